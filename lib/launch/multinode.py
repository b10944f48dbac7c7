"""Several machines, the run started on each by hand: they meet at node 0 and stay in touch until the run is over, so
that none waits for one that is gone.

The words that cross the wire are lines of JSON. Node 0 listens on -master_addr alone, without a password, as torch's
own store does after it on the same socket: a network that one trusts is taken for granted.
"""

import array
import contextlib
import errno
import fcntl
import ipaddress
import json
import socket
import struct
import sys
import time
import uuid
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

from lib.launch import environment
from lib.utils.errors import FAILED, FINISHED, STOPPED, UsageError

HELLO_S, RETRY_S, LEAVE_S, WORD = 5.0, 0.5, 30.0, 1 << 20
HELLO = {"rank": int, "count": int, "nnodes": int, "host": str}  # what a machine says of itself
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine without power is gone after 20 s
SIOCGIFCONF, ROW = 0x8912, struct.Struct("16s4x4s16x")  # Linux: name and IPv4 address of each interface


@dataclass
class Link:
    """The connection to the parent process on another machine."""

    wire: socket.socket
    name: str  # what to call it
    said: dict = field(default_factory=dict)  # its last word: exit code and message
    rest: bytes = b""  # what came and was not read yet

    def __post_init__(self):
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                self.wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fileno(self) -> int:
        return self.wire.fileno()

    @property
    def over(self) -> bool:
        """Whether nothing more will come from there."""
        return bool(self.said)

    @property
    def failed(self) -> bool:
        return self.over and self.said["code"] not in (FINISHED, STOPPED)

    def listen(self):
        """Takes its last word, if it has come or the connection is lost."""
        while not self.over and (b"\n" in self.rest or connection.wait([self], 0)):
            self.said = self.word(HELLO_S) or {"code": FAILED, "message": f"{self.name} is gone"}

    def word(self, seconds: float) -> dict | None:
        """The next thing it says; None if that does not come, or is none of ours."""
        self.wire.settimeout(seconds)
        try:
            while b"\n" not in self.rest and len(self.rest) < WORD:
                data = self.wire.recv(65536)
                if not data:
                    return None
                self.rest += data
            line, _, self.rest = self.rest.partition(b"\n")
            said = json.loads(line)
        except (OSError, ValueError, RecursionError):  # json's, of many brackets
            return None
        return said if isinstance(said, dict) else None

    def send(self, **word):
        with contextlib.suppress(OSError):  # it is gone: that is seen where it is listened to
            self.wire.sendall(json.dumps(word).encode() + b"\n")


@dataclass
class Others:
    """This machine's place among those of the run, and its connections to the others: node 0 has one to each, the
    others have one to node 0. A machine alone is node 0, with none."""

    first: int  # rank of its first process
    size: int  # processes on all machines
    run: str  # an id that all of them share
    store: tuple[str, int]  # address and port where the ranks meet
    interface: str | None  # of the network between them
    name: str = ""  # what the others call it
    listener: socket.socket | None = None  # for the store, on node 0
    links: list[Link] = field(default_factory=list)

    def report(self, code: int, text: str = ""):
        """Says how this machine ended, or passes on which other one failed."""
        passed_on = any(text == link.said.get("message") for link in self.links)
        for link in self.links:
            link.send(code=code, message=text if passed_on else f"{self.name}: {text}")

    def leave(self):
        """Closes the connections. Node 0, which has the store, waits until the others are done with it."""
        until = time.monotonic() + LEAVE_S
        while waiting := [link for link in self.links if self.listener and not link.over]:
            if not connection.wait(waiting, max(0.0, until - time.monotonic())):
                break
            for link in waiting:
                link.listen()
        for link in self.links:
            link.wire.close()


def alone(count: int) -> Others:
    """One machine: what listens there can be reached from nowhere else."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4 * count)
    return Others(0, count, uuid.uuid4().hex, listener.getsockname(), interface_of("127.0.0.1"), listener=listener)


def meet(args, count: int) -> Others:
    """Waits until all machines are there; `count` processes are to run on this one.

    Raises UsageError, in one line, for what keeps them from meeting within -hang_minutes.
    """
    host = environment.fast_name(args.master_addr, args.master_suffix)
    mine = {"rank": args.node_rank, "count": count, "nnodes": args.nnodes, "host": socket.gethostname()}
    until = time.monotonic() + args.hang_minutes * 60
    take_part = gather if args.node_rank == 0 else join
    others = take_part(host, args.master_port, mine, until)
    others.name = f"node {args.node_rank} ({mine['host']})"
    others.interface = environment.fast_interface() or others.interface
    return others


def gather(host: str, port: int, mine: dict, until: float) -> Others:
    """Node 0's part: hears who the others are, and sends each its place."""
    listener, wanted = listening(host, port), mine["nnodes"]
    address, port = listener.getsockname()[:2]
    nodes, links = {0: mine}, {}
    say(f"waiting for {wanted - 1} more at {address}, port {port}")
    while len(nodes) < wanted:
        ready = connection.wait([listener, *links.values()], max(0.0, until - time.monotonic()))
        if not ready:
            missing = ", ".join(str(rank) for rank in range(wanted) if rank not in nodes)
            raise UsageError(f"-nnodes {wanted}: -node_rank {missing} did not come within -hang_minutes")
        for rank in [rank for rank, link in links.items() if link in ready]:
            say(f"{links.pop(rank).name} has left again")
            del nodes[rank]
        if listener in ready:
            greet(listener, nodes, links)
    listener.setblocking(True)
    size, run = sum(node["count"] for node in nodes.values()), uuid.uuid4().hex
    for rank, link in links.items():
        first = sum(nodes[other]["count"] for other in range(rank))
        link.send(first=first, size=size, run=run, host=mine["host"])
    return Others(0, size, run, (address, port), interface_of(address), listener=listener, links=[*links.values()])


