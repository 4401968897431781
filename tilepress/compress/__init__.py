"""Weights in, compressed weights out. Runs without a GPU and never imports the kernels."""
