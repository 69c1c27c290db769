"""Writes vision models as pairs of GGUF files in the layout of llama.cpp's converters."""

from pathlib import Path
from typing import Any

import numpy as np

import tinygguf
import visionmodels
from paritymodels import transformers
from tinygguf import gguf

LLAVA = {"k_proj": "attn_k", "q_proj": "attn_q", "v_proj": "attn_v", "out_proj": "attn_out", "layer_norm1": "ln1",
         "layer_norm2": "ln2", "fc1": "ffn_up", "fc2": "ffn_down"}
OTHERS = {"embeddings.class_embedding": "v.class_embd", "embeddings.patch_embedding.weight": "v.patch_embd.weight",
          "embeddings.patch_embedding.bias": "v.patch_embd.bias", "post_layernorm.weight": "v.post_ln.weight",
          "embeddings.position_embedding.weight": "v.position_embd.weight", "pre_layrnorm.weight": "v.pre_ln.weight",
          "pre_layrnorm.bias": "v.pre_ln.bias", "post_layernorm.bias": "v.post_ln.bias"}


QWEN = {"attn.proj": "attn_out", "norm1": "ln1", "norm2": "ln2", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down", "attn.qkv": "attn_qkv"}
#: Family -> projector type, architecture of the decoder in GGUF files, name of its class and of its configuration.
QWEN_FILES = {"qwen2_vl": ("qwen2vl_merger", "qwen2vl", "Qwen2"),
              "qwen2_5_vl": ("qwen2.5vl_merger", "qwen2vl", "Qwen2"),
              "qwen3_vl": ("qwen3vl_merger", "qwen3vl", "Qwen3"),
              "qwen3_vl_moe": ("qwen3vl_merger", "qwen3vlmoe", "Qwen3Moe"),
              "qwen3_5": ("qwen3vl_merger", "qwen35", "Qwen3_5"),
              "qwen3_5_moe": ("qwen3vl_merger", "qwen35moe", "Qwen3_5Moe")}
OTHER_DECODERS = {"gemma3": "Gemma3", "gemma4": "Gemma4", "gemma4_small": "Gemma4", "gemma4_unified": "Gemma4Unified",
                  "lfm2_vl": "Lfm2", "mistral3": "Ministral3", "internvl": "Qwen2"}
#: Keys of the decoder's configuration.
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id")




def decoder(model: Any, path: Path, image: int | None = None) -> None:
    # files of Mistral are Llama's
    _, arch, family = QWEN_FILES.get(model.mpool_family, ("", None, OTHER_DECODERS.get(model.mpool_family, "Llama")))
    kind = getattr(transformers, f"{family}ForCausalLM")
    given = model.config.text_config
    if family.startswith("Gemma4"):  # the output matrix is the tied table of tokens
        text = kind(given)
        inner = model.model.language_model.state_dict()
        text.load_state_dict({**{f"model.{name}": value for name, value in inner.items()},
                              "lm_head.weight": model.lm_head.weight})
        tinygguf.write(path, text, image=image)
        return
    rope = {key: value for key, value in given.rope_parameters.items() if not key.startswith("mrope_")}
    if family.startswith(("Gemma3", "Lfm2", "Ministral3", "Qwen3")):
        values = {key: value for key, value in given.to_dict().items() if key not in ("model_type", "architectures")}
    else:
        values = {name: getattr(given, name) for name in KEYS}
    if family == "Qwen3Moe":
        values["norm_topk_prob"] = True
    text = kind(kind.config_class(**{**values, "tie_word_embeddings": False, "rope_parameters": rope}))
    inner = getattr(model.model, "language_model", None) or model.model.text_model
    text.load_state_dict({**{f"model.{name}": value for name, value in inner.state_dict().items()},
                          "lm_head.weight": model.lm_head.weight})
    tinygguf.write(path, text, image=image, vision=arch,
                   sections=given.rope_parameters["mrope_section"] if arch else None)


def qwen_projector(model: Any, path: Path) -> None:
    """Write the projector file of one of Qwen's models in the layout of llama.cpp's converter: the first matrix as two
    halves, and separate queries, keys and values before Qwen3-VL."""
    vision, network, family = model.config.vision_config, model.model.visual, model.mpool_family
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("clip.projector_type", QWEN_FILES[family][0])
    hidden, ffn = (vision.embed_dim, vision.hidden_size) if family == "qwen2_vl" else \
        (vision.hidden_size, vision.intermediate_size)
    sizes = {"image_size": 560, "patch_size": vision.patch_size, "block_count": vision.depth,
             "embedding_length": hidden, "feed_forward_length": ffn, "attention.head_count": vision.num_heads,
             "image_min_pixels": 400, "image_max_pixels": 6000, "projection_dim": model.config.text_config.hidden_size}
    if family == "qwen2_5_vl":
        writer.add_bool("clip.use_silu", True)
        sizes |= {"window_size": vision.window_size, "n_wa_pattern": vision.fullatt_block_indexes[0] + 1}
    if family.startswith("qwen3"):
        taps = getattr(vision, "deepstack_visual_indexes", ())
        writer.add_bool("clip.use_gelu", True)
        writer.add_array("clip.vision.is_deepstack_layers", [i in taps for i in range(vision.depth)])
        sizes["image_size"] = int(vision.num_position_embeddings ** 0.5) * vision.patch_size
    for key, value in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    steps = visionmodels.processor(family)
    writer.add_array("clip.vision.image_mean", [float(value) for value in steps.image_mean])
    writer.add_array("clip.vision.image_std", [float(value) for value in steps.image_std])
    for name, value in network.state_dict().items():
        parts, end = name.split("."), name.rpartition(".")[2]
        values = np.ascontiguousarray(value.numpy())
        if name == "patch_embed.proj.weight":
            writer.add_tensor("v.patch_embd.weight", np.ascontiguousarray(values[:, :, 0]))
            writer.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(values[:, :, 1]))
        elif ".qkv." in name and not family.startswith("qwen3"):
            for letter, part in zip("qkv", np.split(values, 3)):
                writer.add_tensor(f"v.blk.{parts[1]}.attn_{letter}.{end}", np.ascontiguousarray(part))
        elif parts[0] == "blocks":
            writer.add_tensor(f"v.blk.{parts[1]}.{QWEN['.'.join(parts[2:-1])]}.{end}", values)
        elif parts[0] in ("patch_embed", "pos_embed"):
            writer.add_tensor("v.patch_embd.bias" if parts[0] == "patch_embed" else "v.position_embd.weight", values)
        elif parts[0] == "deepstack_merger_list":
            layer = vision.deepstack_visual_indexes[int(parts[1])]
            writer.add_tensor(f"v.deepstack.{layer}.{parts[2].replace('linear_', '')}.{end}", values)
        elif parts[1] in ("ln_q", "norm"):
            writer.add_tensor(f"v.post_ln.{end}", values)
        elif parts[1].startswith("linear_fc"):
            writer.add_tensor(f"mm.{2 * int(parts[1][-1]) - 2}.{end}", values)
        else:
            writer.add_tensor(f"mm.{parts[2]}.{end}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GEMMA4 = {"input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
          "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm",
          "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gemma4_projector(model: Any, path: Path) -> None:
    """Write the projector file of Gemma 4 in the layout of llama.cpp's converter: inputs of a patch are ordered
    channel, line, column; the file also has tensors of an audio encoder."""
    vision, unified = model.config.vision_config, model.mpool_family == "gemma4_unified"
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("clip.vision.projector_type", "gemma4uv" if unified else "gemma4v")
    writer.add_string("clip.audio.projector_type", "gemma4a")
    sizes = {"image_size": 224, "patch_size": vision.patch_size, "block_count": 0, "embedding_length": 44,
             "feed_forward_length": 0, "attention.head_count": 0, "projection_dim": 64} if unified else {
        "image_size": 224, "patch_size": vision.patch_size, "block_count": vision.num_hidden_layers,
        "embedding_length": vision.hidden_size, "feed_forward_length": vision.intermediate_size,
        "attention.head_count": vision.num_attention_heads, "projection_dim": 64}
    for key, value in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision.rms_norm_eps)
    writer.add_array("clip.vision.image_mean", [0.0] * 3)
    writer.add_array("clip.vision.image_std", [1.0] * 3)
    writer.add_tensor("a.blk.0.attn_q.weight", np.ones((4, 4), np.float32))
    writer.add_tensor("mm.a.input_projection.weight", np.ones((4, 4), np.float32))
    side = vision.patch_size * (vision.pooling_kernel_size if unified else 1)

    def channels_first(value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(value.reshape(*value.shape[:-1], side, side, 3), -1, -3))

    named = model.model.embed_vision.state_dict() | ({} if unified else model.model.vision_tower.state_dict())
    for name, tensor in named.items():
        value, parts = tensor.numpy(), name.split(".")
        if name.startswith("encoder.layers."):
            inner, end = ".".join(parts[3:-1]).removesuffix(".linear"), parts[-1]
            name, value = f"v.blk.{parts[2]}.{GEMMA4[inner]}.{end}", np.atleast_1d(value)
        elif name.endswith("embedding_projection.weight"):
            name = "mm.input_projection.weight"
        elif name.endswith(("input_proj.weight", "patch_dense.weight")):
            name, value = "v.patch_embd.weight", channels_first(value)
            value = value.reshape(len(value), -1) if unified else value
        elif name == "patch_dense.bias":
            name = "v.patch_embd.bias"
        elif name.endswith(("position_embedding_table", "pos_embedding")):
            name, value = "v.position_embd.weight", value.transpose(1, 0, 2) if unified else value
        elif parts[0] in ("patch_ln1", "patch_ln2", "pos_norm"):
            name = f"v.patch_norm.{parts[0][-1] if parts[0] != 'pos_norm' else 3}.{parts[1]}"
            value = channels_first(value).reshape(-1) if parts[0] == "patch_ln1" else value
        else:
            name = f"v.{name}"
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


