"""Data, one file each: EDIT, add your own.

A file NAME.py is `-dataset NAME`. It has get_dataset(args) -> Dataset, or {"train": Dataset, "val": Dataset, "test":
Dataset}. It may have add_args(parser), for its own flags and for defaults of shared flags. It may have describe(args)
-> dict, for defaults that follow from the data, such as the number of classes. For predictions it may have
get_transform(args), which returns a function from one PIL image, or one text, to the tensor that the model sees.
docs/extending.md lists the optional attributes of a dataset; lib/utils/data/options.py reads them.
"""
