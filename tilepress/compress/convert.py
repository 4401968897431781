"""Changing the layout of weights: the recipe behind `tilepress convert`.

To `dense`: sparse weights become ordinary tensors again, bit for bit; INT8 ones code times scale, rounded to the model's dtype. The folder
loads anywhere. To `tiled-csl`, `tiled-bitmap` or `auto`: a checkpoint that some other tool pruned (zeros stored densely), or an artifact in another
sparse layout, no value changed; but a bitmap's INT8 values become code times scale in Tiled-CSL. As bitmaps they are grouped for another card, no code changed.
"""

from dataclasses import dataclass

from torch import Tensor

from tilepress.compress.run.encode import Compressed, format_names, layout_for
from tilepress.compress.run.plan import Inputs, Recipe
from tilepress.compress.run.targets import LeftAlone, Target, check_patterns, check_value_dtypes, find_targets
from tilepress.formats import UsageError, check_kinds, int8
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.layout import Layout
from tilepress.formats.tiled_bitmap import PAIRS_BELOW
from tilepress.text import Text


@dataclass(frozen=True)
class Convert(Recipe):
    """Change how weights are stored: the recipe of `tilepress convert`. Raises UsageError for an unknown layout."""

    to: str  # auto | tiled-csl | tiled-bitmap | dense
    ignore: tuple[str, ...] = ("lm_head",)
    card: str = "any"  # any | h100 | h200: the card that will run it decides how bitmaps are grouped

    command = "convert"

    def __post_init__(self):
        check_kinds(self)
        if self.to not in (known := format_names()):
            raise UsageError(f"--to {self.to} is unknown", f"choose one of {', '.join(known)}")
        if self.card not in PAIRS_BELOW:
            raise UsageError(f"--card {self.card} is unknown", f"choose one of {', '.join(PAIRS_BELOW)}")
        check_patterns(self.ignore)

    def find_targets(self, inputs: Inputs) -> tuple[list[Target], list[LeftAlone]]:
        checkpoint = inputs.checkpoint
        if not layout_for(self.to).packed:
            if set(self.ignore) - {"lm_head"}:
                raise UsageError("--ignore goes with sparse layouts: --to dense unpacks every weight", "leave it out")
            return packed_targets(checkpoint)
        targets, left = find_targets(checkpoint, self.ignore, inputs.trust_remote_code, int8_bitmaps=True)
        if layout_for(self.to).keeps_codes:
            nonzeros = {t["name"]: t.get("nonzeros") for t in (checkpoint.manifest or {}).get("tensors", [])}
            kept = [t for t in targets if t.weight.is_int8 and self._fits(checkpoint, t, nonzeros.get(t.name))]
            left += [LeftAlone(target.name, "its int8 values are a bitmap already") for target in kept]
            targets = [target for target in targets if target not in kept]
            if not targets:
                raise UsageError(
                    f"every weight of {checkpoint.path.name} is a bitmap already, of int8 values",
                    f"nothing is left to convert for --card {self.card}",
                )
        return targets, left

    def _fits(self, checkpoint: Checkpoint, target: Target, nonzeros: int | None) -> bool:
        """Return whether a bitmap of int8 values is grouped for the card; one whose non-zeros no manifest tells stays as it is."""
        if nonzeros is None:
            return True
        density = min(nonzeros, target.elements) / target.elements
        return self.layout(target).fits(checkpoint.packed_shape(target.weight), density)

    def keeps_codes(self, target: Target) -> bool:
        return target.weight.is_int8 and layout_for(self.to).keeps_codes

    def settings(self, text: Text | None) -> dict:
        chosen = {"to": self.to} | ({"ignore": list(self.ignore)} if layout_for(self.to).packed else {})
        return chosen | ({} if self.card == "any" else {"card": self.card})

    def layout(self, target: Target) -> Layout:
        return layout_for(self.to, "channel" if self.keeps_codes(target) else None, self.card)

    def check(self, inputs: Inputs, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        if layout_for(self.to).packed:
            check_value_dtypes({target.name: target.dtype for target in targets})

    def transform(self, target: Target, weight: Tensor, state: dict) -> Compressed:
        rounded = target.weight.is_int8  # by how much, nobody has measured
        return Compressed(weight, {} if rounded else {"error": 0.0})


def packed_targets(checkpoint: Checkpoint) -> tuple[list[Target], list[LeftAlone]]:
    """List every packed weight as a target, for `--to dense`. Needs no model class, so it works for any architecture.

    Raises TilepressError for a quantized checkpoint of a kind that is not ours to read.
    """
    targets, left = [], []
    quantization = checkpoint.config.get("quantization_config") or {}
    if quantization.get("quant_method", "tilepress") != "tilepress":
        int8.scheme_of(quantization)
    for weight in checkpoint.weights.values():
        if not weight.is_packed:
            left.append(LeftAlone(weight.name, "already dense"))
        else:
            form = checkpoint.form(weight)
            targets.append(Target(weight, form.rows, form.cols, form.dtype, form.transposed))
    if not targets:
        raise UsageError(f"{checkpoint.path.name} has no packed weight", "it is dense already")
    return targets, left