#: Parts of tensor names in projector files -> in files of Ollama's converter.
OLLAMA = {"v.position_embd.": "v.pos_embed.", "v.patch_embd.": "v.patch_embed.", ".ffn_up.": ".mlp.linear_fc1.",
          ".ffn_down.": ".mlp.linear_fc2.", ".ln1.": ".norm1.", ".ln2.": ".norm2.", "v.post_ln.": "v.merger.norm.",
          "mm.0.": "v.merger.linear_fc1.", "mm.2.": "v.merger.linear_fc2.", ".fc1.": ".linear_fc1.",
          ".fc2.": ".linear_fc2."}
OLDER = {"v.patch_embd.weight.1": "v.patch_embd_1.weight", "v.patch_embd.weight": "v.patch_embd_0.weight",
         "v.post_ln.": "v.merger.ln_q.", "mm.": "v.merger.mlp."}
#: The same for Mistral 3.
MISTRAL = {"v.patch_embd.": "v.patch_conv.", "v.pre_ln.": "v.encoder_norm.", ".attn_out.": ".attn_output.",
           ".ln1.": ".attn_norm.", ".ln2.": ".ffn_norm.", "mm.1.": "mm.linear_1.", "mm.2.": "mm.linear_2.",
           "mm.input_norm.": "mm.norm.", "mm.patch_merger.": "mm.patch_merger.merging_layer."}
