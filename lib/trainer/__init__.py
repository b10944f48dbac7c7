"""Ways of training, one file each: EDIT, add your own.

A file NAME.py is `-trainer NAME`. It has class Trainer(lib.trainer.trainer.Trainer), which overrides
training_step(batch), evaluation_step(...), or optimizer_step().
"""
