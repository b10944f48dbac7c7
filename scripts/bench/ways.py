"""The ways that save.py compares: torch's own, Baton's, and those of Lightning Fabric, its Trainer and Accelerate."""

import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lib.utils.checkpoint.manager import Checkpoints
from lib.utils.checkpoint.state import Parts, prepare
from lib.utils.distributed import World

BATCH = 512
LAYERS = 24


class Run:
    """A model of square layers whose weights and AdamW moments take `size` bytes, and its tensors by name."""

    def __init__(self, size: int):
        width = int((size / 3 / 4 / LAYERS) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.parts = Parts({"model": self.model}, {"optim": self.optimizer})
        prepare(self.parts)
        self.inputs = torch.randn(BATCH, width)
        self.tensors = self.parts.tensors()

    def passes(self) -> float:
        """Seconds of a forward and backward pass."""
        began = time.perf_counter()
        self.model(self.inputs).square().mean().backward()
        return time.perf_counter() - began


class Save:
    """torch.save, as most people do it."""

    def __init__(self, run: Run, folder: Path):
        self.run, self.file, self.checkpoint = run, folder / "checkpoint.pt", folder / "checkpoint"

    def begin(self):
        torch.save(self.run.tensors, self.file)

    def staged(self):
        """Waits until the weights may change."""

    def finish(self):
        """Waits until it is on disk, or where the way leaves that to chance, written."""

    def clear(self):
        self.file.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint, ignore_errors=True)


class SaveSynced(Save):
    """torch.save into a new file, fsync, rename."""

    def begin(self):
        partial = self.file.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(self.run.tensors, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.file)
        folder = os.open(self.file.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


class Dcp(Save):
    """dcp.save."""

    def begin(self):
        dcp.save(self.run.tensors, checkpoint_id=self.checkpoint)


class DcpAsync(Save):
    """dcp.async_save."""

    def begin(self):
        self.future = dcp.async_save(self.run.tensors, checkpoint_id=self.checkpoint)

    def finish(self):
        self.future.result()


class DcpStaged(Save):
    """dcp.async_save with its staging in a thread, and its buffers kept."""

    def __init__(self, run, folder):
        super().__init__(run, folder)
        self.stager = DefaultStager(StagingOptions(False, False, True, False))

    def begin(self):
        self.answer = dcp.async_save(self.run.tensors, checkpoint_id=self.checkpoint, async_stager=self.stager)

    def staged(self):
        self.answer.staging_completion.result()

    def finish(self):
        self.answer.upload_completion.result()


class ByFabric(Save):
    """fabric.save."""

    def __init__(self, run, folder):
        from lightning.fabric import Fabric

        super().__init__(run, folder)
        self.fabric = Fabric(accelerator="cpu", devices=1)
        model, optimizer = self.fabric.setup(run.model, run.optimizer)
        self.state = {"model": model, "optimizer": optimizer}

    def begin(self):
        self.fabric.save(self.file, self.state)


class ByLightning(Save):
    """trainer.save_checkpoint, which ModelCheckpoint calls, too."""

    def __init__(self, run, folder):
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = run.model

            def training_step(self, *_):
                """Never called: the trainer only takes hold of model and optimizer."""

            def configure_optimizers(self):
                return run.optimizer

        super().__init__(run, folder)
        off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        self.trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=0, **off)
        self.trainer.fit(Module(), [0])

    def begin(self):
        self.trainer.save_checkpoint(self.file)


class ByAccelerate(Save):
    """accelerator.save_state."""

    def __init__(self, run, folder):
        from accelerate import Accelerator

        super().__init__(run, folder)
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.prepare(run.model, run.optimizer)

    def begin(self):
        self.accelerator.save_state(self.checkpoint)


class Ours(Save):
    """Baton: lib/utils/checkpoint/manager.py."""

    def __init__(self, run, folder):
        super().__init__(run, folder)
        self.checkpoints, self.step = Checkpoints(self.checkpoint, World(), keep_last=1), 0
        self.checkpoints.open()

    def begin(self):
        tensors = self.run.parts.tensors()  # as the trainer does
        self.step += 1
        self.checkpoints.save(tensors, {"state": {}}, step=self.step, early=set())

    def staged(self):
        self.checkpoints.staged()

    def finish(self):
        self.checkpoints.finish()

    def clear(self):
        """Its own retention has removed the one before."""


WAYS = {
    "torch.save": Save,
    "torch.save, fsync, rename": SaveSynced,
    "dcp.save": Dcp,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, staged aside": DcpStaged,
    "Lightning Fabric": ByFabric,
    "Lightning Trainer": ByLightning,
    "Accelerate": ByAccelerate,
    "ours": Ours,
}
