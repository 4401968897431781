"""Static ranges, smoothing factors and GPTQ's codes for INT8, from real text, one decoder layer in memory at a time.

For each layer: which linear layers share an input (they get one scale), with smoothing a first pass over all windows for the channels'
reach, the factors of each group and their fold, then a pass for the ranges. Learned factors need no second pass: what the first one saw is
divided by them. The outputs of the unfolded layer are the next layer's inputs. The float model runs: its activations do not depend on how
earlier layers were quantized. Memory is the embeddings, one layer, its statistics, for GPTQ the second moments of all its inputs, and the
hidden states of all windows (twice where a second pass is made), on the device in the model's dtype.

Ranks observe their own windows. The statistics of an input are put together on the rank that owns it, which decides and computes all that
is asked of that input; inputs of a layer do not depend on each other but for the factors that fold into another's rows.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from tilepress.compress.layers.groups import apply, watch_inputs
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import CALIBRATION, HIDDEN, Found, Layer, Visitor, Walk, check_inside
from tilepress.compress.quantize.inputs import Input, Settings
from tilepress.compress.run.plan import Plan, Progress
from tilepress.formats import int8
from tilepress.formats.checkpoint import linear_shape
from tilepress.models.experts import count_of, counting_tokens
from tilepress.ranks import ALONE, Ranks, dealt

T = TypeVar("T")

_PROBED = 2048  # tokens, about, that a layer runs again for each of its inputs to see what quantizing costs
_SENSED, _SENSED_NOISE = (
    256,
    1e-3,
)  # tokens whose logits are looked at, and noise there: small, but above what 16 bits round
_OUTSTANDING = 2.0  # times the usual cost of a weight's element: from there it may stay in 16 bits
_TOGETHER = {
    "cuda": 1 << 27
}  # elements of a layer's inputs that wait, to be looked at in few launches; on a CPU that saves nothing


class Calibration(Found):
    """A finished calibration, which answers by the names of weights."""

    def columns(self, name: str) -> Tensor | None:
        """Return the factors of a weight's columns [in], or None."""
        return self.get(f"columns:{name}")

    def divisors(self, name: str) -> Tensor | None:
        """Return the divisors [out] of a norm's or bias's elements, or of a weight's rows; or None."""
        return self.get(f"divisors:{name}")

    def offset(self, name: str) -> float:
        """The number that a norm adds to its weight before it multiplies."""
        found = self.get(f"offset:{name}")
        return 0.0 if found is None else float(found)

    @cached_property
    def kept(self) -> frozenset[str]:
        """The weights that stay in 16 bits."""
        return frozenset(name for item in self.facts["inputs"] if item.get("kept") for name in item["weights"])

    @cached_property
    def dynamic(self) -> frozenset[str]:
        """The weights of a static scheme whose inputs are quantized per token."""
        return frozenset(name for item in self.facts["inputs"] if item.get("per_token") for name in item["weights"])

    def beside(self, name: str) -> dict[str, Tensor]:
        """Return scale and zero point of a weight's input and, rounded by GPTQ, codes and scale of the weight itself, by the names under
        which they are stored."""
        if name in self.kept:
            return {}
        weight_scale, scale, zero_point = int8.part_names(name)
        kinds = {name: "codes", weight_scale: "weight_scale"}
        if name not in self.dynamic:
            kinds |= {scale: "scale", zero_point: "zero"}
        found = {key: self.get(f"{kind}:{name}") for key, kind in kinds.items()}
        return {key: value for key, value in found.items() if value is not None}


def calibrate(plan: Plan, settings: Settings, device: str, progress: Progress, ranks: Ranks = ALONE) -> Calibration:
    """Run the model over the text; the result is kept in the work folder.

    Raises UsageError for a text without tokens or an architecture that cannot be run layer by layer, TilepressError naming the
    layer for activations that are not finite and layers that saw no token.
    """
    visitor = _Ranges(settings, settings.dtype or plan.targets[0].dtype)
    Walk.over_text(plan, CALIBRATION, visitor, device, progress, ranks).run()
    return Calibration(plan.work)


