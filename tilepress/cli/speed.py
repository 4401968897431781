"""`tilepress eval speed`: what a decode loop takes, and where the time goes."""

from typing import TYPE_CHECKING, Annotated

import typer

from tilepress.cli.flags import Measuring, Model, Seed, parse_batches, parse_dtype, takes
from tilepress.cli.measuring import begin, ranks, tell
from tilepress.cli.terminal import cell, say, table
from tilepress.formats import UsageError

if TYPE_CHECKING:
    from tilepress.bench.speed import Protocol
    from tilepress.formats.checkpoint import Checkpoint

EXAMPLE = "tilepress eval speed pruned --base MODEL --batch 1,16 --context 8192"
_KERNELS_SHOWN = 6


@takes(Measuring)
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
    seed: Seed = 0,
    *,
    how: Measuring,
) -> None:
    """Time MODEL's decode loop.

    First token, each further one, memory, and where a step's time goes; with --base both in one run.

    A calibrated attention cache of MODEL is used, --base has none. On a card only kernels are timed. Several cards share each model under torchrun:
    torchrun --nproc-per-node 2 -m tilepress eval speed …
    """
    begin(model, how)
    from tilepress.bench.speed import Protocol, Subject, speed as measure
    from tilepress.device import find_device
    from tilepress.formats.checkpoint import open_model
    from tilepress.runtime import loader

    protocol = Protocol(tuple(parse_batches(batch)), context, new_tokens, runs, chunk, seed)
    device, kind = find_device(how.device), parse_dtype(how.dtype) or "auto"
    checkpoint = open_model(model, how.revision)
    for each in (checkpoint, *([] if base is None else [open_model(base)])):
        _check_room(each, protocol)
    path = str(checkpoint.path)
    with ranks(device, how.output) as (group, is_first):

        def load(path: str, kv: bool):
            return loader.load(path, device, kind, how.trust_remote_code, kv=kv, group=group)

        subject = Subject(model, lambda: load(path, True))
        other = None if base is None else Subject(base, lambda: load(base, False))
        found = measure(subject, other, protocol, say if is_first and not how.quiet else lambda at: None, group)
    if is_first:
        tell(found, speed_text, model, how)


def _check_room(checkpoint: "Checkpoint", protocol: "Protocol") -> None:
    """Raise UsageError where sequences would be longer than a model's positions: RoPE has values beyond, with which nobody would run it."""
    from tilepress.text import max_positions

    longest = max_positions(checkpoint.text_config)
    if longest is None or protocol.most <= longest:
        return
    beside = protocol.most - protocol.context
    raise UsageError(
        f"sequences of {protocol.most:,} tokens ({protocol.context:,}, and {beside:,} for what is timed) are longer than the "
        f"{longest:,} positions of {checkpoint.name}",
        f"use --context {longest - beside}" if longest > beside else "use fewer --new-tokens",
    )


def speed_text(found: dict) -> str:
    """Return a row for each model and batch, then what ran and where a step's time went."""
    protocol, env = found["protocol"], found["env"]
    where = env["card"] or f"{env['threads']} threads of a CPU"
    gpus = max(row["gpus"] for row in found["rows"])
    where = where if gpus == 1 else f"{gpus} x {where} (memory of one)"
    title = f"{where}, torch {env['torch']}: context {protocol['context']}, {protocol['new_tokens']} steps, {protocol['runs']} runs (± half of their spread)"
    head = ["model", "batch", "weights GiB", "KV GiB", "peak GiB", "first token ms", "per token ms"]
    head += ["tokens/s", "per GPU-second", "of read bandwidth", "speed-up"]
    rows, notes = [], []
    for row in found["rows"]:
        name = row["model"] + (" (base)" if row["is_base"] else "")
        if not row["fits"]:
            rows.append([name, str(row["asked"]), "does not fit", *[""] * (len(head) - 3)])
            continue
        rows.append(
            [
                name,
                str(row["batch"]),
                f"{row['weights_gib']:.3f}",
                *(cell(row[part], ".3f") for part in ("kv_gib", "peak_gib")),
                *(_with_spread(row, part, ".2f") for part in ("ttft_ms", "tpot_ms")),
                *(_with_spread(row, part, ".1f") for part in ("tokens_per_s", "tokens_per_gpu_s")),
                cell(row["share_of_read"], ".0%"),
                _with_spread(row, "speedup", ".2f") if "speedup" in row else "",
            ]
        )
        ran = "; ".join(f"{count} x {path}" for path, count in row["paths"].items())
        notes.append(f"  {name}, batch {row['batch']}: cache {row['cache']}; ran {ran}")
        longest = [f"{part['share']:.0%} {part['kernel'][:60]}" for part in row["step"][:_KERNELS_SHOWN]]
        notes.append(f"    of a step's time: {', '.join(longest)}")
    return table(title, head, rows) + f"\n\n  {protocol['filled']}\n" + "\n".join(notes)


def _with_spread(row: dict, name: str, form: str) -> str:
    return f"{row[name]:{form}} ± {row[f'{name}_spread'] / 2:.1%}"
