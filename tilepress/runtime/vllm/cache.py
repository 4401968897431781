"""Which attention layers of an engine get a calibrated cache, and what they get of it.

Whoever serves decides by the environment variable `TILEPRESS_VLLM_KV`: without it the calibrated cache is used on a CPU wherever it can be, and two lines say
why where it cannot; `packed` uses it on cards too, and makes those two lines an error; `plain` leaves vLLM's own cache.
"""

import functools
import os

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from tilepress.formats import TilepressError, UsageError, kv_calibration
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.hub import locate
from tilepress.formats.kv_calibration import CONFIG_KEY, CachedLayer, KVCalibration
from tilepress.formats.kv_int4 import PAGE_TOKENS, Forms
from tilepress.kernels import decode_attention, kv_cache
from tilepress.runtime.attention import PackedLayer
from tilepress.runtime.vllm import compat

SWITCH = "TILEPRESS_VLLM_KV"
_CHOICES = ("", "packed", "plain")
_log = init_logger(f"vllm.{__name__}")  # vLLM shows only what logs under its own name


def cache_for(config: VllmConfig, asked: dict) -> PackedLayer | None:
    """Return the cache of a layer that is about to be made with these arguments, or None where vLLM's own serves.

    Raises UsageError where the calibrated one was asked for and cannot be had."""
    try:
        if (calibration := calibration_for(config)) is None:
            return None
        number = extract_layer_index(asked["prefix"])
        if number >= len(calibration.layers):  # of a draft model
            return None
        layer, device = calibration.layers[number], torch.empty(0).device
        _check_layer(asked, layer)
        if device.type == "cuda" and os.environ.get(SWITCH) != "packed":
            _check_kernel(layer, device, config.model_config.dtype)
            raise UsageError(
                "packed pages have to be asked for on cards",
                f"{SWITCH}=packed takes them; docs/vllm.md says what was measured",
            )
        return PackedLayer(layer.of_heads(*_own_heads(asked, calibration)), calibration.refits, device)
    except TilepressError as error:
        if os.environ.get(SWITCH) == "packed":
            raise
        # Where several layers say the same it is told once.
        _log.warning_once("%s; vLLM's own attention cache serves.\nhint: %s", error.message, error.hint)
        return None


def calibration_for(config: VllmConfig) -> KVCalibration | None:
    """Return the calibration that an engine serves with, or None where there is none or `plain` was asked for.

    Raises TilepressError and UsageError for one that cannot be served."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if (switch := os.environ.get(SWITCH, "")) not in _CHOICES:
        raise UsageError(f"{SWITCH}={switch} is unknown", "choose packed or plain, or leave it unset")
    if switch == "plain" or model is None or getattr(model.hf_config, CONFIG_KEY, None) is None:
        return None
    leave = f"or set {SWITCH}=plain"
    compat.check_version(compat.installed())
    compat.check_attention(Attention)
    if cache.cache_dtype != "auto":
        raise UsageError(
            f"{model.model} has a calibrated attention cache, and --kv-cache-dtype {cache.cache_dtype} asks for another",
            f"leave --kv-cache-dtype out, {leave}",
        )
    if cache.user_specified_block_size:
        check_block_size(cache.block_size)
    if model.use_mla:
        raise UsageError("latent attention (MLA) keeps no keys and values of heads", leave.removeprefix("or "))
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UsageError("a calibrated cache is not shared along its tokens", f"leave context parallelism out, {leave}")
    if config.kv_transfer_config is not None:
        raise UsageError(
            "a calibrated cache is not handed to other engines", f"leave --kv-transfer-config out, {leave}"
        )
    calibration = _read(model.model, model.revision, config.load_config.download_dir)
    if isinstance(calibration, TilepressError):
        raise calibration
    calibration.check_model(
        model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads(), model.get_head_size()
    )
    return calibration


@functools.cache
def _read(model: str, revision: str | None, folder: str | None) -> KVCalibration | TilepressError:
    """Return an artifact's calibration, or why there is none: every layer asks, and whose it is takes a look at all weights."""
    try:
        calibration = kv_calibration.load(Checkpoint(locate(model, revision, cache_dir=folder)))
    except TilepressError as error:
        return error
    if calibration is None:
        again = "calibrate again: `tilepress compress kv`"
        return TilepressError(f"{model} has no {kv_calibration.FOLDER}/", again)
    _log.info("Attention cache: %s, %d bytes a token.", calibration.name, calibration.bytes_per_token)
    return calibration


def check_block_size(tokens: int) -> None:
    """Raise UsageError for blocks that are no whole pages."""
    if tokens % PAGE_TOKENS:
        raise UsageError(
            f"blocks of {tokens} tokens are no whole pages of {PAGE_TOKENS}",
            f"leave --block-size out or make it a multiple of {PAGE_TOKENS}, or set {SWITCH}=plain",
        )


def _check_layer(asked: dict, layer: CachedLayer) -> None:
    """Raise UsageError for a layer whose attention the ops do not compute."""
    cache_config = asked.get("cache_config")
    window = asked.get("per_layer_sliding_window") or (cache_config and cache_config.sliding_window)
    extra = asked.get("extra_impl_args", {})
    special = {
        "a sliding window": window,
        "ALiBi": asked.get("alibi_slopes"),
        "a soft cap": asked.get("logits_soft_cap"),
        "the cache of another layer": asked.get("kv_sharing_target_layer_name"),
        "a backend of its own": asked.get("attn_backend"),
        "attention that is not a decoder's own": asked.get("attn_type", "decoder") != "decoder",
        "values of another size than keys": (asked.get("head_size_v") or asked["head_size"]) != asked["head_size"],
        **{name: value is not None for name, value in extra.items()},
    }
    if found := [name for name, value in special.items() if value]:
        raise UsageError(
            f"{asked['prefix']} has {found[0]}, which a calibrated cache does not serve", f"{SWITCH}=plain"
        )
    if asked["head_size"] != layer.form.head_dim:
        raise TilepressError(
            f"{asked['prefix']} has heads of {asked['head_size']}, the cache was calibrated for {layer.form.head_dim}",
            "calibrate again: `tilepress compress kv`",
        )


def why_slow(form: Forms, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a reference appends to a cache or attends to it, or None where kernels do."""
    paths = kv_cache.path(device, form), decode_attention.path(device, form, dtype)
    return next((path.why for path in paths if path.is_reference), None)


def _check_kernel(layer: CachedLayer, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UsageError for a card on which a reference serves: it saves memory, and takes long."""
    if (why := why_slow(layer.form, device, dtype)) is not None:
        raise UsageError(
            f"no kernel serves a cache of {layer.form.name} here: {why}",
            f"{SWITCH}=packed takes the reference, which is slow; `eval speed` and docs/kv_cache.md say what kernels take",
        )


def _own_heads(asked: dict, calibration: KVCalibration) -> tuple[int, int]:
    """Return this rank's KV heads, first and end; ranks share one where there are more ranks than heads."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    first = get_tensor_model_parallel_rank() * calibration.kv_heads // get_tensor_model_parallel_world_size()
    return first, first + (asked.get("num_kv_heads") or asked["num_heads"])
