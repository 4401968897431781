"""Scales for an attention cache of 4 or 8 bits, from real text: the recipe behind `tilepress compress kv`.

Layer by layer, the queries, keys (after RoPE) and values of the attention are looked at as the model computes them. Per KV head and channel a
mean and a scale are kept: scale = reach^alpha, keys' shared by the pairs that RoPE rotates, so that both fold into what is around the
attention (SmoothAttention of QServe, Lin et al. 2024, arXiv 2405.04532, with a searched exponent). alpha and clip of keys and of values
are those of a small grid with the least error of the attention's output on sampled queries. Weights are not touched: their files are linked.

Keys can be rotated by a Hadamard matrix, queries with them. Rounding errors of a rotated row are alike in all channels, so a scale a_c makes
the expected error of a score proportional to sum(k_c^2 / a_c^2) * sum(q_c^2 a_c^2), which is least at a_c = sqrt(k_c / q_c), k and q the
root mean squares: there scale = (k / q)^alpha. Whether the model's keys are rotated is decided by the same error, summed over layers.

Static ranges of keys must hold at positions that calibration never saw. RoPE turns a pair of channels and leaves its length: so the range of
both is the largest length that was seen, around 0.
"""

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from tilepress.compress.calibration import Text, check_window, load_tokenizer
from tilepress.compress.layerwise import LayerByLayer
from tilepress.compress.layouts import DenseLayout, Layout
from tilepress.compress.plan import Plan, Progress, Recipe
from tilepress.compress.targets import LeftAlone, Target, find_targets
from tilepress.formats import TilepressError, UsageError, dtype_name
from tilepress.formats.artifact import write_atomic
from tilepress.formats.checkpoint import Checkpoint, read_json
from tilepress.formats.kv_calibration import FACTS_NAME, FOLDER, KVCalibration, Side, form_of, to_files, weights_hash
from tilepress.formats.kv_int4 import KVFormat, fake_quantize

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
CLIPS = {False: (1.0, 0.95, 0.9, 0.85), True: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)}  # by whether the format is static
REFITS = 2  # of dynamic 4-bit scales
_SAMPLED_WINDOWS = 8  # whose keys and values the search looks at
_QUERIES = 64  # positions of each of them
_ATTENTION = "tilepress_observed"


