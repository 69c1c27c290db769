"""Published model folders that differ from the output of the current transformers: keys of other classes or versions,
repository code, older tensor names. The models are small and seeded."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors
from mpool.models import architectures, load_catalogue
from mpool.models.fields import Fields
from mpool.models.formats import hf_config, vision_folder
from mpool.models.formats.hf_folder import describe_folder
from mpool.models.spec import ModelDescription, ModelSpec, TensorEntry
from mpool.tasks.requests import vision_request

import imagemodels
import paritymodels
import visionmodels
from corelib import logits
from safetensors.torch import load_file, save_file

from paritymodels import randomise, torch, transformers, write_tokenizer


def described(folder: Path) -> ModelDescription:
    """Describe a folder."""
    return describe_folder(str(folder), key="k", ref="r")


def edit(path: Path, changes: dict[str, Any]) -> None:
    """Set keys of a JSON file. ``section/key`` is a nested key, and the value ``...`` removes a key."""
    found = json.loads(path.read_text())
    for name, value in changes.items():
        *sections, name = name.split("/")
        at = found
        for section in sections:
            at = at[section]
        if value is ...:
            at.pop(name)
        else:
            at[name] = value
    path.write_text(json.dumps(found))


#: Published model -> its family in the tests, and the keys of its config.json that transformers does not write.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi-3-mini-4k": ("phi3", {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config",
                                            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
                               "embd_pdrop": 0.0, "rope_scaling": None}),
    "Phi-4-mini": ("phi3_partial", {"auto_map": {"AutoTokenizer": "Xenova/gpt-4o"}, "full_attn_mod": 1,
                                    "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}),
    "Qwen3-Coder-30B-A3B": ("qwen3moe", {"qkv_bias": False, "use_qk_norm": True,
                                         "shared_expert_intermediate_size": 0}),
    "Qwen1.5-MoE-A2.7B": ("qwen2moe", {"sliding_window": 32768, "max_window_layers": 21, "qkv_bias": ...,
                                       "layer_types": ...}),
    "gemma-2": ("gemma2", {"hidden_activation": ..., "hidden_act": "gelu_pytorch_tanh",
                           "cache_implementation": "hybrid"}),
    "Qwen2.5-7B-Instruct-1M": ("qwen2", {  # chunked attention applies only beyond the trained context length
        "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192,
                                        "original_max_position_embeddings": 262144}, "use_mrope": False}),
    "DeepSeek-R1-Distill-Qwen": ("qwen2", {"use_mrope": False, "max_window_layers": 21, "use_sliding_window": False}),
    "c4ai-command-r7b": ("cohere2", {"layer_types": ..., "sliding_window_pattern": 4, "layer_switch": 4,
                                     "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0,
                                     "position_embedding_type": "rope_gptj", "use_embedding_sharing": True,
                                     "use_gated_activation": True, "use_parallel_block": True,
                                     "use_parallel_embedding": True, "use_qk_norm": False,
                                     "cache_implementation": "hybrid", "rope_scaling": None, "rope_theta": 50000,
                                     "rope_parameters": ...}),
    "Olmo-3-7B-Instruct": ("olmo2_3", {"rope_parameters": ..., "rope_theta": 3e4, "rope_scaling": {
        "attention_factor": 0.1 * math.log(4) + 1, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0,
        "original_max_position_embeddings": 100, "rope_type": "yarn"}}),
    "Mixtral-8x7B-Instruct-v0.1": ("llama_mixtral", {"rope_parameters": ..., "rope_theta": 1000000.0,
                                                     "sliding_window": None, "output_router_logits": False}),
    "GLM-4-9B-0414": ("glm4", {"rope_parameters": ..., "rope_theta": 10000.0, "partial_rotary_factor": 0.6}),
    "granite-3.1-1b-a400m-instruct": ("granitemoe", {"rope_parameters": ..., "rope_theta": 10000.0,
                                                     "rope_scaling": None, "output_router_logits": False}),
    "ERNIE-4.5-0.3B-PT": ("ernie4_5", {"architectures": ["Ernie4_5_ForCausalLM"], "compression_ratio": 1.0,
                                       "rope_parameters": ..., "rope_theta": 500000, "use_rmsnorm": True,
                                       "auto_map": {"AutoConfig": "configuration_ernie4_5.Ernie4_5_Config"}}),
    "EXAONE-4.0-32B": ("exaone4_window", {"sliding_window_pattern": "LLLG", "rope_parameters": ...,
                                          "rope_theta": 30000.0, "rope_scaling": {"rope_type": "default"}}),
    "EXAONE-4.0-1.2B": ("exaone4", {"sliding_window_pattern": None, "rope_parameters": ..., "rope_theta": 30000.0,
                                    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                                     "rope_type": "llama3", "original_max_position_embeddings": 64}}),
    "Seed-OSS-36B-Instruct": ("seed_oss", {"rope_parameters": ..., "rope_theta": 10000.0, "residual_dropout": 0.1,
                                           "rope_scaling": {"rope_type": "default"}}),
    "LFM2-1.2B": ("lfm2", {"layer_types": ..., "full_attn_idxs": [0], "block_dim": 96, "block_ff_dim": 144,
                           "block_mlp_init_scale": 1.0, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0,
                           "block_use_swiglu": True, "block_use_xavier_init": True, "conv_dim": 96, "conv_dim_out": 96,
                           "conv_use_xavier_init": True, "intermediate_size": ..., "num_heads": 6,
                           "rope_theta": 20000.0, "rope_parameters": ..., "tie_embedding": True,
                           "tie_word_embeddings": ..., "theta": 20000.0, "use_pos_enc": True}),
    "granite-4.0-h-tiny": ("granitehybrid", {"layer_types": ["attention", "mamba"], "init_method": "mup",
                                             "normalization_function": "rmsnorm", "time_step_limit": ...,
                                             "position_embedding_type": "nope", "rope_parameters": ...,
                                             "rope_scaling": None, "rope_theta": 10000}),
    "LFM2-8B-A1B": ("lfm2moe", {"rope_theta": 20000.0, "rope_parameters": ..., "tie_word_embeddings": ...,
                                "tie_embedding": True}),
    "LFM3-1.7B": ("lfm3", {"auto_map": {"AutoConfig": "configuration_lfm3.Lfm3Config"}, "norm_eps": ...,
                           "rms_norm_eps": 1e-4}),
    "Nemotron-3-Nano": ("nemotron_h", {"layers_block_type": ..., "hybrid_override_pattern": "*ME",
                                       "num_hidden_layers": 3, "time_step_limit": [0.0, float("inf")],
                                       "rms_norm_eps": 1e-05, "rope_parameters": ..., "rope_theta": 10000,
                                       "partial_rotary_factor": 1.0,
                                       "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}}),
    "Nemotron-3-Super": ("nemotron_h_latent", {"layers_block_type": ..., "hybrid_override_pattern": "*ME",
                                               "mtp_layers_block_type": ..., "mtp_hybrid_override_pattern": "*E",
                                               "num_nextn_predict_layers": 1, "n_routed_experts": ...,
                                               "num_local_experts": 7, "time_step_limit": [0.0, float("inf")]}),
    "Falcon-H1-1.5B-Instruct": ("falcon_h1", {"attn_layer_indices": None, "mamba_use_mlp": True,
                                              "mlp_expansion_factor": 8, "num_logits_to_keep": 1,
                                              "time_step_limit": ..., "rope_parameters": ..., "rope_scaling": None,
                                              "rope_theta": 10000.0}),
    "Bamba-9B": ("bamba", {"attn_rotary_emb": 8, "use_mamba_kernels": True, "time_step_limit": ...,
                           "z_loss_coefficient": ..., "rope_parameters": ..., "rope_scaling": None,
                           "rope_theta": 20000.0}),
    "gemma-3-270m": ("gemma3", {"_sliding_window_pattern": 6, "layer_types": ...}),
    "gemma-4-E2B": ("gemma4", {"per_layer_config": ..., "global_head_dim": 36, "num_global_key_value_heads": None,
                               "moe_intermediate_size": None, "num_experts": None, "top_k_experts": None}),
    "gemma-4-12B": ("gemma4_keys", {"per_layer_config": ..., "global_head_dim": 26, "num_global_key_value_heads": 2}),
    "gemma-3n": ("gemma3n", {"rope_parameters": ..., "rope_theta": 5e5, "rope_local_base_freq": 2e4,
                             "rope_scaling": None, "attn_logit_softcapping": None}),
}


@pytest.mark.parametrize("name", DECODERS)
def test_published_keys_of_decoders_have_no_effect(tmp_path: Path, name: str) -> None:
    family, changes = DECODERS[name]
    paritymodels.decoder(family, paritymodels.LAYERS.get(family, 2)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 96)
    before = described(tmp_path)
    edit(tmp_path / "config.json", changes)
    after = described(tmp_path)
    assert after.spec == before.spec and after.generation == before.generation


def test_drafts_of_nemotron_are_read_over(tmp_path: Path) -> None:
    """Folders of Nemotron 3 have layers that only predict further tokens."""
    paritymodels.decoder("nemotron_h_latent", 3).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 96)
    path = tmp_path / "model.safetensors"
    before = [tensor.name for tensor in described(tmp_path).spec.tensors]
    drafts = ("layers.0.eh_proj", "layers.0.mixer.q_proj", "layers.1.mixer.experts.0.up_proj")
    save_file({**load_file(path), **{f"mtp.{name}.weight": torch.ones(7, 3) for name in drafts}}, path,
              {"format": "pt"})
    assert [tensor.name for tensor in described(tmp_path).spec.tensors] == before


#: Published vision model -> its family in the tests, a file, and the keys of the file that transformers does not write.
VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SmolVLM2": ("smolvlm", "config.json", {
        "text_config/architectures": ["VLlama3ForCausalLM"], "text_config/use_resampler": False,
        "text_config/perceiver_config": {"model_type": "vllama3"}, "vision_config/size": {"longest_edge": 2048},
        "vision_config/max_image_size": {"longest_edge": 32}, "vision_config/use_base_siglip": True}),
    "LFM2-VL-450M": ("lfm2_vl", "config.json", {
        "do_image_splitting": True, "encoder_patch_size": 16, "max_image_tokens": 256, "max_num_patches": 1024,
        "max_pixels_tolerance": 2.0, "max_tiles": 10, "tile_size": 512, "use_image_special_tokens": True,
        "use_thumbnail": True, "vision_feature_layer": -1, "vision_config/vision_use_head": False}),
    "LFM2.5-VL-1.6B": ("lfm2_vl", "preprocessor_config.json", {
        "image_processor_type": "Lfm2VlImageProcessorFast", "max_num_patches": 1024, "return_row_col_info": True,
        "size": {"height": 512, "width": 512}, "do_pad": True, "data_format": "channels_first", "crop_size": None}),
    "Ministral-3-3B": ("mistral3", "preprocessor_config.json", {
        "image_processor_type": "PixtralImageProcessorFast", "data_format": "channels_first", "patch_size": 8}),
    "InternVL3-1B-hf": ("internvl", "preprocessor_config.json", {
        "image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False, "crop_size": None,
        "do_center_crop": None, "default_to_square": True, "device": None, "processor_class": "InternVLProcessor"}),
    "llava-v1.6-mistral-7b": ("llava_next", "preprocessor_config.json", {"aspect_ratio_setting": "anyres"}),
}


@pytest.mark.parametrize("name", VISION)
def test_published_keys_of_vision_models_have_no_effect(tmp_path: Path, name: str) -> None:
    family, file, changes = VISION[name]
    visionmodels.save(visionmodels.make(family), family, tmp_path)
    before = described(tmp_path)
    edit(tmp_path / file, changes)
    after = described(tmp_path)
    assert after.spec == before.spec and after.vision == before.vision


_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 96}
_VISION = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 1, "num_attention_heads": 3,
           "image_size": 32, "patch_size": 8}
#: Published vision model -> its class, config.json, whose ``text_config`` omits the defaults of its class, and hyper-
#: parameters that follow.
JOINT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma-3-4b": ("Gemma3ForConditionalGeneration", {
        "boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92, "mm_tokens_per_image": 4,
        "model_type": "gemma3", "text_config": {**_TEXT, "model_type": "gemma3_text", "num_hidden_layers": 7,
                                                "sliding_window": 30,
                                                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}},
                   {"gemma3.context_length": 131072}),
    "gemma-4-E2B-it": ("Gemma4ForConditionalGeneration", {
        "image_token_id": 92, "audio_token_id": 93, "video_token_id": 94, "model_type": "gemma4",
        "text_config": {**_TEXT, "model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": 30,
                        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
                        "global_head_dim": 24, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
                        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 48, "intermediate_size": 88, "head_dim": 16,
                          "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3},
        "audio_config": None}, {"gemma4.context_length": 131072}),
    "Ministral-3-3B": ("Mistral3ForConditionalGeneration", {
        "image_token_index": 92, "model_type": "mistral3", "multimodal_projector_bias": False, "spatial_merge_size": 2,
        "text_config": {**_TEXT, "model_type": "ministral3", "num_hidden_layers": 2, "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 60, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn"}},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16}, "vision_feature_layer": -1},
                       {"mistral3.context_length": 262144}),
    "Mistral-Small-3.1-24B": ("Mistral3ForConditionalGeneration", {
        "image_token_index": 92, "model_type": "mistral3", "spatial_merge_size": 2,
        "text_config": {**_TEXT, "model_type": "mistral", "num_hidden_layers": 2, "rope_theta": 1e9,
                        "max_position_embeddings": 131072, "sliding_window": None},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16}}, {"mistral3.context_length": 131072}),
}


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("name", JOINT)
def test_text_decoders_of_vision_models(tmp_path: Path, name: str, older: bool) -> None:
    """The tensors have older or newer names, and the image encoder is ignored."""
    kind, joint, expected_kv = JOINT[name]
    config = {"architectures": [kind], "eos_token_id": [1, 7], **joint}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    randomise(model, 5)
    model.tie_weights()
    model.save_pretrained(tmp_path, save_original_format=older)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path, 96)
    tokens = np.random.default_rng(6).integers(0, 90, 101)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    with mpool.Pool() as pool:
        assert np.abs(logits(pool, str(tmp_path), tokens, "float32") - expected).max() <= 1e-4
    found = described(tmp_path)
    assert found.generation is not None and found.generation.eog_token_ids == (1, 7)
    assert expected_kv.items() <= found.spec.kv.items()


@pytest.mark.parametrize("experts", [False, True])
def test_text_decoder_of_qwen3_5_with_vision(tmp_path: Path, experts: bool) -> None:
    """Qwen3.5 is published as a vision model: ``text_config``, M-RoPE, an image encoder and a layer for drafts. Experts
    are one tensor per layer and projection."""
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    classes, family = ("Qwen3_5Moe", "qwen35moe") if experts else ("Qwen3_5", "qwen35")
    text = paritymodels.decoder(family, 2, layer_types=["linear_attention", "full_attention"]).config.to_dict()
    text |= {"attn_output_gate": True, "full_attention_interval": 2, "mtp_num_hidden_layers": 1,
             "mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False, "eos_token_id": [1, 7],
             "rope_parameters": {**text["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    del text["layer_types"]
    vision = {"model_type": kind, "depth": 1, "hidden_size": 48, "intermediate_size": 88, "num_heads": 3,
              "out_hidden_size": 96, "patch_size": 8, "num_position_embeddings": 16}
    config = {"architectures": [f"{classes}ForConditionalGeneration"], "model_type": kind, "image_token_id": 90,
              "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
              "tie_word_embeddings": True, "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = getattr(transformers, f"{classes}ForConditionalGeneration")(
        transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    randomise(model, 5)
    model.tie_weights()
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert ("model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors) == experts
    tensors["mtp.layers.0.mlp.experts.gate_up_proj" if experts else "mtp.norm.weight"] = torch.ones(7)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    write_tokenizer(tmp_path, 96)
    tokens = np.random.default_rng(6).integers(0, 90, 101)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    with mpool.Pool() as pool:
        assert np.abs(logits(pool, str(tmp_path), tokens, "float32") - expected).max() <= 1e-4
        with pytest.raises(errors.Unsupported, match="image"):
            pool.chat([{"role": "user", "content": [{"type": "image", "image": b"x"}]}], str(tmp_path))
    found = described(tmp_path)
    assert found.generation is not None and found.generation.eog_token_ids == (1, 7)
    assert found.spec.architecture == family and found.capability == "text_to_text"


#: Model -> hidden size, layers, feed-forward size, heads, KV heads, value heads, experts, and millions of parameters of
#: the language model.
QWEN: dict[str, tuple[int, ...]] = {
    "Qwen3.5-0.8B": (1024, 24, 3584, 8, 2, 16, 0, 752), "Qwen3.5-2B": (2048, 24, 6144, 8, 2, 16, 0, 1882),
    "Qwen3.5-4B": (2560, 32, 9216, 16, 4, 32, 0, 4206), "Qwen3.5-9B": (4096, 32, 12288, 16, 4, 32, 0, 8954),
    "Qwen3.6-27B": (5120, 64, 17408, 24, 4, 48, 0, 26896), "Qwen3.6-35B-A3B": (2048, 40, 512, 16, 2, 32, 256, 34661),
    "Qwen3-Next-80B-A3B-Instruct": (2048, 48, 512, 16, 2, 32, 512, 79674)}


#: Layers, width and feed-forward size of their image encoders; those of the larger models are equal.
QWEN_ENCODERS = {"Qwen3.5-0.8B": (12, 768, 3072), "Qwen3.5-2B": (24, 1024, 4096), "Qwen3.5-4B": (24, 1024, 4096)}


def _encoder_of_qwen(name: str, width: int) -> int:
    """Return the parameters of the image encoder and its projector; ``width``: hidden size of the language model."""
    layers, hidden, ffn = QWEN_ENCODERS.get(name, (27, 1152, 4304))
    model = vision_folder.READERS["qwen3_5"](Fields({"model_type": "qwen3_5", "text_config": {"hidden_size": width},
                                                     "vision_config": {
        "depth": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_heads": hidden // 64,
        "out_hidden_size": width, "patch_size": 16, "num_position_embeddings": 2304}}, file="config.json"))
    return sum(math.prod(tensor.shape) for part in (model.encoder, model.projector) for tensor in part.tensors)


@pytest.mark.parametrize("name", QWEN)
def test_sizes_of_qwen(name: str) -> None:
    """The tensors of the published configuration have the published number of parameters, and the core predicts the
    state of a sequence: the matrices of the delta nets, and three rows before their convolutions."""
    hidden, layers, ffn, heads, kv_heads, values, experts, millions = QWEN[name]
    small, kind = hidden < 3000 and not experts, "qwen3_5_moe_text" if "3.6-35B" in name else "qwen3_5_text"
    row, read = hf_config.read_config(Fields({
        "model_type": "qwen3_next" if "Next" in name else kind, "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_experts": experts,
        "linear_num_value_heads": values, "vocab_size": 151936 if "Next" in name else 248320,
        "max_position_embeddings": 262144, "tie_word_embeddings": small}, file="config.json"))
    size = architectures.sizes(row, read.kv, file="config.json")
    found = sum(math.prod(tensor.shape) for tensor in architectures.expected(row, size).values()
                if tensor.needed or tensor.when == "tied" and not small)
    assert round(found / 1e6) == millions
    listed = load_catalogue().rows[name]
    assert listed.parameters == found + (_encoder_of_qwen(name, hidden) if listed.capability == "vision" else 0)
    state = layers * 3 // 4 * 4 * (values * 128 * 128 + 3 * (4096 + values * 128))
    assert state <= ModelSpec(row.name, (), read.kv, ()).to_core().state_bytes() < state + (2 << 20)


#: Vision model -> its published configuration, as far as its sizes and unusual keys go.
VISION_SIZES: dict[str, dict[str, Any]] = {
    "LFM2-VL-1.6B": {
        "model_type": "lfm2_vl", "architectures": ["Lfm2VlForConditionalGeneration"], "downsample_factor": 2,
        "projector_hidden_size": 2560, "tie_word_embeddings": True, "text_config": {
            "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True,
            "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "norm_eps": 1e-5, "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 65536},
        "vision_config": {
            "model_type": "siglip2_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 26, "num_patches": 256, "vision_use_head": False}},
    "pixtral-12b": {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 10,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "text_config": {
            "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
            "max_position_embeddings": 1024000, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072},
        "vision_config": {"model_type": "pixtral", "head_dim": 64, "hidden_act": "silu", "image_size": 1024,
                          "rope_theta": 10000.0}},
    "Qwen2-VL-2B-Instruct": {  # an older file: the decoder's keys are those of the model
        "model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "hidden_size": 1536,
        "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
        "max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 151936,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": True, "vision_config": {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}},
    "Qwen3-VL-8B-Instruct": {
        "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text", "attention_bias": False, "dtype": "bfloat16", "head_dim": 128,
            "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 262144,
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 5000000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "use_cache": True, "vocab_size": 151936},
        "vision_config": {
            "model_type": "qwen3_vl", "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
            "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2}}}


@pytest.mark.parametrize("name", VISION_SIZES)
def test_sizes_of_vision_models(name: str) -> None:
    """The tensors of the published configuration have the published number of parameters."""
    config = VISION_SIZES[name]
    model = vision_folder.READERS[config["model_type"]](Fields(json.loads(json.dumps(config)), file="config.json"))
    row, read = hf_config.read_config(model.text)
    size = architectures.sizes(row, read.kv, file="config.json") | read.sizes
    found = sum(math.prod(tensor.shape) for tensor in architectures.expected(row, size).values()
                if tensor.needed or tensor.when == "tied" and not read.tied)
    found += sum(math.prod(tensor.shape) for part in (model.encoder, model.projector) for tensor in part.tensors)
    assert found == load_catalogue().rows[name].parameters


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz,.!?", "the", "cat", "##s", "##at",
         "café", "cafe", "Cat", "你", "好", "##e", "##h"]
TEXTS = ["The cats sat, at the Café!", "你好 the cat?", "", "a" * 120, "[SEP] here"]


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": False},
                                      {"tokenize_chinese_chars": False}])
def test_wordpiece_vocabulary_without_tokenizer_json(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A BERT folder with only ``vocab.txt``."""
    from mpool.tokenizers import Tokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    config = transformers.BertConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=1,
                                     intermediate_size=16)
    transformers.BertModel(config).save_pretrained(tmp_path)
    source = described(tmp_path).tokenizer
    assert source is not None
    ours, theirs = Tokenizer.from_source(source), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:-1]:
        assert ours.encode(text).tolist() == theirs(text)["input_ids"], text
    # "[SEP]" in a user's text does not become a control token
    assert ours.encode(TEXTS[-1]).tolist().count(WORDS.index("[SEP]")) == 1
    assert ours.encode_pairs("the", ["cat"], max_tokens=9).ids.tolist() == theirs("the", "cat")["input_ids"]


