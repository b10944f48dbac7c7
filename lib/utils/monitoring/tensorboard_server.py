"""-tb: TensorBoard's server during a run; -ngrok: a tunnel to it, behind a password.

Both live in a process of their own, which ends with the run, even after kill -9.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from lib.utils.errors import UsageError

ROOT = Path(__file__).resolve().parents[3]


def check_password() -> None:
    """Raise UsageError if there is no good password for a tunnel."""
    if not re.fullmatch(r"[^\s:$]{12,128}", os.environ.get("NGROK_PASSWORD", "")):
        wanted = "set NGROK_PASSWORD to 12 to 128 characters, without $, colon or space"
        raise UsageError(f"-ngrok opens no tunnel without a password: {wanted}")


def start(runs: Path, user: str = "") -> subprocess.Popen:
    """Start TensorBoard over a folder of runs, on 127.0.0.1 and the first free port from 6006 on; print its address.

    With a user's name, open a tunnel, too, that asks for it and for the password in NGROK_PASSWORD.
    """
    command = [sys.executable, "-m", __name__, str(runs.resolve()), str(os.getpid()), user]
    # In a session of its own: Ctrl-C is for the run.
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)


def main(runs: str, parent: int, user: str) -> None:
    """Serve until the process `parent` is gone: what `start` starts."""
    from tensorboard import program

    logging.disable()  # the server logs each request; the messages of ngrok's agent may hold the token
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # at exit pyngrok ends the agent
    os.nice(10)
    board = program.TensorBoard()
    # Its fast loader would be a second server.
    board.configure(argv=["tensorboard", "--logdir", runs, "--host", "127.0.0.1", "--load_fast", "false"])
    address = board.launch()
    print(f"TensorBoard: {address}", flush=True)  # noqa: T201  # a process of its own
    if user:
        print(f"TensorBoard for others: {open_tunnel(address, user)}", flush=True)  # noqa: T201
    while os.getppid() == parent:
        time.sleep(0.5)


def open_tunnel(address: str, user: str) -> str:
    """Open a tunnel to a local address that asks for the password. Return its address, or why there is none."""
    from pyngrok import conf, exception, ngrok

    conf.get_default().auth_token = None  # the agent reads it itself; pyngrok would put it on its command line
    lock = {"type": "basic-auth", "config": {"credentials": [f"{user}:{os.environ['NGROK_PASSWORD']}"]}}
    policy = {"on_http_request": [{"actions": [lock]}]}
    try:
        return ngrok.connect(address.rstrip("/"), inspect=False, traffic_policy=policy).public_url or ""
    except (exception.PyngrokError, OSError) as error:
        code = re.search(r"ERR_NGROK_\d+", str(error))  # the rest may hold the token or the password
        return f"no tunnel ({code[0] if code else type(error).__name__}); training continues"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
