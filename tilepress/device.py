"""The device that a command or a call computes on."""

import re

import torch

from tilepress.formats import UsageError


def find_device(name: str | torch.device) -> str:
    """Return cpu, cuda or cuda:N as torch takes it; `auto` is the first card that there is, else the CPU.

    Raises UsageError for another name, and for a card that torch does not see."""
    name = str(name)  # a torch.device too
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if not re.fullmatch(r"(cpu|cuda)(:[0-9]+)?", name):
        raise UsageError(f"--device {name} is no device to compute on", "use cpu, cuda or cuda:N")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= cards:
        raise UsageError(f"--device {name}, but torch sees {cards} cards", "`tilepress env` shows what torch sees")
    return name
