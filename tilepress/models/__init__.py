"""Knowledge of models: their families, their experts, and how one is built without weights."""
