"""The answers of a classifier are counted correctly."""

import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

from lib.utils.distributed import World
from lib.utils.monitoring import metrics


def test_answers_are_counted_by_class():
    answers = metrics.Predictions(nn.CrossEntropyLoss(), 3, World())
    targets, given = torch.tensor([0, 1, 2, 1, -100, 255]), torch.tensor([0, 2, 2, 1, 1, 1])
    for count in (6, 0):  # a batch of padding counts nothing, nor does a target out of range
        answers.add(targets, nn.functional.one_hot(given, 3).float(), count)
    assert answers.counts.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    answers.reset()
    assert not answers.counts.any(), "nothing was evaluated since"
    for ignored in (0, 2):  # a class of -ignore_index
        answers = metrics.Predictions(nn.CrossEntropyLoss(ignore_index=ignored), 3, World())
        answers.add(targets, nn.functional.one_hot(given, 3).float(), 6)
        assert not answers.counts[ignored].any() and answers.counts.sum() == 3


def test_float_targets_are_not_taken_for_classes():
    """A model with one output that computes the loss of a regression itself has such targets."""
    answers = metrics.Predictions(nn.CrossEntropyLoss(), 1, World())
    answers.add(torch.tensor([0.5, 1.0, -2.0]), torch.rand(3, 1), 3)
    assert answers.figures() == {} and not answers.counts.any()


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int64])
@pytest.mark.parametrize("classes", [12, 17, 100])
def test_f1_is_that_of_scikit_learn_for_labels_of_any_type(kind, classes):
    targets = torch.randint(classes - 1, (3 * classes,))  # no sample is of the last class
    outputs = torch.randn(len(targets), classes) + 3 * nn.functional.one_hot(targets, classes)
    answers = metrics.Predictions(nn.CrossEntropyLoss(), classes, World())
    answers.add(targets.to(kind), outputs, len(targets))
    assert answers.figures() == {"f1": pytest.approx(f1_score(targets, outputs.argmax(1), average="macro"))}
