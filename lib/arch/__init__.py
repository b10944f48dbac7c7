"""One file per architecture: get_model(args) -> nn.Module, and if need be add_args(parser), for its own flags and for
shared defaults, which go before the data set's."""
