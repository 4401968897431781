"""Benchmarks of the INT8 kernels, as `tilepress eval kernels w8a8` and `fused` run them, and the tuner of the W8A8 GEMM."""

import itertools
import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilepress.bench.kernels import (
    ERROR,
    check_card,
    check_dtypes,
    copies_of,
    dense_us,
    dense_work,
    environment,
    read_gbps,
    sustained_us,
    time_us,
    timed_rows,
)
from tilepress.formats import TilepressError, UsageError, dtype_name, int8
from tilepress.kernels import fused_quant, jit, w8a8_gemm, w8a16_gemm
from tilepress.kernels.fused_quant import PER_TOKEN
from tilepress.kernels.w8a8_gemm import Configuration

ops = torch.ops.tilepress
_FLOOR_GBPS = 4300.0  # a copy's, on an H200: what floors of memory-bound ops are reckoned with
_CHECKED = 512  # rows of a W8A16 product that are compared with float64, at most
_LARGE = 2048  # M from which a card's power limits it: times of sustained work too
TUNED_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)  # M of the tuner's table
TUNED_SHAPES = (
    *((2048, 2048), (4096, 4096), (6144, 4096), (14336, 4096), (28672, 4096)),
    *((4096, 14336), (8192, 8192), (57344, 8192)),
)  # its N, K


