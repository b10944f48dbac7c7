"""Flags that are right alone and wrong together."""

from lib.config.namespace import Args
from lib.utils.errors import UsageError


def check(args: Args, given: set[str]) -> None:
    """Raise UsageError for such flags. `given`: those of the command line and the -cfg file."""
    if {"batch_size", "batch_per_gpu"} <= given:
        raise UsageError("-batch_size is the global batch and -batch_per_gpu its share: give one of them")
    for one, other in (("fp16", "bf16"), ("gpus", "cpu")):
        if getattr(args, one) and getattr(args, other):
            raise UsageError(f"-{one} and -{other} exclude each other: give one of them")
    if args.micro_batch and not args.batch_per_gpu and args.batch_size % args.micro_batch:
        near = max(args.micro_batch, args.batch_size - args.batch_size % args.micro_batch)
        fault = f"-batch_size {args.batch_size} cannot be cut into micro-batches of -micro_batch {args.micro_batch}"
        raise UsageError(f"{fault}: try -batch_size {near}")
    if args.lr_end > args.lr_start:
        raise UsageError(f"-lr_end {args.lr_end} is above -lr_start {args.lr_start}: the learning rate falls")
