"""A table of all runs: python scripts/status.py [out] [-by best] [-watch] [-wide].

States: running; finished; stopped, with its state saved; failed; lost (kill -9,
a lost node, a power failure); silent: it has not written for a while, on a disk
without locks; requeued: its Slurm job continues by itself. To continue a run
that is stopped, failed or lost, type its command again. `saved` is the step of
the newest checkpoint: if all processes are killed, the steps after it are lost.
-delete removes, after a question, the runs that -reset moved to out/.old.

The table is as wide as the terminal, or 80 columns: long names are cut where
they stay different, or have lines of their own; so has `why`. The last line
names the columns that have no room. -wide shows all in full.
"""

import argparse
import math
import os
import re
import shutil
import sys
import textwrap
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.config import flags
from lib.utils import files
from lib.utils.checkpoint import run_folder
from lib.utils.errors import printable
from scripts import reading

SILENT_S = 900.0
SORTS = ("run", "best", "loss", "seen")
COLUMNS = tuple("run state epoch step saved loss best speed left mirror host job seen why".split())
LEAST = "host speed job seen loss epoch left step saved mirror best".split()  # left out where there is no room
LONGEST = 120  # characters of why
NAME = 28  # characters of a run's name for which columns are left out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", nargs="?", type=Path, default=Path("out"), help="the folder of all runs, or of one (out)"
    )
    parser.add_argument(
        "-by", choices=SORTS, default="run", help="sort by this column, the best or newest first (run)"
    )
    parser.add_argument("-delete", action="store_true", help="remove the old runs in out/.old, after a question")
    parser.add_argument("-wide", action="store_true", help="all columns, and names in full")
    parser.add_argument("-watch", nargs="?", **flags.PERIOD, const=2.0, help="again and again, every X seconds (2)")
    args = parser.parse_args(argv)
    if not args.out.is_dir():
        parser.exit(2, f"status.py: {args.out} is no folder: give the one that -out of the runs names\n")
    if args.delete:
        return delete(args.out / ".old")
    try:
        while True:
            width = 0 if args.wide else shutil.get_terminal_size().columns
            text = table(rows(args.out, args.by), width=width)
            print(f"\033[2J\033[H{text}" if args.watch and sys.stdout.isatty() else text, flush=True)
            if not args.watch:
                return 0
            time.sleep(args.watch)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `| head` has read enough; Python's last flush must not fail, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def delete(old: Path) -> int:
    """List the runs that -reset has moved away, and remove them if the answer is y."""
    entries = sorted(old.iterdir()) if old.is_dir() else []
    runs = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
    if not runs:
        print(f"{old}: no old runs")
        return 0
    sizes = [sum(file.lstat().st_size for file in run.rglob("*") if not file.is_dir()) for run in runs]
    for run, size in zip(runs, sizes):
        print(f"{one_line(run)}  {size / 1e9:.3f} GB")
    try:
        answer = input(f"remove them ({len(runs)} in all, {sum(sizes) / 1e9:.3f} GB) for good? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        print("nothing was removed")
        return 0
    for run in runs:
        shutil.rmtree(run)
    print("removed")
    return 0


def rows(out: Path, by: str = "run") -> list[dict[str, str]]:
    """Return the rows of the table, sorted by a column; rows without a value there come last."""
    folders = reading.folders(out)
    if by == "seen":
        folders.sort(key=reading.sign_of_life, reverse=True)
    found = [row(folder) for folder in folders]
    if by == "loss":
        found.sort(key=lambda row: float(row["loss"] or math.inf))
    if by == "best":
        found.sort(key=lambda row: (not row["best"], row["best"].split(" ")[0], -float(row["score"] or 0)))
    return found


def row(folder: Path) -> dict[str, str]:
    """Return a run's row, by column. Files that no run writes make it a row that says so."""
    try:
        return read_row(folder)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        why = f"its files are odd ({type(error).__name__}: {error})"
        return {
            **dict.fromkeys((*COLUMNS, "score"), ""),
            "run": folder.name,
            "state": "unreadable",
            "why": why[:LONGEST],
        }


def read_row(folder: Path) -> dict[str, str]:
    """Return a run's row, by column."""
    outcome, metrics = run_folder.read_json(folder / "outcome.json"), reading.metrics(folder)
    lines = metrics.lines
    seen = time.time() - reading.sign_of_life(folder)
    found, reason = state(folder, outcome, seen), str(outcome.get("reason") or "").split("\n")[0]
    if found in ("stopped", "failed", "lost") and (waits := reading.requeued(folder)):
        found, reason = "requeued", waits
    job = run_folder.read_json(folder / ".lock").get("job")
    figures = {name: value for line in lines for name, value in line.items()}
    saved = reading.checkpoint(folder)
    epoch, step, left = progress(folder, saved)
    top = outcome.get("best") or saved.get("state", {}).get("best") or best(lines)
    return {
        "run": folder.name,
        "state": found,
        "epoch": epoch,
        "step": step,
        "saved": last_save(folder) if found != "finished" else "",
        "loss": short(figures.get("train/loss", unlogged(saved))),
        "best": f"{top['metric']} {short(top['value'])}" if top else "",
        "score": str(float(top["score"])) if top else "",  # for sorting: higher is better
        "speed": f"{figures['perf/samples_per_s']:,.0f}/s" if figures.get("perf/samples_per_s") else "",
        "left": left if found == "running" else "",
        "mirror": mirror(folder, saved, str(outcome.get("state"))),
        "host": str(outcome.get("host", "")),
        "job": str(job or ""),
        "seen": f"{span(seen)} ago",
        "why": metrics.fault or ("" if found in ("running", "finished") else reason[:LONGEST]),
    }


def last_save(folder: Path) -> str:
    """Return the step of the newest checkpoint, and how old it is: what is lost if all processes are killed now."""
    newest = next(iter(run_folder.list_checkpoints(folder / "checkpoints")), None)
    if newest is None:
        return "never"
    return f"{newest.name.rpartition('_')[2]}, {span(time.time() - newest.stat().st_mtime)} ago"


def mirror(folder: Path, saved: dict, recorded: str) -> str:
    """Return how many steps the copy of -mirror is behind the newest checkpoint `saved`; "" without a copy."""
    facts = run_folder.read_json(folder / "mirror.json")
    if "url" not in facts:
        return ""
    behind = saved.get("state", {}).get("step", 0) - facts.get("step", 0)
    if behind > 0:
        return f"{behind} steps behind"
    ended = recorded != "running" and zlib.crc32(files.read_bytes(folder / "outcome.json")) != facts.get("outcome")
    return "lacks the end" if ended else "whole"


def progress(folder: Path, saved: dict) -> tuple[str, str, str]:
    """Return the epoch and the step, each with its total, and the time left.

    They are from the last log line, or from the newest checkpoint, which is later if a run stopped between two
    lines.
    """
    logged = re.findall(r"epoch (\S+)  step (\S+)  .*left (\S+)$", reading.log(folder, 1 << 16), re.M)
    if not saved or (logged and int(logged[-1][1].split("/")[0]) >= saved["state"]["step"]):
        return logged[-1] if logged else ("", "", "")
    config, done = saved["config"], saved["state"]
    steps = config["samples"] / config["batch_size"]
    steps = math.floor(steps) if config["drop_last"] else math.ceil(steps)
    total = config.get("steps") or config["epochs"] * steps
    epochs = math.ceil(total / steps)
    return f"{min(done['epoch'] + 1, epochs)}/{epochs}", f"{done['step']}/{total}", ""


def unlogged(saved: dict) -> float | None:
    """Return the mean loss that a run saved before its first log line."""
    sums = {name: sum(terms) for name, terms in saved.get("state", {}).get("unlogged", {}).items()}
    return sums["loss"] / sums["samples"] if sums.get("samples") else None


def state(folder: Path, outcome: dict, seen: float) -> str:
    """Return the run's state: a run whose outcome.json says running may be lost or silent."""
    recorded = str(outcome.get("state", "unknown"))
    if recorded != "running":
        return recorded
    locked = reading.is_locked(folder)
    if locked is None:
        return "silent" if seen > SILENT_S else "running"
    return "running" if locked else "lost"


def best(lines: list[dict]) -> dict | None:
    """Return the best validation of a run that has not recorded one yet: the highest accuracy or the lowest loss."""
    for metric, sign in (("accuracy", 1), ("loss", -1)):
        values = [line[f"val/{metric}"] for line in lines if line.get(f"val/{metric}") is not None]
        if values:
            score = max(sign * value for value in values)
            return {"metric": metric, "value": sign * score, "score": score}
    return None


def short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def span(seconds: float) -> str:
    """Return a time in one unit: 12 s, 5 min, 3 h, 2 d."""
    sizes = ((86400, "d"), (3600, "h"), (60, "min"))
    size, unit = next((one for one in sizes if seconds >= 2 * one[0]), (1, "s"))
    return f"{max(0, seconds) / size:.0f} {unit}"


def one_line(text: object) -> str:
    """Return text as one line that cannot control a terminal."""
    return printable(str(text)).replace("\n", "\\n").replace("\t", " ")


def table(rows: list[dict], columns: tuple[str, ...] = COLUMNS, width: int = 0) -> str:
    """Return the rows in columns, the first two and those that are not empty, at most `width` wide if it is not 0."""
    if not rows:
        return "no runs here"
    rows = [{name: one_line(row.get(name, "")) for name in columns} for row in rows]
    shown = [name for name in columns if name in columns[:2] or any(row[name] for row in rows)]
    if not width:
        return "\n".join(lines_of(rows, shown))
    columns_of_why = [name for name in shown if name == "why"]
    shown = [name for name in shown if name != "why"]
    hidden = []
    for name in LEAST:
        if width_of(rows, shown, NAME) > width and name in shown:
            shown.remove(name)
            hidden.append(name)
    room = max(8, width - width_of(rows, shown, 0))
    runs = [row["run"] for row in rows]
    names = cut_apart(runs, room)
    head, *lines = lines_of([{**row, "run": name} for row, name in zip(rows, names or [""] * len(rows))], shown)
    if not names:  # each has a line of its own
        lines = [f"{textwrap.fill(run, width, break_on_hyphens=False)}\n{line}" for run, line in zip(runs, lines)]
    if columns_of_why:
        whys = [textwrap.fill(row["why"], width, initial_indent="  ", subsequent_indent="  ") for row in rows]
        lines = [f"{line}\n{why}" if why else line for line, why in zip(lines, whys)]
    note = textwrap.fill(f"no room for {', '.join(hidden)}: -wide shows all", width)
    return "\n".join([head, *lines, *([note] if hidden else [])])


def lines_of(rows: list[dict], shown: list[str]) -> list[str]:
    """Return a line for each row, below that of the columns' names."""
    wide = widths(rows, shown)
    heads = {name: name for name in shown}
    return ["  ".join(row[name].ljust(wide[name]) for name in shown).rstrip() for row in (heads, *rows)]


def widths(rows: list[dict], shown: list[str]) -> dict[str, int]:
    return {name: max(len(name), *(len(row[name]) for row in rows)) for name in shown}


def width_of(rows: list[dict], shown: list[str], name: int) -> int:
    """Return how wide a table is whose runs' names have at most `name` characters."""
    wide = widths(rows, shown)
    return sum({**wide, "run": min(name, wide["run"])}.values()) + 2 * (len(shown) - 1)


def cut_apart(texts: list[str], room: int) -> list[str]:
    """Return texts in so many characters, cut where their whole words stay different; [] if no place is such."""
    usual = (room - 2) // 3  # most trials of a sweep differ at their ends
    for start in sorted(range(room - 1), key=lambda start: abs(start - usual)):
        found = [cut(text, room, start) for text in texts]
        pairs = zip(found, texts, strict=True)
        words = [one if one == text else re.sub(r"[^_]*\.\.[^_]*", "..", one) for one, text in pairs]  # but cut ones
        if len({*words}) == len({*texts}):
            return found
    return []


def cut(text: str, room: int, start: int) -> str:
    """Return a text in so many characters: its first `start` ones, two dots and its end."""
    return text if len(text) <= room else f"{text[:start]}..{text[len(text) - (room - 2 - start) :]}"


if __name__ == "__main__":
    sys.exit(main())
