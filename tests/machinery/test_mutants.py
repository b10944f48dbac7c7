"""A test of the tests: what keeps a run whole is broken, one thing at a time, and what the other tests look with must
see it; unbroken, they see nothing."""

import itertools
import os
import re
import shutil

import crash
import pytest
import saves
import test_atomic
import test_crash_states
import test_sampler
import torch
from runs import few, norm_net, plugins, run

import train
from lib.core import reduction, scheduler
from lib.utils import seeding
from lib.utils.checkpoint import atomic, manager, run_folder, shards
from lib.utils.compat import samplers
from lib.utils.data import loader
from lib.utils.data.tensors import Tensors

pytestmark = pytest.mark.usefixtures("no_fsync")


# Saving: every cut of a save, as test_atomic and test_crash_states have them


class Unsynced:
    """The module os, without fsync."""

    def __getattr__(self, name):
        return (lambda fd: None) if name == "fsync" else getattr(os, name)


def in_place(path, data):
    path.write_text(data) if isinstance(data, str) else path.write_bytes(data)


def link_anew(link, target):
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def shared_name(path, ending):
    return path.with_name(f"{path.name}.{ending}")


class PublishedInPlace(test_atomic.Checkpoint):
    def save(self, folder, step):
        self.write(folder / f"step_{step}", step)
        atomic.swap_link(folder / "latest", f"step_{step}")
        self.remove_all_but(folder / f"step_{step}")


class RemovedFirst(test_atomic.Checkpoint):
    def write(self, folder, step):
        self.remove_all_but(folder)
        super().write(folder, step)


FILE, LINK, SAVE, DIRECTORY = (
    test_atomic.File(),
    test_atomic.Link(),
    test_atomic.Checkpoint(),
    test_atomic.Directory(),
)
ATOMIC = [  # what of lib.utils.checkpoint.atomic is broken, and who saves with it
    *[("os", Unsynced(), kind) for kind in (FILE, LINK, SAVE, DIRECTORY)],
    ("write_file", in_place, FILE),
    *[("swap_link", link_anew, kind) for kind in (LINK, SAVE, DIRECTORY)],
    ("_unique", shared_name, LINK),
    ("remove_folder", shutil.rmtree, SAVE),
    ("os", os, PublishedInPlace()),
    ("os", os, RemovedFirst()),
]


@pytest.mark.parametrize(("name", "mutant", "kind"), ATOMIC, ids=test_atomic.title)
def test_a_broken_way_of_writing_is_found_out(name, mutant, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, name, mutant)
    folder, save = test_atomic.begun(kind, tmp_path)
    cuts = itertools.chain(crash.power_loss_states(save, folder), crash.kills(save, folder))
    assert any(test_atomic.wrong_after(cut, kind, folder) for cut in cuts)


def test_a_reader_misses_a_link_that_is_removed_and_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "swap_link", link_anew)
    assert test_atomic.misses(tmp_path)


