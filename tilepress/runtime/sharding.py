"""A rank's part of a checkpoint becomes a model: each layer's own ranges are read from the files as they are, nothing is packed or quantized again.

    dense, INT8   rows or columns of the matrix; scales of rows with the rows, of tensors and inputs as they are
    sparse        tiles are stored row block by row block: rows of a layer are one range of words, columns one range in each row block
    KV cache      calibration of the rank's own KV heads; one that several ranks' query heads attend to is on each of them

A part of a sparse layer that does not begin or end where tiles do takes all tiles that it touches (parallel.Trimmed): heads of 64 on an odd number, widths
of less than a tile for each rank. The model is transformers' own, with a rank's heads in its config: its forward pass and `generate` work too, on all
ranks together.
"""

import copy
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tilepress.formats import TilepressError, UsageError, int8, kv_calibration, sparse
from tilepress.formats.checkpoint import COMPUTED_BUFFER, Checkpoint, Weight, locate, model_names, module_path
from tilepress.formats.kv_calibration import KVCalibration, Side
from tilepress.runtime import decoder, kv_cache
from tilepress.runtime.int8 import Int8Linear
from tilepress.runtime.modules import sparse_linear
from tilepress.runtime.parallel import RowParallel, RowParallelInt8, TensorParallel, Trimmed, VocabularyParallel, parts
from tilepress.runtime.plugin import METHOD, check_sizes

_VERIFY = "`tilepress verify DIR` lists every finding"
Span = tuple[int, int]  # first and end


@dataclass(frozen=True)
class Part:
    """Of a layer's outputs and inputs those that a rank has; None: all. `sums`: its outputs are summed over the ranks."""

    rows: Span | None = None
    cols: Span | None = None

    @property
    def sums(self) -> bool:
        return self.cols is not None


def load(
    path: str, group: TensorParallel, dtype: str | torch.dtype = "auto", revision: str | None = None, kv: bool = True
) -> nn.Module:
    """This rank's part of a dense checkpoint or artifact, on the group's device; arguments as those of runtime/loader.load.

    Raises UsageError for an architecture that the lean pass does not know, and heads that cannot be shared; TilepressError for a damaged checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    checkpoint = Checkpoint(locate(str(path), revision))
    check_sizes(checkpoint)
    scheme = _scheme(checkpoint)
    calibration = kv_calibration.load(checkpoint) if kv else None
    config = AutoConfig.from_pretrained(checkpoint.path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = _dtype(checkpoint) if dtype == "auto" else dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    _check_family(model, checkpoint)
    heads = _Heads.of(config, group)
    calibration = None if calibration is None else heads.of_cache(calibration)
    with torch.inference_mode(False), torch.no_grad():
        _fill(model, checkpoint, _parts(model, heads, group), scheme, dtype, group)
    _share_heads(model, heads)
    if (checkpoint.path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    if calibration is not None:
        kv_cache.install(model, calibration)
        model.config.__dict__.pop(kv_calibration.CONFIG_KEY, None)
    if "quantization_config" in checkpoint.config:
        model.config.quantization_config = checkpoint.config["quantization_config"]
    model.tensor_parallel = group
    return model


def _scheme(checkpoint: Checkpoint) -> int8.Int8Scheme | None:
    config = checkpoint.config.get("quantization_config", {})
    if config and config.get("quant_method") not in (METHOD, int8.METHOD):
        raise UsageError(f"{checkpoint.name} is quantized by {config.get('quant_method')!r}", "give a dense checkpoint")
    return int8.scheme_of(config) if config.get("config_groups") else None


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    named = checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype")
    if isinstance(named, str) and isinstance(getattr(torch, named, None), torch.dtype):
        return getattr(torch, named)
    return next(entry.dtype for entry in checkpoint.tensors.values() if entry.dtype.is_floating_point)


@dataclass(frozen=True)
class _Heads:
    """Heads of a model and those of a rank: query heads [first, end) with the KV heads that they attend to."""

    count: int
    kv_count: int
    dim: int
    own: Span
    own_kv: Span

    @classmethod
    def of(cls, config, group: TensorParallel) -> "_Heads":
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if heads % group.size or (kv_heads % group.size and group.size % kv_heads):
            fit = [n for n in range(2, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
            raise UsageError(
                f"{heads} heads with {kv_heads} KV heads are not shared evenly by {group.size} ranks",
                f"use {', '.join(map(str, fit))} ranks" if fit else "use one card",
            )
        each, rank = heads // group.size, group.rank
        kv_each, first = max(1, kv_heads // group.size), rank * kv_heads // group.size
        return cls(heads, kv_heads, dim, (rank * each, (rank + 1) * each), (first, first + kv_each))

    @property
    def queries(self) -> Span:
        """Of the columns of q, and of what the output projection takes."""
        return self.own[0] * self.dim, self.own[1] * self.dim

    @property
    def keys(self) -> Span:
        return self.own_kv[0] * self.dim, self.own_kv[1] * self.dim

    def of_cache(self, calibration: KVCalibration) -> KVCalibration:
        """The calibration of the rank's KV heads. Raises TilepressError for one of another number of heads."""
        if calibration.kv_heads != self.kv_count:
            raise TilepressError(
                f"the cache was calibrated for {calibration.kv_heads} KV heads, the model has {self.kv_count}",
                "calibrate again: `tilepress compress kv`",
            )
        own = slice(*self.own_kv)

        def side(whole: Side) -> Side:
            channels = None if whole.channels is None else whole.channels[:, own].contiguous()
            return Side(channels, None if whole.fixed is None else whole.fixed[own].contiguous(), whole.clip)

        layers = tuple((side(keys), side(values)) for keys, values in calibration.layers)
        return replace(calibration, kv_heads=self.own_kv[1] - self.own_kv[0], layers=layers)


