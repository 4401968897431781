"""The `tilepress` command: flags, words on the screen, exit codes. Heavy imports happen inside the commands, so `--help` is quick."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tilepress.cli import terminal as screen
from tilepress.cli.flags import (
    Blocks,
    Dataset,
    Device,
    Json,
    Making,
    Memory,
    Model,
    Output,
    Quiet,
    Revision,
    Samples,
    Seed,
    Seqlen,
    Trust,
    Writing,
    calibration_text,
    default_seqlen,
    find_rank,
    parse_device,
    parse_dtype,
    parse_list,
    parse_shape,
    parse_share,
    parse_sparsities,
    takes,
)
from tilepress.cli.terminal import Bar, say, size, table
from tilepress.formats import TilepressError, UsageError
from tilepress.version import __version__

EXIT_CHECK_FAILED, EXIT_INTERRUPTED = 3, 130
_WARNINGS_SHOWN = 5

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compress a language model into a smaller, faster artifact, and prove what it costs.",
    epilog="Start with: tilepress demo",
)
compress = typer.Typer(no_args_is_help=True, help="Turn a checkpoint into a compressed artifact.")
evaluate = typer.Typer(no_args_is_help=True, help="Measure what an artifact costs and brings.")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit


app.add_typer(compress, name="compress")
app.add_typer(evaluate, name="eval")


@compress.command(epilog="Example: tilepress compress prune MODEL -o pruned --sparsity 0.5")
@takes(Writing)
def prune(
    model: Model,
    output: Output,
    sparsity: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Of weights to prune, in [0, 1); several with --sweep: 0.5,0.6,0.7.",
            show_default=False,
        ),
    ],
    method: Annotated[
        str, typer.Option(metavar="magnitude|wanda|sparsegpt|admm", help="How weights are chosen: see above.")
    ] = "magnitude",
    scope: Annotated[
        str,
        typer.Option(
            metavar="layer|row|global",
            help="Of magnitude: where the sparsity holds, in each weight, in each output row, or over all.",
        ),
    ] = "layer",
    allocation: Annotated[
        str,
        typer.Option(metavar="uniform|owl|auto", help="Of the other methods: how zeros are laid out over the weights."),
    ] = "uniform",
    damping: Annotated[
        float, typer.Option(help="Of sparsegpt and admm: share of the mean second moment that is added to each.")
    ] = 0.01,
    format: Annotated[
        str, typer.Option(metavar="auto|tiled-bitmap|tiled-csl|dense", help="How pruned weights are stored.")
    ] = "auto",
    value_dtype: Annotated[
        str, typer.Option(metavar="auto|int8", help="Of what is left: as it is, or INT8 with a scale for each output.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="auto|bfloat16|float16", help="Convert floating tensors first.")
    ] = "auto",
    recover: Annotated[
        int,
        typer.Option(
            metavar="STEPS", min=0, help="Then train what is left against MODEL, zeros held; see `compress recover`."
        ),
    ] = 0,
    blocks: Blocks = False,
    dataset: Dataset = None,
    nsamples: Samples = None,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Measure every sparsity and keep a table and a drawing, no artifact.")
    ] = False,
    eval_dataset: Annotated[
        str, typer.Option(metavar="FILE|HUB_ID", help="With --sweep: the text to measure on.")
    ] = "Salesforce/wikitext:wikitext-2-raw-v1:test",
    *,
    how: Writing,
) -> None:
    """Prune the linear weights of MODEL and store what is left: as a tiled bitmap, from about 88 % sparsity on as Tiled-CSL
    (INT8 values always as a bitmap), below 15 % dense.

    \b
    --method   text  what it does
    magnitude  no    drops the smallest weights: usable to about 50 %, destroys models above 55 %
    wanda      yes   weighs them by their inputs: quick
    sparsegpt  yes   and fits what is left to the dense model's outputs: the one to take
    admm       yes   a slower search for better masks than sparsegpt's

    Measured figures: docs/pruning.md. Before you deploy: `tilepress eval perplexity`, or --sweep.
    """
    from dataclasses import replace

    from tilepress.compress.prune.recipe import PruneRecipe

    sparsities = parse_sparsities(sparsity)
    if len(sparsities) > 1 and not sweep:
        raise UsageError(f"--sparsity {sparsity} names {len(sparsities)}", "add --sweep, or give one")

    checkpoint, text = _open(model, how.revision), None
    if method != "magnitude" or recover:
        text = calibration_text(checkpoint.text_config, dataset, nsamples, seqlen, seed)
    elif dataset is not None or nsamples is not None or seqlen is not None:
        raise UsageError(
            "--method magnitude reads no text, but --dataset, --nsamples or --seqlen is given",
            "leave them out, or add --method sparsegpt or --recover STEPS",
        )
    if blocks and not recover:
        raise UsageError("--blocks goes with --recover", "add --recover STEPS, or leave it out")
    if sweep and recover:
        raise UsageError("--sweep measures pruning alone", "leave out --recover")
    recipe = PruneRecipe(
        sparsities[0],
        scope,
        method,
        format,
        value_dtype,
        parse_dtype(dtype),
        how.ignored,
        text if method != "magnitude" else None,
        allocation,
        damping,
        how.trust_remote_code,
    )
    if recover:
        from tilepress.compress.recover.recipe import RecoverRecipe, Recovery

        if value_dtype == "int8" or find_rank(how.rank, how.world_size)[1] > 1:
            raise UsageError(
                "--recover trains floating values, in one process",
                "prune with --recover alone, then `tilepress compress quantize --activations none` for INT8 values",
            )
        if method == "magnitude" and nsamples is not None and not blocks:
            raise UsageError(
                "--nsamples is given, but training of the whole model takes all of the text",
                "leave it out, or add --blocks",
            )
        recovery = Recovery(recover, text.dataset, text.seqlen, seed, blocks=blocks, nsamples=text.nsamples)
        recipe = RecoverRecipe(recovery, recipe, trust_remote_code=how.trust_remote_code)
    if sweep:
        _sweep(checkpoint, [replace(recipe, sparsity=value) for value in sparsities], output, eval_dataset, how)
    else:
        _write_artifact(checkpoint, recipe, output, "pruning and recovering" if recover else "pruning", how)


@compress.command(
    epilog="Example: tilepress compress recover pruned --base MODEL -o recovered --steps 2000 --dataset text.jsonl"
)
@takes(Making)
def recover(
    model: Model,
    output: Output,
    base: Annotated[
        str, typer.Option(metavar="MODEL", help="The dense model that MODEL was pruned from.", show_default=False)
    ],
    steps: Annotated[int, typer.Option(help="Of training; with --blocks for each layer.", show_default=False)],
    dataset: Dataset = None,
    seqlen: Seqlen = None,
    batch: Annotated[int, typer.Option(help="Windows of text in a step.")] = 16,
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Windows that run at a time.  [default: what 16,384 tokens hold]", show_default=False),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate at its peak.  [default: 0.5 / hidden size]", show_default=False)
    ] = None,
    hidden_loss: Annotated[float, typer.Option(help="Weight of the hidden states' error beside the divergence.")] = 1.0,
    train: Annotated[
        str,
        typer.Option(
            metavar="kept|norms|all",
            help="Kept weights of linear layers; also norms and biases; also embeddings and the output head.",
        ),
    ] = "all",
    noise: Annotated[
        float, typer.Option(metavar="SHARE", help="Of input tokens, replaced by random ones for both models.")
    ] = 0.0,
    blocks: Blocks = False,
    nsamples: Annotated[int, typer.Option(help="With --blocks: windows of text.")] = 128,
    seed: Seed = 0,
    save_every: Annotated[float, typer.Option(metavar="MINUTES", min=0, help="For --resume: keep the state.")] = 5.0,
    *,
    how: Making,
) -> None:
    """Train the kept weights of MODEL, a pruned artifact, to do again what its dense model did. Zeros stay zeros.

    The loss is the divergence of the next token's distribution from the dense model's, and the error of hidden states: text needs no labels.
    The layout stays MODEL's. --dry-run shows the memory that the whole model and --blocks take. Measured gains: docs/recovery.md.
    """
    from tilepress.compress.recover.recipe import RecoverRecipe, Recovery, density_of

    if find_rank(None, None)[1] > 1 and not how.dry_run:
        raise UsageError(
            "recovery trains in one process, but WORLD_SIZE or SLURM_NTASKS tells of several",
            "start it once, without torchrun or srun; in a shell of salloc unset SLURM_NTASKS",
        )
    checkpoint, dense = _open(model, how.revision), _open(base, None)
    text = calibration_text(checkpoint.text_config, dataset, None, seqlen, seed)
    recovery = Recovery(
        steps, text.dataset, text.seqlen, seed, batch, micro_batch, lr, hidden_loss, train, blocks, nsamples, noise
    )
    recipe = RecoverRecipe(
        recovery,
        base=dense.path,
        base_name=dense.name,
        density=density_of(checkpoint),
        trust_remote_code=how.trust_remote_code,
        save_every_s=60 * save_every,
    )
    _write_artifact(checkpoint, recipe, output, "recovering", how)


@compress.command(
    epilog="Example: tilepress compress quantize MODEL -o int8 --activations tensor --smooth auto --dataset text.jsonl"
)
@takes(Writing)
def quantize(
    model: Model,
    output: Output,
    weights: Annotated[
        str, typer.Option(metavar="channel|tensor", help="A scale for each output channel, or one.")
    ] = "channel",
    activations: Annotated[
        str,
        typer.Option(
            metavar="token|tensor|channel|tensor-asym|tensor-dynamic|none", help="How inputs are quantized: see above."
        ),
    ] = "token",
    observer: Annotated[
        str | None,
        typer.Option(
            metavar="minmax|percentile|mse", help="How static ranges are chosen.  [default: mse]", show_default=False
        ),
    ] = None,
    percentile: Annotated[
        float | None,
        typer.Option(help="With --observer percentile: 99.9 to 99.9999.  [default: 99.999]", show_default=False),
    ] = None,
    smooth: Annotated[
        str,
        typer.Option(
            metavar="off|ALPHA|auto",
            help="SmoothQuant: move outliers of the inputs into the weights; 0 to 1, or the best for each. Needs text.",
        ),
    ] = "off",
    dataset: Dataset = None,
    nsamples: Samples = None,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    dtype: Annotated[
        str, typer.Option(metavar="auto|bfloat16|float16|float32", help="Convert floating tensors first.")
    ] = "auto",
    *,
    how: Writing,
) -> None:
    """Quantize the linear weights of MODEL, and their inputs, to INT8, as compressed-tensors stores them.

    \b
    --activations   scale of inputs      text  accuracy  vLLM  kernel
    token           per token, run time  no    good      yes   W8A8 + reduction
    tensor          one, calibrated      yes   fair      yes   W8A8
    tensor-asym     one + zero point     yes   fair      yes   W8A8 + zero point
    channel         folded into weights  yes   good      yes   W8A8
    tensor-dynamic  one, run time        no    least     no    W8A8 + two passes
    none            not quantized        no    best      no    W8A16, small batch

    Of sparse weights, none keeps the zeros unstored: bitmaps of INT8 values.
    With the cuda extra and a card from sm_80 on the kernels are our own; elsewhere references serve, no faster than dense.
    Perplexity moved by +0.02 to +0.9 % on two small models, tensor-dynamic by up to +2.7 %; static ranges without smoothing fail where
    channels are outliers: add --smooth auto. Measured figures: docs/int8.md.
    """
    from tilepress.compress.quantize.observers import Observer
    from tilepress.compress.quantize.recipe import QuantizeRecipe, needs_text

    chosen = None
    if observer is not None:
        chosen = Observer(observer) if percentile is None else Observer(observer, percentile)
    if percentile is not None and observer != "percentile":
        raise UsageError("--percentile goes with --observer percentile", "add it, or leave --percentile out")
    checkpoint, text = _open(model, how.revision), None
    if needs_text(activations, smooth) or dataset is not None:
        text = calibration_text(checkpoint.text_config, dataset, nsamples, seqlen, seed)
    elif nsamples is not None or seqlen is not None:
        raise UsageError(
            f"--activations {activations} without --smooth reads no text, but --nsamples or --seqlen is given",
            "add --dataset to measure output errors on it, or leave them out",
        )
    recipe = QuantizeRecipe(
        weights, activations, chosen, smooth, text, parse_dtype(dtype), how.ignored, how.trust_remote_code
    )
    _write_artifact(checkpoint, recipe, output, "quantizing", how)


@compress.command(epilog="Example: tilepress compress kv MODEL -o kv4 --dataset text.jsonl --nsamples 64 --seqlen 1024")
@takes(Making)
def kv(
    model: Model,
    output: Output,
    bits: Annotated[int, typer.Option(metavar="4|8", help="Of a stored key or value.")] = 4,
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="128|64|32",
            min=32,
            help="Channels that share a scale (4 bits).  [default: the head dimension]",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str, typer.Option(metavar="dynamic|static", help="Scales with every token, or calibrated and stored once.")
    ] = "dynamic",
    rotation: Annotated[
        str, typer.Option(metavar="auto|none|hadamard", help="Rotate keys and queries, auto: if it lowers the error.")
    ] = "auto",
    memory: Memory = 1.0,
    dataset: Dataset = None,
    nsamples: Samples = None,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    *,
    how: Making,
) -> None:
    """Calibrate an INT4 or INT8 attention (KV) cache for MODEL, dense or an artifact. Its weights stay as they are.

    Run it last: commands that change weights leave a calibration behind. `tilepress.load` and `tilepress.hf` then generate with the packed cache.
    """
    from tilepress.compress.kv.recipe import KVRecipe

    checkpoint = _open(model, how.revision)
    text = calibration_text(checkpoint.text_config, dataset, nsamples, seqlen, seed)
    recipe = KVRecipe(text, bits, group_size or 0, mode, rotation, how.trust_remote_code)
    _write_artifact(checkpoint, recipe, output, "calibrating", how, {"memory_gib": memory})


@app.command(epilog="Example: tilepress convert pruned -o dense --to dense")
@takes(Writing)
def convert(
    model: Model,
    output: Output,
    to: Annotated[
        str,
        typer.Option(
            metavar="dense|auto|tiled-bitmap|tiled-csl", help="Layout of the weights in DIR.", show_default=False
        ),
    ],
    *,
    how: Writing,
) -> None:
    """Change how weights are stored.

    `--to dense` gives a checkpoint that loads anywhere: sparse weights bit for bit, INT8 ones as code times scale, rounded to the model's
    dtype. The sparse layouts pack a model that another tool pruned, or one in another of them, without changing a value; but a bitmap's INT8
    values become code times scale in Tiled-CSL, and stay as they are with `--to auto`.
    """
    from tilepress.compress.convert import ConvertRecipe

    _write_artifact(_open(model, how.revision), ConvertRecipe(to, how.ignored), output, "converting", how)


@evaluate.command(epilog="Example: tilepress eval perplexity pruned --base MODEL --dataset text.jsonl --seqlen 1024")
def perplexity(
    model: Model,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare with this model, window by window.", show_default=False)
    ] = None,
    dataset: Annotated[
        str, typer.Option(metavar="FILE|HUB_ID", help="A .txt, .jsonl or .parquet file, or HUB_ID[:CONFIG[:SPLIT]].")
    ] = "Salesforce/wikitext:wikitext-2-raw-v1:test",
    recipe: Annotated[
        str,
        typer.Option(
            metavar="gptq|strided", help="gptq: windows without overlap, as papers report; strided: overlapping."
        ),
    ] = "gptq",
    seqlen: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window.  [default: 2048, or what the model's positions allow]", show_default=False
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between windows (strided).  [default: a quarter of seqlen]", show_default=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Score so many windows at most.", show_default=False)] = None,
    max_increase: Annotated[
        str | None,
        typer.Option(metavar="5%", help="Exit with 3 if perplexity rises by more over --base.", show_default=False),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Of activations and dense weights.")
    ] = "auto",
    kv: Annotated[
        str,
        typer.Option(
            metavar="sim|decode|off",
            help="With a calibrated cache: simulate it in a forward pass, or also send half of each window through it token by token (slow). "
            "--base has none.  [default: sim]",
            show_default=False,
        ),
    ] = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    revision: Revision = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity of MODEL on a text; with --base also KL divergence and top-1 agreement, with paired errors.

    Several cards share each model under torchrun: torchrun --nproc-per-node 2 -m tilepress eval perplexity …
    """
    allowed = parse_share(max_increase) if max_increase is not None else None
    if allowed is not None and base is None:
        raise UsageError("--max-increase compares with a base that is not given", "add --base MODEL")
    from tilepress.eval.perplexity import Protocol
    from tilepress.runtime.loader import load, paths

    screen.quiet_libraries()
    checkpoint = _open(model, revision)
    protocol = Protocol(
        dataset, recipe, default_seqlen(checkpoint.text_config) if seqlen is None else seqlen, stride, limit
    )
    from tilepress.eval.perplexity import perplexity as measure
    from tilepress.runtime.parallel.group import TensorParallel
    from tilepress.text import load_tokenizer

    device = parse_device(device)
    group = TensorParallel.start(device)
    is_first = group is None or group.rank == 0
    options = {
        "device": device,
        "dtype": parse_dtype(dtype) or "auto",
        "trust_remote_code": trust_remote_code,
        "group": group,
    }
    started = time.monotonic()
    subject = load(str(checkpoint.path), **options)
    other = load(base, kv=False, **options) if base else None
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code)
    with Bar("perplexity", 1, quiet or not is_first) as bar:
        result = measure(subject, tokenizer, protocol, other, bar.at, kv)
    if group is not None:
        group.close()
    if not is_first:
        return
    mode = "cache" if result["protocol"]["kv"] == "decode" else result["protocol"]["kv"]
    result = {"model": model, **result, "paths": paths(subject, mode), "seconds": round(time.monotonic() - started, 2)}
    if other is not None:
        result["base"] = {"model": base, **result["base"], "paths": paths(other)}
    print(json.dumps(result, indent=2) if json_ else screen.perplexity_text(result))
    if allowed is not None and result["perplexity"] > result["base"]["perplexity"] * (1 + allowed):
        increase = result["perplexity"] / result["base"]["perplexity"] - 1
        say(f"check failed: perplexity rises by {increase:.2%}, more than the {allowed:.2%} allowed")
        raise typer.Exit(EXIT_CHECK_FAILED)


