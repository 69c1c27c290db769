"""Tiny seeded diffusers pipelines with random norms and biases and odd sizes, also as GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

WORDS = ["a", "cat", "dog", "on", "the", "moon", "red", "blue", "of", "tower", "sea", "s"]


def randomise(model: Any, seed: int) -> Any:
    """Randomise all weights, including norms and biases, with a scale at which every part affects the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in list(model.named_parameters()) + list(model.named_buffers()):
            if not value.is_floating_point():
                continue
            shape = value.shape
            if value.dim() == 1:
                base = 1.0 if name.endswith("weight") else 0.0
                value.copy_(base + 0.2 * torch.randn(shape, generator=generator))
            else:
                fan = float(np.prod(shape[1:]))
                value.copy_(torch.randn(shape, generator=generator) * (1.2 / fan ** 0.5))
    return model.eval()


def clip_tokenizer(folder: Path, pad: str = "<|endoftext|>") -> Any:
    """Save a CLIP tokenizer as vocab.json and merges.txt, as in published folders, and return it."""
    letters = sorted(set("".join(WORDS)) | set("!,.0123456789"))
    vocab: dict[str, int] = {}
    if pad == "!":
        vocab["!"] = 0
    for letter in letters:
        vocab.setdefault(letter, len(vocab))
    for letter in letters:
        vocab.setdefault(letter + "</w>", len(vocab))
    merges = []
    for pair in (("c", "a"), ("ca", "t</w>"), ("t", "h"), ("th", "e</w>"), ("m", "o"), ("o", "n</w>"), ("r", "e")):
        merges.append(pair)
        vocab.setdefault("".join(pair), len(vocab))
    for token in ("<|startoftext|>", "<|endoftext|>"):
        vocab[token] = len(vocab)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")
    config = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
              "pad_token": pad, "model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad, model_max_length=77)


