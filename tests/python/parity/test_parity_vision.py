"""Vision language models compared with transformers in float32, on seeded checkpoints: preprocessed images, rows of the
image encoder after every layer and the projector, the decoder after every layer, greedy tokens."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors
from mpool.models.formats import vision_folder
from mpool.tasks.requests import chat_request, vision_request

import visionmodels
from paritymodels import torch
from rounding import deviations
from visionmodels import FAMILIES
from visionparity import greedy_reference, random_images, reference, relative, request, run

TOLERANCE = 1e-4
LAYERS, ENCODER_LAYERS = 2, 3
#: Sizes of the images of a prompt: one, two, odd sizes, the model's size, long and narrow.
CASES = {"one": [(63, 90)], "two": [(40, 40), (57, 41)], "long": [(24, 120)], "three": [(120, 44), (40, 80), (41, 39)]}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    model = visionmodels.randomised(request.param, LAYERS, ENCODER_LAYERS)
    folder = visionmodels.save(model, request.param, tmp_path_factory.mktemp(request.param))
    with mpool.Pool() as pool:
        yield request.param, model, folder, pool


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_rows_and_logits(family, case: str) -> None:
    """Processor, image encoder, projector and decoder match together."""
    _, model, folder, pool = family
    images = random_images(CASES[case])
    made = request(pool, folder, images)
    ticket = run(pool, made, prompt_logits=True)
    rows, logits = reference(model, made, images)
    assert relative(ticket.image_rows(), rows) <= TOLERANCE
    assert relative(ticket.prompt_logits(), logits) <= TOLERANCE


@pytest.mark.sample(3)
def test_greedy_tokens(family) -> None:
    _, model, folder, pool = family
    images = random_images(CASES["two"])
    made = request(pool, folder, images)
    generated = run(pool, made, max_tokens=16).tokens(0)[0].tolist()
    assert generated == greedy_reference(model, made, images, 16)


@pytest.mark.sample(4)
@pytest.mark.parametrize("layers", range(1, ENCODER_LAYERS + 1))
def test_every_layer_of_the_image_network(family, tmp_path: Path, layers: int) -> None:
    name, _, _, pool = family
    model = visionmodels.cut(visionmodels.randomised(name, 1, ENCODER_LAYERS), name, layers)
    folder = visionmodels.save(model, name, tmp_path)
    images = random_images(CASES["one"])
    made = request(pool, folder, images)
    rows, _ = reference(model, made, images)
    assert relative(run(pool, made, prompt_logits=True).image_rows(), rows) <= TOLERANCE


@pytest.mark.sample(4)
@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
def test_every_layer_of_the_decoder(family, tmp_path: Path, layers: int) -> None:
    """The output matrix is the identity, so the logits are the normalised states."""
    name, _, _, pool = family
    model = visionmodels.randomised(name, layers, 2)
    model.lm_head.weight.data = torch.eye(visionmodels.VOCAB, 64)
    folder = visionmodels.save(model, name, tmp_path)
    images = random_images(CASES["two"])
    made = request(pool, folder, images)
    _, states = reference(model, made, images)
    assert relative(run(pool, made, prompt_logits=True).prompt_logits(), states) <= TOLERANCE


def _with_mask(forward: Any, mask: Any, states: Any, **options: Any) -> Any:
    return forward(states, **{**options, "attention_mask": mask})


def test_rows_of_an_image_see_each_other_in_some_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Gemma 4: a row sees the later rows of its image in the first layer only. The window is shorter than an
    image."""
    window, layers, images = 11, [1, 0], random_images(CASES["three"])
    read = vision_folder.READERS["llava"]

    def with_spans(config: Any) -> Any:
        found = read(config)
        return dataclasses.replace(found, kv={**found.kv, "mpool.image_spans": layers})

    monkeypatch.setitem(vision_folder.READERS, "llava", with_spans)
    model = visionmodels.randomised("llava_siglip", LAYERS, ENCODER_LAYERS)
    model.config.text_config.sliding_window = window
    folder = visionmodels.save(model, "llava_siglip", tmp_path)
    with mpool.Pool() as pool:
        made = request(pool, folder, images)
        got = run(pool, made, prompt_logits=True).prompt_logits()
    at = np.arange(len(made.prompt))
    near = at > at[:, None] - window
    causal = at <= at[:, None]
    sees = causal.copy()
    for start, rows, _ in made.images.runs.reshape(-1, 3):
        sees[start:start + rows, start:start + rows] = True
    masks = [torch.zeros(1, 1, *seen.shape).masked_fill(~torch.from_numpy(seen & near), -torch.inf)
             for seen in (causal, sees)]
    for layer, spans in zip(model.model.language_model.layers, layers):
        layer.forward = functools.partial(_with_mask, layer.forward, masks[spans])
    given = visionmodels.inputs(model, made.prompt.tolist(), images)
    with torch.no_grad():
        wanted = model(**given).logits[0].numpy()
    assert relative(got, wanted) <= TOLERANCE