@dataclass(frozen=True)
class KVRecipe(Recipe):
    """Settings of `compress kv`. Raises UsageError for an unknown choice."""

    text: Text
    bits: int = 4
    group_size: int = 0  # 0: the head dimension
    mode: str = "dynamic"  # dynamic | static
    rotation: str = "auto"  # auto | none | hadamard
    trust_remote_code: bool = False

    command = "compress kv"
    links = True

    def __post_init__(self):
        if self.bits not in (4, 8):
            raise UsageError(f"--bits {self.bits} is unknown", "choose 4 or 8")
        if self.mode not in ("dynamic", "static"):
            raise UsageError(f"--mode {self.mode} is unknown", "choose dynamic or static")
        if self.rotation not in ("auto", "none", "hadamard"):
            raise UsageError(f"--rotation {self.rotation} is unknown", "choose one of auto, none, hadamard")
        if self.rotation == "hadamard" and (self.mode == "static" or self.bits == 8):
            raise UsageError("--rotation hadamard goes with 4 bits and --mode dynamic", "leave it out")

    @property
    def rotations(self) -> tuple[bool, ...]:
        """What is tried."""
        if self.rotation == "auto" and self.bits == 4 and self.mode == "dynamic":
            return (False, True)
        return (self.rotation == "hadamard",)

    def find_targets(self, checkpoint: Checkpoint, trust_remote_code: bool = False):
        return [], []

    def layout(self) -> Layout:
        return DenseLayout()

    def settings(self) -> dict:
        chosen = {
            "bits": self.bits,
            "group_size": self.group_size or "head",
            "mode": self.mode,
            "rotation": self.rotation,
        }
        return chosen | asdict(self.text)

    def check(self, checkpoint: Checkpoint, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        check_window(self.text.seqlen, checkpoint.text_config)
        shape = attention_shape(checkpoint)
        self.form(shape.head_dim)

    def form(self, head_dim: int) -> KVFormat:
        size = 0 if self.group_size == head_dim else self.group_size
        return KVFormat(head_dim, self.bits, size, self.mode == "static")

    def peak_bytes(self, checkpoint: Checkpoint, targets: list[Target]) -> int:
        """One layer in float32, what is outside of layers twice, hidden states, the sampled keys and values and their candidates."""
        shape, config = attention_shape(checkpoint), checkpoint.text_config
        layers = max(shape.layers, 1)
        elements = sum(entry.nbytes // entry.dtype.itemsize for entry in checkpoint.tensors.values())
        width = config.get("hidden_size") or config.get("n_embd") or shape.heads * shape.head_dim
        embedding = config.get("vocab_size", 0) * width
        hidden = self.text.nsamples * self.text.seqlen * width * 4
        row = shape.kv_heads * shape.head_dim * 4
        sampled = min(self.text.nsamples, _SAMPLED_WINDOWS) * self.text.seqlen * row * 6
        scores = shape.heads * _QUERIES * self.text.seqlen * 4 * 4
        return 4 * max(elements - embedding, 0) // layers + 8 * embedding + hidden + sampled + scores

    def prepare(self, plan: Plan, rank: int, device: str, progress: Progress) -> dict | None:
        calibrate_kv(plan, self, device, progress)
        return {}

    def extra_files(self, plan: Plan) -> dict[str, bytes]:
        return {
            f"{FOLDER}/{p.name}": p.read_bytes() for p in sorted((plan.work / FOLDER).iterdir()) if p.suffix != ".ok"
        }

    def describe(self, plan: Plan, tensors: list[dict]) -> dict:
        source = Checkpoint(plan.source).manifest or {}  # whose weights these are
        kept = {key: source[key] for key in ("calibration", "report") if key in source}
        return kept | {"kv_cache": memory_told(read_json(plan.work / FOLDER / FACTS_NAME))}

    def result_config(self, config: dict, tensors: list[dict], left_alone: list[LeftAlone]) -> dict:
        return config | {"tilepress_kv_cache": FOLDER}


@dataclass(frozen=True)
class AttentionShape:
    """Of a model's attention, from its config."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # channels that RoPE rotates, 0 without RoPE
    interleaved: bool  # pairs are neighbours (GPT-J) and not half a rotary dimension apart (Llama)


_INTERLEAVED = ("gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "ernie4_5", "helium")


def attention_shape(checkpoint: Checkpoint) -> AttentionShape:
    """Raises UsageError for attention that the cache does not serve."""
    config, kind = checkpoint.text_config, checkpoint.config.get("model_type", "?")

    def first(*names: str) -> int | None:
        return next((config[name] for name in names if isinstance(config.get(name), int)), None)

    layers, heads = (
        first("num_hidden_layers", "n_layer", "num_layers"),
        first("num_attention_heads", "n_head", "num_heads"),
    )
    width = first("hidden_size", "n_embd", "d_model")
    if not (layers and heads and width):
        raise UsageError(
            f"config.json of {checkpoint.name} ({kind}) does not tell its layers, heads and width", _ORDINARY
        )
    window = config.get("sliding_window")
    slides = config.get("use_sliding_window", True) and window is not None and "layer_types" not in config
    if slides or any(t != "full_attention" for t in config.get("layer_types") or ()):
        raise UsageError(
            f"{checkpoint.name} ({kind}) has layers with sliding windows or without softmax attention, which this cache does not serve",
            _ORDINARY,
        )
    if config.get("kv_lora_rank") or config.get("attn_logit_softcapping") or config.get("alibi"):
        raise UsageError(
            f"{kind} has an attention that this cache does not serve (latent, soft-capped or ALiBi)", _ORDINARY
        )
    head_dim = first("head_dim") or width // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    has_rope = bool(rope) or "rope_theta" in config or "rotary_dim" in config or "rotary_pct" in config
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)))
    rotary = (first("rotary_dim") or int(head_dim * share)) if has_rope else 0
    return AttentionShape(layers, heads, first("num_key_value_heads") or heads, head_dim, rotary, kind in _INTERLEAVED)


_ORDINARY = "this model keeps its ordinary cache"


def by_pairs(x: Tensor, shape: AttentionShape, reduce: Callable) -> Tensor:
    """What `reduce` (torch.amax, torch.sum) makes of each pair of channels that RoPE rotates, for both: [..., D] -> [..., D]."""
    n = shape.rotary_dim
    if not n:
        return x
    pairs = x[..., :n].unflatten(-1, (-1, 2) if shape.interleaved else (2, -1))
    along = -1 if shape.interleaved else -2
    shared = reduce(pairs, along, keepdim=True).expand_as(pairs).flatten(-2)
    return torch.cat([shared, x[..., n:]], -1)


@dataclass
class _Seen:
    """One layer's queries, keys and values: statistics of all windows, and some windows whole."""

    name: str
    low: dict[str, Tensor] = field(default_factory=dict)  # of "key", "value": [heads, D]
    high: dict[str, Tensor] = field(default_factory=dict)
    total: dict[str, Tensor] = field(default_factory=dict)
    power: dict[str, Tensor] = field(default_factory=dict)
    longest: Tensor | None = None  # of each key's pairs: [heads, D]
    tokens: int = 0
    query_power: Tensor | float = 0.0
    samples: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(
        default_factory=list
    )  # q at positions, positions, k, v
    scaling: float = 1.0

    def add(self, query: Tensor, key: Tensor, value: Tensor, keep: bool, shape: "AttentionShape") -> None:
        """[1, heads, tokens, D] each."""
        for what, x in (("key", key[0].float()), ("value", value[0].float())):
            low, high = x.amin(1), x.amax(1)
            if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
                raise TilepressError(
                    f"the {what}s of {self.name} are not finite during calibration",
                    "the checkpoint overflows in its own dtype: check it with `tilepress eval perplexity`",
                )
            self.low[what] = torch.minimum(self.low.get(what, low), low)
            self.high[what] = torch.maximum(self.high.get(what, high), high)
            self.total[what] = self.total.get(what, 0.0) + x.sum(1, dtype=torch.float64)
            self.power[what] = self.power.get(what, 0.0) + x.square().sum(1, dtype=torch.float64)
        longest = by_pairs(key[0].float().square(), shape, torch.sum).amax(1).sqrt()
        self.longest = longest if self.longest is None else torch.maximum(self.longest, longest)
        count = key.shape[2]
        self.tokens += count
        groups = query[0].float().unflatten(0, (key.shape[1], -1))
        self.query_power = self.query_power + groups.square().sum((1, 2), dtype=torch.float64)
        if keep:
            generator = torch.Generator().manual_seed(len(self.samples))
            at = torch.randperm(count, generator=generator)[:_QUERIES].sort().values.to(key.device)
            self.samples.append((groups[:, :, at], at, key[0].float(), value[0].float()))


def calibrate_kv(plan: Plan, recipe: KVRecipe, device: str, progress: Progress) -> None:
    """Runs the model over the text and leaves the sidecar's files in the work folder; finds them there when it is resumed.

    Raises UsageError for a model whose attention cannot be looked at, TilepressError naming the layer for keys that are not finite.
    """
    checkpoint, shape = Checkpoint(plan.source), attention_shape(Checkpoint(plan.source))
    windows = recipe.text.windows(load_tokenizer(checkpoint.path, recipe.trust_remote_code))
    hashed = weights_hash(checkpoint)
    identity = hashlib.sha256(
        json.dumps([plan.fingerprint, windows, hashed, torch.device(device).type]).encode()
    ).hexdigest()
    done = plan.work / FOLDER / "identity.ok"
    if done.exists() and done.read_text() == identity:
        return
    targets, _ = find_targets(checkpoint, (), recipe.trust_remote_code, quantized=True)
    stored = targets[0].dtype
    dtype = stored if device != "cpu" else torch.float32
    model = LayerByLayer(checkpoint, targets, device, dtype, None, recipe.trust_remote_code)
    if len(model.layers) != shape.layers:
        raise UsageError(f"{len(model.layers)} decoder layers were found, config.json says {shape.layers}", _ORDINARY)
    hidden = _embedded(model, windows, stored)
    form = recipe.form(shape.head_dim)
    tried: dict[bool, list[tuple[Side, Side, dict]]] = {rotate: [] for rotate in recipe.rotations}
    share = sum(e.nbytes for e in checkpoint.tensors.values()) // shape.layers
    for number, layer in enumerate(model.layers):
        progress(f"calibrating {layer}", 0)
        seen = _observe(model, layer, hidden, shape)
        for rotate, found in tried.items():
            keys, values, facts = _choose(seen, form, shape, rotate)
            found.append((keys, values, {"layer": number} | facts))
        progress(f"calibrating {layer}", share)
    errors = {rotate: sum(facts["output_error"] ** 2 for *_, facts in found) for rotate, found in tried.items()}
    rotate = min(errors, key=errors.get)
    layers, told = [found[:2] for found in tried[rotate]], [found[2] for found in tried[rotate]]
    wanted, tokens = recipe.text.nsamples * recipe.text.seqlen, sum(map(len, windows))
    warnings = [f"{recipe.text.dataset} gave {tokens:,} tokens of the {wanted:,} asked for"] if tokens < wanted else []
    facts = {
        "model_dtype": dtype_name(stored),
        "query_heads": shape.heads,
        "rotary_dim": shape.rotary_dim,
        "rope_pairs": "neighbours" if shape.interleaved else "halves",
        "windows": len(windows),
        "tokens": tokens,
        "computed_in": dtype_name(dtype),
        "device": torch.device(device).type,
        "warnings": warnings,
        "report": told,
    }
    found = KVCalibration(form, shape.kv_heads, tuple(layers), rotate, _refits(form), facts)
    (plan.work / FOLDER).mkdir(exist_ok=True)
    for name, content in to_files(found, hashed).items():
        write_atomic(plan.work / name, content, plan.work)
    write_atomic(done, identity.encode(), plan.work)


def _refits(form: KVFormat) -> int:
    return REFITS if form.bits == 4 and not form.static else 0


def _embedded(model: LayerByLayer, windows: list[list[int]], stored: torch.dtype) -> list[Tensor]:
    largest, size = max(map(max, windows)), model.model.get_input_embeddings().num_embeddings
    if largest >= size:
        raise UsageError(
            f"the tokenizer gives token {largest}, the model has {size}", "the tokenizer does not belong to the model"
        )
    _look_at_attention(model.model)
    return [model.embed(torch.tensor(window)).to(stored) for window in windows]


_looking: list[_Seen] = []  # the layer at hand, while it runs
_keeping: list = []  # whether its window is kept whole, and the attention's shape


def _look_at_attention(model) -> None:
    """Lets the model's attention be an ordinary one that shows what it gets."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def observed(module, query, key, value, attention_mask, scaling=None, **kwargs):
        unusual = [name for name in ("softcap", "s_aux", "sliding_window") if kwargs.get(name) is not None]
        if unusual:
            raise UsageError(f"the attention uses {unusual[0]}, which this cache does not serve", _ORDINARY)
        if _looking:
            _looking[0].scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            _looking[0].add(query, key, value, *_keeping)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register(_ATTENTION, observed)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    try:
        model.set_attn_implementation(_ATTENTION)
    except ValueError as error:
        raise UsageError(f"the attention of {type(model).__name__} cannot be looked at: {error}", _ORDINARY) from error


def _observe(model: LayerByLayer, layer: str, hidden: list[Tensor], shape: AttentionShape) -> _Seen:
    """Runs all windows through a layer; its outputs take the place of its inputs."""
    seen = _Seen(layer)
    _looking.append(seen)
    try:
        with model.loaded(layer):
            for i, h in enumerate(hidden):
                _keeping[:] = (i < _SAMPLED_WINDOWS, shape)
                hidden[i] = model.run(layer, h).to(h.dtype).cpu()
    finally:
        _looking.clear()
    if not seen.tokens:
        raise UsageError(f"{layer} has no attention of transformers' common kind", _ORDINARY)
    return seen


def _choose(seen: _Seen, form: KVFormat, shape: AttentionShape, rotate: bool) -> tuple[Side, Side, dict]:
    """Keys' and values' sides with the least output error on the grid, and what the manifest says of them."""
    found = seen.samples[0][2].shape[0], seen.samples[0][2].shape[-1], seen.samples[0][3].shape[-1]
    if found != (shape.kv_heads, shape.head_dim, shape.head_dim):
        raise UsageError(
            f"{seen.name} has {found[0]} KV heads with keys of {found[1]} and values of {found[2]}, config.json says {shape.kv_heads} of {shape.head_dim}",
            _ORDINARY,
        )
    exact = [_attend(q, at, k, v, seen.scaling) for q, at, k, v in seen.samples]
    power = sum(float(o.square().sum()) for o in exact)
    chosen, facts = {}, {}
    for what in ("key", "value"):
        errors = {}
        for alpha, clip in itertools.product(ALPHAS, CLIPS[form.static]):
            side = _side(seen, what, form, shape, alpha, clip, rotate)
            back = _Back(what, form, side, rotate)
            errors[alpha, clip] = _output_error(seen, exact, back) / max(power, 1e-30)
        alpha, clip = min(errors, key=errors.get)
        chosen[what] = _side(seen, what, form, shape, alpha, clip, rotate)
        facts |= {f"{what}_alpha": alpha, f"{what}_clip": clip}
    backs = [_Back(what, form, chosen[what], rotate) for what in ("key", "value")]
    facts["output_error"] = (_output_error(seen, exact, *backs) / max(power, 1e-30)) ** 0.5
    for back in backs:
        facts |= back.told(seen)
    return chosen["key"], chosen["value"], facts


def _side(
    seen: _Seen, what: str, form: KVFormat, shape: AttentionShape, alpha: float, clip: float, rotate: bool
) -> Side:
    low, high, key = seen.low[what], seen.high[what], what == "key"
    if form.static and key:
        turns = torch.arange(low.shape[-1], device=low.device) < shape.rotary_dim
        low, high = torch.where(turns, -seen.longest, low), torch.where(turns, seen.longest, high)
    mean = (low + high) / 2 if form.static else (seen.total[what] / seen.tokens).float()
    if key and rotate:
        power = by_pairs(seen.power[what] - seen.tokens * mean.double().square(), shape, torch.sum).clamp(min=1e-12)
        wanted = by_pairs(seen.query_power, shape, torch.sum).clamp(min=1e-12)
        scale = (power / wanted).sqrt().float() ** alpha
    else:
        reach = torch.maximum(high - mean, mean - low).clamp(min=1e-6)
        scale = (by_pairs(reach, shape, torch.amax) if key else reach) ** alpha
    # In these units a head's values are about 1, far from the ends of float16.
    samples = [sample[2 if what == "key" else 3] for sample in seen.samples]
    powers = torch.stack([((x - mean[:, None]) / scale[:, None]).square().mean((1, 2)) for x in samples])
    scale = scale * powers.mean(0).sqrt().clamp(min=1e-6)[:, None]
    weight = scale.square()  # an error of the code counts times the scale
    if key:
        weight = weight * seen.query_power.float()
        weight = torch.ones_like(weight) if rotate else weight
    weight = weight / weight.mean(-1, keepdim=True).clamp(min=1e-30)
    fixed = None
    if form.static:
        below, above = ((x - mean) / scale for x in (low, high))
        below, above = (x.unflatten(-1, (form.groups, -1)) for x in (below, above))
        below, above = below.amin(-1), above.amax(-1)
        middle, half = (below + above) / 2, (above - below) / 2 * clip
        fixed = torch.stack([(2 * half / form.levels).clamp(min=2.0**-24), middle - half], -1).half()
    return Side(torch.stack([mean, scale, weight]), fixed, clip)


@dataclass
class _Back:
    """Keys or values as they come back from the cache."""

    what: str
    form: KVFormat
    side: Side
    rotate: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[heads, tokens, D] float32."""
        rotate = self.rotate and self.what == "key"
        return fake_quantize(x.transpose(0, 1), self.form, *self.side, rotate, _refits(self.form)).transpose(0, 1)

    def told(self, seen: _Seen) -> dict:
        off = total = outside = count = 0.0
        for sample in seen.samples:
            x = sample[2 if self.what == "key" else 3]
            off += float((self(x) - x).square().sum())
            total += float(x.square().sum())
            if self.form.static:
                scale, shift = self.side.fixed.float().unbind(-1)
                y = ((x - self.side.channels[0][:, None]) / self.side.channels[1][:, None]).unflatten(
                    -1, (self.form.groups, -1)
                )
                codes = (y - shift[:, None, :, None]) / scale[:, None, :, None]
                outside += float(((codes < -0.5) | (codes > self.form.levels + 0.5)).sum())
                count += y.numel()
        found = {f"{self.what}_error": (off / max(total, 1e-30)) ** 0.5}
        return found | ({f"{self.what}_overflow": outside / count} if self.form.static else {})


def _output_error(seen: _Seen, exact: list[Tensor], *backs: _Back) -> float:
    """Squared error of the attention's outputs with quantized keys, values or both."""
    total = 0.0
    for (query, at, key, value), expected in zip(seen.samples, exact, strict=True):
        found = {"key": key, "value": value} | {back.what: back(key if back.what == "key" else value) for back in backs}
        total += float((_attend(query, at, found["key"], found["value"], seen.scaling) - expected).square().sum())
    return total


def _attend(query: Tensor, at: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """query [heads, group, n, D] at positions `at` [n], key and value [heads, tokens, D] -> [heads, group, n, D]; causal, float32."""
    scores = torch.einsum("hgnd,htd->hgnt", query, key) * scaling
    later = torch.arange(key.shape[1], device=key.device)[None] > at[:, None]
    return torch.einsum("hgnt,htd->hgnd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


def memory_told(facts: dict) -> dict:
    """Bytes of cache a token before and after, and the tokens that fit into a GiB, from a sidecar's facts."""
    form = form_of(facts)
    rows = 2 * facts["kv_heads"] * facts["layers"]
    before, after = rows * facts["head_dim"] * 2, rows * form.row_bytes
    return {
        "format": form.name,
        "bytes_per_token_before": before,
        "bytes_per_token": after,
        "tokens_per_gib_before": (1 << 30) // before,
        "tokens_per_gib": (1 << 30) // after,
        "report": facts.get("report", []),
        "warnings": facts.get("warnings", []),
    }
