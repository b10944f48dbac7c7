"""-check_resume: it passes what keeps the promise, and tells where what breaks it does so first."""

import os
import re
import signal
import time
import types

import pytest
import torch
import torch.distributed as dist
from runs import few, norm_net, plugins
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import train
from lib.core import parallel
from lib.trainer import trainer
from lib.utils.data import permutation
from lib.utils.data.tensors import Tensors
from scripts import check_resume, ledger

STEPS, BATCH = 8, 8
SMALL = f"-num_classes 4 -batch_size {BATCH} -micro_batch 4 -lr_start 1e-2 -epochs 9 -cpu 2 -limit_steps {STEPS}"
ROWS = ["killed 3 times and resumed", "on another number of processes", "killed and resumed on others"]
STATE = torch.Generator()  # goes on from draw to draw, and is in no checkpoint


@pytest.fixture
def checked(tmp_path, capfd):
    """Checks a run. Gives the exit code, what was printed, and what was said on stderr; nothing is left behind."""

    def look(words):
        before = signal.getsignal(signal.SIGTERM)
        code = train.main([*words.split(), "-check_resume", "-out", str(tmp_path / "out")])
        assert signal.getsignal(signal.SIGTERM) is before
        assert not list(tmp_path.glob("out/*"))
        said = capfd.readouterr()
        return code, said.out.splitlines(), said.err

    return look


def test_the_default_run_keeps_the_promise_and_the_check_says_how_long_it_takes(checked):
    code, lines, _ = checked(f"-cpu 2 -limit_steps {STEPS}")
    assert code == 0 and lines[-1] == "all as promised"
    assert re.fullmatch(r"3 more runs: about \d+ (s|minutes)", lines[2])
    assert [line[:44].strip() for line in lines[4:-1]] == ROWS
    assert [line[44:56].strip() for line in lines[4:-1]] == ["2", "1", "1, 2"]
    assert all(line.endswith("the same bits") for line in lines[4:-1])


def test_sums_that_are_left_to_the_library_are_compared_on_the_same_processes_only(checked):
    with plugins(arch={"norm_net": norm_net}, dataset={"few": few}):
        code, lines, message = checked(f"{SMALL} -arch norm_net -dataset few -reduction allreduce")
    assert code == 0, message
    assert "other numbers of processes are not compared: with -reduction allreduce" in lines[2]
    assert [line[:44].strip() for line in lines[5:-1]] == ROWS[:1]


@pytest.mark.parametrize(("more", "rows"), [("", ROWS), ("-bf16", ROWS[:1])])
def test_a_sharded_run_is_compared_on_one_process_too_but_not_in_half_precision(checked, more, rows):
    with plugins(arch={"norm_net": norm_net}, dataset={"few": few}):
        code, lines, message = checked(f"{SMALL} -arch norm_net -dataset few -parallel fsdp {more}")
    assert code == 0 and lines[-1] == "all as promised", "\n".join([*lines, message])
    assert [line[:44].strip() for line in lines[4:-1]] == rows
    assert all(line.endswith("the same bits") for line in lines[4:-1])


class Attention(nn.Module):
    """Attention over 8 words of 8 numbers. A bias of the keys has no effect: its gradient is rounding noise."""

    def __init__(self, args):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(64, args.num_classes)

    def forward(self, inputs):
        words = inputs.reshape(-1, 8, 8)
        scores = self.queries(words) @ self.keys(words).transpose(1, 2)
        return self.head((scores.softmax(2) @ self.values(words)).flatten(1))


class Two(trainer.Trainer):
    """Trains a second such model, an attribute of its own."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.other = Attention(self.args)
        self.other_optimizer = torch.optim.Adam(self.other.parameters())

    def training_step(self, batch):
        return super().training_step(batch) + self.loss(self.other(batch[0]), batch[1])

    def step(self, samples):
        super().step(samples)
        self.other_optimizer.step()
        self.other_optimizer.zero_grad()


def test_gradients_that_are_zero_but_for_rounding_are_no_difference(checked):
    """As those of BERT's key biases, from which Adam makes large steps; in a trainer's own module, too."""
    torch.manual_seed(0)
    model = Attention(types.SimpleNamespace(num_classes=4))
    functional.cross_entropy(model(torch.randn(8, 64)), torch.randint(4, (8,))).backward()
    assert model.keys.bias.grad.abs().max() < 1e-6 < 1e-4 < model.queries.bias.grad.abs().max()
    with plugins(arch={"attention": Attention}, dataset={"few": few}, trainer={"two": Two}):
        code, lines, message = checked(f"{SMALL} -arch attention -dataset few -trainer two")
    assert code == 0 and lines[-1] == "all as promised", "\n".join([*lines, message])
    assert len(lines) > 5 and all(line.endswith("the same bits") for line in lines[4:-1])


# What breaks the promise, and what it looks like


def noisy(generator):
    """The little dataset, its samples drawn with noise from a generator of their own."""

    def get_dataset(args):
        parts = few(args)
        return {**parts, "train": Noisy(generator, *parts["train"].tensors)}

    return get_dataset


class Noisy(Tensors):
    fixed = False

    def __init__(self, generator, *tensors):
        super().__init__(*tensors)
        self.generator = generator

    def __getitems__(self, indices):
        inputs, targets = super().__getitems__(indices)
        return inputs + torch.randn(64, generator=self.generator()), targets


def unseeded():
    generator = torch.Generator()
    generator.seed()
    return generator


class ByWorker(Dataset):
    """Samples that tell who drew them."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        return torch.full((64,), index / 50 + (os.getpid() if info else 0)), index % 4


