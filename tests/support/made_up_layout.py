"""A layout that tilepress does not have: a list of coordinates, with the module that runs it. Importing this file makes it known.

NAME            int16 [n], bits of the values that are not zero, in the order of their places
NAME_places     int32 [n], row * cols + column of each
NAME_size       int32 [4]: rows, cols, 0 for bfloat16 or 1 for float16, transposed
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tilepress.formats import TilepressError, dtype_name
from tilepress.formats.layout import Layout, layout_of, register
from tilepress.runtime.linear import packed as linears

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Coordinates:
    values: Tensor
    places: Tensor
    rows: int
    cols: int
    weight_dtype: torch.dtype
    transposed: bool
    layout_name = "made-up"

    @property
    def size(self) -> Tensor:
        fields = [self.rows, self.cols, DTYPES.index(self.weight_dtype), int(self.transposed)]
        return torch.tensor(fields, dtype=torch.int32)


def coordinates_linear_ref(x: Tensor, packed: Coordinates, bias: Tensor | None) -> Tensor:
    """x [..., cols] -> [..., rows], in x's dtype."""
    return nn.functional.linear(x, layout_of(packed).matrix(packed).to(x.dtype), bias)


class MadeUp(Layout):
    name, title = "made-up", "lists of coordinates"
    suffixes, described_by = ("", "_places", "_size"), "_size"

    def expected_bytes(self, form, density):
        return int(6 * form.elements * density) + 16

    def encode(self, name, form, weight, record, beside, add):
        bits = weight.view(torch.int16).reshape(-1)
        places = bits.nonzero().squeeze(1)
        packed = Coordinates(bits[places], places.int(), form.rows, form.cols, weight.dtype, form.transposed)
        parts = {"": packed.values, "_places": packed.places, "_size": packed.size}
        nbytes = sum(add(name + suffix, tuple(part.shape), [part]) for suffix, part in parts.items())
        return self.examine(packed)[0] | {"bytes": nbytes, "layout": self.name} | record

    def assemble(self, name, parts):
        values, places, size = parts.values()
        if values.shape != places.shape or size.shape != (4,):
            raise TilepressError(f"{name}: {len(values)} values at {len(places)} places")
        rows, cols, dtype, transposed = size.tolist()
        return Coordinates(values, places, rows, cols, DTYPES[dtype], bool(transposed))

    def examine(self, packed):
        record = {"shape": [packed.rows, packed.cols], "dtype": dtype_name(packed.weight_dtype)}
        record |= {"nonzeros": packed.values.numel()} | ({"transposed": True} if packed.transposed else {})
        problem = self.problem(packed)
        return record, [problem] if problem else []

    def problem(self, packed):
        steps = packed.places.diff(
            prepend=packed.places.new_tensor([-1]), append=packed.places.new_tensor([packed.rows * packed.cols])
        )
        return None if bool((steps > 0).all()) else "places do not rise within the matrix"

    def matrix(self, packed):
        bits = torch.zeros(packed.rows * packed.cols, dtype=torch.int16, device=packed.values.device)
        bits[packed.places.long()] = packed.values
        return bits.view(packed.weight_dtype).view(packed.rows, packed.cols)

    def slice(self, packed, read, rows, cols, device):
        whole = replace(packed, values=read("weight"), places=read("weight_places"))
        row, col = whole.places // packed.cols, whole.places % packed.cols
        own = (row >= rows[0]) & (row < rows[1]) & (col >= cols[0]) & (col < cols[1])
        height, width = (end - first for first, end in (rows, cols))
        places = ((row - rows[0]) * width + col - cols[0])[own].int()
        found = replace(whole, values=whole.values[own].to(device), places=places.to(device), rows=height, cols=width)
        return found, (rows, cols)


class CoordinatesLinear(linears.PackedLinear):
    def __init__(self, packed: Coordinates, bias: torch.dtype | None):
        super().__init__()
        self.in_features, self.out_features, self.like = packed.cols, packed.rows, packed
        device = packed.values.device
        self.register_buffer("weight", packed.values)
        self.register_buffer("weight_places", packed.places)
        self.register_buffer("weight_size", packed.size.to(device))
        empty = None if bias is None else torch.empty(packed.rows, dtype=bias, device=device)
        self.bias = None if empty is None else nn.Parameter(empty, requires_grad=False)

    @classmethod
    def of(cls, packed, bias, dtype, scheme=None):
        return cls(packed, bias)

    @property
    def packed(self):
        return replace(self.like, values=self.weight, places=self.weight_places)

    def path_for(self, dtype, n=1):
        return f"coordinates_linear reference on {self.weight.device.type}"

    def forward(self, x):
        return coordinates_linear_ref(x, self.packed, self.bias)


register(MadeUp())
linears.register("made-up", CoordinatesLinear)


def ask(*args, **options):
    """`support.ranks.ask` in a process that has imported this file."""
    from support.ranks import ask

    return ask(*args, **options)
