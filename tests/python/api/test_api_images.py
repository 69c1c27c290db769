"""mpool.embed_image: shapes, options, errors, bulk requests, asyncio, jobs; models with two capabilities; folders."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.tasks import image_embedding
from mpool.models import load_catalogue
from mpool.errors import FileError, FormatError, InvalidArgument, LimitError, Unsupported, WrongCapability

import imagemodels
from waiting import idle


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imagemodels.save(imagemodels.randomised("clip", 2), "clip", tmp_path_factory.mktemp("clip"))


IMAGES = [imagemodels.image(seed, 40 + seed, 50) for seed in range(5)]


def png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


# ---- shapes and options --------------------------------------------------------------------------------------------

def test_shapes(pool: mpool.Pool, clip: Path, dino: Path) -> None:
    one, many, none = (pool.embed_image(given, clip) for given in (IMAGES[0], IMAGES, []))
    assert (one.shape, many.shape, none.shape) == ((24,), (5, 24), (0, 24))
    assert one.dtype == many.dtype == none.dtype == np.float32 and many.flags.writeable
    assert np.array_equal(one, many[0])
    assert np.array_equal(pool.embed_image([png(image) for image in IMAGES], clip), many)
    assert np.array_equal(pool.embed_image(np.stack([IMAGES[0]] * 2), clip), many[[0, 0]])
    assert pool.embed_image(IMAGES[0], dino).shape == (48,)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_equal_images_are_counted(dino: Path, isolation: str) -> None:
    """Each image comes from another source, so its prepared pixels are compared."""
    same, other = IMAGES[:2]
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation=isolation)) as pool:
        rows = pool.embed_image([same, png(same), other, same.copy()], dino)
        assert pool.metrics()["dedup_hits"] == 2
        assert np.array_equal(rows[[0, 0, 0]], rows[[0, 1, 3]]) and not np.array_equal(rows[0], rows[2])
        asyncio.run(mpool.aio.embed_image([other, other], dino, normalize=True, pool=pool))
        assert pool.metrics()["dedup_hits"] == 3  # other options: no vector of the first request is used


def test_options(pool: mpool.Pool, clip: Path) -> None:
    plain = pool.embed_image(IMAGES, clip, compute="float32")
    unit = pool.embed_image(IMAGES, clip, compute="float32", normalize=True, dimensions=9)
    assert np.allclose(unit, plain[:, :9] / np.linalg.norm(plain[:, :9], axis=1, keepdims=True), atol=1e-6)
    assert pool.embed_image(IMAGES, clip, precision="ubinary").shape == (5, 3)
    assert np.array_equal(pool.embed_image(IMAGES, clip, precision="ubinary"), np.packbits(
        pool.embed_image(IMAGES, clip) > 0, axis=-1))
    assert pool.embed_image(IMAGES, clip, precision="int8").dtype == np.int8
    for options, words in (({"dimensions": 25}, "`dimensions` must be an integer from 1 to 24, got 25"),
                           ({"dimensions": 0}, "dimensions"),
                           ({"normalize": 1}, "normalize"), ({"precision": "float16"}, "precision"),
                           ({"on_error": "skip"}, "on_error"), ({"allow_urls": 1}, "allow_urls"),
                           ({"compute": "float64"}, "compute"), ({"on_error": "null", "precision": "int8"}, "on_error"),
                           ({"max_inputs": 0}, "max_inputs"), ({"progress": 3}, "progress"),
                           ({"timeout": -1}, "timeout")):
        with pytest.raises(InvalidArgument, match=words) as caught:
            pool.embed_image(IMAGES, clip, **options)
        assert caught.value.param in options or "max_inputs" in options
    with pytest.raises(InvalidArgument, match="`precision` must be .* for a single input, got 'int8'") as caught:
        pool.embed_image(IMAGES[:1], clip, precision="int8")
    assert caught.value.param == "precision"
    with pytest.raises(InvalidArgument, match="`task` is not an option of embed_image") as caught:
        pool.embed_image(IMAGES, clip, task="query")
    assert caught.value.param == "task"
    with pytest.raises(LimitError, match="`images` must hold at most 4 images, got 5"):
        pool.embed_image(IMAGES, clip, max_inputs=4)


# ---- faults ----------------------------------------------------------------------------------------------------------

def test_faults(pool: mpool.Pool, clip: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad: list[Any] = [IMAGES[0], b"no image", IMAGES[1], str(tmp_path / "absent.png")]
    with pytest.raises(InvalidArgument, match="`images\\[1\\]` must be a PNG") as caught:
        pool.embed_image(bad, clip)
    assert caught.value.key
    with pytest.raises(FileError, match="absent"):
        pool.embed_image(bad[3], clip)
    with caplog.at_level(logging.WARNING, logger="mpool"):
        rows = pool.embed_image(bad, clip, on_error="null")
    assert np.isnan(rows[[1, 3]]).all() and np.array_equal(rows[[0, 2]], pool.embed_image(IMAGES[:2], clip))
    assert "2 of 4 images have no vector" in caplog.text and "`images[1]` must be a PNG" in caplog.text
    assert np.isnan(pool.embed_image(b"no image", clip, on_error="null")).all()
    assert np.isnan(pool.embed_image([b"x"] * 40, clip, on_error="null")).all()


def test_nan_affects_only_its_own_image(tmp_path: Path, pool: mpool.Pool) -> None:
    """In this model only white pixels give infinite values."""
    model = imagemodels.randomised("dinov2", 1)
    model.embeddings.patch_embeddings.projection.weight.data.fill_(3e38)
    folder = imagemodels.save(model, "dinov2", tmp_path)
    steps = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**steps, "do_normalize": False}))
    fine, white = np.zeros((56, 56, 3), np.uint8), np.full((56, 56, 3), 255, np.uint8)
    with pytest.raises(mpool.NumericError):
        pool.embed_image([fine, white, fine], folder)
    rows = pool.embed_image([fine, white, fine, fine], folder, on_error="null")
    assert np.isnan(rows[1]).all() and np.array_equal(rows[[0, 2, 3]], np.stack([pool.embed_image(fine, folder)] * 3))


# ---- many ----------------------------------------------------------------------------------------------------------

def test_bulk(pool: mpool.Pool, clip: Path) -> None:
    given = [imagemodels.image(seed, 44, 41) for seed in range(3 * image_embedding.SLICE + 5)]
    seen: list[tuple[int, int | None]] = []
    whole = pool.embed_image(given, clip, progress=lambda done, total: seen.append((done, total)))
    assert np.array_equal(whole[::7], np.stack([pool.embed_image(image, clip) for image in given[::7]]))
    assert seen[-1] == (len(given), len(given)) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    pool.embed_image(given[0], clip, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (1, 1)
    with pytest.raises(InvalidArgument, match="images.50.` must be 1 to .* bytes, got 0"):
        pool.embed_image([*given[:50], b""], clip)
    idle(pool)


def test_aio(pool: mpool.Pool, clip: Path) -> None:
    given = [imagemodels.image(seed, 44, 41) for seed in range(2 * image_embedding.SLICE + 3)]
    expected = pool.embed_image(given, clip)

    async def main() -> None:
        several = await asyncio.gather(*(mpool.aio.embed_image(image, clip, pool=pool) for image in given[:6]))
        assert np.array_equal(np.stack(several), expected[:6])
        assert np.array_equal(await mpool.aio.embed_image(given, clip, pool=pool), expected)
        rows = await mpool.aio.embed_image([given[0], b"x"], clip, pool=pool, on_error="null")
        assert np.array_equal(rows[0], expected[0]) and np.isnan(rows[1]).all()
        assert (await mpool.aio.embed_image([], clip, pool=pool)).shape == (0, 24)
        with pytest.raises(InvalidArgument, match="`images` must be a PNG"):
            await mpool.aio.embed_image(b"x", clip, pool=pool)
        task = asyncio.ensure_future(mpool.aio.embed_image(given * 100, clip, pool=pool))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert np.array_equal(await mpool.aio.embed_image(given[0], clip, pool=pool), expected[0])

    asyncio.run(main())


# ---- a model of two capabilities -------------------------------------------------------------------------------------

def test_two_capabilities(clip: Path, dino: Path) -> None:
    with mpool.Pool() as pool:
        model = pool.load(clip, name="both")
        assert [row.capability for row in pool.ps()] == ["image_embedding", "text_embedding"]
        assert all(row.state == "ready" for row in pool.ps()) and len({row.model for row in pool.ps()}) == 2
        assert model.capability == "image_embedding" and model.capabilities == ("image_embedding", "text_embedding")
        assert model.dimensions == 24 and model.context_length == 20
        for same in (pool.get("both", "text_embedding"), pool.get("both", "image_embedding"), pool.get(clip)):
            assert same == model
        vectors = model.embed(["w5 w6", "w7"])
        assert np.array_equal(pool.embed(["w5 w6", "w7"], "both"), vectors)
        assert mpool.similarity(vectors, model.embed_image(IMAGES)).shape == (2, 5)
        assert pool.check("both") > 0 and model.count_tokens("w5 w6") == 4
        assert pool.detokenize(pool.tokenize("w5 w6", clip), clip) == "w5 w6"
        with pytest.raises(InvalidArgument, match="no tokenizer"):
            pool.tokenize("w5", dino)
        again = pickle.loads(pickle.dumps(model))
        assert np.array_equal(again.embed("w7"), vectors[1])
        exact = pool.load(model, compute="float32")
        assert np.array_equal(exact.embed_image(IMAGES[0]), pool.embed_image(IMAGES[0], clip, compute="float32"))
        pool.unload("both")
        assert all(row.state == "cold" for row in pool.ps())
        assert np.array_equal(model.embed("w7"), vectors[1])
        with pytest.raises(WrongCapability, match="capability is image_embedding, not text_embedding"):
            pool.embed("w5", dino)
        with pytest.raises(WrongCapability, match="not text_to_text"):
            pool.generate("w5", clip)
        with pytest.raises(WrongCapability):
            pool.get(dino).context_length


def test_text_models_refuse_images(pool: mpool.Pool, bert: Path) -> None:
    with pytest.raises(WrongCapability, match="capability is text_embedding, not image_embedding"):
        pool.embed_image(IMAGES, bert)


def test_settings(pool: mpool.Pool, clip: Path, dino: Path) -> None:
    with mpool.Pool() as pool:
        unit = pool.register("unit", clip, normalize=True, prompts={"photo": "w9"})
        assert np.allclose(np.linalg.norm(unit.embed_image(IMAGES), axis=1), 1, atol=1e-5)
        assert np.allclose(np.linalg.norm(unit.embed(["w5", "w6 w7"], prompt_name="photo"), axis=1), 1, atol=1e-5)
        assert np.array_equal(unit.embed(" w5", prompt_name="photo"), unit.embed("w9 w5"))
        for settings in ({"prompts": {}}, {"pooling": "mean"}, {"chat_template": "x"}):
            with pytest.raises(InvalidArgument):
                pool.register("other", dino, **settings)
        with pytest.raises(InvalidArgument, match="normalize"):
            pool.register("other", dino, normalize="yes")


def test_padded_texts_keep_their_length(tmp_path: Path) -> None:
    folder = imagemodels.save(imagemodels.randomised("siglip", 1), "siglip", tmp_path)
    with mpool.Pool() as pool:
        with pytest.raises(InvalidArgument, match="max_length"):
            pool.register("short", folder, max_length=10)
        whole = pool.embed(["w5 w6", " ".join(["w5"] * 60)], folder)
        assert np.array_equal(whole[0], pool.embed("w5 w6", folder))
        left = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**left, "padding_side": "left"}))
        other = pool.register("left", folder).embed("w5 w6")
        assert not np.allclose(other, whole[0], atol=1e-2)


def test_worker_processes_give_the_same_results(dino: Path, clip: Path) -> None:
    """Results are the same bytes, for images that exceed one frame and for both networks of a model."""
    large = [imagemodels.image(1, 900, 1100), *IMAGES * 5]
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        expected, pair = pool.embed_image(large, dino), (pool.embed_image(IMAGES, clip), pool.embed(["w5", "w6"], clip))
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation="process")) as pool:
        assert np.array_equal(pool.embed_image(large, dino), expected)
        assert np.array_equal(pool.embed_image(IMAGES, clip), pair[0])
        assert np.array_equal(pool.embed(["w5", "w6"], clip), pair[1])
        assert all(row.processes for row in pool.ps())
        with pytest.raises(Unsupported, match="rows of images"):
            size = np.array([56, 56], np.int32)
            pool.registry.embed_images(str(dino), np.zeros(56 * 56 * 3, np.uint8), size, output=1)


# ---- configuration in model folders --------------------------------------------------------------------------------

def changed(source: Path, target: Path, name: str, **values: Any) -> Path:
    """Copy a folder and replace keys of one of its JSON files. None removes a key; ``__`` separates nested keys."""
    shutil.copytree(source, target)
    config = json.loads((target / name).read_text())
    for key, value in values.items():
        at = config
        *sections, key = key.split("__")
        for section in sections:
            at = at[section]
        at[key] = value
        if value is None:
            del at[key]
    (target / name).write_text(json.dumps(config))
    return target


def test_processors_in_older_and_newer_formats(clip: Path, tmp_path: Path, pool: mpool.Pool) -> None:
    expected = pool.embed_image(IMAGES, clip)
    old = changed(clip, tmp_path / "old", "preprocessor_config.json", size=40, crop_size=40, image_processor_type=None,
                  feature_extractor_type="CLIPFeatureExtractor")
    new = shutil.copytree(clip, tmp_path / "new")
    steps = json.loads((new / "preprocessor_config.json").read_text())
    (new / "preprocessor_config.json").unlink()
    with pytest.raises(FormatError, match="preprocessor_config.json"):
        pool.embed_image(IMAGES, new)
    (new / "processor_config.json").write_text(json.dumps({"image_processor": steps,
                                                           "processor_class": "CLIPProcessor"}))
    for folder in (old, new):
        assert np.array_equal(pool.embed_image(IMAGES, folder), expected)


def test_older_configurations(clip: Path, tmp_path: Path, pool: mpool.Pool) -> None:
    """`vision_config_dict` and `text_config_dict` override the sections without `_dict`. Buffers are ignored."""
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(clip, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 7
    config |= {"vision_config_dict": {"num_hidden_layers": 2}, "text_config_dict": None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["text_model.embeddings.position_ids"] = np.arange(20)[None]
    tensors["vision_model.embeddings.position_ids"] = np.arange(26)[None]
    save_file(tensors, folder / "model.safetensors")
    assert np.array_equal(pool.embed_image(IMAGES, folder), pool.embed_image(IMAGES, clip))


def test_folders_of_sentence_transformers(clip: Path, tmp_path: Path, pool: mpool.Pool) -> None:
    """CLIP folders in the library's current and older format give the same embeddings as the library."""
    library = pytest.importorskip("sentence_transformers")
    from PIL import Image
    from sentence_transformers.sentence_transformer.modules import clip_model

    model = library.SentenceTransformer(modules=[clip_model.CLIPModel(str(clip))], device="cpu")
    model.save_pretrained(str(tmp_path / "new"))
    old = tmp_path / "old"
    shutil.copytree(clip, old / "0_CLIPModel")
    row = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    (old / "modules.json").write_text(json.dumps([row]))
    unit = shutil.copytree(old, tmp_path / "unit")
    rows = [row, {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"}]
    (unit / "modules.json").write_text(json.dumps(rows))
    texts = ["w5 w6", "w7"]
    images = model.encode([Image.fromarray(image) for image in IMAGES])
    words = model.encode(texts)
    for folder in (tmp_path / "new", old):
        assert np.abs(pool.embed_image(IMAGES, folder, compute="float32") - images).max() <= 1e-4
        assert np.abs(pool.embed(texts, folder, compute="float32") - words).max() <= 1e-4
    for found in (pool.embed_image(IMAGES, unit), pool.embed(texts, unit)):
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    (unit / "modules.json").write_text(json.dumps([*rows, {**rows[1], "idx": 2}]))
    with pytest.raises(Unsupported, match="the image encoder is followed by"):
        pool.register("twice", unit)
    settings = json.loads((tmp_path / "new/sentence_bert_config.json").read_text())
    settings["modality_config"]["image"]["method"] = "forward"
    (tmp_path / "new/sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(Unsupported, match="modality_config.image"):
        pool.register("forward", tmp_path / "new")


# ---- concurrency -----------------------------------------------------------------------------------------------------

def test_without_a_model() -> None:
    """The default model is CLIP ViT-B/32; offline, the error says how to download it."""
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        for call in (lambda: pool.embed_image(IMAGES[0]), lambda: pool.submit("image_embedding", images=IMAGES[0]),
                     lambda: asyncio.run(mpool.aio.embed_image(IMAGES[0], pool=pool))):
            with pytest.raises(mpool.errors.OfflineError, match="mpool pull .*clip-vit-base-patch32") as caught:
                call()
            assert caught.value.key == load_catalogue().default("image_embedding").key == "clip-vit-base-patch32"
