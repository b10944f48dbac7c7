"""Real runs for tests: each has a session of its own, its output is kept, its processes are killed after the test.

Python's fork server, which has imported what train.py imports, forks a run in a tenth of the time of a fresh Python,
which `command` starts. Tests ask for the fixtures `start` and `uninterrupted`.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120  # seconds that a test waits for anything
SOON_S = 30  # seconds until a run reacts or a failed one has ended, on a machine with other work
LEFT_OUT = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PYTHONDONTWRITEBYTECODE".split()
CLEAN = {key: one for key, one in os.environ.items() if key not in LEFT_OUT and not key.startswith("TORCHELASTIC")}


def until(condition: Callable, limit: float = LIMIT, what: str | Callable = "", pause: float = 0.01):
    """Wait until `condition()` is true, some seconds at most, and return it. `what`: a text, or a function to one."""
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {limit} s for {what() if callable(what) else what or condition}"
        time.sleep(pause)
    return value


@dataclass
class Run:
    """A running process of train.py and its output."""

    pid: int
    folder: Path  # out/NAME
    log: Path  # stdout and stderr
    notes: Path  # the files that ranks wrote when the fault happened
    ended: Callable[[], int | None]  # its exit code, once it has ended
    terminal: int | None = None  # the file descriptor of our end
    output: str = field(default="", repr=False)  # output read from the terminal
    known: set[int] = field(default_factory=set, repr=False)

    def wait(self, limit: float = LIMIT) -> int:
        """Wait for the end and return the exit code, negative after a signal."""
        until(lambda: (self.text(), self.ended() is not None)[1], limit, lambda: f"the end of:\n{self.text()}")
        return self.ended()

    def text(self) -> str:
        if self.terminal is None:
            return self.log.read_text() if self.log.exists() else ""
        while select.select([self.terminal], [], [], 0)[0]:
            try:
                self.output += os.read(self.terminal, 65536).decode(errors="replace")
            except OSError:  # nobody has the other end open any more
                break
        return self.output

    def wait_for_output(self, text: str, limit: float = LIMIT):
        until(lambda: text in self.text(), limit, lambda: f"{text!r} in:\n{self.text()}")

    def type(self, keys: str):
        os.write(self.terminal, keys.encode())

    def hang_up(self):
        os.close(self.terminal)
        self.terminal = None

    def wait_for_notes(self, count: int) -> list[dict]:
        """Wait for the notes of `count` ranks about the fault, and return them by rank."""
        files = until(lambda: self._notes(count), what=lambda: f"{count} notes in:\n{self.text()}")
        return [json.loads(file.read_text()) for file in files]

    def _notes(self, count):
        assert self.ended() is None or len(list(self.notes.glob("*.json"))) >= count, self.text()
        files = sorted(self.notes.glob("rank_*.json"))
        return files if len(files) >= count else None

    def release(self):
        self.notes.mkdir(exist_ok=True)  # maybe no rank has paused yet
        (self.notes / "go").touch()

    def outcome(self) -> dict:
        return json.loads((self.folder / "outcome.json").read_text())

    def weights(self) -> bytes:
        return (self.folder / "final" / "weights.safetensors").read_bytes()

    def processes(self) -> set[int]:
        """The living processes of its session, those that an earlier call found, and descendants of all these."""
        table = dict(_stat())
        mine = {pid for pid, (_, session) in table.items() if self.pid in (pid, session) or pid in self.known}
        while more := {pid for pid, (parent, _) in table.items() if parent in mine} - mine:
            mine |= more
        self.known = mine
        return mine

    def wait_until_gone(self, limit: float = LIMIT):
        until(lambda: not self.processes(), limit, lambda: f"the end of {self.processes()}")

    def ends_with(self, code: int):
        """Wait for the end: with this exit code, and soon after it without a process."""
        assert self.wait() == code, self.text()
        self.wait_until_gone(SOON_S)

    def end(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.terminal is not None:
            self.hang_up()


def _stat():
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent, _, session, *more = (entry / "stat").read_text().rpartition(")")[2].split()
            if state not in "ZX" or int(more[13]) > 1:  # a zombie whose threads are not gone yet
                yield int(entry.name), (int(parent), int(session))


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["faulty", "torch.utils.tensorboard"])


def run_in_fork(flags: list[str], env: dict, stdin: str, stdout: str, stderr: str):
    """Be a forked run as a fresh Python would be: in its own session, with its own terminal or files."""
    import faulty

    import train

    os.setsid()
    for number, name in enumerate((stdin, stdout, stderr)):
        mode = os.O_RDONLY if name == os.devnull else os.O_RDWR | os.O_CREAT | os.O_APPEND
        fd = os.open(name, mode, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    os.environ.clear()
    os.environ.update(env)
    faulty.register()
    sys.argv = ["train.py", *flags]
    sys.exit(train.main())


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Run:
    """A run that is not interrupted: two processes, three epochs of 20 steps."""
    run = Starter(tmp_path_factory.mktemp("uninterrupted"), [])("run")
    assert run.wait() == 0, run.text()
    return run


@pytest.fixture
def start(tmp_path):
    """Start runs of train.py with a model name and flags, by default by the fork server with two processes.

    `fault`: what faulty.py does. `command`: a fresh Python is started with this command instead. `terminal`: which of
    stdin, stdout and stderr are a terminal.
    """
    runs = []
    yield Starter(tmp_path, runs)
    for run in runs:
        run.end()


class Starter:
    def __init__(self, folder: Path, runs: list):
        self.folder, self.runs, self.count = folder, runs, itertools.count()

    def __call__(self, model="run", *flags, fault=None, env=None, command=None, terminal=(), cpu=2) -> Run:
        number = next(self.count)
        notes, log = self.folder / f"notes_{number}", self.folder / f"log_{number}"
        fault = json.dumps({**fault, "notes": str(notes)}) if fault else "{}"
        # One thread on any machine, so that all runs can be compared bit for bit.
        given = {**CLEAN, "OMP_NUM_THREADS": "1", "TERM": "dumb", "FAULT": fault, **(env or {})}
        given = {name: value for name, value in given.items() if value is not None}
        flags = ["-out", str(self.folder / "out"), "-model", model, "-cpu", str(cpu), *map(str, flags)]
        ours = None
        if command:
            log.touch()
            with log.open("ab") as file:
                streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "start_new_session": True}
                process = subprocess.Popen([sys.executable, *command, *flags], cwd=ROOT, env=given, **streams)
            pid, ended = process.pid, process.poll
        else:
            files = {"stdin": os.devnull, "stdout": str(log), "stderr": str(log)}
            if terminal:
                ours, theirs = pty.openpty()
                files |= dict.fromkeys(terminal, os.ttyname(theirs))
            flags = ["-arch", "mlp", "-epochs", "3", "-trainer", "faulty", *flags]
            process = FORKS.Process(target=run_in_fork, args=(flags, given), kwargs=files)
            process.start()
            pid, ended = process.pid, lambda: process.exitcode
            if terminal:
                os.close(theirs)
        run = Run(pid, self.folder / "out" / model, log, notes, ended, ours)
        self.runs.append(run)
        return run


@contextlib.contextmanager
def session(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    """Run a program in a session of its own, whose output is added to a file, and kill the session at the end."""
    with log.open("ab") as file:
        options = {"cwd": ROOT, "stdout": file, "stderr": file, "start_new_session": True, **options}
        process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def python(*args, code: int = 0, cwd: Path = ROOT, env: dict = CLEAN) -> str:
    """The output of Python with these arguments. It must end with this exit code."""
    return output_of([sys.executable, *args], code, cwd=cwd, env=env)


def output_of(command: Iterable, code: int | None = 0, *, limit: float = 280, **options) -> str:
    """The output of a command, stdout first. It must end with this exit code, None for any; `limit` in seconds."""
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, **options)
    assert code in (None, done.returncode), f"{command}: exit code {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def copy_tracked(folder: Path, wanted: Callable[[Path], bool] = lambda name: True):
    """Copy the files that git tracks, or those of them with a wanted name, to a folder."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in map(Path, names.splitlines()):
        if wanted(name) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def copy_of_the_code(folder: Path) -> Path:
    """Copy what runs and their scripts need to an existing or new folder, and return it."""
    for part in ("lib", "scripts", "data"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / file, folder)
    return folder


def fake_program(folder: Path, name: str, text: str) -> Path:
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!{shutil.which('bash', path=CLEAN['PATH'])}\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def serve():
    """Start the server of -tb in a process that acts as the run: it prints "interrupted", and ends with its stdin."""
    command, log = [sys.executable, "-c", SERVE], Path(os.devnull)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with contextlib.ExitStack() as stack:
        yield lambda runs: stack.enter_context(session([*command, str(runs)], log, **pipes))


SERVE = """
import signal, sys
from pathlib import Path
from scripts import tensorboard_server
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
server = tensorboard_server.start(Path(sys.argv[1]))
sys.stdin.read()
server.terminate()
"""