@pytest.mark.parametrize("size", [(63, 90), (40, 40), (120, 44), (17, 300)])
def test_preprocessing_matches_transformers(family, size: tuple[int, int]) -> None:
    """Every tile differs by at most 1/255 before normalisation. The model ignores incomplete patches."""
    name, model, folder, pool = family
    patch = np.ravel(model.config.vision_config.patch_size)[0]
    image = random_images([size])[0]
    made = request(pool, folder, [image])
    found, at = [], 0
    for height, width in made.images.sizes.reshape(-1, 2).tolist():
        found.append(made.images.pixels[at:at + height * width * 3].reshape(height, width, 3))
        at += height * width * 3
    wanted = visionmodels.tiles(name, image)
    assert len(found) == len(wanted)
    for tile, other in zip(found, wanted):
        whole = other[:len(other) // patch * patch, :other.shape[1] // patch * patch]
        assert tile.shape == whole.shape and np.abs(tile.astype(float) - whole).max() <= 1.0


def test_bfloat16_is_near(family) -> None:
    """No row is further from float32 than the furthest row of transformers in bfloat16; but rounding may send a row to
    other experts."""
    name, model, folder, pool = family
    images = random_images(CASES["one"])
    made = vision_request(pool, images, visionmodels.text(3, 20), str(folder), {"compute": "bfloat16"})
    got = run(pool, made, prompt_logits=True).prompt_logits()
    given = visionmodels.inputs(model, made.prompt.tolist(), images)
    with torch.no_grad():
        exact = model(**given).logits[0].numpy()
        rounded = copy.deepcopy(model).to(torch.bfloat16)
        given["pixel_values"] = given["pixel_values"].to(torch.bfloat16)
        theirs = deviations(rounded(**given).logits[0].float().numpy(), exact)
    ours = deviations(got, exact)
    assert "experts" in FAMILIES[name] or ours.max() <= theirs.max()
    assert ours.mean() <= 0.8 * theirs.mean()


def test_experts_of_qwen3_vl_as_transformers_saves_them(tmp_path: Path) -> None:
    """Published folders have them transposed, as those of the tests above."""
    model = visionmodels.randomised("qwen3_vl_moe")
    visionmodels.transpose_experts(visionmodels.save(model, "qwen3_vl_moe", tmp_path))
    images = random_images(CASES["one"])
    with mpool.Pool() as pool:
        made = request(pool, tmp_path, images)
        got = run(pool, made, prompt_logits=True).prompt_logits()
    assert relative(got, reference(model, made, images)[1]) <= TOLERANCE


@pytest.mark.parametrize("size", [(30, 64), (96, 96), (50, 33), (90, 10)])
@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_prompt_around_image_tiles(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    """The text around the tiles of an image equals that of transformers' processor."""
    from tokenizers import Tokenizer
    from transformers.models.smolvlm import processing_smolvlm

    folder = visionmodels.save(visionmodels.make(name, 1, 1), name, tmp_path)
    image = random_images([size])[0]
    with mpool.Pool() as pool:
        made = request(pool, folder, [image], 4)
    done = visionmodels.processed(name, image, return_row_col_info=True)
    expanded = processing_smolvlm.get_image_prompt_string(
        done["rows"][0][0], done["cols"][0][0], 4 if name == "smolvlm" else 1,
        fake_token_around_image="<fake_token_around_image>", image_token="<image>", global_image_token="<global-img>")
    text = f"user : {expanded} {visionmodels.text(3, 4)} assistant : "
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert made.prompt.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("size, crops", [((40, 40), 0), ((30, 90), 3)])
def test_prompt_around_images_of_gemma(tmp_path: Path, size: tuple[int, int], crops: int) -> None:
    """The text around an image equals that of transformers' processor, which encodes it together with the text before
    and after: line feeds become one token."""
    from tokenizers import Tokenizer

    folder = visionmodels.save(visionmodels.make("gemma3", 1, 1), "gemma3", tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    for count, word in enumerate(("w7", "w8", "w9"), start=1):
        data["model"]["vocab"]["\n" * count] = number = data["model"]["vocab"].pop(word)
        data["added_tokens"].append({"id": number, "content": "\n" * count, "special": False, **dict.fromkeys(
            ("single_word", "lstrip", "rstrip", "normalized"), False)})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = folder / "chat_template.json"
    path.write_text(path.read_text().replace("<start_of_image> ", "\\n<start_of_image>"))
    with mpool.Pool() as pool:
        made = request(pool, folder, random_images([size]), 4)
    shown = f"\n\n<start_of_image>{'<image>' * 9}<end_of_image>\n\n"
    text = shown if not crops else (f"Here is the original image {shown} and here are some crops to help you see "
                                    "better " + " ".join([shown] * crops))
    text = f"user : \n{text}{visionmodels.text(3, 4)} assistant : "
    assert made.prompt.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("given, size", [(None, (84, 120)), (70, (84, 120)), (140, (108, 168)), (1120, (336, 480))])
def test_number_of_tokens_of_an_image(tmp_path: Path, given: int | None, size: tuple[int, int]) -> None:
    """As transformers' processor with ``max_soft_tokens``. Other families refuse the option."""
    model = visionmodels.make("gemma4", 1, 1)
    model.config.text_config.max_position_embeddings = 2048
    folder = visionmodels.save(model, "gemma4", tmp_path)
    image = random_images([(63, 90)])[0]
    with mpool.Pool() as pool:
        made = vision_request(pool, [image], visionmodels.text(3, 4), str(folder), {"image_tokens": given})
        for wrong in (0, 71, True, "70"):
            with pytest.raises(errors.InvalidArgument) as raised:
                vision_request(pool, [image], "w10", str(folder), {"image_tokens": wrong})
            assert raised.value.param == "image_tokens"
    done = visionmodels.processed("gemma4", image, **({} if given is None else {"max_soft_tokens": given}))
    height, width = made.images.sizes.tolist()
    assert (height, width) == size
    assert made.images.runs[1] == done["num_soft_tokens_per_image"][0] == height * width // 144


@pytest.mark.parametrize("details, rows", [(("low", "high", "auto"), (70, 280, 126)), ((None, "original", 7),
                                                                                         (126, 1120, 126))])
def test_detail_of_an_image(tmp_path: Path, details: tuple[Any, ...], rows: tuple[int, ...]) -> None:
    """``detail`` of OpenAI's API selects the number of tokens of one image; ``image_tokens`` takes precedence."""
    model = visionmodels.make("gemma4", 1, 1)
    model.config.text_config.max_position_embeddings = 4096
    folder = visionmodels.save(model, "gemma4", tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_soft_tokens": 140}))
    pixels = random_images([(63, 90)])[0]
    parts = [{"type": "image", "image": pixels, "detail": detail} for detail in details]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "w10"}]}]
    with mpool.Pool() as pool:
        made, same = (chat_request(pool, messages, str(folder), options, None, "vision")
                      for options in ({}, {"image_tokens": 280}))
    assert made.images.runs[1::3].tolist() == list(rows)
    assert len(set(same.images.runs[1::3])) == 1


