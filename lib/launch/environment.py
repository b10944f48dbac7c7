"""The environment of a run's processes: torchrun's variables, GPUs, caches, names on fast networks.

These functions overwrite torchrun's variables and those that choose GPUs, and keep others that are set.
"""

import os
import sys
from pathlib import Path

from lib.config import Args
from lib.utils.errors import UsageError

LOOPBACK = "lo" if sys.platform == "linux" else None  # the network interface of 127.0.0.1
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # torch for ROCm reads its own one first
# The first is the standard of freedesktop.org, which torch's hub and extensions, Hugging Face and others follow.
CACHES = {"XDG_CACHE_HOME": "", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "torchinductor"}
# How often a thread on the CPU checks whether the others are done before it sleeps: long enough for the gaps between
# kernels. The 300,000 times of GNU's OpenMP keep cores from the threads that it waits for (docs/benchmarks.md).
OPENMP_SPIN = {"GOMP_SPINCOUNT": "10000"}


def export(args: Args) -> dict[str, str]:
    """Set what torch reads when it is imported or starts. Returns what was set."""
    if not has_rank():
        os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)  # leaked: no torchrun agent started this process
    cache_dir = args.cache_dir
    if not cache_dir and "SCRATCH" in os.environ:
        cache_dir = f"{os.environ['SCRATCH']}/cache_{os.environ.get('USER') or os.getuid()}"
    wanted = {} if "OMP_WAIT_POLICY" in os.environ else dict(OPENMP_SPIN)
    if args.deterministic:
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS's manual, "Results Reproducibility"
    if cache_dir:
        wanted |= {name: str(Path(cache_dir, part).absolute()) for name, part in CACHES.items()}
    asked = ("XDG_CACHE_HOME",) if args.cache_dir else ()  # which many set for all programs
    new = {name: value for name, value in wanted.items() if name not in os.environ or name in asked}
    os.environ.update(new)
    return new


def rank_variables(place: dict[str, int], run_id: str, store: tuple[str, int] | None = None) -> dict[str, str]:
    """Return torchrun's variables for one process of a run, and gloo's network interface on a single machine.

    `place` has RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; `run_id` is the same for all processes and restarts
    of a launch; `store` is host and port of the rendezvous store, which a single process does not need.
    """
    variables: dict[str, object] = {**place, "TORCHELASTIC_RUN_ID": run_id}
    if store:
        variables |= {"MASTER_ADDR": store[0], "MASTER_PORT": store[1]}
        if store[0] == "127.0.0.1" and LOOPBACK:
            variables["GLOO_SOCKET_IFNAME"] = LOOPBACK
    return {name: str(value) for name, value in variables.items()}


def has_rank() -> bool:
    """Whether torchrun or a launcher of ours started this process; a RANK may have leaked from elsewhere."""
    return bool(os.environ.get("RANK")) and int(os.environ["RANK"]) < int(os.environ.get("WORLD_SIZE") or 0)


def choose_gpus(args: Args) -> None:
    """Make only -gpus visible, counted among those that are now, or none with -cpu. Raises UsageError."""
    chosen = args.gpus or ""  # with -cpu, an optimizer would start CUDA on the first GPU (torch 2.15)
    visible = next((os.environ[name] for name in VISIBLE if os.environ.get(name)), "")
    if args.gpus and visible:
        names = visible.replace(" ", "").split(",")
        if any(int(gpu) >= len(names) for gpu in args.gpus.split(",")):
            raise UsageError(f"-gpus {args.gpus}: {len(names)} GPUs are visible here ({visible}), numbered from 0")
        chosen = ",".join(names[int(gpu)] for gpu in args.gpus.split(","))
    if args.gpus or args.cpu:
        os.environ.update(dict.fromkeys(VISIBLE, chosen))
