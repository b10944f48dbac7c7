"""The results of scripts/sweep.py: its table, and the picture of the score against each flag."""

import collections
import contextlib
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts import plot, reading, status

COLOURED = len(plot.COLOURS) - 1  # values of the flag that gives the colours; black is for all other trials
LOSSES = ("loss", "label_smoothing", "ignore_index")  # flags whose values have losses of different meaning
CURVES = 8  # of the best trials: nobody can follow more
LABELLED = 7  # values of a flag that are all written at its axis
DOT = {"marker": "o", "linestyle": "none"}
FAILED = {"marker": "x", "linestyle": "none", "color": "#B00000", "markersize": 7, "markeredgewidth": 2}


def table(trials: list, varied: list[str]) -> str:
    """Return the results as text, best first. Trials that differ only in the seed share a row."""
    names = [name for name in varied if name != "seed"]
    groups: dict[tuple, list] = {}
    for trial in trials:
        groups.setdefault(tuple(trial.values.get(name, "") for name in names), []).append(trial)
    if not names:
        groups |= {(trial.values["seed"],): [trial] for trial in trials}
        names = ["seed"]
    columns = [f"-{name}" for name in names]
    rows = [{**dict(zip(columns, values or ["all"])), **summary(group)} for values, group in groups.items()]
    rows.sort(key=lambda row: -float(row["score"] or -math.inf))
    metric = metrics_of(trials) or "score"
    rows = [{**row, metric: row["value"]} for row in rows]
    several = ("deviation", "seeds") if "seed" in varied else ()
    note = loss_note(trials, varied)
    return status.table(rows, (*columns, metric, *several, "state", "run")) + (f"\n{note}" if note else "")


def loss_note(trials: list, varied: list[str]) -> str:
    """Return a line that says so where the scores are losses that cannot be compared, else ""."""
    flags = [f"-{name}" for name in varied if name in LOSSES]
    by_loss = any(trial.best["metric"].split("/")[-1] == "loss" for trial in trials if trial.best)
    if not (flags and by_loss):
        return ""
    wanted = "rank by a metric, as -best mae, under another -model NAME"
    return f"the losses of different {' '.join(flags)} cannot be compared: {wanted}"


def summary(group: list) -> dict[str, str]:
    """Return what a row says of trials that differ only in the seed; `run` is the best of them."""
    scored = by_score(group)
    values = [trial.best["value"] for trial in scored]
    states = collections.Counter(trial.state for trial in group)
    return {
        "score": str(statistics.fmean(trial.best["score"] for trial in scored)) if scored else "",
        "value": f"{statistics.fmean(values):.4g}" if values else "",
        "deviation": f"{statistics.stdev(values):.2g}" if len(values) > 1 else "",
        "seeds": str(len(values)),
        "state": ", ".join(f"{count} {state}" if len(states) > 1 else state for state, count in states.items()),
        "run": (scored or group)[0].args.model,
    }


def metrics_of(trials: list) -> str:
    """Return by what the trials' best values were chosen; several where each goes by its own."""
    return " or ".join(sorted({trial.best["metric"] for trial in trials if trial.best}))


def by_score(trials: list) -> list:
    """Return the trials that have a score, the best first."""
    return sorted((trial for trial in trials if trial.best), key=lambda trial: -trial.best["score"])


def draw(trials: list, plan) -> None:
    """Draw the score against each flag that varies, and the curves of the best trials."""
    best = by_score(trials)
    if not best:
        return
    file = Path(plan.args.out) / f"{plan.name}.png"
    scales = {name: space.scale for name, space in plan.spaces.items()}
    try:
        score_figure(trials, scales, metrics_of(trials)).savefig(file)
    except ModuleNotFoundError as error:
        print(plot.missing(error), end="", file=sys.stderr)
        return
    print(f"{file}: {len(trials)} trials")
    curves = [str(trial.folder) for trial in best if reading.lines(trial.folder)][:CURVES]
    if len(curves) < len(trials):
        print(f"the curves are of the best {len(curves)} of {len(trials)} trials")
    with contextlib.suppress(SystemExit):  # plot.main has said why
        plot.main([*curves, "-o", str(file.with_name(f"{plan.name}_curves.png"))])


