"""The demo models bundled with mpool: they are complete, small and equal to the catalogue, and reach the accuracy on
their cards on held-out images. Images and split come from ``training/``."""

import importlib.metadata
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mpool
from mpool import errors
from mpool.models import BundledRef, load_catalogue, resolve, verify
from mpool.models.sources import bundled

pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "training" / "digits.py").exists():
    pytest.skip("needs the training scripts", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from training import digits, measure, shipping  # noqa: E402

KEYS = [key for key, row in load_catalogue().rows.items() if any(isinstance(ref, BundledRef) for ref in row.refs)]


# ---- files ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("key", KEYS)
def test_files_match_the_catalogue(key: str) -> None:
    """Every file except the card is in the catalogue, the row matches the file, and nothing is downloaded."""
    row = load_catalogue().rows[key]
    found = resolve(key, offline=True)
    assert (found.key, found.source, found.ref) == (key, "bundled", f"mpool:{key}")
    assert resolve(f"mpool:{key}", offline=True) == found
    verify(found)
    folder = Path(found.path)
    assert folder.parent == Path(bundled.ROOT)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there == {*(row.files or ()), "README.md"}
    assert row.parameters == shipping.tensors(folder)[0]


def test_each_changed_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``verify`` compares each file with the hash of its own name in the catalogue, and names the one that differs."""
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path / "cache"))  # no hash is recorded there
    found = resolve(KEYS[0], offline=True)
    names = [os.path.relpath(path, found.path) for path in found.files]
    assert len(names) > 2
    for changed in names:
        place = tmp_path / changed.replace("/", "-")
        shutil.copytree(found.path, place)
        copy = replace(found, path=str(place), files=tuple(str(place / name) for name in (*names, "README.md")))
        with open(place / changed, "ab") as file:
            file.write(b" ")
        with pytest.raises(errors.IntegrityError, match=changed):
            verify(copy)
    verify(replace(found, files=(*found.files, os.path.join(found.path, "README.md"))))  # no hash is known of the card


def test_demo_models_are_installed() -> None:
    """The file list of an installed mpool contains every file of the demo models."""
    try:
        files = importlib.metadata.distribution("mpool").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mpool is not installed, only on the path")
    installed = {Path(str(file.locate())).resolve() for file in files}
    if Path(mpool.__file__).resolve() not in installed:
        pytest.skip("the mpool on the path is not the installed one")
    for key in KEYS:
        assert set(map(Path.resolve, map(Path, resolve(key).files))) <= installed


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown name, a key of a model that is not bundled, a missing folder and a changed file are errors."""
    for name in ("digits-clap", "bge-small-en-v1"):
        with pytest.raises(errors.UnknownModel):
            resolve(f"mpool:{name}")
    with pytest.raises(errors.InvalidArgument):
        resolve("mpool:../digits-clip")
    monkeypatch.setattr(bundled, "ROOT", str(tmp_path))
    with pytest.raises(errors.FileError, match="this file of a bundled model is missing"):
        resolve("digits-clip")
    (tmp_path / "digits-clip").mkdir()
    for name in load_catalogue().rows["digits-clip"].files or ():
        (tmp_path / "digits-clip" / name).write_text("{}")
    with pytest.raises(errors.IntegrityError):
        resolve("digits-clip")


# ---- demo images ----------------------------------------------------------------------------------------------------

# ---- CLIP -----------------------------------------------------------------------------------------------------------

@pytest.mark.sample(2)
@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_clip_classifies_digits(compute: str) -> None:
    """Zero-shot accuracy is at least 95 %; with permuted prompts it is below 10 %, no better than chance."""
    assert measure.zero_shot("digits-clip", compute=compute) >= 0.95
    assert measure.zero_shot("digits-clip", digits.PROMPTS[1:] + digits.PROMPTS[:1], compute=compute) < 0.1


def test_clip_matches_transformers() -> None:
    """Embeddings of images and texts match, computed from the bundled files."""
    import torch
    import transformers

    folder = resolve("digits-clip").path
    model = transformers.CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    processor = transformers.CLIPProcessor.from_pretrained(folder)
    _, held = digits.load()
    images = [np.repeat(image[:, :, None], 3, axis=2) for image in held.images[:20]]
    with torch.no_grad():
        expected = model(**processor(text=list(digits.PROMPTS), images=images, return_tensors="pt", padding=True))
    for got, wanted in ((mpool.embed_image(images, "digits-clip", compute="float32"), expected.image_embeds),
                        (mpool.embed(list(digits.PROMPTS), "digits-clip", compute="float32"), expected.text_embeds)):
        got = got / np.linalg.norm(got, axis=1, keepdims=True)
        assert np.abs(got - wanted.numpy()).max() <= 1e-4


# ---- LLaVA ----------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_llava_names_digits(compute: str) -> None:
    """At least 95 % of the 500 completions are correct."""
    question = "What digit is this?"
    assert measure.answered("digits-llava", question, *measure.QUESTIONS[question], compute=compute) >= 0.95


@pytest.mark.sample(3)
@pytest.mark.parametrize("question", list(measure.QUESTIONS)[1:])
def test_questions_are_answered(question: str) -> None:
    """At least 94 % for the other questions, one of them about two images."""
    assert measure.answered("digits-llava", question, *measure.QUESTIONS[question]) >= 0.94


def test_conversations(pool: mpool.Pool) -> None:
    """A question about an image, a follow-up question, and the description of an image without a question."""
    for digit in (3, 6):
        image = str(Path(bundled.ROOT) / "images" / f"{digit}.png")
        messages = [{"role": "user", "content": [{"type": "image", "path": image},
                                                 {"type": "text", "text": "What digit is this?"}]}]
        first = pool.chat(messages, "digits-llava", temperature=0, max_tokens=40)
        assert first.text == f"This is {digits.called(digit)}." and first.finish_reason == "stop"
        messages += [first.message, {"role": "user", "content": "Is it even or odd?"}]
        assert pool.chat(messages, "digits-llava", temperature=0, max_tokens=40).text == \
            f"It is {'odd' if digit % 2 else 'even'}."
        assert pool.describe_image(image, model="digits-llava", temperature=0) == \
            f"A handwritten {digits.NAMES[digit]}, dark ink on white paper."


def test_llava_matches_transformers() -> None:
    """Prompts and greedy completions match, for one and two images, computed from the bundled files."""
    import torch
    import transformers
    from PIL import Image

    folder = resolve("digits-llava").path
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    _, held = digits.load()
    for at, question in enumerate(measure.QUESTIONS):
        images = [Image.fromarray(held.images[at + i]).convert("RGB") for i in range(measure.QUESTIONS[question][1])]
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        inputs = processor(images=images, text=processor.apply_chat_template(messages, add_generation_prompt=True),
                           return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1]:]
        done = mpool.vision(images, question, "digits-llava", temperature=0, max_tokens=40, compute="float32")
        assert done.text == processor.decode(ids, skip_special_tokens=True)
        assert done.usage.prompt_tokens == inputs["input_ids"].shape[1]


