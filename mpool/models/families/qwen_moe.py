"""The MoE models of Qwen2 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388), including Qwen3-Coder and the decoder of
Qwen3-VL.

Those of Qwen2 have a shared expert in each layer with experts. A gate scales its output, by one factor for each row.
"""

from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..spec import Value
from .llama import ATTENTION_BIAS, decoder, decoder_row, finish, read_common
from .reading import MAX_LAYERS, MAX_WIDTH, require_values, unsupported
from .rows import Architecture, Config, Tensor, layer

_SHARED = (*decoder(experts=True, shared="shared_expert", qkv_bias=True),
           *layer("layers.{}.mlp.shared_expert_gate", "ffn_gate_inp_shexp", "D", when="if S in sparse"))
#: ``model_type`` of the decoder of Qwen3-VL. Folders have the matrices of all experts of a layer in one tensor:
#: published ones transposed, those of transformers 5 not.
_VISION, _EXPERTS = "qwen3_vl_moe_text", "layers.{}.mlp.experts"
_JOINED = (
    *(tensor for tensor in decoder(head_norms=True, experts=True)
      if "experts.{x}." not in tensor.hf and "_exps." not in tensor.gguf),
    Tensor(f"{_EXPERTS}.gate_up_proj", "blk.{}.ffn_gate_up_exps.halves", "XDG", "if columns in sparse"),
    Tensor(f"{_EXPERTS}.down_proj", "blk.{}.ffn_down_exps.columns", "XND", "if columns in sparse"),
    Tensor(f"{_EXPERTS}.gate_up_proj", "blk.{}.ffn_gate_up_exps.weight", "XGD", "if rows in sparse"),
    Tensor(f"{_EXPERTS}.down_proj", "blk.{}.ffn_down_exps.weight", "XDN", "if rows in sparse"))


def read_experts(config: Fields, row: Architecture, kv: dict[str, Value], *, normalise: bool) -> set[str]:
    """Read the keys of the router, the layers with experts and the shared expert.

    Args:
        config: contents of config.json.
        row: architecture of the model, with the defaults of the sizes.
        kv: hyper-parameters to add to.
        normalise: default of ``norm_topk_prob``.

    Returns:
        the keys that were read.
    """
    kv["mpool.expert_normalise"] = config.bool("norm_topk_prob", normalise)
    layers, step = config.int("num_hidden_layers", low=1), config.int("decoder_sparse_step", 1, low=1)
    dense = set(config.list("mlp_only_layers", [], of=int, limit=MAX_LAYERS))
    kv["mpool.dense_layers"] = [int(i in dense or (i + 1) % step != 0) for i in range(layers)]
    shared = row.defaults.get("shared_expert_intermediate_size")
    if shared:
        kv[f"{row.name}.expert_shared_feed_forward_length"] = config.int("shared_expert_intermediate_size", shared,
                                                                         low=1, high=MAX_WIDTH)
    else:
        require_values(config, {"shared_expert_intermediate_size": (None, 0)})
    return {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"}


def _read(config: Fields, row: Architecture) -> Config:
    kv, used = read_common(config, row)
    normalised = row.in_config == (_VISION,)  # transformers ignores the key
    used |= read_experts(config, row, kv, normalise=normalised)
    if normalised:
        require_values(config, {"norm_topk_prob": (None, True)})
    if config.bool("use_sliding_window", False):  # transformers applies it to all layers and ignores max_window_layers
        unsupported(config, "use_sliding_window", "false")
    fixed: dict[str, tuple[object, ...]] = {"qkv_bias": (None, True)} if row.name == "qwen2moe" else \
        {"use_qk_norm": (None, True)}
    require_values(config, fixed)
    return finish(config, row, kv, used | set(fixed))


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    kv["mpool.expert_normalise"] = table.bool(f"{name}.expert_weights_norm", name != "qwen2moe")


def _extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    return {"G": 2 * size["N"], "columns": 1, "rows": 0}  # the reader of the folder knows which


_HANDLED = frozenset({"expert_count", "expert_used_count"})
ROWS = (
    decoder_row("qwen3moe", ("Qwen3MoeForCausalLM",), decoder(head_norms=True, experts=True), read=_read,
                complete=_complete, full_layers=28, model_types=("qwen3_moe",), biases=ATTENTION_BIAS,
                defaults={"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                          "moe_intermediate_size": 768}, gguf=("qwen3moe", "qwen3vlmoe"), handled=_HANDLED),
    decoder_row("qwen3moe", ("Qwen3VLMoeForConditionalGeneration",), _JOINED, read=_read, gguf=(),
                model_types=(_VISION,), biases=ATTENTION_BIAS, extra_sizes=_extra_sizes,
                defaults={"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
                          "moe_intermediate_size": 1408}),
    decoder_row("qwen2moe", ("Qwen2MoeForCausalLM",), _SHARED, read=_read, complete=_complete, full_layers=28,
                model_types=("qwen2_moe",), handled=_HANDLED,
                defaults={"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
                          "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}),
)
