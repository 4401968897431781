"""Output to the terminal: progress, tables, sizes. Words go to stderr, results to stdout."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_CHECK_FAILED, EXIT_INTERRUPTED = 3, 130
_PLAIN_EVERY_S = 10.0
_LOG = logging.getLogger("tilepress")
_hushed = False


class Bar:
    """A progress bar with the item at hand and the time left; plain lines every few seconds where stderr is no terminal."""

    def __init__(self, title: str, quiet: bool):
        self.title, self.total, self.quiet = title, 1, quiet
        self.done: int | None = None  # until it is told of work
        self._started, self._printed, self._live = time.monotonic(), time.monotonic(), None

    def __enter__(self) -> "Bar":
        if not self.quiet and sys.stderr.isatty() and not is_verbose():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[item]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._live.add_task(self.title, total=self.total, item="")
            self._live.start()
        return self

    def __exit__(self, *error) -> None:
        if self._live:
            self._live.stop()
        elif not self.quiet and not any(error) and self.done is not None:
            say(f"{self.title}: done in {time.monotonic() - self._started:.1f} s")

    def at(self, item: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of work are done, and what is at hand."""
        item = plain(item)
        log(f"{self.title}: {done} of {total}  {item}")
        self.done, self.total = done, max(total, 1)
        now = time.monotonic()
        if self._live:
            self._live.update(self._task, completed=self.done, total=self.total, item=item)
        elif not self.quiet and not is_verbose() and now - self._printed > _PLAIN_EVERY_S:
            self._printed = now
            left = (now - self._started) / self.done * (self.total - self.done) if self.done else None
            say(
                f"{self.title}: {100 * self.done // self.total} %  {item}"
                + (f"  about {left:.0f} s left" if left is not None else "")
            )


def plain(text: str, keep: str = "") -> str:
    """Return text with what moves a cursor, colours, hides or turns letters round as escapes; names in files are anyone's.

    `keep` has characters that stay: the newlines of a text of several lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def say(text: str) -> None:
    text = plain(text, keep="\n")
    if not _hushed:
        print(text, file=sys.stderr, flush=True)
    _LOG.info(text)


@contextmanager
def hushed(wanted: bool) -> Iterator[None]:
    """Say nothing on stderr while the body runs, if that is wanted: another rank says it. Errors that end it are told outside."""
    global _hushed
    before, _hushed = _hushed, wanted
    try:
        yield
    finally:
        _hushed = before


def log(text: str) -> None:
    """Tell a step to those who want every one: the log file, and stderr with `-v`."""
    _LOG.debug(plain(text, keep="\n"))


def is_verbose() -> bool:
    """Return whether the command was given `-v`."""
    return any(type(handler) is logging.StreamHandler for handler in _LOG.handlers)


@contextmanager
def keep_log(file: Path | None, verbose: bool) -> Iterator[None]:
    """Append steps and words to a file while the body runs, and with `verbose` tell the steps on stderr, too."""
    handlers: list[logging.Handler] = []
    if file is not None:
        from tilepress.formats.files import regular

        regular(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    if verbose:
        handlers.append(logging.StreamHandler(sys.stderr))
        handlers[-1].addFilter(lambda record: record.levelno == logging.DEBUG)  # words are there already
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        _LOG.addHandler(handler)
    _LOG.propagate = False
    _LOG.setLevel(logging.DEBUG if handlers else logging.CRITICAL)
    try:
        yield
    finally:
        for handler in handlers:
            _LOG.removeHandler(handler)
            handler.close()


def table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """Return aligned plain text: the first column to the left, the others to the right. It is the same in a terminal, a pipe and a README."""
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [title, ""] if title else []
    for row in [columns, *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def quiet_libraries() -> None:
    """Silence the bars and warnings of transformers and datasets: one voice is enough."""
    import logging
    import os
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def settle_threads(count: int | None, quiet: bool) -> None:
    """Compute with so many threads, and give a hint where others would be faster."""
    from tilepress.device import use_threads

    hint = use_threads(count)
    if hint and not quiet:
        say(f"hint: {hint}")


def left_alone(reasons: dict[str, str]) -> str:
    """Return a line for each reason, with the first names."""
    lines = []
    for reason in sorted(set(reasons.values())):
        names = [plain(name) for name, why in reasons.items() if why == reason]
        lines.append(
            f"  left alone {len(names)} x {plain(reason)}: {', '.join(names[:2])}{' …' if len(names) > 2 else ''}"
        )
    return "\n".join(lines)


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def with_error(value: float, stderr: float | None) -> str:
    return f"{value:.4f}" if stderr is None else f"{value:.4f} ± {stderr:.4f}"


def check_writable(output: Path | None) -> None:
    """Try out a file that the result goes to: what cannot be written is told before the work, which may fail and then leaves no empty file."""
    if output is not None:
        from tilepress.formats.artifact import disk_errors

        with disk_errors(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            there = output.exists()
            output.open("a").close()
            if not there:
                output.unlink()


def check_report(report: Path | None) -> None:
    """Raise UsageError before the work where a page cannot be made of it."""
    from importlib.util import find_spec

    from tilepress.formats import UsageError, installing

    if report is not None:
        if find_spec("plotly") is None:
            raise UsageError("--report needs plotly, which is not installed", installing("report"))
        check_writable(report)


def show_report(runs: list, report: Path | None) -> None:
    """Write a page of what was found, if one was asked for."""
    if report is not None:
        import tilepress

        tilepress.report(runs, report)
        say(f"wrote {report}")


def show(found: dict, output: Path | None, text: Callable[[dict], str], json_: bool) -> None:
    """Print a result as JSON or as text, and write its JSON to a file if there is one."""
    if output is not None:
        from tilepress.formats.artifact import disk_errors

        with disk_errors(output):
            output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=2) if json_ else text(found))