ADDED = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False, "special": False}


@pytest.mark.parametrize("config, files", [
    ({}, {"added_tokens.json": {"zzq": 0, "Dog": 1}}),
    ({"added_tokens_decoder": {0: ADDED | {"content": "zzq"}, 1: ADDED | {"content": "Dog", "normalized": False}}}, {}),
    ({"added_tokens_decoder": {1: ADDED | {"content": "dog", "single_word": True},
                               0: ADDED | {"content": "zzq", "lstrip": True}}}, {"added_tokens.json": {"cat": 0}}),
    ({"additional_special_tokens": ["zzq"]}, {"added_tokens.json": {"zzq": 0}}),
    ({}, {"added_tokens.json": {"[ent]": 0}, "special_tokens_map.json": {"additional_special_tokens": ["[ent]"]}}),
    ({"additional_special_tokens": ["cat", {"__type": "AddedToken", "content": "[MASK]"}]}, {})])
def test_wordpiece_vocabulary_with_added_tokens(tmp_path: Path, config: dict[str, Any], files: dict[str, Any]) -> None:
    """The ids in the parameters are relative to the end of the vocabulary."""
    from mpool.tokenizers import Tokenizer

    n = len(WORDS)
    config = config | {"tokenizer_class": "BertTokenizer"}
    if "added_tokens_decoder" in config:
        config["added_tokens_decoder"] = {str(n + i): token for i, token in config["added_tokens_decoder"].items()}
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps({key: n + value if isinstance(value, int) else value
                                                 for key, value in values.items()}))
    bert = transformers.BertConfig(vocab_size=n + 2, hidden_size=16, num_hidden_layers=1, num_attention_heads=1,
                                   intermediate_size=16)
    transformers.BertModel(bert).save_pretrained(tmp_path)
    source = described(tmp_path).tokenizer
    assert source is not None
    ours, theirs = Tokenizer.from_source(source), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The zzq cats", "zzqs, a Dog dog dogs!", "ZZQ cat[ent] the"):
        expected = theirs(text)["input_ids"]
        if ours._control.isdisjoint(expected[1:-1]):  # mpool never produces control tokens from a user's text
            assert ours.encode(text).tolist() == expected, text
    added = list(theirs.added_tokens_decoder)
    assert [ours.token_text(token) for token in added] == theirs.convert_ids_to_tokens(added)