@evaluate.command(epilog="Example: tilepress eval speed pruned --base MODEL --batch 1,16 --context 8192")
def speed(
    model: Model,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Time this model in the same run.", show_default=False)
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="LIST", help="Sequences at a time; fit: as many as the card holds.")
    ] = "1,16",
    context: Annotated[int, typer.Option(help="Tokens of each sequence before the timed ones.")] = 2048,
    new_tokens: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 128,
    runs: Annotated[int, typer.Option(help="How often, for the spread.")] = 5,
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt that are prefilled at once.")] = 2048,
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Of activations and dense weights.")
    ] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON there.", show_default=False)
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    trust_remote_code: Trust = False,
    revision: Revision = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time MODEL's decode loop: first token, each further one, memory, and where a step's time goes; with --base both in one run.

    A calibrated attention cache of MODEL is used, --base has none. On a card only kernels are timed. Several cards share each model under torchrun:
    torchrun --nproc-per-node 2 -m tilepress eval speed …
    """
    from tilepress.bench.speed import Protocol, Subject, speed as measure
    from tilepress.runtime import loader
    from tilepress.runtime.parallel.group import TensorParallel

    screen.quiet_libraries()
    protocol = Protocol(tuple(_batches(batch)), context, new_tokens, runs, chunk, seed)
    device, kind, path = parse_device(device), parse_dtype(dtype) or "auto", str(_open(model, revision).path)
    group = TensorParallel.start(device)

    def load(path: str, kv: bool):
        return loader.load(path, device, kind, trust_remote_code, kv=kv, group=group)

    subject = Subject(model, lambda: load(path, True))
    other = None if base is None else Subject(base, lambda: load(base, False))
    is_first = group is None or group.rank == 0
    if is_first:
        _check_writable(output)
    found = measure(subject, other, protocol, say if is_first and not quiet else lambda at: None, group)
    if group is not None:
        group.close()
    if is_first:
        _show(found, output, screen.speed_text, json_)


_SHAPES = {  # of weights M x K, weights N x K, tokens x hidden; of attention as eval.attention.Shape says
    "spmm": "4096x4096,8192x8192,11008x4096,28672x8192,36864x9216",
    "w8a8": "4096x4096,28672x4096,4096x14336,8192x8192,57344x8192",
    "fused": "64x4096,64x8192,4096x8192,16384x4096",
    "attention": "1x32x8x8192x128,4x32x8x8192x128,16x32x8x8192x128v,64x32x8x8192x128v,"
    "32x8x1x8192x128,128x8x1x8192x128,512x8x1x8192x128v,"
    "1x32x8x8192x64,4x32x8x8192x64,16x32x8x8192x64,64x32x8x8192x64,"
    "32x8x1x8192x64,128x8x1x8192x64,512x8x1x8192x64",
}
_COLUMNS = {"spmm": "1,8,16,32,64,128,256,512,1024,2048", "w8a8": "1,8,16,32,64,128,512,2048,8192"}


@evaluate.command(epilog="Example: tilepress eval kernels spmm -o benchmarks/h200/spmm.json")
def kernels(
    what: Annotated[str, typer.Argument(metavar="spmm|w8a8|fused|attention", help="Which kernels.")] = "spmm",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON there.", show_default=False)
    ] = None,
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
    """Time the CUDA kernels on this card, each checked first, against cuBLAS, PyTorch's attention or eager PyTorch, and the memory's read bandwidth."""
    from tilepress.bench import attention, int8_kernels, kernels as bench

    if what not in _SHAPES:
        raise UsageError(f"no benchmark {what!r}", f"choose one of {', '.join(_SHAPES)}")
    if tune and (what != "w8a8" or output is None):
        raise UsageError("--tune writes a table for w8a8", "tilepress eval kernels w8a8 --tune -o w8a8_gemm.json")
    parse = attention.Shape.parse if what == "attention" else parse_shape
    sizes = [parse(text) for text in (_SHAPES[what] if shapes is None else shapes).split(",")]
    counts = parse_list(_COLUMNS.get(what, "1") if columns is None else columns, "columns")
    usual = "bfloat16" if what == "attention" else "float16,bfloat16"
    dtypes = [parse_dtype(name) for name in (usual if dtype is None else dtype).split(",")]
    layout_names, shares = layouts.split(","), [parse_share(text) for text in sparsity.split(",")]

    def progress(at: str) -> None:
        if not quiet:
            say(at)

    if output is not None:  # what cannot be written is told before the work
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
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
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=2) if json_ else screen.kernels_text(found))


@app.command()
def inspect(model: Model, memory: Memory = 1.0, revision: Revision = None, json_: Json = False) -> None:
    """Show what MODEL holds, weight by weight, from its headers and manifest."""
    from dataclasses import asdict

    from tilepress.eval.inspect import inspect as look

    found = look(_open(model, revision))
    facts = asdict(found) | {"bytes": found.bytes, "elements": found.elements}
    print(json.dumps(facts, indent=2) if json_ else screen.inspection_text(facts, memory))


@app.command()
def verify(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A finished artifact.", show_default=False)],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also compare every kept value with this source.", show_default=False),
    ] = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an artifact: files, hashes, headers, packed words, declared counts, vLLM's rules (INT8), loading. Exits with 3 on any finding."""
    from tilepress.eval.verify import verify as check_all
    from tilepress.formats.checkpoint import locate

    screen.quiet_libraries()
    with Bar("verifying", 1, quiet) as bar:
        checks = check_all(model, locate(base) if base else None, progress=bar.at)
    if json_:
        print(
            json.dumps(
                {
                    "path": str(model),
                    "passed": all(c.passed for c in checks),
                    "checks": [
                        {
                            "name": c.name,
                            "looked_at": c.looked_at,
                            "passed": c.passed,
                            "findings": list(c.findings),
                            "notes": list(c.notes),
                        }
                        for c in checks
                    ],
                },
                indent=2,
            )
        )
    else:
        print(
            table(
                "",
                ["check", "looked at", "result"],
                [[c.name, str(c.looked_at), "ok" if c.passed else f"{len(c.findings)} wrong"] for c in checks],
            )
        )
        for c in checks:
            for finding in (*c.findings, *c.notes):
                print(f"  {c.name}: {finding}")
    if not all(c.passed for c in checks):
        raise typer.Exit(EXIT_CHECK_FAILED)


