"""The version of the package: a module of its own, so that nothing below imports the package's front for it."""

__version__ = "0.2.0"