@pytest.mark.parametrize("config, files, match", [
    ({}, {"added_tokens.json": {"zzq": 99}}, "zzq.*99"),
    ({}, {"added_tokens.json": {"cat": len(WORDS)}}, "cat"),
    ({}, {"added_tokens.json": {"zzq": "first"}}, "zzq"),
    ({"added_tokens_decoder": {"99": {"content": "zzq"}}}, {}, "zzq.*99"),
    ({"added_tokens_decoder": {"-1": {"content": "zzq"}}}, {}, "added_tokens_decoder"),
    ({"added_tokens_decoder": {"5": "zzq"}}, {}, "added_tokens_decoder.5"),
    ({"additional_special_tokens": ["zzq"]}, {}, "zzq.*no id"),
    ({}, {"special_tokens_map.json": {"additional_special_tokens": [{"content": "zzq"}]}}, "zzq.*no id")])
def test_added_tokens_with_unknown_ids_are_refused(tmp_path: Path, config: dict[str, Any], files: dict[str, Any],
                                                   match: str) -> None:
    """mpool does not assign ids, because the model was trained with specific ones."""
    from mpool.tokenizers import older_files

    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    for name, values in {"tokenizer_config.json": config, **files}.items():
        (tmp_path / name).write_text(json.dumps(values))
    with pytest.raises(errors.FormatError, match=match):
        older_files.wordpiece(str(path), config)


