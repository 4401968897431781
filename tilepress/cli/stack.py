"""`tilepress compress stack`: the steps of a recipe, one after the other."""

import json
from pathlib import Path
from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Making, Model, Output, takes
from tilepress.cli.making import own_text, result_text, say_next
from tilepress.cli.terminal import Bar, check_report, plain, quiet_libraries, say, settle_threads, show_report, table
from tilepress.formats import UsageError

EXAMPLE = "tilepress compress stack MODEL -o small --recipe recipe.yaml"


@takes(Making)
def stack(
    model: Model,
    output: Output,
    recipe: Annotated[
        Path, typer.Option(metavar="FILE|DIR", help="YAML with the steps, or an artifact whose steps are done again.")
    ],
    *,
    how: Making,
) -> None:
    """Do the steps of a recipe file with MODEL.

    The artifact is the one that a command for each step would make.

    `tilepress inspect DIR --recipe` prints the recipe of any artifact, ready for a file. Steps before the last are written beside DIR and removed.
    """
    if not recipe.exists():
        raise UsageError(f"no recipe at {recipe}", "give a YAML file, or the folder of an artifact")
    check_report(how.report)
    quiet_libraries()
    settle_threads(how.threads, how.quiet or how.dry_run)
    steps = tilepress.recipe(recipe)
    pairs = steps.recipes()
    for warning in dict.fromkeys(warning for each, _ in pairs for warning in each.warnings()):
        say(f"warning: {warning}")
    if how.dry_run:
        print(json.dumps(steps.to_json(), indent=2) if how.json_ else steps.to_yaml() + "\nnothing was written")
        return
    # The model as it was before the first step writes what it is calibrated on.
    texts = [text and own_text(model, text, how, how.revision) for _, text in pairs]
    with Bar("compressing", how.quiet) as bar:
        made = tilepress.compress(
            model,
            output,
            [each for each, _ in pairs],
            dataset=texts if any(texts) else None,
            progress=bar.at,
            **how.running(),
        )
    facts = made.to_json() | {"recipe": steps.to_json()}
    print(json.dumps(facts, indent=2) if how.json_ else _text(facts))
    for warning in made.warnings:
        say(f"warning: {plain(warning)}")
    say_next(output, model, how)
    show_report([output], how.report)


def _text(facts: dict) -> str:
    """Return a row for each step, then what came out."""
    rows = []
    for number, step in enumerate(facts["recipe"]["steps"], 1):
        told = ", ".join(f"{key} {value}" for key, value in step.items() if key != "command")
        rows.append([str(number), step["command"], told[:90]])
    lines = table("", ["step", "command", "settings"], rows).splitlines()
    return "\n".join([*lines, "", result_text(facts)])
