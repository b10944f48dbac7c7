"""How the processes of a run are started, get their ranks, are watched, and are ended when one of them fails."""

import concurrent.futures
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import ports
import pytest
import torch
import yaml
from command_line import parsed, plugin_folder, usage_error
from processes import ROOT, SOON_S

import train
from lib import launch
from lib.launch import local
from lib.utils import distributed, errors
from scripts import check_resume

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inspects its runs in /proc")
STEPS = 60  # of three epochs
STRAY = {"RANK": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}  # left over from another program


def test_a_thread_that_gets_no_signals_is_refused(capfd):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(train.main, ["-cpu", "1"]).result() == 2
    assert "train.py: train.main runs in the main thread alone" in capfd.readouterr().err


def test_a_single_process_runs_in_the_parent_so_that_breakpoint_works(start):
    run = start("one", fault={"do": "debug", "step": 5}, cpu=1, terminal=("stdin", "stdout", "stderr"))
    run.wait_for_output("starting:    one (-dataset digits -arch mlp)")
    run.wait_for_output("(Pdb)")
    run.type("p 6 * 7\n")
    run.wait_for_output("42")
    run.type("c\n")
    assert run.wait() == 0, run.text()
    assert [note["pid"] for note in run.wait_for_notes(1)] == [run.pid]
    assert run.wait_for_notes(1)[0]["environ"]["WORLD_SIZE"] == "1"


def test_two_processes_import_torch_once_and_share_the_cores(start, uninterrupted):
    command, env = ["-X", "importtime", "train.py"], {"OMP_NUM_THREADS": None}
    run = start("real", "-arch", "mlp", "-epochs", 3, command=command, env=env)
    assert run.wait() == 0, run.text()
    imported = re.findall(r"^import time:.*\| +(\S+)$", run.text(), re.MULTILINE)
    for name in ("torch", "torch.distributed", "torch._dynamo.eval_frame", "numpy"):
        assert imported.count(name) == 1, name
    threads = yaml.safe_load((run.folder / "config.yaml").read_text())["threads"]
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2) or threads < 3  # of two hardware threads a core
    assert threads > 1 or run.weights() == uninterrupted.weights()


def test_children_get_their_ranks_and_listen_on_this_machine_only(start):
    run = start("place", fault={"do": "pause", "step": 5}, env={"OMP_NUM_THREADS": "3", **STRAY})
    notes = run.wait_for_notes(2)
    for rank, note in enumerate(notes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        assert {name: note["environ"][name] for name in place} == {name: str(value) for name, value in place.items()}
        assert int(note["environ"]["MASTER_PORT"]) > 0 and note["parent"] == run.pid
        assert (note["environ"]["OMP_NUM_THREADS"], note["threads"]) == ("3", 3), "the user's setting"
    assert run.processes() == {run.pid, *(note["pid"] for note in notes)}
    listening = [address for pid in run.processes() for address in ports.listens(pid)]
    assert len(listening) >= 3  # the store, and gloo in each rank
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}
    run.release()
    run.ends_with(0)


def test_runs_started_at_the_same_moment_never_collide(start):
    for run in [start(f"run_{number}", "-epochs", 1) for number in range(4)]:
        assert run.wait() == 0, run.text()


def test_the_error_of_a_rank_is_shown_first_once_and_in_full(start):
    fault = {"do": "fail", "step": 25, "rank": 1, "text": f"a sample {'x' * 200_000} that nobody can bear"}
    run = start("raises", "-workers", 1, fault=fault)
    run.ends_with(1)
    assert time.monotonic() - run.wait_for_notes(1)[0]["time"] < SOON_S
    assert run.text().count("Traceback (most recent call last)") == 1
    shown = run.text()[run.text().index("Traceback") :].strip()
    assert re.search(r"File .*faulty.py.*, in fail\n", shown)
    whole, *last = [line for line in shown.splitlines() if line != "failed"][-3:]  # "failed": of rank 0
    assert whole == f"ValueError: {fault['text']}"
    first, second = sorted(last)  # they come in any order
    assert first.startswith("train.py: rank 1 failed with exit code 1")
    assert second.startswith("train.py: step 25 is saved")
    assert run.outcome()["state"] == "failed" and run.outcome()["reason"].startswith(f"rank 1: {whole}")


def test_a_killed_loader_process_fails_the_run(start):
    run = start("loader", "-workers", 1, fault={"do": "pause", "step": 5})
    ranks = {note["pid"] for note in run.wait_for_notes(2)}
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in run.processes() - ranks - {run.pid}}
    loaders = [pid for pid, command in commands.items() if "resource_tracker" not in command]  # multiprocessing's
    assert len(loaders) == 6, "of three splits, on two ranks"
    os.kill(loaders[0], signal.SIGKILL)
    run.release()
    run.ends_with(1)
    # torch has another message for a loader that dies while it sends a batch.
    assert re.search(f"DataLoader worker .*{loaders[0]}|ConnectionResetError", run.text())
    assert run.outcome()["state"] == "failed"


