"""-tb: TensorBoard's server during a run; -ngrok: a tunnel to it, behind a password.

Both live in a process of their own, which ends with the run, even after kill -9. `python -m tensorboard.main` would
stay, and would show its flags to every user of the machine: the address has a random word in it that keeps them out.
"""

import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from lib.utils.monitoring import console

ROOT = Path(__file__).resolve().parents[3]
ADDRESS_FILE = "tensorboard_address.txt"  # in the folder of the run
log = logging.getLogger(__name__)


def password() -> str | None:
    """Return what the tunnel of -ngrok asks for."""
    return os.environ.get("NGROK_PASSWORD")


class Server:
    """Start TensorBoard over all runs, on 127.0.0.1 and the first free port from 6006 on; returns at once.

    The address goes to the terminal and into a file in the run's folder, which only the user can read, and into no
    log. With `credentials`, "user:password", a tunnel is opened that asks for these.
    """

    def __init__(self, run: Path, credentials: str | None = None):
        self._address_file = run / ADDRESS_FILE
        self._address_file.unlink(missing_ok=True)
        self._address_file.touch(mode=0o600)
        log.info("TensorBoard: its address will be in %s", self._address_file)
        command = [sys.executable, "-m", "lib.utils.monitoring.tensorboard_server"]
        # In a session of its own: Ctrl-C is for the run.
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True, start_new_session=True)
        order = {"run": str(run.resolve()), "credentials": credentials, "parent": os.getpid()}
        if self._process.stdin:  # not on the command line, which everybody can read
            with self._process.stdin as stdin:
                json.dump(order, stdin)

    def close(self):
        """End the server and the tunnel."""
        self._process.terminate()
        self._process.wait()
        self._address_file.unlink(missing_ok=True)


def main():
    """Serve until the run is gone: the process that `Server` starts."""
    order = json.load(sys.stdin)
    run = Path(order["run"])
    console.setup_logging(run, rank=0, main=True)
    logging.getLogger().setLevel(logging.WARNING)  # the server logs each request, with the word
    logging.getLogger("pyngrok").propagate = False  # the agent's messages may hold the token
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # at exit pyngrok ends the agent
    os.nice(10)
    address = start_tensorboard(run.parent)
    show("TensorBoard", address, run)
    if order["credentials"]:
        public = open_tunnel(address, order["credentials"])
        if public:
            show("TensorBoard for others", public, run)
    while os.getppid() == order["parent"]:
        time.sleep(0.5)


def start_tensorboard(runs: Path) -> str:
    """Start TensorBoard's server in a thread. Returns its address."""
    from tensorboard import program

    word = secrets.token_urlsafe(16)
    server = program.TensorBoard()
    # Its fast loader would be a second server, without the word.
    flags = ["--logdir", str(runs), "--host", "127.0.0.1", "--path_prefix", f"/{word}", "--load_fast", "false"]
    server.configure(argv=["tensorboard", *flags])
    return server.launch()


def show(name: str, address: str, run: Path):
    """Write an address into the file, and onto the terminal if there is one."""
    with (run / ADDRESS_FILE).open("a") as file:
        file.write(f"{name}: {address}\n")
    if sys.stdout.isatty():
        sys.stdout.write(f"\r\x1b[K{name}: {address}\n")  # over the progress bar, which then comes again
        sys.stdout.flush()


def open_tunnel(address: str, credentials: str) -> str | None:
    """Open a tunnel to a local address that asks for "user:password". Returns its address, or None with a warning."""
    from pyngrok import conf, exception, ngrok

    local = urllib.parse.urlsplit(address)
    config = conf.PyngrokConfig()
    config.auth_token = None  # the agent reads it itself; pyngrok would put it on the agent's command line
    lock = {"type": "basic-auth", "config": {"credentials": [credentials]}}
    policy = {"on_http_request": [{"actions": [lock]}]}
    try:
        tunnel = ngrok.connect(f"http://{local.netloc}", pyngrok_config=config, inspect=False, traffic_policy=policy)
        if tunnel.public_url and asks_for_password(tunnel.public_url):
            return tunnel.public_url.rstrip("/") + local.path
        problem = "it asks for no password"
    except (exception.PyngrokError, OSError) as error:
        # Not pyngrok's own text: it may hold the token or the password.
        code = re.search(r"ERR_NGROK_\d+", str(error))
        problem = f"see https://ngrok.com/docs/errors/{code[0].lower()}" if code else type(error).__name__
    ngrok.kill(config)
    log.warning("-ngrok: no tunnel (%s); training continues", problem)
    return None


def asks_for_password(address: str) -> bool:
    """Whether a stranger is refused there."""
    try:
        urllib.request.urlopen(address, timeout=15).close()
    except urllib.error.HTTPError as error:
        return error.code == 401
    return False


if __name__ == "__main__":
    main()
