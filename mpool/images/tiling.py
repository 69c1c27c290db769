"""Splits an image into the tiles of a vision model, and builds its placeholders in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil, floor, prod, sqrt
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidArgument
from .preparing import MAX_SIDE, prepare, whole_patches

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from ..models import VisionSettings
    from ..models.spec import VideoSettings


@dataclass(frozen=True, slots=True)
class PlaceholderRun:
    """Consecutive placeholder tokens in the prompt, one for each embedding of an image's tiles.

    Attributes:
        tiles: number of tiles that the run uses; runs use the tiles of an image in order. 0: those of the run before.
        rows: number of placeholder tokens.
        frames: True if the tiles are frames of a video, which together have the embeddings of one tile.
        time: position in time of a run that continues the video of the run before it, counted from the video's first
            run; -1: the run does not.
        sources: int32 ``[rows]``; index of the embedding for each placeholder, counted from the run's first tile; -1
            is the learned newline. None: all embeddings in order.
    """

    tiles: int
    rows: int
    sources: NDArray[np.int32] | None = None
    frames: bool = False
    time: int = -1


@dataclass(frozen=True, slots=True)
class TiledImage:
    """An image, split into tiles and prepared.

    Attributes:
        tiles: pixels of each tile, uint8 ``[height, width, 3]``.
        placeholders: text and runs that replace the image in the prompt; the runs use all tiles in order.
        is_video: True if it is a video, whose frames are the tiles.
    """

    tiles: list[NDArray[np.uint8]]
    placeholders: list[str | PlaceholderRun]
    is_video: bool = False

    @property
    def runs(self) -> list[PlaceholderRun]:
        """The runs of the image in the prompt."""
        return [part for part in self.placeholders if isinstance(part, PlaceholderRun)]

    def text(self, token: str) -> str:
        """Return the text that replaces the image in the prompt, with ``token`` for each run."""
        return "".join(part if isinstance(part, str) else token for part in self.placeholders)


def rows_of(settings: VisionSettings, height: int, width: int) -> int:
    """Return the number of embeddings of a tile of this size in pixels."""
    unit = settings.image.patch_size * settings.merge
    return height // unit * (width // unit) + settings.keep_class


def tile_image(image: Image, settings: VisionSettings, name: str) -> TiledImage:
    """Split an image into tiles.

    Args:
        image: an RGB image.
        settings: the model's vision settings.
        name: name of the image, for error messages.

    Raises:
        InvalidArgument: the image would become too large or too small.
    """
    if settings.scheme in ("tiles", "split"):
        made = (_with_tiles if settings.scheme == "tiles" else _split)(image, settings)
        return TiledImage([whole_patches(tile, settings.image.patch_size) for tile in made.tiles], made.placeholders)
    if settings.scheme == "any":
        return _any_size(image, settings, name)
    if settings.scheme == "fit":
        return _fit(image, settings, name)
    if settings.scheme == "pan":
        return _pan(image, settings, name)
    if settings.scheme == "lines":
        return _lines(image, settings)
    if settings.scheme == "grid":
        return _grid(image, settings)
    if settings.scheme == "marked":
        return _marked(image, settings)
    tile = prepare(image, settings.image, name)
    return TiledImage([tile], [PlaceholderRun(1, rows_of(settings, *tile.shape[:2]))])


# ---- LLaVA 1.6: the whole image, then its tiles ----------------------------------------------------------------------

def best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size that keeps most of the image's pixels; among equals, the one with the least padding.

    Args:
        height, width: size of the image in pixels.
        sizes: the sizes to choose from, (height, width).
    """

    def rank(size: tuple[int, int]) -> tuple[int, int]:
        high, wide = size
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - high * wide

    return max(sizes, key=rank)  # among equal ranks, the first size wins


