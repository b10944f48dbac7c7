"""Saving, finding, loading: machinery, you need not read it.

manager.py      the save in the background, how many are kept; when: Trainer.after_step and end_epoch
state.py        what is saved: the run's progress, models, optimizers; the manifest's facts: Trainer.save
staging.py      copies tensors next to the running step
shards.py       a checkpoint's files: a safetensors file for each process, and the manifest with their checksums
resume.py       finds the newest good checkpoint, decides the batch, checks the flags, and loads it
run_folder.py   out/NAME: names of checkpoints, its lock, what -reset moves away, outcome.json; imports no torch
atomic.py       files and folders that are whole or absent; imports no torch
shared_disk.py  which processes see the same folder
weights.py      weights.safetensors of `best` and `final`
"""
