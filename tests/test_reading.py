"""How files read: lines within 120 columns, and kernels that say what each pointer points to.

Rows of Markdown tables, lines that begin with "|", may be longer: they cannot be broken.
"""

import re
from pathlib import Path

import pytest

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
SOURCES = [source.file for sources in KERNELS.values() for source in sources]


@pytest.mark.parametrize("pattern", FITTING)
def test_lines_fit_120_columns(pattern):
    files = sorted(ROOT.glob(pattern))
    lines = [(file, i, line) for file in files for i, line in enumerate(file.read_text().splitlines(), 1)]
    long = [(file, i) for file, i, line in lines if len(line) > 120 and not line.startswith("|")]
    assert files and [f"{file.relative_to(ROOT)}:{i}" for file, i in long] == []


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
