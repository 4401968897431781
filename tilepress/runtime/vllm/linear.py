"""Linear layers of vLLM whose weights an artifact stores packed.

vLLM's models hand each stored tensor to the `weight_loader` of a parameter, with the number or letter of the projection
that it belongs to (q, k, v; gate, up). How many words a packed weight has only the file knows, so the parameters are
empty: tensors are kept as they come, which for memory-mapped shards costs no memory. As soon as a layer has all of them,
this rank's part goes to the device and the rest is let go. Projections of one input become one product where their tiles
meet. A layer with nothing packed is handed over to vLLM's own method, and so is one that a card has no kernel for, decoded.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs

from tilepress.formats import TilepressError, UsageError
from tilepress.formats.layout import Span, layout_of, layouts, side_suffixes
from tilepress.runtime.linear.cut import VERIFY, Whole, cut
from tilepress.runtime.linear.merged import merge
from tilepress.runtime.linear.packed import PackedLinear
from tilepress.runtime.linear.sparse import SparseLinear

_log = init_logger(f"vllm.{__name__}")  # vLLM shows only what logs under its own name
_WHOLE = None  # the projection's name where one stored matrix is all of a layer


@dataclass
class _Arriving:
    """The stored tensors of a layer that have come so far, by projection and by the part of the weight's name behind it."""

    name: str  # of the layer, for messages
    device: torch.device
    dtype: torch.dtype  # of the model
    sizes: list[int]  # of all projections' outputs, over all ranks
    own: list[Span]  # this rank's of each
    cols: Span | None  # this rank's inputs, where inputs are shared by the ranks
    inputs: int  # over all ranks
    tensors: dict[Hashable, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def projections(self) -> list[Hashable]:
        """The names by which vLLM tells the layer's projections apart, in the order of their rows."""
        if _WHOLE in self.tensors or len(self.sizes) == 1:
            return [_WHOLE]
        return list("qkv") if any(isinstance(name, str) for name in self.tensors) else list(range(len(self.sizes)))

    def whole(self, projection: Hashable) -> Whole | None:
        """Return a projection's stored layer, or None as long as tensors of it are missing."""
        found = self.tensors.get(projection, {})
        if "weight" not in found:
            return None
        rows = sum(self.sizes) if projection is _WHOLE else self.sizes[self.projections.index(projection)]
        name = self.name if projection is _WHOLE else f"{self.name}, projection {projection}"

        def read(part: str, *index: slice) -> Tensor:
            return found[part][index]

        shape, packed = (rows, self.inputs), None
        if found["weight"].dim() != 2:
            if (packed := _assembled(name, found)) is None:
                return None
            form = layout_of(packed).form(packed)
            if (form.rows, form.cols) != shape:
                raise TilepressError(f"{name} is packed as {form.rows} x {form.cols}, the model has {shape}", VERIFY)
        elif not found["weight"].is_floating_point():  # its codes would be taken for numbers
            raise UsageError(
                f"{name} is INT8 in an artifact with sparse layers, which the plug-in does not serve",
                "convert --to dense",
            )
        elif tuple(found["weight"].shape) != shape:
            raise TilepressError(f"{name} is {list(found['weight'].shape)}, the model has {list(shape)}", VERIFY)
        return Whole(name, shape, False, read, packed)

    def parts(self) -> list[tuple[Whole, list[Span]]] | None:
        """Return the stored layers with this rank's rows of each, or None as long as one is missing."""
        wholes = [self.whole(projection) for projection in self.projections]
        if any(whole is None for whole in wholes):
            return None
        if len(wholes) == len(self.own):
            return [(whole, [own]) for whole, own in zip(wholes, self.own, strict=True)]
        spans, start = [], 0  # one stored matrix of several projections
        for size, (first, end) in zip(self.sizes, self.own, strict=True):
            spans.append((start + first, start + end))
            start += size
        return [(wholes[0], spans)]


def _assembled(name: str, tensors: dict[str, Tensor]):
    """Return the packed weight of stored tensors, or None where some are missing."""
    for layout in layouts().values():
        if layout.packed and layout.sparse and layout.described_by and f"weight{layout.described_by}" in tensors:
            if (parts := layout.parts("weight", tensors)) is None:
                return None
            try:
                return layout.assemble(name, {part: tensors[part] for part in parts})
            except TilepressError:
                if len(parts) < len(layout.suffixes) + len(layout.optional_suffixes):
                    return None  # a scale may still come
                raise
    return None


class TilepressLinearMethod(LinearMethodBase):
    """Collects the stored tensors of a linear layer, and multiplies by what becomes of them."""

    def __init__(self, prefix: str):
        self.prefix = prefix

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Give the layer an empty parameter for each tensor that a layout may store."""
        sizes, own = _outputs(layer, output_partition_sizes, output_size)
        cols = None
        if input_size_per_partition != input_size:
            cols = layer.tp_rank * input_size_per_partition, (layer.tp_rank + 1) * input_size_per_partition
        empty = torch.empty(0, dtype=params_dtype)
        layer.arriving = _Arriving(self.prefix, empty.device, params_dtype, sizes, own, cols, input_size)
        for suffix in ("", *side_suffixes()):
            parameter = nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": partial(self._take, layer, f"weight{suffix}")})
            layer.register_parameter(f"weight{suffix}", parameter)

    def _take(self, layer: LinearBase, part: str, parameter, loaded: Tensor, projection: Hashable = _WHOLE) -> None:
        """Keep a tensor that vLLM has read; with the last one of a layer, put the layer together."""
        arriving = layer.arriving
        if arriving is None:
            raise UsageError(
                f"{self.prefix} is loaded already", "vLLM's reloading of weights is not served: start anew"
            )
        if isinstance(projection, tuple):
            raise UsageError(
                f"{self.prefix}: projections {projection} stored as one are not served", "convert --to dense"
            )
        arriving.tensors.setdefault(projection, {})[part] = loaded
        if (parts := arriving.parts()) is not None and any(whole.packed is not None for whole, _ in parts):
            self._put_together(layer, parts)

    def _put_together(self, layer: LinearBase, parts: list[tuple[Whole, list[Span]]]) -> None:
        dtype = layer.arriving.dtype
        linears = self._cut(layer, parts)
        if why := next((why for linear in linears if (why := _why_no_kernel(linear, dtype))), None):
            _log.warning_once(
                "No kernel multiplies packed weights here: %s. They are decoded, and take the memory of dense ones.",
                why,
            )
            self._hand_over(layer, _decoded(self.prefix, linears, dtype))
            return
        layer.packed = merge(linears)
        # What asks a layer for its device or dtype looks here: adapters, for one.
        layer.register_buffer("weight", getattr(layer.packed, "weight", linears[0].weight), persistent=False)

    def _cut(self, layer: LinearBase, parts: list[tuple[Whole, list[Span]]]) -> list[nn.Module]:
        """Return this rank's linears on its device, and let go of the stored tensors and the empty parameters."""
        arriving: _Arriving = layer.arriving
        layer.arriving = None
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        where = arriving.cols, arriving.dtype, arriving.device
        return [cut(whole, rows, *where) for whole, spans in parts for rows in spans]

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Check that the layer is whole; hand it over to vLLM's own method where nothing of it is packed.

        Raises TilepressError where tensors of it are missing."""
        if (arriving := layer.arriving) is None:
            return
        if (parts := arriving.parts()) is None:
            found = sorted({part for tensors in arriving.tensors.values() for part in tensors})
            raise TilepressError(f"{self.prefix} is incomplete: the files have {found or 'nothing'} of it", VERIFY)
        self._hand_over(layer, merge(self._cut(layer, parts)).weight)
        layer.quant_method.process_weights_after_loading(layer)

    def _hand_over(self, layer: LinearBase, weight: Tensor) -> None:
        """Leave a layer with a dense weight to vLLM's own method."""
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.quant_method = UnquantizedLinearMethod()

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., inputs of this rank] -> [..., outputs of this rank]."""
        if isinstance(layer.packed, SparseLinear):
            return layer.packed.multiply(x, bias)
        product = layer.packed(x)
        return product if bias is None else product + bias


def _why_no_kernel(linear: nn.Module, dtype: torch.dtype) -> str | None:
    """Return why a card has no kernel for a layer, so that its reference would decode it in every call; None on CPUs, too."""
    return (linear.path_for(dtype).why or None) if isinstance(linear, PackedLinear) else None


def _decoded(name: str, linears: list[nn.Module], dtype: torch.dtype) -> Tensor:
    """Return the weights of linears one below the other, dense. Raises UsageError where there is no memory for them."""
    try:
        each = [linear.dense() if isinstance(linear, PackedLinear) else linear.weight for linear in linears]
        return torch.cat([weight.to(dtype) for weight in each])
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"no kernel multiplies {name} here, and there is no memory to decode it",
            "`tilepress env` says what kernels lack",
        ) from error


def _outputs(layer: LinearBase, partition_sizes: list[int], output_size: int) -> tuple[list[int], list[Span]]:
    """Return the number of outputs of each projection over all ranks, and this rank's outputs of each."""
    rank = layer.tp_rank
    if isinstance(layer, QKVParallelLinear):
        heads = layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads
        each = layer.head_size, layer.head_size, getattr(layer, "v_head_size", layer.head_size)
        sizes = [count * dim for count, dim in zip(heads, each, strict=True)]
        at = rank, rank // layer.num_kv_head_replicas, rank // layer.num_kv_head_replicas
    else:
        sizes = list(getattr(layer, "output_sizes", [output_size]))
        at = [rank if sum(partition_sizes) < sum(sizes) else 0] * len(sizes)
    return sizes, [(i * width, (i + 1) * width) for i, width in zip(at, partition_sizes, strict=True)]


def refuse_packed(method: QuantizeMethodBase, why: str, hint: str) -> QuantizeMethodBase:
    """Return a method of vLLM's own that refuses a packed weight with a message, before anything is read as something else."""
    create = method.create_weights

    def create_weights(layer: nn.Module, *args, **kwargs) -> None:
        create(layer, *args, **kwargs)
        for parameter in layer.parameters(recurse=False):
            load = getattr(parameter, "weight_loader", None)
            if load is None:
                continue

            def checked(*args, load=load, **kwargs):
                for value in (*args, *kwargs.values()):
                    if isinstance(value, Tensor) and value.dim() == 1 and value.dtype == torch.int32:
                        raise UsageError(why, hint)
                return load(*args, **kwargs)

            parameter.weight_loader = checked

    method.create_weights = create_weights
    return method
