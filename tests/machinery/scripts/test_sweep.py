"""scripts/sweep.py runs each trial once and to its end, even if it is stopped; wrong flags are one line."""

import contextlib
import itertools
import json
import re
import signal
import sqlite3
import statistics
import sys
import types
from pathlib import Path

import needs
import pytest
from command_line import parsed, usage_error
from processes import CLEAN, session, until
from runs import distance, outcome, run

from lib.utils.monitoring import metrics
from scripts import reading, status, sweep, sweep_results

TINY = "-cpu 1 -threads 1 -arch mlp -mlp_width 8 -epochs 2 -log_every 5"
LONG = "-cpu 1 -threads 1 -arch mlp -mlp_width 8 -epochs 15 -save_every 2epochs"
GRID = "-seed 1,2 -lr_start 1e-2,1e-3"
TRIALS = [f"sweep_seed_{seed}_lr_start_{lr}" for seed in (1, 2) for lr in ("1e-2", "1e-3")]
CHOSEN = f"{LONG} -trials 4 -lr_start log:1e-4:1e-2 -mlp_depth lin:1:3 -optimizer sgd,adamw"


@contextlib.contextmanager
def running_sweep(out, flags):
    """A sweep in a session of its own. When the block ends, the sweep and its trials are ended."""
    command = [sys.executable, "scripts/sweep.py", *flags.split(), "-out", str(out)]
    out.mkdir(parents=True, exist_ok=True)
    with session(command, out / "output", env=CLEAN) as process:
        yield process
    until(lambda: not any(map(reading.is_locked, reading.folders(out))), what="the end of the trials")


def run_sweep(out, flags, expected_code=0) -> str:
    with running_sweep(out, flags) as process:
        code = process.wait(240)
    output = (out / "output").read_text()
    assert code == expected_code, output
    (out / "output").unlink()
    return output


