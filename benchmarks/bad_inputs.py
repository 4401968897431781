"""Bad inputs of many kinds, over every command: what comes of them.

    python benchmarks/bad_inputs.py --count 2000 --seed 0 --work FOLDER

A case is a small checkpoint or artifact, a text and a command line, of which one thing is wrong: a value of a JSON file, a tensor of a header,
bytes, a file that is none, a line of the text, a flag. Case N of a seed stays the same as long as this file
does. Each runs in a fork of one process that has imported everything, so that 2,000 take minutes.
What counts against tilepress: a traceback or an error that was not foreseen, more than
20 s, an artifact that is written and does not load, and more anonymous memory than twice the stored bytes and 1 GB.
The first cases are sound, and must succeed.
`--only N` runs one case and shows what it printed; the results of all are lines of JSON in FOLDER/results.jsonl.
"""

import argparse
import collections
import contextlib
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

MOST_S, SPARE_BYTES = 20, 10**9
ODD = [
    0,
    1,
    -1,
    3,
    7,
    10,
    2**31,
    10**9,
    10**18,
    10**400,
    0.5,
    1e308,
    math.nan,
    math.inf,
    "",
    "x",
    "\ud800",
    "a\nb",
    "\x1b[31m",
]
ODD += [
    None,
    True,
    False,
    [],
    {},
    [1],
    [[]] * 3,
    {"a": 1},
    [None] * 1000,
    "y" * 100_000,
    "../../etc/passwd",
    "float16",
    "int4",
]
TYPES = "gpt2 opt bloom mistral mixtral qwen2 qwen3_moe gemma3_text phi3 falcon mamba t5 bert gpt_neo gptj mpt whisper clip gpt_oss"


@dataclass
class Result:
    number: int
    kind: str
    words: list[str]
    code: int | None  # None: it was stopped
    seconds: float  # of a processor
    extra_bytes: int  # anonymous memory above what importing took
    stored_bytes: int
    problem: str  # "" where all is as it should be
    said: str


# What can be wrong. Each function changes a copy of a model in `folder`, and returns a word for it.


