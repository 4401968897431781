"""INT8 weights and activations as compressed-tensors stores them (`int-quantized`), drawn in docs/format.md.

A weight is `q * scale`: int8 `….weight` with `….weight_scale`, [out, 1] per output channel or [1] per tensor. Scales are rounded to
the model's dtype before anything is quantized with them, so that every runtime multiplies the same numbers. Activations are
symmetric per token or per tensor, found at run time, or static per tensor (`….input_scale`, and with an asymmetric range
`….input_zero_point`). Specification: the compressed-tensors package; vLLM's rules: its compressed_tensors quantization config.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilepress.formats import TilepressError, dtype_name
from tilepress.formats.layout import Add, Form, Layout, Span, register
from tilepress.formats.stripes import converted, nonzeros

WEIGHTS = ("channel", "tensor")
ACTIVATIONS = ("token", "tensor", "tensor-asym", "tensor-dynamic", "none")
STATIC = ("tensor", "tensor-asym")  # of them: found before, not at run time
METHOD = "compressed-tensors"
HEAD = "lm_head"  # the path of an output head that is quantized
FORMAT, PACKED_FORMAT = "int-quantized", "pack-quantized"
QMIN, QMAX = -128, 127
_ROWS = 1024  # of a weight quantized together
VERIFY = "download or write the checkpoint again; `tilepress verify DIR` lists every finding"


@dataclass(frozen=True)
class Int8Scheme:
    """The scheme by which weights and activations are quantized.

    `tensor` and `tensor-asym` are static, the other activations found at run time. Of a static scheme some layers may be
    exceptions, whose inputs are quantized per token: `dynamic` has their paths.
    """

    weights: str = "channel"  # channel | tensor
    activations: str = "token"  # token | tensor | tensor-asym | tensor-dynamic | none (weight-only)
    dynamic: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self):
        assert self.weights in WEIGHTS and self.activations in ACTIVATIONS, self
        assert self.static or not self.dynamic, self

    def of(self, name: str) -> "Int8Scheme":
        """The scheme of one weight, by its stored name."""
        return Int8Scheme(self.weights, "token" if name.removesuffix(".weight") in self.dynamic else self.activations)

    @property
    def static(self) -> bool:
        return self.activations in STATIC

    @property
    def asymmetric(self) -> bool:
        return self.activations == "tensor-asym"

    @property
    def format(self) -> str:
        """What compressed-tensors calls the way in which codes are stored."""
        return PACKED_FORMAT if (self.weights, self.activations) == ("channel", "none") else FORMAT

    def config_groups(self, paths: Iterable[str] = (), stored: str = FORMAT) -> dict:
        """The `config_groups` of a `quantization_config`, with no key beyond those that every reader knows.

        With exceptions both groups name their layers, of which `paths` are all: readers disagree on what a name wins against. Without, an output head
        among them is named: vLLM's is no Linear.
        """

        def arguments(strategy: str, symmetric: bool = True, dynamic: bool = False) -> dict:
            return {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": dynamic}

        group = {"targets": ["Linear"], "weights": arguments(self.weights)}
        if self.activations != "none":
            strategy = "token" if self.activations == "token" else "tensor"
            group["input_activations"] = arguments(strategy, not self.asymmetric, not self.static)
        else:
            group["format"] = stored  # newer readers take weight-only layers for pack-quantized ones otherwise
        if not self.dynamic:
            group["targets"] += [HEAD] * (HEAD in paths)
            return {"group_0": group}
        per_token = Int8Scheme(self.weights).config_groups()["group_0"]
        group["targets"], per_token["targets"] = sorted({*paths} - self.dynamic), sorted(self.dynamic)
        return {"group_0": group, "group_1": per_token}

    def quantization_config(self, ignore: list[str], paths: Iterable[str] = ()) -> dict:
        """`config.json`'s `quantization_config`; `ignore` names every linear layer that stays float, `paths` all others."""
        return {
            "quant_method": METHOD,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": self.config_groups(paths, self.format),
            "ignore": ignore,
        }


