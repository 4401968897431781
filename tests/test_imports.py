"""Imports go one way, formats import nothing of ours, and nothing heavy is imported for `--help`."""

import ast
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tilepress"
ALLOWED = {  # part -> parts, or single modules of them, that it may import
    "formats": {"formats"},
    "kernels": {"kernels", "formats"},
    "models": {"models", "formats"},
    "text": {"formats"},
    "device": {"formats"},
    "ranks": {"formats"},
    "sampling": {"runtime", "formats", "text", "device"},
    "chat": {"runtime", "formats", "text", "device"},
    "sharing": {"eval", "formats"},
    "version": set(),
    "runtime": {"runtime", "kernels", "formats", "models", "device", "ranks"},
    "compress": {"compress", "kernels", "formats", "models", "text", "device", "ranks", "version"},
    "eval": {"eval", "chat", "compress", "runtime", "kernels", "formats", "models", "text", "device", "version"},
    "bench": {"bench", "compress", "runtime", "kernels", "formats", "models"},
    "demo": set(),
    "hf": {"runtime", "formats"},
    "__init__": {"compress", "runtime", "eval", "models", "formats", "chat", "sharing", "sampling", "text", "version"},
    "__main__": {"cli"},
    "cli": {
        "cli",
        "chat",
        "bench",
        "eval",
        "runtime",
        "kernels",
        "compress",
        "formats",
        "models",
        "text",
        "device",
        "ranks",
        "demo",
        "version",
        "__init__",
    },
}


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, as `part.module`; names from the package itself as `__init__` or `part`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] if node.module != "tilepress" else [f"tilepress.{alias.name}" for alias in node.names]
        found |= {name.removeprefix("tilepress.") for name in names if name.split(".")[0] == "tilepress"}
    return {"__init__" if name in ("__version__", "tilepress") else name for name in found}


def test_imports_go_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imports(path):
            if name.split(".")[0] not in ALLOWED[part] and name not in ALLOWED[part]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def module_graph(package: Path) -> dict[str, set[str]]:
    """Modules of a package, each with those that it imports anywhere: at its top, inside functions, under TYPE_CHECKING."""
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in files.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                # What is no module is a name in one.
                found |= {other if other in files else node.module for other in whole}
        graph[name] = found & set(files)
    return graph


def test_no_circle_between_modules():
    TopologicalSorter(module_graph(PACKAGE)).prepare()  # raises CycleError with the modules of a circle


@pytest.mark.parametrize(
    "back",
    [
        "import made_up.first",
        "from made_up import first",
        "from made_up.first import name",
        "def later():\n    from made_up.first import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made_up.first import Name",
    ],
)
def test_a_circle_is_found(tmp_path, back):
    package = tmp_path / "made_up"
    (package / "room").mkdir(parents=True)
    for name, text in (("__init__", ""), ("first", "from made_up.room import second"), ("room/__init__", "")):
        (package / f"{name}.py").write_text(text)
    (package / "room" / "second.py").write_text("import made_up.third")
    (package / "third.py").write_text("import torch")
    TopologicalSorter(module_graph(package)).prepare()
    (package / "third.py").write_text(back)
    with pytest.raises(CycleError) as raised:
        TopologicalSorter(module_graph(package)).prepare()
    assert set(raised.value.args[1]) == {"made_up.first", "made_up.room.second", "made_up.third"}


def test_formats_know_no_transformers_and_only_the_screen_prints():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "formats":
            assert "import transformers" not in text and "from transformers" not in text, path
        if part != "cli":
            assert not re.search(r"\bprint\(", text), path


def test_ops_are_imported_where_they_are_called():
    """A module that calls torch.ops.tilepress.x imports, itself or through others, the one that defines x."""
    texts = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text() for path in PACKAGE.rglob("*.py")
    }
    direct = {}
    for name, text in texts.items():
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        named = {at for node in nodes for at in (node.module, *(f"{node.module}.{each.name}" for each in node.names))}
        direct[name] = {at.removeprefix("tilepress.") for at in named} & set(texts)
    homes = {op: name for name, text in texts.items() for op in re.findall(r'library\.define\(\s*f?"(\w+)\(', text)}

    def reached(name: str) -> set[str]:
        found, left = set(), [name]
        while left:
            if (module := left.pop()) in found:
                continue
            found.add(module)
            left += direct[module]
        return found

    calls = {(name, op) for name, text in texts.items() for op in re.findall(r"\bops\.(?:tilepress\.)?(\w+)\b", text)}
    calls = {(name, op) for name, op in calls if op in homes}
    assert len(calls) > 10
    assert {(name, op) for name, op in calls if homes[op] not in reached(name)} == set()


def test_help_is_quick_and_imports_no_torch():
    script = (
        "import sys, tilepress.cli.app as c; sys.argv[1:] = ['compress', 'prune', '--help']\n"
        "try: c.main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "tilepress.cli.app", "--help"], check=True, capture_output=True)
        after = os.times()  # the processor's seconds: a machine may have other work
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.5
