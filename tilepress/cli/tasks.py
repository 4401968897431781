"""`tilepress eval tasks`: what a model answers."""

from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Bos, Measuring, Model, parse_share, takes
from tilepress.cli.measuring import begin, ran, tell
from tilepress.cli.terminal import EXIT_CHECK_FAILED, Bar, cell, check_writable, say, table, with_error
from tilepress.formats import UsageError

EXAMPLE = "tilepress eval tasks pruned --base MODEL --tasks hellaswag --limit 1000"


@takes(Measuring)
def tasks(
    model: Model,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="hellaswag (our own scorer); or names and YAML files of lm-evaluation-harness."
        ),
    ] = "hellaswag",
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare with this model, item by item.", show_default=False)
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|HUB_ID",
            help="Rows with query, choices and gold, or as published.  [default: the task's on the hub]",
            show_default=False,
        ),
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(help="Examples before each item (harness).  [default: the task's own]", show_default=False),
    ] = None,
    min_recovery: Annotated[
        str | None,
        typer.Option(
            metavar="99%", help="Exit with 3 if the mean score over --base's is less, tasks alike.", show_default=False
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each task at most.", show_default=False)] = None,
    bos: Bos = "auto",
    *,
    how: Measuring,
) -> None:
    """Score MODEL on multiple-choice tasks.

    HellaSwag is scored here, as lm-evaluation-harness does; all other tasks by the harness itself (extra `tasks`).

    acc_norm divides the log-likelihood of an answer by its characters, acc_bytes by its bytes. A calibrated attention cache is simulated.
    """
    least = parse_share(min_recovery) if min_recovery is not None else None
    if least is not None and base is None:
        raise UsageError("--min-recovery compares with a base that is not given", "add --base MODEL")
    begin(model, how)
    check_writable(how.output)
    with Bar("tasks", how.quiet) as bar:
        found = tilepress.tasks(
            model,
            tasks.split(","),
            dataset,
            base=base,
            limit=limit,
            fewshot=fewshot,
            bos=bos,
            progress=bar.at,
            **how.loading(),
        )
    tell(found.to_json(), _text, model, how)
    if least is not None and (found.recovery is None or found.recovery[0] < least):
        told = "the base scores nothing, so no share of it is recovered"
        if found.recovery is not None:
            told = f"{found.recovery[0]:.2%} of the base's scores are recovered, less than the {least:.2%} asked for"
        say(f"check failed: {told}")
        raise typer.Exit(EXIT_CHECK_FAILED)


def _text(result: dict) -> str:
    """Return a row for each task and model, and what ran."""
    rows, protocol = [], result["protocol"]
    if protocol["scored_by"] != "tilepress":
        return _of_harness(result)

    def row(task: str, model: str, scores: dict, *told: str) -> list[str]:
        cells = [with_error(scores[name], scores.get(f"{name}_stderr")) for name in ("acc", "acc_norm", "acc_bytes")]
        return [task, model, *cells, *told]

    head = ["task", "model", "acc", "acc_norm", "acc_bytes"]
    if result["base_model"]:
        head += ["change of acc_norm", "flips", "recovery"]
    for name, scores in result["results"].items():
        told = []
        if "base" in scores:
            rows.append(row(name, f"{result['base_model']} (base)", scores["base"], "", "", ""))
            change = with_error(scores["acc_norm_change"], scores.get("acc_norm_change_stderr"))
            told = [change, cell(scores["flips"], ".2%"), _recovered(scores)]
        rows.append(row(name, result["model"], scores, *told))
    sizes = ", ".join(f"{scores['items']:,} items of {scores['dataset']}" for scores in result["results"].values())
    title = f"{sizes}; {protocol['dtype']} on {protocol['device']}"
    if protocol["limit"]:
        title += f" (quick: at most {protocol['limit']} items)"
    return table(title, head, rows) + ran(result)


def _recovered(scores: dict) -> str:
    """Return the recovery in percent, with its error."""
    if "recovery" not in scores:
        return ""
    error = scores.get("recovery_stderr")
    return f"{scores['recovery']:.2%}" + ("" if error is None else f" ± {error:.2%}")


def _of_harness(result: dict) -> str:
    """Return a row for each task and metric, and what ran."""
    from tilepress.eval.tasks import metrics_of

    rows, with_base = [], result["base_model"] is not None
    for name, scores in result["results"].items():
        for metric in metrics_of(scores):
            base = scores.get("base", {})
            row = [name, f"{scores['items']:,}", metric, with_error(scores[metric], scores[f"{metric}_stderr"])]
            told = [with_error(base[metric], base.get(f"{metric}_stderr"))] if with_base else []
            rows.append([*row, *told, *([_recovered(scores) if metric == scores["main"] else ""] if with_base else [])])
    head = ["task", "items", "metric", "model", *(["base", "recovery"] if with_base else [])]
    protocol = result["protocol"]
    title = f"lm-evaluation-harness; {protocol['dtype']} on {protocol['device']}"
    if protocol["limit"]:
        title += f" (quick: at most {protocol['limit']} items)"
    total = f"\n\n  recovery over tasks {_recovered(result)}" if "recovery" in result else ""
    return table(title, head, rows) + total + ran(result)
