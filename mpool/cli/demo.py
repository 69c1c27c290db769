"""``mpool demo``: from nothing to a ranking of sentences, an answer, the nearest texts of images, answers about
images, and pictures, saying what was done and how fast. What works on texts is fetched; what works on images comes with
mpool."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .common import for_output, make_pool, note, say, size_of, speed

if TYPE_CHECKING:
    from ..model import Model
    from ..pool import Pool

SENTENCES = (
    "Air scatters the short waves of sunlight more than the long ones.",
    "At sunset light has a long way through the air, and red is what is left of it.",
    "A blue car is parked in front of the house.",
    "Bread rises because yeast gives off carbon dioxide.",
    "The cat is asleep on the warm roof.",
    "Shares fell by two per cent on Monday.",
)
#: Texts, and words in each, with which the speed of embedding is measured.
TEXTS, WORDS = 256, 20
MAX_TOKENS = 96
#: Digits that are drawn, and the characters that they are shown with, from paper to ink.
DRAWN = (2, 5, 8, 9)
SHADES = " .:-=+*#%@"
#: What the images of digits are compared with.
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def _silent(text: str = "") -> None:
    """Takes what is said when the output is JSON."""


def demo(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from ..errors import DownloadError, OfflineError
    from ..models import load_catalogue

    tell = _silent if arguments.json else say
    catalogue = load_catalogue()
    parts: list[tuple[str, Callable[..., dict[str, Any]], str]] = [
        ("embedding", _embedding, arguments.embedding_model or catalogue.default("text_embedding").key),
        ("text", _text, arguments.text_model or catalogue.default("text_to_text").key),
        ("image_embedding", _image_embedding, "digits-clip"),
        ("vision", _vision, "digits-llava"),
        ("text_to_image", _text_to_image, "digits-sd3"),
    ]
    missing = False
    with make_pool(arguments) as pool:
        facts: dict[str, Any] = {"machine": _machine(tell)}
        for part, show, name in parts:
            try:
                facts[part] = show(pool, name, arguments, tell)
            except (OfflineError, DownloadError) as error:
                facts[part], missing = None, True
                note(f"mpool: {name} could not be shown: {error}\n")
    if arguments.json:
        from .common import print_json

        print_json(facts)
    else:
        tell("Next: mpool chat; mpool embed \"A sentence.\"; mpool models; in Python: import mpool; help(mpool.embed)")
    return 1 if missing else 0


def _machine(tell: Any) -> dict[str, Any]:
    from ..debug.show import show_config

    found = show_config("dicts")
    cpu = found["cpu"]
    tell(f"mpool {found['version']} on {cpu['name']}: {found['lanes']} threads, {cpu['level']} kernels\n")
    return {"version": found["version"], "cpu": cpu["name"], "level": cpu["level"], "lanes": found["lanes"]}


def _fetch(name: str, arguments: argparse.Namespace, tell: Any) -> dict[str, Any]:
    """Has a model's files here."""
    from ..errors import OfflineError
    from ..models import is_offline, resolve

    start, fetched = time.monotonic(), False
    try:
        found = resolve(name, offline=True, progress=False)
    except OfflineError:
        if is_offline(arguments.offline or None):
            raise
        fetched = True
        tell(f"{name}: not here yet, fetching it ...")
        found = resolve(name, offline=arguments.offline or None, progress=None)
    seconds = time.monotonic() - start
    size = size_of(found)
    amount = f"{size / 1e6:,.{0 if size > 1e7 else 1}f} MB"
    here = "comes with mpool" if found.source == "bundled" else "already here"
    tell(f"{name}: " + (f"fetched in {seconds:.1f} s, {amount}, {found.revision or found.ref}" if fetched
                        else f"{here}, {amount}"))
    tell(f"  files   {found.path}")
    return {"model": name, "fetched": fetched, "fetch_seconds": round(seconds, 3), "path": found.path,
            "bytes": size, "revision": found.revision}


def _load(pool: Pool, name: str, compute: Any, facts: dict[str, Any], tell: Any) -> Model:
    start = time.monotonic()
    model = pool.load(name, compute=compute)
    facts["load_seconds"] = round(time.monotonic() - start, 4)
    facts["compute"] = next(row.compute for row in pool.ps() if row.capability == model.capability)
    tell(f"  loaded  in {facts['load_seconds']:.2f} s, arithmetic: {facts['compute']}")
    return model


