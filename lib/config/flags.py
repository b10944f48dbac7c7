"""The shared flags: names, types, defaults, and whether a resumed run may change them."""

import argparse
import functools
from collections.abc import Callable

from lib.config import types
from lib.config.parser import SWITCH
from lib.config.types import path, real, text, whole
from lib.core import scheduler


def value(type_: Callable[[str], object], metavar: str, **more) -> dict:
    """Return argparse's options for a flag with a value. The usual ones have names below."""
    return {"type": type_, "metavar": metavar, **more}


COUNT, COUNT_OR_0 = value(whole(1), "N"), value(whole(0), "N")
POSITIVE = value(real("a number above 0", lambda x: x > 0), "X")
NOT_NEGATIVE = value(real("a number from 0", lambda x: x >= 0), "X")
PERIOD = value(real("a number above 0 up to 1000000", lambda x: 0 < x <= 10**6), "X")  # of time
SHARE = value(real("a number from 0 to 1", lambda x: 0 <= x <= 1), "X")
BELOW_1 = value(real("a number from 0 to below 1", lambda x: 0 <= x < 1), "X")
DIR, FILE, PATH = value(path, "DIR"), value(path, "FILE"), value(path, "PATH")
PLUGIN = value(types.plugin_name, "NAME")
COMPILE = {"choices": ("blocks", "model"), "nargs": "?", "const": "blocks"}
REPEATABLE = {"action": "append", "default": []}


class Rules:
    """Which shared flags may differ in a resumed run, or between the machines of a run; filled as flags are added."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser
        self.free: set[str] = set()  # a resumed run may change them; includes the forgotten ones
        self.forgotten: set[str] = set()  # count for one start: config.yaml does not keep them
        self.per_node: set[str] = set()  # may differ between the machines of a run

    def group(self, title: str, mark: str) -> None:
        """Begin a group of flags; those without a mark of their own have this one."""
        self.current, self.mark = self.parser.add_argument_group(title), mark

    def add(
        self, name: str, kind: dict, help: str, default: object = None, *, on_resume: str = "", per_node: bool = False
    ) -> None:
        """Add a flag to the current group."""
        options = kind if default is None else {**kind, "default": default}
        flag = self.current.add_argument(name, help=help, **options).dest
        on_resume = on_resume or self.mark
        if on_resume != "refuse":
            self.free.add(flag)
        if on_resume == "forget":
            self.forgotten.add(flag)
        if per_node:
            self.per_node.add(flag)


@functools.cache
def rules() -> Rules:
    """Return the rules of the shared flags. A plugin's own flags are in none of the sets."""
    return add_shared(argparse.ArgumentParser(add_help=False))


