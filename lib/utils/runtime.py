"""Settings of torch and Python for speed, and what config.yaml says of the machine and the code."""

import collections
import contextlib
import ctypes
import functools
import gc
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

KEPT = {-1: -1, -4: 0}  # of <malloc.h>: M_TRIM_THRESHOLD never, M_MMAP_MAX no block
FAST_ATTENTION = ("flash", "mem_efficient", "cudnn")  # torch's kernels on a GPU, beside the plain one
LAUNCHED = 4  # micro-batches that a GPU has still to compute while the next is made ready: each holds memory


def kernels(world: World, deterministic: bool):
    """Has matrices multiplied in TF32 and convolutions tried out for the fastest way; or, as no trial ends the same
    way twice, the same bits every time (torch.use_deterministic_algorithms), where torch has such a kernel. The
    memory that a step frees on the CPU is kept for the next."""
    keep_memory()
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = not deterministic
        for kernel in FAST_ATTENTION if deterministic else ():  # which warn_only leaves as they are
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


def keep_memory():
    """Has glibc's malloc give nothing back to the system, which would be asked for it again at the next step, page by
    page (mallopt(3)). Other C libraries stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    for option, value in KEPT.items():
        mallopt(option, value)


@contextlib.contextmanager
def frozen():
    """Python's garbage collector passes over what is there already: it then takes microseconds, and in loader
    processes that are forked copies no memory."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def throttle(batches: Iterable, device: torch.device) -> Iterator:
    """The same batches. A GPU is waited for where it is LAUNCHED batches behind, which it never notices."""
    launched = collections.deque()
    for batch in batches:
        yield batch
        if device.type == "cuda":
            launched.append(torch.cuda.Event(blocking=True))
            launched[-1].record()
            if len(launched) > LAUNCHED:
                launched.popleft().synchronize()


def about(world: World) -> dict:
    """For config.yaml and every checkpoint; for people. Called by all ranks."""
    return {
        "command": " ".join(["python", *sys.argv]),
        **_code(world),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": importlib.metadata.version("torchvision"),
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


@functools.cache  # a save tells it too, and starts no process
def _code(world):
    """What git says on rank 0: a shared disk would hear every rank's question."""
    return distributed.main_does(
        lambda: {"git": _git("rev-parse", "HEAD"), "changed_files": _git("status", "--porcelain")}, world
    )


def _git(*words):
    root = Path(__file__).resolve().parents[2]
    try:
        words = ("git", "--no-optional-locks", *words)  # or a kill -9 here leaves a lock in the user's repository
        asked = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None
