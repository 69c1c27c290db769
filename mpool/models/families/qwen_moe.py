"""The MoE models of Qwen3 (arXiv:2505.09388), including Qwen3-Coder."""

from __future__ import annotations

from ..fields import Fields
from ..spec import Value
from .llama import decoder, decoder_row, finish, read_common
from .reading import MAX_WIDTH, require_values, unsupported
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
    if config.int("decoder_sparse_step", 1, low=1) != 1:
        unsupported(config, "decoder_sparse_step", "1 (every layer has experts)")
    if config.list("mlp_only_layers", []):
        unsupported(config, "mlp_only_layers", "an empty list (every layer has experts)")
    require_values(config, {"use_qk_norm": (None, True), "shared_expert_intermediate_size": (None, 0)})
    return finish(config, kv, used | {"num_experts", "num_local_experts", "num_experts_per_tok",
                                      "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
                                      "mlp_only_layers", "use_qk_norm", "output_router_logits", "router_aux_loss_coef"})


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    kv["mpool.expert_normalise"] = table.bool(f"{name}.expert_weights_norm", True)


ROWS = (
    decoder_row("qwen3moe", ("Qwen3MoeForCausalLM",), decoder(head_norms=True, experts=True), read=_read,
                complete=_complete, full_layers=28, model_types=("qwen3_moe",),
                handled=frozenset({"expert_count", "expert_used_count"})),
)
