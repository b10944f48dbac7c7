"""The images for TensorBoard: the samples, the model's answers and the confusion matrix are drawn correctly."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lib.utils.distributed import World
from lib.utils.monitoring import images as pictures

NAMES = 16 * [""]


def test_samples_of_any_size_are_drawn_in_their_place_and_legible_at_350_pixels():
    images = torch.rand(6, 1, 4, 4)
    picture = pictures.image_grid(images, NAMES)
    assert picture.shape == (2 * 110, 4 * 87, 3) and picture.dtype == np.uint8
    low, high = images.min(), images.max()
    sixth = ((images[5] - low) / (high - low) * 255).byte()  # the second image of the second row
    assert np.array_equal(picture[110:194:21, 87:171:21, 0], sixth[0]), "each pixel is drawn 21 wide"
    assert pictures.image_grid(torch.full((1, 3, 4, 4), math.nan), NAMES)[:84, :84].max() == 0
    for shape in ((100, 3, 4, 4), (16, 3, 224, 224), (16, 1, 1, 300)):
        assert pictures.image_grid(torch.rand(shape), NAMES).shape[1] == 348


def test_answers_are_counted_by_class_and_drawn_next_to_the_samples():
    answers = pictures.Predictions(nn.CrossEntropyLoss(), 3, ["cat", "dog", "owl"], World())
    targets, given = torch.tensor([0, 1, 2, 1, -100, 255]), torch.tensor([0, 2, 2, 1, 1, 1])
    for count in (6, 0):  # a batch of padding counts nothing, nor does a target out of range
        answers.add(torch.rand(6, 1, 8, 8), targets, nn.functional.one_hot(given, 3).float(), count)
    assert answers.counts.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    shown = answers.draw()
    assert list(shown) == ["confusion", "answers"]
    assert all(picture.dtype == np.uint8 and picture.shape[2] == 3 for picture in shown.values())
    second_line = shown["answers"][98:110] < 128
    assert second_line[:, 87:174].any() and not second_line[:, :87].any(), (
        "the second answer is wrong and drawn, the first is right"
    )
    answers.reset()
    assert answers.draw() == {}, "nothing was evaluated since"


def test_answers_of_all_ranks_are_summed_once(monkeypatch):
    sums = []
    monkeypatch.setattr(pictures.distributed, "gather", lambda counts, world: sums.append(1) or [counts, counts])
    answers = pictures.Predictions(nn.CrossEntropyLoss(), 3, None, World(size=2))
    answers.add(torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2]), torch.eye(3), 3)
    assert answers.figures() == {"f1": 1.0} and list(answers.draw()) == ["confusion", "answers"]
    assert answers.counts.tolist() == [[2, 0, 0], [0, 2, 0], [0, 0, 2]] and sums == [1]


def test_classes_without_a_name_are_called_by_their_number():
    for names, message in ((["cat"], ["cat", "1", "2"]), (None, ["0", "1", "2"]), (list("abc"), ["a", "b", "c"])):
        answers = pictures.Predictions(nn.CrossEntropyLoss(), 3, names, World())
        assert answers.names == message
        answers.add(torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2]), torch.eye(3), 3)
        assert list(answers.draw()) == ["confusion", "answers"]


def test_float_targets_are_not_taken_for_classes():
    """A model with one output that computes the loss of a regression itself has such targets."""
    answers = pictures.Predictions(nn.CrossEntropyLoss(), 1, None, World())
    answers.add(torch.rand(3, 1, 8, 8), torch.tensor([0.5, 1.0, -2.0]), torch.rand(3, 1), 3)
    assert answers.figures() == {} and answers.draw() == {}


def test_a_confusion_matrix_is_dark_where_the_samples_are():
    for classes in (40, 100):
        counts = torch.diag(torch.full((classes,), 7))
        counts[1] = 0
        counts[1, 0] = 3
        picture = pictures.confusion_matrix(counts, [str(name) for name in range(classes)])
        margin, size = 60, 24
        corners = picture[1::size, margin + 1 :: size, 0]
        assert np.array_equal(corners == 0, counts > 0) and (corners[counts == 0] == 255).all()


def test_other_losses_many_classes_and_unusual_shapes_are_ignored():
    images, targets = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
    for loss, classes in ((nn.MSELoss(), 2), (nn.CrossEntropyLoss(), 101)):
        answers = pictures.Predictions(loss, classes, None, World())
        answers.add(images, targets, torch.rand(2, classes), 2)
        assert answers.draw() == {} and answers.counts.numel() == 0, "no memory is used for 50,000 tokens"
    answers = pictures.Predictions(nn.CrossEntropyLoss(), 2, None, World())
    answers.add(images, {"label": targets}, torch.rand(2, 2), 2)
    answers.add(images, targets[:, None], torch.rand(2, 2, 1), 2)
    assert answers.draw() == {}
    answers.add({"image": images}, targets, torch.rand(2, 2), 2)
    assert list(answers.draw()) == ["confusion"], "without images only the confusion matrix is drawn"


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int64])
@pytest.mark.parametrize("classes", [12, 17, 100])
def test_f1_is_right_for_labels_of_any_type(kind, classes):
    targets = torch.arange(classes).repeat(3)
    answers = pictures.Predictions(nn.CrossEntropyLoss(), classes, None, World())
    answers.add(None, targets.to(kind), nn.functional.one_hot(targets, classes).float(), len(targets))
    assert answers.figures() == {"f1": 1.0}
