"""train.py -step_times: what the time of a step goes into, and the MFU, in the log line and TensorBoard.

Shares of the time between two log lines: data (waiting for a batch), forward_backward, communication (the sum over
the processes; of DDP and FSDP only what does not run during the backward pass), optimizer. The rest is logging,
saving, and what a trainer of yours adds. On CUDA devices they are measured there, by events. A train_step of your own
has them if it calls `backward` and `rescale_gradients`.

The MFU is the share of the device's peak, in half precision, that the model's operations take (Chowdhery et al.,
arXiv:2204.02311). torch counts them in the first step of each start: those of matrix products, convolutions and
attention. Where samples differ in length it is an estimate.
"""

import contextlib
import itertools
import logging
import re
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lib.utils.data.plan import MicroBatch
from lib.utils.distributed import World
from lib.utils.monitoring.throughput import Throughput

log = logging.getLogger(__name__)
PEAK_TFLOPS = {  # of dense matrix products in half precision, by their makers' data sheets
    "B200": 2250, "H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "A100": 312, "A800": 312, "L40S": 362,
    "L4": 121, "A10": 125, "V100": 125, "T4": 65, "RTX 4090": 165, "RTX 3090": 71, "MI300X": 1307,
}  # fmt: skip
PHASES, PAUSE = ("forward_backward", "communication", "optimizer"), "pause"


class Timed:
    """What a plugin of lib/trainer is: its Trainer, with a StepTimes in place of its Throughput."""

    def __init__(self, plugin: Any):
        class Trainer(plugin.Trainer):
            def __init__(self, args: Namespace, world: World, *parts: Any):
                super().__init__(args, world, *parts)
                self.rate = StepTimes(self, args, world)
                self.of_base["rate"] = id(self.rate)

            def train_step(self, batches: Iterator) -> None:
                with self.rate.counting():
                    super().train_step(batches)
                self.rate.mark("optimizer" if self.rate.has_phases() else "")

            def backward(self, loss: Tensor, micro_batch: MicroBatch, count: Tensor | int) -> None:
                super().backward(loss, micro_batch, count)
                self.rate.mark("forward_backward")

            def rescale_gradients(self, total: Tensor, micro_batch: MicroBatch) -> None:
                self.rate.mark("communication")
                super().rescale_gradients(total, micro_batch)

        self.Trainer = Trainer


class StepTimes(Throughput):
    """A Throughput that also measures the phases of a step, as `mark` is called at the end of each."""

    def __init__(self, trainer: Any, args: Namespace, world: World):
        super().__init__(trainer.total_steps, trainer.state, world.device)
        self.marks: list[tuple[str, Any]] = []  # the end of each phase since the last log line
        self.peak = peak_flops(args, world.device) * world.size
        self.counter, self.is_counted = FlopCounterMode(display=False), False
        self.flops = self.samples = 0  # of this start's first step
        self.why_not = ""  # there is no MFU
        if not self.peak:
            self.why_not = "give -peak_tflops, of this device"
        elif args.compile or any(map(is_compiled, trainer.model.modules())):
            self.why_not = "the operations of compiled code cannot be counted"
        elif args.recompute:
            self.why_not = "under -recompute some operations would count twice"
        if self.why_not and world.is_main:
            log.info("-step_times: no MFU: %s", self.why_not)

    def time_data_loading(self, batches: Iterable) -> Iterator:
        """Yield an epoch's batches, as Throughput does, and mark the waiting for each."""
        timed, self.marks = super().time_data_loading(batches), []  # what lies before an epoch is no step's
        while True:
            self.mark("")
            item = next(timed, None)
            self.mark("data")
            if item is None:
                return
            self.samples += 0 if self.is_counted else len(item[0].indices)
            yield item

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operations of the block, if it is the first step of this start."""
        if self.is_counted or self.why_not:
            yield
            return
        with self.counter:
            yield
        self.flops, self.is_counted = self.flops + self.counter.get_total_flops(), True

    def mark(self, phase: str) -> None:
        """Note that a phase of a step ends here, "" for any other time."""
        if self.device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        else:
            moment = time.monotonic()
        self.marks.append((phase, moment))

    def has_phases(self) -> bool:
        """Return whether the last steps were made of phases: a fork's train_step may call other methods."""
        return "communication" in dict(self.marks)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the time of the interval, and its operations out of those of the step."""
        self.mark("")
        before = self.counter.get_total_flops()
        with super().paused():
            yield
        if not self.is_counted:
            self.flops += before - self.counter.get_total_flops()
        self.mark(PAUSE)

    def interval(self, state: Any) -> dict[str, float]:
        """Return Throughput's figures, the shares of the phases, and the MFU if it is known."""
        figures, seconds, has_phases = super().interval(state), Counter(), self.has_phases()
        self.mark("")
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for (_, begin), (phase, end) in itertools.pairwise(self.marks):
            seconds[phase] += begin.elapsed_time(end) if self.device.type == "cuda" else end - begin
        self.marks = self.marks[-1:]
        total = max(seconds.total() - seconds[PAUSE], 1e-9)
        for phase in PHASES if has_phases else ():
            figures[f"{phase}_share"] = seconds[phase] / total
        if self.is_counted and self.samples:
            figures["mfu_share"] = self.flops / self.samples * figures["samples_per_s"] / self.peak
        return figures


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has taken a module, or its forward."""
    compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return compiled or hasattr(module.forward, "_torchdynamo_orig_callable")


def peak_flops(args: Namespace, device: torch.device) -> float:
    """Return the most operations a second of a device, by -peak_tflops, else by its name; 0 if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    name = "" if re.search("MIG|NVL|Laptop|Max-Q", name) else name  # these have less
    known = [tflops for card, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{card}\b", name)]
    return 1e12 * (args.peak_tflops or (known[0] if known else 0))
