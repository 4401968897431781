"""Products of many rows with a weight that is decoded, its launches made once: what `packed.multiply_decoded` computes, with less of the host's time. In
vLLM a bitmap's 2048 rows waited for the host: 13.3 ms of an H100's time took 20.4 (8 layers of Llama-3-8B's shape).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilepress.kernels import jit, packed
from tilepress.kernels.jit import Launch

FEWEST = 1537  # rows of x


def decoding(
    x: Tensor, rows: int, tile: tuple[int, int], launch_of: Callable[[int], Launch]
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]:
    """Return what multiplies x [..., cols] by W [rows, cols] for arguments like these: run(x, words, offsets, scale, bias) -> [..., rows].

    `tile` is a tile's shape. `launch_of(n)` gives the launch that decodes n rows to x's dtype; it takes the addresses of words, of the rows' offsets and of
    their scale if there is one, and of the dense rows."""
    cols, at_once = x.shape[-1], packed._DECODED_ROWS
    k_blocks, n = -(-cols // tile[1]), x.numel() // cols
    spans = [(first, min(first + at_once, rows)) for first in range(0, rows, at_once)]
    launches = {size: launch_of(size) for size in {last - first for first, last in spans}}
    like = jit.like((n, rows), x.dtype, x.device)
    room = jit.like((max(launches), cols), x.dtype, x.device)

    def run(x: Tensor, words: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        flat, y, dense = x.reshape(-1, cols), jit.empty_like(like), jit.empty_like(room)
        turned = {size: dense[:size].t() for size in launches}
        with torch.no_grad():  # out= has no gradient
            for first, last in spans:  # one after the other in the same memory, which stays in the L2 cache
                of_scale = [] if scale is None else [scale.data_ptr() + scale.itemsize * first]
                begin = offsets.data_ptr() + 4 * k_blocks * (first // tile[0])
                launches[last - first](words.data_ptr(), begin, *of_scale, dense.data_ptr())
                multiply(flat, turned[last - first], bias, y, first, last)
        return y.view(*x.shape[:-1], rows)

    return run


def multiply(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, first: int, last: int) -> None:
    """Write x [n, cols] times w [cols, last - first], and the bias, to columns first to last of y. It is added in float32, and the sum rounded once."""
    if bias is None:
        torch.mm(x, w, out=y[:, first:last])
    else:
        torch.add(packed._wide_product(x, w), bias[first:last], out=y[:, first:last])
