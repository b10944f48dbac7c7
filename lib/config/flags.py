"""The shared flags: names, types, defaults, and whether a resumed run may change them."""

import argparse
import ast
import functools
import importlib
import math
from dataclasses import dataclass, field

from lib.config import plugins, types
from lib.config.parser import SWITCH, Listing
from lib.config.types import real, text, whole


def value(type_, metavar: str, **more) -> dict:
    """Return argparse's options for a flag with a value. The usual ones have names below."""
    return {"type": type_, "metavar": metavar, **more}


def one_of(*choices: str) -> dict:
    """Return argparse's options for a flag with a fixed set of values."""
    return {"choices": choices}


COUNT, COUNT_OR_0, PORT = value(whole(1), "N"), value(whole(0), "N"), value(whole(1, 65535), "N")
POSITIVE, NOT_NEGATIVE = value(real(0, above=True), "X"), value(real(0), "X")
PERIOD = value(real(0, 10**6, above=True), "X")  # of time
DIR, FILE, PATH, NAME = value(text, "DIR"), value(text, "FILE"), value(text, "PATH"), value(text, "NAME")
PLUGIN = value(types.plugin_name, "NAME")
REPEATABLE = {"action": "append", "default": []}


@dataclass
class Rules:
    """What a resumed run, and the other machines of a run, may have different: names of shared flags."""

    free: set[str] = field(default_factory=set)  # a resumed run may change them; the forgotten ones, too
    forgotten: set[str] = field(default_factory=set)  # hold for one start: config.yaml does not keep them
    per_node: set[str] = field(default_factory=set)  # may differ between the machines of a run


@functools.cache
def rules() -> Rules:
    """Return the rules of the shared flags. A plugin's own flags are in none of the sets."""
    return add_shared(argparse.ArgumentParser(add_help=False))


