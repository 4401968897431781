"""What an artifact costs and brings: perplexity, structure, verification."""
