"""A flow-matching model with the architecture of Stable Diffusion 3 (https://arxiv.org/abs/2403.03206) on handwritten
digits.

Training has two stages. First the autoencoder: 32x32 pixels to 8x8 latents of four channels, and back. Then the
transformer together with the second CLIP text encoder and the T5 encoder; the first CLIP encoder is that of
``digits-clip``, frozen. One caption in eight is empty, which classifier-free guidance needs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from . import clip, digits
from .words import clip_tokenizer, t5_tokenizer

NAME = "digits-sd3"
SEED = 2
VAE_STEPS, VAE_BATCH, VAE_RATE = 400, 48, 4e-3
STEPS, BATCH, RATE = 2200, 64, 1.5e-3
#: T5 tokens in most training steps. One step in eight uses the pipelines' length, with fewer images.
TOKENS, MOST_TOKENS, FEW = 16, 256, 12
#: Augmented copies of each training image, encoded once.
COPIES = 8


def autoencoder() -> Any:
    """Build the autoencoder: latents have a quarter of the image's side."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32), layers_per_block=1, latent_channels=4, norm_num_groups=4,
        sample_size=digits.SIDE, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.0, shift_factor=0.0)


def train_autoencoder(images: Any, generator: Any, say: Any) -> Any:
    """Train the autoencoder on reconstruction. Then set its shift and scaling so that its latents have mean 0 and
    deviation 1.
    """
    vae = autoencoder().train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, VAE_RATE, total_steps=VAE_STEPS, pct_start=0.1)
    for step in range(VAE_STEPS):
        chosen = torch.randint(len(images), (VAE_BATCH,), generator=generator)
        batch = clip.pixels(digits.augment(images[chosen], generator, 0.7))
        found = vae.encode(batch).latent_dist
        back = vae.decode(found.sample(generator)).sample
        wrong = torch.nn.functional.mse_loss(back, batch)
        loss = wrong + 1e-4 * found.kl().mean() / found.mean[0].numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == VAE_STEPS - 1:
            say(f"  autoencoder step {step:5} of {VAE_STEPS}  squared error {wrong.item():.5f}")
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        latents = vae.encode(clip.pixels(images)).latent_dist.mean
    vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std()))
    return vae


def encode(vae: Any, images: Any, generator: Any) -> Any:
    """Encode ``COPIES`` augmented copies of each image, as latents for the transformer."""
    made = []
    with torch.no_grad():
        for _ in range(COPIES):
            for part in digits.augment(images, generator, 0.5).split(256):
                made.append(vae.encode(clip.pixels(part)).latent_dist.mean)
    return (torch.cat(made) - vae.config.shift_factor) * vae.config.scaling_factor


class Network(torch.nn.Module):
    """The transformer and the text encoders that are trained with it."""

    def __init__(self, first: Any, ends: tuple[int, int], vocabularies: tuple[int, int]) -> None:
        super().__init__()
        self.first = first.requires_grad_(False)
        self.second = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(
            vocab_size=vocabularies[0], hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=clip.POSITIONS, projection_dim=32, hidden_act="gelu",
            bos_token_id=ends[0], eos_token_id=ends[1], pad_token_id=0))
        self.third = transformers.T5EncoderModel(transformers.T5Config(
            vocab_size=vocabularies[1], d_model=96, d_kv=32, d_ff=128, num_layers=2, num_heads=3,
            feed_forward_proj="gated-gelu", dropout_rate=0.0))
        self.transformer = diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=32,
            num_attention_heads=3, caption_projection_dim=96, joint_attention_dim=96, pooled_projection_dim=96,
            pos_embed_max_size=8, qk_norm="rms_norm")

    def texts(self, one: Any, two: Any, three: Any) -> tuple[Any, Any]:
        """Encode token ids as diffusers' pipeline does: the sequence, and the pooled vector."""
        first = self.first(one, output_hidden_states=True)
        second = self.second(two, output_hidden_states=True)
        both = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        pooled = torch.cat([first.text_embeds, second.text_embeds], dim=-1)
        return torch.cat([both, self.third(three)[0]], dim=1), pooled

    def forward(self, latents: Any, share: Any, ids: tuple[Any, Any, Any]) -> Any:
        """Predict the velocity at a given share of noise."""
        sequence, pooled = self.texts(*ids)
        return self.transformer(hidden_states=latents, timestep=share * 1000, encoder_hidden_states=sequence,
                                pooled_projections=pooled, return_dict=False)[0]


def train_flow(network: Network, latents: Any, labels: Any, ids: list[Any], generator: Any, say: Any) -> Network:
    """Train on the velocity from image to noise; return the moving average of the weights."""
    learnt = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=RATE, weight_decay=0.01, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.05)
    mean, lately = copy.deepcopy(network).requires_grad_(False), 0.0
    for step in range(STEPS):
        long = step % 8 == 7
        count, tokens = (FEW, MOST_TOKENS) if long else (BATCH, TOKENS)
        chosen = torch.randint(len(latents), (count,), generator=generator)
        rows = labels[chosen] * (ids[0].shape[0] // 10) + torch.randint(ids[0].shape[0] // 10, (count,),
                                                                        generator=generator)
        rows[torch.rand(count, generator=generator) < 1 / 8] = ids[0].shape[0] - 1  # the empty caption
        texts = (ids[0][rows], ids[1][rows], ids[2][rows, :tokens])
        share = torch.sigmoid(torch.randn(count, generator=generator))
        clean, noise = latents[chosen], torch.randn(latents[chosen].shape, generator=generator)
        at = share.reshape(-1, 1, 1, 1)
        loss = torch.nn.functional.mse_loss(network((1 - at) * clean + at * noise, share, texts), noise - clean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            keep = min(0.998, (step + 1) / (step + 10))
            for old, new in zip(mean.parameters(), network.parameters()):
                old.lerp_(new, 1 - keep)
        lately = loss.item() if step == 0 else 0.98 * lately + 0.02 * loss.item()
        if step % 200 == 0 or step == STEPS - 1:
            say(f"  transformer step {step:5} of {STEPS}  squared error {lately:.4f}")
    return mean.eval()


def train(out: Path, clip_folder: Path, say: Any = print) -> None:
    """Train the model, and save it as a diffusers folder in float16."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    found, _ = digits.load()
    images = torch.tensor(found.images[:, None] / 255, dtype=torch.float32)
    texts = [text for digit in range(10) for text in digits.captions(digit)]
    one = transformers.CLIPTokenizer.from_pretrained(clip_folder)
    two, three = clip_tokenizer(texts, clip.POSITIONS, "!"), t5_tokenizer(texts)
    ids = [tokenizer([*texts, ""], padding="max_length", max_length=length, truncation=True,
                     return_tensors="pt").input_ids
           for tokenizer, length in ((one, clip.POSITIONS), (two, clip.POSITIONS), (three, MOST_TOKENS))]
    vae = train_autoencoder(images, generator, say)
    network = Network(transformers.CLIPTextModelWithProjection.from_pretrained(clip_folder, dtype=torch.float32),
                      (two.bos_token_id, two.eos_token_id), (len(two), len(three))).train()
    network = train_flow(network, encode(vae, images, generator), torch.tensor(found.labels).repeat(COPIES), ids,
                         generator, say)
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=network.transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae,
        text_encoder=network.first, tokenizer=one, text_encoder_2=network.second, tokenizer_2=two,
        text_encoder_3=network.third, tokenizer_3=three)
    pipeline.to(torch.float16).save_pretrained(out)
