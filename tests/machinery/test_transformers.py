"""What the shipped transformers promise, beyond what test_plugins.py holds for all."""

import pytest
import torch
from torch import nn

from lib import config
from lib.arch import gpt, vit
from lib.core import parallel

SMALL = ["-arch", "gpt", "-num_classes", "17", "-gpt_depth", "3", "-gpt_width", "24", "-gpt_heads", "3"]


def test_gpt_sees_no_later_token():
    torch.manual_seed(0)
    model = gpt.get_model(config.parse_args(SMALL))
    for parameter in model.parameters():  # as small as they begin, little would be seen of anything
        nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(17, (2, 12))
    before = model(tokens)
    for place in range(12):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % 17
        changed = (model(other) - before).abs().amax((0, 2)) > 1e-6
        assert changed.tolist() == [False] * place + [True] * (12 - place)


def test_rotary_positions_turn_complex_numbers():
    """Features i and i + half are one complex number, turned by exp(i place speed): products depend on distances."""
    torch.manual_seed(0)
    x, size = torch.randn(2, 3, 10, 8), 8
    speeds = 10_000.0 ** -(torch.arange(size // 2, dtype=torch.float64) * 2 / size)
    places = torch.arange(10, dtype=torch.float64)[:, None]
    wanted = torch.complex(*x.double().chunk(2, -1)) * torch.exp(1j * places * speeds)
    got = gpt.apply_rotary(x, *gpt.rotary_angles(10, size, x.device))
    assert torch.allclose(torch.cat((wanted.real, wanted.imag), -1).float(), got, atol=1e-6)

    query, key = torch.randn(2, 8)
    turns = gpt.rotary_angles(10, size, x.device)
    query, key = (gpt.apply_rotary(one.expand(10, size), *turns) for one in (query, key))
    products = query @ key.T
    assert torch.allclose(products.diagonal(-3), products[3, 0].expand(7), atol=1e-5)


def test_gpt_has_the_parameters_that_its_sizes_say():
    for depth, width, tokens in ((3, 24, 17), (12, 768, 50_304), (24, 1792, 256)):
        sizes = {"gpt_depth": depth, "gpt_width": width, "num_classes": tokens, "gpt_heads": 4}
        words = [f"-{name}={value}" for name, value in sizes.items()]
        with torch.device("meta"):
            model = gpt.get_model(config.parse_args([*SMALL, *words]))
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == tokens * width + depth * (12 * width**2 + 2 * width) + width
    assert count > 9e8


@pytest.mark.parametrize("words", [SMALL, ["-arch", "vit"]])
def test_a_transformer_from_the_meta_device_is_filled_by_its_modules(words):
    """As FSDP does after sharding: every module that owns parameters can draw them, and it is as on the CPU."""
    args = config.parse_args(words)
    module = {"gpt": gpt, "vit": vit}[args.arch]
    with torch.device("meta"):
        model = module.get_model(args)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"} and not [*model.buffers()]
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    for part in model.modules():
        if list(part.parameters(recurse=False)):
            part.reset_parameters()
    truth = dict(module.get_model(args).named_parameters())
    for name, parameter in model.named_parameters():
        (mean, deviation), (own_mean, own_deviation) = stated(truth[name]), stated(parameter)
        assert own_deviation == pytest.approx(deviation, rel=0.2, abs=1e-8), name
        assert own_mean == pytest.approx(mean, abs=0.01), name
    blocks = parallel.blocks(model)
    assert len(blocks) == len(model.blocks) and all(isinstance(block, module.Block) for block in blocks)


def test_vit_cuts_patches_as_a_convolution_with_their_stride_does():
    args = config.parse_args(["-arch", "vit", "-channels", "3", "-image_size", "12", "-vit_patch", "4"])
    patches = vit.get_model(args).patches
    images = torch.randn(2, 3, 12, 12)
    filters = patches.linear.weight.view(-1, 3, 4, 4)
    wanted = nn.functional.conv2d(images, filters, patches.linear.bias, stride=4).flatten(2).transpose(1, 2)
    got = patches(images) - patches.places
    assert got.shape[1] == 9 and torch.allclose(got, wanted, atol=1e-5)


def test_gpt_of_odd_sizes_and_of_images_is_refused():
    model = gpt.get_model(config.parse_args(SMALL))
    with pytest.raises(gpt.UsageError, match="reads whole numbers"):
        model(torch.randn(2, 1, 8, 8))


def stated(values):
    return values.mean().item(), values.std().item()
