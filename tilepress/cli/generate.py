"""`tilepress generate`: what a model answers to one prompt."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

import tilepress
from tilepress.cli.flags import Device, Json, Model, Quiet, Revision, Threads, Trust, parse_dtype, takes
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


@dataclass(frozen=True)
class Answering:
    """The flags of every command in which a model answers a person."""

    temperature: Temperature = None
    top_p: TopP = None
    seed: DrawSeed = 0
    raw: Raw = False
    system: System = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    trust_remote_code: Trust = False
    revision: Revision = None
    quiet: Quiet = False

    def loading(self) -> dict:
        """Return the arguments of `tilepress.Chat`."""
        chosen = {name: getattr(self, name) for name in ("raw", "system", "device", "trust_remote_code", "revision")}
        return chosen | {"dtype": parse_dtype(self.dtype) or "auto"}


@takes(Answering)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text; - reads it from stdin.", show_default=False)],
    new_tokens: NewTokens = 256,
    json_: Json = False,
    *,
    how: Answering,
) -> None:
    """Let MODEL answer PROMPT.

    A model with a chat template answers through it, another goes on with the text. MODEL is dense or an artifact. The text
    goes to stdout as it comes, its speed to stderr.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("the prompt is empty", "give some text")
    quiet_libraries()
    settle_threads(how.threads, how.quiet)
    drawn = {"temperature": how.temperature, "top_p": how.top_p, "seed": how.seed}
    shown = None if json_ else show_piece
    found = tilepress.generate(model, text, new_tokens=new_tokens, **drawn, **how.loading(), on_text=shown)
    facts = found.to_json()
    print(json.dumps(facts, indent=2) if json_ else "")
    if not how.quiet and not json_:
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
