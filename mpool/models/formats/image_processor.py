"""Readers of ``preprocessor_config.json``, which describes how images are prepared for a model.

Supported are the image processors of transformers that resize, crop the centre, rescale and normalise, with their
defaults (https://github.com/huggingface/transformers/tree/main/src/transformers/models, ``image_processing_*.py``).
Unknown keys, and values that select another operation, raise an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...errors import FormatError, Unsupported
from ..fields import Fields, describe
from ..files import Folder
from ..spec import Value

NAME = "preprocessor_config.json"
#: File that newer folders have instead; the configuration is under its key ``image_processor``.
JOINT_NAME = "processor_config.json"
#: File with the configuration for videos.
VIDEO_NAME = "video_preprocessor_config.json"

#: Maximum side of an image after resizing or cropping, in pixels.
MAX_SIDE = 4096
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALVES = [0.5, 0.5, 0.5]

#: Class name of an image processor, without the suffix Fast or Pil -> its defaults.
_CLASSES: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224},
                           "do_center_crop": True, "resample": 3, "mean": CLIP_MEAN, "std": CLIP_STD},
    "BitImageProcessor": {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224},
                          "do_center_crop": True, "resample": 3, "mean": CLIP_MEAN, "std": CLIP_STD},
    "SiglipImageProcessor": {"size": {"height": 224, "width": 224}, "crop_size": None, "do_center_crop": False,
                             "resample": 3, "mean": HALVES, "std": HALVES},
    "ViTImageProcessor": {"size": {"height": 224, "width": 224}, "crop_size": None, "do_center_crop": False,
                          "resample": 2, "mean": HALVES, "std": HALVES},
}
_CLASSES["LlavaImageProcessor"] = {**_CLASSES["CLIPImageProcessor"], "pads": True}
#: Produces tiles in addition to the whole image. Its ``do_pad`` pads batches, which does not change an image.
_CLASSES["LlavaNextImageProcessor"] = {**_CLASSES["CLIPImageProcessor"], "grid": [
    [336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]}
_CLASSES["Gemma3ImageProcessor"] = {**_CLASSES["SiglipImageProcessor"], "resample": 2}
_CLASSES["CLIPFeatureExtractor"] = _CLASSES["CLIPImageProcessor"]
_CLASSES["ViTFeatureExtractor"] = _CLASSES["ViTImageProcessor"]

#: Keys of the crops of Gemma 3.
_PAN = frozenset(("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops",
                  "pan_and_scan_min_ratio_to_activate"))

READ = {"image_processor_type", "feature_extractor_type", "size", "crop_size", "resample", "do_resize",
         "do_center_crop", "do_pad", "image_grid_pinpoints", "do_rescale", "rescale_factor",
         "do_normalize", "image_mean", "image_std"}
#: Keys without effect -> values for which they have no effect; None: any value.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "do_convert_rgb": None, "processor_class": None, "_processor_class": None, "_valid_processor_keys": None,
    "data_format": ("channels_first",), "input_data_format": (None,), "return_tensors": None, "device": None,
    "aspect_ratio_setting": ("anyres",), "disable_grouping": None, "default_to_square": None, "pad_size": (None,),
    "size_divisor": (None,), "reducing_gap": (None,), "image_seq_length": None, "use_fast": None,
}


@dataclass(frozen=True)
class Processor:
    """An image processor that prepares the whole image at one size.

    Attributes:
        resize, resample, crop: as in :class:`~mpool.models.spec.ImageSettings`.
        pad_square: RGB colour with which images are padded to squares before resizing; None: no padding.
        kv: hyper-parameters of rescaling and normalisation, which the C core applies to pixels.
        grid: (height, width) pairs, in pixels, at which an image may be cut into tiles; empty: no tiles.
    """

    resize: tuple[str, int] | tuple[str, int, int] | None
    resample: int
    crop: tuple[int, int] | None
    pad_square: tuple[int, int, int] | None
    kv: dict[str, Value]
    grid: tuple[tuple[int, int], ...] = ()

    def output(self) -> tuple[int, int] | None:
        """Return the (height, width) of every prepared image, in pixels, or None if it depends on the image."""
        if self.crop is not None:
            return self.crop
        if self.resize is not None and len(self.resize) == 3:
            return self.resize[1], self.resize[2]
        return None


def configuration(folder: Folder) -> Fields:
    """Return the image processor's configuration from either of the two files."""
    if folder.has(JOINT_NAME):
        section = folder.fields(JOINT_NAME).section("image_processor", None)
        if section is not None:
            return section
    if not folder.has(NAME):
        raise FormatError(file=folder.path, field=NAME, got="missing",
                          allowed="the configuration of the model's image processor",
                          hint="Write it with AutoImageProcessor.from_pretrained(...).save_pretrained(...) of "
                               "transformers")
    return folder.fields(NAME)


