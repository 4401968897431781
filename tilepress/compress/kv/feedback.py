"""Feedback of keys' rounding errors: what each block of a row's channels adds to the channels that are rounded after it.

An error e of a key costs e^T M e, M the second moments of the queries, weighted by how much of an error that each of them meets reaches its output
(`Search.moments`). Once a block of channels is rounded, with errors e_b, the cost is least if the channels behind it, r, are off by
-M_rr^-1 M_rb e_b: so this is what they are moved by before they are rounded, as GPTQ (Frantar et al. 2022, arXiv 2210.17323) and LDLQ (Chee et al. 2023,
arXiv 2307.13304) do with weights. Blocks are an eighth of a row, since a kernel has to wait for each (kernels/kv_quantize.cuh).

Few queries say little of some directions: so M gets a share of its mean power in all directions alike.
"""

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import FEEDBACK_BLOCKS, FEEDBACK_ONE, feedback_words, hadamard

DAMP = 0.1  # of the mean power of queries, in every direction


def feedback_for(moments: Tensor, scale: Tensor, rotate: bool) -> Tensor:
    """Return the feedback of keys of these channels' scales [KV heads, D], for queries' moments [KV heads, D, D] float64: int8 words, see kv_int4.py."""
    size = moments.shape[-1]
    metric = moments * scale.double()[:, :, None] * scale.double()[:, None]
    metric = hadamard(hadamard(metric).mT) if rotate else metric
    power = metric.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-300)[:, None, None]
    metric = metric / power + DAMP * torch.eye(size, dtype=metric.dtype, device=metric.device)
    # metric = U U^T with an upper U, of which the later channels' part is U_rr: M_rr^-1 M_rb = (U_br U_rr^-1)^T.
    upper = torch.linalg.cholesky_ex(metric.flip(1, 2)).L.flip(1, 2)
    inverse = torch.linalg.solve_triangular(upper, torch.eye(size).to(upper), upper=True)
    found = torch.zeros_like(metric)
    for block in range(1, FEEDBACK_BLOCKS):
        end = size // FEEDBACK_BLOCKS * block
        own = slice(end - size // FEEDBACK_BLOCKS, end)
        found[:, end:, own] = (upper[:, own, end:] @ inverse[:, end:, end:]).mT
    return feedback_words((found * FEEDBACK_ONE).round().nan_to_num().clamp(-127, 127))