def _check_family(model: nn.Module, checkpoint: Checkpoint) -> None:
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    if name not in decoder.LLAMA and name != decoder.OPT:
        raise UsageError(
            f"{checkpoint.name} is a {type(model).__name__}: tensor parallelism is for Llama, Mistral, Qwen2, Qwen3, OPT",
            "load it on one card",
        )


def _layers(model: nn.Module) -> nn.ModuleList:
    return getattr(model.model, "decoder", model.model).layers


def _parts(model: nn.Module, heads: _Heads, group: TensorParallel) -> dict[str, Part]:
    """By the layers' paths."""
    names, found = {module: name for name, module in model.named_modules()}, {}
    for layer in _layers(model):
        attention, is_opt = layer.self_attn, hasattr(layer, "fc1")
        found[names[attention.q_proj]] = Part(rows=heads.queries)
        for linear in (attention.k_proj, attention.v_proj):
            found[names[linear]] = Part(rows=heads.keys)
        found[names[attention.out_proj if is_opt else attention.o_proj]] = Part(cols=heads.queries)
        into = [layer.fc1] if is_opt else [layer.mlp.gate_proj, layer.mlp.up_proj]
        out = layer.fc2 if is_opt else layer.mlp.down_proj
        inner = group.part(out.in_features)
        found |= {names[linear]: Part(rows=inner) for linear in into}
        found[names[out]] = Part(cols=inner)
    found["lm_head"] = Part(rows=group.part(model.lm_head.out_features))
    return found


def _share_heads(model: nn.Module, heads: _Heads) -> None:
    """What the model's own modules and caches know of heads."""
    own, own_kv = (end - first for first, end in (heads.own, heads.own_kv))
    config = copy.deepcopy(model.config)
    config.head_dim, config.num_attention_heads = heads.dim, own
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = own_kv
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
    for layer in _layers(model):
        attention = layer.self_attn
        if hasattr(attention, "num_heads"):
            attention.num_heads = own
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = own // own_kv


