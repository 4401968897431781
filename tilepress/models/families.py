"""Knowledge of model families: one entry for each, and no table of names anywhere else.

An entry tells the classes of a family, what its parts are called, what they compute, which scales may fold into what, and which passes of ours serve
it. Calibration, fused INT8 layers, fused attention, the lean decode pass and tensor parallelism ask it; what they cannot do for a family they say in
its words. Classes are compared by their qualified names: importing transformers' modules takes seconds, and code that comes with a checkpoint has
classes of the same bare names.

A family like Llama is one line of `FAMILIES`, and a random config in tests/support/families.py.
"""

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# Norms: x / rms(x) times w, rounded before the product; the same times 1 + w, rounded after it; LayerNorm with a bias.
RMS, RMS_PLUS_ONE, LAYER = "rms", "rms of 1 + w", "layer"
# Positions: RoPE turns channels half a rotary dimension apart (all or the first ones), or neighbours; or they are learned embeddings.
HALVES, NEIGHBOURS, LEARNED = "halves", "neighbours", "learned"


@dataclass(frozen=True)
class Names:
    """The names of a model's parts; paths of a decoder layer's parts begin at the layer, those of `qkv`, `out` and
    `head_norms` at its attention.
    """

    body: str = "model"  # holds the embeddings, the layers and the final norm
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None  # learned embeddings of positions
    final_norm: str = "norm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: stored as one matrix, the rows of q, of k, of v
    out: str = "o_proj"
    head_norms: tuple[str, ...] = ()  # of queries and of keys, over a head
    softcap: str | None = None  # attribute of its attention: the soft cap of scores
    input_norm: str = "input_layernorm"
    after_attention: str | None = None  # a norm of what attention gives, before it is added
    mlp_norm: str = "post_attention_layernorm"
    inner: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one name: no gate, or stored as one matrix, gate first
    activation: str = "mlp.act_fn"
    outer: str = "mlp.down_proj"
    after_mlp: str | None = None  # a norm of what the MLP gives, before it is added

    @property
    def merged_qkv(self) -> str:
        """The path at which q, k and v are, or are put, as one product."""
        return f"{self.attention}.{self.qkv[0] if len(self.qkv) == 1 else 'qkv_proj'}"

    @property
    def merged_inner(self) -> str:
        """The path at which a gate and what it gates are, or are put, as one product."""
        return self.inner[0] if len(self.inner) == 1 else f"{self.inner[0].rpartition('.')[0]}.gate_up_proj"


class Setting(NamedTuple):
    """The value of a config's key that our passes compute, and what a model with another one has."""

    key: str
    value: object
    otherwise: str


@dataclass(frozen=True)
class Family:
    """One family of transformers models. What an entry leaves out is Llama's, or not known where `names` is None."""

    model_type: str
    prefix: str = ""  # of its classes' names
    folder: str = ""  # of its module in transformers, where that is not the model type
    suffixes: tuple[str, str] = ("ForCausalLM", "DecoderLayer")  # of the model and of a layer
    names: Names | None = None
    norm: str | None = None
    gated: bool = True  # the MLP multiplies its activation with a second projection
    positions: str = HALVES
    folds: tuple[tuple[str, str], ...] = ()  # (linear, the one before it that may take its factors): trials decide
    experts: tuple[str, str, str] | None = None  # gate, up and down of each expert, stored one by one
    routers: tuple[str, ...] = ()  # linear weights that choose experts: never compressed
    settings: tuple[Setting, ...] = ()
    logit_cap: str | None = None  # a config's key: the soft cap of logits
    absent: tuple[str, ...] = ()  # modules of the body that our passes do not run
    positional: tuple[str, ...] = ()  # what a layer gets by position after its hidden states
    decodes: bool = False  # the lean decode pass and tensor parallelism serve it
    int8_layers: bool = False  # its layers of INT8 linears are fused
    fused_attention: bool = False  # its attention appends to the paged cache by one op
    limits: str = field(default="", kw_only=True)  # why some of these do not serve it, or not all of its models

    def class_names(self) -> dict[str, str]:
        """Qualified names of the family's classes of a "model", "layer", "attention" and "norm"."""
        folder = self.folder or self.model_type
        model, layer = self.suffixes
        kinds = {"model": model, "layer": layer, "attention": "Attention", "norm": "RMSNorm"}
        path = f"transformers.models.{folder}.modeling_{folder}.{self.prefix}"
        return {kind: path + suffix for kind, suffix in kinds.items()} if self.prefix else {}

    def why_not(self, config) -> str | None:
        """Name what a config has that our passes do not compute, or return None."""
        found = ((setting, getattr(config, setting.key, setting.value)) for setting in self.settings)
        return next((s.otherwise for s, value in found if (value or None) != (s.value or None)), None)

    def to_json(self) -> dict:
        """Return what works for the family beyond what works for every model, as `tilepress models --json` prints it."""
        return {
            "model_type": self.model_type,
            "model": self.class_names().get("model", "").rpartition(".")[2] or None,
            "lean_decode": self.decodes,
            "tensor_parallel": self.decodes,
            "fused_int8_layers": self.int8_layers,
            "fused_attention": self.fused_attention,
            "folds": bool(self.folds),
            "experts": self.experts is not None,
            "limits": self.limits or None,
        }


