"""The plug-in for vLLM: `vllm serve ARTIFACT` and `LLM(model=ARTIFACT)` run packed weights with this package's kernels.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins` of an installed tilepress.
Scheduler, LoRA and server stay vLLM's. `config.py` answers for an artifact's `quantization_config`, `linear.py` collects the stored tensors of each
linear layer and runs them, `cache.py` finds a calibrated attention cache, `attention.py` attends to it, `compat.py` knows which versions of vLLM serve.
"""


def register() -> None:
    """Make vLLM know `quant_method: tilepress` and calibrated attention caches; calling it again does nothing more."""
    import tilepress.runtime.vllm.config  # noqa: F401
    from tilepress.runtime.vllm.attention import watch

    watch()