def test_two_writers_that_share_a_temporary_name_mix(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_unique", shared_name)
    assert test_atomic.mixed(tmp_path, monkeypatch)


def remove_before(self, save, answers, real=manager.Checkpoints._publish):
    for folder in run_folder.list_checkpoints(self.folder):
        atomic.remove_folder(folder)
    real(self, save, answers)


SAVES = {
    "no fsync of a shard": (shards, "os", Unsynced()),
    "no fsync of folders and manifest": (atomic, "os", Unsynced()),
    "copied to its name": (atomic, "publish", lambda partial, final: shutil.copytree(partial, final)),
    "a removal that is not renamed first": (atomic, "remove_folder", shutil.rmtree),
    "the old one removed first": (manager.Checkpoints, "_publish", remove_before),
    "a manifest written in place": (atomic, "write_file", in_place),
    "nothing swept": (atomic, "sweep", lambda folder: None),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_broken_save_of_a_checkpoint_is_found_out(name, tmp_path, monkeypatch):
    place, attribute, mutant = SAVES[name]
    case = test_crash_states.Case()
    folder = case.begun(tmp_path)
    monkeypatch.setattr(place, attribute, mutant)
    cuts = itertools.chain(
        crash.power_loss_states(lambda: case.save(folder, case.new), folder),
        crash.kills(lambda: case.save(folder, case.new), folder),
    )
    assert any(case.wrong_after(cut, folder) for cut in cuts)


# Going on: -check_resume, as test_check_resume has it, on the little run with noise and dropout


def noisy(args):
    parts = few(args)
    return {**parts, "train": Noisy(*parts["train"].tensors)}


class Noisy(Tensors):
    """The little dataset, its samples drawn with noise."""

    fixed = False

    def __getitems__(self, indices):
        inputs, targets = super().__getitems__(indices)
        return inputs + torch.randn(inputs.shape), targets


COUNT = itertools.count()


def lr_by_count(step, real=scheduler.lr_at, **schedule):
    return real(next(COUNT), **schedule)


def one_too_far(self, epoch, first_step=0, real=loader.Loader.epoch):
    return real(self, epoch, first_step + (first_step > 0))


GOING_ON = {  # what is broken, and how the run that was killed and went on differs
    "micro-batch seeds left out": (seeding, "seed_micro_batch", lambda *place: None, "another loss"),
    "samples from the global generator": (seeding, "seed_sample", lambda *place: None, "drawn otherwise"),
    "a loader off by one step": (loader.Loader, "epoch", one_too_far, "other samples"),
    "lr from a counter": (scheduler, "lr_at", lr_by_count, "the same losses, another"),
}


def killed(out, capfd, size=2, data="noisy") -> tuple[int, str]:
    """-check_resume's exit code, and what its table says of the run that was killed."""
    words = f"-cpu {size} -batch_size {2 * size} -micro_batch 2 -dataset {data} -arch norm_net -num_classes 4"
    with plugins(arch={"norm_net": norm_net}, dataset={"noisy": noisy, "few": few}):
        code = train.main([*words.split(), "-limit_steps", "10", "-check_resume", "-out", str(out)])
    said = capfd.readouterr()
    (line,) = re.findall("^killed 3 times.*", said.out, re.MULTILINE) or [said.err]
    return code, line


@pytest.mark.parametrize("size", [2, 4])
def test_a_run_that_is_not_broken_goes_on_bit_for_bit(size, tmp_path, capfd, only_kills):
    code, line = killed(tmp_path, capfd, size)
    assert code == 0 and line.endswith("the same bits")


@pytest.mark.parametrize("name", GOING_ON)
def test_a_run_that_goes_on_otherwise_is_found_out(name, tmp_path, capfd, only_kills, monkeypatch):
    place, attribute, mutant, why = GOING_ON[name]
    monkeypatch.setattr(place, attribute, mutant)
    seeded = {"data": "few"} if "micro-batch" in name else {}  # noise would seed the dropout after it
    code, line = killed(tmp_path, capfd, **seeded)
    assert code == 1 and "! step" in line and why in line, line


# The order of sums: in the tree's, any number of processes ends at the same bits


def after_each_other(nodes, leaf, values):
    """Each rank adds up all that it has."""
    if nodes:
        torch._foreach_add_(next(iter(nodes.values())), values)
    else:
        nodes[leaf] = values


def one_after_another(nodes):
    first, *others = (values for _, values in sorted(nodes.items()))
    for values in others:
        torch._foreach_add_(first, values)
    return first


def in_rank_order(monkeypatch):
    """Breaks the order of sums: ranks are added up one after the other."""
    monkeypatch.setattr(reduction, "add_leaf", after_each_other)
    monkeypatch.setattr(reduction, "sum_nodes", one_after_another)
    reduction.nodes_by_rank.cache_clear()
    monkeypatch.setattr(reduction, "nodes_by_rank", reduction.nodes_by_rank.__wrapped__)


@pytest.mark.parametrize("broken", [False, True])
def test_gradients_that_are_summed_in_rank_order_are_found_out(broken, tmp_path, monkeypatch):
    if broken:
        in_rank_order(monkeypatch)
    with plugins(**saves.PLUGINS):
        runs = [run(tmp_path, f"{saves.SMALL} -cpu {size} -model on_{size}") for size in (1, 3)]
    assert (saves.bits(runs[0]) != saves.bits(runs[1])) == broken


def after_one_more(self, state, real=samplers.InterruptableDistributedSampler.load_state_dict):
    real(self, state)
    self.progress = min(self.progress + 1, self.num_samples)


def from_one_later(self, real=samplers.InterruptableDistributedSampler._places):
    return ((places + 1) % len(self.dataset) for places in real(self))


SAMPLERS = {  # what is broken, and the test that must see it
    "goes on one too far": ("load_state_dict", after_one_more, "test_a_rank_that_stops_and_goes_on_misses_nothing"),
    "begins one too far": ("_places", from_one_later, "test_every_epoch_has_exactly_torchs_order"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_off_by_one_is_found_out(name, monkeypatch):
    attribute, mutant, test = SAMPLERS[name]
    monkeypatch.setattr(samplers.InterruptableDistributedSampler, attribute, mutant)
    with pytest.raises(AssertionError):
        getattr(test_sampler, test)()
