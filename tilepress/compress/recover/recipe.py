"""Recovery: the weights that pruning left are trained, with every zero held, until the model does again what the dense one did.

The recipe behind `tilepress compress recover` (an artifact that is pruned already, its dense model beside it), and with a pruning recipe inside
behind `tilepress compress prune --recover`. How it is trained: distillation.py; whole or block by block: retraining.py; what it costs and
brings: docs/recovery.md.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import Found, Walk, check_alike, finished, identity_of, keep
from tilepress.compress.prune import expectation
from tilepress.compress.prune.recipe import Prune
from tilepress.compress.recover.distillation import same_every_time
from tilepress.compress.recover.retraining import (
    STATE,
    TENSORS,
    BlockTrainer,
    Pair,
    Stream,
    Training,
    in_vain,
    train_model,
)
from tilepress.compress.recover.settings import (
    HELD_OUT,
    Settings,
    hidden_size,
    keeps_activations,
    layer_count,
    memory_bytes,
)
from tilepress.compress.recover.sharded import Spread
from tilepress.compress.run.encode import Compressed, layout_for
from tilepress.compress.run.plan import Inputs, ModelCard, Plan, Progress, Recipe
from tilepress.compress.run.targets import LeftAlone, Target, check_value_dtypes, find_targets
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.artifact import sha256_file
from tilepress.formats.checkpoint import Checkpoint, open_model
from tilepress.formats.layout import Layout
from tilepress.models.meta import check_fit
from tilepress.ranks import ALONE, Ranks
from tilepress.text import Text, check_vocabulary, load_tokenizer, token_ids, window_start

RECOVERY = "recovery"  # the name of what is found, in the work folder
_MOST_TOKENS = 8 << 20  # of text read; what training sees beyond are the same again, cut from other offsets
_PRUNED_FROM = 0.01  # share of zeros from which a weight counts as pruned
FSDP = ("auto", "always", "never")
_ROOM = 0.85  # of a card's free memory: what both models and their training may take of it
_UNLIKE = 0.3  # cosine of kept weights and the base's below which the base is another model


@dataclass(frozen=True)
class Recover(Settings, Recipe):
    """Train the weights that pruning left, with every zero held: the recipe of `tilepress compress recover`.

    The model is one that is pruned already, and `base` the dense model that it was pruned from, which a stack of recipes fills in. With `prune`
    the model is dense, and is pruned and trained in one run, as by `compress prune --recover`. Raises UsageError for a setting that makes no
    sense."""

    base: str | Path | None = None  # a folder or hub id
    base_name: str | None = None  # what the manifest calls the base; its hub id or folder unless given
    prune: Prune | None = None
    save_every_s: float = 300.0  # how often the state is kept for a run that goes on
    fsdp: str = (
        "auto"  # auto | always | never: ranks have a part of both models each; auto: where a card has no room for all
    )

    command = "compress recover"
    alone = True
    together = True
    needs_text = True

    def __post_init__(self):
        super().__post_init__()
        if self.fsdp not in FSDP:
            raise UsageError(f"--fsdp {self.fsdp} is unknown", f"choose one of {', '.join(FSDP)}")
        if self.prune:
            object.__setattr__(self, "command", self.prune.command)
        if self.prune and self.prune.value_dtype == "int8":
            raise UsageError(
                "--recover trains floating values, in one process",
                "prune with --recover alone, then `tilepress compress quantize --activations none` for INT8 values",
            )

    @property
    def ignore(self) -> tuple[str, ...]:
        return self.prune.ignore if self.prune else ()

    @property
    def dtype(self) -> torch.dtype | None:
        return self.prune.dtype if self.prune else None

    def passes(self, text: Text | None) -> int:
        return self.prune.passes(text) if self.prune else 1

    def settled(self) -> Recipe:
        if self.prune:
            return self
        if self.base is None:
            raise UsageError("recovery needs the dense model", "name it: --base MODEL, or Recover(…, base=MODEL)")
        dense = open_model(self.base)
        return replace(self, base=dense.path, base_name=self.base_name or dense.name)

    def after(self, model: Checkpoint) -> Recipe:
        return self if self.prune or self.base else replace(self, base=model.path, base_name=model.name)

    def reads(self) -> tuple[Path, ...]:
        return () if self.prune or self.base is None else (Path(self.base),)

    def find_targets(self, inputs: Inputs) -> tuple[list[Target], list[LeftAlone]]:
        return self.prune.find_targets(inputs) if self.prune else super().find_targets(inputs)

    def layout(self, target: Target) -> Layout:
        return self.prune.layout(target) if self.prune else layout_for(target.weight.layout)

    def expected_density(self, inputs: Inputs) -> float:
        return self.prune.expected_density(inputs) if self.prune else _density(inputs.checkpoint)

    def settings(self, text: Text | None) -> dict:
        own = self.described(text)
        if self.prune:
            return self.prune.settings(text) | {f"recover_{key}": value for key, value in own.items()}
        return {"base": self.base_name} | own

    def check(self, inputs: Inputs, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        if inputs.text.nsamples < 2:
            raise UsageError(f"--nsamples {inputs.text.nsamples} is too small", "use at least 2")
        if self.prune:
            self.prune.check(inputs, targets, left_alone)
            return
        packed = {t.name: t.dtype for t in targets if t.weight.is_packed}
        check_value_dtypes(packed)
        base = Checkpoint(self.base, name=self.base_name)
        check_fit(base, inputs.trust_remote_code)
        _check_base(inputs.checkpoint, base, targets)

    def work_units(self, plan: Plan, rank: int, world_size: int) -> int:
        """A step of the whole model counts as the elements of its targets, as one pass over them does."""
        inner = (self.prune or super()).work_units(plan, rank, world_size)
        return inner + self.steps * sum(target.elements for target in plan.targets)

    def foreseen(self, inputs: Inputs) -> dict:
        targets, _ = self.find_targets(inputs)
        memory = {
            way: {kind: memory_bytes(inputs, targets, self, way, kind) for kind in ("cuda", "cpu")}
            for way in ("model", "blocks")
        }
        inner = self.prune.foreseen(inputs) if self.prune else {}
        return inner | {"recovery": {"way": self._way, "memory_bytes": memory}}

    def peak_bytes(self, inputs: Inputs, targets: list[Target]) -> int:
        inner = self.prune.peak_bytes(inputs, targets) if self.prune else super().peak_bytes(inputs, targets)
        return max(inner, memory_bytes(inputs, targets, self, self._way, "cpu"))

    @property
    def _way(self) -> str:
        return "blocks" if self.blocks else "model"

    def prepare(self, plan: Plan, rank: int, device: str, progress: Progress, ranks: Ranks = ALONE) -> dict | None:
        ids, stream = _text(plan, self)  # first, so that too little of it is told before the work
        inner = self.prune.prepare(plan, rank, device, progress, ranks) if self.prune else {}
        if inner is None:
            return None
        recover(plan, self, inner, ids, stream, device, progress, ranks)
        return {"prune": inner, "recovered": Found(plan.work, RECOVERY)}

    def transform(self, target: Target, weight: Tensor, state: dict) -> Compressed:
        found = state["recovered"].get(target.name)
        if found is None:
            return self.prune.transform(target, weight, state["prune"]) if self.prune else Compressed(weight, {})
        values = (found.t() if target.transposed else found).contiguous().to(weight.device)
        wide = weight.float()
        error = float((values.float() - wide).norm() / wide.norm().clamp(min=1e-30))
        zeros = values.numel() - int(torch.count_nonzero(values))
        return Compressed(values, {"zeros": zeros, "error": round(error, 6), "trained": True})

    def copy(self, name: str, tensor: Tensor, state: dict) -> Compressed:
        found = state["recovered"].get(name)
        if found is None:
            return self.prune.copy(name, tensor, state["prune"]) if self.prune else Compressed(tensor, {})
        return Compressed(found, {"trained": True})

    def describe(self, plan: Plan, tensors: list[dict]) -> dict:
        inner = self.prune.describe(plan, tensors) if self.prune else {}
        return inner | {"recovery": Found(plan.work, RECOVERY).facts}

    def extra_files(self, plan: Plan) -> dict[str, bytes]:
        return self.prune.extra_files(plan) if self.prune else {}

    @classmethod
    def made(cls, step: dict) -> bool:
        return expectation.trained(step)

    @classmethod
    def model_card(cls, manifest: dict, steps: list[dict]) -> ModelCard:
        """Describe what training gained, unless the model was pruned once more since."""
        rows = []
        if "recovery" in manifest:
            rows.append(f"| recovered | by distillation from the dense model, {_brought(manifest['recovery'])} |")
        number = next((i for i, step in enumerate(steps) if "method" in step["settings"]), len(steps) - 1)
        if not any(map(cls.made, steps[: number + 1])):
            return ModelCard(tuple(rows))
        method, sparsity = (steps[number]["settings"].get(key) for key in ("method", "sparsity"))
        by, known = (f" by {method} to {sparsity:.0%} zeros", expectation.recovered(sparsity)) if method else ("", None)
        told = f"What pruning{by} left was trained against the dense model, every zero held"
        warned = [f"**Warning**: {warning}." for warning in manifest.get("recovery", {}).get("warnings", [])]
        return ModelCard(tuple(rows), (f"{told}; {known}." if known else f"{told}.", *warned))


def _brought(told: dict) -> str:
    """Tell which text training saw, and what it gained on held-out text."""
    if told["way"] == "blocks":
        last = told["layers"][-1]
        return (
            f"{told['tokens']:,} tokens a layer, held-out error of the last layer's output {last['error_before']:.4f} -> "
            f"{last['error_after']:.4f} (every layer's is in `tilepress.json`)"
        )
    return f"{told['tokens']:,} tokens, held-out KL divergence {told['kl_before']:.4f} -> {told['kl_after']:.4f}"


def _text(plan: Plan, recipe: Recover) -> tuple[list[int], Stream]:
    """Read as many tokens as training will see, as far as the text has them.

    Raises UsageError for less than two windows.
    """
    text, tokenizer = plan.text, load_tokenizer(plan.source, plan.trust_remote_code)
    needed = text.nsamples * text.seqlen if recipe.blocks else _MOST_TOKENS
    needed = min(recipe.tokens(text), needed) + HELD_OUT * text.seqlen
    ids = token_ids(tokenizer, text.source, needed, seed=text.seed, special_tokens=False)
    return ids, Stream(ids, window_start(tokenizer, text.bos), text.seqlen, text.seed, recipe.noise)


def recover(
    plan: Plan,
    recipe: Recover,
    inner: dict,
    ids: list[int],
    stream: Stream,
    device: str,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> None:
    """Trains, and leaves tensors and facts in the work folder; finds them there when it is resumed. Ranks share the windows of every step.

    Raises TilepressError for a loss that is not finite or a card without room, UsageError where the folder holds what was trained from something
    else, and for ranks that would not do the same, or that have nothing to do.
    """
    text, source = plan.text, Checkpoint(plan.source)
    if ranks.size > 1:
        check_alike(plan, [ids], torch.device(device).type, ranks)
        least = min(recipe.batch, stream.per_epoch, text.nsamples if recipe.blocks else recipe.batch)
        if least < ranks.size:
            raise UsageError(
                f"a step has {recipe.batch} windows, of {stream.per_epoch} in all, for {ranks.size} ranks: each needs one",
                "start fewer ranks, or give a larger --batch or more text",
            )
    base = source if recipe.prune else Checkpoint(recipe.base, name=recipe.base_name)
    identity = identity_of(plan, [ids], device, torch.float32, base)
    if ranks.first(lambda: finished(plan, RECOVERY, identity, text.dataset) is not None):  # shards may be of it
        (plan.work / STATE).unlink(missing_ok=True)
        progress("recovered already", recipe.steps * sum(target.elements for target in plan.targets))
        return
    spread = Spread(ranks, not recipe.blocks and _is_spread(plan, recipe, source, ranks))
    if spread.on and recipe.batch % ranks.size:
        raise UsageError(
            f"a step has {recipe.batch} windows for {ranks.size} ranks, between which both models are spread",
            "give a --batch that the ranks divide",
        )
    pair, dtypes = _pair(plan, recipe, source, base, inner, device)
    check_vocabulary([ids], pair.student.model)
    width = hidden_size(source, plan.targets)
    training = Training(
        recipe.steps,
        recipe.batch,
        recipe.windows_at_once(text),
        recipe.peak_lr(width),
        recipe.hidden_loss,
        recipe.train,
        text.seed,
        recipe.save_every_s,
    )
    facts = {
        "way": recipe._way,
        "learning_rate": training.peak_lr,
        "text_tokens": len(ids),
        "held_out_tokens": stream.held * text.seqlen,
        "tokens": recipe.tokens(text),
        "computed_in": "bfloat16" if pair.student.device.type == "cuda" else "float32",
        "device": pair.student.device.type,
        "warnings": [],
    }
    if ranks.size > 1:
        facts |= {"ranks": ranks.size, "fsdp": spread.on}
    if not recipe.prune:
        facts["base"] = [{"name": name, "sha256": sha256_file(base.path / name)} for name in base.shards]
    try:
        with same_every_time():
            if recipe.blocks:
                windows = [*stream.batch(0, min(text.nsamples, stream.per_epoch)), *stream.held_out]
                ids = [window.tolist() for window in windows]
                visitor = BlockTrainer(pair, plan.targets, stream.held, training, dtypes)
                Walk(plan, RECOVERY, visitor, text.dataset, ids, device, progress, identity, facts, ranks).run()
            else:
                stream = stream.to(pair.student.device)
                tokens = training.micro_batch * text.seqlen
                keeps = partial(keeps_activations, source, plan.targets, tokens)
                facts |= train_model(
                    pair, plan.targets, stream, training, dtypes, keeps, plan.work, identity, progress, spread
                )
                facts["warnings"] += [in_vain("the model")] if facts["kl_after"] >= facts["kl_before"] else []
                if not ranks.rank:
                    keep(plan.work, RECOVERY, identity, facts, [TENSORS])
    except torch.OutOfMemoryError as error:
        raise TilepressError(
            f"the card has too little memory for recovery ({str(error).splitlines()[0][:100]})",
            "go on with --resume after freeing some, take a smaller --micro-batch, or train block by block: --blocks",
        ) from error
    ranks.wait()
    (plan.work / STATE).unlink(missing_ok=True)  # six times the weights, which are packed next


def _is_spread(plan: Plan, recipe: Recover, source: Checkpoint, ranks: Ranks) -> bool:
    """Return whether ranks have a part of both models each: the same on all of them."""
    if ranks.size < 2 or recipe.fsdp != "auto" or ranks.device.type != "cuda":
        return recipe.fsdp == "always"
    needed = memory_bytes(Inputs(source, plan.text, plan.trust_remote_code), plan.targets, recipe, "model", "cuda")
    free, _ = torch.cuda.mem_get_info(ranks.device)
    return needed > _ROOM * ranks.least(free)


def _pair(
    plan: Plan, recipe: Recover, source: Checkpoint, base: Checkpoint, inner: dict, device: str
) -> tuple[Pair, dict[str, torch.dtype]]:
    """Return both models, without their layers' weights yet, and the dtype that each tensor is stored in."""
    targets, stored = plan.targets, plan.targets[0].dtype
    student = LayerByLayer(source, targets, device, torch.float32, recipe.dtype, plan.trust_remote_code)
    theirs, _ = find_targets(base, (), plan.trust_remote_code)
    compute = torch.float32 if device == "cpu" else {torch.float32: torch.bfloat16}.get(stored, stored)
    teacher = LayerByLayer(base, theirs, device, compute, None, plan.trust_remote_code)
    unplaced = [target.name for target in targets if target.name not in student.module_of]
    if unplaced:
        raise UsageError(f"{unplaced[0]} has no place in the model", "leave it out of pruning with --ignore")

    def start(target: Target) -> Tensor:
        weight = source.dense(target.weight, device)
        if recipe.prune is None:
            return weight
        weight = weight.to(recipe.dtype or weight.dtype)
        made = recipe.prune.transform(target, (weight.t() if target.transposed else weight).contiguous(), inner).weight
        return made.t() if target.transposed else made

    dtypes = {target.name: recipe.dtype or target.dtype for target in targets}
    for name, entry in source.tensors.items():
        if entry.dtype.is_floating_point:
            dtypes.setdefault(name, recipe.dtype or entry.dtype)
    return Pair(student, teacher, start), dtypes


