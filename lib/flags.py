"""The shared flags: their names, groups, defaults and the values they take."""

import argparse
import ast
import importlib
import keyword
import math
import re
import sys
from pathlib import Path

WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
GPU = re.compile(r"[0-9]{1,4}|[A-Za-z][A-Za-z0-9/-]*")
OPTION = re.compile(r"[a-z][a-z-]*(=[^\x00-\x1f\x7f]+)?")
SUFFIX = re.compile(r"[A-Za-z0-9-]*")
EVERY = re.compile(r"([0-9]{1,18})(epochs?|steps?|min|)")


def add_shared(parser):
    """The flags every run knows, by group."""
    run = parser.add_argument_group("run")
    run.add_argument("-h", "-help", action="help", help="show this help, with the chosen plugins' own flags")
    run.add_argument("-list", action=Listing, help="show all plugins, and what each says of itself")
    run.add_argument("-data", type=text, default="data", metavar="DIR", help="folder of the data sets")
    run.add_argument("-out", type=text, default="out", metavar="DIR", help="folder of all runs")
    run.add_argument(
        "-model", type=run_name, metavar="NAME", help="name of the run: it lives in out/NAME (DATASET_ARCH)"
    )
    run.add_argument("-cfg", type=text, metavar="FILE", help="YAML file of flags; the command line wins over it")
    _switch(run, "-reset", "start anew: an old run of this name is moved to out/.old")
    _switch(run, "-tb", "serve TensorBoard on 127.0.0.1 while the run lasts")
    run.add_argument("-seed", type=whole(0), default=0, metavar="N", help="the seed of all randomness")

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "-gpus", type=gpu_list, metavar="LIST", help="GPUs to use, as 0,1,2 or UUIDs (all visible ones)"
    )
    machine.add_argument("-cpu", type=whole(1), metavar="N", help="train with N processes on the CPU")
    machine.add_argument("-workers", type=whole(0), metavar="N", help="loader processes for each process (0 for data "
                         "in memory and on the CPU, else its share of the cores)")  # fmt: skip
    _switch(machine, "-fp16", "mixed precision with float16 and a gradient scaler")
    _switch(machine, "-bf16", "mixed precision with bfloat16")
    machine.add_argument("-parallel", choices=("ddp", "fsdp"), default="ddp",
                         help="every process has the whole model, or a shard of it")  # fmt: skip
    machine.add_argument("-fsdp_replicas", type=whole(1), default=1, metavar="N",
                         help="fsdp: copies of the sharded model, as one on each node")  # fmt: skip
    _switch(machine, "-offload", "fsdp: parameters and optimizer in the CPU's memory, where the optimizer runs, too")
    _switch(machine, "-recompute", "keep no activations of a block, compute them again in the backward pass")
    machine.add_argument("-compile", nargs="?", const="blocks", choices=("blocks", "model"),
                         help="torch.compile, block by block (or the whole model at once)")  # fmt: skip
    _switch(machine, "-find_unused", "ddp: look in each step for parameters that took no part in it")
    _switch(machine, "-deterministic", "the same bits every time on a GPU, too, at some cost of speed")
    _switch(machine, "-sync_bn", "BatchNorm over the micro-batches of all processes (not on the CPU)")

    data = parser.add_argument_group("data")
    data.add_argument("-dataset", type=plugin_name, default="digits", metavar="NAME", help="lib/dataset/NAME.py")
    data.add_argument(
        "-batch_size", type=whole(1), default=64, metavar="N", help="samples a step, over all processes"
    )
    data.add_argument(
        "-batch_per_gpu", type=whole(1), metavar="N", help="-batch_size as N x processes at the first start"
    )
    data.add_argument("-micro_batch", type=whole(1), metavar="N", help="samples a pass (one process's share)")
    _switch(data, "-shuffle", "a new order of the training samples every epoch", default=True)
    _switch(data, "-augment", "change training images at random, where the data set does so", default=True)
    _switch(data, "-drop_last", "leave out an epoch's short last batch")
    data.add_argument("-num_classes", type=whole(1), default=10, metavar="N", help="outputs of the model")
    data.add_argument("-channels", type=whole(1), default=1, metavar="N", help="image channels")
    data.add_argument("-image_size", type=whole(1), default=8, metavar="N", help="image height and width in pixels")

    training = parser.add_argument_group("training")
    training.add_argument("-arch", type=plugin_name, default="convnet", metavar="NAME", help="lib/arch/NAME.py")
    training.add_argument("-trainer", type=plugin_name, default="trainer", metavar="NAME", help="lib/trainer/NAME.py")
    training.add_argument("-epochs", type=whole(1), default=10, metavar="N", help="passes over the training samples")
    training.add_argument("-loss", choices=table("loss"), default="cross_entropy", help="lib/core/loss.py")
    training.add_argument(
        "-label_smoothing", type=real(0, 1), default=0.0, metavar="X", help="of cross_entropy, 0 to 1"
    )
    training.add_argument("-log_every", type=whole(1), default=50, metavar="N", help="steps between log lines")
    training.add_argument("-log_histograms", type=whole(1), metavar="N",
                          help="every N steps, show TensorBoard how weights and gradients are spread")  # fmt: skip
    training.add_argument("-max_bad_steps", type=whole(1), default=10, metavar="N",
                          help="stop after N steps in a row without a finite gradient; they are skipped")  # fmt: skip

    optim = parser.add_argument_group("optimization")
    optim.add_argument("-optimizer", choices=table("optimizer"), default="adamw", help="lib/core/optimizer.py")
    optim.add_argument(
        "-lr_start", type=real(0, above=True), default=1e-3, metavar="X", help="learning rate at its height"
    )
    optim.add_argument(
        "-lr_end", type=real(-math.inf), default=1e-6, metavar="X", help="learning rate after the last step"
    )
    optim.add_argument(
        "-lr_warmup", type=real(0), default=0.0, metavar="X", help="epochs of linear rise, fractions too"
    )
    optim.add_argument("-scale_lr", choices=("none", "linear", "sqrt"), default="none",
                       help="scale the learning rate by -batch_size over -lr_batch")  # fmt: skip
    optim.add_argument("-lr_batch", type=whole(1), default=256, metavar="N", help="the batch -lr_start is meant for")
    optim.add_argument("-weight_decay", type=real(0), default=0.01, metavar="X", help="not on biases and norms")
    optim.add_argument("-momentum", type=real(0, 1), default=0.9, metavar="X", help="of sgd")
    optim.add_argument(
        "-clip_grad", type=real(0), default=0.0, metavar="X", help="largest gradient norm; 0: no limit"
    )

    saving = parser.add_argument_group("saving and stopping")
    saving.add_argument("-save_every", type=every, default="1epoch", metavar="N[epochs|steps|min]",
                        help="how often to save; a bare number counts epochs")  # fmt: skip
    saving.add_argument("-keep_last", type=whole(1), default=2, metavar="N", help="checkpoints to keep")
    saving.add_argument(
        "-keep_every", type=whole(0), default=0, metavar="N", help="keep every Nth epoch's for good; 0: none"
    )
    saving.add_argument(
        "-best", type=text, metavar="METRIC", help="keep the best weights by this val metric (accuracy, else loss)"
    )
    _switch(saving, "-save_strict", "a save that fails ends the run")
    saving.add_argument("-resume", type=text, metavar="PATH", help="go on from another run's folder or checkpoint")
    saving.add_argument(
        "-weights", type=text, metavar="FILE", help="start from these weights: safetensors or a torch file"
    )
    saving.add_argument(
        "-allow_change",
        type=text,
        action="append",
        default=[],
        metavar="FLAG",
        help="let this flag differ from the checkpoint; nan: take weights that are not finite",
    )
    saving.add_argument(
        "-max_hours", type=real(0, above=True), metavar="X", help="stop, with the state saved, after X hours"
    )
    saving.add_argument("-grace_s", type=real(0, above=True), default=60.0, metavar="X",
                        help="seconds a stop may take before the process ends all the same")  # fmt: skip

    saving.add_argument("-limit_steps", type=whole(1), metavar="N",
                        help="stop, with the state saved, once N optimizer steps are done")  # fmt: skip
    _switch(saving, "-check_resume", "kill and resume this run a few times, -limit_steps or 20 long, and compare")
    saving.add_argument("-hang_minutes", type=real(0, above=True), default=10.0, metavar="X",
                        help="fail when other processes or machines do not answer for X minutes")  # fmt: skip

    several = parser.add_argument_group("several machines")
    several.add_argument("-nnodes", type=whole(1), default=1, metavar="N",
                         help="machines, each started with this same command and its -node_rank")  # fmt: skip
    several.add_argument("-node_rank", type=whole(0), metavar="N", help="which of them this one is, from 0")
    several.add_argument("-master_addr", type=text, metavar="HOST", help="where the others reach -node_rank 0")
    several.add_argument("-master_port", type=port, default=29500, metavar="N", help="a free port there")
    several.add_argument("-master_suffix", type=suffix, metavar="TEXT",
                         help="put behind the head's name, for its fast network (i on JUWELS and such)")  # fmt: skip
    several.add_argument("-cache_dir", type=text, metavar="DIR",
                         help="for the caches of torch and others (in $SCRATCH, if set)")  # fmt: skip
    _switch(several, "-debug_dist", "have torch, torchrun and NCCL tell all they do between processes")

    slurm = parser.add_argument_group("slurm")
    _switch(slurm, "-slurm", "submit to Slurm instead of running here; -cpu N: N tasks a node and no GPUs")
    slurm.add_argument("-slurm_nnodes", type=whole(1), default=1, metavar="N", help="nodes")
    slurm.add_argument("-slurm_ngpus", type=whole(1), default=1, metavar="N", help="GPUs, and so processes, a node")
    slurm.add_argument("-slurm_nodelist", type=text, metavar="NAMES", help="these nodes, as GPU17,GPU18")
    slurm.add_argument("-slurm_exclude", type=text, metavar="NAMES", help="not these nodes")
    slurm.add_argument("-slurm_partition", type=text, metavar="NAME", help="partition")
    slurm.add_argument("-slurm_account", type=text, metavar="NAME", help="account to charge")
    slurm.add_argument("-slurm_qos", type=text, metavar="NAME", help="quality of service")
    slurm.add_argument("-slurm_constraint", type=text, metavar="WORDS", help="features that the nodes must have")
    slurm.add_argument("-slurm_timeout", type=whole(1), default=2800, metavar="N", help="time limit in minutes")
    slurm.add_argument("-slurm_mem_gb", type=real(0, above=True), metavar="X", help="memory of a node in GB")
    slurm.add_argument("-slurm_cpus", type=whole(1), metavar="N", help="CPUs of a task (-workers, or 8, and 2)")
    slurm.add_argument("-slurm_setup", type=text, action="append", default=[], metavar="LINE",
                       help="a line of shell to begin the job with, as 'module load CUDA'; repeatable")  # fmt: skip
    slurm.add_argument("-slurm_arg", type=key_value, action="append", default=[], metavar="KEY=VALUE",
                       help="any other option of sbatch, as reservation=school; repeatable")  # fmt: skip
    slurm.add_argument("-slurm_requeues", type=whole(0), default=20, metavar="N",
                       help="requeues after time limits and crashes, as long as the run gets on")  # fmt: skip
    slurm.add_argument("-slurm_signal_s", type=whole(1), default=120, metavar="N",
                       help="seconds of warning before the time limit")  # fmt: skip
    slurm.add_argument(
        "-slurm_dir", type=text, metavar="DIR", help="the job's files, on a shared disk (OUT/NAME/slurm)"
    )
    _switch(slurm, "-slurm_follow", "stay, and show the job's log; Ctrl-C leaves the job running")
    _switch(slurm, "-slurm_dry", "show what would be submitted, and what sbatch --test-only says to it")
    _switch(slurm, "-slurm_live", "let the job run the code as it is when it starts, not a snapshot of it")


