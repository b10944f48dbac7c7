"""-optimizer takes any class of torch.optim, and muon, on any number of processes."""

import inspect
import re

import pytest
import torch
from runs import distance, run
from saves import SMALL, log_of
from torch import nn
from truth import file_plugins

from lib import config
from lib.core import optimizer


def matrices(args):
    """Has an embedding, hidden matrices of both shapes, a head, and vectors."""
    hidden = [nn.Linear(64, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 40), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(40, 4))


_plugins = file_plugins(arch={"matrices": matrices})
RUN = f"{SMALL} -arch matrices -epochs 1"
CLASSES = {name: one for name, one in vars(torch.optim).items() if inspect.isclass(one)}
USABLE = [name for name, one in CLASSES.items() if issubclass(one, torch.optim.Optimizer)]
USABLE = [name for name in USABLE if name not in ("Optimizer", "LBFGS", "SparseAdam")]


@pytest.mark.parametrize("name", USABLE[::3])
def test_any_optimizer_of_torch_trains_with_the_same_bits_on_two_processes(name, tmp_path):
    one, two = (run(tmp_path, f"{RUN} -optimizer {name} -cpu {cpu} -model on_{cpu}") for cpu in (1, 2))
    assert distance(one, two) == 0.0


@pytest.mark.parametrize("flags", ["-cpu 2", "-cpu 3 -parallel fsdp"])
def test_muon_has_the_same_bits_sharded_or_not_and_after_a_stop(flags, tmp_path):
    base = f"{RUN} -deterministic -optimizer muon -optimizer_arg momentum=0.9 -optimizer_arg betas=0.8,0.9"
    whole = run(tmp_path, f"{base} -cpu 1 -model whole")
    run(tmp_path, f"{base} {flags} -model stopped -limit_steps 2", wanted=75)
    assert distance(whole, run(tmp_path, f"{base} -cpu 1 -model stopped")) == 0.0
    run(tmp_path, f"{base} -cpu 1 -model back -limit_steps 2", wanted=75)
    assert distance(whole, run(tmp_path, f"{base} {flags} -model back")) == 0.0


def test_muon_trains_hidden_matrices_as_torchs_muon_and_all_else_as_torchs_adamw():
    kinds = [nn.Embedding(9, 8), nn.EmbeddingBag(9, 8), nn.Linear(8, 16), nn.Conv1d(2, 3, 3), nn.Linear(16, 4)]
    model = nn.ModuleList([*kinds, nn.Linear(8, 8).requires_grad_(False)])
    args = config.parse_args("-optimizer muon -num_classes 4 -lr_start 0.01 -weight_decay 0.1 -deterministic".split())
    ours = optimizer.get_optimizers(model, nn.Identity(), args)
    hidden = [one for group in ours[1].param_groups for one in group["params"]]
    assert len(hidden) == 1 and hidden[0] is model[2].weight
    trained = [one for one in model.parameters() if one.requires_grad]
    copies = {one: nn.Parameter(one.detach().clone()) for one in trained}
    rest = [one for one in trained if one is not hidden[0]]
    theirs = [
        torch.optim.Muon([copies[hidden[0]]], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([copies[one] for one in rest if one.ndim > 1], lr=0.01, weight_decay=0.1),
        torch.optim.AdamW([copies[one] for one in rest if one.ndim < 2], lr=0.01, weight_decay=0.0),
    ]
    for _ in range(3):
        for mine, other in copies.items():
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for one in (*ours, *theirs):
            one.step()
    assert all(torch.equal(mine, other) for mine, other in copies.items())


def test_an_optimizer_of_a_fork_gets_the_flags_that_it_can_take(monkeypatch):
    monkeypatch.setitem(optimizer.BY_NAME, "Mine", lambda params, **options: torch.optim.AdamW(params, **options))
    args = config.parse_args("-optimizer mine -weight_decay 0.3 -optimizer_arg eps=1e-3".split())
    [made] = optimizer.get_optimizers(nn.Linear(2, 2), nn.Identity(), args)
    assert [group["weight_decay"] for group in made.param_groups] == [0.3, 0.0] and made.defaults["eps"] == 1e-3
    monkeypatch.setitem(optimizer.BY_NAME, "mine", lambda groups, lr: torch.optim.Rprop(groups, lr=lr))
    [made] = optimizer.get_optimizers(nn.Linear(2, 2), nn.Identity(), config.parse_args(["-optimizer", "mine"]))
    assert type(made) is torch.optim.Rprop
    monkeypatch.setitem(optimizer.BY_NAME, "own", type("Own", (torch.optim.SGD,), {}))
    args = config.parse_args("-optimizer own -momentum 0.3".split())
    assert optimizer.get_optimizers(nn.Linear(2, 2), nn.Identity(), args)[0].defaults["momentum"] == 0.3


def test_an_option_that_is_allowed_to_change_takes_effect(tmp_path):
    base = f"{RUN} -cpu 1 -optimizer adamw -model options"
    run(tmp_path, f"{base} -optimizer_arg betas=0.9,0.95 -limit_steps 2", wanted=75)
    changed = run(tmp_path, f"{base} -optimizer_arg betas=0.5,0.6 -allow_change optimizer_arg")
    assert distance(changed, run(tmp_path, f"{base.replace('options', 'kept')} -optimizer_arg betas=0.9,0.95")) > 0


def test_numbers_of_groups_that_an_edit_changes_stay_as_saved_and_are_named(tmp_path, monkeypatch):
    base, before = f"{RUN} -cpu 1 -optimizer adamw", optimizer.decay_groups
    run(tmp_path, f"{base} -limit_steps 2", wanted=75)
    monkeypatch.setattr(optimizer, "decay_groups", lambda model, decay: before(model, decay + 0.5))
    assert "optim has the weight_decay of the checkpoint, 0.01, and not 0.51" in log_of(run(tmp_path, base))


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("-slurm_dry -slurm_arg signal=USR1@9", "signal=USR1@9: take -slurm_signal_s"),
        ("-optimizer LBFGS", "LBFGS doesn't support"),
        ("-optimizer muon -dataset digits -arch convnet -num_classes 10", "no matrix of a hidden layer"),
        ("-slurm_dry -optimizer nope", "there are"),
        ("-loss msa", "there are cross_entropy, mse, l1, huber .do you mean mse"),
        ("-optimizer rmsprob", "there are adadelta, .*do you mean rmsprop"),
        ("-optimizer adamw -optimizer_arg betas=0.9", "-optimizer adamw betas=0.9: "),
        ("-optimizer adamw -optimizer_arg betas=2,2", "Invalid beta"),
        ("-optimizer adamw -optimizer_arg lr=1", "-optimizer_arg lr=1: take -lr_start"),
        ("-optimizer sgd -optimizer_arg nesterov", "KEY=VALUE is needed"),
    ],
)
def test_unknown_names_and_what_an_optimizer_does_not_take_are_refused_in_one_line(flags, wanted, refused):
    assert re.search(wanted, refused(f"{RUN} {flags}"))


def test_options_are_python_values_yes_and_no_or_text():
    found = optimizer.read_options(["betas=0.9,0.95", "nesterov=yes", "foreach=no", "mode=original", "eps=1e-6"])
    assert found == {"betas": (0.9, 0.95), "nesterov": True, "foreach": False, "mode": "original", "eps": 1e-6}
    for words, value in (("true True on", True), ("false False off", False)):
        assert [optimizer.read_options([f"maximize={word}"])["maximize"] for word in words.split()] == [value] * 3
