"""GGUF files of small transformers models in the layout of llama.cpp's converter, all tensors in float32.

Tensor names come from the ``gguf`` package. The converter's changes of a family are repeated here: in Llama's query and
key projections, transformers stores the first elements of all rotary pairs of a head and then the second ones; GGUF
stores pairs adjacently. Qwen2 and BERT are unchanged. Run as a script, it writes the files that the tests use:

    python tests/python/helpers/tinygguf.py FOLDER
"""

import functools
import sys
import zlib
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

NORMAL, UNKNOWN, CONTROL = 1, 2, 3


def _adjacent_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection: rows (i, i + d/2) of a head become rows (2i, 2i + 1)."""
    half = weight.shape[0] // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return weight[order]


def _write_vocabulary(writer: Any, arch: str, size: int, eos: int, image: int | None = None) -> None:
    """Write a valid vocabulary. Its content is irrelevant, because parity tests submit ids.

    Args:
        image: placeholder token of images.
    """
    name = "<|image_pad|>" if arch.startswith("qwen") else "<image>"
    if arch == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokens = special + [f"\u2581w{i}" for i in range(len(special), size)]
        writer.add_tokenizer_model("bert")
        writer.add_token_types([CONTROL] * len(special) + [NORMAL] * (size - len(special)))
        for token, name in enumerate(("padding", "unknown", "cls", "seperator", "mask")):  # GGUF's spelling
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    else:
        tokens = [f"\u2581w{i}" for i in range(size)]
        tokens[0], tokens[eos] = "<unk>", "</s>"
        if image is not None:
            tokens[image] = name
        writer.add_tokenizer_model("llama")
        writer.add_token_types([UNKNOWN if i == 0 else CONTROL if i in (eos, image) else NORMAL for i in range(size)])
        writer.add_token_scores([-float(i) for i in range(size)])
        writer.add_unk_token_id(0)
        writer.add_eos_token_id(eos)
        writer.add_add_bos_token(False)
    writer.add_token_list(tokens)


def _write_gemma4(writer: Any, config: Any) -> None:
    """Write the keys of Gemma 4 that other families do not have, or have otherwise."""
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    wide, narrow = (layers[windows.index(window)].head_dim for window in (False, True))
    shared = config.num_kv_shared_layers
    widths = [config.intermediate_size * (1 + (config.use_double_wide_mlp and i >= len(layers) - shared))
              for i in range(len(layers))]
    counts = [layer.num_key_value_heads for layer in layers]
    writer.add_feed_forward_length(widths if len(set(widths)) > 1 else widths[0])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(counts if len(set(counts)) > 1 else counts[0])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(getattr(config, "hidden_size_per_layer_input", 0))
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windows)
    for add, size in ((writer.add_key_length, wide), (writer.add_value_length, wide),
                      (writer.add_key_length_swa, narrow), (writer.add_value_length_swa, narrow),
                      (writer.add_rope_dimension_count, wide), (writer.add_rope_dimension_count_swa, narrow)):
        add(size)
    full, local = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(local["rope_theta"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "enable_moe_block", False):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    turning = int(full["partial_rotary_factor"] * wide // 2)
    writer.add_tensor("rope_freqs.weight",
                      np.array([1.0] * turning + [1e30] * (wide // 2 - turning), np.float32))


def _write_sizes(writer: Any, arch: str, config: Any, halves: bool, drafts: int) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if arch == "gemma4":
        _write_gemma4(writer, config)
        return
    if arch != "qwen35moe":  # config.json of published models has no intermediate_size
        writer.add_feed_forward_length(config.intermediate_size if arch != "nemotron_h_moe" else [
        config.moe_intermediate_size if kind == "moe" else 0 for kind in config.layer_types])
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if arch == "bert":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        return
    if arch in ("lfm2", "lfm2moe"):
        writer.add_head_count_kv([0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif arch in MAMBA:
        _write_mamba(writer, config)
    else:
        writer.add_head_count_kv(1 if arch == "deepseek2" and halves else config.num_key_value_heads)
    if arch == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    elif arch == "nemotron_h_moe":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    head = getattr(config, "head_dim", None)
    if arch == "deepseek2":
        _write_latents(writer, config, halves)
    elif head:
        writer.add_key_length(head)
        writer.add_value_length(head)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    part = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(part * (head or config.hidden_size // config.num_attention_heads)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(stretch) / np.log(original)))
    if arch in ("phi3", "gemma2", "gemma3", "gemma3n", "gpt-oss", "cohere2", "olmo2", "exaone4") \
            and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    usual = [bool((i + 1) % 6) for i in range(config.num_hidden_layers)]  # the period of Gemma 3
    if arch in ("olmo2", "exaone4", "gemma3n") and getattr(config, "sliding_window", None) or arch == "gemma3" and \
            [kind == "sliding_attention" for kind in config.layer_types] != usual:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    experts = next(filter(None, (getattr(config, key, None) for key in ("n_routed_experts", "num_local_experts",
                                                                        "num_experts"))), None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if hasattr(config, "linear_num_key_heads"):
        _write_delta_sizes(writer, arch, config, drafts)
    shared = getattr(config, "shared_expert_intermediate_size", 0) or getattr(config, "shared_intermediate_size", 0)
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if arch in ("granite", "granitehybrid", "granitemoe"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "gemma3n":
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_altup_active_idx(0)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        writer.add_activation_sparsity_scale([NormalDist().inv_cdf(one) if one else -np.inf
                                              for one in config.activation_sparsity_pattern])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


#: Architectures with Mamba-2 layers.
MAMBA = ("granitehybrid", "nemotron_h_moe", "falcon-h1")


def _write_mamba(writer: Any, config: Any) -> None:
    """Write the keys of models with Mamba-2 layers."""
    writer.add_head_count_kv([config.num_key_value_heads if kind in ("full_attention", "hybrid") else 0
                              for kind in config.layer_types])
    is_granite = config.model_type != "nemotron_h"
    heads, head, state, groups, taps = (getattr(config, key) for key in (
        ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv") if is_granite else
        ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")))
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head)
    writer.add_ssm_time_step_rank(heads)
    if config.model_type == "falcon_h1":
        return
    if is_granite:
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    else:
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)


def _multiplied(name: str, data: np.ndarray, config: Any) -> np.ndarray:
    """Return a tensor of Falcon-H1 with the factors of its network."""
    inner, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    parts = np.repeat(config.ssm_multipliers, [inner, inner, keys, keys, config.mamba_n_heads])
    gate, down = config.mlp_multipliers
    into = config.attention_in_multiplier
    factors = {"embed_tokens": config.embedding_multiplier, "lm_head": config.lm_head_multiplier, "q_proj": into,
               "k_proj": into * config.key_multiplier, "v_proj": into, "o_proj": config.attention_out_multiplier,
               "mamba.out_proj": config.ssm_out_multiplier, "gate_proj": gate, "down_proj": down,
               "mamba.in_proj": (parts * config.ssm_in_multiplier)[:, None]}
    found = [factor for key, factor in factors.items() if f".{key}.weight" in f".{name}"]
    return (data * found[0]).astype(np.float32) if found else data


def _mamba_tensor(name: str, data: np.ndarray, groups: int) -> np.ndarray:
    """Return a tensor of a Mamba-2 layer as files store it."""
    if name.endswith("conv1d.weight"):
        return data[:, 0]
    if name.endswith(".A_log"):
        return -np.exp(data)[:, None]
    if name.endswith(".D"):
        return data[:, None]
    return data.reshape(groups, -1) if name.endswith(("mamba.norm.weight", "mixer.norm.weight")) else data


def _write_latents(writer: Any, config: Any, halves: bool) -> None:
    """Write the keys that only DeepSeek's files have.

    If kv_b is split in halves, the head sizes are those of the single latent KV head, and the sizes of the model's
    heads are in the ``_mla`` keys.
    """
    third, rope = config.model_type == "deepseek_v3", config.rope_parameters
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if halves else key)
    writer.add_value_length(config.kv_lora_rank if halves else config.v_head_dim)
    if halves:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(third)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if third else gguf.ExpertGatingFuncType.SOFTMAX)
    if config.n_group and config.n_group > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _latent_halves(data: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Split kv_b as newer files do: the transposed key half and the value half of each head."""
    parts = data.reshape(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
    keys, values = parts[:, :config.qk_nope_head_dim], parts[:, config.qk_nope_head_dim:]
    return {"attn_k_b": keys.transpose(0, 2, 1), "attn_v_b": values}


def _rope_divisors(config: Any) -> np.ndarray:
    """Return Llama 3's scaling of rotary frequencies as divisors, as stored in GGUF files, float32 (d/2,).

    The divisor is 1 for short wavelengths, ``factor`` for long ones, and interpolated between them (arXiv:2407.21783
    and its reference implementation).
    """
    rope, head = config.rope_parameters, config.hidden_size // config.num_attention_heads
    wave = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head, 2) / head)
    turns = rope["original_max_position_embeddings"] / wave
    blend = np.clip((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0, 1)
    return (1 / ((1 - blend) / rope["factor"] + blend)).astype(np.float32)


def _expert_parts(name: str, data: np.ndarray, interleaved: bool) -> dict[str, np.ndarray]:
    """Return the matrices of all experts, (experts, out, in), or biases, (experts, out), float32, by name suffix.

    transformers stores gate and up projections one after the other, or interleaved (``interleaved``).
    """
    kind = "exps.bias" if name.endswith("_bias") else "exps.weight"
    if name.removesuffix("_bias").endswith("down_proj"):
        return {f"down_{kind}": data}
    if name.endswith("experts.up_proj"):
        return {f"up_{kind}": data}
    gate, up = (data[:, ::2], data[:, 1::2]) if interleaved else np.split(data, 2, axis=1)
    return {f"gate_{kind}": gate, f"up_{kind}": up}


def _write_delta_sizes(writer: Any, arch: str, config: Any, drafts: int) -> None:
    """Write the keys of gated delta nets."""
    types = [kind == "linear_attention" for kind in config.layer_types[:len(config.layer_types) - drafts]]
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    every = 1 + types.index(False)
    if types == [(i + 1) % every != 0 for i in range(len(types))] and every > 1:
        writer.add_full_attention_interval(every)
    else:
        writer.add_array(f"{arch}.attention.recurrent_layers", types)
    if arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _delta_parts(name: str, data: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Return the tensors that the converter makes from one of a gated delta net, by their names in transformers.

    Qwen3-Next's first projection, which has the rows of each key head together, is sorted. In the other models, the
    value heads of a key head are no neighbours: head h belongs to key head h mod ``linear_num_key_heads``.
    """
    stem, part = name.split(".linear_attn.")
    keys, group = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    width, values = config.linear_key_head_dim, config.linear_value_head_dim
    if part == "in_proj_qkvz.weight":
        heads = data.reshape(keys, -1, data.shape[-1])
        q, k, v, z = (rows.reshape(-1, data.shape[-1]) for rows in np.split(
            heads, np.cumsum([width, width, group * values]), axis=1))
        found = {"in_proj_qkv.weight": np.concatenate([q, k, v]), "in_proj_z.weight": z}
    else:
        data = -np.exp(data) if part == "A_log" else data[:, 0] if part == "conv1d.weight" else data
        found = {part.replace("dt_bias", "dt_proj.bias"): data}

    def tile(rows: np.ndarray, first: int = 0) -> np.ndarray:
        heads = rows[first:].reshape(keys, group, -1, *rows.shape[1:])
        return np.concatenate([rows[:first], heads.swapaxes(0, 1).reshape(-1, *rows.shape[1:])])

    if config.model_type != "qwen3_next" and part != "norm.weight":
        first = 2 * keys * width if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
        found = {key: tile(rows.T).T if part == "out_proj.weight" else tile(rows, first)
                 for key, rows in found.items()}
    return {f"{stem}.linear_attn.{key}": rows for key, rows in found.items()}


def _add(writer: Any, name: str, values: np.ndarray, kind: Any) -> None:
    """Add a tensor, quantised to ``kind`` unless that is None."""
    if kind is None:
        writer.add_tensor(name, np.ascontiguousarray(values))
    else:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def write(path: Path, model: Any, *, adjacent: bool | None = None, pooling: int | None = None,
          experts: Any = None, halves: bool = True, image: int | None = None, vision: str | None = None,
          sections: list[int] | None = None, drafts: int = 0) -> Path:
    """Write a causal language model or BertModel of transformers as a GGUF file.

    Args:
        adjacent: store rotary pairs adjacently; None: as the family's files do.
        pooling: GGUF's number of a pooling; makes the decoder an embedding model.
        experts: type of the experts' matrices; None: F32.
        halves: store the two halves of DeepSeek's kv_b as separate tensors, as files do since 2025.
        image: placeholder token of images.
        vision: architecture of the file, if the model is the decoder of a vision model.
        sections: number of rotary pairs of a head for each of three positions.
        drafts: number of layers at the end that become layers for drafts (multi-token prediction), with all experts'
            gate and up projections in one tensor per layer.

    Returns:
        The path.
    """
    config = model.config
    arch = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gpt_oss": "gpt-oss",
            "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "olmo3": "olmo2", "mixtral": "llama",
            "ministral3": "mistral3", "granitemoeshared": "granitemoe", "granitemoehybrid": "granitehybrid",
            "lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
            "qwen3_5_moe_text": "qwen35moe", "nemotron_h": "nemotron_h_moe",
            "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4",
            "falcon_h1": "falcon-h1"}.get(config.model_type, config.model_type)
    arch = vision or arch
    pairs = adjacent if adjacent is not None else arch in ("llama", "smollm3", "granite", "granitehybrid", "granitemoe",
                                                           "mistral3", "nemotron_h_moe")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    # an architecture that the package does not have gets Llama's names of tensors
    names = gguf.get_tensor_name_map(kinds.get(arch, gguf.MODEL_ARCH.LLAMA), config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(path), arch)
    _write_sizes(writer, arch, config, halves, drafts)
    if sections is not None:
        writer.add_rope_dimension_sections([*sections, 0])
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    if drafts:
        writer.add_nextn_predict_layers(drafts)
        writer.add_tensor(f"blk.{config.num_hidden_layers - 1}.nextn.enorm.weight", np.ones(7, np.float32))
    _write_vocabulary(writer, arch, config.vocab_size, getattr(config, "eos_token_id", None) or 0, image)
    for kind in ("altup_projections", "altup_unembed_projections") if arch == "gemma3n" else ():
        data = np.stack([one.weight.detach().numpy() for one in getattr(model.model, kind)])
        writer.add_tensor(names.get_name(f"model.{kind}") + ".weight", data)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings or name.startswith("model.altup_"):
            continue
        data = parameter.detach().numpy().astype(np.float32)
        if ".experts." in name:
            if arch == "gpt-oss" and data.ndim == 3:
                data = data.transpose(0, 2, 1)
            if (drafts or arch == "gemma4") and name.endswith("gate_up_proj"):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", data)
                continue
            for part, values in _expert_parts(name, data, arch == "gpt-oss").items():
                _add(writer, f"blk.{name.split('.')[2]}.ffn_{part}", values, experts if values.ndim == 3 else None)
            continue
        if name.endswith(("router.scale", "router.per_expert_scale")):
            part = "ffn_down_exps" if "expert" in name else "ffn_gate_inp"
            writer.add_tensor(f"blk.{name.split('.')[2]}.{part}.scale", data)
            continue
        if "shared_mlp." in name:
            for part, values in zip(("gate", "up") if "input" in name else ("down",),
                                    np.split(data, 2) if "input" in name else [data]):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}_shexp.weight", np.ascontiguousarray(values))
            continue
        if name.endswith("self_attn.sinks"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.attn_sinks.weight", data)
            continue
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", data)
            continue
        if halves and ".kv_b_proj." in name:
            for part, values in _latent_halves(data, config).items():
                writer.add_tensor(f"blk.{name.split('.')[2]}.{part}.weight", np.ascontiguousarray(values))
            continue
        if ".linear_attn." in name:
            for part, values in _delta_parts(name, data, config).items():
                called = names.get_name(part, try_suffixes=(".weight", ".bias"))
                assert called is not None, part
                writer.add_tensor(called, np.ascontiguousarray(values))
            continue
        if name.endswith("shared_expert_gate.weight"):
            data = data[0]
        if name.endswith("conv.conv.weight"):
            data = data[:, 0]
        if arch in MAMBA:
            data = _mamba_tensor(name, data, getattr(config, "mamba_n_groups", None) or config.n_groups)
        if arch == "falcon-h1":
            data = _multiplied(name, data, config)
        name += ".weight" if name.endswith(("layer_scalar", "correct_output_scale")) else ""
        known = name.replace(".dt_bias", ".dt_proj.bias").replace("moe.router.weight", "moe.router.layer.weight")
        if arch == "nemotron_h_moe":
            known = known.replace("model.", "backbone.")
        found = names.get_name(known, try_suffixes=(".weight", ".bias"))
        if "shared_mlp.input_linear" in name:
            for part, values in zip(("gate", "up"), np.split(data, 2)):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}_shexp.weight", np.ascontiguousarray(values))
            continue
        assert found is not None, name
        if pairs and (".q_proj." in name or ".k_proj." in name):
            data = _adjacent_pairs(data, config.num_attention_heads if ".q_proj." in name
                                   else config.num_key_value_heads)
        if arch in ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe") and name.endswith("norm.weight"):
            data = data + 1
        writer.add_tensor(found, np.ascontiguousarray(data))
    if arch != "bert" and config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_divisors(config))
    if arch != "bert" and config.rope_parameters.get("rope_type") == "longrope":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight",
                              np.array(config.rope_parameters[f"{length}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: Encoder of ``encodermodels`` -> architecture in the ``gguf`` package, and tokenizer type in its files.
ENCODERS = {"bert_xlm_roberta": ("BERT", "t5"), "bert_distilbert": ("BERT", "bert"),
            "llama_embedding_eurobert": ("EUROBERT", "gpt2"), "nomic_bert_published": ("NOMIC_BERT", "bert"),
            "modern_bert": ("MODERN_BERT", "gpt2"), "jina_bert_v2": ("JINA_BERT_V2", "bert"),
            "jina_bert_v2_code": ("JINA_BERT_V2", "gpt2"), "nomic_bert_moe": ("NOMIC_BERT_MOE", "t5")}


def _write_encoder_sizes(writer: Any, name: str, encoder: Any, model: Any, pooling: int,
                         each: bool) -> None:
    config = getattr(model, "config", None)
    writer.add_block_count(config.num_hidden_layers if config else model.layers)
    writer.add_context_length(encoder.longest)
    writer.add_embedding_length(config.hidden_size if config else 48)
    writer.add_feed_forward_length(getattr(config, "hidden_dim", None) or config.intermediate_size if config else 100)
    writer.add_head_count(config.num_attention_heads if config else model.heads)
    if name.endswith("eurobert"):
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None)
                                  or getattr(config, "norm_eps", getattr(model, "epsilon", 1e-12)))
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    if name.startswith("nomic"):
        writer.add_rope_freq_base(model.base if name.endswith("moe") else config.rope_parameters["rope_theta"])
    if name.endswith("moe"):
        writer.add_moe_every_n_layers(2)
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(2)
    if name.startswith("modern"):
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_float32("modern-bert.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.local_attention)
        if each:
            writer.add_sliding_window_pattern([bool(i % 2) for i in range(config.num_hidden_layers)])
        else:
            writer.add_sliding_window_pattern(2)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def write_encoder(path: Path, name: str, model: Any, kind: Any = None, pooling: int = 1,
                  each: bool = False, fused: bool = True) -> Path:
    """Write a model of ``encodermodels`` as a GGUF file.

    As in the converter, the first rows of RoBERTa's position table are dropped.

    Args:
        kind: type of the layers' matrices; None: F32. All other tensors are float32.
        pooling: GGUF's number of the pooling.
        each: write the pattern of windows layer by layer.
        fused: False: write the halves of jina_bert_v2_code's gated layer as two tensors, as older converters do.

    Returns:
        The path.
    """
    from encodermodels import ENCODERS as made

    arch, tokenizer = ENCODERS[name]
    arch = getattr(gguf.MODEL_ARCH, arch)
    encoder, state = made[name], made[name].published(model)
    if not fused:
        for key in [key for key in state if "up_gated_layer" in key]:
            for part, half in zip("vw", state.pop(key).chunk(2)):
                state[key.replace("up_gated_layer", f"gated_layers_{part}")] = half
    layers = 1 + max(int(key.split("layer")[1].split(".")[1]) for key in state if "layer" in key and "." in
                     key.split("layer")[1] and key.split("layer")[1].split(".")[1].isdigit())
    names = gguf.get_tensor_name_map(arch, layers)
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    _write_encoder_sizes(writer, name, encoder, model, pooling, each)
    vocab = next(tensor.shape[0] for key, tensor in state.items()
                 if key.endswith(("_embeddings.weight", "embed_tokens.weight")))
    types = [tensor.shape[0] for key, tensor in state.items() if "token_type" in key]
    if types:
        writer.add_token_type_count(types[0])
    if tokenizer == "gpt2":
        writer.add_token_merges(["w 5"])
    if tokenizer == "bert":
        _write_vocabulary(writer, "bert", vocab, 0)
    else:
        writer.add_tokenizer_model(tokenizer)
        writer.add_token_list([f"w{i}" for i in range(vocab)])
        writer.add_token_types([CONTROL if i < 3 else UNKNOWN if i == 3 else NORMAL for i in range(vocab)])
        writer.add_token_scores([-float(i) for i in range(vocab)])
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(3)
    for key, tensor in state.items():
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if key.endswith("mlp.experts.bias"):
            assert not tensor.any()
            continue  # the converter drops it
        assert found is not None, key
        data = tensor.detach().numpy().astype(np.float32)
        if ".experts." in key:
            data = data.reshape(model.experts, -1, data.shape[1])
            data = data.transpose(0, 2, 1) if key.endswith("w2") else data
            found += ".weight"
        if key == "embeddings.position_embeddings.weight" and "roberta" in name:
            data = data[model.config.pad_token_id + 1:]
        if kind is not None and data.ndim == 2 and found.startswith("blk."):
            writer.add_tensor(found, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(found, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def without_dropped(model: Any) -> Any:
    """Set the tensors of a model that the converter drops to zero: the shared bias of experts. Returns the model."""
    for key, tensor in model.state_dict().items():
        if key.endswith("experts.bias"):
            tensor.zero_()
    return model


def write_gemma(path: Path, model: Any, dense: dict[str, Any]) -> Path:
    """Write a bidirectional Gemma3TextModel with the dense layers that follow its pooling."""
    config, arch = model.config, gguf.MODEL_ARCH.GEMMA_EMBEDDING
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    for add, value in ((writer.add_block_count, config.num_hidden_layers),
                       (writer.add_head_count, config.num_attention_heads),
                       (writer.add_context_length, config.max_position_embeddings), (writer.add_head_count_kv, 1),
                       (writer.add_embedding_length, config.hidden_size), (writer.add_key_length, config.head_dim),
                       (writer.add_feed_forward_length, config.intermediate_size),
                       (writer.add_value_length, config.head_dim), (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
                       (writer.add_rope_freq_base, config.rope_parameters["full_attention"]["rope_theta"]),
                       (writer.add_sliding_window, 16), (writer.add_pooling_type, gguf.PoolingType.MEAN)):
        add(value)
    _write_vocabulary(writer, "gemma", config.vocab_size, 2)
    for name, parameter in model.state_dict().items():
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None, name
        data = parameter.detach().numpy().astype(np.float32)
        writer.add_tensor(found, np.ascontiguousarray(data + 1 if name.endswith("norm.weight") else data))
    for number, layer in enumerate(dense.values(), 2):
        writer.add_tensor(f"dense_{number}.weight", layer.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def model(name: str) -> Any:
    """Return the seeded model whose file the tests compare: a family of DECODERS, ``"llama_tied"`` or ``"bert"``. Most
    have two layers."""
    import paritymodels

    family = name.removesuffix("_tied")
    made = paritymodels.bert(2) if name == "bert" else paritymodels.decoder(
        family, paritymodels.LAYERS.get(name, 2), vocab=157, tie=name != family or name in paritymodels.TIED)
    paritymodels.randomise(made, zlib.crc32(name.encode()))  # so a new family does not change the other files
    if getattr(made, "lm_head", None) is not None:
        made.tie_weights()
    return made


if __name__ == "__main__":
    import paritymodels as known

    for called in (*known.DECODERS, "llama_tied", "bert"):
        if called not in known.FOLDERS_ONLY:
            print(write(Path(sys.argv[1]) / f"{called}.gguf", model(called)))
