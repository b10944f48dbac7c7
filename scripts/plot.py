"""Curves of runs in one picture: python scripts/plot.py out/a out/b [-o curves.png], or .svg, .pdf.

Loss, metric, learning rate and throughput over the steps; a dashed line with a triangle marks where a run resumed
after a stop or a crash.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils.checkpoint import run_folder
from lib.utils.errors import printable
from scripts import reading

LARGEST = 1e100  # value on an axis
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
MOST = 24  # panels
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
        if not lines or args.o.suffix not in KINDS:
            wrong = "; ".join(faults) if not lines else f"-o {args.o}: one of {', '.join(KINDS)} is wanted"
            parser.exit(2, printable(f"plot.py: {wrong}\n"))
        if hidden := names_without_panel(lines):
            more = f" and {len(hidden) - 4} more" if len(hidden) > 4 else ""
            faults.append(f"only {MOST} panels; left out: {', '.join(hidden[:4])}{more}")
        print(printable("".join(f"plot.py: {fault}\n" for fault in faults)), end="", file=sys.stderr)
        figure = draw(lines)
        figure.savefig(args.o, dpi=120)
    except OSError as error:
        parser.exit(2, f"plot.py: {printable(str(error))}\n")
    except ModuleNotFoundError as error:
        parser.exit(2, f"plot.py: needs {error.name}: uv pip install -r pyproject.toml --group plot\n")
    print(f"{printable(str(args.o))}: {len(lines)} run{'s' if len(lines) > 1 else ''}")
    return 0


def draw(runs: dict[Path, list[dict]]):
    """Return the figure of the lines of these runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    panels = panels_of(runs)
    figure, axes = pyplot.subplots(-(-len(panels) // 2), 2, figsize=(11, 3.6 * -(-len(panels) // 2)), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, curves) in zip(axes.flat, panels.items()):
        axis.set_title(title, loc="left", fontsize=11, parse_math=False)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        for (run, lines), colour in zip(runs.items(), COLOURS * len(runs)):
            for name, style in curves.items():
                axis.plot(*points(lines, name), color=colour, **style)
            for step in reading.resumes(run):
                axis.axvline(step, color=colour, linestyle=(0, (4, 3)), linewidth=1, alpha=0.7)
                axis.plot(step, 0.97, marker="v", color=colour, transform=axis.get_xaxis_transform())
        if set(curves) == {"train/loss", "val/loss"}:
            axis.plot([], [], color="grey", label="training", **TRAIN)
            axis.plot([], [], color="grey", label="validation", **VAL)
            axis.legend(frameon=False)
    label(figure, runs)
    return figure


def panels_of(runs: dict) -> dict[str, dict]:
    """Return the panels for which these runs have metrics: their titles, and the curves in each with their styles."""
    logged = {name for lines in runs.values() for line in lines for name in line}
    panels = {
        "Loss": {"train/loss": TRAIN, "val/loss": VAL},
        **{f"Validation {name.removeprefix('val/')}": {name: VAL} for name in validation_names(runs)[: MOST - 3]},
        "Learning rate": {"train/lr": {"linewidth": 1.5}},
        "Throughput (samples a second)": {"perf/samples_per_s": {"linewidth": 1.5}},
    }
    shown = {title: {n: look for n, look in curves.items() if n in logged} for title, curves in panels.items()}
    return {title: curves for title, curves in shown.items() if curves}


def validation_names(runs: dict) -> list[str]:
    """Return the validation metrics of these runs but the loss, by name, the usual ones first."""
    logged = {name for lines in runs.values() for line in lines for name in line}
    metrics = [name for name in logged if name.startswith("val/") and name != "val/loss"]
    return sorted(metrics, key=lambda name: (name not in ("val/accuracy", "val/f1"), name))


def names_without_panel(runs: dict) -> list[str]:
    """Return the validation metrics for which there is no room."""
    return validation_names(runs)[MOST - 3 :]


def points(lines: list[dict], name: str) -> tuple[list, list]:
    """Return the steps and values of a metric, without what no axis can show."""
    found = [(line["step"], line[name]) for line in lines if line.get(name) is not None and abs(line[name]) < LARGEST]
    return [step for step, _ in found], [value for _, value in found]


def label(figure, runs: dict):
    """Write the runs' names and their last steps above the panels."""
    from matplotlib.lines import Line2D

    handles = []
    for (run, lines), colour in zip(runs.items(), COLOURS * len(runs)):
        state = run_folder.read_json(run / "outcome.json").get("state", "unknown")
        text = printable(f"{run.resolve().name} ({state}, step {max(line['step'] for line in lines)})")
        handles.append(Line2D([], [], color=colour, linewidth=3, label=text))
    if any(reading.resumes(run) for run in runs):
        look = {"color": "grey", "linestyle": "--", "marker": "v"}
        handles.append(Line2D([], [], label="went on after a stop or a crash", **look))
    rows = -(-len(handles) // 3)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 * (rows + 0.3) / figure.get_figheight()))
    figure.legend(handles=handles, loc="upper left", ncols=3, frameon=False)


if __name__ == "__main__":
    sys.exit(main())