def score_figure(trials: list, scales: dict[str, str], metric: str):
    """Return the figure: a panel for each flag, in it a point for each setting, the mean over its seeds.

    `scales`: the flags that vary; "log" or "lin" for one of which -trials searches a range.
    """
    pyplot = plot.load_pyplot()
    given = {name for trial in trials for name in trial.values}  # a flag of one arch may be in no trial
    flags = [name for name in scales if name != "seed" and name in given] or ["seed"]
    settings = settings_of(trials)
    key = colour_flag(trials, flags) if len(flags) > 1 or not are_numbers(trials, flags[0]) else ""
    across = min(2, len(flags))
    down = -(-len(flags) // across)
    look = {"figsize": (8, 3 * down + 1.2), "layout": "constrained", "squeeze": False, "sharey": True}
    figure, axes = pyplot.subplots(down, across, **look)
    for axis in axes.flat[len(flags) :]:
        axis.remove()
    colours = dict(zip(values_of(trials, key), plot.COLOURS)) if key else {}
    for axis, name in zip(axes.flat, flags):
        other = colour_flag(trials, [one for one in flags if one != key]) if name == key else ""
        if other:  # in the key's own panel its colours would say nothing new
            others = dict(zip(values_of(trials, other), reversed(plot.COLOURS[:-1])))
            panel(axis, name, settings, scales[name], other, others)
        else:
            panel(axis, name, settings, scales[name], key, colours)
    scores = [score for one in settings for score in one.scores]
    if min(scores) > 0 and max(scores) > 100 * min(scores):
        axes[0, 0].set_yscale("log")
    states = collections.Counter(trial.state for trial in trials)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    for axis in axes[:, 0]:
        axis.set_ylabel(f"best validation {metric}", parse_math=False)
    place = {"loc": "outside upper left", "alignment": "left", "frameon": False, "ncols": 3}
    title = f"{len(trials)} trials: {counts}"
    figure.legend(handles=marks(settings), title=title, title_fontsize=10, **place)
    return figure


@dataclass
class Setting:
    """Trials that differ only in the seed."""

    values: dict[str, str]
    scores: list[float]
    failed: int  # without a score
    is_whole: bool  # whether all of them are finished


def settings_of(trials: list) -> list[Setting]:
    """Return the settings of the trials; each trial is one if only the seed varies."""
    groups: dict[tuple, list] = {}
    for trial in trials:
        values = {name: value for name, value in trial.values.items() if name != "seed"} or trial.values
        groups.setdefault(tuple(values.items()), []).append(trial)
    return [
        Setting(
            dict(values),
            [trial.best["value"] for trial in group if trial.best],
            sum(not trial.best for trial in group),
            all(trial.state == "finished" for trial in group),
        )
        for values, group in groups.items()
    ]


def values_of(trials: list, name: str) -> list[str]:
    """Return the values of a flag, in the order of the trials, numbers in their own."""
    values = [*dict.fromkeys(trial.values[name] for trial in trials if name in trial.values)]
    return sorted(values, key=float) if all(map(is_number, values)) else values


def are_numbers(trials: list, name: str) -> bool:
    return all(map(is_number, values_of(trials, name)))


def is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(text))
    return False


def colour_flag(trials: list, flags: list[str]) -> str:
    """Return the flag that gives the colours: one of words, or else one of few numbers; "" if there is none."""
    few = [name for name in flags if 1 < len(values_of(trials, name)) <= COLOURED]
    words = [name for name in few if not are_numbers(trials, name)]
    return [*words, *few, ""][0]


