"""cycling_utils' classes under their own names, for code that was written for it. Nothing in lib imports them.
MetricsTracker is in lib.utils.monitoring.metrics, as the training loop uses it.

samplers.py          InterruptableDistributedSampler, InterruptableSampler and kin
sharded_dataset.py   DistributedShardedDataset
timer.py             TimestampedTimer
atomic_directory.py  AtomicDirectory, atomic_torch_save
"""
