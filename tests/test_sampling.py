"""Text that a model writes itself: what is drawn, that it stays drawn, and models that write badly."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoTokenizer

import tilepress
from tilepress import Quantize, Text, demo, sampling
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import open_model, read_manifest

WORDS = ("--activations", "tensor", "--dataset", "self", "--nsamples", 4, "--seqlen", 24, "--device", "cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEPRESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def random_model(checkpoint_of):
    return checkpoint_of("llama")


@pytest.fixture
def bent(tiny, tmp_path):
    """Makes copies of `tiny` whose next token is always as a function of the logits says."""

    def make(change) -> sampling.Sampled:
        real = sampling.load

        def load(*words, **options):
            model = real(*words, **options)
            head = model.lm_head
            model.lm_head = torch.nn.Linear(head.in_features, head.out_features)
            with torch.no_grad():
                model.lm_head.weight.copy_(head.weight)
                model.lm_head.bias.zero_()
                change(model.lm_head)
            return model

        return load

    return make


def rows_of(found: sampling.Sampled) -> list[dict]:
    rounds = sorted(found.text.file.parent.glob("round-*.jsonl"))
    return [json.loads(line) for path in rounds for line in path.read_text().splitlines()]


def test_a_model_writes_as_much_as_is_asked_for(tiny):
    found = tilepress.sample(tiny, Text("self", 4, 32), device="cpu")
    told = json.loads(json.dumps(found.to_json()))
    assert told["tokens"] == found.tokens and Path(told["file"]) == found.text.file
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    windows = found.text.windows(tokenizer)
    assert [len(window) for window in windows] == [32] * 4
    assert found.tokens >= 4 * 32 and found.documents >= 4 and not found.was_complete
    texts = [json.loads(line)["text"] for line in found.text.file.read_text().splitlines()]
    assert len(texts) == found.documents and all(text.strip() for text in texts)
    assert all(text.lstrip()[0].isalpha() for text in texts)
    assert found.text == Text("self", 4, 32) and found.text.described() == Text("self", 4, 32).described()
    assert found.warnings == ()


def test_the_same_again_and_something_else(random_model, cache):
    def texts(**changes) -> Path:
        text = Text(**{"dataset": "self", "nsamples": 2, "seqlen": 16, "bos": "never"} | changes)
        return tilepress.sample(random_model, text).text.file

    first = texts()
    before = first.read_text()
    assert texts() == first and tilepress.sample(random_model, Text("self", 2, 16, bos="never")).was_complete
    for path in first.parent.iterdir():
        path.unlink()
    assert texts().read_text() == before  # drawn anew
    others = [texts(seed=1), texts(dataset="self:0.7"), texts(seqlen=20), texts(bos="always")]
    assert len({before, *(path.read_text() for path in others)}) == 5
    assert texts(dataset="self:1") == first


def test_more_text_goes_on_with_what_is_there_and_a_stopped_run_too(random_model, monkeypatch):
    monkeypatch.setitem(sampling.DOCUMENTS, "cpu", (2, 2))
    few = tilepress.sample(random_model, Text("self", 2, 16))
    rounds = sorted(few.text.file.parent.glob("round-*"))
    kept = {path: path.read_text() for path in rounds}
    more = tilepress.sample(random_model, Text("self", 8, 16))
    assert len(list(more.text.file.parent.glob("round-*"))) > len(rounds)
    assert all(path.read_text() == text for path, text in kept.items())
    assert more.text.file.read_text().startswith(few.text.file.read_text()) and few.text.file != more.text.file
    whole, last = more.text.file.read_text(), max(more.text.file.parent.glob("round-*"))
    last.unlink()
    more.text.file.unlink()
    written, real = [], sampling._Writer.round
    monkeypatch.setattr(
        sampling._Writer, "round", lambda self, number, ends: written.append(number) or real(self, number, ends)
    )
    assert tilepress.sample(random_model, Text("self", 8, 16)).text.file.read_text() == whole
    assert written == [int(last.stem.removeprefix("round-"))]


def test_other_text_goes_with_what_the_model_writes(random_model, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "one text"}\n{"text": "another"}\n')
    text = Text(f"self:0.9+{other}", 2, 16)
    assert text.temperature == 0.9 and text.beside == str(other) and Text("self").beside is None
    assert Text("a+b.jsonl").beside is None and Text("a+b.jsonl").temperature is None
    alone, both = (tilepress.sample(random_model, each) for each in (Text("self:0.9", 2, 16), text))
    lines = [json.loads(line)["text"] for line in both.text.file.read_text().splitlines()]
    own = [json.loads(line)["text"] for line in alone.text.file.read_text().splitlines()]
    assert lines[: len(own)] == own and sorted(lines[len(own) :]) == ["another", "one text"]
    assert both.was_complete and both.text.file != alone.text.file and both.text.dataset == text.dataset
    for wrong in ("self+", "self+random"):
        with pytest.raises(UsageError, match="names no text"):
            Text(wrong)
    with pytest.raises(UsageError, match="no file"):
        tilepress.sample(random_model, Text(f"self+{tmp_path / 'missing.jsonl'}", 2, 16))


def test_recovery_reads_other_text_beside_the_models_own(checkpoint_of, tmp_path, cli):
    base, other = checkpoint_of("llama"), tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "words of another text, " * 40}) + "\n")
    assert cli("compress", "prune", base, "-o", tmp_path / "pruned", "--sparsity", 0.5).code == 0
    words = ["compress", "recover", tmp_path / "pruned", "--base", base, "-o", tmp_path / "out", "--steps", 1]
    words += ["--batch", 1, "--seqlen", 16, "--nsamples", 4, "--device", "cpu", "--dataset"]
    ran = cli(*words, f"self+{other}")
    assert ran.code == 0, ran.err
    told = read_manifest(tmp_path / "out")
    assert told["settings"]["dataset"] == f"self+{other}" and told["recovery"]["text_tokens"] > 40 * 4
    wrong = cli(*words, f"self+{tmp_path}/missing.jsonl", "--overwrite")
    assert wrong.code == 2 and wrong.err.splitlines()[0] == f"error: no file {tmp_path}/missing.jsonl"


def test_tokens_come_from_the_models_own_distribution(random_model):
    """Tokens behind one first token, against the model's probabilities at that temperature: a chi-squared test."""
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    text = Text("self:0.1", 32, 16, bos="never")
    object.__setattr__(text, "seqlen", 2)  # one token is drawn
    writer = sampling._Writer(open_model(random_model), tokenizer, text, 32, "cpu", False)
    seen = Counter()
    writer._first, writer._document = lambda draws: 100, lambda ids: seen.update(ids[1:]) or {}
    for number in range(50):
        writer.round(number, ends=True)
    with torch.inference_mode():
        expected = 1600 * torch.softmax(writer.model(torch.tensor([[100]])).logits[0, -1].double() / 0.1, -1)
    likely = torch.nonzero(expected >= 8)[:, 0].tolist()
    assert len(likely) >= 10 and sum(seen.values()) == 1600
    observed, wanted = [seen[token] for token in likely], [float(expected[token]) for token in likely]
    assert chisquare([*observed, 1600 - sum(observed)], [*wanted, 1600 - sum(wanted)]).pvalue > 1e-3


