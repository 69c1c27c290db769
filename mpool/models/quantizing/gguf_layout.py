"""The layout of a GGUF file: keys and tensor table as bytes, and the keys of an existing file.

The format is documented in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from ...errors import FormatError
from ..files import close, open_regular, read_exactly

ALIGNMENT = 32
_MAGIC = b"GGUF"
_VERSION = 3
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
#: Bytes of a value of a fixed size, by type.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
#: Type of a tensor -> its number in the format.
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11,
           "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20,
           "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28, "IQ1_M": 29,
           "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40}


def string(text: str | bytes) -> bytes:
    """Return a string as the format stores it."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(content: bool | int | float | str | Sequence[str | bytes] | Sequence[int] | Sequence[float]) -> bytes:
    """Return a value with its type: integers as uint32 (int32 in lists), floats as float32. A list has values of one
    type."""
    if isinstance(content, bool):
        return struct.pack("<I?", _BOOL, content)
    if isinstance(content, int):
        return struct.pack("<II", _U32, content)
    if isinstance(content, float):
        return struct.pack("<If", _F32, content)
    if isinstance(content, str):
        return struct.pack("<I", _STRING) + string(content)
    if all(isinstance(one, bool) for one in content):
        return struct.pack(f"<IIQ{len(content)}?", _ARRAY, _BOOL, len(content), *content)
    if all(isinstance(one, int) for one in content):
        return struct.pack(f"<IIQ{len(content)}i", _ARRAY, _I32, len(content), *content)
    if isinstance(content[0], float):
        return struct.pack(f"<IIQ{len(content)}f", _ARRAY, _F32, len(content), *content)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(content)) + b"".join(map(string, content))  # type: ignore[arg-type]


def read_values(path: str, end: int) -> dict[str, bytes]:
    """Read the keys of a file that the core has checked.

    Args:
        path: the file.
        end: offset of the first tensor's data, in bytes.

    Returns:
        Values as they are stored, each with its type.
    """
    fd, _ = open_regular(path)
    try:
        data = read_exactly(fd, 0, end, path=path)
    finally:
        close(fd)
    found: dict[str, bytes] = {}
    try:
        at = 24
        for _ in range(struct.unpack_from("<Q", data, 16)[0]):
            length = struct.unpack_from("<Q", data, at)[0]
            key, at = data[at + 8:at + 8 + length].decode("ascii"), at + 8 + length
            start = at
            kind, at = struct.unpack_from("<I", data, at)[0], at + 4
            count = 1
            if kind == _ARRAY:
                kind, count = struct.unpack_from("<IQ", data, at)
                at += 12
            if kind == _STRING:
                for _ in range(count):
                    at += 8 + struct.unpack_from("<Q", data, at)[0]
            else:
                at += count * _SIZES[kind]
            if at > end:
                raise IndexError
            found[key] = data[start:at]
    except (struct.error, KeyError, IndexError, UnicodeDecodeError) as error:  # changed since the core read it
        raise FormatError(file=path, field="header", got="malformed", allowed="the keys of a GGUF file") from error
    return found


def header(keys: Mapping[str, bytes], tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return the bytes before the data.

    Args:
        keys: values with their types.
        tensors: name, type, shape and size in bytes of each tensor. Their data follows in this order, each padded to
            :data:`ALIGNMENT`.
    """
    out = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(keys))]
    out += [string(key) + content for key, content in keys.items()]
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        out.append(string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), NUMBERS[dtype],
                                              offset))
        offset += nbytes + padding(nbytes)
    data = b"".join(out)
    return data + bytes(padding(len(data)))


def padding(size: int) -> int:
    """Return the zero bytes that follow ``size`` bytes."""
    return -size % ALIGNMENT
