"""The environment of a run's processes.

torchrun's variables are overwritten. Of caches, debug switches and names on fast networks, a variable that the user
has set stays as it is.
"""

import contextlib
import os
import shlex
import uuid
from pathlib import Path

from lib.utils.checkpoint import run_folder

# SYSTEMNAME where HOSTi is a host's name on InfiniBand, and nodes that are far apart have no other way to each other.
INFINIBAND = ("juwels", "juwelsbooster", "jurecadc", "jusuf")
CACHES = {
    "TORCH_HOME": "torch",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "HF_HOME": "huggingface",
}
ELASTIC = "agent.server.api agent.server.local_elastic_agent rendezvous.dynamic_rendezvous "
ELASTIC += "rendezvous.c10d_rendezvous_backend rendezvous.utils"
DEBUG = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_LOGS": ",".join(f"+torch.distributed.{name}" for name in
                           [*(f"elastic.{name}" for name in ELASTIC.split()), "distributed_c10d"]),
    "NCCL_DEBUG": "INFO",
    "TORCH_FR_BUFFER_SIZE": "2000",  # the flight recorder: the last collectives of each rank
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # the same, to older torch
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}  # fmt: skip
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the beginning of the recorder's file names


def export(cache_dir: str | None, debug: bool) -> dict[str, str]:
    """Sets what torch reads when it is imported: where packages keep what they compile and download (-cache_dir, or
    the user's own folder in $SCRATCH), and for -debug_dist what is logged. Returns what it set."""
    scratch = os.environ.get("SCRATCH")
    own = Path(scratch) / f"cache_{os.environ.get('USER') or os.getuid()}" if scratch else None
    folder = Path(cache_dir) if cache_dir else own
    caches = {name: str(folder.absolute() / part) for name, part in CACHES.items()} if folder else {}
    wanted = {**caches, **(DEBUG if debug else {})}
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    return new


def torchrun(run: str, **names) -> dict[str, str]:
    """torchrun's variables of these names for a run with this id, whose store is in the launcher already."""
    elastic = {"RUN_ID": run, "RESTART_COUNT": 0, "USE_AGENT_STORE": True}
    named = {**names, **{f"TORCHELASTIC_{name}": value for name, value in elastic.items()}}
    return {name: str(value) for name, value in named.items()}


def of_run(args) -> dict[str, str]:
    """What a process of the run is to find set: for -debug_dist where NCCL's flight recorder writes after a hang,
    in the run's folder; for -deterministic what cuBLAS needs to end at the same bits (its manual, "Results
    Reproducibility")."""
    beginning = run_folder.run_of(args).absolute() / "logs" / "flight_rank_"
    records = dict.fromkeys(RECORDS, str(beginning)) if args.debug_dist else {}
    return records | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if args.deterministic else {})


def shell(own: dict, exported: dict[str, str], interface: str | None) -> str:
    """Lines for a script to evaluate: its own variables, and those it exports to torchrun, with gloo's interface."""
    gloo = {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}
    lines = [f"{name}={shlex.quote(str(value))}\n" for name, value in own.items()]
    lines += [f"export {name}={shlex.quote(value)}\n" for name, value in {**exported, **gloo}.items()]
    return "".join(lines)


def suffix_of(asked: str | None) -> str:
    """-master_suffix, or what this machine's nodes have behind their names on the fast network."""
    return asked if asked is not None else "i" if on_infiniband() else ""


def fast_name(host: str, asked: str | None) -> str:
    """The name of a host on the fast network: the suffix is behind its first part, unless it is there already; a
    number stays as it is."""
    suffix, (first, dot, domain) = suffix_of(asked), host.partition(".")
    if not suffix or ":" in host or host.replace(".", "").isdigit() or first.endswith(suffix):
        return host
    return f"{first}{suffix}{dot}{domain}"


def fast_interface() -> str | None:
    """The network interface to set for gloo; None where gloo finds it."""
    return "ib0" if on_infiniband() else None


def on_infiniband() -> bool:
    """Whether this is a machine whose nodes have another name on the fast network."""
    return os.environ.get("SYSTEMNAME") in INFINIBAND


def place() -> dict[str, str]:
    """torchrun's variables for the only process of a run."""
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    return {name: str(value) for name, value in ranks.items()} | {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex}


def threads(count: int) -> str:
    """A fair share of the cores, for OMP_NUM_THREADS."""
    return str(max(1, cores() // count))


@contextlib.contextmanager
def exported(variables: dict[str, str], **unless_set: str):
    """The environment with these variables while the block runs; the second kind only where not set by the user."""
    before = dict(os.environ)
    os.environ.update({**{name: value for name, value in unless_set.items() if name not in before}, **variables})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
