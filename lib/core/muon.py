"""-optimizer muon: torch's Muon for the matrices of hidden layers, torch's AdamW for all other parameters."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from lib.utils.checkpoint.shards import is_sharded


class Muon(torch.optim.Optimizer):
    """Both in one optimizer. By `match_rms_adamw` they share the learning rate and the weight decay.

    K. Jordan, Muon: an optimizer for hidden layers in neural networks, 2024; J. Liu et al., Muon is scalable for LLM
    training, arXiv:2502.16982. A group with "muon": True is Muon's.
    """

    def __init__(self, groups: list[dict], **options: Any):
        options.setdefault("adjust_lr_fn", "match_rms_adamw")
        of_muon = inspect.signature(torch.optim.Muon).parameters
        others = {name: value for name, value in options.items() if name not in of_muon or name == "lr"}
        matrices = {name: value for name, value in options.items() if name in of_muon}
        self.muon = torch.optim.Muon([one for one in groups if one["muon"]], **matrices)
        self.adamw = torch.optim.AdamW([one for one in groups if not one["muon"]], **others)
        made = [*self.muon.param_groups, *self.adamw.param_groups]
        super().__init__(made, {**self.adamw.defaults, "muon": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step. A sharded matrix is gathered on every rank, as its update needs all rows."""
        for part, is_muon in ((self.muon, True), (self.adamw, False)):
            vars(part)["state"] = self.state
            part.param_groups = [group for group in self.param_groups if group["muon"] == is_muon]
            parameters = [(one, group) for group in part.param_groups for one in group["params"]]
            if is_muon and any(is_sharded(one) for one, _ in parameters):
                for one, group in parameters:
                    self._step_whole(one, group)
            else:
                part.step()

    def _step_whole(self, parameter: nn.Parameter, group: dict) -> None:
        if parameter.grad is None:
            return
        whole = nn.Parameter(_gather(parameter))
        whole.grad = _gather(parameter.grad)
        muon = torch.optim.Muon([{**group, "params": [whole]}])
        muon.state[whole] = {name: _gather(value) for name, value in self.state[parameter].items()}
        muon.step()
        parameter.copy_(_shard(whole.detach(), parameter))
        self.state[parameter] = {name: _shard(value, parameter) for name, value in muon.state[whole].items()}


def mark_matrices(groups: list[dict], model: nn.Module, outputs: int) -> list[dict]:
    """Return the groups, cut into those for Muon and those for AdamW.

    Muon's are the 2-d parameters of all modules but nn.Embedding, without those of `outputs` rows: the head.
    """
    embedded = {one for module in model.modules() if isinstance(module, nn.Embedding) for one in module.parameters()}
    cut = []
    for group in groups:
        hidden = [one for one in group["params"] if one.ndim == 2 and one not in embedded and len(one) != outputs]
        rest = [one for one in group["params"] if one not in {*hidden}]
        cut += [{**group, "params": one, "muon": one is hidden} for one in (hidden, rest) if one]
    return cut


def _gather(tensor: Any) -> Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def _shard(whole: Tensor, like: Any) -> Tensor:
    """Return a tensor, which is the same on all ranks, sharded as another one is."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=like.placements)