class _Ranges(Visitor):
    """Calibrates layer by layer; the float model runs on."""

    def __init__(self, settings: Settings, dtype: torch.dtype):
        self.settings, self.dtype, self.all_experts = settings, dtype, settings.all_experts

    def start(self, model: LayerByLayer, windows: list[list[int]], streams: dict[str, list[Tensor]]) -> None:
        check_inside(model)
        streams[HIDDEN][:] = [h.to(model.device) for h in streams[HIDDEN]]

    def visit(self, layer: Layer) -> tuple[dict[str, list], dict[str, Tensor]]:
        facts, tensors = _calibrate_layer(layer, self.settings, self.dtype)
        last = layer.path == layer.model.layers[-1] and not layer.ranks.rank
        if self.settings.weighs_tokens and not self.settings.scheme.static and last:
            facts["sensitivity"] = _sensitivity(layer)
        return facts, tensors

    def finish(self, facts: dict, streams: dict[str, list[Tensor]]) -> dict:
        _keep_worst(facts["inputs"], self.settings.keep)
        if self.settings.dynamic:
            _except_worst(facts["inputs"], self.settings.dynamic)
        sensitivity, noises = facts.pop("sensitivity", []), [item.get("noise") for item in facts["inputs"]]
        if sensitivity and None not in noises:
            left = sum(item["noise"] for item in facts["inputs"] if not item.get("kept"))
            facts["expected_kl"] = sensitivity[0] * left
        return facts


def _keep_worst(inputs: list[dict], share: float) -> None:
    """Keep the linear layers in 16 bits whose quantization costs the residual stream most for each of their elements, as many as a share of
    all elements allows and as stand out. What few layers cost is not paid for with many bytes. Experts stay INT8: runtimes take them as one."""
    sizes = [item.pop("elements", 0) for item in inputs]
    if not (measured := [(item, size) for item, size in zip(inputs, sizes, strict=True) if "noise" in item]):
        return
    usual = sum(item["noise"] for item, _ in measured) / sum(size for _, size in measured)
    left = share * sum(sizes)
    for item, size in sorted(measured, key=lambda pair: -pair[0]["noise"] / pair[1]):
        if item["noise"] >= _OUTSTANDING * usual * size and size <= left:
            left -= size
            for key in ("range", "scale", "zero_point", "clip_share", "output_error"):
                item.pop(key, None)
            item["kept"] = True


def _except_worst(inputs: list[dict], share: float) -> None:
    """Give the inputs that static ranges serve worst a scale per token, as many as a share of all linear layers allows.

    Those come first that add least to the residual stream then, for each linear layer that reads them. Experts stay: runtimes take those
    of a layer as one."""
    left = int(share * sum(len(item["weights"]) for item in inputs))
    gains = [item.get("noise", 0.0) - item.get("noise_per_token", item.get("noise", 0.0)) for item in inputs]
    order = sorted(range(len(inputs)), key=lambda i: -gains[i] / len(inputs[i]["weights"]))
    for item, gain in ((inputs[i], gains[i]) for i in order):
        per_token, noise = item.pop("per_token_error", None), item.pop("noise_per_token", None)
        if gain > 0 and len(item["weights"]) <= left and not item.get("kept"):
            left -= len(item["weights"])
            item["noise"] = noise
            for key in ("range", "scale", "zero_point", "clip_share"):
                item.pop(key)
            item |= {"per_token": True, "output_error": per_token}