def _fill(model, checkpoint: Checkpoint, shared: dict[str, Part], scheme, dtype: torch.dtype, group) -> None:
    """Puts a rank's tensors where the model has empty ones, shard by shard."""
    modules, prefix = set(dict(model.named_modules())), model.base_model_prefix
    expected, unknown = dict(model.named_parameters()), []
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    read = _Reader(checkpoint, scheme, dtype, group)
    for weight in sorted(checkpoint.weights.values(), key=lambda weight: (weight.file, weight.name)):
        path = module_path(weight.name, modules, prefix)
        if path == "lm_head" and tied:
            continue
        if path in shared and weight.name.endswith(".weight"):
            model.set_submodule(path, read.linear(weight, shared[path], model.get_submodule(path)))
        elif weight.layout != "dense":
            original = model.get_submodule(path) if path is not None else None
            if not isinstance(original, nn.Linear):
                raise TilepressError(
                    f"{weight.name} is packed, but the model has no linear layer of that name", _VERIFY
                )
            model.set_submodule(path, read.linear(weight, Part(), original))
        else:
            name = next((n for n in model_names(weight.name, prefix) if n in expected), None)
            owner = (name or "").rpartition(".")[0]
            if name is None and not COMPUTED_BUFFER.search(weight.name):
                unknown.append(weight.name)
            elif name is not None and owner not in shared:
                _check_shape(weight, weight.entries[0].shape, tuple(expected[name].shape))
                made = nn.Parameter(read.tensor(weight.name, dtype=dtype), requires_grad=False)
                setattr(model.get_submodule(owner), name.rpartition(".")[2], made)
    if tied:
        first, end = shared["lm_head"].rows
        head = nn.Linear(model.lm_head.in_features, end - first, bias=False, device="meta")
        head.weight = nn.Parameter(model.get_input_embeddings().weight[first:end], requires_grad=False)
        model.lm_head = head
    ends = parts(model.config.vocab_size, group.size)
    sizes = [end - first for first, end in itertools.pairwise(ends)]
    model.lm_head = VocabularyParallel(model.lm_head, sizes, group)
    if (rotary := getattr(model.model, "rotary_emb", None)) is not None:  # computed, not stored
        model.model.rotary_emb = type(rotary)(config=model.config).to(group.device)
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    for what, names in (("missing", empty), ("unexpected", unknown)):
        if names:
            raise TilepressError(f"{len(names)} {what} tensors in {checkpoint.name}, such as {min(names)}", _VERIFY)


