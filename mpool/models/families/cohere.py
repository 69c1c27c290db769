"""Cohere 2 (Command R7B, Command A): attention and MLP side by side from one layer norm without a bias, a sliding
window with RoPE in three of four layers, full attention without RoPE in the others, and a factor on logits."""

from __future__ import annotations

from typing import cast

from ..fields import Fields
from ..spec import Value
from .llama import ATTENTION_BIAS, decoder, decoder_row, finish, read_common, set_window, window_pattern
from .reading import require_values, unsupported
from .rows import Architecture, Config

#: Period of the layers with full attention.
_PERIOD = 4
_TENSORS = tuple(tensor for tensor in decoder() if tensor.gguf != "blk.{}.ffn_norm.weight")
#: Keys of published files that transformers does not read -> values of its network.
_FIXED: dict[str, tuple[object, ...]] = {
    "position_embedding_type": (None, "absolute", "rope_gptj"), "use_parallel_block": (None, True),
    "use_gated_activation": (None, True), "rotary_pct": (None, 1.0),
    "order_of_interleaved_layers": (None, "local_attn_first"), "use_sliding_window": (None, True)}


def _compose(kv: dict[str, Value], a: str) -> None:
    """Set the keys that no file states: layer norms, one norm per layer, and RoPE in the layers with a window only."""
    kv["mpool.root_norms"], kv["mpool.one_norm"] = False, True
    windowed = cast(list[int], kv.get("mpool.window_layers", [0] * cast(int, kv[f"{a}.block_count"])))
    kv["mpool.rope_layers"] = [layer - 1 for layer in windowed]


def _read(config: Fields, row: Architecture) -> Config:
    if "sliding_window" in config and config.get("sliding_window") is None:
        unsupported(config, "sliding_window", "models with a sliding window")
    kv, used = read_common(config, row, period=config.int("sliding_window_pattern", _PERIOD, low=1),
                           epsilon="layer_norm_eps")
    kv["mpool.rope_neox"] = False  # rotary pairs are neighbours in folders, too
    kv["mpool.output_scale"] = config.number("logit_scale", 0.0625, above=0.0)
    _compose(kv, row.name)
    require_values(config, _FIXED)
    return finish(config, row, kv, used | {"logit_scale", "sliding_window_pattern", *_FIXED}, tied=True)


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    set_window(kv, name, table.int(f"{name}.attention.sliding_window", low=1), window_pattern(table, name, _PERIOD))
    kv["mpool.output_scale"] = table.number(f"{name}.logit_scale", above=0.0)
    _compose(kv, name)


ROWS = (
    decoder_row("cohere2", ("Cohere2ForCausalLM",), _TENSORS, read=_read, complete=_complete,
                epsilon="attention.layer_norm_epsilon", handled=frozenset({"logit_scale"}), biases=ATTENTION_BIAS,
                defaults={"layer_norm_eps": 1e-5}),
)
