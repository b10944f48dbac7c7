"""Settings of torch and Python for speed, and facts on the machine and the code."""

import contextlib
import ctypes
import functools
import math
import os
import platform
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from lib.utils import distributed

FAST_ATTENTION = ("flash", "mem_efficient", "cudnn")  # torch's kernels on a GPU, next to the plain one
# GNU's mallopt: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes. By default each step may give memory back to the
# system and get it again, which is up to a tenth of the default run's time (docs/benchmarks.md).
KEPT_MEMORY = {-1: 1 << 30, -3: 32 << 20}


def configure_kernels(world: distributed.World, deterministic: bool) -> None:
    """Keep freed memory; on a GPU enable TF32 and cuDNN's autotuning, or `deterministic` algorithms instead."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        for option, value in KEPT_MEMORY.items():
            ctypes.CDLL(None).mallopt(option, value)
    torch.set_autocast_enabled(world.device.type, False)  # by a notebook around the run: -bf16 and -fp16 choose
    torch._C._set_graph_executor_optimize(world.device.type != "cpu" and not deterministic)  # else bits of jit change
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # No code here reads memory before it writes it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = not deterministic  # its trials end differently each time
        for kernel in FAST_ATTENTION if deterministic else ():  # which warn_only lets through
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


def choose_threads(args: Namespace, world: distributed.World, saved: int | None) -> None:
    """Set the number of torch's threads, the same on all ranks and starts: sums by another one have other bits."""
    wanted = args.threads or saved or distributed.user_threads() or cores_per_process(world)
    torch.set_num_threads(-int(distributed.all_reduce_max([-wanted], world)[0]))  # the least: machines may differ


def cores_per_process(world: distributed.World) -> int:
    """Return this machine's cores for each of its processes; in a container, of those that it may use."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len(usable)
    with contextlib.suppress(OSError):  # not Linux; two hardware threads of a core count as one, as in torch
        siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        cores = len({Path(siblings.format(number)).read_text() for number in usable})
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores // world.local_size)


def describe(world: distributed.World) -> dict[str, Any]:
    """Return facts on the code and the machine for config.yaml and every checkpoint; on writers also git's."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "git": _git_status() if world.is_writer else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


@functools.cache  # each checkpoint has it, and a save must start no process
def _git_status() -> list[str] | None:
    """Return the commit, the branch and the files that differ, a line for each; None without a repository."""
    # With a lock, kill -9 could leave one in the user's repository.
    words = ("git", "-C", Path(__file__).parent, "--no-optional-locks", "status", "--porcelain=v2", "--branch")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True, timeout=10).splitlines()
    return None
