"""tilepress: from a Hugging Face causal language model to a smaller, faster artifact, and the proof of what it costs.

    import tilepress
    tilepress.compress("meta-llama/Llama-3.1-8B", "pruned", tilepress.Prune(0.5, method="sparsegpt"), dataset="text.jsonl")
    tilepress.perplexity("pruned", "held-out.jsonl", base="meta-llama/Llama-3.1-8B").perplexity
    model = tilepress.load("pruned", device="cuda")

Everything here is imported when it is first used: `import tilepress` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tilepress.formats import TilepressError, UsageError
from tilepress.version import __version__ as __version__

if TYPE_CHECKING:
    from tilepress import compress
    from tilepress.chat import Chat, generate
    from tilepress.compress.convert import Convert
    from tilepress.compress.kv.recipe import KVCache
    from tilepress.compress.prune.recipe import Prune
    from tilepress.compress.quantize.observers import Observer
    from tilepress.compress.quantize.recipe import Quantize
    from tilepress.compress.recipes import recipe
    from tilepress.compress.recover.recipe import Recover
    from tilepress.compress.run.api import Outcome, plan
    from tilepress.eval.card import write_card
    from tilepress.eval.compare import compare
    from tilepress.eval.inspect import inspect
    from tilepress.eval.perplexity import perplexity
    from tilepress.eval.report import report
    from tilepress.eval.tasks import tasks
    from tilepress.eval.verify import verify
    from tilepress.models.families import families
    from tilepress.runtime.decode.generation import decode
    from tilepress.runtime.loader import load
    from tilepress.sampling import sample
    from tilepress.sharing import push
    from tilepress.text import Text

_HOMES = {
    "Chat": "chat",
    "Convert": "compress.convert",
    "KVCache": "compress.kv.recipe",
    "Observer": "compress.quantize.observers",
    "Outcome": "compress.run.api",
    "Prune": "compress.prune.recipe",
    "Quantize": "compress.quantize.recipe",
    "Recover": "compress.recover.recipe",
    "Text": "text",
    "compare": "eval.compare",
    "decode": "runtime.decode.generation",
    "families": "models.families",
    "generate": "chat",
    "inspect": "eval.inspect",
    "load": "runtime.loader",
    "perplexity": "eval.perplexity",
    "plan": "compress.run.api",
    "push": "sharing",
    "recipe": "compress.recipes",
    "report": "eval.report",
    "sample": "sampling",
    "tasks": "eval.tasks",
    "verify": "eval.verify",
    "write_card": "eval.card",
}
__all__ = [
    "Chat",
    "Convert",
    "KVCache",
    "Observer",
    "Outcome",
    "Prune",
    "Quantize",
    "Recover",
    "Text",
    "TilepressError",
    "UsageError",
    "compare",
    "compress",
    "decode",
    "families",
    "generate",
    "inspect",
    "load",
    "perplexity",
    "plan",
    "push",
    "recipe",
    "report",
    "sample",
    "tasks",
    "verify",
    "write_card",
]


def __getattr__(name: str):
    if name == "compress":
        return import_module("tilepress.compress")
    if name not in _HOMES:
        raise AttributeError(f"module 'tilepress' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"tilepress.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
