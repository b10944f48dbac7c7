"""Saving, finding, loading: machinery, you need not read it.

manager.py      when a checkpoint is saved, the save in the background, how many are kept
state.py        what is saved: the run's progress, models, optimizers
staging.py      copies tensors next to the running step
shards.py       one safetensors file for each process, with checksums
search.py       finds the newest good checkpoint, on whichever disks it lies
resume.py       checks that a run may continue from a checkpoint, and loads it
run_folder.py   out/NAME: its lock, what -reset moves away, outcome.json
stored.py       the names of checkpoints, and outcome.json, for who must not import torch
atomic.py       files and folders that are whole or absent; imports no torch
shared_disk.py  which processes see the same folder
weights.py      weights.safetensors of `best` and `final`
"""
