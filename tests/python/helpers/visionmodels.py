"""Tiny vision language models, created and saved by transformers, and their reference inputs."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from PIL import Image

from imagemodels import image as image
from mpool.images import tiling
from mpool.models import ImageSettings
from mpool.models.spec import VisionSettings
from paritymodels import torch, transformers

VOCAB, IMAGE, EOS = 160, 159, 2
_VISION = {"hidden_size": 48, "intermediate_size": 88, "num_attention_heads": 3, "image_size": 40, "patch_size": 8}
_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": VOCAB, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": EOS,
         "pad_token_id": 0, "rms_norm_eps": 1e-5}
#: Family -> configuration and model class in transformers, model_type of image encoder and decoder, further settings.
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {"config": "LlavaConfig", "model": "LlavaForConditionalGeneration", "encoder": "clip_vision_model",
              "text": "llama", "more": {}},
    "llava_uneven": {"config": "LlavaConfig", "model": "LlavaForConditionalGeneration", "encoder": "clip_vision_model",
                     "text": "llama", "more": {}, "vision": {"image_size": 44}},  # half a patch is left
    "llava_full": {"config": "LlavaConfig", "model": "LlavaForConditionalGeneration", "encoder": "clip_vision_model",
                   "text": "qwen2", "more": {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}},
    "llava_siglip": {"config": "LlavaConfig", "model": "LlavaForConditionalGeneration",
                     "encoder": "siglip_vision_model", "text": "mistral",
                     "more": {"vision_feature_select_strategy": "full", "projector_hidden_act": "relu"}},
    "llava_next": {"config": "LlavaNextConfig", "model": "LlavaNextForConditionalGeneration",
                   "encoder": "clip_vision_model", "text": "mistral",
                   "more": {"image_grid_pinpoints": [[40, 80], [80, 40], [80, 80], [120, 40]]}},
    "smolvlm": {"config": "SmolVLMConfig", "model": "SmolVLMForConditionalGeneration", "encoder": "smolvlm_vision",
                "text": "llama", "more": {"scale_factor": 2}, "vision": {"image_size": 32}},
    "idefics3": {"config": "Idefics3Config", "model": "Idefics3ForConditionalGeneration", "encoder": "idefics3_vision",
                 "text": "llama", "more": {"scale_factor": 4}, "vision": {"image_size": 32}},
    # the window is smaller than the rows of an image
    "gemma3": {"config": "Gemma3Config", "model": "Gemma3ForConditionalGeneration", "encoder": "siglip_vision_model",
               "text": "gemma3_text", "vision": {"image_size": 48, "layer_norm_eps": 1e-3},
               "more": {"mm_tokens_per_image": 9, "boi_token_index": 158, "eoi_token_index": 157}},
    # the rows of an image see each other in layers with a window, which is smaller
    "gemma4": {"config": "Gemma4Config", "model": "Gemma4ForConditionalGeneration", "encoder": "gemma4_vision",
               "text": "gemma4_text", "vision": {"standardize": True}, "decoder": {
                   "head_dim": 20, "global_head_dim": 24, "use_bidirectional_attention": "vision",
                   "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}},
    # as the small models: causal, with inputs per layer and bounded parts
    "gemma4_small": {"config": "Gemma4Config", "model": "Gemma4ForConditionalGeneration", "encoder": "gemma4_vision",
                     "text": "gemma4_text", "vision": {"use_clipped_linears": True},
                     "decoder": {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 12,
                                 "vocab_size_per_layer_input": 160}},
    "gemma4_unified": {"config": "Gemma4UnifiedConfig", "model": "Gemma4UnifiedForConditionalGeneration",
                       "encoder": "gemma4_unified_vision", "text": "gemma4_unified_text",
                       "decoder": {"head_dim": 16, "global_head_dim": 20}},
    # the table of positions is smaller than some images, and larger than others in one direction
    "lfm2_vl": {"config": "Lfm2VlConfig", "model": "Lfm2VlForConditionalGeneration", "encoder": "siglip2_vision_model",
                "text": "lfm2", "more": {"downsample_factor": 2, "projector_hidden_size": 56},
                "vision": {"num_patches": 25, "layer_norm_eps": 1e-3}},
    "pixtral": {"config": "LlavaConfig", "model": "LlavaForConditionalGeneration", "encoder": "pixtral",
                "text": "mistral", "vision": {"image_size": 96, "hidden_act": "silu"},
                "more": {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}},
    "mistral3": {"config": "Mistral3Config", "model": "Mistral3ForConditionalGeneration", "encoder": "pixtral",
                 "text": "ministral3", "vision": {"image_size": 96, "hidden_act": "silu"},
                 "more": {"tie_word_embeddings": False}},
    "internvl": {"config": "InternVLConfig", "model": "InternVLForConditionalGeneration", "encoder": "internvl_vision",
                 "text": "qwen2", "more": {"tie_word_embeddings": False},
                 "vision": {"image_size": 48, "attention_bias": True, "layer_norm_eps": 1e-3}},
    "qwen2_vl": {"config": "Qwen2VLConfig", "model": "Qwen2VLForConditionalGeneration"},
    "qwen2_5_vl": {"config": "Qwen2_5_VLConfig", "model": "Qwen2_5_VLForConditionalGeneration"},
    "qwen3_vl": {"config": "Qwen3VLConfig", "model": "Qwen3VLForConditionalGeneration"},
    "qwen3_vl_moe": {"config": "Qwen3VLMoeConfig", "model": "Qwen3VLMoeForConditionalGeneration",
                     "experts": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}},
    "qwen3_5": {"config": "Qwen3_5Config", "model": "Qwen3_5ForConditionalGeneration"},
    "qwen3_5_moe": {"config": "Qwen3_5MoeConfig", "model": "Qwen3_5MoeForConditionalGeneration",
                    "experts": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                                "shared_expert_intermediate_size": 24}},
}
QWEN = tuple(name for name in FAMILIES if name.startswith("qwen"))
GEMMA4 = tuple(name for name in FAMILIES if name.startswith("gemma4"))
#: Tokens of the prompt that stand beside images.
MARKS = {"gemma3": ["<start_of_image>", "<end_of_image>"], **dict.fromkeys(GEMMA4, ["<|image>", "<image|>"]),
         **dict.fromkeys(("pixtral", "mistral3"), ["[IMG_BREAK]", "[IMG_END]"]),
         "internvl": ["<img>", "</img>"],
         "lfm2_vl": ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
                     *(f"<|img_row_{y}_col_{x}|>" for y in (1, 2, 3, 4) for x in (1, 2, 3, 4))],
         **dict.fromkeys(("smolvlm", "idefics3"), ["<fake_token_around_image>", "<global-img>",
                                                   *(f"<row_{y}_col_{x}>" for y in (1, 2, 3) for x in (1, 2, 3))])}
TEMPLATE = ("{% for message in messages %}{{ message['role'] }} : {% for part in message['content'] | "
            "selectattr('type', 'equalto', 'image') %}{{ '<image> ' }}{% endfor %}{% for part in message['content'] | "
            "selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
            "{% if add_generation_prompt %}assistant : {% endif %}")
#: Family -> its preprocessor_config.json. The size of a tile is 40.
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 40},
              "crop_size": {"height": 40, "width": 40}, "do_center_crop": True, "resample": 3},
    "llava_uneven": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 44},
                     "crop_size": {"height": 44, "width": 44}, "do_center_crop": True, "resample": 3},
    "llava_full": {"image_processor_type": "LlavaImageProcessor", "size": {"shortest_edge": 40}, "do_pad": True,
                   "crop_size": {"height": 40, "width": 40}, "do_center_crop": True, "resample": 3},
    "llava_siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 40, "width": 40},
                     "resample": 2},
    "llava_next": {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 40}, "resample": 3,
                   "crop_size": {"height": 40, "width": 40},
                   "image_grid_pinpoints": [[40, 80], [80, 40], [80, 80], [120, 40]]},
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 96}, "resample": 1,
                "max_image_size": {"longest_edge": 32}, "do_image_splitting": True, "do_pad": True},
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 96}, "resample": 1,
                 "max_image_size": {"longest_edge": 32}, "do_image_splitting": False, "do_pad": True},
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 48, "width": 48},
               "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 3,
               "pan_and_scan_min_ratio_to_activate": 1.5},
    **{name: {"image_processor_type": f"Gemma4{'Unified' * (name == 'gemma4_unified')}ImageProcessor", "resample": 3,
              "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70, "do_normalize": False}
       for name in GEMMA4},
    "lfm2_vl": {"image_processor_type": "Lfm2VlImageProcessor", "tile_size": 32, "min_tiles": 2, "max_tiles": 4,
                "min_image_tokens": 4, "max_image_tokens": 8, "encoder_patch_size": 8, "resample": 2},
    **dict.fromkeys(("pixtral", "mistral3"), {"image_processor_type": "PixtralImageProcessor", "resample": 3,
                                              "size": {"longest_edge": 96}, "patch_size": {"height": 8, "width": 8}}),
    "internvl": {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 48, "width": 48}, "resample": 3,
                 "max_patches": 4},
    **dict.fromkeys(QWEN, {"image_processor_type": "Qwen2VLImageProcessor", "resample": 3, "patch_size": 4,
                           "merge_size": 2, "temporal_patch_size": 2,
                           "size": {"shortest_edge": 400, "longest_edge": 6000}}),
}


def make(family: str, layers: int = 2, encoder_layers: int = 3, **more: Any) -> Any:
    """Create a model with ``layers`` decoder layers and ``encoder_layers`` layers of the image encoder."""
    row = FAMILIES[family]
    if family in QWEN:
        return _qwen(family, layers, encoder_layers)
    if family in GEMMA4:
        return _gemma4(family, layers, encoder_layers)
    vision = {**_VISION, **row.get("vision", {}), "model_type": row["encoder"], "num_hidden_layers": encoder_layers}
    text = {**_TEXT, "model_type": row["text"], "num_hidden_layers": layers}
    if row["text"] == "mistral":
        text["sliding_window"] = 100
    if family == "lfm2_vl":
        del vision["image_size"]
        text |= {"norm_eps": text.pop("rms_norm_eps"), "block_auto_adjust_ff_dim": False,
                 "layer_types": ["conv", "full_attention"][-layers:]}
    if family == "mistral3":
        text["head_dim"] = 20
    if family == "gemma3":
        text |= {"head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 6,
                 "layer_types": ["sliding_attention", "full_attention"][-layers:]}
    config = getattr(transformers, row["config"])(vision_config=vision, text_config=text, image_token_id=IMAGE,
                                                  **{**row["more"], **more})
    model = getattr(transformers, row["model"])(config).eval()
    model.mpool_family = family
    return model


def _gemma4(family: str, layers: int, encoder_layers: int) -> Any:
    row = FAMILIES[family]
    vision = {"patch_size": 4, "pooling_kernel_size": 3}
    if family == "gemma4_unified":
        vision |= {"mm_embed_dim": 44, "output_proj_dims": 44, "mm_posemb_size": 80}
    else:
        vision |= {"hidden_size": 48, "intermediate_size": 88, "num_attention_heads": 3, "num_key_value_heads": 3,
                   "head_dim": 16, "num_hidden_layers": encoder_layers, "position_embedding_size": 230,
                   "rms_norm_eps": 1e-3}
    text = {**_TEXT, "num_hidden_layers": layers, "sliding_window": 6, **row["decoder"],
            "layer_types": ["sliding_attention", "full_attention"][-layers:]}
    config = getattr(transformers, row["config"])(
        vision_config={**vision, **row.get("vision", {})}, text_config=text, audio_config=None, image_token_id=IMAGE,
        boi_token_id=158, eoi_token_id=157, video_token_id=156, audio_token_id=155)
    model = getattr(transformers, row["model"])(config).eval()
    model.mpool_family = family
    return model


def _qwen(family: str, layers: int, encoder_layers: int) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**_TEXT, "num_hidden_layers": layers, "rope_parameters": rope}
    vision = {"depth": encoder_layers, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 48, "mlp_ratio": 2, "hidden_size": 64}
    else:
        vision |= {"hidden_size": 48, "intermediate_size": 88, "out_hidden_size": 64}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 24, "fullatt_block_indexes": [1]}
    row = FAMILIES[family]
    if family.startswith("qwen3"):  # images have more and fewer patches per side than the table of positions
        vision["num_position_embeddings"] = 100
        text |= {"head_dim": 20, **row.get("experts", {}),
                 "rope_parameters": {**rope, "mrope_section": [4, 3, 3], "mrope_interleaved": True}}
    if family.startswith("qwen3_vl"):
        vision["deepstack_visual_indexes"] = [i for i in (0, 2)[:layers] if i < encoder_layers]
    if family.startswith("qwen3_5"):
        text |= {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"][-layers:],
                 "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
                 "linear_num_value_heads": 4}
        text["rope_parameters"] |= {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
    config = getattr(transformers, row["config"])(
        vision_config=vision, text_config=text, image_token_id=IMAGE, vision_start_token_id=158,
        vision_end_token_id=157, video_token_id=156)
    model = getattr(transformers, row["model"])(config).eval()
    model.mpool_family = family
    return model


def randomised(family: str, layers: int = 2, encoder_layers: int = 3, seed: int = 5, **more: Any) -> Any:
    """Create a model with random norms, biases and positions."""
    return fill(make(family, layers, encoder_layers, **more), seed)


def fill(model: Any, seed: int) -> Any:
    """Fill a model with random weights, norms, biases and positions."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if any(word in name for word in ("position", "pos_embed", "class_embedding", "newline")):
            parameter.data = noise
        elif parameter.dim() < 2:
            parameter.data = 1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.3 * noise
        else:
            parameter.data = noise * (0.5 if "embed_tokens" in name else 1.5 / parameter[0].numel() ** 0.5)
    for name, buffer in model.named_buffers():
        noise = torch.randn(buffer.shape, generator=generator)
        if name.endswith(("std_bias", "std_scale")):
            buffer.data = 1 + 0.3 * noise
        elif name.endswith(("_min", "_max")):  # bounds that some values exceed
            least = 0.2 if "o_proj." in name or "down_proj." in name else 0.6
            buffer.data = (1 + 0.3 * noise.abs()) * (-least if name.endswith("_min") else least)
    return model


