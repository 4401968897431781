"""A lean forward pass for decoding, over the modules of a loaded transformers model: Llama, Mistral, Qwen2, Qwen3 and OPT, dense or compressed.

    tokens -> embedding -> [ + residual, norm -> q k v -> RoPE, append, attention -> o -> + residual, norm -> MLP ] ... -> norm -> output head

Every arrow between two products is one kernel. q, k and v are one product, and so are a gate and what it gates (runtime/projections.py); a sum with the
residual is taken by the norm that follows it, also from one layer to the next. Layers that multiply codes get them from the norm or activation before
them (kernels/fused_quant.py), others floating numbers (kernels/fused_norm.py). Dense and compressed models run the same pass, so that they can be compared.

Tokens of a pass are rows: one of each sequence in decoding, a piece of one sequence in prefill. Where rows go, and what they attend to, is the cache's
business (runtime/sequence_cache.py). Roundings are those of the model's own modules.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.activations import ACT2FN

from tilepress.kernels import fused_norm, fused_quant
from tilepress.kernels.arch import Path
from tilepress.runtime.linear.int8 import Int8Linear
from tilepress.runtime.linear.merged import merge
from tilepress.runtime.linear.sparse import SparseLinear

ops = torch.ops.tilepress
LLAMA = {
    f"transformers.models.{folder}.modeling_{folder}.{name}ForCausalLM"
    for folder, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))
}
OPT = "transformers.models.opt.modeling_opt.OPTForCausalLM"
_CHANGING_ROPE = ("dynamic", "longrope")  # whose frequencies depend on the length


def why_not(model: nn.Module, max_len: int) -> str | None:
    """Why a model must run by its own forward pass, or None."""
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    if name not in LLAMA and name != OPT:
        return f"no lean pass for {type(model).__name__}"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "accelerate moves its tensors"
    if len({tensor.device for tensor in (*model.parameters(), *model.buffers())}) > 1:
        return "it lies on several devices"
    config = model.config
    if name == OPT:
        decoder = model.model.decoder
        ordinary = config.do_layer_norm_before and config.layer_norm_elementwise_affine
        ordinary = ordinary and decoder.final_layer_norm is not None and decoder.project_in is None
        return None if ordinary else "OPT with norms behind its layers, or projected embeddings"
    if not all(isinstance(layer.mlp.act_fn, nn.SiLU | type(ACT2FN["silu"])) for layer in model.model.layers):
        return f"its activation is {config.hidden_act}"
    if (kind := model.model.rotary_emb.rope_type) in _CHANGING_ROPE:
        return f"{kind} RoPE"
    windows = getattr(config, "sliding_window", None) or max_len
    types = getattr(config, "layer_types", None)
    if windows < max_len and (types is None or "sliding_attention" in types):
        return f"windows of {windows} tokens slide"
    return None


def most_positions(model: nn.Module) -> int | None:
    """Positions that a model has embeddings for; None where they are rotations, which have no end."""
    if any(name.endswith("rotary_emb") for name, _ in model.named_modules()):
        return None
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or with a bias LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> "Norm":
        if isinstance(module, nn.LayerNorm):
            return cls(module.weight, module.bias, module.eps)
        return cls(module.weight, None, module.variance_epsilon)

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum."""
        if residual is None:
            normal = ops.rms_norm if self.bias is None else ops.layer_norm
            return normal(x, *self._rest), x
        normal = ops.add_rms_norm if self.bias is None else ops.add_layer_norm
        return normal(x, residual, *self._rest)

    def codes(self, x: Tensor, residual: Tensor | None, linear: Int8Linear) -> tuple[Tensor, Tensor, Tensor]:
        """The same quantized for a layer: codes, scale, and the sum."""
        if residual is None:
            normal = ops.rms_norm_int8 if self.bias is None else ops.layer_norm_int8
            return *normal(x, *self._rest, linear.mode, *linear.static), x
        normal = ops.add_rms_norm_int8 if self.bias is None else ops.add_layer_norm_int8
        return normal(x, residual, *self._rest, linear.mode, *linear.static)

    def into(self, linear: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What a linear layer makes of the norm of x + residual, and the sum."""
        if takes_codes(linear):
            *codes, total = self.codes(x, residual, linear)
            return linear.multiply(*codes, x.dtype), total
        normal, total = self(x, residual)
        return linear(normal), total

    @property
    def _rest(self) -> tuple:
        return (self.weight, self.eps) if self.bias is None else (self.weight, self.bias, self.eps)


def takes_codes(linear: nn.Module) -> bool:
    """Whether a layer multiplies int8 codes, and so can get them from what makes its input."""
    return isinstance(linear, Int8Linear) and linear.scheme.activations != "none"


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention_norm: Norm
    qkv: nn.Module
    sizes: tuple[int, int, int]  # columns of q, k and v
    head_norms: tuple[Tensor | None, Tensor | None]  # of queries and keys, over a head
    head_eps: float
    scale: float  # of scores
    out: nn.Module
    mlp_norm: Norm
    inner: nn.Module  # gate and up, or the first of two
    activation: str | None  # None: silu of the gate, times the rest
    function: Callable[[Tensor], Tensor] | None
    outer: nn.Module

    def forward(self, x: Tensor, residual: Tensor | None, attend: Callable[..., Tensor], number: int):
        """What the layer adds, and the sum of all before: both [rows, hidden]."""
        qkv, residual = self.attention_norm.into(self.qkv, x, residual)
        query, key, value = qkv.split(self.sizes, -1)
        out = self.out(attend(self, number, query, key, value))
        inner, residual = self.mlp_norm.into(self.inner, out, residual)
        return self._finish(inner), residual

    def _finish(self, inner: Tensor) -> Tensor:
        outer, dtype = self.outer, inner.dtype
        if takes_codes(outer):
            name = self.activation
            made = partial(ops.silu_mul_int8, inner) if name is None else partial(ops.activation_int8, inner, name)
            return outer.multiply(*outer.codes(made), dtype)
        return outer(ops.silu_mul(inner) if self.activation is None else self.function(inner))


def _alone(linear: nn.Module) -> Iterator[nn.Module]:
    """The layers that it is made of."""
    for part in getattr(linear, "linears", []):
        yield from _alone(part)
    if not hasattr(linear, "linears"):
        yield linear


_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_new"}


class Decoder:
    """The pass over a model; `max_len` bounds positions. Raises ValueError where `why_not` has an answer."""

    def __init__(self, model: nn.Module, max_len: int):
        if (why := why_not(model, max_len)) is not None:
            raise ValueError(why)
        self.model, config = model, model.config
        self.device, self.dtype = next(model.parameters()).device, model.dtype
        self.heads = config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.lm_head = model.lm_head
        with torch.inference_mode():
            if hasattr(model.model, "decoder"):
                self._from_opt(model.model.decoder)
            else:
                self._from_llama(model.model, max_len)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the memory of what was merged

    def _from_llama(self, body: nn.Module, max_len: int) -> None:
        self.embedding, self.embedded_positions = body.embed_tokens, None
        self.final_norm = Norm.of(body.norm)
        # By the model's own module, so that each number is its.
        positions = torch.arange(max_len, device=self.device)[None]
        cos, sin = body.rotary_emb(torch.empty(0, dtype=self.dtype, device=self.device), positions)
        half = cos.shape[-1] // 2
        self.turns = tuple(x[0, :, :half].contiguous() for x in (cos, sin))
        self.layers = [self._llama_layer(layer) for layer in body.layers]

    def _llama_layer(self, layer: nn.Module) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = getattr(attention, "qkv_proj", None) or merge([attention.q_proj, attention.k_proj, attention.v_proj])
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return Layer(
            Norm.of(layer.input_layernorm),
            qkv,
            self._sizes,
            tuple(None if norm is None else norm.weight for norm in norms),
            0.0 if norms[0] is None else norms[0].variance_epsilon,
            attention.scaling,
            attention.o_proj,
            Norm.of(layer.post_attention_layernorm),
            getattr(mlp, "gate_up_proj", None) or merge([mlp.gate_proj, mlp.up_proj]),
            None,
            None,
            mlp.down_proj,
        )

    def _from_opt(self, body: nn.Module) -> None:
        self.embedding, self.embedded_positions = body.embed_tokens, body.embed_positions
        self.final_norm, self.turns = Norm.of(body.final_layer_norm), None
        self.layers = [self._opt_layer(layer) for layer in body.layers]

    def _opt_layer(self, layer: nn.Module) -> Layer:
        attention = layer.self_attn
        qkv = getattr(attention, "qkv_proj", None) or merge([attention.q_proj, attention.k_proj, attention.v_proj])
        name = self.model.config.activation_function
        return Layer(
            Norm.of(layer.self_attn_layer_norm),
            qkv,
            self._sizes,
            (None, None),
            0.0,
            attention.scaling,
            attention.out_proj,
            Norm.of(layer.final_layer_norm),
            layer.fc1,
            _ACTIVATIONS.get(name, name),
            layer.activation_fn,
            layer.fc2,
        )

    @property
    def _sizes(self) -> tuple[int, int, int]:
        kv = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, kv, kv

    def forward(self, tokens: Tensor, positions: Tensor, cache, step, last: slice = slice(None)) -> Tensor:
        """tokens, positions int64 [rows] (-1: nothing stands there) -> logits [rows of `last`, vocabulary]; the keys and values of the rows are in
        `cache` then, of runtime/sequence_cache.py, whose `step` says where."""
        at = positions.clamp(min=0)
        x = self.embedding(tokens)
        if self.embedded_positions is not None:
            x = x + embedding(at + self.embedded_positions.offset, self.embedded_positions.weight)
        turns = None if self.turns is None else tuple(table[at] for table in self.turns)

        def attend(layer: Layer, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows = (x.unflatten(-1, (-1, self.head_dim)) for x in (query, key, value))
            return cache.attend(number, *rows, turns, layer, step).flatten(1)

        residual = None
        for number, layer in enumerate(self.layers):
            x, residual = layer.forward(x, residual, attend, number)
        x, _ = self.final_norm(x[last], residual[last])
        return self.lm_head(x)

    def paths(self, rows: int = 1) -> dict[Path | str, int]:
        """Which implementation serves how many products, norms and activations of a pass with so many rows."""
        found: dict[Path | str, int] = {}
        linears = [x for layer in self.layers for x in (layer.qkv, layer.out, layer.inner, layer.outer)]
        for linear in [*linears, self.lm_head]:
            for part in _alone(linear):
                if isinstance(part, SparseLinear):
                    name = part.path_for(self.dtype, rows)
                elif isinstance(part, Int8Linear):
                    name = part.path
                else:
                    name = f"torch linear on {self.device.type}"
                found[name] = found.get(name, 0) + 1
        for name in self._norm_paths():
            found[name] = found.get(name, 0) + 1
        if (group := getattr(self.model, "tensor_parallel", None)) is not None:
            found |= {f"sums over {group.name}": 2 * len(self.layers), f"logits of {group.name}, gathered": 1}
        return found

    def _norm_paths(self) -> Iterator[Path | str]:
        """Of norms and activations, by what they make."""
        where, hidden = (self.device, self.dtype), len(self.final_norm.weight)
        for layer in self.layers:
            inputs = [(layer.qkv, hidden), (layer.inner, hidden)]
            inputs += [(linear, linear.in_features) for linear in (layer.out, layer.outer)]
            for linear, columns in inputs:
                if takes_codes(linear):
                    one_scale = linear.mode == fused_quant.PER_TENSOR and linear.static[0] is None
                    yield fused_quant.path(*where, columns, one_scale)
                elif linear is layer.outer and layer.activation is not None:
                    yield f"torch activation on {self.device.type}"
                elif linear is not layer.out:  # what attention gives stands between nothing
                    yield fused_norm.path(*where, columns)
        yield fused_norm.path(*where, hidden)
