"""A dataset's own sampler: the same samples on any number of processes, after any stop, or one line."""

import itertools

import numpy as np
import pytest
from runs import distance, few, run, same_tensors, weights
from saves import SMALL, log_of
from torch.utils import data
from truth import file_plugins, same_bits_everywhere

from scripts import doctor

FLAGS = f"{SMALL} -epochs 2 -threads 1"
HEAVY = [1.0] * 40 + [9.0] * 8


class Rotated:
    """What an epoch takes follows from set_epoch. As for torch, any iterable with a length is a sampler."""

    def __len__(self):
        return 48

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.int32([(number + self.epoch) % 48 for number in range(48)]))


class Own(Rotated):
    """Has two orders in turn."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = 1 - self.epoch


def gives(numbers):
    return lambda part: type("Odd", (Rotated,), {"__iter__": lambda self: iter(numbers)})()


def growing(part):
    takes = {"epoch": 0, "__len__": lambda self: 20 + self.epoch, "__iter__": lambda self: iter(range(len(self)))}
    return type("Grows", (Rotated,), takes)()


SAMPLERS = {
    "weighted": lambda part: data.WeightedRandomSampler(HEAVY, 30),
    "rotated": lambda part: Rotated(),
    "grows": growing,
    "own": lambda part: Own(),
    "distributed": lambda part: data.DistributedSampler(part, 2, 0),
    "batches": lambda part: data.BatchSampler(range(50), 8, drop_last=False),
    "short": gives(range(47)),
    "endless": gives(itertools.repeat(0)),
    "negative": gives([50, -1, *range(46)]),
    "floats": gives([0.5] * 48),
    "no_length": lambda part: iter(range(48)),
    "empty": lambda part: [],
}


def part_of(args):
    parts = with_sampler("weighted")(args)
    return {**parts, "train": data.Subset(parts["train"], range(40))}


def with_sampler(name):
    def get_dataset(args):
        parts = few(args)
        parts["train"].sampler = SAMPLERS[name](parts["train"])
        return parts

    return get_dataset


_plugins = file_plugins(dataset={**{name: with_sampler(name) for name in SAMPLERS}, "part": part_of})


@pytest.mark.parametrize("name", ["weighted", "rotated"])
def test_a_sampler_gives_the_same_run_on_any_number_of_processes_and_after_a_stop(name, tmp_path):
    flags = FLAGS.replace("-dataset few", f"-dataset {name}")
    assert distance(same_bits_everywhere(tmp_path, flags, (3, 2)), run(tmp_path, f"{FLAGS} -cpu 1 -model usual"))


@pytest.mark.parametrize("more", ["-shuffle no", "-overfit 20"])
def test_no_shuffling_and_few_samples_leave_the_sampler_out(more, tmp_path):
    runs = [f"{FLAGS.replace('-dataset few', f'-dataset {name}')} {more} -cpu 1" for name in ("few", "weighted")]
    assert same_tensors(*(weights(run(tmp_path, one)) for one in runs))


NUMBERS = "which must give as many numbers from 0 to 49 as its len()"
WRONG = dict.fromkeys("distributed batches short endless negative floats no_length empty".split(), NUMBERS)
WRONG["grows"] = "the sampler of train gives 20 samples at first, and others in a later epoch"
WRONG["part"] = "only a part of the"


@pytest.mark.parametrize("name", WRONG)
def test_a_sampler_that_cannot_be_right_is_one_line(name, error_of):
    assert WRONG[name] in error_of(f"-dataset {name} -arch norm_net -num_classes 4 -cpu 1")


@pytest.mark.parametrize(("data", "steps"), [("weighted", 2), ("few -balance", 4)])
def test_doctor_plans_with_the_length_of_the_sampler(data, steps, tmp_path, capsys):
    run(tmp_path, f"{FLAGS} -dataset {data} -cpu 1 -limit_steps 1 -model planned", wanted=75)
    doctor.main(["-cfg", str(tmp_path / "planned/config.yaml"), "-cpu", "1", "-out", str(tmp_path)])
    assert "resumes from" in (said := capsys.readouterr().out) and f"{steps} steps an epoch" in said


def test_other_weights_are_other_data_and_a_sampler_that_draws_by_itself_is_named(tmp_path, refused, monkeypatch):
    own = run(tmp_path, f"{FLAGS.replace('-dataset few', '-dataset own')} -cpu 1 -model own")
    assert "what sampler gives differs each time it is read" in log_of(own)
    flags = FLAGS.replace("-dataset few", "-dataset weighted")
    run(tmp_path, f"{flags} -cpu 1 -limit_steps 2", wanted=75)
    monkeypatch.setitem(SAMPLERS, "weighted", lambda part: data.WeightedRandomSampler(HEAVY[::-1], 30))
    assert "sampler digest was" in refused(f"{flags} -cpu 1")
    run(tmp_path, f"{flags} -cpu 1 -allow_change data")
    said = refused(f"{flags} -cpu 1 -reset -shuffle_block 4")
    assert "-shuffle_block 4: training has a sampler, weights or lengths" in said
