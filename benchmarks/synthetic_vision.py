"""Pairs of GGUF files, decoder and projector, with the shapes of published models that see and random values."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .synthetic import SEED, Writer, attention, feed_forward, gemma4, layer_types

#: A template that puts images where they stand in a message. ``MARK`` stands for the marks of an image.
TEMPLATE = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == "image" %}MARK{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{% endfor %}assistant:"""


@dataclass(frozen=True)
class Pair:
    """A pair of files.

    Attributes:
        text, projector: write the files; the first one gets the path of a file with a vocabulary, too.
        operations: operations of the image encoder for an image of 1,024 x 1,024, a multiplication and an addition
            counting as two.
    """

    text: Callable[[str, str], float]
    projector: Callable[[str], None]
    operations: float

    def write(self, folder: Path, vocabulary: str) -> None:
        """Write ``model.gguf`` and ``mmproj.gguf`` into a folder."""
        self.text(str(folder / "model.gguf"), vocabulary)
        self.projector(str(folder / "mmproj.gguf"))


class Projector:
    """Writes a projector file with an image encoder in bfloat16."""

    def __init__(self, path: str, kind: str, mean: float, **sizes: int) -> None:
        import gguf

        self.types, self.quantize = gguf.GGMLQuantizationType, gguf.quants.quantize
        self.gguf, self.chance = gguf.GGUFWriter(path, "clip"), np.random.default_rng(SEED)
        self.gguf.add_string("clip.projector_type", kind)
        self.gguf.add_bool("clip.has_vision_encoder", True)
        self.gguf.add_bool("clip.use_gelu", True)
        for name, size in sizes.items():
            self.gguf.add_uint32(f"clip.vision.{name.replace('__', '.')}", size)
        self.gguf.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        for name, value in (("image_mean", mean), ("image_std", mean or 1.0)):
            self.gguf.add_array(f"clip.vision.{name}", [value] * 3)

    def linear(self, name: str, *shape: int, bias: bool = True) -> None:
        """Add a matrix in bfloat16 and a bias in float32."""
        values = self.chance.standard_normal(shape, np.float32) * np.float32(0.02)
        self.gguf.add_tensor(f"{name}.weight", self.quantize(values, self.types.BF16), raw_dtype=self.types.BF16)
        if bias:
            self.plain(f"{name}.bias", shape[0])

    def plain(self, name: str, *shape: int) -> None:
        """Add random float32 values."""
        self.gguf.add_tensor(name, self.chance.standard_normal(shape, np.float32) * np.float32(0.02))

    def norm(self, name: str, width: int, bias: bool = True) -> None:
        """Add the values of a norm."""
        self.gguf.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        if bias:
            self.gguf.add_tensor(f"{name}.bias", np.zeros(width, np.float32))

    def blocks(self, layers: int, width: int, feed: int, *, joined: bool) -> None:
        """Add the layers. ``joined``: queries, keys and values in one matrix."""
        for layer in range(layers):
            at = f"v.blk.{layer}."
            self.norm(f"{at}ln1", width)
            self.norm(f"{at}ln2", width)
            for name in ("qkv",) if joined else "qkv":
                self.linear(f"{at}attn_{name}", len(name) * width, width)
            self.linear(f"{at}attn_out", width, width)
            self.linear(f"{at}ffn_up", feed, width)
            self.linear(f"{at}ffn_down", width, feed)

    def close(self) -> None:
        """Write the file."""
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def encoder_operations(rows: int, layers: int, width: int, feed: int) -> float:
    """Return the operations of an image encoder whose layers have full attention."""
    return 2.0 * layers * rows * (4 * width * width + 2 * width * feed + 2 * rows * width)


def write_text(out: Writer, words: int, layers: int, width: int, feed: int, heads: int, kv_heads: int, head: int,
               norms: tuple[str, ...] = ("attn_norm", "ffn_norm")) -> float:
    """Write the sizes and the layers of a decoder whose heads have norms. ``norms``: those of a layer."""
    out.sizes(block_count=layers, embedding_length=width, feed_forward_length=feed, attention__head_count=heads,
              attention__head_count_kv=kv_heads, attention__key_length=head, attention__value_length=head)
    out.embeddings("Q6_K", words, width)
    out.vector("output_norm.weight", width)
    for layer in range(layers):
        at, six = f"blk.{layer}.", layer_types(layer, layers)
        for name in norms:
            out.vector(f"{at}{name}.weight", width)
        attention(out, at, six, width, heads, kv_heads, head, norms=True)
        feed_forward(out, at, six, width, feed)
    out.close()
    return out.read


