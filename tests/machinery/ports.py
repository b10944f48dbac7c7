"""Ports of this machine, for tests."""

import contextlib
import socket
from pathlib import Path


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def listens(pid: int) -> list[str]:
    """The addresses, as the kernel writes them, on which a process listens; none after it has ended."""
    links, lines = [], []
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # already closed
                links.append(str(fd.readlink()))
        for name in ("tcp", "tcp6"):
            lines += Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    return [row[1] for row in [line.split() for line in lines] if row[3] == "0A" and f"socket:[{row[9]}]" in links]
