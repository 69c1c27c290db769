"""Names of hyper-parameters in a model's own files, for errors.

A spec names its hyper-parameters as GGUF does, and some as mpool does (``mpool.*``), whatever the format of the files.
An error names the file that states the value, and its key there. Only errors use these tables: a key that they lack
keeps mpool's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .fields import Fields

#: Hyper-parameter -> file that states it, and its key there. A hyper-parameter that ends in a dot stands for all that
#: begin with it; an empty key: they keep their names.
Origins = Mapping[str, tuple[str, str]]

_ROPE = "rope_parameters.rope_theta|rope_parameters.full_attention.rope_theta|rope_scaling.rope_theta|"
#: Hyper-parameter without the architecture -> keys of config.json, of which a file has one.
_IN_CONFIG = {
    "block_count": "num_hidden_layers|n_layer|n_layers|num_layers",
    "context_length": "max_position_embeddings|n_positions|max_trained_positions",
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size|n_embd|dim|d_model",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "feed_forward_length": "intermediate_size|n_inner|block_ff_dim|hidden_dim",
    "attention.head_count": "num_attention_heads|n_head|n_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim|num_attention_heads|n_head",
    "attention.value_length": "v_head_dim|head_dim|num_attention_heads|n_head",
    "attention.key_length_swa": "head_dim",
    "attention.key_length_mla": "qk_nope_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.layer_norm_epsilon": "layer_norm_eps|layer_norm_epsilon|norm_eps|norm_epsilon",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps|norm_eps|layer_norm_epsilon|layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.temperature_scale": "rope_parameters.llama_4_scaling_beta|attn_scale",
    "attention.temperature_length": "rope_parameters.original_max_position_embeddings|floor_scale",
    "rope.dimension_count": "rope_parameters.partial_rotary_factor|partial_rotary_factor|qk_rope_head_dim|"
                            "rotary_emb_fraction|rotary_dim|head_dim|num_attention_heads|n_head",
    "rope.dimension_count_swa": "head_dim",
    "rope.freq_base": f"{_ROPE}rope_theta|global_rope_theta|rotary_emb_base",
    "expert_count": "num_experts|num_local_experts|n_routed_experts",
    "expert_used_count": "num_experts_per_tok|top_k_experts|moe_top_k|moe_topk",
    "expert_feed_forward_length": "moe_intermediate_size|intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size|shared_intermediate_size|"
                                         "moe_shared_expert_intermediate_size|n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace|num_dense_layers",
    "moe_every_n_layers": "moe_every_n_layers",
    "moe_latent_size": "moe_latent_size",
    "altup.num_inputs": "altup_num_inputs",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim|mamba_d_conv|conv_kernel",
    "ssm.state_size": "linear_key_head_dim|mamba_d_state|ssm_state_size",
    "ssm.group_count": "linear_num_key_heads|mamba_n_groups|n_groups",
    "ssm.time_step_rank": "linear_num_value_heads|mamba_n_heads|mamba_num_heads",
    "ssm.inner_size": "linear_value_head_dim|mamba_d_head|mamba_head_dim|mamba_d_ssm",
    "vision.block_count": "num_hidden_layers|depth",
    "vision.embedding_length": "embed_dim|hidden_size",
    "vision.feed_forward_length": "intermediate_size|mlp_ratio",
    "vision.attention.head_count": "num_attention_heads|num_heads",
    "vision.attention.layer_norm_epsilon": "layer_norm_eps|rms_norm_eps",
    "vision.patch_size": "patch_size",
    "vision.image_size": "image_size|num_position_embeddings|num_patches",
    "mpool.activation": "hidden_act|hidden_activation|activation_function",
    "mpool.rope_neox": "rope_interleave",
    "mpool.rope_yarn_truncate": "rope_parameters.truncate|rope_scaling.truncate",
    "mpool.expert_normalise": "norm_topk_prob",
    "mpool.expert_gate": "scoring_func",
    "mpool.attention_scale": "query_pre_attn_scalar|attention_multiplier|scaling|head_dim",
    "mpool.embedding_scale": "embedding_multiplier|hidden_size",
    "mpool.residual_scale": "residual_multiplier",
    "mpool.output_scale": "logit_scale|logits_scaling|lm_head_multiplier",
    "mpool.output_softcap": "final_logit_softcapping",
    "mpool.expert_clamp": "swiglu_limit",
    "mpool.expert_scale": "routed_scaling_factor",
    "mpool.expert_groups": "n_group",
    "mpool.expert_groups_used": "topk_group",
    "mpool.rope_local_base": "rope_parameters.sliding_attention.rope_theta|rope_local_base_freq|local_rope_theta|"
                             "swa_rope_theta|rope_theta",
    "mpool.rope_attention_factor": "rope_parameters.attention_factor|rope_scaling.attention_factor|"
                                   "rope_parameters.mscale|rope_scaling.mscale",
    "mpool.rope_long_from": "rope_parameters.original_max_position_embeddings|"
                            "rope_scaling.original_max_position_embeddings|original_max_position_embeddings",
    "mpool.rope_sections": "rope_parameters.mrope_section|rope_scaling.mrope_section",
    "mpool.window_layers": "layer_types|sliding_window_pattern|sliding_window",
    "mpool.layer_windows": "layer_types|sliding_window_pattern|sliding_window",
    "mpool.rope_layers": "no_rope_layers|no_rope_layer_interval|layer_types",
    "mpool.layer_mixers": "layer_types|layers_block_type|hybrid_override_pattern",
    "mpool.layer_blocks": "layers_block_type|hybrid_override_pattern",
    "mpool.dense_layers": "mlp_only_layers|decoder_sparse_step|first_k_dense_replace",
    "mpool.step_low": "time_step_limit",
    "mpool.step_high": "time_step_limit",
    "mpool.ssm_scales": "ssm_multipliers",
    "mpool.recurrent_scale": "ssm_out_multiplier",
    "mpool.mixed_scale": "attention_out_multiplier",
    "mpool.gate_scale": "mlp_multipliers",
    "mpool.ffn_scale": "mlp_multipliers",
    "mpool.sparse_gates": "activation_sparsity_pattern",
    "mpool.relative_span": "max_relative_positions|position_buckets",
    "mpool.relative_buckets": "position_buckets",
    "mpool.relative_farthest": "max_relative_positions",
    "mpool.relative_keys": "pos_att_type",
    "mpool.image.frames": "temporal_patch_size",
    "mpool.image.window": "window_size",
    "mpool.image.window_layers": "fullatt_block_indexes",
    "mpool.image.registers": "num_register_tokens",
    "mpool.image.rope_base": "rope_parameters.rope_theta|rope_theta",
    "mpool.vision.merge": "spatial_merge_size|scale_factor|mm_tokens_per_image|pooling_kernel_size|downsample_factor"
                          "|downsample_ratio",
    "mpool.vision.norm_epsilon": "rms_norm_eps|layer_norm_eps",
    "mpool.vision.tap_layers": "deepstack_visual_indexes",
}
#: Hyper-parameters that are computed from a value of the file, or keys of such values -> their words.
_COMPUTED = {
    "block_ff_dim": "width of the feed-forward layers",  # LFM2 rounds it
    "rope.dimension_count": "rotated components", "vision.feed_forward_length": "width of the feed-forward layers",
    "vision.image_size": "side of images", "ssm.inner_size": "components of all heads",
    "expert_shared_feed_forward_length": "width of the shared experts", "mpool.attention_scale": "scale of attention",
    "mpool.embedding_scale": "scale of embeddings", "mpool.output_scale": "scale of logits",
    "mpool.rope_attention_factor": "scale of YaRN", "mpool.ssm_scales": "scales of the projection",
    "mpool.mixed_scale": "scale of attention", "mpool.rope_neox": "order of rotary pairs",
    "mpool.window_layers": "layers with a window",
    "mpool.layer_windows": "windows of layers", "mpool.rope_layers": "rotary tables of layers",
    "mpool.layer_mixers": "kinds of layers", "mpool.layer_blocks": "kinds of layers",
    "mpool.dense_layers": "layers without experts", "mpool.sparse_gates": "sparse layers",
    "mpool.image.window": "side of a window", "mpool.image.window_layers": "layers with windows",
    "mpool.vision.merge": "side of merged squares", "mpool.vision.tap_layers": "layers with taps"}
#: Beginnings of the hyper-parameters of image encoders.
_ENCODER = ("vision.", "mpool.image.", "mpool.vision.")
#: Hyper-parameter of mpool -> suffix of the key in a GGUF file.
_IN_GGUF = {
    "mpool.attention_scale": "attention.scale", "mpool.embedding_scale": "embedding_scale",
    "mpool.residual_scale": "residual_scale", "mpool.output_scale": "logit_scale",
    "mpool.output_softcap": "final_logit_softcapping", "mpool.expert_scale": "expert_weights_scale",
    "mpool.expert_groups": "expert_group_count", "mpool.expert_groups_used": "expert_group_used_count",
    "mpool.rope_local_base": "rope.freq_base_swa", "mpool.rope_attention_factor": "rope.scaling.attn_factor",
    "mpool.rope_long_from": "rope.scaling.original_context_length", "mpool.rope_sections": "rope.dimension_sections",
    "mpool.window_layers": "attention.sliding_window_pattern",
    "mpool.layer_windows": "attention.sliding_window_pattern", "mpool.sparse_gates": "activation_sparsity_scale",
    "attention.temperature_scale": "attention.temperature_scale",
    "attention.temperature_length": "rope.scaling.original_context_length"}
#: Hyper-parameter of an image encoder -> key of a projector file.
_IN_PROJECTOR = {"mpool.image.mean": "clip.vision.image_mean", "mpool.image.std": "clip.vision.image_std",
                 "mpool.image.window": "clip.vision.window_size",
                 "mpool.image.window_layers": "clip.vision.n_wa_pattern",
                 "mpool.image.activation": "clip.use_gelu", "mpool.image.rope_base": "clip.rope.freq_base",
                 "mpool.vision.merge": "clip.vision.projector.scale_factor",
                 "mpool.vision.norm_epsilon": "clip.vision.attention.layer_norm_epsilon",
                 "mpool.vision.tap_layers": "clip.vision.is_deepstack_layers"}


def _has(values: object, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(values, dict) or values.get(key) is None:
            return False
        values = values[key]
    return True


def _said(key: str, words: str | None) -> str:
    """Return a key with the words of what is computed from it."""
    return f"{words}, from {key}," if words else key


def key_in_config(config: Fields, key: str, architecture: str) -> str:
    """Return the key of config.json that states a hyper-parameter, with its sections."""
    tail = key.removeprefix(f"{architecture}.")
    names = _IN_CONFIG.get(tail)
    if names is None:
        return config.name(tail)
    values = config.values if isinstance(config.values, dict) else dict(config.values)
    section = "vision_config" if tail.startswith(_ENCODER) else "text_config"
    places = [f"{section}.", ""] if isinstance(values.get(section), dict) else [""]
    found = [place + name for place in places for name in names.split("|") if _has(values, place + name)]
    name = config.name(found[0] if found else places[0] + names.partition("|")[0])
    return _said(name, _COMPUTED.get(tail) or _COMPUTED.get(name.rpartition(".")[2]))


def in_config(config: Fields, kv: Iterable[str], architecture: str, processor: Fields | None = None) -> Origins:
    """Return the origins of the hyper-parameters of a transformers folder.

    Args:
        config: its ``config.json``.
        kv: hyper-parameters of the spec.
        architecture: architecture of the spec.
        processor: configuration of the image processor; None: the model has none.
    """
    found = {key: (config.file, key_in_config(config, key, architecture)) for key in kv}
    if processor is not None:
        found |= {f"mpool.image.{key}": (processor.file, processor.name(name)) for key, name in (
            ("mean", "image_mean"), ("std", "image_std"), ("rescale_factor", "rescale_factor"))}
    return found


def key_in_gguf(key: str, architecture: str, name: str) -> str:
    """Return the key of a GGUF file that states a hyper-parameter; ``name``: the architecture in the file."""
    tail = key.removeprefix(f"{architecture}.")
    if tail in _IN_GGUF:
        return _said(f"{name}.{_IN_GGUF[tail]}", _COMPUTED.get(tail))
    return f"{name}.{tail}" if tail != key else key


def in_gguf(file: str, kv: Iterable[str], architecture: str, name: str,
            own: Callable[[str], str] = str) -> Origins:
    """Return the origins of the hyper-parameters of a GGUF file.

    Args:
        file: its path.
        kv: hyper-parameters of the spec.
        architecture: architecture of the spec.
        name: architecture in the file.
        own: function that returns the key of the file for llama.cpp's.
    """
    return {key: (file, own(key_in_gguf(key, architecture, name))) for key in kv}


def in_projector(file: str, kv: Iterable[str], architecture: str, own: Callable[[str], str] = str) -> Origins:
    """Return the origins of the hyper-parameters and tensors of an image encoder; arguments as for :func:`in_gguf`,
    ``file`` is the projector file."""
    start = f"{architecture}.vision."
    found = {key: (file, own(_IN_PROJECTOR.get(key) or key.replace(start, "clip.vision.", 1))) for key in kv
             if key.startswith((start, *_ENCODER))}
    return found | {"v.": (file, ""), "mm.": (file, "")}


def strings(origins: Origins) -> list[list[str]]:
    """Return the origins as the core reads them (``mp_spec_place_error``): a list for each file, prefixes last."""
    lists: dict[tuple[bool, str], list[str]] = {}
    for key, (file, name) in origins.items():
        path = file.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        lists.setdefault((key.endswith("."), path), [path]).extend((key, name))
    return [lists[place] for place in sorted(lists)]
