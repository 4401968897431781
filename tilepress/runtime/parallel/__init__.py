"""Tensor parallelism: layers that several ranks share, and how they get their parts."""
