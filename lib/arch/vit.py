"""torchvision's vision transformer, for any image size and number of channels: an image as a row of patches."""

import torchvision
from torch import nn

from lib.utils.errors import UsageError


def add_args(parser):
    parser.set_defaults(lr_start=5e-4, clip_grad=1.0)  # with what suits convolutions it learns little
    parser.add_argument("-vit_patch", type=int, metavar="N", help="pixels of a patch's side (an eighth of the image)")
    parser.add_argument("-vit_depth", type=int, default=6, metavar="N", help="blocks")
    parser.add_argument("-vit_width", type=int, default=192, metavar="N", help="features of a patch")
    parser.add_argument("-vit_heads", type=int, default=3, metavar="N", help="attention heads")
    parser.add_argument("-vit_dropout", type=float, default=0.0, metavar="P", help="share of features dropped")


def get_model(args) -> nn.Module:
    """Images (B, channels, image_size, image_size) to (B, num_classes), without pretrained weights.

    Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929; depth 12, width 768, 12 heads and patches of
    16 pixels are its ViT-B/16. Raises UsageError for sizes that do not fit.
    """
    patch, width, heads = args.vit_patch or -(-args.image_size // 8), args.vit_width, args.vit_heads
    if args.image_size % patch:
        raise UsageError(f"-vit_patch {patch}: patches that cut -image_size {args.image_size} evenly are needed")
    if width % heads:
        raise UsageError(f"-vit_width {width} -vit_heads {heads}: a width that the heads divide is needed")
    model = torchvision.models.VisionTransformer(
        args.image_size,
        patch,
        args.vit_depth,
        heads,
        width,
        4 * width,
        args.vit_dropout,
        num_classes=args.num_classes,
    )
    if args.channels != 3:
        model.conv_proj = nn.Conv2d(args.channels, width, patch, stride=patch)
        nn.init.trunc_normal_(model.conv_proj.weight, std=(args.channels * patch**2) ** -0.5)  # as torchvision's own
    return model


def get_blocks(model) -> list[nn.Module]:
    return list(model.encoder.layers)
