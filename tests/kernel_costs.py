"""What ptxas tells of a kernel."""

import re


def cost(log: str) -> dict:
    """Registers, bytes of stack and spills, and warnings of serialized wgmma."""
    numbers = {
        name: [int(n) for n in re.findall(pattern, log)]
        for name, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("stack", r"(\d+) bytes stack frame"),
            ("spills", r"(\d+) bytes spill"),
        )
    }
    return {name: max(found) for name, found in numbers.items()} | {
        "serialized": "wgmma.mma_async instructions are serialized" in log
    }