def cut(model: Any, family: str, layers: int) -> Any:
    """Return the model with only the first ``layers`` layers of the image encoder."""
    if hasattr(model.config, "vision_feature_layer"):
        model.config.vision_feature_layer = layers
        return model
    part = make(family, model.config.text_config.num_hidden_layers, layers)
    part.load_state_dict({name: value for name, value in model.state_dict().items() if name in part.state_dict()})
    return part


def transpose_experts(folder: Path) -> None:
    """Transpose the matrices of all experts, as in published folders of Qwen3-VL. Transformers 5 saves them as they
    are in its class."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name: value.transpose(1, 2).contiguous() if ".mlp.experts." in name else value
               for name, value in load_file(path).items()}, path, {"format": "pt"})


def save(model: Any, family: str, folder: Path) -> Path:
    """Save a model with its processor configuration, a tokenizer of words and a chat template."""
    pytest.importorskip("tokenizers")
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        transpose_experts(folder)
    special = {"<unk>": 0, "<s>": 1, "</s>": EOS, "<image>": IMAGE}
    special |= {name: IMAGE - 1 - at for at, name in enumerate(MARKS.get(family, ()))}
    words = {f"w{i}": i for i in range(VOCAB) if i not in special.values()} | special | {"user": 3, "assistant": 4,
                                                                                        ":": 5, "system": 6}
    words = {word: i for word, i in words.items() if word not in ("w3", "w4", "w5", "w6")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "eos_token": "</s>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    # Prompts of these models have a token before and after each image.
    mark = {"gemma3": "<start_of_image>", **dict.fromkeys(QWEN, "w20 <image> w21")}.get(family, "<image>")
    template = TEMPLATE.replace("<image>", mark)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return folder


def make_embedder(folder: Path, scores: bool = False, **kwargs: Any) -> Path:
    """Make a saved model an embedding model, or a reranker, of sentence-transformers, with a prompt for queries.
    ``kwargs``: further keys of ``processing_kwargs``."""
    package, pooling = "sentence_transformers", "sentence_transformer.modules.pooling.Pooling"
    kinds = ["base.modules.transformer.Transformer", *(
        ["cross_encoder.modules.logit_score.LogitScore"] if scores else [pooling, "base.modules.normalize.Normalize"])]
    output = {"method": "forward", "method_output_name": "logits" if scores else "last_hidden_state"}
    files: dict[str, Any] = {
        "modules.json": [{"idx": at, "name": str(at), "path": f"{at}_module" if at else "", "type": f"{package}.{kind}"}
                         for at, kind in enumerate(kinds)],
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder" if scores else "SentenceTransformer", "prompts": {"query": "w30 w31"}},
        "sentence_bert_config.json": {
            "transformer_task": "any-to-any" if scores else "feature-extraction",
            "modality_config": {"text": output, "image": output, "message": {**output, "format": "structured"}},
            "module_output_name": "causal_logits" if scores else "token_embeddings", "max_seq_length": 300,
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}, **kwargs}},
        "1_module/config.json": {"true_token_id": 50, "false_token_id": 60} if scores else
        {"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}}
    tokenizer = folder / "tokenizer.json"  # truncation needs two different texts of one token
    tokenizer.write_text(tokenizer.read_text().replace('"w13"', '"0"').replace('"w14"', '"a"'))
    (folder / "1_module").mkdir()
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return folder


#: Renders parts in order without a separator, as the template of EmbeddingGemma 2.
PARTS_TEMPLATE = ("{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
                  "<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}")


def embedding_gemma2(folder: Path) -> Any:
    """Create EmbeddingGemma 2 and save it as an embedding model of sentence-transformers. Texts get ``<s>`` and
    ``</s>``. Its images are prepared as those of Gemma 4."""
    from tokenizers import Tokenizer, processors

    text = {**_TEXT, "hidden_size": 60, "intermediate_size": 92, "num_hidden_layers": 5, "sliding_window": 5,
            "head_dim": 20, "global_head_dim": 24, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 12,
            "embedding_dim": 44, "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "default", "rope_theta": 9000.0}}}
    vision = {"patch_size": 4, "pooling_kernel_size": 3, "hidden_size": 48, "intermediate_size": 88,
              "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "num_hidden_layers": 3,
              "position_embedding_size": 230, "rms_norm_eps": 1e-3, "standardize": True, "use_clipped_linears": True}
    config = transformers.EmbeddingGemma2Config(
        vision_config={"model_type": "gemma4_vision", **vision}, text_config=text, audio_config=None,
        image_token_id=IMAGE, boi_token_id=158, eoi_token_id=157, video_token_id=156, audio_token_id=155)
    model = fill(transformers.EmbeddingGemma2Model(config).eval(), 5)
    for at, one in enumerate(model.language_model.layers):
        one.layer_scalar.fill_(0.7 + 0.1 * at)
        one.self_attn.q_norm.weight.data *= 0.4  # without a scale, sharp attention magnifies rounding
    model.mpool_family = "gemma4"
    save(model, "gemma4", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS_TEMPLATE}))
    make_embedder(folder)
    output = {"method": "forward", "method_output_name": "last_hidden_state"}
    pooling = {"embedding_dimension": text["embedding_dim"], "pooling_mode": "mean"}
    for name, value in (("1_module/config.json", pooling), ("sentence_bert_config.json", {
                            "transformer_task": "feature-extraction", "module_output_name": "token_embeddings",
                            "modality_config": {**dict.fromkeys(("text", "image", "audio", "video"), output),
                                                "message": {**output, "format": "structured"}}}),
                        ("config_sentence_transformers.json", {"prompts": {"query": "w30 w31 ", "document": "w32 "}})):
        (folder / name).write_text(json.dumps(value))
    return model


def processor(family: str, **more: Any) -> Any:
    """Return the transformers processor of a family, in its Pillow version if there is one, with the options that the
    processor of the model passes."""
    own: dict[str, Any] = {"mistral3": {"patch_size": 16}, "internvl": {"crop_to_patches": True}}.get(family, {})
    config = {**PROCESSORS[family], **own, **more}
    name = config.pop("image_processor_type")
    if family == "gemma4_unified":  # needs torchvision; Gemma 4's with larger patches and without pooling is the same
        name, config = "Gemma4ImageProcessor", {**config, "patch_size": 12, "pooling_kernel_size": 1}
    return (getattr(transformers, f"{name}Pil", None) or getattr(transformers, name))(**config)


def processed(family: str, pixels: np.ndarray, **more: Any) -> Any:
    """Return an image preprocessed by the transformers processor."""
    return processor(family, **more)(pixels, return_tensors="pt", input_data_format="channels_last")


def _lfm2(pixels: np.ndarray) -> tiling.TiledImage:
    """Return the tiles of an image and its marks as mpool makes them for the processor above."""
    size = ImageSettings(48, 64, ("exact", 32, 32), 2, None, 8, 40, True)
    return tiling.tile_image(Image.fromarray(pixels), VisionSettings(
        "marked", size, IMAGE, merge=2, pixels=(4 * 256, 8 * 256), tiles=(2, 4), excess=2.0), "image")


def _lfm2_tiles(pixels: np.ndarray) -> list[np.ndarray]:
    """Return the tiles of an image as torch's resize makes them, which torchvision calls."""
    def resized(height: int, width: int) -> np.ndarray:
        done = torch.nn.functional.interpolate(torch.from_numpy(pixels).permute(2, 0, 1)[None], (height, width),
                                               mode="bilinear", antialias=True)
        return done[0].permute(1, 2, 0).numpy()

    found = _lfm2(pixels)
    marks = re.findall(r"img_row_(\d+)_col_(\d+)", found.text(""))
    whole = [resized(*found.tiles[-1].shape[:2])]
    if not marks:
        return whole
    down, across = map(int, marks[-1])
    grid = resized(32 * down, 32 * across)
    return [grid[y:y + 32, x:x + 32] for y in range(0, 32 * down, 32) for x in range(0, 32 * across, 32)] + whole


