"""A decoder of tokens (GPT): causal attention, RMSNorm, rotary positions, tied embeddings."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from lib.utils.errors import UsageError

STD = 0.02  # deviation of fresh weights
ROTARY_BASE = 10_000.0  # the slowest rotary pair turns once in 2 pi ROTARY_BASE places
PLACES = 32_768  # tokens of a sample, at least, for which there are angles


def add_args(parser):
    parser.add_argument("-gpt_depth", type=int, default=4, metavar="N", help="blocks")
    parser.add_argument("-gpt_width", type=int, default=128, metavar="N", help="features of a token")
    parser.add_argument("-gpt_heads", type=int, default=4, metavar="N", help="attention heads")
    parser.add_argument("-gpt_dropout", type=float, default=0.0, metavar="P", help="share of features dropped")
    parser.add_argument("-gpt_end_token", type=int, metavar="N", help="attention does not reach across this token")


def get_model(args) -> nn.Module:
    """Tokens (B, length), integers below num_classes, to the logits (B, length, num_classes) of each one's next.

    About depth x 12 width^2 parameters: 12 x 768 is GPT-2's 85 million without the embedding, 24 x 1792 is 0.9
    billion. Radford et al., Language Models are Unsupervised Multitask Learners, 2019; Zhang and Sennrich, RMSNorm,
    arXiv:1910.07467; Su et al., rotary positions, arXiv:2104.09864; Press and Wolf, tied embeddings,
    arXiv:1608.05859. An end token counts as the first one of the document behind it. Raises UsageError for sizes, or
    an end token, that do not fit.
    """
    width, heads = args.gpt_width, args.gpt_heads
    if width % (2 * heads):
        raise UsageError(f"-gpt_width {width} -gpt_heads {heads}: a width that twice the heads divide is needed")
    if args.gpt_end_token is not None and not 0 <= args.gpt_end_token < args.num_classes:
        raise UsageError(f"-gpt_end_token {args.gpt_end_token}: tokens are 0 to {args.num_classes - 1}")
    places = max(PLACES, getattr(args, "tokens_length", 0))
    return GPT(args.num_classes, args.gpt_depth, width, heads, args.gpt_dropout, places, args.gpt_end_token)


class GPT(nn.Module):
    """The decoder, with tied embeddings."""

    def __init__(self, tokens: int, depth: int, width: int, heads: int, dropout: float, places=PLACES, end=None):
        super().__init__()
        self.end = end
        self.embed, self.drop, self.norm = nn.Embedding(tokens, width), nn.Dropout(dropout), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        # As buffers: torch.compile would compute them again in each kernel.
        for name, values in zip(("cos", "sin"), rotary_angles(places, width // heads), strict=True):
            self.register_buffer(name, values, persistent=False)
        small = STD / math.sqrt(2 * depth)  # so that the sum over all blocks begins no larger than one of them
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=small if name.endswith(("out.weight", "down.weight")) else STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        mask = None
        if self.end is not None:  # (B, 1, length, length): each token attends to its document, up to itself
            documents = (tokens == self.end).cumsum(1)
            mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return functional.linear(self.norm(x), self.embed.weight)


class Block(nn.Module):
    """x (B, length, width) and what attention, then a two-layer perceptron, add to it."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.out(self.attention(self.norm_1(x), cos, sin, mask)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm_2(x)))))

    def attention(self, x, cos, sin, mask):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, length, size)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return mixed.transpose(1, 2).reshape(batch, length, width)


def rotary_angles(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (length, size / 2), of the angle by which pair i is turned at each place."""
    speeds = ROTARY_BASE ** (torch.arange(0, size, 2, dtype=torch.float32) / -size)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * speeds
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of features i and i + size / 2 of x (..., length, size): products then depend on distances."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)
