"""Tiles, sizes, placeholders and padding of vision models, compared with transformers' Pillow-based processors."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpool.errors import InvalidArgument
from mpool.images import tiling
from mpool.images.preparing import MAX_SIDE, prepare
from mpool.models import ImageSettings
from mpool.models.spec import VisionSettings

import imagemodels

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

RAW: dict[str, Any] = dict(do_rescale=False, do_normalize=False)
SIZES = [(48, 64), (64, 48), (50, 50), (33, 97), (97, 33), (7, 150), (31, 29), (200, 10), (32, 64), (16, 16)]


def image_of(height: int, width: int) -> Any:
    return Image.fromarray(imagemodels.image(height * width, height, width))


def vision(scheme: str, side: int = 32, patch: int = 8, **options: Any) -> VisionSettings:
    image = ImageSettings(8, 8, ("exact", side, side), 3, None, patch, side, False)
    return VisionSettings(scheme, image, 5, **options)


def channels_last(tiles: Any) -> list[np.ndarray]:
    return [np.asarray(tile).transpose(1, 2, 0) for tile in tiles]


def same(found: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize("height, width", SIZES)
def test_padding_to_a_square(height: int, width: int) -> None:
    from transformers import LlavaImageProcessorPil

    colour = (12, 140, 250)
    image = image_of(height, width)
    wanted = LlavaImageProcessorPil().pad_to_square(np.asarray(image).transpose(2, 0, 1), colour).transpose(1, 2, 0)
    side = max(height, width)
    settings = ImageSettings(8, 8, None, 3, None, 1, side, True, pad_square=colour)
    assert np.array_equal(prepare(image, settings), wanted)


# ---- LLaVA 1.6 -----------------------------------------------------------------------------------------------------

GRID = ((32, 64), (64, 32), (64, 64), (96, 32), (32, 96))


@pytest.mark.parametrize("height, width", SIZES)
def test_tiles_and_newlines_of_llava_next(height: int, width: int) -> None:
    from transformers import LlavaNextImageProcessorPil
    from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
    import torch

    image, side, patch = image_of(height, width), 32, 8
    reference = LlavaNextImageProcessorPil(image_grid_pinpoints=list(map(list, GRID)), crop_size=side,
                                           size={"shortest_edge": side}, **RAW)
    found = tiling.tile_image(image, vision("tiles", grid=GRID), "image")
    assert same(found.tiles, channels_last(reference(image, return_tensors="np")["pixel_values"][0]))

    count = (side // patch)**2
    numbers = torch.arange(len(found.tiles) * count).reshape(len(found.tiles), count, 1)
    model = SimpleNamespace(config=SimpleNamespace(
        vision_config=SimpleNamespace(image_size=side, patch_size=patch), image_grid_pinpoints=list(map(list, GRID))))
    packed, _ = LlavaNextModel.pack_image_features(model, [numbers], torch.tensor([[height, width]]), "default",
                                                   torch.tensor([-1]))
    run, = found.placeholders
    assert isinstance(run, tiling.PlaceholderRun) and run.sources is not None
    assert run.sources.dtype == np.int32 and run.sources.tolist() == packed[0][:, 0].tolist()
    assert (run.tiles, run.rows) == (len(found.tiles), len(packed[0]))


def test_the_best_size_among_many() -> None:
    """All sizes of images from 1 to 40 pixels, in steps."""
    from transformers.image_processing_utils import select_best_resolution

    grids = [GRID, ((8, 8), (16, 8), (8, 16), (16, 16)), ((16, 16), (8, 8)), ((7, 9), (9, 7))]
    for height in range(1, 41, 3):
        for width in range(1, 41, 2):
            for grid in grids:
                assert tiling.best_size(height, width, grid) == select_best_resolution((height, width), list(grid))


# ---- Idefics3 ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("longest", [64, 96, None])
@pytest.mark.parametrize("height, width", SIZES)
def test_tiles_and_labels_of_idefics3(height: int, width: int, longest: int | None) -> None:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    image, side = image_of(height, width), 32
    options = {"do_resize": False} if longest is None else {"size": {"longest_edge": longest}}
    reference = Idefics3ImageProcessorPil(max_image_size={"longest_edge": side}, do_pad=False, resample=3, **RAW,
                                          **options)
    wanted = reference([[image]], return_tensors="np", return_row_col_info=True)
    settings = vision("split", longest=longest, split=True, merge=2)
    found = tiling.tile_image(image, settings, "image")
    assert same(found.tiles, channels_last(wanted["pixel_values"][0]))

    rows = tiling.rows_of(settings, side, side)
    assert rows == 4
    text = "".join(one if isinstance(one, str) else "<image>" * one.rows for one in found.placeholders)
    processor = SimpleNamespace(fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>",
                                image_token="<image>", image_seq_len=rows)
    assert text == Idefics3Processor.replace_image_token(processor, wanted, 0)


def test_an_image_that_is_not_split() -> None:
    image = image_of(48, 64)
    found = tiling.tile_image(image, vision("split", longest=None), "image")
    assert same(found.tiles, [np.asarray(image.resize((32, 32), resample=3))])
    assert found.placeholders == ["<fake_token_around_image><global-img>", tiling.PlaceholderRun(1, 16),
                                  "<fake_token_around_image>"]


def test_sizes_before_the_split() -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

    for height, width in [*SIZES, (1, 300), (300, 1), (4096, 3000), (3001, 4097), (1000, 7)]:
        for side in (16, 33, 364, 1456, 4096, 4097, 5000, 9001):
            wanted = get_resize_output_image_size(np.empty((3, height, width), np.bool_), side)
            assert tiling._longest_side(height, width, side) == wanted, (height, width, side)


# ---- Qwen2.5-VL and others -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("height, width", SIZES)
@pytest.mark.parametrize("least, most", [(16 * 16, 64 * 64), (4096, 8192), (256, 1024)])
def test_an_image_of_any_size(height: int, width: int, least: int, most: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    image, unit = image_of(height, width), 16
    high, wide = smart_resize(height, width, unit, least, most)
    found = tiling.tile_image(image, vision("any", merge=2, pixels=(least, most)), "image")
    assert same(found.tiles, [np.asarray(image.resize((wide, high), resample=3))])
    assert found.placeholders == [tiling.PlaceholderRun(1, high * wide // unit**2)]


def test_sides_within_the_limits_of_pixels() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    for height, width in [*SIZES, (28, 28), (14, 14), (13, 2600), (2600, 13), (41, 42), (42, 98), (1000, 700)]:
        for least, most in ((56 * 56, 28 * 28 * 1280), (784, 784), (784, 1568), (100_352, 200_000)):
            assert tiling._sides(height, width, 28, least, most) == smart_resize(height, width, 28, least, most)


def test_an_image_is_cropped_to_whole_squares_without_limits() -> None:
    image = image_of(35, 50)
    found = tiling.tile_image(image, vision("any", merge=2), "image")
    assert same(found.tiles, [np.asarray(image)[:32, :48]])
    assert found.placeholders == [tiling.PlaceholderRun(1, 6)]
    assert len(tiling.tile_image(image_of(16, 16), vision("any", merge=2), "image").tiles) == 1
    for height, width in ((15, 50), (50, 15)):
        match = rf"`images\[1\]` must be at least 16 pixels per side, got {width} x {height} pixels"
        with pytest.raises(InvalidArgument, match=match):
            tiling.tile_image(image_of(height, width), vision("any", merge=2), "images[1]")


@pytest.mark.parametrize("keep_class", [False, True])
def test_one_tile(keep_class: bool) -> None:
    image = image_of(20, 30)
    found = tiling.tile_image(image, vision("one", keep_class=keep_class), "image")
    assert same(found.tiles, [np.asarray(image.resize((32, 32), resample=3))])
    assert found.placeholders == [tiling.PlaceholderRun(1, 16 + keep_class)]


def test_incomplete_patches_are_cut_off() -> None:
    for scheme in ("tiles", "split", "one"):
        found = tiling.tile_image(image_of(40, 40), vision(scheme, 30, 7, grid=((30, 60),), split=True), "image")
        assert {tile.shape for tile in found.tiles} == {(28, 28, 3)}


def test_the_limit_of_sides_after_a_resize_is_accepted() -> None:
    """The shorter side of two pixels becomes 128."""
    settings = ImageSettings(8, 8, ("shortest", 128), 3, (1, 1), 1, 1, True)
    for size in ((256, 2), (2, 256)):
        assert prepare(Image.new("RGB", size), settings).shape == (1, 1, 3)
    for size in ((257, 2), (2, 257)):
        with pytest.raises(InvalidArgument, match="at most 16,384 pixels per side after resizing"):
            prepare(Image.new("RGB", size), settings)
    exact = ImageSettings(8, 8, ("exact", MAX_SIDE, 2), 3, (1, 1), 1, 1, True)
    assert prepare(Image.new("RGB", (2, 2)), exact).shape == (1, 1, 3)
    with pytest.raises(InvalidArgument, match="resizes to 2 x 16,385"):
        prepare(Image.new("RGB", (2, 2)), ImageSettings(8, 8, ("exact", MAX_SIDE + 1, 2), 3, None, 1, 1, True))


# ---- Pixtral and Mistral 3 -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("longest", [64, 300])
@pytest.mark.parametrize("height, width", SIZES)
def test_lines_of_pixtral(height: int, width: int, longest: int, merge: int) -> None:
    from transformers import PixtralImageProcessorPil

    image = image_of(height, width)
    wanted = PixtralImageProcessorPil(size={"longest_edge": longest}, patch_size=8 * merge, **RAW)(
        image, return_tensors="np")
    found = tiling.tile_image(image, vision("lines", merge=merge, longest=longest), "image")
    assert same(found.tiles, channels_last(wanted["pixel_values"]))
    high, wide = (side // (8 * merge) for side in wanted["image_sizes"][0])
    text = "".join(one if isinstance(one, str) else "*" * one.rows for one in found.placeholders)
    assert text == "[IMG_BREAK]".join(["*" * wide] * high) + "[IMG_END]"  # the class of this text requires torchvision
    assert [run.tiles for run in found.runs] == [1] + [0] * (len(found.runs) - 1)
    assert np.concatenate([run.sources for run in found.runs]).tolist() == list(range(text.count("*")))


# ---- InternVL ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("least, most", [(1, 12), (1, 1), (2, 5), (4, 64)])
@pytest.mark.parametrize("height, width", [*SIZES, (64, 64), (80, 64), (300, 301)])
def test_grids_of_internvl(height: int, width: int, least: int, most: int) -> None:
    from transformers import GotOcr2ImageProcessorPil

    image = image_of(height, width)
    wanted = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, min_patches=least, max_patches=most,
                                      crop_to_patches=True, **RAW)(image, return_tensors="np")
    found = tiling.tile_image(image, vision("grid", merge=2, tiles=(least, most)), "image")
    assert same(found.tiles, channels_last(wanted["pixel_values"]))
    count = len(found.tiles)
    assert found.placeholders == ["<img>", tiling.PlaceholderRun(count, 4 * count), "</img>"]


# ---- LFM2-VL -------------------------------------------------------------------------------------------------------

LAYOUTS = json.loads((Path(__file__).parents[2] / "parity" / "vision" / "lfm2_layouts.json").read_text("utf-8"))


@pytest.mark.parametrize("options, rows", LAYOUTS, ids=range(len(LAYOUTS)))
def test_layouts_of_lfm2_vl(tmp_path: Path, options: dict[str, Any], rows: list[Any]) -> None:
    """Tiles and text of the processor of transformers, recorded by tests/parity/vision/make_lfm2_layouts.py."""
    from mpool.models.fields import Fields
    from mpool.models.files import Folder
    from mpool.models.formats import lfm2_vl

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    patch = options.get("encoder_patch_size", 16)
    model = lfm2_vl.read(Fields({"text_config": {"hidden_size": 64}, "vision_config": {"patch_size": patch}}, file="f"))
    settings, _ = model.read_settings(Folder(str(tmp_path)))
    for height, width, text, shapes in rows:
        found = tiling.tile_image(Image.fromarray(np.zeros((height, width, 3), np.uint8)), settings, "image")
        assert [[side // patch for side in tile.shape[:2]] for tile in found.tiles] == shapes, (height, width)
        shown = "".join(one if isinstance(one, str) else f"[{one.rows}]" for one in found.placeholders)
        assert shown == text, (height, width)
