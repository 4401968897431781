"""Linear layers whose weights are packed or quantized, and several of them as one product."""