def test_an_abort_that_follows_another_ranks_failure_does_not_hide_it():
    """torch aborts when it loses a peer."""
    assert local.failed_rank([-signal.SIGABRT, 1]) == 1
    assert local.failed_rank([None, -signal.SIGABRT]) == local.failed_rank([1, -signal.SIGKILL]) == 1
    assert local.failed_rank([None, 75, 0]) is None


@pytest.mark.parametrize(("forwarded", "code"), [([signal.SIGTERM], errors.STOPPED), ([], -signal.SIGTERM)])
def test_a_rank_that_a_signal_ends_before_its_handler_is_installed_is_no_failure(forwarded, code, tmp_path):
    context = multiprocessing.get_context("fork")
    process = context.Process(target=signal.pause)
    process.start()
    process.terminate()
    assert local.watch([process], forwarded, context.Lock(), tmp_path, grace_s=0) == code


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"do": "send_signal", "signal": "SIGSEGV", "rank": 0}, r"rank 0 was killed by SIGSEGV; the others"),
        ({"do": "fail_and_linger", "rank": 1}, "ValueError"),
    ],
)
def test_a_killed_rank_is_reported_and_a_failed_one_that_does_not_exit_is_killed(fault, message, start):
    run = start("fails", fault={**fault, "step": 5})
    run.ends_with(1)
    assert time.monotonic() - run.wait_for_notes(1)[0]["time"] < SOON_S
    assert re.search(message, run.text()), run.text()


SPAWNED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train
from lib.launch import local
local.fork_is_safe = lambda: False
if __name__ == "__main__":
    sys.exit(train.main())
"""


def test_children_that_cannot_be_forked_are_spawned(start, tmp_path, uninterrupted):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    run = start("spawned", "-arch", "mlp", "-epochs", 3, command=[str(script)])
    run.ends_with(0)
    assert run.weights() == uninterrupted.weights()


def test_children_are_forked_where_there_are_neither_gpus_nor_threads_of_a_plugin(monkeypatch):
    assert local.fork_is_safe()
    with Path(__file__).open():
        assert not local.fork_is_safe()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(time.sleep, 0).result()
        assert not local.fork_is_safe()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not local.fork_is_safe()


@pytest.mark.parametrize("line", ["{}", "def describe(args): {}; return {{}}"])
def test_what_a_plugin_computes_before_processes_are_forked_has_one_thread(line, monkeypatch, tmp_path):
    """Forked processes would wait for other threads for ever."""
    line = line.format("sys.threads = torch.get_num_threads()")
    text = f"import sys, torch\n{line}\ndef get_dataset(args): pass\n"
    plugin_folder(monkeypatch, tmp_path, "dataset", "computes", text)
    monkeypatch.setattr(sys, "threads", None, raising=False)
    try:
        torch.set_num_threads(2)
        launch.prepare(parsed("-dataset computes -cpu 2"))
        assert sys.threads == 1
    finally:
        torch.set_num_threads(1)


def test_there_are_as_many_processes_as_the_flags_say_or_one_for_each_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    for flags, count in (("", 4), ("-gpus 2,3", 2), ("-cpu 3", 3)):
        args = parsed(flags)
        assert local.count_processes(args) == check_resume.Check(args, tmp_path).size == count


@pytest.mark.parametrize(("rank", "is_one"), [("1", True), ("2", False)])
def test_a_process_counts_as_launched_if_its_rank_fits_its_world_size(rank, is_one, monkeypatch):
    for given in ({"RANK": rank, "WORLD_SIZE": "2"}, {"RANK": "0"}, {"WORLD_SIZE": "2"}):
        monkeypatch.setattr(os, "environ", given)
        assert launch.is_launched() == (is_one and len(given) == 2)
    assert "without MASTER_ADDR" in usage_error(distributed.join(parsed("-cpu 1")).__enter__)


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&-"])
def test_a_stream_that_the_shell_has_closed_does_not_write_into_a_file_of_the_run(closed, tmp_path):
    code = "from lib.utils import errors; import os\ndef main():\n file = open(os.environ['FILE'], 'w')\n"
    code += " print('a line')\n [os.write(number, b'x') for number in (1, 2)]\n return 0\nerrors.run_program(main)"
    command, env = ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], {"FILE": str(tmp_path / "file")}
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_torchrun_starts_the_same_run(start, uninterrupted):
    command = ["-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"]
    flags = ["-arch", "mlp", "-epochs", 3]
    run = start("torchrun", *flags, "-max_hours", 1e-9, command=command)
    assert run.wait() == 0, run.text()
    assert run.outcome()["state"] == "stopped" and 0 < run.outcome()["step"] < STEPS
    run = start("torchrun", *flags, command=command)
    run.ends_with(0)
    assert run.outcome()["state"] == "finished" and run.weights() == uninterrupted.weights()
