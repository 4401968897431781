"""The parameters of a kernel: written beside its launch, read from its cubin, and compared once.

A signature names the parameters in order, "words* ticket:8 n map&": `*` is an address, `:8` an integer of 8 bytes, `&` a structure that is passed
by value, a bare name 4 bytes (an integer or the bits of a float). The driver only gets addresses of arguments: without the comparison a missing
one is a crash, and two that changed places are wrong results.
"""

import re
import struct
from typing import NamedTuple

from tilepress.formats import TilepressError

_HINT = "the launch in tilepress/kernels does not fit its .cu file"
_LEAST_ADDRESS = 1 << 16  # no memory of a card begins below
_PARAMETER_INFO = 0x17  # EIATTR_KPARAM_INFO of a cubin's .nv.info sections


class Parameter(NamedTuple):
    """One parameter of a kernel, as its launch believes it to be."""

    name: str
    kind: str  # "*" address, "8" and "" integers of 8 and 4 bytes, "&" structure

    @property
    def width(self) -> int | None:
        """Bytes, or None for a structure, which has any size."""
        return {"*": 8, "8": 8, "": 4}.get(self.kind)

    def suits(self, argument: object, width: int | None) -> bool:
        """Return whether an argument can be what this parameter takes; `width` is the compiled one, where it is known."""
        if self.kind == "&":
            return not isinstance(argument, int) and width in (None, argument.nbytes)
        if not isinstance(argument, int) or not 0 <= argument < 1 << 8 * self.width:
            return False
        return self.kind != "*" or argument == 0 or argument >= _LEAST_ADDRESS

    def __str__(self) -> str:
        return f"{self.name} (a structure)" if self.kind == "&" else f"{self.name} ({self.width} bytes)"


def parse(signature: str) -> tuple[Parameter, ...]:
    """Return the parameters of a signature."""
    found = [re.fullmatch(r"(\w+)(\*|&|:8)?", word) for word in signature.split()]
    return tuple(Parameter(match[1], (match[2] or "").lstrip(":")) for match in found)


def check_compiled(name: str, parameters: tuple[Parameter, ...], cubin: bytes) -> list[int]:
    """Return the bytes of each parameter of a compiled kernel. Raises TilepressError unless they are those of the signature."""
    widths = compiled_widths(name, cubin)
    matches = len(widths) == len(parameters) and all(
        parameter.width in (None, width) for parameter, width in zip(parameters, widths, strict=True)
    )
    if not matches:
        taken = ", ".join(f"{width} bytes" for width in widths)
        given = ", ".join(map(str, parameters))
        raise TilepressError(f"kernel {name} takes {len(widths)} arguments: {taken}; its launch gives {given}", _HINT)
    return widths


def check_arguments(
    name: str, parameters: tuple[Parameter, ...], widths: list[int] | None, arguments: tuple[object, ...]
) -> None:
    """Raise TilepressError unless a launch's arguments, integers and structures, can be what the kernel takes."""
    known = widths or [None] * len(parameters)
    if len(arguments) != len(parameters):
        wrong = f"got {len(arguments)} arguments"
    else:
        taken = zip(parameters, arguments, known, strict=True)
        bad = [f"{p.name} is {_shown(argument)}" for p, argument, width in taken if not p.suits(argument, width)]
        if not bad:
            return
        wrong = f"got {len(arguments)} of which {', '.join(bad)}"
    takes = f"kernel {name} takes {len(parameters)} arguments: {', '.join(map(str, parameters))}"
    raise TilepressError(f"{takes}; {wrong}: {', '.join(map(_shown, arguments))}", _HINT)


def _shown(argument: object) -> str:
    if isinstance(argument, int):
        return hex(argument) if argument >= _LEAST_ADDRESS else str(argument)
    return f"a structure of {argument.nbytes} bytes"


def compiled_widths(name: str, cubin: bytes) -> list[int]:
    """Return the bytes of each parameter of a kernel in a cubin. Raises TilepressError where the cubin, an ELF file, does not tell."""
    info = sections(cubin).get(f".nv.info.{name}")
    if info is None:
        raise TilepressError(f"the compiled kernel {name} does not tell what it takes", "run `tilepress env`")
    found, at = {}, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the value is in the two bytes of `size`
            continue
        if attribute == _PARAMETER_INFO:
            _, ordinal, _, flags = struct.unpack_from("<IHHI", info, at)
            found[ordinal] = flags >> 18
        at += size
    return [found[ordinal] for ordinal in sorted(found)]


def sections(elf: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit little-endian ELF file by name; of several with one name the last."""
    (start,), (size, count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<II16xQQ", elf, start + i * size) for i in range(count)]
    strings = headers[names][2]

    def name_of(at: int) -> str:
        return elf[strings + at : elf.index(b"\0", strings + at)].decode()

    empty = 8  # SHT_NOBITS: a section without bytes in the file
    return {name_of(at): b"" if kind == empty else elf[first : first + n] for at, kind, first, n in headers}
