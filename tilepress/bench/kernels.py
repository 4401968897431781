"""Benchmarks of the CUDA kernels, as `tilepress eval kernels` runs them: CUDA graphs of many launches, whose weights rotate through more
than twice the L2 cache; each kernel is checked against float64 before it is timed, and compared with the better of two cuBLAS calls of the same run.

Products are timed in two ways. Overlapped, each launch follows the one before: the next weight's first bytes are read while the last one's blocks end,
which flatters small weights. Cold, each follows a kernel that reads _COLD_BYTES, as much as other layers of a model would, and whose own time is taken
off: nothing of it is in a cache, and nothing of its kind runs beside it."""

import itertools
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilepress.formats import TilepressError, UsageError, dtype_name, int8, tiled_bitmap, tiled_csl
from tilepress.formats.layout import layout_of
from tilepress.formats.tiled_bitmap import TiledBitmap
from tilepress.formats.tiled_csl import TiledCSL
from tilepress.kernels import arch, jit, read_bandwidth
from tilepress.runtime.linear.packed import packed_linear

ERROR = {torch.float16: 2e-3, torch.bfloat16: 8e-3}  # of a correct result, relative to float64
_ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7}  # of one element, relative to it
_SUMMING = 2**-16  # of one element, relative to the sum of its products' magnitudes
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}
_REPLAYS = 15
_GRAPH_US = 2000  # of work in a graph, at least
_MOST_US = 12_000  # of all replays, where five are not longer: after that a card that multiplies large matrices lowers its clocks
_LONG_US, _REST_S = 10, 0.05  # a launch so long finds a card that has rested: what ran before does not count
_SUSTAINED_US = 250_000
_COLD_BYTES = 256 << 20  # that are read between two launches: several times the L2 cache
_COLD_US = 90.0  # that reading them takes, about


def time_us(
    launch: Callable[[int], object], copies: int, guess_us: float, replays: int = _REPLAYS
) -> tuple[float, float]:
    """Median microseconds of a launch, and the spread of the middle half of the replays relative to it. `launch(i)` works on copy i."""
    graph, count = _graph_of(launch, copies, guess_us)
    if guess_us > _LONG_US:
        time.sleep(_REST_S)
    times = [us / count for (us,) in _replays(replays, _MOST_US, graph)]
    quarters = statistics.quantiles(times, n=4)
    return (median := statistics.median(times)), (quarters[2] - quarters[0]) / median


def cold_us(
    launch: Callable[[int], object], copies: int, guess_us: float, replays: int = _REPLAYS
) -> tuple[float, float]:
    """The same behind a kernel that has just read _COLD_BYTES, less the time of that kernel alone."""
    memory = torch.ones(_COLD_BYTES, dtype=torch.uint8, device="cuda")

    def behind(i: int) -> None:
        read_bandwidth.read(memory)
        launch(i)

    guess_us += _COLD_US
    both, count = _graph_of(behind, copies, guess_us)
    alone, _ = _graph_of(lambda _: read_bandwidth.read(memory), copies, guess_us)
    most_us = _MOST_US * guess_us / (guess_us - _COLD_US)
    times = [(us - reading) / count for us, reading in _replays(replays, most_us, both, alone)]
    quarters = statistics.quantiles(times, n=4)
    return (median := statistics.median(times)), (quarters[2] - quarters[0]) / median


WAYS = {False: time_us, True: cold_us}  # to time a product, by whether it is cold


