"""Pages of the site that are made while it is built: those that stand at the repository's root, the commands, and the Python API.

So nothing is written twice. Names of pages in the text, such as `docs/int8.md` in backticks, become links.
"""

import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {  # file: page
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "tilepress/demo/README.md": "demo.md",
}
_LINK = re.compile(r"(?<=\]\()([^)#:]+)(?=[)#])")
_SETTINGS = ("Convert", "KVCache", "Observer", "Prune", "Quantize", "Recover")  # methods of theirs are for runs
_NAMED = re.compile(r"`docs/([\w/]+)\.md`")


def on_files(files, config):
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=_from_root((ROOT / source).read_text())))
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    files.append(File.generated(config, "reference/python.md", content=_python()))
    return files


def on_page_markdown(markdown, page, config, files):
    here = os.path.dirname(page.file.src_uri)

    def link(found):
        target = f"{found[1]}.md"
        text = (Path(config["docs_dir"]) / target).read_text().partition("\n")[0].lstrip("# ")
        return f"[{text}]({os.path.relpath(target, here or '.')})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)  # code stays as it is
    return "".join(part if part.startswith("```") else _NAMED.sub(link, part) for part in parts)


def _from_root(text: str) -> str:
    """A page at the root of the repository with its links as the site has them."""
    text = re.sub(r"^\[!\[.*\n", "", text, flags=re.M)  # badges are for the repository's page
    return _LINK.sub(lambda found: ROOT_PAGES.get(found[1], found[1].removeprefix("docs/")), text)


def _commands() -> str:
    """Every command as its help has it."""
    sys.path.insert(0, str(ROOT))
    import typer

    from tilepress.cli.app import app

    command = typer.main.get_command(app)
    return "# Commands\n\n" + "\n".join(_command(command, command.context_class(command, info_name="tilepress"), 1))


def _command(command, context, depth: int) -> Iterator[str]:
    """Yield the parts of a command's section, and then those of the commands below it, groups of commands first."""
    if depth > 1:
        yield f"{'#' * depth} `{context.command_path}`\n"
    yield _help_text(command.help)
    below = sorted(getattr(command, "commands", {}).items(), key=lambda item: not hasattr(item[1], "commands"))
    if below:
        yield _rows([("command", "what it does"), *(_summary(context, name, one) for name, one in below)])
    else:
        yield f"```\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        rows = []
        for panel, records in command.panels(context).items():
            rows += [
                (f"**{panel}**" if rows else panel, ""),
                *((f"`{name.replace('|', ' | ')}`", _escaped(told)) for name, told in records),
            ]
        yield _rows(rows)
    if command.epilog:
        told, _, example = command.epilog.partition(": ")
        yield f"{told}: `{example}`\n"
    for name, one in below:
        yield from _command(one, one.context_class(one, info_name=name, parent=context), depth + 1)


def _summary(context, name: str, command) -> tuple[str, str]:
    anchor = f"{context.command_path} {name}".replace(" ", "-")
    return f"[`{name}`](#{anchor})", _escaped(command.get_short_help_str(200))


def _help_text(text: str | None) -> str:
    """Return the help of a command as Markdown: what it sets apart by \\b is drawn as it is."""
    found = []
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        drawn = paragraph.startswith("\b\n")
        found.append(f"```\n{paragraph[2:]}\n```" if drawn else _escaped(paragraph))
    return "\n\n".join(found) + "\n"


def _rows(rows: list[tuple[str, str]]) -> str:
    """Return a table of two columns whose first row is its head."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], ("---", "---"), *rows[1:])) + "\n"


def _escaped(text: str) -> str:
    """Return words of the help that Markdown takes as they are, but for code in backticks and names of pages."""
    named = re.sub(r"(?<!`)\bdocs/[\w/]+\.md", r"`\g<0>`", " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", named)
    return "".join(part if part.startswith("`") else re.sub(r"([\\\[\]*_<>|#])", r"\\\1", part) for part in parts)


def _python() -> str:
    """An entry for each public name, found by mkdocstrings where it lives."""
    sys.path.insert(0, str(ROOT))
    import tilepress

    entries = []
    for name in sorted(tilepress.__all__, key=lambda name: (name[0].isupper(), name)):
        home = {"compress": "compress.run.api", "TilepressError": "formats", "UsageError": "formats"}
        options = f"    options:\n      heading: tilepress.{name}\n"
        options += "      members: false\n" if name in _SETTINGS else ""
        entries.append(f"::: tilepress.{(home | tilepress._HOMES)[name]}.{name}\n{options}")
    return "# Python\n\nAll of it is imported from `tilepress`.\n\n" + "\n".join(entries)
