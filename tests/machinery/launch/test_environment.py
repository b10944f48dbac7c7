"""Environment variables for torch and other libraries: caches, debugging, the fast network of some machines."""

import os
from unittest import mock

import pytest
import torch
from command_line import parsed
from processes import python

from lib.launch import environment
from scripts import agent, infiniband


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An environment without any of these variables, restored after the test."""
    ours = (*environment.CACHES, *environment.OPENMP_SPIN)
    with mock.patch.dict(os.environ, USER="ann"):
        for name in (*ours, "SCRATCH", "SYSTEMNAME", "OMP_WAIT_POLICY", "CUBLAS_WORKSPACE_CONFIG"):
            os.environ.pop(name, None)
        yield monkeypatch


def test_caches_are_in_the_folder_of_cache_dir_or_in_scratch(bare, tmp_path):
    environment.export(parsed(""))
    assert not environment.CACHES.keys() & os.environ.keys()
    bare.setenv("SCRATCH", str(tmp_path / "scratch"))
    bare.setenv("TRITON_CACHE_DIR", "/mine")
    environment.export(parsed(""))
    assert torch.hub._get_torch_home() == f"{tmp_path}/scratch/cache_ann/torch"
    for name in environment.CACHES.keys() - {"TRITON_CACHE_DIR"}:
        bare.delenv(name)
    environment.export(parsed(f"-cache_dir {tmp_path}/mine"))
    assert torch.hub._get_torch_home() == f"{tmp_path}/mine/torch"
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/mine/torchinductor"


def test_caches_are_set_before_torch_is_imported(bare, tmp_path):
    code = "import os, sys, train; code = train.main(sys.argv[1:]); print(dict(os.environ)); sys.exit(code)"
    flags = f"-arch mlp -epochs 1 -limit_steps 2 -cpu 2 -cache_dir {tmp_path} -out {tmp_path}".split()
    output = python("-c", code, *flags, code=75, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for name, part in environment.CACHES.items():
        assert f"'{name}': '{tmp_path / part}'" in output


@pytest.mark.parametrize(
    ("visible", "flags", "chosen"),
    [
        ({}, "-gpus 0,1", "0,1"),
        ({"CUDA": "4, 5"}, "-gpus 1,0", "5,4"),
        ({"CUDA": "GPU-aa,GPU-bb"}, "-gpus 1", "GPU-bb"),
        ({"CUDA": "0,1", "HIP": "4,5,6"}, "-gpus 1,2", "5,6"),
        ({"CUDA": "4,5"}, "-cpu 2", ""),
        ({"CUDA": "4,5"}, "", "4,5"),
    ],
)
def test_gpus_are_numbered_among_the_visible_ones(visible, flags, chosen, bare):
    bare.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in visible.items():
        bare.setenv(f"{name}_VISIBLE_DEVICES", value)
    environment.choose_gpus(parsed(flags))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen == os.environ.get("HIP_VISIBLE_DEVICES", chosen)


@pytest.mark.parametrize("system", ["juwels", "juwelsbooster", "jurecadc", "jusuf"])
def test_some_clusters_have_another_host_name_on_their_fast_network(bare, system):
    bare.setenv("SYSTEMNAME", system)
    assert infiniband.name_of("jwb0001") == "jwb0001i" and infiniband.name_of("jwb0001.juwels") == "jwb0001i.juwels"
    for as_it_is in ("jwb0001i.juwels", "10.13.23.64", "fe80::1"):
        assert infiniband.name_of(as_it_is) == as_it_is
    assert agent.interface_of("10.13.23.64") == "ib0"
    bare.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert infiniband.interface() == {"GLOO_SOCKET_IFNAME": "ib0"}
    bare.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert not infiniband.interface()
    bare.setenv("RANK", "")
    assert not environment.has_rank()
    here = environment.rank_variables({"RANK": 0}, "run", ("127.0.0.1", 10_000))
    assert here.get("GLOO_SOCKET_IFNAME") == environment.LOOPBACK, "processes of one machine need no network"
