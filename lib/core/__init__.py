"""What a run is built of: READ, sometimes edit.

loss.py       how a batch goes into the model, the losses of -loss, accuracy and other metrics
optimizer.py  the optimizers of -optimizer
scheduler.py  the learning rate as a function of the step; its peak and warm-up: Trainer.__init__
parallel.py   DDP and FSDP2 (reduction.py sums the gradients), precision, torch.compile, recomputation
reduction.py  sums over micro-batches: the same bits on any number of processes
batchnorm.py  running statistics that do not depend on which process saw which sample
modes.py      -debug and -eval: starts that train nothing and leave the run as it is
"""
