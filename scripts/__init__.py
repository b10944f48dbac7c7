"""Programs next to train.py; the first lines of each say how to call it.

check_resume.py  -check_resume: kills a run and compares bits
check_flags.py   imported by each start: plugins' flags that config.yaml would give back as other values
check_model.py   imported by each start: models that cannot be trained; check_loss.py: losses that stretch targets
check_samples.py imported by each start: samples that a dataset gives otherwise than its author expects
check_code.py    imported by each start: files that differ between processes, or from the last start
check_sums.py    imported by each start: sums and means over a mask in the loss of a training_step
check_plugins.py  imported by each start: what a trainer's and a model's files have that works otherwise elsewhere
check_data.py    -check_data: opens every sample and lists what is wrong
chaos.py         kills runs for hours
ledger.py        the record of a run that both of them use
doctor.py        whether a run can start on this machine
sweep.py         many runs over values of flags; sweep_results.py: their table and picture
status.py        all runs in a table; reading.py reads their folders
track.py         -track: sends a run's figures to Weights & Biases, MLflow or a TrainJob's status
mirror.py        -mirror: copies a run to a store as S3, and fetches it
plot.py          the curves of runs
step_times.py    -step_times: what the time of a step goes into, and the MFU
compare.py       two runs or checkpoints, tensor by tensor
predict.py       a run's predictions for images and texts
export.py        the weights of a run as one file; preprocessing.py: images of bytes for it
new.py           a new model, dataset or trainer, a project of your own, or its update
update.py        merges a later version of the template into a project
project.py       what a project gets, and which parts it may leave out
sampling.py      weights of samples and classes, mixtures; mixture.py: -data A=0.3,B=0.7
shard_cache.py   -cache_gb: copies shards of a URL to this node
make_tokens.py   token files from text; token_files.py: finds, opens and checks them for -dataset tokens
make_digits.py   writes data/digits.npz
flags_page.py    writes docs/flags.md
train.sh         sets up .venv by set_up.sh, and trains; test.sh: the same for the tests
elastic.sh       torchrun on nodes that join and leave
agent.py         torchrun's settings on this machine, for elastic.sh and train.sbatch
infiniband.py    names of hosts on InfiniBand
bench/           benchmarks: compare.py runs train.py next to the scripts in peers/; scale.py is for docs/scaling.md
recipes/         complete configurations
slurm/           modules, a batch script, a Slurm of one machine
kubernetes/      image, jobs and volumes
"""
