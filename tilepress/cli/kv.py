"""`tilepress compress kv`: a calibrated attention cache."""

from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Bos, Dataset, Making, Memory, Model, Output, Samples, Seed, Seqlen, reading, takes
from tilepress.cli.making import Words, make, say_next, sizes_text
from tilepress.cli.terminal import table

EXAMPLE = "tilepress compress kv MODEL -o kv4 --dataset text.jsonl --nsamples 64 --seqlen 1024"


@takes(Making)
def kv(
    model: Model,
    output: Output,
    bits: Annotated[
        str, typer.Option(metavar="4|8|auto", help="Of a stored key or value; auto: forms by layer under --budget.")
    ] = "4",
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="BITS", help="Mean bits of a stored number, scales counted (--bits auto).", show_default=False
        ),
    ] = None,
    alike: Annotated[
        bool, typer.Option("--alike", help="One form for a layer's keys and values, as kernels take it (--bits auto).")
    ] = False,
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
    fold_values: Annotated[
        bool,
        typer.Option("--fold-values", help="Write v_proj and o_proj with a matrix between them that rounds better."),
    ] = False,
    feedback: Annotated[
        bool,
        typer.Option("--feedback/--no-feedback", help="Make up for keys' rounding errors in channels rounded later."),
    ] = True,
    memory: Memory = 1.0,
    dataset: Dataset = None,
    nsamples: Samples = None,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    bos: Bos = "auto",
    *,
    how: Making,
) -> None:
    """Calibrate a 4- or 8-bit attention (KV) cache for MODEL.

    MODEL is dense or an artifact. Its weights stay as they are, but for --fold-values.

    Run it last: commands that change weights leave a calibration behind. `tilepress.load` and `tilepress.hf` then generate with the packed cache.
    """
    recipe = tilepress.KVCache(
        int(bits) if bits.isdecimal() else bits, group_size, mode, rotation, budget, alike, fold_values, feedback
    )
    words = Words("calibrating", _result_text, _plan_text, {"memory_gib": memory})
    if make(model, output, recipe, reading(dataset, nsamples, seqlen, seed, bos), how, words):
        say_next(output, model, how)


def _plan_text(facts: dict) -> str:
    told = facts["kv_cache"]
    head = ["  attention cache: " + told["format"], *_sizes(told, 1.0)]
    what = (
        f"{len(facts['layers'])} weights take the values' matrices,"
        if facts["layers"]
        else "The weights stay as they are,"
    )
    return "\n".join([*head, sizes_text(facts, what), "  nothing was written"])


def _result_text(facts: dict) -> str:
    folded = [layer["value_folded"] for layer in facts["kv_cache"]["report"] if "value_folded" in layer]
    weights = "the weights are the source's own files, linked where the disk allows"
    if folded:
        weights = f"v_proj and o_proj of {sum(folded)} of {len(folded)} layers have the values' matrices"
    written = f"  wrote {facts['output']} in {facts['seconds']:.1f} s; {weights}"
    return f"{kv_text(facts['kv_cache'], facts['memory_gib'])}\n{written}"


def kv_text(told: dict, memory_gib: float) -> str:
    """Return what a calibrated cache takes, and its layers with the greatest output error, or which have which forms."""
    return "\n".join(
        [
            _forms_text(told) if "budget" in told else _layers_text(told),
            "",
            *_sink(told),
            f"  calibrated on {told['tokens']:,} tokens in {told['windows']} windows",
            *_sizes(told, memory_gib),
        ]
    )


def _forms_text(told: dict) -> str:
    """Return how many layers have which forms, and their output error."""
    layers: dict[tuple[str, str], list[float]] = {}
    for layer in told["report"]:
        layers.setdefault((layer["key_format"], layer["value_format"]), []).append(layer["output_error"])
    rows = [
        [*forms, str(len(errors)), f"{max(errors):.2%}"]
        for forms, errors in sorted(layers.items(), key=lambda item: -len(item[1]))
    ]
    title = f"  attention cache: {told['format']}, budget {told['budget']:g}"
    text = table(title, ["keys", "values", "layers", "output error, at most"], rows)
    unlike = sum(len(errors) for (key, value), errors in layers.items() if key != value)
    if unlike:
        text += f"\n\n  {unlike} layers have unlike keys and values, which no kernel takes yet: on a card references read them (--alike avoids it)"
    return text


def _layers_text(told: dict) -> str:
    """Return the layers with the greatest output error."""
    worst = sorted(told["report"], key=lambda layer: -layer["output_error"])[:5]
    rows = [
        [
            str(layer["layer"]),
            f"{layer['key_error']:.2%}",
            f"{layer['value_error']:.2%}",
            f"{layer['output_error']:.2%}",
            *(_range(layer[name]) for name in ("key_alpha", "key_clip", "value_alpha", "value_clip")),
            *(f"{max(layer['key_overflow'], layer['value_overflow']):.3%}" for _ in range("key_overflow" in layer)),
        ]
        for layer in worst
    ]
    head = ["layer", "key error", "value error", "output error", "alpha K", "clip K", "alpha V", "clip V"]
    head += ["beyond the range"] if rows and len(rows[0]) > len(head) else []
    few = "" if len(worst) == len(told["report"]) else f"; the worst layers of {len(told['report'])}:"
    rotated = ", keys rotated" if told["rotation"] == "hadamard" else ""
    return table(f"  attention cache: {told['format']}{rotated}{few}", head, rows)


def _range(told: float | list[float]) -> str:
    """Return a number, or the least and the largest of those of a layer's heads."""
    least, most = (told, told) if isinstance(told, float) else (min(told), max(told))
    return f"{least:.2f}" if least == most else f"{least:.2f} .. {most:.2f}"


def _sink(told: dict) -> list[str]:
    """Return how much of the attention the first token takes, where it takes half of a layer's or more."""
    shares = {layer["layer"]: layer.get("first_attention", 0.0) for layer in told["report"]}
    many = [number for number, share in shares.items() if share >= 0.5]
    if not many:
        return []
    most = max(many, key=shares.get)
    exact = sum(
        all(layer.get("key_first_exact", [False]) + layer.get("value_first_exact", [False])) for layer in told["report"]
    )
    kept = f"; {exact} layers store it exactly" if exact else ""
    return [
        f"  an attention sink: the first token takes half of the attention or more in {len(many)} of {len(shares)} layers, "
        f"{shares[most]:.0%} in layer {most}{kept}"
    ]


def _sizes(told: dict, memory_gib: float) -> list[str]:
    before, after = (int(memory_gib * told[name]) for name in ("tokens_per_gib_bfloat16", "tokens_per_gib"))
    return [
        f"  a token     {told['bytes_per_token_bfloat16']:,} -> {told['bytes_per_token']:,} bytes "
        f"({told['bytes_per_token'] / told['bytes_per_token_bfloat16']:.1%} of bfloat16)",
        f"  {memory_gib:g} GiB     {before:,} -> {after:,} tokens",
    ]
