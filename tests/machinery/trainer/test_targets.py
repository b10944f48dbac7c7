"""Targets that no loss takes, and batches that no BatchNorm takes: one line each. Class weights, ignored targets."""

import math
import re

import pytest
import torch
from command_line import parsed, usage_error
from runs import few, outcome, plugins, run
from torch import nn
from torch.nn import functional
from truth import measured

from lib.core import loss as losses
from lib.utils.data.tensors import Tensors
from lib.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("small_plugins")
ROWS = torch.randn(60, 64, generator=torch.Generator().manual_seed(1))
FLAGS = "-dataset odd -arch norm_net -num_classes 4 -batch_size 16 -epochs 1 -cpu 1 -shuffle no"


def criterion(flags: str = ""):
    return losses.get_loss(parsed(f"-label_smoothing 0 {flags}"))


LABELS, RANGE = torch.arange(60) % 4, r"a batch are ({0} to 3|0 to {0}): labels are 0 to 3 for 4 .*-ignore_index"
ROW = "rows that do not sum to 1, as several labels a sample, or are negative"
BAD = [("train", -1, 3), ("train", 4, 55), ("train", 255, 59), ("train", 1 << 40, 20), ("val", 4, 30)]
BAD += [("train", row, 57) for row in ([1.0, 1, 0, 0], [0.0, 0, 0, 0], [2.0, -1, 0, 0], [float("nan"), 0, 0, 1])]


@pytest.mark.parametrize(("split", "bad", "place"), BAD)
def test_a_label_out_of_range_or_a_row_of_no_probabilities_in_any_batch_is_one_line(split, bad, place, refused):
    targets = torch.eye(4)[LABELS] if isinstance(bad, list) else LABELS.clone()
    targets[place] = torch.tensor(bad)
    with plugins(dataset={"odd": lambda args: {**few(args), split: Tensors(ROWS, targets)}}):
        assert re.search(ROW if isinstance(bad, list) else RANGE.format(bad), refused(FLAGS))


@pytest.mark.parametrize("lengths", [(5, 4), (4, 5)])
def test_a_batch_as_long_as_there_are_classes_does_not_change_where_they_are(lengths):
    """Of four classes; sequences that are padded to the longest in their batch."""
    usual, odd = criterion(), criterion()
    for length in lengths:
        usual(torch.randn(2, length, 4), torch.zeros(2, length, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"outputs \(B, N, N\) have the classes first or last"):
        for length in lengths:
            odd(torch.randn(2, 4, length), torch.zeros(2, length, dtype=torch.int64))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool])
def test_labels_of_any_whole_type_give_the_loss_of_int64(kind):
    labels, outputs = torch.arange(8) % 2, torch.randn(8, 2)
    assert torch.equal(criterion()(outputs, labels.to(kind)), functional.cross_entropy(outputs, labels))
    many = torch.zeros(2**16, 9).half(), torch.zeros(2**16).to(kind)  # whose sum is too large for 16 bits
    assert criterion()(*many).item() == pytest.approx(math.log(9))
    places, rows = torch.arange(24).view(2, 12) % 2, torch.randn(2, 12, 2)
    wanted = functional.cross_entropy(rows.flatten(0, 1), places.flatten())
    assert torch.equal(criterion()(rows, places.to(kind)), wanted)
    assert measured(criterion(), (rows, places.to(kind))).keys() == {"bits_per_token"}


def test_a_label_156_in_uint8_counts_and_an_edit_of_the_table_of_losses_holds(monkeypatch):
    batch = torch.randn(3, 200), torch.tensor([156, 3, 156], dtype=torch.uint8)
    assert [losses.count_targets(criterion(flags), batch, 3) for flags in ("", "-ignore_index 156")] == [3, 1]
    assert losses.count_targets(nn.NLLLoss(ignore_index=3), batch, 3) == 2, "a loss of one's own counts alike"
    assert losses.count_targets(criterion(), batch[0][:2], 3) == 2, "a collate_fn has left one out"
    both = {"input": ROWS, "label": LABELS, "target": LABELS}
    assert "a batch has a label and a target" in usage_error(losses.forward, nn.Linear(64, 4), both, criterion())
    monkeypatch.setitem(losses.BY_NAME, "cross_entropy", nn.CrossEntropyLoss)
    assert type(criterion()) is nn.CrossEntropyLoss and criterion("-ignore_index 3").ignore_index == 3


@pytest.mark.parametrize("name", ["mse", "l1", "huber"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16])
def test_a_regression_takes_numbers_of_any_type(name, precision):
    loss, inputs = criterion(f"-loss {name}"), torch.randn(8, 1).to(precision).requires_grad_()
    for kind in (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool):
        targets = (torch.arange(8)[:, None] % 2).to(kind)
        found = losses.forward(nn.Identity(), (inputs, targets), loss).loss
        found.backward()
        assert found.item() == pytest.approx(loss(inputs.double(), targets.double()).item(), rel=1e-5)


