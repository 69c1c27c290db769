"""``python -m benchmarks synthetic OUT --vocabulary FILE [--shape NAME]``: write a GGUF file with the shapes of a
published model and random values.

For rates, which depend on shapes and formats only. The vocabulary and the tokenizer settings are those of another GGUF
file, filled up to 151,936 tokens. Q4_K, with Q6_K where ``Q4_K_M`` has it: the token embeddings, and the value and down
matrices of the layers that llama.cpp's rule names. The output matrix is tied. Needs the ``gguf`` package.

qwen3-1.7b      28 layers of width 2,048; 16 heads of 128, 8 key-value heads; feed-forward 6,144. The architecture is
                qwen2, which has no norms of queries and keys: they are a thousandth of the work.
qwen3-30b-a3b   8 of the 48 layers: width 2,048; 32 heads of 128, 4 key-value heads; 128 experts of 768, 8 used. The
                router's values are random, so all experts are about equally frequent.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDTH, HEAD, VOCAB = 2048, 128, 151_936


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: ``feed`` is the width of one feed-forward network or expert."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    feed: int
    experts: int = 0
    used: int = 0


SHAPES = {"qwen3-1.7b": Shape("qwen2", 28, 16, 8, 6144),
          "qwen3-30b-a3b": Shape("qwen3moe", 8, 32, 4, 768, experts=128, used=8)}


def more_bits(layer: int, layers: int) -> bool:
    """Return True if Q4_K_M stores a layer's value and down matrices in six bits."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def blocks(chance: np.random.Generator, rows: int, columns: int, six: bool) -> np.ndarray:
    """Return random quants (rows, bytes) whose scales give values of about 0.02."""
    count = rows * columns // 256
    if six:  # Q6_K: 128 low, 64 high, 16 scales, d
        raw = chance.integers(0, 256, (count, 210), dtype=np.uint8)
        raw[:, 192:208] = chance.integers(1, 32, (count, 16), dtype=np.uint8)
        raw[:, 208:210] = np.full((count, 1), 6e-5, np.float16).view(np.uint8)
    else:  # Q4_K: d, dmin, 12 of scales and minima, 128 quants
        raw = chance.integers(0, 256, (count, 144), dtype=np.uint8)
        raw[:, 0:2] = np.full((count, 1), 1e-4, np.float16).view(np.uint8)
        raw[:, 2:4] = np.full((count, 1), 7e-4, np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def write(path: str, vocabulary: str, shape: Shape) -> None:
    """Write the file."""
    import gguf

    source = gguf.GGUFReader(vocabulary)
    writer = gguf.GGUFWriter(path, shape.architecture)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            value: Any = field.contents()
            if name == "tokenizer.ggml.tokens":
                value = value[:VOCAB] + [f"[more {number}]" for number in range(len(value), VOCAB)]
            elif name in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
                value = (value + [5] * VOCAB)[:VOCAB]
            writer.add_key_value(name, value, kind, sub_type=inner)
    writer.add_block_count(shape.layers)
    writer.add_context_length(40_960)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(shape.feed)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.feed)
    chance = np.random.default_rng(17)

    def matrix(name: str, rows: int, columns: int, six: bool = False) -> None:
        kind = gguf.GGMLQuantizationType.Q6_K if six else gguf.GGMLQuantizationType.Q4_K
        count = shape.experts if "_exps" in name else 1
        data = blocks(chance, count * rows, columns, six)
        writer.add_tensor(name, data.reshape(count, rows, -1) if count > 1 else data, raw_dtype=kind)

    def vector(name: str, size: int, value: float = 1) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd.weight", VOCAB, WIDTH, True)
    vector("output_norm.weight", WIDTH)
    for layer in range(shape.layers):
        at, six = f"blk.{layer}.", more_bits(layer, shape.layers)
        ending = "_exps" if shape.experts else ""
        for name in ("attn_norm", "ffn_norm"):
            vector(f"{at}{name}.weight", WIDTH)
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            matrix(f"{at}attn_{name}.weight", heads * HEAD, WIDTH, name == "v" and six)
            if not shape.experts:
                vector(f"{at}attn_{name}.bias", heads * HEAD, 0)
            elif name != "v":
                vector(f"{at}attn_{name}_norm.weight", HEAD)
        matrix(f"{at}attn_output.weight", WIDTH, shape.heads * HEAD)
        if shape.experts:
            router = chance.standard_normal((shape.experts, WIDTH), np.float32)
            writer.add_tensor(f"{at}ffn_gate_inp.weight", router)
        for name in ("gate", "up"):
            matrix(f"{at}ffn_{name}{ending}.weight", shape.feed, WIDTH)
        matrix(f"{at}ffn_down{ending}.weight", WIDTH, shape.feed, six)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Write the file that ``sys.argv`` names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks synthetic", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--vocabulary", required=True, metavar="FILE", help="a GGUF file with a tokenizer")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    given = parser.parse_args()
    write(given.out, given.vocabulary, SHAPES[given.shape])
    return 0


if __name__ == "__main__":
    sys.exit(main())
