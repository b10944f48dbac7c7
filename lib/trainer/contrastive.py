"""Learns from images without their labels: two views of an image are to be alike, and unlike those of others.

Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, arXiv:2002.05709. An example of a
trainer with steps of its own: all else, also that a run goes on exactly, is lib/trainer/trainer.py's.
"""

from argparse import ArgumentParser

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from lib.config.types import real
from lib.trainer import trainer


def add_args(parser: ArgumentParser) -> None:
    heat, share = real(0, above=True), real(0, 1)
    parser.add_argument("-contrastive_heat", type=heat, default=0.2, metavar="X", help="temperature of the softmax")
    parser.add_argument("-contrastive_crop", type=share, default=0.4, metavar="X", help="most a view leaves out")
    parser.add_argument("-contrastive_noise", type=share, default=0.1, metavar="X", help="noise added to each pixel")
    parser.set_defaults(num_classes=64)  # outputs are coordinates, no classes


class Trainer(trainer.Trainer):
    """The usual trainer but for its loss. What an image is compared with are the others of its micro-batch."""

    def training_step(self, batch: tuple) -> Tensor:
        return self.contrast(self.model, batch[0])  # torch's generator has the micro-batch's own seed

    def evaluation_step(self, model: nn.Module, batch: tuple, count: int) -> dict[str, Tensor]:
        generator = Generator(self.world.device).manual_seed(self.args.seed)  # the same views every time
        return {"loss": self.contrast(model, batch[0], generator) * count}

    def contrast(self, model: nn.Module, images: Tensor, generator: Generator | None = None) -> Tensor:
        """The loss of two views of each image (B, C, H, W)."""
        args = self.args
        views = [view(images, args.contrastive_crop, args.contrastive_noise, generator) for _ in range(2)]
        return nt_xent(model(torch.cat(views)), args.contrastive_heat)


def view(images: Tensor, crop: float, noise: float, generator: Generator | None = None) -> Tensor:
    """Each image (B, C, H, W) cut at random, by at most a share `crop` of its sides, stretched and noisy."""
    zoom, x, y = torch.rand(3, len(images), generator=generator, device=images.device)
    zoom, zero = 1 - crop * zoom, torch.zeros_like(zoom)
    shifts = ((1 - zoom) * (2 * place - 1) for place in (x, y))
    rows = [part for row, shift in zip(([zoom, zero], [zero, zoom]), shifts) for part in (*row, shift)]
    grid = functional.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(images.shape), align_corners=False)
    grain = torch.randn(images.shape, generator=generator, device=images.device)
    return functional.grid_sample(images, grid, align_corners=False) + noise * grain


def nt_xent(outputs: Tensor, heat: float) -> Tensor:
    """The paper's loss (equation 1) of outputs (2B, D): of each image i, rows i and B + i are views."""
    along = functional.normalize(outputs.float())
    alike = (along @ along.T / heat).fill_diagonal_(-torch.inf)
    partners = torch.arange(len(alike), device=alike.device).roll(len(alike) // 2)
    return functional.cross_entropy(alike, partners)
