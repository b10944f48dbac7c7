"""Which flags bend a run's trajectory, and which may differ: from start to start, or from machine to machine."""

from lib.utils.errors import UsageError, close

# Said of one start alone: in no config.yaml.
ONCE = {
    "cfg", "reset", "resume", "allow_change", "batch_per_gpu", "limit_steps", "check_resume", "profile", "debug",
    "eval", "dry", "nnodes", "node_rank", "master_addr", "master_port",
}  # fmt: skip
# May differ from machine to machine.
OWN = {"node_rank", "master_addr", "master_suffix", "cpu", "gpus", "workers", "data", "out", "cfg", "cache_dir", "tb"}
# What a run may change as it likes: everything else bends its trajectory.
HARMLESS = ONCE | OWN | {
    "model", "deterministic", "log_every", "log_histograms", "max_bad_steps", "save_every", "keep_last", "keep_every",
    "best", "save_strict", "weights", "max_hours", "grace_s", "hang_minutes", "parallel", "fsdp_replicas", "offload",
    "recompute", "compile", "find_unused", "debug_dist", "ngrok", "ngrok_auth", "ngrok_oauth", "ngrok_allow",
}  # fmt: skip
OTHERS = {"samples", "nan"}  # what -allow_change may name beside flags: the dataset's length, weights not finite


def of(asked: dict) -> dict:
    """Of these flags and values, those that bend a run's trajectory."""
    return {name: value for name, value in asked.items() if name not in HARMLESS and not name.startswith("slurm")}


def check_allowed(allowed: list[str], known: set[str]):
    """Raises UsageError for an -allow_change that names nothing known."""
    known = known | OTHERS
    for name in {*allowed} - known:
        raise UsageError(f"-allow_change {name}: there is no such flag{close(name, sorted(known))}")


def changes(before: dict, now: dict, allowed: list[str]) -> str:
    """What bends the trajectory otherwise than before and is allowed, or is known to one side only, as after a change
    of the code: old and new, in words; "" for nothing. Raises UsageError for what -allow_change does not name."""
    changed = [name for name in sorted(of({**before, **now})) if before.get(name) != now.get(name)]
    told = {name: f"-{name} was {before.get(name, 'unknown')} and is {now.get(name, 'unknown')}" for name in changed}
    refused = [name for name in changed if name in before and name in now and name not in allowed]
    if refused:
        words = " ".join(f"-allow_change {name}" for name in refused)
        raise UsageError(f"-model {now['model']} would go on with other settings: "
                         f"{', '.join(told[name] for name in refused)}; keep them, or add {words}, or start anew "
                         f"with -reset or another -model")  # fmt: skip
    return ", ".join(told.values())
