"""The shared flags: their names, groups and defaults, and what a resume makes of a change."""

import argparse
import functools
import importlib
import math
from dataclasses import dataclass

from lib.config.parser import Listing, Switch
from lib.config.types import (
    every,
    gpu_list,
    key_value,
    metric,
    plugin_name,
    port,
    real,
    run_name,
    suffix,
    text,
    whole,
)


@dataclass(frozen=True)
class Rules:
    """The marks of the shared flags, by their names."""

    forgotten: frozenset[str]  # said of one start alone
    free: frozenset[str]  # of no consequence for the result; the forgotten ones, too
    per_node: frozenset[str]  # may differ between the machines of a run


def add_shared(parser):
    """The flags every run knows, by group.

    A mark says what a start of an old run makes of another value: "refuse" it, as the result depends on the flag;
    "allow" it; or "forget" the flag, which is said of one start alone and stands in no config.yaml. The mark is that
    of the flag's group, unless the flag has its own. `per_node`: it may also differ between the machines of a run.
    """
    _run(_group(parser, "run", "allow"))
    _machine(_group(parser, "machine", "allow"))
    _data(_group(parser, "data", "refuse"))
    _training(_group(parser, "training", "refuse"))
    _finding_out(_group(parser, "finding out why", "forget"))
    _optimization(_group(parser, "optimization", "refuse"))
    _saving(_group(parser, "saving and stopping", "allow"))
    _several_machines(_group(parser, "several machines", "allow"))
    _slurm(_group(parser, "slurm", "allow"))


def _run(add):
    add("-h", "show this help, with the chosen plugins' own flags", action="help")
    add("-list", "list all plugins, with the first line of each one's docstring", action=Listing)
    add("-data", "folder of the data sets", "DIR", type=text, default="data", per_node=True)
    add("-out", "folder of all runs", "DIR", type=text, default="out", per_node=True)
    add("-model", "name of the run: it lives in out/NAME (DATASET_ARCH)", "NAME", type=run_name)
    add(
        "-cfg",
        "YAML file of flags; the command line wins over it",
        "FILE",
        type=text,
        on_resume="forget",
        per_node=True,
    )
    _switch(add, "-reset", "start from scratch; the old run of this name is moved to out/.old", on_resume="forget")
    _switch(add, "-tb", "serve TensorBoard on 127.0.0.1 while the run lasts", per_node=True)
    _switch(add, "-ngrok", "open a tunnel to it for others, who need the password in NGROK_PASSWORD")
    add("-ngrok_auth", "user name that goes with the password", "USER", type=run_name, default="baton")
    add("-seed", "the seed of all randomness", "N", type=whole(0), default=0, on_resume="refuse")


def _machine(add):
    add("-gpus", "GPUs to use, as 0,1,2 or UUIDs (all visible ones)", "LIST", type=gpu_list, per_node=True)
    add("-cpu", "train with N processes on the CPU", "N", type=whole(1), per_node=True)
    add(
        "-workers",
        "loader processes for each process (0 for data in memory and on the CPU, else its share of the cores)",
        "N",
        type=whole(0),
        per_node=True,
    )
    _switch(add, "-fp16", "mixed precision with float16 and a gradient scaler", on_resume="refuse")
    _switch(add, "-bf16", "mixed precision with bfloat16", on_resume="refuse")
    add("-parallel", "every process has the whole model, or a shard of it", choices=("ddp", "fsdp"), default="ddp")
    add("-fsdp_replicas", "fsdp: copies of the sharded model, as one on each node", "N", type=whole(1), default=1)
    _switch(add, "-offload", "fsdp: parameters and optimizer in the CPU's memory, where the optimizer runs, too")
    _switch(add, "-recompute", "keep no activations of a block, compute them again in the backward pass")
    add(
        "-compile",
        "torch.compile, block by block (or the whole model at once)",
        nargs="?",
        const="blocks",
        choices=("blocks", "model"),
    )
    _switch(add, "-find_unused", "ddp: allow parameters that take no part in a step, and search for them")
    _switch(add, "-deterministic", "use deterministic algorithms on a GPU, too, at some cost of speed")
    _switch(add, "-sync_bn", "BatchNorm over the micro-batches of all processes (not on the CPU)", on_resume="refuse")


