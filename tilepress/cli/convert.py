"""`tilepress convert`: another layout for the same weights."""

from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Card, Model, Output, Writing, takes
from tilepress.cli.making import Words, make, result_text, zeros_text

EXAMPLE = "tilepress convert pruned -o dense --to dense"


@takes(Writing)
def convert(
    model: Model,
    output: Output,
    to: Annotated[
        str,
        typer.Option(
            metavar="dense|auto|tiled-bitmap|tiled-csl", help="Layout of the weights in DIR.", show_default=False
        ),
    ],
    card: Card = "any",
    *,
    how: Writing,
) -> None:
    """Change how weights are stored.

    `--to dense` gives a checkpoint that loads anywhere: sparse weights bit for bit, INT8 ones as code times scale, rounded to the model's
    dtype. The sparse layouts pack a model that another tool pruned, or one in another of them, without changing a value; but a bitmap's INT8
    values become code times scale in Tiled-CSL. With `--to auto` they stay, and --card groups them, like other bitmaps, for another card.
    """
    make(model, output, tilepress.Convert(to, how.ignored, card), None, how, Words("converting", _result_text))


def _result_text(facts: dict) -> str:
    return result_text(facts, zeros_text(facts))
