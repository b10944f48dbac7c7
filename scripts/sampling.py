"""How often a sample comes, and how much it counts: by its weight, by its class, by the share of its data set."""

import bisect
import itertools
import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DistributedSampler, Sampler, Subset, TensorDataset

from lib.core import loss as losses
from lib.utils.data import fetch
from lib.utils.data.fetch import option
from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError
from lib.utils.monitoring.metrics import Ratio

SAME = ("on_device", "collate_fn", "classes")  # of the data sets of a mixture


def draw(dataset: Any, epoch: int) -> Tensor:
    """Return what the sampler of a dataset draws in an epoch, as `fetch.draw_order` does.

    Raises UsageError unless that is one index of the dataset for each of the sampler's length.
    """
    sampler, fault = dataset.sampler, ""
    if set_epoch := getattr(sampler, "set_epoch", None):
        set_epoch(epoch)
    try:
        count = 0 if isinstance(sampler, DistributedSampler) else len(sampler)  # that one gives only a part
        indices = torch.tensor([*itertools.islice(sampler, count + 1)])
        are_indices = indices.shape == (count,) and not (indices.is_floating_point() or indices.dtype == torch.bool)
        indices = indices.long()
        if count and are_indices and 0 <= indices.min() <= indices.max() < len(dataset):
            ordered, places = indices.sort(stable=True)
            repeats = torch.arange(count) - torch.searchsorted(ordered, ordered)  # how often each came before
            return indices + len(dataset) * torch.empty_like(indices).index_copy_(0, places, repeats)
    except (TypeError, ValueError) as error:  # it has no length, or gives batches
        fault = f": {error}"
    wanted = f"as many numbers from 0 to {len(dataset) - 1} as its len(), on each process all those of the epoch"
    raise UsageError(f"the training samples have a sampler, {sampler!r:.60}, which must give {wanted}{fault}")


class SystematicSampler(Sampler):
    """Draws each sample as often as its share of the draws says, rounded up or down by chance, in a random order.

    So does each group, as a class, as a whole. It is systematic resampling, one draw for all samples (Baker, Reducing
    bias and inefficiency in the selection algorithm, 1987), over the groups, each of them shuffled.

    Args:
        weights: (samples,), from 0, of any sum.
        num_samples: the number of draws.
        groups: (samples,) int64; by default all are one group.

    Raises UsageError for weights that are no finite numbers from 0, or all 0.
    """

    def __init__(self, weights: Tensor, num_samples: int, groups: Tensor | None = None):
        self.weights, self.num_samples = torch.as_tensor(weights, dtype=torch.float64), num_samples
        self.groups = torch.zeros(len(self.weights), dtype=torch.int64) if groups is None else groups
        if self.weights.ndim != 1 or not (self.weights >= 0).all() or not 0 < self.weights.sum() < math.inf:
            raise UsageError("weights of samples must be one finite number from 0 for each, not all of them 0")

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        shuffled = torch.randperm(len(self.weights))
        shuffled = shuffled[self.groups[shuffled].argsort(stable=True)]
        edges = self.weights[shuffled].cumsum(0)
        edges *= self.num_samples / edges[-1].item()
        places = torch.arange(self.num_samples) + torch.rand((), dtype=torch.float64)
        drawn = torch.searchsorted(edges, places, right=True).clamp_max(len(edges) - 1)
        yield from shuffled[drawn][torch.randperm(self.num_samples)].tolist()


