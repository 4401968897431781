"""What is changed in transformers: only for the calls that it is meant for."""

import sys

import torch

import tilepress
from tilepress.runtime.hf import hooks


def test_only_our_own_callable_gets_more(checkpoint_of):
    """transformers keeps streamers, tokenizers and assistants from callables."""
    model = tilepress.load(checkpoint_of("llama"), dtype=torch.float32)
    seen = {}

    def ours(model, input_ids, streamer=None, tokenizer=None, assistant_model=None, **given):
        seen["ours"] = given | {"streamer": streamer, "tokenizer": tokenizer, "assistant_model": assistant_model}
        return input_ids

    def theirs(model, input_ids, streamer=None, **given):
        seen["theirs"] = given | {"streamer": streamer}
        return input_ids

    class Heard:
        def put(self, tokens):
            pass

    hooks.hand_over(ours)
    heard, words = Heard(), object()
    for function in (ours, theirs):
        options = {"streamer": heard, "tokenizer": words, "max_new_tokens": 2}
        model.generate(torch.tensor([[1, 2]]), custom_generate=function, **options)
    assert seen["ours"]["streamer"] is heard and seen["ours"]["tokenizer"] is words
    assert seen["ours"]["assistant_model"] is None and "logits_processor" in seen["ours"]
    assert seen["theirs"]["streamer"] is None and "tokenizer" not in seen["theirs"]
    plain = model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert plain.shape == (1, 4)


def test_after_import_waits_for_the_module(tmp_path, monkeypatch):
    (tmp_path / "made_up_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    hooks.after_import("made_up_late", lambda module: seen.append(module.value))
    finders = len(sys.meta_path)
    assert seen == []
    import made_up_late

    assert seen == [1] and len(sys.meta_path) == finders - 1
    hooks.after_import("made_up_late", lambda module: seen.append(module))
    assert seen == [1, made_up_late]
