"""Token ids of llama.cpp, committed as goldens: the reference of ``tests/python/tokenizers/test_text_parity.py``.

Needs llama-cpp-python (0.3.36 made the goldens in the tree), and the result of ``make_vocabs.py``:

    python tests/parity/text/make_goldens.py smollm2.gguf qwen05.gguf

The first file is SmolLM2-135M-Instruct, the second Qwen2.5-Coder-0.5B-Instruct; ``-`` in place of a name keeps its
golden as it is. The synthetic vocabularies of ``make_vocabs.py`` are written as GGUF files to a temporary folder. BPE
is written once for every name of a pre-tokenizer.
"""

import hashlib
import lzma
import mmap
import struct
import sys
import tempfile
from array import array
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parents[2]))  # at the end: the sources must not hide what is installed

from make_lines import lines  # noqa: E402
from make_vocabs import load  # noqa: E402

#: Number of lines for real and for synthetic vocabularies.
LINES, SYNTHETIC_LINES = 3000, 2000
#: Number of lines for every pre-tokenizer, and lines per hash.
PRE_LINES, PRE_GROUP = 2000, 8
#: Number of lines with control tokens parsed.
SPECIAL_LINES = 800
#: Pre-tokenizers where mpool follows the model's authors and llama.cpp does not.
OWN = ("kimi-k2",)


def write_gguf(path: Path, kv: dict) -> None:
    """Write a GGUF file (version 3) without tensors."""

    def string(text: str) -> bytes:
        data = text.encode()
        return struct.pack("<Q", len(data)) + data

    def value(key: str, item) -> bytes:
        if isinstance(item, bool):
            return struct.pack("<I?", 7, item)
        if isinstance(item, int):
            return struct.pack("<II", 4, item)
        if isinstance(item, str):
            return struct.pack("<I", 8) + string(item)
        kind, body = 8, b"".join(map(string, item)) if isinstance(item[0], str) else b""
        if key.endswith("charsmap"):
            kind, body = 0, bytes(item)
        elif isinstance(item[0], float):
            kind, body = 6, struct.pack(f"<{len(item)}f", *item)
        elif isinstance(item[0], int):
            kind, body = 5, struct.pack(f"<{len(item)}i", *item)
        return struct.pack("<IIQ", 9, kind, len(item)) + body

    entries = {"general.architecture": "llama", **kv}
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    path.write_bytes(data + b"".join(string(key) + value(key, item) for key, item in entries.items()))


def read_gguf(path: Path | str) -> dict:
    """Read the tokenizer keys of a GGUF file; strings in arrays stay bytes. For trusted files only."""
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 8 + 8
        entries, = struct.unpack_from("<Q", data, at)
        at += 8

        def string() -> bytes:
            nonlocal at
            size, = struct.unpack_from("<Q", data, at)
            at += 8 + size
            return data[at - size:at]

        def value(kind: int):
            nonlocal at
            if kind == 8:
                return string()
            if kind == 9:
                inner, count = struct.unpack_from("<IQ", data, at)
                at += 12
                if inner in (8, 9):
                    return [value(inner) for _ in range(count)]
                items = struct.unpack_from(f"<{count}{_FORMATS[inner]}", data, at)
                at += count * struct.calcsize(_FORMATS[inner])
                return list(items)
            item, = struct.unpack_from("<" + _FORMATS[kind], data, at)
            at += struct.calcsize(_FORMATS[kind])
            return item

        found = {}
        for _ in range(entries):
            key, (kind,) = string().decode(), struct.unpack_from("<I", data, at)
            at += 4
            item = value(kind)
            if key.startswith(("tokenizer.", "general.name")):
                found[key] = item
        return found


_FORMATS = "BbHhIif?  Qqd"  # by type number; 8 is a string, 9 an array


def pack(rows: list[list[int]]) -> bytes:
    """Pack rows of ids as int32, each preceded by its length, and compress them."""
    flat = array("i")
    for row in rows:
        flat.append(len(row))
        flat.extend(row)
    return lzma.compress(flat.tobytes(), preset=9 | lzma.PRESET_EXTREME)


def unpack(data: bytes) -> list[list[int]]:
    """Undo :func:`pack`."""
    flat, rows, at = array("i", lzma.decompress(data)), [], 0
    while at < len(flat):
        rows.append(list(flat[at + 1:at + 1 + flat[at]]))
        at += 1 + flat[at]
    return rows


def digest(rows: list[list[int]]) -> bytes:
    """Hash rows to four bytes."""
    return hashlib.blake2b(repr([list(map(int, row)) for row in rows]).encode(), digest_size=4).digest()


def main(smollm2: str, qwen05: str) -> None:
    """Make every golden."""
    from llama_cpp import Llama

    goldens, texts = HERE / "goldens", lines(LINES)

    def ids(path: Path | str, count: int, special: bool = False, around: bool = False) -> list[list[int]]:
        model = Llama(str(path), vocab_only=True, verbose=False, n_ctx=8)
        # llama-cpp-python cannot return an empty result
        return [model.tokenize(text.encode(), add_bos=around, special=special) if text else []
                for text in texts[:count]]

    for name, path in (("smollm2", smollm2), ("qwen05", qwen05)):
        if path != "-":
            (goldens / f"{name}.xz").write_bytes(pack(ids(path, LINES)))
    vocabs = load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        for name in ("spm", "unigram", "wordpiece"):
            write_gguf(path, vocabs[name])
            (goldens / f"{name}.xz").write_bytes(pack(ids(path, SYNTHETIC_LINES)))
        write_gguf(path, vocabs["bpe"])
        (goldens / "bpe_special.xz").write_bytes(pack(ids(path, SPECIAL_LINES, special=True)))
        from mpool.tokenizers.pretokenizers import PRE_TOKENIZERS
        made: dict[object, bytes] = {}
        with lzma.open(goldens / "pre.xz", "wb", preset=9) as stream:
            for name, pre in sorted(PRE_TOKENIZERS.items()):
                if not pre.byte_level or name in OWN:
                    continue
                write_gguf(path, {**vocabs["bpe"], "tokenizer.ggml.pre": name})
                rows = ids(path, PRE_LINES)
                hashes = b"".join(digest(rows[at:at + PRE_GROUP]) for at in range(0, PRE_LINES, PRE_GROUP))
                # names of one row share their hashes, if llama.cpp gives them the same ids
                if made.setdefault(pre, hashes) != hashes:
                    raise SystemExit(f"{name}: llama.cpp's ids differ from those of another name in its row")
                stream.write(name.encode() + b"\n" + hashes)
                print(name)
    print(sum(item.stat().st_size for item in goldens.iterdir()), "bytes")


if __name__ == "__main__":
    main(*(sys.argv[1:3] if len(sys.argv) > 2 else ("-", "-")))