def test_only_gemma4_has_a_number_of_tokens(tmp_path: Path) -> None:
    folder = visionmodels.save(visionmodels.make("gemma3", 1, 1), "gemma3", tmp_path)
    with mpool.Pool() as pool, pytest.raises(errors.InvalidArgument) as raised:
        vision_request(pool, random_images([(63, 90)]), "w10", str(folder), {"image_tokens": 70})
    assert raised.value.param == "image_tokens"


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (300, 7), (31, 1000), (1000, 31), (84, 120), (12, 12), (13, 840),
                                  (97, 101), (200, 50), (5, 360), (444, 333)])
def test_pixels_of_gemma4(tmp_path: Path, size: tuple[int, int]) -> None:
    """Pixel by pixel as transformers' processor on Pillow, which refuses the same images."""
    folder = visionmodels.save(visionmodels.make("gemma4", 1, 1), "gemma4", tmp_path)
    image = random_images([size])[0]
    with mpool.Pool() as pool:
        try:
            wanted = visionmodels.tiles("gemma4", image)[0]
        except ValueError:
            with pytest.raises(errors.InvalidArgument):
                request(pool, folder, [image])
            return
        made = request(pool, folder, [image])
    assert np.array_equal(made.images.pixels.reshape(*made.images.sizes, 3), wanted)


def test_gemma4_without_an_image_encoder_is_a_language_model(tmp_path: Path) -> None:
    """Its configuration has a vision_config of null; the folder may still have the processor's configuration."""
    folder = visionmodels.save(visionmodels.make("gemma4", 1, 1), "gemma4", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_config": None}))
    with mpool.Pool() as pool:
        assert pool.get(str(folder)).capability == "text_to_text"