def t5_tokenizer(folder: Path) -> Any:
    """Save a T5 tokenizer, a unigram model in tokenizer.json, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0)]
    vocabulary += [("\u2581" + word, -3.0 - i / 10) for i, word in enumerate(WORDS)]
    vocabulary += [(letter, -6.0 - i / 10) for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz!,.\u2581")]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>",
                                                             special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>",
                                                unk_token="<unk>", model_max_length=512)
    fast.save_pretrained(folder)
    return fast


def _clip(vocab: int, hidden: int, projection: int, layers: int, act: str, end: int, projected: bool) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=45, projection_dim=projection,
        num_hidden_layers=layers, num_attention_heads=hidden // 8, max_position_embeddings=77, hidden_act=act,
        bos_token_id=vocab - 2, eos_token_id=end, pad_token_id=vocab - 1)
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def _t5(vocab: int, hidden: int, layers: int, heads: int = 3, ffn: int = 51) -> Any:
    return transformers.T5EncoderModel(transformers.T5Config(
        vocab_size=vocab, d_model=hidden, d_kv=8, d_ff=ffn, num_layers=layers, num_heads=heads,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=8, relative_attention_max_distance=20))


def _vae(latents: int = 4) -> Any:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(8, 16, 24), layers_per_block=1,
        latent_channels=latents, norm_num_groups=4, use_quant_conv=False, use_post_quant_conv=False,
        shift_factor=0.07, scaling_factor=1.3, sample_size=64)


def sd3(folder: Path, *, layers: int = 3, dual: tuple[int, ...] = (0, 1), qk_norm: str | None = "rms_norm",
        t5: bool = True, shift: float = 3.0, end: int | None = None, seed: int = 1, save: bool = True) -> Any:
    """Create a Stable Diffusion 3 pipeline: CLIP-L and CLIP-G with projections, T5, and joint blocks.

    Args:
        dual: numbers of the blocks that have a second attention.
    """
    first, second = clip_tokenizer(folder / "tokenizer"), clip_tokenizer(folder / "tokenizer_2", "!")
    third = t5_tokenizer(folder / "tokenizer_3") if t5 else None
    one = randomise(_clip(len(first), 24, 20, 2, "quick_gelu", 2 if end is None else end, True), seed)
    two = randomise(_clip(len(second), 16, 12, 3, "gelu", second.eos_token_id, True), seed + 1)
    three = randomise(_t5(len(third), 48, 2), seed + 2) if third is not None else None
    transformer = randomise(diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=layers, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=48, pooled_projection_dim=32, out_channels=4,
        pos_embed_max_size=12, dual_attention_layers=tuple(i for i in dual if i < layers), qk_norm=qk_norm), seed + 3)
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=randomise(_vae(), seed + 4), text_encoder=one, tokenizer=first, text_encoder_2=two, tokenizer_2=second,
        text_encoder_3=three, tokenizer_3=third)
    return _saved(pipeline, folder, save)


def flux(folder: Path, *, layers: int = 2, singles: int = 2, guidance: bool = False, dynamic: bool = False,
         texts: int = 40, seed: int = 11, save: bool = True) -> Any:
    """Create a FLUX.1 pipeline: CLIP-L and T5, double and single blocks, positions on three axes."""
    first, second = clip_tokenizer(folder / "tokenizer"), t5_tokenizer(folder / "tokenizer_2")
    transformer = randomise(diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=layers, num_single_layers=singles, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=texts, pooled_projection_dim=24, axes_dims_rope=(4, 4, 8),
        guidance_embeds=guidance), seed)
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=dynamic,
                                                            shift=3.0 if dynamic else 1.0),
        vae=randomise(_vae(), seed + 1),
        text_encoder=randomise(_clip(len(first), 24, 24, 2, "quick_gelu", 2, False), seed + 2), tokenizer=first,
        text_encoder_2=randomise(_t5(len(second), texts, 2, *((4, 96) if texts % 32 == 0 else ())), seed + 3),
        tokenizer_2=second, transformer=transformer)
    return _saved(pipeline, folder, save)


def _saved(pipeline: Any, folder: Path, save: bool) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    if save:
        kept = {path: path.read_bytes() for path in folder.glob("tokenizer*/*")}
        pipeline.save_pretrained(folder)
        for name in ("tokenizer", *(() if (folder / "tokenizer_2" / "spiece.model").exists() else ("tokenizer_2",))):
            if (folder / name / "vocab.json") in kept:  # published folders have no tokenizer.json
                (folder / name / "tokenizer.json").unlink(missing_ok=True)
        for path, data in kept.items():
            path.write_bytes(data)
    return pipeline


# ---- GGUF: only the transformer, under its original tensor names --------------------------------------------------

def published_flux(state: dict[str, Any]) -> dict[str, Any]:
    """Convert the tensors of diffusers' FLUX transformer to the original layout.

    There, queries, keys and values are fused, and the last modulation has its shift first.
    """
    out: dict[str, Any] = {}
    state = dict(state)

    def move(name: str, *sources: str) -> None:
        for kind in ("weight", "bias"):
            out[f"{name}.{kind}"] = torch.cat([state.pop(f"{source}.{kind}") for source in sources])

    def scale(name: str, source: str) -> None:
        out[f"{name}.scale"] = state.pop(f"{source}.weight")

    move("img_in", "x_embedder")
    move("txt_in", "context_embedder")
    for name, source in (("time_in", "timestep_embedder"), ("vector_in", "text_embedder"),
                         ("guidance_in", "guidance_embedder")):
        if f"time_text_embed.{source}.linear_1.weight" in state:
            move(f"{name}.in_layer", f"time_text_embed.{source}.linear_1")
            move(f"{name}.out_layer", f"time_text_embed.{source}.linear_2")
    move("final_layer.linear", "proj_out")
    _swap(state, out)
    for i in range(100):
        at = f"transformer_blocks.{i}"
        if f"{at}.norm1.linear.weight" not in state:
            break
        to = f"double_blocks.{i}"
        move(f"{to}.img_mod.lin", f"{at}.norm1.linear")
        move(f"{to}.txt_mod.lin", f"{at}.norm1_context.linear")
        move(f"{to}.img_attn.qkv", *(f"{at}.attn.to_{c}" for c in "qkv"))
        move(f"{to}.txt_attn.qkv", *(f"{at}.attn.add_{c}_proj" for c in "qkv"))
        move(f"{to}.img_attn.proj", f"{at}.attn.to_out.0")
        move(f"{to}.txt_attn.proj", f"{at}.attn.to_add_out")
        for side, source in (("img", "ff"), ("txt", "ff_context")):
            move(f"{to}.{side}_mlp.0", f"{at}.{source}.net.0.proj")
            move(f"{to}.{side}_mlp.2", f"{at}.{source}.net.2")
        for side, middle in (("img", ""), ("txt", "added_")):
            scale(f"{to}.{side}_attn.norm.query_norm", f"{at}.attn.norm_{middle}q")
            scale(f"{to}.{side}_attn.norm.key_norm", f"{at}.attn.norm_{middle}k")
    for i in range(100):
        at = f"single_transformer_blocks.{i}"
        if f"{at}.norm.linear.weight" not in state:
            break
        to = f"single_blocks.{i}"
        move(f"{to}.modulation.lin", f"{at}.norm.linear")
        move(f"{to}.linear1", *(f"{at}.attn.to_{c}" for c in "qkv"), f"{at}.proj_mlp")
        move(f"{to}.linear2", f"{at}.proj_out")
        scale(f"{to}.norm.query_norm", f"{at}.attn.norm_q")
        scale(f"{to}.norm.key_norm", f"{at}.attn.norm_k")
    assert not state, list(state)
    return out


def published_sd3(state: dict[str, Any]) -> dict[str, Any]:
    """Convert the tensors of diffusers' Stable Diffusion 3 transformer to the original layout."""
    out: dict[str, Any] = {}
    state = dict(state)

    def move(name: str, *sources: str) -> None:
        for kind in ("weight", "bias"):
            out[f"{name}.{kind}"] = torch.cat([state.pop(f"{source}.{kind}") for source in sources])

    out["pos_embed"] = state.pop("pos_embed.pos_embed")
    move("x_embedder.proj", "pos_embed.proj")
    move("context_embedder", "context_embedder")
    for name, source in (("t_embedder", "timestep_embedder"), ("y_embedder", "text_embedder")):
        move(f"{name}.mlp.0", f"time_text_embed.{source}.linear_1")
        move(f"{name}.mlp.2", f"time_text_embed.{source}.linear_2")
    move("final_layer.linear", "proj_out")
    _swap(state, out)
    for i in range(100):
        at, to = f"transformer_blocks.{i}", f"joint_blocks.{i}"
        if f"{at}.norm1.linear.weight" not in state:
            break
        last = f"{at}.ff_context.net.2.weight" not in state
        move(f"{to}.x_block.adaLN_modulation.1", f"{at}.norm1.linear")
        if last:
            _swap(state, out, f"{at}.norm1_context.linear", f"{to}.context_block.adaLN_modulation.1")
        else:
            move(f"{to}.context_block.adaLN_modulation.1", f"{at}.norm1_context.linear")
            move(f"{to}.context_block.attn.proj", f"{at}.attn.to_add_out")
            move(f"{to}.context_block.mlp.fc1", f"{at}.ff_context.net.0.proj")
            move(f"{to}.context_block.mlp.fc2", f"{at}.ff_context.net.2")
        move(f"{to}.x_block.attn.qkv", *(f"{at}.attn.to_{c}" for c in "qkv"))
        move(f"{to}.context_block.attn.qkv", *(f"{at}.attn.add_{c}_proj" for c in "qkv"))
        move(f"{to}.x_block.attn.proj", f"{at}.attn.to_out.0")
        move(f"{to}.x_block.mlp.fc1", f"{at}.ff.net.0.proj")
        move(f"{to}.x_block.mlp.fc2", f"{at}.ff.net.2")
        if f"{at}.attn2.to_q.weight" in state:
            move(f"{to}.x_block.attn2.qkv", *(f"{at}.attn2.to_{c}" for c in "qkv"))
            move(f"{to}.x_block.attn2.proj", f"{at}.attn2.to_out.0")
        for name, source in (("x_block.attn.ln_q", "attn.norm_q"), ("x_block.attn.ln_k", "attn.norm_k"),
                             ("context_block.attn.ln_q", "attn.norm_added_q"),
                             ("context_block.attn.ln_k", "attn.norm_added_k"),
                             ("x_block.attn2.ln_q", "attn2.norm_q"), ("x_block.attn2.ln_k", "attn2.norm_k")):
            if f"{at}.{source}.weight" in state:
                out[f"{to}.{name}.weight"] = state.pop(f"{at}.{source}.weight")
    assert not state, list(state)
    return out