def config_of(folder: Folder, *classes: str) -> Fields:
    """Return the image processor's configuration if it is of one of ``classes``; without a class, it is of the first.

    Raises:
        FormatError: it is of another class.
    """
    config = configuration(folder)
    name = config.str("image_processor_type", classes[0])
    if _plain(name) not in classes:
        config.fail("image_processor_type", describe(name), ", ".join(classes))
    return config


def _plain(name: str) -> str:
    """Return the name of an image processor's class without the suffix of its backend."""
    return name.removesuffix("Fast").removesuffix("Pil")


def _read_size(config: Fields, key: str, default: dict[str, int] | None) -> dict[str, int]:
    """Return ``size`` or ``crop_size`` as a mapping with ``shortest_edge``, or with ``height`` and ``width``.

    A single number means the shortest edge for ``size``, and both sides for ``crop_size``.
    """
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is int:
        value = {"shortest_edge": value} if key == "size" else {"height": value, "width": value}
    section = Fields.of(value, file=config.file, at=config.name(key))
    found = {name: section.int(name, low=1, high=MAX_SIDE) for name in section if section.get(name) is not None}
    allowed = ({"shortest_edge"}, {"height", "width"}) if key == "size" else ({"height", "width"},)
    if set(found) not in allowed:
        config.fail(key, ", ".join(sorted(found)) or "nothing", "height and width"
                    + (", or shortest_edge" if key == "size" else ""))
    return found


def _read_three(config: Fields, key: str, default: list[float]) -> list[float]:
    """Return a value for each of the colours red, green and blue; a single number applies to all three."""
    value = config.get(key)
    if value is None:
        return list(default)
    if type(value) in (int, float):
        value = [value] * 3
    if type(value) is not list or len(value) != 3:
        config.fail(key, describe(value), "three numbers")
    numbers = Fields({str(i): one for i, one in enumerate(value)}, file=config.file, at=config.name(key))
    return [numbers.number(str(i), above=0.0 if key == "image_std" else None) for i in range(3)]


def check_keys(config: Fields, known: set[str], neutral: Mapping[str, tuple[Any, ...] | None]) -> None:
    """Check that a configuration selects only supported operations.

    Args:
        config: the configuration.
        known: keys that the caller reads.
        neutral: keys without effect -> values for which they have no effect; None: any value.

    Raises:
        FormatError: a key is neither known nor neutral.
        Unsupported: a neutral key has a value that has an effect.
    """
    for key in config:
        if key in known:
            continue
        if key not in neutral:
            config.fail(key, describe(config.get(key)), "no such key; known: " + ", ".join(sorted({*known, *neutral})))
        allowed, value = neutral[key], config.get(key)
        if allowed is not None and value is not None and value not in allowed:
            raise Unsupported(f"{config.file}: {config.name(key)} is {describe(value)}, which mpool does not support "
                              "for images")


def read_scaling(config: Fields, mean: list[float], std: list[float], normalize: bool = True) -> dict[str, Value]:
    """Return the hyper-parameters of the rescaling and normalisation that the C core applies to pixels. ``normalize``:
    default of ``do_normalize``."""
    kv: dict[str, Value] = {"mpool.image.rescale_factor": 1.0}
    if config.bool("do_rescale", True):
        kv["mpool.image.rescale_factor"] = config.number("rescale_factor", 1 / 255, above=0.0)
    if config.bool("do_normalize", normalize):
        kv["mpool.image.mean"] = _read_three(config, "image_mean", mean)
        kv["mpool.image.std"] = _read_three(config, "image_std", std)
    return kv


