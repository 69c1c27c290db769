"""CLIP on handwritten digits: an image encoder and a text encoder with one vector space
(https://arxiv.org/abs/2103.00020).

The loss is the paper's contrastive one, with one change. There are only ten digits, so a batch holds each of them
several times: every pair of an image and a caption of the same digit counts as correct, with equal weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from . import digits
from .words import clip_tokenizer

NAME = "digits-clip"
POSITIONS = 16
STEPS, BATCH, RATE = 1000, 96, 2e-3
SEED = 1


def config(vocabulary: int) -> Any:
    """Return the sizes of both networks."""
    text = dict(vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=POSITIONS, projection_dim=64,
                bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1, pad_token_id=vocabulary - 1)
    vision = dict(hidden_size=96, intermediate_size=384, num_hidden_layers=4, num_attention_heads=3,
                  image_size=digits.SIDE, patch_size=8, projection_dim=64)
    return transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)


def processor() -> Any:
    """Return the preprocessing: resize to 32x32, scale to the range -1 to 1."""
    return transformers.CLIPImageProcessor(size={"shortest_edge": digits.SIDE},
                                           crop_size={"height": digits.SIDE, "width": digits.SIDE},
                                           image_mean=[0.5] * 3, image_std=[0.5] * 3)


def pixels(images: Any) -> Any:
    """Convert images (n, 1, 32, 32), 0 to 1, to network inputs (n, 3, 32, 32), -1 to 1."""
    return ((images - 0.5) / 0.5).expand(-1, 3, -1, -1)


def train(out: Path, say: Any = print) -> None:
    """Train the model, and save it as a transformers folder in float16."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    found, _ = digits.load()
    images = torch.tensor(found.images[:, None] / 255, dtype=torch.float32)
    labels = torch.tensor(found.labels)
    tokenizer = clip_tokenizer([text for digit in range(10) for text in digits.captions(digit)], POSITIONS)
    texts = [tokenizer(digits.captions(digit), padding="max_length", return_tensors="pt") for digit in range(10)]
    ids = torch.stack([row["input_ids"] for row in texts])
    longest = int(torch.stack([row["attention_mask"] for row in texts]).sum(dim=2).max())
    ids = ids[:, :, :longest]
    model = transformers.CLIPModel(config(len(tokenizer))).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
                                  lr=RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        digit = labels[chosen]
        caption = torch.randint(ids.shape[1], (BATCH,), generator=generator)
        result = model(input_ids=ids[digit, caption], pixel_values=pixels(digits.augment(images[chosen], generator)))
        right = (digit[:, None] == digit[None]).float()
        right /= right.sum(dim=1, keepdim=True)
        scores = result.logits_per_image
        loss = -(right * (scores.log_softmax(dim=1) + scores.t().log_softmax(dim=1))).sum(dim=1).mean() / 2
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=4.6052)  # 100, as in the paper
        if step % 250 == 0 or step == STEPS - 1:
            say(f"  step {step:5} of {STEPS}  loss {loss.item():.4f}")
    model.half().save_pretrained(out)
    transformers.CLIPProcessor(processor(), tokenizer).save_pretrained(out)
