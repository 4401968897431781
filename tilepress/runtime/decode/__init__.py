"""The forward pass for decoding, its caches and CUDA graphs."""
