"""Attention modules that append to the paged cache by one op, tilepress::rope_append, in place of their own norms and RoPE and `Cache.update`.

    hidden states -> q_proj, k_proj, v_proj -> rope_append -> one position: decode_attention | several: kv_read, SDPA -> o_proj

`install` gives another forward to modules of classes whose family's entry (models/families.py) says that they compute that, nothing else. It serves
the passes that keep a paged cache; any other pass runs the class's own forward. Projections are called as modules: whatever was put in their place
serves too, such as the slices of a merged INT8 projection (int8_layers.py), and biases stay with them.

The rows in the pages are to the bit those of the class's own forward, with norms of queries and keys up to the rounding of their sums. At one position
the query comes with the keys' scale and rotation, rounded to its dtype once more.
"""

from types import MethodType

import torch
from torch import Tensor, nn

from tilepress.kernels.kv_cache import KINDS
from tilepress.models.attention import Scores
from tilepress.models.families import RMS, family_of, heads_of
from tilepress.runtime.attention import Rope
from tilepress.runtime.hf.subclasses import change_forward


def install(model: nn.Module) -> None:
    """Change the attention modules of known classes. Called once, by the paged cache's own install."""
    for module in list(model.modules()):
        if _fits(module):
            module.family = family_of(module, "attention")
            change_forward(module, forward, "Fused")
            if "_old_forward" in vars(module):  # accelerate's hooks call what was the forward when they came
                module._old_forward = MethodType(forward, module)


def modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `install` changed."""
    return [module for module in model.modules() if type(module).forward is forward]


def _fits(attention: nn.Module) -> bool:
    kind, family = type(attention), family_of(attention, "attention")
    if family is None or not family.fused_attention or family.why_not(attention.config) is not None:
        return False
    replaced = "forward" in vars(attention)
    if "_old_forward" in vars(attention):  # where accelerate's hooks keep what they found
        replaced = getattr(attention._old_forward, "__func__", None) is not kind.forward
    norms = [getattr(attention, name) for name in family.names.head_norms]
    replaced |= any("forward" in vars(norm) and "_old_forward" not in vars(norm) for norm in norms)
    # Their weights are read here, without the hooks of their modules: offloaded ones are elsewhere.
    plain = all(type(norm).__module__ == kind.__module__ and not norm.weight.is_meta for norm in norms)
    return not replaced and plain and (family.norm != RMS or len({norm.variance_epsilon for norm in norms}) <= 1)


def forward(
    self,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values=None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Return what the output projection gives, and None in place of attention weights.

    hidden_states are [batch, positions, hidden size], or what takes its place for the projections; position_embeddings are cos and sin
    [batch or 1, positions, rotary], their halves alike."""
    cache = self.kv_state.current
    if cache is None or cache is not past_key_values or not _serves(hidden_states, cache):
        return self.stock_forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
    names, norms = self.family.names, [getattr(self, name) for name in self.family.names.head_norms]
    projected = [getattr(self, name)(hidden_states) for name in names.qkv]
    if len(projected) == 1:
        heads = heads_of(self.config)
        projected = projected[0].split([n * self.head_dim for n in (heads.count, heads.kv_count, heads.kv_count)], -1)
    query, key, value = (x.view(*hidden_states.shape[:2], -1, self.head_dim) for x in projected)
    if self.family.norm != RMS and norms:  # the op rounds before the product: theirs run by their own modules
        (query, key), norms = [norm(x) for norm, x in zip(norms, (query, key), strict=True)], []
    cos, sin = (x[..., : x.shape[-1] // 2] for x in position_embeddings)
    rope = Rope(cos, sin, tuple(norm.weight for norm in norms), norms[0].variance_epsilon) if norms else Rope(cos, sin)
    scores = Scores.of(self, self.family)
    folded = query.shape[1] == 1 and not scores.absolute
    query = cache.rope_append(self.layer_idx, query, key, value, rope, folded)
    out = cache.attend(self.layer_idx, query.transpose(1, 2), self.scaling, folded, scores)
    return getattr(self, names.out)(out.flatten(2)), None


def _serves(hidden_states: Tensor, cache) -> bool:
    """Return whether the op serves a pass: it has no gradients (`Cache.update` refuses them), and takes one dtype,
    which autocast mixes.
    """
    trains = cache.trains() and torch.is_grad_enabled()
    return hidden_states.dtype in KINDS and not trains and not torch.is_autocast_enabled(hidden_states.device.type)
