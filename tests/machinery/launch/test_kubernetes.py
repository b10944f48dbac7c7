"""The files in scripts/kubernetes fit each other, train.py and elastic.sh; process 1 of a pod stops correctly."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import ports
import pytest
import yaml
from command_line import parsed
from kubeflow_trainer_api import models as trainer_api
from processes import CLEAN, ROOT, children, copy_tracked, python, session, until

from lib.utils.checkpoint import run_folder
from scripts import agent

FOLDER = ROOT / "scripts" / "kubernetes"
DOCUMENTS = {
    (name, document["kind"]): document
    for name in ("runs", "network", "trainjob", "pytorchjob", "etcd")
    for document in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
}
RUNTIME, JOB = DOCUMENTS["trainjob", "TrainingRuntime"]["spec"], DOCUMENTS["trainjob", "TrainJob"]["spec"]
PODS = {  # the pod specs of each job
    "v2": RUNTIME["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"],
    "v1": DOCUMENTS["pytorchjob", "PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"],
}
STARTS = {"v2": JOB["trainer"], "v1": PODS["v1"]["containers"][0]}  # what the pods start
# What operators set in a pod, after PET_: Kubeflow Trainer's torch plugin, the Training Operator for elastic jobs.
GIVEN = {
    "v2": "NNODES=1 NPROC_PER_NODE=2 NODE_RANK=0 MASTER_ADDR=localhost MASTER_PORT={port}",
    "v1": "NNODES=1:4 NPROC_PER_NODE=2 MAX_RESTARTS=100 RDZV_BACKEND=c10d RDZV_ENDPOINT=localhost:{port}",
}


def test_kubeflow_trainer_and_kubernetes_know_every_key_of_their_files():
    for kind in ("TrainingRuntime", "TrainJob"):
        document = DOCUMENTS["trainjob", kind]
        known = getattr(trainer_api, f"TrainerV1alpha1{kind}").from_dict(document)
        assert known.to_dict() == document, "the API model leaves out unknown keys"
    own = [document for document in DOCUMENTS.values() if "kubeflow" not in document["apiVersion"]]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec} for spec in PODS.values()]
    assert len(own) == 5
    for document in own + pods:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("kind", PODS)
def test_a_pod_starts_a_file_of_the_image_with_flags_that_train_py_accepts(kind):
    start, spec = STARTS[kind], PODS[kind]
    args = parsed(start["args"])
    assert start["command"] == ["./scripts/elastic.sh"] and (ROOT / start["command"][0]).is_file()
    assert start["image"] == spec["containers"][0]["image"]
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts.values()) == set(volumes) and args.workers and "/dev/shm" in mounts
    claim = volumes[mounts[args.out]]["persistentVolumeClaim"]["claimName"]
    wanted = DOCUMENTS["runs", "PersistentVolumeClaim"]
    assert claim == wanted["metadata"]["name"] and wanted["spec"]["accessModes"] == ["ReadWriteMany"]

    assert args.grace_s + agent.AGENT_S < spec["terminationGracePeriodSeconds"]


def test_the_image_starts_the_default_run_from_the_files_of_its_build_context(tmp_path):
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    assert "USER 1000:1000" in lines and "RUN useradd --uid 1000 baton" in (FOLDER / "Dockerfile").read_text()
    command = yaml.safe_load(next(line for line in lines if line.startswith("CMD ")).removeprefix("CMD "))
    assert parsed(command[2:]).out == "/runs" and command[:2] == ["python", "train.py"]

    sent = context(tmp_path / "image")
    assert sum(file.stat().st_size for file in sent) < 2_000_000
    imported = re.findall(r'"(scripts\.\w+)"', "".join(file.read_text() for file in (ROOT / "lib").rglob("*.py")))
    wanted = {"pyproject.toml", "scripts/elastic.sh", *(f"{one.replace('.', '/')}.py" for one in imported)}
    assert "scripts/mirror.py" in wanted and {tmp_path / "image" / one for one in wanted} <= set(sent)
    assert "finished:" in python(*command[1:3], tmp_path / "runs", "-epochs", "1", cwd=tmp_path / "image")
    assert "digits_convnet  finished" in python("scripts/status.py", tmp_path / "runs", cwd=tmp_path / "image")
    assert any(line.startswith("RUN apt-get") and " g++ " in line for line in lines), "-compile needs a compiler"


def context(target: Path) -> list[Path]:
    """Copy the files that Dockerfile.dockerignore includes to `target`: it leaves out all, and then names them."""
    everything, *included, caches = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert (everything, caches) == ("*", "**/__pycache__") and all(one.startswith("!") for one in included)
    copy_tracked(target, lambda name: any(name.is_relative_to(one[1:]) for one in included))
    return [file for file in target.rglob("*") if file.is_file()]


NAMESPACE = "unshare --pid --fork --mount-proc".split()
CAN_UNSHARE = shutil.which("unshare") and not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode


@pytest.mark.skipif(not CAN_UNSHARE, reason="needs root and util-linux' unshare, to be process 1 as in a pod")
def test_process_1_of_a_pod_stops_with_its_state_saved_and_a_pod_of_the_other_kind_resumes(tmp_path):
    command = [*STARTS["v2"]["args"], *"-epochs 4000 -cpu 2 -arch mlp -workers 0 -log_every 5".split()]
    command[command.index("-out") + 1] = str(tmp_path)
    folder = tmp_path / "digits"
    image = tmp_path / "image"
    context(image)
    (image / ".venv").symlink_to(sys.prefix)
    with pod("v2", command, image) as first:
        until(lambda: (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").read_text(), 120)
        os.kill(children(first.pid)[0], signal.SIGTERM)
        assert first.wait(120) == 1  # so that Kubernetes starts it again
    stopped = run_folder.read_json(folder / "outcome.json")
    assert stopped["state"] == "stopped" and stopped["step"] > 0

    with pod("v1", [*command, "-limit_steps", str(stopped["step"] + 1)], image) as second:
        assert second.wait(120) == 0
    assert run_folder.read_json(folder / "outcome.json")["step"] == stopped["step"] + 1


def pod(kind, command, image):
    """A session with the command and variables of a pod, from the image's files, as process 1 of a namespace."""
    given = dict(f"PET_{one}".split("=") for one in GIVEN[kind].format(port=ports.free()).split())
    command = [*NAMESPACE, "--kill-child", *STARTS[kind]["command"], *command]
    return session(command, image / f"{kind}.log", cwd=image, env={**CLEAN, "OMP_NUM_THREADS": "1", **given})