def add_shared(parser: argparse.ArgumentParser) -> Rules:
    """Add the flags that all runs share, in groups; those that a newcomer needs come first.

    Each has a mark: what a resumed run does with another value. "refuse": it ends, as the result depends on the flag.
    "allow": it takes the new value. "forget": the flag counts for one start only. Without a mark, its group's counts.
    """
    rules = Rules(parser)
    add, group = rules.add, rules.group

    group("run", "allow")
    rules.current.add_argument("-h", "-help", action="help", help="show this help, with the chosen plugins' flags")
    add("-data", DIR, "folder of the data; A=0.3,B=0.7 mixes those of two by shares", "data", per_node=True)
    add("-out", DIR, "folder of all runs", "out", per_node=True)
    add("-model", value(types.run_name, "NAME"), "name of the run: it lives in out/NAME (DATASET_ARCH)")
    add("-cfg", FILE, "YAML file of flags; the command line wins over it", on_resume="forget", per_node=True)
    add("-reset", SWITCH, "start from scratch; move the old run of this name to out/.old", on_resume="forget")
    add("-tb", SWITCH, "serve TensorBoard on 127.0.0.1 while the run lasts", per_node=True)
    add("-ngrok", SWITCH, "open a tunnel to TensorBoard, behind the password in NGROK_PASSWORD")
    add("-ngrok_auth", value(types.run_name, "USER"), "user name that goes with the password", "baton")
    add("-track", {"choices": ("none", "wandb", "mlflow", "kubeflow")}, "send the figures to this tracker", "none")
    add("-mirror", value(text, "URL"), "also copy the run to URL/NAME, as s3://BUCKET/runs, and resume from there")
    add("-seed", COUNT_OR_0, "the seed of all randomness", 0, on_resume="refuse")

    group("data", "refuse")  # those that datasets set are also in DATA_FLAGS of args.py
    add("-dataset", PLUGIN, "data: a file in lib/dataset", "digits")
    add("-batch_size", COUNT, "samples a step, over all processes", 64)
    add("-batch_per_gpu", COUNT, "samples a step for each process, instead of -batch_size", on_resume="forget")
    add("-micro_batch", COUNT, "most samples in a pass, for gradient accumulation (one process's share)")
    add("-shuffle", SWITCH, "a new order of the training samples every epoch", True)
    add("-shuffle_block", COUNT, "shuffle blocks of N neighbours, which need few requests to a URL", 1)
    add("-balance", SWITCH, "draw the training samples of each class equally often")
    add("-augment", SWITCH, "change training images at random, where the data set does so", True)
    add("-drop_last", SWITCH, "leave out an epoch's short last batch")
    add("-skip_bad_files", SWITCH, "open all files before the first start, and leave out those that cannot be read")
    add("-num_classes", COUNT, "outputs of the model", 10)
    add("-channels", COUNT, "image channels", 1)
    add("-image_size", COUNT, "image height and width in pixels", 8)

    group("training", "refuse")
    add("-arch", PLUGIN, "model: a file in lib/arch", "convnet")
    add("-trainer", PLUGIN, "way of training: a file in lib/trainer; ema averages the weights (EMA)", "trainer")
    add("-epochs", COUNT, "passes over the training samples", 10)
    add("-steps", COUNT, "optimizer steps of the run, instead of -epochs; the schedule follows")
    add("-eval_every", value(types.every, "N[epochs|steps]"), "interval of validations", "1epoch", on_resume="allow")
    add("-loss", PLUGIN, "loss: cross_entropy, mse, l1, huber, or what you add to lib/core/loss.py", "cross_entropy")
    add("-label_smoothing", SHARE, "label smoothing of cross_entropy, 0 to 1", 0.0)
    add("-class_weights", value(types.weights, "balanced|X,X,..."), "class weights of cross_entropy (all 1)")
    add("-ignore_index", value(whole(-(10**9)), "N"), "label that the loss and metrics leave out, as 255", -100)
    add("-train_metrics", SWITCH, "also log accuracy and other metrics of the training samples", on_resume="allow")
    add("-log_every", COUNT, "steps between log lines", 50, on_resume="allow")
    add("-step_times", SWITCH, "also log the shares of a step's time, and the MFU", on_resume="allow")
    add("-peak_tflops", POSITIVE, "the same, for devices of X TFLOPS (known of common GPUs)", on_resume="allow")
    add("-max_bad_steps", COUNT, "fail after N steps in a row whose gradients are not finite", 10, on_resume="allow")

    group("optimization", "refuse")
    add("-optimizer", PLUGIN, "any class of torch.optim, as sgd or RMSprop; muon: and AdamW for the rest", "adamw")
    add("-optimizer_arg", value(text, "KEY=VALUE", **REPEATABLE), "an option of it, as betas=0.9,0.95; repeatable")
    add("-lr_schedule", {"choices": (*scheduler.BY_NAME,)}, "curve after warm-up, of lib/core/scheduler.py", "cosine")
    add("-lr_start", POSITIVE, "peak learning rate", 0.001)
    add("-lr_end", value(real("a number", lambda x: True), "X"), "learning rate of the last step", 1e-06)
    add("-lr_warmup", NOT_NEGATIVE, "epochs of linear warm-up; fractions are allowed", 0.0)
    add("-lr_batch", COUNT, "-lr_start is for steps of N samples: scale it linearly to -batch_size")
    add("-weight_decay", NOT_NEGATIVE, "weight decay, not applied to 1-d parameters, as biases and most norms", 0.01)
    add("-momentum", BELOW_1, "momentum of sgd", 0.9)
    add("-clip_grad", NOT_NEGATIVE, "clip the norm of all optimizers' gradients at X; 0: do not clip", 0.0)

    group("saving and stopping", "allow")
    every = value(types.every_or_minutes, "auto|N[epochs|steps|minutes]")
    add("-save_every", every, "interval of saves; auto: each epoch, and up to 1 %% of the time", "auto")
    add("-keep_last", COUNT, "checkpoints to keep", 2)
    add("-keep_hours", COUNT_OR_0, "also keep the first checkpoint of each of the last N hours", 0)
    add("-keep_every", COUNT_OR_0, "keep every Nth epoch's checkpoint for good; 0: none", 0)
    add("-best", value(types.metric, "METRIC"), "val metric of best weights: f1, or gap:min (accuracy, else loss)")
    add("-stop_after", COUNT, "early stopping after N validations without a better -best")
    add("-resume", PATH, "continue from another run's folder or checkpoint", on_resume="forget")
    add("-weights", FILE, "start from these weights: safetensors, a torch file, a run's folder, or imagenet")
    allowed = "flag that may differ from the checkpoint, or data, engine, or nan (weights not finite); repeatable"
    add("-allow_change", value(text, "FLAG", **REPEATABLE), allowed, on_resume="forget")
    add("-max_hours", POSITIVE, "stop, with the state saved, after X hours")
    add("-grace_s", PERIOD, "seconds until a stop that does not finish ends the process", 60.0)
    add("-limit_steps", COUNT, "stop, with the state saved, once N optimizer steps are done", on_resume="forget")
    add("-check_resume", SWITCH, "kill and resume this run a few times, and compare the weights", on_resume="forget")
    add("-check_data", SWITCH, "list samples that cannot be read, or that two splits share", on_resume="forget")
    add("-restarts", COUNT_OR_0, "start again, up to N times, after a rank was killed", 0, on_resume="forget")
    add("-hang_minutes", PERIOD, "end a run in which nothing moves for X minutes", 10.0)

    group("machine", "allow")
    add("-gpus", value(types.gpu_list, "LIST"), "GPUs to use, as 0,1,2 (all visible ones)", per_node=True)
    add("-cpu", COUNT, "train with N processes on the CPU", per_node=True)
    add("-workers", COUNT_OR_0, "loader processes of each process (by the data and the cores)", per_node=True)
    add("-val_workers", COUNT_OR_0, "loader processes for evaluation (as -workers)", per_node=True)
    add("-threads", COUNT, "threads of each process (its share of the cores)", on_resume="refuse")
    add("-fp16", SWITCH, "mixed precision with float16 and a gradient scaler", on_resume="refuse")
    add("-bf16", SWITCH, "mixed precision with bfloat16", on_resume="refuse")
    add("-cache_dir", DIR, "folder for the caches of torch and others (in $SCRATCH, if set)", per_node=True)
    add("-cache_gb", POSITIVE, "copy shards of a URL to -cache_dir, up to X GB on a node", per_node=True)
    add("-parallel", {"choices": ("ddp", "fsdp")}, "ddp: every process has the whole model; fsdp: a shard", "ddp")
    add("-find_unused", SWITCH, "let DDP look for parameters that a pass does not use; not under -deterministic")
    add("-recompute", SWITCH, "gradient checkpointing: compute a block's activations again in the backward pass")
    add("-compile", COMPILE, "torch.compile, block by block or the whole model")
    add("-channels_last", SWITCH, "keep channels last in a GPU's memory: faster for convolutions; not under fsdp")
    exact = "the same bits on any number of processes, by deterministic algorithms; no: sums as torch makes them"
    add("-deterministic", {**SWITCH, "default": None}, f"{exact} (on the CPU the sums only)")

    group("debugging", "forget")
    add("-debug", SWITCH, "train -limit_steps (10) in one process and name the first bad tensor; write nothing")
    add("-eval", SWITCH, "only evaluate the best weights, or those of -weights, into out/NAME/eval.json")
    add("-overfit", COUNT, "train and evaluate on the same N samples", on_resume="refuse")

    group("slurm", "allow")
    add("-slurm", SWITCH, "submit to Slurm instead of running here; -cpu N: N tasks a node and no GPUs")
    add("-slurm_nnodes", COUNT, "nodes", 1)
    add("-slurm_ngpus", COUNT, "GPUs, and so processes, a node", 1)
    add("-slurm_nodelist", value(text, "NAMES"), "nodes to use, as GPU17,GPU18")
    add("-slurm_partition", value(text, "NAME"), "partition")
    add("-slurm_timeout", COUNT, "time limit in minutes (the partition's)")
    add("-slurm_cpus", COUNT, "CPUs of a task (-workers or 8, plus 2)")
    option = "option of sbatch, as account=ME or mem=64G; repeatable; no secrets: config.yaml shows it"
    add("-slurm_arg", value(text, "KEY=VALUE", **REPEATABLE), option)
    add("-slurm_signal_s", COUNT, "seconds of warning before the time limit", 120)
    add("-slurm_dir", DIR, "the job's files, on a shared disk (OUT/NAME/slurm)")
    add("-slurm_dry", SWITCH, "show what would be submitted, and the answer of sbatch --test-only")
    return rules
