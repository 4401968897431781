"""`tilepress demo`: the whole path on an embedded model, or models of a known shape on a card."""

import math
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tilepress
from tilepress.cli.flags import Device, Json, Quiet, Seed, parse_batches, parse_list, parse_share
from tilepress.cli.making import stages_text
from tilepress.cli.measuring import ranks
from tilepress.cli.speed import speed_text
from tilepress.cli.terminal import quiet_libraries, say, show, size, table, with_error
from tilepress.formats import TilepressError, UsageError

if TYPE_CHECKING:
    from tilepress.eval.perplexity import PerplexityResult

_CALIBRATED = 4  # documents of the embedded text to calibrate with; the others are measured on
_SEQLEN, _WINDOWS = 256, 2  # of the tokens that a pretrained model reads: a CPU takes long for more
_OF_EMBEDDED = 8, 512  # windows, and tokens of each, that the embedded one is measured on
EXAMPLE = "tilepress demo --shape llama-3-8b --batch 16,1 --context 8192,2048 -o end_to_end.json"


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
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Take this pretrained model instead of the embedded one, without pruning it.",
            show_default=False,
        ),
    ] = None,
    sparsity: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Shares of zeros to try, too.  [default: 0.3,0.5 of the embedded model]",
            show_default=False,
        ),
    ] = None,
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
    """Compress a small model and show what it costs.

    INT8, a 4-bit cache and zeros are made of the embedded model of 4 M parameters, verified and evaluated: no network, no GPU, within a
    minute. With --model INT8 and the cache of a pretrained model, on a few windows of the embedded text, which is of programming: `make demo`
    takes SmolLM2-135M where a package registry has it.

    With --shape: make random models of a well-known shape on the device, compress them there, and time each beside the dense one, as
    `eval speed` does. Nothing is downloaded or written to disk; a model that does not fit is said not to, and the others run. Several cards share each
    model under torchrun: torchrun --nproc-per-node 2 -m tilepress demo --shape …
    """
    if shape is not None:
        _time_shape(
            shape,
            recipe,
            None if base == "none" else base,
            parse_batches(batch),
            parse_list(context, "context"),
            {"new_tokens": new_tokens, "runs": runs, "chunk": chunk, "seed": seed},
            device,
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

    sparsity = sparsity or ("0.3,0.5" if model is None else None)
    values = [parse_share(value) for value in sparsity.split(",")] if sparsity else []
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and holds files", "choose another -o DIR")
    started = time.monotonic()
    with nullcontext(output) if output else tempfile.TemporaryDirectory(prefix="tilepress-demo-") as folder:
        amount = _OF_EMBEDDED if model is None else (_WINDOWS, _SEQLEN)
        source = str(embedded.MODEL) if model is None else model
        rows = _demo_rows(Path(folder), source, values, embedded.TEXT, amount, device, quiet)
    print(table("", ["model", "weights", "of dense", "cache", "perplexity", "KL divergence", "same top token"], rows))
    print(
        f"\n  Measured on at most {math.prod(amount):,} tokens of programming texts: enough to see it work, too few to choose by."
    )
    if values:
        print(
            "  Zeros cost that much where nothing is trained and no text is read: docs/pruning.md has better methods."
        )
    print(
        f"\n  {len(rows) - 1} artifacts written, verified and evaluated in {time.monotonic() - started:.0f} s"
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
    from tilepress.device import find_device

    quiet_libraries()
    device = find_device(device)
    plans = shapes.protocols(batches, contexts, **settings)
    recipes = (shapes.RECIPES if recipe is None else recipe).split(",")
    with ranks(device, output) as (group, is_first):
        told = say if is_first and not quiet else lambda at: None
        found = shapes.run(shape, recipes, plans, device if group is None else group.device, told, base, group)
    if is_first:
        show(found, output, _shape_text, json_)


def _demo_rows(
    folder: Path, model: str, sparsities: list[float], text: Path, amount: tuple[int, int], device: str, quiet: bool
) -> list[list[str]]:
    """Make, verify and evaluate INT8, a 4-bit cache and each sparsity, and name the command that does each.

    Text is measured on (windows, tokens of each), on documents that nothing was calibrated with."""

    def tell(*words: object) -> None:
        if not quiet:
            say("$ tilepress " + shlex.join(map(str, words)))

    quiet_libraries()
    folder.mkdir(parents=True, exist_ok=True)
    documents, parts = text.read_text(encoding="utf-8").splitlines(keepends=True), []
    for name, part in (("calibration", documents[:_CALIBRATED]), ("held-out", documents[_CALIBRATED:])):
        parts.append(folder / f"{name}.jsonl")
        parts[-1].write_text("".join(part), encoding="utf-8")
    calibration, held_out = parts
    few = tilepress.Text(str(calibration), nsamples=_WINDOWS, seqlen=_SEQLEN)
    steps = [("INT8", ["quantize"], tilepress.Quantize(), None), ("4-bit cache", ["kv"], tilepress.KVCache(), few)]
    for share in sparsities:
        steps.append((f"{100 * share:g}% zeros", ["prune", "--sparsity", f"{share:g}"], tilepress.Prune(share), None))
    rows, (windows, seqlen) = [], amount
    for name, (command, *flags), recipe, words in steps:
        out = folder / name.replace(" ", "-").replace("%", "").lower()
        reads = ["--dataset", words.dataset, "--nsamples", _WINDOWS, "--seqlen", _SEQLEN] if words else []
        tell("compress", command, model, "-o", out, *flags, *reads)
        made = tilepress.compress(model, out, recipe, dataset=words, device=device)
        tell("verify", out, "--base", model)
        if not tilepress.verify(out, model).passed:
            raise TilepressError(f"{out} does not verify", f"`tilepress verify {out} --base {model}` shows why")
        limit = ["--dataset", held_out, "--seqlen", seqlen, "--limit", windows]
        tell("eval", "perplexity", out, "--base", model, *limit)
        found = tilepress.perplexity(out, held_out, base=model, seqlen=seqlen, limit=windows, device=device)
        bits = f"{found.kv_cache['bits_per_element']:g} bits" if found.kv_cache else "16 bits"
        rows += _rows(name, made.bytes, made.source_bytes, ("16 bits", bits), found, not rows)
    return rows


def _rows(
    name: str, nbytes: int, dense: int, changed: tuple[str, str], found: "PerplexityResult", first: bool
) -> list[list[str]]:
    """Return the row of an artifact, and before the first one that of the dense model."""
    against, rows = found.comparison, []
    if first:
        base = with_error(against.base.perplexity, against.base.perplexity_stderr)
        rows.append(["dense bf16", size(dense), "100.0%", changed[0], base, "-", "-"])
    costs = [f"{against.kl_divergence['mean']:.3f}", f"{against.top1_agreement:.1%}"]
    measured = with_error(found.perplexity, found.perplexity_stderr)
    return [*rows, [name, size(nbytes), f"{nbytes / dense:.1%}", changed[1], measured, *costs]]


def _shape_text(found: dict) -> str:
    """Return a table for each context, and how long the models took to make."""
    parts = []
    for context in dict.fromkeys(case["context"] for case in found["protocol"]["cases"]):
        rows = [row | {"model": row["artifact"]} for row in found["rows"] if row["context"] == context]
        parts.append(speed_text(found | {"protocol": found["protocol"] | {"context": context}, "rows": rows}))
    made = [
        f"  {build['artifact']} in {build['seconds']:.1f} s ("
        + stages_text({name: build[name] for name in build if name.endswith("_s")})
        + ")"
        for build in found["builds"]
    ]
    title = f"{found['protocol']['model']}, {found['protocol']['weights']}; made on the device:"
    return "\n\n".join([*parts, "\n".join([f"  {title}", *made])])
