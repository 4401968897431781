"""tilepress: from a Hugging Face causal language model to a smaller, faster artifact, and the proof of what it costs."""

from tilepress.version import __version__ as __version__


def load(path, device="cpu", dtype="auto", **kwargs):
    """Loads an artifact or a dense checkpoint as a transformers model, or with `group` a rank's part of it; see `tilepress.runtime.loader.load`."""
    from tilepress.runtime.loader import load as load_model

    return load_model(path, device=device, dtype=dtype, **kwargs)
