"""`tilepress eval kernels`: what the CUDA kernels take on this card."""

from typing import Annotated

import typer

from tilepress.cli.flags import Json, JsonFile, Quiet, parse_dtype, parse_list, parse_shape, parse_share
from tilepress.cli.terminal import cell, check_writable, say, show, table
from tilepress.formats import UsageError

EXAMPLE = "tilepress eval kernels spmm -o benchmarks/h200/spmm.json"
SHAPES = {  # of weights M x K, weights N x K, tokens x hidden; of attention as bench.attention.Shape says
    "spmm": "4096x4096,8192x8192,11008x4096,28672x8192,36864x9216",
    "w8a8": "4096x4096,28672x4096,4096x14336,8192x8192,57344x8192",
    "fused": "64x4096,64x8192,4096x8192,16384x4096",
    "attention": "1x32x8x8192x128,4x32x8x8192x128,16x32x8x8192x128v,64x32x8x8192x128v,"
    "32x8x1x8192x128,128x8x1x8192x128,512x8x1x8192x128v,"
    "1x32x8x8192x64,4x32x8x8192x64,16x32x8x8192x64,64x32x8x8192x64,"
    "32x8x1x8192x64,128x8x1x8192x64,512x8x1x8192x64",
}
_COLUMNS = {"spmm": "1,8,16,32,64,128,256,512,1024,2048", "w8a8": "1,8,16,32,64,128,512,2048,8192"}


def kernels(
    what: Annotated[str, typer.Argument(metavar="spmm|w8a8|fused|attention", help="Which kernels.")] = "spmm",
    output: JsonFile = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="MxK,…",
            help="Of weights, outputs x inputs; for fused, tokens x hidden size; for attention batch x query heads x KV heads x tokens x head "
            "dimension, and a v behind it for lengths that vary too.",
            show_default="the usual ones",
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="LIST", help="Rows of the input.", show_default="1 to 2048, or to 8192")
    ] = None,
    sparsity: Annotated[str, typer.Option(metavar="LIST", help="spmm: of random weights.")] = "0.5,0.6,0.7,0.8,0.9",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Of x, and of weights that are not INT8; of queries.",
            show_default="float16,bfloat16; attention: bfloat16",
        ),
    ] = None,
    kv: Annotated[
        str, typer.Option(metavar="LIST", help="attention: how the cache is stored.")
    ] = "int4,int4-g32,int4-static,int8,bf16",
    layouts: Annotated[
        str, typer.Option(metavar="LIST", help="spmm: how weights are stored.")
    ] = "tiled-csl,tiled-bitmap,tiled-bitmap-int8",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="w8a8: write a table of the fastest configurations, in bfloat16, as the package has one."
        ),
    ] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time the CUDA kernels on this card, each checked first, against cuBLAS, PyTorch's attention or eager PyTorch, and the memory's read bandwidth.

    Products are timed overlapped, each launch behind the one before, and cold, each behind a kernel that has just read 256 MB, as between a model's layers."""
    from tilepress.bench import attention, int8_kernels, kernels as bench

    if what not in SHAPES:
        raise UsageError(f"no benchmark {what!r}", f"choose one of {', '.join(SHAPES)}")
    if tune and (what != "w8a8" or output is None):
        raise UsageError("--tune writes a table for w8a8", "tilepress eval kernels w8a8 --tune -o w8a8_gemm.json")
    parse = attention.Shape.parse if what == "attention" else parse_shape
    sizes = [parse(text) for text in (SHAPES[what] if shapes is None else shapes).split(",")]
    counts = parse_list(_COLUMNS.get(what, "1") if columns is None else columns, "columns")
    usual = "bfloat16" if what == "attention" else "float16,bfloat16"
    dtypes = [parse_dtype(name) for name in (usual if dtype is None else dtype).split(",")]
    layout_names, shares = layouts.split(","), [parse_share(text) for text in sparsity.split(",")]

    def progress(at: str) -> None:
        if not quiet:
            say(at)

    check_writable(output)
    if tune:
        rows, weights = counts if columns else int8_kernels.TUNED_ROWS, sizes if shapes else int8_kernels.TUNED_SHAPES
        int8_kernels.write_table(int8_kernels.tune(weights, rows, progress), output)
        return
    if what == "spmm":
        found = bench.spmm(layout_names, sizes, counts, shares, dtypes, progress)
    elif what == "w8a8":
        found = int8_kernels.gemm(sizes, counts, dtypes, progress)
    elif what == "attention":
        fronts = attention.FRONTS if shapes is None else [shape.front for shape in sizes]
        found = attention.attention(sizes, kv.split(","), dtypes, progress, fronts)
    else:
        found = int8_kernels.fused(sizes, dtypes, progress)
    show(found, output, kernels_text, json_)


