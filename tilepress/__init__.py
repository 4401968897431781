"""tilepress: from a Hugging Face causal language model to a smaller, faster artifact, and the proof of what it costs."""

__version__ = "0.1.0"


def load(path, device="cpu", dtype="auto", **kwargs):
    """Loads an artifact or a dense checkpoint as a transformers model, or with `group` a rank's part of it; see `tilepress.runtime.loader.load`."""
    from tilepress.runtime.loader import load as load_model

    return load_model(path, device=device, dtype=dtype, **kwargs)


def __getattr__(name: str):
    """Import `decode`, for `model.generate(..., custom_generate=tilepress.decode)`, when it is asked for: runtime/decode/generation.py."""
    if name == "decode":
        from tilepress.runtime.decode.generation import decode

        return decode
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
