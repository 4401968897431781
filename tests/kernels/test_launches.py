"""What ops hand to the driver, on a card that is not there: by the kernels' own names, in a first launch and in those that follow."""

import pytest
import torch
from support.stub_card import recorded

from tilepress.formats import tiled_bitmap, tiled_csl
from tilepress.formats.kv_int4 import KVFormat
from tilepress.kernels import jit, packed, tiled_bitmap_prefill, w8a8_gemm

ops = torch.ops.tilepress
TOKENS, COLUMNS, ROWS = 3, 256, 512
BF16 = torch.bfloat16


@pytest.fixture
def launches(monkeypatch):
    with recorded(monkeypatch) as seen, torch.inference_mode():
        yield seen


def randn(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int8)


FORM = KVFormat(64, 4, 32)


def _row():
    x, residual, weight = randn(TOKENS, COLUMNS), randn(TOKENS, COLUMNS), randn(COLUMNS)
    made = ops.add_rms_norm_int8(x, residual, weight, 1e-5, 0, None, None)
    codes, scales, total = made
    given = {"x": x, "residual": residual, "weight": weight, "codes": codes, "scales": scales, "total": total}
    return given, {"bias": 0, "scale": 0, "n": COLUMNS, "eps": jit.float_bits(1e-5)}


def _static():
    x, scale, zero_point = randn(TOKENS, COLUMNS), torch.ones(1), ints(1)
    codes = ops.quantize_int8_static(x, scale, zero_point)
    return {"x": x, "scale": scale, "zero_point": zero_point, "codes": codes}, {"residual": 0, "total": 0}


def _silu():
    x = randn(TOKENS, 2 * COLUMNS)
    return {"x": x, "codes": ops.silu_mul(x)}, {"n": COLUMNS, "scales": 0}


def _w8a8():
    x, x_scale, zero_point, weight, scale = (
        ints(TOKENS, COLUMNS),
        torch.ones(3, 1),
        ints(1),
        ints(ROWS, COLUMNS),
        randn(1),
    )
    bias = randn(ROWS)
    y = ops.w8a8_gemm(x, x_scale, zero_point, weight, scale, bias, BF16)
    given = {"x_scale": x_scale, "w_scale": scale, "bias": bias, "zero_point": zero_point, "y": y, "x": x, "w": weight}
    return given | {"w_sums": w8a8_gemm.row_sums(weight)}, {"m": TOKENS, "n": ROWS, "k": COLUMNS}


def _w8a16():
    x, weight, scale = randn(TOKENS, COLUMNS), ints(ROWS, COLUMNS), randn(ROWS, 1)
    y = ops.w8a16_gemm(x, weight, scale, None)
    return {"w": weight, "x": x, "w_scale": scale, "y": y}, {"bias": 0, "m": TOKENS, "n": ROWS}


def _bitmap():
    weight = torch.where(torch.rand(ROWS, COLUMNS) < 0.5, 0, randn(ROWS, COLUMNS))
    packed, x, bias = tiled_bitmap.pack(weight), randn(1, TOKENS, COLUMNS), randn(ROWS)
    y = ops.tiled_bitmap_spmm(x, packed.words, packed.offsets, None, bias, ROWS, BF16, packed.group)
    return {"words": packed.words, "offsets": packed.offsets, "x": x, "bias": bias, "y": y}, {"scale": 0, "n": TOKENS}


def _csl():
    weight = torch.where(torch.rand(ROWS, COLUMNS) < 0.8, 0, randn(ROWS, COLUMNS))
    packed, x = tiled_csl.pack(weight), randn(TOKENS, COLUMNS)
    y = ops.tiled_csl_spmm(x, packed.words, packed.offsets, None, ROWS, BF16)
    return {"words": packed.words, "offsets": packed.offsets, "x": x, "y": y}, {"bias": 0, "n": TOKENS, "m": ROWS}


def _cache():
    pages = torch.zeros(8, 2, FORM.page_bytes, dtype=torch.uint8)
    return pages, torch.ones(3, 2, 64), torch.ones(3, 2, 64)


