"""The stock engine: gradients as DistributedDataParallel or FSDP2 sum them, and checks of what they do not notice."""

from argparse import Namespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.core.buffers import Buffers, take_first
from lib.utils.checkpoint.shards import is_sharded
from lib.utils.data.plan import MicroBatch
from lib.utils.distributed import World
from lib.utils.errors import UsageError


class Engine:
    """Computes the gradients of a step: `begin_pass` and `backward` of each micro-batch, then `sum_gradients`.

    Modules outside of DDP and FSDP, and parameters that needed no gradient when DDP was built, are summed here
    after the last pass. Buffers are DDP's: rank 0's, from the next forward pass on.
    """

    def __init__(self, modules: list[nn.Module], world: World, args: Namespace):
        self.world, self.modules = world, modules
        self.buffers = Buffers(modules, world)  # names those that are rank 0's; DDP shares them
        self.wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
        if any(isinstance(inner, DistributedDataParallel) for one in self.wrapped for inner in one.module.modules()):
            raise UsageError("a DistributedDataParallel is in another: parallel.wrap has made one already")
        if self.wrapped and any(map(is_sharded, (p for module in modules for p in module.parameters()))):
            raise UsageError("-parallel fsdp: no module of a trainer can be in DistributedDataParallel")
        self.recomputes, self.sums = args.recompute, False  # sums: whether DDP sums in this pass
        self.keeps_start = world.size > 1 and world.rank == 0 and world.device.type == "cpu"  # for just_in_time.py
        self.called: set[nn.Module] = set()  # those of `wrapped` that this pass called
        self.by_ddp: set[nn.Parameter] = set()
        self.reached: set[nn.Parameter] = set()  # by this backward pass
        for module in self.wrapped:
            module.register_forward_pre_hook(self._note)
            needed = [one for one in module.parameters() if one.requires_grad]
            self.by_ddp.update(getattr(module, "trained", needed))  # a trainer may freeze and thaw layers since
            for parameter in needed:
                parameter.register_post_accumulate_grad_hook(self.reached.add)
        self.loss_scale = world.size if self.wrapped else 1  # DDP divides by it; FSDP, as parallel sets it up, not

    def begin_pass(self, micro_batch: MicroBatch, parameters: list[nn.Parameter]) -> None:
        """Prepare for the forward pass of a micro-batch. `parameters`: those whose gradients are wanted."""
        self.parameters, self.sums = parameters, micro_batch.last
        self.buffers.starts = self.buffers.copies() if self.keeps_start and micro_batch.first else self.buffers.starts
        self.called.clear()
        self.reached.clear()
        for module in self.wrapped:
            module.require_backward_grad_sync = micro_batch.last  # as no_sync() sets it

    def backward(self, loss: Tensor, micro_batch: MicroBatch, figures: Tensor) -> None:
        """Compute the gradients of a share of the loss. In the last pass DDP sums them, else UsageError says why."""
        after = self.buffers.copies() if self.recomputes else []
        (loss * self.loss_scale).backward()
        self.buffers.restore(after)  # which the second forward pass of a block (-recompute) has changed again
        if micro_batch.first:
            self.figures = figures.new_zeros(micro_batch.step_parts, 2)
        if micro_batch.count:
            self.figures[micro_batch.number] = figures
        for module in self.wrapped if micro_batch.last else ():
            self._check(module)

    def _note(self, module: nn.Module, inputs: tuple) -> None:
        self.called.add(module)
        if self.sums and torch.is_grad_enabled() and not module.require_backward_grad_sync:
            raise UsageError("training_step calls the model within no_sync(): leave it out, the trainer sees to it")

    def _check(self, module: DistributedDataParallel) -> None:
        named = [(name, p) for name, p in module.module.named_parameters() if p in self.by_ddp]
        if not {*self.parameters}.intersection(p for _, p in named):
            return  # a copy of the model that nobody trains, as a teacher
        if module not in self.called and any(p in self.reached for _, p in named):
            raise UsageError("DDP sums only gradients of self.model(): call the whole model, or take -deterministic")
        unused = [name for name, p in named if p not in self.reached]
        if module in self.called and unused and not module.find_unused_parameters:
            fault = f"no backward pass reached the parameter {unused[0]} ({len(unused)} in all)"
            raise UsageError(f"{fault}: add -find_unused, freeze them in get_model, or take -deterministic")

    @torch.no_grad()
    def sum_gradients(self) -> Tensor:
        """Sum gradients that neither DDP nor FSDP knows; return all micro-batches' figures, (number, 2)."""
        if self.world.size == 1:
            return self.figures
        for module in self.modules:
            take_first(() if module in self.wrapped else module.buffers())
        dist.all_reduce(self.figures)
        own = [p for p in self.parameters if p not in self.by_ddp and not is_sharded(p)]
        if not own:
            return self.figures
        used = torch.tensor([float(p.grad is not None) for p in own], device=self.world.device)
        dist.all_reduce(used)
        for parameter, count in zip(own, used.tolist(), strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                dist.all_reduce(gradient)
                parameter.grad = gradient / self.loss_scale
        return self.figures