def sustained_us(launch: Callable[[int], object], copies: int, guess_us: float) -> float:
    """Microseconds of a launch at the clocks to which a quarter of a second of them brings the card: the median of the second half."""
    graph, count = _graph_of(launch, copies, guess_us)
    times = [us for (us,) in _replays(1 << 30, _SUSTAINED_US, graph)]
    return statistics.median(times[len(times) // 2 :]) / count


def _graph_of(launch: Callable[[int], object], copies: int, guess_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of launches over all copies, and how many they are."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(copies):
            launch(i)
    torch.cuda.current_stream().wait_stream(side)
    count = copies * max(1, math.ceil(max(_GRAPH_US / guess_us, 2) / copies))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launch(i % copies)
    return graph, count


def _replays(most: int, most_us: float, *graphs: torch.cuda.CUDAGraph) -> list[tuple[float, ...]]:
    """Microseconds of each round of replays after a first one, each graph in turn: at least 5 rounds of `most`, and so many that the first graph's last
    `most_us`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replayed(graph: torch.cuda.CUDAGraph) -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000

    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    rounds: list[tuple[float, ...]] = []
    while len(rounds) < min(most, 5) or (len(rounds) < most and sum(times[0] for times in rounds) < most_us):
        rounds.append(tuple(replayed(graph) for graph in graphs))
    return rounds


def copies_of(nbytes: int) -> int:
    """The number of copies of an input that together are more than twice the L2 cache."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, math.ceil(2 * cache / nbytes) + 1)


def read_gbps() -> float:
    """Bytes a nanosecond that a kernel gets that only reads."""
    memory = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    us, _ = time_us(lambda _: read_bandwidth.read(memory), 1, 250.0)
    return memory.nbytes / us / 1000


def environment() -> dict:
    """Card, driver, versions and commit (of the checkout; TILEPRESS_COMMIT, if set, says it for copies): what a result needs to be believed."""
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    commit = _said("git", "rev-parse", "HEAD")
    return {
        "card": torch.cuda.get_device_name(0),
        "driver": driver[0] if driver else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "commit": os.environ.get("TILEPRESS_COMMIT") or commit or None,
    }


def _said(*words: str) -> str:
    """Return what a program prints, and nothing where the program is missing."""
    try:
        return subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


def arch_name() -> str:
    """Return for which cards the kernels that run were made: "sm90", or "sm80-forced" where TILEPRESS_ARCH asks for others than the card's own."""
    forced = arch.forced()
    row = forced or arch.card(torch.device("cuda", 0))
    return "sm{}{}".format(*row.capability) + ("-forced" if forced else "")


def sparse_weight(rows: int, cols: int, sparsity: float, dtype: torch.dtype) -> Tensor:
    """Random, on the card; each element zero with probability `sparsity`."""
    generator = torch.Generator(device="cuda").manual_seed(rows + cols + round(100 * sparsity))
    weight = torch.randn(rows, cols, generator=generator, device="cuda").to(dtype)
    return weight.masked_fill_(torch.rand(rows, cols, generator=generator, device="cuda") < sparsity, 0.0)


def dense_us(x: Tensor, weight: Tensor) -> dict[bool, float]:
    """The better of torch.matmul and F.linear, in each of WAYS."""
    works = dense_work(x, weight)
    return {cold: min(timed(*work)[0] for work in works) for cold, timed in WAYS.items()}


def timed_rows(row: dict, work: tuple, us_dense: dict[bool, float], nbytes: int, bandwidth: float) -> Iterator[dict]:
    """Yield a row for each of WAYS: what `row` says of a product, and the times of its `work`, which are arguments of `time_us`, beside the dense ones."""
    for cold, timed in WAYS.items():
        us, spread = timed(*work)
        gbps = nbytes / us / 1000
        times = {
            "cold": cold,
            "us": us,
            "us_spread": spread,
            "us_dense": us_dense[cold],
            "speedup": us_dense[cold] / us,
        }
        yield row | times | {"gbps": gbps, "share_of_read": gbps / bandwidth}


def dense_work(x: Tensor, weight: Tensor) -> list[tuple[Callable[[int], object], int, float]]:
    """Return the arguments of `time_us` for each dense product: the call, its copies of the weight, a guess of its time."""
    copies = copies_of(weight.nbytes)
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]
    guess = max(weight.nbytes / 4.0e6, x.numel() * len(weight) / 4e8) + 4
    calls = (lambda i: torch.matmul(x, weights[i].t()), lambda i: linear(x, weights[i]))
    return [(call, copies, guess) for call in calls]


def check_card() -> None:
    """Raises UsageError where no kernel runs."""
    if not torch.cuda.is_available():
        raise UsageError("no CUDA card is visible", "run it on the machine that the model will run on")
    why = jit.why_not(torch.device("cuda", 0))
    if why is not None:
        raise UsageError(f"on this card run the references ({why})", "only kernels are timed")


def check_dtypes(dtypes: Iterable[torch.dtype]) -> None:
    """Raises UsageError for one that no kernel takes."""
    if not all(dtype in ERROR for dtype in dtypes):
        raise UsageError("the kernels multiply float16 and bfloat16", "leave other dtypes out")


def spmm(layouts, shapes, columns, sparsities, dtypes, progress: Callable[[str], None]) -> dict:
    """Rows for each dtype, shape [M, K] of W, sparsity, one of LAYOUTS, and columns N of y. Raises UsageError where no CUDA kernel runs,
    TilepressError for a result that is wrong."""
    for layout in layouts:
        if layout not in LAYOUTS:
            raise UsageError(f"--layouts {layout} is unknown", f"choose of {', '.join(LAYOUTS)}")
    check_dtypes(dtypes)
    if not all(sparsity < 1 for sparsity in sparsities):
        raise UsageError("a weight of zeros alone gives nothing to check", "leave out a sparsity of 1 and more")
    check_card()
    facts, bandwidth, rows = environment(), read_gbps(), []
    for dtype, (m, k) in itertools.product(dict.fromkeys(dtypes), dict.fromkeys(shapes)):
        weight = sparse_weight(m, k, 0.0, dtype)
        xs = {n: torch.randn(n, k, dtype=dtype, device="cuda") for n in columns}
        dense = {n: dense_us(x, weight) for n, x in xs.items()}
        for sparsity, layout in itertools.product(dict.fromkeys(sparsities), dict.fromkeys(layouts)):
            packed = LAYOUTS[layout](sparse_weight(m, k, sparsity, dtype))
            for n, x in xs.items():
                progress(f"{layout}, {dtype_name(dtype)}, {m} x {k}, N = {n}, {sparsity:.0%}")
                row, work = _spmm_row(x, packed, dense[n][False])
                row = {"op": "spmm", "M": m, "K": k, "N": n, "sparsity": sparsity, "arch": arch_name()} | row
                rows += timed_rows(row, work, dense[n], row["bytes"], bandwidth)
    return {"env": facts, "read_gbps": bandwidth, "rows": rows}


def pack_int8(weight: Tensor) -> tiled_bitmap.TiledBitmap:
    scale = int8.weight_scale(weight, "channel", weight.dtype)
    return tiled_bitmap.pack(int8.quantize(weight, scale), scale=scale.view(-1))


LAYOUTS = {"tiled-csl": tiled_csl.pack, "tiled-bitmap": tiled_bitmap.pack, "tiled-bitmap-int8": pack_int8}


def _spmm_row(x: Tensor, packed: TiledCSL | TiledBitmap, guess_us: float) -> tuple[dict, tuple]:
    """Return what a row says of a product, which is checked here, and the arguments of `time_us`."""
    copies = copies_of(packed.words.nbytes)
    layers = [packed_linear(_copy(packed)) for _ in range(copies)]

    def launch(i: int) -> Tensor:
        return layers[i].multiply(x, None)

    poison = torch.full((x.shape[0], packed.rows), float("nan"), dtype=x.dtype, device=x.device)
    del poison  # the memory that the result will most likely get
    path = layers[0].path_for(x.dtype, x.shape[0])
    error = _error(launch(0), x, _multiplied(packed, rounded=path.decodes))
    stored = (packed.words, packed.offsets, getattr(packed, "scale", None), x)
    nbytes = sum(t.nbytes for t in stored if t is not None) + x.shape[0] * packed.rows * x.element_size()
    return {
        "layout": packed.layout_name,
        "value_dtype": _SHORT[packed.dtype],
        "dtype": _SHORT[x.dtype],
        **({"group": packed.group} if hasattr(packed, "group") else {}),
        "bytes": nbytes,
        "of_dense": packed.words.nbytes / (packed.rows * packed.cols * x.element_size()),
        "rel_err": error,
        "path": str(path),
    }, (launch, copies, guess_us)


def _copy(packed: TiledCSL | TiledBitmap) -> TiledCSL | TiledBitmap:
    return replace(packed, words=packed.words.clone(), offsets=packed.offsets.clone())


def _multiplied(packed: TiledCSL | TiledBitmap, rounded: bool) -> Tensor:
    """The weight in float64; int8 values times their scale, `rounded` to its dtype as decoding does."""
    if getattr(packed, "scale", None) is not None and not rounded:
        return tiled_bitmap.unpack_values(packed).double() * packed.scale.double()[:, None]
    return layout_of(packed).matrix(packed).double()


def _error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """The error of y relative to the product in float64.

    Raises TilepressError where it is too large, in all or in one element.
    """
    weight = weight.double()
    expected = x.double() @ weight.t()
    error = float((y.double() - expected).norm() / expected.norm())
    allowed = _ROUNDING[y.dtype] * expected.abs() + _SUMMING * (x.double().abs() @ weight.abs().t())
    wrong = ~((y.double() - expected).abs() <= allowed)
    if not error < ERROR[y.dtype] or bool(wrong.any()):
        at = f"{weight.shape[0]} x {weight.shape[1]}, N = {x.shape[0]}"
        raise TilepressError(f"{at}: the relative error is {error}, {int(wrong.sum())} elements are wrong")
    return error
