"""A model that is built without its values, which are worked out later, a tensor at a time.

What the constructor does to tensors is recorded on fakes that take no memory, and played back from the same state of
torch's generator once the model is sharded: every value is the one that building the model as usual gives, and no
process ever holds more than what the next operation needs. The idea is that of torchdistx's deferred_init.
"""

import logging

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lib.utils.checkpoint import shards

log = logging.getLogger(__name__)
DRAWS = torch.Tag.nondeterministic_seeded
LOOKING = "_no_grad_trunc_normal_"  # of torch.nn.init: draws again what lies outside, so it cannot run on fakes
OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "copy_", LOOKING}  # what was there before does not matter


def build(make) -> tuple[nn.Module, "Values | None"]:
    """What `make()` gives, on the meta device, and its values; the model itself and None where that cannot be, as its
    constructor looks at a value that is drawn."""
    start = torch.get_rng_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Recording() as recording:
            model = make()
        return model, Values(model, recording.done, start)
    except RuntimeError as error:
        log.warning("the model cannot be built without its values (%s): every process builds the whole of it first",
                    str(error).splitlines()[0])  # fmt: skip
    torch.set_rng_state(start)
    return make(), None


class Recording(TorchDispatchMode):
    """Notes every operation on tensors while it is on; `nn.init.trunc_normal_` as one. A number that is asked for is
    worked out at once, where no draw is in it."""

    def __init__(self):
        super().__init__()
        self.done = []  # (operation, arguments, keywords, result)
        self.looking = getattr(nn.init, LOOKING)

    def __enter__(self):
        setattr(nn.init, LOOKING, self._whole)
        return super().__enter__()

    def __exit__(self, *error):
        setattr(nn.init, LOOKING, self.looking)
        return super().__exit__(*error)

    def _whole(self, tensor, *args, **kwargs):
        self.done.append((self.looking, (tensor, *args), kwargs, tensor))
        return tensor

    def _worked_out(self, fake):
        wanted, entries, real = {_storage(fake)}, [], {}
        for entry in reversed(self.done):
            touched = {_storage(leaf) for leaf in _fakes(entry)}
            if touched & wanted:
                if DRAWS in getattr(entry[0], "tags", [DRAWS]):
                    raise RuntimeError(f"its constructor looks at what {entry[0].__name__} draws")
                wanted |= touched
                entries.append(entry)
        for entry in reversed(entries):
            _play(entry, real)
        return _view(fake, real)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        try:
            result = operation(*args, **(kwargs or {}))
        except DataDependentOutputException:
            with unset_fake_temporarily():
                return operation(self._worked_out(args[0]))
        entry = operation, args, kwargs or {}, result
        if not operation.is_view or len(_fakes(entry[:3])) == 0:  # a view of what is noted says nothing new
            self.done.append(entry)
        return result


class Values:
    """The values of a model that was built under a Recording; the model is moved to the meta device."""

    def __init__(self, model: nn.Module, done: list, start: Tensor):
        self.done, self.start = done, start
        named = [*model.named_parameters(), *model.named_buffers()]
        stray = [f"{name}.{word}" for name, module in model.named_modules() for word, value in vars(module).items()
                 if isinstance(value, FakeTensor)]  # fmt: skip
        if stray:
            raise RuntimeError(f"the tensor {stray[0].lstrip('.')} is neither a parameter nor a buffer")
        self.wanted: dict[int, list] = {}  # by storage: the names of those who view it, and how
        for name, tensor in named:
            self.wanted.setdefault(_storage(tensor), []).append((name, tensor))
        _to_meta(model)

    @torch.no_grad()
    def fill(self, model: nn.Module):
        """Gives the parameters and buffers of the model, sharded meanwhile and with memory, their values."""
        targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        torch.set_rng_state(self.start)
        touched = [sorted({_storage(leaf) for leaf in _fakes(entry)}) for entry in self.done]
        real: dict[int, torch.UntypedStorage] = {}
        for entry, here, later in zip(self.done, touched, self._later(touched), strict=True):
            _play(entry, real)
            for storage, following in zip(here, later, strict=True):
                if following is None:
                    for name, fake in self.wanted.get(storage, ()):
                        shards.put(targets[name], _view(fake, real))
                if following is None or _overwrites(self.done[following], storage):
                    real.pop(storage, None)

    def _later(self, touched):
        """For every operation and every storage it touches: which operation touches that storage next."""
        rows, following = [], {}
        for number in range(len(touched) - 1, -1, -1):
            rows.append([following.get(storage) for storage in touched[number]])
            following.update(dict.fromkeys(touched[number], number))
        return reversed(rows)


def _play(entry, real):
    operation, args, kwargs, result = entry
    args, kwargs = tree_map(lambda leaf: _view(leaf, real), (args, kwargs))
    played = operation(*args, **kwargs)
    for fake, made in zip(tree_leaves(result), tree_leaves(played), strict=True):
        if isinstance(fake, FakeTensor):
            real.setdefault(_storage(fake), made.untyped_storage())


def _fakes(entry):
    return [leaf for leaf in tree_leaves(entry[1:]) if isinstance(leaf, FakeTensor)]


def _storage(tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(leaf, real):
    """The real tensor of a fake one."""
    if not isinstance(leaf, FakeTensor):
        return leaf.clone() if isinstance(leaf, Tensor) else leaf  # a constant: nothing may change it
    size = leaf.untyped_storage().nbytes()
    storage = real.setdefault(_storage(leaf), torch.UntypedStorage(size))
    return torch.empty(0, dtype=leaf.dtype).set_(storage, leaf.storage_offset(), leaf.size(), leaf.stride())


def _overwrites(entry, storage) -> bool:
    operation, args = entry[:2]
    if operation.__name__.partition(".")[0] not in OVERWRITES or _storage(args[0]) != storage:
        return False
    return args[0].nbytes == args[0].untyped_storage().nbytes()


def _to_meta(model):
    moved = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in moved:
                empty = torch.empty_strided(
                    parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta"
                )
                moved[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = moved.get(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in moved:
                moved[buffer] = torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device="meta")
            module._buffers[name] = moved.get(buffer)
