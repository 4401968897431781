"""Additions of `import tilepress.hf` to transformers' from_pretrained, beside the quantizer of plugin.py: INT8
checkpoints, and the calibrated cache.
"""

from functools import cache

from transformers import PreTrainedModel
from transformers.utils.quantization_config import CompressedTensorsConfig

from tilepress.formats import TilepressError, int8, kv_calibration
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.hub import locate
from tilepress.runtime.hf import hooks, paged_cache as kv_cache
from tilepress.runtime.hf.plugin import TilepressConfig, register


class _CompressedTensors(CompressedTensorsConfig):
    """The quantizer class that transformers finds for `quant_method: compressed-tensors`: it chooses between our
    quantizer and the stock one.
    """

    @classmethod
    def from_dict(cls, config_dict, *args, **kwargs):
        try:
            int8.scheme_of(config_dict)
        except TilepressError:
            return CompressedTensorsConfig.from_dict(config_dict, *args, **kwargs)
        return TilepressConfig.from_dict(config_dict, *args, **kwargs)


def _install_cache(model: PreTrainedModel, options: dict) -> None:
    """Put the cache that a model's config names into it; `options` are the arguments that from_pretrained got.

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


@cache
def install() -> None:
    """Make from_pretrained load every artifact. `tilepress.hf` calls it when it is imported, and once more when it is run."""
    register()
    hooks.replace_quantization_config(int8.METHOD, _CompressedTensors)
    hooks.after_from_pretrained(_install_cache)