_FOLDS = (("down_proj", "up_proj"), ("o_proj", "v_proj"))
_LLAMA = Family(
    "llama", "Llama", names=Names(), norm=RMS, folds=_FOLDS, decodes=True, int8_layers=True, fused_attention=True
)
_HEAD_NORMS = ("q_norm", "k_norm")


def _attention(model_type: str, prefix: str, limits: str, **changes) -> Family:
    """A family whose attention alone is served."""
    return replace(
        _LLAMA, model_type=model_type, prefix=prefix, decodes=False, int8_layers=False, limits=limits, **changes
    )


_ROUTED = "its experts run one by one"
_NAMED_EXPERTS = ("gate_proj", "up_proj", "down_proj")
FAMILIES = (
    _LLAMA,
    replace(_LLAMA, model_type="mistral", prefix="Mistral"),
    replace(_LLAMA, model_type="qwen2", prefix="Qwen2"),
    replace(_LLAMA, model_type="qwen3", prefix="Qwen3", names=Names(head_norms=_HEAD_NORMS)),
    replace(
        _LLAMA,
        model_type="phi3",
        prefix="Phi3",
        names=Names(qkv=("qkv_proj",), inner=("mlp.gate_up_proj",), activation="mlp.activation_fn"),
        folds=(),  # what makes the input of o_proj and down_proj is a part of a matrix
        limits="longrope",
    ),
    replace(
        _LLAMA,
        model_type="gemma3_text",
        prefix="Gemma3",
        folder="gemma3",
        names=Names(
            head_norms=_HEAD_NORMS,
            after_attention="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        norm=RMS_PLUS_ONE,
        settings=(
            Setting("use_bidirectional_attention", False, "attention to later tokens"),
            Setting("attn_logit_softcapping", None, "soft-capped scores"),
        ),
        logit_cap="final_logit_softcapping",
    ),
    replace(
        _LLAMA,
        model_type="gemma2",
        prefix="Gemma2",
        names=Names(
            softcap="attn_logit_softcapping",
            after_attention="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        norm=RMS_PLUS_ONE,
        settings=(Setting("use_bidirectional_attention", False, "attention to later tokens"),),
        logit_cap="final_logit_softcapping",
    ),
    Family(
        "opt",
        "OPT",
        names=Names(
            body="model.decoder",
            positions="embed_positions",
            final_norm="final_layer_norm",
            out="out_proj",
            input_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            inner=("fc1",),
            activation="activation_fn",
            outer="fc2",
        ),
        norm=LAYER,
        gated=False,
        positions=LEARNED,
        folds=(("fc2", "fc1"), ("out_proj", "v_proj")),
        settings=(
            Setting("do_layer_norm_before", True, "norms behind its layers"),
            Setting("layer_norm_elementwise_affine", True, "norms without weights"),
        ),
        absent=("project_in", "project_out"),
        positional=("attention_mask",),
        decodes=True,
        int8_layers=True,
        limits="no RoPE for fused attention to compute",
    ),
    Family(
        "gpt2",
        "GPT2",
        suffixes=("LMHeadModel", "Block"),
        names=Names(
            body="transformer",
            layers="h",
            embedding="wte",
            positions="wpe",
            final_norm="ln_f",
            attention="attn",
            qkv=("c_attn",),
            out="c_proj",
            input_norm="ln_1",
            mlp_norm="ln_2",
            inner=("mlp.c_fc",),
            activation="mlp.act",
            outer="mlp.c_proj",
        ),
        norm=LAYER,
        gated=False,
        positions=LEARNED,
        settings=(Setting("add_cross_attention", False, "cross-attention"),),
        positional=("past_key_values", "attention_mask", "encoder_hidden_states"),
        int8_layers=True,
        limits="its matrices are stored transposed (Conv1D), which products of several and cuts do not take",
    ),
    _attention("arcee", "Arcee", "no gate in its MLP"),
    _attention("gemma", "Gemma", "norms of 1 + w and scaled embeddings, served for Gemma 2 and 3 so far"),
    _attention("granite", "Granite", "scaled embeddings, residuals and logits"),
    _attention("granitemoe", "GraniteMoe", _ROUTED),
    _attention("ministral", "Ministral", "windows that slide in some of its layers"),
    _attention(
        "mixtral", "Mixtral", _ROUTED, folds=(*_FOLDS, ("w2", "w3")), experts=("w1", "w3", "w2"), routers=("gate",)
    ),
    _attention("qwen2_moe", "Qwen2Moe", _ROUTED, experts=_NAMED_EXPERTS, routers=("gate", "shared_expert_gate")),
    _attention(
        "qwen3_moe", "Qwen3Moe", _ROUTED, names=Names(head_norms=_HEAD_NORMS), experts=_NAMED_EXPERTS, routers=("gate",)
    ),
    Family("gpt_oss", routers=("router",), limits="its experts are one tensor, its cosines one for each pair"),
    *(
        Family(kind, positions=NEIGHBOURS, limits="RoPE that turns neighbours")
        for kind in ("codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium")
    ),
)

_BY_CLASS = {(kind, name): family for family in FAMILIES for kind, name in family.class_names().items()}
_BY_TYPE = {family.model_type: family for family in FAMILIES}


def families() -> tuple[Family, ...]:
    """Return every family that has an entry; each `to_json` says what works for it."""
    return FAMILIES


def family_of(module: object, kind: str) -> Family | None:
    """The family whose "model", "layer", "attention" or "norm" a module is, of exactly that class, or None."""
    return _BY_CLASS.get((kind, f"{type(module).__module__}.{type(module).__qualname__}"))


def turns_neighbours(model_type: str) -> bool:
    """Return whether the RoPE of a model type turns neighbouring channels."""
    return model_type in _BY_TYPE and _BY_TYPE[model_type].positions == NEIGHBOURS


def norm_offset(norm: object) -> float:
    """The number that a norm adds to its weight before it multiplies: 1 in families whose norms are of 1 + w."""
    family = family_of(norm, "norm")
    return 1.0 if family is not None and family.norm == RMS_PLUS_ONE else 0.0


def folded_norm(weight, divisors, offset: float):
    """The weight of a norm whose outputs are divided: it multiplies by weight + offset."""
    return (weight + offset) / divisors - offset if offset else weight / divisors


class Heads(NamedTuple):
    """The numbers of query heads, of KV heads, and of channels in one head."""

    count: int
    kv_count: int
    dim: int


def heads_of(config) -> Heads:
    """The heads that a transformers text config declares."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Heads(heads, getattr(config, "num_key_value_heads", None) or heads, dim)


def part(module, path: str):
    """The part of a module at a dotted path, or None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def last(path: str) -> str:
    """The last name of a dotted path."""
    return path.rpartition(".")[2]


# What holds for weights by their names alone, of families with an entry or without one.
FOLDS = tuple(dict.fromkeys(pair for family in FAMILIES for pair in family.folds))
VALUE_FOLDS = tuple(
    pair for pair in FOLDS if pair[1] == "v_proj"
)  # (linear that reads attention, that which makes values)
EXPERTS = tuple(dict.fromkeys(family.experts for family in FAMILIES if family.experts))
ROUTER = re.compile(rf"(^|\.)({'|'.join(sorted({name for family in FAMILIES for name in family.routers}))})$")
ONE_PRODUCT = tuple(  # linear weights of one input, which runtimes multiply as one
    dict.fromkeys(
        tuple(map(last, group))
        for family in FAMILIES
        for group in (*((family.names.qkv, family.names.inner) if family.names else ()), (family.experts or ())[:2])
        if len(group) > 1
    )
)
ADDED = frozenset(  # linear weights whose outputs are added to the residual
    last(name) for family in FAMILIES if family.names for name in (family.names.out, family.names.outer)
)