def test_small_models_write_more_documents_at_once_on_a_card():
    smol = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
    large = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 32}
    found = [sampling._documents(config, 2048, "cuda") for config in (smol, large, {})]
    assert found == [128, 32, 32] and sampling._documents(smol, 8192, "cuda") == 32  # 360 MB a document
    assert sampling._documents(smol, 4096, "cuda") == 64 and sampling._documents(smol, 2048, "cpu") == 8


def test_another_model_writes_its_own(random_model, checkpoint_of):
    models = random_model, checkpoint_of("llama", hidden_size=64)
    one, other = (tilepress.sample(path, Text("self", 1, 16)).text.file for path in models)
    assert one.parent != other.parent


def test_a_model_that_ends_at_once_goes_on_without_its_end(tiny, bent, monkeypatch):
    def ends(head):
        head.bias[0] = 1e4  # <|endoftext|>

    monkeypatch.setattr(sampling, "load", bent(ends))
    found = tilepress.sample(tiny, Text("self", 4, 32))
    assert "ended within 16 tokens" in found.warnings[0] and found.tokens >= 4 * 32
    rows = rows_of(found)
    assert all(row["ended"] and row["tokens"] == 1 for row in rows[:4])
    assert not any(row["ended"] for row in rows[4:]) and all(row["tokens"] == 32 for row in rows[4:])


def test_a_model_that_repeats_itself_is_told_of(tiny, bent, monkeypatch, tmp_path, cli):
    def repeats(head):
        head.bias[300] = 1e4

    monkeypatch.setattr(sampling, "load", bent(repeats))
    ran = cli("compress", "quantize", tiny, "-o", tmp_path / "out", *WORDS)
    assert ran.code == 0, ran.err
    assert "warning: 4 of 4 sampled texts repeat themselves" in ran.err and "--dataset self:1.2" in ran.err
    assert (tmp_path / "out" / "tilepress.json").exists()