def spoil_json(rng: random.Random, path: Path) -> str:
    """Change one value somewhere in a JSON file, or the file as a whole."""
    text = path.read_text()
    if rng.random() < 0.12:
        whole = [
            "",
            "{",
            "[]",
            "null",
            "7",
            '"x"',
            "[" * 100_000,
            "\ufeff" + text,
            text[: rng.randrange(1, len(text))],
            "\x00" * 50,
        ]
        path.write_text(rng.choice(whole))
        return f"{path.name}: the whole"
    root = json.loads(text)
    at, parents, keys = root, [], []
    while isinstance(at, (dict, list)) and at and (not keys or rng.random() < 0.8):
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        parents.append(at)
        keys.append(key)
        at = at[key]
    owner, key = (parents[-1], keys[-1]) if keys else (root, "x")
    choice = rng.random()
    if choice < 0.2:
        del owner[key]
    elif choice < 0.3 and isinstance(owner, dict):
        owner["odd"] = owner.pop(key)
    elif choice < 0.5 and type(at) in (int, float):
        owner[key] = rng.choice([at + 1, at - 1, at * 2, at * 1000, -at, at // 2, at + 0.5])
    else:
        owner[key] = rng.choice(ODD)
    if type(owner) is dict and "model_type" in owner and rng.random() < 0.05:
        owner["model_type"] = rng.choice(TYPES.split())
    path.write_text(json.dumps(root))
    return f"{path.name}: {'.'.join(map(str, keys))[:80]}"


def spoil_header(rng: random.Random, path: Path) -> str:
    """Change a tensor of a safetensors header; its length is made right again."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name, odd_names = (
        rng.choice(names),
        ["", "a\nb", "\x1b[31mred", "x" * 10_000, "../x", "ü", "\ud800", "lm_head.weight", "model"],
    )
    entry, what = header[name], rng.randrange(14)
    if what == 0:
        header[rng.choice(odd_names)] = header.pop(name)
    elif what == 1:
        del header[name]
    elif what == 2:
        entry["shape"] = [math.prod(entry["shape"])]
    elif what == 3:
        entry["shape"] = entry["shape"][::-1]
    elif what == 4:
        entry["shape"] = [1] * rng.choice([3, 9, 100_000]) + entry["shape"]
    elif what == 5:
        entry["dtype"] = rng.choice(["F16", "I16", "U16", "F32", "F8_E4M3", "I8", "BOOL", "PICKLE", None, 3])
    elif what == 6:
        entry["data_offsets"] = rng.choice([[0, 0], [-1, 5], [0, 2**63], [0], "ab", None, [5, 1], [0.0, 4.0]])
    elif what == 7:
        entry["shape"] = rng.choice([[2**40, 2**40], [0], [], [-1], [1.5], None, "ab", [[]], {}, [2**31, 0]])
    elif what == 8:
        header |= {
            f"extra.{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
            for i in range(rng.choice([1, 100, 300_000]))
        }
    elif what == 9:
        header["__metadata__"] = rng.choice([[], {"format": 1}, {"format": "tf"}, "x", None, {"a": "b" * 10**6}])
    elif what == 10:
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
    elif what == 11:
        header["model.layers.9.mlp.up_proj.weight"] = entry
    elif what == 12:
        header[name] = rng.choice([7, None, [], {}, "x", {"dtype": "BF16"}])
    else:  # taken out, with its bytes
        begin, end = entry["data_offsets"]
        del header[name]
        data = data[:begin] + data[end:]
        for each in header.values():
            if "data_offsets" in each and each["data_offsets"][0] >= end:
                each["data_offsets"] = [n - (end - begin) for n in each["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return f"{path.name}: header {what} of {name}"


def spoil_bytes(rng: random.Random, path: Path) -> str:
    raw, what = bytearray(path.read_bytes()), rng.randrange(6)
    if not raw:
        return spoil_file(rng, path)
    at = rng.randrange(len(raw))
    if what == 0:
        raw = raw[:at]
    elif what == 1:
        raw += rng.randbytes(rng.choice([1, 8, 1000]))
    elif what == 2:
        raw[at : at + 64] = b"\xff" * min(64, len(raw) - at)  # NaN in every float
    elif what == 3:
        raw[:8] = struct.pack("<Q", rng.choice([0, 1, 2**63, len(raw), len(raw) - 8, 10**8]))
    elif what == 4:
        raw = bytearray(rng.randbytes(len(raw)))
    else:
        for _ in range(rng.choice([1, 10, 1000])):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    return f"{path.name}: bytes {what}"


def spoil_file(rng: random.Random, path: Path) -> str:
    """Put something else in a file's place."""
    path.unlink()
    ways: dict[str, Callable] = {
        "missing": lambda: None,
        "empty": path.touch,
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "link to itself": lambda: path.symlink_to(path.name),
        "device": lambda: path.symlink_to("/dev/zero"),
        "dangling": lambda: path.symlink_to("nowhere"),
    }
    way = rng.choice(list(ways))
    ways[way]()
    return f"{path.name}: {way}"


def spoil_model(rng: random.Random, folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kinds = {".json": [spoil_json] * 8, ".safetensors": [spoil_header] * 6 + [spoil_bytes] * 2}
    weights = [
        12 if p.name == "config.json" else 8 if p.suffix == ".safetensors" else 5 if p.name == "tilepress.json" else 2
        for p in files
    ]
    path = rng.choices(files, weights)[0]
    try:
        return rng.choice([*kinds.get(path.suffix, [spoil_bytes]), spoil_file])(rng, path)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error):  # it was spoiled once already
        return spoil_bytes(rng, path)


def bad_text(rng: random.Random, folder: Path) -> str:
    """Write a text that cannot be used, or only with care; return its path."""
    line = json.dumps({"text": "some words and more of them. " * 40})
    texts = {
        "a.txt": ["", " \n" * 500, "\ufeff" + "words " * 900, "x", "a" * 3_000_000, "\x00" * 5000, "words " * 600_000],
        "a.jsonl": [
            "",
            "\n\n",
            "{oops",
            "[1]",
            "7",
            '{"text": 3}',
            '{"content": "x"}',
            '{"text": ""}',
            '{"text": "\\ud800"}',
        ],
        "a.md": ["words " * 900],
        "a.json": ["", "{", "[]", '{"text": "x"}', "[" * 5000],
        "a.parquet": ["", "PAR1", "words"],
    }
    name = rng.choice(list(texts))
    path = folder / name
    choice = rng.random()
    if choice < 0.08:
        os.mkfifo(path)
    elif choice < 0.14:
        path.mkdir()
    elif choice < 0.24:
        path.write_bytes(rng.randbytes(5000))
    elif choice < 0.3:
        path.write_text("words " * 900, encoding="utf-16")
    elif choice < 0.4:
        return rng.choice(
            ["", " ", ":", "::", "nobody/nothing", "/dev/zero", "/dev/stdin", "a:b:c:d", "x" * 5000, "é", "hf://a"]
        )
    elif choice < 0.5:
        lines = [line] * 20
        lines[rng.randrange(20)] = rng.choice(texts["a.jsonl"])
        path.write_text("\n".join(lines))
    else:
        path.write_text(rng.choice(texts[name]))
    return str(path)


def bad_recipe(rng: random.Random, path: Path) -> str:
    """Change a recipe, which is JSON and so YAML; or make it what only YAML has."""
    if rng.random() < 0.6:
        return spoil_json(rng, path)
    laughs = "model:\n  a: &a [x, x, x, x, x, x, x, x, x]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        laughs += f"  {name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    odd = {
        "aliases": laughs + "steps:\n- {command: *i}\n",
        "itself": "steps: &s\n- {command: *s}\n",
        "no day": "model: 2001-13-01\nsteps: []\n",
        "a call": "model: !!python/object/apply:os.getcwd []\nsteps: []\n",
        "keys": "? [a, b]\n: c\nsteps: []\n",
        "large": "steps:\n" + "- {command: prune, sparsity: 0.5}\n" * 20_000,
        "deep": "[" * 20_000,
        "controls": 'model: "\\e[2J\\n"\nsteps:\n- {command: "\\e[31m"}\n',
        "digits": "steps:\n- {command: prune, sparsity: 0x" + "f" * 5000 + "}\n",
    }
    way = rng.choice(list(odd))
    path.write_text(odd[way])
    return f"{path.name}: {way}"


def bad_flags(rng: random.Random, words: list[str]) -> list[str]:
    """Give one flag an odd value."""
    from typer.main import get_command

    from tilepress.cli.app import app

    command = get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    values = [
        "",
        "0",
        "-1",
        "nan",
        "inf",
        "1e308",
        "99999999999999999999",
        "x",
        "é",
        "[",
        "re:(",
        "re:.*",
        "*",
        "0.5,0.6",
        "auto",
        "\udcff",
    ]
    flags = [param.opts[0] for param in command.params if param.opts[0].startswith("--") and not param.is_flag]
    known = [word for word in words if word.startswith("--")]
    flag = rng.choice(known) if known and rng.random() < 0.5 else rng.choice([*flags, "--odd"])
    value = rng.choice(values)
    if flag in words[:-1]:
        words[words.index(flag) + 1] = value
        return words
    return [*words, flag, value]


def bad_output(rng: random.Random, folder: Path, source: Path) -> str:
    ways = {
        "a file": lambda: (folder / "out").touch(),
        "below a file": lambda: (folder / "file").touch(),
        "full": lambda: ((folder / "out").mkdir(), (folder / "out" / "x").touch()),
        "a pipe": lambda: os.mkfifo(folder / "out"),
        "a loop": lambda: (folder / "out").symlink_to("out"),
        "dangling": lambda: (folder / "out").symlink_to("nowhere"),
    }
    way = rng.choice([*ways, "source", "device", "long", "odd", "above", "store"])
    if way in ways:
        ways[way]()
        return str(folder / ("file/out" if way == "below a file" else "out"))
    places = {"source": str(source), "device": "/dev/full", "long": "o" * 300, "odd": "a\nb\x1b[31m", "above": ".."}
    return (places | {"store": f"{STORE}/out"})[way]


# Commands, and what they are given.

MAKING = [
    "compress prune MODEL -o OUT --sparsity 0.5",
    "compress prune MODEL -o OUT --sparsity 0.9 --format tiled-csl",
    "compress prune MODEL -o OUT --sparsity 0.6 --scope global --value-dtype int8",
    "compress prune MODEL -o OUT --sparsity 0.5 --method wanda --dataset TEXT --nsamples 4 --seqlen 64",
    "compress prune MODEL -o OUT --sparsity 0.5 --method sparsegpt --allocation owl --dataset TEXT --nsamples 4 --seqlen 64",
    "compress quantize MODEL -o OUT",
    "compress quantize MODEL -o OUT --activations tensor --smooth 0.5 --dataset TEXT --nsamples 4 --seqlen 64",
    "compress quantize MODEL -o OUT --activations tensor --dynamic 0.5 --dataset TEXT --nsamples 4 --seqlen 64",
    "compress kv MODEL -o OUT --group-size 32 --dataset TEXT --nsamples 4 --seqlen 64",
    "compress kv MODEL -o OUT --group-size 32 --dataset self --nsamples 2 --seqlen 32",
    "compress kv MODEL -o OUT --bits auto --budget 6.1 --dataset TEXT --nsamples 4 --seqlen 64",
    "compress recover MODEL -o OUT --base BASE --steps 1 --batch 1 --dataset TEXT --seqlen 32",
    "compress prune MODEL -o OUT --sparsity 0.5 --method admm --dataset TEXT --nsamples 4 --seqlen 64",
    "compress quantize MODEL -o OUT --head int8 --dataset TEXT --nsamples 4 --seqlen 64",
    "compress quantize MODEL -o OUT --activations none",
    "compress kv MODEL -o OUT --group-size 32 --fold-values --dataset TEXT --nsamples 4 --seqlen 64",
    "compress kv MODEL -o OUT --bits auto --alike --budget 6.1 --dataset TEXT --nsamples 4 --seqlen 64",
    "compress stack MODEL -o OUT --recipe RECIPE",
    "convert MODEL -o OUT --to dense",
    "convert MODEL -o OUT --to tiled-bitmap",
]
READING = [
    "inspect MODEL",
    "inspect MODEL --json",
    "verify MODEL",
    "verify MODEL --base BASE",
    "eval perplexity MODEL --dataset TEXT --seqlen 32 --limit 2",
    "eval perplexity MODEL --base BASE --dataset TEXT --seqlen 32 --limit 2 --recipe strided",
    "eval tasks MODEL --dataset ROWS --limit 2",
    "eval speed MODEL --batch 1 --context 16 --new-tokens 2 --runs 1",
    "load MODEL",  # tilepress.load, and a few tokens
    "inspect MODEL --recipe",
    "generate MODEL Hello --new-tokens 4",
    "chat MODEL --new-tokens 4",
    "compare BASE MODEL --prompt Hello --new-tokens 4",
    "report MODEL RESULT -o PAGE",
    "models",
]
OF_ARTIFACTS = ("convert", "recover", "verify", "inspect MODEL --recipe", "report")
SOUND = [(form, "csl" if form.startswith(OF_ARTIFACTS) or "recover" in form else "llama") for form in MAKING + READING]
ARTIFACTS = ["csl", "bitmap", "int8", "exceptions", "kv", "mixed-kv", "folded", "head", "words", "sparse-words"]
MODELS = ["llama", "sharded", "gpt2", "mixtral", "chat", *ARTIFACTS]
STORE = "s3://bucket"  # refused: the package for stores is not installed where this runs
RECIPE = {
    "model": "model",
    "steps": [{"command": "prune", "sparsity": 0.6}, {"command": "quantize", "activations": "none"}],
}
SAID = "Hello\n/clear\nHello again\n"  # to a chat


def build_models(folder: Path) -> None:
    """Make the sound models that cases are copies of."""
    import torch
    from support.artifacts import few_words, run_recipe
    from support.families import _COMMON, _GQA, FAMILIES, build

    import tilepress

    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    FAMILIES["micro"] = ("LlamaConfig", _GQA | small)
    FAMILIES["micro-moe"] = ("MixtralConfig", _COMMON | small | {"num_local_experts": 2})
    build(folder / "llama", "micro", torch.bfloat16, "5GB", {})
    build(folder / "sharded", "micro", torch.bfloat16, "60KB", {})
    build(folder / "gpt2", "gpt2", torch.bfloat16, "5GB", {"n_embd": 64, "n_head": 2})
    build(folder / "mixtral", "micro-moe", torch.bfloat16, "5GB", {})
    for name, recipe in (
        ("csl", tilepress.Prune(0.8, format="tiled-csl")),
        ("bitmap", tilepress.Prune(0.6)),
        ("int8", tilepress.Quantize()),
        ("exceptions", tilepress.Quantize(activations="tensor", dynamic=0.5)),
        ("kv", tilepress.KVCache(group_size=32)),
        ("mixed-kv", tilepress.KVCache("auto", budget=6.1)),
        ("folded", tilepress.KVCache(group_size=32, fold_values=True)),
        ("head", tilepress.Quantize(head="int8")),
        ("words", tilepress.Quantize(activations="none")),
    ):
        text = few_words(2, 32) if name in ("exceptions", "kv", "mixed-kv", "folded") else None
        run_recipe(recipe, folder / "llama", folder / name, text=text)
    run_recipe(tilepress.Quantize(activations="none"), folder / "bitmap", folder / "sparse-words")
    shutil.copytree(folder / "llama", folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )


def make_case(seed: int, number: int, models: Path, folder: Path) -> tuple[str, list[str], Path | None]:
    """Return what is wrong in a case, its command, and the folder that it may write."""
    if number < len(SOUND):
        form, name = SOUND[number]
        shutil.copytree(models / name, folder / "model")
        return f"sound: {form}", *_placed(form, folder, models, {})
    rng = random.Random(f"{seed}-{number}")
    form = rng.choice(MAKING if rng.random() < 0.6 else READING)
    kinds = ["model", "text", "flags", "output", "base", "twice", "store"]
    # A recipe and figures are what their commands read first.
    kind = rng.choices(kinds, [60, 60 if "RECIPE" in form or "RESULT" in form else 10, 14, 4, 6, 6, 2])[0]
    name = rng.choice(MODELS)
    if form.startswith(OF_ARTIFACTS) or "recover" in form:
        name = rng.choice([*ARTIFACTS, name])
    source, told, places = folder / "model", name, {}
    shutil.copytree(models / name, source)
    if kind in ("model", "twice"):
        for _ in range(1 if kind == "model" else 2):
            told += " " + spoil_model(rng, source)
    elif kind == "base" and "BASE" in form:
        places["BASE"] = shutil.copytree(models / "llama", folder / "base")
        told += " base " + spoil_model(rng, places["BASE"])
    elif kind == "text" and "TEXT" in form:
        places["TEXT"] = bad_text(rng, folder)
        told += f" text {places['TEXT'][-40:]!r}"
    elif kind == "text" and (read := next((word for word in form.split() if word in FILES), None)):
        places[read] = shutil.copy(models / FILES[read], folder)
        told += f" {(bad_recipe if read == 'RECIPE' else spoil_json)(rng, Path(places[read]))}"
    elif kind == "output" and "OUT" in form:
        places["OUT"] = bad_output(rng, folder, source)
        told += f" output {places['OUT'][-40:]!r}"
    elif kind == "store" and "MODEL" in form:
        places["MODEL"] = f"{STORE}/model"
        told += " in a store"
    words, place = _placed(form, folder, models, places)
    if told == name:
        words, told = bad_flags(rng, words), told + " flags"
    return f"{form.split(' MODEL')[0]}: {told}", words, place


FILES = {"ROWS": "rows.jsonl", "RECIPE": "recipe.yaml", "RESULT": "result.json"}  # that commands read


def _placed(form: str, folder: Path, models: Path, places: dict) -> tuple[list[str], Path | None]:
    """Return a form with its places, those that are given and sound ones, and the folder that it may write."""
    sound = {"MODEL": folder / "model", "BASE": models / "llama", "OUT": folder / "out", "PAGE": folder / "page.html"}
    sound |= {word: models / name for word, name in (FILES | {"TEXT": "text.jsonl"}).items()}
    given = {word: str(place) for word, place in (sound | places).items()}
    return [given.get(word, word) for word in form.split()], Path(given["OUT"]) if "OUT" in form else None


# Running.


def run_words(words: list[str], output: Path | None) -> int:
    """Run a command as the command line does, and load what it wrote; `load` is the library's own."""
    import torch

    import tilepress
    from tilepress.cli import app

    def try_out(path: Path) -> None:
        model = tilepress.load(path)
        with torch.inference_mode():
            model(torch.arange(8)[None], use_cache=False)

    if words[0] == "load":
        try:
            try_out(Path(words[1]))
        except tilepress.TilepressError as error:
            print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
            return 1
        return 0
    sys.argv[1:] = words
    try:
        app.main()
    except SystemExit as ended:
        code = ended.code
    if code == 0 and output is not None and (output / "config.json").exists() and "--dry-run" not in words:
        try:
            try_out(output)
        except Exception as error:
            print(f"DOES NOT LOAD: {type(error).__name__}: {error}", file=sys.stderr)
    return code


def run_case(seed: int, number: int, models: Path, work: Path) -> Result:
    folder = work / f"case-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind, words, output = make_case(seed, number, models, folder)
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    ran, before, peak = time.monotonic(), anonymous("self"), 0
    (folder / "stdin").write_text(SAID)
    pid = os.fork()
    if not pid:
        for place, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT), place)
        os.chdir(folder)
        os.setsid()
        code = 99
        try:
            code = run_words(words, output)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 98)
    code = None
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        peak = max(peak, anonymous(pid) - before)
        state, used_s = at_work(pid)
        ran = time.monotonic() if state == "R" else ran
        # A busy machine may keep it waiting for a core, and nothing else may.
        if used_s > 2 * MOST_S or time.monotonic() - ran > 2 * MOST_S:
            os.killpg(pid, signal.SIGKILL)
            _, _, used = os.wait4(pid, 0)
            break
        time.sleep(0.01)
    seconds, said = used.ru_utime + used.ru_stime, (folder / "stderr").read_text(errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    problem = judge(kind, code, seconds, peak, stored, said)
    return Result(number, kind, words, code, round(seconds, 2), peak, stored, problem, said[-1500:])


def judge(kind: str, code: int | None, seconds: float, peak: int, stored: int, said: str) -> str:
    """Return what speaks against tilepress, or nothing."""
    if kind.startswith("sound") and code != 0:
        return "sound, and refused"
    lines = [line for line in said.splitlines() if not line.startswith("warning: ")]
    if code is None or seconds > MOST_S:
        return "hang"
    if "Traceback (most recent" in said:
        return "traceback"
    if "not foreseen" in said:
        return "not foreseen"
    if "DOES NOT LOAD" in said:
        return "does not load"
    if code not in (0, 1, 2, 3):
        return f"exit code {code}"
    if code in (1, 2) and (len(lines) < 2 or not lines[-2].startswith("error: ") or not lines[-1].startswith("hint: ")):
        return "not two lines"
    if peak > 2 * stored + SPARE_BYTES:
        return "memory"
    return ""


def anonymous(pid: int | str) -> int:
    """Anonymous memory of a process in bytes, 0 where it is gone."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def at_work(pid: int) -> tuple[str, float]:
    """What a process does (R: it runs, or waits for a core), and the seconds of a processor that it took; of one that is gone R and 0."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "R", 0.0
    return words[0], sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")


def warm_up(models: Path, folder: Path) -> None:
    """Run every command once, so that forks find imported what it takes."""
    from tilepress.cli.app import app
    from tilepress.cli.terminal import quiet_libraries

    quiet_libraries()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, (form, name) in enumerate(SOUND):
        words, _ = _placed(form, folder, models, {"MODEL": models / name, "OUT": folder / str(number)})
        sys.stdin = io.StringIO(SAID)
        if words[0] != "load":
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                app(words, standalone_mode=False)
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then; --first goes on")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TILEPRESS_CACHE": str(args.work / "cache"),
    }  # before torch is imported
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
    import tilepress

    models, results = args.work / "models", args.work / "results.jsonl"
    if not models.exists():
        build_models(models)
        line = json.dumps({"text": "Some words and more of them, in sentences of their own. " * 20})
        (models / "text.jsonl").write_text("\n".join([line] * 6))  # which a flag may have scored whole
        (models / "rows.jsonl").write_text('{"query": "a b", "choices": ["c", "d e"], "gold": 1}\n')
        (models / "recipe.yaml").write_text(json.dumps(RECIPE))
        asked = {"dataset": models / "text.jsonl", "seqlen": 32, "limit": 2}
        found = tilepress.perplexity(models / "csl", base=models / "llama", **asked).to_json()
        (models / "result.json").write_text(json.dumps(found))
    warm_up(models, args.work / "warm")
    if args.only is not None:
        print(json.dumps(asdict(run_case(args.seed, args.only, models, args.work)), indent=1))
        return
    counts, until = collections.Counter(), time.monotonic() + 60 * args.minutes
    slowest, most = 0.0, 0
    for number in range(args.first, args.first + args.count):
        result = run_case(args.seed, number, models, args.work)
        counts[result.problem or f"exit {result.code}"] += 1
        slowest, most = max(slowest, result.seconds), max(most, result.extra_bytes)
        with open(results, "a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        if result.problem:
            print(
                f"{number} {result.problem}: {result.kind}\n    {' | '.join(result.said.splitlines()[-3:])[:300]}",
                flush=True,
            )
        if time.monotonic() > until:
            break
    print(
        f"{args.first}..{number}: {dict(counts)}; slowest {slowest:.1f} s of a processor, most memory {most / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
