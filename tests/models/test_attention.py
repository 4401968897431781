"""What scores become, against the attention that transformers' own classes write out."""

import pytest
import torch
import transformers
from support.families import FAMILIES
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from tilepress.models import attention
from tilepress.models.attention import Scores, attend, unserved
from tilepress.models.families import family_of


class _Module(torch.nn.Module):
    """What transformers' functions ask of an attention module: two query heads share a KV head."""

    num_key_value_groups, training = 2, False

    def __init__(self, sinks=None):
        super().__init__()
        self.sinks = sinks


@pytest.mark.parametrize("at_once", [1, 500, 1 << 22])
@pytest.mark.parametrize("rows,tokens", [(9, 9), (4, 9), (1, 9)])
def test_written_out_scores_are_transformers(monkeypatch, at_once, rows, tokens):
    """However many queries are written out at once, with a mask and without one."""
    monkeypatch.setattr(attention, "_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, *size, 16, generator=generator) for size in ((4, rows), (2, tokens), (2, tokens))
    )
    sinks = torch.randn(4, generator=generator)
    mask = torch.ones(rows, tokens).tril(tokens - rows).bool() & torch.ones(rows, tokens).triu(tokens - rows - 5).bool()
    mask = mask.expand(2, 1, rows, tokens).clone()
    mask[1, :, 1:, :2] = False  # padding
    added = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    capped = modeling_gemma2.eager_attention_forward(_Module(), query, key, value, added, scaling=0.7, softcap=1.5)[0]
    found = attend(query, key, value, mask, 0.7, Scores(softcap=1.5))
    torch.testing.assert_close(found.transpose(1, 2), capped)
    sunk = modeling_gpt_oss.eager_attention_forward(_Module(sinks), query, key, value, added, scaling=0.7)[0]
    found = attend(query, key, value, mask, 0.7, Scores(sinks=sinks))
    torch.testing.assert_close(found.transpose(1, 2), sunk)
    if rows in (1, tokens):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=rows > 1, scale=0.7, enable_gqa=True
        )
        torch.testing.assert_close(attend(query, key, value, None, 0.7, Scores()), expected)


@pytest.mark.parametrize("name", ["gemma2", "mistral", "gemma3", "qwen3", "qwen3-windows"])
def test_an_entry_says_what_the_module_asks_for(monkeypatch, name):
    """Before a pass, from a layer's attributes: what it hands to the attention function then."""
    kind, settings = FAMILIES[name.partition("-")[0]]
    if name == "qwen3-windows":
        settings = settings | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model, asked = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings)).eval(), []

    def watch(module, query, key, value, mask, **given):
        asked.append((module, Scores.asked(given)))
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register("watched", watch)
    model.set_attn_implementation("watched")
    model(torch.arange(5)[None])
    windows = {layer.self_attn: attention.window_of(layer.self_attn) for layer in model.model.layers}
    assert len(asked) == len(windows) == 2
    for module, scores in asked:
        assert Scores.of(module, family_of(module, "attention")) == scores and windows[module] == scores.window
    assert any(windows.values()) == (name != "qwen3")


def test_what_nothing_computes_is_named():
    mask = torch.zeros(1, 1, 2, 2)
    assert (
        unserved(mask, {}) == "a mask of its own"
        and unserved(mask.bool(), {"sliding_window": 4, "softcap": 2.0}) is None
    )
    assert (
        unserved(None, {"position_bias": mask}) == "position_bias" and unserved(None, {"position_bias": None}) is None
    )
