"""-check_resume: it passes what keeps the promise, and tells where what breaks it does so first."""

import os
import re
import signal

import pytest
import torch
from runs import few, norm_net, plugins
from torch import nn

import train
from lib.utils.data import permutation

STEPS, BATCH = 8, 8
SMALL = f"-num_classes 4 -batch_size {BATCH} -micro_batch 4 -lr_start 1e-2 -epochs 9 -cpu 2 -limit_steps {STEPS}"
ROWS = ["undisturbed", "killed 3 times, gone on with each time", "undisturbed", "killed, gone on with on others"]
FIRST = int(permutation.order(50, 0, 0)[:1])  # the first sample of the first epoch
STATE = torch.Generator()  # goes on from draw to draw, and is in no checkpoint


@pytest.fixture
def checked(tmp_path, capfd):
    """Checks a run. Gives the exit code, the table's rows, and what was said on stderr; nothing is left behind."""

    def look(words):
        code = train.main([*words.split(), "-check_resume", "-out", str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()
        said = capfd.readouterr()
        return code, said.out.splitlines(), said.err

    return look


def test_the_default_run_keeps_the_promise(checked):
    code, lines, _ = checked(f"-cpu 2 -limit_steps {STEPS}")
    assert code == 0 and lines[-1] == "all as promised"
    assert [line[:44].strip() for line in lines[2:-1]] == ROWS
    assert [line[44:56].strip() for line in lines[2:-1]] == ["2", "2", "1", "1, 2"]
    assert lines[3].endswith("the same bits") and not [line for line in lines if "!" in line]
    assert all(line.endswith("the same bits") for line in lines[3:-1] if "with -micro_batch" not in line)


# What breaks the promise


def noisy(generator):
    """The little dataset, its samples drawn with noise from a generator of their own."""

    def get_dataset(args):
        parts = few(args)
        parts["train"].fixed = False
        parts["train"].transform = lambda batch: (batch[0] + torch.randn(64, generator=generator()), batch[1])
        return parts

    return get_dataset


def unseeded():
    generator = torch.Generator()
    generator.seed()
    return generator


class OwnDropout(nn.Module):
    """Dropout from a generator that nobody seeds anew."""

    def forward(self, inputs):
        return inputs * torch.empty(inputs.shape).bernoulli_(0.7, generator=STATE) if self.training else inputs


class Drift(nn.Module):
    """Counts its passes and lets them grow, and saves no count."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, inputs):
        self.passes += self.training
        return inputs * (1 + self.passes / 100)


class BySize(nn.Module):
    def forward(self, inputs):
        return inputs * int(os.environ["WORLD_SIZE"])


def norm_net_and(layer):
    return lambda args: norm_net(args).append(layer())


DRAWN, LOSS = "the same sample, drawn otherwise", "the same samples, another loss"
BROKEN = {  # arch or dataset -> where the killed run differs, and how
    "dataset noise_of_a_generator_with_a_state": (noisy(lambda: STATE), "later", DRAWN),
    "dataset noise_without_a_seed": (noisy(unseeded), "at once", DRAWN),
    "arch dropout_with_a_state": (norm_net_and(OwnDropout), "later", LOSS),
    "arch a_state_that_is_not_saved": (norm_net_and(Drift), "later", LOSS),
}


@pytest.mark.parametrize("plugin", BROKEN)
def test_a_plugin_that_breaks_the_promise_is_told_with_its_first_step_and_sample(checked, plugin, only_kills):
    kind, name = plugin.split()
    builder, when, why = BROKEN[plugin]
    chosen = {"arch": {"norm_net": norm_net}, "dataset": {"few": few}}
    chosen[kind][name] = builder
    words = {"arch": "norm_net", "dataset": "few", kind: name}
    with plugins(**chosen):
        code, lines, message = checked(f"{SMALL} -arch {words['arch']} -dataset {words['dataset']}")
    assert code == 1 and lines[-1] == "not as promised, see ! above", message
    step, sample = map(int, re.search(rf"! step (\d+), sample (\d+): {why}$", lines[3]).groups())
    assert (step > 0) == (when == "later")
    assert sample in permutation.order(50, 0, 0)[step * BATCH : (step + 1) * BATCH]


def test_a_model_that_is_another_on_other_numbers_of_processes_is_told(checked):
    with plugins(arch={"by_size": norm_net_and(BySize)}, dataset={"few": few}):
        code, lines, message = checked(f"{SMALL} -arch by_size -dataset few")
    assert code == 1 and lines[-1] == "not as promised, see ! above", message
    assert lines[3].endswith("the same bits")
    assert [line.partition("! ")[2] for line in lines[4:-1]] == [f"step 0, sample {FIRST}: {LOSS}"] * 2


# What cannot be checked


def failing(args):
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("-limit_steps 1", 2, "-limit_steps 1: -check_resume needs 2 steps or more"),
        ("-data nowhere", 2, "-data nowhere: no digits.npz in it"),
        ("-out README.md/out", 2, "-out README.md/out: cannot be written (Not a directory)"),
        ("-dataset few -arch failing", 1, "RuntimeError: no such luck"),
    ],
)
def test_a_run_that_cannot_be_checked_says_why(capfd, tmp_path, words, code, message):
    with plugins(arch={"failing": failing}, dataset={"few": few}):
        words = ["-out", str(tmp_path / "out"), "-cpu", "2", *words.split(), "-check_resume"]
        assert train.main(words) == code
    said = capfd.readouterr().err
    assert message in said and "train.py: " in said
    assert code == 1 or len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_process_of_a_launcher_is_no_place_for_a_check(checked, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, _, said = checked("-cpu 2")
    assert code == 2 and "run it without torchrun" in said


def test_a_check_that_is_told_to_stop_leaves_nothing_behind(start):
    run = start("run", "-check_resume", deed={"do": "pause", "step": 5})
    run.noted(2)
    os.kill(run.pid, signal.SIGTERM)
    assert run.ends() == 128 + signal.SIGTERM, run.text()
    run.is_gone()
    assert not run.folder.parent.exists()
