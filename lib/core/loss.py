"""The loss and the metrics of a batch: by -loss, or by the model itself where it returns its loss."""

import functools
import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lib.utils.checkpoint.state import unwrap
from lib.utils.data.tensors import named_tensors
from lib.utils.errors import UsageError, call_optional
from lib.utils.monitoring.metrics import Ratio, ratio

TAKES = "-loss cross_entropy takes class numbers or probabilities of 2 classes or more (for a regression: -loss mse)"
signature = functools.cache(inspect.signature)  # which is slow, for each micro-batch
TARGETS = ("labels", "targets", "label", "target")  # names of them, in a batch and as a parameter of a forward


@dataclass
class ForwardResult:
    """What a forward pass gives: the mean loss of the batch, and what metrics are computed from."""

    loss: Tensor
    targets: Any
    outputs: Tensor | None
    is_own: bool = False  # whether the loss is the model's own


def forward(model: nn.Module, batch: Any, criterion: Callable) -> ForwardResult:
    """Compute the loss of a batch: the model's own if it returns one, else `criterion(outputs, targets)`.

    A model whose `forward` has a parameter named labels or targets gets them, too. Of a dict it gets the entries that
    `forward` names, and all others as **batch; if it names none, as many values as it needs, in order.
    Raises UsageError where all this gives no loss, or a number next to the outputs that may be a part of the loss.
    """
    if isinstance(batch, (tuple, list)) and len(batch) > 2:
        raise _wrong_batch(batch)
    inputs, targets = split_batch(batch)
    answer, got_targets = _call(model, batch, inputs, targets)
    answer = answer._asdict() if hasattr(type(answer), "_asdict") else answer  # a named tuple
    outputs, loss = split_output(answer)
    entries = answer if isinstance(answer, (Mapping, tuple, list)) else getattr(answer, "__dict__", answer)
    numbers = [one for _, one in named_tensors(entries) if one.grad_fn and not one.ndim]
    if (len(numbers) > 1 and isinstance(answer, (tuple, list))) or (numbers and loss is None):
        raise UsageError('a model must return one number, its whole loss, or a dict with it as "loss"; detach others')
    if loss is not None:
        may_be_output = isinstance(answer, Tensor) and getattr(targets, "shape", ())[:1] == (1,)  # squeeze()
        is_part = isinstance(answer, (tuple, list)) and outputs is not None
        if (may_be_output or is_part) and targets is not None and not got_targets:
            found = "the model got no targets and returns a number: is it the whole loss, or a part, or an output?"
            raise UsageError(f'{found} Return {{"loss": number}} for the whole; sum parts in a trainer; no squeeze()')
        # Without the targets, outputs need not be predictions (an autoencoder's are not). With rows of
        # targets, a model may shift them against the outputs, as for the next token.
        are_answers = got_targets and isinstance(targets, Tensor) and targets.ndim == 1
        exact = loss if loss.dtype == torch.float64 else loss.float()  # bfloat16 has no room for sums over samples
        return ForwardResult(exact, targets, outputs if are_answers else None, is_own=True)
    is_ours = isinstance(criterion, (CrossEntropy, *PAIRWISE))
    if outputs is None or targets is None or (is_ours and not isinstance(targets, Tensor)):
        found = f"the model returns a {type(answer).__name__} without a loss"
        raise _wrong_batch(batch, f", and {found} for targets of type {type(targets).__name__}")
    if isinstance(criterion, PAIRWISE) and type(criterion).forward.__module__.startswith("torch."):
        if outputs.shape != targets.shape or targets.is_complex():  # torch would stretch one of them
            shapes = f"the model gives {tuple(outputs.shape)} and the targets are {tuple(targets.shape)}"
            raise UsageError(f"{shapes}: this -loss needs real numbers of one shape, (samples, 1) for -num_classes 1")
        kind = torch.promote_types(outputs.dtype, torch.float32)  # bfloat16 has no room for targets
        outputs, targets = outputs.to(kind), targets.to(kind)
    elif outputs.ndim + getattr(targets, "ndim", 0) == 3 and 1 in (outputs.shape[-1], targets.shape[-1]):
        call_optional("scripts.check_loss", "check", criterion, outputs, targets)
    return ForwardResult(criterion(outputs, targets), targets, outputs)


