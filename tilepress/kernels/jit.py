"""CUDA kernels from source: compiled by NVRTC for the card at hand on first use, kept on disk, launched on torch's current stream.

A source is CUDA C++ without headers: ptx.cuh is put before it, and a line `#define NAME VALUE` for each macro. Cubins are kept in
TILEPRESS_CACHE, by default ~/.cache/tilepress/kernels, under a key of source, options, compiler and architecture. Files are written atomically,
so processes that compile the same at once do no harm. Nothing is imported from cuda-core before the first kernel is needed.

Launches go to the driver directly. What a kernel takes is compared with the compiled one when it is loaded, and with the arguments at a launch's
first time; of those, what varies is written into memory that belongs to the launch and its thread. Launches can be captured in CUDA graphs.
"""

import ctypes
import functools
import os
import re
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tilepress.formats import TilepressError, installing
from tilepress.kernels import arch
from tilepress.kernels.signature import Parameter, check_arguments, check_compiled, parse

FOLDER = Path(__file__).parent
_ENV = "run `tilepress env`"
_HINT = f"kernels are tried with CUDA 13's NVRTC: {installing('cuda')}"


def source(file: str, before: str = "", **macros: int) -> str:
    """Return a kernel's source as the compiler gets it: macros, ptx.cuh, `before` (text of ptx.py), then the file with the files that it includes.
    `#line` says where each line stands, so that the compiler's messages name real files and lines."""
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    made = f'#line 1 "ptx.py"\n{before}' if before else ""
    return defines + _lines_of("ptx.cuh") + made + _lines_of(file)


def _lines_of(file: str) -> str:
    found = [f'#line 1 "{file}"\n']
    for number, line in enumerate((FOLDER / file).read_text().splitlines(keepends=True), 1):
        included = re.fullmatch(r'#include "(.+)"\n', line)
        found.append(f'{_lines_of(included[1])}#line {number + 1} "{file}"\n' if included else line)
    return "".join(found)


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return why references serve a device ("" for the CPU, of which there is nothing to say), or None where kernels do."""
    if device.type != "cuda":
        return ""
    return missing() if arch.card(device).has_kernels else "the card is older than sm_80"


@functools.cache
def missing() -> str | None:
    """Return what this machine lacks to compile kernels, or None."""
    try:
        from cuda.bindings import driver  # noqa: F401
        from cuda.core import ObjectCode, Program, ProgramOptions  # noqa: F401
        from cuda.core.utils import FileStreamProgramCache, make_program_cache_key  # noqa: F401
    except ImportError as error:
        return f"{error.name or 'cuda-core'} is not installed or too old"
    return None


def compile_cubin(name: str, source: str, arch: str) -> tuple[bytes, str]:
    """Return a cubin and the compiler's log, with registers and spills. Raises TilepressError with the log."""
    from cuda.core import Program

    log: list[str] = []
    try:
        program = Program(source, "c++", _options(arch))
        return bytes(program.compile("cubin", logs=_Writer(log)).code), "".join(log)
    except Exception as error:
        raise TilepressError(
            f"kernel {name} does not compile for {arch}: {error}\n{''.join(log)}".rstrip(), _HINT
        ) from error


class _Writer:
    def __init__(self, parts: list[str]):
        self.write = parts.append


def _options(arch: str):
    from cuda.core import ProgramOptions

    return ProgramOptions(arch=arch, std="c++17", ptxas_options="-v", no_cache=True)  # its own cache loses the log


