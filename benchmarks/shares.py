"""``python -m benchmarks shares``: share of a request's CPU time that the model does not use.

``texts``: the tokenizer alone (the batch call of its own library), compared with the embedding of the same texts, by
their length. ``images``: decoding and preparing alone (:mod:`mpool.images`), compared with the embedding of the same
images, by format and size. Both in CPU time of the process, with all threads, so that the share does not depend on how
many of them run at once. No text or image is used twice. With ``--json``, a turn of the record has both times of a row.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpool

from . import texts
from .options import add_json, add_threads, parser_of
from .record import Recorder

#: Format and size of images: a photograph of a phone, an image of a web page, and one that needs no resizing.
IMAGES = (("JPEG", 4032, 3024), ("JPEG", 640, 480), ("PNG", 640, 480), ("PNG", 224, 224))


def cpu_of(call: Callable[[], object]) -> float:
    """Return the CPU seconds that the process spends in a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def share_of(alone: list[float], whole: list[float]) -> dict[str, Any]:
    """Return the medians in milliseconds, and the share with its range over the turns."""
    shares = [part / total for part, total in zip(alone, whole, strict=True)]
    return {"alone ms": round(statistics.median(alone) * 1e3, 3), "whole ms": round(statistics.median(whole) * 1e3, 3),
            "share": round(statistics.median(shares), 3), "from": round(min(shares), 3), "to": round(max(shares), 3)}


def add_row(recorder: Recorder, topic: str, turns: int, given: Callable[[int], Any], whole: Callable[[Any], object],
            alone: Callable[[Any], object]) -> None:
    """Measure a row, print its share, and add its turns to the record. A turn before them packs weights.

    Args:
        topic: name of the row.
        given: turn -> texts or images.
        whole, alone: the request, and the part of it that is not the model's.
    """
    both = []
    for turn in range(turns + 1):
        inputs = given(turn)
        seconds, frame = recorder.measure(lambda inputs=inputs: [cpu_of(functools.partial(call, inputs))
                                                                  for call in (alone, whole)])
        if turn:
            both.append(seconds)
            recorder.add(topic, "mpool", turn, {"alone ms": seconds[0] * 1e3, "whole ms": seconds[1] * 1e3}, frame)
    print(json.dumps({"row": topic, **share_of(*map(list, zip(*both, strict=True)))}), flush=True)


def of_texts(pool: mpool.Pool, recorder: Recorder, args: argparse.Namespace) -> None:
    """Measure the tokenizer's share for texts of natural length, of 10 and of 90 words."""
    from tokenizers import Tokenizer

    from mpool.models import resolve

    model = pool.load(args.embedding)
    path = resolve(args.embedding, progress=False).path
    tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    for name, make in (("natural", texts.mixed), ("10 words", lambda count, turn: texts.same(count, 10, turn)),
                       ("90 words", lambda count, turn: texts.same(count, 90, turn))):
        add_row(recorder, f"texts, {name}", args.turns, functools.partial(make, args.count), model.embed,
                tokenizer.encode_batch_fast)
    recorder.add_weights("embedding", path)


def encoded(form: str, width: int, height: int, seed: int) -> bytes:
    """Return an image of smooth colours with some noise, encoded."""
    from PIL import Image

    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (height // 32 + 1, width // 32 + 1, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize((width, height))).astype(np.int16)
    noise = random.integers(-6, 7, (height, width, 1), dtype=np.int16)
    stream = io.BytesIO()
    Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)).save(stream, form, quality=90)
    return stream.getvalue()


def of_images(pool: mpool.Pool, recorder: Recorder, args: argparse.Namespace) -> None:
    """Measure the share of decoding and preparing."""
    from mpool.images.loading import read_image
    from mpool.images.preparing import prepare
    from mpool.models import describe, resolve

    model = pool.load(args.images)
    settings = describe(args.images).image
    for form, width, height in IMAGES:
        add_row(recorder, f"images, {form} {width} x {height}", args.turns,
                lambda turn, kind=(form, width, height): [encoded(*kind, 100 * turn + number)
                                                          for number in range(args.image_count)],
                model.embed_image, lambda given: [prepare(read_image(one), settings) for one in given])
    recorder.add_weights("images", resolve(args.images, progress=False).path)


def main() -> int:
    """Run the command line."""
    parser = parser_of("shares", __doc__)
    parser.add_argument("--embedding", default="all-MiniLM-L6-v2", help="embedding model (default: %(default)s)")
    parser.add_argument("--images", metavar="MODEL", help="image model; without it, images are not measured")
    parser.add_argument("--count", type=int, default=512, help="texts of a turn (default: %(default)s)")
    parser.add_argument("--image-count", type=int, default=16, help="images of a turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="turns of each row (default: %(default)s)")
    add_threads(parser)
    add_json(parser)
    args = parser.parse_args()
    recorder = Recorder("shares", args.threads, count=args.count, image_count=args.image_count, turns=args.turns)
    with mpool.Pool(mpool.PoolConfig(threads=args.threads)) as pool:
        of_texts(pool, recorder, args)
        if args.images:
            of_images(pool, recorder, args)
    if args.json:
        recorder.write(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
