"""A card that is not there: ops run what they run on a Hopper card up to the launch, which a driver of ours writes down or swallows."""

import contextlib
import ctypes
import warnings
from collections.abc import Iterator

import torch

from tilepress.kernels import (
    arch,
    argmax,
    decode_attention,
    fused_norm,
    fused_quant,
    jit,
    kv_cache,
    kv_read,
    rope_append,
    tiled_bitmap_spmm,
    tiled_csl_spmm,
    w8a8_gemm,
    w8a16_gemm,
)
from tilepress.kernels.once import forget_plans


def _on_card() -> dict:
    """What our ops run on a card, by name."""
    found = {}
    for module in (decode_attention, fused_norm, fused_quant):
        found |= module.ON_CARD
    found |= {
        "argmax": argmax._argmax_cuda,
        "kv_append": kv_cache._append_cuda,
        "kv_read": kv_read._kv_read_cuda,
        "rope_append": rope_append._rope_append_cuda,
        "tiled_bitmap_spmm": tiled_bitmap_spmm._cuda,
        "tiled_csl_spmm": tiled_csl_spmm._cuda,
        "w8a16_gemm": w8a16_gemm._cuda,
        "w8a8_gemm": w8a8_gemm._cuda,
    }
    return found


def _map(address: int, *_) -> jit.ByValue:
    """A tensor map that begins with the address of its matrix."""
    return jit.ByValue.of(torch.tensor([address] + [0] * 15))


@contextlib.contextmanager
def stubbed(monkeypatch, launch=None) -> Iterator[None]:
    """CPU tensors stand for those of a card. `launch` takes what cuLaunchKernelEx does; None: a C function that returns at once."""
    if launch is None:
        launch = ctypes.CDLL("libm.so.6").feclearexcept  # returns 0 and looks at nothing
        launch.argtypes = [ctypes.c_void_p] * 4

    class Driver:
        cuLaunchKernelEx = launch

    hopper, on_card = arch.card_of(9, 0), _on_card()
    for module, name, value in (
        (jit, "_driver", lambda: Driver),
        (jit, "_bind_context", lambda device: None),
        (jit, "why_not", lambda device: None),
        (jit, "_tensor_map", _map),
        (jit, "capture_number", lambda stream: 0),
        (jit, "zeros_for_good", lambda device, nbytes: 1 << 20),
        (jit.Kernel, "_load", lambda self, device: 70),
        (arch, "card", lambda device: hopper),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000, raising=False)
    forget_plans()
    ours = torch.library.Library("tilepress", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that references are overridden
        for name, run in on_card.items():
            ours.impl(name, run, "CPU", allow_override=True)
    try:
        yield
    finally:
        ours._destroy()
        forget_plans()


@contextlib.contextmanager
def recorded(monkeypatch) -> Iterator[list[tuple[bool, dict[str, int]]]]:
    """A stub card that keeps of each launch whether it is alone, and its arguments by name; of a tensor map its matrix's address."""
    seen, kernels = [], {}

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config, handle, pointers, extra):
        parameters = kernels[handle].parameters
        addresses = (ctypes.c_void_p * len(parameters)).from_address(pointers)
        kinds = (ctypes.c_uint if parameter.width == 4 else ctypes.c_ulonglong for parameter in parameters)
        values = [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]
        names = [parameter.name for parameter in parameters]
        seen.append((not jit._Config.from_address(config).num_attributes, dict(zip(names, values, strict=True))))
        return 0

    def load(kernel, device):
        kernels[id(kernel)] = kernel
        return id(kernel)

    with stubbed(monkeypatch, launch):
        monkeypatch.setattr(jit.Kernel, "_load", load)
        yield seen


def kept(monkeypatch, module) -> list[tuple]:
    """Have a module's launches kept, in place of made: kernel, device, grid, arguments; of a tensor map what it is of."""
    seen = []

    class Launch:
        def __init__(self, kernel, device, grid, args):
            self.what = kernel, device, grid, args

        def __call__(self, *given, alone=False):
            (*first, args), rest = self.what, iter(given)
            seen.append((*first, *(next(rest) if arg is jit.VARIES else arg for arg in args)))
            assert next(rest, None) is None

    class TensorMaps:
        def __init__(self, matrix, *box):
            self.what = tuple(matrix.shape), *box

        def __getitem__(self, address):
            return address, *self.what

    monkeypatch.setattr(module, "Launch", Launch)
    monkeypatch.setattr(jit, "TensorMaps", TensorMaps)
    return seen