def cached_cubin(name: str, source: str, arch: str, again: bool = False) -> bytes:
    """Return a cubin from disk, compiled and kept if it is not there, or `again`. A folder that cannot be written only costs the next process its
    time."""
    from cuda.core.utils import FileStreamProgramCache, make_program_cache_key

    try:
        folder = Path(os.environ.get("TILEPRESS_CACHE") or Path.home() / ".cache" / "tilepress" / "kernels")
        cache = FileStreamProgramCache(str(folder))
        key = make_program_cache_key(code=source, code_type="c++", options=_options(arch), target_type="cubin")
        if not again and (found := cache.get(key)) is not None:
            return bytes(found)
    except (OSError, RuntimeError):  # a folder that cannot be made, or nobody's home
        cache = None
    sys.stderr.write(f"tilepress: compiling kernel {name} for {arch}, once\n")
    code, _ = compile_cubin(name, source, arch)
    if cache is not None:
        from cuda.core import ObjectCode

        try:
            cache[key] = ObjectCode.from_cubin(code, name=name)
        except OSError as error:
            sys.stderr.write(f"tilepress: cannot keep kernels in {folder}: {error.strerror}\n")
    return code


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_ulonglong * 8))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_FLOAT, _BITS = struct.Struct("f"), struct.Struct("I")
# Whether all kernels behind ours wait for the grids before them (wait_for_grid) ahead of everything that they read, as ours do. Then a product lets the
# next kernel start at once, before it waits itself. What torch.compile writes waits only for what the kernel just ahead of it writes, and takes what
# came earlier for done: beside such kernels this is False, and a product waits first.
successors_wait = True
_SERIALIZE = _Attribute(6, 0, (1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@functools.cache
def _driver():
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return driver


def _bind_context(device: int) -> None:
    """Make torch's context current in a thread that has not used the device yet."""
    from cuda.bindings import driver

    context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))
    _checked(driver.cuCtxSetCurrent(context))


VARIES = object()  # stands for an argument that is given with each launch


class Launch:
    """A kernel's launch on a device, with some of its arguments: each has a slot of 8 bytes, and those that vary are written before every launch. Only
    the thread that made it may launch it."""

    def __init__(self, kernel: "Kernel", device: torch.device, grid: int, args: tuple):
        """`args` are integers from 0 (addresses and `float_bits` too) and structures, or VARIES."""
        self.handle = kernel.load(device)
        with torch.cuda.device(device):
            _bind_context(device.index)
        self.kernel, self.device, self.index, self.args = kernel, device, device.index, args
        varies = [i for i, arg in enumerate(args) if arg is VARIES]
        fixed = [i for i, arg in enumerate(args) if arg is not VARIES]
        self.values = (ctypes.c_ulonglong * len(args))()
        start = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * len(args))()
        for slot, i in enumerate(varies + fixed):
            self.pointers[i] = start + 8 * slot
        for slot, i in enumerate(fixed, len(varies)):
            self._fix(slot, i, args[i])
        kinds = [kernel.parameters[i] for i in varies if i < len(kernel.parameters)]
        self.by_value = [(i, at) for at, (i, kind) in enumerate(zip(varies, kinds, strict=False)) if kind.kind == "&"]
        # A number that does not fit its width, as an address does not fit 4 bytes, is refused here in every launch.
        slots = "".join("I4x" if kind.width == 4 else "Q" for kind in kinds)
        self.pack = functools.partial(struct.Struct(f"={slots}").pack_into, self.values, 0)
        config = _Config(grid=(grid, 1, 1), block=(kernel.threads, 1, 1), shared_bytes=kernel.shared_bytes)
        config.attributes = ctypes.pointer(_SERIALIZE)
        self.overlaps = kernel.overlaps and arch.card(device).has_dependent_launch
        self.grid, self.stream, self.num_attributes = (
            kind.from_buffer(config, member.offset)
            for kind, member in (
                (ctypes.c_uint, _Config.grid),
                (ctypes.c_void_p, _Config.stream),
                (ctypes.c_uint, _Config.num_attributes),
            )
        )
        addresses = ctypes.addressof(config), self.handle, ctypes.addressof(self.pointers)
        self.go = functools.partial(_driver().cuLaunchKernelEx, *addresses, None)
        self.checked = False

    def _fix(self, slot: int, i: int, arg: "int | ByValue") -> None:
        if isinstance(arg, ByValue):
            self.pointers[i] = arg.address
        elif 0 <= arg < 1 << 64:
            self.values[slot] = arg

    def __call__(self, *given: "int | ByValue", alone: bool = False) -> None:
        """Launch it with the arguments that vary, in the kernel's order, on the device's current stream. `alone`: not before earlier kernels have
        ended.

        Raises TilepressError naming what the kernel takes and what it got, or the driver's error."""
        if not self.checked:
            self._check(given)
            self.checked = True
        try:
            self.pack(*given)
        except struct.error as error:
            self._check(given)
            raise TilepressError(f"kernel {self.kernel.name} takes {self.kernel.takes}: {error}", _ENV) from error
        for i, at in self.by_value:
            self.pointers[i] = given[at].address
        self.num_attributes.value = self.overlaps and not alone
        self.stream.value = torch._C._cuda_getCurrentRawStream(self.index)
        if torch._C._cuda_getDevice() == self.index:
            status = self.go()
        else:
            with torch.cuda.device(self.device):
                status = self.go()
        if status:
            raise TilepressError(f"kernel {self.kernel.name} was not launched: CUDA error {status}", _ENV)

    def _check(self, given: tuple) -> None:
        """Compare all arguments with what the compiled kernel takes."""
        rest = iter(given)
        args = [next(rest, None) if arg is VARIES else arg for arg in self.args]
        args = [arg for arg in args if arg is not None] + list(rest)
        check_arguments(self.kernel.name, self.kernel.parameters, self.kernel.widths, tuple(args))


