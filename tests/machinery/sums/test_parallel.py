"""DDP, FSDP2 and one process train alike and load each other's checkpoints, with any usual model."""

import copy
import multiprocessing
import os
import shutil
import types

import needs
import pytest
import ranks
import torch
from command_line import usage_error
from nets import NET, BlocksNet
from runs import norm_net, plugins, run, same_tensors, weights
from saves import bits
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from truth import file_plugins

from lib import config
from lib.core import loss as losses
from lib.core import parallel
from lib.utils.distributed import World

NORM = "-dataset few -arch norm_net -num_classes 4 -batch_size 16 -micro_batch 8 -epochs 2 -cpu 1"
GPT = "-dataset tokens -gpt_depth 1 -gpt_width 32 -tokens_length 16 -tokens_samples 96 -micro_batch 4"

RECOMPUTE = types.SimpleNamespace(recompute=True, compile=None, parallel="ddp", arch="line", channels_last=False)
ARCHS = {"blocks_net": lambda args: BlocksNet(), "still_net": lambda args: BlocksNet(dropout=0.0)}
_plugins = file_plugins(arch={**ARCHS, "float32_net": lambda args: float32_net()})


def relative_distance(one: dict, other: dict) -> float:
    """The largest relative difference between the weights of two models, by tensor."""
    assert one.keys() == other.keys()
    pairs = [(one[name].double(), other[name]) for name in one]
    return max(((a - b).norm() / a.norm().clamp(min=1e-9)).item() for a, b in pairs)


def test_a_stock_fsdp_run_ends_with_the_weights_of_ddp_up_to_rounding(tmp_path):
    runs = "-cpu 2 -model ddp", "-cpu 3 -deterministic no -recompute -parallel fsdp -model fsdp"
    assert relative_distance(*(weights(run(tmp_path, f"{NET} {flags}")) for flags in runs)) < 1e-5


@pytest.mark.parametrize("flags", [f"{NET} -arch float32_net -epochs 3", GPT], ids=["net", "gpt"])
def test_half_precision_has_the_same_bits_under_ddp_and_fsdp_on_any_number_of_processes(flags, tmp_path):
    """The scaler skips the same steps, blocks get inputs of the same type, and RMSNorm weights that nobody rounds."""
    for half in ("-bf16", "-fp16"):
        made = [
            run(tmp_path, f"{flags} {half} -deterministic -parallel {kind} -model {half[1:]}{kind[0]}{kind[-1]}")
            for kind in ("ddp -cpu 2", "fsdp -cpu 2", "fsdp -cpu 1")
        ]
        ddp, *sharded = map(weights, made)
        assert all(same_tensors(ddp, other) for other in sharded)


def test_layers_that_get_model_puts_into_evaluation_mode_stay_there_and_a_pretrained_part_is_trained():
    part, frozen = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval() for _ in range(2))
    model = nn.Sequential(part, frozen.requires_grad_(False), nn.BatchNorm1d(2).eval())
    parallel.wrap(model, config.parse_args([]), World())
    assert [one.training for one in model.modules()] == [True] * 4 + [False] * 4
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 2)).requires_grad_(False).eval()
    model.append(nn.Linear(2, 2))  # a new head
    parallel.wrap(model, config.parse_args([]), World())
    assert [one.training for one in model] == [False, True, False, True]


@pytest.mark.parametrize("sizes", [(4, 3, 4), (3, 4, 4)], ids=str)
def test_a_batch_gets_the_same_compiled_code_whatever_came_before_it(sizes, tmp_path):
    """Else a start in the middle of an epoch would go on with other kernels, and so with other bits."""

    def check(rank):
        seen = []

        def backend(graph, inputs):
            seen.append({type(size) for one in inputs for size in getattr(one, "shape", [one])})
            return graph.forward

        line = torch.compile(nn.Linear(2, 2), backend=backend)  # as a get_model may do it
        parallel._configure_compiler("exact")
        for size in sizes:
            line(torch.ones(size, 2))
        assert seen == [{int}, {int}]

    ranks.on_ranks(1, check, tmp_path)  # in a process of its own, as none can be forked after it


