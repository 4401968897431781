"""The parts that ops on packed weights share: their arguments, what is worked out once for a weight, and products with
a decoded weight.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilepress.formats import TilepressError
from tilepress.kernels import jit
from tilepress.kernels.jit import Launch
from tilepress.kernels.once import OfTensors

_DECODED_ROWS = 2048  # of W, decoded at once: what the L2 cache holds for cuBLAS
_FEW_ROWS = 512  # of x: up to so many, more of W is decoded at once, since cuBLAS fills a card with that
Made = TypeVar("Made")


def check_arguments(
    x: Tensor, words: Tensor, offsets: Tensor, bias: Tensor | None, rows: int, tiles: int, scale: Tensor | None = None
) -> None:
    """Raises ValueError for arguments that cannot be a product. What offsets and words hold is believed: `check_bounds` of their format looks."""
    if words.dtype != torch.int32 or offsets.dtype != torch.int32:
        raise ValueError(f"words of {words.dtype} and offsets of {offsets.dtype}, not int32")
    if offsets.shape != (tiles + 1,):
        raise ValueError(f"{offsets.numel()} offsets are not those of {rows} x {x.shape[-1]}, which has {tiles} tiles")
    if not (words.is_contiguous() and offsets.is_contiguous()) or (words.is_cuda and words.data_ptr() % 16):
        raise ValueError("words and offsets must be contiguous, on a card words must begin at a multiple of 16 bytes")
    for what, vector in (("bias", bias), ("scale", scale)):
        if vector is not None and (vector.shape != (rows,) or not vector.is_contiguous()):
            raise ValueError(f"a {what} of {list(vector.shape)} for {rows} rows")
    if any(t is not None and t.device != x.device for t in (words, offsets, bias, scale)):
        raise ValueError("the arguments are on several devices")


def aligning(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the rows of x [..., cols] as `aligned` does, and what gives those, or at least their memory, of all that is like x."""
    flat = aligned(x.reshape(-1, x.shape[-1]))
    if flat.data_ptr() == x.data_ptr():
        return flat, lambda x: x
    return flat, lambda x: aligned(x.reshape(-1, x.shape[-1]))


def aligned(x: Tensor) -> Tensor:
    """x [n, cols], with rows of a multiple of 8 columns that begin at multiples of 16 bytes. A kernel more where cols is no multiple of 8."""
    if x.shape[1] % 8:
        x = pad(x, (0, -x.shape[1] % 8))
    if x.stride(1) != 1 or x.stride(0) % 8 or x.stride(0) < x.shape[1] or x.data_ptr() % 16:
        x = x.new_empty(x.shape).copy_(x)
    return x


class PerWeight(Generic[Made]):
    """Keeps what `make(offsets, blocks)` works out for a weight where it is first multiplied. It waits for the device, and that lets kernels read words
    and offsets before the kernels ahead of them have ended."""

    def __init__(self, make: Callable[[Tensor, int], Made]):
        self._make, self._made = make, OfTensors()

    def __call__(self, words: Tensor, offsets: Tensor, blocks: int) -> Made:
        """Return what was made, made anew where the tensors have changed. Raises TilepressError inside a CUDA graph."""
        versions = [0 if p.is_inference() else p._version for p in (words, offsets)]
        version = blocks, words.data_ptr(), offsets.data_ptr(), *versions
        known = self._made.get(offsets)
        if known is None or known[0] != version:
            if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
                raise TilepressError(
                    "a sparse layer is first used inside a CUDA graph", "run the model once before capturing"
                )
            known = version, self._make(offsets, blocks)
            self._made.keep(offsets, known)
        return known[1]