def _with_tiles(image: Image, settings: VisionSettings) -> TiledImage:
    side, resample = settings.image.image_size, settings.image.resample
    width, height = image.size
    high, wide = best_size(height, width, settings.grid)
    whole = np.asarray(image.resize((side, side), resample=resample))  # type: ignore[arg-type]
    by_width, by_height = wide / width, high / height
    if by_width < by_height:
        new_width, new_height = wide, min(ceil(height * by_width), high)
    else:
        new_width, new_height = min(ceil(width * by_height), wide), high
    canvas = np.zeros((high, wide, 3), dtype=np.uint8)
    top, left = (high - new_height) // 2, (wide - new_width) // 2
    canvas[top:top + new_height, left:left + new_width] = np.asarray(
        image.resize((new_width, new_height), resample=resample))  # type: ignore[arg-type]
    tiles = [canvas[y:y + side, x:x + side] for y in range(0, high, side) for x in range(0, wide, side)]
    grid = side // settings.image.patch_size
    sources = _sources(grid, high // side, wide // side, height, width)
    return TiledImage([whole, *tiles], [PlaceholderRun(1 + len(tiles), len(sources), sources)])


def _sources(grid: int, down: int, across: int, height: int, width: int) -> NDArray[np.int32]:
    """Return the sources of a run of placeholders: the embeddings of the whole image, then those of the tiles, line by
    line. Embeddings of padding are left out, and a newline follows each line.

    Args:
        grid: embeddings per side of a tile.
        down, across: number of tiles in a column and in a row.
        height, width: size of the image in pixels.
    """
    y, x = np.mgrid[:down * grid, :across * grid]
    rows = (1 + y // grid * across + x // grid) * grid * grid + y % grid * grid + x % grid
    high, wide = rows.shape
    if width / height > wide / high:
        border = (high - int(round(height * (wide / width), 7))) // 2
        rows = rows[border:high - border]
    else:
        border = (wide - int(round(width * (high / height), 7))) // 2
        rows = rows[:, border:wide - border]
    lines = np.pad(rows, ((0, 0), (0, 1)), constant_values=-1)
    return np.concatenate([np.arange(grid * grid), lines.reshape(-1)]).astype(np.int32)


# ---- Idefics3 and SmolVLM: tiles labelled with row and column, then the whole image ----------------------------------

#: Maximum side in pixels after the first resize, before the image is split.
_MAX_SIDE = 4096
_AROUND = "<fake_token_around_image>"


def _longest_side(height: int, width: int, side: int) -> tuple[int, int]:
    """Return height and width such that the longer side is ``side`` and the other is rounded up to an even number."""
    if width >= height:
        width, height = side, int(side / (width / height))
        height += height % 2
    else:
        height, width = side, int(side * (width / height))
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    if max(height, width) > _MAX_SIDE:
        ratio = width / height
        height, width = (int(_MAX_SIDE / ratio), _MAX_SIDE) if width >= height else \
            (_MAX_SIDE, int(_MAX_SIDE * ratio))
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Return height and width rounded up to multiples of a tile's side."""
    ratio = width / height
    if width >= height:
        width = ceil(width / side) * side
        height = ceil(int(width / ratio) / side) * side
    else:
        height = ceil(height / side) * side
        width = ceil(int(height * ratio) / side) * side
    return max(height, side), max(width, side)


def _split(image: Image, settings: VisionSettings) -> TiledImage:
    side, resample = settings.image.image_size, settings.image.resample

    def resized(image: Image, size: tuple[int, int]) -> Image:
        return image.resize(size[::-1], resample=resample)  # type: ignore[arg-type]

    rows = rows_of(settings, side, side)
    if settings.longest is not None:
        image = resized(image, _longest_side(image.size[1], image.size[0], settings.longest))
    tiles: list[NDArray[np.uint8]] = []
    placeholders: list[str | PlaceholderRun] = []
    if settings.split:
        image = resized(image, _whole_tiles(image.size[1], image.size[0], side))
        pixels = np.asarray(image)
        down, across = pixels.shape[0] // side, pixels.shape[1] // side
        before = ""
        for y in range(down if down * across > 1 else 0):
            for x in range(across):
                tiles.append(pixels[y * side:(y + 1) * side, x * side:(x + 1) * side])
                placeholders += [f"{before}{_AROUND}<row_{y + 1}_col_{x + 1}>", PlaceholderRun(1, rows)]
                before = ""
            before = "\n"
        before += "\n" if tiles else ""
    else:
        before = ""
    tiles.append(np.asarray(resized(image, (side, side))))
    placeholders += [f"{before}{_AROUND}<global-img>", PlaceholderRun(1, rows), _AROUND]
    return TiledImage(tiles, placeholders)


# ---- Qwen's models: images of any size -------------------------------------------------------------------------------

def _sides(height: int, width: int, unit: int, least: int, most: int, shortest: int = 0) -> tuple[int, int]:
    """Return multiples of ``unit`` near the image's sides, such that the number of pixels is within the limits.
    ``shortest``: least side before the limits apply."""
    high, wide = (max(shortest, round(side / unit) * unit) for side in (height, width))
    if high * wide > most:
        by = sqrt(height * width / most)
        high, wide = max(unit, floor(height / by / unit) * unit), max(unit, floor(width / by / unit) * unit)
    elif high * wide < least:
        by = sqrt(least / (height * width))
        high, wide = ceil(height * by / unit) * unit, ceil(width * by / unit) * unit
    return high, wide


def _any_size(image: Image, settings: VisionSettings, name: str) -> TiledImage:
    unit = settings.image.patch_size * settings.merge
    width, height = image.size
    if settings.pixels is None:
        high, wide = height // unit * unit, width // unit * unit
        if not high or not wide:
            raise InvalidArgument(param=name, got=f"{width} x {height} pixels",
                                  allowed=f"at least {unit} pixels per side")
        tile = np.asarray(image)[:high, :wide]
    else:
        high, wide = _sides(height, width, unit, *settings.pixels)
        tile = np.asarray(image.resize((wide, high), resample=settings.image.resample))  # type: ignore[arg-type]
    return TiledImage([tile], [PlaceholderRun(1, rows_of(settings, high, wide))])


# ---- frames of a video -----------------------------------------------------------------------------------------------

def frame_size(settings: VisionSettings, count: int, height: int, width: int) -> tuple[int, int]:
    """Return height and width to which the frames of a video are resized, as in transformers' Qwen3VLVideoProcessor,
    or for models without texts between frames in its Qwen2VLVideoProcessor.

    Args:
        settings: the model's vision settings.
        count: number of frames.
        height, width: their size in pixels.
    """
    video, unit = settings.video, settings.image.patch_size * settings.merge
    assert video is not None
    if video.mark_token_id is None:
        return settings.image.image_size, settings.image.image_size
    if video.pixels is None:
        return height // unit * unit, width // unit * unit
    least, most = video.pixels
    if video.around is None:
        if video.most_rows is not None:
            area = int(video.most_rows * unit * unit * 0.9)
            most = max(min(most, area * video.frames // count), int(least * 1.05))
        return _sides(height, width, unit, least, most)
    if video.most_rows is not None:
        most = count * max(min(video.most_rows * unit * unit, most // count), int(least * 1.05))
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    total = round(count / video.frames) * video.frames * high * wide
    if total > most:
        by = sqrt(count * height * width / most)
        high, wide = max(unit, floor(height / by / unit) * unit), max(unit, floor(width / by / unit) * unit)
    elif total < least:
        by = sqrt(least / (count * height * width))
        high, wide = ceil(height * by / unit) * unit, ceil(width * by / unit) * unit
    return high, wide


def resize_frame(image: Image, settings: VisionSettings, size: tuple[int, int], first: tuple[int, int],
                 name: str) -> NDArray[np.uint8]:
    """Return the pixels of a frame.

    Args:
        image: an RGB image.
        settings: the model's vision settings.
        size: result of :func:`frame_size`.
        first: height and width of the first frame.
        name: name of the frame, for error messages.

    Raises:
        InvalidArgument: the frame has another size than the first one.
    """
    assert settings.video is not None
    width, height = image.size
    if (height, width) != first:
        raise InvalidArgument(param=name, got=f"{width} x {height} pixels",
                              allowed=f"{first[1]} x {first[0]} pixels, as the first frame")
    if settings.video.mark_token_id is None:
        own = replace(settings, split=False, longest=settings.video.longest,
                      image=replace(settings.image, resample=settings.video.resample))
        return whole_patches(_split(image, own).tiles[0], settings.image.patch_size)
    if settings.video.pixels is None:
        return np.asarray(image)[:size[0], :size[1]]
    return np.asarray(image.resize(size[::-1], resample=settings.video.resample))  # type: ignore[arg-type]


def frame_positions(times: Sequence[float], fps: float | None, video: VideoSettings) -> list[int]:
    """Return the position in time of each group of frames, counted from the first one.

    Args:
        times: time of each frame in seconds.
        fps: number of frames per second, which gives the positions of transformers, rounded in float32; None: unknown.
        video: settings of a model without texts between groups.
    """
    starts = times[::video.frames]
    if video.per_second is None:
        return list(range(len(starts)))
    if fps is None:
        return [int(video.per_second * (at - starts[0])) for at in starts]
    step = np.float32(video.per_second) * np.float32(video.frames / fps)
    return [int(np.float32(at) * step) for at in range(len(starts))]


def tile_video(frames: list[NDArray[np.uint8]], times: Sequence[float], settings: VisionSettings,
               around: tuple[str, str] | None, positions: Sequence[int] = ()) -> TiledImage:
    """Group the frames of a video. Each group follows a text with its time, the mean of its first and last frame's.

    Args:
        frames: pixels of the frames; the last one is repeated until the last group is full.
        times: time of each frame in seconds.
        settings: the model's vision settings.
        around: texts before and after the placeholders of a group; None: no texts.
        positions: without texts: result of :func:`frame_positions`.
    """
    assert settings.video is not None
    if settings.video.mark_token_id is None:
        return _with_clock(frames, times, rows_of(settings, *frames[0].shape[:2]))
    size, times = settings.video.frames, list(times)
    missing = -len(frames) % size
    frames, times = frames + frames[-1:] * missing, times + times[-1:] * missing
    rows, placeholders = rows_of(settings, *frames[0].shape[:2]), []  # type: int, list[str | PlaceholderRun]
    if around is None:
        return TiledImage(frames, [PlaceholderRun(size, rows, frames=size > 1, time=position if number else -1)
                                   for number, position in enumerate(positions)], True)
    for at in range(0, len(frames), size):
        placeholders += [f"<{(times[at] + times[at + size - 1]) / 2:.1f} seconds>{around[0]}",
                         PlaceholderRun(size, rows, frames=size > 1), around[1]]
    return TiledImage(frames, placeholders, True)


_ONES = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def _words(number: int) -> str:
    """Return a number of 1 to 999 in English words, as the package num2words writes it."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + ("-" + _ONES[number % 10] if number % 10 else "")
    return f"{_ONES[number // 100]} hundred" + (f" and {_words(number % 100)}" if number % 100 else "")


def _with_clock(frames: list[NDArray[np.uint8]], times: Sequence[float], rows: int) -> TiledImage:
    """Return the frames of a video as images, each after its time, as in transformers' SmolVLMProcessor. The time of
    the last frame counts as the video's duration."""
    placeholders: list[str | PlaceholderRun] = []
    before = (f"You are provided the following series of {_words(len(frames))} frames from a "
              f"{timedelta(seconds=int(times[-1]))} [H:MM:SS] video.\n")
    for at in times:
        placeholders += [f"{before}\nFrame from {int(at // 60):02d}:{int(at % 60):02d}:{_AROUND}<global-img>",
                         PlaceholderRun(1, rows)]
        before = _AROUND
    return TiledImage(frames, [*placeholders, f"{_AROUND}\n\n"], True)


# ---- Gemma 3: the whole image, then crops of a long one ("pan and scan") ---------------------------------------------

_BEFORE, _AFTER = "\n\n<start_of_image>", "<end_of_image>\n\n"


def _crops(height: int, width: int, least: int, most: int, ratio: float) -> list[tuple[int, int, int, int]]:
    """Return the boxes (left, top, right, bottom) of the crops of an image: equal parts of its longer side."""
    longer, shorter = max(height, width), min(height, width)
    if longer / shorter < ratio:
        return []
    count = min(max(2, min(longer // least, floor(longer / shorter + 0.5))), most)
    length = ceil(longer / count)
    if min(length, shorter) < least:
        return []
    ends = [(start, min(start + length, longer)) for start in range(0, count * length, length)]
    return [(start, 0, end, height) if width >= height else (0, start, width, end) for start, end in ends]


def _pan(image: Image, settings: VisionSettings, name: str) -> TiledImage:
    boxes = [] if settings.crops is None else _crops(image.size[1], image.size[0], *settings.crops)
    tiles = [prepare(part, settings.image, name) for part in (image, *map(image.crop, boxes))]
    shown: list[str | PlaceholderRun] = [_BEFORE, PlaceholderRun(1, rows_of(settings, *tiles[0].shape[:2])), _AFTER]
    if not boxes:
        return TiledImage(tiles, shown)
    placeholders = ["Here is the original image ", *shown, " and here are some crops to help you see better "]
    for number in range(len(boxes)):
        placeholders += [" " if number else "", *shown]
    return TiledImage(tiles, placeholders)


# ---- Gemma 4: the whole image, with at most a number of embeddings ---------------------------------------------------

_BEGIN, _END = "<|image>", "<image|>"


def _fit(image: Image, settings: VisionSettings, name: str) -> TiledImage:
    assert settings.rows is not None
    unit, patch = settings.image.patch_size * settings.merge, settings.image.patch_size
    width, height = image.size
    most = settings.rows * settings.merge ** 2 * patch ** 2
    factor = sqrt(most / (height * width))
    high, wide = floor(factor * height / unit) * unit, floor(factor * width / unit) * unit
    if not high:
        high, wide = unit, min(width // height, settings.rows) * unit
    elif not wide:
        high, wide = min(height // width, settings.rows) * unit, unit
    if not high or not wide or high * wide > most or max(high, wide) > MAX_SIDE:
        raise InvalidArgument(param=name, got=f"{width} x {height} pixels", allowed="sides that differ less",
                              hint="Crop the image first")
    tile = np.asarray(image if (wide, high) == image.size else
                      image.resize((wide, high), resample=settings.image.resample))  # type: ignore[arg-type]
    return TiledImage([tile], [_BEGIN, PlaceholderRun(1, rows_of(settings, high, wide)), _END])


# ---- Pixtral: a token between the lines of an image ------------------------------------------------------------------

def _lines(image: Image, settings: VisionSettings) -> TiledImage:
    unit = settings.image.patch_size * settings.merge
    width, height = image.size
    if settings.longest is not None:
        by = max(height, width) / settings.longest
        if by > 1:
            height, width = floor(height / by), floor(width / by)
    down, across = max(1, -(-height // unit)), max(1, -(-width // unit))
    tile = _resized(image, settings, down * unit, across * unit)
    placeholders: list[str | PlaceholderRun] = []
    for y in range(down):
        sources = np.arange(y * across, (y + 1) * across, dtype=np.int32)
        placeholders += [PlaceholderRun(int(y == 0), across, sources), "[IMG_BREAK]" if y < down - 1 else "[IMG_END]"]
    return TiledImage([tile], placeholders)


# ---- grids of tiles: InternVL, LFM2-VL -------------------------------------------------------------------------------

def _resized(image: Image, settings: VisionSettings, height: int, width: int) -> NDArray[np.uint8]:
    return np.asarray(image.resize((width, height), resample=settings.image.resample))  # type: ignore[arg-type]


def _best_grid(height: int, width: int, settings: VisionSettings) -> tuple[int, int]:
    """Return the grid (across, down) of tiles whose proportions are nearest to those of an image of this size; among
    equals, the largest one that is less than twice as large as the image, or the smallest."""
    fewest, most = settings.tiles or (1, 1)
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most // x + 1) if x * y >= fewest]
    best, least = (1, 1), float("inf")
    for across, down in sorted(grids, key=lambda grid: prod(grid)):
        away = abs(width / height - across / down)
        if away < least or away == least and 2 * height * width > _tile_side(settings) ** 2 * across * down:
            best = across, down
        least = min(least, away)
    return best


def _tiles_of(image: Image, settings: VisionSettings, across: int, down: int) -> list[NDArray[np.uint8]]:
    """Return the tiles of an image line by line."""
    side = _tile_side(settings)
    pixels = _resized(image, settings, down * side, across * side)
    return [pixels[y * side:(y + 1) * side, x * side:(x + 1) * side] for y in range(down) for x in range(across)]


def _tile_side(settings: VisionSettings) -> int:
    assert settings.image.resize is not None
    return settings.image.resize[1]


def _grid(image: Image, settings: VisionSettings) -> TiledImage:
    side, (width, height) = _tile_side(settings), image.size
    tiles = _tiles_of(image, settings, *_best_grid(height, width, settings))
    if len(tiles) > 1:
        tiles.append(_resized(image, settings, side, side))
    tiles = [whole_patches(tile, settings.image.patch_size) for tile in tiles]
    rows = sum(rows_of(settings, *tile.shape[:2]) for tile in tiles)
    return TiledImage(tiles, ["<img>", PlaceholderRun(len(tiles), rows), "</img>"])


def _marked(image: Image, settings: VisionSettings) -> TiledImage:
    unit, (width, height) = settings.image.patch_size * settings.merge, image.size
    assert settings.pixels is not None
    least, most = settings.pixels
    size = _sides(height, width, unit, least, most, unit)
    rounded = [max(settings.image.patch_size, round(side / unit) * unit) for side in (height, width)]
    tiles: list[NDArray[np.uint8]] = []
    placeholders: list[str | PlaceholderRun] = []
    before, mark = "<|image_start|>", ""
    if settings.tiles not in (None, (1, 1)) and prod(rounded) > most * settings.excess:
        across, down = _best_grid(height, width, settings)
        tiles = _tiles_of(image, settings, across, down)
        for number, tile in enumerate(tiles):
            if len(tiles) > 1:
                mark = f"<|img_row_{number // across + 1}_col_{number % across + 1}|>"
            placeholders += [before + mark, PlaceholderRun(1, rows_of(settings, *tile.shape[:2]))]
            before = ""
        mark = "<|img_thumbnail|>"
    if not tiles or settings.thumbnail and len(tiles) > 1:
        tiles.append(_resized(image, settings, *size))
        placeholders += [before + mark, PlaceholderRun(1, rows_of(settings, *size))]
    return TiledImage(tiles, [*placeholders, "<|image_end|>"])
