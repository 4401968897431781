"""The cost and gain of an artifact: perplexity, structure, verification."""
