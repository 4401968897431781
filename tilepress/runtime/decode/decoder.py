"""A lean forward pass for decoding, over the modules of a loaded transformers model whose family's entry says that it serves, dense or compressed.

    tokens -> embedding -> [ + residual, norm -> q k v -> RoPE, append, attention -> o -> + residual, norm -> MLP ] ... -> norm -> output head

Every arrow between two products is one kernel where our ops compute it (runtime/linear/between.py). q, k and v are one product, and so are a gate and
what it gates (runtime/linear/merged.py); a sum with the residual is taken by the norm that follows it, also from one layer to the next. Dense and
compressed models run the same pass, so that they can be compared.

Tokens of a pass are rows: one of each sequence in decoding, a piece of one sequence in prefill. Where rows go, and what they attend to, is the cache's
business (runtime/decode/cache.py). Roundings are those of the model's own modules.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from tilepress.kernels.arch import Path
from tilepress.models.attention import Scores
from tilepress.models.families import HALVES, LEARNED, RMS_PLUS_ONE, Family, family_of, heads_of, part
from tilepress.runtime.half import fast_products
from tilepress.runtime.linear.between import Activation, Norm, quantizes_by, takes_codes
from tilepress.runtime.linear.merged import merge
from tilepress.runtime.linear.packed import PackedLinear

_CHANGING_ROPE = ("dynamic", "longrope")  # whose frequencies depend on the length


def why_not(model: nn.Module, max_len: int) -> str | None:
    """Why a model must run by its own forward pass for sequences of up to `max_len` tokens, or None."""
    family = family_of(model, "model")
    if family is None or not family.decodes:
        limits = f" ({family.limits})" if family is not None else ""
        return f"no lean pass for {type(model).__name__}{limits}"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "accelerate moves its tensors"
    if any("forward" in vars(module) or _own_hooks(module) for module in model.modules()):
        return "its modules have hooks, or a forward of their own"
    if len({tensor.device for tensor in (*model.parameters(), *model.buffers())}) > 1:
        return "it lies on several devices"
    config, body = model.config, part(model, family.names.body)
    if (otherwise := family.why_not(config)) is not None:
        return f"{type(model).__name__} with {otherwise}"
    if part(body, family.names.final_norm) is None or any(part(body, name) is not None for name in family.absent):
        return f"{type(model).__name__} with other parts before or behind its layers"
    if family.positions == HALVES and (kinds := set(_rope_types(body).values()) & set(_CHANGING_ROPE)):
        return f"{min(kinds)} RoPE"
    return None


def _own_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of the user: the pass does not call every module. Those of transformers only record."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not str(hook.__module__).startswith(("transformers.", "tilepress.")) for hook in hooks)


def _rope_types(body: nn.Module) -> dict[str | None, str]:
    """The kind of RoPE of each kind of layer; of all layers, under None, where they share one."""
    kinds = body.rotary_emb.rope_type
    return kinds if isinstance(kinds, dict) else {None: kinds}


def most_positions(model: nn.Module) -> int | None:
    """Positions that a model has embeddings for; None where they are rotations, which have no end."""
    if any(name.endswith("rotary_emb") for name, _ in model.named_modules()):
        return None
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention_norm: Norm
    qkv: nn.Module
    sizes: tuple[int, int, int]  # columns of q, k and v
    own_norms: tuple[nn.Module, ...]  # of queries and keys, over a head, where no op computes them
    head_norms: tuple[Tensor | None, Tensor | None]  # weights of those that ops compute
    head_eps: float
    turns: str | None  # which of the decoder's cosines and sines are this layer's
    scale: float  # of scores
    scores: Scores  # what else becomes of them
    out: nn.Module
    after_attention: nn.Module | None  # a norm of what attention gives
    mlp_norm: Norm
    inner: nn.Module  # gate and up, or the first of two
    activation: Activation
    outer: nn.Module
    after_mlp: nn.Module | None  # a norm of what the MLP gives

    @classmethod
    def of(
        cls, layer: nn.Module, family: Family, sizes: tuple[int, int, int], kinds: Iterable[str | None], max_len: int
    ) -> "Layer":
        """A decoder layer of a family, with what has one input merged; `kinds` of layers have cosines and sines of their own, and windows of `max_len` tokens
        are none."""
        names, attention = family.names, part(layer, family.names.attention)
        kind = getattr(attention, "layer_type", None)
        norms = [getattr(attention, name) for name in names.head_norms]
        own = family.norm == RMS_PLUS_ONE
        qkv, inner = part(layer, names.merged_qkv), part(layer, names.merged_inner)
        scores = Scores.of(attention, family)
        return cls(
            attention_norm=Norm(part(layer, names.input_norm), family.norm),
            qkv=qkv or merge([getattr(attention, name) for name in names.qkv]),
            sizes=sizes,
            own_norms=tuple(norms) if own else (),
            head_norms=(None, None) if own or not norms else tuple(norm.weight for norm in norms),
            head_eps=0.0 if own or not norms else norms[0].variance_epsilon,
            turns=kind if kind in kinds else None,
            scale=attention.scaling,
            scores=scores if scores.window < max_len else scores._replace(window=0),
            out=getattr(attention, names.out),
            after_attention=names.after_attention and part(layer, names.after_attention),
            mlp_norm=Norm(part(layer, names.mlp_norm), family.norm),
            inner=inner or merge([part(layer, path) for path in names.inner]),
            activation=Activation.of(layer, family),
            outer=part(layer, names.outer),
            after_mlp=names.after_mlp and part(layer, names.after_mlp),
        )

    def forward(self, x: Tensor, residual: Tensor | None, attend: Callable[..., Tensor], number: int):
        """What the layer adds, and the sum of all before: both [rows, hidden]."""
        qkv, residual = self.attention_norm.into(self.qkv, x, residual)
        query, key, value = qkv.split(self.sizes, -1)
        out = self.out(attend(self, number, query, key, value))
        out = out if self.after_attention is None else self.after_attention(out)
        inner, residual = self.mlp_norm.into(self.inner, out, residual)
        out = self.activation.into(self.outer, inner)
        return out if self.after_mlp is None else self.after_mlp(out), residual

    def paths(self, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
        """Which implementations serve its norms and its activation; what attention gives stands between nothing."""
        own = [x for x in (*self.own_norms, self.after_attention, self.after_mlp) if x is not None]
        yield from (f"torch norm on {device.type}" for _ in own)
        yield from self.attention_norm.paths(self.qkv, device, dtype)
        yield from self.mlp_norm.paths(self.inner, device, dtype)
        yield from self.activation.paths(self.outer, device, dtype)
        if takes_codes(self.out):
            yield quantizes_by(self.out, self.out.in_features, device, dtype)


def _alone(linear: nn.Module) -> Iterator[nn.Module]:
    """The layers that it is made of."""
    for inner in getattr(linear, "linears", []):
        yield from _alone(inner)
    if not hasattr(linear, "linears"):
        yield linear


class Decoder:
    """The pass over a model; `max_len` bounds positions. Raises ValueError where `why_not` has an answer."""

    def __init__(self, model: nn.Module, max_len: int):
        if (why := why_not(model, max_len)) is not None:
            raise ValueError(why)
        self.model, self.lm_head = model, model.lm_head
        self.device, self.dtype = next(model.parameters()).device, model.dtype
        self.heads, self.kv_heads, self.head_dim = heads_of(model.config)
        family = family_of(model, "model")
        names, body = family.names, part(model, family.names.body)
        sizes = tuple(heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads))
        with torch.no_grad():  # not inference mode: the model can be trained after its weights were merged
            self.embedding = part(body, names.embedding)
            self.final_norm = Norm(part(body, names.final_norm), family.norm)
            self.embedded_positions = part(body, names.positions) if family.positions == LEARNED else None
            self.turns = self._tables(body, max_len) if family.positions == HALVES else None
            kinds = self.turns or ()
            self.layers = [Layer.of(layer, family, sizes, kinds, max_len) for layer in part(body, names.layers)]
        self.logit_cap = getattr(model.config, family.logit_cap, None) if family.logit_cap else None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the memory of what was merged

    def _tables(self, body: nn.Module, max_len: int) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Cosines and sines [max_len, rotary / 2] for each kind of layer, by the model's own module, so that each number is its own."""
        positions = torch.arange(max_len, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        found = {}
        for kind in _rope_types(body):
            turns = body.rotary_emb(like, positions, *([] if kind is None else [kind]))
            found[kind] = tuple(x[0, :, : x.shape[-1] // 2].contiguous() for x in turns)
        return found

    def forward(self, tokens: Tensor, positions: Tensor, cache, step, last: slice | Tensor = slice(None)) -> Tensor:
        """tokens, positions int64 [rows] (-1: nothing stands there) -> logits [rows that `last` takes, vocabulary]; the keys and values of the rows are in
        `cache` then (runtime/decode/cache.py), whose `step` says where."""
        at = positions.clamp(min=0)
        x = self.embedding(tokens)
        if self.embedded_positions is not None:
            x = x + embedding(at + self.embedded_positions.offset, self.embedded_positions.weight)
        turns = {kind: tuple(table[at] for table in tables) for kind, tables in (self.turns or {}).items()}

        def attend(layer: Layer, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in (query, key, value))
            if layer.own_norms:
                query, key = (norm(x) for norm, x in zip(layer.own_norms, (query, key), strict=True))
            return cache.attend(number, query, key, value, turns.get(layer.turns), layer, step).flatten(1)

        residual = None
        with fast_products(self.dtype, self.device):
            for number, layer in enumerate(self.layers):
                x, residual = layer.forward(x, residual, attend, number)
            logits = self.final_norm.into(self.lm_head, x[last], residual[last])[0]
        return torch.tanh(logits / self.logit_cap) * self.logit_cap if self.logit_cap else logits

    @property
    def bytes_of_a_row(self) -> int:
        """The bytes that a pass takes for a row: what stands beside each other in a layer is about 20 times a hidden state, mostly of its MLP."""
        return 32 * self.dtype.itemsize * len(self.final_norm.module.weight)

    def paths(self, rows: int = 1) -> dict[Path | str, int]:
        """Which implementation serves how many products, norms and activations of a pass with so many rows."""
        found: dict[Path | str, int] = {}
        linears = [x for layer in self.layers for x in (layer.qkv, layer.out, layer.inner, layer.outer)]
        for linear in [*linears, self.lm_head]:
            for alone in _alone(linear):
                ours = isinstance(alone, PackedLinear)
                name = alone.path_for(self.dtype, rows) if ours else f"torch linear on {self.device.type}"
                found[name] = found.get(name, 0) + 1
        for layer in self.layers:
            for name in layer.paths(self.device, self.dtype):
                found[name] = found.get(name, 0) + 1
        for name in self.final_norm.paths(self.lm_head, self.device, self.dtype):
            found[name] = found.get(name, 0) + 1
        if (group := getattr(self.model, "tensor_parallel", None)) is not None:
            found |= {f"sums over {group.name}": 2 * len(self.layers), f"logits of {group.name}, gathered": 1}
        return found
