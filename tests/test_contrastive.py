"""The contrastive trainer's loss is the paper's, and it learns what a digit is without being told."""

import pytest
import torch
from command_line import parsed
from runs import lines, run, weights

from lib import config
from lib.arch import convnet
from lib.dataset import digits
from lib.trainer import contrastive


def test_the_loss_is_the_papers_written_out():
    outputs, heat = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), 0.5
    alike = torch.nn.functional.cosine_similarity(outputs[:, None], outputs[None], dim=-1) / heat
    terms = []
    for i in range(6):
        others = sum(alike[i, k].exp() for k in range(6) if k != i)
        terms.append(-(alike[i, (i + 3) % 6].exp() / others).log())
    assert contrastive.nt_xent(outputs, heat) == pytest.approx(sum(terms) / 6)


def test_views_differ_stay_alike_and_are_the_generators():
    images = torch.rand(4, 1, 8, 8)
    assert torch.allclose(contrastive.view(images, crop=0, noise=0), images, atol=1e-5)
    first, second = (contrastive.view(images, 0.4, 0.1, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert not torch.equal(first, second) and first.shape == images.shape
    assert torch.equal(first, contrastive.view(images, 0.4, 0.1, torch.Generator().manual_seed(1)))


def test_the_loss_falls_and_digits_of_a_class_come_to_lie_together(tmp_path):
    words = f"-trainer contrastive -convnet_width 16 -epochs 6 -cpu 1 -data {config.ROOT / 'data'}"
    folder = run(tmp_path, words)
    losses = [line["val/loss"] for line in lines(folder) if "val/loss" in line]
    assert len(losses) == 6 and losses[-1] < 0.85 * losses[0]

    args = parsed(f"{words} -out {tmp_path}")
    model, parts = convnet.get_model(args).eval(), digits.get_dataset(args)
    before = apart(model, parts["val"])
    model.load_state_dict(weights(folder))
    after = apart(model, parts["val"])
    print({"before": before, "after": after})
    assert after > 0.2 > 2 * before


def apart(model, part) -> float:
    """How much more alike, as a cosine, images of one class are on average than images of different ones."""
    images, labels = part.tensors
    with torch.no_grad():
        along = torch.nn.functional.normalize(model(images))
    same = labels[:, None] == labels[None]
    return ((along @ along.T)[same].mean() - (along @ along.T)[~same].mean()).item()
