"""INT8 weights and activations: the recipe behind `tilepress compress quantize`.

Weights are symmetric per output channel or per tensor. Activations found at run time need no text; static ranges and smoothing are
calibrated (ranges.py). Weight-only quantization of a pruned artifact keeps it sparse, as bitmaps with INT8 values; every other artifact is
compressed-tensors `int-quantized`, which vLLM, SGLang and transformers load without us (transformers not with experts, nobody with Conv1D layers: see
docs/format.md).
"""

import math
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilepress.compress.layers.walk import Found, wait_for_walk
from tilepress.compress.quantize.inputs import LEARNING_ROWS, ROUNDINGS, SAMPLED_ROWS, Settings
from tilepress.compress.quantize.observers import HISTOGRAM_BYTES, Observer
from tilepress.compress.quantize.ranges import Calibration, calibrate
from tilepress.compress.run.encode import Compressed, layout_for
from tilepress.compress.run.plan import Inputs, ModelCard, Plan, Progress, Recipe
from tilepress.compress.run.targets import (
    EXPERTS_SEE,
    LeftAlone,
    Target,
    check_experts,
    check_patterns,
    check_value_dtypes,
    find_targets,
)
from tilepress.formats import UsageError, check_kinds, dtype_name
from tilepress.formats.checkpoint import FORMAT_VERSION, Checkpoint
from tilepress.formats.int8 import ACTIVATIONS, PACKED_FORMAT, STATIC, WEIGHTS, Int8Layout, Int8Scheme
from tilepress.formats.int8_packed import PackedLayout
from tilepress.formats.layout import Layout, layout_named
from tilepress.models.experts import EXPERT_WEIGHT
from tilepress.models.families import ONE_PRODUCT, folded_norm
from tilepress.ranks import ALONE, Ranks
from tilepress.text import RANDOM, Text

# What --activations takes: the schemes of the format, and `channel`, which becomes `tensor` by folding.
EXCEPTIONS = 0.1  # of all linear layers at most have inputs per token in a static scheme, unless told otherwise
KEPT = 0.05  # of all linear weights at most stay in 16 bits where there is text, unless told otherwise
CHOICES = (*ACTIVATIONS[:2], "channel", *ACTIVATIONS[2:])


