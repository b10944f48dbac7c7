"""The environment of a run's processes: torchrun's variables, GPUs, caches, debug switches, names on fast networks.

Only lib/launch writes it, with these functions. They overwrite torchrun's variables, and keep others that are set.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from lib.config import Args
from lib.utils.errors import UsageError

# SYSTEMNAME of machines on which HOSTi is the name of HOST on InfiniBand, the only network between distant nodes.
INFINIBAND = ("juwels", "juwelsbooster", "jurecadc", "jusuf")
IB_INTERFACE = "ib0"  # the name of the network interface on InfiniBand; elsewhere gloo chooses one
LOOPBACK = "lo" if sys.platform == "linux" else None  # the network interface of 127.0.0.1
VISIBLE, ROCM = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"  # torch for ROCm reads its own one first
CACHES = {
    "TORCH_HOME": "torch",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "HF_HOME": "huggingface",
}
DEBUG = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO",  # DDP crashes on gloo under DETAIL (torch 2.15)
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_LOGS": "+distributed",
    "LOGLEVEL": "DEBUG",  # torchrun's own
    "NCCL_DEBUG": "INFO",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
# How often a thread on the CPU checks whether the others are done before it sleeps: for some microseconds. GNU's
# OpenMP checks 300,000 times by default, which keeps cores from the threads it waits for (docs/benchmarks.md).
OPENMP_SPIN = {"GOMP_SPINCOUNT": "3000"}
# Variables of launchers: numbers, and those that a process needs to find the others.
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
NUMBERS += ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_GTIDS", "SLURM_STEP_NODELIST")
MESH_UP_TO = 256  # ranks that gloo connects each with each other at the start: as many sockets in every process


def export(cache_dir: str | None, debug: bool) -> dict[str, str]:
    """Set what torch reads when it is imported. Returns what was set.

    Args:
        cache_dir: where packages keep what they compile and download; None: a folder in $SCRATCH, if that is set.
        debug: turn on verbose logging in torch.distributed, torchrun and NCCL.
    """
    if not cache_dir and "SCRATCH" in os.environ:
        cache_dir = f"{os.environ['SCRATCH']}/cache_{os.environ.get('USER') or os.getuid()}"
    wanted = {} if "OMP_WAIT_POLICY" in os.environ else dict(OPENMP_SPIN)
    wanted |= DEBUG if debug else {}
    if cache_dir:
        wanted |= {name: str(Path(cache_dir, part).absolute()) for name, part in CACHES.items()}
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    return new


def rank_variables(place: dict[str, int], run_id: str, store: tuple[str, int] | None = None) -> dict[str, str]:
    """Return torchrun's variables for one process of a run, and gloo's network interface where it is known.

    Args:
        place: RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.
        run_id: the same for all processes and restarts of a launch.
        store: address and port of the rendezvous store, which the launcher opens; a single process needs none.
    """
    variables: dict[str, object] = {**place, "TORCHELASTIC_RUN_ID": run_id}
    if store:
        variables |= {"MASTER_ADDR": store[0], "MASTER_PORT": store[1]}
        variables |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
        interface = LOOPBACK if store[0] == "127.0.0.1" else IB_INTERFACE if has_infiniband_names() else None
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = interface
    return {name: str(value) for name, value in variables.items()}


def check_variables(needed: tuple[str, ...] = ()) -> None:
    """Raise UsageError for a launcher's variable that is no number, or for a needed one that is not set."""
    for name in NUMBERS + needed:
        text = os.environ.get(name, "" if name in needed else "0")
        if not text or (name in NUMBERS and not text.isdecimal()):
            hint = "unset RANK, WORLD_SIZE and SLURM_STEP_NUM_TASKS if no launcher started this process"
            raise UsageError(f"{name} is {text!r} in the environment: {hint}")


def for_run(args: Args) -> dict[str, str]:
    """Return what a run needs set, as cuBLAS's workspace for -deterministic.

    On many ranks, gloo connects two of them when they first talk: docs/scaling.md.
    """
    variables = {}
    if int(os.environ.get("WORLD_SIZE", 1)) > MESH_UP_TO:
        variables["TORCH_GLOO_LAZY_INIT"] = "1"
    if args.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS's manual, "Results Reproducibility"
    return variables


def visible_devices(gpus: str | None, cpu: int | None = None) -> dict[str, str]:
    """Return variables that make visible only the GPUs of -gpus, or none with -cpu; CUDA must not be initialized yet.

    Number i means the i-th of those that are visible now. Raises UsageError for others.
    """
    if cpu:
        return {VISIBLE: "", ROCM: ""}  # an optimizer on the CPU would start CUDA on the first one (torch 2.15)
    if not gpus:
        return {}
    import torch

    wanted, count = gpus.split(","), torch.cuda.device_count()
    if not count:
        raise UsageError(f"-gpus {gpus}: no GPU is visible here; -cpu N trains on the CPU")
    numbers = [str(gpu) for gpu in range(count)]
    missing = [gpu for gpu in wanted if int(gpu) >= count]
    if missing:
        raise UsageError(f"-gpus {gpus}: {', '.join(missing)} is not one of the GPUs here: {','.join(numbers)}")
    variable = ROCM if torch.version.hip and ROCM in os.environ else VISIBLE
    names = os.environ[variable].replace(" ", "").split(",") if os.environ.get(variable) else numbers
    return {variable: ",".join(names[int(gpu)] for gpu in wanted)}


@contextlib.contextmanager
def override(variables: dict[str, str]) -> Iterator[None]:
    """Set these variables while the block runs."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def infiniband_name(host: str) -> str:
    """Return the name of a host on the fast network: gpu7.site becomes gpu7i.site. An address stays as it is."""
    first, dot, domain = host.partition(".")
    if not has_infiniband_names() or ":" in host or host.replace(".", "").isdigit() or first.endswith("i"):
        return host
    return f"{first}i{dot}{domain}"


def local_address(host: str) -> str:
    """Return this machine's address on the way to a host; nothing is sent. Raises OSError."""
    family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def has_infiniband_names() -> bool:
    """Whether this machine's nodes have another name on the fast network."""
    return os.environ.get("SYSTEMNAME") in INFINIBAND
