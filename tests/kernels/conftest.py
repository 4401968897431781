"""What tests of kernels share."""

from collections.abc import Iterator

import pytest

from tilepress.kernels.once import forget_plans


@pytest.fixture
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    """pytest's own; ops plan anew after every change."""

    class Patch(pytest.MonkeyPatch):
        def setattr(self, *args, **kwargs) -> None:
            super().setattr(*args, **kwargs)
            forget_plans()

    patch = Patch()
    yield patch
    patch.undo()
    forget_plans()
