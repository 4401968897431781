"""The parts that make transformers load and run artifacts: the quantizer plug-in, the paged cache, fused layers."""