class LengthSampler(Sampler):
    """Draws samples of similar length for each step, so that few values pad them; the steps have a random order.

    The samples of `window` steps, drawn at random, are sorted by their lengths. Those of a short last step stay last.

    Args:
        lengths: (samples,), of any unit.
        sampler: what draws the samples; by default each comes once.
        window: in steps, of as many samples as `set_batch_size` says; before that it is the epoch.
    """

    def __init__(self, lengths: Tensor, sampler: Sampler | None = None, window: int = 50):
        self.lengths, self.sampler, self.window, self.batch_size = lengths, sampler, window, len(lengths)

    def set_batch_size(self, batch_size: int) -> None:
        """Take the number of samples of a step. Orders for the digests of the data are drawn before, without it."""
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.lengths) if self.sampler is None else len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        drawn = torch.randperm(len(self)) if self.sampler is None else torch.tensor([*self.sampler])
        whole, rest = drawn.tensor_split([len(drawn) - len(drawn) % self.batch_size])
        steps = []
        for part in whole.split(self.batch_size * self.window) if len(whole) else ():
            ranks = torch.randperm(len(self.lengths))
            part = part[ranks[part].argsort(stable=True)]  # so that copies of a sample lie together
            ordered = part[self.lengths[part].argsort(stable=True)]
            copies = int(part.unique(return_counts=True)[1].max())  # of one sample: each comes in another step
            steps += [few.view(self.batch_size, -1).T for few in ordered.split(self.batch_size * copies)]
        mixed = torch.cat(steps)[torch.randperm(sum(map(len, steps)))].flatten() if steps else whole
        yield from torch.cat([mixed, rest[self.lengths[rest].argsort(stable=True)]]).tolist()


class Mixture(ConcatDataset):
    """Several data sets as one, of which training draws by their shares.

    Args:
        parts: the data sets, by name. They have the same `on_device`, `collate_fn` and `classes`, or none.
        shares: of the samples of an epoch, by name, of any sum. Within a part `weights` decide, if it has them.
        samples: of an epoch; by default as many as all parts have.

    Raises UsageError if the parts do not fit together.
    """

    def __init__(self, parts: Mapping[str, Any], shares: Mapping[str, float], samples: int | None = None):
        if not isinstance(parts, Mapping) or {*parts} != {*shares}:
            named, shared = (", ".join(map(str, one)) for one in (parts, shares))
            raise UsageError(f"a mixture of {named} has shares for {shared}")
        if odd := [name for name, part in parts.items() if not (hasattr(part, "__len__") and len(part))]:
            raise UsageError(f"{odd[0]} of a mixture is empty, or has no length")
        if not (all(0 <= share < math.inf for share in shares.values()) and any(shares.values())):
            raise UsageError(f"the shares of a mixture are {dict(shares)}: give numbers from 0, one of them above 0")
        super().__init__(parts.values())
        self.names = [*parts]
        self.log_lines = [line for part in parts.values() for line in option(part, "log_lines", ())]
        for name in SAME:
            values = [option(part, name) for part in parts.values()]
            same = [[*map(str, value)] if isinstance(value, Sequence) else value for value in values]
            if odd := [part for part, value in zip(parts, same, strict=True) if value != same[0]]:
                hint = "" if name == "classes" else ": let it be one function, outside of classes and functions"
                raise UsageError(f"{next(iter(parts))} and {odd[0]} of a mixture differ in their {name}{hint}")
            if values[0] is not None:
                setattr(self, name, values[0])
        if odd := [name for name, part in parts.items() if option(part, "sampler") is not None]:
            raise UsageError(f"{odd[0]} of a mixture has a sampler: give it weights instead")
        weights = []
        for name, part in parts.items():
            own = weights_of(part)
            own = torch.ones(len(part), dtype=torch.float64) if own is None else own
            weights.append(own * (shares[name] / own.sum()))
        groups = torch.arange(len(parts)).repeat_interleave(torch.tensor([*map(len, parts.values())]))
        self.sampler = SystematicSampler(torch.cat(weights), samples or len(self), groups)
        if all(hasattr(part, "sample_name") for part in parts.values()):
            self.sample_name = self._sample_name
        marks = [option(part, "fingerprint") for part in parts.values()]
        if all(isinstance(mark, str | int) for mark in marks):
            self.fingerprint = " ".join(map(str, marks))

    def losses_by_part(self, loss: nn.Module, done: Any, indices: list[int]) -> dict[str, Ratio]:
        """Return the loss of each part's samples in a pass, under NAME_loss; nothing where it is not known.

        It is known for a -loss of ours or of torch on outputs and targets with a row for each sample, in the order of
        `indices`: not behind a collate_fn or an on_device of one's own. `done` is of loss.forward.
        """
        outputs, targets = done.outputs, done.targets
        is_stateless = type(loss) is losses.CrossEntropy or type(loss).__module__.startswith("torch.nn.")
        may_reorder = option(self, "collate_fn") or not isinstance(option(self, "on_device"), Pixels | None)
        if done.is_own or not is_stateless or may_reorder:
            return {}
        are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        if not (are_tensors and len(outputs) == len(targets) == len(indices)):
            return {}
        part_of = torch.bucketize(torch.tensor(indices) % len(self), torch.tensor(self.cumulative_sizes), right=True)
        found = {}
        for number in part_of.unique().tolist():
            rows = (part_of == number).nonzero()[:, 0].to(outputs.device)
            part = outputs.detach()[rows], targets[rows]
            count = losses.count_targets(loss, part, len(rows))
            mean = loss(*part)  # torch's is NaN where all are ignored
            total = torch.where(torch.as_tensor(count, device=mean.device) > 0, mean * count, 0.0)
            found[re.sub(r"\W", "_", f"{self.names[number]}_loss")] = Ratio(total, count)
        return found

    def prefetch_samples(self, indices: list[int]) -> None:
        """Let each part fetch its samples of a micro-batch at once."""
        for part, end in zip(self.datasets, self.cumulative_sizes, strict=True):
            begin = end - len(part)
            if own := [index - begin for index in indices if begin <= index < end]:
                fetch.prefetch(part, own)

    def _sample_name(self, index: int) -> str:
        """Return what a sample's part calls it, for lists of bad files."""
        number = bisect.bisect_right(self.cumulative_sizes, index)
        part: Any = self.datasets[number]
        return f"{self.names[number]}: {part.sample_name(index - self.cumulative_sizes[number] + len(part))}"