def test_clip_tokenizer_with_added_tokens(tmp_path: Path) -> None:
    """Textual inversion saves tokens with ids after the last of vocab.json."""
    import pipelinemodels

    from mpool.tokenizers import pipeline_tokenizers

    pipelinemodels.clip_tokenizer(tmp_path)
    n = len(json.loads((tmp_path / "vocab.json").read_text()))
    plain = pipeline_tokenizers.encode(str(tmp_path), "the <moon-cat> on", 20, "<|endoftext|>", True)[0]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<moon-cat>": n}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs("the <moon-cat> on", padding="max_length", max_length=20)["input_ids"]
    got = pipeline_tokenizers.encode(str(tmp_path), "the <moon-cat> on", 20, "<|endoftext|>", True)[0]
    assert got == expected and n in got and n not in plain


def test_clip_without_tokenizer_json(tmp_path: Path) -> None:
    """clip-ViT-B-32 of sentence-transformers has vocab.json and merges.txt in the folder of its only module."""
    from mpool.models import describe

    folder = tmp_path / "0_CLIPModel"
    letters = [chr(c) for c in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "ca", "cat</w>", "th", "the</w>"]
    vocab = {word: i for i, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    imagemodels.save(imagemodels.make("clip", 1), "clip", folder)
    edit(folder / "config.json", {"text_config/vocab_size": len(vocab), "text_config/eos_token_id": 2})
    model = transformers.CLIPModel(transformers.CLIPConfig.from_pretrained(folder)).eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nc a\nca t</w>\nt h\nth e</w>\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "CLIPTokenizer", "do_lower_case": True, "model_max_length": 77, "errors": "replace",
        **{name: "<|endoftext|>" for name in ("unk_token", "eos_token", "pad_token")}, "bos_token": "<|startoftext|>"}))
    (tmp_path / "modules.json").write_text(json.dumps([{
        "idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}]))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    found = describe(str(tmp_path))
    assert found.capability == "image_embedding"
    texts = ["The cat", "Cat, the!"]
    with torch.no_grad():
        expected = [model.get_text_features(**theirs(text, return_tensors="pt")).pooler_output[0].numpy()
                    for text in texts]
    with mpool.Pool() as pool:
        got = pool.embed(texts, str(tmp_path), compute="float32")
    assert np.abs(got - expected).max() <= 1e-4


def test_jina_reranker(tmp_path: Path) -> None:
    """jina-reranker-v1 is a JinaBERT with BERT's classification head."""
    import encodermodels
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    model, pooler, classifier = encodermodels.JinaBert(2), torch.nn.Linear(48, 48), torch.nn.Linear(48, 1)
    for part in (model, pooler, classifier):
        randomise(part, 4)
    encodermodels.save_jina(model, tmp_path)
    tensors = {f"bert.{name}": tensor for name, tensor in model.published().items()}
    for name, layer in (("bert.pooler.dense", pooler), ("classifier", classifier)):
        tensors |= {f"{name}.{kind}": tensor.detach() for kind, tensor in layer.state_dict().items()}
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    encodermodels.save_tensors(tensors, config, tmp_path)
    words = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2, **{f"w{i}": i for i in range(3, encodermodels.VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    documents = ["w9 w30", "w100 w8 w7 w6"]
    expected = []
    for document in documents:
        second = [int(word[1:]) for word in document.split()] + [1]
        ids, types = torch.tensor([[0, 5, 6, 1, *second]]), torch.tensor([[0] * 4 + [1] * len(second)])
        with torch.no_grad():
            expected.append(float(torch.sigmoid(classifier(torch.tanh(pooler(model(ids, types)[:, 0]))))))
    with mpool.Pool() as pool:
        scores = pool.rerank("w5 w6", documents, str(tmp_path), compute="float32")
    assert np.abs([one.score for one in sorted(scores, key=lambda one: one.index)] - np.array(expected)).max() <= 1e-5


@pytest.mark.parametrize("changes, words", [
    ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, "quantised by bitsandbytes"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "quantised, .*gguf")])
def test_quantised_folders_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    paritymodels.decoder("llama", 1).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", changes)
    with pytest.raises(mpool.Unsupported, match=words):
        described(tmp_path)


def test_error_names_the_tensors_of_a_variant(tmp_path: Path) -> None:
    """A JinaBERT with other layer names."""
    import encodermodels

    model = encodermodels.JinaBert(1)
    encodermodels.save_jina(model, tmp_path)
    tensors = {name.replace("mlp.gated_layers", "mlp.up_layer"): tensor for name, tensor in model.published().items()}
    encodermodels.save_tensors(tensors, json.loads((tmp_path / "config.json").read_text()), tmp_path)
    with pytest.raises(mpool.errors.FormatError, match="mlp.gated_layers.weight missing.*a variant.*up_layer"):
        described(tmp_path)


def _as_ollama(raw: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> tuple[dict[str, Any], list[TensorEntry]]:
    """Return the tables under the names of Ollama's converter, with an image tensor if the family has an encoder."""
    old = raw["general.architecture"]
    new = {"gpt-oss": "gptoss", "qwen2vl": "qwen25vl"}.get(old, old)
    names = {"attn_output": "attn_out", "attn_sinks.weight": "attn_sinks", "post_attention_norm": "ffn_norm"} \
        if new == "gptoss" else {}
    kv = {key.replace(f"{old}.", f"{new}.", 1): value for key, value in raw.items()} | {"general.architecture": new}
    renamed = []
    for entry in tensors:
        name = entry.name
        for llama_cpp, ollama in names.items():
            name = name.replace(llama_cpp, ollama)
        renamed.append(replace(entry, name=name))
    if new == "gptoss":
        for key in ("expert_feed_forward_length", "rope.scaling.type"):
            del kv[f"gptoss.{key}"]
        return kv | {"tokenizer.ggml.pre": "default"}, renamed
    renamed.append(TensorEntry("v.blk.0.attn_q.weight", "F32", (8, 8), 0, 0, 256))
    if new == "qwen25vl":
        kv["qwen25vl.rope.mrope_section"] = kv.pop("qwen25vl.rope.dimension_sections")[:3]
    else:
        for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"):
            del kv[f"gemma3.{key}"]
        kv["tokenizer.ggml.tokens"] = [*kv["tokenizer.ggml.tokens"], "<image_soft_token>"]
        kv["tokenizer.ggml.token_type"] = [*kv["tokenizer.ggml.token_type"], 3]
        kv["tokenizer.ggml.scores"] = [*kv["tokenizer.ggml.scores"], 0.0]
    return kv, renamed


@pytest.mark.parametrize("keys, tensor, expected", [
    (["attention.layer_norm_rms_epsilon"], "output_norm.weight", False), ([], "output_norm.weight", True),
    (["attention.layer_norm_rms_epsilon", "rope.local.freq_base"], "output_norm.weight", True),
    (["rope.local.freq_base"], "output_norm.weight", True),
    (["attention.layer_norm_rms_epsilon"], "dense.0.weight", True),
    (["attention.layer_norm_rms_epsilon"], "v.blk.0.attn_q.weight", True),
    (["attention.layer_norm_rms_epsilon"], "dense_2.weight", False)])
def test_converters_of_gemma_files(keys: list[str], tensor: str, expected: bool) -> None:
    """Each difference of the two converters alone tells that a file is Ollama's."""
    from mpool.models.formats import ollama_gguf

    entry = TensorEntry(tensor, "F32", (8,), 0, 0, 32)
    assert ollama_gguf._is_ollama_gemma({f"gemma3.{key}": 1.0 for key in keys}, (entry,)) is expected


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2", "gemma3"])
def test_files_of_ollamas_converter(tmp_path: Path, family: str) -> None:
    """The translated tables equal those of llama.cpp's converter."""
    import tinygguf
    from mpool.models.formats import gguf_model, gguf_tables, ollama_gguf

    model = paritymodels.decoder(family, paritymodels.LAYERS.get(family, 2), tie=family == "gemma3")
    if family == "gemma3":
        model.config.max_position_embeddings, model.config.rms_norm_eps = 131072, 1e-6
    path = tinygguf.write(tmp_path / "model.gguf", model, sections=[2, 3, 3] if family == "qwen2" else None,
                          vision="qwen2vl" if family == "qwen2" else None)
    raw, tensors, files = gguf_tables.read_gguf(str(path))
    plain = gguf_model.describe_tables(raw, tensors, files, key="k", ref="r")
    kv, others = _as_ollama(dict(raw), tensors)
    with pytest.raises(mpool.MpoolError):
        gguf_model.describe_tables(kv, others, files, key="k", ref="r")
    found = gguf_model.describe_tables(*ollama_gguf.translated(kv, tuple(others)), files, key="k", ref="r")
    assert found.spec.tensors == plain.spec.tensors and found.generation == plain.generation
    for key, value in plain.spec.kv.items():
        assert found.spec.kv[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert ollama_gguf.translated(raw, tensors) == (raw, tensors)


def test_siglip_with_a_partial_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """siglip-so400m-patch14-384: a side of 384 pixels is 27 patches and 6 pixels that belong to no patch."""
    monkeypatch.setitem(imagemodels.PROCESSORS, "siglip", {
        **imagemodels.PROCESSORS["siglip"], "size": {"height": 44, "width": 44}})
    model = imagemodels.randomised("siglip", 2, image_size=44)
    imagemodels.save(model, "siglip", tmp_path)
    image = imagemodels.image(1, 63, 90)
    expected = imagemodels.vision(model, "siglip", imagemodels.pixels("siglip", image))[1]
    with mpool.Pool() as pool:
        got = pool.embed_image(image, str(tmp_path), compute="float32")
    assert np.abs(got - expected).max() <= 1e-4 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("family, side", [("smolvlm", 28), ("llava_siglip", 44)])
def test_vision_models_with_a_partial_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str,
                                            side: int) -> None:
    """SmolVLM-Instruct uses that SigLIP for its tiles and merges 3 x 3 patches."""
    from corelib import SAMPLING

    processor = {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": 3 * side}} \
        if family == "smolvlm" else {"size": {"height": side, "width": side}}
    more: dict[str, Any] = {"scale_factor": 3} if family == "smolvlm" else {}
    monkeypatch.setitem(visionmodels.FAMILIES, family,
                        {**visionmodels.FAMILIES[family], "vision": {"image_size": side}})
    monkeypatch.setitem(visionmodels.PROCESSORS, family, {**visionmodels.PROCESSORS[family], **processor})
    model = visionmodels.randomised(family, **more)
    visionmodels.save(model, family, tmp_path)
    images = [visionmodels.image(seed, *size) for seed, size in enumerate([(63, 90), (40, 40)])]
    with mpool.Pool() as pool:
        request = vision_request(pool, images, visionmodels.text(3, 20), str(tmp_path), {"compute": "float32"})
        ticket = pool.registry.submit_text(request.core_key, request.prompt, vision=True, prompt_logits=True,
                                           images=request.images.arrays(), **SAMPLING)
        ticket.wait()
        ticket.check()
    with torch.no_grad():
        expected = model(**visionmodels.inputs(model, request.prompt.tolist(), images)).logits[0].numpy()
    assert np.abs(ticket.prompt_logits() - expected).max() <= 1e-4 * max(1, np.abs(expected).max())