def greet(listener: socket.socket, nodes: dict, links: dict):
    """Takes in the machine that knocks, unless it has no place in this run."""
    link = Link(listener.accept()[0], "a machine")
    hello = link.word(HELLO_S) or {}
    if {name: type(value) for name, value in hello.items()} != HELLO:
        link.wire.close()  # no machine of ours
        return
    link.name = f"node {hello['rank']} ({hello['host']})"
    fault = unfit(hello, nodes)
    say(f"{link.name} {'is refused: ' + fault if fault else 'is there'}")
    if fault:
        link.send(refused=fault)
        link.wire.close()
        return
    nodes[hello["rank"]], links[hello["rank"]] = hello, link


def unfit(hello: dict, nodes: dict) -> str:
    """Why a machine cannot take part, "" if it can."""
    theirs, wanted = hello["nnodes"], nodes[0]["nnodes"]
    if theirs != wanted or not 0 <= hello["rank"] < wanted:
        return f"-nnodes is {theirs} there and {wanted} on node 0: give all machines the same"
    if hello["rank"] in nodes:
        return f"-node_rank {hello['rank']} is {nodes[hello['rank']]['host']} already: each machine needs its own"
    return ""


def join(host: str, port: int, mine: dict, until: float) -> Others:
    """The part of the other nodes: finds node 0 and hears its place."""
    link = Link(reached(host, port, until), "node 0")
    address = link.wire.getpeername()[0]
    link.send(**mine)
    place = link.word(max(1.0, until - time.monotonic())) or {}
    if "refused" in place:
        raise UsageError(place["refused"])
    if "first" not in place:
        raise UsageError(f"-master_addr {host} -master_port {port}: what listens there does not wait for this run: "
                         "is it running already?")  # fmt: skip
    link.name = f"node 0 ({place.pop('host')})"
    own = link.wire.getsockname()[0]
    return Others(**place, store=(address, port), interface=interface_of(own), links=[link])


def reached(host: str, port: int, until: float) -> socket.socket:
    """A connection to node 0, which may be started later than this one."""
    addresses(host, port)
    patient = False
    while True:
        try:
            wire = socket.create_connection((host, port), timeout=HELLO_S)
            if wire.getsockname() != wire.getpeername():  # else it has met itself, as can happen on one machine
                return wire
            fault = "nobody listens"
        except OSError as error:
            fault = error.strerror or str(error)
        if time.monotonic() > until:
            raise UsageError(f"-master_addr {host} -master_port {port}: node 0 does not answer ({fault})")
        if not patient:
            say(f"node 0 does not answer at {host}, port {port} ({fault}): trying again")
        patient = True
        time.sleep(RETRY_S)


def listening(host: str, port: int) -> socket.socket:
    """A socket on this machine's own address of that name, and on no other. Raises UsageError if it has none that
    others can reach."""
    there = addresses(host, port)
    outside = [one for one in there if not ipaddress.ip_address(one[1][0].partition("%")[0]).is_loopback]
    typed = host == "localhost" or any(host == place[0] for _, place in there)
    if not outside and not typed:
        raise UsageError(f"-master_addr {host} means {there[0][1][0]} on this machine, where others cannot reach it: "
                         "give its address in the network")  # fmt: skip
    for family, place in outside or there:
        try:
            return socket.create_server(place[:2], family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise UsageError(f"-master_port {port}: {error.strerror} on this machine: name another") from None
    raise UsageError(f"-master_addr {host} is no address of this machine, and -node_rank 0 must run there")


def addresses(host: str, port: int) -> list[tuple]:
    """What the name means: families and places. Raises UsageError if nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"-master_addr {host} is unknown here ({getattr(error, 'strerror', None) or error})"
        ) from None
    return [(family, place) for family, _, _, _, place in found]


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface with that address; None where it cannot be found."""
    if not sys.platform.startswith("linux"):
        return None
    if ":" in address:
        digits = ipaddress.ip_address(address.partition("%")[0]).exploded.replace(":", "")
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((row[-1] for row in rows if row[0] == digits), None)
    room = array.array("B", bytes(256 * ROW.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iP", len(room), room.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(any_socket, SIOCGIFCONF, asked))[0]
    rows = ROW.iter_unpack(bytes(room)[:used])
    names = [name.split(b"\0")[0].decode().partition(":")[0] for name, ip in rows if ip == socket.inet_aton(address)]
    return next(iter(names), None)


def say(text: str):
    """Tells the person at the terminal."""
    print(f"train.py: {text}", file=sys.stderr, flush=True)
