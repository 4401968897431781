"""A run that writes an artifact, whatever its recipe: targets, plan, shards, and the files that make it whole."""
