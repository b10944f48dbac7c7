"""A real Slurm of two nodes on this machine, for tests, and runs submitted to it."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

from processes import LIMIT, ROOT, output_of, until
from runs import lines

import lib.dataset
import train
from lib.config import plugins
from lib.launch import slurm

SCRIPT = ROOT / "scripts" / "slurm" / "mini_cluster.sh"
TOOLS = ("slurmctld", "slurmd", "munged")
MISSING = next((tool for tool in TOOLS if not shutil.which(tool, path="/usr/sbin:/usr/bin")), "")
ENABLED_BY = "apt-get install -y slurm-wlm munge, as root" if MISSING or os.getuid() else ""
ENABLED_BY = ENABLED_BY and f"no Slurm here; enabled by: {ENABLED_BY}"
DATASET = '''"""The digits without augmentation, read slowly; they can kill their process."""

import os
import signal
import time
from pathlib import Path

from lib.dataset import digits
from lib.utils.data.tensors import Tensors


def add_args(parser):
    digits.add_args(parser)
    parser.set_defaults(arch="mlp", epochs=3, micro_batch=16, log_every=2)
    parser.add_argument("-slow_s", type=float, default=0.02, help="seconds a micro-batch takes")
    parser.add_argument("-slow_deadly", type=int, default=0, help="micro-batches before it kills itself")
    parser.add_argument("-slow_lost", type=int, default=0, help="micro-batches before rank 1 kills itself, once")
    parser.add_argument("-slow_wait", type=int, default=0, help="readings before it waits for the file OUT/go")


class Slow(Tensors):
    args, done = None, 0

    def __getitems__(self, indices):
        time.sleep(self.args.slow_s)
        self.done += 1
        while self.done == self.args.slow_wait and not (Path(self.args.out) / "go").exists():
            time.sleep(0.1)
        mark = Path(self.args.out) / f"{self.args.model}.deadly"
        is_lost = os.environ["RANK"] == "1" and self.done == self.args.slow_lost > 0 and not mark.exists()
        if is_lost or (self.args.slow_deadly and (mark.exists() or self.done > self.args.slow_deadly)):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(indices)


def get_dataset(args):
    parts = digits.get_dataset(args)
    train = Slow(*parts["train"].tensors)
    train.args = args
    return {**parts, "train": train}
'''


class Cluster:
    """A mini cluster, and the code that its jobs run. Requeued jobs start without the usual delay."""

    def __init__(self, code: Path, out: Path, **options):
        self.code, self.out, self.options = code, out, {name: str(value) for name, value in options.items()}
        self.folder = Path(tempfile.mkdtemp(prefix="baton_slurm_", dir="/tmp"))
        self.environ = dict(os.environ)  # `run_here` changes it for a moment, in which a thread may read it
        self.over = threading.Event()
        self.starter = threading.Thread(target=self._start_requeued_jobs, daemon=True)

    def __enter__(self):
        subprocess.run([SCRIPT, "start", self.folder], env={**self.environ, **self.options}, check=True, timeout=120)
        self.starter.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.starter.join()
        subprocess.run([SCRIPT, "stop", self.folder], check=True, timeout=120)
        shutil.rmtree(self.folder, ignore_errors=True)

    def env(self, **more) -> dict[str, str]:
        python = {"PATH": f"{Path(sys.executable).parent}:{self.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
        own = {name: value for name, value in self.environ.items() if name != "OMP_NUM_THREADS"}
        return {**own, "SLURM_CONF": str(self.folder / "slurm.conf"), **python, **more}

    def run(self, *command, wanted: int | None = 0, **more) -> str:
        """The output of a command, started in the folder of the code. Its exit code must be `wanted`."""
        return output_of(command, wanted, cwd=self.code, env=self.env(**more))

    def train(self, flags: str, wanted: int = 0, **more) -> str:
        return self.run(sys.executable, "train.py", *flags.split(), "-out", self.out, wanted=wanted, **more)

    def run_here(self, flags: str, wanted: int = 0, **more) -> str:
        """The same as train(), in this process, which has imported torch already."""
        output, names = io.StringIO(), plugins.names
        with (
            mock.patch.dict(os.environ, self.env(**more)),
            mock.patch.object(slurm, "ROOT", self.code),
            mock.patch.object(plugins, "names", lambda kind: [*names(kind), "slow"]),
            mock.patch.object(lib.dataset, "__path__", [*lib.dataset.__path__, str(self.code / "lib" / "dataset")]),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            code = train.main([*flags.split(), "-out", str(self.out)])
        assert code == wanted, f"{flags}: exit code {code}: {output.getvalue()}"
        return output.getvalue()

    def submit(self, flags: str, nodes: int = 2, **more) -> str:
        """Submit a run with 2 tasks a node, unless -cpu is given, and return the job id."""
        cpu = "" if "-cpu" in flags else "-cpu 2"
        output = self.run_here(f"-slurm -slurm_nnodes {nodes} {cpu} -slurm_cpus 1 -dataset slow {flags}", **more)
        return re.search(r"submitted: +job (\d+)", output)[1]

    def submit_urgent(self, seconds: float) -> str:
        """Submit a job that preempts the jobs on all nodes."""
        command = "sbatch --parsable -purgent -N2 --exclusive -o/dev/null --wrap".split()
        return self.run(*command, f"sleep {seconds}").strip()

    def job(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(?:^| )(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", job)))

    def wait_for_end(self, job: str, limit: float = LIMIT) -> dict[str, str]:
        """Wait until a job is over, for at most `limit` seconds, and return its fields."""
        unfinished = ("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED")
        found = lambda: f"{self.job(job)}\n{_texts(*self.out.glob(f'*/slurm/{job}_*.out'))}"  # noqa: E731
        until(lambda: self.job(job)["JobState"] not in unfinished, limit, found, 0.2)
        return self.job(job)

    def wait_until_it_trains(self, name: str, step: int = 1):
        until(lambda: (steps_of(self.out / name) or [0])[-1] >= step, what=self.log(name))

    def log(self, name: str):
        return lambda: _texts(*(self.out / name / "slurm").glob("*.out"), *self.out.glob(f"{name}.log"))

    def _start_requeued_jobs(self):
        """Start requeued jobs soon: Slurm delays them by two minutes. A start in the same second would fail."""
        done = set()
        while not self.over.wait(0.5):
            output = self.run("squeue", "-h", "-t", "PENDING", "-o", "%A %r", wanted=None).splitlines()
            waiting = {line.split()[0] for line in output if line.endswith(" BeginTime")}
            for job in waiting - done:
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2", wanted=None)
            done = waiting


def _texts(*logs: Path) -> str:
    return "".join(f"{log}:\n{log.read_text()}" for log in sorted(logs))


def steps_of(folder: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        return [line["step"] for line in lines(folder) if "train/loss" in line]
    return []
