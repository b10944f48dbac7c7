"""-track: scripts/track.py, in a process of its own, sends a run's figures to Weights & Biases or MLflow."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "track.py"
CLOSE_S, STOP_S = 5.0, 0.5  # most that a run waits for it at its end: a finished run, and any other


class Tracker:
    """Follow the run's metrics.jsonl for a tracker, "wandb" or "mlflow", until `close`."""

    def __init__(self, name: str, folder: Path):
        command = [sys.executable, str(SCRIPT), name, str(folder), "-parent", str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C is the run's

    def close(self, finished: bool) -> None:
        """Say how the run ended, and wait a moment until the rest is sent."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it then goes on in the background
            self.process.communicate(b"finished" if finished else b"stopped", CLOSE_S if finished else STOP_S)
