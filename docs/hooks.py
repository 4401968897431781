"""Pages of the site that are made while it is built: those that stand at the repository's root, the commands, and the Python API.

So nothing is written twice. Names of pages in the text, such as `docs/int8.md` in backticks, become links.
"""

import os
import re
import subprocess
import sys
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
    """The commands as typer documents them."""
    words = [sys.executable, "-m", "typer", "tilepress.cli.app", "utils", "docs", "--name", "tilepress"]
    made = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return "# Commands\n" + made.partition("\n")[2]


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
