"""The model and text of `tilepress demo`: a real 4 M parameter Llama and held-out text, shipped with the package
(sources: README.md here).
"""

from pathlib import Path

MODEL = Path(__file__).parent / "tiny"
TEXT = Path(__file__).parent / "text.jsonl"
