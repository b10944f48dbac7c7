"""The TensorBoard server that -tb starts beside a run, and its tunnel of -ngrok."""

import atexit
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from lib.utils.monitoring import tunnel

ROOT = Path(__file__).resolve().parents[3]
log = logging.getLogger(__name__)


class Server:
    """TensorBoard's server while it runs: `address` once it answers; without a process, nothing.

    `heard(name, address)` is called from a thread for "address" and for "tunnel", as soon as there is one.
    """

    def __init__(self, process: subprocess.Popen | None, heard=None):
        self.address = ""
        self._process, self._owner, self._heard = process, os.getpid(), heard
        self._thread = threading.Thread(target=self._listen, args=(process,), daemon=True)
        if process is not None:
            atexit.register(self.close)
            self._thread.start()

    def close(self):
        """End the server; waits up to 2 seconds for it. In a forked child, which does not own it, nothing happens."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._thread.join()

    def _listen(self, process):
        told = {}
        with process.stdout as lines:
            for line in lines:
                told |= json.loads(line)
                self._hear(*json.loads(line).popitem())
        if not told:
            self._hear("error", "it ended before it was ready")

    def _hear(self, name, value):
        if self._process is None:  # closed in the meantime
            return
        if name.endswith("error"):
            what = "-ngrok: no tunnel" if name == "tunnel_error" else "-tb: no TensorBoard server"
            log.warning("%s (%s); training goes on", what, value)
            return
        self.address = value if name == "address" else self.address
        self._heard(name, value)


def serve(folder: Path, heard, enabled: bool = True, policy: dict | None = None) -> Server:
    """Start TensorBoard over `folder` on 127.0.0.1, on the first free port from 6006 on; returns at once.

    heard("address", ...) is called from a thread when it answers, after seconds; if it never does, there is one
    warning. With a `policy` (of tunnel.py) a tunnel is opened to it, and heard("tunnel", ...) called.
    TensorBoard knows no password, so a random word in the address keeps the machine's other users out: the word goes
    through a pipe, as command lines are public, and the data server, which would ask for no word, stays off.
    The server is in a session of its own (Ctrl-C goes to the run) and ends with this process, even after kill -9.
    """
    if not enabled:
        return Server(None)
    order = {
        "folder": str(Path(folder).resolve()),
        "word": secrets.token_urlsafe(16),
        "parent": os.getpid(),
        "policy": policy,
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    command = [sys.executable, "-m", "lib.utils.monitoring.tensorboard_server"]
    try:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    except OSError as error:
        log.warning("-tb: TensorBoard cannot be started (%s); training goes on", error)
        return Server(None)
    with suppress(OSError), process.stdin:  # a child that is gone already shows in its answer
        process.stdin.write(json.dumps(order))
    return Server(process, heard)


def _serve_until_orphaned():
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what packages print is not taken for the answer
    sys.excepthook = lambda kind, error, trace: _tell(answer, error=f"{kind.__name__}: {error}")
    order = json.load(sys.stdin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # with the agent, which pyngrok ends at exit
    os.nice(10)
    from tensorboard import program

    server = program.TensorBoard()
    flags = ["--logdir", order["folder"], "--host", "127.0.0.1", "--path_prefix", "/" + order["word"]]
    server.configure(argv=["tensorboard", *flags, "--load_fast", "false"])
    address = server.launch()
    _tell(answer, address=address)
    threading.Thread(
        target=tunnel.answer, args=(partial(_tell, answer), address, order["policy"]), daemon=True
    ).start()
    # Asking for the parent serves any thread of it; PR_SET_PDEATHSIG fires when the thread ends that started us.
    while os.getppid() == order["parent"]:
        time.sleep(0.5)


def _tell(stream, **answer):
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":  # the process that serve() starts
    _serve_until_orphaned()
