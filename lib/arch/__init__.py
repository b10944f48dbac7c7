"""Models, one file each: EDIT, add your own.

A file NAME.py is `-arch NAME`. It has get_model(args) -> nn.Module. It may have add_args(parser), for flags of its
own and for defaults of shared flags; a dataset's defaults win over a model's.

    mlp.py      fully connected: the shortest example
    convnet.py  a small convolutional network
    resnet.py   ResNet-18, -34, -50, ... of torchvision
    vit.py      a vision transformer
    gpt.py      a decoder-only transformer for text
"""