def cuts_of(offsets: Tensor, tile_cost: int, parts: int) -> Tensor:
    """Return where the runs of tiles begin that `parts` blocks take, equal in bytes and `tile_cost` a tile, in 16 bytes: int32 [parts + 1, 2], tiles and their
    offsets, from offsets int32 [tiles + 1], on their device. No run is empty; where tiles are too few, the last ones are."""
    count, number = len(offsets) - 1, torch.arange(parts + 1, device=offsets.device)
    ends = torch.cumsum((offsets[1:] - offsets[:-1] + tile_cost).long(), 0)
    inner = torch.searchsorted(ends, ends[-1] * number[1:-1] // parts) + 1
    beyond = torch.nn.functional.pad(inner, (1, 1)) - number  # how many more tiles than blocks come before
    beyond[-1] = count - parts
    tiles = (beyond.cummax(0).values.clamp(0, max(count - parts, 0)) + number).clamp(max=count)
    return torch.stack([tiles, offsets[tiles]], 1).int()


def multiply_decoded(
    x: Tensor, bias: Tensor | None, rows: int, tile: tuple[int, int], decode: Callable[[slice, int, int], Tensor]
) -> Tensor:
    """x [n, cols] -> [n, rows] by cuBLAS, for some rows of W at a time: `decode(tiles, first, last)` gives them dense; `tile` is a tile's shape.
    A bias is added in float32 and the sum is rounded once, as the kernels do."""
    y = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    k_blocks = -(-x.shape[1] // tile[1])
    parts = _parts_of(rows, len(x))
    with torch.no_grad():  # out= has no gradient
        for first, last in parts:
            tiles = slice(first // tile[0] * k_blocks, -(-last // tile[0]) * k_blocks + 1)
            dense = decode(tiles, first, last).to(x.dtype).t()
            _multiply(x, dense, bias, y, first, last)
            del dense  # the next rows get the same memory, which is in the L2 cache
    return y


def decoding(
    out: Tensor, x: Tensor, tile: tuple[int, int], launch_of: Callable[[int], Launch]
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]:
    """Return what computes `multiply_decoded` for arguments like these, launches made: run(x, words, offsets, scale, bias) -> like `out` [..., rows].

    `launch_of(n)` gives the launch that decodes n rows to x's dtype; it takes the addresses of words, of the rows' offsets and scale if there is one, and of
    the dense rows."""
    rows, cols = out.shape[-1], x.shape[-1]
    n, k_blocks = x.numel() // cols, -(-cols // tile[1])
    flat_like, parts = jit.like((n, rows), out.dtype, out.device), _parts_of(rows, n)
    launches = {size: launch_of(size) for size in {last - first for first, last in parts}}
    room = jit.like((max(launches), cols), x.dtype, x.device)

    def run(x: Tensor, words: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        x, y, dense = x.reshape(-1, cols), jit.empty_like(flat_like), jit.empty_like(room)
        turned = {size: dense[:size].t() for size in launches}
        with torch.no_grad():  # out= has no gradient
            for first, last in parts:  # one after the other in the same memory, which stays in the L2 cache
                of_scale = [] if scale is None else [scale.data_ptr() + scale.itemsize * first]
                of_tiles = offsets.data_ptr() + 4 * k_blocks * (first // tile[0])
                launches[last - first](words.data_ptr(), of_tiles, *of_scale, dense.data_ptr())
                _multiply(x, turned[last - first], bias, y, first, last)
        return y.view(out.shape)

    return run


def _parts_of(rows: int, n: int) -> list[tuple[int, int]]:
    """Return the rows of W, first and last, that are decoded at once for n rows of x."""
    step = _DECODED_ROWS * (2 if n <= _FEW_ROWS else 1)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, first: int, last: int) -> None:
    """Write x [n, cols] times w [cols, last - first] and their part of the bias to columns first to last of y."""
    if bias is None:
        torch.mm(x, w, out=y[:, first:last])
    else:
        torch.add(_wide_product(x, w), bias[first:last], out=y[:, first:last])


def _wide_product(x: Tensor, w: Tensor) -> Tensor:
    """x [n, cols] times w [cols, rows] in float32, or in their own dtype if it is as wide."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x @ w
    return torch.mm(x, w, out_dtype=torch.float32) if x.is_cuda else x.float() @ w.float()
