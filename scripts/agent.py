"""Prints, for elastic.sh to evaluate, what a torchrun agent on this machine is to know: `agent.py HEAD:PORT WORDS`.

The head by its name on the fast network, whether it is this machine, and this machine's address on the way there
(torchrun guesses both from names, and errs where a host has two: pytorch issue 73656); the interface of that address
for gloo; what -debug_dist and -cache_dir of the words set, as the agent reads some of it too; and how many processes
-cpu or -gpus ask for. What is wrong with the words is one line, here: torchrun would start again and again.
"""

import contextlib
import importlib.util
import ipaddress
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import config
from lib.launch import environment, local, multinode
from lib.utils.errors import FINISHED, UsageError


def main(head: str, *words: str) -> int:
    """Prints lines of shell. Returns the exit code."""
    name, _, port = head.rpartition(":")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # -h is not for the shell
            new = environment.export(*config.early(list(words)))
            args = config.parse_args(list(words))
        if args.reset and not os.environ.get("RUN_ID") and not os.environ.get("PET_RDZV_ID"):
            raise UsageError("-reset without RUN_ID: a second -reset would be taken for a restart of the first; give "
                             "all nodes a RUN_ID that no start had before, as RUN_ID=again_2")  # fmt: skip
        place = os.environ.get("RENDEZVOUS") or os.environ.get("PET_RDZV_BACKEND") or "c10d"
        if place.startswith("etcd") and importlib.util.find_spec("etcd") is None:
            raise UsageError(f"RENDEZVOUS={place} needs a package that is not installed: pip install python-etcd")
    except UsageError as error:
        return local.refused(error)
    host = environment.fast_name(name, args.master_suffix)
    own, is_host = toward(host)
    interface = environment.fast_interface() or (multinode.interface_of(own) if own else None)
    new |= {"PET_LOCAL_ADDR": own} if own else {}
    processes = len(args.gpus.split(",")) if args.gpus else args.cpu or ""
    own = {"head": f"{host}:{port}", "is_host": int(is_host), "processes": processes}
    print(environment.shell(own, new, interface), end="")
    return FINISHED


def toward(host: str) -> tuple[str | None, bool]:
    """The address of this machine on the way to a host, None where it cannot be told or no other could use it; and
    whether the host is this machine."""
    try:
        family, place = multinode.addresses(host, 9)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as wire:  # nothing is sent
            wire.connect(place)
            own = wire.getsockname()[0]
    except (OSError, UsageError):
        return None, False
    loopback = ipaddress.ip_address(own.partition("%")[0]).is_loopback
    typed = host in ("localhost", place[0])  # else a name that has another meaning elsewhere
    return own if typed or not loopback else None, loopback or own == place[0]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
