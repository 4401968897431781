"""The model of a checkpoint without its weights."""

import torch

from tilepress.formats import UsageError
from tilepress.formats.checkpoint import Checkpoint


def build_meta_model(checkpoint: Checkpoint, trust_remote_code: bool = False, device: str = "meta"):
    """The checkpoint's model without weights; on another `device` than meta, with random ones.

    Raises UsageError for an architecture that transformers does not know."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    kind = stored.get("model_type", "(none)")
    try:
        if trust_remote_code and "auto_map" in stored:
            config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=True)
            config.__dict__.pop("quantization_config", None)
        else:
            config = AutoConfig.for_model(**stored)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).eval()
    except Exception as error:  # whatever a config.json can make a model class raise
        raise UsageError(
            f"no causal language model for architecture {kind!r} of {checkpoint.path.name} ({' '.join(str(error).split())[:160]})",
            "upgrade transformers, or add --trust-remote-code if the checkpoint brings code that you have read",
        ) from error
