"""One file per dataset: get_dataset(args) -> Dataset or {"train": ..., "val": ..., "test": ...}.

It may also have add_args(parser), for its own flags and for shared defaults that never change, and
describe(args) -> dict, for shared defaults that only the data can tell, such as the number of classes.
"""
