"""Benchmarks of the paged cache's kernels, as `tilepress eval kernels attention` runs them: decode attention against PyTorch's over a dense 16-bit cache,
and the step before it, RoPE and append, against its floor. Launches rotate over caches that together are more than twice the L2 cache, as a model's layers do:
pages in a random order, the block table is that of all. What a kernel gives is checked before it is timed."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tilepress.bench.kernels import arch_name, check_card, check_dtypes, copies_of, environment, read_gbps, time_us
from tilepress.formats import TilepressError, UsageError, dtype_name
from tilepress.formats.kv_int4 import PAGE_TOKENS, KVFormat
from tilepress.kernels import decode_attention, kv_read, rope_append
from tilepress.kernels.arch import Path

ops = torch.ops.tilepress
_DEVICE = torch.device("cuda", 0)
KINDS = {  # of caches: bits, group size, static
    "int4": (4, 0, False),
    "int4-g32": (4, 32, False),
    "int4-static": (4, 0, True),
    "int8": (8, 0, False),
    "bf16": (16, 0, False),
}
FRONTS = ((64, 32, 8, 128),)  # tokens, query heads, KV heads, head dimension
_BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_ERROR = 5e-3  # of a correct result, relative to float64
_CHECKED = 8  # sequences that are compared with float64, at most
_APPENDED = 1 << 19  # rows at once
_NO_PAGE = 1 << 30  # stands in block tables behind a sequence's last page
_FIXED = 0.4, -3.0  # (scale, shift) of static formats, for normal numbers
_FLOOR_GBPS = 4300.0  # a copy's, on an H200: what floors are reckoned with
_SLACK, _LAUNCH_US = 1.3, 2.0  # what a kernel may take over its floor


@dataclass(frozen=True)
class Shape:
    """Sequences of a decode step; `variable`: also with lengths that vary. Raises UsageError for heads that do not divide and sizes that no cache has.

    With `q_tokens` each sequence has so many queries, its last tokens: a few that were guessed, or a piece of a prompt. With `window` a query sees so many.
    """

    batch: int
    query_heads: int
    kv_heads: int
    tokens: int  # of a sequence, on average
    head_dim: int
    variable: bool = False
    q_tokens: int = 1  # of each sequence
    window: int = 0  # 0: all tokens

    def __post_init__(self):
        if self.query_heads % self.kv_heads:
            raise UsageError(
                f"{self.query_heads} query heads are no multiple of {self.kv_heads} KV heads",
                "give each KV head as many",
            )

        if self.head_dim % 32:
            raise UsageError(
                f"the head dimension {self.head_dim} is no multiple of 32",
                "time one that the kernels take: 64, 96, 128 or 256",
            )
        if self.q_tokens > self.tokens:
            raise UsageError(
                f"{self.q_tokens} queries of {self.tokens} tokens",
                "queries are among a sequence's tokens: give it more",
            )

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """64x32x8x8192x128, with a v behind it for lengths that vary too, q4 for 4 queries of each sequence, w4096 for a window."""
        pattern = r"(\d+)x(\d+)x(\d+)x(\d+)x(\d+)(v?)(?:q([1-9]\d*))?(?:w([1-9]\d*))?"
        found = re.fullmatch(pattern, text.strip().lower())
        sizes = [int(number) for number in found.groups()[:5]] if found else [0]
        if min(sizes) < 1:
            raise UsageError(
                f"{text!r} is no shape of attention",
                "write BATCHxQUERY_HEADSxKV_HEADSxTOKENSxHEAD_DIM, a v if lengths vary too, q4 for 4 queries, w4096 for a window: 64x32x8x8192x128v",
            )
        return cls(*sizes, bool(found[6]), int(found[7] or 1), int(found[8] or 0))

    @property
    def front(self) -> tuple[int, int, int, int]:
        """The entry of FRONTS for this shape: a token of each sequence."""
        return self.batch, self.query_heads, self.kv_heads, self.head_dim

    def __str__(self) -> str:
        of = f"{self.batch} x {self.tokens} tokens, {self.query_heads}/{self.kv_heads} heads of {self.head_dim}"
        return (
            of
            + (f", {self.q_tokens} queries" if self.q_tokens > 1 else "")
            + (f", window {self.window}" if self.window else "")
        )

    @property
    def extras(self) -> tuple[str, ...]:
        """What the op is asked for beyond one query over all tokens."""
        return ("several queries",) * (self.q_tokens > 1) + ("a window",) * (self.window > 0)


def form_of(kind: str, head_dim: int) -> KVFormat:
    """The format that one of KINDS names.

    Raises UsageError for another, and for a head dimension that it does not have.
    """
    if kind not in KINDS:
        raise UsageError(f"--kv {kind} is unknown", f"choose of {', '.join(KINDS)}")
    bits, group_size, static = KINDS[kind]
    return KVFormat(head_dim, bits, group_size, static)


def cases(shapes: Iterable[Shape], kinds: Iterable[str]) -> Iterator[tuple[Shape, str, bool]]:
    """Shape, kind and whether lengths vary: equal lengths first, since the others are compared with them."""
    for shape, kind in itertools.product(dict.fromkeys(shapes), dict.fromkeys(kinds)):
        yield shape, kind, False
        if shape.variable:
            yield shape, kind, True


def lengths(batch: int, tokens: int, variable: bool) -> Tensor:
    """int32 [batch] of the sequences: all `tokens`, or uniform in 1 .. 2 tokens and then scaled to the same total."""
    total, most = batch * tokens, 2 * tokens
    if not variable:
        return torch.full((batch,), tokens, dtype=torch.int32)
    generator = torch.Generator().manual_seed(batch)
    drawn = torch.randint(1, most + 1, (batch,), generator=generator)
    drawn = (drawn.double() * total / int(drawn.sum())).round().long().clamp(1, most)
    while left := total - int(drawn.sum()):  # what rounding and the ends took
        free = (drawn < most if left > 0 else drawn > 1).nonzero().view(-1)
        some = free[torch.randperm(len(free), generator=generator)[: abs(left)]]
        step = max(1, abs(left) // len(free))
        drawn[some] = (drawn[some] + (step if left > 0 else -step)).clamp(1, most)
    return drawn.int()


def attention(
    shapes: Iterable[Shape],
    kinds: Iterable[str],
    dtypes: Iterable[torch.dtype],
    progress: Callable[[str], None],
    fronts: Iterable[tuple[int, int, int, int]] = FRONTS,
) -> dict:
    """Rows `decode_attention` for each dtype of queries, shape and kind of cache, then rows `rope_append` for each dtype, front and kind. Raises
    UsageError where no kernel runs, TilepressError for a result that is wrong or a case that a kernel does not take."""
    shapes, kinds, dtypes, fronts = (list(dict.fromkeys(each)) for each in (shapes, kinds, dtypes, fronts))
    dims = [shape.head_dim for shape in shapes] + [front[-1] for front in fronts]
    forms = {(kind, dim): form_of(kind, dim) for kind, dim in itertools.product(kinds, dims)}
    check_dtypes(dtypes)
    check_card()
    for shape, kind, dtype in itertools.product(shapes, kinds, dtypes):
        _check_path(decode_attention.path(_DEVICE, forms[kind, shape.head_dim], dtype, shape.extras))
    for path in (rope_append.path(_DEVICE), kv_read.path(_DEVICE)):
        _check_path(path)
    facts, bandwidth, rows, dense, equal = environment(), read_gbps(), [], {}, {}
    for dtype, (shape, kind, variable) in itertools.product(dtypes, cases(shapes, kinds)):
        if (dtype, shape) not in dense:
            progress(f"dense attention, {dtype_name(dtype)}, {shape}")
            dense[dtype, shape] = dense_best(shape, dtype)
        progress(f"{kind}, {dtype_name(dtype)}, {shape}{', variable lengths' if variable else ''}")
        us_best, best = dense[dtype, shape]
        timed = _decode_row(shape, forms[kind, shape.head_dim], dtype, variable)
        row = {
            "op": "decode_attention",
            "B": shape.batch,
            "HQ": shape.query_heads,
            "HKV": shape.kv_heads,
            "T": shape.tokens,
            "D": shape.head_dim,
            "kv": kind,
            "dtype": dtype_name(dtype),
            "q_tokens": shape.q_tokens,
            "window": shape.window,
            "arch": arch_name(),
            "variable_lengths": variable,
            "us": timed["us"],
            "us_spread": timed["us_spread"],
            "us_bf16_best": us_best,
            "bf16_best": best,
            "speedup": us_best / timed["us"],
            "share_of_read": timed["gbps"] / bandwidth,
            **timed,
        }
        if variable:
            row["over_equal"] = row["us"] / equal[dtype, shape, kind]
        else:
            equal[dtype, shape, kind] = row["us"]
        rows.append(row)
    for dtype, front, kind in itertools.product(dtypes, fronts, kinds):
        progress(f"RoPE and append, {kind}, {dtype_name(dtype)}, {front[0]} tokens")
        names = dict(zip(("B", "HQ", "HKV", "D"), front, strict=True))
        row = {"op": "rope_append", **names, "kv": kind, "dtype": dtype_name(dtype)}
        rows.append(row | _front_row(front, forms[kind, front[-1]], dtype))
    return {"env": facts, "read_gbps": bandwidth, "rows": rows}


def dense_best(shape: Shape, dtype: torch.dtype) -> tuple[float, str]:
    """Microseconds of PyTorch's fastest attention over contiguous keys and values [batch, KV heads, T, D] of `dtype`, and which it is. Query heads that share
    a KV head are given as such, or as rows of one. With a window only the tokens that are seen are there. Raises TilepressError where no backend takes
    them."""
    b, heads, d, rows = shape.batch, shape.kv_heads, shape.head_dim, shape.q_tokens
    t = min(shape.tokens, shape.window + rows - 1) if shape.window else shape.tokens
    copies = copies_of(4 * b * heads * t * d)
    caches = [torch.randn(2, b, heads, t, d, device=_DEVICE, dtype=dtype) for _ in range(copies)]
    query = torch.randn(b, shape.query_heads, rows, d, device=_DEVICE, dtype=dtype)
    mask = causal_lower_right(rows, t) if rows > 1 else None
    times, failed = {}, []
    for name, gqa in itertools.product(_BACKENDS, (True, False) if mask is None else (True,)):

        def launch(i: int, name=name, gqa=gqa) -> Tensor:
            with sdpa_kernel(_BACKENDS[name]):
                q = query if gqa else query.view(b, heads, -1, d)
                return scaled_dot_product_attention(q, *caches[i], attn_mask=mask, enable_gqa=gqa)

        call = f"{name}, {'enable_gqa' if gqa else 'heads as rows'}"
        try:
            with warnings.catch_warnings(action="ignore"):  # each reason why a backend does not apply
                launch(0)
                torch.cuda.synchronize()
                times[call] = time_us(launch, copies, caches[0].nbytes / 4e6 + 5)[0]
        except RuntimeError as error:
            failed.append(f"{call}: {str(error).splitlines()[0]}")
    if not times:
        raise TilepressError(f"{shape}: PyTorch has no attention to compare with; {'; '.join(failed)}")
    best = min(times, key=times.get)
    return times[best], best


def _fixed(form: KVFormat, heads: int) -> Tensor | None:
    """(scale, shift) [heads, groups, 2] of a static format for keys and values that are normal numbers."""
    pair = torch.tensor(_FIXED, dtype=torch.float16, device=_DEVICE)
    return pair.expand(heads, form.groups, 2).contiguous() if form.static else None


def _table(lens: Tensor) -> Tensor:
    """A block table of sequences of `lens` tokens: their pages in a random order, and no page's number behind a sequence's last one."""
    device, counts = lens.device, -(-lens.long() // PAGE_TOKENS)
    total, most = int(counts.sum()), int(counts.max())
    number, first = torch.arange(most, device=device), (counts.cumsum(0) - counts)[:, None]
    order = torch.randperm(total, device=device)
    return torch.where(number < counts[:, None], order[(first + number).clamp(max=total - 1)], _NO_PAGE).int()


def _filled(form: KVFormat, lens: Tensor, table: Tensor, heads: int, fixed: Tensor | None) -> Tensor:
    """Pages with random keys and values; 0xFF, which is NaN as a scale, where no token is."""
    device, total = lens.device, int((-(-lens.long() // PAGE_TOKENS)).sum())
    pages = torch.full((total, heads, form.page_bytes), 0xFF, dtype=torch.uint8, device=device)
    slots = (table[..., None].long() * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=device)).flatten(1)
    slots = slots[torch.arange(slots.shape[1], device=device) < lens[:, None]]
    for part in slots.split(max(1, _APPENDED // heads)):
        key, value = torch.randn(2, len(part), heads, form.head_dim, device=device, dtype=torch.bfloat16)
        sides = (None, fixed, 1.0) * 2
        ops.kv_append(pages, key, value, part, *sides, form.bits, form.group_size, form.static, False, form.refits)
    return pages


def _error(
    out: Tensor,
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    lens: Tensor,
    form: KVFormat,
    fixed: Tensor | None,
    window: int = 0,
) -> float:
    """The largest of some sequences, the shortest and the longest among them, relative to attention in float64 over what the cache gives back. Raises
    TilepressError where it is too large."""
    heads, errors, rows = pages.shape[1], [], len(query) // len(lens)
    picks = torch.linspace(0, len(lens) - 1, min(len(lens), _CHECKED)).round().long()
    for i in lens.cpu().argsort()[picks].tolist():
        one = table[i : i + 1], lens[i : i + 1], int(lens[i])
        shape = form.head_dim, form.bits, form.group_size, form.static, False, torch.float32
        key, value = (x[0].double() for x in ops.kv_read(pages, *one, None, fixed, None, fixed, *shape))
        mine = slice(i * rows, (i + 1) * rows)
        grouped = query[mine].double().unflatten(1, (heads, -1))
        place = torch.arange(len(key[0]), device=key.device)
        behind = place[len(place) - rows :, None] - place
        hidden = (behind < 0) | (behind >= window) if window else behind < 0
        scores = torch.einsum("qhgd,htd->hgqt", grouped, key) * form.head_dim**-0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hgqt,htd->qhgd", weights, value).flatten(1, 2)
        errors.append(float((out[mine].double() - expected).norm() / expected.norm()))
    broken = int((~torch.isfinite(out)).sum())
    worst = max(errors)
    if not all(error <= _ERROR for error in errors) or broken:
        raise TilepressError(
            f"{form.name}, {len(lens)} sequences of {int(lens.min())} .. {int(lens.max())} tokens: the relative errors are "
            f"{', '.join(f'{error:.1e}' for error in errors)}, {broken} elements are not finite"
        )
    return worst


def _check_path(path: Path) -> Path:
    """Raise TilepressError where a reference would be timed."""
    if path.is_reference:
        raise TilepressError(f"only kernels are timed, here runs: {path}", "leave out what no kernel takes")
    return path


def _decode_row(shape: Shape, form: KVFormat, dtype: torch.dtype, variable: bool) -> dict:
    heads, fixed, rows = shape.kv_heads, _fixed(form, shape.kv_heads), shape.q_tokens
    lens = lengths(shape.batch, shape.tokens, variable).clamp(min=rows).to(_DEVICE)
    query = torch.randn(shape.batch * rows, shape.query_heads, form.head_dim, device=_DEVICE, dtype=dtype)
    seen = lens.clamp(max=shape.window + rows - 1) if shape.window else lens
    stored = int(seen.sum()) * heads * 2 * form.row_bytes
    table = _table(lens)
    caches = [_filled(form, lens, table, heads, fixed) for _ in range(copies_of(stored))]
    how = form.head_dim**-0.5, None, fixed, None, fixed, form.bits, form.group_size, form.static, False

    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=_DEVICE) * rows if rows > 1 else None

    def launch(i: int) -> Tensor:
        return ops.decode_attention(query, caches[i], table, lens, *how, cu_query_lens=starts, window=shape.window)

    poison = torch.full_like(query, float("nan"))
    del poison  # the memory that the result will most likely get
    error = _error(launch(0), query, caches[0], table, lens, form, fixed, shape.window)
    nbytes = stored + 2 * query.nbytes
    us, spread = time_us(launch, len(caches), nbytes / 4e6 + 3)
    measured = {"us": us, "us_spread": spread, "bytes": nbytes, "gbps": nbytes / us / 1000}
    return measured | {"rel_err": error, "path": str(decode_attention.path(_DEVICE, form, dtype, shape.extras))}


def _front_row(front: tuple[int, int, int, int], form: KVFormat, dtype: torch.dtype) -> dict:
    tokens, heads, kv_heads, dim = front
    fixed, width = _fixed(form, kv_heads), (heads + 2 * kv_heads) * dim
    copies = copies_of(2 * tokens * width)
    qkv = torch.randn(copies, tokens, width, device=_DEVICE, dtype=dtype)
    pages = torch.full((copies * tokens, kv_heads, form.page_bytes), 0xFF, dtype=torch.uint8, device=_DEVICE)
    places = torch.randint(PAGE_TOKENS, (copies * tokens,), device=_DEVICE)  # a page for each token, as sequences have
    slots = (torch.randperm(len(pages), device=_DEVICE) * PAGE_TOKENS + places).view(copies, tokens)
    angles = torch.rand(tokens, 1, device=_DEVICE) * 8192 * 1e4 ** -torch.linspace(0, 1, dim // 2, device=_DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def arguments(i: int, pages: Tensor) -> tuple:
        sizes = heads * dim, kv_heads * dim, kv_heads * dim
        query, key, value = (x.unflatten(-1, (-1, dim)) for x in qkv[i].split(sizes, -1))
        plain = None, None, None, None, None, 1e-6, cos, sin, False, True  # no biases and norms, halves rotated
        side = None, fixed, 1.0
        shape = form.bits, form.group_size, form.static, False, form.refits
        return pages, query, key, value, *plain, slots[i], *side, *side, *shape

    found, wanted = pages.clone(), pages.clone()
    query = ops.rope_append(*arguments(0, found))
    expected = rope_append.rope_append_ref(*arguments(0, wanted))
    apart, written = int((found != wanted).sum()), tokens * kv_heads * 2 * form.row_bytes
    error = float((query.double() - expected.double()).norm() / expected.double().norm())
    if not error <= _ERROR or apart > written / 1000:
        raise TilepressError(
            f"RoPE and append, {form.name}: the queries' relative error is {error:.1e}, {apart} of {written} bytes are wrong"
        )
    nbytes = qkv[0].nbytes + query.nbytes + written + cos.nbytes + sin.nbytes
    floor = nbytes / _FLOOR_GBPS / 1000
    us, spread = time_us(lambda i: ops.rope_append(*arguments(i, pages)), copies, floor + _LAUNCH_US)
    return {
        "us": us,
        "us_spread": spread,
        "us_eager": _eager_us(lambda i: rope_append.rope_append_ref(*arguments(i, pages)), copies),
        "bytes": nbytes,
        "us_floor": floor,
        "us_allowed": _SLACK * floor + _LAUNCH_US,
        "rel_err": error,
        "path": str(rope_append.path(_DEVICE)),
    }


def _eager_us(launch: Callable[[int], object], copies: int) -> float | None:
    """Time work in a CUDA graph; None where it waits for the card, which no graph can hold.

    Waiting is looked for first: a capture that fails leaves torch's generators behind.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch(0)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return None
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return time_us(launch, copies, 300.0)[0]
