"""Windows that begin with the BOS, of tokenizers that add one and others: what is run, what is scored, what an artifact says of it."""

import math

import numpy as np
import pytest
import torch
import transformers
from support.families import byte_tokenizer
from tokenizers.processors import TemplateProcessing

import tilepress
from tilepress import Quantize, Recover, Text, demo
from tilepress.compress.recover.recipe import _text
from tilepress.eval.perplexity import Protocol, measure
from tilepress.formats import UsageError
from tilepress.formats.checkpoint import read_manifest
from tilepress.text import documents, token_ids, window_start

BEGIN, END, MASK = 0, 298, 299  # special tokens of the tokenizers below
TEMPLATES = {  # what a tokenizer puts around a text
    "bos": ("<s> $A", [BEGIN]),
    "bos and eos": ("<s> $A </s>", [BEGIN]),
    "two": ("<mask> <s> $A", [MASK, BEGIN]),
    "eos": ("$A </s>", []),
    "nothing": ("$A", []),
}


def made(template: str, **changes) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes that puts these tokens around a text."""
    backend = byte_tokenizer().backend_tokenizer
    backend.add_special_tokens(["</s>", "<mask>"])
    ids = {name: backend.token_to_id(name) for name in ("<s>", "</s>", "<mask>")}
    backend.post_processor = TemplateProcessing(single=template, special_tokens=list(ids.items()))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **{"bos_token": "<s>"} | changes)


@pytest.fixture(scope="module")
def source(checkpoint_of):
    return checkpoint_of("llama")


@pytest.fixture(scope="module")
def model(source):
    return tilepress.load(source, dtype=torch.float32)


@pytest.fixture
def with_tokenizer(source, tmp_path):
    """Makes copies of the checkpoint with another tokenizer."""

    def make(name: str):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        for path in source.iterdir():
            if not path.name.startswith("tokenizer"):
                (folder / path.name).hardlink_to(path)
        made(TEMPLATES[name][0]).save_pretrained(folder)
        return folder

    return make


def plain_ids(tokenizer) -> list[int]:
    return tokenizer("\n\n".join(documents(str(demo.TEXT))), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokenizer_tells_what_windows_begin_with(name):
    template, expected = TEMPLATES[name]
    tokenizer = made(template)
    expected = [tokenizer.convert_tokens_to_ids({BEGIN: "<s>", MASK: "<mask>"}[i]) for i in expected]
    assert window_start(tokenizer) == window_start(tokenizer, "auto") == expected
    assert window_start(tokenizer, "always") == (expected or [BEGIN])
    assert window_start(tokenizer, "never") == []


def test_a_bos_that_is_not_there():
    without = made("$A", bos_token=None)
    assert window_start(without) == []
    with pytest.raises(UsageError, match="no BOS token") as raised:
        window_start(without, "always")
    assert raised.value.hint
    for make in (
        lambda: window_start(without, "yes"),
        lambda: Text("x", bos="first"),
        lambda: Protocol("x", bos="yes"),
    ):
        with pytest.raises(UsageError, match="is unknown"):
            make()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_calibration_windows(name, bos):
    """Windows of seqlen tokens, each with its start and then the next of the text, none left out and none twice."""
    tokenizer = made(TEMPLATES[name][0])
    start = {"auto": TEMPLATES[name][1], "always": TEMPLATES[name][1] or [BEGIN], "never": []}[bos]
    start = [tokenizer.convert_tokens_to_ids("<mask>") if i == MASK else i for i in start]
    windows = Text(str(demo.TEXT), 3, 32, bos=bos).windows(tokenizer)
    assert [len(window) for window in windows] == [32] * 3
    assert all(window[: len(start)] == start for window in windows)
    step, text = 32 - len(start), token_ids(tokenizer, str(demo.TEXT), special_tokens=False, seed=0)
    cut = [text[at : at + step] for at in range(0, len(text), step)]
    assert all(window[len(start) :] in cut for window in windows)


@pytest.mark.parametrize("recipe", ["gptq", "strided"])
@pytest.mark.parametrize(
    ("name", "bos"), [("bos", "auto"), ("nothing", "auto"), ("nothing", "always"), ("bos", "never"), ("two", "auto")]
)
def test_perplexity_against_windows_put_together_here(model, name, bos, recipe, tmp_path):
    tokenizer = made(TEMPLATES[name][0])
    start = {"bos": ["<s>"], "two": ["<mask>", "<s>"]}.get(name, []) if bos == "auto" else ["<s>"] * (bos == "always")
    start = tokenizer.convert_tokens_to_ids(start)
    if recipe == "gptq":
        text = demo.TEXT
    else:
        text = tmp_path / "some.txt"
        text.write_text("".join(documents(str(demo.TEXT)))[:150])
    ids = tokenizer("\n\n".join(documents(str(text))), add_special_tokens=False)["input_ids"]
    width, losses, firsts = 40 - len(start), [], 0
    spans = [(w * width, (w + 1) * width) for w in range(3)]
    if recipe == "strided":
        spans = [(a, min(a + width, len(ids))) for a in range(0, len(ids), 16)]
        spans = spans[: next(i for i, span in enumerate(spans) if span[1] == len(ids)) + 1]
    scored = set()
    for a, b in spans:
        window = start + ids[a:b]
        with torch.inference_mode():
            logp = torch.log_softmax(model(torch.tensor([window])).logits[0].double(), -1)
        mine = [i for i in range(a, b) if i not in scored and (i > a or start)]
        scored |= {*range(a, b)} if recipe == "strided" else set()
        losses += [-float(logp[len(start) + i - a - 1, ids[i]]) for i in mine]
        firsts += a in mine
    protocol = Protocol(
        str(text), recipe, 40, 16 if recipe == "strided" else None, 3 if recipe == "gptq" else None, bos
    )
    found = measure(model, tokenizer, protocol).to_json()
    assert (firsts > 0) == bool(start)  # the first token of a text is scored behind a BOS
    assert found["tokens"] == len(losses)
    assert found["nll"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["protocol"]["bos"] == bos
    assert found["protocol"]["window_start"] == tokenizer.convert_ids_to_tokens(start)


@pytest.mark.parametrize("name", ["bos", "nothing", "bos and eos"])
def test_first_is_what_other_tools_do(model, name):
    """The whole text is tokenized as the tokenizer does, then cut: its BOS is a token of the first window, no window has another."""
    tokenizer = made(TEMPLATES[name][0])
    ids = tokenizer("\n\n".join(documents(str(demo.TEXT))))["input_ids"]
    windows = torch.tensor(ids[: 3 * 40]).view(3, 40)
    with torch.inference_mode():
        losses = [float(model(window[None], labels=window[None]).loss) for window in windows]
    found = measure(model, tokenizer, Protocol(str(demo.TEXT), "gptq", 40, limit=3, bos="first"))
    assert found.window_nll == pytest.approx(losses, rel=1e-5)


def test_windows_without_room_and_tokens_that_the_model_lacks(model):
    with pytest.raises(UsageError, match="no room"):
        measure(model, made(TEMPLATES["two"][0]), Protocol(str(demo.TEXT), seqlen=2))


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("nothing", "auto", None),
        ("nothing", "never", None),
        ("nothing", "always", "always"),
        ("bos", "auto", "always"),
        ("bos", "always", "always"),
        ("bos", "never", "never"),
    ],
)
def test_fingerprint_and_card_tell_of_it(with_tokenizer, tmp_path, name, asked, told, cli):
    """Nothing is said where the tokenizer adds none and none is asked for: these artifacts are as they always were."""
    source, out = with_tokenizer(name), tmp_path / "out"
    words = ("--activations", "tensor", "--dataset", demo.TEXT, "--nsamples", 2, "--seqlen", 32, "--bos", asked)
    ran = cli("compress", "quantize", source, "-o", out, *words, "--device", "cpu", "--json", "-q")
    assert ran.code == 0, ran.err
    manifest, card = read_manifest(out), (out / "README.md").read_text()
    assert manifest["settings"].get("bos") == told
    assert (f"bos {told}" in card) == (told is not None) and ("bos" in card) == (told is not None)


def test_another_bos_is_another_run(with_tokenizer, tmp_path):
    source, recipe = with_tokenizer("bos"), Quantize(activations="tensor")
    prints = {
        bos: tilepress.plan(source, tmp_path / "out", recipe, dataset=Text(str(demo.TEXT), 2, 32, bos=bos)).plan
        for bos in ("auto", "always", "never")
    }
    assert prints["auto"].fingerprint == prints["always"].fingerprint != prints["never"].fingerprint


def test_nothing_is_written_where_there_is_no_bos(with_tokenizer, tmp_path, cli):
    source = with_tokenizer("nothing")
    made("$A", bos_token=None).save_pretrained(source)
    words = ("--activations", "tensor", "--dataset", demo.TEXT, "--bos", "always", "--device", "cpu")
    ran = cli("compress", "quantize", source, "-o", tmp_path / "out", *words)
    assert ran.code == 2 and ran.err.count("\n") == 2 and "no BOS token" in ran.err
    assert not (tmp_path / "out").exists()
    ran = cli("eval", "perplexity", source, "--dataset", demo.TEXT, "--seqlen", 32, "--bos", "always")
    assert ran.code == 2 and "no BOS token" in ran.err
    ran = cli("compress", "quantize", source, "-o", tmp_path / "out", "--bos", "always")
    assert ran.code == 2 and "reads no text" in ran.err


def test_training_windows_begin_so_too(with_tokenizer, tmp_path):
    source = with_tokenizer("bos")
    recipe = Recover(2, batch=2, prune=tilepress.Prune(0.5))
    for bos, start in (("auto", [BEGIN]), ("never", [])):
        plan = tilepress.plan(source, tmp_path / "out", recipe, dataset=Text(str(demo.TEXT), 4, 32, bos=bos)).plan
        ids, stream = _text(plan, plan.recipe)
        assert stream.start.tolist() == start and stream.batch(0, 2).shape == (2, 32)
        assert BEGIN not in ids
        assert (stream.held_out[:, 0] == BEGIN).all() == bool(start)


def test_the_command_says_what_windows_begin_with(source, cli):
    words = ("eval", "perplexity", source, "--dataset", demo.TEXT, "--seqlen", 40, "--limit", 2)
    ran = cli(*words)
    assert ran.code == 0 and "each beginning with <s>" in ran.out
    assert math.isfinite(cli(*words, "--bos", "never", "--json").json["perplexity"])
