"""`tilepress compress quantize`: INT8 weights and inputs."""

from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import (
    Bos,
    Dataset,
    Experts,
    Model,
    Output,
    Samples,
    Seed,
    Seqlen,
    Writing,
    parse_dtype,
    parse_share,
    reading,
    takes,
)
from tilepress.cli.making import Words, experts_text, make, result_text, say_next
from tilepress.cli.terminal import table
from tilepress.formats import UsageError

EXAMPLE = "tilepress compress quantize MODEL -o int8 --dataset text.jsonl"
_ADVICE = "a pretrained model may lose several times what it has to: --dataset TEXT avoids it, or with no text --dataset self or random"
_MASSIVE = 300  # times the root mean square of a usual token: only tokens that serve as a sink come near


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
        str | None,
        typer.Option(
            metavar="off|learn|auto|ALPHA",
            help="Move outliers of the inputs into the weights: by factors with the least noise, or SmoothQuant's with the best alpha of "
            "each input or one from 0 to 1.  [default with text: learn; auto for static inputs]",
            show_default=False,
        ),
    ] = None,
    rounding: Annotated[
        str | None,
        typer.Option(
            metavar="nearest|gptq",
            help="How weights are rounded; gptq needs text.  [default: gptq where --dataset is given and --smooth is not]",
            show_default=False,
        ),
    ] = None,
    dynamic: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Of all layers the share, at most, whose inputs get a scale per token because one static range serves them worst.  "
            "[default: 10% where --smooth is not given]",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Of all linear weights the share, at most, that stays in 16 bits because INT8 costs these layers most.  "
            "[default with text and scales per token: 5%; 0 for none]",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="int8",
            help="Quantize the output head too, for models that do not tie it to the embedding.  [default: 16 bits]",
            show_default=False,
        ),
    ] = None,
    experts: Experts = "routed",
    dataset: Dataset = None,
    nsamples: Samples = None,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    bos: Bos = "auto",
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
    tensor          one, calibrated      yes   fair      yes   W8A8; the worst layers per token
    tensor-asym     one + zero point     yes   fair      yes   W8A8 + zero point
    channel         folded into weights  yes   good      yes   W8A8
    tensor-dynamic  one, run time        no    least     no    W8A8 + two passes
    none            not quantized        no    best      yes   W8A16, small batch

    Of sparse weights, none keeps the zeros unstored: bitmaps of INT8 values.
    With the cuda extra and a card from sm_80 on the kernels are our own; elsewhere references serve, no faster than dense.
    Recommended: --dataset with text like what the model will see, and nothing else. Factors then take outliers out of the inputs, and GPTQ
    rounds the weights; without text a pretrained model can lose several times as much. With no text at hand: --dataset self, or random, which
    finds the factors in seconds. Measured figures: docs/int8.md.
    """
    chosen = None
    if observer is not None:
        chosen = tilepress.Observer(observer) if percentile is None else tilepress.Observer(observer, percentile)
    if percentile is not None and observer != "percentile":
        raise UsageError("--percentile goes with --observer percentile", "add it, or leave --percentile out")
    share, text = None if dynamic is None else parse_share(dynamic), None
    settings = weights, activations, chosen, smooth, parse_dtype(dtype), how.ignored, rounding, share
    kept = None if keep is None else parse_share(keep)
    recipe = tilepress.Quantize(*settings, kept, experts, head)
    if recipe.needs_text or dataset is not None:
        text = reading(dataset, nsamples, seqlen, seed, bos)
    elif nsamples is not None or seqlen is not None or bos != "auto":
        raise UsageError(
            f"--activations {activations} without --smooth reads no text, but --nsamples, --seqlen or --bos is given",
            "add --dataset to calibrate on it, or leave them out",
        )
    if make(model, output, recipe, text, how, Words("quantizing", _result_text)):
        say_next(output, model, how)


def _result_text(facts: dict) -> str:
    return result_text(facts, "", _layers_text(facts), "")


def _layers_text(facts: dict) -> str:
    """Return the five worst layers, and what calibration saw and left alone."""
    layers, calibration = facts["report"]["layers"], facts.get("calibration")
    per_channel = facts["settings"]["activations"] == "channel"

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.4%}"

    rows = [
        [layer["name"], f"{layer['snr_db'] or 0:.1f} dB", share(layer["clip_share"]), share(layer["output_error"])]
        for layer in layers[:5]
    ]
    title = f"  {len(layers)} linear weights in INT8; the worst:"
    lines = [table(title, ["weight", "weight SNR", "inputs clipped", "output error"], rows)]
    if facts["settings"]["activations"] == "tensor-dynamic":
        lines.append("\n  vLLM refuses inputs with one scale at run time; tilepress and transformers take them")
    if facts["settings"].get("head") and calibration is None:
        lines.append(
            "\n  head       in INT8; what that costs was not measured: `tilepress eval perplexity --base` does"
        )
    if calibration is None:
        lines.append("\n  output errors were not measured: no --dataset")
        if facts["settings"]["activations"] == "token":
            lines.append(f"  {_ADVICE}")
        return "\n".join(lines)
    lines.append(f"\n  calibrated on {calibration['tokens']:,} tokens in {calibration['windows']} windows")
    lines += experts_text(calibration) + _statistics_text(calibration["inputs"])
    if "expected_kl" in calibration:
        lines.append(
            f"  expected   a KL divergence of about {calibration['expected_kl']:.2g} from the model as it was, to a factor of 4: "
            "eval perplexity --base measures it"
        )
    if head := calibration.get("head"):
        lines.append(
            f"  head       INT8 alone costs a KL divergence of {head['kl']:.2g} and {head['perplexity']:+.2%} of the perplexity on "
            f"{head['tokens']:,} of these tokens"
        )
    if kept := [name for item in calibration["inputs"] if item.get("kept") for name in item["weights"]]:
        lines.append(
            f"  16 bits    {len(kept)} weights, which INT8 costs most: {', '.join(kept[:3])}{' …' if len(kept) > 3 else ''}"
        )
    smoothed = [item for item in calibration["inputs"] if item.get("folded_into")]
    alone = [item for item in calibration["inputs"] if "left_alone" in item]
    done, not_done = ("per channel", "left per tensor") if per_channel else ("smoothed   ", "not smoothed")
    if smoothed:
        lines.append(
            f"  {done} {len(smoothed)} of {len(smoothed) + len(alone)} inputs, the factors folded into what makes them"
        )
    for reason in sorted({item["left_alone"] for item in alone}):
        names = [item["weights"][0] for item in alone if item["left_alone"] == reason]
        lines.append(f"  {not_done} {len(names)} x {reason}: {', '.join(names[:2])}{' …' if len(names) > 2 else ''}")
    return "\n".join(lines)


def _statistics_text(inputs: list[dict]) -> list[str]:
    """Return what the inputs' statistics say: massive activations, and the layers that have a scale per token for them."""
    lines = []
    massive = sorted((i for i in inputs if i.get("massive", 0) >= _MASSIVE), key=lambda item: -item["massive"])
    if massive:
        told = [f"{i['weights'][0]} (up to {i['reach']:,.0f}, {i['massive']:,.0f} times the usual)" for i in massive]
        lines.append(
            f"  massive    {len(massive)} of {len(inputs)} inputs have values of an attention sink: {', '.join(told[:3])}"
            f"{' …' if len(told) > 3 else ''}"
        )
    excepted = [name for item in inputs if item.get("per_token") for name in item["weights"]]
    if excepted:
        more = " …" if len(excepted) > 3 else ""
        lines.append(
            f"  per token  {len(excepted)} weights' inputs, which a static range serves worst: {', '.join(excepted[:3])}{more}"
        )
    elif massive and any("range" in item for item in massive):
        lines.append(
            "  a static range cannot hold these and usual values: --dynamic 10% gives the worst layers a scale per token"
        )
    return lines
