"""Data, one file each: EDIT, add your own.

A file NAME.py is `-dataset NAME`. It has get_dataset(args) -> Dataset, or a dict: "train", "val", "val_NAME", "test".
It may have add_args(parser), for its own flags and for defaults of shared flags, and describe(args) -> dict, for
defaults that follow from the data. For predictions it may have get_transform(args), which returns a function from one
PIL image, or one text, to the tensor that the model sees. docs/extending.md lists the attributes of a dataset.
"""
