"""The quantizer plug-in with which transformers' from_pretrained loads an artifact (transformers 5, `quant_method:
tilepress`).

Before the weights are read, the shards' headers tell which weights are packed and how large; their modules are replaced on the
meta device by packed ones with the same names and exact shapes. From there the ordinary loader does everything: shards,
device_map, tied embeddings, saving. Once the weights are there, decoder layers of INT8 linears are merged and fused (int8_layers.py). Anything missing,
unexpected or of another shape raises: a model with a random layer is worse than none.
"""

import functools
from pathlib import Path

import torch
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tilepress.formats import TilepressError
from tilepress.formats.checkpoint import (
    COMPUTED_BUFFER,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Checkpoint,
    Weight,
    linear_shape,
    module_path,
)
from tilepress.formats.int8 import Int8Scheme, scheme_of
from tilepress.models.experts import SeparateExperts, place_of
from tilepress.runtime.hf import adapters, hooks
from tilepress.runtime.hf.int8_layers import fuse
from tilepress.runtime.linear.packed import PackedLinear, packed_linear

METHOD = "tilepress"
_VERIFY = "`tilepress verify DIR` lists every finding"


@functools.cache
def register() -> None:
    """Makes from_pretrained know artifacts, and peft their layers; calling it again does nothing."""
    hooks.add_quantizer(METHOD, TilepressConfig, TilepressQuantizer)
    hooks.count_parameters(lambda m: m.out_features * m.in_features if isinstance(m, PackedLinear) else 0)
    adapters.register()


class TilepressConfig(QuantizationConfigMixin):
    """`quantization_config` of an artifact, or of INT8 that compressed-tensors or a tool of its kind wrote. Unknown keys are kept, so that an older
    reader does not break a newer file."""

    def __init__(self, format_version: int = FORMAT_VERSION, value_dtypes: list[str] | None = None, **extra):
        self.quant_method = METHOD
        self.format_version = format_version
        self.value_dtypes = value_dtypes or []
        for key, value in extra.items():
            if key != "quant_method":
                setattr(self, key, value)


class TilepressQuantizer(HfQuantizer):
    requires_calibration = True  # from_pretrained(dense, quantization_config=...) is refused

    def validate_environment(self, *args, **kwargs):
        version = self.quantization_config.format_version
        if version != FORMAT_VERSION:
            raise TilepressError(
                f"the artifact has format version {version!r}, this tilepress reads {FORMAT_VERSION}",
                "upgrade tilepress",
            )

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        if not checkpoint_files:
            raise TilepressError("the artifact's shards were not found", _VERIFY)
        checkpoint = Checkpoint(Path(checkpoint_files[0]).parent)
        check_sizes(checkpoint)
        config = self.quantization_config.to_dict()
        replace_packed(model, checkpoint, scheme_of(config) if config.get("config_groups") else None)
        check_shapes(model, checkpoint)
        self._model = model  # transformers before 5.20 does not hand it to update_weight_conversions
        self._dtypes = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
        self._stored = checkpoint.config.get("quantization_config", config)
        adjust, heads = model._adjust_missing_and_unexpected_keys, heads_beside(model, checkpoint)

        def refuse_any(loading_info):
            adjust(loading_info)
            for what in ("missing", "unexpected", "mismatched"):
                keys = sorted(str(key) for key in getattr(loading_info, f"{what}_keys"))
                if what == "unexpected":
                    keys = [key for key in keys if key not in heads and not COMPUTED_BUFFER.search(key)]
                if keys:
                    names = ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")
                    raise TilepressError(f"{len(keys)} {what} tensors in {checkpoint.path.name}: {names}", _VERIFY)

        # The one place where the loader's final list is known before it returns a model.
        model._adjust_missing_and_unexpected_keys = refuse_any

    def _process_model_after_weight_loading(self, model, **kwargs):
        model.__dict__.pop("_adjust_missing_and_unexpected_keys", None)
        for name, parameter in model.named_parameters():
            # transformers before 5.20 leaves the stored dtype on some renamed tensors
            if parameter.dtype != self._dtypes.get(name, parameter.dtype):
                parameter.data = parameter.data.to(self._dtypes[name])
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear):
                if not module.is_meta and (problem := module.check_bounds()):
                    raise TilepressError(f"{name}.weight: {problem}", _VERIFY)
                module.lay_out()
        fuse(model)
        model.config.quantization_config = self._stored  # save_pretrained writes what was read
        del self._model, self._dtypes, self._stored
        return model

    def update_weight_conversions(self, weight_conversions, model=None):
        """Drops the merging of experts that are packed one by one; renamings stay."""
        model = model or self._model
        if any(isinstance(module, SeparateExperts) for module in model.modules()):
            names = list(model.state_dict())
            merging = [c for c in weight_conversions if hasattr(c, "operations")]
            unused = [c for c in merging if not any(name.endswith(t) for t in c.target_patterns for name in names)]
            weight_conversions = [c for c in weight_conversions if c not in unused]
        return weight_conversions

    def update_parallel_plan(self, model, plan):
        if plan and getattr(model, "_tp_size", None):
            raise TilepressError(
                "packed weights cannot be split by transformers' tensor parallelism",
                "load on one device, or convert --to dense first",
            )

    def is_serializable(self):
        return True

    @property
    def is_trainable(self):
        """Tell Trainer whether adapters can be trained: gradients pass all layers but those of quantized activations."""
        config = self.quantization_config.to_dict()
        return not config.get("config_groups") or scheme_of(config).activations == "none"

    @property
    def is_compileable(self):
        return True