@dataclass(frozen=True)
class Quantize(Recipe):
    """Quantize the linear weights, and their inputs, to INT8: the recipe of `tilepress compress quantize`.

    Static ranges and smoothing need text; with other choices a text serves to measure output errors. Raises UsageError for an unknown choice
    or two that contradict each other."""

    weights: str = "channel"  # channel | tensor: a scale for each output channel, or one
    activations: str = "token"  # token | tensor | channel | tensor-asym | tensor-dynamic | none
    observer: Observer | None = None  # how static ranges are chosen; None: mse
    smooth: str | float | None = None  # off | learn | auto | alpha in [0, 1]; None: what the text allows
    dtype: torch.dtype | None = None  # cast floating tensors to it first
    ignore: tuple[str, ...] = ("lm_head",)  # layers left in floating point: names, globs or re:REGEX
    rounding: str | None = None  # nearest | gptq; None: gptq where there is text and `smooth` is left to us
    dynamic: float | None = (
        None  # of static inputs' layers the share, at most, that gets a scale per token; None: as `smooth`
    )

    keep: float | None = None  # of the linear weights the share, at most, that stays in 16 bits; None: as `smooth`
    experts: str = "routed"  # routed | all: which tokens of the text the experts of a mixture are calibrated on
    head: str | None = (
        None  # int8: the output head too, with inputs per token where inputs are quantized; None: as it is
    )

    command = "compress quantize"
    together = True
    takes_random = True

    def __post_init__(self):
        if self.smooth is not None:
            object.__setattr__(self, "smooth", str(self.smooth))
        check_kinds(self)
        for value, choices, flag in (
            (self.weights, WEIGHTS, "weights"),
            (self.activations, CHOICES, "activations"),
            (self.experts, EXPERTS_SEE, "experts"),
        ):
            if value not in choices:
                raise UsageError(f"--{flag} {value} is unknown", f"choose one of {', '.join(choices)}")
        if self.smooth not in (None, "off", "learn", "auto") and not _is_alpha(self.smooth):
            raise UsageError(f"--smooth {self.smooth} is no alpha", "use off, learn, auto, or a number from 0 to 1")
        if self.head not in (None, "int8"):
            raise UsageError(f"--head {self.head} is unknown", "use int8, or leave --head out for 16 bits")
        if self.rounding not in (None, *ROUNDINGS):
            raise UsageError(f"--rounding {self.rounding} is unknown", f"choose one of {', '.join(ROUNDINGS)}")
        if self.dynamic is not None and not self.static:
            raise UsageError(
                f"--dynamic excepts layers from static ranges, --activations {self.activations} has none",
                "leave --dynamic out, or choose --activations tensor, tensor-asym or channel",
            )
        if self.dynamic is not None and not 0 <= self.dynamic < 1:
            raise UsageError(f"--dynamic {self.dynamic:g} is no share of the layers", "use 0.1, or 10%")
        if self.keep is not None and not 0 <= self.keep < 1:
            raise UsageError(f"--keep {self.keep:g} is no share of the weights", "use 0.05, or 5%")
        if self.keep and self.activations == "none":
            raise UsageError(
                "--keep leaves layers out that INT8 inputs cost most, but --activations none quantizes no inputs",
                "leave --keep out, or name layers with --ignore",
            )
        if self.rounding == "gptq" and self.activations == "none":
            raise UsageError(
                "--rounding gptq, but --activations none stores weights as they are pruned", "leave --rounding out"
            )
        if self.observer is not None and not self.static:
            raise UsageError(
                f"--observer sets static ranges, --activations {self.activations} has none"
                + ("" if self.activations == "none" else ": it finds its scales at run time"),
                "leave --observer out, or choose --activations tensor, tensor-asym or channel",
            )
        if self.smooth not in (None, "off") and self.activations in ("none", "channel"):
            why = (
                "leaves inputs in floating point"
                if self.activations == "none"
                else "brings every channel to the same reach"
            )
            raise UsageError(
                f"--smooth {self.smooth}, but --activations {self.activations} {why}: nothing is left to smooth",
                "leave --smooth out",
            )
        check_patterns(self.ignore)

    @property
    def static(self) -> bool:
        return self.scheme.static

    @property
    def needs_text(self) -> bool:
        chosen = self.smooth not in (None, "off") or self.rounding == "gptq" or bool(self.keep)
        return chosen or self.activations in (*STATIC, "channel")

    @property
    def refuses_text(self) -> None:
        return None

    def passes(self, text: Text | None) -> int:
        return 1 if text is None else 2

    def chosen(self, text: Text | None) -> tuple[str, str, float, float]:
        """Return smoothing, rounding, the share of exceptions and that of weights in 16 bits.

        What is left to us is chosen by the inputs' scales and whether there is
        text. Random tokens show which channels are large, but not how they go together: GPTQ loses by them."""
        smooth, rounding, dynamic, keep = self.smooth, self.rounding, self.dynamic, self.keep
        if smooth is None:
            recommended = text is not None and self.activations not in ("none", "channel")
            smooth = ("auto" if self.static else "learn") if recommended else "off"
            rounding = rounding or ("gptq" if recommended and text.dataset != RANDOM else "nearest")
            dynamic = EXCEPTIONS if recommended and self.static and dynamic is None else dynamic
            keep = KEPT if smooth == "learn" and keep is None else keep
        return smooth, rounding or "nearest", dynamic or 0.0, keep or 0.0

    @property
    def scheme(self) -> Int8Scheme:
        return Int8Scheme(self.weights, "tensor" if self.activations == "channel" else self.activations)

    def find_targets(self, inputs: Inputs) -> tuple[list[Target], list[LeftAlone]]:
        with_head = self.head is not None
        return find_targets(inputs.checkpoint, self.ignore, inputs.trust_remote_code, with_head=with_head)

    def layout(self, target: Target) -> Layout:
        """Zeros of a sparse weight stay unstored where a kernel multiplies inputs in floating point."""
        if self.activations == "none" and target.weight.stored_as.sparse:
            return layout_for("auto", self.weights)
        packed = self.scheme.format == PACKED_FORMAT and not target.transposed
        if packed:
            return PackedLayout()
        return Int8Layout(self.scheme)

    def expected_bytes(self, target: Target, density: float, text: Text | None) -> int:
        """Count for each target its share of the weights that may stay in 16 bits: which they are, the text decides."""
        codes = super().expected_bytes(target, density, text)
        kept = 0.0 if target.is_head else self.chosen(text)[-1]
        return codes + round(kept * target.elements * ((self.dtype or target.dtype).itemsize - 1))

    def settings(self, text: Text | None) -> dict:
        observer = None
        if self.static:
            observer = self._observer.name
            observer += f" {self._observer.percentile:g}" if observer == "percentile" else ""
        smooth, rounding, dynamic, keep = self.chosen(text)
        return {
            "weights": self.weights,
            "activations": self.activations,
            "observer": observer,
            "smooth": smooth,
            **({"rounding": rounding} if rounding != "nearest" else {}),
            **({"dynamic": dynamic} if dynamic else {}),
            **({"keep": keep} if keep else {}),
            **({"experts": self.experts} if self.experts != "routed" else {}),
            **({"head": self.head} if self.head else {}),
            "ignore": list(self.ignore),
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
        } | ({} if text is None else text.described())

    @property
    def _observer(self) -> Observer:
        return self.observer or Observer()

    def check(self, inputs: Inputs, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        checkpoint = inputs.checkpoint
        check_experts(self.experts, targets)
        if self.experts == "all" and inputs.text is None:
            raise UsageError("--experts all, but no text is read", "add --dataset, or leave it out")
        self._check_dtype(checkpoint, targets)
        sparse_ones = [target for target in targets if self.layout(target).sparse]
        check_value_dtypes({target.name: self.dtype or target.dtype for target in sparse_ones})
        packed = [name for name, weight in checkpoint.weights.items() if weight.is_packed]
        kept = [item.name for item in left_alone if item.name in packed]
        if kept:
            raise UsageError(
                f"{kept[0]} is packed and would be left alone: one artifact cannot be packed in two ways",
                "quantize it too, or `tilepress convert --to dense` first",
            )
        chosen, others = {t.name for t in targets}, {item.name: item.reason for item in left_alone}
        for name, reason in others.items():
            match = EXPERT_WEIGHT.match(name)
            same = match and next((t for t in sorted(chosen) if t.startswith(f"{match['path']}.")), None)
            if same:
                raise UsageError(
                    f"{same} would be quantized and {name} not ({reason}): a layer's experts run as one",
                    "ignore all experts of a layer, or none",
                )
        for name in sorted(chosen):
            stem, _, last = name.removesuffix(".weight").rpartition(".")
            for fused in (names for names in ONE_PRODUCT if last in names):
                for other in (f"{stem}.{n}.weight" for n in fused):
                    if other in others:
                        raise UsageError(
                            f"{name} would be quantized and {other} not ({others[other]}): runtimes compute them as one",
                            "ignore both, or neither",
                        )

    def _check_dtype(self, checkpoint: Checkpoint, targets: list[Target]) -> None:
        """Scales are stored in the weights' dtype: it has to be the one that loaders run the model in."""
        dtypes = sorted({dtype_name(target.dtype) for target in targets})
        declared = checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype") or dtypes[0]
        if self.dtype is None and dtypes != [declared]:
            raise UsageError(
                f"the weights are {' and '.join(dtypes)}, config.json says {declared}: scales must be in one dtype",
                f"convert on the way: --dtype {declared}",
            )

    def prepare(self, plan: Plan, rank: int, device: str, progress: Progress, ranks: Ranks = ALONE) -> dict | None:
        if plan.text is None:
            return {"calibration": None}
        if rank and ranks.size == 1 and not wait_for_walk(plan.work, progress):
            return None
        smooth, rounding, dynamic, keep = self.chosen(plan.text)
        smooth = "channel" if self.activations == "channel" else smooth
        shown_all = self.experts == "all"
        settings = Settings(
            self.scheme,
            self._observer,
            smooth,
            rounding,
            dynamic,
            self.dtype,
            keep,
            torch.device(device).type,
            shown_all,
            self.head is not None,
        )
        return {"calibration": calibrate(plan, settings, device, progress, ranks)}

    def transform(self, target: Target, weight: Tensor, state: dict) -> Compressed:
        found: Calibration | None = state["calibration"]
        made = Compressed(weight, {})
        if target.is_head and self.static:
            made.record = {"inputs": "token"}  # ranges are those of decoder layers' inputs
        if found is None or target.is_head:
            return made
        columns, divisors = found.columns(target.name), found.divisors(target.name)
        if columns is not None or divisors is not None:
            # Never in place: a float32 weight may be the stored bytes themselves.
            made.weight, made.record = weight.float(), {"smoothed": True}
            if columns is not None:
                made.weight = made.weight * columns.to(weight.device)
            if divisors is not None:
                made.weight = made.weight / divisors.to(weight.device)[:, None]
        if target.name in found.kept:
            made.weight = made.weight.to(self.dtype or target.dtype)
            made.record, made.layout = made.record | {"kept": True}, layout_named("dense")
        made.beside = found.beside(target.name)
        if target.name in made.beside:
            made.record = made.record | {"refitted": True}
        if target.name in found.dynamic:
            made.record = made.record | {"inputs": "token"}
        return made

    def copy(self, name: str, tensor: Tensor, state: dict) -> Compressed:
        found: Calibration | None = state["calibration"]
        divisors = found and found.divisors(name)
        if divisors is None:
            return Compressed(tensor, {})
        dtype = self.dtype or tensor.dtype
        folded = folded_norm(tensor.to(dtype).float(), divisors, found.offset(name))
        return Compressed(folded.to(dtype), {"smoothed": True})

    def peak_bytes(self, inputs: Inputs, targets: list[Target]) -> int:
        """Writing takes a weight as stored, its codes, and in float32 if it is folded; for calibrating see the terms."""
        checkpoint, text = inputs.checkpoint, inputs.text
        smooth, rounding, *_ = self.chosen(text)
        wide = 4 if smooth != "off" or self.activations == "channel" else 0
        writing = max(t.elements * (2 * (self.dtype or t.dtype).itemsize + wide) for t in targets)
        if text is None:
            return writing
        outside = sum(e.nbytes for e in checkpoint.tensors.values()) - sum(t.weight.nbytes for t in targets)
        targets = [target for target in targets if not target.is_head]  # which is only rounded
        layers: dict[str, list[Target]] = {}
        for target in targets:
            layers.setdefault("".join(re.findall(r"\.\d+\.", target.name)[:1]), []).append(target)
        layer = 4 * max(sum(t.elements for t in found) for found in layers.values())
        config = checkpoint.text_config
        width = config.get("hidden_size") or config.get("n_embd") or max(t.cols for t in targets)
        hidden = text.nsamples * text.seqlen * width * (self.dtype or targets[0].dtype).itemsize
        copies = 2 if wide else 1  # inputs and outputs of a layer
        widest = max(t.cols for t in targets)
        window = 4 * text.seqlen * widest * 8  # a forward pass and its statistics
        rows = LEARNING_ROWS["cpu"] if smooth == "learn" else SAMPLED_ROWS
        inputs = max(sum(3 * 4 * rows * t.cols + HISTOGRAM_BYTES for t in found) for found in layers.values())
        if (
            rounding == "gptq"
        ):  # moments of each width of input, at most once a weight; weights in float32, three matrices of a solve
            inputs += max(sum(4 * t.cols**2 for t in found) for found in layers.values()) + layer + 12 * widest**2
            inputs += (
                2 * 4 * 4 * max(t.elements for t in targets)
            )  # two weights as one matrix, scaled, codes in two orders
        return max(
            writing, layer + 2 * outside + copies * hidden + window + inputs + 3 * 4 * max(t.elements for t in targets)
        )

    def describe(self, plan: Plan, tensors: list[dict]) -> dict:
        facts = {}
        if plan.text is not None:
            facts["calibration"] = Found(plan.work).facts
        return facts | {"report": report(tensors, facts.get("calibration"))}

    @classmethod
    def model_card(cls, manifest: dict, steps: list[dict]) -> ModelCard:
        if "report" not in manifest or not any(
            layout_named(record["layout"]).matrix_of_codes for record in manifest["tensors"]
        ):
            return ModelCard()
        worst = ", ".join(f"`{name}`" for name in manifest["report"]["worst"])
        return ModelCard(paragraphs=(f"Quantized worst: {worst}. The report on every layer is in `tilepress.json`.",))

    def quantization_config(self, tensors: list[dict], left_alone: list[LeftAlone]) -> dict:
        """compressed-tensors' own; ours where it has no such layer (Conv1D, sparse ones)."""
        kept = (item["name"].removesuffix(".weight") for item in tensors if item.get("kept"))
        float_head = set() if self.head else {"lm_head"}  # also where it is tied, and not stored
        ignore = sorted({*float_head, *kept, *(item.module for item in left_alone if item.module)})
        paths = {
            item["name"].removesuffix(".weight"): item
            for item in tensors
            if layout_named(item["layout"]).matrix_of_codes
        }
        dynamic = frozenset(path for path, item in paths.items() if item.get("inputs") == "token")
        config = replace(self.scheme, dynamic=dynamic).quantization_config(ignore, paths)
        if any(item.get("transposed") or layout_named(item["layout"]).sparse for item in tensors):
            return {"quant_method": "tilepress", "format_version": FORMAT_VERSION} | {
                key: config[key] for key in ("config_groups", "ignore")
            }
        return config


def report(tensors: list[dict], calibration: dict | None) -> dict:
    """Report how well each weight came through: {"layers": [{name, snr_db, clip_share, output_error}, …], "worst": five
    names}.

    `snr_db` is of the weight, `clip_share` of its input's values (None unless static), `output_error` relative on calibration text (None
    without). Worst first by output error where there is one, else by SNR.
    """
    inputs = {name: item for item in (calibration or {}).get("inputs", []) for name in item["weights"]}
    layers = []
    for record in tensors:
        if layout_named(record["layout"]).matrix_of_codes or record.get("value_dtype") == "int8":
            seen = inputs.get(record["name"], {})
            snr = -20 * math.log10(record["error"]) if record["error"] else None
            layers.append(
                {
                    "name": record["name"],
                    "snr_db": snr and round(snr, 2),
                    "clip_share": seen.get("clip_share"),
                    "output_error": seen.get("output_error", {}).get(record["name"]),
                }
            )
    layers.sort(key=lambda layer: (-(layer["output_error"] or 0.0), layer["snr_db"] or math.inf, layer["name"]))
    return {"layers": layers, "worst": [layer["name"] for layer in layers[:5]]}


def _is_alpha(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