def _quantized(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Codes of normal numbers with a scale for each row, on the card."""
    values = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    scale = int8.dynamic_scale(values, True)
    return int8.quantize(values, scale), scale


def gemm(shapes, columns, dtypes, progress: Callable[[str], None]) -> dict:
    """Rows for each dtype, weight [N, K] of `shapes` and M of `columns`: W8A8 with scales per token and channel, and W8A16. Raises UsageError where no
    kernel runs, TilepressError for a result that is wrong."""
    check_card()
    check_dtypes(dtypes)
    facts, bandwidth, rows = environment(), read_gbps(), []
    for dtype, (n, k) in itertools.product(dict.fromkeys(dtypes), dict.fromkeys(shapes)):
        weight, scale = _quantized(n, k)
        copies = copies_of(weight.nbytes)
        weights, scale = [weight, *(weight.clone() for _ in range(copies - 1))], scale.to(dtype)
        dense = torch.randn(n, k, device="cuda", dtype=dtype)
        for m in columns:
            progress(f"W8A8 and W8A16, {dtype_name(dtype)}, {n} x {k}, M = {m}")
            x = torch.randn(m, k, device="cuda", dtype=dtype)
            us_dense = dense_us(x, dense)
            for row, work, nbytes in (_w8a8_row(m, weights, scale, dtype), _w8a16_row(x, weights, scale)):
                row = {"M": m, "N": n, "K": k, "w_scale": "channel"} | row
                made = list(timed_rows(row, work, us_dense, nbytes, bandwidth))
                for one in made:
                    one["tops"] = 2 * m * n * k / one["us"] / 1e6
                if m >= _LARGE and row["op"] == "w8a8_gemm":
                    made[0]["us_sustained"] = sustained_us(*work)
                    made[0]["us_dense_sustained"] = sustained_us(*dense_work(x, dense)[1])
                rows += made
    return {"env": facts, "read_gbps": bandwidth, "rows": rows}


def _w8a8_row(m: int, weights: list[Tensor], scale: Tensor, dtype: torch.dtype) -> tuple[dict, tuple, int]:
    """Return what a row says of a product, which is checked here, the arguments of `time_us`, and the bytes that it has to move."""
    n, k = weights[0].shape
    codes, x_scale = _quantized(m, k)

    def launch(i: int) -> Tensor:
        return ops.w8a8_gemm(codes, x_scale, None, weights[i], scale, None, dtype)

    expected = w8a8_gemm.w8a8_gemm_ref(codes, x_scale, None, weights[0], scale, None, dtype)
    if not torch.equal(launch(0), expected):
        raise TilepressError(f"W8A8, {n} x {k}, M = {m}: {int((launch(0) != expected).sum())} elements are wrong")
    is_wgmma = w8a8_gemm.uses_wgmma(codes.device, n, k)
    row = {
        "op": "w8a8_gemm",
        "dtype": dtype_name(dtype),
        "x_scale": "token",
        "configuration": list(astuple(w8a8_gemm.configuration_for(m, n, k))) if is_wgmma else None,
        "path": str(w8a8_gemm.path(codes.device, dtype, dtype, n, k)),
    }
    return row, (launch, len(weights), n * k / 4e6 + m * n * k / 5e8), n * k + m * k + 2 * m * n


def _w8a16_row(x: Tensor, weights: list[Tensor], scale: Tensor) -> tuple[dict, tuple, int]:
    """The same of W8A16."""
    (m, k), n = x.shape, len(weights[0])

    def launch(i: int) -> Tensor:
        return ops.w8a16_gemm(x, weights[i], scale, None)

    expected = linear(x[:_CHECKED].double(), weights[0].double() * scale.double())
    error = float((launch(0)[:_CHECKED].double() - expected).norm() / expected.norm())
    if not error < ERROR[x.dtype]:
        raise TilepressError(f"W8A16, {n} x {k}, M = {m}: the relative error is {error}")
    row = {
        "op": "w8a16_gemm",
        "dtype": dtype_name(x.dtype),
        "rel_err": error,
        "path": str(w8a16_gemm.path(x.device, x.dtype, x.dtype, k, m)),
    }
    return row, (launch, len(weights), n * k / 4e6 + m * n * k / 2e8), n * k + 2 * m * k + 2 * m * n


def _fused_cases(tokens: int, hidden: int, dtype: torch.dtype):
    """Name, arguments that vary, how the op is called with them, how its reference is, and bytes that it has to move for an element of a row."""

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    x, residual, gate_up = some(tokens, hidden), some(tokens, hidden), some(tokens, 2 * hidden)
    weight, bias, scale = some(hidden), some(hidden), torch.tensor([0.02], device="cuda", dtype=dtype)
    token, static = (PER_TOKEN, None, None), (PER_TOKEN, scale, None)
    for name, varying, fixed, size in (
        ("quantize_int8", (x,), (PER_TOKEN,), 3),
        ("quantize_int8_static", (x,), (scale, None), 3),
        ("rms_norm_int8", (x,), (weight, 1e-5, *token), 3),
        ("add_rms_norm_int8", (x, residual), (weight, 1e-5, *token), 7),
        ("add_rms_norm_int8_static", (x, residual), (weight, 1e-5, *static), 7),
        ("layer_norm_int8", (x,), (weight, bias, 1e-5, *token), 3),
        ("add_layer_norm_int8", (x, residual), (weight, bias, 1e-5, *token), 7),
        ("silu_mul_int8", (gate_up,), token, 5),
        ("activation_int8_relu", (x,), ("relu", *token), 3),
        ("activation_int8_gelu_tanh", (x,), ("gelu_tanh", *token), 3),
    ):
        op = next(op for op in sorted(fused_quant.REFERENCES, key=len, reverse=True) if name.startswith(op))
        yield name, varying, fixed, getattr(ops, op), fused_quant.REFERENCES[op], size


def fused(shapes, dtypes, progress: Callable[[str], None]) -> dict:
    """Rows for each dtype, (tokens, hidden) of `shapes` and fused op. Raises UsageError where no kernel runs, TilepressError for wrong codes."""
    check_card()
    check_dtypes(dtypes)
    facts, bandwidth, rows = environment(), read_gbps(), []
    for dtype, (tokens, hidden) in itertools.product(dict.fromkeys(dtypes), dict.fromkeys(shapes)):
        for name, varying, fixed, op, reference, size in _fused_cases(tokens, hidden, dtype):
            progress(f"{name}, {dtype_name(dtype)}, {tokens} x {hidden}")
            _check_codes(name, op(*varying, *fixed), reference(*varying, *fixed))
            copies = copies_of(sum(x.nbytes for x in varying))
            inputs = [varying, *(tuple(x.clone() for x in varying) for _ in range(copies - 1))]
            moved = size * tokens * hidden
            us, spread = time_us(
                lambda i, op=op, inputs=inputs, fixed=fixed: op(*inputs[i], *fixed), copies, moved / 3e6 + 3
            )
            eager, _ = time_us(
                lambda i, r=reference, inputs=inputs, fixed=fixed: r(*inputs[i], *fixed), copies, moved / 3e5 + 30
            )
            row = {
                "op": name,
                "tokens": tokens,
                "hidden": hidden,
                "dtype": dtype_name(dtype),
                "us": us,
                "us_spread": spread,
            }
            row |= {
                "us_dense": eager,
                "speedup": eager / us,
                "us_floor": moved / _FLOOR_GBPS / 1000,
                "gbps": moved / us / 1000,
            }
            rows.append(row | {"of_floor": us / row["us_floor"], "share_of_read": row["gbps"] / bandwidth})
    return {"env": facts, "read_gbps": bandwidth, "rows": rows}


def _check_codes(name: str, found, expected) -> None:
    """Codes differ by one where a norm's or an activation's last bit does, which is rare."""
    codes, wanted = (t if isinstance(t, Tensor) else t[0] for t in (found, expected))
    apart = (codes.int() - wanted.int()).abs()
    if int(apart.max()) > 1 or float((apart > 0).float().mean()) > 1e-3:
        raise TilepressError(f"{name}: {int((apart > 0).sum())} of {apart.numel()} codes are wrong")


def candidates(m: int) -> list[Configuration]:
    """Configurations that a tuner tries for m tokens: stages as many as one block, or each of two, of a multiprocessor has room for."""
    if m > 256:
        return [
            _fitting(1, groups, tokens, 1, split, together)
            for groups, tokens in ((2, 128), (2, 256))
            for split, together in ((1, 16), (1, 32), (1, 64), (2, 16))
            if split == 1 or m <= 512
        ]
    tokens = [t for t in (8, 16, 32, 64, 128, 256) if m <= 2 * t and t <= max(m, 8)]
    found = []
    for blocks, t, groups, k_blocks, split in itertools.product((1, 2), tokens, (1, 2), (1, 2, 4), (1, 2, 4)):
        if k_blocks * t <= (64 if k_blocks == 4 else 256) and (split < 4 or m <= 128):
            found.append(_fitting(blocks, groups, t, k_blocks, split, 16))
    return [chosen for chosen in dict.fromkeys(found) if chosen is not None]


def _fitting(blocks: int, groups: int, tokens: int, k_blocks: int, split: int, together: int) -> Configuration | None:
    """Choose the most stages, 3 at least, with which so many blocks fit a multiprocessor."""
    choices = (Configuration(groups, tokens, k_blocks, stages, split, together) for stages in range(12, 2, -1))
    return next((chosen for chosen in choices if chosen.fits(blocks)), None)


def tune(shapes, columns, progress: Callable[[str], None]) -> dict:
    """The table of the fastest configurations: {env, rows: [M, N, K, configuration .., us]}, in bfloat16."""
    check_card()
    facts, rows = environment(), []
    for n, k in shapes:
        if not w8a8_gemm.uses_wgmma(torch.device("cuda", 0), n, k):
            raise UsageError(
                f"{n} x {k} runs on mma.sync here, which has no choice of configurations",
                "tune on a Hopper card, N a multiple of 8 and K of 16",
            )
        weight, scale = _quantized(n, k)
        weights, scale = [weight, *(weight.clone() for _ in range(copies_of(weight.nbytes) - 1))], scale.bfloat16()
        for m in columns:
            progress(f"{n} x {k}, M = {m}")
            times = _times(_quantized(m, k), weights, scale)
            best = min(times, key=times.get)
            rows.append([m, n, k, *astuple(best), round(times[best], 2)])
    return {"env": facts, "rows": rows}


def _times(x: tuple[Tensor, Tensor], weights: list[Tensor], scale: Tensor) -> dict[Configuration, float]:
    """Microseconds of each candidate. Raises TilepressError for one that is wrong."""
    (n, k), m = weights[0].shape, len(x[0])
    expected = w8a8_gemm.w8a8_gemm_ref(*x, None, weights[0], scale, None, torch.bfloat16)
    times: dict[Configuration, float] = {}
    for _ in range(2):  # the better of two: clocks vary
        for chosen in candidates(m):
            launch = _launching(chosen, x, weights, scale)
            if chosen not in times and not torch.equal(launch(0), expected):
                raise TilepressError(f"{chosen}, {n} x {k}, M = {m}: wrong results")
            us = time_us(launch, len(weights), n * k / 4e6 + m * n * k / 5e8, replays=5)[0]
            times[chosen] = min(us, times.get(chosen, us))
    return times


def _launching(
    chosen: Configuration, x: tuple[Tensor, Tensor], weights: list[Tensor], scale: Tensor
) -> Callable[[int], Tensor]:
    """Return what multiplies with weight i."""
    behind = scale, None, torch.bfloat16
    out = jit.like((len(x[0]), len(weights[0])), torch.bfloat16, x[0].device)
    run = w8a8_gemm.multiplying(chosen, out, *x, None, weights[0], *behind)
    return lambda i: run(*x, None, weights[i], *behind)


def write_table(found: dict, file: Path) -> None:
    """A row a line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found["rows"])
    file.write_text(f'{{"env": {json.dumps(found["env"])},\n "rows": [\n{rows}\n]}}\n')
