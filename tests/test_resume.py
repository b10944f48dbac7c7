"""Resuming: from another run, from weights, with other settings, from a checkpoint of another version."""

import os
import shutil
import stat
import sys

import pytest
import saves
import torch
from runs import distance, few, norm_net, outcome, plugins, run, same_tensors, weights
from safetensors.torch import load_file, save_file
from saves import SMALL, log_of, names
from torch import nn

from lib.trainer import trainer
from lib.utils.checkpoint.weights import load_into

pytestmark = pytest.mark.usefixtures("small_plugins")


# From another run's state, or its weights


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/000006_step_6"])
def test_a_run_resumes_from_another_run(finished_run, tmp_path, place):
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")}
    folder = run(tmp_path, f"{SMALL} -cpu 2 -model branch -resume {finished_run / place}")
    assert distance(folder, finished_run) == 0.0
    wanted = {"checkpoints/000006_step_6": "step 6"}.get(place, "step 12")
    assert f"resuming from {finished_run}/checkpoints/" in log_of(folder) and wanted in log_of(folder)
    assert before == {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")}
    best = outcome(folder)["best"]
    assert (best is None) == (not (folder / "best").exists()), "best is only named if its weights exist"
    again = run(tmp_path, f"{SMALL} -cpu 2 -model branch -resume {finished_run / place}")
    assert names(again) and distance(again, finished_run) == 0.0
    assert "is not used: this run has checkpoints of its own" in log_of(again)


def test_a_damaged_checkpoint_of_another_run_is_skipped_and_stays_in_place(copy, finished_run, tmp_path):
    newest = names(copy)[0]
    shard = copy / "checkpoints" / newest / "shard_0000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    folder = run(tmp_path, f"{SMALL} -cpu 2 -model branch -resume {copy}")
    assert f"{shard}: " in log_of(folder) and "an older checkpoint is taken" in log_of(folder)
    assert distance(folder, finished_run) == 0.0 and names(copy)[0] == newest


def test_a_checkpoint_that_cannot_be_resumed_is_refused_and_no_code_in_it_is_executed(refused, copy, tmp_path):
    text, empty, mark = tmp_path / "text", tmp_path / "empty", tmp_path / "mark"
    text.write_text("no checkpoint")
    empty.mkdir()
    foreign = saves.payload(tmp_path / "foreign.pt", mark)
    for path in (tmp_path / "nowhere", text, empty, foreign, text / "below"):
        assert f"-resume {path}: there is no checkpoint" in refused(f"{SMALL} -resume {path}")
    assert not (tmp_path / "few_norm_net").exists(), "something was written"
    for name in names(copy):
        saves.payload(copy / "checkpoints" / name / "manifest.json", mark)
    for path in (copy, copy / "checkpoints" / names(copy)[3]):
        assert "is left: -reset without -resume starts from scratch" in refused(f"{SMALL} -resume {path}")
    assert not mark.exists()


def test_checkpoints_of_format_1_are_refused_and_not_overwritten(refused, copy):
    for number, name in enumerate(names(copy)):
        saves.change_manifest(copy / "checkpoints" / name, lambda manifest: {**manifest, "format": 1})
        old_name = f"step_{number:08d}_keep"  # as format 1 has it
        (copy / "checkpoints" / name).rename(copy / "checkpoints" / old_name)
    assert "is of format 1" in refused(f"{SMALL} -model {copy.name}", copy.parent)
    assert "is of format 1" in refused(f"{SMALL} -model other -resume {copy}")


def test_resuming_from_an_older_checkpoint_of_the_same_run_needs_another_name(copy, refused):
    flags = f"{SMALL} -cpu 2 -resume {copy / 'checkpoints' / '000006_step_6'}"
    assert all("another -model" in refused(one, out=copy.parent) for one in (flags, f"{SMALL} -reset -resume {copy}"))
    before = names(copy)
    run(copy.parent, f"{flags} -model older")
    assert names(copy) == before


FORMS = {
    "safetensors": ("w.safetensors", lambda weights, path: save_file(weights, path)),
    "torch": ("w.pt", torch.save),
    "nested": ("w.pth", lambda weights, path: torch.save({"model": weights, "epoch": 3}, path)),
    "wrapped": ("w.bin", lambda weights, path: torch.save({f"module.{k}": v for k, v in weights.items()}, path)),
    "old": ("w.tar", lambda weights, path: torch.save(weights, path, _use_new_zipfile_serialization=False)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_starts_from_weights_of_any_file_format(finished_run, tmp_path, form):
    name, write = FORMS[form]
    write(weights(finished_run), tmp_path / name)
    model = norm_net(type("Args", (), {"num_classes": 4}))
    load_into(str(tmp_path / name), model)
    assert all(torch.equal(value, weights(finished_run)[name]) for name, value in model.state_dict().items())


def test_weights_from_a_run_folder_are_its_best_weights(finished_run):
    model = norm_net(type("Args", (), {"num_classes": 4}))
    load_into(str(finished_run), model)
    best = load_file(finished_run / "best" / "weights.safetensors")
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())


def test_weights_are_loaded_only_at_the_first_start_and_tensors_that_do_not_fit_are_logged(finished_run, tmp_path):
    given = weights(finished_run)
    given["5.bias"], given["more"] = torch.zeros(7), torch.zeros(1)
    del given["1.weight"]
    save_file(given, tmp_path / "w.safetensors")
    flags = f"{SMALL} -cpu 2 -weights {tmp_path / 'w.safetensors'}"
    folder = run(tmp_path, flags)
    for message in ("not loaded, as missing or of another shape: 1.weight, 5.bias", "not used: more"):
        assert message in log_of(folder)
    again = log_of(run(tmp_path, flags)).partition("resuming from")
    assert "tensors loaded" not in again[2]


def test_a_trainer_is_built_after_the_weights_of_a_file_are_loaded(finished_run, tmp_path):
    """Copies that a trainer makes in `__init__`, such as a teacher or an average, start from these weights."""
    copied = {}

    class Copying(trainer.Trainer):
        def __init__(self, *parts):
            super().__init__(*parts)
            copied.update({name: value.clone() for name, value in self.model.state_dict().items()})

    with plugins(trainer={"copying": Copying}):
        file = finished_run / "final" / "weights.safetensors"
        run(tmp_path, f"{SMALL} -cpu 1 -trainer copying -limit_steps 1 -weights {file}", wanted=75)
    assert same_tensors(copied, weights(finished_run))


def test_weights_that_cannot_be_read_or_do_not_fit_are_refused_and_no_code_is_executed(refused, tmp_path):
    mark = tmp_path / "mark"
    torch.save({"weight": torch.ones(1), "more": saves.Payload(mark)}, tmp_path / "evil.pt")
    saves.payload(tmp_path / "evil.pkl", mark)
    saves.payload(tmp_path / "evil.safetensors", mark)
    (tmp_path / "empty.pt").touch()
    (tmp_path / "garbage.safetensors").write_bytes(os.urandom(999))
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    files = "evil.pt evil.pkl evil.safetensors empty.pt garbage.safetensors nowhere tensor.pt".split()
    (tmp_path / "page.md").write_text("no weights")
    for name in [*files, "page.md", ""]:
        assert f"-weights {tmp_path / name}: cannot be read" in refused(f"{SMALL} -weights {tmp_path / name}")
    assert "a run's folder with best or final weights" in refused(f"{SMALL} -weights {tmp_path}")
    save_file({"other": torch.ones(3)}, tmp_path / "other.safetensors")
    assert "not the weights of this model" in refused(f"{SMALL} -weights {tmp_path / 'other.safetensors'}")
    assert not mark.exists() and not (tmp_path / "few_norm_net").exists()


# With changed flags


CHANGES = {
    "-batch_size 8": "-batch_size was 16 and is 8",
    "-micro_batch 8": "-micro_batch was 4 and is 8",
    "-seed 3": "-seed was 0 and is 3",
    "-lr_start 0.5": "-lr_start was 0.001 and is 0.5",
    "-epochs 4": "-epochs was 3 and is 4",
    "-optimizer sgd": "-optimizer was adamw and is sgd",
    "-bf16": "-bf16 was False and is True",
    "-dataset more": "samples was 50 and is 60",
    "-arch mlp": "-arch was norm_net and is mlp",
    "-threads 3": "-threads was 1 and is 3",
}


def test_a_changed_flag_is_refused_with_both_values_only_if_it_changes_the_result(copy, refused):
    with plugins(dataset={"more": lambda args: few(args, 60)}):
        for flags, message in CHANGES.items():
            line = refused(f"{SMALL} -cpu 2 -model few_norm_net {flags}", out=copy.parent)
            assert message in line and f"-allow_change {flags.split()[0][1:]}" in line
        line = refused(f"{SMALL} -cpu 2 -model few_norm_net -seed 3 -epochs 9 -allow_change seed", out=copy.parent)
        assert "-epochs was" in line and "-seed" not in line
    easy = "-cpu 1 -workers 1 -log_every 3 -keep_last 3 -save_every 2epochs -best loss -max_bad_steps 5 -max_hours 3"
    run(copy.parent, f"{SMALL} {easy} -model few_norm_net")


def test_a_run_keeps_its_number_of_threads_unless_the_change_is_allowed(copy, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    again = f"{SMALL} -cpu 2 -model few_norm_net"
    run(copy.parent, again)
    assert "threads:     1\n" in log_of(copy)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    run(copy.parent, f"{again} -threads {share + 1} -allow_change threads")
    assert f"threads:     {share + 1}\n" in log_of(copy)
    assert f"\nthreads: {share + 1}\n" in (copy / "config.yaml").read_text()


def test_flags_unknown_to_the_version_that_saved_are_logged_and_accepted(copy):
    saves.change_manifest(
        copy / "checkpoints" / names(copy)[0], lambda manifest: manifest["config"].pop("momentum") and None
    )
    run(copy.parent, f"{SMALL} -cpu 2 -model few_norm_net")
    assert "-momentum was unknown and is 0.9" in log_of(copy)


def test_another_torch_version_or_processor_is_logged_and_accepted(copy):
    before = {"torch": "2.0.0", "processor": "a pocket calculator"}
    saves.change_manifest(copy / "checkpoints" / names(copy)[0], lambda manifest: manifest["config"].update(before))
    run(copy.parent, f"{SMALL} -cpu 2 -model few_norm_net")
    assert f"torch was 2.0.0 and is {torch.__version__}" in log_of(copy)
    assert f"was a pocket calculator and is {torch.backends.cpu.get_cpu_capability()}" in log_of(copy)


def test_a_new_batch_size_need_not_be_a_multiple_of_the_micro_batch(tmp_path, refused):
    run(tmp_path, f"{SMALL} -limit_steps 2", wanted=75)
    flags = f"{SMALL.replace('-micro_batch 4', '')} -batch_size 6"
    message = refused(flags)
    assert "-batch_size was 16 and is 6" in message and "-micro_batch was" not in message
    run(tmp_path, f"{flags} -allow_change batch_size")


@pytest.mark.parametrize(("batch", "micro"), [(8, 4), (4, 2), (48, 8), (25, 5)])
def test_a_run_with_another_batch_size_resumes_at_the_same_samples(tmp_path, monkeypatch, batch, micro):
    """Stopped after 16 samples of the second epoch: samples that fill no whole batch of the new size are repeated."""
    saves.run_until(tmp_path, f"{SMALL} -keep_last 1", 5)
    seen, real = [], trainer.Trainer.call_training_step

    def call_training_step(self, batch, micro_batch):
        seen.append((self.state.epoch, self.state.step, micro_batch.indices[: micro_batch.count]))
        return real(self, batch, micro_batch)

    monkeypatch.setattr(trainer.Trainer, "call_training_step", call_training_step)
    flags = f"{SMALL} -batch_size {batch} -micro_batch {micro} -keep_last 1"
    folder = run(tmp_path, f"{flags} -allow_change batch_size -allow_change micro_batch")
    epochs = [[i for epoch, _, indices in seen for i in indices if epoch == number] for number in (1, 2)]
    assert len(epochs[0]) == 50 - 16 // batch * batch and sorted(epochs[1]) == list(range(50))
    assert len(set(epochs[0])) == len(epochs[0])
    steps = -(-50 // batch)
    assert seen[0][1] == steps + 16 // batch and seen[-1][1] == 3 * steps - 1
    assert saves.steps(folder)[0] == 3 * steps and len(names(folder)) == 1


def test_a_run_resumes_with_a_longer_dataset_if_that_is_allowed(copy, monkeypatch):
    for name in names(copy)[: names(copy).index("000006_step_6")]:
        shutil.rmtree(copy / "checkpoints" / name)
    monkeypatch.setattr(sys.modules["lib.dataset.few"], "get_dataset", lambda args: few(args, 70))
    folder = run(copy.parent, f"{SMALL} -cpu 2 -model few_norm_net -allow_change samples")
    result = outcome(folder)
    assert (result["step"], result["samples"]) == (15, 50 + 32 + (70 - 32) + 70)


def test_a_run_resumes_with_another_optimizer_only_if_its_state_has_the_same_tensors(copy, refused):
    flags = f"{SMALL} -cpu 2 -model few_norm_net -allow_change optimizer"
    line = refused(f"{flags} -optimizer sgd", out=copy.parent)
    assert "the checkpoint is of another optimizer: its optim has no dampening" in line
    run(copy.parent, f"{flags} -optimizer adam")


class Late(nn.Module):
    """Does not use its last layer in the first six steps."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, inputs):
        self.calls += self.training
        outputs = self.first(inputs.flatten(1))
        return self.last(outputs) if self.calls > 6 else outputs


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_whose_parameter_had_no_gradient_yet_resumes_exactly(optimizer, tmp_path):
    flags = "-dataset few -arch late -num_classes 4 -batch_size 10 -epochs 2 -cpu 1 -optimizer"
    with plugins(arch={"late": lambda args: Late()}):
        whole = run(tmp_path, f"{flags} {optimizer} -model whole")
        saves.run_until(tmp_path, f"{flags} {optimizer} -model parts", 4)
        assert distance(whole, run(tmp_path, f"{flags} {optimizer} -model parts")) == 0


def test_a_restrictive_umask_a_link_and_a_name_with_spaces_work(tmp_path, finished_run):
    before = os.umask(0o077)
    try:
        (tmp_path / "real one").mkdir()
        (tmp_path / "link").symlink_to("real one")
        for out in ("link", "real one/deeper ünd"):
            saves.run_until(tmp_path / out, SMALL, 6)
            assert distance(run(tmp_path / out, SMALL), finished_run) == 0.0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "real one").rglob("*") if not path.is_symlink()]
    assert files and not [path for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077]
    (tmp_path / "real one").rename(tmp_path / "moved")
    (tmp_path / "link").unlink()
    run(tmp_path / "moved", SMALL)
