"""The shared flags: their names, groups and defaults."""

import importlib
import math

from lib.config.parser import Listing, Switch
from lib.config.types import (
    email,
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


def add_shared(parser):
    """The flags every run knows, by group."""
    _run(parser.add_argument_group("run"))
    _machine(parser.add_argument_group("machine"))
    _data(parser.add_argument_group("data"))
    _training(parser.add_argument_group("training"))
    _finding_out(parser.add_argument_group("finding out why"))
    _optimization(parser.add_argument_group("optimization"))
    _saving(parser.add_argument_group("saving and stopping"))
    _several_machines(parser.add_argument_group("several machines"))
    _slurm(parser.add_argument_group("slurm"))


def _run(group):
    group.add_argument("-h", "-help", action="help", help="show this help, with the chosen plugins' own flags")
    group.add_argument("-list", action=Listing, help="show all plugins, and what each says of itself")
    group.add_argument("-data", type=text, default="data", metavar="DIR", help="folder of the data sets")
    group.add_argument("-out", type=text, default="out", metavar="DIR", help="folder of all runs")
    group.add_argument(
        "-model", type=run_name, metavar="NAME", help="name of the run: it lives in out/NAME (DATASET_ARCH)"
    )
    group.add_argument("-cfg", type=text, metavar="FILE", help="YAML file of flags; the command line wins over it")
    _switch(group, "-reset", "start anew: an old run of this name is moved to out/.old")
    _switch(group, "-tb", "serve TensorBoard on 127.0.0.1 while the run lasts")
    _switch(group, "-ngrok", "open a tunnel to it for others, locked by a password (NGROK_PASSWORD, or made up)")
    group.add_argument("-ngrok_auth", type=run_name, default="baton", metavar="USER", help="the user it asks for")
    group.add_argument("-ngrok_oauth", choices=("google", "github", "gitlab", "linkedin", "microsoft", "twitch"),
                       help="let it ask for a sign-in there instead, by those of -ngrok_allow")  # fmt: skip
    group.add_argument("-ngrok_allow", type=email, action="append", default=[], metavar="EMAIL",
                       help="an address that may sign in; repeatable")  # fmt: skip
    group.add_argument("-seed", type=whole(0), default=0, metavar="N", help="the seed of all randomness")


def _machine(group):
    group.add_argument(
        "-gpus", type=gpu_list, metavar="LIST", help="GPUs to use, as 0,1,2 or UUIDs (all visible ones)"
    )
    group.add_argument("-cpu", type=whole(1), metavar="N", help="train with N processes on the CPU")
    group.add_argument("-workers", type=whole(0), metavar="N", help="loader processes for each process (0 for data "
                       "in memory and on the CPU, else its share of the cores)")  # fmt: skip
    _switch(group, "-fp16", "mixed precision with float16 and a gradient scaler")
    _switch(group, "-bf16", "mixed precision with bfloat16")
    group.add_argument("-parallel", choices=("ddp", "fsdp"), default="ddp",
                       help="every process has the whole model, or a shard of it")  # fmt: skip
    group.add_argument("-fsdp_replicas", type=whole(1), default=1, metavar="N",
                       help="fsdp: copies of the sharded model, as one on each node")  # fmt: skip
    _switch(group, "-offload", "fsdp: parameters and optimizer in the CPU's memory, where the optimizer runs, too")
    _switch(group, "-recompute", "keep no activations of a block, compute them again in the backward pass")
    group.add_argument("-compile", nargs="?", const="blocks", choices=("blocks", "model"),
                       help="torch.compile, block by block (or the whole model at once)")  # fmt: skip
    _switch(group, "-find_unused", "ddp: look in each step for parameters that took no part in it")
    _switch(group, "-deterministic", "the same bits every time on a GPU, too, at some cost of speed")
    _switch(group, "-sync_bn", "BatchNorm over the micro-batches of all processes (not on the CPU)")


def _data(group):
    group.add_argument("-dataset", type=plugin_name, default="digits", metavar="NAME", help="lib/dataset/NAME.py")
    group.add_argument(
        "-batch_size", type=whole(1), default=64, metavar="N", help="samples a step, over all processes"
    )
    group.add_argument(
        "-batch_per_gpu", type=whole(1), metavar="N", help="-batch_size as N x processes at the first start"
    )
    group.add_argument("-micro_batch", type=whole(1), metavar="N", help="most samples a pass (one process's share)")
    _switch(group, "-shuffle", "a new order of the training samples every epoch", default=True)
    _switch(group, "-augment", "change training images at random, where the data set does so", default=True)
    _switch(group, "-drop_last", "leave out an epoch's short last batch")
    group.add_argument("-num_classes", type=whole(1), default=10, metavar="N", help="outputs of the model")
    group.add_argument("-channels", type=whole(1), default=1, metavar="N", help="image channels")
    group.add_argument("-image_size", type=whole(1), default=8, metavar="N", help="image height and width in pixels")


def _training(group):
    group.add_argument("-arch", type=plugin_name, default="convnet", metavar="NAME", help="lib/arch/NAME.py")
    group.add_argument("-trainer", type=plugin_name, default="trainer", metavar="NAME", help="lib/trainer/NAME.py")
    group.add_argument("-epochs", type=whole(1), default=10, metavar="N", help="passes over the training samples")
    group.add_argument("-loss", choices=table("loss"), default="cross_entropy", help="lib/core/loss.py")
    group.add_argument("-label_smoothing", type=real(0, 1), default=0.0, metavar="X", help="of cross_entropy, 0 to 1")
    group.add_argument("-log_every", type=whole(1), default=50, metavar="N", help="steps between log lines")
    group.add_argument("-log_histograms", type=whole(1), metavar="N",
                       help="every N steps, show TensorBoard how weights and gradients are spread")  # fmt: skip
    group.add_argument("-max_bad_steps", type=whole(1), default=10, metavar="N",
                       help="stop after N skipped steps in a row: a gradient or buffer was not finite")  # fmt: skip


def _finding_out(group):
    _switch(
        group, "-dry", "build all, train one step, evaluate one batch; tell shapes, parameters, memory; write nothing"
    )
    _switch(
        group, "-debug", "a few steps (-limit_steps, 10) in one process that name the first bad tensor; write nothing"
    )
    _switch(group, "-eval", "only evaluate the best weights, or those of -weights, into out/NAME/eval.json")
    group.add_argument("-overfit", type=whole(1), metavar="N", help="train and evaluate on the same N samples")
    group.add_argument("-profile", type=whole(1), metavar="N", help="record N steps with torch's profiler")


def _optimization(group):
    group.add_argument("-optimizer", choices=table("optimizer"), default="adamw", help="lib/core/optimizer.py")
    group.add_argument(
        "-lr_start", type=real(0, above=True), default=1e-3, metavar="X", help="learning rate at its height"
    )
    group.add_argument(
        "-lr_end", type=real(-math.inf), default=1e-6, metavar="X", help="learning rate after the last step"
    )
    group.add_argument(
        "-lr_warmup", type=real(0), default=0.0, metavar="X", help="epochs of linear rise, fractions too"
    )
    group.add_argument("-scale_lr", choices=("none", "linear", "sqrt"), default="none",
                       help="scale the learning rate by -batch_size over -lr_batch")  # fmt: skip
    group.add_argument("-lr_batch", type=whole(1), default=256, metavar="N", help="the batch -lr_start is meant for")
    group.add_argument("-weight_decay", type=real(0), default=0.01, metavar="X", help="not on biases and norms")
    group.add_argument("-momentum", type=real(0, 1, below=True), default=0.9, metavar="X", help="of sgd")
    group.add_argument(
        "-clip_grad", type=real(0), default=0.0, metavar="X", help="largest gradient norm; 0: no limit"
    )


def _saving(group):
    group.add_argument("-save_every", type=every, default="1epoch", metavar="N[epochs|steps|min]",
                       help="how often to save; a bare number counts epochs")  # fmt: skip
    group.add_argument("-keep_last", type=whole(1), default=2, metavar="N", help="checkpoints to keep")
    group.add_argument(
        "-keep_every", type=whole(0), default=0, metavar="N", help="keep every Nth epoch's for good; 0: none"
    )
    group.add_argument(
        "-best",
        type=metric,
        metavar="METRIC",
        help="keep the best weights by this val metric, as f1 or mae:min (accuracy, else loss)",
    )
    _switch(group, "-save_strict", "a save that fails ends the run")
    group.add_argument("-resume", type=text, metavar="PATH", help="go on from another run's folder or checkpoint")
    group.add_argument(
        "-weights", type=text, metavar="FILE", help="start from these weights: safetensors or a torch file"
    )
    group.add_argument(
        "-allow_change",
        type=text,
        action="append",
        default=[],
        metavar="FLAG",
        help="let this flag differ from the checkpoint; nan: take weights that are not finite",
    )
    group.add_argument(
        "-max_hours", type=real(0, above=True), metavar="X", help="stop, with the state saved, after X hours"
    )
    group.add_argument("-grace_s", type=real(0, 10**6, above=True), default=60.0, metavar="X",
                       help="seconds a stop may take before the process ends all the same")  # fmt: skip
    group.add_argument("-limit_steps", type=whole(1), metavar="N",
                       help="stop, with the state saved, once N optimizer steps are done")  # fmt: skip
    _switch(group, "-check_resume", "kill and resume this run a few times, -limit_steps or 20 long, and compare")
    group.add_argument("-hang_minutes", type=real(0, 10**6, above=True), default=10.0, metavar="X",
                       help="fail when a step or an answer of another process takes X minutes")  # fmt: skip


def _several_machines(group):
    group.add_argument("-nnodes", type=whole(1), default=1, metavar="N",
                       help="machines, each started with this same command and its -node_rank")  # fmt: skip
    group.add_argument("-node_rank", type=whole(0), metavar="N", help="which of them this one is, from 0")
    group.add_argument("-master_addr", type=text, metavar="HOST", help="where the others reach -node_rank 0")
    group.add_argument("-master_port", type=port, default=29500, metavar="N", help="a free port there")
    group.add_argument("-master_suffix", type=suffix, metavar="TEXT",
                       help="put behind the head's name, for its fast network (i on JUWELS and such)")  # fmt: skip
    group.add_argument("-cache_dir", type=text, metavar="DIR",
                       help="for the caches of torch and others (in $SCRATCH, if set)")  # fmt: skip
    _switch(group, "-debug_dist", "have torch, torchrun and NCCL tell all they do between processes")


def _slurm(group):
    _switch(group, "-slurm", "submit to Slurm instead of running here; -cpu N: N tasks a node and no GPUs")
    group.add_argument("-slurm_nnodes", type=whole(1), default=1, metavar="N", help="nodes")
    group.add_argument("-slurm_ngpus", type=whole(1), default=1, metavar="N", help="GPUs, and so processes, a node")
    group.add_argument("-slurm_nodelist", type=text, metavar="NAMES", help="these nodes, as GPU17,GPU18")
    group.add_argument("-slurm_exclude", type=text, metavar="NAMES", help="not these nodes")
    group.add_argument("-slurm_partition", type=text, metavar="NAME", help="partition")
    group.add_argument("-slurm_account", type=text, metavar="NAME", help="account to charge")
    group.add_argument("-slurm_qos", type=text, metavar="NAME", help="quality of service")
    group.add_argument("-slurm_constraint", type=text, metavar="WORDS", help="features that the nodes must have")
    group.add_argument("-slurm_timeout", type=whole(1), metavar="N", help="time limit in minutes (the partition's)")
    group.add_argument("-slurm_mem_gb", type=real(0, above=True), metavar="X", help="memory of a node in GB")
    group.add_argument("-slurm_cpus", type=whole(1), metavar="N", help="CPUs of a task (-workers, or 8, and 2)")
    group.add_argument("-slurm_setup", type=text, action="append", default=[], metavar="LINE",
                       help="a line of shell to begin the job with, as 'module load CUDA'; repeatable")  # fmt: skip
    group.add_argument("-slurm_arg", type=key_value, action="append", default=[], metavar="KEY=VALUE",
                       help="any other option of sbatch, as reservation=school; repeatable")  # fmt: skip
    group.add_argument("-slurm_requeues", type=whole(0), default=20, metavar="N",
                       help="requeues after time limits and crashes, as long as the run gets on")  # fmt: skip
    group.add_argument("-slurm_signal_s", type=whole(1), default=120, metavar="N",
                       help="seconds of warning before the time limit")  # fmt: skip
    group.add_argument(
        "-slurm_dir", type=text, metavar="DIR", help="the job's files, on a shared disk (OUT/NAME/slurm)"
    )
    _switch(group, "-slurm_follow", "stay, and show the job's log; Ctrl-C leaves the job running")
    _switch(group, "-slurm_dry", "show what would be submitted, and what sbatch --test-only says to it")
    _switch(group, "-slurm_live", "let the job run the code as it is when it starts, not a snapshot of it")


def table(kind: str) -> tuple:
    """The names that lib/core/KIND.py knows."""
    return tuple(importlib.import_module(f"lib.core.{kind}").BY_NAME)


def _switch(group, name, text, default=False):
    group.add_argument(name, action=Switch, default=default, help=text)
