"""Seeded transformers models for parity tests: odd sizes, random norms and biases, token ids instead of texts."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

#: DeepSeek's heads and latents, with odd sizes where possible.
LATENT: dict[str, Any] = {"num_key_value_heads": 6, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
                          "v_head_dim": 32, "moe_intermediate_size": 48}
#: Gated delta nets: two value heads per key head, and sizes that no vector divides. A fifth of a head is rotated.
#: Llama.cpp allows heads of keys and values of one size only.
DELTA: dict[str, Any] = {"head_dim": 40, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
                         "linear_key_head_dim": 22, "linear_value_head_dim": 22,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0,
                                             "partial_rotary_factor": 0.2}}
#: Classes by name, of families that transformers does not have, in plain torch. A configuration takes keywords and has
#: ``to_dict()`` and ``rope_parameters``. A model has ``config``, ``lm_head``, ``tie_weights()`` and
#: ``save_pretrained(folder)``; its tensors have the names of the published files; its result has ``logits``.
OWN: dict[str, Any] = {}
#: Decoders by name: configuration class and model class, in transformers or in OWN, and settings that differ from the
#: common ones.
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama_rope3": ("LlamaConfig", "LlamaForCausalLM",
                    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                         "original_max_position_embeddings": 64}}),
    "llama_linear": ("LlamaConfig", "LlamaForCausalLM",
                     {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama_yarn": ("LlamaConfig", "LlamaForCausalLM",
                   {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                        "original_max_position_embeddings": 100}}),
    "llama_dynamic": ("LlamaConfig", "LlamaForCausalLM",
                      {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama_longrope": ("LlamaConfig", "LlamaForCausalLM",
                       {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
                                            "original_max_position_embeddings": 100,
                                            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.7, 1.9],
                                            "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0, 12.0, 15.0]}}),
    "llama_biased": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama_heads12": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 12}),
    "llama_heads100": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 100, "hidden_act": "relu"}),
    "llama_heads2": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 2, "hidden_act": "gelu"}),
    "llama_mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 50}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2_window": ("Qwen2Config", "Qwen2ForCausalLM",
                     {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3_biased": ("Qwen3Config", "Qwen3ForCausalLM",
                     {"head_dim": 26, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                 {"head_dim": 32, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
                  "norm_topk_prob": True}),
    "qwen3moe_shares": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                        {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 80,
                         "norm_topk_prob": False}),
    "qwen3moe_dense": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                       {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 80,
                        "norm_topk_prob": True, "mlp_only_layers": [1], "attention_bias": True,
                        "hidden_act": "gelu"}),
    "qwen3moe_step": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                      {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 80,
                       "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen2moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM",
                 {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                  "shared_expert_intermediate_size": 80, "norm_topk_prob": False}),
    "qwen2moe_dense": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM",
                       {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 80, "norm_topk_prob": True,
                        "shared_expert_intermediate_size": 48, "mlp_only_layers": [1], "hidden_act": "gelu"}),
    "qwen3next": ("Qwen3NextConfig", "Qwen3NextForCausalLM",
                  {**DELTA, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
                   "shared_expert_intermediate_size": 80}),
    "qwen35": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
    "qwen35_biased": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM",
                      {**DELTA, "attention_bias": True, "linear_conv_kernel_dim": 3, "linear_num_key_heads": 2,
                       "linear_value_head_dim": 26,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0,
                                           "partial_rotary_factor": 1.0}}),
    "qwen35moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM",
                  {**DELTA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 80,
                   "shared_expert_intermediate_size": 48}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM",
                {"head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 60,
                 "swiglu_limit": 7.0,
                 "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
                                     "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 100}}),
    # rotary embeddings without scaling, which llama.cpp computes as transformers does at every position
    "gpt_oss_clamp": ("GptOssConfig", "GptOssForCausalLM",
                      {"head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 60,
                       "swiglu_limit": 7.0, "initializer_range": 0.2,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "gpt_oss_limit": ("GptOssConfig", "GptOssForCausalLM",
                      {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 30,
                       "swiglu_limit": 1.25,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "deepseek2": ("DeepseekV3Config", "DeepseekV3ForCausalLM",
                  {**LATENT, "q_lora_rank": 40, "n_routed_experts": 12, "n_group": 4, "topk_group": 2,
                   "num_experts_per_tok": 3, "n_shared_experts": 1, "routed_scaling_factor": 1.7,
                   "first_k_dense_replace": 1,
                   "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
                                       "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                       "original_max_position_embeddings": 100}}),
    "deepseek2_kimi": ("DeepseekV3Config", "DeepseekV3ForCausalLM",
                       {**LATENT, "num_attention_heads": 66, "num_key_value_heads": 66,  # groups have at most 64 heads
                        "q_lora_rank": 56, "n_routed_experts": 7, "n_group": 1, "topk_group": 1,
                        "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 2,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
    "deepseek2_lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM",
                       {**LATENT, "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2,
                        "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy",
                        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707,
                                            "mscale_all_dim": 0.707, "original_max_position_embeddings": 100}}),
    "deepseek2_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM",
                     {**LATENT, "q_lora_rank": 40, "n_routed_experts": 8, "num_experts_per_tok": 3,
                      "n_shared_experts": 1, "first_k_dense_replace": 0, "topk_method": "group_limited_greedy",
                      "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0,
                      "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "deepseek2_mscale": ("DeepseekV3Config", "DeepseekV3ForCausalLM",
                         {**LATENT, "q_lora_rank": 40, "n_routed_experts": 5, "n_group": 1, "topk_group": 1,
                          "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 0,
                          "norm_topk_prob": False, "routed_scaling_factor": 0.6, "hidden_act": "gelu",
                          "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                              "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                                              "mscale_all_dim": 0.4, "original_max_position_embeddings": 100}}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "smollm3_biased": ("SmolLM3Config", "SmolLM3ForCausalLM",
                       {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    "smollm3_window": ("SmolLM3Config", "SmolLM3ForCausalLM",
                       {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 40}),
    "smollm3_interval": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "granite": ("GraniteConfig", "GraniteForCausalLM",
                {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                 "logits_scaling": 4.0}),
    "granite_biased": ("GraniteConfig", "GraniteForCausalLM",
                       {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                        "logits_scaling": 4.0, "attention_bias": True, "mlp_bias": True}),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
                       {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                        "logits_scaling": 4.0, "num_local_experts": 0, "num_experts_per_tok": 0,
                        "shared_intermediate_size": 112, "position_embedding_type": "rope", "mamba_n_heads": 8}),
    "granitehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
                      {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                       "logits_scaling": 4.0, "num_local_experts": 5, "num_experts_per_tok": 2,
                       "shared_intermediate_size": 56, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 21}),
    "granitehybrid_dense": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
                            {"attention_multiplier": 0.1, "num_local_experts": 0, "num_experts_per_tok": 0,
                             "shared_intermediate_size": 112, "position_embedding_type": "rope", "mamba_n_heads": 3,
                             "mamba_expand": 1, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_conv_bias": False,
                             "mamba_proj_bias": True, "attention_bias": True, "time_step_limit": (0.4, 0.9)}),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM",
                   {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                    "logits_scaling": 4.0, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe_shared": ("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM",
                          {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                           "logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 3,
                           "shared_intermediate_size": 80, "attention_bias": True}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 90}),
    "phi3_partial": ("Phi3Config", "Phi3ForCausalLM",
                     {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                          "partial_rotary_factor": 0.75}}),
    "phi3_long": ("Phi3Config", "Phi3ForCausalLM",
                  {"original_max_position_embeddings": 100,
                   "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                                       "original_max_position_embeddings": 100,
                                       "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.6],
                                       "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0]}}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM",
               {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 90, "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 8.0, "attn_implementation": "eager"}),
    "gemma2_scalar": ("Gemma2Config", "Gemma2ForCausalLM",
                      {"head_dim": 16, "query_pre_attn_scalar": 40, "sliding_window": 20,
                       "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2_biased": ("Gemma2Config", "Gemma2ForCausalLM",
                      {"head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 90, "attention_bias": True,
                       "hidden_activation": "gelu", "attn_implementation": "eager"}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM",
               {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 60,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "gemma3_types": ("Gemma3TextConfig", "Gemma3ForCausalLM",
                     {"head_dim": 16, "query_pre_attn_scalar": 30, "sliding_window": 30,
                      "attn_logit_softcapping": 2.0,  # transformers ignores it
                      "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5},
                                          "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM",
                {"head_dim": 16, "sliding_window": 60, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 1,
                 "laurel_rank": 64, "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0],
                 "final_logit_softcapping": 8.0,
                 "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5},
                                     "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM",
               {"head_dim": 20, "global_head_dim": 36, "sliding_window": 60, "hidden_size_per_layer_input": 12,
                "num_kv_shared_layers": 1, "use_double_wide_mlp": True, "final_logit_softcapping": 8.0,
                "rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 5e5,
                                                       "partial_rotary_factor": 0.25},
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}),
    "gemma4_keys": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM",
                    {"head_dim": 32, "global_head_dim": 26, "num_key_value_heads": 3, "num_global_key_value_heads": 2,
                     "attention_k_eq_v": True, "sliding_window": 30, "final_logit_softcapping": 9.0}),
    "gemma4_experts": ("Gemma4TextConfig", "Gemma4ForCausalLM",
                       {"head_dim": 16, "global_head_dim": 32, "sliding_window": 60, "hidden_size_per_layer_input": 0,
                        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
                        "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 48}),
    "gemma4_biased": ("Gemma4TextConfig", "Gemma4ForCausalLM",
                      {"head_dim": 16, "global_head_dim": 16, "sliding_window": 40, "hidden_size_per_layer_input": 8,
                       "num_kv_shared_layers": 1, "attention_bias": True, "hidden_activation": "gelu"}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "olmo2_biased": ("Olmo2Config", "Olmo2ForCausalLM", {"attention_bias": True, "hidden_act": "gelu"}),
    "olmo2_3": ("Olmo3Config", "Olmo3ForCausalLM",
                {"sliding_window": 60, "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "rope_theta": 3e4, "factor": 4.0,
                                       "original_max_position_embeddings": 100},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}}),
    "olmo2_3_own": ("Olmo3Config", "Olmo3ForCausalLM",
                    {"sliding_window": 30, "attention_bias": True, "rope_parameters": {
                        "full_attention": {"rope_type": "default", "rope_theta": 3e4},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 2e3}}}),
    "llama_mixtral": ("MixtralConfig", "MixtralForCausalLM",
                      {"head_dim": 20, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "mistral3": ("Ministral3Config", "Ministral3ForCausalLM",
                 {"head_dim": 20, "rope_parameters": {
                     "rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 60,
                     "llama_4_scaling_beta": 0.3}}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 20, "partial_rotary_factor": 0.6}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"head_dim": 20}),
    "ernie4_5_biased": ("Ernie4_5Config", "Ernie4_5ForCausalLM",
                        {"head_dim": 12, "use_bias": True, "hidden_act": "gelu"}),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM",
                {"sliding_window": None,
                 "rope_parameters": {"rope_type": "llama3", "rope_theta": 30000.0, "factor": 8.0,
                                     "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                     "original_max_position_embeddings": 64}}),
    "exaone4_window": ("Exaone4Config", "Exaone4ForCausalLM",
                       {"head_dim": 20, "sliding_window": 60,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}}),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {"head_dim": 20}),
    "seed_oss_biased": ("SeedOssConfig", "SeedOssForCausalLM",
                        {"head_dim": 12, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM",
                {"sliding_window": 60, "logit_scale": 0.7, "layer_norm_eps": 1e-3,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
    "cohere2_biased": ("Cohere2Config", "Cohere2ForCausalLM",
                       {"sliding_window": 30, "logit_scale": 1.3, "attention_bias": True, "hidden_act": "gelu"}),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM",
             {"norm_eps": 1e-4, "block_auto_adjust_ff_dim": False,
              "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "lfm2_biased": ("Lfm2Config", "Lfm2ForCausalLM",
                    {"conv_bias": True, "conv_L_cache": 5, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "lfm2moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM",
                {"norm_eps": 1e-4, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                 "num_dense_layers": 1,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "lfm2moe_plain": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM",
                      {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "num_dense_layers": 0,
                       "use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True,
                       "routed_scaling_factor": 1.7}),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM",
             {"head_dim": 20, "sliding_window": 60, "rms_norm_eps": 1e-4, "rope_parameters": {
                 "full_attention": {"rope_type": "proportional", "rope_theta": 3e4, "partial_rotary_factor": 0.35},
                 "sliding_attention": {"rope_type": "default", "rope_theta": 2e3}}}),
    "lfm3_plain": ("Lfm3Config", "Lfm3ForCausalLM",
                   {"head_dim": 26, "sliding_window": 30, "conv_bias": True, "conv_L_cache": 5,
                    "use_attention_gate": False, "rope_parameters": {
                        "full_attention": {"rope_type": "proportional", "rope_theta": 3e4, "factor": 1.7},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 2e3}}}),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM",
                   {"head_dim": 16, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                    "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 1.7, "mamba_num_heads": 4,
                    "mamba_head_dim": 19, "n_groups": 2, "ssm_state_size": 21,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "nemotron_h_latent": ("NemotronHConfig", "NemotronHForCausalLM",
                          {"head_dim": 16, "n_routed_experts": 7, "num_experts_per_tok": 3, "moe_latent_size": 40,
                           "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 28,
                           "routed_scaling_factor": 2.5, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "nemotron_h_dense": ("NemotronHConfig", "NemotronHForCausalLM",
                         {"head_dim": 26, "moe_latent_size": 56, "n_routed_experts": 6, "num_experts_per_tok": 2,
                          "n_group": 3, "topk_group": 2, "moe_intermediate_size": 24,
                          "moe_shared_expert_intermediate_size": 28, "norm_topk_prob": False, "mlp_bias": True,
                          "routed_scaling_factor": 1.3}),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM",
                  {"mamba_d_ssm": 76, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 21,
                   "mamba_rms_norm": True, "mamba_norm_before_gate": False, "embedding_multiplier": 3.0,
                   "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
                   "attention_out_multiplier": 0.6, "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.4,
                   "mlp_multipliers": [1.2, 0.7], "ssm_multipliers": [0.6, 1.1, 0.9, 1.3, 0.5]}),
    "falcon_h1_plain": ("FalconH1Config", "FalconH1ForCausalLM",
                        {"mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_d_state": 5, "mamba_d_conv": 3,
                         "mamba_conv_bias": False, "mlp_multipliers": [0.8, 1.5]}),
    "bamba": ("BambaConfig", "BambaForCausalLM",
              {"attn_layer_indices": [0], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 21,
               "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "bamba_biased": ("BambaConfig", "BambaForCausalLM",
                     {"attn_layer_indices": [0, 2], "mamba_n_heads": 3, "mamba_expand": 1, "mamba_d_state": 5,
                      "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True, "attention_bias": True,
                      "mlp_bias": True, "time_step_limit": (0.4, 0.9),
                      "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0,
                                          "partial_rotary_factor": 0.75}}),
}
#: Layer types of models whose default pattern would need more layers.
LAYER_TYPES = {**dict.fromkeys(("gemma3n", "gemma4", "gemma4_keys", "gemma4_experts", "gemma4_biased"),
                               ["sliding_attention", "full_attention"] * 2),
               "gemma3_types": ["full_attention", "sliding_attention", "full_attention"],
               "olmo2_3_own": ["full_attention", "sliding_attention", "full_attention"],
               "olmo2_3": ["full_attention", "sliding_attention", "full_attention"],
               "exaone4_window": ["full_attention", "sliding_attention", "full_attention"],
               "exaone4": ["full_attention"] * 3,
               "granite_hybrid": ["attention"] * 3,
               "granitehybrid": ["full_attention", "linear_attention", "linear_attention"],
               "granitehybrid_dense": ["full_attention", "linear_attention", "full_attention"],
               "nemotron_h": ["full_attention", "linear_attention", "moe"],
               "nemotron_h_latent": ["full_attention", "linear_attention", "moe"],
               "nemotron_h_dense": ["full_attention", "moe", "mlp"],
               "cohere2_biased": ["full_attention", "sliding_attention", "full_attention"],
               "qwen3next": ["full_attention", "linear_attention", "linear_attention"],
               "qwen35": ["full_attention", "linear_attention", "linear_attention"],
               "qwen35_biased": ["full_attention", "full_attention", "linear_attention"],
               "qwen35moe": ["full_attention", "linear_attention", "full_attention"],
               "lfm2": ["full_attention", "conv", "full_attention"], "lfm2_biased": ["full_attention", "conv", "conv"],
               "lfm3": ["full_attention", "conv", "sliding_attention"],
               "lfm3_plain": ["sliding_attention", "full_attention", "conv"],
               "lfm2moe": ["full_attention", "conv", "conv"], "lfm2moe_plain": ["full_attention", "conv", "conv"]}

#: Decoders that GGUF files cannot represent, or usually do not: windows, their layers, or scales are missing there.
FOLDERS_ONLY = ("gpt_oss_limit", "deepseek2_mscale", "llama_dynamic", "llama_longrope", "llama_heads100",
                "llama_heads2", "qwen3_biased", "qwen3moe_dense", "qwen3moe_step", "smollm3_biased", "gemma2_biased",
                "llama_mistral", "qwen2_window", "qwen3moe_shares", "smollm3_interval", "smollm3_window",
                "qwen2moe_dense", "granite_hybrid", "gemma2_scalar", "gemma3_types", "olmo2_biased", "cohere2_biased",
                "lfm2_biased", "qwen35_biased", "lfm2moe_plain", "granitehybrid_dense", "nemotron_h_dense",
                "gemma4_biased",
                "olmo2_3_own", "lfm3", "lfm3_plain", "ernie4_5_biased", "seed_oss_biased", "falcon_h1_plain", "bamba",
                "bamba_biased")
#: Decoders whose GGUF files never have an output matrix: they use the token embedding.
TIED = ("gemma2", "cohere2", "lfm2", "lfm2moe")
#: Number of layers that a model needs to have a layer of every type.
LAYERS = {"smollm3": 5, "gemma3": 7, "gemma3n": 4, "gemma4": 4, "cohere2": 5, "nemotron_h": 3, "nemotron_h_latent": 3}


#: Default of ``initializer_range`` in transformers, which only training uses.
_RANGE = 0.02


#: Beginnings of the ``model_type`` of models whose norms multiply by 1 + weight. With weights near 1, queries and keys
#: would double, and attention would amplify rounding errors.
CENTRED = ("qwen3_next", "qwen3_5")


def randomise(model: Any, seed: int) -> None:
    """Randomise all weights, including norms and biases: ones and zeros would hide a missing term."""
    generator = torch.Generator().manual_seed(seed)
    centred = getattr(getattr(model, "config", None), "model_type", "").startswith(CENTRED)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            near_one = "norm" in name.lower() and name.endswith("weight") \
                and ("linear_attn" in name or not centred)
            parameter.data = (1 + 0.3 * noise) if near_one else 0.3 * noise
        else:
            parameter.data = noise * (0.5 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5)
        if name.endswith("experts.gate_up_proj") and model.config.model_type == "gpt_oss":
            parameter.data *= model.config.initializer_range / _RANGE  # a larger one reaches the clamp
    correct(model)


def correct(model: Any) -> None:
    """Randomise the weights that are buffers and not parameters: corrections of expert scores, factors of layers."""
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("layer_scalar"):
            buffer.copy_(0.7 + 0.2 * torch.randn(buffer.shape, generator=generator))


def find_class(name: str) -> Any:
    """Return a class of OWN, or of transformers."""
    return OWN.get(name) or getattr(transformers, name)


def decoder(family: str, layers: int, hidden: int = 96, vocab: int = 96, tie: bool = False, positions: int = 400,
            **more: Any) -> Any:
    """Create a causal language model of one of DECODERS with the initial weights of transformers. ``more`` overrides
    settings of DECODERS."""
    config_class, model_class, extra = DECODERS[family]
    if family in LAYER_TYPES:
        extra = {**extra, "layer_types": LAYER_TYPES[family][:layers]}
    if "attn_layer_indices" in extra:
        extra = {**extra, "attn_layer_indices": [i for i in extra["attn_layer_indices"] if i < layers]}
    if "num_kv_shared_layers" in extra:
        extra = {**extra, "num_kv_shared_layers": max(0, layers - 2)}
    if extra.get("hidden_size_per_layer_input"):
        extra = {**extra, "vocab_size_per_layer_input": vocab}
    if "activation_sparsity_pattern" in extra:
        extra = {**extra, "activation_sparsity_pattern": extra["activation_sparsity_pattern"][:layers]}
    extra = {**extra, **more}
    config = find_class(config_class)(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=160 if family == "gpt_oss" else 144,
        num_hidden_layers=layers, max_position_embeddings=positions, tie_word_embeddings=tie,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
        **{"rms_norm_eps": 1e-5, "num_attention_heads": 6, "num_key_value_heads": 2, **extra})
    return find_class(model_class)(config).eval()


def bert(layers: int) -> Any:
    """Create a BERT without pooler, with 211 tokens and 70 positions."""
    config = transformers.BertConfig(vocab_size=211, hidden_size=48, num_hidden_layers=layers, num_attention_heads=3,
                                     intermediate_size=100, max_position_embeddings=70, hidden_act="gelu",
                                     layer_norm_eps=1e-6)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a valid tokenizer of the right size. Its content is irrelevant: these tests submit ids."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w0"}))


def save_mxfp4(model: Any, folder: Path) -> None:
    """Save a GPT-OSS with its experts in MXFP4, as OpenAI publishes them. Replaces the weights of ``model`` by the
    values that transformers unpacks from them."""
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors.pop(name).transpose(1, 2).contiguous().float().numpy()
        stored = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.MXFP4)
        stored = torch.tensor(stored).reshape(*rows.shape[:2], -1, 17)
        codes = torch.cat([stored[..., 1:] & 15, stored[..., 1:] >> 4], dim=-1)  # 0 ... 31
        packed = {"blocks": (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous(),
                  "scales": stored[..., 0].contiguous()}
        for part, values in packed.items():
            tensors[f"{name}_{part}"] = values
        values = convert_moe_packed_tensors(packed["blocks"], packed["scales"], dtype=torch.float32)
        model.get_parameter(name).data = values.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
