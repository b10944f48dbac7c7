"""Output of a run: a progress bar on a terminal, plain lines elsewhere, and the log files."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from functools import reduce

from processes import ROOT

RUN = """
import logging, sys, time, warnings
from tqdm import tqdm
from lib.utils.monitoring import console
folder, rank = sys.argv[1], int(sys.argv[2])
console.setup_logging(folder, rank)
log = logging.getLogger("lib.trainer")
bar = tqdm(total=200, initial=100, unit="step", dynamic_ncols=True, disable=None)  # as the logger's
for step in range(101, 201):
    bar.update()
    if step % 10 == 0:
        text = f"loss {step / 1000:.3f}  data 25 %"
        if rank == 0:
            logging.getLogger("lib.logger").info("step %d/200  %s", step, text)
    if step == 150:
        log.info("saved step_%08d", step)
        warnings.warn("careful", stacklevel=1)
        logging.getLogger("somebody").info("chatter")
bar.close()
log.info("finished")
print("last words")
"""
COMMAND = [sys.executable, "-c", RUN]


def test_a_terminal_shows_a_bar_and_log_lines_do_not_break_it(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen([*COMMAND, tmp_path, "0"], cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    with suppress(OSError):  # on Linux the error means that the other end is closed
        while True:
            written += os.read(ours, 65536)
    os.close(ours)
    assert process.wait() == 0
    written = written.decode(errors="replace")
    pieces = [line.split("\r") for line in written.replace("\r\n", "\n").split("\n")]  # "\r" goes back to the start
    screen = [reduce(lambda shown, piece: piece + shown[len(piece) :], line).rstrip() for line in pieces]
    assert "saved step_00000150" in screen and "finished" in screen and "chatter" not in written
    bars = [line for line in screen if "|" in line]
    assert len(bars) == 1, "one bar that is updated in place"
    assert re.match(r"100%\|█+\| 200/200 \[00:0\d<00:0\d, ", bars[0]), bars[0]
    assert "loss 0.110" in (tmp_path / "logs/rank_0.log").read_text()


def test_without_a_terminal_lines_are_plain_and_each_rank_has_a_log_file(tmp_path):
    given = {"cwd": ROOT, "timeout": 240, "capture_output": True, "text": True}
    main, other = (subprocess.run([*COMMAND, tmp_path, str(rank)], **given) for rank in range(2))
    lines = main.stdout.splitlines()
    assert lines[0] == "step 110/200  loss 0.110  data 25 %" and lines[-2:] == ["finished", "last words"]
    assert len([line for line in lines if line.startswith("step")]) == 10 and main.stderr == ""
    assert (other.stdout, other.stderr) == ("last words\n", "")
    logs = [(tmp_path / f"logs/rank_{rank}.log").read_text() for rank in range(2)]
    for text in logs:
        assert " INFO saved step_00000150\n" in text and "careful" in text
    assert "careful" in main.stdout and "loss 0.110" in logs[0] and "loss" not in logs[1]
    subprocess.run([*COMMAND, tmp_path, "1"], **given)
    assert (tmp_path / "logs/rank_1.log").read_text().startswith(logs[1]), "the next start appends"
