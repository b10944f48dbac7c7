"""-optimizer muon: torch's Muon for the matrices of hidden layers; the rest is AdamW's."""

from typing import Any

import torch
from torch import Tensor, nn

from lib.utils.checkpoint.shards import is_sharded


class Muon(torch.optim.Muon):
    """torch's, also for matrices that FSDP shards: their update needs all rows, so each is gathered in turn.

    K. Jordan, Muon: an optimizer for hidden layers in neural networks, 2024; J. Liu et al., Muon is scalable for LLM
    training, arXiv:2502.16982.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step, with the same bits sharded or not."""
        parameters = [(one, group) for group in self.param_groups for one in group["params"] if one.grad is not None]
        if not any(is_sharded(one) for one, _ in parameters):
            super().step()
            return
        for parameter, group in parameters:
            whole = nn.Parameter(parameter.full_tensor())
            whole.grad = parameter.grad.full_tensor()
            alone = torch.optim.Muon([{**group, "params": [whole]}])
            alone.state[whole] = {name: value.full_tensor() for name, value in self.state[parameter].items()}
            alone.step()
            parameter.copy_(_shard(whole.detach(), parameter))
            self.state[parameter] = {name: _shard(value, parameter) for name, value in alone.state[whole].items()}


def hidden_matrices(model: nn.Module, outputs: int) -> list[nn.Parameter]:
    """Return the 2-d parameters of all modules but embeddings, without the head: the last one of `outputs` rows."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embedded = {one for module in model.modules() if isinstance(module, kinds) for one in module.parameters()}
    matrices = [one for one in model.parameters() if one.requires_grad and one.ndim == 2 and one not in embedded]
    head = {*[one for one in matrices if len(one) == outputs][-1:]}
    return [one for one in matrices if one not in head]


def _shard(whole: Tensor, like: Any) -> Tensor:
    """Return a tensor, which is the same on all ranks, sharded as another one is."""
    from torch.distributed.tensor import DTensor, Replicate

    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=like.placements)
