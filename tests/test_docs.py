"""Commands, names and errors of the documentation are those of the program.

Every `tilepress` command of README, the guides and the pages that stand beside them runs on the embedded model, with little text. Those of all other
pages, and those that need a card, a network or several processes, are parsed: an unknown command or flag fails.
"""

import importlib.util
import io
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tilepress

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BESIDE = ("report", "chat", "sharing", "text", "pruning", "recovery", "vllm")  # pages whose commands run, too
RUN = [*GUIDES, *(ROOT / "docs" / f"{name}.md" for name in BESIDE)]
PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = {  # what a command gets in addition: the last of two equal flags counts
    ("compress", "prune"): "--nsamples 2 --seqlen 64",
    ("compress", "quantize"): "--nsamples 2 --seqlen 64",
    ("compress", "kv"): "--nsamples 2 --seqlen 64",
    ("compress", "recover"): "--nsamples 2 --seqlen 32 --steps 2 --batch 1",
    ("eval", "perplexity"): "--seqlen 64 --limit 2 --dataset short.jsonl",
    ("eval", "tasks"): "--tasks hellaswag --dataset items.jsonl",
    ("eval", "speed"): "--batch 1 --context 16 --new-tokens 2 --runs 1",
}
QUICK = {  # a word of a command that takes long, and what stands for it; others of our tests run it as it is
    "--sweep": "--sparsity 0.5 --method wanda --eval-dataset short.jsonl",
    "--allocation": "--allocation uniform",
    "--refit": "--refit 0",
    "admm": "--method wanda",
    "sparsegpt": "--method wanda",
    "--blocks": "--dry-run",
    "--workers": "--workers 1",
    "--recover": "--recover 2",
    "self": "--dataset text.jsonl",
}
STANDS_FOR = {"$MODEL": "MODEL", "OTHER": "MODEL", "TEXT": "text.jsonl"}