def _check_base(source: Checkpoint, base: Checkpoint, targets: list[Target]) -> None:
    """Raises UsageError for a source without zeros, or a base that it cannot have been made from."""
    pruned = next((target for target in targets if _share_of_zeros(source, target) >= _PRUNED_FROM), None)
    if pruned is None:
        raise UsageError(
            f"{source.name} has no pruned weight: recovery trains what pruning left",
            "prune it first, or prune and recover at once: `tilepress compress prune … --recover STEPS`",
        )
    hint = "--base is the dense model that the artifact was pruned from"
    packed = [weight.name for weight in base.weights.values() if weight.is_packed]
    if packed:
        raise UsageError(f"the base {base.name} is compressed itself ({packed[0]})", hint)
    for key, ours, theirs in (
        ("model_type", source.config.get("model_type"), base.config.get("model_type")),
        ("vocab_size", source.text_config.get("vocab_size"), base.text_config.get("vocab_size")),
        ("decoder layers", layer_count(source), layer_count(base)),
    ):
        if ours != theirs:
            raise UsageError(f"{source.name} has {key} {ours}, the base {base.name} {theirs}", hint)
    for target in targets:
        shape = (target.cols, target.rows) if target.transposed else (target.rows, target.cols)
        theirs = base.tensors.get(target.name)
        if theirs is None or theirs.shape != shape:
            what = "is not there" if theirs is None else f"is {list(theirs.shape)}"
            raise UsageError(f"{target.name} is {list(shape)}, in the base {base.name} it {what}", hint)
    ours, theirs = source.dense(pruned.weight).float(), base.read(pruned.name).float()
    if int(torch.count_nonzero(theirs)) <= int(torch.count_nonzero(ours)):
        raise UsageError(f"{pruned.name} has as many zeros in the base {base.name}: it is pruned itself", hint)
    cosine = float(torch.nn.functional.cosine_similarity(ours.flatten(), (theirs * (ours != 0)).flatten(), dim=0))
    if cosine < _UNLIKE:
        raise UsageError(
            f"what is left of {pruned.name} is unlike the base {base.name} (cosine {cosine:.2f}): it is another model",
            hint,
        )


def _share_of_zeros(checkpoint: Checkpoint, target: Target) -> float:
    weight = checkpoint.dense(target.weight)
    return 1 - int(torch.count_nonzero(weight)) / weight.numel()


def _density(checkpoint: Checkpoint) -> float:
    """The share of non-zeros in an artifact's packed and pruned weights, from its manifest; 1 without one."""
    tensors = [t for t in (checkpoint.manifest or {}).get("tensors", []) if "zeros" in t]
    elements = sum(t["zeros"] + t["nonzeros"] for t in tensors)
    return sum(t["nonzeros"] for t in tensors) / elements if elements else 1.0
