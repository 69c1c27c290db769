"""Engines that generate images: mpool, and diffusers on torch, on the same weights. Runs by path in a process of its
own.

A shape is a diffusers folder with seeded weights in bfloat16: a few blocks of a published transformer, or the published
decoder, with tiny networks around it. Rates depend on sizes only. mpool generates whole images; the time of a step is a
third of the difference between two images whose step counts differ by three.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import own_process
from own_process import rss, run_task
from timing import seconds_of

TEXTS, SIDE = 256, 512
#: Shape -> pipeline, sizes of the transformer, True if the decoder is the published one.
SHAPES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "flux-512": ("flux", {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 128, "num_attention_heads": 24,
                          "axes_dims_rope": (16, 56, 56)}, False),
    "sd35m-512": ("sd3", {"num_layers": 3, "attention_head_dim": 64, "num_attention_heads": 24,
                          "caption_projection_dim": 1536, "pos_embed_max_size": 384,
                          "dual_attention_layers": (0, 1)}, False),
    "vae-512": ("flux", {"num_layers": 1, "num_single_layers": 0, "attention_head_dim": 16, "num_attention_heads": 2,
                         "axes_dims_rope": (4, 4, 8)}, True),
}


def _tokenizers(folder: Path, t5: str, clips: tuple[str, ...]) -> None:
    for name in clips:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "vocab.json").write_text(json.dumps(
            {"a": 0, "a</w>": 1, "<|startoftext|>": 2, "<|endoftext|>": 3}))
        (folder / name / "merges.txt").write_text("#version: 0.2\n")
        (folder / name / "tokenizer_config.json").write_text("{}")
    (folder / t5).mkdir(exist_ok=True)
    (folder / t5 / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", -1.0],
                                                            ["a", -2.0]]}}))


def make_folder(shape: str, folder: Path) -> None:
    """Write the pipeline, unless the folder is complete."""
    import diffusers
    import torch
    import transformers

    if (folder / "ready").exists():
        return
    kind, sizes, published = SHAPES[shape]
    flux, texts = kind == "flux", 64
    torch.manual_seed(3)
    clip = transformers.CLIPTextConfig(vocab_size=4, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                       num_attention_heads=4, projection_dim=32, eos_token_id=3, bos_token_id=2,
                                       pad_token_id=3)
    t5 = transformers.T5Config(vocab_size=4, d_model=texts, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
                               feed_forward_proj="gated-gelu")
    widths = (128, 256, 512, 512) if published else (8, 8, 8, 8)
    parts: dict[str, tuple[str, Any]] = {
        "vae": ("diffusers", diffusers.AutoencoderKL(
            in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=widths, layers_per_block=2,
            latent_channels=16, norm_num_groups=32 if published else 4, use_quant_conv=False, use_post_quant_conv=False,
            scaling_factor=0.36, shift_factor=0.12)),
        "text_encoder_2" if flux else "text_encoder_3": ("transformers", transformers.T5EncoderModel(t5))}
    if flux:
        parts["text_encoder"] = "transformers", transformers.CLIPTextModel(clip)
        parts["transformer"] = "diffusers", diffusers.FluxTransformer2DModel(
            in_channels=64, joint_attention_dim=texts, pooled_projection_dim=32, **sizes)
    else:
        for name in ("text_encoder", "text_encoder_2"):
            parts[name] = "transformers", transformers.CLIPTextModelWithProjection(clip)
        parts["transformer"] = "diffusers", diffusers.SD3Transformer2DModel(
            sample_size=128, patch_size=2, in_channels=16, out_channels=16, joint_attention_dim=texts,
            pooled_projection_dim=64, qk_norm="rms_norm", **sizes)
    index: dict[str, Any] = {"_class_name": "FluxPipeline" if flux else "StableDiffusion3Pipeline"}
    for name, (library, part) in parts.items():
        part.to(torch.bfloat16).save_pretrained(folder / name)
        index[name] = [library, type(part).__name__]
    diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0 if flux else 3.0).save_pretrained(folder / "scheduler")
    _tokenizers(folder, "tokenizer_2" if flux else "tokenizer_3", ("tokenizer",) if flux else ("tokenizer",
                                                                                              "tokenizer_2"))
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "ready").touch()


class Mpool(own_process.Mpool):
    """mpool."""

    def start(self, shape: str, folder: str, threads: int) -> None:
        """Open a pool with one worker."""
        self.load(folder, threads, max_workers_per_model=1)
        self.decodes = SHAPES[shape][2]
        self.generate(1)

    def generate(self, steps: int) -> None:
        """Generate one image."""
        self.pool.generate_image("a", self.folder, width=SIDE, height=SIDE, num_inference_steps=steps, guidance_scale=0,
                                 max_sequence_length=TEXTS, seed=1, compute=self.compute)

    def seconds(self, repeat: int) -> float:
        """Return the seconds of one step, or of decoding."""
        if self.decodes:
            return statistics.median(seconds_of(lambda: self.generate(1)) for _ in range(repeat))
        more = 3
        one = statistics.median(seconds_of(lambda: self.generate(1)) for _ in range(repeat))
        return (statistics.median(seconds_of(lambda: self.generate(1 + more)) for _ in range(repeat)) - one) / more


class Torch:
    """The modules of diffusers, on torch."""

    def __init__(self, variant: str) -> None:
        self.variant = variant or "float32"

    def start(self, shape: str, folder: str, threads: int) -> None:
        """Load the modules in this process."""
        import diffusers
        import torch

        torch.set_num_threads(threads)
        kind, _, decodes = SHAPES[shape]
        dtype = getattr(torch, self.variant)
        if decodes:
            vae = diffusers.AutoencoderKL.from_pretrained(folder, subfolder="vae", torch_dtype=dtype).eval()
            latents = torch.randn(1, 16, SIDE // 8, SIDE // 8, dtype=dtype)
            self.run = lambda: vae.decode(latents)
        elif kind == "flux":
            flux = diffusers.FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer",
                                                                    torch_dtype=dtype).eval()
            rows = (SIDE // 16) ** 2
            inputs: dict[str, Any] = {
                "hidden_states": torch.randn(1, rows, 64, dtype=dtype),
                "encoder_hidden_states": torch.randn(1, TEXTS, 64, dtype=dtype),
                "pooled_projections": torch.randn(1, 32, dtype=dtype), "timestep": torch.tensor([0.5], dtype=dtype),
                "img_ids": torch.zeros(rows, 3), "txt_ids": torch.zeros(TEXTS, 3)}
            self.run = lambda: flux(**inputs)
        else:
            sd3 = diffusers.SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer",
                                                                  torch_dtype=dtype).eval()
            given = {"hidden_states": torch.randn(1, 16, SIDE // 8, SIDE // 8, dtype=dtype),
                     "encoder_hidden_states": torch.randn(1, TEXTS + 77, 64, dtype=dtype),
                     "pooled_projections": torch.randn(1, 64, dtype=dtype), "timestep": torch.tensor([500.0])}
            self.run = lambda: sd3(**given)
        self.lib = torch
        self.seconds(1)

    def seconds(self, repeat: int) -> float:
        """See Mpool."""
        with self.lib.no_grad():
            return statistics.median(seconds_of(self.run) for _ in range(repeat))


ENGINES: dict[str, Any] = {"mpool": Mpool, "torch": Torch}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of one step, or of decoding."""
    name, _, variant = task["engine"].partition(":")
    engine = ENGINES[name](variant)
    engine.start(task["shape"], task["folder"], task["threads"])
    what = "decode ms" if SHAPES[task["shape"]][2] else "step ms"
    return {"measures": {what: engine.seconds(task["repeat"]) * 1e3}, "rss MB": rss()}


def prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Make the folder."""
    if task["engine"] == "folder":
        make_folder(task["shape"], Path(task["folder"]))
    return {}


if __name__ == "__main__":
    np.seterr(all="ignore")
    run_task({"measure": measure, "prepare": prepare})
