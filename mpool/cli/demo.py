"""``mpool demo``: run one model of every capability, and print results and speed.

Ranks sentences, computes the other outputs of text encoders, answers a question, classifies images by text, answers
questions about images, and generates images. Downloads the two text models; the three image models are bundled with
mpool, and small models of the other outputs are written to a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..debug import show_config
from ..errors import DownloadError, OfflineError, Unsupported
from ..models.catalogue import load as load_catalogue
from ..models.describing import is_offline, resolve
from ..models.sources.bundled import ROOT
from ..search import maxsim, similarity
from . import word_models
from .common import make_pool, note, print_json, say, size_of, speed
from .layout import fit
from .terminal import Wrapped

if TYPE_CHECKING:
    from ..model import Model
    from ..pool import Pool

SENTENCES = (
    "Air scatters the short waves of sunlight more than the long ones.",
    "At sunset, sunlight travels a long way through the air, and mostly red light remains.",
    "A blue car is parked in front of the house.",
    "Bread rises because yeast gives off carbon dioxide.",
    "The cat is asleep on the warm roof.",
    "Shares fell by two per cent on Monday.",
)
#: Benchmark of text embedding: number of texts, and words per text.
TEXTS, WORDS = 256, 20
MAX_TOKENS = 96
#: Words of the labels of the classifier for the sentences.
TOPICS = {"science": ("air", "waves", "sunlight"), "home": ("car", "house", "roof"), "food": ("bread", "yeast"),
          "animals": ("cat", "asleep"), "money": ("shares", "cent")}
#: Sentences to classify, and the adapter that treats the words for food as words for science.
CLASSIFIED, ADAPTER = SENTENCES[3:5], "bread-is-science"
#: Digits to generate images of.
GENERATED = (2, 5, 8, 9)
#: Characters for pixels, from white to black.
SHADES = " .:-=+*#%@"
#: Names of the digits, for prompts and for the texts that images are compared with.
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def _discard(text: str = "") -> None:
    """Print nothing: replaces ``say`` if the output is JSON."""


def _show(text: str = "") -> None:
    say(fit(text, sys.stdout))


def demo(arguments: argparse.Namespace) -> int:
    """Run ``mpool demo``. The exit code is 1 if a model could not be downloaded."""
    show = _discard if arguments.json else _show
    catalogue = load_catalogue()
    parts: list[tuple[str, Callable[..., dict[str, Any]], str]] = [
        ("embedding", _embedding, arguments.embedding_model or catalogue.default("text_embedding").key),
        ("outputs", _outputs, "word models"),
        ("text", _text, arguments.text_model or catalogue.default("text_to_text").key),
        ("image_embedding", _image_embedding, "digits-clip"),
        ("vision", _vision, "digits-llava"),
        ("text_to_image", _text_to_image, "digits-sd3"),
    ]
    missing = False
    with make_pool(arguments) as pool:
        facts: dict[str, Any] = {"machine": _machine(show)}
        for part, run, name in parts:
            try:
                facts[part] = run(pool, name, arguments, show)
            except (OfflineError, DownloadError) as error:
                facts[part], missing = None, True
                note(f"mpool: skipping {name}: {error}\n")
    if arguments.json:
        print_json(facts)
    else:
        show("Next steps:\n"
             "  mpool chat                   chat with the language model\n"
             "  mpool embed \"A sentence.\"    print the embedding of a text\n"
             "  mpool models                 list the available models\n"
             "  python -c 'import mpool; help(mpool.embed)'")
    return 1 if missing else 0


def _machine(show: Any) -> dict[str, Any]:
    found = show_config("dicts")
    cpu = found["cpu"]
    threads = found["compute_threads"]
    show(f"mpool {found['version']} on {cpu['name']}: {threads} compute threads, {cpu['level']} kernels\n")
    return {"version": found["version"], "cpu": cpu["name"], "level": cpu["level"], "compute_threads": threads}


def _fetch(name: str, arguments: argparse.Namespace, show: Any) -> dict[str, Any]:
    """Download a model's files unless they exist."""
    start, fetched = time.monotonic(), False
    try:
        found = resolve(name, offline=True, progress=False)
    except OfflineError:
        if is_offline(arguments.offline or None):
            raise
        fetched = True
        show(f"{name}: downloading ...")
        found = resolve(name, offline=arguments.offline or None, progress=None)
    seconds = time.monotonic() - start
    size = size_of(found)
    amount = f"{size / 1e6:,.{0 if size > 1e7 else 1}f} MB"
    here = "bundled with mpool" if found.source == "bundled" else "already downloaded"
    show(f"{name}: " + (f"downloaded in {seconds:.1f} s, {amount}, revision {found.revision or found.ref}" if fetched
                        else f"{here}, {amount}"))
    show(f"  files   {found.path}")
    return {"model": name, "fetched": fetched, "fetch_seconds": round(seconds, 3), "path": found.path,
            "bytes": size, "revision": found.revision}