def _data(add):
    add("-dataset", "lib/dataset/NAME.py", "NAME", type=plugin_name, default="digits")
    add("-batch_size", "samples a step, over all processes", "N", type=whole(1), default=64)
    add(
        "-batch_per_gpu",
        "samples a step for each process, instead of -batch_size",
        "N",
        type=whole(1),
        on_resume="forget",
    )
    add("-micro_batch", "most samples in a forward and backward pass (one process's share)", "N", type=whole(1))
    _switch(add, "-shuffle", "a new order of the training samples every epoch", default=True)
    _switch(add, "-augment", "change training images at random, where the data set does so", default=True)
    _switch(add, "-drop_last", "leave out an epoch's short last batch")
    add("-num_classes", "outputs of the model", "N", type=whole(1), default=10)
    add("-channels", "image channels", "N", type=whole(1), default=1)
    add("-image_size", "image height and width in pixels", "N", type=whole(1), default=8)


def _training(add):
    add("-arch", "lib/arch/NAME.py", "NAME", type=plugin_name, default="convnet")
    add("-trainer", "lib/trainer/NAME.py", "NAME", type=plugin_name, default="trainer")
    add("-epochs", "passes over the training samples", "N", type=whole(1), default=10)
    add("-loss", "loss function, of lib/core/loss.py", choices=table("loss"), default="cross_entropy")
    add("-label_smoothing", "label smoothing of cross_entropy, 0 to 1", "X", type=real(0, 1), default=0.0)
    add("-log_every", "steps between log lines", "N", type=whole(1), default=50, on_resume="allow")
    add(
        "-log_histograms",
        "every N steps, write histograms of weights and gradients to TensorBoard",
        "N",
        type=whole(1),
        on_resume="allow",
    )
    add(
        "-max_bad_steps",
        "stop after N skipped steps in a row: a gradient or buffer was not finite",
        "N",
        type=whole(1),
        default=10,
        on_resume="allow",
    )


def _finding_out(add):
    _switch(
        add, "-dry", "build all, train one step, evaluate one batch; show shapes, parameters, memory; write nothing"
    )
    _switch(add, "-debug", "train -limit_steps (10) in one process and name the first bad tensor; write nothing")
    _switch(add, "-eval", "only evaluate the best weights, or those of -weights, into out/NAME/eval.json")
    add("-overfit", "train and evaluate on the same N samples", "N", type=whole(1), on_resume="refuse")
    add("-profile", "record N steps with torch's profiler", "N", type=whole(1))


def _optimization(add):
    add("-optimizer", "optimizer, of lib/core/optimizer.py", choices=table("optimizer"), default="adamw")
    add("-lr_start", "peak learning rate", "X", type=real(0, above=True), default=0.001)
    add("-lr_end", "learning rate after the last step", "X", type=real(-math.inf), default=1e-06)
    add("-lr_warmup", "epochs of linear warm-up; fractions are allowed", "X", type=real(0), default=0.0)
    add(
        "-scale_lr",
        "scale the learning rate by -batch_size over -lr_batch",
        choices=("none", "linear", "sqrt"),
        default="none",
    )
    add("-lr_batch", "the batch -lr_start is meant for", "N", type=whole(1), default=256)
    add("-weight_decay", "weight decay, not applied to biases and norms", "X", type=real(0), default=0.01)
    add("-momentum", "momentum of sgd", "X", type=real(0, 1, below=True), default=0.9)
    add("-clip_grad", "clip the gradient's norm at X; 0: do not clip", "X", type=real(0), default=0.0)


def _saving(add):
    add(
        "-save_every",
        "how often to save; a bare number counts epochs",
        "N[epochs|steps|min]",
        type=every,
        default="1epoch",
    )
    add("-keep_last", "checkpoints to keep", "N", type=whole(1), default=2)
    add("-keep_every", "keep every Nth epoch's for good; 0: none", "N", type=whole(0), default=0)
    add(
        "-best",
        "keep the best weights by this val metric, as f1 or mae:min (accuracy, else loss)",
        "METRIC",
        type=metric,
    )
    _switch(add, "-save_strict", "a save that fails ends the run")
    add("-resume", "go on from another run's folder or checkpoint", "PATH", type=text, on_resume="forget")
    add("-weights", "start from these weights: safetensors or a torch file", "FILE", type=text)
    add(
        "-allow_change",
        "let this flag differ from the checkpoint; nan: take weights that are not finite",
        "FLAG",
        type=text,
        action="append",
        default=[],
        on_resume="forget",
    )
    add("-max_hours", "stop, with the state saved, after X hours", "X", type=real(0, above=True))
    add(
        "-grace_s",
        "seconds a stop may take before the process ends all the same",
        "X",
        type=real(0, 10**6, above=True),
        default=60.0,
    )
    add(
        "-limit_steps",
        "stop, with the state saved, once N optimizer steps are done",
        "N",
        type=whole(1),
        on_resume="forget",
    )
    _switch(
        add,
        "-check_resume",
        "kill and resume this run a few times, -limit_steps or 20 long, and compare",
        on_resume="forget",
    )
    add(
        "-hang_minutes",
        "fail when a step or an answer of another process takes X minutes",
        "X",
        type=real(0, 10**6, above=True),
        default=10.0,
    )


