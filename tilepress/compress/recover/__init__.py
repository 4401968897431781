"""Recovery of pruned models by distillation: the recipe of `compress recover`."""
