"""`tilepress compare`: two models side by side."""

from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Device, Json, JsonFile, Quiet, Threads, Trust, parse_dtype
from tilepress.cli.generate import Dtype, NewTokens, Raw
from tilepress.cli.terminal import Bar, check_writable, plain, quiet_libraries, settle_threads, show, with_error

EXAMPLE = 'tilepress compare MODEL int8 --prompt "Why is the sky blue?"'


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder or hub id, as a rule the dense one.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Folder or hub id of the same vocabulary.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Prompt; repeatable.  [default: five of our own]", show_default=False),
    ] = None,
    new_tokens: NewTokens = 64,
    raw: Raw = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
    output: JsonFile = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what A and B write after the same prompts.

    Below stands how far B's next tokens are from A's on A's answers.

    Both answer greedily. KL divergence and the share of same top tokens are of so few tokens a hint; `eval perplexity --base` measures on a text.
    """
    quiet_libraries()
    settle_threads(threads, quiet)
    check_writable(output)
    chosen = {} if prompt is None else {"prompts": tuple(prompt)}
    with Bar("comparing", quiet) as bar:
        found = tilepress.compare(
            a,
            b,
            **chosen,
            new_tokens=new_tokens,
            raw=raw,
            device=device,
            dtype=parse_dtype(dtype) or "auto",
            trust_remote_code=trust_remote_code,
            progress=bar.at,
        )
    show(found.to_json(), output, _text, json_)


def _text(found: dict) -> str:
    """Return each prompt with both answers, then the figures over all."""
    parts = []
    for pair in found["pairs"]:
        same = f"{pair['alike']} of {pair['tokens']} tokens alike before they part"
        costs = f"KL divergence {pair['kl_divergence']:.4f}, same top token {pair['same_top']:.0%}"
        answers = [f"  {name}: {_indented(pair[key])}" for name, key in (("A", "of_a"), ("B", "of_b"))]
        parts.append("\n".join([_indented(f"> {pair['prompt']}"), *answers, f"  {same}; {costs}"]))
    distance = found["distance"]
    kl, same = distance["kl_divergence"], distance["top1_agreement"]
    told = f"A = {found['a']}, B = {found['b']}; on {found['device']}, over all of A's answers:"
    figures = f"  KL divergence {with_error(kl['mean'], kl['stderr'])}, same top token {same:.1%}"
    return plain("\n\n".join([*parts, f"{told}\n{figures}"]), keep="\n\t")


def _indented(text: str) -> str:
    return text.replace("\n", "\n     ")
