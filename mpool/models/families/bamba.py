"""IBM's Bamba: Llama's layers, most of which have Mamba-2 in place of attention. RoPE rotates half of each head.

GGUF files are not supported: llama.cpp's converter sorts whole heads into pairs, which are not the pairs that rotate.
"""

from __future__ import annotations

from typing import cast

from ..fields import Fields
from .llama import BIASES, decoder, decoder_row, finish, read_common
from .mamba import ATTENTION, MAMBA, mamba_sizes, mamba_tensors, mix, read_mamba
from .reading import MAX_LAYERS, require_values
from .rows import Architecture, Config, Tensor, layer

_BLOCK = "layers.{}"
_TENSORS = (
    *decoder(attends="in attention", without=("ffn_gate", "ffn_up", "ffn_down", "ffn_norm", "output_norm")),
    Tensor("final_layernorm.weight", "output_norm.weight", "D"),
    *layer(f"{_BLOCK}.pre_ff_layernorm", "ffn_norm", "D"),
    *(tensor for name, shape in (("gate", "FD"), ("up", "FD"), ("down", "DF"))
      for tensor in layer(f"{_BLOCK}.feed_forward.{name}_proj", f"ffn_{name}", shape, bias=shape[0],
                          biased="if mlp_bias")),
    *mamba_tensors(f"{_BLOCK}.mamba", "in mamba"),
)


def _mixers(config: Fields) -> list[int]:
    layers = config.int("num_hidden_layers", low=1, high=MAX_LAYERS)
    attention = config.list("attn_layer_indices", [], of=int, limit=MAX_LAYERS)
    for index in attention:
        if not 0 <= index < layers:
            config.fail("attn_layer_indices", index, f"numbers of layers, from 0 to {layers - 1}")
    return [ATTENTION if i in attention else MAMBA for i in range(layers)]


def _read(config: Fields, row: Architecture) -> Config:
    kv, used = read_common(config, row, acts=("silu",))
    a, mixers = row.name, _mixers(config)
    mix(config, "attn_layer_indices", kv, mixers)
    if MAMBA in mixers:
        inner = config.int("mamba_expand", 2, low=1, high=64) * cast(int, kv[f"{a}.embedding_length"])
        used |= read_mamba(config, kv, a, {"heads": 128, "head": 1, "groups": 1, "state": 256}, inner=inner)
    # transformers ignores both keys: its factor is 0.5, unless rope_parameters states another one
    require_values(config, {"partial_rotary_factor": (None, 0.5),
                            "attn_rotary_emb": (None, kv[f"{a}.rope.dimension_count"])})
    found = finish(config, row, kv, used | {
        "attn_layer_indices", "attn_rotary_emb", "mamba_expand", "mamba_conv_bias", "mamba_proj_bias",
        "num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"})
    proj = int(config.bool("mamba_proj_bias", False))
    found.sizes |= {"proj_bias": proj, "out_bias": proj, "conv_bias": int(config.bool("mamba_conv_bias", True))}
    return found


ROWS = (
    decoder_row("bamba", ("BambaForCausalLM",), _TENSORS, read=_read, gguf=(), extra_sizes=mamba_sizes,
                biases=BIASES, partial_rope=True,
                defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
)
