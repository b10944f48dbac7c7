"""The scripts for clusters where there is none: stand-ins for `module`, uv, srun, sbatch and torchrun say what they
were asked for."""

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import cluster
import pytest

import train
from lib.launch import slurm
from scripts import agent

ROOT = Path(__file__).resolve().parents[2]
MODULE = 'module() { echo "module $*"; }; export -f module; '


@pytest.fixture
def there(tmp_path):
    """A copy of the scripts and the code, with a folder `bin` for stand-ins."""
    for name in ("scripts", "lib", "data"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def stand_in(folder: Path, name: str, text: str):
    """Makes bin/NAME, a script of bash."""
    (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / "bin" / name).chmod(0o755)


def bash(folder: Path, command: str, **variables) -> str:
    """What a command says, in an environment of its own; it must exit with 0."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(folder), **variables}
    said = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout + said.stderr


def test_set_up_on_a_login_node_loads_the_modules_and_installs(there):
    stand_in(
        there, "python", '[ "$2" = venv ] && mkdir -p "$3/bin" && touch "$3/bin/python" && chmod +x "$3/bin/python"'
    )
    stand_in(there, "uv", 'echo "uv $*"')
    said = bash(there, f"{MODULE} ./scripts/slurm/set_up.sh", SYSTEMNAME="juwelsbooster", PYTHON="python")
    loads = [line for line in said.splitlines() if line.startswith("module")]
    assert loads == [f"module load {name}" for name in ("Stages", "GCC", "CUDA", "Python")]
    assert "uv pip install --quiet --python .venv/bin/python --compile-bytecode -r pyproject.toml" in said
    assert "ready: . .venv/bin/activate; python train.py -slurm" in said
    again = bash(there, f"{MODULE} ./scripts/slurm/set_up.sh", BATON_MODULES="CUDA/12.8", PYTHON="python")
    assert again.startswith("module load CUDA/12.8\nready:"), "it installs once"


def test_modules_are_loaded_where_there_are_some(there):
    for variables, command, wanted in (
        ({}, MODULE, ""),
        ({"SYSTEMNAME": "jusuf"}, "", ""),
        ({"SYSTEMNAME": "jusuf", "BATON_MODULES": ""}, MODULE, ""),
        ({"BATON_MODULES": "A B/1"}, MODULE, "module load A\nmodule load B/1\n"),
    ):
        assert bash(there, f"set -eu; {command} . scripts/slurm/modules.sh", **variables) == wanted


AGENT = """for word in "$@"; do
    echo "word $word"
    case "$word" in --rdzv-endpoint=*) python tries.py ${word##*:} ;; esac
done
env | grep -E "^(BATON|GLOO|TORCH|HF|PET|OMP)_" | sort"""


TRIES = """import contextlib, socket, sys
with contextlib.suppress(OSError):
    socket.socket().bind(("", int(sys.argv[1])))
    print("anybody may take the port")
socket.create_server(("", int(sys.argv[1])))  # reuses the address, as torch's store does
print("torchrun listens there")
"""


@pytest.mark.parametrize(
    ("variables", "words", "head", "interface", "processes"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, "-gpus=2,3", "jwb0001", None, 2),
        ({"SYSTEMNAME": "juwels", "SLURM_GPUS_ON_NODE": "4"}, "-cfg two.yaml", "jwb0001i", "ib0", 2),
        (
            {"SYSTEMNAME": "jurecadc", "GLOO_SOCKET_IFNAME": "ib1", "SLURM_GPUS_ON_NODE": "4"},
            "",
            "jwb0001i",
            "ib1",
            4,
        ),
    ],
)
def test_the_sbatch_file_tells_torchrun_who_and_where_the_host_is(
    there, variables, words, head, interface, processes
):
    """pytorch issue 73656: torchrun must not guess from names which node is the host."""
    (there / "two.yaml").write_text("cpu: 2\n")
    (there / "tries.py").write_text(TRIES)
    stand_in(there, "scontrol", "[ $1 = show ] && printf 'jwb0001\\njwb0002\\n'")
    stand_in(
        there,
        "srun",
        'while [ "$1" != bash ]; do shift; done; for SLURM_NODEID in 0 1; do\n'
        'export SLURM_NODEID SLURMD_NODENAME=jwb000$((SLURM_NODEID + 1)); "$@"; done',
    )
    stand_in(
        there,
        "python_of_the_job",
        f'case "$*" in *torch.distributed.run*) {AGENT} ;; *) exec {sys.executable} "$@" ;; esac',
    )
    job = {
        "SLURM_SUBMIT_DIR": str(there),
        "SLURM_JOB_NODELIST": "jwb[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "5",
        "PYTHON": str(there / "bin" / "python_of_the_job"),
    }
    command = (
        f"bash scripts/slurm/train.sbatch -epochs 3 -grace_s 89.5 -debug_dist -cache_dir cache {words} || [ $? = 1 ]"
    )
    said = bash(there, command, **job, **variables)
    heads, hosts, own = (
        [line for line in said.splitlines() if line.startswith(f"word --{option}")]
        for option in ("rdzv-endpoint", "rdzv-conf", "local-addr")
    )
    assert len(heads) == 2 and all(line.startswith(f"word --rdzv-endpoint={head}:") for line in heads), said
    assert said.count("torchrun listens there") == 2 and "anybody may take" not in said
    assert [line[-9:] for line in hosts] == ["is_host=1", "is_host=0"]
    assert own == [f"word --local-addr=jwb000{node}{head[7:]}" for node in (1, 2)]
    assert said.count(f"word --nproc-per-node={processes}\n") == 2
    assert said.count("\nGLOO_SOCKET_IFNAME=") == (2 if interface else 0)
    assert not interface or f"\nGLOO_SOCKET_IFNAME={interface}\n" in said
    assert "\nTORCH_LOGS=+distributed\n" in said, "the agent hears of -debug_dist too"
    assert f"\nTORCH_HOME={there}/cache/torch\n" in said and "word -debug_dist\n" in said
    history = there / "out" / "digits_convnet" / "slurm" / "5.json"
    assert history.exists() and said.splitlines().count(f"BATON_HISTORY={history}") == 2
    assert said.count("\nTORCH_ELASTIC_SHUTDOWN_TIMEOUT=95\n") == 2, "torchrun kills later than -grace_s"
    assert said.count("word --rdzv-id=5\n") == 2, "a requeue carries -reset out no second time"


def test_an_elastic_agent_is_told_its_address_on_the_way_to_the_head(there):
    stand_in(there, "torchrun", AGENT)
    words = "./scripts/elastic.sh -epochs 3"
    said = bash(there, words, HEAD="127.0.0.1:29400", PER_NODE="1")
    assert "word --rdzv_endpoint=127.0.0.1:29400\n" in said and "\nPET_LOCAL_ADDR=127.0.0.1\n" in said
    assert "\nGLOO_SOCKET_IFNAME=lo\n" in said and "TORCH_LOGS" not in said and "is_host=1" in said
    said = bash(there, f"{words} -debug_dist -gpus 2,3", HEAD="nowhere.invalid:1", SYSTEMNAME="jusuf")
    assert "word --nproc_per_node=2\n" in said
    assert (
        "word --rdzv_endpoint=nowherei.invalid:1\n" in said and "PET_LOCAL_ADDR" not in said and "is_host=0" in said
    )
    assert "\nGLOO_SOCKET_IFNAME=ib0\n" in said and "\nTORCH_LOGS=" in said
    other = bash(there, words, HEAD="localhost:1", PER_NODE="1", GLOO_SOCKET_IFNAME="mine", IS_HOST="0")
    assert "\nGLOO_SOCKET_IFNAME=mine\n" in other and "is_host=0" in other
    own = bash(there, words, HEAD=f"{socket.gethostname()}:1", PER_NODE="1")
    assert "is_host=1" in own, "by any of its names"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-epochs many", "train.py: argument -epochs: 'many' is not a whole number"),
        ("-fp16 -bf16", "train.py: -fp16 and -bf16 exclude each other"),
        ("-reset", "train.py: -reset without RUN_ID: a second -reset would be taken for a restart of the first"),
    ],
)
def test_words_that_are_wrong_never_come_to_torchrun(there, words, message):
    """It would start them again a hundred times."""
    stand_in(there, "torchrun", AGENT)
    said = bash(there, f"./scripts/elastic.sh {words}; [ $? = 2 ]", HEAD="127.0.0.1:1", PER_NODE="1")
    assert said.startswith(message) and said.count("\n") == 1


def test_an_etcd_server_without_its_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "etcd", None)
    monkeypatch.setenv("RENDEZVOUS", "etcd-v2")
    assert agent.main("elastic", "127.0.0.1:2379", "-cpu", "1") == 2
    said = capsys.readouterr().err
    assert said == "train.py: RENDEZVOUS=etcd-v2 needs a package that is not installed: pip install python-etcd\n"
    monkeypatch.setenv("RENDEZVOUS", "c10d")
    assert agent.main("elastic", "127.0.0.1:2379", "-cpu", "1") == 0


def test_an_elastic_start_anew_has_an_id_of_its_own_and_the_processes_it_asks_for(there):
    stand_in(there, "torchrun", AGENT)
    said = bash(there, "./scripts/elastic.sh -reset -cpu 3", HEAD="127.0.0.1:1", RUN_ID="again")
    assert "word --rdzv_id=again\n" in said and "word --nproc_per_node=3\n" in said
    shown = bash(there, "./scripts/elastic.sh -h", HEAD="127.0.0.1:1")
    assert "-epochs" in shown and "word" not in shown.split()


@pytest.mark.skipif(os.getuid() != 0, reason="mini_cluster.sh asks for root first")
def test_the_mini_cluster_refuses_a_folder_that_others_may_have_filled(tmp_path):
    """It runs as root what lies there, and ends the processes that its files name."""
    script = ROOT / "scripts" / "slurm" / "mini_cluster.sh"
    theirs, open_, loop = (tmp_path / name for name in ("theirs", "open", "loop"))
    for folder in (theirs, open_):
        folder.mkdir()
        (folder / "slurmd.n1.pid").write_text("1")
    theirs.chmod(0o700)
    os.chown(theirs, 65534, 65534)
    open_.chmod(0o777)
    loop.symlink_to(theirs)
    for word in ("stop", "status", "start"):
        for folder in (theirs, open_, loop):
            said = subprocess.run([script, word, folder], capture_output=True, text=True, timeout=60)
            assert said.returncode == 1 and "name a folder that is root's alone" in said.stderr
            assert sorted(path.name for path in folder.iterdir()) == ["slurmd.n1.pid"]
    env = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    said = subprocess.run([script, "stop"], env=env, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1 and "which cluster? " in said.stderr


def test_what_sbatch_says_against_a_job_is_one_line(there, monkeypatch, capsys):
    error = "sbatch: error: Batch job submission failed: Invalid partition name specified"
    stand_in(there, "sbatch", f"echo '{error}' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{there / 'bin'}:{os.environ['PATH']}")
    assert train.main(["-slurm", "-slurm_partition", "gpus", "-out", str(there / "out")]) == 2
    assert capsys.readouterr().err == f"train.py: -slurm: sbatch refused the job: {error}\n"
    assert not list((there / "out" / "digits_convnet" / "slurm").iterdir()), "no pickle and no snapshot is left"
    (there / "bin" / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(there / "bin"))
    assert train.main(["-slurm", "-out", str(there / "out")]) == 2
    assert "-slurm: there is no sbatch on this machine: start on a login node, or" in capsys.readouterr().err


def test_what_fails_before_sbatch_is_not_put_to_its_account(there, monkeypatch, capsys):
    stand_in(there, "sbatch", "exit 0")
    monkeypatch.setenv("PATH", f"{there / 'bin'}:{os.environ['PATH']}")

    def full(*words):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(slurm, "copy_code", full)
        assert train.main(["-slurm", "-out", str(there / "out")]) == 2
        assert "No space left on device" in (heard := capsys.readouterr().err) and "-slurm_dir" in heard
        patched.setattr(slurm, "copy_code", lambda *words: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.main(["-slurm", "-out", str(there / "out")])


def test_a_dry_run_shows_the_script_and_what_sbatch_says_to_it(there, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(there / "bin"))
    assert train.main(["-slurm_dry", "-out", str(there / "out")]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --job-name=digits_convnet\n" in said and "no sbatch here: not tested" in said
    assert "--time" not in said, "the partition's limit, unless -slurm_timeout says another"
    stand_in(there, "sbatch", "echo 'allocation failure: Unable to contact slurm controller' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{there / 'bin'}:/usr/bin:/bin")
    assert train.main(["-slurm_dry", "-out", str(there / "out")]) == 2
    assert "-slurm: sbatch refused the job: allocation failure: Unable" in capsys.readouterr().err


def test_a_job_folder_is_private_if_it_is_made_for_the_job(there, monkeypatch):
    stand_in(there, "sbatch", "echo Submitted batch job 7 on cluster there")
    monkeypatch.setenv("PATH", f"{there / 'bin'}:{os.environ['PATH']}")
    groups = there / "groups"
    groups.mkdir()
    groups.chmod(0o2770)
    for folder, mode in ((groups, 0o2770), (there / "mine" / "jobs", 0o700)):
        assert train.main(["-slurm", "-slurm_dir", str(folder), "-out", str(there / "out")]) == 0
        assert folder.stat().st_mode & 0o7777 == mode
        assert [path.name for path in folder.glob("code_*/*.pkl")] == ["submitted.pkl"]


def test_slurm_is_required_on_ci_and_elsewhere_its_absence_is_told(monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert cluster.needed("slurmctld is missing").args == (False,)
    monkeypatch.delenv("CI")
    mark = cluster.needed("slurmctld is missing")
    assert mark.args == (True,) and "slurmctld is missing" in mark.kwargs["reason"]
    assert cluster.needed("").args == (False,)
