"""Multiple choice: each ending scored alone here, by transformers' own tokenizer call and a plain forward pass, against what the command says."""

import json
import math
import random

import numpy as np
import pytest
import torch
from support.artifacts import few_words, run_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

import tilepress
from tilepress import KVCache, demo
from tilepress.eval import harness
from tilepress.eval.tasks import TASKS, _recovery, answers
from tilepress.formats import UsageError
from tilepress.text import documents


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Items of pieces of text, some endings not in ASCII, of very different lengths."""
    words, random_order = " ".join(documents(str(demo.TEXT))).split(), random.Random(0)
    items = []
    for number in range(10):
        at = random_order.randrange(len(words) - 100)
        choices = [" ".join(words[at + 12 : at + 15 + number % 3])]
        for _ in range(3):
            wrong = random_order.randrange(len(words) - 100)
            choices.append(" ".join(words[wrong : wrong + 1 + random_order.randrange(9)]))
        if number % 4 == 0:
            choices[1] = "größer, ja " + choices[1]
        order = random_order.sample(range(4), 4)
        items.append(
            {
                "query": " ".join(words[at : at + 12]) + " " * (number % 3),
                "choices": [choices[i] for i in order],
                "gold": order.index(0),
            }
        )
    path = tmp_path_factory.mktemp("tasks") / "hellaswag.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def answered(model, tokenizer, items: list[dict], start: list[int]) -> np.ndarray:
    """Return whether each item is answered rightly, [items, 3]: by log-likelihood, by that of a character, of a byte."""
    found = []
    for item in items:
        scores = []
        for choice in item["choices"]:
            context, spaces = item["query"].rstrip(), len(item["query"]) - len(item["query"].rstrip())
            whole = tokenizer(context + " " * spaces + " " + choice, add_special_tokens=False)["input_ids"]
            own = len(tokenizer(context, add_special_tokens=False)["input_ids"])
            with torch.inference_mode():
                logits = model(torch.tensor([start + whole])).logits[0].double()
            logp = torch.log_softmax(logits, -1)
            places = range(len(start) + own, len(start) + len(whole))
            likely = sum(float(logp[at - 1, (start + whole)[at]]) for at in places)
            scores.append((likely, likely / len(choice), likely / len(choice.encode("utf-8"))))
        found.append([int(np.argmax(column)) == item["gold"] for column in zip(*scores, strict=True)])
    return np.array(found)


@pytest.mark.parametrize(("source", "bos"), [("tiny", "auto"), ("llama", "auto"), ("llama", "never")])
def test_scores_against_each_ending_alone(source, bos, tiny, checkpoint_of, questions):
    path = tiny if source == "tiny" else checkpoint_of(source)
    items = [json.loads(line) for line in questions.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(path)
    start = [0] if (source, bos) == ("llama", "auto") else []
    expected = answered(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer, items, start)
    questions_read = [TASKS["hellaswag"].read(item) for item in items]
    model = tilepress.load(path, dtype=torch.float32)
    assert answers(model, tokenizer, questions_read, start).tolist() == expected.tolist()
    found = tilepress.tasks(path, dataset=questions, bos=bos, device="cpu", dtype=torch.float32).to_json()
    scores = found["results"]["hellaswag"]
    for name, column in zip(("acc", "acc_norm", "acc_bytes"), expected.T, strict=True):
        share = column.mean()
        assert scores[name] == pytest.approx(share)
        assert scores[f"{name}_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (len(column) - 1)))
    assert scores["items"] == 10 and found["protocol"]["window_start"] == (["<s>"] if start else [])
    if source == "tiny":
        assert len({tuple(column) for column in expected.T}) > 1  # the metrics differ on these items
        assert scores["acc"] > 0.3  # and the model knows more than chance does


def test_beside_a_base(tiny, artifact, questions):
    found = tilepress.tasks(artifact, dataset=questions, base=tiny, device="cpu", dtype=torch.float32)
    items = [json.loads(line) for line in questions.read_text().splitlines()]
    tokenizer, read = AutoTokenizer.from_pretrained(tiny), [TASKS["hellaswag"].read(item) for item in items]
    ours, theirs = (
        answers(tilepress.load(path, dtype=torch.float32), tokenizer, read, [])[:, 1] for path in (artifact, tiny)
    )
    told, differences = found.results[0], ours.astype(float) - theirs.astype(float)
    assert told.base.acc_norm == theirs.mean() and told.acc_norm == ours.mean()
    assert told.acc_norm_change == pytest.approx(differences.mean())
    assert told.acc_norm_change_stderr == pytest.approx(differences.std(ddof=1) / math.sqrt(10))
    assert told.flips == np.abs(differences).mean()


def test_a_calibrated_cache_is_simulated(tiny, questions, tmp_path):
    run_recipe(KVCache(), tiny, tmp_path / "out", text=few_words(4, 64))
    found = tilepress.tasks(tmp_path / "out", dataset=questions, limit=2, device="cpu")
    assert any("kv" in path or "attention" in path for path in found.paths)


def test_published_rows_become_the_usual_items():
    row = {
        "activity_label": "Baking",
        "ctx_a": "A man opens[substeps] an oven [title] He waits.",
        "ctx_b": "he then",
        "endings": ["takes  it out. [step] ", "leaves."],
        "label": "1",
    }
    item = TASKS["hellaswag"].read(row)
    assert item.context == "Baking: A man opens an oven. He waits. He then"
    assert item.choices == ("takes it out. ", "leaves.") and item.gold == 1


def test_the_command(tiny, questions, cli):
    words = ("eval", "tasks", tiny, "--dataset", questions, "--limit", 3, "--device", "cpu", "--dtype", "float32")
    found = cli(*words, "--json").json
    assert {"acc_norm", "acc_norm_stderr"} <= set(found["results"]["hellaswag"])
    ran = cli(*words, "--base", tiny)
    assert ran.code == 0 and "quick: at most 3 items" in ran.out and "acc_norm" in ran.out
    assert "flips" in ran.out and "ran 29 layers by torch linear on cpu" in ran.out


def test_requests_that_make_no_sense(tiny, questions, tmp_path, cli, monkeypatch):
    (tmp_path / "other.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "gold.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "gold": 2}\n')
    (tmp_path / "nested.jsonl").write_text('{"query": "a", "choices": ["b", ["c"]], "gold": 0}\n')
    (tmp_path / "empty.jsonl").write_text("")
    for options, message in (
        ({"tasks": ["arc"], "dataset": questions}, "--dataset is for our own"),
        ({"fewshot": -1}, "--fewshot -1"),
        ({"tasks": []}, "unknown"),
        ({"tasks": ["hellaswag"] * 2, "dataset": questions}, "items of one task"),
        ({"limit": 0, "dataset": questions}, "nothing to answer"),
        ({"dataset": tmp_path / "other.jsonl"}, "row 1 of .* is no item of hellaswag; its columns are text"),
        ({"dataset": tmp_path / "gold.jsonl"}, "no item"),
        ({"dataset": tmp_path / "nested.jsonl"}, "no item"),
        ({"dataset": tmp_path / "empty.jsonl"}, "no rows"),
        ({"dataset": tmp_path / "missing.jsonl"}, "no file"),
        ({"dataset": questions, "bos": "maybe"}, "unknown"),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            tilepress.tasks(tiny, **options)
        assert raised.value.hint
    for words in (("--min-recovery", "99%"), ("--min-recovery", "200", "--base", tiny), ("--tasks", "gone.yaml")):
        ran = cli("eval", "tasks", tiny, *words)
        assert ran.code == 2 and ran.err.count("\n") == 2 and ran.out == "", ran.err
    with monkeypatch.context() as without:
        without.setattr(harness, "find_spec", lambda name: None)
        ran = cli("eval", "tasks", tiny, "--tasks", "arc_easy,hellaswag")
        assert ran.code == 2 and "'./tilepress[tasks]'" in ran.err and ran.err.count("\n") == 2


@pytest.fixture
def task_file(questions, tmp_path):
    """The questions as a task of lm-evaluation-harness."""
    lines = ["task: asked", "dataset_path: json", "dataset_kwargs:", f"  data_files: {questions}", "test_split: train"]
    lines += ["output_type: multiple_choice", 'doc_to_text: "{{query}}"', 'doc_to_target: "{{gold}}"']
    lines += ['doc_to_choice: "choices"', "metric_list:", *(f"  - metric: {name}" for name in ("acc", "acc_norm"))]
    (tmp_path / "asked.yaml").write_text("\n".join(lines) + "\n")
    return tmp_path / "asked.yaml"


def test_the_harness_scores_as_we_do(tiny, artifact, questions, task_file, cli):
    pytest.importorskip("lm_eval")
    options = {"base": tiny, "device": "cpu", "dtype": torch.float32}
    ours = tilepress.tasks(artifact, dataset=questions, **options)
    found = tilepress.tasks(artifact, [str(task_file)], **options)
    (theirs,), (mine,) = found.results, ours.results
    assert theirs.task == "asked" and theirs.items == 10 and theirs.main == "acc_norm"
    for name in ("acc", "acc_norm"):
        assert theirs.scores[name] == pytest.approx((getattr(mine, name), getattr(mine, f"{name}_stderr")))
        assert theirs.base[name] == pytest.approx((getattr(mine.base, name), getattr(mine.base, f"{name}_stderr")))
    assert (theirs.recovery, theirs.recovery_stderr) == pytest.approx((mine.recovery, mine.recovery_stderr))
    assert found.recovery[0] == pytest.approx(theirs.scores["acc_norm"][0] / theirs.base["acc_norm"][0])
    words = ("eval", "tasks", artifact, "--tasks", task_file, "--base", tiny, "--device", "cpu", "--dtype", "float32")
    quick = cli(*words, "--min-recovery", "100000%", "--limit", 8)
    assert quick.code == 3 and "check failed" in quick.err and "quick: at most 8 items" in quick.out
    assert "recovery over tasks" in quick.out and "acc_norm" in quick.out


def test_the_error_of_a_recovery_is_that_of_its_spread():
    """Against thousands of draws of the same two kinds of answers."""
    draws = np.random.default_rng(0)
    base = draws.random((4000, 200)) < 0.6
    own = np.where(draws.random(base.shape) < 0.9, base, draws.random(base.shape) < 0.3).astype(float)
    found = [_recovery(*pair) for pair in zip(own[:200], base[:200].astype(float), strict=True)]
    spread = (own.mean(1) / base.mean(1)).std()
    assert np.mean([error for _, error in found]) == pytest.approx(spread, rel=0.1)
    assert _recovery(own[0], np.zeros(200)) == (None, None) and _recovery(base[0] * 1.0, base[0] * 1.0) == (1.0, 0.0)
