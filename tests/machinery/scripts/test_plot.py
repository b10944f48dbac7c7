"""scripts/plot.py draws the logged metrics, and marks where runs resumed."""

import needs
import pytest
from runs import run

from scripts import plot, reading

pytestmark = needs.require_package("matplotlib", "plot")
FLAGS = "-cpu 1 -arch mlp -epochs 3 -log_every 5 -train_metrics"


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A run without an interruption, and one that resumed at step 27."""
    out = tmp_path_factory.mktemp("plot")
    run(out, f"{FLAGS} -model parts -limit_steps 27", wanted=75)
    return [run(out, f"{FLAGS} -model whole -lr_start 1e-2"), run(out, f"{FLAGS} -model parts")]


def test_the_curves_are_the_logged_metrics_and_resumes_are_marked(two_runs):
    lines = {folder: reading.lines(folder) for folder in two_runs}
    figure = plot.draw(lines)
    titles = {axis.get_title(loc="left"): axis for axis in figure.axes}
    both = "Training and validation "
    assert list(titles) == ["Loss", f"{both}accuracy", f"{both}f1", "Learning rate"]
    curves = [(list(line.get_xdata()), list(line.get_ydata())) for line in titles[f"{both}accuracy"].get_lines()]
    for folder, name in [(folder, f"{split}/accuracy") for folder in two_runs for split in ("train", "val")]:
        truth = [(line["step"], line[name]) for line in lines[folder] if name in line]
        assert [list(part) for part in zip(*truth)] in [list(curve) for curve in curves]
    for axis in figure.axes:
        marked = [line.get_xdata()[0] for line in axis.get_lines() if line.get_marker() == "v"]
        assert marked == [27], "one mark where the second run resumed"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert str(plot.points([{"step": step, "x": 1.0} for step in (1, 2, 1)], "x")[0]) == "[1, 2, nan, 1]"
    assert legend == ["whole (finished, step 60)", "parts (finished, step 60)", "went on after a stop or a crash"]


def test_21_runs_differ_and_more_are_named_as_left_out(tmp_path, capsys):
    runs = [tmp_path / f"{'long_' * 18}{number:02}" for number in range(23)]
    for run_folder in runs:
        run_folder.mkdir()
        (run_folder / "metrics.jsonl").write_text('{"step": 1, "val/loss": 2.0, "val_b/loss": 1.0, "train/x": 1.0}\n')
    assert plot.main([*map(str, runs), "-o", str(tmp_path / "x.png")]) == 0
    assert f"only 21 runs; left out: {runs[21]}, {runs[22]}\n" in capsys.readouterr().err
    figure = plot.draw({folder: reading.lines(folder) for folder in runs[:21]})
    figure.canvas.draw()
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.legends[0].get_lines()}) == 21
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1 and len(figure.axes) == 3, "val_b/loss, x"
    for number, folder in enumerate(runs[:4]):
        (folder / "config.yaml").write_text(f"model: {number}\nseed: {number // 2}\nx: {number % 2}\nabout: x\n")
    one, two, again, _ = plot.styles(runs[:4])
    assert one["color"] == again["color"] != two["color"] and one["linestyle"] != again["linestyle"]