@pytest.mark.parametrize(("flags", "compiled"), [("-compile", ["_sum"]), ("-compile -cpu 1", []), ("", [])])
def test_compile_compiles_the_loss_too_on_a_gpu(flags, compiled, monkeypatch):
    found = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function: found.append(function.__name__) or function)
    losses.get_loss(config.parse_args(flags.split()))
    assert found == compiled


def float32_net():
    """A model whose blocks accept only 32-bit inputs, which is what autocast gives them."""

    def check(block, inputs):
        assert inputs[0].dtype is torch.float32

    net = BlocksNet()
    for block in net.blocks:
        block.register_forward_pre_hook(check)
    return net


@pytest.mark.parametrize("engine", ["", "-deterministic no"])
def test_recomputing_changes_no_bit_and_updates_batchnorm_once(engine, tmp_path):
    plain, again = (weights(run(tmp_path, f"{NORM} {engine} {flag} -model a{flag}")) for flag in ("", "-recompute"))
    assert same_tensors(plain, again)


def test_a_copy_of_a_compiled_model_has_its_own_weights(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: lambda *inputs: function(*inputs))
    own = nn.Linear(2, 2)
    own.forward = own.forward  # as a model may choose one of its methods
    for net in (nn.Linear(2, 2), own):
        model = parallel.wrap(net, config.parse_args(["-compile", "model"]), World())
        teacher = copy.deepcopy(model)
        nn.init.zeros_(model.weight)
        assert not torch.equal(teacher(torch.ones(1, 2)), model(torch.ones(1, 2)))


@needs.require("" if shutil.which("g++") else "needs a C++ compiler: apt-get install g++")
def test_a_compiled_run_keeps_its_parameter_names_and_resumes_uncompiled(tmp_path):
    """Without dropout, for which a compiler may draw other masks."""
    flags = f"{NET} -arch still_net -epochs 2 -cpu 1"
    plain = weights(run(tmp_path, f"{flags} -model plain"))
    compiled = f"{flags} -compile blocks -recompute -model compiled -limit_steps 5"
    child = multiprocessing.get_context("fork").Process(target=run, args=(tmp_path, compiled, 75))
    child.start()  # whose threads would keep later tests from forking
    child.join()
    assert child.exitcode == 0
    assert relative_distance(plain, weights(run(tmp_path, f"{flags} -model compiled"))) < 1e-5


def test_all_ranks_begin_with_the_values_of_rank_0(tmp_path):
    """Even those of a model that draws otherwise on each rank; one that has other shapes there is refused."""

    def shifted_net(args):
        model = norm_net(args)
        for value in model.state_dict().values():
            value += int(os.environ["RANK"])
        return model

    def wider_net(args):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4 + int(os.environ["RANK"])))

    with plugins(arch={"shifted": shifted_net, "wider": wider_net}):
        for more in ("-parallel ddp", "-parallel fsdp"):
            flags = f"{NORM} -arch shifted {more} -model {more[-4:]}"
            runs = [run(tmp_path, f"{flags}_{size} -cpu {size}") for size in (1, 2)]
            assert bits(runs[0]) == bits(runs[1])
        run(tmp_path, f"{NORM} -arch wider -cpu 2 -model wider", wanted=1)


def test_blocks_are_the_outermost_module_lists_or_the_children_of_a_sequential():
    net, line = BlocksNet(), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert parallel.blocks(net) == list(net.blocks) and parallel.blocks(line) == [line[0], line[2]]
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), nn.Linear(1, 1)])
    assert parallel.blocks(nn.Sequential(nested)) == [nested[1]], "FSDP takes no part without a forward"
    assert parallel.blocks(nn.Linear(2, 2)) == parallel.blocks(nn.ModuleList([None])) == []
    assert len(parallel.blocks(nn.Sequential(weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2)))) == 2


def test_recompute_for_a_model_without_blocks_is_refused_and_an_arch_may_define_its_own():
    assert "get_blocks" in usage_error(parallel.wrap, nn.Linear(2, 2), RECOMPUTE, World())
    net = BlocksNet()
    before = {module: module.forward for module in net.modules()}
    arch = types.SimpleNamespace(get_blocks=lambda model: [model.inner, model.head])
    parallel.wrap(net, RECOMPUTE, World(), arch=arch)
    assert [module for module in net.modules() if module.forward != before[module]] == [net.inner, net.head]
