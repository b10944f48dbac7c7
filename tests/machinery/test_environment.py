"""What is told to torch and its kin by variables: caches, debugging, the fast network of some machines."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import parsed

from lib.launch import environment, slurm_task
from scripts import agent

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An environment without any of these variables."""
    before = dict(os.environ)
    ours = (*environment.CACHES, *environment.DEBUG, *environment.OPENMP_SPIN)
    for name in (*ours, "SCRATCH", "SYSTEMNAME", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    os.environ["USER"] = "ann"
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


def test_caches_lie_in_the_folder_that_was_asked_for_or_in_scratch(bare, tmp_path):
    environment.export(None, False)
    assert not environment.CACHES.keys() & os.environ.keys()
    bare.setenv("SCRATCH", str(tmp_path / "scratch"))
    bare.setenv("HF_HOME", "/mine")
    environment.export(None, False)
    assert os.environ["TORCH_HOME"] == f"{tmp_path}/scratch/cache_ann/torch"
    for name in environment.CACHES.keys() - {"HF_HOME"}:
        bare.delenv(name)
    environment.export(f"{tmp_path}/mine", False)
    assert {name: os.environ[name] for name in environment.CACHES} == {
        "TORCH_HOME": f"{tmp_path}/mine/torch",
        "TORCH_EXTENSIONS_DIR": f"{tmp_path}/mine/torch_extensions",
        "TRITON_CACHE_DIR": f"{tmp_path}/mine/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/mine/torchinductor",
        "HF_HOME": "/mine",
    }


def test_threads_wait_for_each_other_as_the_user_says_or_else_only_for_a_moment(bare):
    bare.setenv("OMP_WAIT_POLICY", "active")
    assert environment.export(None, False) == {}
    bare.delenv("OMP_WAIT_POLICY")
    assert environment.export(None, False) == environment.OPENMP_SPIN
    bare.setenv("GOMP_SPINCOUNT", "7")
    assert environment.export(None, False) == {} and os.environ["GOMP_SPINCOUNT"] == "7"


def test_debugging_and_caches_are_there_before_torch_is_imported(bare, tmp_path):
    """In a real run of two processes: torch's C++ and the process group speak, inductor's cache is where it was asked
    for, the user's own word stands."""
    words = [sys.executable, "train.py", "-arch", "mlp", "-epochs", "1", "-cpu", "2", "-out", str(tmp_path)]
    env = {**os.environ, "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    code = "import os, sys, train; code = train.main(sys.argv[1:]); print(dict(os.environ)); sys.exit(code)"
    words[1:2] = ["-c", code]
    quiet, loud = (
        subprocess.run([*words, *more], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
        for more in (["-model", "quiet"], ["-model", "loud", "-debug_dist", "-cache_dir", str(tmp_path)])
    )
    assert quiet.returncode == loud.returncode == 0, quiet.stderr + loud.stderr
    assert not re.search(r"\[I\d", quiet.stderr) and "TORCH_DISTRIBUTED_DEBUG" not in quiet.stdout
    for message in ("TCPStore", "Reducer"):
        assert any(message in line and "[I" in line for line in loud.stderr.splitlines()), message
    caches = {name: f"{tmp_path}/{part}" for name, part in environment.CACHES.items()}
    for name, value in {**environment.DEBUG, **caches, "NCCL_DEBUG": "WARN"}.items():
        assert f"'{name}': '{value}'" in loud.stdout


def test_deterministic_runs_give_cublas_its_workspace():
    assert environment.for_run(parsed("")) == {}
    assert environment.for_run(parsed("-deterministic")) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(("hip", "wanted"), [("6.3", "HIP"), (None, "CUDA")])
def test_gpus_of_rocm_are_chosen_by_its_own_variable_where_that_is_set(hip, wanted, bare):
    """On a machine of NVIDIA's the same variable says nothing."""
    bare.setattr(torch.version, "hip", hip)
    bare.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("HIP", "CUDA"):
        bare.setenv(f"{name}_VISIBLE_DEVICES", "4,5,6,7")
    assert environment.visible_devices("1,2") == {f"{wanted}_VISIBLE_DEVICES": "5,6"}
    bare.delenv("HIP_VISIBLE_DEVICES")
    assert environment.visible_devices("1,2") == {"CUDA_VISIBLE_DEVICES": "5,6"}


def test_many_ranks_are_not_connected_each_with_each_other(monkeypatch):
    for size, variables in ((8, {}), (4096, {"TORCH_GLOO_LAZY_INIT": "1"})):
        monkeypatch.setenv("WORLD_SIZE", str(size))
        assert environment.for_run(parsed("")) == variables


@pytest.mark.parametrize("system", ["juwels", "juwelsbooster", "jurecadc", "jusuf"])
def test_some_machines_have_another_name_on_their_fast_network(bare, system):
    bare.setenv("SYSTEMNAME", system)
    assert environment.infiniband_name("jwb0001") == "jwb0001i"
    assert environment.infiniband_name("jwb0001.juwels") == "jwb0001i.juwels"
    assert environment.infiniband_name("jwb0001i.juwels") == "jwb0001i.juwels"
    assert environment.infiniband_name("10.13.23.64") == "10.13.23.64"
    assert environment.infiniband_name("fe80::1") == "fe80::1"
    assert agent.interface_of("10.13.23.64") == "ib0"
    variables = environment.rank_variables({"RANK": 0}, "run", ("10.13.23.64", 10_000))
    assert variables["GLOO_SOCKET_IFNAME"] == "ib0"


def test_any_other_machine_is_called_by_its_name(bare):
    bare.setenv("SYSTEMNAME", "elsewhere")
    assert environment.infiniband_name("gpu17") == "gpu17"
    assert agent.interface_of("127.0.0.1") == environment.LOOPBACK
    assert agent.interface_of("192.0.2.7") is None
    assert "GLOO_SOCKET_IFNAME" not in environment.rank_variables({"RANK": 0}, "run", ("10.13.23.64", 10_000))


def test_a_task_of_slurm_meets_the_others_in_the_fast_network_alone(bare, monkeypatch):
    """The store listens at the address on the way to another node; the others find it by its name there."""
    asked, known = [], socket.getaddrinfo

    def addresses(name, *more, **options):
        asked.append(name)
        return known("127.0.0.1", *more, **options)

    bare.setenv("SLURM_STEP_NODELIST", "jwb[0001-0002]")
    bare.setenv("SLURM_JOB_ID", "5")
    bare.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    for system, end in (("juwelsbooster", "i"), ("elsewhere", "")):
        bare.setenv("SYSTEMNAME", system)
        for node, name in ((0, "jwb0002"), (1, "jwb0001")):
            bare.setenv("SLURM_NODEID", str(node))
            assert slurm_task.rendezvous_address()[0] == "127.0.0.1"
            assert asked.pop() == f"{name}{end}"
    bare.setenv("SLURM_STEP_NODELIST", "jwb0001")
    assert slurm_task.rendezvous_address()[0] == "127.0.0.1" and not asked, "a node alone needs no network"
