"""Image encoders compared with transformers in float32, on seeded checkpoints with random norms, biases and scales:
every layer, the embedding, other sizes, and the common space of images and texts."""

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


def rows(pool: mpool.Pool, folder: Path, images: list[np.ndarray], compute: str = "float32") -> list[np.ndarray]:
    """Return the rows after the last layer, one array per preprocessed image."""
    key = pool._find(str(folder), "image_embedding").core_key(compute)
    sizes = np.array([size for image in images for size in image.shape[:2]], dtype=np.int32)
    flat = np.concatenate([image.reshape(-1) for image in images])
    settings = pool._find(str(folder), "image_embedding").describe()
    patch = settings.image.patch_size
    before = {"siglip": 0, "dinov2_with_registers": 4}.get(settings.spec.architecture, 1)
    counts = [before + (image.shape[0] // patch) * (image.shape[1] // patch) for image in images]
    found = pool.registry.embed_images(key, flat, sizes, output=TOKENS)
    return np.split(found, np.cumsum(counts)[:-1])


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference relative to the scale of the activations."""
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max()))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Family, full model, and a folder for each number of layers."""
    full = randomised(request.param, LAYERS)
    folders = []
    for layers in range(1, LAYERS + 1):
        part = imagemodels.make(request.param, layers)
        part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
        folders.append(save(part, request.param, tmp_path_factory.mktemp(f"{request.param}{layers}")))
    return request.param, full, folders


def images_for(family: str) -> list[np.ndarray]:
    """Return two images of the model's size, or images of several sizes if the model supports them."""
    if family in ("clip", "siglip"):
        return [imagemodels.image(seed, 40, 40) for seed in (1, 2)]
    return [imagemodels.image(seed, *size) for seed, size in enumerate(((56, 56), (70, 42), (99, 57), (30, 61)))]


def plain(family: str, image: np.ndarray):
    """Return an image normalised by transformers, without resizing."""
    steps = imagemodels.processor(family)
    return steps(image, do_resize=False, do_center_crop=False, input_data_format="channels_last",
                 return_tensors="pt")["pixel_values"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
def test_image_layers(family, layers: int) -> None:
    name, full, folders = family
    with mpool.Pool() as pool:
        got = rows(pool, folders[layers - 1], images_for(name))
    for image, found in zip(images_for(name), got):
        states, _ = vision(full, name, plain(name, image))
        assert relative(found, states[layers]) <= TOLERANCE


def test_image_vectors(family) -> None:
    name, full, folders = family
    given = images_for(name)
    with mpool.Pool() as pool:
        got = pool.embed_image(given, str(folders[-1]), compute="float32")
        alone = [pool.embed_image(image, str(folders[-1]), compute="float32") for image in given]
        unit = pool.embed_image(given, str(folders[-1]), compute="float32", normalize=True)
        cut = pool.embed_image(given[0], str(folders[-1]), compute="float32", dimensions=7)
    assert np.array_equal(got, np.stack(alone))
    assert np.allclose(unit, got / np.linalg.norm(got, axis=1, keepdims=True), atol=1e-6)
    assert np.array_equal(cut, got[0, :7])
    for image, found in zip(given, got):
        assert relative(found, vision(full, name, plain(name, image))[1]) <= TOLERANCE


@pytest.mark.parametrize("compute, least", [("bfloat16", 0.99989), ("int8", 0.997)])
def test_image_precisions_are_near(family, compute: str, least: float) -> None:
    """The largest difference of all families times three. Trained models are more robust: see test_parity_dino.py."""
    name, _, folders = family
    with mpool.Pool() as pool:
        exact, near = (pool.embed_image(images_for(name), str(folders[-1]), compute=each)
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
    """Embeddings of images of any size match those of transformers' processor and model together."""
    name, full, folders = family
    given = [imagemodels.image(seed, *size) for seed, size in enumerate(((63, 90), (120, 44), (57, 41)))]
    with mpool.Pool() as pool:
        got = pool.embed_image(given, str(folders[-1]), compute="float32")
    for image, found in zip(given, got):
        values = imagemodels.processor(name)(image, input_data_format="channels_last", return_tensors="pt")
        assert relative(found, vision(full, name, values["pixel_values"])[1]) <= TOLERANCE


# ---- texts in the same space ---------------------------------------------------------------------------------------

PAIRS = [name for name in FAMILIES if name in ("clip", "siglip")]
TEXTS = ["w5", "w7 w8 w9 w10", " ".join(f"w{i}" for i in range(3, 20)), " ".join(f"w{i}" for i in range(3, 60)),
         "w1 w4"]


def text_vector(model, name: str, folder: Path, text: str) -> np.ndarray:
    """Return the text embedding of transformers, with the family's truncation and padding."""
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
    """Similarities match the logits of transformers' whole model without its scale and shift."""
    name, model, folder, pool = pair
    got = pool.embed(TEXTS, str(folder), compute="float32")
    found = pool.get(str(folder))
    assert found.capabilities == ("image_embedding", "text_embedding")
    images = pool.embed_image(images_for(name), found, compute="float32")
    with torch.no_grad():
        wanted = torch.cat([model.get_image_features(plain(name, one)).pooler_output for one in images_for(name)])
        texts = torch.tensor(np.stack([text_vector(model, name, folder, text) for text in TEXTS]))
        cosine = torch.nn.functional.cosine_similarity(texts[:, None], wanted[None], dim=-1).numpy()
    assert np.abs(mpool.similarity(got, images) - cosine).max() <= 1e-5


def test_unsupported_image_sizes_are_refused(family) -> None:
    """The core itself refuses sizes that a model does not support."""
    name, _, folders = family
    with mpool.Pool() as pool:
        pool.load(str(folders[0]))
        try:
            rows(pool, folders[0], [imagemodels.image(1, 48, 40)])
        except mpool.InvalidArgument as error:
            message = str(error)
        else:
            message = ""
    assert ("must have 40 x 40 pixels" in message) == (name in ("clip", "siglip"))


def test_every_family_has_a_processor() -> None:
    assert {row for row, capability in mpool._core.architectures() if capability == "image_embedding"} \
        == {name for name in PROCESSORS if name != "dinov2_gated"}
    assert transformers.__version__


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_images_need_no_tokenizer(tmp_path: Path, name: str) -> None:
    """A folder without a tokenizer loads and embeds images. A text raises the error that names the missing file."""
    folder, image = save(randomised(name, 2), name, tmp_path / "whole"), imagemodels.image(3, 40, 40)
    with mpool.Pool() as pool:
        expected = pool.embed_image([image], model=str(folder))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with mpool.Pool() as pool:
        pool.load(str(folder))
        assert np.array_equal(pool.embed_image([image], model=str(folder)), expected)
        with pytest.raises(mpool.errors.FormatError, match=r"tokenizer\.json"):
            pool.embed(["w3 w4"], model=str(folder))


@pytest.mark.parametrize("prefix", ["", "vision_model."])
@pytest.mark.parametrize("name, projected", [("clip", True), ("clip", False), ("siglip", False)])
def test_image_encoders_that_are_stored_alone(tmp_path: Path, name: str, projected: bool, prefix: str) -> None:
    """Folders of CLIPVisionModel, CLIPVisionModelWithProjection and SiglipVisionModel, which have no text encoder."""
    safetensors = pytest.importorskip("safetensors.torch")
    whole = randomised(name, 2)
    made = getattr(transformers, {"clip": "CLIP", "siglip": "Siglip"}[name] + "VisionModel"
                   + ("WithProjection" if projected else ""))
    config = whole.config.vision_config
    config.projection_dim = whole.config.projection_dim if name == "clip" else None
    model = made(config).eval()
    known = whole.state_dict()
    model.load_state_dict({key: known.get(key, known.get(f"vision_model.{key}")) for key in model.state_dict()})
    model.save_pretrained(tmp_path)
    if not projected:
        safetensors.save_file({prefix + key: value.contiguous() for key, value in model.state_dict().items()},
                              str(tmp_path / "model.safetensors"), {"format": "pt"})
    (tmp_path / "preprocessor_config.json").write_text(imagemodels.json.dumps(PROCESSORS[name]))
    image = imagemodels.image(3, 40, 40)
    with torch.no_grad():
        out = model(imagemodels.pixels(name, image))
    expected = (out.image_embeds if projected else out.pooler_output)[0].numpy()
    with mpool.Pool() as pool:
        got = pool.embed_image([image], model=str(tmp_path), normalize=False, compute="float32")[0]
    assert relative(got, expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["clip", "siglip", "dinov2"])
def test_heads_of_any_size(tmp_path: Path, name: str) -> None:
    """Heads of 12 components, which is no multiple of a vector."""
    model = randomised(name, 2, num_attention_heads=4)
    folder = save(model, name, tmp_path)
    given = images_for(name)
    with mpool.Pool() as pool:
        got = rows(pool, folder, given)
    for image, found in zip(given, got):
        assert relative(found, vision(model, name, plain(name, image))[0][2]) <= TOLERANCE