def _call(model: nn.Module, batch: Any, inputs: Any, targets: Any) -> tuple[Any, bool]:
    """Call the model as its `forward` is written. Return what it returns, and whether it got the targets."""
    _, *taken = signature(type(unwrap(model)).forward).parameters.values()
    names, takes_all = [one.name for one in taken], any(one.kind is one.VAR_KEYWORD for one in taken)
    given = {name: targets for name in names if name in TARGETS and targets is not None}
    if isinstance(batch, Mapping) and len({name.rstrip("s") for name in TARGETS if name in batch}) > 1:
        raise UsageError("a batch has a label and a target: the loss takes one of them, so rename or drop the other")
    if not isinstance(inputs, Mapping):
        takes_any = targets is not None and all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in taken)
        if takes_any and any({*signature(type(one).forward).parameters} & {*TARGETS} for one in model.modules()):
            raise UsageError("a forward of *args alone gets no targets, but a part of the model does: name them")
        return model(inputs, **given), bool(given)
    entries = inputs if given or not isinstance(batch, Mapping) else batch
    if takes_all:
        return model(**{**entries, **given}), bool(given) or entries is batch
    named = {name: value for name, value in inputs.items() if name in names}
    needed = [one for one in taken if one.default is one.empty and one.name not in given]
    if not named and len(inputs) > max(1, len(needed)) and all(one.kind is not one.VAR_POSITIONAL for one in taken):
        raise UsageError(f"forward({', '.join(names)}) has none of the batch's {', '.join(inputs)}: name them alike")
    return model(*(() if named else inputs.values()), **{**named, **given}), bool(given)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return a batch's inputs and targets: of a pair, or of a dict, whose inputs are a dict. Targets may be None."""
    if isinstance(batch, Mapping):
        key = next((name for name in TARGETS if name in batch), None)
        return {name: value for name, value in batch.items() if name != key}, batch.get(key)
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return batch[0], (*batch, None)[1]
    return batch, None


def count_targets(criterion: Callable, batch: Any, samples: int) -> Tensor | int:
    """Return how many targets the loss of a batch is a mean over: not the ignored ones; `samples` if it has none.

    Of class numbers with `ignore_index` they are a 0-d tensor, for which nobody waits.
    """
    if isinstance(batch, Tensor) and batch.ndim and samples:
        return len(batch)  # a collate_fn may have left samples out
    _, targets = split_batch(batch)
    are_rows = isinstance(targets, Tensor) and targets.ndim
    if isinstance(targets, list):  # one of each sample, as boxes; or, as default_collate makes them, several of all
        are_rows = not any(isinstance(one, Tensor) for one in targets)
    if not (samples and are_rows):
        return samples
    ignored = getattr(criterion, "ignore_index", None)
    if ignored is not None and isinstance(targets, Tensor) and not targets.is_floating_point():
        return (targets.long() != ignored).sum()  # as uint8, -100 would be 156
    return len(targets)


def _wrong_batch(batch: Any, more: str = "") -> UsageError:
    shapes = ", ".join(f"{name}: {tuple(one.shape)}" for name, one in [*named_tensors(batch)][:6]) or "no tensors"
    takes = "the default trainer takes (inputs, targets) or a dict with labels"
    found = f"this dataset gives a {type(batch).__name__} of {shapes}{more}"
    return UsageError(f"{takes}; {found}: override training_step and evaluation_step (scripts/new.py trainer NAME)")


def split_output(answer: Any) -> tuple[Any, Any]:
    """Return the outputs and the loss in what a model returned, each None if it is not there.

    The loss is called loss, or is a tuple's 0-d tensor; outputs are called logits, or are the first other tensor.
    """
    if isinstance(answer, (Tensor, tuple, list)):
        parts = [answer] if isinstance(answer, Tensor) else answer
        scalars = [one for one in parts if isinstance(one, Tensor) and not one.ndim]
        named = {**dict(enumerate(parts)), "loss": scalars[0] if scalars else None}
    else:
        found = {name: getattr(answer, name, None) for name in ("logits", "loss")}  # properties, too, and no methods
        found = {key: one for key, one in found.items() if isinstance(one, Tensor)}
        named = answer if isinstance(answer, dict) else {**getattr(answer, "__dict__", {}), **found}
    others = [one for one in named.values() if isinstance(one, Tensor) and one.ndim]
    return named.get("logits", others[0] if others else None), named.get("loss")


def get_loss(args: Namespace) -> nn.Module:
    """Return a module (outputs, targets) -> the mean loss over the batch, a scalar."""
    numbers = args.class_weights if args.class_weights != "balanced" else None  # `Run.prepare` sets balanced ones
    if args.loss != "cross_entropy":
        if numbers or args.ignore_index != -100:
            raise UsageError(f"-loss {args.loss} takes no -class_weights or -ignore_index, as cross_entropy does")
        return BY_NAME[args.loss]()
    weights = torch.tensor([float(one) for one in numbers.split(",")]) if numbers else None
    if weights is not None and len(weights) != args.num_classes:
        raise UsageError(f"-class_weights {numbers}: give one for each of -num_classes {args.num_classes}")
    options = {"ignore_index": args.ignore_index, "label_smoothing": args.label_smoothing}
    criterion = BY_NAME["cross_entropy"](weights, **options)
    criterion.register_buffer("weight", weights, persistent=False)  # no checkpoint brings back those of an old flag
    if hasattr(criterion, "_sum") and args.compile and not args.cpu and torch.accelerator.is_available():
        criterion._sum = torch.compile(criterion._sum)  # an eighth of a small GPT's step
    return criterion


