"""Every layout by the one protocol: what it stores it gives back, whole and in parts, and it says what it will be."""

import pytest
import torch

from tilepress.formats import TilepressError
from tilepress.formats.int8 import Int8Layout, Int8Scheme, part_names, quantize
from tilepress.formats.layout import Form, layout_named, layout_of, layouts, side_suffixes

ROWS, COLS, NAME = 300, 330, "a.weight"  # whole tiles and some more, either way
LAYOUTS = {
    "tiled-csl": layout_named("tiled-csl"),
    "tiled-bitmap": layout_named("tiled-bitmap"),
    "int8 bitmap": layout_named("tiled-bitmap").of_codes("channel"),
    "int8": Int8Layout(Int8Scheme("channel", "none")),
    "int8 tensor": Int8Layout(Int8Scheme("tensor", "none")),
    "dense": layout_named("dense"),
}


def weight() -> torch.Tensor:
    values = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(3)).bfloat16()
    return values.masked_fill_(values.abs() < 0.7, 0.0)


def stored(layout, transposed: bool = False) -> tuple[dict, dict[str, torch.Tensor]]:
    """The record of an encoded weight, and its stored tensors."""
    parts = {}

    def add(name, shape, pieces):
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        parts[name] = flat if shape[:1] == (-1,) else flat.view(shape)
        return flat.nbytes

    form = Form(ROWS, COLS, torch.bfloat16, transposed)
    record = layout.encode(NAME, form, weight(), {"error": 0.0}, {}, add)
    return record, parts


def expected(which: str) -> torch.Tensor:
    """The dense weight, of int8 codes rounded by the textbook: absmax / 127 of a row or of all."""
    values = weight().float()
    if not which.startswith("int8"):
        return values.bfloat16()
    scale = (values.abs().amax() if "tensor" in which else values.abs().amax(1, keepdim=True)).div(127).bfloat16()
    codes = (values / scale.float()).round().clamp(-128, 127)
    return (codes * scale.float()).bfloat16()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("which", LAYOUTS)
def test_what_is_encoded_comes_back(which, transposed):
    layout = LAYOUTS[which]
    record, parts = stored(layout, transposed)
    assert sorted(parts) == sorted(layout.stored_names(NAME))
    assert sorted(layout_named(layout.name).parts(NAME, parts)) == sorted(parts)
    assert record["layout"] == layout.name and record["bytes"] == sum(part.nbytes for part in parts.values())
    assert layout.expected_bytes(Form(ROWS, COLS, torch.bfloat16), 0.48) == pytest.approx(record["bytes"], rel=0.4)
    packed = layout.assemble(NAME, {name: parts[name] for name in layout_named(layout.name).parts(NAME, parts)})
    assert layout_of(packed) is layouts()[layout.name]
    matrix = layout.matrix(packed)
    assert torch.equal(matrix.t() if which == "dense" and transposed else matrix, expected(which))
    if layout.packed:
        assert layout.form(packed) == Form(ROWS, COLS, torch.bfloat16, transposed)
        assert layout.problem(packed) is None
    found, problems = layout.examine(packed)
    assert not problems and {key: record[key] for key in found} == found
    assert layout.holds_codes(NAME, parts) == which.startswith("int8")
    if layout.holds_codes(NAME, parts):
        codes, scale = layout.codes(packed)
        assert torch.equal(codes, quantize(weight(), scale))


@pytest.mark.parametrize("rows,cols", [((0, ROWS), (0, COLS)), ((128, 256), (128, 300)), ((30, 170), (7, 9))])
@pytest.mark.parametrize("which", LAYOUTS)
def test_a_part_is_read_without_the_rest(which, rows, cols):
    layout = LAYOUTS[which]
    _, parts = stored(layout)
    names = layout_named(layout.name).parts(NAME, parts)
    empty = {n: parts[n] if n.endswith(layout.described_by or "-") else parts[n].to("meta") for n in names}

    def read(part, *ranges):
        return parts[f"a.{part}"][ranges] if ranges else parts[f"a.{part}"]

    packed, covered = layout.slice(layout.assemble(NAME, empty), read, rows, cols, torch.device("cpu"))
    for asked, found, side in zip((rows, cols), covered, layout.tile or (1, 1), strict=True):
        assert found[0] <= asked[0] < found[0] + side and asked[1] <= found[1] < asked[1] + side
    part = expected(which)[slice(*covered[0]), slice(*covered[1])]
    assert torch.equal(layout.matrix(packed), part)
    assert not layout.examine(packed)[1]


def test_the_registry():
    assert list(layouts())[:5] == ["tiled-csl", "tiled-bitmap", "int8", "int8-packed", "dense"]
    assert side_suffixes()[:4] == ["_offsets", "_layout", "_bitmap", "_scale"]  # the order that files have
    with pytest.raises(TilepressError, match="'unheard-of' is unknown") as caught:
        layout_named("unheard-of")
    assert "tiled-csl" in caught.value.hint
    with pytest.raises(TilepressError, match=part_names(NAME)[0]):
        layout_named("int8").parts(NAME, {NAME: torch.zeros(2, 2, dtype=torch.int8)})