def plan_of(flags) -> sweep.Plan:
    return sweep.parse(flags.split())[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    run_sweep(out, f"{LONG} {GRID}")
    return out


def test_a_grid_runs_each_combination_and_prints_a_table_best_first(uninterrupted, tmp_path, monkeypatch, capsys):
    output = run_sweep(uninterrupted, f"{LONG} {GRID}")  # all its trials are finished already
    assert output.startswith("sweep: 4 trials over -seed -lr_start, 1 at once\n")
    assert output.count(" finished before ") == 4
    assert sorted(folder.name for folder in reading.folders(uninterrupted)) == TRIALS
    rows = re.findall(r"^(1e-\d) +(\S+) +(\S+) +2 +finished  sweep_seed_", output, re.M)
    for lr, mean, deviation in rows:
        values = [outcome(uninterrupted / f"sweep_seed_{seed}_lr_start_{lr}")["best"]["value"] for seed in (1, 2)]
        assert (mean, deviation) == (f"{statistics.mean(values):.4g}", f"{statistics.stdev(values):.2g}")
    assert len(rows) == 2 and float(rows[0][1]) > float(rows[1][1]), "best first"
    assert distance(run(tmp_path, f"{LONG} -seed 2 -lr_start 1e-3 -model plain"), uninterrupted / TRIALS[3]) == 0
    pytest.importorskip("matplotlib", reason="needs uv pip install -r pyproject.toml --group plot")
    pictures = [(uninterrupted / f"sweep{name}.png").read_bytes() for name in ("", "_curves")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    monkeypatch.setattr(sweep_results, "CURVES", 3)
    assert sweep.main([*LONG.split(), *GRID.split(), "-out", str(uninterrupted), "-show"]) == 0
    assert re.search(r"best 3 of 4 trials\n.*_curves.png: 3 runs", capsys.readouterr().out)


def test_a_sweep_that_was_stopped_and_then_killed_resumes_with_the_same_bits(uninterrupted, tmp_path):
    output = tmp_path / "output"
    with running_sweep(tmp_path, f"{LONG} {GRID}") as process:
        until(lambda: sum("val/loss" in line for line in reading.lines(tmp_path / TRIALS[0])) >= 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75, output.read_text()
    assert re.search(rf"{TRIALS[0]}: stopped in (.*\n)+stopped: the same command continues\n\Z", output.read_text())
    assert outcome(tmp_path / TRIALS[0])["state"] == "stopped"
    assert [folder.name for folder in reading.folders(tmp_path)] == TRIALS[:1], "no other trial was started"

    with running_sweep(tmp_path, f"{LONG} {GRID} -jobs 2") as process:
        until(lambda: "finished" in output.read_text())
        until(lambda: len({file.parents[2] for file in tmp_path.glob("*/checkpoints/*/manifest.json")}) > 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = {name for name in TRIALS if (tmp_path / name / "final").exists()}
        with running_sweep(tmp_path, f"{LONG} {GRID} -jobs 2") as again:  # the killed one's trials may still save
            written = {name: (tmp_path / name / "outcome.json").stat().st_mtime_ns for name in done}
            assert again.wait(240) == 0, output.read_text()
    assert 0 < len(done) < 4 and all(distance(uninterrupted / name, tmp_path / name) == 0 for name in TRIALS)
    assert written == {name: (tmp_path / name / "outcome.json").stat().st_mtime_ns for name in done}
    assert reading.resumes(tmp_path / TRIALS[0])


def test_a_trial_that_fails_does_not_end_the_sweep_and_is_run_again_by_the_next(tmp_path):
    flags = f"{TINY} -max_bad_steps 1 -lr_start 1e30,1e-2 -model mine"
    output = run_sweep(tmp_path, flags, expected_code=1)
    line = re.search(r"^\[1/2\] mine_lr_start_1e30: failed in .* (\S+)\)$", output, re.M)
    assert "gradient" in line[0] and "Traceback" in Path(line[1].strip("(")).read_text()
    assert "[2/2] mine_lr_start_1e-2: finished" in output
    assert re.search(r"^1e-2 .* finished  mine.*\n1e30 .* failed ", output, re.M), "best first"
    assert re.search(r"^1e-2 .* finished  mine.*\n1e30 .* failed ", run_sweep(tmp_path, f"{flags} -show"), re.M)
    assert re.findall(r"\] mine_\S+: (\w+ \w+)", run_sweep(tmp_path, flags, 1)) == ["failed in", "finished before"]


def test_a_trial_is_pruned_if_it_is_worse_than_the_median_of_finished_trials_at_its_epoch(tmp_path, capsys):
    def trial(name, values, state="", split="val"):
        one = sweep.Trial(sweep.config.parse_args(["-out", str(tmp_path), "-model", name]), [], {})
        one.state = state
        one.folder.mkdir()
        lines = [{"step": n, "epoch": n + 1, f"{split}/loss": one, "val_z/loss": 0} for n, one in enumerate(values)]
        (one.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        best = metrics.new_best(None, {"loss": min(values)}, None, 1)
        (one.folder / "outcome.json").write_text(json.dumps({"state": state, "best": best}))
        return one

    runner = sweep.Runner(plan_of(f"-out {tmp_path} -loss mse,l1"), 2, None)
    for name, values in {"a": [5, 3, 1], "b": [5, 4, 6], "nan": [float("nan")], "again": [float("nan")]}.items():
        runner.end(trial(name, values, "finished"), "finished")
    slow = trial("slow", [6, 5], split="val_a")
    assert not runner.is_poor(slow), "two finished trials are not enough"
    runner.end(trial("c", [5, 0], "finished"), "finished")  # its score is -0.0
    runner.end(trial("stopped", [1, 1], "stopped"), "stopped")
    assert runner.is_poor(slow)
    assert not runner.is_poor(trial("first", [9])), "-prune 2 starts at epoch 2"
    assert not runner.is_poor(trial("earlier", [2, 9])), "the best value so far counts"
    assert not runner.is_poor(trial("late", [9, 9, 9])), "only two trials finished that many epochs"
    printed = [capsys.readouterr().out, *(sweep_results.table(runner.ended, [flag]) for flag in ("loss", "lr_start"))]
    assert [text.count("the losses of different -loss cannot be compared") for text in printed] == [1, 1, 0]
    assert printed[0].count("no validation scores: Optuna draws at random, and -prune stops nothing\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-batch_per_gpu 8", "give a flag that changes the result several values, as -lr_start 1e-3,3e-3; -data, "),
        ("-best f1,loss -seed 1,2", "-best f1,loss: -best cannot vary: give one value"),
        ("-lr_start 1e-4:1e-2 -trials 3", "nothing varies: give a flag that changes the result a range, as -lr"),
        ("-lr_start 1e-3,,1e-2", "a value is missing"),
        ("-lr_strat 1e-3,1e-2", "unknown flag -lr_strat (do you mean -lr_start"),
        ("-lr_start log:1e-4:1e-2", "add -trials N"),
        ("-lr_start log:0:1 -trials 3", "two rising numbers"),
        ("-lr_end 1e-6,1 -lr_start 1e-3", "-lr_end 1.0 is above -lr_start"),
        ("-seed 1,2 -reset", "-reset is for a single run"),
        ("-seed 1,2 -allow_change seed", "-allow_change is for a single run"),
        ("-seed 1,2 -seed 3,4", "-seed is there twice with several values"),
        ("-seed 1,2 -seed 3", "-seed is there twice: give all its values"),
        ("-seed 1,2 -gpus 0,1 -gpus_per_trial 3", "-gpus_per_trial 3 needs"),
        ("-seed 1,2 -only 3", "-only 3: this grid has 2 trials"),
        ("-arch convnet,resnet -mlp_width 8,16", "unknown flag -mlp_width: a plugin's flag needs its -arch, "),
        ("mlp -seed 1,2", "belongs to no flag"),
        ("-seed 1,2 -slurm", "-slurm: squeue does not answer: no controller"),
        ("-seed lin:1:9 -trials 3", "-trials needs Optuna: uv pip"),
    ],
)
def test_wrong_flags_are_refused_in_one_line_before_the_first_trial(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(sweep, "QUEUE", ["sh", "-c", "echo no controller >&2; exit 1"])
    assert sweep.main([*flags.split(), "-out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.startswith("sweep.py: ") and len(output.err.splitlines()) == 1
    assert not output.out and not list(tmp_path.glob("out/*"))


def test_a_trial_with_other_data_or_without_a_flag_is_of_another_sweep(tmp_path):
    (tmp_path / "config.yaml").write_text("data: a\noverfit: 9\nthreads: 3\n")
    sweep.check_earlier(tmp_path, parsed("-data a -overfit 9"))
    for flags in ("-data a", "-data b -overfit 9", "-data a -overfit 9 -weights w"):
        assert "another -model NAME starts a new" in usage_error(sweep.check_earlier, tmp_path, parsed(flags))


def test_a_flag_of_one_arch_is_for_its_trials_alone():
    flags = "-arch mlp,convnet -mlp_width 8,16 -mlp_depth 2 -seed 1,2"
    trials = plan_of(flags).examples
    of_mlp = [{"arch": "mlp", "mlp_width": width, "seed": seed} for width in ("8", "16") for seed in "12"]
    assert [one.values for one in trials] == [*of_mlp, *({"arch": "convnet", "seed": seed} for seed in "12")]
    assert [one.args.mlp_depth for one in trials[:4]] == [2] * 4 and not hasattr(trials[4].args, "mlp_depth")
    assert [one.values for one in plan_of(f"{flags} -only 6").examples] == [trials[5].values]
    spaces = plan_of("-optimizer_arg betas=0.9,0.9,betas=0.5,0.9,eps=1e-6 -class_weights 1,2,3,4,5,6,7,8,9,10").spaces
    assert spaces.keys() == {"optimizer_arg"} and spaces["optimizer_arg"].values[1:] == ["betas=0.5,0.9", "eps=1e-6"]
    assert plan_of("-optimizer_arg eps=1e-6 -optimizer_arg betas=0.9,0.9,betas=0.5,0.9").count == 2
    chosen = [one.values for one in plan_of("-trials 9 -mlp_width lin:8:16 -arch convnet,mlp").examples]
    assert chosen == [{"arch": "convnet"}, *({"mlp_width": width, "arch": "mlp"} for width in ("8", "16"))]


def test_the_picture_has_a_panel_for_each_flag_and_marks_what_failed():
    pytest.importorskip("matplotlib", reason="needs uv pip install -r pyproject.toml --group plot")
    trials = []
    for lr, arch, seed in itertools.product(("1e-4", "1e-2"), ("mlp", "convnet"), ("1", "3")):
        value = float(lr) * int(seed)
        best = {} if (lr, arch) == ("1e-2", "mlp") else {"metric": "loss", "value": value, "score": -value}
        trials.append(types.SimpleNamespace(values={"lr": lr, "arch": arch, "seed": seed}, best=best, state="failed"))
    figure = sweep_results.score_figure(trials, {"lr": "", "arch": "", "width": "lin", "seed": ""}, "loss")
    assert [axis.get_xscale() for axis in figure.axes] == ["log", "linear"]
    for axis, places, failed in zip(figure.axes, ([1e-4, 1e-4, 1e-2], [0, 0.875, 1.125]), (1e-2, 0)):
        marks = [(line.get_marker(), *line.get_xydata()[0]) for line in axis.get_lines()]
        assert sorted(y for mark, _, y in marks if mark == "o") == pytest.approx([2e-4, 2e-4, 2e-2]), "means"
        assert sorted(x for mark, x, _ in marks if mark == "o") == pytest.approx(places)
        assert [x for mark, x, _ in marks if mark == "x"] == [failed]
    places = [*(axis.get_legend() for axis in figure.axes), figure.legends[0]]
    legends = [[text.get_text() for text in legend.get_texts()] for legend in places]
    assert legends[:2] == [["-arch mlp", "-arch convnet"], ["-lr 1e-4", "-lr 1e-2"]], "at the panels of these colours"
    assert legends[2] == ["deviation over seeds", "not all finished", "without a score (2)"]


def study_trials(out) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(out / "sweep.db")) as db:
        rows = "SELECT number, state, value FROM trials LEFT JOIN trial_values USING (trial_id) ORDER BY number"
        return db.execute(rows).fetchall()


@needs.require_package("optuna", "sweep")
def test_optuna_suggests_the_same_trials_after_a_kill(tmp_path):
    uninterrupted_folder, killed = tmp_path / "calm", tmp_path / "killed"
    assert run_sweep(uninterrupted_folder, CHOSEN).count(": finished in") == 4
    with running_sweep(killed, CHOSEN) as process:
        until(lambda: list(killed.glob("sweep_*/final")) or process.poll() is not None)
        assert process.poll() is None, (killed / "output").read_text()
        process.send_signal(signal.SIGKILL)
        process.wait()
    run_sweep(killed, CHOSEN)
    names = [folder.name for folder in reading.folders(uninterrupted_folder)]
    assert names == [folder.name for folder in reading.folders(killed)] and len(names) == 4
    assert all(distance(uninterrupted_folder / name, killed / name) == 0 for name in names)
    trials = study_trials(uninterrupted_folder)
    assert trials == study_trials(killed) and {state for _, state, _ in trials} == {"COMPLETE"}
    best = [status.row(uninterrupted_folder / name)["best"] for name in names]
    assert sorted(best) == sorted(f"accuracy {value:.4g}" for _, _, value in trials)
    for name in names:
        lr, depth, optimizer = re.fullmatch(r"sweep_lr_start_(.+)_mlp_depth_(\d)_optimizer_(\w+)", name).groups()
        assert 1e-4 <= float(lr) <= 1e-2 and 1 <= int(depth) <= 3 and optimizer in ("sgd", "adamw")