def test_a_model_that_writes_nothing_is_an_error(tiny, bent, monkeypatch):
    def nothing(head):
        head.bias[0] = 1e4

    monkeypatch.setattr(sampling, "load", bent(nothing))
    monkeypatch.setattr(sampling._Writer, "_first", lambda self, draws: 0)
    monkeypatch.setattr(sampling, "_ends_at_once", lambda rows: False)
    with pytest.raises(TilepressError, match="writes no text") as raised:
        tilepress.sample(tiny, Text("self", 1, 16))
    assert raised.value.hint


def test_the_command(random_model, tmp_path, cli, cache):
    ran = cli("compress", "quantize", random_model, "-o", tmp_path / "dry", *WORDS, "--dry-run")
    assert ran.code == 0 and not cache.exists()  # nothing is sampled for a plan
    ran = cli("compress", "quantize", random_model, "-o", tmp_path / "out", *WORDS)
    assert ran.code == 0 and "documents by" in ran.err, ran.err
    settings = read_manifest(tmp_path / "out")["settings"]
    assert settings["dataset"] == "self" and "file" not in settings
    assert "dataset self" in (tmp_path / "out" / "README.md").read_text()
    again = cli("compress", "quantize", random_model, "-o", tmp_path / "again", *WORDS)
    assert "sampled before" in again.err
    for name in (*(path.name for path in (tmp_path / "out").glob("*.safetensors")), "tilepress.json", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    resumed = cli("compress", "quantize", random_model, "-o", tmp_path / "out", *WORDS, "--resume")
    assert resumed.code == 0 and "complete already" in resumed.err


def test_recovery_reads_what_the_dense_model_writes(tiny, artifact, tmp_path, cli, monkeypatch):
    asked = []
    real = tilepress.sample
    monkeypatch.setattr(
        tilepress, "sample", lambda model, *a, **b: asked.append(model) or real(model, *a, **b), raising=False
    )
    words = ("--steps", 1, "--batch", 1, "--dataset", "self", "--nsamples", 3, "--seqlen", 16, "--device", "cpu")
    ran = cli("compress", "recover", artifact, "--base", tiny, "-o", tmp_path / "out", *words)
    assert ran.code == 0, ran.err
    assert asked == [str(tiny)]
    assert read_manifest(tmp_path / "out")["settings"]["dataset"] == "self"


def test_python_says_how(random_model, tmp_path):
    for call in (
        lambda: tilepress.compress(random_model, tmp_path / "out", Quantize(activations="tensor"), dataset="self"),
        lambda: tilepress.compress(
            random_model, tmp_path / "out", [tilepress.Prune(0.5), Quantize(activations="tensor")], dataset="self"
        ),
    ):
        with pytest.raises(UsageError, match="not written its text") as raised:
            call()
        assert "tilepress.sample(MODEL).text" in raised.value.hint and not (tmp_path / "out").exists()
    made = tilepress.compress(
        random_model,
        tmp_path / "out",
        Quantize(activations="tensor"),
        dataset=tilepress.sample(random_model, Text("self", 2, 32)).text,
    )
    assert made.details["settings"]["dataset"] == "self" and made.details["settings"]["nsamples"] == 2


def test_requests_that_make_no_sense(tiny):
    assert Text("self:0.8").temperature == 0.8 and Text("self").temperature == 1 and Text("selfish").temperature is None
    for dataset in ("self:hot", "self:0", "self:-1", "self:nan", "self:inf"):
        with pytest.raises(UsageError, match="no temperature"):
            Text(dataset)
    with pytest.raises(UsageError, match="no text that a model writes"):
        tilepress.sample(tiny, Text(str(demo.TEXT)))


@pytest.mark.parametrize("content", ["{oops", '{"text": 3}\n', "[" * 5000, "\xff"])
def test_a_damaged_round_is_written_again(random_model, content):
    found = tilepress.sample(random_model, Text("self", 2, 16))
    whole = found.text.file.read_text()
    path = min(found.text.file.parent.glob("round-*"))
    kept = path.read_text()
    path.write_text(content, encoding="latin-1")
    found.text.file.write_text("damaged too")
    again = tilepress.sample(random_model, Text("self", 2, 16))
    assert path.read_text() == kept and again.text.file.read_text() == whole and not again.was_complete


def test_a_model_whose_logits_are_no_numbers_is_told(bent, monkeypatch, tiny):
    monkeypatch.setattr(sampling, "load", bent(lambda head: head.bias.fill_(torch.nan)))
    with pytest.raises(TilepressError, match="cannot write text"):
        tilepress.sample(tiny, Text("self", 2, 16))