@app.command()
def env(json_: Json = False) -> None:
    """Show versions, cards and what would run where."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"tilepress": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "safetensors", "datasets", "typer", "scipy", "cuda-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    found["cards"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["cores"], found["threads"] = os.cpu_count(), torch.get_num_threads()
    from tilepress.kernels import tiled_bitmap_spmm, tiled_csl_spmm, w8a8_gemm, w8a16_gemm

    here = torch.device("cuda" if found["cards"] else "cpu"), torch.bfloat16, torch.bfloat16
    found["Tiled-CSL linears run on"] = tiled_csl_spmm.path(*here)
    found["tiled bitmap linears run on"] = tiled_bitmap_spmm.path(*here)
    found["INT8 linears run on"] = f"{w8a8_gemm.path(*here, 64, 64)}, {w8a16_gemm.path(*here, 64)}"
    print(
        json.dumps(found, indent=2)
        if json_
        else table(
            "",
            ["what", "found"],
            [[k, ", ".join(v) or "none" if isinstance(v, list) else str(v or "-")] for k, v in found.items()],
        )
    )


@app.command(epilog="Example: tilepress demo --shape llama-3-8b --batch 16,1 --context 8192,2048 -o end_to_end.json")
def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR|FILE",
            help="Keep the artifacts here.  [default: a temporary folder] With --shape, write the JSON there.",
            show_default=False,
        ),
    ] = None,
    sparsity: Annotated[str, typer.Option(metavar="LIST", help="Sparsities to try.")] = "0.3,0.5,0.6,0.7",
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Time random models of this shape: llama-3-8b, llama-2-70b, opt-30b, opt-66b; to try it out, llama-tiny, opt-tiny.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="--shape: of tiled-csl-PERCENT, tiled-bitmap-PERCENT, w8a8, w8a16, dense, each alone or with +kv4 or +kv8.  "
            "[default: tiled-csl-80+kv4,tiled-bitmap-50+kv4,w8a8+kv4]",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str, typer.Option(metavar="RECIPE|none", help="--shape: the recipe that speed-ups are over, timed first.")
    ] = "dense",
    batch: Annotated[
        str, typer.Option(metavar="LIST", help="--shape: sequences at a time; fit: as many as the card holds.")
    ] = "1,16",
    context: Annotated[
        str, typer.Option(metavar="LIST", help="--shape: tokens of a sequence, for all batches or one for each.")
    ] = "2048",
    new_tokens: Annotated[int, typer.Option(help="--shape: decode steps that are timed.")] = 128,
    runs: Annotated[int, typer.Option(help="--shape: how often, for the spread.")] = 5,
    chunk: Annotated[int, typer.Option(help="--shape: tokens of a prompt that are prefilled at once.")] = 2048,
    seed: Seed = 0,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prune the embedded 4 M parameter model, verify and evaluate it: no network, no GPU, about half a minute.

    With --shape: make random models of a well-known shape on the device, compress them there, and time each beside the dense one, as
    `eval speed` does. Nothing is downloaded or written to disk; a model that does not fit is said not to, and the others run. Several cards share each
    model under torchrun: torchrun --nproc-per-node 2 -m tilepress demo --shape …
    """
    if shape is not None:
        _time_shape(
            shape,
            recipe,
            None if base == "none" else base,
            _batches(batch),
            parse_list(context, "context"),
            {"new_tokens": new_tokens, "runs": runs, "chunk": chunk, "seed": seed},
            parse_device(device),
            output,
            json_,
            quiet,
        )
        return
    if recipe is not None or base != "dense" or json_:
        flag = "--recipe" if recipe else "--json" if json_ else "--base"
        raise UsageError(f"{flag} is for random models", "add --shape NAME")
    import tempfile
    from contextlib import nullcontext

    from tilepress import demo as embedded

    values = [parse_share(value) for value in sparsity.split(",")]
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and holds files", "choose another -o DIR")
    started = time.monotonic()
    with nullcontext(output) if output else tempfile.TemporaryDirectory(prefix="tilepress-demo-") as folder:
        rows = _demo_rows(Path(folder), values, embedded.MODEL, embedded.TEXT, quiet)
    print(table("", ["model", "weights", "of dense", "zeros", "perplexity", "KL divergence", "same top token"], rows))
    print(
        f"\n  {len(values)} artifacts written, verified and evaluated in {time.monotonic() - started:.0f} s"
        + (f"; they are in {output}" if output else "; keep them with -o DIR")
    )


