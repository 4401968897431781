"""The rules by which vLLM accepts an INT8 artifact, as of vLLM 0.33 (CompressedTensorsConfig, CompressedTensorsW8A8Int8,
CompressedTensorsWNA16).

What it would refuse or misread is a finding, what it has no kernel for a note. `tilepress verify` prints both.
"""

import itertools
from collections.abc import Callable

from torch import Tensor

from tilepress.formats import TilepressError
from tilepress.formats.int8 import HEAD, PACKED_FORMAT, Int8Scheme, part_names, scheme_of
from tilepress.formats.patterns import matched

_ARGUMENTS = {  # of weights and input_activations that compressed-tensors 0.9.4 knows; it refuses others
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure"),
    *("dynamic", "actorder", "observer", "observer_kwargs"),
}


def vllm_findings(
    config: dict,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    linears: dict[str, str],
    value: Callable[[str], Tensor],
    one_product: tuple[tuple[str, ...], ...],
) -> tuple[list[str], list[str]]:
    """List what vLLM would refuse or misread in a W8A8 artifact, and what it has no kernel for: (findings, notes).

    `config` is the `quantization_config`, `tensors` each stored name's (safetensors dtype, shape), `linears` the layer's path of each stored
    weight of a linear layer or router, `value(name)` reads a small tensor, `one_product` are the last names of layers that vLLM runs as one
    GEMM. Rules as of vLLM 0.33 (CompressedTensorsConfig and CompressedTensorsW8A8Int8).
    """
    try:
        scheme = scheme_of(config)
    except TilepressError as error:
        return [error.message], []
    findings, notes = [], []
    for group, part in itertools.product(config["config_groups"].values(), ("weights", "input_activations")):
        extra = {key for key, value in (group.get(part) or {}).items() if value is not None} - _ARGUMENTS
        if extra:
            findings.append(f"{part} has keys that older readers refuse: {', '.join(sorted(extra))}")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("targets"):
        findings.append("a sparsity_config with targets")
    unpacked = scheme.activations == "none" and config.get("format") != PACKED_FORMAT
    if unpacked or scheme.activations == "tensor-dynamic":
        what = f"INT8 weights alone that are not {PACKED_FORMAT}" if unpacked else "dynamic per-tensor input"
        notes.append(f"vLLM has no kernel for {what}; tilepress and transformers run it")
    quantized = {
        name.removesuffix("_packed").removesuffix(".weight")
        for name, (dtype, _) in tensors.items()
        if (name.endswith(".weight") and dtype == "I8") or (name.endswith(".weight_packed") and dtype == "I32")
    }
    if any(".experts." in name for name in linears):
        notes.append("transformers 5 with compressed-tensors 0.20 does not load a mixture of experts; tilepress does")
        if scheme.activations != "token" and any(".experts." in path for path in quantized):
            notes.append("vLLM runs INT8 experts with dynamic per-token activations only")
    for path in sorted(quantized):
        findings += _part_findings(path, scheme.of(path), config.get("format"), tensors)
    if HEAD in quantized:
        notes.append("SGLang, and vLLM before March 2026, take the codes of an INT8 output head for its weights")
        named = {name for group in config["config_groups"].values() for name in group["targets"]}
        findings += [] if HEAD in named else [f"{HEAD} is quantized, but targets do not name it"]
    if scheme.dynamic:
        named = {name for group in config["config_groups"].values() for name in group["targets"]}
        findings += [f"{path} is quantized, but in no group" for path in sorted(quantized - named)]

    float_layers = {path for name, path in linears.items() if name.removesuffix(".weight") not in quantized}
    if HEAD not in quantized:
        float_layers.add(HEAD)  # also where it is tied, and not stored
    patterns = config.get("ignore") or []
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        return [*findings, "`ignore` is no list of names and patterns"], notes
    layers = float_layers | quantized
    found = matched((pattern[3:] for pattern in patterns if pattern.startswith("re:")), layers)
    if found is None:
        return [*findings, "`ignore` has a pattern that is none, or that takes too long to match"], notes
    ignored = (layers & set(patterns)).union(*found.values())
    findings += [
        f"{path} is float but not in `ignore`: loaders would wait for its scale, or compute with none"
        for path in sorted(float_layers)
        if path not in ignored
    ]
    findings += [f"{path} is quantized but in `ignore`" for path in sorted(quantized & ignored)]
    for path in sorted({p.rpartition(".")[0] for p in quantized}):
        for names in one_product:
            there = [found for name in names if not tensors.keys().isdisjoint(_firsts(found := f"{path}.{name}"))]
            some = [name for name in there if name in quantized]
            if some and len(some) < len(there):
                findings.append(f"{', '.join(there)} are one GEMM, but only {', '.join(some)} quantized")
            elif len({scheme.of(name) for name in some}) > 1:
                findings.append(f"{', '.join(some)} are one GEMM, but only some have inputs per token")
            elif len(some) > 1 and scheme.of(some[0]).static and not _same_input(some, value, tensors):
                findings.append(f"{', '.join(some)} are one GEMM, but their input scales differ")
    return findings, notes


def _firsts(path: str) -> tuple[str, str]:
    """Return the names that a layer's codes may have."""
    return f"{path}.weight", f"{path}.weight_packed"


def _part_findings(path: str, scheme: Int8Scheme, stored: str, tensors: dict) -> list[str]:
    first = next(name for name in _firsts(path) if name in tensors)
    shape = tensors[first][1]
    if len(shape) != 2:
        return [f"{first} is {list(shape)}, not a matrix"]
    if first.endswith("_packed") != (stored == PACKED_FORMAT):
        return [f"{first} is not {stored}, which the config says"]
    scale, input_scale, zero_point = part_names(f"{path}.weight")
    wanted = {scale: [(shape[0], 1)] if scheme.weights == "channel" else [(1,)]}
    if scheme.static:
        wanted[input_scale] = [(1,), ()]
    if scheme.asymmetric:
        wanted[zero_point] = [(1,), ()]
    found = []
    for name in (scale, input_scale, zero_point):
        if (name in tensors) != (name in wanted):
            found.append(f"{name} is {'there' if name in tensors else 'missing'}, against the scheme")
        elif name in wanted and tensors[name][1] not in wanted[name]:
            found.append(f"{name} is {list(tensors[name][1])}, not {list(wanted[name][0])}")
        elif name in wanted and tensors[name][0] not in (("I8",) if name == zero_point else ("BF16", "F16", "F32")):
            found.append(f"{name} is {tensors[name][0]}")
    return found


def _same_input(paths: list[str], value, tensors: dict) -> bool:
    kinds = [{part_names(f"{p}.weight")[i] for p in paths} for i in (1, 2)]
    for names in kinds:
        there = [name for name in names if name in tensors]
        if there and len({tuple(value(name).reshape(-1)[:1].float().tolist()) for name in there}) > 1:
            return False
    return True
