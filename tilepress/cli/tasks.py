"""`tilepress eval tasks`: what a model answers."""

from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import (
    Bos,
    Device,
    Json,
    JsonFile,
    Model,
    Quiet,
    Report,
    Revision,
    Trust,
    WriteCard,
    parse_dtype,
)
from tilepress.cli.terminal import (
    Bar,
    cell,
    check_card,
    check_report,
    check_writable,
    quiet_libraries,
    show,
    show_card,
    show_report,
    table,
    with_error,
)

EXAMPLE = "tilepress eval tasks pruned --base MODEL --tasks hellaswag --limit 1000"


def tasks(
    model: Model,
    tasks: Annotated[str, typer.Option(metavar="LIST", help="Of hellaswag.")] = "hellaswag",
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
    limit: Annotated[int | None, typer.Option(help="Items of each task at most.", show_default=False)] = None,
    bos: Bos = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Of activations and dense weights.")
    ] = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    revision: Revision = None,
    output: JsonFile = None,
    report: Report = None,
    write_card: WriteCard = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Share of multiple-choice questions that MODEL answers rightly, scored as lm-evaluation-harness does without examples.

    acc_norm divides the log-likelihood of an answer by its characters, acc_bytes by its bytes. A calibrated attention cache is simulated.
    """
    check_report(report)
    check_card(model, write_card)
    check_writable(output)
    quiet_libraries()
    with Bar("tasks", quiet) as bar:
        found = tilepress.tasks(
            model,
            tasks.split(","),
            dataset,
            base=base,
            limit=limit,
            bos=bos,
            device=device,
            dtype=parse_dtype(dtype) or "auto",
            trust_remote_code=trust_remote_code,
            revision=revision,
            progress=bar.at,
        )
    show(found.to_json(), output, _text, json_)
    show_report([found.to_json()], report)
    show_card(model, found.to_json(), write_card)


def _text(result: dict) -> str:
    """Return a row for each task and model, and what ran."""
    rows, protocol = [], result["protocol"]

    def row(task: str, model: str, scores: dict, *told: str) -> list[str]:
        cells = [with_error(scores[name], scores.get(f"{name}_stderr")) for name in ("acc", "acc_norm", "acc_bytes")]
        return [task, model, *cells, *told]

    head = ["task", "model", "acc", "acc_norm", "acc_bytes"]
    if result["base_model"]:
        head += ["change of acc_norm", "flips"]
    for name, scores in result["results"].items():
        told = []
        if "base" in scores:
            rows.append(row(name, f"{result['base_model']} (base)", scores["base"], "", ""))
            change = with_error(scores["acc_norm_change"], scores.get("acc_norm_change_stderr"))
            told = [change, cell(scores["flips"], ".2%")]
        rows.append(row(name, result["model"], scores, *told))
    sizes = ", ".join(f"{scores['items']:,} items of {scores['dataset']}" for scores in result["results"].values())
    title = f"{sizes}; {protocol['dtype']} on {protocol['device']}"
    if protocol["limit"]:
        title += f" (quick: at most {protocol['limit']} items)"
    ran = "; ".join(f"{count} layer{'s' if count > 1 else ''} by {path}" for path, count in result["paths"].items())
    return table(title, head, rows) + f"\n\n  ran {ran}; {result['seconds']:.1f} s"
