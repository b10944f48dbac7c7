"""The cluster scripts without a cluster: fakes of `module`, uv, srun, sbatch and torchrun print their arguments."""

import os
import re
import socket
import sys
from pathlib import Path

import pytest
from processes import copy_of_the_code, fake_program, output_of

import train

MODULE = 'module() { echo "module $*"; }; export -f module; '


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the scripts and the code. Programs in its folder `bin` come first."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return copy_of_the_code(tmp_path)


def bash(folder: Path, command: str, **variables) -> str:
    """The output of a command, run in an environment of its own. The command must exit with 0."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(folder), **variables}
    return output_of(["bash", "-c", command], cwd=folder, env=env)


def test_set_up_on_a_login_node_loads_modules_and_installs_packages(project):
    make_venv = "mkdir -p .venv/bin && touch .venv/bin/python && chmod +x .venv/bin/python"
    fake_program(project, "python", f'[ "$2" != venv ] || ({make_venv})')
    fake_program(project, "uv", 'echo "uv $*"')
    output = bash(project, f"{MODULE} ./scripts/slurm/set_up.sh", SYSTEMNAME="juwelsbooster", PYTHON="python")
    loads = [line for line in output.splitlines() if line.startswith("module")]
    assert loads == [f"module load {name}" for name in ("Stages", "GCC", "CUDA", "Python")]
    assert "uv pip install --python .venv/bin/python --compile-bytecode -r pyproject.toml" in output
    assert "ready: . .venv/bin/activate; python train.py -slurm" in output
    again = bash(project, f"{MODULE} ./scripts/slurm/set_up.sh", BATON_MODULES="CUDA/12.8", PYTHON="python")
    assert again.startswith("module load CUDA/12.8\nready:"), "the second call installs nothing"


AGENT = """for arg in "$@"; do
    echo "arg $arg"
    case "$arg" in --rdzv-endpoint=*) python tries.py ${arg##*:} ;; esac
done
env | grep -E "^(BATON|GLOO|TORCH|XDG|PET|OMP)_" | sort"""


TRIES = """import contextlib, socket, sys
with contextlib.suppress(OSError):
    socket.socket().bind(("", int(sys.argv[1])))
    print("anybody may take the port")
socket.create_server(("", int(sys.argv[1])))  # reuses the address, as torch's store does
print("torchrun listens there")
"""


@pytest.mark.parametrize(
    ("variables", "flags", "head", "interfaces", "processes"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, "", "jwb0001", [], 4),
        ({"SYSTEMNAME": "juwels", "SLURM_GPUS_ON_NODE": "4"}, "-cfg two.yaml", "jwb0001i", ["ib0", "ib0"], 2),
    ],
)
def test_the_sbatch_file_tells_torchrun_who_the_host_is(project, variables, flags, head, interfaces, processes):
    """torchrun must not guess from host names which node is the host (pytorch issue 73656)."""
    (project / "two.yaml").write_text("cpu: 2\n")
    (project / "tries.py").write_text(TRIES)
    fake_program(project, "scontrol", "[ $1 = show ] && printf 'jwb0001\\njwb0002\\n'")
    loop = 'while [ "$1" != bash ]; do shift; done; for SLURM_NODEID in 0 1; do\n'
    loop += 'export SLURM_NODEID SLURMD_NODENAME=jwb000$((SLURM_NODEID + 1)); "$@"; done'
    fake_program(project, "srun", loop)
    python = f'case "$*" in *torch.distributed.run*) {AGENT} ;; *) exec {sys.executable} "$@" ;; esac'
    fake_program(project, "python_of_the_job", python)
    job = {"SLURM_JOB_NODELIST": "jwb[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "5"}
    job |= {"SLURM_SUBMIT_DIR": str(project), "PYTHON": str(project / "bin" / "python_of_the_job")}
    flags = f"-epochs 3 -grace_s 89.5 -cache_dir cache {flags}"
    output = bash(project, f"bash scripts/slurm/train.sbatch {flags} || [ $? = 1 ]", **job, **variables)
    heads, hosts, own = (
        [line for line in output.splitlines() if line.startswith(f"arg --{option}")]
        for option in ("rdzv-endpoint", "rdzv-conf", "local-addr")
    )
    assert len(heads) == 2 and all(line.startswith(f"arg --rdzv-endpoint={head}:") for line in heads), output
    assert output.count("torchrun listens there") == 2 and "anybody may take" not in output
    assert [line[-9:] for line in hosts] == ["is_host=1", "is_host=0"]
    assert own == [f"arg --local-addr=jwb000{node}{head[7:]}" for node in (1, 2)]
    assert output.count(f"arg --nproc-per-node={processes}\n") == 2
    assert re.findall(r"^GLOO_SOCKET_IFNAME=(.*)", output, re.M) == interfaces
    assert f"\nXDG_CACHE_HOME={project}/cache\n" in output
    history = project / "out" / "digits_convnet" / "slurm" / "5.json"
    assert history.exists() and output.splitlines().count(f"BATON_HISTORY={history}") == 2
    assert output.count("\nTORCH_ELASTIC_SHUTDOWN_TIMEOUT=95\n") == 2, "torchrun waits longer than -grace_s"
    assert output.count("arg --rdzv-id=5\n") == 2, "a requeue does not apply -reset again"
    assert output.count("arg -m\narg scripts.slurm.task\narg -epochs\n") == 2


def test_an_elastic_agent_uses_the_address_from_which_it_reaches_the_head_node(project):
    fake_program(project, "torchrun", AGENT)
    flags = "./scripts/elastic.sh -epochs 3 -grace_s 89.5"
    output = bash(project, flags, HEAD="127.0.0.1:29400", PER_NODE="1")
    assert "arg --rdzv_endpoint=127.0.0.1:29400\n" in output and "\nPET_LOCAL_ADDR=127.0.0.1\n" in output
    assert "\nGLOO_SOCKET_IFNAME=lo\n" in output and "is_host=1" in output
    assert "\nTORCH_ELASTIC_SHUTDOWN_TIMEOUT=95\n" in output
    output = bash(project, f"{flags} -gpus 2,3", HEAD="nowhere.invalid:1", SYSTEMNAME="jusuf")
    assert "arg --nproc_per_node=2\n" in output
    assert "arg --rdzv_endpoint=nowherei.invalid:1\n" in output and "is_host=0" in output
    assert "PET_LOCAL_ADDR" not in output
    assert "\nGLOO_SOCKET_IFNAME=ib0\n" in output
    other = bash(project, flags, HEAD="localhost:1", PER_NODE="1", GLOO_SOCKET_IFNAME="mine", IS_HOST="0")
    assert "\nGLOO_SOCKET_IFNAME=mine\n" in other and "is_host=0" in other
    own = bash(project, flags, HEAD=f"{socket.gethostname()}:1", PER_NODE="1")
    assert "is_host=1" in own, "the head may be any name of this machine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-epochs many", "train.py: argument -epochs: 'many' is not a whole number"),
        ("-reset", "train.py: -reset without RUN_ID: a second -reset would be taken for a restart of the first"),
    ],
)
def test_wrong_flags_never_reach_torchrun(project, flags, message):
    """torchrun would restart a run with wrong flags a hundred times."""
    fake_program(project, "torchrun", AGENT)
    output = bash(project, f"./scripts/elastic.sh {flags}; [ $? = 2 ]", HEAD="127.0.0.1:1", PER_NODE="1")
    assert output.startswith(message) and output.count("\n") == 1


def test_an_error_of_sbatch_is_reported_in_one_line(project, capsys, error_of):
    error = "sbatch: error: Batch job submission failed: Invalid partition name specified"
    fake_program(project, "sbatch", f"echo '{error}' >&2; exit 1")
    assert train.main(["-slurm", "-slurm_partition", "gpus", "-out", str(project / "out")]) == 2
    assert capsys.readouterr().err == f"train.py: -slurm: sbatch refused the job: {error}\n"
    assert "-gpus 0 with -slurm: Slurm says which GPUs" in error_of("-slurm -gpus 0")
    assert "-restarts is for one machine: scripts/elastic.sh restarts under" in error_of("-slurm -restarts 2")


def test_a_job_folder_is_private_if_baton_creates_it(project):
    fake_program(project, "sbatch", "echo Submitted batch job 7 on cluster there")
    groups = project / "groups"
    groups.mkdir()
    groups.chmod(0o2770)
    for folder, mode in ((groups, 0o2770), (project / "mine" / "jobs", 0o700)):
        assert train.main(["-slurm", "-slurm_dir", str(folder), "-out", str(project / "out")]) == 0
        assert folder.stat().st_mode & 0o7777 == mode
        assert [path.name for path in folder.glob("code_*/*.pkl")] == ["submitted.pkl"]
