"""Vision models as pairs of GGUF files in the layout of llama.cpp's converters, compared with the transformers folders
that they were written from (test_parity_vision.py compares these with transformers); and mismatched pairs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors
from mpool.models.describing import describe_resolved
from mpool.models.formats import ollama_gguf
from mpool.models.sources import Resolved
from mpool.tasks.requests import vision_request

import visionmodels
from corelib import SAMPLING
from paritymodels import transformers
from tinygguf import gguf
from visiongguf import decoder, ollama, projector
from visionparity import greedy_reference, random_images, reference, relative, request

UNKNOWN = 0
#: Families whose files contain the preprocessing of images.
OWN_PREPROCESSING = ("llava_next", *visionmodels.QWEN, "smolvlm", "pixtral", "mistral3", "internvl")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("family, swapped", [("llava", False), ("llava", True), ("llava_uneven", False),
                                             ("llava_next", False), ("smolvlm", False), ("gemma3", False),
                                             ("lfm2_vl", False), ("pixtral", False), ("mistral3", False),
                                             ("internvl", False),
                                             *((name, False) for name in visionmodels.GEMMA4 + visionmodels.QWEN)])
def test_gguf_pair_matches_transformers(tmp_path: Path, family: str, swapped: bool) -> None:
    """Rows of the images, logits and greedy tokens match those of transformers for the same tiles."""
    model = visionmodels.randomised(family)
    if family in ("llava_next", "pixtral"):
        model.config.text_config.sliding_window = None  # GGUF files of Mistral have no window
    folder = visionmodels.save(model, family, tmp_path / "folder")
    pair = tmp_path / "pair"
    pair.mkdir()
    decoder(model, pair / "text-F32.gguf")
    projector(model, pair / "mmproj-text-F32.gguf", swapped=swapped)
    images = random_images([(63, 90), (40, 40)])
    with mpool.Pool() as pool:
        made = request(pool, folder, images)
        found = pool.get(str(pair))
        assert found.capability == "vision"
        # The vocabulary has no <image>, so any token may be the placeholder.
        assert found.description.vision.image_token_id == -1
        prompt = np.where(made.prompt == visionmodels.IMAGE, UNKNOWN, made.prompt).astype(np.int32)
        ticket = pool.registry.submit_text(found._entry.core_key("float32"), prompt, vision=True,
                                           images=made.images.arrays(),
                                           **{**SAMPLING, "prompt_logits": True, "max_tokens": 8})
        ticket.wait()
        ticket.check()
        if family in OWN_PREPROCESSING:
            pair_made = vision_request(pool, images, visionmodels.text(3, 20), pool.register(
                "named", str(pair), chat_template=TEMPLATE), {})
            for one, other in zip(pair_made.images.arrays()[:3], made.images.arrays()[:3]):
                assert np.array_equal(one, other)
            runs = [one.images.runs.reshape(-1, 3)[:, 1:].tolist() for one in (pair_made, made)]
            assert runs[0] == runs[1]
            assert np.array_equal(pair_made.images.sources, made.images.sources)
    rows, logits = reference(model, made, images)
    assert relative(ticket.image_rows(), rows) <= 1e-4
    assert relative(ticket.prompt_logits(), logits) <= 1e-4
    assert ticket.tokens(0)[0].tolist() == greedy_reference(model, made, images, 8)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gemma4_small", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
                                    "qwen3_5", "qwen3_5_moe", "mistral3"])
def test_files_of_ollamas_converter_see(tmp_path: Path, family: str) -> None:
    """Ollama's files hold the language model and the image encoder, under names of their own."""
    model = visionmodels.randomised(family)
    folder = visionmodels.save(model, family, tmp_path / "folder")
    decoder(model, tmp_path / "text.gguf", visionmodels.IMAGE)
    projector(model, tmp_path / "image.gguf")
    path = ollama(tmp_path / "text.gguf", tmp_path / "image.gguf", tmp_path / "sha256-0")
    images = random_images([(63, 90), (40, 40)])
    with mpool.Pool() as pool:
        made = request(pool, folder, images)
        found = pool.get(pool.register("named", str(path), chat_template=TEMPLATE))
        assert found.capability == "vision"
        ticket = pool.registry.submit_text(found._entry.core_key("float32"), made.prompt, vision=True,
                                           images=made.images.arrays(), **{**SAMPLING, "prompt_logits": True})
        ticket.wait()
        ticket.check()
    rows, logits = reference(model, made, images)
    assert relative(ticket.image_rows(), rows) <= 1e-4
    assert relative(ticket.prompt_logits(), logits) <= 1e-4


