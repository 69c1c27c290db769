"""The MoE models of Qwen3 (arXiv:2505.09388), including Qwen3-Coder."""

from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..spec import Value
from .llama import ATTENTION_BIAS, decoder, decoder_row, finish, read_common
from .reading import MAX_LAYERS, MAX_WIDTH, require_values, unsupported
from .rows import Architecture, Config


def _read(config: Fields, row: Architecture) -> Config:
    kv, used = read_common(config, row)
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    experts = config.int(key, 128, low=1, high=4096)
    kv["qwen3moe.expert_count"] = experts
    kv["qwen3moe.expert_used_count"] = config.int("num_experts_per_tok", 8, low=1, high=experts)
    kv["qwen3moe.expert_feed_forward_length"] = config.int("moe_intermediate_size", 768, low=1, high=MAX_WIDTH)
    kv["mpool.expert_normalise"] = config.bool("norm_topk_prob", False)
    if config.bool("use_sliding_window", False):  # transformers applies it to all layers and ignores max_window_layers
        unsupported(config, "use_sliding_window", "false")
    layers, step = config.int("num_hidden_layers", low=1), config.int("decoder_sparse_step", 1, low=1)
    dense = set(config.list("mlp_only_layers", [], of=int, limit=MAX_LAYERS))
    kv["mpool.dense_layers"] = [int(i in dense or (i + 1) % step != 0) for i in range(layers)]
    require_values(config, {"use_qk_norm": (None, True), "shared_expert_intermediate_size": (None, 0)})
    return finish(config, row, kv, used | {
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers", "use_qk_norm", "output_router_logits", "router_aux_loss_coef"})


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    kv["mpool.expert_normalise"] = table.bool(f"{name}.expert_weights_norm", True)


def _extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    """Return the size ``sparse``: bit i is set if layer i has experts. In GGUF files, all layers have experts."""
    dense = kv.get("mpool.dense_layers", [0] * size["layers"])
    return {"sparse": sum(1 << i for i, flag in enumerate(dense) if not flag)}


ROWS = (
    decoder_row("qwen3moe", ("Qwen3MoeForCausalLM",), decoder(head_norms=True, experts=True), read=_read,
                complete=_complete, full_layers=28, extra_sizes=_extra_sizes, model_types=("qwen3_moe",),
                biases=ATTENTION_BIAS, defaults={"num_key_value_heads": 4},
                handled=frozenset({"expert_count", "expert_used_count"})),
)