def add_sampler(dataset: Any, args: Namespace) -> None:
    """Let the training samples be drawn by their classes (-balance), their `weights` and their `lengths`."""
    is_mixture = isinstance(dataset, Mixture)  # whose sampler goes by its parts' weights
    if args.balance or (fetch.lists(dataset, "weights") and not is_mixture):
        set_weight_sampler(dataset, args)
        if not args.balance:
            said = "drawn by their weights; for weights of a loss give the dataset's attribute another name"
            vars(dataset)["log_lines"] = [*option(dataset, "log_lines", ()), f"the training samples are {said}"]
    if fetch.lists(dataset, "lengths"):
        said = set_length_sampler(dataset)
        vars(dataset)["log_lines"] = [*option(dataset, "log_lines", ()), f"the training samples: {said}"]


def set_length_sampler(dataset: Any) -> str:
    """Let those of the training samples that a step takes have similar `lengths`. Returns what the log says of it."""
    sampler = option(dataset, "sampler")
    if not isinstance(sampler, SystematicSampler | None):
        return "their lengths are not used next to a sampler"
    try:
        lengths = of_samples(dataset, ("lengths",))
    except (UsageError, RuntimeError) as error:  # something else of that name
        return f"their lengths are not used ({error})"
    if lengths is None or lengths.ndim > 1:
        return (
            f"their lengths are not used: {'only a part has some' if lengths is None else 'not one number for each'}"
        )
    dataset.sampler = LengthSampler(lengths.double().cpu(), sampler)
    return "those of a step have similar lengths"


def set_weight_sampler(dataset: Any, args: Namespace) -> None:
    """Let the training samples be drawn by their classes, under -balance, or by their `weights`."""
    weights, groups, has_sampler = weights_of(dataset), None, option(dataset, "sampler") is not None
    if args.balance and (not args.shuffle or has_sampler or weights is not None):
        hint = "not with -shuffle no, nor with a sampler or weights of their own"
        raise UsageError(f"-balance draws the samples: {hint}")
    if args.balance:
        groups = class_numbers(dataset, "-balance")
        if groups.ndim > 1:
            raise UsageError(f"-balance needs one class for each sample: the labels are {tuple(groups.shape)}")
        counted = groups != args.ignore_index
        groups = groups.where(counted, 0)
        if (groups < 0).any():
            raise UsageError(f"-balance: the training samples have the class {groups.min()}")
        weights = counted / torch.bincount(groups, counted.double()).clamp_min(1)[groups]
    if weights is not None and has_sampler:
        raise UsageError("the training samples have weights and a sampler: one of them must go")
    if weights is not None:
        dataset.sampler = SystematicSampler(weights, len(dataset), groups)


