"""Curves of runs in one picture: python scripts/plot.py out/a out/b [-o curves.png], or .svg, .pdf.

Loss, metrics (also those of -train_metrics and log_scalar) and learning rate over the steps; a dotted line with a
triangle marks where a run resumed after a stop or a crash. Each run has its own colour and kind of line, those that
differ in the seed alone have one colour, where colours and kinds of lines suffice; of more than 21 runs the first 21
are drawn.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils.checkpoint import run_folder
from lib.utils.errors import printable
from scripts import reading

LARGEST = 1e100  # value on an axis
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
LINES = ("-", "--", ":")
MOST_RUNS = len(COLOURS) * len(LINES)
MOST = 24  # panels
MOST_METRICS = MOST - 2  # next to the loss and the learning rate
OF_ALL_RUNS = {"train/loss", "train/loss_mean", "train/lr", "train/grad_norm"}
KINDS = (".png", ".svg", ".pdf")
TRAIN, VAL = {"linewidth": 1, "alpha": 0.7}, {"linewidth": 2, "marker": "o", "markersize": 3}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="out/NAME", help="the runs' folders")
    parser.add_argument("-o", type=Path, default=Path("curves.png"), metavar="FILE", help="(curves.png)")
    args = parser.parse_args(argv)
    try:
        metrics = {run: reading.metrics(run) for run in args.runs}
        lines = {run: found.lines for run, found in metrics.items() if found.lines}
        faults = [f"{run}: {metrics[run].fault or 'no figures there'}" for run in args.runs if run not in lines]
        faults += [f"{run}: {metrics[run].fault}" for run in lines if metrics[run].fault]
        if left_out := [str(run) for run in [*lines][MOST_RUNS:]]:
            faults.append(f"only {MOST_RUNS} runs; left out: {shortened(left_out)}")
            lines = {run: lines[run] for run in [*lines][:MOST_RUNS]}
        if not lines or args.o.suffix not in KINDS:
            wrong = "; ".join(faults) if not lines else f"-o {args.o}: one of {', '.join(KINDS)} is wanted"
            parser.exit(2, printable(f"plot.py: {wrong}\n"))
        if hidden := [*metric_panels(lines)][MOST_METRICS:]:
            faults.append(f"only {MOST} panels; left out: {shortened(hidden)}")
        print(printable("".join(f"plot.py: {fault}\n" for fault in faults)), end="", file=sys.stderr)
        figure = draw(lines)
        figure.savefig(args.o)
    except OSError as error:
        parser.exit(2, f"plot.py: {printable(str(error))}\n")
    except ModuleNotFoundError as error:
        parser.exit(2, missing(error))
    print(f"{printable(str(args.o))}: {len(lines)} run{'s' if len(lines) > 1 else ''}")
    return 0


def missing(error: ModuleNotFoundError) -> str:
    return f"plot.py: needs {error.name}: uv pip install -r pyproject.toml --group plot\n"


def shortened(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def load_pyplot():
    """Import matplotlib, and set the look of all figures: legible at 800 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    look = {"svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150}
    pyplot.rcParams.update({**look, "font.size": 9, "legend.fontsize": 8})
    return pyplot


def draw(runs: dict[Path, list[dict]]):
    """Return the figure of the lines of these runs."""
    pyplot, panels, entries = load_pyplot(), panels_of(runs), legend_of(runs)
    across = fitting_columns([entry.get_label() for entry in entries])
    down = -(-len(panels) // 2)
    size = (8, 2.7 * down + 0.17 * -(-len(entries) // across) + 0.2)
    figure, axes = pyplot.subplots(down, 2, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, curves) in zip(axes.flat, panels.items()):
        axis.set_title(title, loc="left", fontsize=11, parse_math=False)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        for (run, lines), look in zip(runs.items(), styles(runs)):
            for name, style in curves.items():
                axis.plot(*points(lines, name), **look, **style)
            for step in reading.resumes(run):
                colour = look["color"]
                axis.axvline(step, color=colour, linestyle=(0, (1, 3)), linewidth=1, alpha=0.7)
                axis.plot(step, 0.97, marker="v", color=colour, transform=axis.get_xaxis_transform())
        highest = [max(points(lines, "train/lr")[1], default=0) for lines in runs.values()]
        if title == "Learning rate" and max(highest) > 10 * min(highest):
            axis.set_yscale("log")
        if len(curves) > 1:
            axis.plot([], [], color="grey", label="training", **TRAIN)
            axis.plot([], [], color="grey", label="validation", **VAL)
            axis.legend(frameon=False)
    figure.legend(handles=entries, loc="outside upper left", ncols=across, frameon=False)
    return figure


def styles(runs: Iterable[Path]) -> list[dict[str, str]]:
    """Return a colour and a kind of line for each run: a colour for the seeds of a configuration, if they suffice."""
    flags = [configuration(run) for run in runs]
    different = [*dict.fromkeys(flags)]
    seeds = [flags[:place].count(one) for place, one in enumerate(flags)]  # how many of the same flags come before
    if 1 < len(different) <= len(COLOURS) and max(seeds) < len(LINES):
        chosen = [(COLOURS[different.index(one)], LINES[number]) for one, number in zip(flags, seeds)]
    else:
        chosen = [(colour, line) for line in LINES for colour in COLOURS]
    return [{"color": colour, "linestyle": line} for colour, line in chosen]


def configuration(run: Path) -> str:
    """Return the flags in a run's config.yaml without its names and the seed; "" without the file."""
    file = run / "config.yaml"
    flags = file.read_text(errors="replace").partition("\nabout:")[0] if file.is_file() else ""
    return re.sub(r"(?m)^(seed|model|out): .*$", "", flags)


def fitting_columns(labels: list[str], width: float = 1.0) -> int:
    """Return how many columns of a legend with these labels fit this share of the picture's width."""
    return max(1, min(3, int(width * 128) // (max(map(len, labels)) + 9)))


def panels_of(runs: dict) -> dict[str, dict]:
    """Return the panels for which these runs have metrics: their titles, and the curves in each with their styles."""
    logged = logged_names(runs)
    panels = {
        "Loss": {"train/loss": TRAIN, "val/loss": VAL},
        **dict([*metric_panels(runs).items()][:MOST_METRICS]),
        "Learning rate": {"train/lr": {"linewidth": 1.5}},
    }
    shown = {title: {n: look for n, look in curves.items() if n in logged} for title, curves in panels.items()}
    return {title: curves for title, curves in shown.items() if curves}


def metric_panels(runs: dict) -> dict[str, dict]:
    """Return the panels of all metrics but the loss, those of validations first, and of these the usual ones.

    In training they come from -train_metrics and log_scalar. A metric of training and of val has one panel.
    """
    logged, panels = logged_names(runs), {}
    training = {name for name in logged if name.startswith("train/")} - OF_ALL_RUNS
    validation = {name for name in logged if name.startswith("val")} - {"val/loss"}
    for name in sorted(validation, key=lambda name: (name not in ("val/accuracy", "val/f1"), name)):
        short = name.removeprefix("val/")
        if (same := f"train/{short}") in training:
            training.remove(same)
            panels[f"Training and validation {short}"] = {same: TRAIN, name: VAL}
        else:
            panels[f"Validation {short}"] = {name: VAL}
    return panels | {f"Training {name.removeprefix('train/')}": {name: TRAIN} for name in sorted(training)}


def logged_names(runs: dict) -> set[str]:
    return {name for lines in runs.values() for line in lines for name in line}


def points(lines: list[dict], name: str) -> tuple[list, list]:
    """Return the steps and values of a metric, without what no axis can show; a step of NaN interrupts the curve.

    That is where the steps go back, as those of a larger -batch_size count more samples.
    """
    steps, values = [], []
    for line in lines:
        step, value = line["step"], line.get(name)
        if value is None or abs(value) >= LARGEST:
            continue
        if steps and step < steps[-1]:
            steps.append(math.nan)
            values.append(value)
        steps.append(step)
        values.append(value)
    return steps, values


def legend_of(runs: dict) -> list:
    """Return the entries of the legend: the runs' names and their last steps."""
    from matplotlib.lines import Line2D

    handles = []
    for (run, lines), look in zip(runs.items(), styles(runs)):
        state = run_folder.read_json(run / "outcome.json").get("state", "unknown")
        text = printable(f"{run.resolve().name} ({state}, step {max(line['step'] for line in lines)})")
        handles.append(Line2D([], [], linewidth=2.5, label=text, **look))
    if any(reading.resumes(run) for run in runs):
        look = {"color": "grey", "linestyle": ":", "marker": "v"}
        handles.append(Line2D([], [], label="went on after a stop or a crash", **look))
    return handles


if __name__ == "__main__":
    sys.exit(main())
