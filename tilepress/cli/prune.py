"""`tilepress compress prune`: zeros in the linear weights, and what several sparsities cost."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tilepress
from tilepress.cli import recover as recovering
from tilepress.cli.flags import (
    Blocks,
    Bos,
    Card,
    Dataset,
    Experts,
    Model,
    Output,
    Samples,
    Seed,
    Seqlen,
    Writing,
    parse_dtype,
    parse_sparsities,
    reading,
    takes,
)
from tilepress.cli.making import Words, experts_text, make, own_text, plan_text, result_text, say_next, zeros_text
from tilepress.cli.terminal import Bar, check_report, quiet_libraries, say, show_report, table
from tilepress.formats import UsageError

if TYPE_CHECKING:
    from tilepress.compress.prune.recipe import Prune
    from tilepress.text import Text

_MASSIVE = 10  # times the size of a usual token in the residual stream: only tokens that serve as a sink come near
EXAMPLE = "tilepress compress prune MODEL -o pruned --sparsity 0.5"


@takes(Writing)
def prune(
    model: Model,
    output: Output,
    sparsity: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Share of zeros, in [0, 1); several with --sweep: 0.5,0.6,0.7.", show_default=False
        ),
    ],
    method: Annotated[
        str, typer.Option(metavar="magnitude|wanda|sparsegpt|admm", help="How weights are chosen: see above.")
    ] = "magnitude",
    scope: Annotated[
        str,
        typer.Option(
            metavar="layer|row|global",
            help="Where the sparsity holds, with magnitude: in each weight, in each output row, or over all.",
        ),
    ] = "layer",
    allocation: Annotated[
        str,
        typer.Option(
            metavar="uniform|owl|auto", help="How zeros are laid out over the weights, with the other methods."
        ),
    ] = "uniform",
    damping: Annotated[
        float, typer.Option(help="Of sparsegpt and admm: share of the mean second moment that is added to each.")
    ] = 0.01,
    refit: Annotated[
        int,
        typer.Option(
            metavar="STEPS", help="Of sparsegpt and admm: train each layer to give the dense one's outputs, masks held."
        ),
    ] = 0,
    format: Annotated[
        str, typer.Option(metavar="auto|tiled-bitmap|tiled-csl|dense", help="How pruned weights are stored.")
    ] = "auto",
    value_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|int8",
            help="How kept values are stored: as they are, or in INT8 with a scale for each output.",
        ),
    ] = "auto",
    card: Card = "any",
    experts: Experts = "routed",
    dtype: Annotated[
        str, typer.Option(metavar="auto|bfloat16|float16", help="Convert floating tensors first.")
    ] = "auto",
    recover: Annotated[
        int,
        typer.Option(
            metavar="STEPS", min=0, help="Then train what is left against MODEL, zeros held; see `compress recover`."
        ),
    ] = 0,
    blocks: Blocks = False,
    dataset: Dataset = None,
    nsamples: Samples = None,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    bos: Bos = "auto",
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Measure every sparsity and keep a table and a drawing, no artifact.")
    ] = False,
    eval_dataset: Annotated[
        str, typer.Option(metavar="FILE|HUB_ID", help="With --sweep: the text to measure on.")
    ] = "Salesforce/wikitext:wikitext-2-raw-v1:test",
    *,
    how: Writing,
) -> None:
    """Prune the linear weights of MODEL.

    \b
    --method   text  what it does
    magnitude  no    drops the smallest weights: without text, up to 30 % or so
    wanda      yes   weighs them by their inputs: with text and little memory
    sparsegpt  yes   also fits what is left to the dense model's outputs; quicker than admm
    admm       yes   looks for better masks: the one to take, with some minutes

    What is left is stored as a tiled bitmap, from about 88 % sparsity on as Tiled-CSL (INT8 values always as a bitmap), below 15 % dense.
    Measured figures: docs/pruning.md. Before you deploy: `tilepress eval perplexity`, or --sweep.
    """
    from dataclasses import replace

    sparsities = parse_sparsities(sparsity)
    if len(sparsities) > 1 and not sweep:
        raise UsageError(f"--sparsity {sparsity} names {len(sparsities)}", "add --sweep, or give one")
    settings = (
        scope,
        method,
        format,
        value_dtype,
        parse_dtype(dtype),
        how.ignored,
        allocation,
        damping,
        card,
        experts,
        refit,
    )
    recipe = tilepress.Prune(sparsities[0], *settings)
    text = None
    if recipe.needs_text or recover:
        text = reading(dataset, nsamples, seqlen, seed, bos)
    elif dataset is not None or nsamples is not None or seqlen is not None or (bos != "auto" and not sweep):
        raise UsageError(
            "--method magnitude reads no text, but --dataset, --nsamples, --seqlen or --bos is given",
            "leave them out, or add --method sparsegpt or --recover STEPS",
        )
    if blocks and not recover:
        raise UsageError("--blocks goes with --recover", "add --recover STEPS, or leave it out")
    if sweep and recover:
        raise UsageError("--sweep measures pruning alone", "leave out --recover")
    if sweep:
        recipes = [replace(recipe, sparsity=value) for value in sparsities]
        _sweep(model, recipes, Path(output), text, eval_dataset, bos, how)
        return
    if recover:
        if method == "magnitude" and nsamples is not None and not blocks and text.temperature is None:
            raise UsageError(
                "--nsamples is given, but training of the whole model takes all of the text",
                "leave it out, or add --blocks",
            )
        recipe = tilepress.Recover(recover, blocks=blocks, prune=recipe)
    words = Words("pruning and recovering" if recover else "pruning", _result_text, _plan_text)
    if make(model, output, recipe, text, how, words):
        say_next(output, model, how)


def _sweep(
    model: str, recipes: "list[Prune]", output: Path, text: "Text | None", eval_dataset: str, bos: str, how: Writing
) -> None:
    """Measure every recipe, and print what came out."""
    if how.workers > 1 or how.rank is not None or how.ray is not None or how.dry_run:
        hint = "leave out --workers, --rank, --ray and --dry-run"
        raise UsageError("--sweep measures one artifact after the other", hint)
    from tilepress.eval.sweep import FILES, HEAD, cells, sweep

    check_report(how.report)
    quiet_libraries()
    for warning in dict.fromkeys(warning for recipe in recipes for warning in recipe.warnings()):
        say(f"warning: {warning}")
    text = text and own_text(model, text, how, how.revision)
    with Bar("sweep", how.quiet) as bar:
        found = sweep(
            model, output, recipes, dataset=text, evaluate_on=eval_dataset, bos=bos, progress=bar.at, **how.running()
        )
    title = f"  {recipes[0].method} on {eval_dataset}; dense: {found.rows[0].base_perplexity:.4f}"
    print(json.dumps(found.to_json(), indent=2) if how.json_ else table(title, HEAD, cells(found.rows)))
    if not how.quiet:
        wrote = ", ".join(name for name in FILES if (output / name).exists())
        say(f"wrote {wrote} into {output}")
    show_report([output / "sweep.json"], how.report)


def _plan_text(facts: dict) -> str:
    return recovering.plan_text(facts) if "recovery" in facts else plan_text(facts)


def _result_text(facts: dict) -> str:
    told = [zeros_text(facts)]
    if "allocation" in facts:
        told.append(_calibrated_text(facts))
    if "recovery" in facts:
        told.append(recovering.recovery_text(facts["recovery"]))
    return result_text(facts, *told)


def _calibrated_text(facts: dict) -> str:
    """Return what a calibrated pruning saw, and its worst weights."""
    seen = facts["calibration"]
    worst = sorted(seen["pruned"], key=lambda item: -item.get("output_error", 0.0))[:5]
    rows = [
        [item["name"], f"{item['sparsity']:.2%}", item["method"], f"{item.get('output_error', float('nan')):.2%}"]
        for item in worst
    ]
    return "\n".join(
        [
            f"  calibrated {seen['tokens']:,} tokens in {seen['windows']} windows, allocation {facts['allocation']['chosen']}; the worst:\n",
            table("", ["weight", "zeros", "method", "output error"], rows),
            *experts_text(seen),
            *_cost_text(seen),
            "",
        ]
    )


def _cost_text(seen: dict) -> list[str]:
    """Return what the dense model's hidden states say, and what pruning costs on the text that it was fitted to."""
    lines = []
    stream = seen.get("stream", [])
    massive = [layer for layer in stream if layer["massive"] >= _MASSIVE]
    if massive:
        most = max(massive, key=lambda layer: layer["massive"])
        lines.append(
            f"  massive    tokens of an attention sink in {len(massive)} of {len(stream)} layers, {most['massive']:,.0f} times as "
            f"large as others in {most['layer']}: they count no more than others"
        )
    if cost := seen.get("cost"):
        lines.append(
            f"  expected   a KL divergence of {cost['kl']:.2g} and {cost['perplexity']:.3g} times the perplexity on {cost['tokens']:,} "
            "tokens of this text, more on others: eval perplexity --base measures it"
        )
    return lines
