"""How files read: lines within 120 columns, docstrings that are sentences, and kernels that say what each pointer points to.

Rows of Markdown tables, lines that begin with "|", may be longer: they cannot be broken.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tilepress.formats import installing, storage
from tilepress.kernels.arch import KERNELS

ROOT = Path(__file__).parents[1]
FITTING = (
    "tilepress/kernels/*.cu",
    "tilepress/kernels/*.cuh",
    "docs/kernels/*.md",
    "docs/*.md",
    "docs/guides/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)  # one pattern more for each that fits
TOLD = (".py", ".md", ".yaml", ".ipynb")  # files that tell people what to install
# Words that no docstring begins with.
FRAGMENTS = ("And", "As", "Behind", "Beside", "By", "From", "In", "Of", "On", "Under", "With", "Without")
SOURCES = [source.file for sources in KERNELS.values() for source in sources]


@pytest.mark.parametrize("pattern", FITTING)
def test_lines_fit_120_columns(pattern):
    files = sorted(ROOT.glob(pattern))
    lines = [(file, i, line) for file in files for i, line in enumerate(file.read_text().splitlines(), 1)]
    long = [(file, i) for file, i, line in lines if len(line) > 120 and not line.startswith("|")]
    assert files and [f"{file.relative_to(ROOT)}:{i}" for file, i in long] == []


def test_the_design_is_two_screens_and_names_what_is_there():
    """Every file and folder that it names stands in the package, its tests, benchmarks or docs."""
    text = (ROOT / "docs" / "DESIGN.md").read_text()
    assert len(text.splitlines()) <= 130
    folders = [ROOT / name for name in ("tilepress", "tests", "benchmarks", "docs")]
    there = {path.name for folder in folders for path in (folder, *folder.rglob("*"))} | {"mkdocs.yml"}
    named = set(re.findall(r"\b[a-z]\w*\.(?:py|cu|yml)\b|\b[a-z]\w*(?=/)", text))
    assert len(named) > 90 and {name for name in named if name not in there} == set()


def test_docstrings_and_comments_begin_as_sentences():
    """A docstring begins with a verb or names the thing, a comment above a line is a sentence: not "Of each …", nor "In units of …"."""
    begins = rf'"""(?:{"|".join(FRAGMENTS)}) |^\s*# Of '
    files = list((ROOT / "tilepress").rglob("*.py"))
    lines = [(file, i, line) for file in files for i, line in enumerate(file.read_text().splitlines(), 1)]
    found = [f"{file.relative_to(ROOT)}:{i}: {line.strip()}" for file, i, line in lines if re.search(begins, line)]
    assert len(files) > 150 and found == []


@pytest.mark.parametrize("file", SOURCES)
def test_pointers_of_a_kernel_have_dtype_and_shape(file):
    text = (ROOT / "tilepress" / "kernels" / file).read_text()
    lines = re.search(r"\n\w+\((.*?\) {[^\n]*)", text[text.index('extern "C"') :], re.S)[1].splitlines()
    pointers = [line for line in lines if "*" in line.split("//")[0] or "TensorMap" in line]
    assert pointers
    for line in pointers:
        code, _, comment = line.partition("//")
        assert code.count(",") <= 1, f"several arguments in a line with a pointer: {line}"
        assert re.search(r"\[.*\]|words, of 16 bytes|int32: cuts", comment), line


@pytest.mark.parametrize("file", SOURCES)
def test_a_kernel_says_what_it_is_for(file):
    first = (ROOT / "tilepress" / "kernels" / file).read_text().splitlines()[0]
    assert first.startswith("// ") and len(first.split()) > 5


def test_installing_is_told_in_one_way():
    """tilepress is on no index: pip would look for a bare name there, and take somebody else's package or none."""
    folders = ("tilepress", "docs", "docs/guides", "docs/kernels", "examples")
    files = [path for folder in folders for path in (ROOT / folder).glob("**/*") if path.suffix in TOLD]
    bare = [
        str(path.relative_to(ROOT)) for path in files if re.search(r"pip install\s+'?tilepress\b", path.read_text())
    ]
    assert files and sorted(set(bare)) == []
    sources = "\n".join(path.read_text() for path in (ROOT / "tilepress").rglob("*.py"))
    named = set(re.findall(r"""installing\(["'](\w+)["']\)""", sources)) | set(storage._EXTRAS.values())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cuda", "ray", "report", "s3", "tasks", "vllm"} == named <= extras.keys()
    words = shlex.split(installing("vllm"), comments=True)  # as a shell takes it
    assert words == ["pip", "install", "./tilepress[vllm]"]