def _lfm2_inputs(images: list[np.ndarray]) -> dict[str, Any]:
    """Return the patches of all tiles, padded, with channels last."""
    parts = [tile for pixels in images for tile in _lfm2(pixels).tiles]
    shapes = [(tile.shape[0] // 8, tile.shape[1] // 8) for tile in parts]
    values, mask = (torch.zeros(len(parts), max(h * w for h, w in shapes), *more) for more in ((192,), ()))
    for i, (tile, (high, wide)) in enumerate(zip(parts, shapes)):
        patches = (torch.from_numpy(tile.astype(np.float32)) / 255 - 0.5) / 0.5
        values[i, :high * wide] = patches.reshape(high, 8, wide, 8, 3).transpose(1, 2).reshape(high * wide, 192)
        mask[i, :high * wide] = 1
    return {"pixel_values": values, "spatial_shapes": torch.tensor(shapes), "pixel_attention_mask": mask.int()}


def tiles(family: str, pixels: np.ndarray) -> list[np.ndarray]:
    """Return the tiles of an image before normalisation, ``[height, width, 3]`` from 0 to 255 each."""
    if family == "lfm2_vl":  # the class requires torchvision, which resizes with torch; test_tiling.py has its results
        return _lfm2_tiles(pixels)
    done = processed(family, pixels, do_rescale=False, do_normalize=False)
    values = done["pixel_values"].numpy()
    if family in QWEN:  # patches of two equal frames; the patches of a merged group are adjacent
        _, down, across = done["image_grid_thw"][0].tolist()
        values = values.reshape(down // 2, across // 2, 2, 2, 3, 2, 4, 4)[:, :, :, :, :, 0]
        return [values.transpose(0, 2, 5, 1, 3, 6, 4).reshape(down * 4, across * 4, 3)]
    if family in GEMMA4:
        side = 12 if family == "gemma4_unified" else 4
        at = done["image_position_ids"][0].numpy()
        kept = at[:, 0] >= 0
        across, down = at[kept].max(axis=0) + 1
        whole = values.reshape(-1, side, side, 3)[kept].reshape(down, across, side, side, 3)
        return [whole.transpose(0, 2, 1, 3, 4).reshape(down * side, across * side, 3)]
    return [tile.transpose(1, 2, 0) for tile in values.reshape(-1, *values.shape[-3:])]


def inputs(model: Any, ids: list[int], images: list[np.ndarray]) -> dict[str, Any]:
    """Return the arguments of the transformers model for ids (with placeholders expanded) and images."""
    family = model.mpool_family
    found: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    if family == "lfm2_vl":
        return {**found, **_lfm2_inputs(images)}
    made = [processed(family, pixels) for pixels in images]
    if family in QWEN:
        return {**found, "pixel_values": torch.cat([one["pixel_values"] for one in made]),
                "image_grid_thw": torch.cat([one["image_grid_thw"] for one in made]),
                "mm_token_type_ids": (found["input_ids"] == IMAGE).int()}
    if family in GEMMA4:
        kinds = (found["input_ids"] == IMAGE).int()
        if family == "gemma4_unified":  # the masks of its generate(), which are Gemma 4's; forward() makes other ones
            found["attention_mask"] = model.create_masks_for_generate(
                model.config, torch.zeros(1, len(ids), 64), None, None, torch.arange(len(ids))[None], kinds)
        return {**found, "pixel_values": torch.cat([one["pixel_values"] for one in made]),
                "image_position_ids": torch.cat([one["image_position_ids"] for one in made]),
                "mm_token_type_ids": kinds}
    if family in ("pixtral", "mistral3"):  # a batch has the size of its largest image
        found["image_sizes"] = torch.cat([one["image_sizes"] for one in made])
        high, wide = found["image_sizes"].max(0).values.tolist()
        for one in made:
            given = one["pixel_values"]
            one["pixel_values"] = torch.nn.functional.pad(given, (0, wide - given.shape[-1], 0,
                                                                  high - given.shape[-2]))
    found["pixel_values"] = torch.cat([one["pixel_values"].flatten(0, -4) for one in made])
    if family == "gemma3":
        found["token_type_ids"] = (found["input_ids"] == IMAGE).int()
    if family in ("smolvlm", "idefics3"):
        found["pixel_values"] = found["pixel_values"][None]
    if family == "llava_next":
        found["image_sizes"] = torch.tensor([pixels.shape[:2] for pixels in images])
    return found


def text(seed: int, words: int) -> str:
    """Return random words of the tokenizer's vocabulary."""
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(10, IMAGE, words))


if __name__ == "__main__":  # arguments: a folder, and families; without families, all of them
    for called in sys.argv[2:] or FAMILIES:
        print(save(randomised(called), called, Path(sys.argv[1]) / called))
