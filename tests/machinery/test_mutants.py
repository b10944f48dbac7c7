"""A test of the tests: parts of Baton are broken on purpose, one at a time, and the other tests' checks must fail.
Without a fault they must pass."""

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
from lib.core import exact, scheduler
from lib.utils import seeding
from lib.utils.checkpoint import atomic, manager, run_folder, shards
from lib.utils.compat import samplers
from lib.utils.data import loader
from lib.utils.data.tensors import Tensors

pytestmark = pytest.mark.usefixtures("no_fsync")


# Saves: each is cut short as in test_atomic and test_crash_states


class Unsynced:
    """The module os, without fsync."""

    def __getattr__(self, name):
        return (lambda fd: None) if name == "fsync" else getattr(os, name)


def write_in_place(path, data):
    path.write_text(data) if isinstance(data, str) else path.write_bytes(data)


def delete_and_link(link, target):
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
ATOMIC = [  # the attribute of lib.utils.checkpoint.atomic, its broken replacement, and the kind of save
    *[("os", Unsynced(), kind) for kind in (FILE, LINK, SAVE, DIRECTORY)],
    ("write_file", write_in_place, FILE),
    *[("swap_link", delete_and_link, kind) for kind in (LINK, SAVE, DIRECTORY)],
    ("_unique", shared_name, LINK),
    ("remove_folder", shutil.rmtree, SAVE),
    ("os", os, PublishedInPlace()),
    ("os", os, RemovedFirst()),
]


@pytest.mark.parametrize(("name", "mutant", "kind"), ATOMIC, ids=test_atomic.title)
def test_a_broken_way_of_writing_is_detected(name, mutant, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, name, mutant)
    folder, save = test_atomic.prepare(kind, tmp_path)
    cuts = itertools.chain(crash.power_loss_states(save, folder), crash.kills(save, folder))
    assert any(test_atomic.wrong_after(cut, kind, folder) for cut in cuts)


def test_a_reader_misses_a_link_that_is_deleted_and_created_again(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "swap_link", delete_and_link)
    assert test_atomic.count_misses(tmp_path)


