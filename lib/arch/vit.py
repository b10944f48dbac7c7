"""A vision transformer: an image as a row of patches."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from lib.utils.errors import UsageError

STD = 0.02  # deviation of fresh weights


def add_args(parser):
    parser.set_defaults(lr_start=5e-4, clip_grad=1.0)  # with what suits convolutions it learns little
    parser.add_argument("-vit_patch", type=int, metavar="N", help="pixels of a patch's side (an eighth of the image)")
    parser.add_argument("-vit_depth", type=int, default=6, metavar="N", help="blocks")
    parser.add_argument("-vit_width", type=int, default=192, metavar="N", help="features of a patch")
    parser.add_argument("-vit_heads", type=int, default=3, metavar="N", help="attention heads")
    parser.add_argument("-vit_dropout", type=float, default=0.0, metavar="P", help="share of features dropped")


def get_model(args) -> nn.Module:
    """Images (B, channels, image_size, image_size) to (B, num_classes).

    Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929; depth 12, width 768, 12 heads and patches of
    16 pixels are its ViT-B/16, with the patches' mean in place of the class token (Zhai et al., arXiv:2106.04560).
    Raises UsageError for sizes that do not fit.
    """
    patch, width, heads = args.vit_patch or -(-args.image_size // 8), args.vit_width, args.vit_heads
    if patch < 1 or args.image_size % patch:
        raise UsageError(f"-vit_patch {patch}: patches that cut -image_size {args.image_size} evenly are needed")
    if args.vit_depth < 1 or heads < 1 or width < 1 or width % heads:
        given = f"-vit_depth {args.vit_depth} -vit_width {width} -vit_heads {heads}"
        raise UsageError(f"{given}: at least 1 block and a width that the heads divide are needed")
    if not 0 <= args.vit_dropout < 1:
        raise UsageError(f"-vit_dropout {args.vit_dropout}: a share from 0 to below 1 is needed")
    blocks = [Block(width, heads, args.vit_dropout) for _ in range(args.vit_depth)]
    tokens = Patches(args.channels, args.image_size // patch, patch, width)
    return ViT(tokens, blocks, width, args.num_classes)


class ViT(nn.Module):
    """Patches, blocks, and a linear layer on what they end with."""

    def __init__(self, patches: "Patches", blocks: list[nn.Module], width: int, classes: int):
        super().__init__()
        self.patches, self.blocks = patches, nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1))


class Patches(nn.Module):
    """Images (B, C, H, W) to (B, patches, width), each one's place added."""

    def __init__(self, channels: int, side: int, patch: int, width: int):
        super().__init__()
        self.patch = patch
        self.linear = Linear(channels * patch**2, width)
        self.places = nn.Parameter(torch.empty(side**2, width))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.places, std=STD)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        cut = images.view(batch, channels, height // self.patch, self.patch, width // self.patch, self.patch)
        return self.linear(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)) + self.places


class Block(nn.Module):
    """x (B, patches, width) and what attention, then a two-layer perceptron, add to it."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.out(self.attention(self.norm_1(x))))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm_2(x)))))

    def attention(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)


class Linear(nn.Linear):
    """A linear layer that begins with small weights and no bias."""

    def reset_parameters(self):
        nn.init.trunc_normal_(self.weight, std=STD)
        nn.init.zeros_(self.bias)
