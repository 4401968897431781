"""Which card tests run on."""

import pytest
import torch

from tilepress.kernels import arch

HAS_WGMMA = torch.cuda.is_available() and arch.card(torch.device("cuda", 0)).has_wgmma
HOPPER = pytest.mark.skipif(not HAS_WGMMA, reason="needs a Hopper card")
H200_BLOCKS = arch.HOPPER.multiprocessors


def pretend(monkeypatch, capability: tuple[int, int]) -> None:
    """Make every CUDA device one of a compute capability."""
    monkeypatch.setattr(arch, "card", lambda device: arch.card_of(*capability))


def take_for_older(monkeypatch, capability: tuple[int, int] = (8, 0)) -> None:
    """Make the card at hand one whose kernels are chosen and sized as for an older one, as TILEPRESS_ARCH does."""
    here = arch.card
    monkeypatch.setattr(arch, "card", lambda device: arch.as_older(here(device), arch.card_of(*capability)))
