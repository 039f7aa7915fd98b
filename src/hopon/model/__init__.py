"""The data plane: model files to a running CPU executor."""
