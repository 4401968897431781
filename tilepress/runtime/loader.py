"""From a folder or hub id to a transformers model on a device."""

import torch

from tilepress.formats import UsageError
from tilepress.formats.checkpoint import Checkpoint, locate
from tilepress.runtime.modules import TiledCSLLinear
from tilepress.runtime.plugin import register


def load(
    path: str,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **kwargs,
):
    """Loads a dense checkpoint or an artifact as a transformers causal language model in evaluation mode.

    The linears of an artifact's packed weights are `TiledCSLLinear`. `dtype` is that of activations and dense weights ("auto": the
    checkpoint's); packed values keep theirs. Further arguments go to from_pretrained (`device_map`, `attn_implementation`).
    Raises TilepressError for a damaged checkpoint, UsageError for an unknown architecture.
    """
    from transformers import AutoModelForCausalLM

    register()
    folder = locate(str(path), revision)
    checkpoint = Checkpoint(folder)
    if "auto_map" in checkpoint.config and not trust_remote_code and not _known(checkpoint.config.get("model_type")):
        raise UsageError(
            f"{folder.name} needs its own code for architecture {checkpoint.config.get('model_type')!r}",
            "add --trust-remote-code if you have read it",
        )
    if not _known(checkpoint.config.get("model_type")) and not trust_remote_code:
        raise UsageError(
            f"transformers knows no architecture {checkpoint.config.get('model_type')!r} ({folder.name})",
            "upgrade transformers",
        )
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **kwargs
    )
    wrong = {what: sorted(map(str, keys)) for what, keys in info.items() if keys}
    if wrong:
        what, keys = next(iter(wrong.items()))
        raise UsageError(
            f"{folder.name}: {len(keys)} {what.replace('_', ' ')}, such as {keys[0]}",
            "the checkpoint does not fit its config.json",
        )
    return model.eval() if "device_map" in kwargs else model.eval().to(device)


def _known(model_type: str | None) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def paths(model: torch.nn.Module) -> dict[str, int]:
    """Which implementation serves how many linear layers of a model, e.g. {"torch linear on cpu": 1, …}."""
    found: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, TiledCSLLinear):
            found[module.path] = found.get(module.path, 0) + 1
        elif isinstance(module, torch.nn.Linear):
            key = f"torch linear on {module.weight.device.type}"
            found[key] = found.get(key, 0) + 1
    return found
