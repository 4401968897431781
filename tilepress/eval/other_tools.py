"""The rules of compressed-tensors for artifacts of other tools, in schemes that tilepress does not run: 4 bits, FP8.

The package writes a quantized layer X as one of

    float-quantized, naive-quantized, int-quantized    X.weight of 8-bit numbers [rows, cols]
    pack-quantized                                     X.weight_packed int32 [rows, cols x bits / 32], X.weight_shape [2]

with X.weight_scale [rows, groups], [rows, 1] or [1], and of asymmetric schemes X.weight_zero_point.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilepress.formats import TilepressError, int8

_CODES = ("I8", "U8", "F8_E4M3")
_OF_FORMAT = {
    "float-quantized": ("F8_E4M3",),
    "int-quantized": ("I8", "U8"),
    "pack-quantized": (),
}  # dtypes of X.weight


def is_of_compressed_tensors(config: dict) -> bool:
    """Return whether a model's config says that compressed-tensors wrote its weights."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == int8.METHOD


def why_not_ours(config: dict) -> str | None:
    """Return why tilepress does not run a scheme of compressed-tensors, or None if it does."""
    try:
        int8.scheme_of(config)
    except TilepressError as error:
        return error.message
    return None


def check(
    config: dict, tensors: dict[str, tuple[str, tuple[int, ...]]], value: Callable[[str], Tensor]
) -> tuple[int, list[str], list[str]]:
    """List what is wrong with the layers that a `quantization_config` speaks of: (layers, findings, notes).

    `tensors` has each stored name's (safetensors dtype, shape); `value(name)` reads a tensor.
    """
    groups = config.get("config_groups")
    schemes = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if _is(groups) else []
    if not schemes or not all(map(_is, schemes)):
        return 0, ["quantization_config has no config_groups with weights"], []
    if len(schemes) > 1:
        return 0, [], [f"{len(schemes)} groups of layers with schemes of their own: shapes were not compared"]
    scheme, findings = schemes[0], []
    if config.get("quantization_status", "compressed") != "compressed":
        findings.append(f"quantization_status is {config['quantization_status']!r}, not 'compressed'")
    packed = {name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")}
    plain = {n for n, (kind, _) in tensors.items() if n.endswith(".weight") and kind in _CODES}
    for name in sorted(packed | plain):
        kinds = _OF_FORMAT.get(str(config.get("format")), _CODES)
        if name in plain and tensors[name][0] not in kinds:
            findings.append(f"{name} is {tensors[name][0]}, against the format {config['format']}")
        found, shape = _packed_shape(name, scheme, tensors, value) if name in packed else ([], tensors[name][1])
        if shape is not None and len(shape) != 2:
            found.append(f"{name} is {list(shape)}, not a matrix")
        elif shape is not None:
            found += _scales(name, shape, scheme, tensors, value)
        findings += found
    for name in sorted(tensors):
        layer, dot, part = name.rpartition(".")
        if (
            part in ("weight_scale", "weight_shape", "weight_zero_point")
            and f"{layer}{dot}weight" not in packed | plain
        ):
            findings.append(f"{name} belongs to no quantized weight")
    if not packed | plain:
        findings.append("quantization_config speaks of quantized layers, and none is stored")
    return len(packed | plain), findings, []


def _is(value: object) -> bool:
    return isinstance(value, dict)


def _packed_shape(
    name: str, scheme: dict, tensors: dict, value: Callable[[str], Tensor]
) -> tuple[list[str], tuple[int, int] | None]:
    """Compare a packed weight's words with the shape that is stored beside them; return findings and that shape."""
    if tensors.get(f"{name}_shape") not in (("I32", (2,)), ("I64", (2,))):
        return [f"{name}_shape is missing, or not two whole numbers"], None
    kind, words = tensors[f"{name}_packed"]
    rows, cols = (int(n) for n in value(f"{name}_shape"))
    bits = scheme.get("num_bits")
    if not isinstance(bits, int) or not 1 <= bits <= 8 or kind not in ("I32", "U8"):
        return [f"{name}_packed is {kind} of {bits!r} bits"], None
    number = 32 // bits if kind == "I32" else 8 // bits
    if words != (rows, -(-cols // number)):
        return [f"{name}_packed is {list(words)}, not [{rows}, {-(-cols // number)}] of {rows} x {cols}"], None
    return [], (rows, cols)


def _scales(name: str, shape: tuple[int, int], scheme: dict, tensors: dict, value: Callable) -> list[str]:
    rows, cols = shape
    size, strategy = scheme.get("group_size"), str(scheme.get("strategy"))
    if f"{name}_scale" not in tensors:
        return [f"{name}_scale is missing"]
    grouped = strategy == "group" and isinstance(size, int) and size > 0
    allowed = {"tensor": [(1,), ()], "channel": [(rows, 1), (rows,)]}
    wanted = [(rows, -(-cols // size))] if grouped else allowed.get(strategy)
    found = []
    if wanted is not None and tensors[f"{name}_scale"][1] not in wanted:
        found.append(f"{name}_scale is {list(tensors[f'{name}_scale'][1])}, not {list(wanted[0])}")
    elif tensors[f"{name}_scale"][0] in ("BF16", "F16", "F32") and not bool(
        torch.isfinite(value(f"{name}_scale")).all()
    ):
        found.append(f"{name}_scale has numbers that are not finite")
    if scheme.get("symmetric", True) is False and f"{name}_zero_point" not in tensors:
        found.append(f"{name}_zero_point is missing, of an asymmetric scheme")
    return found