def _swap(state: dict[str, Any], out: dict[str, Any], source: str = "norm_out.linear",
          name: str = "final_layer.adaLN_modulation.1") -> None:
    for kind in ("weight", "bias"):
        scale, shift = state.pop(f"{source}.{kind}").chunk(2)
        out[f"{name}.{kind}"] = torch.cat([shift, scale])


def write_t5_gguf(model: Any, path: Path, quantisation: str = "F32") -> dict[str, Any]:
    """Write T5's encoder as a GGUF file. Returns its (dequantised) tensors under transformers' names."""
    import gguf

    names = {"shared.weight": "token_embd.weight", "encoder.final_layer_norm.weight": "enc.output_norm.weight"}
    for i in range(len(model.encoder.block)):
        at, to = f"encoder.block.{i}.layer", f"enc.blk.{i}"
        names |= {f"{at}.0.SelfAttention.{c}.weight": f"{to}.attn_{c}.weight" for c in "qkvo"}
        names |= {f"{at}.0.layer_norm.weight": f"{to}.attn_norm.weight",
                  f"{at}.1.layer_norm.weight": f"{to}.ffn_norm.weight",
                  f"{at}.1.DenseReluDense.wi_0.weight": f"{to}.ffn_gate.weight",
                  f"{at}.1.DenseReluDense.wi_1.weight": f"{to}.ffn_up.weight",
                  f"{at}.1.DenseReluDense.wo.weight": f"{to}.ffn_down.weight",
                  f"{at}.0.SelfAttention.relative_attention_bias.weight": f"{to}.attn_rel_b.weight"}
    writer = gguf.GGUFWriter(path, "t5encoder")
    kind = gguf.GGMLQuantizationType[quantisation]
    values = {}
    for name, tensor in model.state_dict().items():
        if name not in names:
            assert name == "encoder.embed_tokens.weight"
            continue
        data = tensor.float().numpy()
        if quantisation != "F32" and data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            packed = gguf.quants.quantize(data, kind)
            writer.add_tensor(names[name], packed, raw_dtype=kind)
            values[name] = torch.tensor(gguf.quants.dequantize(packed, kind).reshape(data.shape))
        else:
            writer.add_tensor(names[name], data)
            values[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def write_gguf(pipeline: Any, path: Path, quantisation: str = "F32", named: bool = True) -> dict[str, Any]:
    """Write the pipeline's transformer as a GGUF file.

    As in converters, matrices whose rows are not a multiple of the block size stay in float32.

    Args:
        quantisation: type of the matrices.
        named: the file contains its architecture. Files of stable-diffusion.cpp do not.

    Returns:
        The (dequantised) tensors of the file under their original names.
    """
    import gguf

    flux = "Flux" in type(pipeline).__name__
    state = pipeline.transformer.state_dict()
    tensors = published_flux(state) if flux else published_sd3(state)
    writer = gguf.GGUFWriter(path, "flux" if flux else "sd3")
    if not named:
        writer.kv_data[0].clear()
    kind = gguf.GGMLQuantizationType[quantisation]
    values = {}
    for name, tensor in tensors.items():
        data = tensor.float().numpy()
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if kind != gguf.GGMLQuantizationType.F32 and data.ndim == 2 and data.shape[1] % block == 0:
            packed = gguf.quants.quantize(data, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            values[name] = torch.tensor(gguf.quants.dequantize(packed, kind).reshape(data.shape))
        else:
            writer.add_tensor(name, data)
            values[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values
