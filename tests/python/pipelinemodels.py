"""Tiny pipelines of diffusers, seeded, with random norms and biases and odd sizes; and the same as GGUF files."""

from __future__ import annotations

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
    """Random weights everywhere, norms and biases too, of a size that lets every part show in the result."""
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
    """CLIP's, saved as vocab.json and merges.txt, as the published folders have it; also what transformers makes."""
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
    """T5's: a unigram model in tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0)]
    pieces += [("\u2581" + word, -3.0 - i / 10) for i, word in enumerate(WORDS)]
    pieces += [(letter, -6.0 - i / 10) for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz!,.\u2581")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
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


def _t5(vocab: int, hidden: int, layers: int) -> Any:
    return transformers.T5EncoderModel(transformers.T5Config(
        vocab_size=vocab, d_model=hidden, d_kv=8, d_ff=51, num_layers=layers, num_heads=3,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=8, relative_attention_max_distance=20))


def _vae(latents: int = 4) -> Any:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(8, 16, 24), layers_per_block=1,
        latent_channels=latents, norm_num_groups=4, use_quant_conv=False, use_post_quant_conv=False,
        shift_factor=0.07, scaling_factor=1.3, sample_size=64)


def sd3(folder: Path, *, layers: int = 3, dual: tuple[int, ...] = (0, 1), qk_norm: str | None = "rms_norm",
        t5: bool = True, shift: float = 3.0, end: int | None = None, seed: int = 1, save: bool = True) -> Any:
    """Stable Diffusion 3: CLIP-L and CLIP-G with projections, T5, joint blocks of which some attend twice."""
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
         seed: int = 11, save: bool = True) -> Any:
    """FLUX.1: CLIP-L and T5, double and single blocks, positions in three axes."""
    first, second = clip_tokenizer(folder / "tokenizer"), t5_tokenizer(folder / "tokenizer_2")
    transformer = randomise(diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=layers, num_single_layers=singles, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=40, pooled_projection_dim=24, axes_dims_rope=(4, 4, 8),
        guidance_embeds=guidance), seed)
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=dynamic, shift=3.0 if dynamic else 1.0),
        vae=randomise(_vae(), seed + 1),
        text_encoder=randomise(_clip(len(first), 24, 24, 2, "quick_gelu", 2, False), seed + 2), tokenizer=first,
        text_encoder_2=randomise(_t5(len(second), 40, 2), seed + 3), tokenizer_2=second, transformer=transformer)
    return _saved(pipeline, folder, save)


def _saved(pipeline: Any, folder: Path, save: bool) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    if save:
        kept = {path: path.read_bytes() for path in folder.glob("tokenizer*/*")}
        pipeline.save_pretrained(folder)
        for name in ("tokenizer", *(() if (folder / "tokenizer_2" / "spiece.model").exists() else ("tokenizer_2",))):
            if (folder / name / "vocab.json") in kept:  # as published: without tokenizer.json
                (folder / name / "tokenizer.json").unlink(missing_ok=True)
        for path, data in kept.items():
            path.write_bytes(data)
    return pipeline
