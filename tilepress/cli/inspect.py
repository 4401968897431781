"""`tilepress inspect`: what a model holds."""

import json
from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Json, Memory, Model, Revision
from tilepress.cli.kv import kv_text
from tilepress.cli.terminal import cell, plain, size, table
from tilepress.formats import foreign_errors


def inspect(
    model: Model,
    memory: Memory = 1.0,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="Print the steps that made it, as `compress stack --recipe` takes them.")
    ] = False,
    revision: Revision = None,
    json_: Json = False,
) -> None:
    """Show what MODEL holds, weight by weight.

    Headers and manifest tell it, no weight is read.
    """
    if recipe:
        from tilepress.formats.checkpoint import open_model

        steps = tilepress.recipe(open_model(model, revision).path)
        print(json.dumps(steps.to_json(), indent=2) if json_ else steps.to_yaml(), end="" if not json_ else "\n")
        return
    facts = tilepress.inspect(model, revision).to_json()
    with foreign_errors(f"the manifest of {facts['path']} does not say what it should", "make the artifact again"):
        told = json.dumps(facts, indent=2) if json_ else _text(facts, memory)
    print(told)


def _text(found: dict, memory_gib: float) -> str:
    """Return a row for each weight, then the total; `-` where only a manifest could tell."""
    title = f"{found['path']}: {found['architecture']}, {found['shards']} shard{'s' if found['shards'] > 1 else ''}"
    if found["made_by"]:
        title += f", by {found['made_by']}"
    rows = [
        [
            row["name"],
            " x ".join(map(str, row["shape"])),
            row["layout"],
            row["dtype"] if row["value_dtype"] in (None, row["dtype"]) else f"{row['value_dtype']} x {row['dtype']}",
            cell(row["sparsity"], ".2%"),
            size(row["bytes"]),
            cell(row["densest_tile"], ".1%"),
            cell(row["wavefronts_per_32"], ".3f"),
            cell(row["filled"], ".1%"),
            *([row["method"] or "-", cell(row["output_error"], ".2%")] if found["allocation"] else []),
        ]
        for row in found["rows"]
    ]
    head = ["weight", "shape", "layout", "dtype", "zeros", "bytes", "densest tile", "wavefronts/32", "filled"]
    head += ["pruned by", "output error"] if found["allocation"] else []
    bits = 8 * found["bytes"] / max(found["elements"], 1)
    total = f"{found['elements']:,} elements, {size(found['bytes'])}, {bits:.2f} bits per element"
    cache = "\n\n" + kv_text(found["kv_cache"], memory_gib) if found.get("kv_cache") else ""
    return table(plain(title), head, rows) + f"\n\n  {total}" + cache
