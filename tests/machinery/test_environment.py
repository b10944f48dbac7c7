"""Environment variables for torch and other libraries: caches, debugging, the fast network of some machines."""

import os
import re
import shutil
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


def test_caches_are_in_the_folder_of_cache_dir_or_in_scratch(bare, tmp_path):
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


def test_openmp_threads_spin_as_the_user_says_or_only_briefly(bare):
    bare.setenv("OMP_WAIT_POLICY", "active")
    assert environment.export(None, False) == {}
    bare.delenv("OMP_WAIT_POLICY")
    assert environment.export(None, False) == environment.OPENMP_SPIN
    bare.setenv("GOMP_SPINCOUNT", "7")
    assert environment.export(None, False) == {} and os.environ["GOMP_SPINCOUNT"] == "7"


def test_variables_for_debugging_and_caches_are_set_before_torch_is_imported(bare, tmp_path):
    """In a real run of two processes torch's C++ code and the process group log, inductor's cache is in -cache_dir,
    and the user's own setting is kept."""
    code = "import os, sys, train; code = train.main(sys.argv[1:]); print(dict(os.environ)); sys.exit(code)"
    flags = f"-arch mlp -epochs 1 -limit_steps 2 -cpu 2 -debug_dist -cache_dir {tmp_path} -out {tmp_path}".split()
    env = {**os.environ, "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *flags]
    loud = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert loud.returncode == 75, loud.stderr
    for message in ("TCPStore", "Reducer"):
        assert any(message in line and "[I" in line for line in loud.stderr.splitlines()), message
    caches = {name: f"{tmp_path}/{part}" for name, part in environment.CACHES.items()}
    for name, value in {**environment.DEBUG, **caches, "NCCL_DEBUG": "WARN"}.items():
        assert f"'{name}': '{value}'" in loud.stdout


def test_a_deterministic_run_sets_the_cublas_workspace_and_many_ranks_use_gloos_lazy_connections(monkeypatch):
    assert environment.for_run(parsed("")) == {}
    assert environment.for_run(parsed("-deterministic")) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    monkeypatch.setenv("WORLD_SIZE", "4096")
    assert environment.for_run(parsed("")) == {"TORCH_GLOO_LAZY_INIT": "1"}


@pytest.mark.parametrize(("hip", "wanted"), [("6.3", "HIP"), (None, "CUDA")])
def test_on_rocm_gpus_are_chosen_by_its_own_variable_if_it_is_set(hip, wanted, bare):
    """On a machine with NVIDIA GPUs this variable has no effect."""
    bare.setattr(torch.version, "hip", hip)
    bare.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("HIP", "CUDA"):
        bare.setenv(f"{name}_VISIBLE_DEVICES", "4,5,6,7")
    assert environment.visible_devices("1,2") == {f"{wanted}_VISIBLE_DEVICES": "5,6"}
    bare.delenv("HIP_VISIBLE_DEVICES")
    assert environment.visible_devices("1,2") == {"CUDA_VISIBLE_DEVICES": "5,6"}


def test_some_clusters_have_another_host_name_on_their_fast_network(bare):
    bare.setenv("SYSTEMNAME", "juwelsbooster")
    assert environment.infiniband_name("jwb0001") == "jwb0001i"
    assert environment.infiniband_name("jwb0001.juwels") == "jwb0001i.juwels"
    assert environment.infiniband_name("jwb0001i.juwels") == "jwb0001i.juwels"
    for address in ("10.13.23.64", "fe80::1"):
        assert environment.infiniband_name(address) == address
    assert agent.interface_of("10.13.23.64") == "ib0"
    variables = environment.rank_variables({"RANK": 0}, "run", ("10.13.23.64", 10_000))
    assert variables["GLOO_SOCKET_IFNAME"] == "ib0"


def test_any_other_machine_is_called_by_its_host_name(bare):
    bare.setenv("SYSTEMNAME", "elsewhere")
    assert environment.infiniband_name("gpu17") == "gpu17"
    assert agent.interface_of("127.0.0.1") == (environment.LOOPBACK if shutil.which("ip") else None)
    assert agent.interface_of("192.0.2.7") is None
    assert "GLOO_SOCKET_IFNAME" not in environment.rank_variables({"RANK": 0}, "run", ("10.13.23.64", 10_000))


def test_slurm_tasks_use_only_the_fast_network_for_the_rendezvous(bare, monkeypatch):
    """The store listens at the address that reaches the other node; others find it by its name on that network."""
    resolved, known = [], socket.getaddrinfo

    def addresses(name, *more, **options):
        resolved.append(name)
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
            assert resolved.pop() == f"{name}{end}"
    bare.setenv("SLURM_STEP_NODELIST", "jwb0001")
    assert slurm_task.rendezvous_address()[0] == "127.0.0.1" and not resolved, "a single node needs no network"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"RANK": "", "WORLD_SIZE": ""}, "RANK is ''"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is ''|MASTER_ADDR is ''"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "one"}, "SLURM_PROCID is 'one'"),
    ],
)
def test_left_over_variables_of_launchers_are_one_line(given, name, monkeypatch, refused):
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    line = refused("-cpu 2 -arch mlp")
    assert re.search(name, line) and "unset RANK" in line and "\n" not in line.strip()
