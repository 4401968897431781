"""`import tilepress.hf` makes transformers' from_pretrained load artifacts as `tilepress.load` does, alone and stacked:

- sparse layers (`quant_method: tilepress`), by the quantizer that `register` adds;
- INT8 layers of compressed-tensors checkpoints, by the same quantizer, without that package; schemes that it does not run go to the stock one;
- the calibrated attention cache that a config names, put into models that generate. `attn_implementation=…` leaves it out: it brings its own attention.

What from_pretrained does with other checkpoints stays as it is.
"""

from functools import wraps

from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import CompressedTensorsConfig

from tilepress.formats import TilepressError, int8, kv_calibration
from tilepress.formats.checkpoint import Checkpoint, locate
from tilepress.runtime.hf import paged_cache as kv_cache
from tilepress.runtime.hf.plugin import TilepressConfig, register


class _CompressedTensors(CompressedTensorsConfig):
    """What transformers finds for `quant_method: compressed-tensors`: chooses between our quantizer and the stock one."""

    @classmethod
    def from_dict(cls, config_dict, *args, **kwargs):
        try:
            int8.scheme_of(config_dict)
        except TilepressError:
            return CompressedTensorsConfig.from_dict(config_dict, *args, **kwargs)
        return TilepressConfig.from_dict(config_dict, *args, **kwargs)


def _install_cache(model: PreTrainedModel, options: dict) -> None:
    """Puts the cache that a model's config names into it; `options` are the arguments that from_pretrained got.

    Raises TilepressError for a calibration that is missing, damaged or of another model."""
    named = model.config.__dict__.pop(kv_calibration.CONFIG_KEY, None)  # save_pretrained does not write the calibration
    asked = options.get("attn_implementation") or getattr(options.get("config"), "_attn_implementation", None)
    if named is None or asked or not model.can_generate() or options.get("state_dict") is not None:
        return
    hub = ("revision", "cache_dir", "token", "local_files_only")
    folder = locate(model.name_or_path, **{name: options[name] for name in hub if name in options})
    calibration = kv_calibration.load(Checkpoint(folder / (options.get("subfolder") or "")))
    if calibration is not None:
        kv_cache.install(model, calibration)


def _with_cache(stock):
    @wraps(stock)
    def from_pretrained(cls, *args, **kwargs):
        loaded = stock(cls, *args, **kwargs)
        _install_cache(loaded[0] if isinstance(loaded, tuple) else loaded, kwargs)
        return loaded

    return classmethod(from_pretrained)


register()
AUTO_QUANTIZATION_CONFIG_MAPPING[int8.METHOD] = _CompressedTensors
PreTrainedModel.from_pretrained = _with_cache(PreTrainedModel.from_pretrained.__func__)
