"""cycling_utils' classes together: a loop like its Fashion-MNIST example stops anywhere and resumes."""

import functools

import torch
from ranks import on_ranks
from runs import same_tensors
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lib.utils import compat

EPOCHS, BATCH, ROWS = 3, 4, {"train": 30, "test": 10}


def loop(rank, out, stop):
    """Train and test; end without a save after `stop` batches, as if killed."""
    timer = compat.TimestampedTimer("imports")
    torch.manual_seed(0)
    data = {part: TensorDataset(torch.randn(rows, 3), torch.randint(2, (rows,))) for part, rows in ROWS.items()}
    samplers = {part: compat.InterruptableDistributedSampler(data[part]) for part in data}
    loaders = {part: DataLoader(data[part], BATCH, sampler=samplers[part]) for part in data}
    metrics = {part: compat.MetricsTracker() for part in data}
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    criterion = nn.CrossEntropyLoss(reduction="sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    state |= {f"{part}_sampler": samplers[part] for part in data}
    state |= {f"{part}_metrics": metrics[part] for part in data}

    saver = compat.AtomicDirectory(output_directory=str(out), is_master=rank == 0)
    if (newest := out / saver.symlink_name).is_symlink():
        saved = torch.load(newest.readlink() / "checkpoint.pt")
        for name, one in state.items():
            one.load_state_dict(saved[name])
    done = 0
    for epoch in range(samplers["train"].epoch, EPOCHS):
        for sampler in samplers.values():
            sampler.set_epoch(epoch)
        for part, loader in loaders.items():
            model.train(part == "train")
            for inputs, targets in loader:
                batch = samplers[part].progress // BATCH + 1
                is_last = batch == len(loader)
                optimizer.zero_grad()
                with torch.set_grad_enabled(part == "train"):
                    loss = criterion(model(inputs), targets)
                if part == "train":
                    loss.backward()
                    optimizer.step()
                samplers[part].advance(len(inputs))
                metrics[part].update({"examples": len(inputs), "loss": loss.item()})
                metrics[part].reduce().reset_local()
                if is_last and part == "train":
                    schedule.step()
                if is_last and (part == "train" or rank == 0):  # in the example only the master ends a test's epoch
                    metrics[part].end_epoch()
                if is_last or batch % 2 == 0:
                    save(saver, state, rank)
                timer.report(f"epoch {epoch} {part} batch {batch}: {metrics[part].agg['loss']:.3f}")
                done += 1
                if done == stop:
                    return
        for sampler in samplers.values():
            sampler.reset_progress()


def save(saver, state, rank):
    folder = saver.prepare_checkpoint_directory()
    if rank == 0:
        compat.atomic_torch_save({name: one.state_dict() for name, one in state.items()}, f"{folder}/checkpoint.pt")
    saver.symlink_latest(folder)


def test_a_loop_with_all_classes_resumes_with_the_same_bits_after_any_stop(tmp_path):
    """Stops before the first save, during an epoch's training, after a test, and in a later epoch's training."""
    found = {}
    for name, stops in {"whole": [None], "stopped": [1, 3, 5, 9, None]}.items():
        out = tmp_path / name
        for number, stop in enumerate(stops):
            meeting = tmp_path / f"{name}_{number}"
            meeting.mkdir()
            on_ranks(2, functools.partial(loop, out=out, stop=stop), meeting)
        (link,) = out.glob("*.latest_checkpoint")
        found[name] = torch.load(link.readlink() / "checkpoint.pt")
    whole, stopped = found["whole"], found["stopped"]
    assert same_tensors(whole["model"], stopped["model"])
    for part, rows in ROWS.items():
        assert [one["examples"] for one in whole[f"{part}_metrics"]["epoch_reports"]] == [rows] * EPOCHS
        for name in (f"{part}_sampler", f"{part}_metrics"):
            assert whole[name] == stopped[name], name
