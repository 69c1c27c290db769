"""Images in prompts: found in messages, prepared, and put in the place of the tokens that stand for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import shown
from ..errors import ContextOverflow, InvalidArgument, MpoolError
from ..images import read_image
from ..images.tiling import PlaceholderRun, tile_image
from ..runtime import threads as _threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..images.tiling import TiledImage
    from ..models import VisionSettings
    from ..runtime.entry import Entry
    from ..tokenizers import Tokenizer

#: Images of one call.
MOST_IMAGES = 256
_KEY = 16


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a prompt as the core takes them; see ``mp_text_images`` in csrc/models/capability.h.

    Attributes:
        pixels: uint8, all tiles behind each other.
        sizes: int32 ``[2 * tiles]``, heights and widths in turn.
        tile_keys: uint8 ``[16 * tiles]``, hashes of size and pixels.
        runs: int32 ``[3 * runs]``: start in the prompt, rows, tiles.
        run_keys: uint8 ``[16 * runs]``.
        sources: int32, which row stands where; empty: one after the other.
    """

    pixels: NDArray[np.uint8]
    sizes: NDArray[np.int32]
    tile_keys: NDArray[np.uint8]
    runs: NDArray[np.int32]
    run_keys: NDArray[np.uint8]
    sources: NDArray[np.int32]

    def arrays(self) -> tuple[Any, ...]:
        """Arguments of the core's ``submit_text``."""
        return self.pixels, self.sizes, self.tile_keys, self.runs, self.run_keys, self.sources


# ---- preparing -------------------------------------------------------------------------------------------------------

def _read(entry: Entry, images: Sequence[Any], allow_urls: bool, deadline: float | None) -> list[TiledImage]:
    settings, found = _settings(entry), []
    for at, image in enumerate(images):
        name = f"images[{at}]" if len(images) > 1 else "image"
        limit = _threads.remaining(deadline, entry.key)
        read = read_image(image, name, allow_urls=allow_urls, timeout=limit)
        found.append(tile_image(read, settings, name))
    return found


def _settings(entry: Entry) -> VisionSettings:
    settings = entry.describe().vision
    assert settings is not None, "entries of another capability are refused before"
    return settings


def read_images(entry: Entry, images: Sequence[Any], allow_urls: Any, deadline: float | None) -> list[TiledImage]:
    """Images read and prepared; off the main thread, so that Ctrl-C is seen meanwhile.

    Raises:
        InvalidArgument: an image that is none, broken or beyond a limit, or too many.
        FileError, DownloadError: one that cannot be read.
    """
    if not isinstance(allow_urls, bool):
        raise InvalidArgument(f"allow_urls is {shown(allow_urls)}, allowed: True or False", key=entry.key)
    if len(images) > MOST_IMAGES:
        raise InvalidArgument(f"there are {len(images):,} images, allowed: at most {MOST_IMAGES}", key=entry.key)
    try:
        if threading.current_thread() is not threading.main_thread():
            return _read(entry, images, allow_urls, deadline)
        return _threads.interruptible(_read, entry, images, allow_urls, deadline, chars=_threads.LONG)
    except MpoolError as error:
        error.key = error.key or entry.key
        raise


# ---- in the prompt ---------------------------------------------------------------------------------------------------

def _digest(*parts: bytes | memoryview) -> bytes:
    made = blake2b(digest_size=_KEY)
    for part in parts:
        made.update(part)
    return made.digest()


def _placeholders(cut: TiledImage, tokenizer: Tokenizer) -> list[NDArray[np.int32] | PlaceholderRun]:
    """Token ids that stand for an image in the prompt, and the runs of its rows."""
    return [part if isinstance(part, PlaceholderRun) else tokenizer.encode(part, add_special=False, parse_special=True)
            for part in cut.placeholders]