def scheme_of(config: dict) -> Int8Scheme:
    """The scheme that a `quantization_config` describes. Raises TilepressError for anything but INT8 linears as this module writes them."""
    groups = config.get("config_groups")
    if config.get("quant_method") == METHOD:
        if config.get("format") not in (FORMAT, PACKED_FORMAT):
            raise _refusal(f"format is {config.get('format')!r}")
        if config.get("quantization_status") != "compressed":
            raise _refusal(f"quantization_status is {config.get('quantization_status')!r}, not 'compressed'")
        if config.get("kv_cache_scheme"):
            raise _refusal("a kv_cache_scheme")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise _refusal("config_groups is not one group, or one and another of exceptions")
    found = [(_scheme_of_group(group), group.get("targets")) for group in groups.values()]
    if config.get("format") == PACKED_FORMAT and any(scheme.activations != "none" for scheme, _ in found):
        raise _refusal(f"format is {PACKED_FORMAT!r} with quantized inputs")
    if len(found) == 1:
        if found[0][1] not in (["Linear"], ["Linear", HEAD]):
            raise _refusal(f"targets are {found[0][1]!r}, not ['Linear'] or ['Linear', '{HEAD}']")
        return found[0][0]
    found.sort(key=lambda pair: pair[0].activations == "token")
    scheme, exceptions = (pair[0] for pair in found[:2])
    if len(found) > 2 or not scheme.static or exceptions != Int8Scheme(scheme.weights):
        raise _refusal("config_groups are not one of static inputs and one of inputs per token")
    for _, targets in found:
        if not isinstance(targets, list) or not all(
            isinstance(name, str) and ("." in name or name == HEAD) for name in targets
        ):
            raise _refusal("targets of two groups are not names of layers")
        if any(name.startswith("re:") for name in targets):
            raise _refusal("targets of two groups are patterns, not names of layers")
    return Int8Scheme(scheme.weights, scheme.activations, frozenset(found[1][1]))


def _refusal(why: str) -> TilepressError:
    return TilepressError(
        f"quantization_config: {why[:200]}",
        "this reader takes INT8 linears of compressed-tensors, int-quantized or (weights alone) pack-quantized",
    )


def _scheme_of_group(group: dict) -> Int8Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    for name, arguments in (("weights", weights), ("input_activations", inputs)):
        if name == "input_activations" and arguments is None:
            continue
        if not isinstance(arguments, dict) or (arguments.get("num_bits"), arguments.get("type")) != (8, "int"):
            raise _refusal(f"{name} are not 8-bit integers")
    if group.get("output_activations"):
        raise _refusal("quantized output activations")
    if not weights.get("symmetric", True) or weights.get("dynamic") or str(weights.get("strategy")) not in WEIGHTS:
        raise _refusal("weights are not static, symmetric, per channel or per tensor")
    if inputs is None:
        return Int8Scheme(weights["strategy"], "none")
    kind = (str(inputs.get("strategy")), bool(inputs.get("dynamic", False)), bool(inputs.get("symmetric", True)))
    known = {
        ("token", True, True): "token",
        ("tensor", False, True): "tensor",
        ("tensor", False, False): "tensor-asym",
        ("tensor", True, True): "tensor-dynamic",
    }
    if kind not in known:
        raise _refusal(f"input_activations are (strategy, dynamic, symmetric) = {kind}")
    return Int8Scheme(weights["strategy"], known[kind])


def part_names(name: str) -> tuple[str, str, str]:
    """Names of a weight's scale, input scale and input zero point: `X.weight` -> `X.weight_scale`, `X.input_scale`, …."""
    stem = name.removesuffix(".weight")
    return f"{stem}.weight_scale", f"{stem}.input_scale", f"{stem}.input_zero_point"


def rounded_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 scales in the dtype that every runtime holds them in; 1 where a scale is 0 (nothing but zeros).

    Scales that are subnormal in float16 are rounded up, so that nothing is clipped; other dtypes' are kept normal.
    """
    if dtype == torch.float16:
        step = 2.0**-24
        scale = torch.where((scale > 0) & (scale < 2.0**-14), (scale / step).ceil() * step, scale)
    else:
        scale = torch.where(scale > 0, scale.clamp(min=torch.finfo(dtype).tiny), scale)
    return torch.where(scale == 0, torch.ones_like(scale), scale).to(dtype)


def weight_scale(weight: Tensor, per: str, dtype: torch.dtype) -> Tensor:
    """The symmetric scale absmax / 127 of a weight [out, in]: [out, 1] per `channel`, [1] per `tensor`, in `dtype`.

    Codes then lie in -127..127 even where rounding the scale to bfloat16 made it smaller.
    """
    absmax = torch.cat([rows.abs().amax(dim=1, keepdim=True).float() for rows in weight.split(1024)])
    if per == "tensor":
        absmax = absmax.amax().reshape(1)
    return rounded_scale(absmax / QMAX, dtype)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """round(x / scale + zero_point), half to even, saturated to int8, 0 for NaN; computed in float32. `scale` broadcasts over x."""
    codes = x.float() / scale.float()
    if zero_point is not None:
        codes = codes + zero_point.float()
    return codes.nan_to_num_(nan=0.0).clamp_(QMIN, QMAX).round_().to(torch.int8)


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """(q - zero_point) * scale in the scale's dtype; int8 codes are exact in each."""
    codes = q.to(scale.dtype)
    if zero_point is not None:
        codes = codes - zero_point.to(scale.dtype)
    return codes * scale


