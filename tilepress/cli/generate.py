"""`tilepress generate`: what a model answers to one prompt."""

import json
import sys
from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Device, Json, Model, Quiet, Revision, Threads, Trust, parse_dtype
from tilepress.cli.terminal import plain, quiet_libraries, say, settle_threads
from tilepress.formats import UsageError

EXAMPLE = 'tilepress generate pruned "The capital of France is"'

NewTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0: always the most likely token; higher: more chance.  [default: as the model's generation_config.json]",
        show_default=False,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Draw from the most likely tokens of this share.", show_default=False),
]
DrawSeed = Annotated[int, typer.Option("--seed", help="Of what is drawn.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Message that a conversation begins with.", show_default=False)
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="Of activations and dense weights; auto: the checkpoint's, on a CPU float32.",
    ),
]


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text; - reads it from stdin.", show_default=False)],
    new_tokens: NewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: DrawSeed = 0,
    raw: Raw = False,
    system: System = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
    revision: Revision = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let MODEL, dense or an artifact, answer PROMPT: through its chat template if it has one, else by going on with the text.

    The text goes to stdout as it comes, its speed to stderr.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("the prompt is empty", "give some text")
    quiet_libraries()
    settle_threads(threads, quiet)
    found = tilepress.generate(
        model,
        text,
        new_tokens=new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        raw=raw,
        system=system,
        device=device,
        dtype=parse_dtype(dtype) or "auto",
        trust_remote_code=trust_remote_code,
        revision=revision,
        on_text=None if json_ else show_piece,
    )
    facts = found.to_json()
    print(json.dumps(facts, indent=2) if json_ else "")
    if not quiet and not json_:
        say(f"{speed_line(facts)}; {found.device}, decoded by {found.decoded_by}")


def show_piece(text: str) -> None:
    """Print a piece of an answer at once; what a model writes moves no cursor."""
    print(plain(text, keep="\n\t"), end="", flush=True)


def speed_line(facts: dict) -> str:
    """Return how many tokens an answer has, and how fast they came."""
    rate = "" if facts["tokens_per_s"] is None else f", then {facts['tokens_per_s']:.1f} a second"
    ended = "" if facts["ended"] else " (as many as were allowed)"
    first = f"the first after {1000 * facts['first_token_s']:.0f} ms{rate}"
    return f"{facts['prompt_tokens']} -> {facts['tokens']} tokens{ended}, {first}"
