"""cycling_utils' classes under their own names, for code that was written for it. Nothing in lib imports them.

In such code `from lib.utils.compat import ...` takes the place of `from cycling_utils import ...`.

samplers.py          InterruptableDistributedSampler, InterruptableSampler and kin
sharded_dataset.py   DistributedShardedDataset
metrics_tracker.py   MetricsTracker
timer.py             TimestampedTimer
atomic_directory.py  AtomicDirectory, atomic_torch_save
"""

from lib.utils.compat.atomic_directory import AtomicDirectory as AtomicDirectory
from lib.utils.compat.atomic_directory import atomic_torch_save as atomic_torch_save
from lib.utils.compat.metrics_tracker import MetricsTracker as MetricsTracker
from lib.utils.compat.samplers import AdvancedTooFarError as AdvancedTooFarError
from lib.utils.compat.samplers import HasNotResetProgressError as HasNotResetProgressError
from lib.utils.compat.samplers import (
    InterruptableDistributedGroupedBatchSampler as InterruptableDistributedGroupedBatchSampler,
)
from lib.utils.compat.samplers import InterruptableDistributedSampler as InterruptableDistributedSampler
from lib.utils.compat.samplers import InterruptableSampler as InterruptableSampler
from lib.utils.compat.samplers import InterruptibleSampler as InterruptibleSampler
from lib.utils.compat.sharded_dataset import DistributedShardedDataset as DistributedShardedDataset
from lib.utils.compat.timer import TimestampedTimer as TimestampedTimer
