"""The shipped transformers, beyond what test_plugins.py checks for all."""

import torch
from command_line import usage_error
from torch import nn

from lib import config
from lib.arch import gpt

SMALL = ["-arch", "gpt", "-num_classes", "17", "-gpt_depth", "3", "-gpt_width", "24", "-gpt_heads", "3"]


def test_a_gpt_output_does_not_depend_on_later_tokens():
    torch.manual_seed(0)
    model = gpt.get_model(config.parse_args(SMALL))
    for parameter in model.parameters():  # with the small initial values a change would hardly be visible
        nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(17, (2, 12))
    before = model(tokens)
    for place in range(12):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % 17
        assert ((model(other) - before).abs().amax((0, 2)) > 1e-6).tolist() == [False] * place + [True] * (12 - place)


def test_attention_does_not_reach_across_an_end_token():
    """A row of two documents and the start of a third has the outputs of each by itself."""
    model = gpt.get_model(config.parse_args([*SMALL, "-gpt_end_token", "0"]))
    parts = [torch.tensor([row]) for row in ([5, 6, 1], [0, 3, 3, 8], [0], [0])]
    wanted = torch.cat([model(part) for part in parts], dim=1)
    assert torch.allclose(model(torch.cat(parts, dim=1)), wanted, atol=1e-5)
    outside = config.parse_args([*SMALL, "-gpt_end_token", "17"])
    assert "-gpt_end_token 17: tokens are 0 to 16" in usage_error(gpt.get_model, outside)


def test_rotary_positions_rotate_complex_numbers():
    """Features i and i + half are a complex number times exp(i place speed), so products depend only on distances."""
    x, speeds = torch.randn(2, 3, 10, 8), 10_000.0 ** -(torch.arange(4).double() / 4)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.exp(1j * torch.arange(10)[:, None] * speeds)
    found = gpt.apply_rotary(x, *gpt.rotary_angles(10, 8))
    assert torch.allclose(torch.cat((turned.real, turned.imag), -1).float(), found, atol=1e-6)