def commands(page: Path) -> list[list[str]]:
    """Commands in the code blocks of a page, lines that go on joined, comments taken off."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if "tilepress" in line else []
            if "…" in words:
                continue
            if words[:1] == ["tilepress"] and len(words) > 1:
                found.append(words[1:])
            elif words[:1] == ["torchrun"]:
                found.append([*words[words.index("tilepress") + 1 :], "--help"])
    return found


def inline(page: Path) -> list[list[str]]:
    """Commands in the text of a page, which may be given in part: `tilepress compress kv`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    found = [shlex.split(words) for words in re.findall(r"`tilepress ([a-z][^`…]*)`", text)]
    return [[*words, "VALUE"] if words[-1].startswith("--") else words for words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse(page, cli):
    for words in commands(page) + inline(page):
        ran = cli(*words, "--help")
        assert ran.code == 0 and "Usage:" in ran.out, (words, ran.err)


@pytest.fixture(scope="session")
def ready(artifact, tiny, text, halves, tmp_path_factory):
    """What a guide takes for granted: artifacts of other guides, and texts."""
    folder = tmp_path_factory.mktemp("ready")
    few = tilepress.Text(str(text), nsamples=2, seqlen=64)
    tilepress.compress(tiny, folder / "int8", tilepress.Quantize())
    tilepress.compress(folder / "int8", folder / "int8-kv4", tilepress.KVCache(), dataset=few)
    tilepress.compress(tiny, folder / "sparse-model", tilepress.Prune(0.5, format="dense"))
    (folder / "pruned").symlink_to(artifact)
    (folder / "small").symlink_to(folder / "int8-kv4")
    calibration, held_out = halves
    (folder / "text.jsonl").symlink_to(calibration.dataset)
    (folder / "held-out.jsonl").symlink_to(held_out)
    item = {"query": "import", "choices": ["os", "a very long ending"], "gold": 0}
    (folder / "items.jsonl").write_text(json.dumps(item) + "\n")
    (folder / "short.jsonl").write_text(json.dumps({"text": "import os\n" * 1000}) + "\n")
    return folder


@pytest.fixture(scope="module")
def ran_before() -> dict[tuple[str, ...], Path | None]:
    """Commands that another page had, with the folder that they wrote: nothing runs twice."""
    return {}


def elsewhere(words: list[str]) -> bool:
    """Return whether a command needs a card or a network, or has tests of its own."""
    sends = words[0] == "push" and "--dry-run" not in words
    return (
        sends or words[-1] == "--help" or words[:2] == ["eval", "kernels"] or words[0] == "demo" or "://" in str(words)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_commands_of_a_guide_run(page, cli, ready, ran_before, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))  # for `chat`
    for name in ("items.jsonl", "short.jsonl", "text.jsonl"):
        Path(name).symlink_to(ready / name)
    for words in commands(page):
        if elsewhere(words):
            continue
        words = [STANDS_FOR.get(word, word) for word in words]
        words, into = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
        words = words[: words.index("--system")] if "--system" in words else words  # the model has no chat template
        written = words[words.index("-o") + 1] if "-o" in words else into
        if tuple(words) in ran_before:
            if (made := ran_before[tuple(words)]) and not Path(written).exists():
                Path(written).symlink_to(made)
            continue
        for word in words:
            if (ready / word).exists() and word != written and not Path(word).exists():
                Path(word).symlink_to(ready / word)
        reads = "--dataset" in words or words[0] == "eval"
        more = [SMALL.get(tuple(words[:2]), "") if reads else "", *(QUICK[word] for word in words if word in QUICK)]
        if "--recover" in words and "--method" not in words:
            more[0] = "--seqlen 64"  # no windows are calibrated on
        if words[0] == "compress" and written and Path(written).is_dir():
            more.append("--overwrite")
        more += ["--new-tokens 3"] if words[0] in ("generate", "chat", "compare") else []
        ran = cli(*(str(tiny) if word == "MODEL" else word for word in [*words, *" ".join(more).split()]))
        assert ran.code in ((0, 3) if "--max-increase" in words else (0,)), (words, ran.err)
        if into is not None:
            Path(into).write_text(ran.out)
        stays = written is not None and "--dry-run" not in " ".join([*words, *more])
        assert not stays or Path(written).exists(), words
        ran_before[tuple(words)] = tmp_path / written if stays else None


@pytest.mark.thorough
def test_examples_in_python_run(ready, tiny, tmp_path, monkeypatch):
    """Blocks of Python in the guides, one after the other; what they load stands ready."""
    monkeypatch.chdir(tmp_path)
    for name in ("int8", "int8-kv4", "text.jsonl", "held-out.jsonl"):
        Path(name).symlink_to(ready / name)
    Path("kv4").symlink_to(ready / "int8-kv4")
    Path("MODEL").symlink_to(tiny)
    ran = 0
    for page in GUIDES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.S | re.M):
            small = block.replace('"cuda"', '"cpu"').replace('dataset="text.jsonl"', "dataset=few")
            small = small.replace('"held-out.jsonl",', '"held-out.jsonl", seqlen=64, limit=2,')
            exec(small, {"few": tilepress.Text("text.jsonl", nsamples=2, seqlen=64)})
            ran += 1
    assert ran >= 4


def test_the_pages_of_errors_quote_the_program():
    sources = "".join(path.read_text() for path in (ROOT / "tilepress").rglob("*.py"))
    for quoted in re.findall(r"^### `(.*)`$", (ROOT / "docs" / "faq.md").read_text(), flags=re.M):
        for part in re.split("…", quoted):
            part = part.strip(" ()`")
            assert len(part) < 4 or part in sources, quoted


def test_links_of_the_root_pages_lead_somewhere():
    """Those between pages of docs/ are held by the strict build of the site."""
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert (ROOT / link).exists(), (page, link)


def test_every_page_is_in_the_site():
    named = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        assert str(path.relative_to(ROOT / "docs")) in named, path


def test_the_reference_has_every_command_and_option(cli, monkeypatch):
    """Compared with what `--help` prints of each."""
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):  # which only the site's environment has
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(File=None))
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    sections = re.split(r"^#+ `tilepress (.*)`$", hooks._commands(), flags=re.M)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert {"compress", "eval", "compress quantize", "eval speed", "demo", "push"} <= found.keys()
    for name, section in found.items():
        options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)(?=\s)", cli(*name.split(), "--help").out, flags=re.M))
        assert "--help" in options
        assert name in ("compress", "eval") or options == set(re.findall(r"^\| `(?:-\w, )?(--[\w-]+)", section, re.M))
