"""GGUF files of a given size with random weights: a Llama with Q8_0 matrices, written without holes.

Every byte of a matrix is random, except for the scales, which give values of about 0.02. The file is written in parts
of 16 MB, so memory does not limit its size.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Bytes of a block of 32 values: a scale and 32 numbers.
BLOCK, VALUES = 34, 32
#: Values per part that is written at once.
PART = 1 << 24


@dataclass(frozen=True)
class Width:
    """Widths of a model: of the hidden states, and of the feed-forward network."""

    hidden: int
    feed: int


#: Largest file in bytes -> widths, so that files of every size have about as many layers as published models.
WIDTHS = {100_000_000: Width(256, 768), 3_000_000_000: Width(2048, 5632), 1 << 62: Width(4096, 14336)}
HEAD = 64


def _quantised(count: int, chance: np.random.Generator) -> np.ndarray:
    """Return random Q8_0 blocks for ``count`` values, as bytes."""
    raw = chance.integers(0, 256, (count // VALUES, BLOCK), dtype=np.uint8)
    raw[:, :2] = np.full((len(raw), 1), 2.5e-4, np.float16).view(np.uint8)
    return raw.reshape(-1)


def _parts(count: int, chance: np.random.Generator) -> Iterator[np.ndarray]:
    for begin in range(0, count, PART):
        yield _quantised(min(PART, count - begin), chance)


def _bytes(values: int) -> int:
    return values // VALUES * BLOCK


def write(path: str, vocabulary: str, size: int) -> int:
    """Write a file of about ``size`` bytes.

    Args:
        path: path of the new file.
        vocabulary: path of a GGUF file, whose tokenizer the new file has.
        size: wanted size in bytes. The file has at least one layer.

    Returns:
        Size of the file in bytes.
    """
    import gguf

    source = gguf.GGUFReader(vocabulary)
    writer = gguf.GGUFWriter(path, "llama")
    tokens = 0
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            value: Any = field.contents()
            tokens = len(value) if name == "tokenizer.ggml.tokens" else tokens
            writer.add_key_value(name, value, kind, sub_type=inner)
    width = next(width for most, width in WIDTHS.items() if size <= most)
    hidden, feed = width.hidden, width.feed
    matrices = {"attn_q": (hidden, hidden), "attn_k": (hidden // 4, hidden), "attn_v": (hidden // 4, hidden),
                "attn_output": (hidden, hidden), "ffn_gate": (feed, hidden), "ffn_up": (feed, hidden),
                "ffn_down": (hidden, feed)}
    layer = sum(_bytes(math.prod(shape)) for shape in matrices.values())
    layers = max(1, round((size - _bytes(tokens * hidden)) / layer))
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(hidden // HEAD)
    writer.add_head_count_kv(hidden // HEAD // 4)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    wanted = [("token_embd.weight", (tokens, hidden)), ("output_norm.weight", (hidden,))]
    for number in range(layers):
        wanted += [(f"blk.{number}.{name}.weight", (hidden,)) for name in ("attn_norm", "ffn_norm")]
        wanted += [(f"blk.{number}.{name}.weight", shape) for name, shape in matrices.items()]
    for name, shape in wanted:
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), shape[0] * 4)
        else:
            writer.add_tensor_info(name, (shape[0], shape[1] // VALUES * BLOCK), np.dtype(np.uint8),
                                   _bytes(math.prod(shape)), gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    chance = np.random.default_rng(17)
    with open(path, "ab") as file:
        _pad(file)
        for _, shape in wanted:
            if len(shape) == 1:
                file.write(np.ones(shape, np.float32).tobytes())
            else:
                for part in _parts(math.prod(shape), chance):
                    file.write(part.data)
            _pad(file)
        file.flush()
        os.fsync(file.fileno())
    return os.path.getsize(path)


def _pad(file: Any) -> None:
    """Fill the file up to a multiple of GGUF's alignment."""
    file.write(b"\0" * (-file.tell() % 32))