def _time_shape(
    shape: str,
    recipe: str | None,
    base: str | None,
    batches: list[int | str],
    contexts: list[int],
    settings: dict,
    device: str,
    output: Path | None,
    json_: bool,
    quiet: bool,
) -> None:
    from tilepress.bench import shapes
    from tilepress.runtime.parallel.group import TensorParallel

    screen.quiet_libraries()
    plans = shapes.protocols(batches, contexts, **settings)
    recipes = (shapes.RECIPES if recipe is None else recipe).split(",")
    group = TensorParallel.start(device)
    is_first = group is None or group.rank == 0
    if is_first:
        _check_writable(output)
    told = say if is_first and not quiet else lambda at: None
    found = shapes.run(shape, recipes, plans, device if group is None else group.device, told, base, group)
    if group is not None:
        group.close()
    if is_first:
        _show(found, output, screen.shape_text, json_)


def _batches(batch: str) -> list[int | str]:
    return ["fit" if part == "fit" else parse_list(part, "batch")[0] for part in batch.split(",")]


def _check_writable(output: Path | None) -> None:
    """What cannot be written is told before the work."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()


def _show(found: dict, output: Path | None, text: Callable[[dict], str], json_: bool) -> None:
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=2) if json_ else text(found))


def _demo_rows(folder: Path, values: list[float], model: Path, text: Path, quiet: bool) -> list[list[str]]:
    """Runs the ordinary commands one by one, as a user would, and collects their JSON."""

    def run(*words: str) -> dict:
        import contextlib
        import io

        if not quiet:
            say("$ tilepress " + shlex.join(words))
        captured, silent = io.StringIO(), () if words[0] == "inspect" else ("-q",)
        with contextlib.redirect_stdout(captured):
            code = app([*words, "--json", *silent], standalone_mode=False)
        if code:
            raise TilepressError(f"`tilepress {shlex.join(words)}` ended with {code}", "run it by itself to see why")
        return json.loads(captured.getvalue())

    def perplexity_of(scores: dict) -> str:
        return screen.with_error(scores["perplexity"], scores["perplexity_stderr"])

    protocol = ["--dataset", str(text), "--seqlen", "1024"]
    rows, dense = [], run("inspect", str(model))
    for value in values:
        out = str(folder / f"tiny-{100 * value:g}")
        made = run("compress", "prune", str(model), "-o", out, "--sparsity", f"{value:g}")
        run("verify", out, "--base", str(model))
        measured = run("eval", "perplexity", out, "--base", str(model), *protocol)
        if not rows:
            rows.append(["dense bf16", size(dense["bytes"]), "100.0%", "-", perplexity_of(measured["base"]), "-", "-"])
        sizes = [size(made["bytes"]), f"{made['bytes'] / dense['bytes']:.1%}", f"{made['sparsity']:.1%}"]
        costs = [f"{measured['kl_divergence']['mean']:.3f}", f"{measured['top1_agreement']:.1%}"]
        rows.append([f"magnitude {100 * value:g}%", *sizes, perplexity_of(measured), *costs])
    return rows


def _sweep(checkpoint, recipes: list, output: Path, dataset: str, how: Writing) -> None:
    """Measures every recipe, and prints and draws what came out."""
    if how.workers > 1 or how.rank is not None or how.dry_run:
        raise UsageError("--sweep measures one artifact after the other", "leave out --workers, --rank and --dry-run")
    from tilepress.eval.perplexity import Protocol
    from tilepress.eval.sweep import HEAD, cells, sweep as measure
    from tilepress.text import load_tokenizer

    screen.quiet_libraries()
    for warning in dict.fromkeys(warning for recipe in recipes for warning in recipe.warnings()):
        say(f"warning: {warning}")
    protocol = Protocol(dataset, "gptq", default_seqlen(checkpoint.text_config))
    tokenizer = load_tokenizer(checkpoint.path, how.trust_remote_code)
    with Bar("sweep", len(recipes), how.quiet) as bar:
        found = measure(
            checkpoint,
            recipes,
            protocol,
            output,
            parse_device(how.device),
            how.resume,
            how.overwrite,
            bar.at,
            tokenizer,
        )
    title = f"  {recipes[0].method} on {dataset}; dense: {found['rows'][0]['base_perplexity']:.4f}"
    print(json.dumps(found, indent=2) if how.json_ else table(title, HEAD, cells(found["rows"])))
    if not how.quiet:
        say(f"wrote {output}/sweep.md, sweep.svg and sweep.json")


def _write_artifact(checkpoint, recipe, output: Path, title: str, how: Making, told: dict | None = None) -> None:
    """Plans, writes and finishes an artifact, and prints what came out, with what else is `told`."""
    from tilepress.compress.run.finish import finish
    from tilepress.compress.run.plan import make_plan, open_output
    from tilepress.compress.run.shards import run_parallel, run_shards
    from tilepress.formats.kv_calibration import FOLDER as KV_FOLDER

    screen.quiet_libraries()
    targets, left = recipe.find_targets(checkpoint, how.trust_remote_code)
    recipe.check(checkpoint, targets, left)
    plan = make_plan(checkpoint, output, recipe, targets, left)
    for warning in recipe.warnings():
        say(f"warning: {warning}")
    if how.dry_run:
        facts = plan.facts()
        print(json.dumps(facts, indent=2) if how.json_ else screen.plan_text(facts))
        return
    device = parse_device(how.device)
    rank, world_size = (0, 1) if recipe.links else find_rank(how.rank, how.world_size)
    started, stages = time.monotonic(), {}
    if not open_output(plan, how.resume, how.overwrite, joining=world_size > 1):
        say(f"{output} is complete already")
    else:
        with Bar(title, recipe.work_units(plan, rank, world_size), how.quiet) as bar:
            if how.workers > 1:
                stages = run_parallel(plan, how.workers, rank, world_size, device, bar.step)
            else:
                stages = run_shards(plan, rank, world_size, device, bar.step)
        if finish(plan) is None:
            say(f"the shards of rank {rank} of {world_size} are done; whoever finishes last completes {output}")
            if how.json_:
                print(json.dumps({"output": str(output), "complete": False, "rank": rank, "world_size": world_size}))
            return
    facts = plan.outcome() | (told or {}) | {"seconds": round(time.monotonic() - started, 2)}
    facts["stages"] = {f"{name}_s": round(seconds, 2) for name, seconds in stages.items()}
    print(json.dumps(facts, indent=2) if how.json_ else screen.result_text(facts))
    warnings = [w for part in ("calibration", "kv_cache", "recovery") for w in facts.get(part, {}).get("warnings", [])]
    if not recipe.links and (checkpoint.path / KV_FOLDER).exists():
        warnings.append("kv_cache/ was not taken over: it belongs to the weights as they were; run `compress kv` again")
    for warning in warnings[:_WARNINGS_SHOWN]:
        say(f"warning: {warning}")
    if len(warnings) > _WARNINGS_SHOWN:
        say(f"warning: {len(warnings) - _WARNINGS_SHOWN} more in {output}/tilepress.json")
    if recipe.command.startswith("compress") and not how.quiet:
        say(f"next: tilepress eval perplexity {output} --base {getattr(recipe, 'base', None) or checkpoint.path}")


def _open(model: str, revision: str | None):
    from tilepress.formats.checkpoint import Checkpoint, locate

    path = locate(model, revision)
    return Checkpoint(path, name=None if Path(model).expanduser() == path else model)


class _Interrupt:
    """Remembers a Ctrl-C: native code may turn the KeyboardInterrupt into an error of its own."""

    seen = False

    def __call__(self, *_) -> None:
        self.seen = True
        raise KeyboardInterrupt


def main() -> None:
    """Entry point: runs the command and turns every failure into two lines and an exit code."""
    interrupt = _Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    try:
        code = app(standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:
        if interrupt.seen:
            code = EXIT_INTERRUPTED
        elif os.environ.get("TILEPRESS_DEBUG") == "1":
            raise
        else:
            code = _explain(error)
    if code == EXIT_INTERRUPTED:
        command = shlex.join(word for word in sys.argv[1:] if word not in ("--resume", "--overwrite"))
        writes = sys.argv[1:2] in (["compress"], ["convert"])
        say("interrupted" + (f"; continue with: tilepress {command} --resume" if writes else ""))
    sys.exit(code)


def _explain(error: Exception) -> int:
    if isinstance(error, TilepressError):
        say(f"error: {error.message}")
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    if type(error).__name__ == "NoArgsIsHelpError":  # typer's private name for a command without arguments
        say(error.format_message())
        return 2
    if hasattr(error, "format_message"):  # a usage error that typer found in the words themselves
        say(f"error: {error.format_message()}")
        say("hint: add --help to the command to see what it takes")
        return 2
    if isinstance(error, OSError) and error.filename:
        say(f"error: {error.filename}: {error.strerror}")
        say("hint: check the path and its permissions")
        return 1
    first = (str(error).strip().splitlines() or [""])[0]
    say(f"error: {type(error).__name__}: {first}")
    say("hint: this was not foreseen; TILEPRESS_DEBUG=1 shows where it happened")
    return 1


if __name__ == "__main__":
    main()