@dataclass(frozen=True)
class TilingProcessor:
    """The image processor of Idefics3 and SmolVLM, which cuts images into tiles of one size.

    Attributes:
        side: side of a tile, in pixels.
        longest, split: as in :class:`~mpool.models.spec.VisionSettings`.
        resample: Pillow's number of the resampling filter.
        kv: hyper-parameters of rescaling and normalisation, which the C core applies to pixels.
    """

    side: int
    longest: int | None
    split: bool
    resample: int
    kv: dict[str, Value]


def read_tiling(folder: Folder) -> TilingProcessor:
    """Read the image processor of an Idefics3 or SmolVLM folder.

    Raises:
        FormatError, Unsupported: on the conditions of :func:`read`.
    """
    config = config_of(folder, "Idefics3ImageProcessor", "SmolVLMImageProcessor")
    check_keys(config, (READ - {"crop_size", "do_center_crop", "image_grid_pinpoints"})
               | {"max_image_size", "do_image_splitting"},
               {**NEUTRAL, "return_row_col_info": None, "video_sampling": None, "crop_size": (None,),
                "do_center_crop": (False,)})

    def edge(key: str, default: int) -> int:
        section = config.section(key, None)
        if section is None:
            return default
        section.only({"longest_edge"})
        return section.int("longest_edge", low=1, high=MAX_SIDE)

    return TilingProcessor(
        edge("max_image_size", 364), edge("size", 4 * 364) if config.bool("do_resize", True) else None,
        config.bool("do_image_splitting", True), config.int("resample", 1, low=0, high=5),
        read_scaling(config, HALVES, HALVES))


