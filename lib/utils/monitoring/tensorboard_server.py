"""-tb: TensorBoard's server during a run; -ngrok: a tunnel to it, behind a password.

Both live in a process of their own, which ends with the run, even after kill -9. The server's address has a random
word in it that keeps other users of the machine out; it is on no command line, which they could read.
"""

import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

from lib.utils.monitoring import console

ROOT = Path(__file__).resolve().parents[3]
ADDRESS_FILE = "tensorboard_address.txt"  # in the folder of the run
log = logging.getLogger(__name__)


class Server:
    """Start TensorBoard over all runs, on 127.0.0.1 and the first free port from 6006 on; returns at once.

    The address goes to the terminal and into a file in the run's folder, which only the user can read, and into no
    log. With a user's name, a tunnel is opened that asks for it and for the password in NGROK_PASSWORD.
    """

    def __init__(self, run: Path, user: str = ""):
        self._address_file = run / ADDRESS_FILE
        self._address_file.unlink(missing_ok=True)
        self._address_file.touch(mode=0o600)
        log.info("TensorBoard: its address will be in %s", self._address_file)
        command = [sys.executable, "-m", __name__, str(run.resolve()), str(os.getpid()), user]
        # In a session of its own: Ctrl-C is for the run.
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """End the server and the tunnel."""
        self._process.terminate()
        self._process.wait()
        self._address_file.unlink(missing_ok=True)


def main(run: Path, parent: int, user: str) -> None:
    """Serve until the process `parent` is gone: what `Server` starts."""
    from tensorboard import program

    console.setup_logging(run, rank=0)
    logging.getLogger().setLevel(logging.WARNING)  # the server logs each request, with the word
    logging.getLogger("pyngrok").propagate = False  # the agent's messages may hold the token
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # at exit pyngrok ends the agent
    os.nice(10)
    board, word = program.TensorBoard(), secrets.token_urlsafe(16)
    # Its fast loader would be a second server, without the word.
    flags = ["--logdir", f"{run.parent}", "--host", "127.0.0.1", "--path_prefix", f"/{word}", "--load_fast", "false"]
    board.configure(argv=["tensorboard", *flags])
    address = board.launch()
    show("TensorBoard", address, run)
    if user and (public := open_tunnel(address, f"{user}:{os.environ['NGROK_PASSWORD']}")):
        show("TensorBoard for others", public, run)
    while os.getppid() == parent:
        time.sleep(0.5)


def show(name: str, address: str, run: Path) -> None:
    """Write an address into the file, and onto the terminal if there is one."""
    with (run / ADDRESS_FILE).open("a") as file:
        file.write(f"{name}: {address}\n")
    if sys.stdout.isatty():
        sys.stdout.write(f"\r\x1b[K{name}: {address}\n")  # over the progress bar, which then comes again
        sys.stdout.flush()


def open_tunnel(address: str, credentials: str) -> str | None:
    """Open a tunnel to a local address that asks for "user:password". Return its address, or None with a warning."""
    from pyngrok import conf, exception, ngrok

    local = urllib.parse.urlsplit(address)
    config = conf.PyngrokConfig()
    config.auth_token = None  # the agent reads it itself; pyngrok would put it on the agent's command line
    lock = {"type": "basic-auth", "config": {"credentials": [credentials]}}
    policy = {"on_http_request": [{"actions": [lock]}]}
    try:
        tunnel = ngrok.connect(f"http://{local.netloc}", pyngrok_config=config, inspect=False, traffic_policy=policy)
    except (exception.PyngrokError, OSError) as error:
        code = re.search(r"ERR_NGROK_\d+", str(error))  # the rest may hold the token or the password
        log.warning("-ngrok: no tunnel (%s); training continues", code[0] if code else type(error).__name__)
        return None
    return f"{tunnel.public_url}{local.path}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
