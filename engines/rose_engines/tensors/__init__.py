"""Tensors of checkpoints and of running models, in one naming and one order of elements."""
