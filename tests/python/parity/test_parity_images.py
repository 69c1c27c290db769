"""Image networks against transformers, in float32, on seeded checkpoints with random norms, biases and scales: every
layer, the vector, other sizes, both networks of a pair in one space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mpool

import imagemodels
from imagemodels import FAMILIES, PROCESSORS, randomised, save, vision
from paritymodels import torch, transformers

LAYERS = 3
TOLERANCE = 1e-4
TOKENS = 1  # output of the core: all rows, before the last norm


def rows(pool: mpool.Pool, folder: Path, pictures: list[np.ndarray], compute: str = "float32") -> list[np.ndarray]:
    """Rows after the last layer, an array an image, of images that are prepared already."""
    key = pool._find(str(folder), "image_embedding").core_key(compute)
    sizes = np.array([size for picture in pictures for size in picture.shape[:2]], dtype=np.int32)
    flat = np.concatenate([picture.reshape(-1) for picture in pictures])
    settings = pool._find(str(folder), "image_embedding").describe()
    patch = settings.image.patch_size
    before = {"siglip": 0, "dinov2_with_registers": 4}.get(settings.spec.architecture, 1)
    counts = [before + (picture.shape[0] // patch) * (picture.shape[1] // patch) for picture in pictures]
    found = pool.registry.embed_images(key, flat, sizes, output=TOKENS)
    return np.split(found, np.cumsum(counts)[:-1])


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, as a share of the activations' scale."""
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max()))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The model cut after each number of layers."""
    full = randomised(request.param, LAYERS)
    folders = []
    for layers in range(1, LAYERS + 1):
        part = imagemodels.make(request.param, layers)
        part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
        folders.append(save(part, request.param, tmp_path_factory.mktemp(f"{request.param}{layers}")))
    return request.param, full, folders


def pictures(family: str) -> list[np.ndarray]:
    """Two images of the model's own size; where it takes others, odd ones too."""
    if family in ("clip", "siglip"):
        return [imagemodels.image(seed, 40, 40) for seed in (1, 2)]
    return [imagemodels.image(seed, *size) for seed, size in enumerate(((56, 56), (70, 42), (99, 57), (30, 61)))]


def plain(family: str, picture: np.ndarray):
    """Pixels of an image that has its size already, as transformers normalises them."""
    steps = imagemodels.processor(family)
    return steps(picture, do_resize=False, do_center_crop=False, input_data_format="channels_last",
                 return_tensors="pt")["pixel_values"]


@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
def test_image_layers(family, layers: int) -> None:
    name, full, folders = family
    with mpool.Pool() as pool:
        got = rows(pool, folders[layers - 1], pictures(name))
    for picture, found in zip(pictures(name), got):
        states, _ = vision(full, name, plain(name, picture))
        assert relative(found, states[layers]) <= TOLERANCE


def test_image_vectors(family) -> None:
    name, full, folders = family
    given = pictures(name)
    with mpool.Pool() as pool:
        got = pool.embed_image(given, str(folders[-1]), compute="float32")
        alone = [pool.embed_image(picture, str(folders[-1]), compute="float32") for picture in given]
        unit = pool.embed_image(given, str(folders[-1]), compute="float32", normalize=True)
        cut = pool.embed_image(given[0], str(folders[-1]), compute="float32", dimensions=7)
    assert np.array_equal(got, np.stack(alone))
    assert np.allclose(unit, got / np.linalg.norm(got, axis=1, keepdims=True), atol=1e-6)
    assert np.array_equal(cut, got[0, :7])
    for picture, found in zip(given, got):
        assert relative(found, vision(full, name, plain(name, picture))[1]) <= TOLERANCE