# ---- Stable Diffusion 3 ---------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_generated_digits_are_recognised() -> None:
    """Two images of each digit with default options; float32 gives the same images on every x86-64 CPU."""
    found = measure.recognised("digits-sd3", 2, compute="float32")
    assert sum(found) >= 19, found


def test_generated_digits_follow_their_prompts() -> None:
    """Different prompts with the same noise give different digits."""
    images = [mpool.generate_image(digits.PROMPTS[digit], "digits-sd3", seed=3, num_inference_steps=8,
                                     guidance_scale=4, compute="float32").array for digit in (1, 8)]
    classifier = digits.classifier(digits.load()[0])
    assert list(classifier.predict(digits.cells_of(np.stack(images) * 255))) == [1, 8]


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_a_hundred_generated_digits_are_recognised(compute: str) -> None:
    """At least 95 of ten images per digit are recognised."""
    found = measure.recognised("digits-sd3", 10, compute=compute)
    assert sum(found) >= 95, found


def test_generated_images_match_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text embeddings, the latents of four steps, and the image match, computed from the bundled files."""
    import diffusers
    import torch

    import pipelineparity as parity

    monkeypatch.setattr(parity, "PROMPT", "a handwritten seven")
    folder = resolve("digits-sd3").path
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    for asked in ({"guidance_scale": 7.0}, {"guidance_scale": 1.0}):
        parity.compare(parity.ours(folder, 32, 32, **asked), parity.reference(pipeline, 32, 32, **asked))