def test_ollamas_mistral_without_yarn() -> None:
    """Its converter writes the keys of YaRN always, with the value 0 or "", and does not know the pre-tokenizer."""
    kept = {"general.architecture": "mistral3", "mistral3.rope.freq_base": 1e6}
    given = {f"mistral3.rope.{key}": 0.0 for key in ("scaling.factor", "scaling.beta_fast", "scaling.beta_slow")}
    found, _ = ollama_gguf.translated({**kept, **given, "mistral3.rope.scaling.type": "",
                                       "tokenizer.ggml.pre": "default"}, ())
    assert found == {**kept, "tokenizer.ggml.pre": "tekken"}


def test_a_downloaded_projector_of_no_use_leaves_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    """A reference to a repository does not ask for images; a row of the catalogue with a projector file does."""
    model = visionmodels.randomised("gemma3")
    decoder(model, tmp_path / "text.gguf", visionmodels.IMAGE)
    found = Resolved("org/name", "gguf", str(tmp_path / "text.gguf"), "hub", projector=str(tmp_path / "mmproj.gguf"))
    projector(model, tmp_path / "mmproj.gguf")
    assert describe_resolved(found).capability == "vision"
    projector(model, tmp_path / "mmproj.gguf", width=40)  # another model has this width
    assert describe_resolved(found).capability == "text_to_text"
    with pytest.raises(errors.FormatError):
        describe_resolved(replace(found, key="gemma-3-4b-it"))
    add = gguf.GGUFWriter.add_string
    monkeypatch.setattr(gguf.GGUFWriter, "add_string", lambda self, name, value: add(
        self, name, "other" if name == "clip.projector_type" else value))
    projector(model, tmp_path / "mmproj.gguf")
    with caplog.at_level("WARNING", "mpool"):
        assert describe_resolved(found).capability == "text_to_text" and "accepts texts only" in caplog.text
    with pytest.raises(errors.Unsupported, match="clip.projector_type is 'other'"):
        describe_resolved(replace(found, key="gemma-3-4b-it"))


def test_a_pair_drafts_for_its_decoder(tmp_path: Path) -> None:
    """A draft model has no use for images."""
    model = visionmodels.randomised("llava_uneven")
    decoder(model, tmp_path / "text-F32.gguf")
    projector(model, tmp_path / "mmproj-F32.gguf")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "compute": "float32", "ignore_eos": True}
    with mpool.Pool() as pool:
        alone = pool.generate([5, 9, 31], str(tmp_path / "text-F32.gguf"), **options)
        drafted = pool.load(str(tmp_path / "text-F32.gguf"), name="drafted", draft=str(tmp_path))
        assert pool.generate([5, 9, 31], drafted, **options).token_ids == alone.token_ids
        with pytest.raises(errors.InvalidArgument, match="`draft`.*hf://org/name/file.gguf"):
            pool.load(str(tmp_path), draft=str(tmp_path / "text-F32.gguf"))


def test_the_decoder_of_a_pair_generates_text_alone(tmp_path: Path) -> None:
    """The decoder of Qwen2.5-VL is a Qwen2 for text: the positions of text are the same on all axes."""
    model = visionmodels.randomised("qwen2_5_vl")
    folder = visionmodels.save(model, "qwen2_5_vl", tmp_path / "folder")
    decoder(model, tmp_path / "text.gguf", visionmodels.IMAGE)
    prompt = [int(word[1:]) for word in visionmodels.text(3, 20).split()]
    options = {"temperature": 0, "max_tokens": 8, "compute": "float32"}
    with mpool.Pool() as pool:
        alone = pool.generate(prompt, str(tmp_path / "text.gguf"), **options)
        assert alone.token_ids == pool.generate(prompt, str(folder), **options).token_ids


@pytest.mark.parametrize("key, value, words", [
    ("clip.vision.image_grid_pinpoints", [40, 80, 80], "alternating widths and heights"),
    ("clip.vision.image_grid_pinpoints", [41, 80], "multiples of 40"),
    ("clip.vision.image_grid_pinpoints", [4000, 4000], "at most"),
    ("clip.vision.mm_patch_merge_type", "flat", "together with clip.vision.mm_patch_merge_type"),
    ("clip.vision.mm_patch_merge_type", "other", "flat, spatial_unpad")])
