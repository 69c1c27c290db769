"""Hostile values in files of models: one place of JSON, of the header of weights or of a GGUF file changes."""

import copy
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

from jsonplaces import places

VALUES: list[Any] = [
    0, 1, -1, 2, 3, 7, 64, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53, 1 << 63, 1 << 64, 1 << 200, -(1 << 63),
    0.0, -0.0, 0.5, -1.5, 1e-30, 1e30, 1e308, float("inf"), float("nan"), True, False, None, "", "x", "relu", "gelu",
    "mean", "cls", "\0", "a" * 3000, "../x", "/etc/passwd", "\u00e9\ud800", "[PAD]", "w1", "{{ 1/0 }}", [], [0], [1, 2],
    [None], [1 << 64], [[1]], [{}], {}, {"a": {"b": 1}}]


def changed(rng: random.Random, value: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a copy of a JSON value with one place deleted, repeated, scaled or replaced, and the path of the place."""
    value = copy.deepcopy(value)
    found = list(places(value, most=60))
    if not found:
        return rng.choice(VALUES), ()
    *path, last = where = rng.choice(found)
    parent, choice = value, rng.random()
    for key in path:
        parent = parent[key]
    old = parent[last]
    if choice < 0.15:
        del parent[last]
    elif choice < 0.25 and isinstance(parent, list):
        parent.append(copy.deepcopy(old))
    elif choice < 0.4 and type(old) in (int, float):
        parent[last] = old * rng.choice((2, 3, -1, 1000)) + rng.choice((0, 1, -1))
    else:
        parent[last] = copy.deepcopy(rng.choice(VALUES))
    return value, where


def change(rng: random.Random, file: Path) -> str:
    """Change a file in one place: a value of JSON, a value of the header of weights, or a few bytes. Returns the key or
    the tensor of that place, or nothing."""
    data = file.read_bytes()
    file.unlink()  # it may be a hard link
    if file.suffix == ".safetensors":
        size = int.from_bytes(data[:8], "little")
        value, path = changed(rng, json.loads(data[8:8 + size]))
        header = json.dumps(value).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size:])
    elif file.suffix == ".json":
        value, path = changed(rng, json.loads(data))
        file.write_text(json.dumps(value))
    else:
        path = ()
        at, removed = rng.randrange(len(data) + 1), rng.choice((0, 1, 50))
        file.write_bytes(data[:at] + bytes(rng.choices(range(256), k=rng.choice((0, 1, 30)))) + data[at + removed:])
    return next((key for key in reversed(path) if isinstance(key, str)), "")


#: Type of a GGUF value -> format of its bytes, and hostile values.
_WHOLE = [0, 1, 2, 3, 7, 13, 64, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
_FLOATS = [0.0, -1.0, 1e-38, 1e30, math.inf, -math.inf, math.nan]
_TYPES: dict[int, tuple[str, list[Any]]] = {
    4: ("<I", _WHOLE), 5: ("<i", [-1, -(1 << 31), *_WHOLE[:9]]), 6: ("<f", _FLOATS), 7: ("<B", [0, 1, 2, 255]),
    10: ("<Q", [*_WHOLE, 1 << 63, (1 << 64) - 1]), 11: ("<q", [-1, *_WHOLE]), 12: ("<d", _FLOATS)}


def change_gguf(rng: random.Random, file: Path, beginning: str = "") -> str:
    """Change a GGUF file in one place, without moving others: a value, its type, its key, or the sizes or the type of a
    tensor. ``beginning``: that of the keys that change. Returns the key of a value, or nothing."""
    from tinygguf import gguf

    reader = gguf.GGUFReader(file)
    data = bytearray(file.read_bytes())

    def at(part: Any) -> int:
        return int(part.__array_interface__["data"][0] - reader.data.__array_interface__["data"][0])

    if rng.random() < 0.2:
        tensor = rng.choice(reader.tensors)
        _, name, _, sizes, kind, _ = tensor.field.parts
        if rng.random() < 0.3:
            struct.pack_into("<I", data, at(kind), rng.choice((0, 1, 2, 8, 24, 30, 99)))
        else:
            size = rng.choice((0, 1, 2, 1 << 20, 1 << 32, (1 << 64) - 1, int(sizes[0]) + 1))
            struct.pack_into("<Q", data, at(sizes) + 8 * rng.randrange(len(sizes)), size)
        found = ""
    else:
        field = rng.choice([field for key, field in reader.fields.items() if key.startswith(beginning)])
        found, choice = field.name, rng.random()
        if choice < 0.15:  # the key is missing
            data[at(field.parts[1]) + len(field.name) - 1] ^= 1
        elif choice < 0.25:  # the values of other types have other sizes, so the next keys move
            struct.pack_into("<I", data, at(field.parts[2]), rng.choice((4, 5, 6, 7, 8, 9, 99)))
            found = ""
        else:
            kind = int(field.types[-1])
            value = field.parts[rng.choice(field.data)] if field.data else None
            if kind in _TYPES and value is not None:
                struct.pack_into(_TYPES[kind][0], data, at(value), rng.choice(_TYPES[kind][1]))
            elif value is not None and len(value):
                data[at(value) + rng.randrange(len(value))] = rng.choice((0, 32, 65, 255))
    file.unlink()
    file.write_bytes(data)
    return found
