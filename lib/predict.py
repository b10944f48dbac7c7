"""Predictions of a run's model for new images or texts, also in notebooks; scripts/predict.py reads files."""

from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from lib import config
from lib.config import plugins
from lib.core import loss, parallel
from lib.utils.checkpoint import weights
from lib.utils.errors import UsageError


def load(run: str | Path, device: str = "cpu") -> Callable[[list], list[dict[str, float]]]:
    """Return a function from a list of PIL images, or of texts, to a dict for each: its probability by class.

    They may also be tensors, made by the dataset's get_transform. Where classes share a name, a number follows it.

    With another loss than cross_entropy it is the model's outputs by number. Of a sequence, the last place counts.
    The weights are the run's best ones, or where there are none, its final ones. The run's data is not needed.
    """
    file = Path(run) / "config.yaml"
    args = config.parse_args(["-cfg", str(file)], describe=False)
    names = yaml.safe_load(file.read_text())["about"].get("classes", [])
    dataset = plugins.load("dataset", args.dataset)
    if not hasattr(dataset, "get_transform"):
        raise UsageError(f"lib/dataset/{args.dataset}.py has no get_transform(args): see lib/dataset/__init__.py")
    best = weights.find(Path(run))
    if best is None:
        raise UsageError(f"{run} has no best or final weights yet: they come with the first evaluation")
    transform = dataset.get_transform(args)
    model = plugins.load("arch", args.arch).get_model(args).eval()
    weights.load_into(str(best), model, whole=True)
    model, precision = model.to(device), parallel.autocast(args, torch.device(device))

    @torch.no_grad()
    def predict(inputs: list) -> list[dict[str, float]]:
        rows = [one if isinstance(one, torch.Tensor) else transform(one) for one in inputs]
        alike = len({row.shape for row in rows}) == 1
        answers = []
        for batch in [torch.stack(rows)] if alike else [row[None] for row in rows]:  # texts have their own lengths
            with precision:
                answer = model(batch.to(device))
            outputs = loss.split_output(answer)[0].float()
            outputs = outputs[:, -1] if outputs.ndim == 3 else outputs
            answers += (outputs.softmax(1) if args.loss == "cross_entropy" else outputs).tolist()
        shown = [*names, *map(str, range(len(names), len(answers[0])))]
        keys = [f"{name} ({n})" if shown.count(name) > 1 else name for n, name in enumerate(shown)]
        return [dict(zip(keys, one)) for one in answers]

    return predict
