"""-optimizer muon: torch's Muon for the matrices of hidden layers; the rest is AdamW's."""

import torch
from torch import nn

from lib.utils.checkpoint.shards import copy_whole, is_sharded


class Muon(torch.optim.Muon):
    """torch's, also for matrices that FSDP shards: their update needs all rows, so each is gathered in turn.

    K. Jordan, Muon (a blog, 2024); J. Liu et al., Muon is scalable for LLM training, arXiv:2502.16982 (2025).
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
            copy_whole(parameter, whole)
            for name, value in alone.state[whole].items():
                copy_whole(self.state[parameter].setdefault(name, torch.empty_like(parameter)), value)


def hidden_matrices(model: nn.Module, outputs: int) -> list[nn.Parameter]:
    """Return the 2-d parameters of all modules but embeddings, without the head: the last one of `outputs` rows."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embedded = {one for module in model.modules() if isinstance(module, kinds) for one in module.parameters()}
    matrices = [one for one in model.parameters() if one.requires_grad and one.ndim == 2 and one not in embedded]
    head = {*[one for one in matrices if len(one) == outputs][-1:]}
    return [one for one in matrices if one not in head]
