"""EmbeddingGemma 2: texts and images in one space.

The layers are those of Gemma 4, without shared keys and values. All rows of a prompt attend to each other, in most
layers within a window that reaches as far to both sides. Each layer has inputs of its own, which a matrix projects from
the embeddings. The vector of a prompt is a projection of the mean of its normed rows.
"""

from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..spec import Value
from . import gemma4
from .llama import ATTENTION_BIAS, IGNORED, decoder, decoder_row
from .reading import MAX_LAYERS, MAX_WIDTH
from .rows import Architecture, Config, Tensor, layer

_BLOCK = "layers.{}"
#: Defaults of EmbeddingGemma2TextConfig in transformers.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
    "sliding_window": 512, "hidden_size_per_layer_input": 512}
_ROPE: dict[str, Any] = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                         "full_attention": {"rope_type": "default", "rope_theta": 1000000.0}}
_TENSORS = (
    *decoder(without=("ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "output", "rope_freqs")),
    Tensor("embedding_projection.weight", "output.weight", "ZD"),
    *layer(f"{_BLOCK}.post_attention_layernorm", "post_attention_norm", "D"),
    *layer(f"{_BLOCK}.pre_feedforward_layernorm", "ffn_norm", "D"),
    *layer(f"{_BLOCK}.post_feedforward_layernorm", "post_ffw_norm", "D"),
    Tensor(f"{_BLOCK}.layer_scalar", "blk.{}.layer_output_scale.weight", "1"),
    *gemma4.attention("wide", "Q", "K", "E"), *gemma4.attention("narrow", "q", "k", "e"),
    Tensor("ple.per_layer_model_projection.weight", "per_layer_model_proj.weight", "wD"),
    Tensor("ple.per_layer_projection_norm.weight", "per_layer_proj_norm.weight", "W"),
    *layer(f"{_BLOCK}.ple_block.per_layer_input_gate", "inp_gate", "WD"),
    *layer(f"{_BLOCK}.ple_block.per_layer_projection", "proj", "DW"),
    *layer(f"{_BLOCK}.ple_block.post_per_layer_input_norm", "post_norm", "D"),
)


def _read(config: Fields, row: Architecture) -> Config:
    given = {key: value for key, value in config.values.items() if value is not None}
    values: dict[str, Any] = {"rope_parameters": _ROPE, **DEFAULTS, **given}
    config = Fields(values, file=config.file, at=config.at)
    types = gemma4.kinds(config, config.int("num_hidden_layers", low=1, high=MAX_LAYERS))
    if "per_layer_config" not in config:
        wide = {"head_dim": config.int("global_head_dim", 512, low=1, high=MAX_WIDTH),
                "num_key_value_heads": config.int("num_global_key_value_heads", 1, low=1)}
        values["per_layer_config"] = {str(i): wide for i, kind in enumerate(types) if kind == "full_attention"}
        config = Fields(values, file=config.file, at=config.at)
    config.int("hidden_size_per_layer_input", low=1, high=MAX_WIDTH)
    found = gemma4.read_layers(config, row, types, {"embedding_dim"})
    kv: dict[str, Value] = found.kv
    window = config.int("sliding_window", low=1, high=1 << 30)
    if f"{row.name}.attention.sliding_window" in kv:  # positions to one side, the row's own included
        kv[f"{row.name}.attention.sliding_window"] = window + 1
    kv["mpool.whole_prompts"] = kv["mpool.plain_inputs"] = True
    found.sizes["Z"] = config.int("embedding_dim", 768, low=1, high=MAX_WIDTH)
    return found


#: The core's row is that of Gemma 4: the keys that ``_read`` adds describe the differences.
ROWS = (
    decoder_row("gemma4", ("EmbeddingGemma2TextModel",), _TENSORS, read=_read, activation="gelu_tanh",
                biases=ATTENTION_BIAS, extra_sizes=gemma4.extra_sizes, model_types=("embedding_gemma2_text",), gguf=(),
                by_layer=frozenset({"attention.head_count_kv", "feed_forward_length"}),
                prefixes=("model.language_model.", "language_model.", "model.", ""),
                ignored=(*IGNORED, r"(model\.)?((vision|audio)_tower|embed_(vision|audio))\..*")),
)
