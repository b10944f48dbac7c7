"""Models, one file each: EDIT, add your own.

A file NAME.py is `-arch NAME`. It has get_model(args) -> nn.Module. It may have add_args(parser), for its own flags
and for defaults of shared flags (they win over a dataset's); get_weights(args) -> dict of tensors by name, for
`-weights imagenet`; get_blocks(model) -> list of modules, for -parallel fsdp, -recompute and -compile.
"""
