"""Answers: those of plain transformers' generate, through the tokenizer's own template, streamed and told with their speed; two models side by side."""

import io
import json
import shutil
import signal
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tilepress
from tilepress import Chat, UsageError
from tilepress.models.families import FAMILIES

PROMPT = "Once upon a time"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def templated(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("templated") / "tiny"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def plain(path, ids: list[int], count: int) -> list[int]:
    """Return what transformers' own generate adds, greedily, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return rows[0, len(ids) :].tolist()


def test_an_answer_is_that_of_plain_generate(tiny):
    tokenizer, pieces = AutoTokenizer.from_pretrained(tiny), []
    ids = tokenizer(PROMPT)["input_ids"]
    found = tilepress.generate(tiny, PROMPT, new_tokens=12, device="cpu", on_text=pieces.append)
    answer = found.answer
    assert list(answer.prompt_ids) == ids and list(answer.ids) == plain(tiny, ids, 12)
    assert "".join(pieces) == answer.text == tokenizer.decode(answer.ids) and len(pieces) > 1
    assert answer.tokens == 12 and not answer.ended and not found.templated and found.decoded_by == "the lean pass"
    assert 0 < answer.first_token_s < answer.seconds and answer.tokens_per_s > 0
    assert json.loads(json.dumps(found.to_json()))["paths"] == {"torch linear on cpu": 29}


def test_a_seed_decides_what_is_drawn_and_a_temperature_whether(tiny):
    talk = Chat(tiny, device="cpu")
    ids = talk._ids(PROMPT)
    drawn = [talk.continued(ids, new_tokens=16, temperature=1.0, seed=seed).ids for seed in (0, 0, 1)]
    greedy = [talk.continued(ids, new_tokens=16, temperature=0, seed=seed).ids for seed in (0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and greedy[0] == greedy[1] == tuple(plain(tiny, ids, 16))
    before = torch.get_rng_state()
    talk.continued(ids, new_tokens=2, temperature=1.0, top_p=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_a_conversation_goes_through_the_template(templated):
    talk = Chat(templated, device="cpu", system="Be brief.")
    first = talk.say("Hello", new_tokens=4, temperature=0)
    second = talk.say("And now?", new_tokens=4, temperature=0)
    written = f"[system] Be brief.\n[user] Hello\n[assistant] {first.text}\n[user] And now?\n[assistant] "
    assert list(second.prompt_ids) == AutoTokenizer.from_pretrained(templated)(written)["input_ids"]
    assert list(second.ids) == plain(templated, list(second.prompt_ids), 4)
    talk.clear()
    assert talk.say("Hello", new_tokens=4, temperature=0).ids == first.ids
    assert not Chat(templated, device="cpu", raw=True).templated


def test_an_answer_ends_where_the_model_says_so(tiny):
    talk = Chat(tiny, device="cpu")
    ids = talk._ids(PROMPT)
    third = talk.continued(ids, new_tokens=8, temperature=0).ids[2]
    talk.model.generation_config.eos_token_id = third
    answer = talk.continued(ids, new_tokens=8, temperature=0)
    assert answer.ended and answer.ids[-1] == third and answer.tokens <= 3


def test_artifacts_answer_too(artifact, made, tiny):
    found = tilepress.generate(artifact, PROMPT, new_tokens=4, device="cpu")
    assert any("tiled_csl" in path for path in found.paths)
    cached = tilepress.generate(made("llama", "int8+kv4"), "ab", new_tokens=4, device="cpu")
    assert cached.answer.tokens == 4 and any("w8a8" in path for path in cached.paths)


def test_prompts_that_cannot_be_answered(checkpoint_of, tiny):
    small = checkpoint_of("llama", max_position_embeddings=16)
    with pytest.raises(UsageError, match="positions for 16"):
        tilepress.generate(small, "a b c d e f g h i j k l m n o p q r s t", device="cpu")
    assert tilepress.generate(small, "ab", device="cpu", temperature=0).answer.tokens <= 15
    for options, message in (
        ({"prompt": " \n"}, "empty"),
        ({"new_tokens": 0}, "nothing to say"),
        ({"temperature": -1.0}, "cannot be"),
        ({"temperature": float("nan")}, "cannot be"),
        ({"temperature": 0.0, "top_p": 0.5}, "needs sampling"),
        ({"temperature": 1.0, "top_p": 2.0}, "share above 0"),
        ({"system": "Be brief."}, "no system message"),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            tilepress.generate(tiny, **{"prompt": PROMPT, "device": "cpu"} | options)
        assert raised.value.hint


def test_generate_prints_the_text_alone(tiny, cli, monkeypatch):
    words = ("generate", tiny, "--new-tokens", 6, "--device", "cpu")
    ran = cli(*words[:2], PROMPT, *words[2:])
    told = tilepress.generate(tiny, PROMPT, new_tokens=6, device="cpu")
    assert ran.out == told.answer.text + "\n" and "6 tokens (as many as were allowed)" in ran.err
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    again = cli(*words[:2], "-", *words[2:], "--json")
    assert again.json["text"] == told.answer.text and again.json["prompt"] == PROMPT and again.err == ""
    for wrong in (("",), (PROMPT, "--top-p", "0.5"), (PROMPT, "--new-tokens", "0"), (PROMPT, "--dtype", "int3")):
        refused = cli(*words[:2], *wrong)
        assert refused.code == 2 and refused.out == "" and refused.err.count("\n") == 2, refused.err


def test_chat_reads_lines_and_answers_each(templated, cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\n/clear\nHello\nAnd now?\n/exit\nnever read\n"))
    ran = cli("chat", templated, "--new-tokens", 4, "--temperature", 0, "--device", "cpu")
    talk = Chat(templated, device="cpu")
    answers = [talk.say(line, new_tokens=4, temperature=0).text for line in ("Hello", "And now?")]
    assert ran.code == 0 and ran.out == f"{answers[0]}\n{answers[0]}\n{answers[1]}\n"
    assert ran.err.count(" tokens") == 3 and "its chat template" in ran.err


def test_a_stopped_answer_ends_no_conversation(templated, cli, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    real, calls = Chat.say, []

    def say(self, text, **how):
        calls.append(text)
        if len(calls) < 3:
            raise KeyboardInterrupt(signal.SIGINT) if len(calls) == 1 else UsageError("too long", "shorten it")
        return real(self, text, **how)

    monkeypatch.setattr(Chat, "say", say)
    monkeypatch.setattr(sys, "stdin", Terminal("one\ntwo\nthree\n"))
    ran = cli("chat", templated, "--new-tokens", 2, "--device", "cpu")
    assert ran.code == 0 and calls == ["one", "two", "three"] and "stopped" in ran.err
    assert "error: too long\nhint: shorten it" in ran.err and "2 tokens" in ran.err
    monkeypatch.setattr(Chat, "say", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt(signal.SIGTERM)))
    monkeypatch.setattr(sys, "stdin", Terminal("one\n"))
    assert cli("chat", templated, "--device", "cpu").code != 0


def test_two_models_side_by_side(tiny, artifact):
    found = tilepress.compare(tiny, artifact, [PROMPT, "Water"], new_tokens=6, device="cpu")
    dense = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    sparse, tokenizer = tilepress.load(artifact, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)
    sums, count = 0.0, 0
    for pair in found.pairs:
        ids = tokenizer(pair.prompt)["input_ids"]
        ours, theirs = plain(tiny, ids, 6), sparse.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
        theirs = theirs[0, len(ids) :].tolist()
        assert pair.of_a == tokenizer.decode(ours) and pair.of_b == tokenizer.decode(theirs) and pair.tokens == 6
        assert (
            ours[: pair.alike] == theirs[: pair.alike]
            and (ours[pair.alike :] or [0])[0] != (theirs[pair.alike :] or [1])[0]
        )
        with torch.inference_mode():
            p, q = (m(torch.tensor([ids + ours])).logits[0, len(ids) - 1 : -1].double() for m in (dense, sparse))
        kl = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
        assert pair.kl_divergence == pytest.approx(float(kl.mean()), rel=1e-3)
        assert pair.same_top == float((p.argmax(-1) == q.argmax(-1)).double().mean())
        sums, count = sums + float(kl.sum()), count + len(ours)
    assert found.distance.kl_divergence["mean"] == pytest.approx(sums / count, rel=1e-3)


def test_compare_says_what_it_found(tiny, artifact, checkpoint_of, cli, tmp_path):
    words = ("compare", tiny, artifact, "--prompt", PROMPT, "--new-tokens", 4, "--device", "cpu")
    ran = cli(*words, "-o", tmp_path / "compared.json")
    told = json.loads((tmp_path / "compared.json").read_text())
    assert ran.code == 0 and f"> {PROMPT}" in ran.out and "same top token" in ran.out
    assert told["pairs"][0]["of_a"].split("\n")[0] in ran.out and len(told["pairs"]) == 1
    other = cli("compare", tiny, checkpoint_of("llama"), "--device", "cpu")
    assert other.code == 2 and "vocabularies of 4096 and 300" in other.err and other.err.count("\n") == 2
    itself = cli("compare", tiny, tiny, "--prompt", PROMPT, "--new-tokens", 4, "--device", "cpu", "--json").json
    assert itself["distance"]["kl_divergence"]["mean"] == 0 and itself["pairs"][0]["alike"] == 4


def test_models_shows_every_family(cli):
    ran, facts = cli("models"), cli("models", "--json").json
    assert [one["model_type"] for one in facts] == [family.model_type for family in FAMILIES]
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines()[1 : len(FAMILIES) + 1]}
    assert rows["llama"][1:7] == ["yes"] * 5 + ["-"] and rows["gptj"][1:7] == ["-"] * 6
    assert rows["mixtral"][6] == "yes" and "RoPE that turns neighbours" in ran.out