@dataclass
class Kernel:
    """One kernel in one configuration, on every device of the process. Compiled and loaded where it is first launched."""

    name: str  # of the extern "C" function
    source: str
    takes: str  # its parameters, as signature.py writes them: "x* stride:8 columns"
    threads: int  # of a block
    shared_bytes: int = 0  # dynamic shared memory of a block
    # Programmatic dependent launch, on cards that have it: the kernel starts before earlier kernels of the stream end, and must wait for them
    # (wait_for_grid) before it reads what they wrote and before it writes.
    overlaps: bool = False
    _handles: dict[int, int] = field(default_factory=dict)  # of each device
    widths: list[int] | None = None  # bytes of the compiled kernel's parameters
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _local: threading.local = field(default_factory=threading.local)
    _libraries: list = field(default_factory=list)

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return parse(self.takes)

    def __call__(self, device: torch.device, grid: int, *args: "int | ByValue", alone: bool = False) -> None:
        """Launch `grid` blocks on the device's current stream: for launches that are seldom. Arguments are those of `Launch`.

        Raises TilepressError with the compiler's log, with what the kernel takes and what it got, or naming the driver's error."""
        launch = self._local.__dict__.get(device.index)
        if launch is None:
            launch = Launch(self, device, grid, (VARIES,) * len(self.parameters))
            self._local.__dict__[device.index] = launch
        launch.grid.value = grid
        launch(*args, alone=alone)

    def load(self, device: torch.device) -> int:
        """Compile and load it where that was not done. Return its handle there."""
        return self._handles.get(device.index) or self._load(device)

    def _load(self, device: torch.device) -> int:
        from cuda.bindings import driver

        if torch.cuda.is_current_stream_capturing():
            raise TilepressError(
                f"kernel {self.name} is first used inside a CUDA graph", "run the model once before capturing"
            )
        with self._lock:
            if device.index in self._handles:
                return self._handles[device.index]
            target = arch.card(device).target
            code = cached_cubin(self.name, self.source, target)
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # makes the context
                status, library = driver.cuLibraryLoadData(code, [], [], 0, [], [], 0)
                if int(status):  # a damaged file
                    code = cached_cubin(self.name, self.source, target, again=True)
                    library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
                self.widths = check_compiled(self.name, self.parameters, code)
                kernel = _checked(driver.cuLibraryGetKernel(library, self.name.encode()))
                if self.shared_bytes > arch.PLAIN_SHARED_BYTES:
                    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    number = _checked(driver.cuDeviceGet(device.index))
                    _checked(driver.cuKernelSetAttribute(attribute, self.shared_bytes, kernel, number))
                self._libraries.append(library)
                self._handles[device.index] = int(_checked(driver.cuKernelGetFunction(kernel)))
        return self._handles[device.index]


