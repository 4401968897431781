"""Regular expressions that a config or a recipe brings, matched within bounds.

Python cannot stop a match, and an expression of a few characters may take years. So a process of its own does it, which is stopped.
"""

import json
import subprocess
import sys
from collections.abc import Iterable

MOST_S = 5  # for all expressions together
_MATCH = """
import json, re, sys
expressions, names, how = json.load(sys.stdin)
json.dump([[name for name in names if getattr(re, how)(e, name)] for e in expressions], sys.stdout)
"""


def matched(expressions: Iterable[str], names: Iterable[str], how: str = "match") -> dict[str, set[str]] | None:
    """Return the names that each expression matches, by re's function `how`; None where one is none, or all take more than MOST_S."""
    expressions = list(expressions)
    if not expressions:
        return {}
    words, asked = [sys.executable, "-I", "-S", "-c", _MATCH], json.dumps([expressions, sorted(names), how])
    try:
        ran = subprocess.run(words, input=asked, capture_output=True, text=True, timeout=MOST_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return dict(zip(expressions, map(set, json.loads(ran.stdout)), strict=True))
