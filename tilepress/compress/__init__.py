"""Weights in, compressed weights out: `tilepress.compress(model, output, recipe)`; the rooms behind it are run, layers and one for each recipe."""

import inspect
import sys
from types import ModuleType


class _Package(ModuleType):
    """Makes the package callable: `tilepress.compress` is both the call that compresses a model and the package that holds its code.
    Nothing heavy is imported before the call; its signature and its text are those of `tilepress.compress.run.api.compress`."""

    def __call__(self, *args, **options):
        from tilepress.compress.run.api import compress

        return compress(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        from tilepress.compress.run.api import compress

        return inspect.signature(compress)

    @property
    def __doc__(self) -> str:
        from tilepress.compress.run.api import compress

        return f"{__doc__}\n\n{inspect.getdoc(compress)}"


sys.modules[__name__].__class__ = _Package
