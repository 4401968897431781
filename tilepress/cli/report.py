"""`tilepress report`: what is known of artifacts, on one page."""

import json
from pathlib import Path
from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Json
from tilepress.cli.terminal import check_writable, say

EXAMPLE = "tilepress report int8 perplexity.json speed.json -o report.html"


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Artifacts, and JSON files of eval and compare (-o FILE).")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Page to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Of the page.", show_default=False)] = None,
    json_: Json = False,
) -> None:
    """Put what is known of compressed models on one page.

    It has sizes, costs, layers, speed, texts and recipes, and loads nothing from a network.

    Nothing is measured: `eval perplexity`, `eval tasks`, `eval speed` and `compare` write with -o what is shown. It needs the extra `report`.
    """
    from tilepress.eval.report import verdicts

    check_writable(output)
    found = tilepress.report(runs, output, title=title)
    if json_:
        print(json.dumps(found.to_json(), indent=2))
    else:
        for line in verdicts(found.found):
            print(f"  {line}")
    say(f"wrote {output}")
