"""`python -m tilepress.hf MODULE …`: any Python module that loads models by transformers, with artifacts as models."""

import argparse
import importlib.util
import runpy
import sys


def main() -> None:
    """Run a module as `python -m` would, with the words behind its name as its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tilepress.hf",
        description="Run a Python module that loads models by transformers; artifacts of tilepress load like any other model.",
        epilog="Example: python -m tilepress.hf lm_eval --model hf --model_args pretrained=DIR --tasks hellaswag",
    )
    parser.add_argument("module", metavar="MODULE", help="what `python -m` would run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the module")
    asked = parser.parse_args()
    sys.path.insert(0, "")  # as for `python -m`
    try:
        found = importlib.util.find_spec(asked.module)
        if (
            found is not None and found.submodule_search_locations is not None
        ):  # a package is run by a module of its own
            found = importlib.util.find_spec(f"{asked.module}.__main__")
    except (ImportError, ValueError):  # a package above it is missing, or the name is none
        found = None
    if found is None:
        parser.error(f"there is no module {asked.module!r} to run: install the tool into this Python, {sys.executable}")
    sys.argv = [asked.module, *asked.arguments]
    runpy.run_module(asked.module, run_name="__main__", alter_sys=True)
