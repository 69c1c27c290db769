"""Image generation compared with diffusers in float32, on seeded pipelines with the same initial latents.

The tests compare the text embeddings and pooled embeddings that the transformer receives, the latents after each step,
and the decoded image. There are transformers with each number of blocks, so that every block is compared.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.tasks import text_to_image

import pipelinemodels
from pipelinemodels import torch
from rounding import deviations
from pipelineparity import PROMPT, STEPS, TOKENS, compare, latents_of, near, ours, reference


#: Name -> family, arguments of the pipeline, options of the request.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sd3, guided": ("sd3", {}, {"negative_prompt": "blue dog", "guidance_scale": 4.0}),
    "sd3, guided, no negative prompt": ("sd3", {"shift": 1.0}, {"guidance_scale": 2.5}),
    "sd3, turbo": ("sd3", {"layers": 2, "dual": ()}, {"guidance_scale": 0.0}),
    "sd3, one layer": ("sd3", {"layers": 1, "dual": ()}, {"guidance_scale": 0.0}),
    "sd3, one dual layer": ("sd3", {"layers": 1, "dual": (0,)}, {"guidance_scale": 0.0}),
    "sd3, two layers": ("sd3", {"layers": 2, "dual": (0,)}, {"guidance_scale": 0.0}),
    "sd3, no norms of heads": ("sd3", {"layers": 2, "qk_norm": None}, {"guidance_scale": 0.0}),
    "sd3, without T5": ("sd3", {"layers": 1, "t5": False}, {"guidance_scale": 0.0}),
    "sd3, end by id": ("sd3", {"layers": 1, "end": 7}, {"guidance_scale": 0.0}),
    "flux": ("flux", {}, {}),
    "flux, a double block": ("flux", {"layers": 1, "singles": 0}, {}),
    "flux, two double blocks": ("flux", {"layers": 2, "singles": 0}, {}),
    "flux, a single block": ("flux", {"layers": 1, "singles": 1}, {}),
    "flux, with a guidance scale": ("flux", {"guidance": True, "dynamic": True}, {"guidance_scale": 3.5}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_every_stage_and_step(tmp_path: Path, name: str) -> None:
    family, made, asked = CASES[name]
    pipeline = getattr(pipelinemodels, family)(tmp_path, **made)
    for width, height in ((64, 40), (24, 56)):
        compare(ours(tmp_path, width, height, **asked), reference(pipeline, width, height, **asked))


def test_default_schedules(tmp_path: Path) -> None:
    """Noise levels and times match for any number of steps, with and without shift."""
    for family, made in (("sd3", {"layers": 1}), ("sd3", {"layers": 1, "shift": 1.0}),
                         ("flux", {"layers": 1, "singles": 0}), ("flux", {"layers": 1, "singles": 0, "dynamic": True})):
        folder = tmp_path / f"{family}{len(made)}{made.get('dynamic')}"
        pipeline = getattr(pipelinemodels, family)(folder, **made)
        from mpool.models import describe

        settings = describe(str(folder)).pipeline
        assert settings is not None
        for steps in (1, 2, 5, 28):
            for rows in (16, 300, 4096):
                scheduler = pipeline.scheduler
                if family == "flux":
                    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

                    config = scheduler.config
                    mu = calculate_shift(rows, config.base_image_seq_len, config.max_image_seq_len, config.base_shift,
                                         config.max_shift)
                    scheduler.set_timesteps(sigmas=list(np.linspace(1.0, 1 / steps, steps)), mu=mu)
                else:
                    scheduler.set_timesteps(steps)
                times, sigmas = text_to_image.schedule(settings, steps, rows)
                assert np.abs(sigmas - scheduler.sigmas.numpy()).max() <= 1e-7
                assert np.abs(times - scheduler.timesteps.numpy()).max() <= 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_gguf_matches_diffusers(tmp_path: Path, family: str) -> None:
    """A GGUF file with the published names and fused queries, keys and values gives the results of diffusers, and the
    same bits alone, in a folder, and without the key of its architecture."""
    pipeline = getattr(pipelinemodels, family)(tmp_path)
    expected = reference(pipeline, 64, 40)
    folder = ours(tmp_path, 64, 40)
    pipelinemodels.write_gguf(pipeline, tmp_path / "transformer-F32.gguf")
    named = ours(tmp_path / "transformer-F32.gguf", 64, 40)
    compare(named, expected)
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    beside = ours(tmp_path, 64, 40)
    pipelinemodels.write_gguf(pipeline, tmp_path / "transformer-F32.gguf", named=False)
    for got in (named, beside, ours(tmp_path / "transformer-F32.gguf", 64, 40)):
        assert np.array_equal(got["history"], folder["history"]) and np.array_equal(got["image"], folder["image"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_0", "Q5_1", "BF16"])
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_quantised_gguf(tmp_path: Path, family: str, quantisation: str) -> None:
    """Compared with diffusers on the dequantised values, only the rounding of activations remains."""
    pipeline = getattr(pipelinemodels, family)(tmp_path)
    path = tmp_path / "transformer.gguf"
    values = pipelinemodels.write_gguf(pipeline, path, quantisation)
    assert any(not torch.equal(value, tensor) for value, tensor in zip(
        values.values(), (pipelinemodels.published_flux if family == "flux" else pipelinemodels.published_sd3)(
            pipeline.transformer.state_dict()).values()))
    _load_published(pipeline, family, values)
    expected = reference(pipeline, 64, 40)
    exact = ours(path, 64, 40, "float32")
    compare(exact, expected)
    # three times the largest difference that was measured
    near(ours(path, 64, 40, "auto")["history"][-1], expected["history"][-1], 0.13 if family == "sd3" else 0.048)


@pytest.mark.parametrize("quantisation", ["F32", "Q8_0"])
def test_t5_from_a_gguf_file(tmp_path: Path, quantisation: str) -> None:
    """The text encoder may be a GGUF file in its folder instead of safetensors."""
    pipeline = pipelinemodels.flux(tmp_path, layers=1, singles=0, texts=64)
    before = ours(tmp_path, 64, 40)
    inside = tmp_path / "text_encoder_2"
    values = pipelinemodels.write_t5_gguf(pipeline.text_encoder_2, inside / "t5.gguf", quantisation)
    (inside / "model.safetensors").unlink()
    got = ours(tmp_path, 64, 40)
    assert np.array_equal(got["texts"], before["texts"]) is (quantisation == "F32")
    pipeline.text_encoder_2.load_state_dict(values, strict=False)
    compare(got, reference(pipeline, 64, 40))
    near(ours(tmp_path, 64, 40, "auto")["texts"], got["texts"], 0.1)


def _load_published(pipeline: Any, family: str, values: dict[str, Any]) -> None:
    """Load values with published names into diffusers' module. Converting a module of indices gives the mapping."""
    state = pipeline.transformer.state_dict()
    places, at = {}, 0
    for name, tensor in state.items():
        places[name] = torch.arange(at, at + tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
        at += tensor.numel()
    flat = torch.empty(at)
    publish = pipelinemodels.published_flux if family == "flux" else pipelinemodels.published_sd3
    for name, ids in publish(places).items():
        flat[ids.reshape(-1).long()] = values[name].reshape(-1).float()
    pipeline.transformer.load_state_dict({name: flat[ids.reshape(-1).long()].reshape(ids.shape)
                                          for name, ids in places.items()})


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_bfloat16_is_near_float32(tmp_path: Path, family: str) -> None:
    pipeline = getattr(pipelinemodels, family)(tmp_path)
    expected = reference(pipeline, 64, 40)
    got = ours(tmp_path, 64, 40, "bfloat16")
    # three times the differences that were measured
    bounds = {"texts": 9e-4, "pooled": 5e-5, "history": 6.5e-4 if family == "sd3" else 6e-5, "image": 2.5e-4}
    for name, most in bounds.items():
        assert deviations(got[name].ravel(), expected[name].ravel()) <= most, name
    assert not np.array_equal(got["image"], ours(tmp_path, 64, 40)["image"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["sd3", "flux"])
@pytest.mark.parametrize("save", ["float16", "bfloat16"])
def test_half_precision_weights(tmp_path: Path, family: str, save: str) -> None:
    """Published folders are in half precision: the stored values are computed in float32."""
    pipeline = getattr(pipelinemodels, family)(tmp_path / "full")
    half = pipeline.to(getattr(torch, save))
    half.save_pretrained(tmp_path)
    for name in ("tokenizer", "tokenizer_2"):
        for file in (tmp_path / "full" / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    expected = reference(half.to(torch.float32), 64, 40)
    compare(ours(tmp_path, 64, 40), expected)


def test_long_prompts_are_truncated_as_in_diffusers(tmp_path: Path) -> None:
    pipeline = pipelinemodels.sd3(tmp_path, layers=1)
    long = "a red cat on the moon, " * 30
    with torch.no_grad():
        texts, _, pooled, _ = pipeline.encode_prompt(long, None, None, max_sequence_length=TOKENS)
    with mpool.Pool() as pool:
        entry = pool._find(str(tmp_path), "text_to_image")
        with pytest.warns(UserWarning, match="too long for the text encoder CLIP, which supports 77 tokens"):
            request = text_to_image.prepare(entry, long, text_to_image.GenerateImageOptions(
                width=16, height=16, num_inference_steps=1, guidance_scale=0, max_sequence_length=TOKENS,
                compute="float32"), keep=True)
        ticket = request.submit(None)
        ticket.wait()
        found = ticket.generated_images()
        near(found["texts"][0], texts[0])
        near(found["pooled"][0], pooled[0])


def test_previews_show_the_predicted_image(tmp_path: Path) -> None:
    """A preview is the step's latents minus the remaining noise along its velocity, decoded by diffusers' decoder."""
    pipeline = pipelinemodels.flux(tmp_path)
    with mpool.Pool() as pool:
        entry = pool._find(str(tmp_path), "text_to_image")
        request = text_to_image.prepare(entry, PROMPT, text_to_image.GenerateImageOptions(
            width=32, height=40, num_inference_steps=STEPS, preview_every=1, latents=latents_of(32, 40),
            compute="float32"), keep=True)
        ticket = request.submit(None)
        ticket.wait()
        assert ticket.image_progress() == (STEPS, STEPS - 1, 1, STEPS - 1)
        states = np.concatenate([request.noise[0][None], ticket.generated_images()["history"][0]])
        for step in range(STEPS - 1):
            velocity = (states[step + 1] - states[step]) / (request.sigmas[step + 1] - request.sigmas[step])
            latents = torch.tensor(states[step + 1] - request.sigmas[step + 1] * velocity)[None]
            config = pipeline.vae.config
            with torch.no_grad():
                decoded = pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor).sample
            expected = (decoded[0].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1).numpy() * 255
            assert np.abs(np.array(ticket.preview(step), float) - expected).max() <= 0.51
