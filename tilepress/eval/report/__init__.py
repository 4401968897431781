"""`tilepress report`: what is known of one or several artifacts on one page that needs no network.

    artifacts, JSON of eval and compare -> gather.py -> Gathered -> tables.py, figures.py -> page.py -> one HTML file

Nothing is measured here: the page shows what commands have found, and leaves out what none has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilepress.eval.report.figures import needs_plotly
from tilepress.eval.report.gather import Gathered, gather
from tilepress.eval.report.page import html, verdicts as verdicts
from tilepress.formats import foreign_errors
from tilepress.formats.artifact import disk_errors


@dataclass(frozen=True)
class Report:
    """A page, and what stands on it."""

    found: Gathered
    html: str

    def to_json(self) -> dict:
        """Return what the page shows as a dictionary of plain values."""
        return self.found.to_json()


def report(runs: Sequence[str | Path | dict], output: str | Path | None = None, *, title: str | None = None) -> Report:
    """Put what is known of compressed models on one page: `tilepress.report(["int8", "perplexity.json"], "report.html")`.

    runs    folders of artifacts, and JSON files (or the dictionaries in them) of `eval perplexity`, `eval tasks`, `eval speed`, `compare`
            and `compress prune --sweep`; a folder that such a file names is read too, if it is there
    output  HTML file to write, with everything in it: scripts too, no network

    Raises UsageError where plotly is missing (the extra `report`), for a file that none of these commands wrote, and for nothing to show."""
    needs_plotly()
    found = gather(runs)
    with foreign_errors("a result does not say what it should", "measure again, and leave its JSON as it is written"):
        made = Report(found, html(found, title))
    if output is not None:
        with disk_errors(Path(output)):
            Path(output).write_text(made.html, encoding="utf-8")
    return made
