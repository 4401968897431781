"""`tilepress push`: an artifact goes to the hub."""

import json
from pathlib import Path
from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Json, Quiet
from tilepress.cli.terminal import Bar, quiet_libraries, size, table

EXAMPLE = "tilepress push int8 me/model-int8 --private --dry-run"


def push(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A finished artifact.", show_default=False)],
    repo: Annotated[str, typer.Argument(metavar="NAME/MODEL", help="Repository of the hub.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Make it private if it is new.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch.  [default: main]", show_default=False)] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; send nothing.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Send an artifact to the hub.

    Its files are compared with its manifest first, and only those that the manifest lists go.

    The token is huggingface_hub's: `hf auth login`, or HF_TOKEN. `eval … --write-card` puts measured figures into the model card before.
    """
    quiet_libraries()
    with Bar("checking", quiet) as bar:
        found = tilepress.push(
            model, repo, private=private, revision=revision, message=message, dry_run=dry_run, progress=bar.at
        )
    print(json.dumps(found.to_json(), indent=2) if json_ else _text(found))


def _text(found) -> str:
    rows = [[name, size(count)] for name, count in found.files.items()]
    told = f"  {len(rows)} files, {size(found.bytes)}"
    end = f"would go to {found.repo}; nothing was sent" if found.url is None else f"went to {found.url}"
    return table("", ["file", "size"], rows) + f"\n\n{told}, {end}"
