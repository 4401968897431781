"""What ptxas tells of a kernel."""

import re


def cost(log: str) -> dict:
    """Registers, bytes of stack and spills, and warnings of wgmma that waits."""
    numbers = {
        name: [int(n) for n in re.findall(pattern, log)]
        for name, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("stack", r"(\d+) bytes stack frame"),
            ("spills", r"(\d+) bytes spill"),
        )
    }
    return {name: max(found) for name, found in numbers.items()} | {
        "serialized": any(
            warning in log for warning in ("C7512", "C7519", "C7520")
        )  # wgmma waits more than it was told to
    }