def _rope():
    pages, keys, values = _cache()
    query, key, value = (x.unflatten(-1, (-1, 64)) for x in randn(TOKENS, 8 * 64).split((256, 128, 128), -1))
    cos, sin, slots, norm = randn(TOKENS, 32), randn(TOKENS, 32), torch.arange(TOKENS), randn(64)
    between = None, None, None, None, norm, 1e-6, cos, sin, False, True, slots
    out = ops.rope_append(pages, query, key, value, *between, keys, None, 1.0, values, None, 1.0, 4, 32, False, True, 0)
    given = {"pages": pages, "slots": slots, "key_channels": keys, "value_channels": values, "out": out, "query": query}
    given |= {"key": key, "value": value, "key_norm": norm, "cosines": cos, "sines": sin}
    return given, {"query_bias": 0, "query_norm": 0, "key_fixed": 0, "query_token": 512, "tokens": TOKENS}


def _append():
    pages, keys, values = _cache()
    key, value, slots = randn(TOKENS, 2, 64), randn(TOKENS, 2, 64), torch.arange(TOKENS)
    ops.kv_append(pages, key, value, slots, keys, None, 1.0, values, None, 1.0, 4, 32, False, True, 0)
    return {
        "pages": pages,
        "slots": slots,
        "key_channels": keys,
        "value_channels": values,
        "key": key,
        "value": value,
    }, {}


def _table():
    return torch.zeros(TOKENS, 2, dtype=torch.int32), torch.ones(TOKENS, dtype=torch.int32)


def _read():
    (pages, keys, values), (table, lengths) = _cache(), _table()
    found = ops.kv_read(pages, table, lengths, 70, keys, None, values, None, 64, 4, 32, False, True, BF16)
    given = {"pages": pages, "key_channels": keys, "value_channels": values}
    return given, {"_outputs": [x.data_ptr() for x in found], "_tables": [table.data_ptr(), lengths.data_ptr()]}


def _attention():
    (pages, _, values), (table, lengths), query = _cache(), _table(), randn(TOKENS, 4, 64)
    calibration = None, None, values, None
    out, lse = ops.decode_attention_lse(query, pages, table, lengths, 0.125, *calibration, 4, 32, False, False)
    given = {"query": query, "pages": pages, "table": table, "lens": lengths, "out": out, "lse": lse}
    return given | {"value_channels": values}, {"key_channels": 0, "out_scale": 0, "batch": TOKENS, "group": 2}


def _argmax():
    x = randn(TOKENS, COLUMNS)
    return {"x": x, "out": ops.argmax(x)}, {"stride": COLUMNS, "columns": COLUMNS}


CASES = (_row, _static, _silu, _w8a8, _w8a16, _bitmap, _csl, _rope, _append, _read, _attention, _argmax)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_every_argument_is_where_the_kernel_takes_it(launches, case):
    kept = []  # so that no two tensors have one address
    for _ in range(3):
        launches.clear()
        given, numbers = case()
        kept.append(given)
        ((_, arguments),) = launches
        for name, tensor in given.items():
            assert arguments[name] == tensor.data_ptr(), name
        for name, number in numbers.items():
            if name.startswith("_"):
                assert set(number) <= set(arguments.values()), name
            else:
                assert arguments[name] == number, name


def test_a_weight_that_was_not_multiplied_as_it_is_waits_for_what_writes_it(launches):
    x, scale, weight, other = ints(TOKENS, COLUMNS), torch.ones(1), ints(ROWS, COLUMNS), ints(ROWS, COLUMNS)

    def is_alone(w):
        launches.clear()
        ops.w8a8_gemm(x, scale, None, w, scale, None, BF16)
        return launches[0][0]

    assert [is_alone(w) for w in (weight, weight, other, weight, other)] == [True, False, True, False, False]
    with torch.inference_mode(False):
        weight = ints(ROWS, COLUMNS)
        assert is_alone(weight) and not is_alone(weight)
        weight.add_(1)
        assert is_alone(weight) and not is_alone(weight)


def test_arguments_of_another_kind_are_checked_anew(launches):
    x, scale, weight = ints(TOKENS, COLUMNS), torch.ones(1), ints(ROWS, COLUMNS)
    for _ in range(2):
        ops.w8a8_gemm(x, scale, None, weight, scale, None, BF16)
        with pytest.raises(ValueError, match="times"):
            ops.w8a8_gemm(x, scale, None, weight[:, 16:].contiguous(), scale, None, BF16)
        with pytest.raises(ValueError, match="bias"):
            ops.w8a8_gemm(x, scale, None, weight, scale, randn(ROWS - 1), BF16)
    assert len(launches) == 2


def test_rows_that_lie_apart_are_copied(launches):
    x, weight = randn(TOKENS, 2 * COLUMNS)[:, :COLUMNS], randn(COLUMNS)
    for _ in range(2):
        launches.clear()
        ops.rms_norm(x, weight, 1e-5)
        assert launches[0][1]["x"] != x.data_ptr() and launches[0][1]["weight"] == weight.data_ptr()


