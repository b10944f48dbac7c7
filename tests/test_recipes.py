"""Each file in scripts/recipes is a complete command: its flags exist, and its model fits its data."""

import pytest
import tiny_data
import torch
from runs import run

from lib import config

RECIPES = sorted((config.ROOT / "scripts" / "recipes").glob("*.yaml"))
SMALL = {  # flags that make a recipe run in seconds
    "resnet": "-image_size 32 -epochs 1 -batch_size 2 -resnet_depth 18 -limit_steps 1 -lr_warmup 0",
    "convnet": "-limit_steps 2",
    "gpt": "-batch_size 4 -micro_batch 2 -gpt_depth 1 -gpt_width 24 -limit_steps 2",
    "tokens": "-tokens_length 16 -tokens_samples 16",
}


def test_each_recipe_contains_its_command_and_is_listed_in_the_readme_of_the_recipes():
    page = (config.ROOT / "scripts" / "recipes" / "README.md").read_text()
    assert RECIPES
    for file in RECIPES:
        command = f"python train.py -cfg scripts/recipes/{file.name}"
        assert command in file.read_text() and command in page


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_can_be_parsed_and_trains_on_two_processes(file, tmp_path, monkeypatch):
    flags = ["-cfg", str(file)]
    made = {"imagenet_resnet50": tiny_data.make_folder, "gpt_tokens": tiny_data.make_tokens}
    if file.stem in made:
        made[file.stem](tmp_path)
        flags += ["-data", str(tmp_path)]
    args = config.parse_args(flags)
    assert all(f"{name}: " in file.read_text() for name in ("dataset", "arch", "steps" if args.steps else "epochs"))
    assert args.parallel == ("fsdp" if "fsdp" in file.stem else "ddp")
    small = f"{SMALL[args.arch]} {SMALL.get(args.dataset, '')}".split()
    monkeypatch.setattr(torch, "compile", lambda forward: forward)  # saves half a minute of C++ compiler
    run(tmp_path / "out", " ".join([*flags, *small, "-cpu", "2", "-bf16", "no"]), wanted=75)