def expand(entry: Entry, ids: NDArray[np.int32], cuts: Sequence[TiledImage]) -> tuple[NDArray[np.int32], Images | None]:
    """The prompt with every image in the place of its token, and the images.

    Raises:
        InvalidArgument: the prompt has not as many tokens for images as there are images.
        ContextOverflow: the images leave no room for an answer.
    """
    settings, tokenizer = _settings(entry), entry.tokenizer()
    row = np.int32(max(settings.image_token_id, 0))  # what stands for a row; the core knows by its runs that it does
    places = np.flatnonzero(ids == settings.image_token_id)
    if len(places) != len(cuts):
        raise InvalidArgument(f"the prompt has {len(places)} places for images and there are {len(cuts)} images, "
                              "allowed: as many", key=entry.key,
                              hint="The model's chat template decides where images stand"
                              if len(cuts) else "Give the images, or leave the token for images out")
    if not cuts:
        return ids, None
    parts: list[NDArray[np.int32]] = []
    runs: list[int] = []
    run_keys: list[bytes] = []
    sources: list[NDArray[np.int32]] = []
    tile_keys = [[_digest(np.array(tile.shape[:2], np.int32).tobytes(), np.ascontiguousarray(tile).data)
                  for tile in cut.tiles] for cut in cuts]
    length = start = 0
    for at, image, keys in zip(places.tolist(), cuts, tile_keys):
        parts.append(ids[start:at])
        length += at - start
        tile = 0
        for piece in _placeholders(image, tokenizer):
            if isinstance(piece, PlaceholderRun):
                runs += [length, piece.rows, piece.tiles]
                order = b"" if piece.sources is None else piece.sources.tobytes()
                run_keys.append(_digest(order, *keys[tile:tile + piece.tiles]))
                sources.append(np.arange(piece.rows, dtype=np.int32) if piece.sources is None else piece.sources)
                tile += piece.tiles
                piece = np.full(piece.rows, row, dtype=np.int32)
            parts.append(piece)
            length += len(piece)
        start = at + 1
    parts.append(ids[start:])
    whole = np.concatenate(parts)
    _check_room(entry, len(whole), len(ids), len(cuts))
    tiles = [tile for image in cuts for tile in image.tiles]
    plain = all(isinstance(piece, str) or piece.sources is None for image in cuts for piece in image.placeholders)
    made = Images(
        pixels=np.concatenate([tile.reshape(-1) for tile in tiles]),
        sizes=np.array([side for tile in tiles for side in tile.shape[:2]], dtype=np.int32),
        tile_keys=np.frombuffer(b"".join(key for keys in tile_keys for key in keys), dtype=np.uint8),
        runs=np.array(runs, dtype=np.int32), run_keys=np.frombuffer(b"".join(run_keys), dtype=np.uint8),
        sources=np.empty(0, dtype=np.int32) if plain else np.concatenate(sources))
    return whole, made


def check_raw(entry: Entry, ids: NDArray[np.int32]) -> None:
    """A raw prompt, which has no images.

    Raises:
        InvalidArgument: it has a place for one.
    """
    token = _settings(entry).image_token_id
    places = np.flatnonzero(ids == token) if token >= 0 else ids[:0]
    if len(places):
        raise InvalidArgument(f"token {places[0]} of the prompt is {entry.tokenizer().token_text(token)}, the place of "
                              "an image, and a raw prompt has no images", key=entry.key,
                              hint="Use mpool.vision(images, prompt, model), or mpool.chat with image parts")


def _check_room(entry: Entry, tokens: int, texts: int, images: int) -> None:
    generation = entry.describe().generation
    assert generation is not None
    limit = generation.context_length - 1
    if tokens > limit:
        raise ContextOverflow(f"the prompt has {tokens} tokens, {tokens - texts + images} of them for {images} "
                              f"image{'s' * (images != 1)}; the model takes {limit} and at least one to answer",
                              tokens=tokens, limit=limit, hint="Give fewer or smaller images, or a shorter text",
                              key=entry.key)


def messages_of(images: Any, prompt: Any) -> list[dict[str, Any]]:
    """The conversation of :func:`mpool.vision`: images, then a text.

    Raises:
        InvalidArgument: no image, or no text.
    """
    from ..images import images_of

    if not isinstance(prompt, str) or not prompt:
        raise InvalidArgument(f"the prompt is {shown(prompt)}, allowed: a text of 1 character and more")
    found = images_of(images, MOST_IMAGES, "Ask about fewer at a time")
    many = [images] if found is None else found
    if not many:
        raise InvalidArgument("images is empty, allowed: an image or a list of images",
                              hint="For a text alone: mpool.chat or mpool.generate")
    return [{"role": "user", "content": [*({"type": "image", "image": image} for image in many),
                                         {"type": "text", "text": prompt}]}]
