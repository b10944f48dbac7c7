"""A usual template: the bare loop with a progress bar, and each loss read and written to TensorBoard."""

import bare
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


def train(rank: int, flags):
    writer = SummaryWriter(flags.out / "tensorboard") if rank == 0 else None

    def logged(loss, step):
        value = loss.item()
        if writer:
            writer.add_scalar("train/loss", value, step)

    bare.train(rank, flags, bar=tqdm, logged=logged)


if __name__ == "__main__":
    bare.main(train)