def kernels_text(found: dict) -> str:
    """Return a row for each case, of one kind of kernels."""
    rows = found["rows"]
    title = f"{found['env']['card']}, torch {found['env']['torch']}: reads {found['read_gbps'] / 1000:.2f} TB/s"
    if "HQ" in rows[0]:
        return _attention_text(title, rows)
    if all(row["op"] == "spmm" for row in rows):
        head = [
            "M x K",
            "N",
            "zeros",
            "layout",
            "values",
            "caches",
            "us",
            "cuBLAS us",
            "times as fast",
            "of read bandwidth",
            "error",
        ]
        cells = [
            [
                f"{row['M']} x {row['K']}",
                str(row["N"]),
                f"{row['sparsity']:.0%}",
                row["layout"],
                row["value_dtype"],
                _caches(row),
                *_times(row),
                f"{row['share_of_read']:.0%}",
                f"{row['rel_err']:.0e}",
            ]
            for row in rows
        ]
    elif "tokens" in rows[0]:
        head = ["op", "tokens x hidden", "dtype", "us", "eager us", "times as fast", "of the floor"]
        cells = [
            [row["op"], f"{row['tokens']} x {row['hidden']}", row["dtype"], *_times(row), f"{row['of_floor']:.2f}"]
            for row in rows
        ]
    else:
        head = ["op", "N x K", "M", "dtype", "caches", "us", "cuBLAS us", "times as fast", "TOPS", "of read bandwidth"]
        cells = [
            [
                row["op"],
                f"{row['N']} x {row['K']}",
                str(row["M"]),
                row["dtype"],
                _caches(row),
                *_times(row),
                f"{row['tops']:.0f}",
                f"{row['share_of_read']:.0%}",
            ]
            for row in rows
        ]
    return table(title, head, cells)


def _attention_text(title: str, rows: list[dict]) -> str:
    """Decode attention, and RoPE with the append."""

    def sizes(row: dict) -> list[str]:
        return [row["kv"], str(row["B"]), f"{row['HQ']}/{row['HKV']}", str(row["D"]), row["dtype"]]

    names = ["cache", "batch", "heads", "of", "dtype"]
    head = [*names, "tokens", "us", "dense us", "times as fast", "of read bandwidth", "of equal lengths", "error"]
    cells = [
        [
            *sizes(row),
            _tokens(row),
            f"{row['us']:.1f}",
            f"{row['us_bf16_best']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['share_of_read']:.0%}",
            cell(row.get("over_equal"), ".2f"),
            f"{row['rel_err']:.0e}",
        ]
        for row in rows
        if row["op"] == "decode_attention"
    ]
    fronts = [
        [*sizes(row), *(cell(row[name], ".2f") for name in ("us", "us_eager", "us_floor", "us_allowed"))]
        for row in rows
        if row["op"] == "rope_append"
    ]
    tables = [table(f"decode attention on {title}", head, cells)]
    if fronts:
        names += ["us", "eager us", "floor us", "allowed us"]
        tables.append(table("RoPE and append, a token of each", names, fronts))
    return "\n\n".join(tables)


def _caches(row: dict) -> str:
    return "cold" if row["cold"] else "overlapped"


def _tokens(row: dict) -> str:
    """Tokens of a sequence, queries and window where they are not one and all."""
    several = f", {row['q_tokens']} queries" if row.get("q_tokens", 1) > 1 else ""
    window = f", window {row['window']}" if row.get("window") else ""
    return (f"1..{2 * row['T']}" if row["variable_lengths"] else str(row["T"])) + several + window


def _times(row: dict) -> list[str]:
    return [f"{row['us']:.1f}", f"{row['us_dense']:.1f}", f"{row['speedup']:.2f}"]
