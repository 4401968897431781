"""How commands look and begin: help in panels, choices and paths checked before torch is imported, and a log of what was said."""

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Annotated, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from tilepress.cli.terminal import keep_log, log
from tilepress.formats import UsageError, is_address
from tilepress.version import __version__

PANELS = {  # options that many commands share, by the panel of the help that they stand in; all others come before
    "Text": ("dataset", "nsamples", "seqlen", "seed", "bos", "eval_dataset"),
    "Model": ("ignore", "trust_remote_code", "revision"),
    "Machine": ("device", "threads", "card"),
    "Several workers": ("workers", "rank", "world_size", "ray"),
    "Output": (
        *("output", "overwrite", "resume", "dry_run", "report", "write_card", "json_", "quiet", "verbose", "log_file"),
    ),
}
_OTHERS = "Options"
_WORDS = {int: "NUMBER", int | None: "NUMBER", float: "NUMBER", float | None: "NUMBER", str: "TEXT", str | None: "TEXT"}
# What help lists and more is taken: layouts from elsewhere, sizes that heads divide into, dtypes of few uses; and what has an error of its own.
_OPEN = ("ray", "format", "to", "group_size", "dtype", "what")
_MODELS = ("model", "base", "a", "b")

Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Say every step with its time, every weight of a plan, and where an unforeseen error happened.",
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append every step and all that is said, with times.", show_default=False),
]


class Command(TyperCommand):
    """A command whose help has panels, and which refuses what cannot be before it imports anything heavy."""

    def format_options(self, ctx, formatter) -> None:
        for panel, records in self.panels(ctx).items():
            with formatter.section(panel):
                formatter.write_dl(records)

    def collect_usage_pieces(self, ctx) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def panels(self, ctx) -> dict[str, list[tuple[str, str]]]:
        """Return the panels of the help: of each the parameters, with what is said of them."""
        panels: dict[str, list] = {"Arguments": [], _OTHERS: [], **{panel: [] for panel in PANELS}}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                own = "Arguments" if param.param_type_name == "argument" else _OTHERS
                if own == "Arguments":
                    record = param.metavar or param.name.upper(), record[1]  # typer adds the type, which says less
                panels[next((p for p, names in PANELS.items() if param.name in names), own)].append(record)
        return {panel: records for panel, records in panels.items() if records}

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:  # completion of a shell
            for param in self.params:
                _check(param, ctx.params.get(param.name))
        return rest


def _check(param, value: object) -> None:
    """Raise UsageError for a word that is none of an option's, and for a path at which there is no folder."""
    choices = (param.metavar or "").split("|")
    closed = len(choices) > 1 and param.name not in _OPEN and all(word == word.lower() for word in choices)
    if closed and value not in (None, param.default) and str(value) not in choices:
        raise UsageError(f"{param.opts[0]} {value} is unknown", f"choose one of {', '.join(choices)}")
    for run in value if param.name == "runs" and isinstance(value, list | tuple) else ():
        if not Path(run).exists():
            raise UsageError(f"there is no {run}", "give folders of artifacts, and JSON files of `eval … -o FILE`")
    if param.name in _MODELS and value and not is_address(str(value)):
        path, said = Path(value).expanduser(), str(value)
        a_path = isinstance(value, Path) or said.startswith((".", "/", "~")) or said.count("/") > 1
        if a_path and not path.is_dir():
            hint = "give a folder with config.json and *.safetensors"
            raise UsageError(f"{path} is not a folder", hint if isinstance(value, Path) else f"{hint}, or a hub id")


class Group(TyperGroup):
    """A group whose help lists commands by what one does with them."""

    def format_commands(self, ctx, formatter) -> None:
        panels: dict[str, list] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            panels.setdefault(command.rich_help_panel or "Commands", []).append((name, command))
        width = max(len(name) for rows in panels.values() for name, _ in rows)
        # Typer has groups after single commands; what they do is what the program is for.
        for panel, rows in sorted(panels.items(), key=lambda item: not isinstance(item[1][0][1], TyperGroup)):
            with formatter.section(panel):
                limit = formatter.width - 6 - width
                formatter.write_dl([(name.ljust(width), c.get_short_help_str(limit)) for name, c in rows])


def register(group: typer.Typer, panels: dict[str, list[str]]) -> None:
    """Add commands by panel: of the module of each name in `tilepress.cli` the function that is called like it, with its example below the help."""
    for panel, names in panels.items():
        for name in names:
            module = import_module(f"tilepress.cli.{name}")
            example = getattr(module, "EXAMPLE", None)
            how = {"cls": Command, "epilog": example and f"Example: {example}", "rich_help_panel": panel}
            group.command(name, **how)(_logged(getattr(module, name)))


def _logged(command: Callable) -> Callable:
    """Give a command `-v` and `--log-file`."""
    signature = inspect.signature(command)
    added = [
        inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose),
        inspect.Parameter("log_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=LogFile),
    ]

    @functools.wraps(command)
    def run(verbose: bool, log_file: Path | None, **words):
        if verbose:
            os.environ.setdefault("TILEPRESS_DEBUG", "1")
        with keep_log(log_file, verbose):
            log(f"tilepress {__version__}: {' '.join(sys.argv[1:])}")
            started = time.monotonic()
            try:
                found = command(**words)
            except BaseException as error:
                code = getattr(error, "exit_code", None)
                told = f"exit code {code}" if code is not None else type(error).__name__
                log(f"ended by {told}{f': {error}' if str(error) else ''} after {time.monotonic() - started:.1f} s")
                raise
            log(f"done in {time.monotonic() - started:.1f} s")
        return found

    own = [_in_words(p) for p in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=own + added)
    run.__annotations__ = {p.name: p.annotation for p in own + added}
    return run


def _in_words(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of a command whose help names values by a word."""
    hint = parameter.annotation
    kind, *told = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if kind in _WORDS and told and told[0].metavar is None:
        hint = Annotated[kind, copy(told[0])]
        get_args(hint)[1].metavar = _WORDS[kind]
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)
