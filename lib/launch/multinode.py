"""-nnodes by hand: the launchers of all machines meet at node 0, and stay connected until the run is over.

torch's static agent was tried instead: it ends minutes after a signal, compares no flags, and starts half as fast.
Messages are JSON, never pickles. Node 0 listens on -master_addr alone, without a password, like torch's own store,
which takes over the same socket: use a network that you trust.
"""

import contextlib
import json
import resource
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from multiprocessing import connection

from lib.config import Args
from lib.launch import environment
from lib.utils.errors import FAILED, UsageError

HELLO_S, RETRY_S, ANSWER_S, LEAVE_S = 5.0, 0.5, 20.0, 30.0
MESSAGE_BYTES = 1 << 20
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine without power is gone after 20 s


class Link:
    """The connection to the launcher on another machine."""

    def __init__(self, wire: socket.socket):
        self.name = ""
        self.code: int | None = None  # its exit code, once the run is over there
        self.message = ""  # what it printed if the run failed
        wire.setblocking(True)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # macOS lacks one
                wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.pipe = connection.Connection(wire.detach())

    def send(self, **message: object) -> None:
        """Send a message; `listen` notices if the connection is lost."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(json.dumps(message).encode())

    def receive(self, seconds: float) -> dict:
        """Return the next message, {} if there is none in time or the connection is lost."""
        try:
            return (self.pipe.poll(seconds) and json.loads(self.pipe.recv_bytes(MESSAGE_BYTES))) or {}
        except (OSError, EOFError, ValueError):
            return {}

    def listen(self, seconds: float = 0.0) -> None:
        """Receive how the run ended there, if it did or if the connection is lost."""
        if self.code is None and self.pipe.poll(seconds):
            end = self.receive(HELLO_S) or {"code": FAILED, "message": "the connection is lost"}
            self.code, self.message = end["code"], f"{self.name}: {end['message']}"


@dataclass
class Meeting:
    """This machine's place in the run. Node 0 has a link to each of the others, they have one to node 0."""

    first_rank: int  # of this machine
    size: int  # processes on all machines
    run_id: str
    store: tuple[str, int]  # address and port of the rendezvous store
    interface: str | None  # the network between the machines, for gloo
    listener: socket.socket | None = None  # of the store, on node 0
    links: list[Link] = field(default_factory=list)

    def report(self, code: int, message: str = "") -> None:
        """Send the other machines how the run ended here."""
        for link in self.links:
            link.send(code=code, message=message)

    def leave(self) -> None:
        """Close the links. Node 0 has the store, and waits until the others no longer need it."""
        for link in self.links:
            if self.listener:
                link.listen(LEAVE_S)
            link.pipe.close()


def alone(count: int) -> Meeting:
    """Return the place of a machine that runs all `count` processes; no other can reach its store."""
    listener = serve("127.0.0.1", 0)
    return Meeting(0, count, uuid.uuid4().hex, listener.getsockname(), environment.LOOPBACK, listener=listener)


def meet(args: Args, count: int) -> Meeting:
    """Wait until all machines are there; this one will run `count` processes.

    Raises:
        UsageError: what keeps them from meeting within -hang_minutes.
    """
    host = environment.fast_name(str(args.master_addr))
    name = f"node {args.node_rank} ({socket.gethostname()})"
    own = {"rank": args.node_rank, "name": name, "count": count}
    until = time.monotonic() + args.hang_minutes * 60
    if args.node_rank:
        return join(host, args.master_port, own, until)
    return gather(host, args.master_port, own, args.nnodes, until)


def gather(host: str, port: int, own: dict, nnodes: int, until: float) -> Meeting:
    """Wait on node 0 for the others, then send each its place."""
    listener = listen(host, port)
    store = listener.getsockname()[:2]
    unreachable = ", which no other machine reaches" if store[0].startswith("127.") and host != store[0] else ""
    say(f"waiting for {nnodes - 1} more at {store[0]}, port {port}{unreachable}")
    nodes, links = {0: own}, {}
    while missing := [str(rank) for rank in range(nnodes) if rank not in nodes]:
        listener.settimeout(max(RETRY_S, until - time.monotonic()))
        try:
            link = Link(listener.accept()[0])
        except TimeoutError:
            who = f"-node_rank {', '.join(missing)}"
            raise UsageError(f"-nnodes {nnodes}: {who} did not come within -hang_minutes") from None
        node = link.receive(HELLO_S)
        if node.keys() != own.keys():  # another program
            link.pipe.close()
            continue
        link.name = node["name"]
        say(f"{link.name} is there")
        link.send(waiting=True)
        nodes[node["rank"]], links[node["rank"]] = node, link  # the last one of a rank, if it was started again
    listener.setblocking(True)
    size, run_id = sum(node["count"] for node in nodes.values()), uuid.uuid4().hex
    for rank, link in links.items():
        first_rank = sum(nodes[lower]["count"] for lower in range(rank))
        link.send(first_rank=first_rank, size=size, run_id=run_id, name=own["name"])
    interface = environment.interface_of(store[0])
    return Meeting(0, size, run_id, store, interface, listener, list(links.values()))


def join(host: str, port: int, own: dict, until: float) -> Meeting:
    """Connect to node 0, which may be started later, and receive this machine's place from it."""
    where = f"-master_addr {host} -master_port {port}"
    say(f"connecting to node 0 at {where}")
    while True:
        try:
            wire = socket.create_connection((host, port), timeout=HELLO_S)
            break
        except OSError as error:
            if time.monotonic() > until:
                raise UsageError(f"{where}: node 0 does not answer ({error.strerror or error})") from None
        time.sleep(RETRY_S)
    store, interface = (wire.getpeername()[0], port), environment.interface_of(wire.getsockname()[0])
    link = Link(wire)
    link.send(**own)
    place = link.receive(ANSWER_S)  # a store that took over the socket answers nothing
    if "waiting" in place:
        place = link.receive(max(HELLO_S, until - time.monotonic()))
    if "size" not in place:
        why = f"does the run go on already, or did another machine come with -node_rank {own['rank']}?"
        raise UsageError(f"{where}: node 0 does not wait for this machine: {why}")
    link.name = place.pop("name")
    return Meeting(**place, store=store, interface=interface, links=[link])


def listen(host: str, port: int) -> socket.socket:
    """Listen on this machine's address of that name, and on no other."""
    try:
        return serve(str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port)
    except OSError as error:
        fault = f"-node_rank 0 cannot listen at -master_addr {host} -master_port {port} ({error.strerror})"
        raise UsageError(f"{fault}: name an address and a free port of this machine") from None


def serve(address: str, port: int) -> socket.socket:
    """Listen at an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def open_store(listener: socket.socket, host: str, size: int) -> object:
    """Return the rendezvous store of `size` processes, on a socket that listens already. Keep it while it is used.

    It has two connections from each process, so this process may have as many files open as the machine allows.
    """
    from torch.distributed import TCPStore

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * size + 512, hard)), hard))
    port, fd = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def say(text: str) -> None:
    """Print a line for the person at the terminal."""
    print(f"train.py: {text}", file=sys.stderr, flush=True)
