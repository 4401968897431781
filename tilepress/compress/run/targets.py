"""The stored tensors that are linear weights, and the reasons why others are left alone.

The model is built on the meta device (no memory, no weights) and its modules say what each stored name is: `nn.Linear`, GPT-2's
`Conv1D` (stored transposed), an embedding, a norm. Experts of a mixture are stored one by one under `….experts.N.` even where
transformers merges them in memory, so they are recognized by that name.
"""

import contextlib
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from tilepress.formats import UsageError, dtype_name
from tilepress.formats.checkpoint import COMPUTED_BUFFER, Checkpoint, Weight, linear_shape, model_names, module_path
from tilepress.formats.layout import Form
from tilepress.formats.patterns import MOST_S, matched
from tilepress.formats.tiled_csl import VALUE_DTYPES
from tilepress.models.experts import EXPERT_WEIGHT
from tilepress.models.families import ROUTER
from tilepress.models.meta import build_meta_model


@dataclass(frozen=True)
class Target:
    """A weight to compress: `rows` x `cols` = out_features x in_features, whatever way round it is stored."""

    weight: Weight
    rows: int
    cols: int
    dtype: torch.dtype  # of the values
    transposed: bool  # stored as [in_features, out_features]
    is_head: bool = False  # the output head

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    def form(self, dtype: torch.dtype | None = None) -> Form:
        """The matrix that the tensor stands for, in another dtype if one is given."""
        return Form(self.rows, self.cols, dtype or self.dtype, self.transposed)


@dataclass(frozen=True)
class LeftAlone:
    """A weight that is not compressed, and why."""

    name: str
    reason: str
    dropped: bool = False  # not even copied
    module: str | None = None  # the linear layer or router that stays as it is


def _quantized(checkpoint: Checkpoint, how: str) -> UsageError:
    return UsageError(
        f"{checkpoint.name} is quantized already ({how}), its stored values are not its weights",
        "give the checkpoint that it was made from",
    )


def check_patterns(patterns: tuple[str, ...]) -> None:
    """Raises UsageError for a `re:` pattern that is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise UsageError(f"--ignore {pattern}: {error}", "after re: stands a Python regular expression") from error


EXPERTS_SEE = ("routed", "all")  # which tokens of a text the experts of a mixture are calibrated on


def check_experts(experts: str, targets: "list[Target]") -> None:
    """Raise UsageError where all tokens are wanted for experts that the targets do not have."""
    if experts == "all" and not any(EXPERT_WEIGHT.match(target.name) for target in targets):
        raise UsageError("--experts all, but the model has no experts that are stored one by one", "leave it out")


def matching(paths: set[str], patterns: tuple[str, ...]) -> dict[str, list[str]]:
    """The patterns that each module path matches: as a whole, by its last parts, or as `re:REGEX`.

    Raises UsageError for expressions that take too long; a recipe may be anyone's."""
    found = matched((pattern[3:] for pattern in patterns if pattern.startswith("re:")), paths, "search")
    if found is None:
        raise UsageError(f"--ignore: the patterns take more than {MOST_S} s to match", "write simpler ones, or names")
    return {
        path: [
            pattern
            for pattern in patterns
            if (pattern.startswith("re:") and path in found[pattern[3:]])
            or fnmatchcase(path, pattern)
            or fnmatchcase(path, f"*.{pattern}")
        ]
        for path in paths
    }


