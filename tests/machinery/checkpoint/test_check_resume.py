"""-check_resume: a run that resumes exactly passes; a fault is reported with its first step and its likely cause."""

import os
import re
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from items import Items
from runs import few, norm_net, plugins
from torch import nn

import train
from lib.trainer import trainer
from lib.utils.data import plan
from scripts import check_resume, ledger

STEPS, BATCH = 8, 8
SMALL = f"-num_classes 4 -batch_size {BATCH} -micro_batch 4 -lr_start 1e-2 -epochs 9 -cpu 2 -limit_steps {STEPS}"
ROWS = ["killed 3 times and resumed", "on another number of processes", "killed and resumed on others"]
STATE = torch.Generator()  # its state changes with each draw, and is in no checkpoint


@pytest.fixture
def check_run(tmp_path, capfd):
    """A function that checks a run and returns exit code, lines of stdout, and stderr. No file may remain."""

    def check(flags):
        before = signal.getsignal(signal.SIGTERM)
        code = train.main(["-check_resume", "-out", str(tmp_path / "out"), *flags.split()])
        assert signal.getsignal(signal.SIGTERM) is before
        assert not list(tmp_path.glob("out/*"))
        captured = capfd.readouterr()
        return code, captured.out.splitlines(), captured.err

    return check


def test_the_default_run_passes_and_the_check_says_how_long_it_takes(check_run):
    code, lines, _ = check_run(f"-cpu 2 -limit_steps {STEPS}")
    assert code == 0 and lines[-1] == "all as promised"
    assert re.fullmatch(r"3 more runs: about \d+ (s|minutes)", lines[2])
    assert [line[:44].strip() for line in lines[4:-1]] == ROWS
    assert [line[44:56].strip() for line in lines[4:-1]] == ["2", "1", "1, 2"]
    assert all(line.endswith("the same bits") for line in lines[4:-1])


def test_with_the_stock_engine_only_the_same_number_of_processes_is_compared(check_run):
    with plugins(arch={"norm_net": norm_net}, dataset={"few": few}):
        code, lines, message = check_run(f"{SMALL} -arch norm_net -dataset few -deterministic no")
    assert code == 0, message
    assert "other numbers of processes are not compared: without -deterministic they" in lines[2]
    assert [line[:44].strip() for line in lines[5:-1]] == ROWS[:1]


def noisy(generator):
    """The small dataset with noise from a generator of its own."""

    def add_noise(inputs, target):
        return inputs + torch.randn(64, generator=generator()), target

    def get_dataset(args):
        parts = few(args)
        return {**parts, "train": Items([partial(add_noise, *parts["train"][index]) for index in range(50)])}

    return get_dataset


def norm_net_and(forward):
    """The small model with a last layer that applies a function to the outputs during training."""

    class Layer(nn.Module):
        passes = 0

        def forward(self, outputs):
            self.passes += self.training
            return forward(outputs, self) if self.training else outputs

    return lambda args: norm_net(args).append(Layer())


UNSEEDED = noisy(lambda: torch.Generator().manual_seed(time.time_ns()))
DRIFTS = norm_net_and(lambda outputs, layer: outputs * (1 + layer.passes / 100))
BY_SIZE = norm_net_and(lambda outputs, _: outputs * int(os.environ["WORLD_SIZE"]))


class Guided(trainer.Trainer):
    """Has a module whose gradients it sums itself, in bf16."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.guide = nn.Linear(4, 4)

    def training_step(self, batch):
        return self.loss(self.guide(self.model(batch[0])), batch[1])

    @torch.no_grad()
    def optimizer_step(self):
        norm = super().optimizer_step()
        for parameter in self.guide.parameters():
            total = parameter.grad.bfloat16()
            if self.world.size > 1:
                dist.all_reduce(total)
            parameter -= 0.1 * total
            parameter.grad = None
        return norm


MODEL = "model, loss or trainer"
FAULTS = {  # plugin: its builder, the row that differs, when, the kind of difference, the likely cause
    "dataset a_generator": (noisy(lambda: STATE), "killed", "later", ledger.DRAWN, "a state of the dataset"),
    "dataset no_seed": (UNSEEDED, "killed", "at once", ledger.DRAWN, "randomness or time in the dataset"),
    "arch counter": (DRIFTS, "killed", "later", ledger.LOSS, f"a state of the {MODEL}"),
    "arch size": (BY_SIZE, "on_1", "at once", ledger.LOSS, f"a {MODEL} that depends on the number"),
    "trainer guided": (Guided, "on_1", "later", ledger.LOSS, "sums over processes that the trainer makes itself"),
}


@pytest.mark.parametrize("plugin", FAULTS)
def test_a_fault_is_reported_with_its_first_step_and_its_likely_cause(check_run, plugin, monkeypatch):
    kind, name = plugin.split()
    builder, run, when, why, cause = FAULTS[plugin]
    real = check_resume.Check.planned
    monkeypatch.setattr(check_resume.Check, "planned", lambda *all: [row for row in real(*all) if row.run == run])
    chosen = {"arch": {"norm_net": norm_net}, "dataset": {"few": few}, "trainer": {}}
    chosen[kind][name] = builder
    names = {"arch": "norm_net", "dataset": "few", "trainer": "trainer", kind: name}
    with plugins(**chosen):
        code, lines, message = check_run(f"{SMALL} {' '.join(f'-{kind} {name}' for kind, name in names.items())}")
    text = "\n".join([*lines, message])
    assert code == 1 and lines[-1].startswith("not as promised: it looks like ") and cause in lines[-1], text
    step, sample = map(int, re.search(rf"! step (\d+), sample (\d+): {why}$", lines[4]).groups())
    assert (step > 0) == (when == "later"), text
    assert sample in plan.order(50, 0, 0)[step * BATCH : (step + 1) * BATCH]


@pytest.mark.parametrize(
    ("flags", "wanted", "message"),
    [
        ("-debug", 2, "-debug gives nothing to resume"),
        ("-limit_steps 1", 2, "-limit_steps 1: -check_resume needs 2 steps or more"),
        ("-steps 1", 1, "the run ends after its first step"),
        ("-out README.md/out", 2, "-out README.md/out: cannot be written (Not a directory)"),
        ("-dataset few -arch failing", 1, "ZeroDivisionError: "),
        ("", 2, "run it without torchrun"),
    ],
)
def test_a_run_that_cannot_be_checked_is_reported_with_the_reason(check_run, flags, wanted, message, monkeypatch):
    if "torchrun" in message:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    with plugins(arch={"failing": lambda args: 1 // 0}, dataset={"few": few}):
        code, _, output = check_run(f"-cpu 2 {flags}")
    assert code == wanted and message in output and "train.py: " in output
    assert code == 1 or len(output.splitlines()) == 1


def test_a_check_that_is_stopped_leaves_no_files(start):
    run = start("run", "-check_resume", fault={"do": "pause", "step": 5})
    run.wait_for_notes(2)
    os.kill(run.pid, signal.SIGTERM)
    run.ends_with(128 + signal.SIGTERM)
    assert not any(run.folder.parent.iterdir())
