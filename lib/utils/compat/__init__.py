"""cycling_utils' classes under their own names, for code that was written for it. Nothing in lib imports them.

samplers.py          InterruptableDistributedSampler, InterruptableSampler and kin
sharded_dataset.py   DistributedShardedDataset
metrics_tracker.py   MetricsTracker
timer.py             TimestampedTimer
atomic_directory.py  AtomicDirectory, atomic_torch_save
"""