@pytest.mark.parametrize("compute, least", [("bfloat16", 0.9995), ("int8", 0.99)])
def test_image_classes_are_near(family, compute: str, least: float) -> None:
    """A tiny model with random norms is a rougher thing than a trained one."""
    name, _, folders = family
    with mpool.Pool() as pool:
        exact, near = (pool.embed_image(pictures(name), str(folders[-1]), compute=each)
                       for each in ("float32", compute))
    cosine = mpool.similarity(exact, near, pairwise=True)
    assert least <= cosine.min() and not np.array_equal(exact, near)


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "relu", "silu"])
def test_image_activations(tmp_path: Path, act: str) -> None:
    model = randomised("clip", 2, hidden_act=act)
    save(model, "clip", tmp_path)
    given = imagemodels.image(3, 40, 40)
    with mpool.Pool() as pool:
        got = pool.embed_image(given, str(tmp_path), compute="float32")
    assert relative(got, vision(model, "clip", plain("clip", given))[1]) <= TOLERANCE


def test_image_processor_and_network_together(family) -> None:
    """From images of any size to the vector, as transformers' processor and model together give it."""
    name, full, folders = family
    given = [imagemodels.image(seed, *size) for seed, size in enumerate(((63, 90), (120, 44), (57, 41)))]
    with mpool.Pool() as pool:
        got = pool.embed_image(given, str(folders[-1]), compute="float32")
    for picture, found in zip(given, got):
        values = imagemodels.processor(name)(picture, input_data_format="channels_last", return_tensors="pt")
        assert relative(found, vision(full, name, values["pixel_values"])[1]) <= TOLERANCE


# ---- texts in the same space ---------------------------------------------------------------------------------------

PAIRS = [name for name in FAMILIES if name in ("clip", "siglip")]
TEXTS = ["w5", "w7 w8 w9 w10", " ".join(f"w{i}" for i in range(3, 20)), " ".join(f"w{i}" for i in range(3, 60)),
         "w1 w4"]


def text_vector(model, name: str, folder: Path, text: str) -> np.ndarray:
    """As transformers gives it, truncated and padded as the family's processor does."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    clip = name == "clip"
    body = tokenizer.encode(text, add_special_tokens=False).ids
    ids = [118, *body[:18], 119] if clip else [*body[:19], 1]
    ids += [] if clip else [1] * (20 - len(ids))
    with torch.no_grad():
        return model.get_text_features(torch.tensor([ids])).pooler_output[0].numpy()


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    model = randomised(request.param, 2)
    folder = save(model, request.param, tmp_path_factory.mktemp(request.param))
    with mpool.Pool() as pool:
        yield request.param, model, folder, pool


@pytest.mark.parametrize("at", range(len(TEXTS)))
def test_image_texts(pair, at: int) -> None:
    name, model, folder, pool = pair
    got = pool.embed(TEXTS, str(folder), compute="float32")
    assert relative(got[at], text_vector(model, name, folder, TEXTS[at])) <= TOLERANCE
    assert np.array_equal(pool.embed(TEXTS[at], str(folder), compute="float32"), got[at])


def test_image_texts_in_one_space(pair) -> None:
    """The scores of transformers' whole model, but for its scale and shift."""
    name, model, folder, pool = pair
    got = pool.embed(TEXTS, str(folder), compute="float32")
    found = pool.get(str(folder))
    assert found.capabilities == ("image_embedding", "text_embedding")
    images = pool.embed_image(pictures(name), found, compute="float32")
    with torch.no_grad():
        wanted = torch.cat([model.get_image_features(plain(name, one)).pooler_output for one in pictures(name)])
        texts = torch.tensor(np.stack([text_vector(model, name, folder, text) for text in TEXTS]))
        cosine = torch.nn.functional.cosine_similarity(texts[:, None], wanted[None], dim=-1).numpy()
    assert np.abs(mpool.similarity(got, images) - cosine).max() <= 1e-5


def test_image_sizes_that_a_model_does_not_take(family) -> None:
    """The core says so, whoever asks it."""
    name, _, folders = family
    with mpool.Pool() as pool:
        pool.load(str(folders[0]))
        try:
            rows(pool, folders[0], [imagemodels.image(1, 48, 40)])
        except mpool.InvalidArgument as error:
            message = str(error)
        else:
            message = ""
    assert ("takes 40 x 40" in message) == (name in ("clip", "siglip"))


def test_every_family_has_a_processor() -> None:
    assert {row for row, capability in mpool._core.architectures() if capability == "image_embedding"} \
        == {name for name in PROCESSORS if name != "dinov2_gated"}
    assert transformers.__version__
