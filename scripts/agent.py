"""Prints what a torchrun agent on this machine needs, as lines of shell for elastic.sh and train.sbatch to evaluate.

    agent.py elastic HEAD:PORT ARGUMENTS    one node of an elastic run
    agent.py slurm ARGUMENTS                the batch script of a Slurm job; records the start in the job's history

ARGUMENTS are train.py's. An error in them is one line, here: torchrun would start again and again.
"""

import contextlib
import importlib.util
import ipaddress
import math
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import config
from lib.launch import environment, local
from lib.utils.errors import FINISHED, USAGE, UsageError
from scripts import infiniband

AGENT_S = 5  # seconds that torchrun waits for its workers beyond -grace_s


def main(launcher: str = "", *arguments: str) -> int:
    """Print lines of shell. Returns the exit code."""
    if launcher != "slurm" and not (launcher == "elastic" and arguments):
        print(__doc__, file=sys.stderr)
        return FINISHED if launcher in ("-h", "--help") else USAGE
    head, arguments = (arguments[0], arguments[1:]) if launcher == "elastic" else (None, arguments)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # -h is not for the shell
            args = config.parse_args(list(arguments))
        variables = environment.export(args)  # the agent reads some of them, too
        own, more = elastic(args, head) if head else slurm_job(args)
    except UsageError as error:
        return local.report_usage_error(error)
    variables |= {name: value for name, value in more.items() if value and name not in os.environ}
    print(*(f"{name}={shlex.quote(str(value))}" for name, value in own.items()), sep="\n")
    print(*(f"export {name}={shlex.quote(value)}" for name, value in variables.items()), sep="\n")
    return FINISHED


def elastic(args, head: str) -> tuple[dict, dict]:
    """Return the script's own variables and those for torchrun: the address of this machine as the head sees it."""
    if args.reset and not os.environ.get("RUN_ID") and not os.environ.get("PET_RDZV_ID"):
        raise UsageError(
            "-reset without RUN_ID: a second -reset would be taken for a restart of the first; give all nodes a "
            "RUN_ID that no start had before, as RUN_ID=again_2"
        )
    place = os.environ.get("RENDEZVOUS") or os.environ.get("PET_RDZV_BACKEND") or "c10d"
    if place.startswith("etcd") and importlib.util.find_spec("etcd") is None:
        raise UsageError(f"RENDEZVOUS={place} needs a package that is not installed: pip install python-etcd")
    name, _, port = head.rpartition(":")
    host = infiniband.name_of(name)
    address, is_host = toward(host)
    own = {"head": f"{host}:{port}", "is_host": int(is_host), "processes": processes(args) or ""}
    # torchrun guesses its address from host names, and fails if a host has two (pytorch issue 73656).
    interface = interface_of(address or host)
    return own, {**shutdown(args), "PET_LOCAL_ADDR": address, "GLOO_SOCKET_IFNAME": interface}


def shutdown(args) -> dict:
    """Return torchrun's limit for workers that save when it gets a signal; its own 30 s would cut a save off."""
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(args.grace_s) + AGENT_S)}


def toward(host: str) -> tuple[str | None, bool]:
    """Return this machine's address toward a host, None if no other can use it; and whether this is the host."""
    try:
        own = local_address(host)
        there = socket.getaddrinfo(host, None)[0][4][0]
    except OSError:
        return None, False
    loopback = ipaddress.ip_address(own.partition("%")[0]).is_loopback
    usable = not loopback or host in ("localhost", there)  # any other name may mean another machine elsewhere
    return own if usable else None, loopback or own == there


def interface_of(address: str) -> str | None:
    """Return gloo's network interface: InfiniBand's, or that of an address, by iproute2. None: gloo chooses."""
    if infiniband.is_here():
        return infiniband.INTERFACE
    with contextlib.suppress(FileNotFoundError):
        command = ["ip", "-oneline", "address", "show", "to", address.partition("%")[0]]
        found = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return found[1] if found else None
    return None


def slurm_job(args) -> tuple[dict, dict]:
    """Return the batch script's own variables and those for torchrun, and record the start."""
    from lib.launch import slurm  # which a project may have deleted, and an image leaves out

    history = slurm.record_start(args)
    count = processes(args) or os.environ.get("SLURM_GPUS_ON_NODE", 1)
    own = {"history": history, "suffix": "i" if infiniband.is_here() else "", "processes": count}
    return own, {
        **shutdown(args),
        "GLOO_SOCKET_IFNAME": infiniband.INTERFACE if infiniband.is_here() else None,
    }


def processes(args) -> int | None:
    """Return how many processes the flags request on this machine, None without such flags."""
    return len(args.gpus.split(",")) if args.gpus else args.cpu


def local_address(host: str) -> str:
    """Return this machine's address on the way to a host; nothing is sent. Raises OSError."""
    family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
