"""A run on several machines, with a torchrun on each: on loopback, and between network namespaces with addresses of
their own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import ports
import pytest
from processes import CLEAN, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inspects its runs in /proc")
ROOT = Path(__file__).resolve().parents[2]
NETWORKS = {"baton_a": "10.77.0.1", "baton_b": "10.77.0.2"}


@pytest.fixture
def machines(start):
    """A function that starts a run by torchrun on each of two machines with a shared disk. Returns their Runs, that
    of the rendezvous host first."""

    def start_both(*flags, more=()):
        meeting = f"--rdzv_backend=c10d --rdzv_endpoint=localhost:{ports.free()}"
        command = f"-m torch.distributed.run --nnodes=2 --nproc_per_node=1 {meeting} train.py".split()
        first = start("run", *flags, command=command, cpu=1)
        until(lambda: first.folder.exists() or any(ports.listens(pid) for pid in first.processes()))
        return [first, start("run", *flags, *more, command=command, cpu=1)]

    return start_both


@pytest.fixture
def networks():
    """Two network namespaces and a cable between them."""
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("makes network namespaces: needs root and `apt-get install -y iproute2`")
    one, other = NETWORKS
    made = ip(f"netns add {one}") == 0
    if not made and not os.environ.get("CI"):
        pytest.skip("this machine lets nobody make network namespaces (`ip netns add` fails)")
    try:
        assert made and ip(f"netns add {other}") == 0
        assert ip(f"-n {one} link add cable type veth peer name cable netns {other}") == 0
        for name, address in NETWORKS.items():
            for command in (f"address add {address}/24 dev cable", "link set cable up", "link set lo up"):
                assert ip(f"-n {name} {command}") == 0
        yield list(NETWORKS)
    finally:
        for name in NETWORKS:
            ip(f"netns delete {name}")


def ip(command: str) -> int:
    return subprocess.run(["ip", *command.split()], stderr=subprocess.DEVNULL).returncode


def test_a_signal_to_one_torchrun_stops_all_machines_with_the_state_saved(machines):
    runs = machines("-arch", "mlp", "-epochs", 3000, "-save_every", "1000epochs")
    runs[0].wait_for_output("epoch 1/3000")
    os.kill(runs[0].pid, signal.SIGTERM)
    assert [run.wait() for run in runs] == [1, 0], runs[0].text() + runs[1].text()
    assert runs[0].outcome()["state"] == "stopped" and runs[0].outcome()["step"] > 0
    assert list((runs[0].folder / "checkpoints").glob(f"*_step_{runs[0].outcome()['step']}"))
    for run in runs:
        run.wait_until_gone()


def test_machines_with_different_flags_report_the_flag_and_do_not_train(machines):
    runs = machines("-arch", "mlp", more=("-batch_size", 32))
    assert [run.wait() for run in runs] == [1, 1]
    counts = [run.text().count("train.py: -batch_size is 32 on rank ") for run in runs]
    assert counts == [1, 1], runs[0].text() + runs[1].text()
    assert not runs[0].folder.exists()


def test_machines_with_different_addresses_train_one_run(tmp_path, networks, uninterrupted):
    """elastic.sh sets gloo's interface to the one that reaches the other machine. Each machine has a network."""
    env = {**CLEAN, "OMP_NUM_THREADS": "1", "HEAD": f"{NETWORKS[networks[0]]}:29400", "NODES": "2"}
    command = ["./scripts/elastic.sh", *"-arch mlp -epochs 3 -cpu 1 -model run -out".split(), str(tmp_path / "out")]
    agents = []
    try:
        for name in networks:
            prefix, log = ["ip", "netns", "exec", name], (tmp_path / f"{name}.log").open("w")
            options = {"cwd": ROOT, "env": env, "stdout": log, "stderr": log, "start_new_session": True}
            agents.append(subprocess.Popen([*prefix, *command], **options))
        for agent, address in zip(agents, NETWORKS.values(), strict=True):
            worker = until(lambda agent=agent: workers(agent.pid))[0]
            own = socket.inet_aton(address)[::-1].hex().upper()
            until(lambda worker=worker, own=own: own in [one.partition(":")[0] for one in ports.listens(worker)])
            assert b"\0GLOO_SOCKET_IFNAME=cable\0" in Path(f"/proc/{worker}/environ").read_bytes()
        assert [agent.wait(120) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    run = tmp_path / "out" / "run"
    assert json.loads((run / "outcome.json").read_text())["state"] == "finished"
    assert (run / "final" / "weights.safetensors").read_bytes() == uninterrupted.weights()


def workers(agent: int) -> list[int]:
    """The process ids of an agent's workers, without those that are just ending."""
    found = []
    with contextlib.suppress(OSError):
        for pid in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
            with contextlib.suppress(OSError):
                found += [pid] if b"-u\0train.py\0" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found