def test_two_writers_with_the_same_temporary_name_mix_their_content(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_unique", shared_name)
    assert test_atomic.find_mixed_content(tmp_path, monkeypatch)


def remove_before(self, save, answers, real=manager.Checkpoints._publish):
    for folder in run_folder.list_checkpoints(self.folder):
        atomic.remove_folder(folder)
    real(self, save, answers)


SAVES = {
    "no fsync of a shard": (shards, "os", Unsynced()),
    "no fsync of folders and manifest": (atomic, "os", Unsynced()),
    "copied instead of renamed": (atomic, "publish", lambda partial, final: shutil.copytree(partial, final)),
    "a removal that is not renamed first": (atomic, "remove_folder", shutil.rmtree),
    "the old one removed first": (manager.Checkpoints, "_publish", remove_before),
    "a manifest written in place": (atomic, "write_file", write_in_place),
    "no cleanup at the start": (atomic, "sweep", lambda folder: None),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_broken_save_of_a_checkpoint_is_detected(name, tmp_path, monkeypatch):
    place, attribute, mutant = SAVES[name]
    case = test_crash_states.Case()
    folder = case.prepare(tmp_path)
    monkeypatch.setattr(place, attribute, mutant)
    cuts = itertools.chain(
        crash.power_loss_states(lambda: case.save(folder, case.new), folder),
        crash.kills(lambda: case.save(folder, case.new), folder),
    )
    assert any(case.wrong_after(cut, folder) for cut in cuts)


# Resumes: -check_resume as in test_check_resume, on a small run with noise and dropout


def noisy(args):
    parts = few(args)
    return {**parts, "train": Noisy(*parts["train"].tensors)}


class Noisy(Tensors):
    """The small dataset with noise."""

    fixed = False

    def __getitems__(self, indices):
        inputs, targets = super().__getitems__(indices)
        return inputs + torch.randn(inputs.shape), targets


COUNT = itertools.count()


def lr_by_count(step, real=scheduler.lr_at, **schedule):
    return real(next(COUNT), **schedule)


def epoch_off_by_one(self, epoch, first_step=0, real=loader.Loader.epoch):
    return real(self, epoch, first_step + (first_step > 0))


RESUME_FAULTS = {  # fault: where, the attribute, its broken replacement, and the difference that must be reported
    "micro-batch seeds left out": (seeding, "seed_micro_batch", lambda *place: None, "another loss"),
    "samples from the global generator": (seeding, "seed_sample", lambda *place: None, "drawn otherwise"),
    "a loader off by one step": (loader.Loader, "epoch", epoch_off_by_one, "other samples"),
    "lr from a counter": (scheduler, "lr_at", lr_by_count, "the same losses, another"),
}


def check_killed_run(out, capfd, size=2, data="noisy") -> tuple[int, str]:
    """The exit code of -check_resume, and the line of its table for the killed run."""
    flags = f"-cpu {size} -batch_size {2 * size} -micro_batch 2 -dataset {data} -arch norm_net -num_classes 4"
    with plugins(arch={"norm_net": norm_net}, dataset={"noisy": noisy, "few": few}):
        code = train.main([*flags.split(), "-limit_steps", "10", "-check_resume", "-out", str(out)])
    output = capfd.readouterr()
    (line,) = re.findall("^killed 3 times.*", output.out, re.MULTILINE) or [output.err]
    return code, line


@pytest.mark.parametrize("size", [2, 4])
def test_check_resume_passes_without_a_fault(size, tmp_path, capfd, compare_kills_only):
    code, line = check_killed_run(tmp_path, capfd, size)
    assert code == 0 and line.endswith("the same bits")


@pytest.mark.parametrize("name", RESUME_FAULTS)
def test_a_fault_that_changes_a_resumed_run_is_detected(name, tmp_path, capfd, compare_kills_only, monkeypatch):
    place, attribute, mutant, why = RESUME_FAULTS[name]
    monkeypatch.setattr(place, attribute, mutant)
    seeded = {"data": "few"} if "micro-batch" in name else {}  # noise would seed the dropout too
    code, line = check_killed_run(tmp_path, capfd, **seeded)
    assert code == 1 and "! step" in line and why in line, line


# Order of sums: along the tree any number of processes gives the same bits


def add_to_one_sum(nodes, leaf, values):
    """Add all values of a rank to one sum."""
    if nodes:
        torch._foreach_add_(next(iter(nodes.values())), values)
    else:
        nodes[leaf] = values


def add_in_order(nodes):
    first, *others = (values for _, values in sorted(nodes.items()))
    for values in others:
        torch._foreach_add_(first, values)
    return first


def in_rank_order(monkeypatch):
    """Break the order of sums: add the ranks one after the other."""
    monkeypatch.setattr(exact, "add_leaf", add_to_one_sum)
    monkeypatch.setattr(exact, "sum_nodes", add_in_order)
    exact.nodes_by_rank.cache_clear()
    monkeypatch.setattr(exact, "nodes_by_rank", exact.nodes_by_rank.__wrapped__)


@pytest.mark.parametrize("broken", [False, True])
def test_a_sum_of_gradients_in_rank_order_is_detected(broken, tmp_path, monkeypatch):
    if broken:
        in_rank_order(monkeypatch)
    with plugins(**saves.PLUGINS):
        runs = [run(tmp_path, f"{saves.SMALL} -cpu {size} -model on_{size}") for size in (1, 3)]
    assert (saves.bits(runs[0]) != saves.bits(runs[1])) == broken


def load_off_by_one(self, state, real=samplers.InterruptableDistributedSampler.load_state_dict):
    real(self, state)
    self.progress = min(self.progress + 1, self.num_samples)


def places_off_by_one(self, real=samplers.InterruptableDistributedSampler._places):
    return ((places + 1) % len(self.dataset) for places in real(self))


SAMPLERS = {  # fault: the attribute, its broken replacement, and the test that must fail
    "resumes one too far": (
        "load_state_dict",
        load_off_by_one,
        "test_a_rank_that_stops_and_resumes_misses_no_sample",
    ),
    "begins one too far": ("_places", places_off_by_one, "test_every_epoch_has_the_order_of_torchs_sampler"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_off_by_one_is_detected(name, monkeypatch):
    attribute, mutant, test = SAMPLERS[name]
    monkeypatch.setattr(samplers.InterruptableDistributedSampler, attribute, mutant)
    with pytest.raises(AssertionError):
        getattr(test_sampler, test)()
