"""`tilepress verify`: whether an artifact holds what it declares."""

import json
from pathlib import Path
from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Json, Quiet
from tilepress.cli.terminal import EXIT_CHECK_FAILED, Bar, plain, quiet_libraries, table


def verify(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A finished artifact.", show_default=False)],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also compare every kept value with this source.", show_default=False),
    ] = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that an artifact is sound.

    Files, hashes, headers, packed words, declared counts, vLLM's rules (INT8), loading. Exits with 3 on any finding.
    """
    quiet_libraries()
    with Bar("verifying", quiet) as bar:
        found = tilepress.verify(model, base, progress=bar.at)
    if json_:
        print(json.dumps(found.to_json(), indent=2))
    else:
        rows = [[c.name, str(c.looked_at), "ok" if c.passed else f"{len(c.findings)} wrong"] for c in found.checks]
        print(table("", ["check", "looked at", "result"], rows))
        for check in found.checks:
            for finding in (*check.findings, *check.notes):
                print(f"  {check.name}: {plain(finding)}")
    if not found.passed:
        raise typer.Exit(EXIT_CHECK_FAILED)