def _embedding(pool: Pool, name: str, arguments: argparse.Namespace, tell: Any) -> dict[str, Any]:
    from .. import similarity

    facts = _fetch(name, arguments, tell)
    model = _load(pool, name, arguments.compute, facts, tell)
    question = model.embed(arguments.question, "query")
    scores = similarity(question, model.embed(SENTENCES, "document"))
    ranking = sorted(zip(map(float, scores.ravel()), SENTENCES), reverse=True)
    tell(f"\n  {arguments.question}")
    for score, sentence in ranking:
        tell(f"  {score:6.3f}  {sentence}")
    facts["ranking"] = [{"similarity": round(score, 6), "text": sentence} for score, sentence in ranking]

    words = " ".join(SENTENCES).replace(".", "").split()
    chance = random.Random(0)
    texts = [" ".join(chance.choices(words, k=WORDS)) for _ in range(TEXTS)]
    start = time.monotonic()
    model.batch_embed(texts)
    facts["texts_per_second"] = round(TEXTS / (time.monotonic() - start), 1)
    singles = []
    for text in texts[:32]:
        start = time.monotonic()
        model.embed(text)
        singles.append(time.monotonic() - start)
    facts["one_text_ms"] = round(sorted(singles)[len(singles) // 2] * 1e3, 3)
    tell(f"\n  speed   {facts['texts_per_second']:,.0f} texts/s ({TEXTS} texts of {WORDS} words in one call), "
         f"{facts['one_text_ms']:.2f} ms for one\n")
    return facts


def _text(pool: Pool, name: str, arguments: argparse.Namespace, tell: Any) -> dict[str, Any]:
    facts = _fetch(name, arguments, tell)
    model = _load(pool, name, arguments.compute, facts, tell)
    tell(f"\n  {arguments.question}")
    messages = [{"role": "user", "content": arguments.question}]
    with model.chat(messages, stream=True, temperature=0, max_tokens=MAX_TOKENS) as stream:
        if not arguments.json:
            sys.stdout.write("  ")
            for chunk in stream:
                sys.stdout.write(for_output(chunk.text, sys.stdout).replace("\n", "\n  "))
                sys.stdout.flush()
        done = stream.result()
    reading, writing = speed(done)
    facts |= {"answer": done.text, "finish_reason": done.finish_reason, "prompt_tokens": done.usage.prompt_tokens,
              "completion_tokens": done.usage.completion_tokens, "prompt_tokens_per_second": round(reading, 1),
              "tokens_per_second": round(writing, 1)}
    cut = f" (cut after {MAX_TOKENS} tokens)" if done.finish_reason == "length" else ""
    tell(f"{cut}\n\n  speed   {writing:,.0f} tokens/s written, {reading:,.0f} tokens/s of prompt read\n")
    return facts


def digit_images() -> list[str]:
    """Paths of the images that come with mpool, of the digits from 0 to 9; no model was trained on them."""
    from ..models.sources.bundled import ROOT

    return [os.path.join(ROOT, "images", f"{digit}.png") for digit in range(10)]


def _image_embedding(pool: Pool, name: str, arguments: argparse.Namespace, tell: Any) -> dict[str, Any]:
    from .. import similarity

    facts = _fetch(name, arguments, tell)
    model = _load(pool, name, arguments.compute, facts, tell)
    texts, images = [f"a handwritten {digit}" for digit in DIGITS], digit_images()
    start = time.monotonic()
    scores = similarity(model.embed_image(images), pool.embed(texts, name, compute=arguments.compute))
    facts["seconds"] = round(time.monotonic() - start, 4)
    tell("\n  a small model that knows handwritten digits only; images that it was not trained on, and the nearest of "
         "ten texts:")
    facts["nearest"] = []
    for image, row in zip(images, scores):
        best = int(row.argmax())
        facts["nearest"].append({"image": os.path.basename(image), "text": texts[best],
                                 "similarity": round(float(row[best]), 6)})
        tell(f"  {row[best]:6.3f}  {os.path.basename(image)}  {texts[best]}")
    right = sum(row["text"] == text for row, text in zip(facts["nearest"], texts))
    facts["right"] = right
    tell(f"\n  {right} of {len(images)} are right, in {facts['seconds'] * 1e3:.0f} ms\n")
    return facts


def _vision(pool: Pool, name: str, arguments: argparse.Namespace, tell: Any) -> dict[str, Any]:
    facts = _fetch(name, arguments, tell)
    model = _load(pool, name, arguments.compute, facts, tell)
    images = digit_images()
    asked = (([images[7]], "What digit is this?"), ([images[7]], "Is it even or odd?"),
             ([images[4]], "Describe the image."), ([images[3], images[8]], "Which digits are these?"))
    tell("\n  a small model that reads images of handwritten digits only:")
    start, facts["answers"], tokens = time.monotonic(), [], 0
    for shown, question in asked:
        done = model.vision(shown, question, temperature=0, max_tokens=40)
        tokens += done.usage.completion_tokens
        names = ", ".join(map(os.path.basename, shown))
        facts["answers"].append({"images": names, "question": question, "answer": done.text})
        tell(f"  {names:12}  {question:24}  {done.text}")
    facts["seconds"] = round(time.monotonic() - start, 4)
    tell(f"\n  speed   {len(asked)} answers of {tokens} tokens in {facts['seconds'] * 1e3:.0f} ms\n")
    return facts


def _text_to_image(pool: Pool, name: str, arguments: argparse.Namespace, tell: Any) -> dict[str, Any]:
    facts = _fetch(name, arguments, tell)
    model = _load(pool, name, arguments.compute, facts, tell)
    prompts = [f"a handwritten {DIGITS[digit]}" for digit in DRAWN]
    start = time.monotonic()
    made = [model.generate_image(prompt, seed=1, guidance_scale=2) for prompt in prompts]
    facts["seconds"] = round(time.monotonic() - start, 3)
    tell("\n  a small model that draws handwritten digits only: " + ", ".join(prompts))
    for line in zip(*(_drawn(pictures.array) for pictures in made)):
        tell("  " + "  ".join(line))
    facts["pictures"] = [dict(pictures.parameters) for pictures in made]
    steps = sum(parameters["num_inference_steps"] for parameters in facts["pictures"])
    tell(f"\n  speed   {facts['seconds'] / len(made):.2f} s for each, {steps / facts['seconds']:,.0f} steps/s\n")
    return facts


def _drawn(pixels: Any) -> list[str]:
    """A picture (high, wide, 3), from 0 to 1, as lines of characters, each of 4 pixels down and 2 across."""
    high, wide, _ = pixels.shape
    cells = pixels.mean(axis=2).reshape(high // 4, 4, wide // 2, 2).mean(axis=(1, 3))
    return ["".join(SHADES[min(int((1 - value) * len(SHADES)), len(SHADES) - 1)] for value in row) for row in cells]
