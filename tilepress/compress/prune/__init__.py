"""Unstructured pruning: the recipe of `compress prune` and its methods."""