#: Keys of Mistral 3 that Ollama's converter writes under another name.
MISTRAL_KEYS = {"rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
                "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
                "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
                "attention.temperature_scale": "rope.scaling_beta"}
IMAGE_KEYS = ("block_count", "embedding_length", "attention.head_count", "attention.layer_norm_epsilon", "patch_size",
              "window_size", "feed_forward_length", "projector.scale_factor")
#: The same for Gemma 3, whose keys are those of llama.cpp but for the sides of the bases of RoPE.
GEMMA = {"v.patch_embd.": "v.patch_embedding.", "v.position_embd.": "v.position_embedding.",
         "v.post_ln.": "v.post_layernorm.", ".ln1.": ".layer_norm1.", ".ln2.": ".layer_norm2.",
         ".attn_out.": ".attn_output.", ".ffn_up.": ".mlp.fc1.", ".ffn_down.": ".mlp.fc2.", "mm.": "mm.mm_"}
GEMMA_KEYS = (*IMAGE_KEYS, "image_size")
GEMMA_ROPE = {"gemma3.rope.freq_base": "gemma3.rope.global.freq_base",
              "gemma3.rope.freq_base_swa": "gemma3.rope.local.freq_base"}


def ollama(text: Path, image: Path, path: Path) -> Path:
    """Join a pair of files to one file as Ollama's converter writes it."""
    one, other = gguf.GGUFReader(text), gguf.GGUFReader(image)
    old = one.fields["general.architecture"].contents()
    arch = {"qwen2vl": "qwen25vl"}.get(old, old)
    writer = gguf.GGUFWriter(str(path), arch)
    copied = {key.replace(f"{old}.", f"{arch}.", 1): field for key, field in one.fields.items()
              if not key.startswith("GGUF.") and key != "general.architecture"}
    copied |= {f"{arch}.vision.{key}": other.fields[f"clip.vision.{key}"] for key in
               (GEMMA_KEYS if arch in ("gemma3", "mistral3") else IMAGE_KEYS) if f"clip.vision.{key}" in other.fields}
    for key, field in copied.items():
        value = field.contents()
        key = GEMMA_ROPE.get(key, key)
        if arch == "mistral3":
            key = f"{arch}.{MISTRAL_KEYS.get(key.removeprefix('mistral3.'), key.removeprefix('mistral3.'))}" \
                if key.startswith("mistral3.") else key
        if key.endswith("rope.dimension_sections"):
            key, value = f"{arch}.rope.mrope_section", value[:3]
        if arch.startswith("qwen35") and key.endswith("attention.head_count_kv"):
            writer.add_array(key, [0, value])  # the first layer has a delta net
            continue
        writer.add_key_value(key, value, field.types[0], sub_type=field.types[-1] if len(field.types) > 1 else None)
    parts = {part.name: part.data for part in other.tensors}
    names: dict[str, str] = {}
    if arch == "gemma3":
        side = copied["gemma3.vision.image_size"].contents() // copied["gemma3.vision.patch_size"].contents()
        writer.add_uint32("gemma3.mm.tokens_per_image",
                          (side // other.fields["clip.vision.projector.scale_factor"].contents()) ** 2)
        names = GEMMA
    elif arch == "gemma4":
        layers = other.fields["clip.vision.block_count"].contents()
        bounds = [parts.pop(f"v.blk.{layer}.{part}.{end}", np.zeros(1, np.float32)) for layer in range(layers)
                  for part in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
                  for end in ("input_min", "input_max", "output_min", "output_max")]
        if np.any(bounds):
            parts["v.clamp_data"] = np.concatenate([*bounds, np.zeros(4, np.float32)])
    elif arch == "qwen25vl":
        writer.add_array(f"{arch}.vision.fullatt_block_indexes",
                         [other.fields["clip.vision.n_wa_pattern"].contents() - 1])
        names = OLDER
    elif arch == "mistral3":
        writer.add_uint32(f"{arch}.spatial_merge_size", other.fields["clip.vision.spatial_merge_size"].contents())
        writer.add_float32(f"{arch}.vision.rope.freq_base", 10000.0)
        for key in ("beta_fast", "beta_slow"):  # zero without YaRN
            if f"{arch}.rope.scaling.yarn_{key}" not in copied:
                writer.add_float32(f"{arch}.rope.scaling.{key}", 0.0)
        if f"{arch}.rope.scaling.type" not in copied:
            writer.add_string(f"{arch}.rope.scaling.type", "")
        del parts["v.token_embd.img_break"]
        heads = other.fields["clip.vision.attention.head_count"].contents()
        for name, value in parts.items():
            if ".attn_q." in name or ".attn_k." in name:
                parts[name] = value.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        names = MISTRAL
    else:
        taps = [i for i, tap in enumerate(other.fields["clip.vision.is_deepstack_layers"].contents()) if tap]
        writer.add_array(f"{arch}.vision.deepstack_visual_indexes", taps)
        for old, new in (("image_mean", "image_mean"), ("image_std", "image_std")):
            writer.add_array(f"{arch}.vision.{new}", other.fields[f"clip.vision.{old}"].contents())
        for old, new in (("image_min_pixels", "shortest_edge"), ("image_max_pixels", "longest_edge")):
            writer.add_uint32(f"{arch}.vision.{new}", other.fields[f"clip.vision.{old}"].contents())
        both = np.stack([parts.pop("v.patch_embd.weight"), parts.pop("v.patch_embd.weight.1")], axis=2)
        parts["v.patch_embd.weight"] = both.reshape(-1, *both.shape[2:])
        for name in [name for name in parts if ".attn_qkv." in name]:
            for letter, value in zip("qkv", np.split(parts.pop(name), 3)):
                parts[name.replace("_qkv", f"_{letter}")] = value
        for number, layer in enumerate(taps):
            parts = {name.replace(f"v.deepstack.{layer}.", f"v.deepstack_merger.{number}."): value
                     for name, value in parts.items()}
        names = OLLAMA
    for name, value in [(part.name, part.data) for part in one.tensors] + list(parts.items()):
        for part, new in names.items() if name in parts else ():
            name = name.replace(part, new)
        name = name.replace(".ssm_dt.bias", ".ssm_dt")
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MORE = {"lfm2_vl": "lfm2", "pixtral": "pixtral", "mistral3": "pixtral", "internvl": "internvl"}
#: Names of a layer's tensors in transformers -> in projector files.
MORE_LAYERS = {**LLAVA, "o_proj": "attn_out", "attention_norm": "ln1", "ffn_norm": "ln2", "gate_proj": "ffn_gate",
               "up_proj": "ffn_up", "down_proj": "ffn_down", "projection_layer": "attn_out", "layernorm_before": "ln1",
               "layernorm_after": "ln2"}
MORE_OTHERS = {**OTHERS, "patch_conv.weight": "v.patch_embd.weight", "ln_pre.weight": "v.pre_ln.weight",
               "embeddings.cls_token": "v.class_embd", "embeddings.position_embeddings": "v.position_embd.weight",
               "embeddings.patch_embeddings.projection.weight": "v.patch_embd.weight",
               "embeddings.patch_embeddings.projection.bias": "v.patch_embd.bias"}
#: Names of the projector's layers.
MORE_PROJECTORS = {"lfm2": {"layer_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"},
                   "pixtral": {"norm": "mm.input_norm", "patch_merger.merging_layer": "mm.patch_merger",
                               "linear_1": "mm.1", "linear_2": "mm.2"},
                   "internvl": {"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1",
                                "linear_2": "mm.model.mlp.3"}}


def more_projector(model: Any, path: Path) -> None:
    """Write the projector file of LFM2-VL, Pixtral, Mistral 3 or InternVL: pairs of Pixtral's rotary positions stand
    side by side, and the channels of LFM2-VL's patches are first."""
    family, vision, config = model.mpool_family, model.config.vision_config, model.config
    kind, heads = MORE[family], vision.num_attention_heads
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_uint32("clip.vision.projection_dim", config.text_config.hidden_size)
    writer.add_bool("clip.use_silu" if vision.hidden_act == "silu" else "clip.use_gelu", True)
    side, patch = getattr(vision, "image_size", 40), vision.patch_size
    side, patch = (value if isinstance(value, int) else value[0] for value in (side, patch))
    for key, value in (("image_size", side), ("patch_size", patch), ("block_count", vision.num_hidden_layers),
                       ("embedding_length", vision.hidden_size), ("feed_forward_length", vision.intermediate_size),
                       ("attention.head_count", heads)):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", getattr(vision, "layer_norm_eps", 1e-5))
    halves = [0.5] * 3
    steps = None if family == "lfm2_vl" else visionmodels.processor(family)
    writer.add_array("clip.vision.image_mean", halves if steps is None else [float(value) for value in
                                                                             steps.image_mean])
    writer.add_array("clip.vision.image_std", halves if steps is None else [float(value) for value in steps.image_std])
    if family == "mistral3":
        writer.add_uint32("clip.vision.spatial_merge_size", config.spatial_merge_size)
    elif family != "pixtral":
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
    if family == "internvl":
        writer.add_uint32("clip.vision.preproc_min_tiles", 1)
        writer.add_uint32("clip.vision.preproc_max_tiles", 4)
    for name, value in model.model.vision_tower.state_dict().items():
        parts, end = name.split("."), name.rpartition(".")[2]
        layer = parts.index("layers" if "layers" in parts else "layer") + 1 if parts[0] in ("encoder", "transformer") \
            else 0
        values = value.numpy()
        if layer:
            short = end.replace("lambda_", "ls") if end.startswith("lambda_") else MORE_LAYERS[parts[-2]]
            if kind == "pixtral" and short in ("attn_q", "attn_k"):
                values = tinygguf._adjacent_pairs(values, heads)
            name = f"v.blk.{parts[layer]}.{short}.{'weight' if end.startswith('lambda_') else end}"
        elif name in MORE_OTHERS:
            if family == "lfm2_vl" and name == "embeddings.patch_embedding.weight":
                values = values.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
            name = MORE_OTHERS[name]
        else:
            continue
        writer.add_tensor(name, np.ascontiguousarray(values.squeeze() if values.shape[0] == 1 else values))
    for name, value in model.model.multi_modal_projector.state_dict().items():
        stem, _, end = name.rpartition(".")
        writer.add_tensor(f"{MORE_PROJECTORS[kind][stem]}.{end}", value.numpy())
    if kind == "pixtral":
        writer.add_tensor("v.token_embd.img_break", model.get_input_embeddings().weight.detach().numpy()[158])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def projector(model: Any, path: Path, *, swapped: bool = False, width: int | None = None) -> None:
    """Write a projector file.

    Args:
        swapped: exchange the names of the feed-forward layer's two matrices, as in older files.
        width: number of output rows to keep, for a file that does not match its decoder; None: all.
    """
    family, vision = model.mpool_family, model.config.vision_config
    llava, gemma = family.startswith("llava"), family == "gemma3"
    if family in QWEN_FILES:
        return qwen_projector(model, path)
    if family in MORE:
        return more_projector(model, path)
    if family.startswith("gemma4"):
        return gemma4_projector(model, path)
    network = model.model.vision_tower if llava or gemma else model.model.vision_model
    layers = vision.num_hidden_layers - llava  # the last layer is not used
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("clip.projector_type", "mlp" if llava else "gemma3" if gemma else "idefics3")
    writer.add_bool("clip.use_gelu", not llava)
    for key, value in (("image_size", vision.image_size), ("patch_size", vision.patch_size), ("block_count", layers),
                       ("embedding_length", vision.hidden_size), ("feed_forward_length", vision.intermediate_size),
                       ("attention.head_count", vision.num_attention_heads)):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision.layer_norm_eps)
    steps = visionmodels.processor(family)
    writer.add_array("clip.vision.image_mean", [float(value) for value in steps.image_mean])
    writer.add_array("clip.vision.image_std", [float(value) for value in steps.image_std])
    if gemma:
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
    elif not llava:
        writer.add_uint32("clip.vision.projector.scale_factor", model.config.scale_factor)
        writer.add_uint32("clip.vision.preproc_image_size", 96)
    if family == "llava_next":
        writer.add_array("clip.vision.image_grid_pinpoints",
                         [side for high, wide in model.config.image_grid_pinpoints for side in (wide, high)])
        writer.add_string("clip.vision.mm_patch_merge_type", "spatial_unpad")
        writer.add_string("clip.vision.image_aspect_ratio", "anyres")
        writer.add_tensor("model.image_newline", model.model.image_newline.detach().numpy())
    ends = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
    for name, value in network.state_dict().items():
        parts = name.split(".")
        if parts[0] == "encoder":
            if int(parts[2]) >= layers:
                continue
            short = LLAVA[parts[-2]]
            name = f"v.blk.{parts[2]}.{ends.get(short, short)}.{parts[-1]}"
        elif name in OTHERS:
            name = OTHERS[name]
        else:
            continue
        writer.add_tensor(name, value.numpy())
    if llava:
        for number, linear in ((0, model.model.multi_modal_projector.linear_1),
                               (2, model.model.multi_modal_projector.linear_2)):
            writer.add_tensor(f"mm.{number}.weight", linear.weight.detach().numpy()[:width])
            writer.add_tensor(f"mm.{number}.bias", linear.bias.detach().numpy()[:width])
    elif gemma:
        own = model.model.multi_modal_projector
        writer.add_tensor("mm.input_projection.weight", own.mm_input_projection_weight.detach().numpy()[:, :width])
        writer.add_tensor("mm.soft_emb_norm.weight", 1 + own.mm_soft_emb_norm.weight.detach().numpy())
    else:
        writer.add_tensor("mm.model.fc.weight", model.model.connector.modality_projection.proj.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
