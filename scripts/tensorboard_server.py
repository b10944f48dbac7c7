"""TensorBoard's server over a folder of runs: python scripts/tensorboard_server.py out [-ngrok].

-ngrok also opens a tunnel to it, behind the password in NGROK_PASSWORD. train.py -tb and -ngrok start it next to a
run, as a process of its own, which ends with the run, even after kill -9.
"""

import argparse
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.config import types
from lib.utils.errors import UsageError, printable


def check_password() -> None:
    """Raise UsageError if there is no good password for a tunnel."""
    if not re.fullmatch(r"[^\s:$]{12,128}", os.environ.get("NGROK_PASSWORD", "")):
        wanted = "set NGROK_PASSWORD to 12 to 128 characters, without $, colon or space"
        raise UsageError(f"-ngrok opens no tunnel without a password: {wanted}")


def start(runs: Path, user: str = "") -> subprocess.Popen:
    """Start TensorBoard over a folder of runs, on 127.0.0.1 and the first free port from 6006 on; print its address.

    With a user's name, open a tunnel, too, that asks for it and for the password in NGROK_PASSWORD.
    """
    command = [sys.executable, __file__, str(runs.resolve()), "-parent", str(os.getpid())]
    command += ["-ngrok", "-ngrok_auth", user] if user else []
    # In a session of its own: Ctrl-C is for the run.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def main(argv: list[str] | None = None) -> int:
    """Serve until the process of -parent is gone, or without one until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=Path("out"), metavar="out", help="folder of runs (out)")
    parser.add_argument("-ngrok", "--ngrok", action="store_true", help="open a tunnel, too")
    user = {"type": types.run_name, "default": "baton", "metavar": "USER"}
    parser.add_argument("-ngrok_auth", "--ngrok_auth", **user, help="goes with the password (%(default)s)")
    parser.add_argument("-parent", "--parent", type=int, metavar="PID", help="process of the run: end with it")
    args = parser.parse_args(argv)
    try:
        if not args.runs.is_dir():
            raise UsageError(f"{args.runs} is no folder: give the one that -out of the runs names")
        if args.ngrok:
            check_password()
    except UsageError as error:
        parser.exit(2, f"tensorboard_server.py: {printable(str(error))}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # at exit pyngrok ends the agent
    if args.parent:
        os.nice(10)
    try:
        serve(args.runs, args.ngrok_auth if args.ngrok else "", args.parent)
    except KeyboardInterrupt:
        print()
    return 0


def serve(runs: Path, user: str, parent: int | None) -> None:
    """Print the server's address, and the tunnel's if there is a user. Return once the process `parent` is gone."""
    from tensorboard import program

    logging.disable()  # the server logs each request; the messages of ngrok's agent may hold the token
    board = program.TensorBoard()
    # Its fast loader would be a second server.
    board.configure(argv=["tensorboard", "--logdir", str(runs), "--host", "127.0.0.1", "--load_fast", "false"])
    address = board.launch()
    print(f"TensorBoard: {address}", flush=True)
    if user:
        print(f"TensorBoard for others: {open_tunnel(address, user)}", flush=True)
    while parent in (None, os.getppid()):
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
        return f"no tunnel ({code[0] if code else type(error).__name__}); all else continues"


if __name__ == "__main__":
    sys.exit(main())
