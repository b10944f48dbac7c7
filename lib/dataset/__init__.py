"""Data, one file each: EDIT, add your own.

A file NAME.py is `-dataset NAME`. It has get_dataset(args) -> Dataset, or {"train": Dataset, "val": Dataset, "test":
Dataset}. It may have add_args(parser), for flags of its own and for defaults of shared flags that never change, and
describe(args) -> dict, for defaults that only the data can tell, such as the number of classes.

    digits.py   1,797 images of 8x8 pixels, in this repository: the default
    cifar10.py  CIFAR-10 of torchvision
    folder.py   images in one folder for each class
    text.py     the bytes of text files
    random.py   random regression data
    fake.py     random images, to measure speed
"""
