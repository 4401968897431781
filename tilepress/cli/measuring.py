"""The parts that commands which measure share: what is refused before the work, ranks, and where figures go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tilepress
from tilepress.cli.flags import Measuring
from tilepress.cli.terminal import check_report, check_writable, quiet_libraries, say, settle_threads, show, show_report
from tilepress.formats import UsageError

if TYPE_CHECKING:
    from tilepress.runtime.parallel.group import TensorParallel


def begin(model: str, how: Measuring) -> None:
    """Raise UsageError before the work for a page that cannot be made and for a model that has no card of ours; settle threads."""
    check_report(how.report)
    if how.write_card and not (Path(model) / "tilepress.json").exists():
        raise UsageError(f"--write-card, but {model} is no artifact in a folder", "leave it out, or give an artifact")
    quiet_libraries()
    settle_threads(how.threads, how.quiet)


@contextmanager
def ranks(device: str, output: Path | None) -> Iterator[tuple["TensorParallel | None", bool]]:
    """Give the ranks that torchrun started, None without, and whether this process is the one that speaks, which has tried to write `output`."""
    from tilepress.device import find_device
    from tilepress.runtime.parallel.group import TensorParallel

    group = TensorParallel.start(find_device(device))
    is_first = group is None or group.rank == 0
    if is_first:
        check_writable(output)
    yield group, is_first
    if group is not None:
        group.close()


def tell(found: dict, text: Callable[[dict], str], model: str, how: Measuring) -> None:
    """Print figures, and put them where they were asked for: a file, a page, the artifact's card."""
    show(found, how.output, text, how.json_)
    show_report([found], how.report)
    if how.write_card:
        say(f"wrote {tilepress.write_card(model, found)}")


def ran(result: dict) -> str:
    """Return the last line of a table: what ran a model's layers, and for how long."""
    paths = (f"{count} layer{'s' if count > 1 else ''} by {path}" for path, count in result["paths"].items())
    return f"\n\n  ran {'; '.join(paths)}; {result['seconds']:.1f} s"
