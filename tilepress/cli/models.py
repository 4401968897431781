"""`tilepress models`: the families that are known, and what works for each."""

import json

import tilepress
from tilepress.cli.flags import Json
from tilepress.cli.terminal import table

_COLUMNS = {
    "lean_decode": "lean decode",
    "tensor_parallel": "several cards",
    "fused_int8_layers": "fused INT8",
    "fused_attention": "fused cache",
    "folds": "folds",
    "experts": "experts",
}


def models(json_: Json = False) -> None:
    """Show the model families, and what works for each.

    Others are compressed too: what stands here goes beyond what works for all.
    """
    facts = [family.to_json() for family in tilepress.families()]
    print(json.dumps(facts, indent=2) if json_ else _text(facts))


def _text(facts: list[dict]) -> str:
    """Return a row for each family, and what the columns mean."""
    rows = [[one["model_type"], *("yes" if one[key] else "-" for key in _COLUMNS)] for one in facts]
    lines = table("", ["model type", *_COLUMNS.values()], rows).splitlines()
    limits = ["not served", *(one["limits"] or "" for one in facts)]
    width = max(map(len, lines))
    left = [f"{line:{width}}  {limit}".rstrip() for line, limit in zip(lines, limits, strict=True)]
    notes = [
        "Every causal language model of transformers whose linear layers are stored one by one can be pruned, quantized and",
        "evaluated. Without an entry here it runs by transformers' own forward pass. The columns say what is more:",
        "  lean decode    `custom_generate=tilepress.decode` and `eval speed` run a decode pass of our own, on a card as CUDA graphs",
        "  several cards  the same pass shares a model among cards (torchrun)",
        "  fused INT8     decoder layers of INT8 linears share quantized inputs",
        "  fused cache    attention appends to the packed cache by one kernel",
        "  folds          outliers can move into the linear before an input, beside norms",
        "  experts        experts of a mixture, stored one by one, are compressed as linears; its router never is",
    ]
    return "\n".join([*left, "", *(f"  {note}" for note in notes)])