def _check_shape(weight: Weight, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise TilepressError(f"{weight.name} is {list(found)}, a mismatch with the model's {list(expected)}", _VERIFY)


@dataclass(frozen=True)
class _Reader:
    """Reads a rank's parts of a checkpoint's layers."""

    checkpoint: Checkpoint
    scheme: int8.Int8Scheme | None
    dtype: torch.dtype  # of the model
    group: TensorParallel

    def tensor(self, name: str, *index: slice, dtype: torch.dtype | None = None) -> Tensor:
        """A range of a stored tensor, in memory of its own on the rank's device."""
        found = self.checkpoint.part(name, *index)
        return found.to(self.group.device, dtype or found.dtype, copy=True).contiguous()

    def linear(self, weight: Weight, part: Part, original: nn.Linear) -> nn.Module:
        """The layer of a stored weight in place of the whole one, as far as it is this rank's."""
        form, (rows, cols) = None, original.weight.shape
        if weight.layout != "dense":
            form = self.checkpoint.form(weight)
        _check_shape(weight, weight.entries[0].shape if form is None else (form.rows, form.cols), (rows, cols))
        if form is not None and form.transposed:
            raise TilepressError(f"{weight.name} is packed as a Conv1D's, the model has Linear", _VERIFY)
        spans = part.rows or (0, rows), part.cols or (0, cols)
        adds = original.bias is not None and not (part.sums and self.group.rank)  # the sum has it once
        make = {"dense": self._dense, "int8": self._int8}.get(weight.layout, self._sparse)
        return make(weight, part, spans, adds)

    def _bias(self, weight: Weight, rows: Span) -> nn.Parameter:
        name = weight.name.removesuffix("weight") + "bias"
        if name not in self.checkpoint.tensors:
            raise TilepressError(f"{name} is missing in {self.checkpoint.name}", _VERIFY)
        return nn.Parameter(self.tensor(name, slice(*rows), dtype=self.dtype), requires_grad=False)

    def _dense(self, weight: Weight, part: Part, spans: tuple[Span, Span], bias: bool) -> nn.Module:
        rows, cols = (slice(*span) for span in spans)
        made = nn.Linear(cols.stop - cols.start, rows.stop - rows.start, bias=bias, device="meta")
        made.weight = nn.Parameter(self.tensor(weight.name, rows, cols, dtype=self.dtype), requires_grad=False)
        if bias:
            made.bias = self._bias(weight, spans[0])
        return RowParallel(made, self.group) if part.sums else made

    def _int8(self, weight: Weight, part: Part, spans: tuple[Span, Span], bias: bool) -> nn.Module:
        if self.scheme is None:
            raise TilepressError(f"{weight.name} is int8, but config.json has no scheme for it", _VERIFY)
        rows, cols = (slice(*span) for span in spans)
        quantizes = part.sums and self.scheme.activations != "none"
        kind = RowParallelInt8 if quantizes else Int8Linear
        made = kind(rows.stop - rows.start, cols.stop - cols.start, self.scheme, self.dtype, bias)
        made.weight = self.tensor(weight.name, rows, cols)
        for entry in weight.entries[1:]:
            name = entry.name.rpartition(".")[2]
            of_rows = name == "weight_scale" and self.scheme.weights == "channel"
            dtype = self.dtype if entry.dtype.is_floating_point else None
            setattr(made, name, self.tensor(entry.name, *([rows] if of_rows else []), dtype=dtype))
        if bias:
            made.bias = self._bias(weight, spans[0])
        if quantizes:
            made.group = self.group
        return RowParallel(made, self.group) if part.sums and not quantizes else made

    def _sparse(self, weight: Weight, part: Part, spans: tuple[Span, Span], bias: bool) -> nn.Module:
        (packed, covered), (rows, cols) = self._tiles(weight, spans), spans
        made = sparse_linear(packed, bias, self.dtype if bias else None)
        if (problem := made.check_bounds()) is not None:
            raise TilepressError(f"{weight.name}: {problem}", _VERIFY)
        if bias:
            made.bias = self._bias(weight, covered[0])
        if covered != spans:
            tops = covered[0][0], covered[1][0]
            made = Trimmed(made, *(tuple(x - top for x in span) for span, top in zip((rows, cols), tops, strict=True)))
        return RowParallel(made, self.group) if part.sums else made

    def _tiles(self, weight: Weight, spans: tuple[Span, Span]) -> tuple[sparse.Packed, tuple[Span, Span]]:
        """The tiles that a part touches as a packed weight, and the part that they cover."""
        whole, form = self.checkpoint.packed_shape(weight), sparse.MODULES[weight.layout]
        offsets = self.checkpoint.read(f"{weight.name}_offsets").long()
        words = weight.entries[0].shape[0]
        if int(offsets[0]) != 0 or int(offsets[-1]) * 4 != words or bool((offsets[1:] < offsets[:-1]).any()):
            raise TilepressError(f"{weight.name}: offsets do not rise from 0 to {words // 4}", _VERIFY)
        sides = zip(spans, (form.TILE_ROWS, form.TILE_COLS), strict=True)
        down, across = ((first // side, -(-end // side)) for (first, end), side in sides)
        per_block = -(-whole.cols // form.TILE_COLS)
        if across == (0, per_block):
            ranges = [(down[0] * per_block, down[1] * per_block)]
        else:
            ranges = [(block * per_block + across[0], block * per_block + across[1]) for block in range(*down)]
        sizes = torch.cat([offsets[first + 1 : end + 1] - offsets[first:end] for first, end in ranges])
        own = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        made = torch.empty(4 * int(own[-1]), dtype=torch.int32, device=self.group.device)
        at = 0
        for first, end in ranges:
            piece = self.checkpoint.part(weight.name, slice(4 * int(offsets[first]), 4 * int(offsets[end])))
            made[at : at + len(piece)] = piece
            at += len(piece)
        covered = (
            (down[0] * form.TILE_ROWS, min(down[1] * form.TILE_ROWS, whole.rows)),
            (across[0] * form.TILE_COLS, min(across[1] * form.TILE_COLS, whole.cols)),
        )
        height, width = (end - first for first, end in covered)
        packed = replace(whole, words=made, offsets=own.int().to(made.device), rows=height, cols=width)
        if getattr(whole, "scale", None) is not None:
            packed = replace(packed, scale=self.tensor(f"{weight.name}_scale", slice(*covered[0])))
        return packed, covered
