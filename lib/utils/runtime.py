"""Settings of torch and Python for speed, and facts on the machine and the code."""

import collections
import functools
import importlib.metadata
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from lib.utils import distributed
from lib.utils.distributed import World

FAST_ATTENTION = ("flash", "mem_efficient", "cudnn")  # torch's kernels on a GPU, next to the plain one
LAUNCHED = 4  # micro-batches that a GPU has still to compute while the next is made ready: each holds memory


def kernels(world: World, deterministic: bool):
    """Enable TF32 and cuDNN's autotuning on a GPU; with `deterministic`, deterministic algorithms instead."""
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Nothing here reads memory that it did not write.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = not deterministic  # its trials end differently each time
        for kernel in FAST_ATTENTION if deterministic else ():  # which warn_only lets through
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


def throttle(batches: Iterable, device: torch.device) -> Iterator:
    """Yield the same batches. Waits for a GPU that is LAUNCHED batches behind, which costs it nothing."""
    launched = collections.deque()
    for batch in batches:
        yield batch
        if device.type == "cuda":
            launched.append(torch.cuda.Event(blocking=True))
            launched[-1].record()
            if len(launched) > LAUNCHED:
                launched.popleft().synchronize()


def about(world: World) -> dict:
    """Return facts on the code and the machine for config.yaml and every checkpoint. Called by all ranks."""
    return {
        "command": " ".join(["python", *sys.argv]),
        **_code(world),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": _torchvision(),
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


@functools.cache  # reading it takes a millisecond, and every checkpoint has it
def _torchvision():
    return importlib.metadata.version("torchvision")


@functools.cache  # a checkpoint needs it, too, and must start no process
def _code(world):
    """Return what git says on rank 0: not all ranks read the repository, which may lie on a shared disk."""
    return distributed.main_does(
        lambda: {"git": _git("rev-parse", "HEAD"), "changed_files": _git("status", "--porcelain")}, world
    )


def _git(*words):
    words = ("git", "--no-optional-locks", *words)  # or kill -9 could leave a lock in the user's repository
    try:
        done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
