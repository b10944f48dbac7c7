"""Settings of torch and Python for speed, and facts on the machine and the code."""

import contextlib
import functools
import logging
import math
import os
import platform
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lib.utils import distributed
from lib.utils.distributed import World

log = logging.getLogger(__name__)
WORK = 1.25e8  # floating-point operations of a forward pass for each further thread: docs/benchmarks.md
FAST_ATTENTION = ("flash", "mem_efficient", "cudnn")  # torch's kernels on a GPU, next to the plain one


def configure_kernels(world: World, deterministic: bool) -> None:
    """Enable TF32 and cuDNN's autotuning on a GPU; with `deterministic`, deterministic algorithms instead."""
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # No code here reads memory before it writes it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = not deterministic  # its trials end differently each time
        for kernel in FAST_ATTENTION if deterministic else ():  # which warn_only lets through
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


def set_threads(args: Namespace, saved: int | None = None) -> None:
    """Set the number of threads: -threads, else that of the run's first start, else OMP_NUM_THREADS, else 1.

    1 is for the code before `choose_threads`: data and weights then have the same bits on any machine.
    """
    torch.set_num_threads(args.threads or saved or distributed.user_threads() or 1)


def choose_threads(args: Namespace, world: World, saved: int | None, model: nn.Module, sample: Callable) -> int:
    """Set the run's number of threads, the same on all ranks, and return it.

    Sums by another number of threads have other bits. So it is computed and not measured, and a run keeps the number
    of its first start (`saved`). `sample` returns a micro-batch of the run.
    """
    share = -int(distributed.all_reduce_max([-cores_per_process(world)], world)[0])

    def choose() -> int:
        wanted = args.threads or saved or distributed.user_threads()
        if wanted or share == 1 or world.device.type != "cpu":
            return wanted or share
        return threads_for(count_flops(model, sample()), share)

    count = distributed.run_on_main(choose, world)
    torch.set_num_threads(count)
    return count


def cores_per_process(world: World) -> int:
    """Return this machine's cores for each of its processes; in a container, of those that it may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores // world.local_size)


def threads_for(work: float, share: int) -> int:
    """Return the number of threads for a pass of so many floating-point operations, at most a share of the cores."""
    return int(min(share, 1 + work / WORK))


def count_flops(model: nn.Module, batch: Any) -> float:
    """Return the floating-point operations of a forward pass, on the meta device: it computes and changes no values.

    A model that does not take the first part of a batch, or reads values, counts as infinitely large.
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            torch.func.functional_call(model.eval(), shapes, (inputs.to("meta"),))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        log.debug("the work of a pass is not known: %r", error)
        return math.inf
    finally:
        model.train()
    return counter.get_total_flops()


def describe(world: World) -> dict[str, Any]:
    """Return facts on the code and the machine for config.yaml and every checkpoint. Called by all ranks."""
    return {
        "command": " ".join(["python", *sys.argv]),
        **_code(world),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


@functools.cache  # each checkpoint has it, and a save must start no process
def _code(world: World) -> dict[str, Any]:
    """Return what git says on rank 0: not all ranks read the repository, which may lie on a shared disk."""
    return distributed.run_on_main(
        lambda: {"git": _git("rev-parse", "HEAD"), "changed_files": _git("status", "--porcelain")}, world
    )


def _git(*words: str) -> str | None:
    words = ("git", "--no-optional-locks", *words)  # or kill -9 could leave a lock in the user's repository
    try:
        done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