def panel(axis, name: str, settings: list[Setting], scale: str, key: str, colours: dict[str, str]) -> None:
    """Draw the scores of the settings that have a flag against its values, in the colours of another flag's."""

    def colour_of(one: Setting) -> str:
        return colours.get(one.values.get(key), plot.COLOURS[-1])

    mine = [one for one in settings if name in one.values]
    values = values_of(mine, name)
    numbers = all(map(is_number, values))
    title = f"-{name}" if len(mine) == len(settings) else f"-{name} (of {len(mine)} of {len(settings)} settings)"
    axis.grid(alpha=0.25)
    axis.margins(y=0.12)  # below them are the failed trials
    places = {value: float(value) if numbers else float(values.index(value)) for value in values}
    if numbers and is_logarithmic([*places.values()], scale):
        axis.set_xscale("log")
    if not numbers or len(values) <= LABELLED:
        axis.minorticks_off()
        slanted = {"rotation": 25, "ha": "right"} if sum(map(len, values)) > 40 else {}
        labels = (
            [status.cut(value, room=18, start=5) for value in values]
            if not numbers
            else without_overlaps(places, axis.get_xscale() == "log")
        )
        axis.set_xticks([*places.values()], labels, parse_math=False, **slanted)
    if not numbers:
        axis.set_xlim(-0.5, len(values) - 0.5)
    lines = collections.defaultdict(list)
    for value in values:
        column = [one for one in mine if one.values[name] == value]
        scored = [one for one in column if one.scores]
        for number, one in enumerate(scored):
            x = places[value] + (0 if numbers else 0.5 * ((number + 0.5) / len(scored) - 0.5))
            point(axis, x, one, colour_of(one))
            if numbers and name != "seed":
                others = tuple((flag, text) for flag, text in one.values.items() if flag != name)
                lines[others].append((x, statistics.fmean(one.scores), colour_of(one)))
        if failed := sum(one.failed for one in column):
            bottom = axis.get_xaxis_transform()
            axis.plot(places[value], 0.04, transform=bottom, clip_on=False, **FAILED)
            if failed > 1:
                axis.annotate(f"{failed}", (places[value], 0.04), (6, -3), bottom, "offset points", fontsize=8)
    entries = colour_entries(key, colours, mine)
    scores = [score for one in mine for score in one.scores]
    if name == "seed" and len(scores) > 1:
        mean, spread = statistics.fmean(scores), statistics.stdev(scores)
        label = f"mean {mean:.4g}, deviation {spread:.2g}"
        entries.append(axis.axhline(mean, color="grey", linewidth=1, label=label))
        axis.axhspan(mean - spread, mean + spread, color="grey", alpha=0.15)
    for places_of_line in lines.values():
        xs, ys, line_colours = zip(*places_of_line)
        axis.plot(xs, ys, color=line_colours[0], linewidth=1, alpha=0.4)
    look = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0}  # above the panel
    look |= {"alignment": "left", "frameon": False, "title_fontsize": 10}
    columns = plot.fitting_columns([entry.get_label() for entry in entries] or [""], width=0.5)
    axis.legend(handles=entries, title=title, ncols=columns, **look)


def point(axis, x: float, one: Setting, colour: str) -> None:
    """Draw a setting's mean over its seeds, with their deviation; hollow if a trial of it is not finished."""
    spread = statistics.stdev(one.scores) if len(one.scores) > 1 else 0
    hollow = {} if one.is_whole else {"markerfacecolor": "white"}
    bar = {"yerr": spread, "capsize": 3} if spread else {}
    axis.errorbar(x, statistics.fmean(one.scores), fmt="o", color=colour, markersize=5, **bar, **hollow)


def is_logarithmic(values: list[float], scale: str) -> bool:
    """Whether numbers are better shown on a logarithmic axis: they span a factor of 10, or grow by a factor."""
    low, middle, high = min(values), statistics.median(values), max(values)
    if scale or low <= 0 or low == high:
        return scale == "log"
    return high >= 10 * low or abs(middle - math.sqrt(low * high)) < abs(middle - (low + high) / 2)


def without_overlaps(places: dict[str, float], logarithmic: bool) -> list[str]:
    """Return the labels of rising places, "" for one that is too near to the last label."""
    xs = [math.log(place) if logarithmic else place for place in places.values()]
    labels, last = [], -math.inf
    for text, x in zip(places, xs):
        near = x - last < 0.03 * (3 + len(text)) / 2 * (xs[-1] - xs[0])
        labels.append("" if near else text)
        last = last if near else x
    return labels


def colour_entries(key: str, colours: dict[str, str], settings: list[Setting]) -> list:
    """Return the entries of a panel's legend: the values of the flag that gives its colours."""
    from matplotlib.lines import Line2D

    used = {one.values.get(key) for one in settings}
    shown = {value: colour for value, colour in colours.items() if value in used}
    found = [Line2D([], [], color=colour, label=f"-{key} {value}", **DOT) for value, colour in shown.items()]
    if colours and None in used:
        found.append(Line2D([], [], color=plot.COLOURS[-1], label=f"without -{key}", **DOT))
    return found


def marks(settings: list[Setting]) -> list:
    """Return the entries of the picture's legend: the marks that are in it."""
    from matplotlib.lines import Line2D

    found = []
    if any(len(one.scores) > 1 for one in settings):
        look = {"marker": "|", "markersize": 12, "linestyle": "none", "color": "grey"}
        found.append(Line2D([], [], label="deviation over seeds", **look))
    if any(one.scores and not one.is_whole for one in settings):
        found.append(Line2D([], [], color="grey", markerfacecolor="white", label="not all finished", **DOT))
    if failed := sum(one.failed for one in settings):
        found.append(Line2D([], [], label=f"without a score ({failed})", **FAILED))
    return found
