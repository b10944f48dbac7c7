"""What the flags do not tell of a run: code, versions, machine, command line."""

import functools
import importlib.metadata
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from lib.utils import distributed
from lib.utils.distributed import World


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