def find_targets(
    checkpoint: Checkpoint,
    patterns: tuple[str, ...] = (),
    trust_remote_code: bool = False,
    quantized: bool = False,
    int8_bitmaps: bool = False,
    with_head: bool = False,
) -> tuple[list[Target], list[LeftAlone]]:
    """Splits a checkpoint's weights into targets and those left alone, both in name order; `quantized` ones, or bitmaps of INT8 values, only if they may be;
    the output head only `with_head`, whatever `patterns` say of "lm_head".

    Raises UsageError for an unknown architecture, a checkpoint that its config.json does not describe, a pattern that matches no
    linear layer, or a checkpoint without linear weights.
    """
    method = checkpoint.config.get("quantization_config", {}).get("quant_method")
    if method not in (None, "tilepress") and not quantized:
        raise _quantized(checkpoint, method)
    int8 = [
        weight
        for weight in checkpoint.weights.values()
        if weight.is_int8 and not (int8_bitmaps and weight.stored_as.sparse)
    ]
    if int8 and not quantized:
        raise _quantized(checkpoint, "int8")
    model = build_meta_model(checkpoint, trust_remote_code)
    modules = dict(model.named_modules())
    known, stored = set(modules), set()
    heads = [m for m in (model.get_output_embeddings(), model.get_input_embeddings()) if m is not None]
    head_path = next((path for path, module in modules.items() if module is model.get_output_embeddings()), None)
    if with_head:
        _check_head(model, head_path, checkpoint)
        patterns = tuple(pattern for pattern in patterns if pattern != "lm_head")
    direct = _read_directly(model)
    parameters = set(model.state_dict())
    targets, left, used = [], [], set()
    paths = {
        name: module_path(name, known, model.base_model_prefix) if name.endswith(".weight") else None
        for name in checkpoint.weights
    }
    ignored = matching({path or name.removesuffix(".weight") for name, path in paths.items()}, patterns)
    for name, weight in checkpoint.weights.items():
        path = paths[name]
        stored.add(path)
        target = _describe(checkpoint, weight, modules.get(path))
        plain = path or name.removesuffix(".weight")
        linear = path if isinstance(modules.get(path), torch.nn.Linear) else None
        linear = name.removesuffix(".weight") if EXPERT_WEIGHT.match(name) else linear
        is_head = with_head and path == head_path
        if any(modules.get(path) is head for head in heads) and not is_head:
            left.append(LeftAlone(name, "embedding or output head", module=None if with_head else head_path))
        elif COMPUTED_BUFFER.search(name) and not parameters.intersection(model_names(name, model.base_model_prefix)):
            left.append(LeftAlone(name, "a buffer that the model computes itself: not copied", dropped=True))
        elif ROUTER.search(plain) and len(weight.entries[0].shape) == 2:
            left.append(LeftAlone(name, "expert router", module=linear or plain))
        elif isinstance(target, str):
            left.append(LeftAlone(name, target, module=linear))
        elif found := ignored[plain]:
            used.update(found)
            left.append(LeftAlone(name, f"matches --ignore {found[0]}", module=linear))
        elif path in direct:
            left.append(LeftAlone(name, "the model reads the weight itself, not through its layer", module=linear))
        else:
            targets.append(replace(target, is_head=is_head))
    _refuse_missing(model, modules, stored, heads, checkpoint.name)
    unused = set(patterns) - used - {"lm_head"}
    if unused:
        raise UsageError(
            f"--ignore {sorted(unused)[0]} matches no linear layer",
            f"list the names with `tilepress inspect {checkpoint.path.name}`",
        )
    if not targets:
        raise UsageError(
            f"{checkpoint.name} has no linear weight to compress", "give a decoder language model's checkpoint"
        )
    return targets, left


def _check_head(model: torch.nn.Module, path: str | None, checkpoint: Checkpoint) -> None:
    """Raise UsageError for an output head that cannot be stored apart from the embedding."""
    if path is None or not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        raise UsageError(f"{checkpoint.name} has no linear output head", "leave --head out")
    if path != "lm_head":
        raise UsageError(f"the output head is named {path}, readers of INT8 heads know lm_head", "leave --head out")
    if model.config.get_text_config().tie_word_embeddings or f"{path}.weight" not in checkpoint.weights:
        raise UsageError(
            f"{checkpoint.name} has one matrix as embedding and output head (tie_word_embeddings)",
            "leave --head out, or store lm_head.weight as a tensor of its own and set tie_word_embeddings to false first",
        )


def linear_layers(checkpoint: Checkpoint) -> dict[str, str]:
    """The stored weights of a model's linear layers, routers and experts, each with the path of its layer as `ignore` lists name it.

    Raises UsageError for an unknown architecture.
    """
    model = build_meta_model(checkpoint)
    modules, found = dict(model.named_modules()), {}
    for name in (name for name in checkpoint.weights if name.endswith(".weight")):
        path, stem = module_path(name, set(modules), model.base_model_prefix), name.removesuffix(".weight")
        if isinstance(modules.get(path), torch.nn.Linear) or ROUTER.search(path or stem) or EXPERT_WEIGHT.match(name):
            found[name] = path or stem
    return found


