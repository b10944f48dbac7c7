"""A table of all runs: python scripts/status.py [out] [-watch [SECONDS]].

State: running, finished, stopped (its state saved), failed; lost: it says running, and is not (kill -9, a lost node,
a power failure); silent: it says so and has not written for a while, on a disk that cannot tell; requeued: its Slurm
job waits to be started again, and goes on by itself. Type the run's command again to let one that is stopped, failed
or lost go on.
"""

import argparse
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils.checkpoint import run_folder
from scripts import reading

SILENT_S = 900.0
COLUMNS = ("run", "state", "epoch", "step", "loss", "best", "speed", "left", "host", "job", "seen", "why")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", nargs="?", type=Path, default=Path("out"), help="the folder of all runs, or of one (out)"
    )
    parser.add_argument("-watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="again and again (2)")
    args = parser.parse_args(argv)
    if not args.out.is_dir():
        parser.exit(2, f"status.py: {args.out} is no folder: give the one that -out of the runs names\n")
    try:
        while True:
            text = table([row(folder) for folder in reading.folders(args.out)])
            print(f"\033[2J\033[H{text}" if args.watch and sys.stdout.isatty() else text, flush=True)
            if not args.watch:
                return 0
            time.sleep(args.watch)
    except KeyboardInterrupt:
        return 0


def row(folder: Path) -> dict[str, str]:
    """What is to be known of a run, by column."""
    outcome, lines = run_folder.read_json(folder / "outcome.json"), reading.lines(folder)
    seen = time.time() - reading.sign_of_life(folder)
    found, reason = state(folder, outcome, seen), str(outcome.get("reason") or "").split("\n")[0]
    if found in ("stopped", "failed", "lost") and (waits := reading.requeued(folder)):
        found, reason = "requeued", waits
    job = run_folder.read_json(folder / ".lock").get("job")
    figures = {name: value for line in lines for name, value in line.items()}
    progress = re.findall(r"epoch (\S+)  step (\S+)  .*?(?:left (\S+))?$", reading.log(folder, 1 << 16), re.M)
    epoch, step, left = progress[-1] if progress else ("", str(outcome.get("step", "")), "")
    return {
        "run": folder.name,
        "state": found,
        "epoch": epoch,
        "step": step,
        "loss": short(figures.get("train/loss")),
        "best": best(outcome, lines),
        "speed": f"{figures['perf/samples_per_s']:,.0f}/s" if "perf/samples_per_s" in figures else "",
        "left": left if found == "running" else "",
        "host": str(outcome.get("host", "")),
        "job": str(job or ""),
        "seen": f"{span(seen)} ago",
        "why": "" if found in ("running", "finished") else reason[:60],
    }


def state(folder: Path, outcome: dict, seen: float) -> str:
    """What the run is, and not only what it last said of itself."""
    said = str(outcome.get("state", "unknown"))
    if said != "running":
        return said
    held = reading.held(folder)
    if held is None:
        return "silent" if seen > SILENT_S else "running"
    return "running" if held else "lost"


def best(outcome: dict, lines: list[dict]) -> str:
    """The best validation: what the run noted when it ended, or else the highest accuracy or the lowest loss."""
    noted = outcome.get("best")
    if noted:
        return f"{noted['metric']} {short(noted['value'])}"
    for metric, pick in (("accuracy", max), ("loss", min)):
        values = [line[f"val/{metric}"] for line in lines if line.get(f"val/{metric}") is not None]
        if values:
            return f"{metric} {short(pick(values))}"
    return ""


def short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def span(seconds: float) -> str:
    """Seconds in one unit: 12 s, 5 min, 3 h, 2 d."""
    sizes = ((86400, "d"), (3600, "h"), (60, "min"))
    size, unit = next((one for one in sizes if seconds >= 2 * one[0]), (1, "s"))
    return f"{max(0, seconds) / size:.0f} {unit}"


def table(rows: list[dict]) -> str:
    """The rows in columns; those that are empty are left out."""
    if not rows:
        return "no runs here"
    shown = [name for name in COLUMNS if name in COLUMNS[:2] or any(row[name] for row in rows)]
    wide = {name: max(len(name), *(len(row[name]) for row in rows)) for name in shown}
    heads = {name: name for name in shown}
    return "\n".join("  ".join(row[name].ljust(wide[name]) for name in shown).rstrip() for row in (heads, *rows))


if __name__ == "__main__":
    sys.exit(main())
