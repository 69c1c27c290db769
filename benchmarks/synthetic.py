"""``python -m benchmarks synthetic OUT --vocabulary FILE``: write a GGUF file with the shapes of Qwen3-1.7B and random
values.

For decode rates, which depend on shapes and formats only. The vocabulary and the tokenizer settings are those of
another Qwen file. 28 layers of width 2,048; 16 heads of 128, 8 key-value heads; feed-forward 6,144; 151,936 tokens;
tied output matrix. Q4_K, with Q6_K where ``Q4_K_M`` has it: the token embeddings, and the value and down matrices of
the layers that llama.cpp's rule names. The architecture is qwen2, which has no norms of queries and keys: they are a
thousandth of the work. Needs the ``gguf`` package.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, FEED, VOCAB = 28, 2048, 16, 8, 128, 6144, 151_936


def more_bits(layer: int) -> bool:
    """Return True if Q4_K_M stores a layer's value and down matrices in six bits."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


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


def write(path: str, vocabulary: str) -> None:
    """Write the file."""
    import gguf

    source = gguf.GGUFReader(vocabulary)
    writer = gguf.GGUFWriter(path, "qwen2")
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
    writer.add_block_count(LAYERS)
    writer.add_context_length(40_960)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    chance = np.random.default_rng(17)

    def matrix(name: str, rows: int, columns: int, six: bool) -> None:
        kind = gguf.GGMLQuantizationType.Q6_K if six else gguf.GGMLQuantizationType.Q4_K
        writer.add_tensor(name, blocks(chance, rows, columns, six), raw_dtype=kind)

    matrix("token_embd.weight", VOCAB, WIDTH, True)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}{name}.weight", np.ones(WIDTH, np.float32))
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{at}attn_{name}.weight", heads * HEAD, WIDTH, name == "v" and more_bits(layer))
            writer.add_tensor(f"{at}attn_{name}.bias", np.zeros(heads * HEAD, np.float32))
        matrix(f"{at}attn_output.weight", WIDTH, HEADS * HEAD, False)
        for name in ("gate", "up"):
            matrix(f"{at}ffn_{name}.weight", FEED, WIDTH, False)
        matrix(f"{at}ffn_down.weight", WIDTH, FEED, more_bits(layer))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Write the file that ``sys.argv`` names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks synthetic", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--vocabulary", required=True, metavar="FILE", help="a GGUF file of a Qwen model")
    given = parser.parse_args()
    write(given.out, given.vocabulary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
