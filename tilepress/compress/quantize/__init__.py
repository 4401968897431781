"""INT8 weights and activations: the recipe of `compress quantize`, ranges and smoothing."""
