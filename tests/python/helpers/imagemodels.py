"""Tiny image models of every family, created and saved by transformers, and their reference outputs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paritymodels import torch, transformers

#: Family -> its preprocessor_config.json. The image size of the models is 40 or 56.
PROCESSORS: dict[str, dict[str, Any]] = {
    "clip": {"image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 40},
             "resample": 3, "do_center_crop": True, "crop_size": {"height": 40, "width": 40}},
    "siglip": {"image_processor_type": "SiglipImageProcessor", "do_resize": True, "size": {"height": 40, "width": 40},
               "resample": 2},
    "dinov2": {"image_processor_type": "BitImageProcessor", "do_resize": False, "do_center_crop": False,
               "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
}
PROCESSORS |= {"dinov2_gated": PROCESSORS["dinov2"], "dinov2_with_registers": PROCESSORS["dinov2"]}
FAMILIES = tuple(PROCESSORS)

_VISION = {"hidden_size": 48, "intermediate_size": 88, "num_attention_heads": 3, "image_size": 40, "patch_size": 8}
_TEXT = {"hidden_size": 32, "intermediate_size": 72, "num_attention_heads": 4, "vocab_size": 120,
         "max_position_embeddings": 20, "num_hidden_layers": 2}
_DINO = {"hidden_size": 48, "num_attention_heads": 3, "image_size": 56, "patch_size": 14, "mlp_ratio": 2}


def make(family: str, layers: int, **more: Any) -> Any:
    """Create a model with ``layers`` image layers and the initial weights of transformers."""
    t = transformers
    if family == "clip":
        config: Any = t.CLIPConfig(text_config={**_TEXT, "eos_token_id": 119, "bos_token_id": 118, "pad_token_id": 119},
                                   vision_config={**_VISION, "num_hidden_layers": layers, **more}, projection_dim=24)
        return t.CLIPModel(config).eval()
    if family == "siglip":
        text = {**_TEXT, "pad_token_id": 1, "eos_token_id": 1, "bos_token_id": 2, "projection_size": 48}
        config = t.SiglipConfig(text_config=text, vision_config={**_VISION, "num_hidden_layers": layers, **more})
        return t.SiglipModel(config).eval()
    if family == "dinov2_with_registers":
        config = t.Dinov2WithRegistersConfig(**{**_DINO, **more}, num_hidden_layers=layers, num_register_tokens=3)
        return t.Dinov2WithRegistersModel(config).eval()
    config = t.Dinov2Config(**{**_DINO, **more}, num_hidden_layers=layers, use_swiglu_ffn=family == "dinov2_gated")
    return t.Dinov2Model(config).eval()


def randomised(family: str, layers: int, seed: int = 5, **more: Any) -> Any:
    """Create a model with random norms, biases, scales and positions: ones and zeros would hide a missing term."""
    model = make(family, layers, **more)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if any(word in name for word in ("cls_token", "position", "register", "class_embedding", "probe", "lambda")):
            parameter.data = noise
        elif parameter.dim() < 2:
            parameter.data = 1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.3 * noise
        else:
            parameter.data = noise * (0.5 if "token_embedding" in name else 1.5 / parameter[0].numel() ** 0.5)
    return model


def save(model: Any, family: str, folder: Path) -> Path:
    """Save a model with its processor configuration, and with a tokenizer if it also encodes text."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    if family in ("clip", "siglip"):
        write_tokenizer(folder, family)
    return folder


def write_tokenizer(folder: Path, family: str) -> None:
    """Write a tokenizer of 120 words. CLIP adds a token before and one after a text, SigLIP only one after it, which is
    also its padding token."""
    pytest.importorskip("tokenizers")
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    clip, bos, eos = family == "clip", "<bos>", "<eos>"
    special = {bos: 118, eos: 119} if clip else {bos: 2, eos: 1}
    words = {f"w{i}": i for i in range(120) if i not in special.values()} | special
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (bos, eos)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}" if clip else f"$A {eos}", special_tokens=list(special.items()))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"unk_token": "w0", "bos_token": bos, "eos_token": eos, "pad_token": eos, "tokenizer_class": "TestTokenizer"}))


def image(seed: int, height: int, width: int) -> np.ndarray:
    """Return an image of large squares with noise, uint8 ``[height, width, 3]``."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (-(-height // 8), -(-width // 8), 3))
    fine = np.kron(coarse, np.ones((8, 8, 1)))[:height, :width]
    return np.clip(fine + generator.normal(0, 20, fine.shape), 0, 255).astype(np.uint8)


def processor(family: str) -> Any:
    """Return the transformers processor of a family, in its Pillow version if there is one."""
    config = dict(PROCESSORS[family])
    name = config.pop("image_processor_type")
    cls = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return cls(**config)


def pixels(family: str, image: Any) -> Any:
    """Return an image preprocessed by transformers, ``[1, 3, h, w]``."""
    return processor(family)(image, return_tensors="pt", input_data_format=None)["pixel_values"]


def vision(model: Any, family: str, values: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the hidden states after the embeddings and each layer, ``[rows, d]`` each, and the image embedding."""
    with torch.no_grad():
        if family in ("clip", "siglip"):
            out = model.vision_model(values, output_hidden_states=True)
            vector = out.pooler_output if family == "siglip" else model.visual_projection(out.pooler_output)
        else:
            out = model(values, output_hidden_states=True)
            vector = out.pooler_output
    return [state[0].numpy() for state in out.hidden_states], vector[0].numpy()
