"""What makes transformers load and run artifacts: the quantizer plug-in, the paged cache, fused layers."""
