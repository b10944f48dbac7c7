"""What every run needs apart from model, data and trainer: machinery, you need not read it.

errors.py       UsageError, exit codes, the signals that stop a run
files.py        opens files that others may have put there
distributed.py  World (which process am I), and the collectives
seeding.py      random numbers as a function of (seed, step, micro-batch)
runtime.py      settings of torch for speed, and what config.yaml says of the machine and the code
signals.py      handlers of the signals that stop a run, before and after the training
preemption.py   requests to stop, and the vote on them at a step's end
watchdog.py     ends a run that hangs
data/           which samples a step holds, and how they come to the device
checkpoint/     saving, finding and loading; the run's folder
monitoring/     the terminal, metrics.jsonl, TensorBoard, trackers
compat/         cycling_utils' classes under their own names; nothing in lib imports them
"""
