"""Cohere 2 (Command R7B, Command A): attention and MLP side by side from one layer norm without a bias, a sliding
window with RoPE in three of four layers, full attention without RoPE in the others, and a factor on logits."""

from __future__ import annotations

from ..fields import Fields
from ..spec import Value
from .llama import ATTENTION_BIAS, decoder, decoder_row, finish, read_common
from .reading import require_values, unsupported
from .rows import Architecture, Config

#: Keys of published files that transformers does not read -> values of its network.
_FIXED: dict[str, tuple[object, ...]] = {
    "position_embedding_type": (None, "absolute", "rope_gptj"), "use_parallel_block": (None, True),
    "use_gated_activation": (None, True), "rotary_pct": (None, 1.0),
    "order_of_interleaved_layers": (None, "local_attn_first"), "use_sliding_window": (None, True)}


def _compose(kv: dict[str, Value]) -> None:
    """Set the keys that no file states: layer norms, and one norm per layer."""
    kv["mpool.root_norms"], kv["mpool.one_norm"] = False, True


def _read(config: Fields, row: Architecture) -> Config:
    if "sliding_window" in config and config.get("sliding_window") is None:
        unsupported(config, "sliding_window", "models with a sliding window")
    kv, used = read_common(config, row, epsilon="layer_norm_eps")
    kv["mpool.output_scale"] = config.number("logit_scale", 0.0625, above=0.0)
    _compose(kv)
    require_values(config, _FIXED)
    return finish(config, row, kv, used | {"logit_scale", *_FIXED}, tied=True)


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    table.int(f"{name}.attention.sliding_window", low=1)
    kv["mpool.output_scale"] = table.number(f"{name}.logit_scale", above=0.0)
    _compose(kv)


ROWS = (
    decoder_row("cohere2", ("Cohere2ForCausalLM",), decoder(without=("ffn_norm",)), read=_read, complete=_complete,
                epsilon="attention.layer_norm_epsilon", handled=frozenset({"logit_scale"}), biases=ATTENTION_BIAS,
                defaults={"layer_norm_eps": 1e-5}, period=4, window_rope="only", rope_neox=False),
)