def gemma3_text(path: str, vocabulary: str) -> float:
    """Write the decoder of Gemma-3-4B."""
    marks = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    out = Writer(path, vocabulary, "gemma3", 262_208, 1, special=marks, template=TEMPLATE.replace("MARK", marks[0]))
    out.sizes(attention__sliding_window=1024)
    return write_text(out, 262_208, layers=34, width=2560, feed=10_240, heads=8, kv_heads=4, head=256,
                      norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"))


def gemma3_projector(path: str) -> None:
    """Write Gemma 3's image encoder, SigLIP So400m of 896 x 896."""
    layers, width, feed = 27, 1152, 4304
    out = Projector(path, "gemma3", 0.5, image_size=896, patch_size=14, block_count=layers, embedding_length=width,
                    feed_forward_length=feed, attention__head_count=16, projection_dim=2560,
                    projector__scale_factor=4)
    out.plain("v.patch_embd.weight", width, 3, 14, 14)
    out.plain("v.patch_embd.bias", width)
    out.plain("v.position_embd.weight", 4096, width)
    out.blocks(layers, width, feed, joined=False)
    out.norm("v.post_ln", width)
    out.plain("mm.input_projection.weight", width, 2560)
    out.norm("mm.soft_emb_norm", width, bias=False)
    out.close()


def gemma4_text(path: str, vocabulary: str) -> float:
    """Write the decoder of Gemma-4-E2B."""
    marks = ("<|image>", "<|image|>", "<image|>")
    return gemma4(path, vocabulary, layers=35, special=marks, template=TEMPLATE.replace("MARK", marks[1]))


def gemma4_projector(path: str) -> None:
    """Write the image encoder of Gemma-4-E2B."""
    layers, width, feed = 16, 768, 3072
    out = Projector(path, "gemma4v", 0.0, image_size=768, patch_size=16, block_count=layers, embedding_length=width,
                    feed_forward_length=feed, attention__head_count=12, projection_dim=1536)
    out.plain("v.patch_embd.weight", width, 3, 16, 16)
    out.plain("v.position_embd.weight", 2, 10_240, width)
    for layer in range(layers):
        at = f"v.blk.{layer}."
        for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            out.norm(f"{at}{name}", width, bias=False)
        for name in ("q", "k"):
            out.norm(f"{at}attn_{name}_norm", width // 12, bias=False)
        for name, shape in (("attn_q", (width, width)), ("attn_k", (width, width)), ("attn_v", (width, width)),
                            ("attn_out", (width, width)), ("ffn_gate", (feed, width)), ("ffn_up", (feed, width)),
                            ("ffn_down", (width, feed))):
            out.linear(f"{at}{name}", *shape, bias=False)
    out.plain("mm.input_projection.weight", 1536, width)
    out.close()


def qwen3_vl_text(path: str, vocabulary: str) -> float:
    """Write the decoder of Qwen3-VL-2B."""
    marks = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    out = Writer(path, vocabulary, "qwen3vl", 151_936, 1, special=marks,
                 template=TEMPLATE.replace("MARK", "".join(marks)))
    out.sizes(n_deepstack_layers=3)
    out.gguf.add_array("qwen3vl.rope.dimension_sections", [24, 20, 20, 0])
    return write_text(out, 151_936, layers=28, width=2048, feed=6144, heads=16, kv_heads=8, head=128)


def qwen3_vl_projector(path: str) -> None:
    """Write the image encoder of Qwen3-VL-2B."""
    layers, width, feed, taps = 24, 1024, 4096, (5, 11, 17)
    out = Projector(path, "qwen3vl_merger", 0.5, image_size=768, patch_size=16, block_count=layers,
                    embedding_length=width, feed_forward_length=feed, attention__head_count=16, projection_dim=2048,
                    spatial_merge_size=2, image_min_pixels=65_536, image_max_pixels=16_777_216)
    out.gguf.add_array("clip.vision.is_deepstack_layers", [layer in taps for layer in range(layers)])
    out.plain("v.patch_embd.weight", width, 3, 16, 16)
    out.plain("v.patch_embd.weight.1", width, 3, 16, 16)
    out.plain("v.patch_embd.bias", width)
    out.plain("v.position_embd.weight", 2304, width)
    out.blocks(layers, width, feed, joined=True)
    out.norm("v.post_ln", width)
    for layer in taps:
        out.norm(f"v.deepstack.{layer}.norm", 4 * width)
        out.linear(f"v.deepstack.{layer}.fc1", 4 * width, 4 * width)
        out.linear(f"v.deepstack.{layer}.fc2", 2048, 4 * width)
    out.linear("mm.0", 4 * width, 4 * width)
    out.linear("mm.2", 2048, 4 * width)
    out.close()


PAIRS: dict[str, Pair] = {
    "gemma4-e2b": Pair(gemma4_text, gemma4_projector, encoder_operations(2304, 16, 768, 3072 * 3 // 2)),
    "gemma3-4b": Pair(gemma3_text, gemma3_projector, encoder_operations(4096, 27, 1152, 4304)),
    "qwen3-vl-2b": Pair(qwen3_vl_text, qwen3_vl_projector, encoder_operations(4096, 24, 1024, 4096)),
}
