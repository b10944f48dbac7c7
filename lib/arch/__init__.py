"""One file per architecture: get_model(args) -> nn.Module, and add_args(parser) for its own flags if it has any."""
