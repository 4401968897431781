"""Merged projections: the outputs of each side by side, in memory that the layers share; what cannot be merged multiplies alone."""

import pytest
import torch
from torch import nn

from tilepress.formats import tiled_bitmap, tiled_csl
from tilepress.formats.int8 import Int8Scheme
from tilepress.runtime.linear.int8 import Int8Linear, MergedInt8Linear
from tilepress.runtime.linear.merged import merge
from tilepress.runtime.linear.packed import packed_linear


def weight(rows: int, cols: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=generator)
    return (values * (torch.rand(rows, cols, generator=generator) < 0.3)).bfloat16()


def dense(rows: int, seed: int) -> nn.Linear:
    made = nn.Linear(96, rows, bias=seed != 1).bfloat16()
    made.weight.data = weight(rows, 96, seed)
    return made


def sparse(form):
    def make(rows: int, seed: int):
        made = packed_linear(form.pack(weight(rows, 96, seed)), None if seed == 1 else torch.bfloat16)
        if made.bias is not None:
            made.bias.data = torch.randn(rows).bfloat16()
        return made

    return make


def weight_only(rows: int, seed: int) -> Int8Linear:
    made = Int8Linear(rows, 96, Int8Scheme("channel", "none"), torch.bfloat16, bias=False)
    made.weight = torch.randint(-128, 128, (rows, 96), dtype=torch.int8)
    made.weight_scale = torch.rand(rows, 1).bfloat16()
    return made


KINDS = {"dense": dense, "csl": sparse(tiled_csl), "bitmap": sparse(tiled_bitmap), "int8": weight_only}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_side_by_side_in_shared_memory(kind):
    linears = [KINDS[kind](rows, seed) for seed, rows in enumerate((256, 128, 40))]
    x = weight(5, 96, 9)
    with torch.inference_mode():
        expected = [linear(x) for linear in linears]
        merged = merge(linears)
        assert type(merged).__name__ != "_Separate"
        torch.testing.assert_close(merged(x), torch.cat(expected, -1))
        assert all(torch.equal(linear(x), y) for linear, y in zip(linears, expected, strict=True))
        memory = merged.weight.untyped_storage().data_ptr()
        assert all(linear.weight.untyped_storage().data_ptr() == memory for linear in linears)
        if kind != "int8":  # what lies so already is not copied
            assert merge(linears).weight.untyped_storage().data_ptr() == memory
    if kind in ("csl", "bitmap"):
        form = tiled_csl if kind == "csl" else tiled_bitmap
        rows = torch.cat([form.unpack(linear.packed) for linear in linears])
        assert torch.equal(form.unpack(merged.packed), rows) and merged.check_bounds() is None


def test_what_cannot_be_merged():
    csl, bitmap = KINDS["csl"], KINDS["bitmap"]
    x = weight(3, 96, 9)
    for linears in (
        [csl(100, 0), csl(128, 2)],  # a tile with rows of both
        [csl(128, 0), bitmap(128, 2)],
        [dense(128, 0), csl(128, 2)],
        [dense(128, 0), dense(128, 2).float()],
    ):
        if linears[1].weight.dtype == torch.float32:
            assert type(merge(linears)).__name__ == "_Separate"
            continue
        with torch.inference_mode():
            assert torch.equal(merge(linears)(x), torch.cat([linear(x) for linear in linears], -1))
        assert type(merge(linears)).__name__ == "_Separate"
    alone = dense(8, 0)
    assert merge([alone]) is alone and isinstance(merge([weight_only(8, 0), weight_only(8, 1)]), MergedInt8Linear)