def like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what torch.empty_like makes tensors of, in half the time that torch.empty takes. It has memory for one element."""
    return _element(dtype, device).expand(shape)


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def filling(launch: Launch, given: list[int], likes: list[Tensor], kept: int) -> Callable:
    """Return what runs an op: it makes outputs like `likes`, of which the first `kept` are the op's, and launches with addresses, in the kernel's order, of
    arguments by their number, and of outputs, which are -1, -2 and so on."""

    def run(*arguments):
        made = [empty_like(x) for x in likes]
        launch(*[(arguments[i] if i >= 0 else made[~i]).data_ptr() for i in given])
        return made[0] if kept == 1 else tuple(made[:kept]) or None

    return run


def tensors_of(arguments: tuple) -> list[int]:
    """Return which arguments are tensors."""
    return [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]


def empty_like(x: Tensor) -> Tensor:
    """Return memory for what `like` stands for."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def capture_number(stream: int) -> int:
    """Return the number of the capture that a stream, given by its address, is in, or 0: no two captures of a process have the same."""
    status = ctypes.c_int()
    if not _driver().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)) and not status.value:
        return 0
    from cuda.bindings import driver

    found = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    active = _checked(found) == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(found[2]) if active else 0


def zeros_for_good(device: torch.device, nbytes: int) -> int:
    """Return the address of zeros on a device that nobody frees. They lie outside of torch's memory, because what torch allocates now may belong to
    a graph. Waits for the card."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the context
        address = _checked(driver.cuMemAlloc(nbytes))
        _checked(driver.cuMemsetD8(address, 0, nbytes))
        _checked(driver.cuCtxSynchronize())
    return int(address)


def float_bits(value: float) -> int:
    """Return the bits of a float, as an argument of a launch."""
    return _BITS.unpack(_FLOAT.pack(value))[0]


class ByValue:
    """A structure among a launch's arguments: a copy of it goes to the card with the launch."""

    def __init__(self, owner, address: int, nbytes: int):
        self.owner, self.address, self.nbytes = owner, address, nbytes  # `owner` keeps the memory

    def __index__(self) -> int:  # among a launch's integers, where it is not read
        return 0

    @classmethod
    def of(cls, array: Tensor) -> "ByValue":
        """Make one of a contiguous tensor on the CPU. All arguments of a launch together are less than 4 KiB."""
        return cls(array, array.data_ptr(), array.nbytes)


_MAP_BYTES = 128  # of a CUtensorMap
_MOST_MAPS = 4096  # of matrices of one kind


class TensorMaps(dict):
    """CUtensorMaps of matrices that differ in their addresses alone, by address: with them the copy engine finds boxes of a matrix in memory, with 128-byte
    swizzle and zeros beyond the edges."""

    def __init__(self, matrix: Tensor, box_rows: int, box_columns: int):
        """`matrix`, one of them, is int8 or 16-bit [rows, columns] with contiguous rows, 16-byte aligned."""
        rows, columns = matrix.shape
        stride = matrix.stride(0) if rows > 1 else columns  # that of one row can be anything
        self._like = matrix.device.index, rows, columns, stride, matrix.dtype, box_rows, box_columns

    def __missing__(self, address: int) -> ByValue:
        if len(self) >= _MOST_MAPS:
            self.clear()
        made = self[address] = _tensor_map(address, *self._like)
        return made


def _tensor_map(
    address: int, device: int, rows: int, columns: int, stride: int, dtype: torch.dtype, box_rows: int, box_columns: int
) -> ByValue:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        _bind_context(device)
    kinds = driver.CUtensorMapDataType
    kind = {
        torch.int8: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[dtype]
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    found = _checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [wide(columns), wide(rows)],
            [wide(dtype.itemsize * stride)],
            [narrow(box_columns), narrow(box_rows)],
            [narrow(1), narrow(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ByValue(found, found.getPtr(), _MAP_BYTES)


def _checked(result: tuple):
    status, *values = result
    if int(status):
        raise TilepressError(f"the CUDA driver says {status.name}", _ENV)
    return values[0] if values else None