def _calibrate_layer(layer: Layer, settings: Settings, dtype: torch.dtype) -> tuple[dict[str, list], dict[str, Tensor]]:
    """Return the layer's part of the manifest, and its tensors."""
    names, smooth = layer.names, settings.smooth != "off"
    with layer.model.loaded(layer.path) as module:
        modules = dict(module.named_modules(prefix=layer.path))
        inputs = [Input(group, settings, dtype, i) for i, group in enumerate(layer.groups(module, fold=smooth))]
        owned = _Owned(layer.ranks, inputs, modules)
        # What comes after is computed from the unfolded layer: a resumed run, which has no factors at hand, then computes the same.
        outputs = list(layer.hidden) if settings.observes_twice else layer.hidden
        probed = _probed(layer) if settings.weighs_tokens else []
        with counting_tokens(modules, layer.model.device) as routed:
            for i, output in enumerate(_observe(layer, modules, owned, counting=not smooth)):
                outputs[i] = output
        if settings.all_experts:
            routed = {path: layer.ranks.sum(counts) for path, counts in routed.items()}
            for item in inputs:
                item.routed = count_of(item.group.linears[0], routed)
        for item in owned.mine:
            if smooth:
                item.choose_factors(modules)
        owned.exchange("factors", "alpha", "left_alone")
        divisors = {item.group.producer: item.factors for item in inputs if item.factors is not None}
        for item in owned.mine:
            item.fold(modules, divisors)
        if settings.observes_twice:
            for item in inputs:
                if item.factors is not None:
                    apply(item.group, modules, item.factors)
            for _ in _observe(layer, modules, owned, counting=True):
                pass
            layer.hidden[:] = outputs
        for item in owned.mine:
            if item.stats.tokens:
                item.choose_range(inputs)
        owned.exchange("range", "scale", "zero_point")
        for item in owned.mine:
            item.choose_range(inputs)
            item.round_weights()
            item.measure(modules)
        _measure_noise(layer, modules, owned.mine, probed)
    told = owned.tell(lambda item: (item.record(names), item.warnings(names)))
    warnings = [warning for _, of_item in told for warning in of_item]
    tensors = {name: tensor for item in owned.mine for name, tensor in item.tensors(layer.model, names).items()}
    return {"inputs": [record for record, _ in told], "warnings": warnings}, tensors


class _Owned:
    """The inputs of a layer, each owned by one rank: the dearest weights first, each to the rank that has least to do."""

    def __init__(self, ranks: Ranks, inputs: list[Input], modules: dict[str, nn.Module]):
        self.ranks, self.inputs = ranks, inputs
        shapes = [[linear_shape(modules[path]) for path in item.group.linears] for item in inputs]
        self.widths = [linears[0][1] for linears in shapes]
        self.owners = dealt([sum(rows * cols**2 for rows, cols, _ in linears) for linears in shapes], ranks.size)
        self.mine = [item for item, rank in zip(inputs, self.owners, strict=True) if rank == ranks.rank]

    def tell(self, tells: Callable[[Input], T]) -> list[T]:
        """Return what each input's owner tells of it, in the order of the inputs."""
        every = self.ranks.tell([tells(item) for item in self.mine])
        found = [iter(of_rank) for of_rank in every]
        return [next(found[rank]) for rank in self.owners]

    def exchange(self, *names: str) -> None:
        """Give every rank what the owners have decided on."""
        if self.ranks.size == 1:
            return
        told = self.tell(lambda item: {name: _moved(getattr(item, name), "cpu") for name in names})
        for item, rank, values in zip(self.inputs, self.owners, told, strict=True):
            for name in names if rank != self.ranks.rank else ():
                setattr(item, name, _moved(values[name], self.ranks.device))

    def agree_on_usual(self) -> None:
        """Take what is usual of each input from the first rank whose first window has shown it."""
        usual = torch.tensor([item.usual() for item in self.inputs], dtype=torch.float64, device=self.ranks.device)
        for item, every in zip(self.inputs, self.ranks.gather(usual).transpose(0, 1).tolist(), strict=True):
            item.settle_usual(*next((each for each in every if not math.isnan(each[0])), every[0]), self.ranks.device)

    def reduce(self, counting: bool) -> None:
        """Put the statistics of all ranks together, each input's on its owner."""
        for item, rank, width in zip(self.inputs, self.owners, self.widths, strict=True):
            item.reduce(self.ranks, rank, width, counting)


