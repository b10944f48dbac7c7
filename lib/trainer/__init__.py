"""Ways of training, one file each: EDIT, add your own.

A file NAME.py is `-trainer NAME`. It has class Trainer(lib.trainer.trainer.Trainer), which overrides
training_step(batch), evaluation_step(...), or step(samples).

    trainer.py  the usual way: supervised training, evaluation, checkpoints
    ema.py      evaluates and keeps averaged weights: an example with a module of its own
"""