@pytest.mark.parametrize("flags", ["", "-loss mse", "-loss huber"])
@pytest.mark.parametrize("targets", [["a", "b"], [torch.ones(2), torch.ones(2)], (1, 2), {"x": 1}, None])
def test_targets_that_are_no_tensor_are_one_line(targets, flags):
    with pytest.raises(UsageError, match=rf"^the default .* for targets of type {type(targets).__name__}: override"):
        losses.forward(nn.Identity(), (torch.randn(2, 4), targets), criterion(flags))


SHAPES = {
    "several labels": ((8, 4), torch.ones(8, 4, dtype=torch.int64)),
    "a column": ((8, 4), torch.ones(8, 1, dtype=torch.int64)),
    "a mask with a channel": ((2, 3, 5, 5), torch.ones(2, 1, 5, 5, dtype=torch.uint8)),
    "another number": ((8, 4), torch.ones(7, dtype=torch.int64)),
    "no classes": ((8,), torch.ones(8, dtype=torch.int64)),
    "one output": ((8, 1), torch.zeros(8, dtype=torch.int64)),
    "float numbers": ((8, 4), torch.ones(8)),
}


@pytest.mark.parametrize(("shape", "targets"), SHAPES.values(), ids=SHAPES)
def test_targets_of_another_shape_are_one_line(shape, targets):
    assert losses.TAKES in usage_error(criterion(), torch.randn(shape), targets)


@pytest.mark.parametrize("weights", ["1,1,1", "1,2,3"])
@pytest.mark.parametrize("ignored", [-1, 255, 0])
def test_ignored_labels_are_left_out_of_the_loss_and_of_bits_per_token(ignored, weights):
    loss = criterion(f"-ignore_index {ignored} -num_classes 3 -class_weights {weights}")
    masks, images = torch.randint(1, 3, (2, 5, 5)), torch.randn(2, 3, 5, 5)
    masks[0, 2:] = ignored
    options = {"ignore_index": ignored, "reduction": "none"}
    each = functional.cross_entropy(images, masks, torch.tensor([*map(float, weights.split(","))]), **options)
    assert torch.allclose(loss(images, masks), each[masks != ignored].mean())
    tokens, rows = masks.flatten(1), images.flatten(2).transpose(1, 2)
    assert torch.allclose(loss(rows, tokens), loss(images, masks))
    plain = functional.cross_entropy(images, masks, ignore_index=ignored).item()
    assert measured(loss, (rows, tokens)) == {"bits_per_token": pytest.approx(plain / math.log(2))}


def norm_over_places(args):
    return nn.Sequential(nn.Unflatten(1, (4, 16)), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(64, args.num_classes))


@pytest.mark.parametrize(("samples", "flags"), [(33, ""), (19, "-micro_batch 2"), (32, "-micro_batch 1")])
def test_a_single_sample_that_batchnorm_cannot_train_on_is_said(samples, flags, tmp_path):
    with plugins(dataset={"odd": lambda args: few(args, samples)}, arch={"places": norm_over_places}):
        assert "take -drop_last" in outcome(run(tmp_path, f"{FLAGS} {flags} -model rows -cpu 2", wanted=1))["reason"]
        run(tmp_path, f"{FLAGS} {flags} -arch places -model places")
        if samples % 16:
            run(tmp_path, f"{FLAGS} {flags} -drop_last -model dropped")


def test_class_weights_are_one_for_each_class_and_take_probabilities_and_smoothing():
    smooth = criterion("-num_classes 3 -class_weights 1,1,1 -label_smoothing 0.1")
    for shape in ((12, 3), (2, 3, 5, 5)):
        outputs, soft = torch.randn(shape), torch.randn(shape).softmax(1)
        assert torch.allclose(smooth(outputs, soft), functional.cross_entropy(outputs, soft, label_smoothing=0.1))
    with pytest.raises(UsageError, match="-class_weights 1,2: give one for each of -num_classes 3"):
        criterion("-num_classes 3 -class_weights 1,2")


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("flags", ["", "-class_weights 1,2,3,4"])
def test_a_batch_of_ignored_targets_alone_has_the_loss_0(shape, flags):
    loss, outputs = criterion(f"-num_classes 4 {flags}"), torch.randn(*shape, 4, requires_grad=True)
    targets = torch.full(shape, -100)
    loss(outputs, targets).backward()
    assert loss(outputs, targets).item() == 0 and not outputs.grad.any()
    assert all(math.isnan(figure) for figure in measured(loss, (outputs, targets)).values())