def dynamic_scale(x: Tensor, per_token: bool) -> Tensor:
    """The scale that quantizing at run time uses, float32 absmax / 127.5 as compressed-tensors defines it: [..., 1] or [1].

    The largest value lands on 127.5, give or take a rounding: it becomes 127, a negative one -127 or -128.
    """
    absmax = (x.abs().amax(dim=-1, keepdim=True) if per_token else x.abs().amax().reshape(1)).float()
    scale = absmax / torch.full_like(absmax, 127.5)  # with a number CUDA would multiply by its reciprocal
    return torch.where(scale == 0, torch.full_like(scale, torch.finfo(torch.float32).eps), scale)


def static_scale(low: float, high: float, asymmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale [1] in `dtype` and zero point int8 [1] (None if symmetric) that cover the range [low, high] and 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    if not asymmetric:
        return rounded_scale(torch.tensor([max(-low, high) / QMAX]), dtype), None
    scale = rounded_scale(torch.tensor([(high - low) / (QMAX - QMIN)]), dtype)
    zero_point = (QMIN - low / scale.float()).round().clamp(QMIN, QMAX).to(torch.int8)
    return scale, zero_point


def examine(name: str, parts: dict[str, Tensor]) -> tuple[dict, list[str]]:
    """Count anew what the manifest records of a weight, from its stored tensors by name, and list what is wrong with
    them.
    """
    scale_name, *_ = part_names(name)
    codes, scale = parts[name], parts[scale_name]
    problems = [
        f"{part} has values that are no scale"
        for part, tensor in parts.items()
        if tensor.is_floating_point() and not bool((torch.isfinite(tensor.float()) & (tensor > 0)).all())
    ]
    problems += [f"{part} is {parts[part].dtype}" for part in (scale_name,) if not scale.is_floating_point()]
    transposed = codes.dim() == 3 and codes.shape[0] == 1
    if codes.dim() != 2 and not transposed:
        return {}, [f"codes are {list(codes.shape)}, not a matrix"]
    rows, cols = codes.shape[:0:-1] if transposed else codes.shape
    if tuple(scale.shape) not in ((rows, 1), (1,)):
        problems.append(f"{scale_name} is {list(scale.shape)} for codes {list(codes.shape)}")
    found = {"shape": [rows, cols], "dtype": dtype_name(scale.dtype), "nonzeros": nonzeros(codes)}
    return found | ({"transposed": True} if transposed else {}), problems


def fake_quantize_input(x: Tensor, scheme: Int8Scheme, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """float32 x as an INT8 layer of this scheme sees it."""
    if scheme.activations == "none":
        return x
    if not scheme.static:
        scale = dynamic_scale(x, scheme.activations == "token")
    return dequantize(quantize(x, scale, zero_point), scale.float(), zero_point)


class Codes:
    """A weight's int8 codes, some rows after the other as (first row, codes), and what is known of them after the last."""

    def __init__(
        self, weight: Tensor, per: str, dtype: torch.dtype, name: str, given: tuple[Tensor, Tensor] | None = None
    ):
        """`given` are codes that somebody else rounded, and their scale; else the scale is `weight_scale`'s and codes are the nearest.

        Raises TilepressError for values that are not finite: a scale would mean nothing."""
        for _ in converted(weight, weight.dtype, name):
            pass
        self.weight, self._given = weight, None
        if given is None:
            self.scale = weight_scale(weight, per, dtype)
        else:
            self._given, self.scale = (part.to(weight.device) for part in given)
        self.nonzeros, self._signal, self._noise = 0, 0.0, 0.0

    @property
    def error(self) -> float:
        """Frobenius norm of what rounding changed, relative to the weight's."""
        return (self._noise / self._signal) ** 0.5 if self._signal else 0.0

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, len(self.weight), _ROWS):
            rows = self.weight[first : first + _ROWS].float()
            scale = self.scale if self.scale.dim() == 1 else self.scale[first : first + _ROWS]
            codes = quantize(rows, scale) if self._given is None else self._given[first : first + _ROWS]
            self._signal += float(rows.square().sum(dtype=torch.float64))
            self._noise += float((dequantize(codes, scale.float()) - rows).square().sum(dtype=torch.float64))
            self.nonzeros += int(torch.count_nonzero(codes))
            yield first, codes

    def all(self) -> Tensor:
        """Return the whole matrix of codes."""
        codes = torch.empty(self.weight.shape, dtype=torch.int8, device=self.weight.device)
        for first, rows in self:
            codes[first : first + len(rows)] = rows
        return codes


@dataclass(frozen=True)
class Int8Weight:
    """The stored tensors of a weight by the names that a layer's module gives them: weight, weight_scale, input_scale, …"""

    name: str
    parts: dict[str, Tensor]
    layout_name = "int8"

    @property
    def stored(self) -> Tensor:
        """int8 [rows, cols], or [1, cols, rows] in place of a Conv1D."""
        return self.parts["weight"]

    @property
    def scale(self) -> Tensor:
        """[rows, 1] or [1]."""
        return self.parts["weight_scale"]


class Int8Layout(Layout):
    """int8 codes with scales; those of a Conv1D as [1, in, out], which no loader takes for its weight."""

    name, title, sparse, offered, matrix_of_codes = "int8", "INT8", False, False, True
    stored_as = FORMAT  # in compressed-tensors' words

    def __init__(self, scheme: Int8Scheme | None = None):
        """The scheme is needed for writing alone: `config.json` has it."""
        self.scheme = scheme

    def parts(self, name: str, tensors: Mapping) -> tuple[str, ...] | None:
        if not name.endswith(".weight") or tensors[name].dtype != torch.int8:
            return None
        scale, *inputs = part_names(name)
        if scale not in tensors:
            raise TilepressError(f"int8 tensor {name!r} has no {scale}", VERIFY)
        return name, scale, *(part for part in inputs if part in tensors)

    def holds_codes(self, name: str, parts: Iterable[str]) -> bool:
        return True

    def stored_names(self, name: str) -> list[str]:
        scale, input_scale, zero_point = part_names(name)
        static = [input_scale] if self.scheme.static else []
        return [name, scale, *static, *([zero_point] if self.scheme.asymmetric else [])]

    def expected_bytes(self, form: Form, density: float) -> int:
        scales = (form.rows if self.scheme.weights == "channel" else 1) + self.scheme.static
        return form.elements + scales * form.dtype.itemsize + self.scheme.asymmetric

    def encode(self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor], add: Add) -> dict:
        scale_name, *_ = part_names(name)
        given = (beside[name], beside[scale_name]) if name in beside else None
        codes, shape = Codes(weight, self.scheme.weights, form.dtype, name, given), (form.rows, form.cols)
        stored = (1, *shape[::-1]) if form.transposed else shape
        nbytes = add(name, stored, codes.all().t().split(_ROWS) if form.transposed else (rows for _, rows in codes))
        for part, values in (beside | {scale_name: codes.scale}).items():
            if part == name:
                continue
            nbytes += add(part, tuple(values.shape), [values])
        found = {"shape": list(shape), "dtype": dtype_name(codes.scale.dtype), "nonzeros": codes.nonzeros}
        found |= {"error": round(codes.error, 8)} | ({"transposed": True} if form.transposed else {})
        return {"bytes": nbytes, "layout": self.name} | record | found

    def assemble(self, name: str, parts: dict[str, Tensor]) -> Int8Weight:
        return Int8Weight(name, {part.rpartition(".")[2]: tensor for part, tensor in parts.items()})

    def form(self, packed: Int8Weight) -> Form:
        codes = packed.stored
        transposed = codes.dim() == 3 and codes.shape[0] == 1
        if codes.dim() != 2 and not transposed:
            raise TilepressError(f"int8 weight {packed.name} is {list(codes.shape)}, not a matrix", VERIFY)
        rows, cols = codes.shape[:0:-1] if transposed else codes.shape
        return Form(rows, cols, packed.scale.dtype, transposed)

    def examine(self, packed: Int8Weight) -> tuple[dict, list[str]]:
        stem = packed.name.removesuffix("weight")
        return examine(packed.name, {stem + part: tensor for part, tensor in packed.parts.items()})

    def problem(self, packed: Int8Weight) -> str | None:
        shape, rows = list(packed.scale.shape), self.form(packed).rows
        return None if shape in ([rows, 1], [1], []) else f"a scale of {shape} for {rows} rows"

    def matrix(self, packed: Int8Weight) -> Tensor:
        return dequantize(*self.codes(packed))

    def codes(self, packed: Int8Weight) -> tuple[Tensor, Tensor]:
        codes = packed.stored
        return codes if codes.dim() == 2 else codes[0].t(), packed.scale

    def slice(
        self, packed: Int8Weight, read: Callable[..., Tensor], rows: Span, cols: Span, device: torch.device
    ) -> tuple[Int8Weight, tuple[Span, Span]]:
        """Scales of rows go with the rows; those of tensors and inputs stay as they are."""
        found = {}
        for part, whole in packed.parts.items():
            of_rows = part == "weight_scale" and whole.dim() == 2
            ranges = [slice(*rows), slice(*cols)] if part == "weight" else [slice(*rows)] if of_rows else []
            found[part] = read(part, *ranges).to(device, copy=True).contiguous()
        return Int8Weight(packed.name, found), (rows, cols)


register(Int8Layout())
