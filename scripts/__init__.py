"""Programs next to train.py; the first lines of each say how to call it.

check_resume.py  -check_resume: kills a run and compares bits, by what ledger.py wrote down; chaos.py kills for longer
doctor.py        whether a run can start on this machine
sweep.py         many runs over values of flags
status.py        all runs in a table; reading.py reads their folders
plot.py          the curves of runs
predict.py       what a run's model says of files
export.py        the weights of a run as one file
new.py           a new model, dataset, trainer, or a project of one's own
completion.py    flags at the TAB key
flags_page.py    writes docs/flags.md
make_digits.py   writes data/digits.npz
agent.py         what torchrun must know of this machine, for elastic.sh and train.sbatch
bench/           benchmarks: compare.py runs train.py next to the scripts in peers/; scale.py is for docs/scaling.md
recipes/         complete configurations
slurm/           modules, a batch script, a Slurm of one machine
kubernetes/      image, jobs and volumes
"""
