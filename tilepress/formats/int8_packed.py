"""INT8 weights alone as compressed-tensors stores them (`pack-quantized`), drawn in docs/format.md.

Four codes lie in an int32, the first in its lowest byte, each with 128 added: `….weight_packed` int32 [out, ceil(in / 4)], beside it
`….weight_scale` [out, 1] and `….weight_shape` int64 [2], the matrix's. It is the one form in which vLLM takes 8-bit weights without quantized
inputs, and only with a scale a row. Specification: the compressed-tensors package.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilepress.formats import TilepressError, dtype_name
from tilepress.formats.int8 import (
    PACKED_FORMAT,
    VERIFY,
    Codes,
    Int8Layout,
    Int8Scheme,
    Int8Weight,
    examine,
    part_names,
    scheme_of,
)
from tilepress.formats.layout import Add, Form, Span, register

_WORD = 4  # codes
_PACKED = "_packed"


def to_words(codes: Tensor) -> Tensor:
    """int8 codes [rows, cols] -> int32 [rows, ceil(cols / 4)]; codes behind the last column are bytes of 0."""
    moved = codes.view(torch.uint8) ^ 128
    return pad(moved, (0, -moved.shape[1] % _WORD)).contiguous().view(torch.int32)


def from_words(words: Tensor, cols: int) -> Tensor:
    """int32 [rows, ceil(cols / 4)] -> int8 codes [rows, cols]."""
    return (words.contiguous().view(torch.uint8)[:, :cols] ^ 128).contiguous().view(torch.int8)


class Int8PackedWeight(Int8Weight):
    """The stored tensors of a weight as a layer's module names them: weight_packed, weight_scale, weight_shape."""

    layout_name = "int8-packed"

    @property
    def stored(self) -> Tensor:
        """int32 [rows, words]."""
        return self.parts["weight_packed"]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns. Raises TilepressError where the stored numbers are no shape of these words."""
        words, told = self.stored, self.parts["weight_shape"]
        found = tuple(told.tolist()) if tuple(told.shape) == (2,) and told.dtype in (torch.int32, torch.int64) else ()
        agree = found and words.dim() == 2 and found[0] == len(words) and -(-found[1] // _WORD) == words.shape[1]
        if not agree or found[1] < 0:
            raise TilepressError(f"{self.name}: words of {list(words.shape)} for a weight of {list(found)}", VERIFY)
        return found


class PackedLayout(Int8Layout):
    """Words of four codes, with scales of rows."""

    name, title, stored_as = "int8-packed", "INT8", PACKED_FORMAT
    described_by = "_shape"

    def __init__(self):
        super().__init__(Int8Scheme("channel", "none"))

    def applies(self, config: dict) -> bool:
        """Only with INT8 weights alone: other tools store numbers of other sizes under the same names."""
        try:
            return scheme_of(config.get("quantization_config", {})).activations == "none"
        except TilepressError:
            return False

    def weight_name(self, name: str) -> str:
        return name.removesuffix(_PACKED)

    def parts(self, name: str, tensors: Mapping) -> tuple[str, ...] | None:
        if not name.endswith(f".weight{_PACKED}") or tensors[name].dtype != torch.int32:
            return None
        found = self.stored_names(self.weight_name(name))
        for part in found[1:]:
            if part not in tensors:
                raise TilepressError(f"packed tensor {name!r} has no {part}", VERIFY)
        return tuple(found)

    def stored_names(self, name: str) -> list[str]:
        return [name + _PACKED, part_names(name)[0], f"{name}_shape"]

    def expected_bytes(self, form: Form, density: float) -> int:
        return form.rows * (-(-form.cols // _WORD) * _WORD + form.dtype.itemsize) + 16

    def encode(self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor], add: Add) -> dict:
        words, scale, shape = self.stored_names(name)
        codes = Codes(weight, "channel", form.dtype, name)
        nbytes = add(words, (form.rows, -(-form.cols // _WORD)), (to_words(rows) for _, rows in codes))
        nbytes += add(scale, tuple(codes.scale.shape), [codes.scale])
        nbytes += add(shape, (2,), [torch.tensor([form.rows, form.cols])])
        found = {"shape": [form.rows, form.cols], "dtype": dtype_name(codes.scale.dtype), "nonzeros": codes.nonzeros}
        return {"bytes": nbytes, "layout": self.name} | record | found | {"error": round(codes.error, 8)}

    def assemble(self, name: str, parts: dict[str, Tensor]) -> Int8PackedWeight:
        return Int8PackedWeight(name, {part.rpartition(".")[2]: tensor for part, tensor in parts.items()})

    def form(self, packed: Int8PackedWeight) -> Form:
        return Form(*packed.shape, packed.scale.dtype)

    def examine(self, packed: Int8PackedWeight) -> tuple[dict, list[str]]:
        try:
            codes = self.codes(packed)[0]
        except TilepressError as error:
            return {}, [error.message]
        return examine(packed.name, {packed.name: codes, part_names(packed.name)[0]: packed.scale})

    def problem(self, packed: Int8PackedWeight) -> str | None:
        if packed.stored.dtype != torch.int32:
            return f"words of {packed.stored.dtype}"
        return super().problem(packed)

    def codes(self, packed: Int8PackedWeight) -> tuple[Tensor, Tensor]:
        return from_words(packed.stored, packed.shape[1]), packed.scale

    def slice(
        self, packed: Int8PackedWeight, read: Callable[..., Tensor], rows: Span, cols: Span, device: torch.device
    ) -> tuple[Int8Weight, tuple[Span, Span]]:
        """A part is no longer packed: it is for running."""
        first = cols[0] // _WORD
        words = read("weight_packed", slice(*rows), slice(first, -(-cols[1] // _WORD))).to(device)
        codes = from_words(words, cols[1] - _WORD * first)[:, cols[0] - _WORD * first :].contiguous()
        whole = packed.scale.dim() < 2  # a scale a tensor, which another tool may have written
        scale = read("weight_scale", *([] if whole else [slice(*rows)])).to(device, copy=True).contiguous()
        return Int8Weight(packed.name, {"weight": codes, "weight_scale": scale}), (rows, cols)


register(PackedLayout())
