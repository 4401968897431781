"""`tilepress compress recover`: training of the weights that pruning left."""

import os
from typing import Annotated

import typer

import tilepress
from tilepress.cli import making
from tilepress.cli.flags import Blocks, Bos, Dataset, Making, Model, Output, Seed, Seqlen, find_rank, reading, takes
from tilepress.cli.making import Words, make, result_text, say_next, zeros_text
from tilepress.cli.terminal import size, table
from tilepress.formats import UsageError

EXAMPLE = "tilepress compress recover pruned --base MODEL -o recovered --steps 2000 --dataset text.jsonl"


@takes(Making)
def recover(
    model: Model,
    output: Output,
    base: Annotated[
        str, typer.Option(metavar="MODEL", help="The dense model that MODEL was pruned from.", show_default=False)
    ],
    steps: Annotated[int, typer.Option(help="Of training; with --blocks for each layer.", show_default=False)],
    dataset: Dataset = None,
    seqlen: Seqlen = None,
    batch: Annotated[int, typer.Option(help="Windows of text in a step.")] = 16,
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Windows that run at a time.  [default: what 16,384 tokens hold]", show_default=False),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate at its peak.  [default: 0.5 / hidden size]", show_default=False)
    ] = None,
    hidden_loss: Annotated[float, typer.Option(help="Weight of the hidden states' error beside the divergence.")] = 1.0,
    train: Annotated[
        str,
        typer.Option(
            metavar="kept|norms|all",
            help="Kept weights of linear layers; also norms and biases; also embeddings and the output head.",
        ),
    ] = "all",
    noise: Annotated[
        float, typer.Option(metavar="SHARE", help="Of input tokens, replaced by random ones for both models.")
    ] = 0.0,
    blocks: Blocks = False,
    nsamples: Annotated[int, typer.Option(help="With --blocks or --dataset self: windows of text.")] = 128,
    seed: Seed = 0,
    bos: Bos = "auto",
    save_every: Annotated[float, typer.Option(metavar="MINUTES", min=0, help="For --resume: keep the state.")] = 5.0,
    *,
    how: Making,
) -> None:
    """Train the kept weights of MODEL, a pruned artifact, to do again what its dense model did. Zeros stay zeros.

    The loss is the divergence of the next token's distribution from the dense model's, and the error of hidden states: text needs no labels.
    The layout stays MODEL's. --dry-run shows the memory that the whole model and --blocks take. Measured gains: docs/recovery.md.
    """
    if find_rank(None, None)[1] > 1 and "LOCAL_RANK" not in os.environ and not how.dry_run:
        raise UsageError(
            "recovery trains in one process or under torchrun, but WORLD_SIZE or SLURM_NTASKS tells of several",
            "start it once, or with torchrun; in a shell of salloc unset SLURM_NTASKS",
        )
    recipe = tilepress.Recover(
        steps, batch, micro_batch, lr, hidden_loss, train, blocks, noise, base, save_every_s=60 * save_every
    )
    text = reading(dataset, nsamples, seqlen, seed, bos)
    if make(model, output, recipe, text, how, Words("recovering", _result_text, plan_text), base):
        say_next(output, base, how)


def plan_text(facts: dict) -> str:
    """Return what `--dry-run` prints: also what each way of recovery needs."""
    told = facts["recovery"]
    names = {"model": "the whole model", "blocks": "block by block (--blocks)"}
    rows = [
        [names[way] + (" <- chosen" if way == told["way"] else ""), size(sizes["cuda"]), size(sizes["cpu"])]
        for way, sizes in told["memory_bytes"].items()
    ]
    needed = table("", ["memory of recovery", "on a card", "on the CPU"], rows)
    return making.plan_text(facts, "", needed, "")


def _result_text(facts: dict) -> str:
    return result_text(facts, zeros_text(facts), recovery_text(facts["recovery"]))


def recovery_text(told: dict) -> str:
    """Return what training brought on text that was held out."""
    if told["way"] == "blocks":
        last = told["layers"][-1]
        what = f"error of the last layer's output {last['error_before']:.4f} -> {last['error_after']:.4f}"
    else:
        what = f"KL divergence {told['kl_before']:.4f} -> {told['kl_after']:.4f}"
    return f"  recovered  {told['tokens']:,} tokens trained on, {told['trained_parameters']:,} weights; held-out {what}"