class CrossEntropy(nn.CrossEntropyLoss):
    """torch's, which also takes the classes of tokens last: outputs (B, length, classes), targets (B, length).

    With class weights it is the mean of the weighted losses, so that micro-batches add up; torch's do not.
    """

    had_classes_first = had_either = False  # whether a batch had outputs (B, classes, length), or (B, N, N)
    found_odd: Tensor | bool = False  # whether a batch had floats as targets that are no probabilities, 0-d

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, 0-d, of outputs (B, classes, ...) or (B, length, classes); 0 if all are ignored.

        Raises UsageError for targets that are neither class numbers nor probabilities. For the values of floats,
        which may still be in a GPU's queue, `check_probabilities` does so.
        """
        if outputs.ndim == 3 and targets.ndim == 2:  # a batch of as many places as classes looks like both
            self.had_classes_first |= not _classes_last(outputs, targets)
            self.had_either |= outputs.shape[1] == outputs.shape[2]
            if self.had_classes_first and self.had_either:
                raise UsageError("outputs (B, N, N) have the classes first or last: give (B, length, classes)")
        if _classes_last(outputs, targets):
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        numbers = not targets.is_floating_point()
        wanted = (outputs.shape[0], *outputs.shape[2:]) if numbers else outputs.shape
        if outputs.ndim < 2 or targets.shape != wanted or (numbers and outputs.shape[1] == 1):
            found = f"{targets.dtype} {tuple(targets.shape)} for outputs {tuple(outputs.shape)}"
            raise UsageError(f"{TAKES}; these targets are {found}")  # of 1 class, the loss would always be 0
        if not numbers:
            self.found_odd |= ~((targets.min() >= 0) & ((targets.sum(1) - 1).abs().max() <= 0.01))  # NaN is odd
            return self._sum(outputs, targets) / max(1, targets[:, 0].numel())
        targets = targets.long()
        try:
            return self._sum(outputs, targets) / (targets != self.ignore_index).sum().clamp_min(1)
        except IndexError:  # on a GPU the kernel stops the process, see RunFolder.fail
            found, count = f"the labels of a batch are {targets.min()} to {targets.max()}", outputs.shape[1]
            wanted = f"labels are 0 to {count - 1} for {count} outputs (-num_classes)"
            raise UsageError(f"{found}: {wanted}; -ignore_index N leaves targets N out of the loss") from None

    def _sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))  # 16 bits have no room for sums
        weight = None if self.weight is None else self.weight.to(outputs.dtype)
        return functional.cross_entropy(outputs, targets, weight, reduction="sum", **options)


def _classes_last(outputs: Tensor, targets: Tensor) -> bool:
    """Whether the classes are in the last dimension, as of tokens; those of images come first, as torch has them."""
    return outputs.ndim < 4 and outputs.shape[:-1] == targets.shape and not targets.is_floating_point()


def check_probabilities(criterion: nn.Module) -> None:
    """Raise UsageError for float targets, in any batch until now, that are no probabilities. Waits for the device."""
    if isinstance(criterion, CrossEntropy) and criterion.found_odd:
        raise UsageError(f"{TAKES}; here are rows that do not sum to 1, as several labels a sample, or are negative")


BY_NAME = {"cross_entropy": CrossEntropy, "mse": nn.MSELoss, "l1": nn.L1Loss, "huber": nn.HuberLoss}
REGRESSION = (nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss)
BINARY = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss)
PAIRWISE = (*REGRESSION, *BINARY, nn.PoissonNLLLoss, nn.KLDivLoss)  # a target for each output


def compute_metrics(criterion: Callable, outputs: Any, targets: Any) -> dict[str, Ratio]:
    """Return the metrics of a batch but the loss, over its targets that are not ignored.

    One class a sample: accuracy; f1, the macro F1, up to 100 classes; top5 of more than 10. A class at each place
    (tokens): bits_per_token, the code length in bits, without label smoothing. Numbers: mae.
    """
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return {}
    outputs = outputs.detach()
    if isinstance(criterion, REGRESSION) and outputs.shape == targets.shape:
        return {"mae": ratio((outputs.float() - targets.float()).abs())}
    if not isinstance(criterion, nn.CrossEntropyLoss) or not _classes_last(outputs, targets):
        return {}
    targets = targets.long()
    counted = (targets != criterion.ignore_index) & (targets >= 0)  # a loss of the model's may leave out others
    if targets.ndim == 1:
        if outputs.shape[1] == 1:  # one number a sample, as of a binary loss: its largest says nothing
            return {}
        answers, classes, number = outputs.argmax(1), outputs.shape[1], counted.sum()
        found = {"accuracy": Ratio((counted & (answers == targets)).sum(), number)}
        if classes > 10:
            found["top5"] = Ratio((counted & (outputs.topk(5).indices == targets[:, None]).any(1)).sum(), number)
        if classes <= 100:  # of more, sums by class would take long
            known = counted & (targets < classes)
            true = functional.one_hot(targets.where(known, 0), classes) * known[:, None]
            chosen = functional.one_hot(answers, classes) * known[:, None]
            found["f1"] = Ratio(2 * (true * chosen).sum(0), (true + chosen).sum(0))
        return found
    rows, numbers, ignored = outputs.float().flatten(0, -2), targets.flatten(), criterion.ignore_index
    nats = functional.cross_entropy(rows, numbers, ignore_index=ignored, reduction="sum")
    return {"bits_per_token": Ratio(nats / math.log(2), counted.sum())}
