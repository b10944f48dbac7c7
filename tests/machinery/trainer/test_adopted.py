"""Models and data from elsewhere train unchanged, with the same bits on any number of processes."""

import collections
import dataclasses

import pytest
import torch
from command_line import usage_error
from runs import few, norm_net, plugins, run
from saves import SMALL, bits
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from lib.core import loss as losses
from lib.utils.data.tensors import Tensors

pytestmark = pytest.mark.usefixtures("small_plugins")


class Output(collections.OrderedDict):
    """A dict whose entries are also attributes, without those that are None, as Hugging Face's ModelOutput."""

    def __init__(self, **entries):
        super().__init__({name: value for name, value in entries.items() if value is not None})

    def __getattr__(self, name):
        return self.get(name)


@dataclasses.dataclass(slots=True)  # as a property, not in its __dict__
class Answer:
    """A dataclass that a model may return."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Net(nn.Sequential):
    """The network of SMALL; each subclass returns its outputs in another form."""

    def __init__(self, args):
        super().__init__(*norm_net(args))

    def outputs_and_loss(self, inputs, targets):
        logits = super().forward(inputs)
        return logits, None if targets is None else functional.cross_entropy(logits, targets)


class LikeHuggingFace(Net):
    def forward(self, input_values=None, position=None, labels=None, **options):
        logits, loss = self.outputs_and_loss(input_values, labels)
        return Output(loss=loss, logits=logits, attentions=None)


class LikeNanoGpt(Net):
    def forward(self, tokens, targets=None):
        return self.outputs_and_loss(tokens, targets)


class FromKwargs(Net):
    def forward(self, **batch):
        return Answer(*self.outputs_and_loss(batch["input_values"], batch["label"]))


class Rows(Dataset):
    """A dataset like Hugging Face's: rows are dicts, and its methods have common names."""

    def __init__(self, part: Tensors, *names: str):
        self.part, self.column_names = part, names or ("idx", "input_values", "label")

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        row = {"idx": index, "input_values": self.part[index][0], "label": self.part[index][1]}
        return {name: row[name] for name in self.column_names}

    def __getitems__(self, indices):
        return [self[index] for index in indices]

    def shard(self, num_shards, index):
        raise AssertionError("the trainer must not shard a dataset")

    map = select = with_format = filter = shard


DATASETS = {
    "rows": lambda args: {name: Rows(part) for name, part in few(args).items()},
    "named": lambda args: {name: Rows(part, "input_values", "label") for name, part in few(args).items()},
}


@pytest.fixture(scope="module")
def usual_run(small_plugins, tmp_path_factory):
    """A run on (inputs, targets), with a model that returns a tensor."""
    return run(tmp_path_factory.mktemp("usual"), f"{SMALL} -cpu 1")


@pytest.mark.parametrize(
    ("arch", "dataset"), [("hugging", "rows"), ("batch", "rows"), ("nano", "few"), ("norm_net", "named")]
)
def test_models_and_batches_of_many_forms_train_with_the_usual_bits(arch, dataset, usual_run, tmp_path):
    with plugins(arch={"hugging": LikeHuggingFace, "nano": LikeNanoGpt, "batch": FromKwargs}, dataset=DATASETS):
        for size in (1, 2):
            flags = f"{SMALL} -arch {arch} -dataset {dataset} -cpu {size} -model on_{size}"
            assert bits(run(tmp_path, flags)) == bits(usual_run), size


def test_outputs_of_a_model_with_its_own_loss_are_measured_only_if_they_are_class_scores():
    """An autoencoder's are none; of one output a sample the argmax says nothing; a model may shift labels of rows."""

    class Autoencoder(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            return Answer(outputs, (outputs - inputs).square().mean())

    class Binary(nn.Linear):
        def forward(self, inputs, labels=None):
            outputs = super().forward(inputs)
            return outputs, functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.float())

    class Causal(nn.Linear):
        def forward(self, inputs, labels=None):
            return Output(loss=super().forward(inputs).mean(), logits=super().forward(inputs))

    criterion, sequence = losses.CrossEntropy(), {"inputs": torch.randn(2, 5, 12), "labels": torch.zeros(2, 5).long()}
    labelled = [(torch.randn(8, 12), torch.randint(count, (8,))) for count in (12, 2)]
    for model, batch in zip((Autoencoder(12, 12), Binary(12, 1), Causal(12, 4)), (*labelled, sequence), strict=True):
        done = losses.forward(model, batch, criterion)
        assert (done.outputs is None) != isinstance(model, Binary)
        assert losses.compute_metrics(criterion, done.outputs, done.targets) == {}


def test_a_scalar_next_to_the_outputs_is_a_loss_only_if_the_model_got_targets_or_calls_it_loss():
    """The auxiliary loss of a mixture of experts is such a scalar: alone it would teach the model nothing."""

    class Experts(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs), self.weight.square().mean()

    class Named(nn.Linear):
        def forward(self, inputs):
            return {"outputs": super().forward(inputs), "loss": self.weight.square().mean()}

    class Squeezed(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).squeeze()

    inputs, labels, criterion = torch.randn(8, 4), torch.randint(3, (8,)), losses.CrossEntropy()
    single = inputs[:1], labels[:1].float()
    assert "or an output" in usage_error(losses.forward, Squeezed(4, 1), single, nn.MSELoss())
    assert "numbers of one shape" in usage_error(losses.forward, nn.Linear(4, 1), single, nn.PoissonNLLLoss())
    for batch in ((inputs, labels), {"image": inputs, "label": labels}):
        assert "is it the whole loss, or a part" in usage_error(losses.forward, Experts(4, 3), batch, criterion)
    for several in (lambda one: {"loss_ce": one, "logits": inputs}, lambda one: (one, one)):
        given = {"forward": lambda self, inputs, several=several: several(self.bias.mean())}
        model = type("Several", (nn.Linear,), given)(4, 3)
        assert "must return one number," in usage_error(losses.forward, model, (inputs, labels), criterion)
    for model, batch in ((Named(4, 3), (inputs, labels)), (Experts(4, 3), inputs), (Experts(4, 3), {"x": inputs})):
        assert losses.forward(model, batch, criterion).loss == model.weight.square().mean()


def test_a_batch_may_be_any_mapping_and_a_model_must_name_what_it_takes():
    class Around(nn.Linear):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
    batch = collections.UserDict({"input": inputs, "labels": labels})
    model, criterion = nn.Linear(4, 3), losses.CrossEntropy()
    assert losses.forward(model, batch, criterion).loss == criterion(model(inputs), labels)
    named = {"x": inputs, "index": labels, "labels": labels}
    assert "forward(input) has none of the batch's x, index" in usage_error(losses.forward, model, named, criterion)
    around = Around(4, 3)
    around.inner = nn.NLLLoss()
    assert "a forward of *args alone gets no" in usage_error(losses.forward, around, (inputs, labels), criterion)


TWICE = "this dataset gives a tuple of 0: (4, 64), 1: (4,), 2: (4,): override training_step and evaluation_step"
UNLABELLED = "a dict of input_values: (4, 64), and the model returns a Tensor without a loss"


def test_a_batch_that_the_default_trainer_cannot_use_is_refused_in_one_line(refused):
    part = few(None)["train"]
    for odd, message in ((Tensors(*part.tensors, part.tensors[1]), TWICE), (Rows(part, "input_values"), UNLABELLED)):
        with plugins(dataset={"odd": lambda args, odd=odd: odd}):
            line = refused(f"{SMALL} -dataset odd -cpu 1")
        assert "the default trainer takes (inputs, targets) or a dict with labels" in line and message in line
