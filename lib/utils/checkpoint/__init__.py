"""Saving, finding, loading: machinery, you need not read it.

manager.py      saves in the background, and how many are kept; when: Trainer.after_step and end_epoch
state.py        what is saved: the run's progress, models, optimizers; the manifest's other entries: Trainer.save
staging.py      copies the tensors of a save to the CPU, so that training continues
shards.py       a checkpoint's files: a safetensors file for each process, and the manifest with their checksums
resume.py       finds the newest good checkpoint, decides the batch, checks the flags, and loads it
run_folder.py   out/NAME: names of checkpoints, its lock, what -reset moves away, outcome.json; imports no torch
atomic.py       files and folders that are whole or absent; imports no torch
shared_disk.py  which processes see the same folder
weights.py      weights.safetensors of `best` and `final`, and -weights
pretrained.py   weights of other programs: their files, folders and names
"""
