#!/usr/bin/env python3
"""Makes the GGUF corpus: small files, well formed and not, each with the answer that reading it must give.

    python tests/corpus/make_gguf.py            # writes tests/corpus/gguf/{valid,reject}/ and its two manifests
    python tests/corpus/make_gguf.py --check    # exit code 1 when what is there differs

The number in a name is the case that the file stands for; the cases are listed in tests/corpus/gguf/README.md. It has a
writer of its own because files that no proper writer would make are the point. Everything is deterministic. Cases that
need large files are made by :func:`large_cases` when the tests run.

``manifest.json`` has a row for each file to be opened: ``{"file", "case", "status", "field"}``; status is a name
of csrc/base/status.def and field what the error must name. ``manifest.tsv`` is the same for the C tests.
"""

import argparse
import json
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE / "gguf"

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
PACK = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q",
        F64: "<d"}
#: Every type that mpool reads: id, items and bytes of a block.
DTYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136), "IQ1_M": (29, 256, 56), "I8": (24, 1, 1), "I16": (25, 1, 2),
    "I32": (26, 1, 4), "I64": (27, 1, 8), "F64": (28, 1, 8), "BF16": (30, 1, 2), "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36),
}
MAX = 2**64 - 1


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: int | float | str | bytes) -> bytes:
    return string(value) if kind == STRING else struct.pack(PACK[kind], value)  # type: ignore[arg-type]