def add_shared(parser) -> Rules:
    """Add the flags that all runs share, by group.

    Each has a mark: what a resumed run does with another value. "refuse": it ends, as the result depends on the flag.
    "allow": it takes the new value. "forget": the flag holds for one start only. Without a mark, its group's counts.
    """
    rules = Rules()

    def group(title: str, mark: str):
        return functools.partial(_add, parser.add_argument_group(title), rules, mark)

    add = group("run", "allow")
    add("-h", {"action": "help"}, "show this help, with the chosen plugins' own flags")
    add("-list", {"action": Listing}, "list all plugins, with the first line of each one's docstring")
    add("-data", DIR, "folder of the data sets", "data", per_node=True)
    add("-out", DIR, "folder of all runs", "out", per_node=True)
    add("-model", value(types.run_name, "NAME"), "name of the run: it lives in out/NAME (DATASET_ARCH)")
    add("-cfg", FILE, "YAML file of flags; the command line wins over it", on_resume="forget", per_node=True)
    add("-reset", SWITCH, "start from scratch; move the old run of this name to out/.old", on_resume="forget")
    add("-tb", SWITCH, "serve TensorBoard on 127.0.0.1 while the run lasts", per_node=True)
    add("-ngrok", SWITCH, "open a tunnel to it for others, who need the password in NGROK_PASSWORD")
    add("-ngrok_auth", value(types.run_name, "USER"), "user name that goes with the password", "baton")
    add("-seed", COUNT_OR_0, "the seed of all randomness", 0, on_resume="refuse")

    add = group("machine", "allow")
    add("-gpus", value(types.gpu_list, "LIST"), "GPUs to use, as 0,1,2 or UUIDs (all visible ones)", per_node=True)
    add("-cpu", COUNT, "train with N processes on the CPU", per_node=True)
    add("-workers", COUNT_OR_0, "loader processes of each process (by the data and the cores)", per_node=True)
    add("-threads", COUNT, "threads of each process (by the work in a pass, and the cores)", on_resume="refuse")
    add("-fp16", SWITCH, "mixed precision with float16 and a gradient scaler", on_resume="refuse")
    add("-bf16", SWITCH, "mixed precision with bfloat16", on_resume="refuse")
    add("-parallel", one_of("ddp", "fsdp"), "every process has the whole model, or a shard of it", "ddp")
    add("-fsdp_replicas", COUNT, "fsdp: copies of the sharded model, as one on each node", 1)
    reduction = "sum gradients in one order for any number of processes, or leave it to the communication library"
    add("-reduction", one_of("tree", "allreduce"), reduction, "tree", on_resume="refuse")
    add("-offload", SWITCH, "fsdp: parameters and optimizer in the CPU's memory, where the optimizer runs, too")
    add("-recompute", SWITCH, "keep no activations of a block, compute them again in the backward pass")
    add("-compile", one_of("blocks", "model"), "torch.compile, by blocks or in one", nargs="?", const="blocks")
    add("-channels_last", SWITCH, "keep channels last in a GPU's memory: faster for convolutions; not under fsdp")
    add("-deterministic", SWITCH, "use deterministic algorithms on a GPU, too, at some cost of speed")
    add("-sync_bn", SWITCH, "BatchNorm over the micro-batches of all processes (GPU only)", on_resume="refuse")

    add = group("data", "refuse")
    add("-dataset", PLUGIN, "lib/dataset/NAME.py", "digits")
    add("-batch_size", COUNT, "samples a step, over all processes", 64)
    add("-batch_per_gpu", COUNT, "samples a step for each process, instead of -batch_size", on_resume="forget")
    add("-micro_batch", COUNT, "most samples in a forward and backward pass (one process's share)")
    add("-shuffle", SWITCH, "a new order of the training samples every epoch", True)
    add("-augment", SWITCH, "change training images at random, where the data set does so", True)
    add("-drop_last", SWITCH, "leave out an epoch's short last batch")
    add("-num_classes", COUNT, "outputs of the model", 10)
    add("-channels", COUNT, "image channels", 1)
    add("-image_size", COUNT, "image height and width in pixels", 8)

    add = group("training", "refuse")
    add("-arch", PLUGIN, "lib/arch/NAME.py", "convnet")
    add("-trainer", PLUGIN, "lib/trainer/NAME.py", "trainer")
    add("-epochs", COUNT, "passes over the training samples", 10)
    add("-loss", one_of(*table("loss")), "loss function, of lib/core/loss.py", "cross_entropy")
    add("-label_smoothing", value(real(0, 1), "X"), "label smoothing of cross_entropy, 0 to 1", 0.0)
    add("-log_every", COUNT, "steps between log lines", 50, on_resume="allow")
    add("-max_bad_steps", COUNT, "fail after N steps in a row whose gradients are not finite", 10, on_resume="allow")

    add = group("finding out why", "forget")
    add("-dry", SWITCH, "train one step, evaluate one batch; show shapes, parameters and memory; write nothing")
    add("-debug", SWITCH, "train -limit_steps (10) in one process and name the first bad tensor; write nothing")
    add("-eval", SWITCH, "only evaluate the best weights, or those of -weights, into out/NAME/eval.json")
    add("-overfit", COUNT, "train and evaluate on the same N samples", on_resume="refuse")
    add("-profile", COUNT, "record N steps with torch's profiler")

    add = group("optimization", "refuse")
    add("-optimizer", one_of(*table("optimizer")), "optimizer, of lib/core/optimizer.py", "adamw")
    add("-lr_schedule", one_of(*table("scheduler")), "fall after the warm-up, of lib/core/scheduler.py", "cosine")
    add("-lr_start", POSITIVE, "peak learning rate", 0.001)
    add("-lr_end", value(real(-math.inf), "X"), "learning rate after the last step", 1e-06)
    add("-lr_warmup", NOT_NEGATIVE, "epochs of linear warm-up; fractions are allowed", 0.0)
    add("-scale_lr", one_of("none", "linear", "sqrt"), "scale -lr_start by -batch_size over -lr_batch", "none")
    add("-lr_batch", COUNT, "the batch -lr_start is meant for", 256)
    add("-weight_decay", NOT_NEGATIVE, "weight decay, not applied to biases and norms", 0.01)
    add("-momentum", value(real(0, 1, below=True), "X"), "momentum of sgd", 0.9)
    add("-clip_grad", NOT_NEGATIVE, "clip the gradient's norm at X; 0: do not clip", 0.0)

    add = group("saving and stopping", "allow")
    add("-save_every", value(types.every, "N[epochs|steps|min]"), "interval of saves, in epochs if bare", "1epoch")
    add("-keep_last", COUNT, "checkpoints to keep", 2)
    add("-keep_every", COUNT_OR_0, "keep every Nth epoch's for good; 0: none", 0)
    add("-best", value(types.metric, "METRIC"), "val metric of the best weights: f1, mae:min (accuracy, else loss)")
    add("-resume", PATH, "go on from another run's folder or checkpoint", on_resume="forget")
    add("-weights", FILE, "start from these weights: safetensors or a torch file")
    allowed = "flag that may differ from the checkpoint, repeatable; nan: allow weights that are not finite"
    add("-allow_change", value(text, "FLAG", **REPEATABLE), allowed, on_resume="forget")
    add("-max_hours", POSITIVE, "stop, with the state saved, after X hours")
    add("-grace_s", PERIOD, "seconds a stop may take before the process ends all the same", 60.0)
    add("-limit_steps", COUNT, "stop, with the state saved, once N optimizer steps are done", on_resume="forget")
    add("-check_resume", SWITCH, "kill and resume this run a few times, and compare", on_resume="forget")
    add("-hang_minutes", PERIOD, "fail when a step or an answer of another process takes X minutes", 10.0)

    add = group("several machines", "allow")
    add("-nnodes", COUNT, "machines, each started with this same command and its -node_rank", 1, on_resume="forget")
    add("-node_rank", COUNT_OR_0, "which of them this one is, from 0", on_resume="forget", per_node=True)
    add("-master_addr", value(text, "HOST"), "where the others reach -node_rank 0", on_resume="forget", per_node=True)
    add("-master_port", PORT, "a free port there", 29500, on_resume="forget")
    add("-master_suffix", value(types.suffix, "TEXT"), "end of the head's name on its fast network", per_node=True)
    add("-cache_dir", DIR, "for the caches of torch and others (in $SCRATCH, if set)", per_node=True)
    add("-debug_dist", SWITCH, "turn on verbose logging in torch.distributed, torchrun and NCCL")

    add = group("slurm", "allow")
    add("-slurm", SWITCH, "submit to Slurm instead of running here; -cpu N: N tasks a node and no GPUs")
    add("-slurm_nnodes", COUNT, "nodes", 1)
    add("-slurm_ngpus", COUNT, "GPUs, and so processes, a node", 1)
    add("-slurm_nodelist", value(text, "NAMES"), "these nodes, as GPU17,GPU18")
    add("-slurm_exclude", value(text, "NAMES"), "not these nodes")
    add("-slurm_partition", NAME, "partition")
    add("-slurm_account", NAME, "account to charge")
    add("-slurm_qos", NAME, "quality of service")
    add("-slurm_constraint", value(text, "WORDS"), "features that the nodes must have")
    add("-slurm_timeout", COUNT, "time limit in minutes (the partition's)")
    add("-slurm_mem_gb", POSITIVE, "memory of a node in GB")
    add("-slurm_cpus", COUNT, "CPUs of a task (2, plus -workers or 8)")
    add("-slurm_setup", value(text, "LINE", **REPEATABLE), "shell command that begins the job; repeatable")
    add("-slurm_arg", value(types.key_value, "KEY=VALUE", **REPEATABLE), "any option of sbatch; repeatable")
    add("-slurm_requeues", COUNT_OR_0, "most requeues after time limits and crashes of a run that advances", 20)
    add("-slurm_signal_s", COUNT, "seconds of warning before the time limit", 120)
    add("-slurm_dir", DIR, "the job's files, on a shared disk (OUT/NAME/slurm)")
    add("-slurm_dry", SWITCH, "show what would be submitted, and the answer of sbatch --test-only")
    return rules


@functools.cache
def table(kind: str) -> tuple[str, ...]:
    """Return the names that lib/core/KIND.py knows, from its text if that shows them: importing it takes seconds."""
    tree = ast.parse((plugins.ROOT / "lib" / "core" / f"{kind}.py").read_bytes())
    match [one for one, names in plugins.changes(tree).items() if "BY_NAME" in names]:
        case [ast.Assign(value=ast.Dict(keys=keys))]:
            found = tuple(str(key.value) for key in keys if isinstance(key, ast.Constant))
            if len(found) == len(keys):
                return found
    return tuple(importlib.import_module(f"lib.core.{kind}").BY_NAME)


def _add(group, rules, mark, name, kind, help_text, default=None, *, on_resume=None, per_node=False, **options):
    names = ("-h", "-help") if name == "-h" else (name,)
    options = {**kind, **options} if default is None else {**kind, **options, "default": default}
    flag = group.add_argument(*names, help=help_text, **options).dest
    on_resume = on_resume or mark
    if on_resume != "refuse":
        rules.free.add(flag)
    if on_resume == "forget":
        rules.forgotten.add(flag)
    if per_node:
        rules.per_node.add(flag)