def table(kind: str) -> tuple:
    """The names that lib/core/KIND.py knows."""
    return tuple(importlib.import_module(f"lib.core.{kind}").BY_NAME)


def whole(low: int):
    """A reader of whole numbers of at least `low`."""

    def read(text):
        if not WHOLE.fullmatch(text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low} (18 digits at most)")
        return int(text)

    return read


def real(low: float, high: float = math.inf, above: bool = False):
    """A reader of finite numbers from `low` (or above it) to `high`."""

    def read(text):
        value = float(text) if REAL.fullmatch(text) else math.nan
        if not (low <= value <= high) or math.isinf(value) or (above and value == low):
            bottom = f" {'above' if above else 'from'} {low}" if low > -math.inf else ""
            top = f" up to {high}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number{bottom}{top}")
        return value

    return read


def integer(text: str) -> int:
    """A whole number in digits: int() would take 1_0 and digits of other scripts."""
    if not WHOLE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def number(text: str) -> float:
    """A number in digits, or inf or nan."""
    if not REAL.fullmatch(text) and text.lower().lstrip("+-") not in ("inf", "nan"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)


def every(text: str) -> str:
    """A checked interval: 5 or 5epochs, 500steps, 10min."""
    match = EVERY.fullmatch(text)
    if not match or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an interval like 5epochs, 500steps or 10min")
    return text