def kv(key: str | bytes, kind: int, value: int | float | str | bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + scalar(kind, value)


def raw_array(key: str, kind: int, count: int, body: bytes) -> bytes:
    """An array whose count need not be that of its body."""
    return string(key) + struct.pack("<IIQ", ARRAY, kind, count) + body


def array(key: str, kind: int, values: Iterable[int | float | str | bytes]) -> bytes:
    items = list(values)
    return raw_array(key, kind, len(items), b"".join(scalar(kind, value) for value in items))


def info(name: str | bytes, shape: Iterable[int], dtype: int = 0, offset: int = 0, ndim: int | None = None) -> bytes:
    """A tensor's record. ``shape`` is innermost first, as in the file."""
    sizes = list(shape)
    return (string(name) + struct.pack("<I", len(sizes) if ndim is None else ndim)
            + b"".join(struct.pack("<Q", size % 2**64) for size in sizes)
            + struct.pack("<IQ", dtype % 2**32, offset % 2**64))


ARCHITECTURE = kv("general.architecture", STRING, "test")


def pad(data: bytes, to: int) -> bytes:
    return data + bytes(-len(data) % to)


def gguf(values: Iterable[bytes] = (ARCHITECTURE,), infos: Iterable[bytes] = (), data: bytes = b"", *,
         version: int = 3, magic: bytes = b"GGUF", values_count: int | None = None, infos_count: int | None = None,
         alignment: int = 32, padded: bool = True) -> bytes:
    """A file. Counts are those of the records unless given; the header is padded to ``alignment``."""
    values, infos = list(values), list(infos)
    head = magic + struct.pack("<IQQ", version, len(infos) if infos_count is None else infos_count,
                               len(values) if values_count is None else values_count)
    head += b"".join(values) + b"".join(infos)
    return (pad(head, alignment) if padded else head) + data


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    _, items, size = DTYPES[dtype]
    total = 1
    for one in shape:
        total *= one
    return total // items * size


def fill(count: int, seed: int) -> bytes:
    return bytes((seed * 37 + i * 11) % 251 for i in range(count))


def model(tensors: Iterable[tuple[str, str, tuple[int, ...]]], values: Iterable[bytes] = (ARCHITECTURE,),
          alignment: int = 32, pad_last: bool = True, **more: int) -> bytes:
    """A well-formed file of (name, dtype, shape innermost first)."""
    infos, data = [], b""
    listed = list(tensors)
    for seed, (name, dtype, shape) in enumerate(listed):
        infos.append(info(name, shape, DTYPES[dtype][0], len(data)))
        data += fill(nbytes(dtype, shape), seed)
        if pad_last or seed + 1 < len(listed):
            data = pad(data, alignment)
    return gguf(values, infos, data, alignment=alignment, **more)  # type: ignore[arg-type]


ONE = (("a.weight", "F32", (4, 2)),)
TWO = (("a.weight", "F32", (4, 2)), ("b.weight", "F16", (16, 3)))


def split(no: int, count: int, tensors: int, *, architecture: bool = True) -> list[bytes]:
    own = [ARCHITECTURE] if architecture else []
    return own + [kv("split.no", U16, no), kv("split.count", U16, count), kv("split.tensors.count", I32, tensors)]


@dataclass(frozen=True)
class Case:
    """One file to open and the expected result. ``extra`` files lie in the same folder and are not opened by name."""

    name: str
    data: bytes
    status: str = "OK"
    field: str = ""
    extra: tuple[tuple[str, bytes], ...] = ()

    @property
    def number(self) -> int | None:
        base = self.name.split("/")[0]
        return int(base[4:6]) if base.startswith("case") else None


def every_value() -> list[bytes]:
    samples: dict[int, list[int | float | str | bytes]] = {
        U8: [0, 255], I8: [-128, 127], U16: [0, 65535], I16: [-32768, 32767], U32: [0, 2**32 - 1],
        I32: [-2**31, 2**31 - 1], F32: [0.5, -2.0], BOOL: [0, 1], STRING: ["", "häl"], U64: [0, 2**63 - 1],
        I64: [-2**63, 2**63 - 1], F64: [1e300, -0.25],
    }
    names = {U8: "u8", I8: "i8", U16: "u16", I16: "i16", U32: "u32", I32: "i32", F32: "f32", BOOL: "bool",
             STRING: "string", U64: "u64", I64: "i64", F64: "f64"}
    out = []
    for kind, values in samples.items():
        out.append(kv(f"one.{names[kind]}", kind, values[1]))
        out.append(array(f"many.{names[kind]}", kind, values))
        out.append(array(f"none.{names[kind]}", kind, []))
    return out


def valid_cases() -> Iterator[Case]:
    yield Case("v2_minimal.gguf", model(ONE, version=2))
    yield Case("v3_minimal.gguf", model(ONE))
    yield Case("no_tensors.gguf", gguf(padded=False))
    yield Case("no_tensors_padded.gguf", gguf())
    yield Case("no_architecture.gguf", model(ONE, [kv("x", U8, 1)]))
    yield Case("last_not_padded.gguf", model((("a", "F32", (3,)), ("b", "F32", (3,))), pad_last=False))
    yield Case("every_dtype.gguf", model((f"t.{name}", name, (items * 2 if items > 1 else 6, 3))
                                         for name, (_, items, _) in DTYPES.items()))
    yield Case("every_value_type.gguf", gguf([ARCHITECTURE, *every_value()], padded=False))
    yield Case("dimensions_1_to_4.gguf", model((f"d{n}", "F32", (2, 3, 5, 7)[:n]) for n in range(1, 5)))
    for alignment in (1, 8, 64):
        values = [ARCHITECTURE, kv("general.alignment", U32, alignment)]
        yield Case(f"alignment_{alignment}.gguf", model(TWO, values, alignment=alignment))
    yield Case("case17_name_utf8.gguf", model((("größe.重み", "F32", (2,)),)))
    yield Case("case17_token_bytes.gguf",
               gguf([ARCHITECTURE, array("tokenizer.ggml.tokens", STRING, [b"\xff\xfe", b"a\x00b", "é", b""])],
                    padded=False))
    yield Case("case19_name_64_bytes.gguf", model((("n" * 64, "F32", (2,)),)))
    for name, data in (("one_byte", model((("a", "F32", (1,)),)) + b"\0"),
                       ("padding_twice", model((("a", "F32", (1,)),)) + bytes(32))):
        yield Case(f"case30_{name}.gguf", data)
    yield Case("case40_context_u32_max.gguf",
               gguf([ARCHITECTURE, kv("test.context_length", U32, 2**32 - 1)], padded=False))
    yield Case("split/pair-00001-of-00002.gguf",
               model((("a.weight", "F32", (4, 2)),), split(0, 2, 3)), extra=(
                   ("split/pair-00002-of-00002.gguf",
                    model((("b.weight", "Q8_0", (32, 2)), ("c.weight", "F16", (8,))),
                          split(1, 2, 3, architecture=False))),))
    yield Case("split/no_tensor_first-00001-of-00003.gguf", gguf(split(0, 3, 2), padded=False), extra=(
        ("split/no_tensor_first-00002-of-00003.gguf", model(ONE, split(1, 3, 2, architecture=False))),
        ("split/no_tensor_first-00003-of-00003.gguf",
         model((("b.weight", "F16", (4,)),), split(2, 3, 2, architecture=False)))))
    yield Case("split/merged_count_0.gguf", model(ONE, split(0, 0, 1)))
    yield Case("split/one-00001-of-00001.gguf", model(ONE, split(0, 1, 1)))


def reject_cases() -> Iterator[Case]:
    def bad(name: str, field: str, data: bytes, status: str = "FORMAT",
            extra: tuple[tuple[str, bytes], ...] = ()) -> Case:
        return Case(name if "/" in name else name + ".gguf", data, status, field, extra)

    def values(*more: bytes, **options: int) -> bytes:
        return gguf([ARCHITECTURE, *more], padded=False, **options)  # type: ignore[arg-type]

    def tensors(*infos: bytes, data: bytes = bytes(64)) -> bytes:
        return gguf(infos=infos, data=data)

    whole = model(ONE)
    yield bad("case01_empty", "file size", b"")
    yield bad("case01_magic_only", "header", b"GGUF")
    yield bad("case01_23_bytes", "header", whole[:23])
    yield bad("case02_ggml", "magic", b"lmgg" + whole[4:])
    yield bad("case02_lower", "magic", b"gguf" + whole[4:])
    yield bad("case02_zeros", "magic", bytes(64))
    for label, version in (("0", 0), ("1", 1), ("4", 4), ("max", 2**32 - 1), ("2_swapped", 2 << 24),
                           ("3_swapped", 3 << 24)):
        yield bad(f"case03_version_{label}", "version", model(ONE, version=version))
    for label, count in (("minus_1", MAX), ("2_63", 2**63), ("minus_2_63_plus_1", 2**63 + 1)):
        yield bad(f"case04_tensors_{label}", "tensor_count", gguf(infos_count=count))
        yield bad(f"case05_values_{label}", "kv_count", gguf(values_count=count))
    yield bad("case06_tensors", "tensor_count", gguf(infos_count=5))
    yield bad("case06_values", "kv_count", gguf(values_count=6))
    # 2^64 / 33 and 2^64 / 14, so that count * smallest record wraps to a few bytes
    yield bad("case06_tensors_wrap", "tensor_count", gguf(infos_count=2**64 // 33 + 1))
    yield bad("case06_values_wrap", "kv_count", gguf(values_count=2**64 // 14 + 1))
    yield bad("case07_key_length_max", "key length", gguf([struct.pack("<Q", MAX) + b"key" + bytes(40)]))
    yield bad("case07_key_length_past_end", "key length", gguf([struct.pack("<Q", 200) + b"key" + bytes(40)]))
    yield bad("case08_key_empty", "key length", values(kv("", U8, 1)))
    yield bad("case08_key_not_ascii", "key", values(kv("größe", U8, 1)))
    yield bad("case08_key_nul", "key", values(kv(b"a\x00b", U8, 1)))
    yield bad("case08_key_newline", "key", values(kv("a\nb", U8, 1)))
    yield bad("case09_key_twice", "key", values(kv("a", U8, 1), kv("b", U8, 1), kv("a", U8, 1)))
    yield bad("case09_alignment_twice", "key",
              values(kv("general.alignment", U32, 32), kv("general.alignment", U32, 64)))
    for kind in (13, 255, 2**32 - 1):
        yield bad(f"case11_type_{kind}", "x", values(string("x") + struct.pack("<I", kind) + bytes(32)))
        yield bad(f"case11_element_type_{kind}", "x", values(raw_array("x", kind, 1, bytes(32))))
    yield bad("case12_nested", "x", values(raw_array("x", ARRAY, 1, struct.pack("<IQ", U8, 1) + b"\x01")))
    deep = struct.pack("<IQ", ARRAY, 1) * 3000
    yield bad("case12_nested_deep", "x", values(string("x") + struct.pack("<I", ARRAY) + deep))
    yield bad("case13_count_wraps", "x", values(raw_array("x", U64, 2**61 + 1, bytes(64))))
    yield bad("case13_count_max", "x", values(raw_array("x", U8, MAX, bytes(64))))
    yield bad("case13_count_past_end", "x", values(raw_array("x", I32, 17, bytes(64))))
    yield bad("case14_strings_wrap", "x", values(raw_array("x", STRING, 2**61 + 1, bytes(64))))
    yield bad("case14_strings_past_end", "x", values(raw_array("x", STRING, 9, bytes(64))))
    yield bad("case15_string_max", "x", values(string("x") + struct.pack("<IQ", STRING, MAX) + bytes(64)))
    yield bad("case15_string_past_end", "x", values(string("x") + struct.pack("<IQ", STRING, 65) + bytes(64)))
    yield bad("case15_in_array_max", "x", values(raw_array("x", STRING, 2, string("ab") + struct.pack("<Q", MAX))))
    yield bad("case15_in_array_past_end", "x", values(raw_array("x", STRING, 2, string("ab") + struct.pack("<Q", 1))))
    yield bad("case16_bool_2", "x", values(kv("x", BOOL, 2)))
    yield bad("case16_bool_array", "x", values(array("x", BOOL, [0, 1, 255])))
    for label, name in (("lone_continuation", b"a\x80"), ("cut", b"a\xe2\x82"), ("overlong", b"\xc0\xaf"),
                        ("surrogate", b"\xed\xa0\x80"), ("above_10ffff", b"\xf4\x90\x80\x80"), ("nul", b"a\x00b")):
        yield bad(f"case17_name_{label}", "tensor name", tensors(info(name, (8,))))
    for alignment in (0, 3, 48):
        yield bad(f"case18_alignment_{alignment}", "general.alignment",
                  values(kv("general.alignment", U32, alignment)))
    yield bad("case18_alignment_2_31_plus_1", "general.alignment", values(kv("general.alignment", U32, 2**31 + 1)))
    for alignment in (2**17, 2**31):
        yield bad(f"case18_alignment_{alignment}", "general.alignment",
                  values(kv("general.alignment", U32, alignment)), "LIMIT")
    yield bad("case18_alignment_u64", "general.alignment", values(kv("general.alignment", U64, 32)))
    yield bad("case18_alignment_string", "general.alignment", values(kv("general.alignment", STRING, "32")))
    yield bad("case18_alignment_array", "general.alignment", values(array("general.alignment", U32, [32])))
    yield bad("case19_name_empty", "tensor name", tensors(info("", (8,))))
    yield bad("case19_name_65_bytes", "tensor name", tensors(info("n" * 65, (8,))))
    yield bad("case19_name_length_max", "tensor name", tensors(struct.pack("<Q", MAX) + b"a" * 64))
    yield bad("case19_name_twice", "tensor name", tensors(info("a", (8,)), info("a", (8,), offset=32)))
    for ndim in (0, 5, 2**32 - 1):
        yield bad(f"case20_ndim_{ndim}", "a: dimensions", tensors(info("a", (1,) * min(ndim, 6), ndim=ndim)))
    yield bad("case21_size_0", "a: shape", tensors(info("a", (8, 0))))
    yield bad("case21_size_minus_1", "a: shape", tensors(info("a", (8, -1))))
    yield bad("case21_size_minus_2_63", "a: shape", tensors(info("a", (2**63, 1))))
    yield bad("case22_elements_wrap", "a: shape", tensors(info("a", (2**32, 2**32))))
    yield bad("case22_elements_negative", "a: shape", tensors(info("a", (2**62, 2))))
    yield bad("case22_elements_wrap_4", "a: shape", tensors(info("a", (2**21, 2**21, 2**21, 2**21))))
    yield bad("case23_bytes_wrap", "a: size", tensors(info("a", (2**61, 3))))
    yield bad("case23_row_bytes_wrap", "a: size", tensors(info("a", (2**62 + 2,), DTYPES["I64"][0])))
    yield bad("case24_padding_wraps", "a: size", tensors(info("a", (4, 2**30 - 1, 2**30 + 1))))
    yield bad("case24_second_padding_wraps", "b: size",
              tensors(info("a", (8,)), info("b", (4, 2**30 - 1, 2**30 + 1), offset=32)))
    yield bad("case25_sum_wraps", "a: size", tensors(info("a", (2**60, 2)), info("b", (2**60, 2), offset=2**63)))
    yield bad("case25_second_wraps", "b: size", tensors(info("a", (8,)), info("b", (2**61, 1), offset=32)))
    yield bad("case25_with_header_past_end", "a: size", tensors(info("a", (24,)), data=bytes(64)))
    yield bad("case26_type_minus_1", "a: type", tensors(info("a", (8,), -1)))
    yield bad("case26_type_min", "a: type", tensors(info("a", (8,), -2**31)))
    yield bad("case26_type_99", "a: type", tensors(info("a", (8,), 99)))
    for removed in (4, 5, 31, 36):
        yield bad(f"case26_type_removed_{removed}", "a: type", tensors(info("a", (8,), removed)))
    yield bad("case26_type_not_computed", "", tensors(info("a", (256,), 41)), "UNSUPPORTED")
    yield bad("case27_row_33", "a: row", tensors(info("a", (33,), DTYPES["Q4_0"][0])))
    yield bad("case27_row_128", "a: row", tensors(info("a", (128, 2), DTYPES["Q4_K"][0])))
    yield bad("case28_misaligned", "b: offset", tensors(info("a", (8,)), info("b", (8,), offset=33)))
    yield bad("case28_overlap", "b: offset", tensors(info("a", (16,)), info("b", (8,), offset=32)))
    yield bad("case28_same", "b: offset", tensors(info("a", (8,)), info("b", (8,), offset=0)))
    yield bad("case28_order", "b: offset", tensors(info("b", (8,), offset=32), info("a", (8,), offset=0)))
    yield bad("case28_hole", "b: offset", tensors(info("a", (8,)), info("b", (8,), offset=64), data=bytes(96)))
    yield bad("case28_first", "a: offset", tensors(info("a", (8,), offset=32)))
    yield bad("case28_max", "a: offset", tensors(info("a", (8,), offset=-32)))
    yield bad("case29_cut", "a.weight: size", whole[:-1])
    yield bad("case29_no_data", "a.weight: size", whole[:-32])
    yield bad("case29_larger_than_file", "a: size", tensors(info("a", (1 << 20,))))
    yield bad("case29_no_padding", "a: size", gguf(infos=[info("a", (1,))], padded=False))
    yield from split_cases(bad)
    yield bad("case33_architecture_type", "general.architecture", gguf([kv("general.architecture", U32, 1)]))
    yield bad("case33_architecture_empty", "general.architecture", gguf([kv("general.architecture", STRING, "")]))
    yield bad("case33_architecture_nul", "general.architecture", gguf([kv("general.architecture", STRING, "a\0b")]))
    yield bad("case33_architecture_long", "general.architecture",
              gguf([kv("general.architecture", STRING, "a" * 65)]))
    yield bad("case33_u64_above_i64", "x", values(kv("x", U64, 2**63)))
    yield bad("case33_u64_above_i64_array", "x", values(array("x", U64, [1, MAX])))


def split_cases(bad) -> Iterator[Case]:  # noqa: ANN001 - the local function of reject_cases
    first = model(ONE, split(0, 2, 2))
    second = model((("b.weight", "F32", (8,)),), split(1, 2, 2, architecture=False))

    def pair(label: str, field: str, a: bytes, b: bytes | None, status: str = "FORMAT") -> Case:
        stem = f"case31_{label}/m"
        return bad(f"{stem}-00001-of-00002.gguf", field, a, status,
                   ((f"{stem}-00002-of-00002.gguf", b),) if b is not None else ())

    yield bad("case31_name", "file name", first)
    yield bad("case31_name_count/m-00001-of-00003.gguf", "file name", first)
    yield bad("case31_name_number/m-00002-of-00002.gguf", "file name", first)
    yield bad("case31_second_opened/m-00002-of-00002.gguf", "split.no",
              model((("b.weight", "F32", (8,)),), split(1, 2, 2)))
    yield pair("missing", "", first, None, "IO")
    yield pair("tensors_count", "split.tensors.count", model(ONE, split(0, 2, 3)), second)
    yield pair("second_is_first", "split.no", first, first)
    yield pair("second_of_3", "split.count", first, model((("b.weight", "F32", (8,)),), split(1, 3, 2)))
    yield pair("second_not_split", "split.count", first, model((("b.weight", "F32", (8,)),)))
    yield pair("tensor_in_both", "a.weight", first, model(ONE, split(1, 2, 2)))
    yield pair("second_cut", "b.weight: size", first, second[:-1])
    yield bad("case31_no_number", "split.no", model(ONE, [ARCHITECTURE, kv("split.count", U16, 2)]))
    yield bad("case31_number_of_count", "split.no", model(ONE, split(2, 2, 2)))
    yield bad("case31_negative_count", "split.count",
              model(ONE, [ARCHITECTURE, kv("split.count", I32, -1), kv("split.no", U16, 0)]))
    yield bad("case31_count_1025", "split.count", model(ONE, split(0, 1025, 2)), "LIMIT")
    yield bad("case31_count_type", "split.count", model(ONE, [ARCHITECTURE, kv("split.count", STRING, "2")]))


def large_cases(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Cases that are too large to keep: written into ``folder``, (path, status, field) each."""

    def write(name: str, head: bytes, size: int | None = None) -> Path:
        path = folder / f"{name}.gguf"
        with open(path, "wb") as file:
            file.write(head)
            if size is not None:
                file.truncate(size)
        return path

    many = [kv(f"k{i}", U8, 1) for i in range(65537)]
    yield write("case10_65537_keys", gguf(many, padded=False)), "LIMIT", "kv_count"
    yield write("case10_65536_keys", gguf([ARCHITECTURE, *many[:65535]], padded=False)), "OK", ""
    yield write("case08_key_65536_bytes", gguf([kv("k" * 65536, U8, 1)])), "FORMAT", "key length"
    yield write("case08_key_65535_bytes", gguf([ARCHITECTURE, kv("k" * 65535, U8, 1)])), "OK", ""
    head = gguf([string("x") + struct.pack("<IQ", STRING, (16 << 20) + 1)], padded=False)
    yield write("case15_string_over_16_mib", head, len(head) + (16 << 20) + 1), "LIMIT", "x"
    head = gguf([raw_array("x", U8, (1 << 24) + 1, b"")], padded=False)
    yield write("case13_array_over_cap", head, len(head) + (1 << 24) + 1), "LIMIT", "x"
    # Sparse, all zeros: 2^34 empty strings would be 128 GiB of offsets.
    head = gguf([raw_array("x", STRING, 1 << 34, b"")], padded=False)
    yield write("case14_2_34_strings", head, len(head) + (8 << 34)), "LIMIT", "x"
    head = gguf([raw_array("x", U8, 1 << 23, bytes(1 << 23)), raw_array("y", U8, (1 << 23) + 1, b"")], padded=False)
    yield write("case13_arrays_over_cap", head, len(head) + (1 << 23) + 1), "LIMIT", "y"
    # Five strings of 16 MiB: each within its cap, together over that of the header.
    path = folder / "case15_header_over_cap.gguf"
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 5))
        for i in range(5):
            file.write(string(f"x{i}") + struct.pack("<IQ", STRING, 1 << 24))
            file.seek(1 << 24, 1)
        file.truncate()
    yield path, "LIMIT", "x3"
    yield write("case10_65537_tensors", gguf(infos_count=65537), 4 << 20), "LIMIT", "tensor_count"


README = """# GGUF corpus

Made by `tests/corpus/make_gguf.py`; `manifest.json` and `manifest.tsv` say what reading each file must give.
`regress/` holds inputs that once broke something, as found by fuzzing. The number in a name is that of the case:

| case | malformed input | answer |
|---|---|---|
| 1 | empty, or less than 24 bytes | FORMAT |
| 2 | bad magic | FORMAT |
| 3 | version 0, 1, of the future, byte-swapped | FORMAT |
| 4, 5 | tensor or value count negative or 2^64 - 1 | FORMAT |
| 6 | count times smallest record is more than what is left | FORMAT |
| 7, 8 | key length 2^64 - 1; key empty, not ASCII, over 65,535 bytes | FORMAT |
| 9 | key twice (found by hash, in linear time) | FORMAT |
| 10 | over 65,536 keys | LIMIT |
| 11, 12 | unknown value type; arrays of arrays | FORMAT |
| 13, 14 | array count overflows or is more than what is left; over 16,777,216 elements in all arrays | FORMAT; LIMIT |
| 15 | string longer than what is left; over 16 MiB | FORMAT; LIMIT |
| 16 | bool other than 0 and 1 | FORMAT |
| 17 | tensor name not UTF-8, or with NUL (bytes of tokens may be anything) | FORMAT |
| 18 | alignment 0, no power of two, of another type; over 64 KiB | FORMAT; LIMIT |
| 19 | tensor name empty, over 64 bytes, twice | FORMAT |
| 20, 21 | no or over 4 dimensions; a size below 1 | FORMAT |
| 22, 23, 24, 25 | elements, bytes, padded bytes or their sum overflow | FORMAT |
| 26 | tensor type unknown; known but not computed with | FORMAT; UNSUPPORTED |
| 27 | row that is not whole blocks | FORMAT |
| 28 | offset misaligned, overlapping, out of order, leaving a hole | FORMAT |
| 29, 30 | tensor past the end of the file; bytes after the last padding | FORMAT |
| 31 | split files that do not fit together; a missing one | FORMAT; IO |
| 33 | architecture of another type; integer above 2^63 - 1 | FORMAT |

Accepted: the last tensor, or a header without tensors, may end the file without padding.
"""


def build(root: Path) -> dict[str, bytes]:
    """Every file of the corpus, path below ``root`` -> content."""
    files: dict[str, bytes] = {"README.md": README.encode()}
    rows = []
    for folder, cases in (("valid", valid_cases()), ("reject", reject_cases())):
        for case in cases:
            for name, data in ((case.name, case.data), *case.extra):
                path = f"{folder}/{name}"
                assert path not in files, path
                files[path] = data
            rows.append({"file": f"{folder}/{case.name}", "case": case.number, "status": case.status,
                         "field": case.field})
    regress = root / "regress"
    if regress.is_dir():
        rows += [{"file": f"regress/{path.name}", "case": None, "status": "ANY", "field": ""}
                 for path in sorted(regress.iterdir())]
    files["manifest.json"] = (json.dumps(rows, indent=1) + "\n").encode()
    files["manifest.tsv"] = "".join(f"{row['file']}\t{row['status']}\t{row['field']}\n" for row in rows).encode()
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the files there differ")
    parser.add_argument("--large", metavar="FOLDER", type=Path, help="write the large cases there instead")
    args = parser.parse_args()
    if args.large:
        args.large.mkdir(parents=True, exist_ok=True)
        for path, status, field in large_cases(args.large):
            print(f"{path}\t{status}\t{field}")
        return 0
    files = build(OUT)
    there = {str(path.relative_to(OUT)) for path in OUT.rglob("*") if path.is_file()}
    stale = {name for name in there - set(files) if not name.startswith("regress/")}
    if args.check:
        wrong = sorted(stale | {name for name, data in files.items()
                                if name not in there or (OUT / name).read_bytes() != data})
        print("\n".join(wrong) or "the corpus is what the script makes")
        return 1 if wrong else 0
    for name in stale:
        (OUT / name).unlink()
    for name, data in files.items():
        (OUT / name).parent.mkdir(parents=True, exist_ok=True)
        (OUT / name).write_bytes(data)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes below {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
