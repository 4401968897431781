"""`import tilepress.hf` registers artifacts with transformers: from_pretrained then loads them like any other checkpoint."""

from tilepress.runtime.plugin import register

register()
