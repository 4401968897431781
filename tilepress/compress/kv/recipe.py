"""Scales for an attention cache of 4 or 8 bits, from real text: the recipe behind `tilepress compress kv`.

Layer by layer the model runs over the text and each layer's scales are searched (calibration.py). Weights are not touched, and their files
linked, unless a matrix before the values is folded into them (fold.py).
"""

from dataclasses import dataclass

from torch import Tensor

from tilepress.compress.kv.attention import QUERIES, AttentionShape, attention_shape
from tilepress.compress.kv.budget import check_budget, forms_for_budget
from tilepress.compress.kv.calibration import SAMPLED_WINDOWS, Settings, calibrate
from tilepress.compress.kv.fold import find_pairs
from tilepress.compress.run.encode import Compressed
from tilepress.compress.run.plan import OURS, Inputs, ModelCard, Plan, Progress, Recipe
from tilepress.compress.run.targets import LeftAlone, Target, find_targets
from tilepress.formats import UsageError, check_kinds
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.files import read_json
from tilepress.formats.kv_calibration import CONFIG_KEY, FACTS_NAME, FOLDER, forms_in, name_of
from tilepress.formats.kv_int4 import Forms, KVFormat
from tilepress.formats.layout import Layout, layout_named
from tilepress.ranks import ALONE, Ranks
from tilepress.text import Text


