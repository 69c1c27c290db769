"""``mpool demo`` with small models: its facts as JSON, compared with the library, and the lines that it prints."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.cli import demo, main, word_models
from mpool.cli.parser import make_parser

QUESTION = "Who are you?"
DIGITS = [f"{digit}.png" for digit in range(10)]
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def arguments(bert: Path, llama: Path) -> list[str]:
    return ["demo", "--embedding-model", str(bert), "--text-model", str(llama), "--question", QUESTION, "--offline",
            "--compute", "float32"]


@pytest.mark.builds
def test_facts(arguments: list[str], bert: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has the facts of all parts, with results of the library, and no other output."""
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config: Any = mpool.show_config("dicts")
    assert list(found) == ["machine", "embedding", "outputs", "text", "image_embedding", "vision", "text_to_image"]
    assert found["machine"] == {"version": mpool.__version__, "cpu": config["cpu"]["name"],
                                "level": config["cpu"]["level"], "compute_threads": config["compute_threads"]}
    for part, name in (("embedding", str(bert)), ("text", str(llama)), ("image_embedding", "digits-clip"),
                       ("vision", "digits-llava"), ("text_to_image", "digits-sd3")):
        facts = found[part]
        assert (facts["model"], facts["fetched"], facts["compute"]) == (name, False, "float32")
        size = sum(os.path.getsize(os.path.join(folder, file))
                   for folder, _, files in os.walk(facts["path"]) for file in files)
        assert facts["bytes"] == size or part not in ("embedding", "text") and size / 2 < facts["bytes"] < size
        assert 0 <= facts["fetch_seconds"] < 60 and 0 <= facts["load_seconds"] < 60
    query = mpool.embed(QUESTION, str(bert), task="query", compute="float32")
    scores = mpool.similarity(query, mpool.embed(demo.SENTENCES, str(bert), task="document", compute="float32"))
    ranking = sorted(zip(scores.tolist(), demo.SENTENCES), reverse=True)
    assert found["embedding"]["ranking"] == [
        {"similarity": pytest.approx(score, abs=1e-5), "text": text} for score, text in ranking]
    tokens = [mpool.embed_tokens(texts, str(bert), compute="float32") for texts in ([QUESTION], list(demo.SENTENCES))]
    unit = [[matrix / np.linalg.norm(matrix, axis=1, keepdims=True) for matrix in one] for one in tokens]
    scores = [float((unit[0][0] @ matrix.T).max(axis=1).sum()) for matrix in unit[1]]
    best = sorted(zip(scores, demo.SENTENCES), reverse=True)[:2]
    assert found["embedding"]["maxsim"] == [
        {"score": pytest.approx(score, abs=1e-3), "text": text} for score, text in best]
    assert found["embedding"]["texts_per_second"] > 0 and found["embedding"]["one_text_ms"] > 0
    done = mpool.chat([{"role": "user", "content": QUESTION}], str(llama), temperature=0, max_tokens=96,
                      compute="float32")
    text = found["text"]
    assert (text["answer"], text["finish_reason"], text["prompt_tokens"], text["completion_tokens"]) == (
        done.text, done.finish_reason, done.usage.prompt_tokens, done.usage.completion_tokens)
    assert text["tokens_per_second"] > 0
    nearest = found["image_embedding"]["nearest"]
    assert [row["image"] for row in nearest] == DIGITS
    assert [row["text"] for row in nearest] == [f"a handwritten {name}" for name in NAMES]
    vectors = mpool.embed_image(demo.digit_images(), "digits-clip", compute="float32")
    texts = mpool.embed([row["text"] for row in nearest], "digits-clip", compute="float32")
    assert np.allclose([row["similarity"] for row in nearest], np.diag(mpool.similarity(vectors, texts)), atol=1e-5)
    assert found["image_embedding"]["correct"] == 10
    assert [(row["images"], row["question"]) for row in found["vision"]["answers"]] == [
        ("7.png", "What digit is this?"), ("7.png", "Is it even or odd?"), ("4.png", "Describe the image."),
        ("3.png, 8.png", "Which digits are these?")]
    assert [row["answer"] for row in found["vision"]["answers"]][:2] == ["This is a seven.", "It is odd."]
    images = found["text_to_image"]["images"]
    assert [(row["prompt"], row["seed"], row["guidance_scale"]) for row in images] == [
        (f"a handwritten {NAMES[digit]}", 1, 2) for digit in (2, 5, 8, 9)]


