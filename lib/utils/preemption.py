"""A stop is a wish until all ranks agree on it at a step boundary.

A signal only leaves its number in a pipe. A thread reads it at once, even while the main thread waits in a
collective, raises the wish and sets the clock: a stop that takes longer than the grace ends the process with a dump
of all stacks.
"""

import contextlib
import faulthandler
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch

from lib.utils import distributed
from lib.utils.checkpoint import run_folder
from lib.utils.distributed import World
from lib.utils.errors import ABORTED, FAILED, STOPPING

log = logging.getLogger(__name__)
TWICE_S = 1.0  # a terminal's Ctrl-C and a dying parent's signal each arrive twice: nearer together they are one
ASK_EVERY_S = 1.0  # between votes
LAST_S = 5.0  # that a stop leaves to the last evaluation, which finishes the run: the next start would cost as much
AGENT_GONE = "a torchrun agent is gone"
STUCK_S = 5.0  # and twice the longest step: then a step that does not end waits for a process that is gone
MOST_STEPS = 100  # between votes, so that steps that grow slow are noticed


class Stop:
    """The wish to stop of this process: from a signal, the file STOP in the run folder, -max_hours, or because the
    torchrun agent that started it is gone: the others are then to go on without it. `at_limit` is no wish: all ranks
    know it."""

    def __init__(self, folder: Path, max_hours: float | None, grace_s: float, limit_steps: int | None):
        self.reason: str | None = None
        self.signal: str | None = None  # its name, where that is the reason
        self.by_file = False  # whether the file is the reason, on whichever node it lies
        self.limit_steps = limit_steps
        self.folder, self.lock = folder, run_folder.lock_id(folder)
        self.lost = False  # whether the run's folder is gone: no wish, as nothing could be saved
        self.file: Path | None = folder / "STOP"
        self.grace_s = grace_s
        self.ends = time.monotonic() + max_hours * 3600 if max_hours else None
        self.looked = 0.0
        self.since = None  # monotonic time of the first signal
        self.step_since: float | None = None  # monotonic time at which the step under way began
        self.longest_s: float | None = None  # of the steps that this process finished
        self.trained = False  # nothing is left but an evaluation: the wish waits LAST_S for the run to finish
        self.wished_at = None

    def wished(self) -> bool:
        """Whether this process wishes to stop; the file, and the run's folder, are looked for once a second."""
        now = time.monotonic()
        if self.reason is None and self.ends and now >= self.ends:
            self.reason = "-max_hours is over"
        if self.reason is None and now - self.looked >= ASK_EVERY_S:
            self.looked = now
            self.lost = not run_folder.has_lock(self.folder, self.lock)
            if self.file and self.file.exists():
                self.reason, self.by_file = f"the file {self.file} is there", True
            elif distributed.orphaned():
                self.reason = AGENT_GONE
                faulthandler.dump_traceback_later(self.grace_s, exit=True, file=2)
        if self.reason is not None and self.wished_at is None:
            self.wished_at = now
        return self.reason is not None and (not self.trained or now - self.wished_at >= LAST_S)

    def remove_file(self):
        """Removes the file STOP: it means the run, once. Whoever finds it has not obeyed it yet, be it older than
        this start or newer by another machine's clock."""
        try:
            self.file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed (%s): the next start will stop for it, too", self.file, error)

    def check_folder(self):
        """Raises OSError where the run's folder is not the one that it began in."""
        self.lost = not run_folder.has_lock(self.folder, self.lock)
        self.raise_if(self.lost)

    def raise_if(self, lost: float):
        """The same, once all ranks know whether it is."""
        if lost:
            raise OSError(f"{self.folder} was removed, moved or unmounted while the run wrote there. Another run may "
                          f"have its place by now, so this one ends")  # fmt: skip

    def why(self) -> dict[str, str | None]:
        """What outcome.json says of the wish."""
        return {"reason": self.reason, "signal": self.signal}

    def is_another_nodes(self) -> bool:
        """Whether the others of an elastic run are to go on: the agent of some ranks is gone, or they alone were told
        to stop, as on a node that has to go."""
        told = self.signal is not None and self.since is None
        return self.reason == AGENT_GONE or (told and distributed.elastic())

    def at_limit(self, step: int) -> bool:
        """Whether -limit_steps is reached, which all ranks see at the same step."""
        reached = self.limit_steps is not None and step >= self.limit_steps
        if reached:
            self.reason = self.reason or f"-limit_steps {self.limit_steps} is reached"
        return reached

    def step_begins(self):
        """Notes that a step begins."""
        self.step_since = time.monotonic()

    def step_ends(self):
        """Notes that it is over, as is the vote behind it."""
        self.longest_s = max(self.longest_s or 0.0, time.monotonic() - self.step_since)
        self.step_since = None

    @contextlib.contextmanager
    def listening(self, saving=lambda: False):
        """Signals raise the wish while the block runs; afterwards they do again what they did before. `saving()`:
        whether this process writes its part of a checkpoint."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        before_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, _handler(number)) for number in STOPPING}
        thread = threading.Thread(target=self._watch, args=(ours, saving), name="stop", daemon=True)
        thread.start()
        os.register_at_fork(after_in_child=functools.partial(_forked, theirs))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # a task of a Slurm job kept them waiting until now
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)
            theirs.shutdown(socket.SHUT_WR)  # the thread reads the end, though loader processes have it open too
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            theirs.close()
            ours.close()

    def _watch(self, pipe, saving):
        while True:
            try:
                data = pipe.recv(64)
            except TimeoutError:
                self._leave_if_stuck(saving)
                continue
            if not data:
                return
            for number in data:
                self._heard(number)
            if self.signal == "SIGTERM" and distributed.has_agent():
                pipe.settimeout(STUCK_S / 10)

    def _leave_if_stuck(self, saving):
        """Ends this process where a step does not end after torchrun's SIGTERM. If a process is lost, torchrun sends
        it to the others; they wait for the lost one in NCCL, which does not notice, and torchrun for them, 30 s. The
        first step of a process may take any time."""
        begun, longest_s = self.step_since, self.longest_s
        if begun is None or longest_s is None or saving():
            return
        stuck_s = time.monotonic() - max(begun, self.since)
        if stuck_s > STUCK_S + 2 * longest_s:
            faulthandler.dump_traceback(file=2)
            log.error("the step has not ended %.0f s after SIGTERM, the longest one took %.1f s: this process leaves "
                      "without a save, as another one is gone or hangs", stuck_s, longest_s)  # fmt: skip
            os._exit(FAILED)

    def _heard(self, number):
        if number not in STOPPING:
            return
        now = time.monotonic()
        if self.since is None:
            self.since = now
            if self.reason is None:
                self.signal = signal.Signals(number).name
                self.reason = f"signal {self.signal}"
            faulthandler.dump_traceback_later(self.grace_s, exit=True, file=2)  # no Python code can be in its way
            log.info(
                "%s: stopping at the end of this step, or after -grace_s %g without saving", self.reason, self.grace_s
            )
        elif number == signal.SIGINT and now - self.since > TWICE_S:
            os._exit(ABORTED)


class Ballot:
    """The vote of all ranks on stopping, cast at step boundaries that all of them know beforehand.

    Every rank must call `tick` equally often. Alone, each tick answers; together, they vote about once a second: the
    slowest rank's time for a step says after how many, so that a vote costs well under 1 % of the steps between.
    """

    def __init__(self, stop: Stop, world: World):
        self.stop, self.world = stop, world
        self.ticks, self.next, self.since = 0, 1, time.monotonic()
        self.voted = self.alarmed = False  # at the last tick: whether all answered, and rank 0's other wish
        self.training = True

    def tick(self, alarm: bool | None = None) -> bool:
        """True once all ranks agree to stop. `alarm`: a wish of another kind of rank 0, voted on in the same
        breath; None between the batches of an evaluation, whose speed says nothing of the steps."""
        self.ticks += 1
        if self.world.size == 1:
            self.voted, self.alarmed = True, bool(alarm)
            wished = self.stop.wished()
            self.stop.raise_if(self.stop.lost)
            return wished
        if self.training != (alarm is not None):
            self.training, self.ticks, self.next = alarm is not None, 1, 1
        self.voted, self.alarmed = self.ticks >= self.next, False
        return self.voted and self.ask(bool(alarm))

    def ask(self, alarm: bool = False) -> bool:
        """The vote itself, now, by all ranks."""
        step_s = (time.monotonic() - self.since) / max(1, self.ticks)
        wished = self.stop.wished()
        mine = torch.tensor([wished, step_s, alarm and self.world.is_main, self.stop.lost], dtype=torch.float64)
        wished, step_s, alarmed, lost = distributed.max_(mine, self.world).tolist()
        self.stop.raise_if(lost)
        self.alarmed = alarmed > 0
        # Twice as many at most: a GPU that was just waited for takes the next steps' launches in no time.
        self.next = max(1, min(MOST_STEPS, 2 * self.ticks, int(ASK_EVERY_S / max(step_s, 1e-9))))
        self.ticks, self.since = 0, time.monotonic()
        if wished:
            told = distributed.gather_json([self.stop.reason, self.stop.signal, self.stop.by_file], self.world)
            self.stop.reason, self.stop.signal, self.stop.by_file = next(one for one in told if one[0])
        return wished > 0


def _handler(number):
    """A lost terminal stops a run only if somebody was reading there, and did not say nohup."""
    at_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    deaf = signal.Signals(number).name == "SIGHUP" and (signal.getsignal(number) == signal.SIG_IGN or not at_terminal)
    return signal.SIG_IGN if deaf else _left_to_the_thread


def _forked(pipe):
    """In a process that a plugin forks while this one listens, as multiprocessing.Pool does and ends by SIGTERM: no
    signal that it gets is this one's."""
    if pipe.fileno() >= 0:  # else nobody listens any more
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _left_to_the_thread(number, frame):
    """The pipe has the number already."""