@dataclass(frozen=True)
class KVCache(Recipe):
    """Calibrate a packed attention cache and leave the weights as they are: the recipe of `tilepress compress kv`.

    Raises UsageError for an unknown choice or two that contradict each other."""

    bits: int | str = 4  # of a stored key or value: 4 | 8 | "auto": forms by layer, for keys and values, under `budget`
    group_size: int | None = None  # channels that share a scale, 4 bits: 128 | 64 | 32; None: the head dimension
    mode: str = "dynamic"  # dynamic: scales with every token | static: calibrated and stored once
    rotation: str = "auto"  # of keys and queries: auto, if it lowers the error | none | hadamard
    budget: float | None = None  # of "auto": mean bits of a stored number, scales counted
    alike: bool = False  # of "auto": keys and values of a layer have one form, as kernels take it
    fold_values: bool = False  # store values times a matrix that `v_proj` and `o_proj` take: weights are written then
    feedback: bool = True  # keys of 4 bits are rounded block by block, and a block's errors made up for in the next

    command = "compress kv"
    together = True
    alone = True
    needs_text = True

    def __post_init__(self):
        check_kinds(self)
        if self.bits not in (4, 8, "auto"):
            raise UsageError(f"--bits {self.bits} is unknown", "choose 4, 8 or auto")
        if self.bits == "auto":
            if self.budget is None:
                raise UsageError(
                    "--bits auto needs a budget", "give --budget, the mean bits of a stored number, such as 4.5"
                )
            if not 0 < self.budget <= 16:
                raise UsageError(f"--budget {self.budget:g} is no number of bits", "give one up to 16, such as 4.5")
            if self.group_size is not None or self.mode != "dynamic":
                raise UsageError(
                    "--bits auto tries groups and static scales itself", "leave --group-size and --mode out"
                )
        elif self.budget is not None or self.alike:
            raise UsageError(
                f"--bits {self.bits} takes no {'--alike' if self.budget is None else '--budget'}", "use --bits auto"
            )
        if self.mode not in ("dynamic", "static"):
            raise UsageError(f"--mode {self.mode} is unknown", "choose dynamic or static")
        if self.rotation not in ("auto", "none", "hadamard"):
            raise UsageError(f"--rotation {self.rotation} is unknown", "choose one of auto, none, hadamard")
        if self.rotation == "hadamard" and (self.mode == "static" or self.bits == 8):
            raise UsageError("--rotation hadamard goes with 4 bits and --mode dynamic", "leave it out")

    @property
    def links(self) -> bool:
        return not self.fold_values

    @property
    def rotations(self) -> tuple[bool, ...]:
        """The rotations that are tried."""
        if self.rotation == "auto" and self.bits in (4, "auto") and self.mode == "dynamic":
            return (False, True)
        return (self.rotation == "hadamard",)

    def find_targets(self, inputs: Inputs) -> tuple[list[Target], list[LeftAlone]]:
        if not self.fold_values:
            return [], []
        return find_pairs(inputs.checkpoint, find_targets(inputs.checkpoint, (), inputs.trust_remote_code)[0]), []

    def layout(self, target: Target) -> Layout:
        return layout_named("dense")

    def settings(self, text: Text | None) -> dict:
        chosen = {
            "bits": self.bits,
            "group_size": self.group_size or "head",
            "mode": self.mode,
            "rotation": self.rotation,
        }
        if self.bits == "auto":
            chosen = {"bits": "auto", "budget": self.budget, "alike": self.alike, "rotation": self.rotation}
        chosen |= {"fold_values": True} if self.fold_values else {}
        return chosen | ({} if self.feedback else {"feedback": False}) | text.described()

    def check(self, inputs: Inputs, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        head_dim = attention_shape(inputs.checkpoint, inputs.trust_remote_code).head_dim
        self.forms(head_dim)
        if self.budget is not None:
            check_budget(self.budget, head_dim)

    def forms(self, head_dim: int) -> tuple[KVFormat, ...]:
        """Return the forms that are tried. Raises UsageError for a head dimension that does not fit."""
        if self.bits == "auto":
            return tuple(forms_for_budget(head_dim))
        return (KVFormat(head_dim, self.bits, self.group_size or 0, self.mode == "static"),)

    def work_units(self, plan: Plan, rank: int, world_size: int) -> int:
        """Return the number of layers, or where weights are written their elements, and as many for each layer that is looked at."""
        layers = attention_shape(Checkpoint(plan.source), plan.trust_remote_code).layers
        return layers * self._units(plan) + sum(shard.elements for shard in plan.shards[rank::world_size])

    def _units(self, plan: Plan) -> int:
        return max(sum(target.elements for target in plan.targets), 1)

    def foreseen(self, inputs: Inputs) -> dict:
        shape = attention_shape(inputs.checkpoint, inputs.trust_remote_code)
        if self.budget is not None:
            return {"kv_cache": foreseen_sizes(self.budget, shape)}
        return {"kv_cache": sizes([*self.forms(shape.head_dim)] * shape.layers, shape.kv_heads)}

    def peak_bytes(self, inputs: Inputs, targets: list[Target]) -> int:
        """Estimate the peak memory in bytes.

        It is one layer in float32, twice what is outside of layers, hidden states, and sampled keys and values with their
        candidates.
        """
        checkpoint, text = inputs.checkpoint, inputs.text
        shape, config = attention_shape(checkpoint, inputs.trust_remote_code), checkpoint.text_config
        elements = sum(entry.nbytes // entry.dtype.itemsize for entry in checkpoint.tensors.values())
        width = config.get("hidden_size") or config.get("n_embd") or shape.heads * shape.head_dim
        embedding = config.get("vocab_size", 0) * width
        hidden = text.nsamples * text.seqlen * width * 4
        row = shape.kv_heads * shape.head_dim * 4
        # Keys and values, the quantized ones, and what quantizing holds for a moment (codes, weights, sums).
        sampled = min(text.nsamples, SAMPLED_WINDOWS) * text.seqlen * row * (2 + 2 + 2)
        scores = shape.heads * QUERIES * text.seqlen * 4 * 4  # scores, masked, softmax and its inputs
        scores += min(text.nsamples, SAMPLED_WINDOWS) * shape.heads * QUERIES * text.seqlen * 4  # kept of each window
        return 4 * max(elements - embedding, 0) // shape.layers + 8 * embedding + hidden + sampled + scores

    def prepare(self, plan: Plan, rank: int, device: str, progress: Progress, ranks: Ranks = ALONE) -> dict | None:
        shape = attention_shape(Checkpoint(plan.source), plan.trust_remote_code)
        settings = Settings(
            shape,
            self.forms(shape.head_dim),
            self.rotations,
            self.budget,
            self.alike,
            self.fold_values,
            self.feedback,
            self._units(plan),
        )
        return {"folds": calibrate(plan, settings, device, progress, ranks)}

    def transform(self, target: Target, weight: Tensor, state: dict) -> Compressed:
        return Compressed(state["folds"].apply(target.name, weight), {})

    def copy(self, name: str, tensor: Tensor, state: dict) -> Compressed:
        return Compressed(state["folds"].apply(name, tensor), {})

    def extra_files(self, plan: Plan) -> dict[str, bytes]:
        return {f"{FOLDER}/{p.name}": p.read_bytes() for p in sorted((plan.work / FOLDER).iterdir())}

    def describe(self, plan: Plan, tensors: list[dict]) -> dict:
        source = Checkpoint(plan.source).manifest or {}  # whose weights these are
        kept = {key: source[key] for key in ("calibration", "report") if key in source}
        return kept | {"kv_cache": told(read_json(plan.work / FOLDER / FACTS_NAME))}

    @classmethod
    def model_card(cls, manifest: dict, steps: list[dict]) -> ModelCard:
        told = manifest.get("kv_cache")
        if told is None:  # weights have changed since: the calibration was left behind
            return ModelCard()
        return ModelCard(
            paragraphs=(
                f"The attention cache is calibrated for {told['format']} (`kv_cache/`): {told['bytes_per_token']:,} bytes a token instead of "
                f"{told['bytes_per_token_bfloat16']:,}, {told['tokens_per_gib']:,} tokens in a GiB instead of {told['tokens_per_gib_bfloat16']:,}. "
                f"{OURS} generates with it; other loaders ignore it. In vLLM without our plug-in its plain 16-bit cache serves.",
            )
        )

    def result_config(self, config: dict, tensors: list[dict], left_alone: list[LeftAlone]) -> dict:
        return config | {CONFIG_KEY: FOLDER}


def sizes(forms: list[Forms], heads: int) -> dict:
    """Bytes of cache a token with bfloat16 and with the layers' formats, and the tokens that fit into a GiB; `heads` of each layer."""
    rows = [row for form in forms for row in (form.key, form.value)]
    before, after = (
        heads * sum(sizes) for sizes in ([2 * row.head_dim for row in rows], [row.row_bytes for row in rows])
    )
    return _in_memory(name_of(forms), before, after)


def foreseen_sizes(budget: float, shape: AttentionShape) -> dict:
    """`sizes` of a cache whose forms are not known yet: at most what the budget allows."""
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return _in_memory(f"mixed, at most {budget:g} bits a number", 2 * numbers, int(numbers * budget / 8))


def _in_memory(name: str, before: int, after: int) -> dict:
    return {
        "format": name,
        "bytes_per_token_bfloat16": before,
        "bytes_per_token": after,
        "tokens_per_gib_bfloat16": (1 << 30) // before,
        "tokens_per_gib": (1 << 30) // after,
    }


def told(facts: dict) -> dict:
    """The manifest's entry for a sidecar, from its facts."""
    kept = {
        key: facts[key] for key in ("rotation", "windows", "tokens", "report", "warnings", "budget") if key in facts
    }
    return sizes(forms_in(facts), facts["kv_heads"]) | kept
