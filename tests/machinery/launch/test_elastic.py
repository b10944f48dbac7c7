"""torchrun with nodes that join and leave, on loopback: the run continues on the remaining nodes where it was."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys

import ports
import pytest
from needs import require
from processes import CLEAN, ROOT, children, session, until
from runs import outcome, run
from saves import bits

pytestmark = pytest.mark.timeout(600)  # 2,400 steps take minutes on a machine with other work
FLAGS = "-cpu 1 -threads 1 -micro_batch 16 -epochs 120 -eval_every 20epochs -save_every 500epochs -log_every 10 "
FLAGS += "-model elastic -arch mlp -mlp_depth 0 -optimizer sgd -lr_start 0.05"


@pytest.fixture
def nodes(tmp_path):
    """A function that starts the next node of an elastic run; the remaining ones are ended after the test."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(**env):
            number = next(numbers)
            usual = {"NODES": "1:2", "PER_NODE": "1", "OMP_NUM_THREADS": "1", "IS_HOST": str(int(not number))}
            command = ["./scripts/elastic.sh", *FLAGS.split(), "-out", str(tmp_path / "out")]
            log = tmp_path / f"node_{number}.log"
            return stack.enter_context(session(command, log, env={**CLEAN, **usual, **env}))

        yield start


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), FLAGS)


def test_a_run_continues_when_nodes_join_and_are_lost(tmp_path, nodes, single):
    """No step is lost if a node joins, or an agent or a worker is killed."""
    env = {"HEAD": f"127.0.0.1:{ports.free()}"}
    log = tmp_path / "out" / "elastic" / "logs" / "rank_0.log"
    first = nodes(**env)
    until(lambda: log.exists() and _steps(log) >= 20)

    second = nodes(**env)
    joined = _wait_for_start(log, 2)
    assert joined["stopped"] == joined["resumed"] > 0

    until(lambda: _steps(log) > joined["resumed"] + 20)
    done = _steps(log)
    os.kill(until(lambda: children(second.pid))[0], signal.SIGKILL)  # its worker
    replaced = _wait_for_start(log, 3)
    assert replaced["resumed"] >= done > joined["resumed"] + 20

    until(lambda: _steps(log) > replaced["resumed"] + 20)
    os.kill(second.pid, signal.SIGKILL)
    smaller = _wait_for_start(log, 4)
    assert smaller["stopped"] == smaller["resumed"] > replaced["resumed"]
    assert "signal SIGTERM" in log.read_text()

    assert first.wait(400) == 0
    assert _has_same_end(tmp_path / "out" / "elastic", single)


@require("" if shutil.which("etcd") else "needs etcd: apt-get install etcd-server, pip install python-etcd")
def test_a_node_that_gets_sigterm_saves_and_its_replacement_continues_by_etcd(tmp_path, nodes, single):
    """An eviction sends SIGTERM to the agent, which passes it to its own workers only. The other node waits."""
    client, peer = (f"127.0.0.1:{ports.free()}" for _ in range(2))
    options = {"data-dir": tmp_path / "etcd", "log-level": "error", "listen-client-urls": f"http://{client}"}
    options |= {"advertise-client-urls": f"http://{client}", "listen-peer-urls": f"http://{peer}"}
    options |= {"initial-advertise-peer-urls": f"http://{peer}", "initial-cluster": f"default=http://{peer}"}
    command = ["etcd", "--enable-v2", *(f"--{name}={value}" for name, value in options.items())]
    env = {"HEAD": client, "RENDEZVOUS": "etcd-v2", "NODES": "2"}
    log = tmp_path / "out" / "elastic" / "logs" / "rank_0.log"
    with session(command, tmp_path / "etcd.log"):
        until(lambda: not ports.is_free(int(client.partition(":")[2])))
        head, other = nodes(**env), nodes(**env)
        until(lambda: log.exists() and _steps(log) >= 20)
        until(lambda: children(other.pid))
        os.kill(other.pid, signal.SIGTERM)
        assert other.wait(60)
        nodes(**env)
        replaced = _wait_for_start(log, 2)
        assert replaced["stopped"] == replaced["resumed"] > 0
        assert head.wait(400) == 0
    assert _has_same_end(tmp_path / "out" / "elastic", single)


def _wait_for_start(log, starts):
    """Wait for the given start of the run and return its step before and after."""
    until(lambda: log.read_text().count("resuming from") >= starts - 1)
    text = log.read_text()
    resumed_at = int(re.findall(r"resuming from .*: epoch \d+, step (\d+)", text)[-1])
    stopped = [int(step) for step in re.findall(r"stopped \(.*\) in epoch \d+/\d+ at step (\d+)", text)]
    return {"resumed": resumed_at, "stopped": stopped[-1] if stopped else None}


def _steps(log):
    return int((re.findall(r"  step (\d+)/", log.read_text()) or ["0"])[-1])


def _has_same_end(folder, single) -> bool:
    """Whether the run ended as one that was not interrupted, with every step logged once."""
    ours, truth = outcome(folder), outcome(single)
    is_same = all(ours[name] == truth[name] for name in ("state", "samples", "best", "test"))
    return is_same and bits(folder) == bits(single)


def test_a_worker_whose_agent_ends_before_torch_is_imported_detects_that_it_is_an_orphan(tmp_path):
    """The agent is a shell that ends at once; its worker imports torch afterwards."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import os, pathlib, signal, time\n"
        "from lib.utils import errors\n"
        "pathlib.Path('ready').touch()\n"
        "while os.getppid() == errors.PARENT:\n"
        "    time.sleep(0.01)\n"
        "from lib.utils import watchdog\n"
        "signal.signal(signal.SIGTERM, lambda *_: [pathlib.Path('answer').touch(), os._exit(0)])\n"
        "with watchdog.watch(1 / 60):\n"
        "    time.sleep(60)\n"
    )
    env = {**CLEAN, "PYTHONPATH": str(ROOT), "TORCHELASTIC_MAX_RESTARTS": "3"}
    agent = f"{sys.executable} {program} & until [ -e ready ]; do sleep 0.05; done"
    subprocess.run(["sh", "-c", agent], cwd=tmp_path, env=env, check=True, stdin=subprocess.DEVNULL)
    assert until((tmp_path / "answer").exists)
