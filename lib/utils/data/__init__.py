"""From a dataset to a batch on the device: machinery, you need not read it.

In the order in which a sample passes through them:
    permutation.py  the order of an epoch's samples: change this to shuffle in another way
    plan.py         how an epoch is cut into steps and micro-batches, and which are this process's
    loader.py       the samples of a split, fetched and put on the device; checks what get_dataset gives
    fetch.py        reads and collates samples, in worker processes
    fingerprint.py  what the data are, so that a run continues on the same
    options.py      reads the optional attributes of a dataset
    tensors.py      a dataset of tensors in memory; functions over all tensors of a batch
    transforms.py   uint8 images to floats on the device, random crops and flips
"""
