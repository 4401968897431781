"""A tensor piece by piece: whole row blocks padded to whole tiles, as layouts of tiles pack them, and elements in order."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilepress.formats import TilepressError, dtype_name

# Dtypes that torch stores and does not count; none loses a non-zero as float64.
_NOT_COUNTED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
_ON_A_CARD = 1 << 25  # elements: there a thousand small operations take the time of a large one, and memory is at hand


def infinity(dtype: torch.dtype) -> int:
    """The bits of a 16-bit dtype's +inf: from there on nothing is finite."""
    return 0x7F80 if dtype == torch.bfloat16 else 0x7C00


def stripes(weight: Tensor, tile_rows: int, tile_cols: int, elements: int, name: str) -> Iterator[Tensor]:
    """weight [rows, cols] of bfloat16, float16 or int8 -> [a tile_rows, b tile_cols] each, of about so many elements, on a card 2^25.

    Raises TilepressError naming `name` for a value that is not finite, or the code -128.
    """
    rows, cols = weight.shape
    wide = -(-cols // tile_cols) * tile_cols
    step = max(1, (_ON_A_CARD if weight.is_cuda else elements) // (tile_rows * wide)) * tile_rows
    for first in range(0, rows, step):
        stripe = weight[first : first + step].contiguous()
        if not _storable(stripe):
            is_code = stripe.dtype == torch.int8
            row, col = (stripe == -128 if is_code else ~torch.isfinite(stripe)).nonzero()[0].tolist()
            raise TilepressError(
                f"{name} has {'the code -128' if is_code else 'a non-finite value'} at [{first + row}, {col}]",
                "the checkpoint is damaged, or overflowed when it was converted to this dtype",
            )
        tall = -(-stripe.shape[0] // tile_rows) * tile_rows
        yield stripe if stripe.shape == (tall, wide) else pad(stripe, (0, wide - cols, 0, tall - stripe.shape[0]))


def _storable(stripe: Tensor) -> bool:
    if stripe.dtype == torch.int8:
        return int(stripe.amin()) > -128
    return int((stripe.view(torch.int16) & 0x7FFF).amax()) < infinity(stripe.dtype)


def nonzeros(tensor: Tensor) -> int:
    """Return how many elements are not zero."""
    countable = tensor.dtype not in _NOT_COUNTED
    pieces = tensor.reshape(-1).split(1 << 22)
    return sum(int(torch.count_nonzero(piece if countable else piece.double())) for piece in pieces)


def set_bits(bits: Tensor) -> Tensor:
    """Return where a bool tensor is set, in one dimension, as int64. On a CPU NumPy finds it in an eighth of torch's time."""
    flat = bits.view(-1)
    return torch.from_numpy(flat.numpy().nonzero()[0]) if flat.device.type == "cpu" else flat.nonzero().squeeze(1)


def converted(tensor: Tensor, dtype: torch.dtype, name: str) -> Iterator[Tensor]:
    """Yield the elements in order, in pieces, converted to a dtype.

    Raises TilepressError naming a tensor with values that are not finite, before or after.
    """
    for piece in tensor.reshape(-1).split(1 << 22):
        other = piece.to(dtype)
        if piece.is_floating_point() and not bool(torch.isfinite(other.float()).all()):
            if bool(torch.isfinite(piece.float()).all()):
                hint = "convert with --dtype bfloat16, which has float32's range"
                raise TilepressError(f"{name} has values beyond {dtype_name(dtype)}", hint)
            raise TilepressError(
                f"{name} has non-finite values", "the checkpoint is damaged, or overflowed in training"
            )
        yield other
