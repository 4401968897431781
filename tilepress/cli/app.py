"""The `tilepress` command: its commands, errors as two lines, exit codes. Heavy imports happen inside the commands, so `--help` is quick."""

import contextlib
import errno
import os
import shlex
import signal
import sys
from typing import Annotated

import typer

from tilepress.cli import terminal
from tilepress.cli.commands import Group, register
from tilepress.cli.terminal import EXIT_INTERRUPTED, plain, say
from tilepress.formats import TilepressError, lack_of_memory
from tilepress.version import __version__

COMMANDS = {
    "Try": ["demo", "generate", "chat", "compare"],
    "Look": ["inspect", "verify", "report", "models", "env"],
    "Change and share": ["convert", "push"],
}
COMPRESS = {"One recipe": ["prune", "recover", "quantize", "kv"], "Several": ["stack"]}
EVALUATE = {"What it costs": ["perplexity", "tasks"], "What it brings": ["speed", "kernels"]}
_LOOKS = {"cls": Group, "no_args_is_help": True}

app = typer.Typer(
    **_LOOKS,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compress a language model into a smaller, faster artifact, and prove what it costs.",
    epilog="Start with: tilepress demo",
)
compress = typer.Typer(**_LOOKS, help="Turn a checkpoint into a compressed artifact.")
evaluate = typer.Typer(**_LOOKS, help="Measure what an artifact costs and brings.")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit


app.add_typer(compress, name="compress", rich_help_panel="Compress and measure")
app.add_typer(evaluate, name="eval", rich_help_panel="Compress and measure")
register(compress, COMPRESS)
register(evaluate, EVALUATE)
register(app, COMMANDS)


class _Interrupt:
    """Remembers a Ctrl-C or a SIGTERM: native code may turn the KeyboardInterrupt into an error of its own."""

    seen = False
    code = EXIT_INTERRUPTED

    def __call__(self, number: int, *_) -> None:
        self.seen, self.code = True, 128 + number
        raise KeyboardInterrupt(number)


def main() -> None:
    """Entry point: runs the command and turns every failure into two lines and an exit code."""
    # Before torch is imported: threads that wait then sleep, and do not spin away the time of those that they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "LOCAL_RANK" in os.environ:  # of torchrun: that a rank is gone one of the others tells in our words
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    interrupt = _Interrupt()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    if sys.stdout is not None:  # closed
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does with bytes of a name that are no text
    try:
        code = app(standalone_mode=False) or 0
        print(end="", flush=True)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:
        if interrupt.seen:
            code = EXIT_INTERRUPTED
        elif os.environ.get("TILEPRESS_DEBUG") == "1":
            raise
        else:
            code = _explain(error, hushed=not _speaks())
    if interrupt.seen and code:
        code = interrupt.code
        if not _speaks():
            os._exit(code)
        command = shlex.join(word for word in sys.argv[1:] if word not in ("--resume", "--overwrite"))
        writes = sys.argv[1:2] in (["compress"], ["convert"])
        program = "torchrun … -m tilepress" if "LOCAL_RANK" in os.environ else "tilepress"
        say("interrupted" + (f"; continue with: {program} {command} --resume" if writes else ""))
    with contextlib.suppress(OSError):
        print(end="", flush=True)
        sys.exit(code)
    os._exit(code)  # what is left for a full disk or a closed pipe, Python would complain about once more


def _speaks() -> bool:
    """Return whether this process tells the user how it ended: of those that torchrun started the first that asks."""
    if "LOCAL_RANK" not in os.environ:
        return True
    from tilepress.ranks import first_to_tell

    return first_to_tell()


def _explain(error: Exception, hushed: bool = False) -> int:
    """Tell an error in two lines, unless another rank has told why all of them end; return the exit code."""
    with terminal.hushed(hushed):
        return _told(error)


def _told(error: Exception) -> int:
    if isinstance(error, TilepressError):
        say(f"error: {plain(error.message)}")
        if error.hint:
            say(f"hint: {plain(error.hint)}")
        return error.exit_code
    if type(error).__name__ == "NoArgsIsHelpError":  # typer's private name for a command without arguments
        say(error.format_message())
        return 2
    if hasattr(error, "format_message"):  # a usage error that typer found in the words themselves
        say(f"error: {error.format_message()}")
        say("hint: add --help to the command to see what it takes")
        return 2
    if isinstance(error, OSError) and error.filename:
        say(f"error: {plain(str(error.filename))}: {error.strerror}")
        say("hint: check the path and its permissions")
        return 1
    if isinstance(error, BrokenPipeError):  # whoever read the output has seen enough
        return 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        say(f"error: the output cannot be written: {error.strerror}")
        say("hint: free some space, or send it somewhere else")
        return 1
    if (told := lack_of_memory(error)) is not None:
        say(f"error: there is not enough memory: {told}")
        say("hint: free some, allow more (ulimit -v, the job's limit), or work on a smaller model")
        return 1
    say(f"error: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    say("hint: this was not foreseen; TILEPRESS_DEBUG=1 shows where it happened")
    return 1


if __name__ == "__main__":
    main()
