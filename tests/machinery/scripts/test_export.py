"""scripts/export.py writes the run's model, from best, final or a checkpoint."""

import numpy as np
import pytest
import torch
from command_line import parsed
from runs import run, same_tensors
from safetensors.torch import load_file

from lib import config
from lib.arch import convnet
from lib.utils.checkpoint import run_folder
from scripts import export


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A short run on two processes."""
    flags = f"-cpu 2 -epochs 2 -convnet_width 8 -model small -data {config.ROOT / 'data'}"
    return run(tmp_path_factory.mktemp("export"), flags)


def run_export(*args):
    assert export.main([str(arg) for arg in args]) == 0


def model_of(trained_run) -> torch.nn.Module:
    """The run's model, built without export.py."""
    model = convnet.get_model(parsed(["-cfg", str(trained_run / "config.yaml")])).eval()
    model.load_state_dict(load_file(trained_run / "final" / "weights.safetensors"))
    return model


def test_every_source_gives_its_weights(trained_run, tmp_path):
    last, first = run_folder.list_checkpoints(trained_run / "checkpoints")
    final = load_file(trained_run / "final" / "weights.safetensors")
    for source in ("final", last):
        run_export(trained_run, "-from", source, "-o", tmp_path / "out.safetensors")
        assert same_tensors(load_file(tmp_path / "out.safetensors"), final)
    run_export(trained_run, "-from", first, "-o", tmp_path / "first.safetensors")
    assert not same_tensors(load_file(tmp_path / "first.safetensors"), final)
    run_export(trained_run)
    small, best = (load_file(trained_run / file) for file in ("small.safetensors", "best/weights.safetensors"))
    assert same_tensors(small, best)
    run_export(trained_run, "-format", "torch", "-from", "final")
    assert same_tensors(torch.load(trained_run / "small.pt", weights_only=True), final)


def test_torchexport_gives_the_same_outputs_for_any_batch_size(trained_run):
    run_export(trained_run, "-format", "torchexport", "-from", "final")
    program, model = torch.export.load(trained_run / "small.pt2").module(), model_of(trained_run)
    for count in (2, 7):
        images = torch.rand(count, 1, 8, 8)
        torch.testing.assert_close(program(images), model(images))


def test_onnx_gives_the_same_outputs_for_any_batch_size(trained_run):
    reason = "needs uv pip install -r pyproject.toml --group export"
    pytest.importorskip("onnxscript", reason=reason)
    reference = pytest.importorskip("onnx.reference", reason=reason)
    run_export(trained_run, "-format", "onnx", "-from", "final")
    session, model = reference.ReferenceEvaluator(str(trained_run / "small.onnx")), model_of(trained_run)
    for count in (2, 5):
        images = torch.rand(count, 1, 8, 8)
        [outputs] = session.run(None, {"input": images.numpy()})
        np.testing.assert_allclose(outputs, model(images).detach().numpy(), rtol=1e-3, atol=1e-4)
