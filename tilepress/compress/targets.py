"""Which stored tensors are linear weights, and why the others are left alone.

The model is built on the meta device (no memory, no weights) and its modules say what each stored name is: `nn.Linear`, GPT-2's
`Conv1D` (stored transposed), an embedding, a norm. Experts of a mixture are stored one by one under `….experts.N.` even where
transformers merges them in memory, so they are recognized by that name.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from tilepress.formats import UsageError
from tilepress.formats.checkpoint import Checkpoint, Weight, dtype_name, module_path
from tilepress.formats.tiled_csl import VALUE_DTYPES

_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")


@dataclass(frozen=True)
class Target:
    """A weight to compress: `rows` x `cols` = out_features x in_features, whatever way round it is stored."""

    weight: Weight
    rows: int
    cols: int
    dtype: torch.dtype  # of the values
    transposed: bool  # stored as [in_features, out_features]

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class LeftAlone:
    name: str
    reason: str


def build_meta_model(checkpoint: Checkpoint, trust_remote_code: bool = False):
    """The checkpoint's model without weights. Raises UsageError for an architecture that transformers does not know."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    kind = stored.get("model_type", "(none)")
    try:
        if trust_remote_code and "auto_map" in stored:
            config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=True)
            config.__dict__.pop("quantization_config", None)
        else:
            config = AutoConfig.for_model(**stored)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise UsageError(
            f"no causal language model for architecture {kind!r} of {checkpoint.path.name} ({str(error).splitlines()[0][:120]})",
            "upgrade transformers, or add --trust-remote-code if the checkpoint brings code that you have read",
        ) from error


def ignored(path: str, patterns: tuple[str, ...]) -> str | None:
    """The pattern that a module path matches as a whole, by its last parts, or as `re:REGEX`; None if none does."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.search(pattern[3:], path):
                return pattern
        elif fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}"):
            return pattern
    return None


def find_targets(
    checkpoint: Checkpoint, patterns: tuple[str, ...] = (), trust_remote_code: bool = False
) -> tuple[list[Target], list[LeftAlone]]:
    """Splits a checkpoint's weights into targets and those left alone, both in name order.

    Raises UsageError for an unknown architecture, a pattern that matches nothing, or a checkpoint without linear weights.
    """
    from transformers.pytorch_utils import Conv1D

    model = build_meta_model(checkpoint, trust_remote_code)
    modules = dict(model.named_modules())
    known = set(modules)
    heads = [module for module in (model.get_output_embeddings(), model.get_input_embeddings()) if module is not None]
    targets, left = [], []
    unused = set(patterns) - {"lm_head"}
    for name, weight in checkpoint.weights.items():
        packed = checkpoint.packed_shape(weight) if weight.layout != "dense" else None
        shape = (packed.rows, packed.cols) if packed else weight.entries[0].shape
        path = module_path(name, known, model.base_model_prefix) if name.endswith(".weight") else None
        module = modules.get(path)
        plain = path or name.removesuffix(".weight")
        pattern = ignored(plain, patterns)
        linear = isinstance(module, torch.nn.Linear | Conv1D) or (
            module is None and bool(_EXPERT.search(name)) and len(shape) == 2
        )
        unused.discard(pattern)
        if any(module is head for head in heads):
            left.append(LeftAlone(name, "embedding or output head"))
        elif len(shape) == 3 and ".experts." in name:
            left.append(LeftAlone(name, "experts fused into one 3-D tensor"))
        elif not linear or not name.endswith(".weight"):
            left.append(LeftAlone(name, "not a linear weight"))
        elif pattern:
            left.append(LeftAlone(name, f"matches --ignore {pattern}"))
        elif _ROUTER.search(plain):
            left.append(LeftAlone(name, "expert router"))
        elif packed is None and not weight.entries[0].dtype.is_floating_point:
            left.append(LeftAlone(name, f"stored as {dtype_name(weight.entries[0].dtype)}, already quantized"))
        else:
            transposed = packed.transposed if packed else isinstance(module, Conv1D)
            rows, cols = shape if packed or not transposed else reversed(shape)
            dtype = packed.dtype if packed else weight.entries[0].dtype
            targets.append(Target(weight, rows, cols, dtype, transposed))
    if unused:
        raise UsageError(
            f"--ignore {sorted(unused)[0]} matches no linear layer",
            f"list the names with `tilepress inspect {checkpoint.path.name}`",
        )
    if not targets:
        raise UsageError(
            f"{checkpoint.path.name} has no linear weight to compress", "give a decoder language model's checkpoint"
        )
    return targets, left


def check_value_dtypes(dtypes: dict[str, torch.dtype]) -> None:
    """Raises UsageError naming the weights whose dtype Tiled-CSL does not store."""
    wide = [name for name, dtype in dtypes.items() if dtype not in VALUE_DTYPES]
    if wide:
        names = ", ".join(wide[:3]) + (" …" if len(wide) > 3 else "")
        raise UsageError(
            f"{len(wide)} weights are {dtype_name(dtypes[wide[0]])}, Tiled-CSL stores bfloat16 and float16: {names}",
            "convert on the way: `tilepress compress prune … --dtype bfloat16` (or float16), or write --format dense",
        )