def _moved(value, device: str | torch.device):
    return value.to(device) if isinstance(value, Tensor) else value


def _probed(layer: Layer) -> list[Tensor]:
    """Return the first windows of the text, of as many tokens as a look at what quantizing costs takes."""
    found: list[Tensor] = []
    ranks, hidden = layer.ranks, layer.hidden
    for number, length in enumerate(layer.lengths):
        if sum(h.shape[1] for h in found) < _PROBED:
            owner, i = number % ranks.size, number // ranks.size
            window = hidden[i] if owner == ranks.rank else hidden[0].new_empty(1, length, hidden[0].shape[-1])
            found.append(ranks.share(window.contiguous(), owner))
    return found


def _measure_noise(layer: Layer, modules: dict[str, nn.Module], inputs: list[Input], probed: list[Tensor]) -> None:
    """Run the layer with one input's linear layers quantized, and no others: what that adds to its output, squared, relative to each token's
    residual stream. That is one measure for all, whatever the scale of a layer's inner values. Experts are left out."""
    exact = [layer.model.run(layer.path, h) for h in probed]
    energies = [_energy(h.to(out.device), out) for h, out in zip(probed, exact, strict=True)]
    for item in inputs if probed else ():
        if ".experts." in item.group.linears[0] or not item.stats.tokens:
            continue

        def noise(scheme: int8.Int8Scheme, item: Input = item) -> float:
            with item.quantized(modules, scheme):
                off = [layer.model.run(layer.path, h).float() - out for h, out in zip(probed, exact, strict=True)]
            squares = torch.cat([d.square().sum(-1).reshape(-1) for d in off])
            return float((squares / torch.cat(energies).clamp(min=1e-30)).mean())

        item.noise = noise(item.scheme)
        if item.settings.dynamic and item.scheme.static:
            item.noise_per_token = noise(int8.Int8Scheme(item.scheme.weights))


def _sensitivity(layer: Layer) -> list[float]:
    """Return the divergence of the logits, in nats, for each unit of noise, squared and relative, in what the last layer gives; none for a
    model without a head. Noise of one direction as likely as any other stands for what rounding leaves."""
    hidden = layer.hidden[0][:, :_SENSED].to(layer.model.device)
    exact = layer.model.logits(hidden)
    if exact is None:
        return []
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden.device)
    noise *= hidden.float().norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True) * _SENSED_NOISE**0.5
    exact, other = (logits.float().log_softmax(-1) for logits in (exact, layer.model.logits(hidden.float() + noise)))
    return [float((exact.exp() * (exact - other)).sum(-1).mean()) / _SENSED_NOISE]


def _observe(layer: Layer, modules: dict[str, nn.Module], owned: _Owned, counting: bool) -> Iterator[Tensor]:
    """Yield the layer's outputs for all windows; each input sees what reaches it."""
    inputs, shared = owned.inputs, layer.ranks.size > 1
    seeing = {item.group.linears[0]: item for item in inputs}
    for item in inputs:
        item.start()
    together = _TOGETHER.get(layer.model.device.type, 1) // max(len(inputs), 1)
    with watch_inputs(modules, list(seeing), lambda path, x: seeing[path].see(x)):
        for i, (h, output) in enumerate(zip(layer.hidden, layer.outputs(), strict=True)):
            energy = _energy(h, output).to(layer.model.device)
            place = sum(layer.lengths[: layer.number_of(i)]) if shared else None
            for item in inputs:
                item.end_window(energy, counting, together if i or not shared else math.inf, place)
            if not i and shared and inputs and inputs[0].settings.weighs_tokens:
                owned.agree_on_usual()
            yield output
    for item in inputs:
        item.look(counting)
    owned.reduce(counting)


def _energy(before: Tensor, after: Tensor) -> Tensor:
    """Return each token's squared norm in the residual stream [tokens]: the larger of those before and after the layer, one of which may make
    a massive activation."""
    before, after = (h.detach().float().square().sum(-1).reshape(-1) for h in (before, after))
    return torch.maximum(before, after)
