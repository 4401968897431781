"""Changes of bytes that readers may meet: of any bytes, and of what JSON says, so that it stays JSON."""

import copy
import json
import random
import struct

ODD = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "\ud800",
    "\x1b[2J", "../../etc/passwd", "/", "a" * 5000, [], {}, [[]], {"": {}}, [None], [0] * 300, "compressed-tensors", "tilepress",
    "dense", "int8", "tiled-csl", "F32", "model.safetensors",
]  # fmt: skip
_WITH_HEADER = ("header", "kv-tensors")  # JSON behind its length


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or put in."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, count = rng.randrange(len(made) + 1), rng.choice((1, 2, 4, 8, 40))
        kind = rng.randrange(5)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at : at + count] = rng.choice((b"\0", b"\xff", b"\x7f", b"9")) * count
        elif kind == 2:
            del made[at : at + count]
        elif kind == 3:
            made[at:at] = made[at : at + count]
        else:
            made[at:at] = rng.choice((b"{", b"[", b'"', b"null", b"-1", b"1e999", b"NaN", b"true", b"\\ud800", b"{}"))
    return bytes(made)


def mutated_json(name: str, data: bytes, rng: random.Random) -> bytes | None:
    """The JSON of a reader's bytes with one to three of its values changed; None where it is none."""
    begin = 8 if name in _WITH_HEADER else 0
    try:
        end = begin + struct.unpack_from("<Q", data)[0] if begin else len(data)
        value = json.loads(data[begin:end])
    except (ValueError, struct.error, RecursionError):
        return None
    root = [value]
    for _ in range(rng.randint(1, 3)):
        _change(root, rng)
    try:
        made = json.dumps(root[0]).encode()
    except (ValueError, RecursionError):
        return None
    return struct.pack("<Q", len(made)) + made + data[end:] if begin else made


def _change(root: list, rng: random.Random) -> None:
    """Change one value of a tree: another, a copy from elsewhere, none, or one more."""
    places = [(root, 0)]
    for container, key in places:
        inner = container[key]
        if len(places) < 2000:
            places += (
                [(inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)))]
                if isinstance(inner, dict | list)
                else []
            )
    container, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0 and container is not root:
        del container[key]
    elif kind == 1:
        other, where = rng.choice(places)
        container[key] = copy.deepcopy(other[where]) if other is not root else None
    elif kind == 2 and isinstance(container[key], dict):
        container[key][rng.choice(("x", "", "\ud800", "weight", "model.norm.weight"))] = copy.deepcopy(rng.choice(ODD))
    elif kind == 3 and isinstance(container[key], int | float) and not isinstance(container[key], bool):
        container[key] += rng.choice((1, -1, 0.5, 64, -64))
    else:
        container[key] = copy.deepcopy(rng.choice(ODD))
