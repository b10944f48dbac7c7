"""cycling_utils' classes under their own names, for code that was written for it. Nothing in lib imports them.

In such code `from lib.utils.compat import ...` takes the place of `from cycling_utils import ...`.

samplers.py          InterruptableDistributedSampler, InterruptableSampler and kin
sharded_dataset.py   DistributedShardedDataset
metrics_tracker.py   MetricsTracker
timer.py             TimestampedTimer
atomic_directory.py  AtomicDirectory, atomic_torch_save
"""

from lib.utils.compat.atomic_directory import AtomicDirectory, atomic_torch_save
from lib.utils.compat.metrics_tracker import MetricsTracker
from lib.utils.compat.samplers import (
    AdvancedTooFarError,
    HasNotResetProgressError,
    InterruptableDistributedGroupedBatchSampler,
    InterruptableDistributedSampler,
    InterruptableSampler,
    InterruptibleSampler,
)
from lib.utils.compat.sharded_dataset import DistributedShardedDataset
from lib.utils.compat.timer import TimestampedTimer
