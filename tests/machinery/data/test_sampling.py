"""Weights of samples, balanced classes and mixtures: how often each comes, on any number of processes."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import parsed, usage_error
from hypothesis import given
from hypothesis import strategies as st
from items import Items
from runs import distance, few, lines, run
from saves import SMALL
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from truth import file_plugins, same_bits_everywhere

from lib import config
from lib.core import loss
from lib.utils.data import fetch
from lib.utils.data.loader import Loader
from lib.utils.data.plan import Plan
from lib.utils.data.tensors import Tensors
from lib.utils.distributed import World
from lib.utils.errors import UsageError
from scripts import check_data, sampling

FLAGS = f"{SMALL} -epochs 2 -threads 1"
TOKENS = "-dataset tokens -arch gpt -tokens_length 8 -tokens_samples 40 -gpt_width 8 -gpt_heads 2 -gpt_depth 1"


def rare(args):
    """Three quarters of the training samples are of class 0."""
    parts = few(args)
    inputs, labels = parts["train"].tensors
    return {**parts, "train": Tensors(inputs, labels * (torch.arange(len(labels)) % 4 == 0))}


def weighted(args, **more):
    parts = few(args)
    vars(parts["train"]).update(weights=[1.0] * 40 + [9.0] * 10, **more)
    return parts


by_length = functools.partial(weighted, lengths=torch.arange(50) % 7)
_plugins = file_plugins(dataset={"rare": rare, "weighted": weighted, "by_length": by_length})


def drawn(sampler, seed=0):
    torch.manual_seed(seed)
    return torch.tensor([*sampler])


@given(
    st.lists(st.floats(0, 100, allow_subnormal=False, width=16), min_size=1, max_size=30).filter(any),
    st.integers(1, 99),
    st.data(),
)
def test_each_sample_and_each_group_comes_as_often_as_its_share_rounded_up_or_down(shares, count, data):
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(shares), max_size=len(shares))))
    sampler = sampling.SystematicSampler(torch.tensor(shares), count, groups)
    times = torch.bincount(drawn(sampler), minlength=len(shares)).double()
    wanted = torch.tensor(shares, dtype=torch.float64) * count / math.fsum(shares)
    assert len(sampler) == times.sum() == count and ((times - wanted).abs() < 1 + 1e-6).all()
    assert ((times - wanted).new_zeros(4).index_add_(0, groups, times - wanted).abs() < 1 + 1e-6).all()


def test_a_sample_that_comes_again_is_drawn_under_another_seed():
    items = [lambda: torch.rand(()), *range(4)]
    part = Items(items, on_device=lambda batch, draws: torch.stack([batch, draws[:, 0]]))
    part.sampler = sampling.SystematicSampler(torch.tensor([3.0, 0, 0, 0, 0]), 3)
    assert sorted(fetch.draw_order(part, 0, 0).tolist()) == [0, 5, 10]
    [(_, found)] = Loader(part, Plan(3, 3, 3), World(), seed=0, shuffle=True, workers=0).epoch(0)
    assert [len({*row.tolist()}) for row in found] == [3, 3]
    sampling.add_sampler(part := Items([*range(40)], lengths=torch.zeros(40), weights=torch.ones(40)), parsed(""))
    part.sampler.sampler.num_samples = 80
    part.sampler.set_batch_size(8)
    steps = fetch.draw_order(part, 0, 0).split(8)
    assert all(len((step % 40).unique()) == 8 for step in steps), "no step has copies"


MIXED = f"{TOKENS} -threads 1 -data a=0.3,b=0.7 -micro_batch 4 -epochs 2 -train_metrics"


@pytest.mark.parametrize(
    ("flags", "others"),
    [
        (f"{FLAGS} -dataset rare -balance", f"{FLAGS} -dataset rare"),
        (f"{FLAGS} -dataset weighted", f"{FLAGS} -dataset few"),
        (f"{FLAGS} -dataset by_length", f"{FLAGS} -dataset weighted"),
        (MIXED, MIXED.replace("b=0.7", "b=0.2")),
    ],
    ids=["balanced", "weighted", "by_length", "mixed"],
)
def test_drawn_samples_are_the_same_on_any_number_of_processes_and_after_a_stop(flags, others, texts, tmp_path):
    folder = same_bits_everywhere(tmp_path, flags, (3, 2))
    assert distance(folder, run(tmp_path, f"{others} -model others -cpu 1"))
    assert flags != MIXED or {"val_a/loss", "val_b/loss", "train/b_loss"} < set().union(*lines(folder))


@given(st.integers(1, 300), st.integers(6, 40), st.integers(0, 9))
def test_a_step_has_samples_of_similar_length_and_an_epoch_each_sample_once(count, batch, seed):
    lengths = torch.randint(100, (count,), generator=torch.Generator().manual_seed(seed))
    sampling.add_sampler(part := Items([*range(count)], lengths=lengths), parsed(""))
    part.sampler.set_batch_size(batch)
    order = fetch.draw_order(part, seed, 0)
    assert sorted(order.tolist()) == [*range(count)]
    steps = sorted(sorted(lengths[step].tolist()) for step in order[: count - count % batch].split(batch))
    assert all(steps[n - 1][-1] <= steps[n][0] for n in range(1, len(steps))), "of one window, none overlap"


def test_balanced_classes_come_equally_often():
    sampling.add_sampler(part := rare(None)["train"], parsed("-balance"))
    _, times = part.tensors[1][fetch.draw_order(part, 0, 0) % len(part)].unique(return_counts=True)
    assert {*times.tolist()} == {16, 17}, "50 samples of three classes, most of which are of class 0"


@pytest.mark.parametrize("kind", ["tensors", "subset", "several", "attribute", "masks"])
def test_balanced_weights_are_those_of_scikit_learn(kind):
    labels = torch.tensor([0, 0, 0, 1, 2, 2])
    whole = TensorDataset(torch.zeros(8), torch.cat([torch.tensor([1, 1]), labels]))
    part = {
        "tensors": TensorDataset(torch.zeros(6), labels),
        "subset": Subset(whole, range(2, 8)),
        "several": ConcatDataset([Subset(whole, range(2, 5)), Subset(whole, range(5, 8))]),
        "attribute": type("Own", (), {"targets": labels.tolist(), "__len__": lambda self: 6})(),
        "masks": TensorDataset(torch.zeros(2), torch.cat([labels, torch.tensor([-100, -100])]).view(2, 2, 2)),
    }[kind]
    args = parsed("-num_classes 3 -class_weights balanced")
    sampling.balance_loss(found := loss.get_loss(args), part, args)
    assert torch.allclose(found.weight, torch.tensor([6 / 9, 6 / 3, 6 / 6]))


REFUSED = {
    "-dataset rare -balance -shuffle no": "not with -shuffle no",
    "-dataset weighted -balance": "nor with a sampler or weights of their own",
    f"{TOKENS} -balance": "must list their classes, as dataset.labels or dataset.targets, and Windows has none",
    "-dataset rare -class_weights balanced -num_classes 5": "(-num_classes) there are [",
    "-dataset rare -class_weights balance": "'balance' is not balanced or a list of numbers",
    "-dataset rare -balance -class_weights balanced": "counts samples as they are listed",
    "-dataset few -loss l1 -class_weights 1,2,2,1": "-loss l1 takes no -class_weights or -ignore_index",
    f"{TOKENS} -data a=0.5,b/a=0.5": "two places have the name a",
    f"{TOKENS} -data a=0,b=0": "one share must be above 0",
    f"{TOKENS} -data a,b=0.7": "'a' is no PLACE=SHARE",
    f"{TOKENS} -data a=-1,b=0.7": "'a=-1' is no PLACE=SHARE",
    f"{TOKENS} -data a=0.3.1,b=0.7": "'a=0.3.1' is no PLACE=SHARE",
    f"{TOKENS} -data a=0.5,b=0.5 -skip_bad_files": "-skip_bad_files: not in a mixture",
    f"{TOKENS} -data a=0.5,none=0.5": "neither train.bin nor a text there",
    f"{TOKENS} -data a=0.5,words=0.5": "do not mix: {'num_classes': 256} and {'num_classes': 300} describe them",
}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Two places with a text each, and one with tokens of another vocabulary."""
    for name, text in (("a", "abc" * 3000), ("b", "xyz" * 2000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    (tmp_path / "words").mkdir()
    (tmp_path / "words/meta.json").write_text('{"vocabulary": 300}')
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "words/train.bin")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("flags", "message"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_drawn_is_one_line(flags, message, texts, error_of):
    assert message in error_of(f"{FLAGS} {flags} -cpu 1")


def test_places_are_mixed_by_their_shares(texts):
    args = config.parse_args([*TOKENS.split(), "-data", "a=3e0, b=1"])
    mixed = config.plugins.mixed(config.plugins.load("dataset", "tokens"), args.data)
    splits = mixed.get_dataset(args)
    assert {*splits} == {"train", "val_a", "val_b", "test"} and len(splits["train"]) == 80
    assert (fetch.draw_order(splits["train"], 0, 0) % 80 < 40).sum() == 60
    assert not check_data.find_faults({"train": splits["train"]}, check_data.World())
    Path("a/tokenizer.json").touch()
    Path("b/tokenizer.json").write_text("{}")
    assert "a/tokenizer.json and b/tokenizer.json differ" in usage_error(mixed.get_dataset, args)


def test_parts_that_do_not_fit_together_are_refused():
    one, other = (Tensors(torch.zeros(4), torch.arange(4), classes=names) for names in (["a", "b"], ["b", "a"]))
    both = {"one": one, "other": other}
    assert "differ in their classes" in usage_error(sampling.Mixture, both, {"one": 1, "other": 1})
    assert "has shares for" in usage_error(sampling.Mixture, {"one": one}, {"other": 1})
    one.sampler = range(4)
    for part, share, message in (([], 1, "one of a mixture is empty"), ([1], -1, "the shares of a mixture are")):
        assert message in usage_error(sampling.Mixture, {"one": Items(part)}, {"one": share})
    parts = ConcatDataset([Items([1], sampler=[0]), Items([2])])
    assert "only a part of the training samples" in usage_error(fetch.draw_order, parts, 0, 0)
    assert "give it weights instead" in usage_error(sampling.Mixture, {"one": one}, {"one": 1})


def test_each_part_of_a_mixture_has_the_loss_of_its_samples():
    mixed = sampling.Mixture({name: Items(range(3)) for name in "ab"}, {"a": 1, "b": 1})
    outputs, targets, rows = torch.randn(4, 3), torch.tensor([0, 2, -100, 1]), {"a": [0, 3], "b": [1, 2]}
    done = loss.ForwardResult(torch.zeros(()), targets, outputs)
    found = mixed.losses_by_part(criterion := torch.nn.CrossEntropyLoss(), done, [1, 5, 10, 6])  # 10 and 6 come again
    wanted = {f"{part}_loss": criterion(outputs[of], targets[of]) for part, of in rows.items()}
    assert wanted == {name: total / count for name, (total, count) in found.items()}
    for own in ("collate_fn", "on_device"):  # which may have another order
        mixed = sampling.Mixture({name: Items(range(3), **{own: list}) for name in "ab"}, {"a": 1, "b": 1})
        assert not mixed.losses_by_part(criterion, done, [1, 5, 10, 6])


def test_what_lists_no_classes_of_samples_is_refused_and_other_attributes_of_the_names_are_left_alone():
    for labels, flag in ((["a", "b"], "balance"), ([[0, 1], [1, 0]], "class_weights balanced"), ([-1, 0], "balance")):
        with pytest.raises(UsageError):
            part, args = Items([1, 2], labels=labels), parsed(f"-num_classes 2 -{flag}")
            sampling.add_sampler(part, args)
            sampling.balance_loss(loss.get_loss(args), part, args)
    part = Items([1, 2], labels=[0, 1, 1])
    assert "are (3,)" in usage_error(sampling.balance_loss, torch.nn.NLLLoss(), part, parsed("-num_classes 2"))
    part = Items([1, 2], labels=[-100, 1])
    sampling.add_sampler(part, parsed("-balance"))
    assert drawn(part.sampler).tolist() == [1, 1]
    for weights_of_a_model in ("imagenet", {}, len):
        sampling.add_sampler(part := Items([1, 2], weights=weights_of_a_model), parsed(""))
        assert not hasattr(part, "sampler")
    sampling.add_sampler(part := Items([1, 2], lengths=[5, 6, 7]), parsed(""))
    assert not hasattr(part, "sampler") and "not used (lengths of 2 samples are (3,)" in part.log_lines[0]
    one, two = (Items([1, 2], weights=[0, 1]) for _ in range(2))
    sampling.add_sampler(both := ConcatDataset([one, two]), parsed(""))
    assert {*drawn(both.sampler).tolist()} == {1, 3}
    sampling.add_sampler(mixed := sampling.Mixture({"one": one, "two": two}, {"one": 1, "two": 0}), parsed(""))
    assert {*drawn(mixed.sampler).tolist()} == {1}, "by the shares, and by the weights within"
    assert "some have weights" in usage_error(sampling.add_sampler, ConcatDataset([one, Items([1])]), parsed(""))
    part = TensorDataset(*[torch.zeros(2, dtype=torch.int64)] * 3)  # the last tensor may be anything
    assert "must list their classes" in usage_error(sampling.add_sampler, part, parsed("-balance"))
    part = Items([1, 2], weights=[1, 2], sampler=[0, 1])
    assert "one of them must go" in usage_error(sampling.add_sampler, part, parsed(""))
    for weights in ([1.0, math.nan], [0, 0], [1.0, -1], [1.0, math.inf], [1.0]):
        assert "weights of" in usage_error(sampling.add_sampler, Items([1, 2], weights=weights), parsed(""))