def test_invalid_tile_settings_are_refused(tmp_path: Path, key: str, value: Any, words: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    model = visionmodels.randomised("llava_next")
    decoder(model, tmp_path / "text-F32.gguf", visionmodels.IMAGE)
    given = "add_array" if isinstance(value, list) else "add_string"
    add = getattr(gguf.GGUFWriter, given)
    monkeypatch.setattr(gguf.GGUFWriter, given, lambda self, name, old: add(self, name, value if name == key else old))
    projector(model, tmp_path / "mmproj-F32.gguf")
    with mpool.Pool() as pool, pytest.raises(errors.FormatError, match=words):
        pool.load(str(tmp_path))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair = tmp_path_factory.mktemp("pair")
    model = visionmodels.randomised("llava")
    decoder(model, pair / "text-F32.gguf", visionmodels.IMAGE)
    projector(model, pair / "mmproj-F32.gguf")
    return pair


def test_a_registered_pair_answers_questions_about_images(llava: Path) -> None:
    """The chat template comes from `register`. Images are padded to a square and then resized, as for LLaVA 1.5."""
    image = visionmodels.image(3, 50, 90)
    with mpool.Pool() as pool:
        model = pool.register("pair", str(llava), chat_template=TEMPLATE)
        done = model.vision([image, image], "w10 w11", temperature=0, max_tokens=4)
        made = vision_request(pool, image, "w10", "pair", {})
        alone = pool.load(str(llava / "text-F32.gguf"))
    assert done.usage.prompt_tokens > 50 and len(done.token_ids) <= 4
    assert alone.capability == "text_to_text"
    tile = made.images.pixels.reshape(40, 40, 3).astype(float)
    config = {"size": {"shortest_edge": 40}, "crop_size": {"height": 40, "width": 40}, "do_pad": True}
    other = transformers.LlavaImageProcessorPil(**config, do_rescale=False, do_normalize=False)(
        image, return_tensors="pt", input_data_format="channels_last")["pixel_values"][0].numpy()
    assert np.abs(tile - other.transpose(1, 2, 0)).max() <= 1


def test_incomplete_patches_are_cropped(tmp_path: Path) -> None:
    """A side of 44 is five and a half patches of 8: the pixels are those of whole patches at the upper left."""
    model = visionmodels.randomised("llava_uneven")
    decoder(model, tmp_path / "text-F32.gguf", visionmodels.IMAGE)
    projector(model, tmp_path / "mmproj-F32.gguf")
    image = visionmodels.image(3, 44, 44)
    with mpool.Pool() as pool:
        made = vision_request(pool, image, "w10", pool.register("pair", str(tmp_path), chat_template=TEMPLATE), {})
    assert np.array_equal(made.images.pixels.reshape(40, 40, 3), image[:40, :40])


def test_image_placeholders_are_not_tokens(tmp_path: Path) -> None:
    """If the vocabulary has neither <image> nor bytes, unknown words become the unknown token, and none of them is an
    image."""
    model = visionmodels.randomised("llava")
    decoder(model, tmp_path / "text-F32.gguf")
    projector(model, tmp_path / "mmproj-F32.gguf")
    image = visionmodels.image(3, 50, 90)
    with mpool.Pool() as pool:
        made = vision_request(pool, [image, image], "w10 \u00fc <unk> \ufdd8 w11", str(tmp_path), {})
        runs = made.images.runs.reshape(-1, 3).tolist()
        entry = pool.get(str(tmp_path))._entry
        head, line = ([*entry.tokenizer().encode(text, add_special=False)] for text in ("USER: ", "\n"))
        assert runs == [[len(head), 25, 1], [len(head) + 25 + len(line), 25, 1]]
        assert (made.prompt == UNKNOWN).sum() > 50 + len(line)  # the words of the text are unknown too
        done = pool.vision(image, "w10 \u00fc w11", str(tmp_path), temperature=0, max_tokens=3)
        assert len(done.token_ids) <= 3 and done.usage.prompt_tokens == len(vision_request(
            pool, image, "w10 \u00fc w11", str(tmp_path), {}).prompt)
        with pytest.raises(errors.InvalidArgument, match=r"U\+FDD8 to U\+FDDB"):
            pool.vision(image, "\ufdd8\ufdd9\ufdda\ufddb", str(tmp_path))
        talk = [{"role": role, "content": word} for role, word in (
            ("system", "w1"), ("user", "w2"), ("assistant", "w3"), ("user", "w4"))]
        assert entry.template().render(talk, add_generation_prompt=True) == (  # the template of LLaVA 1.5
            "w1 USER: w2 ASSISTANT: w3</s>USER: w4 ASSISTANT:")


def test_mismatched_pairs_are_refused(llava: Path, tmp_path: Path) -> None:
    model = visionmodels.randomised("llava")
    text, other = tmp_path / "text.gguf", tmp_path / "mmproj.gguf"
    text.write_bytes((llava / "text-F32.gguf").read_bytes())
    with mpool.Pool() as pool:
        projector(model, other, width=48)
        with pytest.raises(errors.FormatError, match="64 outputs, the hidden size of"):
            pool.load(str(tmp_path))
        other.write_bytes(text.read_bytes())
        with pytest.raises(errors.FormatError, match="clip, the architecture of projector files"):
            pool.load(str(tmp_path))
        other.write_bytes((llava / "mmproj-F32.gguf").read_bytes()[:4000])
        with pytest.raises(errors.FormatError):
            pool.load(str(tmp_path))
        (tmp_path / "mmproj-2.gguf").write_bytes(b"")
        with pytest.raises(errors.InvalidArgument, match="2 projector files"):
            pool.load(str(tmp_path))
