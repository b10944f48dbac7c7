"""A run on several machines, started by hand on each: on loopback, and between network namespaces with addresses of
their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import ports
import pytest
from command_line import error_of

from lib.launch import environment, multinode
from lib.utils.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at its runs through /proc")
GONE_S = 40  # a machine without power is gone after 20
NETWORKS = {"baton_a": "10.77.0.1", "baton_b": "10.77.0.2"}


@pytest.fixture
def machines(start):
    """Starts a run on both machines, the second one first. Gives their Runs, by -node_rank."""

    def both(name, *words, deeds=(None, None), counts=(1, 1), addr="127.0.0.1", networks=None):
        runs, port = [], ports.free()
        for rank in (1, 0):
            env = {"NETWORK": networks[rank]} if networks else {}
            place = ["-nnodes", 2, "-node_rank", rank, "-master_addr", addr, "-master_port", port]
            runs.insert(0, start(name, *place, *words, cpu=counts[rank], deed=deeds[rank], env=env))
        return runs

    return both


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
            for words in (f"address add {address}/24 dev cable", "link set cable up", "link set lo up"):
                assert ip(f"-n {name} {words}") == 0
        yield list(NETWORKS)
    finally:
        for name in NETWORKS:
            ip(f"netns delete {name}")


def ip(words: str) -> int:
    return subprocess.run(["ip", *words.split()], stderr=subprocess.DEVNULL).returncode


def test_two_machines_train_as_one_and_a_signal_on_either_stops_both(machines, undisturbed):
    runs = machines("two", deeds=[{"do": "pause", "step": 25}] * 2)
    for run in runs:
        run.noted(1)
    os.kill(runs[1].pid, signal.SIGTERM)
    for run in runs:
        run.go()
    assert [run.ends() for run in runs] == [75, 75], runs[0].text() + runs[1].text()
    assert runs[0].outcome()["state"] == "stopped" and runs[0].outcome()["step"] == 26
    runs = machines("two")
    assert [run.ends() for run in runs] == [0, 0], runs[0].text() + runs[1].text()
    assert runs[0].weights() == undisturbed.weights()
    for run in runs:
        run.is_gone()


def test_machines_may_have_different_numbers_of_processes(machines):
    runs = machines("uneven", counts=(2, 1), deeds=[{"do": "pause", "step": 5}] * 2)
    notes = [*runs[0].noted(2), *runs[1].noted(1)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    places = [tuple(int(note["environ"][name]) for name in names) for note in notes]
    assert places == [(0, 0, 3, 2), (1, 1, 3, 2), (2, 0, 3, 1)]
    assert len({note["environ"]["TORCHELASTIC_RUN_ID"] for note in notes}) == 1
    for run in runs:
        run.go()
    assert [run.ends() for run in runs] == [0, 0], runs[0].text() + runs[1].text()


@pytest.mark.parametrize("there", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_machine_with_its_name(machines, there):
    deeds = [None, None]
    deeds[there] = {"do": "strike", "signal": "SIGKILL", "step": 5}
    runs = machines("killed", deeds=deeds)
    assert [run.ends() for run in runs] == [1, 1]
    for run in runs:
        assert f"rank {there} was killed by SIGKILL; the others are ended" in run.text()
        run.is_gone()
    assert runs[1 - there].text().splitlines()[-1].startswith(f"train.py: node {there} (")


def test_a_machine_that_is_gone_ends_the_other(machines):
    runs = machines("gone", deeds=[{"do": "pause", "step": 5}] * 2)
    for run in runs:
        run.noted(1)
    runs[1].end()
    runs[0].go()
    assert runs[0].ends() == 1
    assert runs[0].text().splitlines()[-1] == f"train.py: node 1 ({socket.gethostname()}): the connection is lost"
    runs[0].is_gone()


def test_machines_with_addresses_of_their_own_listen_nowhere_else(machines, networks, undisturbed):
    """Each has but its own network; gloo uses the interface that leads to the other. Then the cable is cut."""
    where = {"networks": networks, "addr": NETWORKS["baton_a"]}
    deeds = [{"do": "pause", "step": 5}] * 2
    runs = machines("apart", deeds=deeds, **where)
    for run, own in zip(runs, NETWORKS.values(), strict=True):
        assert run.noted(1)[0]["environ"]["GLOO_SOCKET_IFNAME"] == "cable"
        listening = {address.partition(":")[0] for pid in run.processes() for address in ports.listens(pid)}
        assert listening == {socket.inet_aton(own)[::-1].hex().upper()}
        run.go()
    assert [run.ends() for run in runs] == [0, 0], runs[0].text() + runs[1].text()
    assert runs[0].weights() == undisturbed.weights()
    runs = machines("cut", deeds=deeds, **where)
    for run in runs:
        run.noted(1)
    assert ip("-n baton_a link set cable down") == 0
    for run in runs:
        run.go()
    assert [run.ends(GONE_S) for run in runs] == [1, 1]
    for run, other in zip(runs, (1, 0), strict=True):
        assert (
            run.text().splitlines()[-1] == f"train.py: node {other} ({socket.gethostname()}): the connection is lost"
        )


def test_strangers_are_turned_away_and_a_port_that_is_taken_is_one_line(start):
    port = ports.free()
    place = ["-nnodes", 2, "-master_addr", "localhost", "-master_port", port, "-epochs", 1, "-node_rank"]
    first = start("run", *place, 0, cpu=1)
    first.says("waiting for 1 more")
    again = start("run", *place, 0, cpu=1)
    assert again.ends() == 2 and f"-master_port {port} (Address already in use" in again.text()
    for line in (b"GET / HTTP/1.0\r\n", b"[" * 200_000, b"\0\0\0\x02[]"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(line)
            with contextlib.suppress(ConnectionResetError):
                assert not stranger.recv(1), line[:20]
    second = start("run", *place, 1, cpu=1)
    assert (first.ends(), second.ends()) == (0, 0), first.text() + second.text()


def test_another_number_of_machines_ends_both_with_one_line(start):
    place = ["-master_addr", "localhost", "-master_port", ports.free(), "-nnodes"]
    runs = [start("run", *place, 2 + rank, "-node_rank", rank, cpu=1) for rank in (0, 1)]
    assert [run.ends() for run in runs] == [2, 2]
    said = "train.py: -nnodes is 3 on rank 1 and 2 on rank 0: give all processes the same"
    assert [run.text().splitlines()[-1] for run in runs] == [said, said]


def test_machines_with_different_flags_end_with_one_line_each(start):
    place = ["-nnodes", 2, "-master_addr", "localhost", "-master_port", ports.free(), "-node_rank"]
    runs = [start("run", *place, rank, "-batch_size", batch, cpu=1) for rank, batch in ((0, 64), (1, 32))]
    assert [run.ends() for run in runs] == [2, 2], runs[0].text() + runs[1].text()
    said = "train.py: -batch_size is 32 on rank 1 and 64 on rank 0: give all processes the same"
    assert [run.text().splitlines()[-1] for run in runs] == [said, said]
    assert not runs[0].folder.exists()


def test_of_two_machines_with_one_rank_the_second_takes_part(start):
    """The first was ended and started again, or it is a mistake."""
    place = ["-nnodes", 3, "-master_addr", "localhost", "-master_port", ports.free(), "-node_rank"]
    first = start("run", *place, 0, cpu=1)
    first.says("waiting for 2 more at 127.0.0.1")
    second = start("run", *place, 1, cpu=1)
    first.says("node 1 (")
    twin = start("run", *place, 1, cpu=1)
    assert second.ends() == 2
    assert "or did another machine come with -node_rank 1?" in second.text()
    os.kill(first.pid, signal.SIGINT)
    assert first.ends() == 75 and "Traceback" not in first.text()
    assert twin.ends() == 2 and "node 0 does not wait for this machine" in twin.text()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("-nnodes 2 -node_rank 2 -master_addr here", "-node_rank 2 of -nnodes 2: 0 to 1 are wanted"),
        ("-nnodes 2 -node_rank 0", "-nnodes, -node_rank and -master_addr belong together"),
        ("-nnodes 2 -master_addr here", "-nnodes, -node_rank and -master_addr belong together"),
        ("-node_rank 0 -master_addr here", "-nnodes, -node_rank and -master_addr belong together"),
        ("-nnodes 2 -node_rank 0 -master_addr a -master_port 65536", "and at most 65535"),
        (
            "-nnodes 2 -node_rank 0 -master_addr no.such.invalid -cpu 1",
            "-node_rank 0 cannot listen at -master_addr no.such.invalid",
        ),
        (
            "-nnodes 2 -node_rank 0 -master_addr 192.0.2.7 -cpu 1",
            "(Cannot assign requested address",
        ),
        (
            "-nnodes 2 -node_rank 0 -master_addr here -check_resume",
            "run it without torchrun, srun, -slurm and -nnodes",
        ),
    ],
)
def test_what_keeps_machines_from_meeting_is_one_line(words, answer, tmp_path, capsys):
    assert answer in error_of(words, tmp_path, capsys)


def test_nobody_waits_longer_than_hang_minutes(start):
    place = ["-nnodes", 2, "-hang_minutes", 0.01, "-master_addr", "localhost", "-node_rank"]
    runs = [start("run", *place, rank, "-master_port", ports.free(), cpu=1) for rank in (0, 1)]
    assert [run.ends() for run in runs] == [2, 2]
    assert "-nnodes 2: -node_rank 1 did not come within -hang_minutes" in runs[0].text()
    assert "node 0 does not answer (Connection refused)" in runs[1].text()


def test_torchrun_and_srun_say_who_takes_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = error_of("-nnodes 2 -node_rank 0 -master_addr here", tmp_path, capsys)
    assert said == "-nnodes 2 under torchrun or srun: they start the processes of all machines"


def test_the_interface_of_an_address_is_found():
    assert environment.interface_of("127.0.0.1") == environment.LOOPBACK == "lo"
    assert environment.interface_of("192.0.2.7") is None


@pytest.mark.timeout(60)  # old code tried again for an hour
def test_a_machine_that_comes_too_late_says_so_at_once(monkeypatch):
    """The store that took over node 0's socket accepts connections, and answers a stranger nothing."""
    monkeypatch.setattr(multinode, "ANSWER_S", 0.2)
    listener = multinode.serve("127.0.0.1", 0)
    port = listener.getsockname()[1]
    store = multinode.open_store(listener, "127.0.0.1", 2)
    with pytest.raises(UsageError, match="node 0 does not wait for this machine"):
        multinode.join("127.0.0.1", port, {"rank": 1, "name": "late", "count": 1}, time.monotonic() + 3600)
    del store