def balance_loss(loss: nn.Module, dataset: Any, args: Namespace) -> None:
    """Weigh the classes in a loss by n / (num_classes * targets of the class), of n targets, as scikit-learn does.

    Raises UsageError if the training samples do not list their targets, if a class has none, or if the loss has no
    `weight`.
    """
    sampler = option(dataset, "sampler")
    sampler = sampler.sampler if isinstance(sampler, LengthSampler) else sampler
    if args.balance or sampler is not None:
        raise UsageError("-class_weights balanced counts samples as they are listed: not if a sampler draws them")
    labels, count = class_numbers(dataset, "-class_weights balanced"), args.num_classes
    if labels.ndim == 2 and labels.shape[1] == count and labels.max() < 2:
        raise UsageError(f"-class_weights balanced needs class numbers: {tuple(labels.shape)} labels are one-hot")
    labels = labels[labels != args.ignore_index]
    if (labels < 0).any():
        raise UsageError(f"-class_weights balanced: the training samples have the class {labels.min()}")
    found = torch.bincount(labels, minlength=count)
    if (found == 0).any() or len(found) > count:
        text = f"of {count} classes (-num_classes) there are {found.tolist()!s:.80} targets"
        raise UsageError(f"-class_weights balanced: {text}: each needs one")
    if not hasattr(loss, "weight"):
        raise UsageError(f"-class_weights balanced: {type(loss).__name__} has no `weight`, as cross_entropy has")
    loss.weight = found.sum() / (count * found)


def class_numbers(dataset: Any, flag: str) -> Tensor:
    """Return the targets of the training samples, int64, also ignored ones. Raises UsageError if they are unknown."""
    labels = of_samples(dataset, ("labels", "targets"))
    if labels is None or labels.is_floating_point() or not labels.numel():
        found = "has none" if labels is None else f"has {labels.dtype} {tuple(labels.shape)}"
        wanted = "the training samples must list their classes, as dataset.labels or dataset.targets"
        raise UsageError(f"{flag}: {wanted}, and {type(fetch.nested(dataset, wrapped=False)[-1]).__name__} {found}")
    if option(dataset, "target_transform") is not None:
        raise UsageError(f"{flag}: the training samples list their classes as they are before their target_transform")
    return labels.long()


def weights_of(dataset: Any) -> Tensor | None:
    """Return the `weights` of a data set, (samples,) float64; None without. Raises UsageError if they do not fit."""
    weights = of_samples(dataset, ("weights",))
    if weights is None and fetch.lists(dataset, "weights"):
        raise UsageError("of several datasets that are read as one, some have weights: give all of them some")
    if weights is not None and weights.ndim > 1:
        raise UsageError(f"weights of {len(dataset)} samples are {tuple(weights.shape)}: one for each is needed")
    return None if weights is None else weights.double()


def of_samples(dataset: Any, names: tuple[str, ...]) -> Tensor | None:
    """Return what a data set says of each of its samples, under the first of these names that it has.

    Raises UsageError if that is not one for each.
    """
    if isinstance(dataset, Subset) and not vars(dataset).keys() & {*names}:
        whole = of_samples(dataset.dataset, names)
        return None if whole is None else whole[np.array(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset) and not vars(dataset).keys() & {*names}:
        parts = [of_samples(part, names) for part in dataset.datasets]
        return None if any(part is None for part in parts) else torch.cat(parts)
    name = next((name for name in names if getattr(dataset, name, None) is not None), names[0])
    values = getattr(dataset, name, None)
    if values is None and isinstance(dataset, TensorDataset) and "labels" in names:
        values = dataset.tensors[-1] if len(dataset.tensors) == 2 else None
    if values is None or callable(values) or isinstance(values, str | Mapping):  # something else of that name
        return None
    try:
        values = values if isinstance(values, Tensor) else torch.as_tensor(np.array(values))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{type(dataset).__name__}.{name}: no numbers of samples ({error})") from None
    if values.shape[:1] != (len(dataset),):
        raise UsageError(f"{name} of {len(dataset)} samples are {tuple(values.shape)}: one for each is needed")
    return values
