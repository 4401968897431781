"""What to expect of a pruned model, said before somebody deploys it. Figures: docs/pruning.md."""

USABLE = 0.55  # the sparsity up to which magnitude pruning alone is worth a try
MEASURED = {
    0.5: 1.2,
    0.6: 1.7,
    0.7: 5.2,
    0.8: 70.0,
}  # perplexity over dense, magnitude per layer, an 18 M parameter Llama


def warning(method: str, sparsity: float) -> str | None:
    """Why a result will disappoint, and the better command; None where nothing speaks against it."""
    if method != "magnitude" or sparsity <= USABLE:
        return None
    at = min(MEASURED, key=lambda known: abs(known - sparsity))
    return (
        f"magnitude pruning breaks models above {USABLE:.0%}: at {at:.0%} it multiplied the perplexity of an 18 M parameter Llama by {MEASURED[at]:g}; "
        "better: --method sparsegpt --dataset TEXT"
    )
