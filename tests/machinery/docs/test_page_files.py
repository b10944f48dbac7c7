"""The files in README.md and docs run unchanged, in a fork that has them."""

import re
import shlex

import needs
import pytest
import safetensors.torch
import torch
import torchvision
from pages import COMMANDS, FILES, PAGE_PLUGINS, PAGES, README, run_command
from runs import lines
from saves import bits

pytestmark = pytest.mark.timeout(900)  # many runs in turn
RUNS = {  # runs of the files in the pages, in turn: name and flags
    "digits_convnet": "",
    "stripes_tiny": "-dataset stripes",
    "again": "-cfg out/stripes_tiny/config.yaml -model again",
    "rings_planar": "-dataset rings",
    "saddle_planar": "-dataset saddle",
    "rare_planar": "-dataset rare",
    "above_tagger": "-dataset above -cpu 2",
    "discs_pixelwise": "-dataset discs",
    "tokens_nano": "-dataset tokens -data lib -tokens_samples 64 -tokens_length 32 -arch nano",
    "boxes_detector": "-dataset boxes -best overlap -epochs 1 -batch_size 16 -micro_batch 8 -cpu 2",
    "gan": "-arch painter -trainer gan -epochs 1 -micro_batch 32 -cpu 1 -model gan",
    "views": "-trainer contrastive -epochs 2 -micro_batch 32 -cpu 1 -model views",
    "views_3": "-trainer contrastive -epochs 2 -micro_batch 32 -cpu 3 -model views_3",
    "profiled": "-arch tiny -trainer profiled -epochs 1 -model profiled",
    "free": "-arch mlp -trainer free -lr_start 2 -epochs 4 -model free",
    "mixup": "-arch mlp -trainer mixup -epochs 9 -micro_batch 32 -cpu 1 -model mixup",
    "photos": "-image_size 65 -epochs 1 -batch_size 12 -model photos",  # added to the README's own flags
}
WORLD = needs.require_package("peft", "world")  # the last that came into the group
PHOTOS = "-image_size 32 -dataset folder -data data/photos -epochs 3 -batch_size 12 -micro_batch 6"
LAYERS = f"-arch vision {PHOTOS} -trainer layers -vision_freeze conv1 bn1 layer1 -layers_thaw 1"
LORA = "-dataset counting -arch lora -micro_batch 32"
WORLD_RUNS = {  # those that need packages of others
    "parity_bert": "-dataset parity -epochs 1",
    "layers": f"{LAYERS} -model layers -cpu 1",
    "counting_causal": "-dataset counting -epochs 1",
    "counting_lora": f"{LORA} -cpu 1",
    "auroc": "-trainer auroc -best auroc -epochs 1 -cpu 2 -model auroc",
}


def train_in_turn(fork, runs, **variables) -> str:
    """The output of one process that does all these runs."""
    code = "import train, shlex, sys; sys.exit(max(train.main(shlex.split(run)) for run in sys.argv[1:]))"
    output = run_command(fork, shlex.join(["python", "-c", code, *runs.values()]), **variables)
    assert output.count("finished:") == len(runs)
    return output


@pytest.fixture(scope="module")
def output(fork):
    weights = next(one for one in COMMANDS if "-weights imagenet" in one).removeprefix("python train.py ")
    cache = fork / "cache" / "hub" / "checkpoints"  # where torch.hub would have downloaded it
    cache.mkdir(parents=True)
    torch.save(torchvision.models.resnet18().state_dict(), cache / "resnet18-f37072fd.pth")
    return train_in_turn(fork, {**RUNS, "photos": f"{weights} {RUNS['photos']}"}, TORCH_HOME=str(fork / "cache"))


def test_the_files_in_the_pages_train(fork, output):
    used = {word for kind in PAGE_PLUGINS.values() for word in kind if not word.startswith("my_")}
    assert {name.split("/")[-1][:-3] for name in FILES if name.startswith("lib/")} == used
    last = {run: {name: value for line in lines(fork / "out" / run) for name, value in line.items()} for run in RUNS}
    assert min(last[run]["val/accuracy"] for run in ("stripes_tiny", "rings_planar", "free")) > 0.9
    assert last["saddle_planar"]["val/mae"] < 0.05 and last["above_tagger"]["val/bits_per_token"] < 0.2
    assert last["rare_planar"]["val/recall_1"] > 0.8 and last["discs_pixelwise"]["val/miou"] > 0.9
    assert last["rings_planar"]["val/sure"] > 0.5 and last["boxes_detector"]["val/overlap"] >= 0
    assert all("train/critic" in line for line in lines(fork / "out" / "gan") if "train/loss" in line)
    assert bits(fork / "out" / "views") == bits(fork / "out" / "views_3")
    assert last["mixup"]["val/accuracy"] > 0.9
    manifest = max(fork.glob("out/mixup/checkpoints/*/manifest.json")).read_text()
    assert '"model.' in manifest and '"trainer.teacher' not in manifest
    assert bits(fork / "out" / "stripes_tiny") == bits(fork / "out" / "again"), "config.yaml repeats a run"
    losses = [line["val/loss"] for line in lines(fork / "out" / "views") if "val/loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0]
    (trace,) = (fork / "out" / "profiled" / "profile").glob("rank_0.*.pt.trace.json")
    assert trace.read_text().count('"name": "ProfilerStep#') == 5


def test_the_default_run_reaches_the_accuracy_in_the_readme(output):
    """At least 98.5 % of the test digits: the first of RUNS."""
    assert float(re.search(r"finished: +test accuracy ([\d.]+)", output)[1]) >= 0.985
    for line in re.search(r"```\n(finished:.*?)```", README, re.S)[1].splitlines():
        assert f"\n{line.split(':')[0]}:" in output, "the last lines of a run differ from those in the README"


@needs.require_package("torchmetrics", "track")
@WORLD
def test_the_files_in_the_pages_that_need_packages_train(fork):
    train_in_turn(fork, WORLD_RUNS)
    code = PAGES["docs/examples/lora.md"].rpartition("```python\n")[2].partition("```")[0]
    run_command(fork, shlex.join(["python", "-c", code]))
    files = [fork / "adapter/adapter_model.safetensors", fork / "out/counting_lora/best/weights.safetensors"]
    adapter, best = (safetensors.torch.load_file(file) for file in files)
    assert {*adapter} == {name.replace(".default", "") for name in best} and len(best) == 28, "both are the adapters"


@pytest.mark.parametrize(
    "flags",
    [
        "-dataset tokens -data lib -tokens_samples 256 -tokens_length 32 -arch nano",
        *(pytest.param(flags, marks=WORLD) for flags in ("-dataset parity", LAYERS, LORA)),
        "-arch painter -trainer gan -micro_batch 32",
        "-dataset boxes -best overlap -batch_size 8 -micro_batch 4",
        "-arch mlp -trainer free -lr_start 2",
        *("-dataset rare", "-dataset above", "-dataset discs -micro_batch 32"),
        "-arch mlp -trainer mixup -micro_batch 32",
    ],
)
def test_models_of_other_libraries_in_the_pages_pass_check_resume(fork, output, flags):
    output = run_command(fork, f"python train.py {flags} -check_resume -cpu 2 -limit_steps 3")
    assert "all as promised" in output.splitlines() and "on another number of processes" in output