def _describe(checkpoint: Checkpoint, weight: Weight, module: torch.nn.Module | None) -> Target | str:
    """A stored weight as a target, or why it cannot be one. Raises UsageError if it is not of its module's shape."""
    packed = checkpoint.form(weight) if weight.is_packed else None
    shape = (packed.rows, packed.cols) if packed else weight.entries[0].shape
    expert = module is None and EXPERT_WEIGHT.match(weight.name) and len(shape) == 2
    if len(shape) == 3 and ".experts." in weight.name:
        return "experts fused into one 3-D tensor"
    linear = linear_shape(module)
    if not weight.name.endswith(".weight") or not (expert or linear):
        own = isinstance(module, torch.nn.Linear)
        return f"{type(module).__name__}, a linear layer of the model's own kind" if own else "not a linear weight"
    expected = None
    if linear:
        expected = linear[1::-1] if linear[2] and not packed else linear[:2]
    if (expected is not None and expected != shape) or 0 in shape:
        raise UsageError(
            f"{weight.name} is {list(shape)}, config.json makes it {list(expected or shape)}",
            "the checkpoint and its config.json do not belong together",
        )
    dtype = packed.dtype if packed else weight.entries[0].dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"stored as {dtype_name(dtype)}"
    transposed = packed.transposed if packed else bool(linear and linear[2])
    rows, cols = shape if packed or not transposed else reversed(shape)
    return Target(weight, rows, cols, dtype, transposed)


def _refuse_missing(model, modules: dict, stored: set, heads: list, name: str) -> None:
    """Raises UsageError for linear layers that the checkpoint should have and has not."""
    tied = {key.removesuffix(".weight") for key in getattr(model, "all_tied_weights_keys", {})}
    missing = [
        path
        for path, module in modules.items()
        if linear_shape(module) and path not in stored | tied and not any(module is h for h in heads)
    ]
    if missing:
        raise UsageError(
            f"{name} has no weight for {len(missing)} linear layers of its config.json: {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}",
            "the checkpoint and its config.json do not belong together",
        )


def _read_directly(model: torch.nn.Module) -> set[str]:
    """Linear layers whose weight the model uses without calling them (Mamba's, say): they cannot be packed.

    Found by a forward pass on the meta device with the layers replaced by ones that note who asks for their weight. A model that
    cannot run there (a mixture routes by values) is seen up to the point where it stops.
    """
    asked: set[str] = set()

    class Noting(torch.nn.Module):
        def __init__(self, path: str, linear: torch.nn.Module):
            super().__init__()
            self.path, self.bias = path, linear.bias
            self.rows = linear_shape(linear)[0]
            self._weight = [linear.weight]

        @property
        def weight(self):
            asked.add(self.path)
            return self._weight[0]

        def forward(self, x):
            return x.new_empty(*x.shape[:-1], self.rows)

    linears = {path: module for path, module in model.named_modules() if linear_shape(module)}
    try:
        for path, linear in linears.items():
            model.set_submodule(path, Noting(path, linear))
        asked.clear()
        with torch.no_grad(), contextlib.suppress(Exception):
            model(torch.zeros(1, 8, dtype=torch.long, device="meta"), use_cache=False)
    finally:
        for path, linear in linears.items():
            model.set_submodule(path, linear)
    return asked


def check_value_dtypes(dtypes: dict[str, torch.dtype]) -> None:
    """Raises UsageError naming the weights whose dtype the sparse layouts do not store."""
    wide = [name for name, dtype in dtypes.items() if dtype not in VALUE_DTYPES]
    if wide:
        names = ", ".join(wide[:3]) + (" …" if len(wide) > 3 else "")
        raise UsageError(
            f"{len(wide)} weights are {dtype_name(dtypes[wide[0]])}, the sparse layouts store bfloat16 and float16: {names}",
            "convert on the way: `tilepress compress prune … --dtype bfloat16` (or float16), or write --format dense",
        )
