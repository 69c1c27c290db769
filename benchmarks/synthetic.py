"""``python -m benchmarks synthetic OUT --vocabulary FILE [--shape NAME] [--type TYPE] [--routing NAME]``: write a GGUF
file with the shapes of a published model and random values, and print how many bytes of weights a token reads.

For rates, which depend on shapes and formats only. The vocabulary and the tokenizer settings are those of another GGUF
file, filled up to the size of the published vocabulary. Needs the ``gguf`` package.

qwen3-1.7b      28 layers of width 2,048; 16 heads of 128, 8 key-value heads; feed-forward 6,144. The architecture is
                qwen2, which has no norms of queries and keys: they are a thousandth of the work. Q4_K, with Q6_K where
                ``Q4_K_M`` has it: the token embeddings, and the value and down matrices of the layers that llama.cpp's
                rule names. The output matrix is tied.
qwen3-30b-a3b   8 of the 48 layers: width 2,048; 32 heads of 128, 4 key-value heads; 128 experts of 768, 8 used. Types
                as above.
gpt-oss-20b     8 of the 24 layers: width 2,880; 64 heads of 64, 8 key-value heads, sinks, every second layer with a
                window of 128; 32 experts of 2,880 in MXFP4, 4 used. All other matrices in Q8_0; the output matrix is
                not tied.
deepseek-v3     2 layers with experts of the 61: width 7,168; 128 heads with latent attention; 256 experts of 2,048 in
                Q4_K, 8 used, and a shared one. Other types as for qwen3; the output matrix is not tied. 14 GB.

qwen3.5-4b      24 layers with gated delta nets (16 heads of keys, 32 of values, 128 x 128) and 8 with gated attention
                (16 heads of 256, 4 key-value heads); width 2,560, feed-forward 9,216; 248,320 tokens. Types as for
                qwen3, with Q8_0 for the gates of the delta nets; the output matrix is tied.
qwen3.6-35b-a3b 8 of the 40 layers: width 2,048, delta nets as above, attention with 2 key-value heads; 256 experts of
                512, 8 used, and a shared one. The output matrix is not tied.
granite-4-h-tiny  10 of the 40 layers, one of them with attention (12 heads of 128, 4 key-value heads), the others with
                Mamba-2 (48 heads of 64, a state of 128); width 1,536; 64 experts of 512, 6 used, and a shared one of
                1,024.
gemma4-e2b      35 layers of width 1,536: 28 with a window of 512 and heads of 256, 7 with full attention and heads of
                512; 8 heads, one key-value head; feed-forward 6,144, and 12,288 in the last 20 layers, which have no
                keys and values of their own. 256 inputs per layer and token from a table of 1.9 GB in Q6_K; the output
                matrix is tied.
lfm2.5-1.2b     10 layers with short convolutions and 6 with attention (32 heads of 64, 8 key-value heads); width 2,048,
                feed-forward 8,192.

``--routing`` says which experts the rows of an MoE shape choose. ``uniform``: all about equally often (routers of
random values). ``zipf``: expert k about in proportion to 1 / k. ``one``: the first expert in every row, and random ones
beside it. For the latter two, the embeddings of tokens are larger than what the layers add to them, their first 256
values are the same for all tokens, and the routers read the preferences of the experts from these.

With ``--type``, all linear matrices of the layers of a qwen3 shape have that type; the token embeddings stay in Q6_K.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpool.models.quantizing.recipes import uses_more_bits

from .options import parser_of

#: Bytes per block and values per block of a type.
TYPES = {"F32": (4, 1), "Q8_0": (34, 32), "MXFP4": (17, 32), "Q4_K": (144, 256), "Q6_K": (210, 256),
         "Q2_K": (84, 256), "Q3_K": (110, 256), "IQ2_XS": (74, 256), "IQ3_S": (110, 256), "TQ2_0": (66, 256)}
#: Types that ``--type`` accepts: the linear matrices of a model may have any of them.
LINEAR = ("Q2_K", "Q3_K", "IQ2_XS", "IQ3_S", "TQ2_0", "Q4_K")
#: Offset in a block -> f16 number there (d, dmin), so that weights are about 0.02.
HALVES = {"Q8_0": {0: 2e-4}, "Q4_K": {0: 1e-4, 2: 7e-4}, "Q6_K": {208: 6e-5}, "Q2_K": {80: 1.6e-3, 82: 2.4e-3},
          "Q3_K": {108: 4.7e-4}, "IQ2_XS": {0: 4e-4}, "IQ3_S": {0: 1.2e-4}, "TQ2_0": {64: 0.025}}
#: Bytes of four ternary codes of two bits: TQ2_0 does not use the fourth value.
TERNARY = np.array([byte for byte in range(256) if all(byte >> at & 3 != 3 for at in (0, 2, 4, 6))], np.uint8)
SEED = 17
#: Distributions of ``--routing``.
ROUTINGS = ("uniform", "zipf", "one")
#: Unless the routing is uniform, embeddings are LARGER times as large: far above the outputs of the layers, so that
#: rows keep what distinguishes them, and their first COMMON values are the same.
COMMON, LARGER = 256, 200
#: Standard deviation of the random part of a router's output, samples of it, and a preference that it never reaches.
NOISE, SAMPLES, CERTAIN = 1.0, 8000, 40.0


def blocks(chance: np.random.Generator, kind: str, count: int, larger: float = 1) -> np.ndarray:
    """Return ``count`` valid blocks with random quants, and scales that give values of about 0.02 times ``larger``."""
    raw = chance.integers(0, 256, (count, TYPES[kind][0]), dtype=np.uint8)
    if kind == "Q6_K":  # 128 low, 64 high, 16 scales, d
        raw[:, 192:208] = chance.integers(1, 32, (count, 16), dtype=np.uint8)
    elif kind == "TQ2_0":  # 64 of codes, d
        raw[:, :64] = TERNARY[chance.integers(0, len(TERNARY), (count, 64), dtype=np.uint8)]
    elif kind == "MXFP4":  # an exponent, where 127 is 1 for codes of up to 6, and 16 bytes of codes
        raw[:, 0] = 120
    for at, number in HALVES.get(kind, {}).items():
        raw[:, at:at + 2] = np.full((count, 1), larger * number, np.float16).view(np.uint8)
    return raw


def same_blocks(kind: str, count: int, value: float) -> np.ndarray:
    """Return ``count`` blocks whose values are all about ``value``, above 0."""
    raw = np.full((count, TYPES[kind][0]), 0xFF, np.uint8)  # the largest codes
    halves = {"Q8_0": {0: value / 127}, "Q4_K": {0: value / (63 * 15), 2: 0.0}, "Q6_K": {208: value / 31}}[kind]
    if kind == "Q8_0":
        raw[:, 2:] = 127
    elif kind == "Q6_K":
        raw[:, 192:208] = 1  # scales
    for at, number in halves.items():
        raw[:, at:at + 2] = np.full((count, 1), number, np.float16).view(np.uint8)
    return raw


def preferences(routing: str, experts: int) -> np.ndarray:
    """Return what is added to the output of a router for each expert."""
    if routing == "zipf":  # corrected until samples of the noise choose in proportion to 1 / k
        wanted = 1 / np.arange(1, experts + 1) / sum(1 / number for number in range(1, experts + 1))
        noise = np.random.default_rng(SEED).normal(0, NOISE, (SAMPLES, experts))
        found = np.log(wanted)
        for _ in range(60):
            chosen = np.bincount(np.argmax(noise + found, axis=1), minlength=experts)
            found += 0.3 * np.log(wanted * (SAMPLES + experts) / (chosen + 1))
        return found
    found = np.zeros(experts)
    found[0] = CERTAIN if routing == "one" else 0.0
    return found


class Writer:
    """Writes one file, and counts the bytes of weights that a token reads.

    Args:
        special: special tokens of the model; those that the vocabulary lacks become its last ones.
        template: chat template; None: that of the vocabulary's file.
    """

    def __init__(self, path: str, vocabulary: str, architecture: str, words: int, share: float,
                 routing: str = "uniform", special: tuple[str, ...] = (), template: str | None = None) -> None:
        import gguf

        self.routing = routing

        self.gguf = gguf.GGUFWriter(path, architecture)
        self.architecture, self.share, self.read = architecture, share, 0.0
        self.types, self.dequantize = gguf.GGMLQuantizationType, gguf.dequantize
        self.chance = np.random.default_rng(SEED)
        self._vocabulary(gguf, gguf.GGUFReader(vocabulary), words, special, template is None)
        if template is not None:
            self.gguf.add_chat_template(template)
        self.set(f"{architecture}.rope.freq_base", 1e6)
        self.set(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
        self.set(f"{architecture}.context_length", 40_960)

    def _vocabulary(self, gguf: Any, source: Any, words: int, special: tuple[str, ...],
                    keep_template: bool) -> None:
        missing = [name for name in special if name not in source.fields["tokenizer.ggml.tokens"].contents()]
        for name, field in source.fields.items():
            if name.startswith("tokenizer.") and (keep_template or name != "tokenizer.chat_template"):
                kind = field.types[0]
                inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                value: Any = field.contents()
                if name == "tokenizer.ggml.tokens":
                    value = value[:words] + [f"[more {number}]" for number in range(len(value), words)]
                    value[words - len(missing):] = missing
                elif name in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
                    value = (value + [5] * words)[:words]
                    value[words - len(missing):] = [3] * len(missing)
                self.gguf.add_key_value(name, value, kind, sub_type=inner)

    def set(self, key: str, value: object) -> None:
        """Add a hyper-parameter."""
        add: Callable[[str, Any], None] = {bool: self.gguf.add_bool, int: self.gguf.add_uint32,
                                           float: self.gguf.add_float32, str: self.gguf.add_string}[type(value)]
        add(key, value)

    def sizes(self, **values: object) -> None:
        """Add hyper-parameters of the architecture. Two underscores in a name stand for a dot."""
        for name, value in values.items():
            self.set(f"{self.architecture}.{name.replace('__', '.')}", value)

    def embeddings(self, kind: str, words: int, width: int, share: float = 1.0) -> None:
        """Add the embeddings of tokens."""
        if self.routing == "uniform":
            self.matrix("token_embd.weight", kind, words, width, share=share)
            return
        size, values = TYPES[kind]
        data = blocks(self.chance, kind, words * width // values, LARGER).reshape(words, -1, size)
        typical = float((self.dequantize(data[:64].reshape(-1, size), self.types[kind]) ** 2).mean() ** 0.5)
        data[:, :COMMON // values] = same_blocks(kind, COMMON // values, typical)
        self.read += data.nbytes * share
        self.gguf.add_tensor("token_embd.weight", data.reshape(words, -1), raw_dtype=self.types[kind])

    def matrix(self, name: str, kind: str, *shape: int, share: float = 1.0) -> None:
        """Add random weights; ``share``: the share of them that a token reads."""
        size, values = TYPES[kind]
        count = int(np.prod(shape)) // values
        data = np.empty((count, size), np.uint8)
        for start in range(0, count, 1 << 20):
            data[start:start + (1 << 20)] = blocks(self.chance, kind, min(1 << 20, count - start))
        self.read += data.nbytes * share
        self.gguf.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=self.types[kind])

    def experts(self, name: str, kind: str, *shape: int) -> None:
        """Add the weights of all experts of a layer."""
        self.matrix(name, kind, *shape, share=self.share)

    def vector(self, name: str, *shape: int, value: float = 1.0) -> None:
        """Add float32 weights that are all ``value``."""
        self.gguf.add_tensor(name, np.full(shape, value, np.float32))

    def noise(self, name: str, *shape: int) -> None:
        """Add random float32 weights."""
        self.gguf.add_tensor(name, self.chance.standard_normal(shape, np.float32) * np.float32(0.3))

    def router(self, name: str, experts: int, width: int) -> None:
        """Add a router with random float32 weights, and the preferences of ``routing``."""
        weights = self.chance.standard_normal((experts, width), np.float32)
        if self.routing != "uniform":
            # the norm before the router scales all values of a row to about 1, also the common ones
            weights -= weights[:, COMMON:].mean(1, keepdims=True)  # a row's mean prefers no expert
            weights *= NOISE * (width - COMMON) ** -0.5
            weights[:, :COMMON] = preferences(self.routing, experts)[:, None] / COMMON
        self.gguf.add_tensor(name, weights)
        self.read += 4 * experts * width

    def close(self) -> None:
        """Write the file."""
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def qwen3(path: str, vocabulary: str, layers: int, heads: int, kv_heads: int, feed: int, experts: int = 0,
          used: int = 0, width: int = 2048, words: int = 151_936, linear: str | None = None,
          routing: str = "uniform") -> float:
    """Write a dense or MoE model of Qwen3. ``feed`` is the width of one feed-forward network or expert, ``linear`` the
    type of all linear matrices of the layers; None: the mixture of Q4_K_M.
    """
    head = 128
    out = Writer(path, vocabulary, "qwen3moe" if experts else "qwen2", words, used / experts if experts else 1,
                 routing)
    out.sizes(block_count=layers, embedding_length=width, feed_forward_length=feed, attention__head_count=heads,
              attention__head_count_kv=kv_heads, attention__key_length=head, attention__value_length=head)
    if experts:
        out.sizes(expert_count=experts, expert_used_count=used, expert_feed_forward_length=feed)
    if linear is None:
        out.set("general.file_type", 15)  # Q4_K_M
    out.embeddings("Q6_K", words, width)
    out.vector("output_norm.weight", width)
    most = linear or "Q4_K"
    for layer in range(layers):
        at, six = f"blk.{layer}.", linear or ("Q6_K" if uses_more_bits(layer, layers) else "Q4_K")
        for name in ("attn_norm", "ffn_norm"):
            out.vector(f"{at}{name}.weight", width)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            out.matrix(f"{at}attn_{name}.weight", six if name == "v" else most, count * head, width)
            if not experts:
                out.vector(f"{at}attn_{name}.bias", count * head, value=0)
            elif name != "v":
                out.vector(f"{at}attn_{name}_norm.weight", head)
        out.matrix(f"{at}attn_output.weight", most, width, heads * head)
        if experts:
            out.router(f"{at}ffn_gate_inp.weight", experts, width)
            for name in ("gate", "up"):
                out.experts(f"{at}ffn_{name}_exps.weight", most, experts, feed, width)
            out.experts(f"{at}ffn_down_exps.weight", six, experts, width, feed)
        else:
            for name in ("gate", "up"):
                out.matrix(f"{at}ffn_{name}.weight", most, feed, width)
            out.matrix(f"{at}ffn_down.weight", six, width, feed)
    out.close()
    return out.read


def gpt_oss(path: str, vocabulary: str, layers: int, heads: int = 64, experts: int = 32, width: int = 2880,
            words: int = 201_088, routing: str = "uniform") -> float:
    """Write a model of GPT-OSS."""
    kv_heads, head, used = heads // 8, 64, 4
    out = Writer(path, vocabulary, "gpt-oss", words, used / experts, routing)
    out.sizes(block_count=layers, embedding_length=width, feed_forward_length=width, attention__head_count=heads,
              attention__head_count_kv=kv_heads, attention__key_length=head, attention__value_length=head,
              attention__sliding_window=128, expert_count=experts, expert_used_count=used,
              expert_feed_forward_length=width, rope__scaling__type="yarn", rope__scaling__factor=32.0,
              rope__scaling__original_context_length=4096)
    out.embeddings("Q8_0", words, width, share=0)
    out.matrix("output.weight", "Q8_0", words, width)
    out.vector("output_norm.weight", width)
    for layer in range(layers):
        at = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm"):
            out.vector(f"{at}{name}.weight", width)
        for name, rows, columns in (("q", heads * head, width), ("k", kv_heads * head, width),
                                    ("v", kv_heads * head, width), ("output", width, heads * head)):
            out.matrix(f"{at}attn_{name}.weight", "Q8_0", rows, columns)
            out.vector(f"{at}attn_{name}.bias", rows, value=0)
        out.vector(f"{at}attn_sinks.weight", heads)
        out.router(f"{at}ffn_gate_inp.weight", experts, width)
        out.vector(f"{at}ffn_gate_inp.bias", experts, value=0)
        for name in ("gate", "up", "down"):
            out.experts(f"{at}ffn_{name}_exps.weight", "MXFP4", experts, width, width)
            out.vector(f"{at}ffn_{name}_exps.bias", experts, width, value=0)
    out.close()
    return out.read


def deepseek(path: str, vocabulary: str, layers: int, heads: int = 128, feed: int = 2048, experts: int = 256,
             width: int = 7168, words: int = 129_280, routing: str = "uniform") -> float:
    """Write a model of DeepSeek-V3 without its dense layers."""
    key, value, rotated, rank, q_rank, used = 128, 128, 64, 512, 1536, 8
    out = Writer(path, vocabulary, "deepseek2", words, used / experts, routing)
    out.sizes(block_count=layers, embedding_length=width, feed_forward_length=18_432, attention__head_count=heads,
              attention__head_count_kv=1, attention__key_length=rank + rotated, attention__value_length=rank,
              attention__key_length_mla=key + rotated, attention__value_length_mla=value, attention__kv_lora_rank=rank,
              attention__q_lora_rank=q_rank, rope__dimension_count=rotated, leading_dense_block_count=0,
              expert_count=experts, expert_used_count=used, expert_feed_forward_length=feed, expert_shared_count=1,
              expert_weights_scale=2.5, expert_weights_norm=True, expert_gating_func=2, expert_group_count=8,
              expert_group_used_count=4, vocab_size=words)
    out.embeddings("Q4_K", words, width, share=0)
    out.matrix("output.weight", "Q6_K", words, width)
    out.vector("output_norm.weight", width)
    for layer in range(layers):
        at, six = f"blk.{layer}.", "Q6_K" if uses_more_bits(layer, layers) else "Q4_K"
        for name, size in (("attn_norm", width), ("ffn_norm", width), ("attn_q_a_norm", q_rank),
                           ("attn_kv_a_norm", rank)):
            out.vector(f"{at}{name}.weight", size)
        out.matrix(f"{at}attn_q_a.weight", "Q4_K", q_rank, width)
        out.matrix(f"{at}attn_q_b.weight", "Q4_K", heads * (key + rotated), q_rank)
        out.matrix(f"{at}attn_kv_a_mqa.weight", "Q8_0", rank + rotated, width)
        out.matrix(f"{at}attn_k_b.weight", "Q8_0", heads, rank, key)
        out.matrix(f"{at}attn_v_b.weight", "Q8_0", heads, value, rank)
        out.matrix(f"{at}attn_output.weight", "Q4_K", width, heads * value)
        out.router(f"{at}ffn_gate_inp.weight", experts, width)
        out.vector(f"{at}exp_probs_b.bias", experts, value=0)
        for name in ("gate", "up"):
            out.experts(f"{at}ffn_{name}_exps.weight", "Q4_K", experts, feed, width)
            out.matrix(f"{at}ffn_{name}_shexp.weight", "Q4_K", feed, width)
        out.experts(f"{at}ffn_down_exps.weight", six, experts, width, feed)
        out.matrix(f"{at}ffn_down_shexp.weight", six, width, feed)
    out.close()
    return out.read


def layer_types(layer: int, layers: int) -> str:
    """Return the type of the value and down matrices of a layer in Q4_K_M."""
    return "Q6_K" if uses_more_bits(layer, layers) else "Q4_K"


def feed_forward(out: Writer, at: str, six: str, width: int, feed: int, experts: int = 0, shared: int = 0,
                 gated: bool = False) -> None:
    """Write a network, or experts of width ``feed`` with a shared one."""
    if not experts:
        for name in ("gate", "up"):
            out.matrix(f"{at}ffn_{name}.weight", "Q4_K", feed, width)
        out.matrix(f"{at}ffn_down.weight", six, width, feed)
        return
    out.router(f"{at}ffn_gate_inp.weight", experts, width)
    if gated:
        out.vector(f"{at}ffn_gate_inp_shexp.weight", width, value=0)
    for name in ("gate", "up"):
        out.experts(f"{at}ffn_{name}_exps.weight", "Q4_K", experts, feed, width)
        out.matrix(f"{at}ffn_{name}_shexp.weight", "Q4_K", shared, width)
    out.experts(f"{at}ffn_down_exps.weight", six, experts, width, feed)
    out.matrix(f"{at}ffn_down_shexp.weight", six, width, shared)


def attention(out: Writer, at: str, six: str, width: int, heads: int, kv_heads: int, head: int, norms: bool = False,
              gated: bool = False) -> None:
    """Write the attention of a layer; ``gated``: queries have gates."""
    for name, count in (("q", heads * (2 if gated else 1)), ("k", kv_heads), ("v", kv_heads)):
        out.matrix(f"{at}attn_{name}.weight", six if name == "v" else "Q4_K", count * head, width)
        if norms and name != "v":
            out.vector(f"{at}attn_{name}_norm.weight", head)
    out.matrix(f"{at}attn_output.weight", "Q4_K", width, heads * head)


def qwen35(path: str, vocabulary: str, layers: int, width: int, feed: int, heads: int, kv_heads: int, experts: int = 0,
           used: int = 0, words: int = 248_320, routing: str = "uniform") -> float:
    """Write a model of Qwen3.5. Every fourth layer has attention."""
    head, keys, values, dim = 256, 16, 32, 128
    out = Writer(path, vocabulary, "qwen35moe" if experts else "qwen35", words, used / experts if experts else 1,
                 routing)
    out.sizes(block_count=layers, embedding_length=width, feed_forward_length=feed, attention__head_count=heads,
              attention__head_count_kv=kv_heads, attention__key_length=head, attention__value_length=head,
              rope__dimension_count=64, full_attention_interval=4, ssm__conv_kernel=4, ssm__state_size=dim,
              ssm__group_count=keys, ssm__time_step_rank=values, ssm__inner_size=values * dim)
    out.gguf.add_array(f"{out.architecture}.rope.dimension_sections", [11, 11, 10, 0])
    if experts:
        out.sizes(expert_count=experts, expert_used_count=used, expert_feed_forward_length=feed,
                  expert_shared_feed_forward_length=feed)
    out.embeddings("Q6_K", words, width, share=0 if experts else 1)
    if experts:
        out.matrix("output.weight", "Q6_K", words, width)
    out.vector("output_norm.weight", width)
    for layer in range(layers):
        at, six = f"blk.{layer}.", layer_types(layer, layers)
        for name in ("attn_norm", "post_attention_norm"):
            out.vector(f"{at}{name}.weight", width)
        if layer % 4 == 3:
            attention(out, at, six, width, heads, kv_heads, head, norms=True, gated=True)
        else:
            channels = (2 * keys + values) * dim
            out.matrix(f"{at}attn_qkv.weight", "Q4_K", channels, width)
            out.matrix(f"{at}attn_gate.weight", "Q4_K", values * dim, width)
            for name in ("beta", "alpha"):
                out.matrix(f"{at}ssm_{name}.weight", "Q8_0", values, width)
            out.noise(f"{at}ssm_conv1d.weight", channels, 4)
            out.vector(f"{at}ssm_a", values, value=-0.05)
            out.vector(f"{at}ssm_dt.bias", values)
            out.vector(f"{at}ssm_norm.weight", dim)
            out.matrix(f"{at}ssm_out.weight", "Q4_K", width, values * dim)
        feed_forward(out, at, six, width, feed, experts, feed, gated=True)
    out.close()
    return out.read


def granite_h(path: str, vocabulary: str, layers: int, width: int = 1536, feed: int = 512, heads: int = 12,
              kv_heads: int = 4, experts: int = 64, used: int = 6, shared: int = 1024, words: int = 100_352,
              routing: str = "uniform") -> float:
    """Write a model of Granite 4 H. Layer 5 has attention."""
    state, inner, steps = 128, 2 * width, 48
    out = Writer(path, vocabulary, "granitehybrid", words, used / experts, routing)
    out.sizes(block_count=layers, embedding_length=width, feed_forward_length=feed, attention__head_count=heads,
              rope__dimension_count=width // heads, expert_count=experts, expert_used_count=used,
              expert_shared_feed_forward_length=shared, ssm__conv_kernel=4, ssm__state_size=state, ssm__group_count=1,
              ssm__time_step_rank=steps, ssm__inner_size=inner, embedding_scale=12.0, residual_scale=0.22,
              attention__scale=0.0078125, logit_scale=6.0)
    out.gguf.add_array("granitehybrid.attention.head_count_kv", [kv_heads if i == 5 else 0 for i in range(layers)])
    out.gguf.add_bool("granitehybrid.rope.scaling.finetuned", False)
    out.embeddings("Q6_K", words, width)
    out.vector("output_norm.weight", width)
    for layer in range(layers):
        at, six = f"blk.{layer}.", layer_types(layer, layers)
        for name in ("attn_norm", "ffn_norm"):
            out.vector(f"{at}{name}.weight", width)
        if layer == 5:
            attention(out, at, six, width, heads, kv_heads, width // heads)
        else:
            out.matrix(f"{at}ssm_in.weight", "Q4_K", 2 * inner + 2 * state + steps, width)
            out.noise(f"{at}ssm_conv1d.weight", inner + 2 * state, 4)
            out.vector(f"{at}ssm_conv1d.bias", inner + 2 * state, value=0)
            out.vector(f"{at}ssm_dt.bias", steps)
            for name, value in (("a", -0.05), ("d", 1.0)):
                out.vector(f"{at}ssm_{name}", steps, 1, value=value)
            out.vector(f"{at}ssm_norm.weight", 1, inner)
            out.matrix(f"{at}ssm_out.weight", "Q4_K", width, inner)
        feed_forward(out, at, six, width, feed, experts, shared)
    out.close()
    return out.read


def lfm2(path: str, vocabulary: str, layers: int, width: int = 2048, feed: int = 8192, heads: int = 32,
         kv_heads: int = 8, words: int = 65_536, routing: str = "uniform") -> float:
    """Write a model of LFM2.5."""
    with_attention = (2, 5, 8, 10, 12, 14)
    out = Writer(path, vocabulary, "lfm2", words, 1, routing)
    out.sizes(block_count=layers, embedding_length=width, feed_forward_length=feed, attention__head_count=heads,
              shortconv__l_cache=3, vocab_size=words)
    out.gguf.add_array("lfm2.attention.head_count_kv", [kv_heads * (i in with_attention) for i in range(layers)])
    out.embeddings("Q6_K", words, width)
    out.vector("token_embd_norm.weight", width)
    for layer in range(layers):
        at, six = f"blk.{layer}.", layer_types(layer, layers)
        for name in ("attn_norm", "ffn_norm"):
            out.vector(f"{at}{name}.weight", width)
        if layer in with_attention:
            attention(out, at, six, width, heads, kv_heads, width // heads, norms=True)
        else:
            out.matrix(f"{at}shortconv.in_proj.weight", "Q4_K", 3 * width, width)
            out.noise(f"{at}shortconv.conv.weight", width, 3)
            out.matrix(f"{at}shortconv.out_proj.weight", "Q4_K", width, width)
        feed_forward(out, at, six, width, feed)
    out.close()
    return out.read


def gemma4(path: str, vocabulary: str, layers: int, width: int = 1536, feed: int = 6144, heads: int = 8,
           kv_heads: int = 1, shared: int = 20, inputs: int = 256, words: int = 262_144,
           routing: str = "uniform", special: tuple[str, ...] = (), template: str | None = None) -> float:
    """Write a small model of Gemma 4. ``shared``: layers without keys and values, whose networks are twice as wide."""
    out = Writer(path, vocabulary, "gemma4", words, 1, routing, special=special, template=template)
    wide = [layer % 5 == 4 for layer in range(layers)]
    out.sizes(block_count=layers, embedding_length=width, attention__head_count=heads, attention__key_length=512,
              attention__value_length=512, attention__key_length_swa=256, attention__value_length_swa=256,
              attention__sliding_window=512, attention__shared_kv_layers=shared, vocab_size=words,
              attention__head_count_kv=kv_heads, rope__dimension_count=512, rope__dimension_count_swa=256,
              rope__freq_base_swa=10_000.0, embedding_length_per_layer_input=inputs, final_logit_softcapping=30.0)
    out.gguf.add_array("gemma4.attention.sliding_window_pattern", [not one for one in wide])
    widths = [feed * (1 + (layer >= layers - shared)) for layer in range(layers)]
    out.gguf.add_array("gemma4.feed_forward_length", widths)
    out.embeddings("Q6_K", words, width)
    out.matrix("per_layer_token_embd.weight", "Q6_K", words, layers * inputs, share=1 / words)
    out.matrix("per_layer_model_proj.weight", "Q4_K", layers * inputs, width)
    out.vector("per_layer_proj_norm.weight", inputs)
    out.vector("output_norm.weight", width)
    out.gguf.add_tensor("rope_freqs.weight", np.array([1.0] * 64 + [1e30] * 192, np.float32))
    for layer in range(layers):
        at, six, head = f"blk.{layer}.", layer_types(layer, layers), 512 if wide[layer] else 256
        for name in ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "post_norm"):
            out.vector(f"{at}{name}.weight", width)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            if name == "q" or layer < layers - shared:
                out.matrix(f"{at}attn_{name}.weight", six if name == "v" else "Q4_K", count * head, width)
            if name == "q" or name == "k" and layer < layers - shared:
                out.vector(f"{at}attn_{name}_norm.weight", head)
        out.matrix(f"{at}attn_output.weight", "Q4_K", width, heads * head)
        feed_forward(out, at, six, width, widths[layer])
        out.matrix(f"{at}inp_gate.weight", "Q4_K", inputs, width)
        out.matrix(f"{at}proj.weight", "Q4_K", width, inputs)
        out.vector(f"{at}layer_output_scale.weight", 1, value=0.5)
    out.close()
    return out.read


#: Functions that write a file and return how many bytes of weights a token reads, the output matrix included. Those of
#: qwen3 accept ``linear``.
SHAPES: dict[str, Callable[..., float]] = {
    "qwen3-1.7b": functools.partial(qwen3, layers=28, heads=16, kv_heads=8, feed=6144),
    "qwen3-30b-a3b": functools.partial(qwen3, layers=8, heads=32, kv_heads=4, feed=768, experts=128, used=8),
    "gpt-oss-20b": functools.partial(gpt_oss, layers=8),
    "deepseek-v3": functools.partial(deepseek, layers=2),
    "qwen3.5-4b": functools.partial(qwen35, layers=32, width=2560, feed=9216, heads=16, kv_heads=4),
    "qwen3.6-35b-a3b": functools.partial(qwen35, layers=8, width=2048, feed=512, heads=16, kv_heads=2, experts=256,
                                         used=8),
    "granite-4-h-tiny": functools.partial(granite_h, layers=10),
    "gemma4-e2b": functools.partial(gemma4, layers=35),
    "lfm2.5-1.2b": functools.partial(lfm2, layers=16),
}


def main() -> int:
    """Write the file that ``sys.argv`` names."""
    parser = parser_of("synthetic", __doc__)
    parser.add_argument("out")
    parser.add_argument("--vocabulary", required=True, metavar="FILE", help="a GGUF file with a tokenizer")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--type", choices=LINEAR, help="type of the linear matrices of a qwen3 shape")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform", help="which experts the rows of an MoE shape "
                        "choose (default: %(default)s)")
    given = parser.parse_args()
    if given.routing != "uniform" and given.shape in ("qwen3-1.7b", "qwen3.5-4b", "gemma4-e2b", "lfm2.5-1.2b"):
        parser.error(f"--routing needs a shape with experts, got {given.shape}")
    if given.type and not given.shape.startswith("qwen3-"):
        parser.error(f"--type needs a qwen3 shape, got {given.shape}")
    more = {"linear": given.type} if given.type else {}
    read = SHAPES[given.shape](given.out, given.vocabulary, routing=given.routing, **more)
    print(f"{given.shape}, routing {given.routing}: a token reads {read / 1e6:,.0f} MB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
