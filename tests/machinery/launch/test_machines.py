"""A run on two machines: network namespaces with addresses of their own, and elastic.sh on each."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import CLEAN, children, session, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inspects its runs in /proc")
NETWORKS = {"baton_a": "10.77.0.1", "baton_b": "10.77.0.2"}


@pytest.fixture
def networks():
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


def test_machines_with_different_addresses_train_one_run(tmp_path, networks, uninterrupted):
    """elastic.sh sets gloo's interface to the one that reaches the other machine. Each machine has a network."""
    env = {**CLEAN, "OMP_NUM_THREADS": "1", "HEAD": f"{NETWORKS[networks[0]]}:29400", "NODES": "2"}
    command = ["./scripts/elastic.sh", *"-arch mlp -epochs 3 -cpu 1 -model run -out".split(), str(tmp_path / "out")]
    with contextlib.ExitStack() as stack:
        prefixes = [["ip", "netns", "exec", name] for name in networks]
        sessions = [session([*prefix, *command], tmp_path / f"{prefix[-1]}.log", env=env) for prefix in prefixes]
        agents = [stack.enter_context(one) for one in sessions]
        for agent in agents:
            worker = until(lambda agent=agent: workers(agent.pid))[0]
            assert b"\0GLOO_SOCKET_IFNAME=cable\0" in Path(f"/proc/{worker}/environ").read_bytes()
        assert [agent.wait(120) for agent in agents] == [0, 0]
    run = tmp_path / "out" / "run"
    assert json.loads((run / "outcome.json").read_text())["state"] == "finished"
    assert (run / "final" / "weights.safetensors").read_bytes() == uninterrupted.weights()


def workers(agent: int) -> list[int]:
    """The process ids of an agent's workers, without those that are just ending."""
    found = []
    for pid in children(agent):
        with contextlib.suppress(OSError):
            found += [pid] if b"-u\0train.py\0" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found
