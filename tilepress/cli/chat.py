"""`tilepress chat`: a conversation with a model."""

import signal
import sys

import tilepress
from tilepress.cli.flags import Model, takes
from tilepress.cli.generate import Answering, NewTokens, show_piece, speed_line
from tilepress.cli.terminal import plain, quiet_libraries, say, settle_threads
from tilepress.formats import UsageError

EXAMPLE = 'tilepress chat int8 --system "Answer in one sentence."'


@takes(Answering)
def chat(model: Model, new_tokens: NewTokens = 512, *, how: Answering) -> None:
    """Talk with MODEL, dense or an artifact, a line at a time. Its speed stands below each answer.

    /clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer. A model without a chat template goes on with each line by itself.
    """
    quiet_libraries()
    settle_threads(how.threads, how.quiet)
    talk = tilepress.Chat(model, **how.loading())
    if not how.quiet:
        way = "its chat template" if talk.templated else "no chat template: it goes on with each line by itself"
        say(f"{model} on {talk.model.device}, {way}; decoded by {talk.decoded_by()}; /exit ends")
    drawn = {"new_tokens": new_tokens, "temperature": how.temperature, "top_p": how.top_p}
    for turn, line in enumerate(_lines(how.quiet)):
        if line.strip() == "/exit":
            break
        if line.strip() == "/clear":
            talk.clear()
        elif line.strip():
            _answer(talk, line, drawn | {"seed": how.seed + turn}, how.quiet)


def _lines(quiet: bool):
    """Yield the lines of a person, who sees a prompt, or of a pipe."""
    asks = sys.stdin.isatty() and not quiet
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.rstrip("\n")


def _answer(talk, line: str, drawn: dict, quiet: bool) -> None:
    """Print an answer and its speed. A conversation goes on after what the model cannot take, and after a Ctrl-C."""
    try:
        answer = talk.say(line, **drawn, on_text=show_piece)
    except UsageError as error:
        if not sys.stdin.isatty():
            raise
        say(f"error: {plain(error.message)}")
        say(f"hint: {plain(error.hint)}")
        return
    except KeyboardInterrupt as stopped:
        if stopped.args[:1] == (signal.SIGTERM,) or not sys.stdin.isatty():
            raise
        print()
        say("stopped; this answer is not part of the conversation")
        return
    print()
    if not quiet:
        say(f"[{speed_line(answer.to_json())}]")
