"""Both models of a recovery spread over the ranks, for those that one card does not hold.

FSDP2 of torch (`fully_shard`; Zhao et al. 2023, arXiv 2304.11277): a rank keeps its rows of every tensor, of gradients and of moments. Each decoder
layer is gathered before it runs, on the way there and back, and given back after. So a rank's memory is its part of both models, one layer of
each, what is in no layer, and the activations of its own windows. Gradients are added up where their rows are kept.

A `Spread` that is off keeps whole models: code for a spread model is the code for one.
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.run.targets import Target
from tilepress.ranks import Ranks


class Spread:
    """Whether tensors are spread over ranks, and how they get there and back."""

    def __init__(self, ranks: Ranks, on: bool):
        self.ranks, self.on = ranks, on and ranks.size > 1
        self._mesh = DeviceMesh.from_group(ranks.group, ranks.device.type) if self.on else None

    def load(
        self, model: LayerByLayer, targets: Sequence[Target] = (), put: Callable[[list[Target]], None] | None = None
    ) -> nn.Module:
        """Return a model with all of its weights. `put` gives it other ones of `targets`: of a layer after the other, where it is spread."""
        if not self.on:
            loaded = model.load_all()
            if put:
                put(list(targets))
            return loaded

        def shard(module: nn.Module) -> nn.Module:
            # The root too gives its tensors back after a pass: those that it kept would be old after a step without a backward pass between.
            return fully_shard(module, mesh=self._mesh, reshard_after_forward=True)

        def keep_own(layer: str) -> None:
            if put:
                put(model.targets_of[layer])
            shard(model.model.get_submodule(layer))

        loaded = model.load_all(keep_own)
        if put:
            put([target for target in targets if target.name in model.outside])
        return shard(loaded)


def own(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, in the same memory; a tensor that is not spread as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor. Every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a whole tensor that every rank has, spread as another one is, on its device."""
    tensor = tensor.to(other.device)
    if isinstance(other, DTensor):
        return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
    return tensor


def gathered(tensors: Iterable[tuple[str, Tensor]], ranks: Ranks) -> dict[str, Tensor]:
    """Return tensors whole, on the CPU of the first rank, and none on the others. Every rank must ask; one tensor at a time is whole on a card."""
    found = {}
    for name, tensor in tensors:
        tensor = whole(tensor.detach())
        if not ranks.rank:
            found[name] = tensor.cpu()
    return found