def test_attention_of_several_queries_in_parts(launches):
    """Two launches, both with memory that is given and with sums of parts that the second one reads where the first one writes them."""
    (pages, _, values), (_, lengths) = _cache(), _table()
    table, starts = torch.zeros(TOKENS, 1000, dtype=torch.int32), torch.tensor([0, 4, 5, 7], dtype=torch.int32)
    query, sinks = randn(7, 4, 64), torch.zeros(4)
    given = {"query": query, "pages": pages, "table": table, "lens": lengths, "value_channels": values, "sinks": sinks}
    arguments = query, pages, table, lengths, 0.125, None, None, values, None, 4, 32, False, False
    extras = 0, 0, False, starts, 50_000, 0.0, sinks
    for out in (torch.empty_like(query), torch.empty_like(query), None):
        launches.clear()
        if out is None:
            out, lse = ops.decode_attention_lse(*arguments, *extras)
            given["lse"] = lse
        else:
            assert ops.decode_attention_into(*arguments, out, *extras) is None
        (_, attend), (_, combine) = launches
        for name, tensor in (given | {"starts": starts, "out": out}).items():
            assert attend[name] == tensor.data_ptr(), name
            assert combine.get(name, tensor.data_ptr()) == tensor.data_ptr(), name
        assert attend["key_channels"] == attend["slopes"] == attend["out_scale"] == combine["out_scale"] == 0
        assert attend["lse"] == combine["lse"] == (given["lse"].data_ptr() if "lse" in given else 0)
        assert attend["parts"] == combine["parts"] > 0 and attend["splits"] == combine["splits"] > 1
        rows = 7 * 4
        assert attend["weights"] - attend["parts"] == 4 * attend["splits"] * rows * 64 and combine["rows"] == rows
        assert (attend["queries"], attend["batch"], attend["kv_heads"], attend["group"]) == (7, TOKENS, 2, 2)
        assert (attend["table_stride"], attend["table_pages"], attend["window"]) == (1000, 1000, 50_000)


@pytest.mark.parametrize("bias", [None, True], ids=["plain", "bias"])
@pytest.mark.parametrize("layout", ["csl", "bitmap", "int8"])
def test_many_rows_are_multiplied_by_decoded_parts(launches, monkeypatch, layout, bias):
    """Every launch takes its own rows' offsets and scales; products are of what lies in the memory that it writes to, here made by hand."""
    monkeypatch.setattr(packed, "_DECODED_ROWS", 256)
    monkeypatch.setattr(tiled_bitmap_prefill, "_MOST_X_BYTES", 0)  # else a kernel takes the bitmap as it is
    dtype, rows = BF16, 700
    dense = torch.randint(-3, 4, (rows, COLUMNS)).to(dtype)
    bias = bias and torch.randint(-9, 9, (rows,)).to(dtype)
    x = torch.randint(-3, 4, (3, 700, COLUMNS)).to(dtype)  # small whole numbers, exact in any order
    scale, stored = None, tiled_csl.pack(dense) if layout == "csl" else tiled_bitmap.pack(dense)
    if layout == "int8":
        scale = torch.ones(rows, dtype=dtype)
        stored = tiled_bitmap.pack(dense.to(torch.int8), scale=scale)
    made, multiply = [], packed._multiply

    def decoded(x, w, bias, y, first, last):
        (_, told), wanted = launches[-1], first // 128 * (COLUMNS // (64 if layout == "csl" else 128))
        assert told["offsets"] == stored.offsets[wanted:].data_ptr() and told["words"] == stored.words.data_ptr()
        assert told.get("scale", 0) == (0 if scale is None else scale[first:].data_ptr())
        assert (told["w"], told["rows"], told["cols"]) == (w.data_ptr(), last - first, COLUMNS)
        w.t().copy_(dense[first:last])
        made.append((first, last))
        multiply(x, w, bias, y, first, last)

    monkeypatch.setattr(packed, "_multiply", decoded)
    if layout == "csl":
        found = ops.tiled_csl_spmm(x, stored.words, stored.offsets, bias, rows, dtype)
    else:
        found = ops.tiled_bitmap_spmm(x, stored.words, stored.offsets, scale, bias, rows, stored.dtype, stored.group)
    assert made == [(0, 256), (256, 512), (512, 700)]
    expected = x.double() @ dense.double().t() + (0 if bias is None else bias.double())
    assert torch.equal(found, expected.to(dtype))
