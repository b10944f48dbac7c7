"""Prints, for elastic.sh to evaluate, what a torchrun agent on this machine is to know: `agent.py HEAD:PORT WORDS`.

The head by its name on the fast network, whether it is this machine, and this machine's address on the way there
(torchrun guesses both from names, and errs where a host has two: pytorch issue 73656); the interface of that address
for gloo; and what -debug_dist and -cache_dir of the words set, as the agent reads some of it too. Without torch, so
that it takes no time.
"""

import ipaddress
import os
import shlex
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import config, nodes, variables
from lib.utils.errors import USAGE, UsageError


def main(head: str, *words: str) -> int:
    """Prints lines of shell. Returns the exit code."""
    name, _, port = head.rpartition(":")
    suffix = config.value_of(list(words), "master_suffix")
    try:
        new = variables.export(*config.early(list(words)))
    except UsageError as error:
        nodes.say(str(error))
        return USAGE
    host = variables.fast_name(name, suffix)
    own, is_host = toward(host)
    interface = variables.fast_interface() or (nodes.interface_of(own) if own else None)
    new |= {"PET_LOCAL_ADDR": own} if own else {}
    new |= {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}
    print(f"head={shlex.quote(f'{host}:{port}')} is_host={int(is_host)}")
    for variable, value in new.items():
        print(f"export {variable}={shlex.quote(value)}")
    return 0


def toward(host: str) -> tuple[str | None, bool]:
    """The address of this machine on the way to a host, None where it cannot be told or no other could use it; and
    whether the host is this machine."""
    try:
        family, place = nodes.addresses(host, 9)[0]
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
