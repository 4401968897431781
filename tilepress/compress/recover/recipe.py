"""Recovery: the weights that pruning left are trained, with every zero held, until the model does again what the dense one did.

The recipe behind `tilepress compress recover` (an artifact that is pruned already, its dense model beside it), and with a pruning recipe inside
behind `tilepress compress prune --recover`. How it is trained: distill.py; whole or block by block: retrain.py; what it costs and brings:
docs/recovery.md.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import Found, Walk, finished, identity_of, keep
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
    Recovery,
    hidden_size,
    keeps_activations,
    layer_count,
    memory_bytes,
)
from tilepress.compress.run.encode import Compressed, Layout, layout_for
from tilepress.compress.run.plan import Plan, Progress, Recipe
from tilepress.compress.run.targets import LeftAlone, Target, check_value_dtypes, find_targets
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.artifact import sha256_file
from tilepress.formats.checkpoint import Checkpoint
from tilepress.text import check_vocabulary, check_window, load_tokenizer, token_ids

RECOVERY = "recovery"  # the name of what is found, in the work folder
_MOST_TOKENS = 8 << 20  # of text read; what training sees beyond are the same again, cut from other offsets
_PRUNED_FROM = 0.01  # share of zeros from which a weight counts as pruned
_UNLIKE = 0.3  # cosine of kept weights and the base's below which the base is another model


@dataclass(frozen=True)
class RecoverRecipe(Recipe):
    """`prune` is what makes the zeros; without it the source has them already, and `base` is the dense model that it came from."""

    recovery: Recovery
    prune: Recipe | None = None
    base: Path | None = None
    base_name: str | None = None
    density: float = 1.0  # expected of the result, where there is no pruning recipe to ask
    trust_remote_code: bool = False
    save_every_s: float = 300.0

    @property
    def command(self) -> str:
        return self.prune.command if self.prune else "compress recover"

    @property
    def ignore(self) -> tuple[str, ...]:
        return self.prune.ignore if self.prune else ()

    @property
    def dtype(self) -> torch.dtype | None:
        return self.prune.dtype if self.prune else None

    @property
    def passes(self) -> int:
        return self.prune.passes if self.prune else 1

    def find_targets(
        self, checkpoint: Checkpoint, trust_remote_code: bool = False
    ) -> tuple[list[Target], list[LeftAlone]]:
        if self.prune:
            return self.prune.find_targets(checkpoint, trust_remote_code)
        return find_targets(checkpoint, (), trust_remote_code)

    def layout(self, target: Target) -> Layout:
        return self.prune.layout(target) if self.prune else layout_for(target.weight.layout)

    def expected_density(self) -> float:
        return self.prune.expected_density() if self.prune else self.density

    def settings(self) -> dict:
        own = asdict(self.recovery)
        if self.prune:
            return self.prune.settings() | {f"recover_{key}": value for key, value in own.items()}
        return {"base": self.base_name} | own

    def check(self, checkpoint: Checkpoint, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        check_window(self.recovery.seqlen, checkpoint.text_config)
        if self.prune:
            self.prune.check(checkpoint, targets, left_alone)
            return
        packed = {t.name: t.dtype for t in targets if t.weight.layout != "dense"}
        check_value_dtypes(packed)
        _check_base(checkpoint, Checkpoint(self.base), targets)

    def work_units(self, plan: Plan, rank: int, world_size: int) -> int:
        """A step of the whole model counts as the elements of its targets, as one pass over them does."""
        inner = (self.prune or super()).work_units(plan, rank, world_size)
        return inner + self.recovery.steps * sum(target.elements for target in plan.targets)

    def foreseen(self, checkpoint: Checkpoint) -> dict:
        targets, _ = self.find_targets(checkpoint, self.trust_remote_code)
        memory = {
            way: {kind: memory_bytes(checkpoint, targets, self.recovery, way, kind) for kind in ("cuda", "cpu")}
            for way in ("model", "blocks")
        }
        inner = self.prune.foreseen(checkpoint) if self.prune else {}
        return inner | {"recovery": {"way": self._way, "memory_bytes": memory}}

    def peak_bytes(self, checkpoint: Checkpoint, targets: list[Target]) -> int:
        inner = self.prune.peak_bytes(checkpoint, targets) if self.prune else super().peak_bytes(checkpoint, targets)
        return max(inner, memory_bytes(checkpoint, targets, self.recovery, self._way, "cpu"))

    @property
    def _way(self) -> str:
        return "blocks" if self.recovery.blocks else "model"

    def prepare(self, plan: Plan, rank: int, device: str, progress: Progress) -> dict | None:
        ids, stream = _text(plan, self)  # first, so that too little of it is told before the work
        inner = self.prune.prepare(plan, rank, device, progress) if self.prune else {}
        if inner is None:
            return None
        recover(plan, self, inner, ids, stream, device, progress)
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


def _text(plan: Plan, recipe: RecoverRecipe) -> tuple[list[int], Stream]:
    """As many tokens as training will see, as far as the text has them. Raises UsageError for less than two windows."""
    recovery, tokenizer = recipe.recovery, load_tokenizer(plan.source, recipe.trust_remote_code)
    needed = recovery.nsamples * recovery.seqlen if recovery.blocks else _MOST_TOKENS
    needed = min(recovery.tokens, needed) + HELD_OUT * recovery.seqlen
    ids = token_ids(tokenizer, recovery.dataset, needed, seed=recovery.seed, special_tokens=False)
    return ids, Stream(ids, tokenizer("")["input_ids"][:1], recovery.seqlen, recovery.seed, recovery.noise)


def recover(
    plan: Plan, recipe: RecoverRecipe, inner: dict, ids: list[int], stream: Stream, device: str, progress: Progress
) -> None:
    """Trains, and leaves tensors and facts in the work folder; finds them there when it is resumed.

    Raises TilepressError for a loss that is not finite or a card without room, UsageError where the folder holds what was trained from something else.
    """
    recovery, source = recipe.recovery, Checkpoint(plan.source)
    base = source if recipe.prune else Checkpoint(recipe.base, name=recipe.base_name)
    identity = identity_of(plan, [ids], device, torch.float32, base)
    if finished(plan, RECOVERY, identity, recovery.dataset):  # and shards may have been written from it
        (plan.work / STATE).unlink(missing_ok=True)
        progress("recovered already", recovery.steps * sum(target.elements for target in plan.targets))
        return
    pair, dtypes = _pair(plan, recipe, source, base, inner, device)
    check_vocabulary([ids], pair.student.model)
    width = hidden_size(source, plan.targets)
    training = Training(
        recovery.steps,
        recovery.batch,
        recovery.windows_at_once,
        recovery.peak_lr(width),
        recovery.hidden_loss,
        recovery.train,
        recovery.seed,
        recipe.save_every_s,
    )
    facts = {
        "way": recipe._way,
        "learning_rate": training.peak_lr,
        "text_tokens": len(ids),
        "held_out_tokens": stream.held * recovery.seqlen,
        "tokens": recovery.tokens,
        "computed_in": "bfloat16" if pair.student.device.type == "cuda" else "float32",
        "device": pair.student.device.type,
        "warnings": [],
    }
    if not recipe.prune:
        facts["base"] = [{"name": name, "sha256": sha256_file(base.path / name)} for name in base.shards]
    try:
        with same_every_time():
            if recovery.blocks:
                windows = [*stream.batch(0, min(recovery.nsamples, stream.per_epoch)), *stream.held_out]
                ids = [window.tolist() for window in windows]
                visitor = BlockTrainer(pair, plan.targets, stream.held, training, dtypes)
                Walk(plan, RECOVERY, visitor, recovery.dataset, ids, device, progress, identity, facts).run()
            else:
                stream = stream.to(pair.student.device)
                keeps = keeps_activations(source, plan.targets, recovery)
                facts |= train_model(pair, plan.targets, stream, training, dtypes, keeps, plan.work, identity, progress)
                facts["warnings"] += [in_vain("the model")] if facts["kl_after"] >= facts["kl_before"] else []
                keep(plan.work, RECOVERY, identity, facts, [TENSORS])
    except torch.OutOfMemoryError as error:
        raise TilepressError(
            f"the card has too little memory for recovery ({str(error).splitlines()[0][:100]})",
            "go on with --resume after freeing some, take a smaller --micro-batch, or train block by block: --blocks",
        ) from error
    (plan.work / STATE).unlink(missing_ok=True)  # six times the weights, which are packed next


def _pair(
    plan: Plan, recipe: RecoverRecipe, source: Checkpoint, base: Checkpoint, inner: dict, device: str
) -> tuple[Pair, dict[str, torch.dtype]]:
    """Both models, without their layers' weights yet, and the dtype that each tensor is stored in."""
    targets, stored = plan.targets, plan.targets[0].dtype
    student = LayerByLayer(source, targets, device, torch.float32, recipe.dtype, recipe.trust_remote_code)
    theirs, _ = find_targets(base, (), recipe.trust_remote_code)
    compute = torch.float32 if device == "cpu" else {torch.float32: torch.bfloat16}.get(stored, stored)
    teacher = LayerByLayer(base, theirs, device, compute, None, recipe.trust_remote_code)
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
    packed = [weight.name for weight in base.weights.values() if weight.layout != "dense"]
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


def density_of(checkpoint: Checkpoint) -> float:
    """The share of non-zeros in an artifact's packed and pruned weights, from its manifest; 1 without one."""
    tensors = [t for t in (checkpoint.manifest or {}).get("tensors", []) if "zeros" in t]
    elements = sum(t["zeros"] + t["nonzeros"] for t in tensors)
    return sum(t["nonzeros"] for t in tensors) / elements if elements else 1.0
