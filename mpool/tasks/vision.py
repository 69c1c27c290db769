"""Images in prompts: reads and prepares the images, and replaces their placeholder tokens in the prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import refuse, surrogate_of
from ..conversation.messages import NamedImage, NamedVideo
from ..errors import ContextOverflow, InvalidArgument, MpoolError, Unsupported
from ..host import native_calls
from ..images.loading import check_image, convert_image, images_of
from ..images.tiling import frame_positions, frame_size, resize_frame, rows_of, tile_image, tile_video
from ..runtime import deadlines as _deadlines

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..images.tiling import TiledImage
    from ..models import VisionSettings
    from ..runtime.entry import Entry
    from .options import Call

#: Maximum number of images per request.
MAX_IMAGES = 256
#: Bytes of a hash of a tile or a run, the key of the core's prefix cache.
_KEY_BYTES = 16
#: Maximum number of patches of a frame, as in the C core.
_MAX_PATCHES = 16384
#: Maximum position in time of frames, as in the C core.
_MAX_TIME = 1 << 17
#: Maximum time in seconds that a text before a frame states.
_MAX_SECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a prompt in the core's layout; see ``mp_text_images`` in csrc/models/capability.h.

    Attributes:
        pixels: uint8, the pixels of all tiles, concatenated.
        sizes: int32 ``[2 * tiles]``, height and width of each tile.
        tile_keys: uint8 ``[16 * tiles]``, hashes of size and pixels.
        runs: int32 ``[3 * runs]``: position in the prompt, number of rows and number of tiles of each run; 0 tiles:
            those of the run before.
        run_keys: uint8 ``[16 * runs]``, hashes of the tiles, sources and time of each run.
        sources: int32 ``[rows]``, the encoder row of each placeholder row; empty: the encoder rows in order.
        times: int32 ``[runs]``, the position in time of a run that continues a video, or -1; empty: there is none.
    """

    pixels: NDArray[np.uint8]
    sizes: NDArray[np.int32]
    tile_keys: NDArray[np.uint8]
    runs: NDArray[np.int32]
    run_keys: NDArray[np.uint8]
    sources: NDArray[np.int32]
    times: NDArray[np.int32]

    def arrays(self) -> tuple[Any, ...]:
        """Return the argument ``images`` of the core's ``submit_text``."""
        return self.pixels, self.sizes, self.tile_keys, self.runs, self.run_keys, self.sources, self.times


# ---- reading ---------------------------------------------------------------------------------------------------------

def _read(entry: Entry, images: Sequence[NamedImage | NamedVideo], allow_urls: bool, deadline: float | None,
          tokens: int | None) -> list[TiledImage]:
    settings = _settings(entry)
    found: list[TiledImage] = []
    allowed = settings.rows_allowed
    details = {"low": min(allowed), "high": min((one for one in allowed if one > (settings.rows or 0)),
                                                default=max(allowed)),
               "original": max(allowed)} if allowed and tokens is None else {}

    def limited(tokens: int | None) -> VisionSettings:
        if tokens is None:
            return settings
        if tokens not in allowed:
            refuse("image_tokens", tokens, ", ".join(map(str, allowed)) + " or None" if allowed else
                   "None: images of this model have a fixed number of tokens")
        return replace(settings, rows=tokens)

    limited(tokens)
    def converted(given: NamedImage, convert: Callable[[Any], Any]) -> Any:
        return convert_image(given.image, given.name, convert, allow_urls=allow_urls,
                             timeout=_deadlines.remaining(deadline, entry.key))

    for given in images:
        if isinstance(given, NamedVideo):
            found.append(_video(entry, given, converted))
            # the frames of many videos would take much memory before the prompt is known to be too long
            _check_context(entry, sum(run.rows for one in found for run in one.runs), 0,
                           [one.is_video for one in found], complete=False)
            continue
        rows = details.get(given.detail) if isinstance(given.detail, str) else None
        own = limited(tokens or rows or given.tokens)
        found.append(converted(given, partial(tile_image, settings=own, name=given.name)))
    return found


