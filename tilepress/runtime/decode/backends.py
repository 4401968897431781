"""What the decode loop runs a model by: `LeanBackend` is runtime/decoder.py over a cache of many sequences, `ModelBackend` the model's own forward pass,
a sequence at a time, for what the lean pass does not know.

Both have places for sequences: `begin` one, `prefill` it piece by piece, `decode` one row of each of the first places, `end` it.
"""

import torch
from torch import Tensor, nn

from tilepress.formats import UsageError
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat
from tilepress.kernels import decode_attention
from tilepress.kernels.arch import Path, references
from tilepress.runtime.decode.cache import ContiguousSequences, PagedSequences
from tilepress.runtime.decode.decoder import Decoder, why_not
from tilepress.runtime.hf import paged_cache as kv_cache
from tilepress.runtime.loader import paths

CACHES = ("auto", "calibrated", "bfloat16", "contiguous")


class LeanBackend:
    """The lean pass; `cache` is one of CACHES: auto is the model's calibrated one, else pages of bfloat16 for a model of that dtype, else contiguous."""

    def __init__(self, model: nn.Module, places: int, max_len: int, cache: str, num_pages: int | None):
        self.decoder = decoder = Decoder(model, max_len)
        calibration = model.kv_state.calibration if getattr(model, "kv_state", None) is not None else None
        if cache == "calibrated" and calibration is None:
            raise UsageError("the model has no calibrated cache", "make one: `tilepress compress kv`")
        if cache == "bfloat16" or (cache == "auto" and calibration is None and _pages_serve(decoder)):
            form = KVFormat(decoder.head_dim, 16)
            calibration = uncalibrated(form, decoder.kv_heads, len(decoder.layers))
        with torch.inference_mode():
            if cache == "contiguous" or calibration is None:
                size = len(decoder.layers), decoder.kv_heads, decoder.head_dim
                self.cache = ContiguousSequences(*size, decoder.dtype, decoder.device, places, max_len)
            else:
                self.cache = PagedSequences(calibration, decoder.device, places, max_len, num_pages)
        # References look at numbers on the host, which no graph can.
        self.captures = decoder.device.type == "cuda" and not references(self.paths())
        self.fits, self.begin, self.end = self.cache.fits, self.cache.begin, self.cache.end

    def prefill(self, place: int, tokens: Tensor, first: int) -> Tensor:
        """tokens int64 [count], from position `first` on -> logits [1, vocabulary] behind the last."""
        step = self.cache.prefilling(place, first, len(tokens))
        return self.decoder.forward(tokens, step.positions, self.cache, step, slice(-1, None))

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions int64 [rows] of the first places, -1 where none is -> logits [rows, vocabulary]."""
        return self.decoder.forward(tokens, positions, self.cache, self.cache.decoding(positions))

    def paths(self) -> dict[Path | str, int]:
        decoder = self.decoder
        return decoder.paths() | self.cache.paths(decoder.dtype, decoder.turns is not None)


def _pages_serve(decoder: Decoder) -> bool:
    """Whether pages of bfloat16 lose nothing, and on a card have a kernel."""
    if decoder.dtype != torch.bfloat16 or decoder.head_dim % 32:
        return False
    form = KVFormat(decoder.head_dim, 16)
    return decoder.device.type != "cuda" or decode_attention.why_not(decoder.device, form, decoder.dtype) is None


class ModelBackend:
    """The model's own forward pass with its own cache (packed pages where it is calibrated), a sequence at a time: correct, not fast."""

    captures, cache = False, None

    def __init__(self, model: nn.Module, why: str):
        self.model, self.why = model, why
        self.caches: dict[int, object] = {}

    def fits(self, tokens: int) -> bool:
        return True

    def begin(self, place: int, tokens: int) -> None:
        self.caches[place] = None

    def end(self, place: int) -> None:
        cache = self.caches.pop(place)
        if isinstance(cache, kv_cache.PagedCache):
            cache.free()

    def prefill(self, place: int, tokens: Tensor, first: int) -> Tensor:
        found = self.model(tokens[None], past_key_values=self.caches[place], use_cache=True)
        self.caches[place] = found.past_key_values
        return found.logits[0, -1:]

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        rows = [
            self.prefill(place, tokens[place : place + 1], at) if at >= 0 else None
            for place, at in enumerate(positions.tolist())
        ]
        some = next(row for row in rows if row is not None)
        return torch.cat([torch.zeros_like(some) if row is None else row for row in rows])

    def paths(self) -> dict[Path | str, int]:
        return {f"transformers' own forward pass ({self.why})": 1} | paths(self.model, "cache")


def backend_for(model: nn.Module, places: int, max_len: int, cache: str = "auto", num_pages: int | None = None):
    """The lean pass where the model is known to it, else its own. Raises UsageError for an unknown cache, or one that only the lean pass has."""
    if cache not in CACHES:
        raise UsageError(f"the cache {cache!r} is unknown", f"choose one of {', '.join(CACHES)}")
    if (why := why_not(model, max_len)) is None:
        return LeanBackend(model, places, max_len, cache, num_pages)
    if cache not in ("auto", "calibrated"):
        raise UsageError(f"the cache {cache!r} is not for this model: {why}", "use cache='auto'")
    return ModelBackend(model, why)