@pytest.mark.builds
def test_outputs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The models of words give the results that their weights imply, and each output has its lines."""
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["outputs"]
    counts = [Counter(re.findall(r"\w+", text.lower())) for text in demo.SENTENCES]
    for row, count, sentence in zip(found["sparse"], counts, demo.SENTENCES):
        alone = {word for word in count if sum(word in other for other in counts) == 1}
        assert row["text"] == sentence and len(row["weights"]) == 4 and set(row["weights"]) <= alone
    assert len(found["sparse"]) == 2 and min(min(row["weights"].values()) for row in found["sparse"]) > 1
    products = {(a, b): sum(counts[a][word] * counts[b][word] for word in counts[a])
                / np.sqrt(sum(n * n for n in counts[a].values())
                          * sum(n * n for n in counts[b].values()))
                for a in range(len(counts)) for b in range(a)}
    a, b = max(products, key=lambda pair: products[pair])  # punctuation is unknown, and has no vector
    assert found["static"]["texts"] == [demo.SENTENCES[b], demo.SENTENCES[a]]
    assert found["static"]["similarity"] == pytest.approx(products[a, b], abs=1e-5)
    assert found["static"]["texts_per_second"] > 0
    bread, cat = demo.SENTENCES[3:5]
    assert [(row["text"], row["label"]) for row in found["classification"]] == [(bread, "food"), (cat, "animals")]
    assert [(row["text"], row["label"]) for row in found["adapters"]] == [(bread, "science"), (cat, "animals")]
    assert all(row["score"] > 0.9 for row in found["classification"] + found["adapters"])
    assert main(arguments) == 0
    out = capsys.readouterr().out
    number = r" +\d+\.\d{2,3}  "
    for title, pattern in {
            "Token vectors: the two sentences with the highest MaxSim": rf"{number}[A-Z].*\.",
            "Sparse vectors: the four largest weights of two sentences":
                r"  (\w+ \d\.\d\d, ){3}\w+ \d\.\d\d +[A-Z].*\.",
            "Static embeddings: the two most similar sentences": rf'{number}"[A-Z].*"',
            "Classification: score and label": rf"{number}(food|animals) +(Bread|The cat).*",
            "The same with the adapter (LoRA) 'bread-is-science'": rf"{number}(science|animals) +(Bread|The cat).*",
            }.items():
        assert re.search(rf"^  {re.escape(title)}\n{pattern}\n{pattern}\n", out, re.MULTILINE), title


def test_models_without_vectors_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Static embeddings have no token vectors: the demo says so, and continues."""
    model = word_models.write_static(tmp_path / "static", word_models.words_of(demo.SENTENCES))
    parsed = make_parser().parse_args(["demo", "--offline", "--question", demo.SENTENCES[4]])
    lines = list[str]()
    with mpool.Pool() as pool:
        facts = demo._embedding(pool, str(model), parsed, lines.append)
    assert facts["maxsim"] is None and "\n  This model has no token vectors" in lines
    assert facts["ranking"][0]["text"] == demo.SENTENCES[4]


def test_characters_of_images() -> None:
    """White is a space and black the last character; a character stands for 4 rows and 2 columns."""
    pixels = np.ones((8, 6, 3), np.float32)
    pixels[:4, 2:4], pixels[4:, 4:] = 0.0, 0.5
    assert demo._characters(pixels) == [" @ ", "  +"]