@dataclass(frozen=True)
class DynamicSizeProcessor:
    """The image processor of Qwen's vision models, which keeps the proportions of an image.

    Attributes:
        patch: side of a patch, in pixels.
        merge: side of the square of patches that the model merges, in patches.
        min_pixels, max_pixels: bounds of the number of pixels after resizing.
        resize: True if images are resized to these bounds and to a whole number of merged patches.
        resample: Pillow's number of the resampling filter.
        kv: hyper-parameters of rescaling and normalisation, which the C core applies to pixels.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    resize: bool
    resample: int
    kv: dict[str, Value]


def _pixel_limits(config: Fields, least: int, most: int, own: bool = True) -> tuple[int, int]:
    """Return the bounds of the number of pixels of an image processor.

    Args:
        config: the processor's fields.
        least, most: defaults. One that contradicts the other bound of the file yields to it.
        own: True: ``min_pixels`` and ``max_pixels`` beside ``size`` come first.

    Raises:
        FormatError: a bound is malformed, or both contradict each other.
    """
    size = config.section("size", None)
    found: list[tuple[str, int]] = []
    for key, edge, usual in (("min_pixels", "shortest_edge", least), ("max_pixels", "longest_edge", most)):
        if own and key in config:
            found.append((key, config.int(key, low=1)))
        elif size is not None and edge in size:
            found.append((f"size.{edge}", size.int(edge, low=1)))
        else:
            found.append(("", usual))
    (low, least), (high, most) = found
    if least > most and low and high:
        config.fail(low, least, f"at most {most}, the value of {high}")
    return (least if low else min(least, most)), (most if high else max(least, most))


def read_dynamic_size(folder: Folder) -> DynamicSizeProcessor:
    """Read the image processor of a folder of one of Qwen's vision models.

    Raises:
        FormatError, Unsupported: on the conditions of :func:`read`.
    """
    config = config_of(folder, "Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
    check_keys(config, (READ - {"crop_size", "do_center_crop", "do_pad", "image_grid_pinpoints"})
               | {"min_pixels", "max_pixels", "patch_size", "merge_size", "temporal_patch_size"},
               {**NEUTRAL, "crop_size": (None,), "do_center_crop": (False,), "do_pad": (False,)})
    size = config.section("size", None)
    if size is not None:
        size.only({"shortest_edge", "longest_edge", "min_pixels", "max_pixels"})
    min_pixels, max_pixels = _pixel_limits(config, 56 * 56, 28 * 28 * 1280)
    return DynamicSizeProcessor(
        config.int("patch_size", 14, low=1, high=256), config.int("merge_size", 2, low=1, high=16), min_pixels,
        max_pixels, config.bool("do_resize", True), config.int("resample", 3, low=0, high=5),
        read_scaling(config, CLIP_MEAN, CLIP_STD))


def _differs(folder: Folder, config: Fields, key: str, found: object, images: object) -> str:
    """Return the sentence about a key that differs. It names no folder: clients of a server receive it."""
    file = os.path.basename(config.file)
    place = f"{file}: {config.name(key)}" if folder.has(file) else f"{file} is missing, and its default of {key}"
    found, images = (str(one) if isinstance(one, list) else describe(one) for one in (found, images))
    return f"{place} is {found}, but {images} for images; mpool prepares frames like images"


def _other_scaling(folder: Folder, config: Fields, images: Mapping[str, Value],
                   usual: Mapping[str, Any] | None = None) -> str | None:
    """Return the sentence that says which key of rescaling or normalisation differs, or None.

    Args:
        folder: the model folder.
        config: the configuration for videos.
        images: hyper-parameters of the image processor.
        usual: values of keys that ``config`` does not have; None: those of the image processor.
    """
    given = configuration(folder)
    own: dict[str, Any] = {**{key: given.bool(key, True) for key in ("do_rescale", "do_normalize")}, **{
        name: images.get(f"mpool.image.{key}") for key, name in (
            ("rescale_factor", "rescale_factor"), ("mean", "image_mean"), ("std", "image_std"))}}
    usual = own if usual is None else usual
    for flag, keys in (("do_rescale", ("rescale_factor",)), ("do_normalize", ("image_mean", "image_std"))):
        if (does := config.bool(flag, usual[flag])) != own[flag]:
            return _differs(folder, config, flag, does, own[flag])
        for key in keys if does else ():
            found = config.number(key, usual[key], above=0.0) if key == "rescale_factor" else \
                _read_three(config, key, usual[key])
            if found != own[key]:
                return _differs(folder, config, key, found, own[key])
    return None


def _video_config(folder: Folder, *others: str) -> Fields:
    """Return the configuration for videos: a section of the newer file, its own file, or the first of ``others`` that
    the folder has; without any, an empty one."""
    if folder.has(JOINT_NAME):
        section = folder.fields(JOINT_NAME).section("video_processor", None)
        if section is not None:
            return section
    name = next((one for one in (VIDEO_NAME, *others) if folder.has(one)), VIDEO_NAME)
    return folder.fields(name, missing_ok=True)


def read_frames(folder: Folder, images: TilingProcessor) -> tuple[int, int] | str:
    """Read the video processor of a SmolVLM 2 folder, whose frames become images of one tile.

    Returns:
        ``resample`` and ``longest`` of :class:`~mpool.models.spec.VideoSettings`; or, if frames are not prepared like
        images, the sentence that says which key differs.

    Raises:
        FormatError: a value is malformed.
    """
    config = _video_config(folder, NAME)
    sampling = config.section("video_sampling", None)
    size = config.section("size", None) or (None if sampling is None else sampling.section("video_size", None))
    tile = config.section("max_image_size", None)
    side = 364 if tile is None else tile.int("longest_edge", low=1, high=MAX_SIDE)
    if side != images.side:
        return _differs(folder, config, "max_image_size", side, images.side)
    scaling = _other_scaling(folder, config, images.kv, {
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": HALVES, "image_std": HALVES})
    if scaling is not None:
        return scaling
    file = os.path.basename(config.file)
    if not config.bool("do_resize", True):
        return f"{file}: {config.name('do_resize')} is false, which mpool does not support for frames"
    if size is not None and "longest_edge" not in size:
        return f"{file}: {size.at} has no longest_edge, which mpool needs for frames"
    longest = 4 * 364 if size is None else size.int("longest_edge", low=1, high=MAX_SIDE)
    return config.int("resample", 1, low=0, high=5), longest


def read_video(folder: Folder, images: DynamicSizeProcessor, frames: int, each: bool
               ) -> tuple[tuple[int, int] | None, int | None, int] | str:
    """Read the video processor of a folder of one of Qwen's vision models; without a file, its defaults.

    Args:
        folder: the model folder.
        images: the image processor.
        frames: number of frames that a patch spans.
        each: True if the limits are those of each frame: of Qwen2-VL and Qwen2.5-VL. Without a file, transformers then
            takes the limits of images; mpool takes those with which the models were published, of 768 tokens.

    Returns:
        ``pixels``, ``most_rows`` and ``resample`` of :class:`~mpool.models.spec.VideoSettings`; or, if frames are not
        prepared like images, the sentence that says which key differs.

    Raises:
        FormatError: a value is malformed.
    """
    config = _video_config(folder)
    for key, value in (("patch_size", images.patch), ("merge_size", images.merge), ("temporal_patch_size", frames)):
        if (found := config.int(key, value)) != value:
            return _differs(folder, config, key, found, value)
    scaling = _other_scaling(folder, config, images.kv)
    if scaling is not None:
        return scaling
    area = (28 if each else 32) ** 2
    least, most = _pixel_limits(config, 128 * area, 768 * area, own=each)
    rows = None
    if config.bool("cap_pixels_per_frame", False):
        rows = config.int("max_video_tokens", 128000 if each else 768, low=1)
    return ((least, most) if config.bool("do_resize", True) else None), rows, config.int("resample", 3, low=0, high=5)


@dataclass(frozen=True)
class FittingProcessor:
    """The image processor of Gemma 4, which keeps the proportions of an image.

    Attributes:
        patch: side of a patch, in pixels.
        merge: side of the square of patches that becomes one embedding, in patches.
        rows: maximum number of embeddings of an image.
        resample: Pillow's number of the resampling filter.
        kv: hyper-parameters of rescaling and normalisation, which the C core applies to pixels.
    """

    patch: int
    merge: int
    rows: int
    resample: int
    kv: dict[str, Value]


#: Numbers of embeddings of an image that Gemma 4 was trained with, at most.
GEMMA4_ROWS = (70, 140, 280, 560, 1120)


def read_fitting(folder: Folder, pixels_from_0: bool) -> FittingProcessor:
    """Read the image processor of a Gemma 4 folder.

    Args:
        folder: the model folder.
        pixels_from_0: False: the model maps pixels from 0 to 1 to values from -1 to 1.

    Raises:
        FormatError, Unsupported: on the conditions of :func:`read`.
    """
    config = config_of(folder, "Gemma4ImageProcessor", "Gemma4UnifiedImageProcessor")
    check_keys(config, (READ - {"size", "crop_size", "do_center_crop", "do_pad", "image_grid_pinpoints", "do_resize"})
               | {"patch_size", "pooling_kernel_size", "max_soft_tokens"},
               {**NEUTRAL, "size": None, "crop_size": (None,), "do_center_crop": (False,), "do_pad": (False,),
                "do_resize": (True,)})
    rows = config.int("max_soft_tokens", 280)
    if rows not in GEMMA4_ROWS:
        config.fail("max_soft_tokens", rows, ", ".join(map(str, GEMMA4_ROWS)))
    kv = read_scaling(config, [0.0] * 3, [1.0] * 3, normalize=False)
    return FittingProcessor(
        config.int("patch_size", 16, low=1, high=256), config.int("pooling_kernel_size", 3, low=1, high=16), rows,
        config.int("resample", 3, low=0, high=5), kv if pixels_from_0 else centred(kv))


def centred(kv: dict[str, Value]) -> dict[str, Value]:
    """Return the hyper-parameters of a normalisation, followed by the map of [0, 1] to [-1, 1]."""
    mean, std = (cast("list[float]", kv.get(f"mpool.image.{key}", [value] * 3)) for key, value in (
        ("mean", 0.0), ("std", 1.0)))
    return {**kv, "mpool.image.mean": [m + s / 2 for m, s in zip(mean, std)], "mpool.image.std": [s / 2 for s in std]}


def read_pan(folder: Folder) -> tuple[Processor, tuple[int, int, float] | None]:
    """Read the image processor of a Gemma 3 folder.

    Returns:
        The processor, and how it crops long images, as in :class:`~mpool.models.spec.VisionSettings`.

    Raises:
        FormatError, Unsupported: on the conditions of :func:`read`.
    """
    config = config_of(folder, "Gemma3ImageProcessor")
    processor = _processor(config, _PAN)
    if not config.bool("do_pan_and_scan", False):
        return processor, None
    return processor, (config.int("pan_and_scan_min_crop_size", 256, low=1, high=MAX_SIDE),
                       config.int("pan_and_scan_max_num_crops", 4, low=1, high=64),
                       config.number("pan_and_scan_min_ratio_to_activate", 1.2, above=0.0))


def read(folder: Folder) -> Processor:
    """Read the image processor of a folder.

    Raises:
        FormatError: the configuration is missing, its class or a key is unknown, or a value is malformed.
        Unsupported: the configuration selects an operation that mpool does not support.
    """
    return _processor(configuration(folder))


def _processor(config: Fields, more: frozenset[str] = frozenset()) -> Processor:
    """Read a processor; ``more``: keys that the caller reads."""
    name = config.str("image_processor_type", None) or config.str("feature_extractor_type", "CLIPImageProcessor")
    plain = _plain(name)
    if plain not in _CLASSES:
        config.fail("image_processor_type", describe(name), ", ".join(sorted(_CLASSES)))
    check_keys(config, READ | more, NEUTRAL)
    defaults = _CLASSES[plain]
    resize: tuple[str, int] | tuple[str, int, int] | None = None
    crop: tuple[int, int] | None = None
    if config.bool("do_resize", True):
        size = _read_size(config, "size", defaults["size"])
        resize = ("shortest", size["shortest_edge"]) if len(size) == 1 else ("exact", size["height"], size["width"])
    if config.bool("do_center_crop", defaults["do_center_crop"]):
        box = _read_size(config, "crop_size", defaults["crop_size"])
        crop = box["height"], box["width"]
    kv = read_scaling(config, defaults["mean"], defaults["std"])
    grid = () if "grid" not in defaults else pinpoints(config, defaults["grid"])
    if "image_grid_pinpoints" in config and not grid:
        config.fail("image_grid_pinpoints", "set", f"no such key for {plain}")
    return Processor(resize, config.int("resample", defaults["resample"], low=0, high=5), crop,
                     None if grid else _read_padding(config, bool(defaults.get("pads"))), kv, grid)


def pinpoints(config: Fields, default: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Return ``image_grid_pinpoints``: (height, width) pairs, in pixels, at which an image may be cut into tiles."""
    value = config.get("image_grid_pinpoints")
    value = default if value is None else value
    ok = isinstance(value, list) and 1 <= len(value) <= 64 and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 1 <= n <= MAX_SIDE for n in pair)
        for pair in value)
    if not ok:
        config.fail("image_grid_pinpoints", describe(value), "1 to 64 pairs of height and width")
    return tuple((high, wide) for high, wide in value)


def _read_padding(config: Fields, pads: bool) -> tuple[int, int, int] | None:
    """Return the RGB colour with which images are padded to squares before resizing, or None for no padding.

    Args:
        config: the configuration.
        pads: True if the processor's class supports ``do_pad``.
    """
    if not config.bool("do_pad", False):
        return None
    if not pads:
        raise Unsupported(f"{config.file}: {config.name('do_pad')} is true, which mpool supports only for "
                          "LlavaImageProcessor")
    return padding_color(_read_three(config, "image_mean", CLIP_MEAN))


def padding_color(mean: Sequence[float]) -> tuple[int, int, int]:
    """Return the mean colour of an image processor, whose components are 0 to 1, with components of 0 to 255."""
    red, green, blue = (int(min(max(value, 0.0), 1.0) * 255) for value in mean)
    return red, green, blue
