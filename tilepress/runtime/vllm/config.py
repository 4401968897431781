"""What vLLM asks of an artifact's `quantization_config`: which versions and dtypes serve, and what runs each layer."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from tilepress.formats import UsageError
from tilepress.formats.checkpoint import FORMAT_VERSION
from tilepress.kernels.arch import OLDEST
from tilepress.runtime.vllm.compat import check_version, installed, wait_before_successors
from tilepress.runtime.vllm.linear import TilepressLinearMethod, refuse_packed

METHOD = "tilepress"


@register_quantization_config(METHOD)
class TilepressConfig(QuantizationConfig):
    """The configuration of an artifact: `quant_method: tilepress` in config.json."""

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 10 * OLDEST[0] + OLDEST[1]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TilepressConfig":
        """Read `quantization_config`. Raises UsageError for a version of vLLM or of the format that is not served."""
        check_version(installed())
        if (found := config.get("format_version")) != FORMAT_VERSION:
            raise UsageError(
                f"the artifact has format version {found!r}, this tilepress reads {FORMAT_VERSION}", "upgrade tilepress"
            )
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            wait_before_successors()  # here, because every worker comes by
            return TilepressLinearMethod(prefix)
        if hasattr(layer, "moe_config"):
            why = "experts are packed, which the plug-in does not serve"
            hint = "compress again with --ignore '*.experts.*', or convert --to dense"
            return refuse_packed(UnquantizedFusedMoEMethod(layer.moe_config), why, hint)
        return None
