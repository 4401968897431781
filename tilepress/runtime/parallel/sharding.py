"""A rank's part of a checkpoint becomes a model: each layer's own ranges (partition.py) are read from the files, and nothing else of them.

The model is transformers' own, with a rank's heads in its config: its forward pass and `generate` work too, on all ranks together.
"""

from functools import partial

import torch
from torch import Tensor, nn

from tilepress.formats import TilepressError, UsageError, int8, kv_calibration
from tilepress.formats.checkpoint import COMPUTED_BUFFER, Checkpoint, Weight, model_names, module_path
from tilepress.formats.hub import locate
from tilepress.models.meta import check_fit
from tilepress.runtime.hf import paged_cache as kv_cache
from tilepress.runtime.hf.plugin import METHOD, check_sizes
from tilepress.runtime.linear.cut import VERIFY, Whole
from tilepress.runtime.parallel.group import TensorParallel
from tilepress.runtime.parallel.partition import Partition


def load(
    path: str, group: TensorParallel, dtype: str | torch.dtype = "auto", revision: str | None = None, kv: bool = True
) -> nn.Module:
    """Load this rank's part of a dense checkpoint or artifact, on the group's device; arguments as those of
    runtime/loader.load.

    Raises UsageError for an architecture that the lean pass does not know, and heads that cannot be shared; TilepressError for a damaged checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    checkpoint = Checkpoint(locate(str(path), revision))
    check_sizes(checkpoint)
    check_fit(checkpoint)
    scheme = _scheme(checkpoint)
    calibration = kv_calibration.load(checkpoint) if kv else None
    config = AutoConfig.from_pretrained(checkpoint.path)
    for key in ("quantization_config", kv_calibration.CONFIG_KEY):
        config.__dict__.pop(key, None)
    dtype = _dtype(checkpoint) if dtype == "auto" else dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    own = Partition.of(model, group, checkpoint.name)
    calibration = None if calibration is None else own.of_cache(calibration)
    with torch.inference_mode(False), torch.no_grad():
        _fill(model, checkpoint, own, scheme, dtype)
    if (checkpoint.path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    if calibration is not None:
        kv_cache.install(model, calibration)
    if "quantization_config" in checkpoint.config:
        model.config.quantization_config = checkpoint.config["quantization_config"]
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


def _fill(model, checkpoint: Checkpoint, own: Partition, scheme: int8.Int8Scheme | None, dtype: torch.dtype) -> None:
    """Puts a rank's tensors where the model has empty ones, shard by shard."""
    modules, prefix = set(dict(model.named_modules())), model.base_model_prefix
    expected, unknown = dict(model.named_parameters()), []
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    device = own.group.device
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):  # computed, not stored
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
            model._init_weights(module)
    for weight in sorted(checkpoint.weights.values(), key=lambda weight: (weight.file, weight.name)):
        path = module_path(weight.name, modules, prefix)
        if path == "lm_head" and tied:
            continue
        if weight.is_packed or (path in own.linears and weight.name.endswith(".weight")):
            original = model.get_submodule(path) if path is not None else None
            if not isinstance(original, nn.Linear):
                raise TilepressError(f"{weight.name} is packed, but the model has no linear layer of that name", VERIFY)
            model.set_submodule(path, own.cut(path, _whole(checkpoint, weight, scheme, original), dtype))
        else:
            name = next((n for n in model_names(weight.name, prefix) if n in expected), None)
            owner = (name or "").rpartition(".")[0]
            if name is None and not COMPUTED_BUFFER.search(weight.name):
                unknown.append(weight.name)
            elif name is not None and owner not in own.linears:
                _check_shape(weight, weight.entries[0].shape, tuple(expected[name].shape))
                made = nn.Parameter(checkpoint.read(weight.name).to(device, dtype, copy=True), requires_grad=False)
                setattr(model.get_submodule(owner), name.rpartition(".")[2], made)
    own.finish(model)
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    for what, names in (("missing", empty), ("unexpected", unknown)):
        if names:
            raise TilepressError(f"{len(names)} {what} tensors in {checkpoint.name}, such as {min(names)}", VERIFY)


def _check_shape(weight: Weight, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise TilepressError(f"{weight.name} is {list(found)}, a mismatch with the model's {list(expected)}", VERIFY)


def _whole(checkpoint: Checkpoint, weight: Weight, scheme: int8.Int8Scheme | None, original: nn.Linear) -> Whole:
    """A stored layer that takes the place of `original`. Raises TilepressError where it does not fit there."""
    form, shape = None, tuple(original.weight.shape)
    if weight.is_packed:
        form = checkpoint.form(weight)
    _check_shape(weight, weight.entries[0].shape if form is None else (form.rows, form.cols), shape)
    if form is not None and form.transposed:
        raise TilepressError(f"{weight.name} is packed as a Conv1D's, the model has Linear", VERIFY)
    facts = weight.name, shape, original.bias is not None
    read = partial(_read, checkpoint, weight.name.removesuffix("weight"))
    return Whole(
        *facts, read, checkpoint.packed_shape(weight) if weight.is_packed else None, scheme and scheme.of(weight.name)
    )


def _read(checkpoint: Checkpoint, prefix: str, part: str, *index: slice) -> Tensor:
    if prefix + part not in checkpoint.tensors:
        raise TilepressError(f"{prefix}{part} is missing in {checkpoint.name}", VERIFY)
    return checkpoint.part(prefix + part, *index)
