"""Models, one file each: EDIT, add your own.

A file NAME.py is `-arch NAME`. It has get_model(args) -> nn.Module. It may have add_args(parser), for flags of its
own and for defaults of shared flags, which win over a dataset's. It may have get_weights(args) -> dict of names and
tensors, which `-weights imagenet` starts from.

    mlp.py          fully connected: the shortest example
    convnet.py      a small convolutional network
    resnet.py       ResNet-18, -34, -50, ... of torchvision, also for small images
    gpt.py          a decoder-only transformer for text
    torchvision.py  each classification model of torchvision, also vision transformers, with pretrained weights
    timm.py         each model of timm, with pretrained weights
"""