def norm_net_and(forward):
    """The little model, its outputs changed by a function of them and the layer, while it is trained."""

    class Layer(nn.Module):
        passes = 0

        def forward(self, outputs):
            self.passes += self.training
            return forward(outputs, self) if self.training else outputs

    return lambda args: norm_net(args).append(Layer())


def dropout(outputs, _):
    return outputs * torch.empty(outputs.shape).bernoulli_(0.7, generator=STATE)


def drift(outputs, layer):
    return outputs * (1 + layer.passes / 100)


def drift_if_compiled(args):
    return norm_net_and(drift)(args) if args.compile else norm_net(args)


def by_time(outputs, _):
    return outputs if torch.are_deterministic_algorithms_enabled() else outputs * (1 + time.monotonic() % 1)


def by_size(outputs, _):
    return outputs * int(os.environ["WORLD_SIZE"])


class Threads(trainer.Trainer):
    def __init__(self, *parts):
        super().__init__(*parts)
        torch.set_num_threads(self.world.size)

    def training_step(self, batch):
        return super().training_step(batch) * torch.get_num_threads()


class Guided(trainer.Trainer):
    """Has a module whose gradients it sums itself, in half precision."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.guide = nn.Linear(4, 4)

    def training_step(self, batch):
        return self.loss(self.guide(self.model(batch[0])), batch[1])

    @torch.no_grad()
    def step(self, samples):
        super().step(samples)
        for parameter in self.guide.parameters():
            total = parameter.grad.bfloat16()
            if self.world.size > 1:
                dist.all_reduce(total)
            parameter -= 0.1 * total
            parameter.grad = None


MODEL = "model, loss or trainer"
FAULTS = {  # a plugin, further flags -> the row that differs, where, how, and what it looks like
    "dataset a_generator": (noisy(lambda: STATE), "", "killed", "later", ledger.DRAWN, "a state of the dataset"),
    "dataset no_seed": (noisy(unseeded), "", "killed", "at once", ledger.DRAWN, "randomness or time in the dataset"),
    "dataset worker": (lambda args: ByWorker(), "-workers 1", "killed", "at once", ledger.DRAWN, "with -workers 0"),
    "arch own_dropout": (norm_net_and(dropout), "", "killed", "later", ledger.LOSS, f"a state of the {MODEL}"),
    "arch counter": (norm_net_and(drift), "", "killed", "later", ledger.LOSS, f"a state of the {MODEL}"),
    "arch code": (drift_if_compiled, "-compile", "killed", "later", ledger.LOSS, "-compile, whose code"),
    "arch time": (norm_net_and(by_time), "", "killed", "at once", ledger.LOSS, "kernels that are chosen by time"),
    "arch size": (norm_net_and(by_size), "", "on_1", "at once", ledger.LOSS, f"a {MODEL} that depends on the number"),
    "trainer threads": (Threads, "", "on_1", "at once", ledger.LOSS, "another number of threads: 1 and 2"),
    "trainer guided": (Guided, "", "on_1", "later", ledger.LOSS, "sums over processes that the trainer makes itself"),
}


@pytest.mark.parametrize("plugin", FAULTS)
def test_a_fault_is_named_with_its_first_step_and_what_it_looks_like(checked, plugin, monkeypatch):
    kind, name = plugin.split()
    builder, flags, run, when, why, cause = FAULTS[plugin]
    real = check_resume.Check.planned
    monkeypatch.setattr(check_resume.Check, "planned", lambda *all: [row for row in real(*all) if row.run == run])
    monkeypatch.setattr(parallel, "_compile", lambda parts: None)  # as slow as it is exact
    chosen = {"arch": {"norm_net": norm_net}, "dataset": {"few": few}, "trainer": {}}
    chosen[kind][name] = builder
    words = {"arch": "norm_net", "dataset": "few", "trainer": "trainer", kind: name}
    with plugins(**chosen):
        code, lines, message = checked(
            f"{SMALL} {flags} {' '.join(f'-{kind} {name}' for kind, name in words.items())}"
        )
    text = "\n".join([*lines, message])
    assert code == 1 and lines[-1].startswith("not as promised: it looks like ") and cause in lines[-1], text
    step, sample = map(int, re.search(rf"! step (\d+), sample (\d+): {why}$", lines[4]).groups())
    assert (step > 0) == (when == "later"), text
    assert sample in permutation.order(50, 0, 0)[step * BATCH : (step + 1) * BATCH]


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
    assert not list(tmp_path.glob("out/*"))


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
    assert not any(run.folder.parent.iterdir())