def _several_machines(add):
    add(
        "-nnodes",
        "machines, each started with this same command and its -node_rank",
        "N",
        type=whole(1),
        default=1,
        on_resume="forget",
    )
    add("-node_rank", "which of them this one is, from 0", "N", type=whole(0), on_resume="forget", per_node=True)
    add("-master_addr", "where the others reach -node_rank 0", "HOST", type=text, on_resume="forget", per_node=True)
    add("-master_port", "a free port there", "N", type=port, default=29500, on_resume="forget")
    add(
        "-master_suffix",
        "put behind the head's name, for its fast network (i on JUWELS and such)",
        "TEXT",
        type=suffix,
        per_node=True,
    )
    add("-cache_dir", "for the caches of torch and others (in $SCRATCH, if set)", "DIR", type=text, per_node=True)
    _switch(add, "-debug_dist", "turn on verbose logging in torch.distributed, torchrun and NCCL")


def _slurm(add):
    _switch(add, "-slurm", "submit to Slurm instead of running here; -cpu N: N tasks a node and no GPUs")
    add("-slurm_nnodes", "nodes", "N", type=whole(1), default=1)
    add("-slurm_ngpus", "GPUs, and so processes, a node", "N", type=whole(1), default=1)
    add("-slurm_nodelist", "these nodes, as GPU17,GPU18", "NAMES", type=text)
    add("-slurm_exclude", "not these nodes", "NAMES", type=text)
    add("-slurm_partition", "partition", "NAME", type=text)
    add("-slurm_account", "account to charge", "NAME", type=text)
    add("-slurm_qos", "quality of service", "NAME", type=text)
    add("-slurm_constraint", "features that the nodes must have", "WORDS", type=text)
    add("-slurm_timeout", "time limit in minutes (the partition's)", "N", type=whole(1))
    add("-slurm_mem_gb", "memory of a node in GB", "X", type=real(0, above=True))
    add("-slurm_cpus", "CPUs of a task (2, plus -workers or 8)", "N", type=whole(1))
    add(
        "-slurm_setup",
        "a line of shell to begin the job with, as 'module load CUDA'; repeatable",
        "LINE",
        type=text,
        action="append",
        default=[],
    )
    add(
        "-slurm_arg",
        "any other option of sbatch, as reservation=school; repeatable",
        "KEY=VALUE",
        type=key_value,
        action="append",
        default=[],
    )
    add(
        "-slurm_requeues",
        "most requeues after time limits and crashes, as long as the run makes progress",
        "N",
        type=whole(0),
        default=20,
    )
    add("-slurm_signal_s", "seconds of warning before the time limit", "N", type=whole(1), default=120)
    add("-slurm_dir", "the job's files, on a shared disk (OUT/NAME/slurm)", "DIR", type=text)
    _switch(add, "-slurm_follow", "stay, and show the job's log; Ctrl-C leaves the job running")
    _switch(add, "-slurm_dry", "show what would be submitted, and the answer of sbatch --test-only")
    _switch(add, "-slurm_live", "let the job run the code as it is when it starts, not a snapshot of it")


def table(kind: str) -> tuple:
    """The names that lib/core/KIND.py knows."""
    return tuple(importlib.import_module(f"lib.core.{kind}").BY_NAME)


def _group(parser, title: str, mark: str):
    """A function that adds a flag to a group: its name, its help, argparse's options, its marks."""
    group = parser.add_argument_group(title)

    def add(name: str, help_text: str, metavar=None, *, on_resume: str = mark, per_node: bool = False, **options):
        names = ("-h", "-help") if name == "-h" else (name,)
        options = options if metavar is None else {**options, "metavar": metavar}
        action = group.add_argument(*names, help=help_text, **options)
        action.on_resume, action.per_node = on_resume, per_node

    return add


def _switch(add, name: str, help_text: str, default: bool = False, **marks):
    add(name, help_text, action=Switch, default=default, **marks)


@functools.cache
def rules() -> Rules:
    """The marks of the shared flags; a plugin's own flags are all refused."""
    parser = argparse.ArgumentParser(add_help=False)
    add_shared(parser)
    return Rules(
        forgotten=frozenset(flag.dest for flag in parser._actions if flag.on_resume == "forget"),
        free=frozenset(flag.dest for flag in parser._actions if flag.on_resume != "refuse"),
        per_node=frozenset(flag.dest for flag in parser._actions if flag.per_node),
    )
