"""What the comparisons share: who of the contenders is installed, whose turn it is, and the table of ratios."""

import importlib.util
import statistics

BASE = "bare PyTorch"
NEEDS = {"Lightning Fabric": "lightning", "Lightning Trainer": "lightning", "Accelerate": "accelerate"}


def installed(names) -> list[str]:
    """Those whose package is there; says who is left out."""
    absent = [name for name in names if name in NEEDS and not importlib.util.find_spec(NEEDS[name])]
    if absent:
        print(f"left out, as not installed: {', '.join(absent)}")
    return [name for name in names if name not in absent]


def in_turn(names: list[str], turn: int) -> list[str]:
    """The names in the order of this round, in which each begins once in as many rounds."""
    return names[turn % len(names) :] + names[: turn % len(names)]


def show(title: str, seconds: dict[str, list[float]], *, unit: str, scale: float, digits: int = 0) -> dict:
    """Prints one table and returns it: for each name the median in `unit` (seconds times `scale`), and its ratio to
    the bare loop in the same round, with the quartiles of that."""
    print(f"\n{title}\n{'':20} {unit:>10} {'ratio':>7}  quartiles")
    rows = {}
    for name, values in seconds.items():
        ratios = [one / base for one, base in zip(values, seconds[BASE], strict=True)]
        low, high = quartiles(ratios)
        middle, ratio = scale * statistics.median(values), statistics.median(ratios)
        rows[name] = {unit.split()[0]: middle, "ratio": ratio, "quartiles": [low, high]}
        print(f"{name:20} {middle:10.{digits}f} {ratio:7.2f}  {low:.2f} to {high:.2f}", flush=True)
    return rows


def quartiles(values: list[float]) -> list[float]:
    """The value below which a quarter lies, and the one above which."""
    values = sorted(values)
    return [values[len(values) // 4], values[-1 - len(values) // 4]]
