"""`tilepress eval perplexity`: what a model costs on a text."""

from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Measuring, Model, parse_share, takes
from tilepress.cli.measuring import begin, ran, ranks, tell
from tilepress.cli.terminal import EXIT_CHECK_FAILED, Bar, say, table, with_error
from tilepress.formats import UsageError

EXAMPLE = "tilepress eval perplexity pruned --base MODEL --dataset text.jsonl --seqlen 1024"


@takes(Measuring)
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
    bos: Annotated[
        str,
        typer.Option(
            metavar="auto|always|never|first",
            help="Begin every window with the BOS; auto: if the tokenizer adds one. first: only the text, as papers do.",
        ),
    ] = "auto",
    noise_floor: Annotated[
        bool,
        typer.Option("--noise-floor", help="Also measure the dense model in a wider float: what rounding alone costs."),
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Score so many windows at most.", show_default=False)] = None,
    max_increase: Annotated[
        str | None,
        typer.Option(metavar="5%", help="Exit with 3 if perplexity rises by more over --base.", show_default=False),
    ] = None,
    kv: Annotated[
        str,
        typer.Option(
            metavar="sim|decode|off",
            help="With a calibrated cache: simulate it in a forward pass, or also send half of each window through it token by token (slow). "
            "--base has none.  [default: sim]",
            show_default=False,
        ),
    ] = "auto",
    *,
    how: Measuring,
) -> None:
    """Measure the perplexity of MODEL on a text.

    With --base also its KL divergence from that model and the share of equal top tokens, with paired errors.

    Several cards share each model under torchrun: torchrun --nproc-per-node 2 -m tilepress eval perplexity …
    """
    allowed = parse_share(max_increase) if max_increase is not None else None
    if allowed is not None and base is None:
        raise UsageError("--max-increase compares with a base that is not given", "add --base MODEL")
    begin(model, how)
    with ranks(how.device, how.output) as (group, is_first), Bar("perplexity", how.quiet or not is_first) as bar:
        found = tilepress.perplexity(
            model,
            dataset,
            base=base,
            recipe=recipe,
            seqlen=seqlen,
            stride=stride,
            limit=limit,
            bos=bos,
            noise_floor=noise_floor,
            kv=kv,
            group=group,
            progress=bar.at,
            **how.loading(),
        )
    if not is_first:
        return
    tell(found.to_json(), _text, model, how)
    if allowed is not None and (increase := found.perplexity / found.comparison.base.perplexity - 1) > allowed:
        say(f"check failed: perplexity rises by {increase:.2%}, more than the {allowed:.2%} allowed")
        raise typer.Exit(EXIT_CHECK_FAILED)


def _text(result: dict) -> str:
    """Return the protocol, a row a model, and what ran."""
    protocol = result["protocol"]
    title = f"{protocol['dataset']}: recipe {protocol['recipe']}, {result['windows']} windows of {protocol['seqlen']} tokens"
    if protocol["recipe"] == "strided":
        title += f", stride {protocol['stride']}"
    if protocol["window_start"]:
        title += f", each beginning with {' '.join(protocol['window_start'])}"
    title += f", {result['tokens']:,} scored, {protocol['dtype']} on {protocol['device']}"
    if protocol["ranks"] > 1:
        title += f", {protocol['ranks']} ranks"
    if protocol["limit"]:
        title += f" (quick: at most {protocol['limit']} windows)"

    def first_cells(name: str, scores: dict) -> list[str]:
        return [name, with_error(scores["perplexity"], scores["perplexity_stderr"]), f"{scores['bits_per_byte']:.4f}"]

    def distance_cells(found: dict) -> list[str]:
        return [
            with_error(found["delta_nll"], found["delta_nll_stderr"]),
            with_error(found["kl_divergence"]["mean"], found["kl_divergence"]["stderr"]),
            f"{found['top1_agreement']:.2%}",
        ]

    head, rows, floor = ["model", "perplexity", "bits/byte"], [], result.get("noise_floor")
    row = first_cells(result["model"], result)
    if "base" in result or floor:
        head += ["nll change", "KL divergence", "same top token"]
    if "base" in result:
        rows.append([*first_cells(f"{result['base']['model']} (base)", result["base"]), "", "", ""])
        row += distance_cells(result)
    elif floor:
        row += ["", "", ""]
    if floor:
        name = f"noise floor: {floor['of']} in {floor['dtype']}"
        rows.append([name, f"{floor['perplexity']:.4f}", "", *distance_cells(floor)])
    if "kv_cache" in result:
        cache = result["kv_cache"]
        title += f"\nattention cache {cache['format']}: {cache['measured']}"
        if "sim_perplexity" in cache:
            title += (
                f"\n  simulated: {cache['sim_perplexity']:.4f}, the cache is {cache['decode_over_sim']:+.3%} from that"
            )
    return table(title, head, [*rows, row]) + ran(result)
