"""The modules that take the place of a linear layer when its weight is packed: what each can do, and which runs which layout.

A layout's module is registered under its name, in the file that defines it. Those of this package are listed below; a
package of its own registers one beside its layout (formats/layout.py).
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tilepress.formats import TilepressError
from tilepress.formats.int8 import Int8Scheme
from tilepress.formats.layout import layout_of
from tilepress.kernels.arch import Path

_BUILT_IN = ("sparse", "int8")  # modules of this package


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored in a layout, in place of nn.Linear and of transformers' Conv1D.

    Its buffers carry the names that the tensors have on disk, so loading and `save_pretrained` need no renaming.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    @classmethod
    def of(
        cls, packed: Any, bias: torch.dtype | None, dtype: torch.dtype, scheme: Int8Scheme | None = None
    ) -> "PackedLinear":
        """Return the layer of a packed weight, which may be empty, with room for a bias of a dtype, for a model of `dtype`.

        `scheme` is that of INT8 weights, from config.json.
        """
        raise NotImplementedError

    @property
    def packed(self) -> Any:
        """The weight as its layout knows it; it shares the layer's memory."""
        raise NotImplementedError

    def path_for(self, dtype: torch.dtype, n: int = 1) -> Path:
        """Return the implementation that serves this layer where it is now, for n rows of activations of a dtype."""
        raise NotImplementedError

    @property
    def is_meta(self) -> bool:
        """Whether nothing was loaded into it."""
        return any(buffer.is_meta for buffer in self.buffers(recurse=False))

    def dense(self) -> Tensor:
        """Return W [out_features, in_features], decoded anew at every call."""
        packed = self.packed
        return layout_of(packed).matrix(packed)

    def check_bounds(self) -> str | None:
        """Return what would make running it unsafe, or None."""
        return layout_of(self.packed).problem(self.packed)

    def lay_out(self) -> None:
        """Put the loaded weight into the order in memory that kernels read; shapes stay."""

    def merged(self, others: list["PackedLinear"]) -> nn.Module | None:
        """Return this layer and others of its class and input as one that shares their memory, or None if they cannot be one."""
        return None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """x W^T + bias with its gradients: that of x is the one of y times W, which is decoded again rather than kept.

    The stored words have none. The function stands around the op, not behind it: an op with a registered gradient takes
    tens of microseconds more to call, even where none is asked for.
    """

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, linear: PackedLinear, multiply: Callable[[Tensor], Tensor]):
        ctx.linear = linear
        return multiply(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_x, of_bias, *_ = ctx.needs_input_grad
        dx = grad @ ctx.linear.dense().to(grad.dtype) if of_x else None
        return dx, grad.flatten(0, -2).sum(0).to(ctx.linear.bias.dtype) if of_bias else None, None, None


def product(linear: PackedLinear, multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `multiply(x)`, which is x W^T + bias, with gradients of x and of the bias where they are asked for."""
    bias = linear.bias
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Product.apply(x, bias, linear, multiply)
    return multiply(x)


_registered: dict[str, type[PackedLinear]] = {}


def register(layout: str, kind: type[PackedLinear]) -> None:
    """Have weights of a layout run by a class of modules."""
    _registered[layout] = kind


@functools.cache
def _load_all() -> None:
    for name in _BUILT_IN:
        importlib.import_module(f"tilepress.runtime.linear.{name}")


def packed_linear(
    packed: Any, bias: torch.dtype | None = None, dtype: torch.dtype = torch.bfloat16, scheme: Int8Scheme | None = None
) -> PackedLinear:
    """Return the layer of a packed weight; arguments as those of `PackedLinear.of`. Raises TilepressError for a layout that nothing runs."""
    _load_all()
    if packed.layout_name not in _registered:
        raise TilepressError(
            f"nothing runs weights stored as {packed.layout_name}",
            "`tilepress convert --to dense`, or register a module",
        )
    return _registered[packed.layout_name].of(packed, bias, dtype, scheme)


def biases(linears: list[nn.Module]) -> Tensor | None:
    """Return the biases of layers one behind the other, or None if none has one; the layers' own become views of it. Those without get zeros in it."""
    if all(linear.bias is None for linear in linears):
        return None
    if all(linear.bias is not None for linear in linears):
        return _joined(linears, "bias")
    like = next(x.bias for x in linears if x.bias is not None).detach()
    whole = torch.cat([like.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears])
    _share(linears, "bias", whole.split([x.out_features for x in linears]))
    return whole


def one_weight(linears: list[nn.Module]) -> Tensor:
    """Return their weights one below the other; they become views of it. Nothing is copied where they lie so already."""
    return _joined(linears, "weight")


def _joined(linears: list[nn.Module], name: str) -> Tensor:
    parts = [getattr(linear, name).detach() for linear in linears]
    first, ends = parts[0], [part.data_ptr() + part.nbytes for part in parts]
    follow = all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False))
    if follow and len({part.untyped_storage().data_ptr() for part in parts}) == 1:
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    whole = torch.cat(parts)
    _share(linears, name, whole.split([len(part) for part in parts]))
    return whole


def _share(linears: list[nn.Module], name: str, parts: Iterable[Tensor]) -> None:
    """Put a part in the place of every layer's own tensor, where it has one."""
    for linear, part in zip(linears, parts, strict=True):
        own = getattr(linear, name)
        if isinstance(own, nn.Parameter):
            own.data = part
        elif own is not None:
            setattr(linear, name, part)
