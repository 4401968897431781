"""What a sparsity may be, and the quality to expect of a model pruned to it, said before somebody deploys it. Figures: docs/pruning.md."""

from tilepress.formats import UsageError

USABLE = 0.55  # the sparsity up to which magnitude pruning alone is worth a try
# Perplexity over dense of an 18 M parameter Llama, by magnitude per layer.
MEASURED = {0.5: 1.2, 0.6: 1.7, 0.7: 5.2, 0.8: 70.0}
RECOVERED = {0.5: 1.011, 0.6: 1.028, 0.7: 1.067, 0.8: 1.151}  # the same model pruned by sparsegpt and trained 800 steps


def check(sparsity: float) -> None:
    """Raise UsageError for what is no share of weights to prune."""
    if not 0 <= sparsity < 1:
        raise UsageError(f"sparsity {sparsity:g} is not in [0, 1)", "0.6 prunes 60 % of the weights: --sparsity 0.6")


def warning(method: str, sparsity: float) -> str | None:
    """Why a result will disappoint, and the better command; None where nothing speaks against it."""
    if method != "magnitude" or sparsity <= USABLE:
        return None
    at = _nearest(MEASURED, sparsity)
    return (
        f"magnitude pruning breaks models above {USABLE:.0%}: at {at:.0%} it multiplied the perplexity of an 18 M parameter Llama by {MEASURED[at]:g}; "
        "better: --method sparsegpt --dataset TEXT"
    )


def recovered(sparsity: float) -> str:
    """Tell what training the remaining weights recovered elsewhere; nothing is known beyond the sparsities measured."""
    if sparsity > max(RECOVERED) + 0.05:
        return f"no figures of recovery are known for {sparsity:.0%} zeros"
    at = _nearest(RECOVERED, sparsity)
    return (
        f"for comparison, an 18 M parameter Llama that sparsegpt pruned to {at:.0%} was at {RECOVERED[at]:g} times its dense perplexity "
        "after 800 steps"
    )


def trained(step: dict) -> bool:
    """Return whether a step of an artifact's history trained what pruning left."""
    return step["command"] == "compress recover" or "recover_steps" in step["settings"]


def _nearest(known: dict[float, float], sparsity: float) -> float:
    return min(known, key=lambda at: abs(at - sparsity))
