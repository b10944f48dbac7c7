"""A network that is hard to sum and to shard, and the flags of a run that trains it."""

import torch
from torch import nn

NET = "-dataset few -arch blocks_net -num_classes 4 -batch_size 16 -micro_batch 4 -epochs 13 -clip_grad 0.5"


class BlocksNet(nn.Module):
    """Has dropout, tied weights, a frozen parameter, an integer buffer, and sizes that no number of ranks divides."""

    def __init__(self, dropout=0.2):
        super().__init__()
        layers = [[nn.Linear(64, 64), nn.Tanh(), nn.Dropout(dropout)] for _ in range(2)]
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in layers)
        self.inner, self.outer = nn.Linear(64, 37), nn.Linear(37, 64)
        self.outer.weight = nn.Parameter(torch.randn(64, 37) / 8)
        self.mirror = nn.Linear(64, 64, bias=False)
        self.mirror.weight = self.blocks[1][0].weight
        self.scale = nn.Parameter(torch.full((64,), 0.5), requires_grad=False)
        self.register_buffer("calls", torch.tensor(3))
        self.head = nn.Linear(64, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.head(self.mirror(self.outer(self.inner(inputs)).relu() * self.scale))