def check_sizes(checkpoint: Checkpoint) -> None:
    """Compares the shards with the manifest, where there is one, by size: hashes are `verify`'s business."""
    for file in (checkpoint.manifest or {}).get("files", []):
        path = checkpoint.path / file["name"]
        if file["name"] in checkpoint.shards and path.stat().st_size != file["bytes"]:
            raise TilepressError(
                f"{file['name']} has {path.stat().st_size} bytes, {MANIFEST_NAME} declares {file['bytes']}", _VERIFY
            )


def heads_beside(model: torch.nn.Module, checkpoint: Checkpoint) -> set[str]:
    """Stored tensors that lie outside of a base model, where `model` is one: the head of the model that was stored."""
    prefix = f"{model.base_model_prefix}."
    outside = {name for name in checkpoint.tensors if not name.startswith(prefix)}
    return outside if model.base_model is model and len(outside) < len(checkpoint.tensors) else set()


def check_shapes(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Compares what the shards declare with the model, for every tensor whose name is the model's: not every version of the loader does."""
    prefix = f"{model.base_model_prefix}."
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, entry in checkpoint.tensors.items():
        known = next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in expected), None)
        if known is not None and expected[known] != entry.shape:
            raise TilepressError(
                f"{name} is {list(entry.shape)}, a mismatch with the model's {list(expected[known])}", _VERIFY
            )


def replace_packed(model: torch.nn.Module, checkpoint: Checkpoint, scheme: Int8Scheme | None) -> None:
    """Puts packed modules, empty on the meta device, where the checkpoint has packed weights; `scheme` is that of int8 ones.

    Raises TilepressError for a packed weight that has no place in the model, or a place of another shape.
    """
    modules = dict(model.named_modules())
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    experts: dict[str, dict[str, dict[str, torch.nn.Module]]] = {}
    for weight in checkpoint.weights.values():
        if not weight.is_packed:
            continue
        path = module_path(weight.name, set(modules), model.base_model_prefix)
        if path is not None:
            model.set_submodule(path, _packed_module(checkpoint, weight, scheme, modules[path], dtype))
        elif place := place_of(weight.name, set(modules)):
            if place.experts is None:
                raise TilepressError(f"{weight.name} belongs to experts that the model does not have", _VERIFY)
            linears = experts.setdefault(place.experts, {}).setdefault(place.number, {})
            linears[place.linear] = _packed_module(checkpoint, weight, scheme, None, dtype)
        else:
            raise TilepressError(
                f"{weight.name} is packed, but {type(model).__name__} has no linear layer of that name", _VERIFY
            )
    for path, numbered in experts.items():
        try:
            model.set_submodule(path, SeparateExperts(modules[path], numbered))
        except ValueError as error:
            raise TilepressError(
                f"the packed experts of {path} ({error}) cannot be run as they are",
                "compress again with --ignore '*.experts.*', or convert --to dense",
            ) from error


def _packed_module(
    checkpoint: Checkpoint,
    weight: Weight,
    scheme: Int8Scheme | None,
    original: torch.nn.Module | None,
    dtype: torch.dtype,
) -> torch.nn.Module:
    """The module for a packed weight in place of `original`, a linear layer; of an expert there is none."""
    form, shape = checkpoint.form(weight), linear_shape(original)
    if original is not None and (shape is None or shape[:2] != (form.rows, form.cols)):
        found = type(original).__name__ if shape is None else shape[:2]
        raise TilepressError(f"{weight.name} is packed as {form.rows} x {form.cols}, the model has {found}", _VERIFY)
    if shape is not None and shape[2] != form.transposed:
        raise TilepressError(
            f"{weight.name} is packed {'' if form.transposed else 'not '}as a Conv1D's, the model has {type(original).__name__}",
            _VERIFY,
        )
    packed, bias = checkpoint.packed_shape(weight), getattr(original, "bias", None)
    own = scheme and scheme.of(weight.name)
    return packed_linear(packed, None if bias is None else bias.dtype, dtype, own)