def run_name(text: str) -> str:
    """A checked folder name for a run."""
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of letters, digits, dots, dashes and underscores")
    return text


def plugin_name(text: str) -> str:
    """A checked plugin name: an identifier, never a path."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a plugin's name: a file's name without .py is wanted")
    return text


def text(value: str) -> str:
    """Text that is not empty and fits on a line."""
    if not value or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise argparse.ArgumentTypeError(f"{value!r} is empty or holds control characters")
    return value


def port(text: str) -> int:
    """A number of a TCP port."""
    value = whole(1)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 65535 is the last")
    return value


def suffix(text: str) -> str:
    """The end of a host name's first part; empty for none."""
    if not SUFFIX.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the end of a host name: letters, digits, dashes")
    return text


def key_value(value: str) -> str:
    """An option of sbatch without its dashes, with =VALUE if it takes one."""
    if not OPTION.fullmatch(value):
        raise argparse.ArgumentTypeError(f"{value!r} is not an option of sbatch like reservation=school or exclusive")
    return value


def gpu_list(text: str) -> str:
    """GPUs by index or UUID, each once."""
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or not all(GPU.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPUs like 0,1,2 or GPU-8932f937, each once")
    return ",".join(names)


def yes_no(text: str) -> bool:
    """True or False of yes, no, true, false, 1, 0."""
    if text.lower() not in ("yes", "true", "1", "no", "false", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text.lower() in ("yes", "true", "1")


class Switch(argparse.Action):
    """A flag that stands alone for yes, or has yes or no behind it."""

    def __init__(self, option_strings, dest, default=False, required=False, help=None):
        super().__init__(option_strings, dest, nargs="?", const=True, default=default, type=yes_no, required=required,
                         help=help, metavar="yes|no")  # fmt: skip

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values)


class Listing(argparse.Action):
    """A flag that shows the plugins, each with the first line of its docstring, and ends, as -h does."""

    def __init__(self, option_strings, dest, help=None):
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser, namespace, values, option_string=None):
        for kind in ("arch", "dataset", "trainer"):
            files = sorted((Path(__file__).parent / kind).glob("[!_]*.py"))
            told = {file.stem: ast.get_docstring(ast.parse(file.read_text())) or "" for file in files}
            rows = (f"  {name:20} {text.partition(chr(10))[0]}\n" for name, text in told.items())
            parser._print_message(f"-{kind} NAME\n{''.join(rows)}", sys.stdout)
        parser.exit()


def _switch(group, name, text, default=False):
    group.add_argument(name, action=Switch, default=default, help=text)
