"""The loader: from a folder or hub id to a transformers model on a device.

Shards are memory-mapped. On a CPU a model's tensors are those pages as long as their dtype stays; on a card each tensor goes there as it is read, and is
converted and checked there: no host memory is filled but for the tensors that are under way.
"""

import torch

from tilepress.device import find_device
from tilepress.formats import UsageError, foreign_errors, int8, kv_calibration
from tilepress.formats.checkpoint import COMPUTED_BUFFER, Checkpoint
from tilepress.formats.hub import locate
from tilepress.models.meta import check_fit
from tilepress.runtime.hf import hooks, paged_cache as kv_cache
from tilepress.runtime.hf.plugin import METHOD, register
from tilepress.runtime.linear.packed import PackedLinear
from tilepress.runtime.parallel import sharding
from tilepress.runtime.parallel.group import TensorParallel

_SOUND = "config.json and the files beside it must be as save_pretrained writes them"


def load(
    path: str,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    kv: bool = True,
    group: TensorParallel | None = None,
    **kwargs,
):
    """Load a dense checkpoint or an artifact as a transformers causal language model in evaluation mode.

    The linears of an artifact's packed weights are `PackedLinear`; decoder layers of the Llama kind share quantized
    inputs (hf/int8_layers.py). INT8 checkpoints of compressed-tensors load whoever wrote them. `dtype` is that of
    activations and dense weights ("auto": the checkpoint's); packed values keep theirs. The device `meta` gives the
    model without its weights. An artifact with a calibrated attention cache (`compress kv`) generates with it, unless
    `kv` is False. Further arguments go to from_pretrained (`attn_implementation`; `device_map` needs accelerate).
    Of ranks that share the model each gives their `group` and gets its part, on the group's device
    (parallel/sharding.py); there are no further arguments then.
    Raises TilepressError for a damaged checkpoint, UsageError for an unknown architecture, device or dtype.
    """
    if group is not None:
        if kwargs:
            raise UsageError(
                f"ranks that share a model take no {', '.join(kwargs)}", "leave it out, or use one process"
            )
        with foreign_errors(f"{path} does not load", _SOUND):
            return sharding.load(path, group, dtype, revision, kv)
    register()
    device = "meta" if str(device) == "meta" else find_device(device)
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in ("auto", None) and not (isinstance(chosen, torch.dtype) and chosen.is_floating_point):
        raise UsageError(f"the dtype {dtype!r} is none to compute in", "use auto, bfloat16, float16 or float32")
    folder = locate(str(path), revision)
    checkpoint = Checkpoint(folder)
    calibration = kv_calibration.load(checkpoint) if kv else None
    if calibration is not None and "attn_implementation" in kwargs:
        raise UsageError("the calibrated cache brings its own attention", "give kv=False with attn_implementation")
    _check_architecture(checkpoint, trust_remote_code)
    check_fit(checkpoint, trust_remote_code)
    with foreign_errors(f"{folder.name} does not load", _SOUND):
        return _loaded(checkpoint, device, dtype, trust_remote_code, calibration, kwargs)


def _check_architecture(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """Raise UsageError for a model that neither transformers nor code of its own, which may run, knows."""
    from transformers import CONFIG_MAPPING

    kind, name = str(checkpoint.config.get("model_type"))[:60], checkpoint.path.name
    if not trust_remote_code and kind not in CONFIG_MAPPING:
        if "auto_map" in checkpoint.config:
            raise UsageError(
                f"{name} needs its own code for architecture {kind!r}", "add --trust-remote-code if you have read it"
            )
        raise UsageError(f"transformers knows no architecture {kind!r} ({name})", "upgrade transformers")


def _loaded(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    calibration: kv_calibration.KVCalibration | None,
    kwargs: dict,
):
    """Return the model that `load` returns, from a checkpoint that fits its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = checkpoint.path
    ours, with_cache = is_int8(checkpoint), kv_calibration.CONFIG_KEY in checkpoint.config
    if ours or with_cache:
        config, kwargs = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **kwargs
        )
        kwargs["config"] = config
    if ours:  # in place of the compressed-tensors package, which computes in floating point
        config.quantization_config = checkpoint.config["quantization_config"] | {"quant_method": METHOD}
    if with_cache:  # which is put in below, or not at all; and save_pretrained does not write the calibration
        delattr(config, kv_calibration.CONFIG_KEY)
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True} | kwargs
    with hooks.straight_to(torch.device("cpu" if "device_map" in kwargs else device)) as placing:
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options, **placing)
    for what, keys in info.items():
        names = sorted(
            key for key in map(str, keys or ()) if what != "unexpected_keys" or not COMPUTED_BUFFER.search(key)
        )
        if names:
            raise UsageError(
                f"{folder.name}: {len(names)} {what.replace('_', ' ')}, such as {names[0]}",
                "the checkpoint does not fit its config.json",
            )
    model.eval()
    if "device_map" not in kwargs:
        model.to(device)
    if calibration is not None:
        kv_cache.install(model, calibration)
    return model


def is_int8(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is compressed-tensors INT8 that this package runs.

    Raises TilepressError for any other form of it.
    """
    config = checkpoint.config.get("quantization_config", {})
    return config.get("quant_method") == int8.METHOD and bool(int8.scheme_of(config))


def paths(model: torch.nn.Module, kv: str | None = None) -> dict[str, int]:
    """Return which implementation serves how many layers of a model, e.g. {"torch linear on cpu": 1, …}; with its cache in mode `kv`."""
    found: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            key = str(module.path_for(model.dtype))
            found[key] = found.get(key, 0) + 1
        elif isinstance(module, torch.nn.Linear):
            key = f"torch linear on {module.weight.device.type}"
            found[key] = found.get(key, 0) + 1
    if (state := getattr(model, "kv_state", None)) is not None:
        found |= {str(path): count for path, count in kv_cache.paths(model, kv or state.mode).items()}
    return found