def _load(pool: Pool, name: str, compute: Any, facts: dict[str, Any], show: Any) -> Model:
    start = time.monotonic()
    model = pool.load(name, compute=compute)
    facts["load_seconds"] = round(time.monotonic() - start, 4)
    facts["compute"] = next(row.compute for row in pool.ps() if row.capability == model.capability)
    show(f"  loaded  in {facts['load_seconds']:.2f} s, compute type {facts['compute']}")
    return model


def _embedding(pool: Pool, name: str, arguments: argparse.Namespace, show: Any) -> dict[str, Any]:
    facts = _fetch(name, arguments, show)
    model = _load(pool, name, arguments.compute, facts, show)
    question = model.embed(arguments.question, "query")
    scores = similarity(question, model.embed(SENTENCES, "document"))
    ranking = sorted(zip(map(float, scores.ravel()), SENTENCES), reverse=True)
    show(f"\n  Sentences ranked by similarity to the question: {arguments.question}")
    for score, sentence in ranking:
        show(f"  {score:6.3f}  {sentence}")
    facts["ranking"] = [{"similarity": round(score, 6), "text": sentence} for score, sentence in ranking]

    facts["maxsim"] = _maxsim(model, arguments.question, show)
    texts = _texts()
    start = time.monotonic()
    model.batch_embed(texts)
    facts["texts_per_second"] = round(TEXTS / (time.monotonic() - start), 1)
    singles = []
    for text in texts[:32]:
        start = time.monotonic()
        model.embed(text)
        singles.append(time.monotonic() - start)
    facts["one_text_ms"] = round(sorted(singles)[len(singles) // 2] * 1e3, 3)
    show(f"\n  speed   {facts['texts_per_second']:,.0f} texts/s for {TEXTS} texts of {WORDS} words in one call, "
         f"{facts['one_text_ms']:.2f} ms for a single text\n")
    return facts


def _texts() -> list[str]:
    """Return the texts of the benchmarks: words of the sentences in any order."""
    words = " ".join(SENTENCES).replace(".", "").split()
    generator = random.Random(0)
    return [" ".join(generator.choices(words, k=WORDS)) for _ in range(TEXTS)]


def _maxsim(model: Model, question: str, show: Any) -> list[dict[str, Any]] | None:
    """Rank the sentences by the vectors of their tokens; None if the model has none (static embeddings)."""

    try:
        query, documents = (model.embed_tokens(texts) for texts in ([question], SENTENCES))
    except Unsupported:
        show("\n  This model has no token vectors")
        return None
    for found in (query, documents):
        found.values[:] = found.values / np.maximum(np.linalg.norm(found.values, axis=1, keepdims=True), 1e-12)
    scores = np.asarray(maxsim(query, documents))[0]
    show("\n  Token vectors: the two sentences with the highest MaxSim")
    rows = [{"score": round(float(scores[at]), 4), "text": SENTENCES[at]} for at in np.argsort(-scores)[:2]]
    for row in rows:
        show(f"  {row['score']:6.2f}  {row['text']}")
    return rows


def _outputs(pool: Pool, name: str, arguments: argparse.Namespace, show: Any) -> dict[str, Any]:
    """Compute sparse vectors, static embeddings and labels, without and with an adapter, by models of words."""
    words = word_models.words_of(SENTENCES)
    show("Other outputs of text encoders. Tiny models whose weights are set by hand: each\n"
         "word of the sentences above has a component of its own, so the scores show how\n"
         "the outputs work, and not how good a model is")
    with tempfile.TemporaryDirectory(prefix="mpool-demo-") as path:
        folder = Path(path)
        sparse = word_models.write_sparse(folder / "sparse", words, SENTENCES)
        static = word_models.write_static(folder / "static", words)
        facts: dict[str, Any] = {"sparse": _sparse(pool, sparse, arguments, show),
                                 "static": _static(pool, static, arguments, show)}
        model = word_models.write_classifier(folder / "classifier", words, TOPICS)
        adapter = word_models.write_adapter(folder / "adapter", words, TOPICS["food"], TOPICS["science"])
        loaded = pool.load(model, compute=arguments.compute, adapters={ADAPTER: adapter})
        show("\n  Classification: score and label")
        facts["classification"] = _labels(loaded, None, show)
        show(f"\n  The same with the adapter (LoRA) {ADAPTER!r}")
        facts["adapters"] = _labels(loaded, ADAPTER, show)
        for found in (sparse, static, model):
            pool.unload(found)
    show("")
    return facts


def _sparse(pool: Pool, model: Path, arguments: argparse.Namespace, show: Any) -> list[dict[str, Any]]:
    found = pool.embed_sparse(SENTENCES[:2], model, compute=arguments.compute).decoded(4)
    show("\n  Sparse vectors: the four largest weights of two sentences")
    for text, row in zip(SENTENCES, found):
        weights = ", ".join(f"{word} {weight:.2f}" for word, weight in row)
        show(f"  {weights:48}  {text}")
    return [{"text": text, "weights": {word: round(weight, 4) for word, weight in row}}
            for text, row in zip(SENTENCES, found)]


def _static(pool: Pool, model: Path, arguments: argparse.Namespace, show: Any) -> dict[str, Any]:
    vectors = pool.embed(SENTENCES, model, compute=arguments.compute)
    scores = similarity(vectors, vectors)
    first, second = max(combinations(range(len(SENTENCES)), 2), key=lambda pair: scores[pair])
    start = time.monotonic()
    pool.embed(_texts(), model, compute=arguments.compute)
    rate = round(TEXTS / (time.monotonic() - start), 1)
    show("\n  Static embeddings: the two most similar sentences")
    for sentence in (SENTENCES[first], SENTENCES[second]):
        show(f"  {scores[first, second]:6.3f}  \"{sentence}\"")
    show(f"  speed   {rate:,.0f} texts/s for {TEXTS} texts of {WORDS} words in one call")
    return {"similarity": round(float(scores[first, second]), 6), "texts": [SENTENCES[first], SENTENCES[second]],
            "texts_per_second": rate}


def _labels(model: Model, adapter: str | None, show: Any) -> list[dict[str, Any]]:
    found = model.classify(list(CLASSIFIED), adapter=adapter)
    rows = [{"text": text, "label": one.label, "score": round(one.score, 6)} for text, one in zip(CLASSIFIED, found)]
    for row in rows:
        show(f"  {row['score']:6.3f}  {row['label']:8}  {row['text']}")
    return rows


def _text(pool: Pool, name: str, arguments: argparse.Namespace, show: Any) -> dict[str, Any]:
    facts = _fetch(name, arguments, show)
    model = _load(pool, name, arguments.compute, facts, show)
    show(f"\n  Question: {arguments.question}")
    messages = [{"role": "user", "content": arguments.question}]
    with model.chat(messages, stream=True, temperature=0, max_tokens=MAX_TOKENS) as stream:
        if not arguments.json:
            text = Wrapped(sys.stdout, indent="  ")
            for chunk in stream:
                text.write(chunk.text)
            text.end()
        done = stream.result()
    prefill, decode = speed(done)
    facts |= {"answer": done.text, "finish_reason": done.finish_reason, "prompt_tokens": done.usage.prompt_tokens,
              "completion_tokens": done.usage.completion_tokens, "prompt_tokens_per_second": round(prefill, 1),
              "tokens_per_second": round(decode, 1)}
    cut = f" (stopped after {MAX_TOKENS} tokens)" if done.finish_reason == "length" else ""
    show(f"{cut}\n\n  speed   {decode:,.0f} tokens/s decode, {prefill:,.0f} tokens/s prefill\n")
    return facts


def digit_images() -> list[str]:
    """Return the paths of the bundled images of the digits 0 to 9. They are not in the training data of the models."""
    return [os.path.join(ROOT, "images", f"{digit}.png") for digit in range(10)]


def _image_embedding(pool: Pool, name: str, arguments: argparse.Namespace, show: Any) -> dict[str, Any]:
    facts = _fetch(name, arguments, show)
    model = _load(pool, name, arguments.compute, facts, show)
    texts, images = [f"a handwritten {digit}" for digit in DIGITS], digit_images()
    start = time.monotonic()
    scores = similarity(model.embed_image(images), pool.embed(texts, name, compute=arguments.compute))
    facts["seconds"] = round(time.monotonic() - start, 4)
    show("\n  A tiny model that was trained on handwritten digits only. For each\n"
         "  image, which is not in its training data, the most similar of the texts\n"
         "  \"a handwritten zero\" to \"a handwritten nine\":")
    facts["nearest"] = []
    for image, row in zip(images, scores):
        best = int(row.argmax())
        facts["nearest"].append({"image": os.path.basename(image), "text": texts[best],
                                 "similarity": round(float(row[best]), 6)})
        show(f"  {row[best]:6.3f}  {os.path.basename(image)}  {texts[best]}")
    correct = sum(row["text"] == text for row, text in zip(facts["nearest"], texts))
    facts["correct"] = correct
    show(f"\n  {correct} of {len(images)} are correct\n\n  speed   {facts['seconds'] * 1e3:.0f} ms in total\n")
    return facts


def _vision(pool: Pool, name: str, arguments: argparse.Namespace, show: Any) -> dict[str, Any]:
    facts = _fetch(name, arguments, show)
    model = _load(pool, name, arguments.compute, facts, show)
    images = digit_images()
    questions = (([images[7]], "What digit is this?"), ([images[7]], "Is it even or odd?"),
                 ([images[4]], "Describe the image."), ([images[3], images[8]], "Which digits are these?"))
    show("\n  A tiny vision model for images of handwritten digits. Image, question and answer:")
    start, facts["answers"], tokens = time.monotonic(), [], 0
    for shown, question in questions:
        done = model.vision(shown, question, temperature=0, max_tokens=40)
        tokens += done.usage.completion_tokens
        names = ", ".join(map(os.path.basename, shown))
        facts["answers"].append({"images": names, "question": question, "answer": done.text})
        show(f"  {names:12}  {question:24}  {done.text}")
    facts["seconds"] = round(time.monotonic() - start, 4)
    show(f"\n  speed   {len(questions)} answers with {tokens} tokens in {facts['seconds'] * 1e3:.0f} ms\n")
    return facts


def _text_to_image(pool: Pool, name: str, arguments: argparse.Namespace, show: Any) -> dict[str, Any]:
    facts = _fetch(name, arguments, show)
    model = _load(pool, name, arguments.compute, facts, show)
    prompts = [f"a handwritten {DIGITS[digit]}" for digit in GENERATED]
    start = time.monotonic()
    results = [model.generate_image(prompt, seed=1, guidance_scale=2) for prompt in prompts]
    facts["seconds"] = round(time.monotonic() - start, 3)
    show("\n  A tiny diffusion model for images of handwritten digits. Prompts: " + ", ".join(prompts))
    for line in zip(*(_characters(images.array) for images in results)):
        show("  " + "  ".join(line))
    facts["images"] = [dict(images.parameters) for images in results]
    steps = sum(parameters["num_inference_steps"] for parameters in facts["images"])
    rate = steps / facts["seconds"]
    show(f"\n  speed   {facts['seconds'] / len(results):.2f} s per image, "
         f"{f'{rate:,.0f}' if rate >= 10 else f'{rate:.2g}'} steps/s\n")
    return facts


def _characters(pixels: Any) -> list[str]:
    """Convert an image ``(height, width, 3)``, 0 to 1, to lines of text: one character per 4 rows and 2 columns."""
    height, width, _ = pixels.shape
    cells = pixels.mean(axis=2).reshape(height // 4, 4, width // 2, 2).mean(axis=(1, 3))
    return ["".join(SHADES[min(int((1 - value) * len(SHADES)), len(SHADES) - 1)] for value in row) for row in cells]