def _video(entry: Entry, given: NamedVideo, converted: Callable[..., Any]) -> TiledImage:
    """Read the frames of a video. ``converted``: reads an image and calls a function with it."""
    settings, positions = _settings(entry), list[int]()
    if settings.video is None:
        if settings.no_video is not None:
            raise Unsupported(settings.no_video, param=given.name, hint="Pass frames as images")
        raise Unsupported(f"`{given.name}` has frames of a video; this model takes images only", param=given.name,
                          hint="Pass frames as images, or use a model such as Qwen3-VL")
    if settings.video.mark_token_id is None and given.times[-1] > _MAX_SECONDS:
        raise InvalidArgument(param=given.name_of_times, got=f"{given.times[-1]:.6g} seconds",
                              allowed=f"at most {_MAX_SECONDS:,.0f} seconds")
    if settings.video.in_positions:
        span, rate = given.times[-1] - given.times[0], settings.video.per_second
        if rate is not None and not span * rate <= _MAX_TIME:
            raise InvalidArgument(param=given.name_of_times, got=f"{span:.6g} seconds",
                                  allowed=f"at most {_MAX_TIME // rate:,.0f} seconds")
        positions = frame_positions(given.times, given.fps, settings.video)
    width, height = converted(given.frames[0], _size_of)
    size = frame_size(settings, len(given.frames), height, width)
    if min(size) < 1 or size[0] * size[1] > _MAX_PATCHES * settings.image.patch_size ** 2:
        raise InvalidArgument(param=given.name, got=f"frames of {width} x {height} pixels",
                              allowed="frames that the model resizes to 1 to "
                                      f"{_MAX_PATCHES:,} patches", hint="Resize the frames first")
    _check_context(entry, rows_of(settings, *size) * -(-len(given.frames) // settings.video.frames), 0, [True],
                   complete=False)
    frames = [converted(one, partial(resize_frame, settings=settings, size=size, first=(height, width), name=one.name))
              for one in given.frames]
    around = settings.video.around
    texts = None if around is None else (entry.tokenizer().token_text(around[0]),
                                         entry.tokenizer().token_text(around[1]))
    return tile_video(frames, given.times, settings, texts, positions)


def _size_of(image: Any) -> tuple[int, int]:
    width, height = image.size
    return width, height


def _settings(entry: Entry) -> VisionSettings:
    settings = entry.describe().vision
    assert settings is not None, "the entry must have the right capability"
    return settings


def read_images(entry: Entry, images: Sequence[NamedImage | NamedVideo], allow_urls: Any, deadline: float | None,
                tokens: int | None = None) -> list[TiledImage]:
    """Read images and prepare them for the model. Threads for native calls decode them.

    Args:
        entry: the model.
        images: paths, URLs, bytes, arrays or Pillow images, as for :func:`mpool.vision`.
        allow_urls: True: download images from URLs.
        deadline: ``time.monotonic()`` at which downloads and decoders end; None: no deadline.
        tokens: maximum number of tokens of an image; None: that of the image's ``detail`` or of the model's image
            processor.

    Raises:
        InvalidArgument: a value is not an image, an image is corrupted or exceeds a limit, or there are too many.
        FileError, DownloadError: an image cannot be read.
    """
    if not isinstance(allow_urls, bool):
        refuse("allow_urls", allow_urls, "True or False", key=entry.key)
    try:
        _check_count(images)
        with native_calls.limited(deadline):
            return _read(entry, images, allow_urls, deadline, tokens)
    except MpoolError as error:
        error.key = error.key or entry.key
        raise


def check_images(images: Sequence[NamedImage | NamedVideo], allow_urls: bool, call: Call | None) -> None:
    """Check the images of a request before its model is known: as :func:`read_images`, but URLs are not fetched.

    Raises:
        InvalidArgument, FileError: as :func:`read_images`.
    """
    _check_count(images)
    with native_calls.limited(None if call is None else call.deadline):
        for given in images:
            for one in (given,) if isinstance(given, NamedImage) else given.frames:
                check_image(one.image, one.name, allow_urls, read=True)


def _check_count(images: Sequence[NamedImage | NamedVideo]) -> None:
    if len(images) > MAX_IMAGES:
        raise InvalidArgument(param=images[MAX_IMAGES].name, got=f"image {MAX_IMAGES + 1} of {len(images):,}",
                              allowed=f"at most {MAX_IMAGES} images")


# ---- placeholders ----------------------------------------------------------------------------------------------------

def _digest(*parts: bytes | memoryview) -> bytes:
    hash = blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        hash.update(part)
    return hash.digest()


def _keys_of_runs(cut: TiledImage) -> list[list[bytes]]:
    """Return the keys of the tiles of each run of an image."""
    tiles = iter([_digest(np.array(tile.shape[:2], np.int32).tobytes(), np.ascontiguousarray(tile).data)
                 for tile in cut.tiles])
    found: list[list[bytes]] = []
    for run in cut.runs:
        found.append(list(islice(tiles, run.tiles)) if run.tiles else found[-1])
    # the first frame of a group stands for all, so its key is that of all
    return [[_digest(b"frames", *one), *one[1:]] if run.frames else one for run, one in zip(cut.runs, found)]


def expand(entry: Entry, ids: NDArray[np.int32], cuts: Sequence[TiledImage], check_context: bool = True
           ) -> tuple[NDArray[np.int32], Images | None]:
    """Replace each image token of a prompt by the placeholders of a run.

    Args:
        entry: the model.
        ids: token ids of the prompt, int32 ``[tokens]``, with one image token for each run of the images.
        cuts: the prepared images, in the order of their tokens.
        check_context: True: check that the prompt fits into the context.

    Returns:
        the token ids with all placeholders, and the images or None.

    Raises:
        InvalidArgument: the number of image tokens differs from that of the runs.
        ContextOverflow: the images leave no space for a completion.
    """
    settings = _settings(entry)
    row = np.int32(max(settings.image_token_id, 0))  # any valid id: the core identifies image rows by `runs`
    positions = np.flatnonzero(ids == settings.image_token_id)
    parts_of = [(run, keys) for cut in cuts for run, keys in zip(cut.runs, _keys_of_runs(cut))]
    if len(positions) != len(parts_of):
        raise InvalidArgument(f"the prompt must have an image token for each of the {len(parts_of)} parts of its "
                              f"images, got {len(positions)} tokens", param="images", key=entry.key,
                              got=f"{len(positions)} image tokens", allowed=f"{len(parts_of)} image tokens",
                              hint="The model's chat template writes the image tokens" if cuts else
                              "Pass the images, or remove the image tokens from the prompt")
    if not cuts:
        return ids, None
    parts: list[NDArray[np.int32]] = []
    runs: list[int] = []
    sources: list[NDArray[np.int32]] = []
    length = start = 0
    for position, (run, _) in zip(positions.tolist(), parts_of):
        parts += [ids[start:position], np.full(run.rows, row, dtype=np.int32)]
        length += position - start
        runs += [length, run.rows, run.tiles]
        sources.append(np.arange(run.rows, dtype=np.int32) if run.sources is None else run.sources)
        length += run.rows
        start = position + 1
    parts.append(ids[start:])
    expanded = np.concatenate(parts)
    if check_context:
        _check_context(entry, len(expanded), len(ids) - len(parts_of), [cut.is_video for cut in cuts])
    tiles = [tile for image in cuts for tile in image.tiles]
    times = [run.time for run, _ in parts_of]
    in_order = all(run.sources is None for run, _ in parts_of)
    prompt_images = Images(
        pixels=np.concatenate([tile.reshape(-1) for tile in tiles]),
        sizes=np.array([side for tile in tiles for side in tile.shape[:2]], dtype=np.int32),
        tile_keys=np.frombuffer(b"".join(key for run, keys in parts_of for key in keys if run.tiles), dtype=np.uint8),
        runs=np.array(runs, dtype=np.int32),
        run_keys=np.frombuffer(b"".join(_digest(np.int32(run.time).tobytes(), b"" if run.sources is None else
                                                run.sources.tobytes(), *keys) for run, keys in parts_of), np.uint8),
        sources=np.empty(0, dtype=np.int32) if in_order else np.concatenate(sources),
        times=np.array([] if max(times) < 0 else times, dtype=np.int32))
    return expanded, prompt_images


def check_raw(entry: Entry, ids: NDArray[np.int32], name: str, hint: str) -> None:
    """Check that a raw prompt has no image tokens: it has no images.

    Args:
        entry: the model.
        ids: token ids of the prompt.
        name: parameter with the prompt, for the error.
        hint: how images are passed.

    Raises:
        InvalidArgument: the prompt has an image token.
    """
    token = _settings(entry).image_token_id
    positions = np.flatnonzero(ids == token) if token >= 0 else ids[:0]
    if len(positions):
        text = entry.tokenizer().token_text(token)
        raise InvalidArgument(f"`{name}` must not have image tokens, got {text} at index {positions[0]}",
                              param=name, key=entry.key, hint=hint)


def _check_context(entry: Entry, tokens: int, text: int, videos: Sequence[bool], complete: bool = True) -> None:
    """Raise ContextOverflow for a prompt that is too long. ``text``: the tokens that are no placeholders. ``videos``:
    for each image, True if it is a video. ``complete``: False if the prompt has more tokens."""
    generation = entry.describe().generation
    assert generation is not None
    limit = generation.context_length - 1
    if tokens > limit:
        kinds = (("image", len(videos) - sum(videos)), ("video", sum(videos)))
        counted = " and ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in kinds if count)
        least = "" if complete else "at least "
        raise ContextOverflow(f"the prompt has {least}{tokens} tokens, {tokens - text} of them for "
                              f"{counted}, but the model supports at most {limit} plus one "
                              "generated token", tokens=tokens, limit=limit,
                              hint="Pass fewer or smaller images or frames, or a shorter text", key=entry.key)


def messages_of(images: Any, prompt: Any) -> list[dict[str, Any]]:
    """Return the conversation for the arguments of :func:`mpool.vision`: one user message, images first.

    Raises:
        InvalidArgument: there is no image, the prompt is not a text, or the two are in the other order.
    """
    if not isinstance(prompt, str) or not prompt:
        refuse("prompt", prompt, "a text of at least 1 character")
    fault = surrogate_of(prompt, "prompt")
    if fault is not None:
        raise fault
    if isinstance(images, str) and " " in images and not os.path.exists(images) and os.path.isfile(prompt):
        raise InvalidArgument(param="images", got=f"a text, and the file {prompt} as the prompt",
                              allowed="an image or a list of images", hint="Use vision(images, prompt, model)")
    found = images_of(images, MAX_IMAGES, "Pass fewer images per request")
    several = [images] if found is None else found
    if not several:
        raise InvalidArgument(param="images", got="an empty list", allowed="an image or a list of images",
                              hint="For text without images use mpool.chat or mpool.generate")
    parts = [{"type": "image", "image": NamedImage(image, "images" if found is None else f"images[{at}]")}
             for at, image in enumerate(several)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
