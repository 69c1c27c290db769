"""``--adapter`` of ``mpool embed``, ``search``, ``rerank`` and ``classify``, compared with the library."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from adapterfiles import matrices, save_peft

import mpool
from mpool.cli import main

TEXTS = ["A cat sat on the mat.", "The quick brown fox jumps.", "w1 w2 numbers 0 1 2"]
QUERY = "a cat"
MODELS = {"embed": "bert", "sparse": "m3", "search": "bert", "rerank": "ranker", "classify": "sentiment",
          "tokens": "tagger"}


@pytest.fixture(scope="module")
def pool() -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(threads=2)) as made:
        yield made


def _ranked(lines: list[Any]) -> list[float]:
    return [line["score"] for line in sorted(lines, key=lambda line: line["line"])]


#: Name -> arguments of the command, numbers in what it prints, and those of the library.
COMMANDS: dict[str, tuple[list[str], Callable[[Any], Any], Callable[..., Any]]] = {
    "embed": (["embed"], lambda lines: [line["embedding"] for line in lines],
              lambda pool, model, **more: pool.embed(TEXTS, model, **more)),
    "sparse": (["embed", "--vectors", "sparse"],
               lambda lines: [value for line in lines for value in line["sparse"]["values"]],
               lambda pool, model, **more: pool.embed_sparse(TEXTS, model, **more).values),
    "search": (["search", "--json", QUERY], _ranked,
               lambda pool, model, **more: mpool.similarity(pool.embed(QUERY, model, task="query", **more),
                                                            pool.embed(TEXTS, model, task="document", **more)).ravel()),
    "rerank": (["rerank", "--json", QUERY], _ranked,
               lambda pool, model, **more: pool.rerank(QUERY, TEXTS, model, **more).scores),
    "classify": (["classify", "--json"],
                 lambda lines: [one["score"] for line in lines for one in line["results"]],
                 lambda pool, model, **more: [one.score for row in pool.classify(TEXTS, model, **more) for one in row]),
    "tokens": (["classify", "--json", "--tokens", "--aggregation", "none"],
               lambda lines: [one["score"] for line in lines for one in line["spans"]],
               lambda pool, model, **more: [one.score for spans in pool.classify_tokens(TEXTS, model, **more)
                                            for one in spans])}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return what a command prints for TEXTS, parsed as JSON."""
    assert main([*arguments, *TEXTS]) == 0
    text = capsys.readouterr().out
    return json.loads(text) if "--json" in arguments else [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_adapters_of_the_command_line(name: str, pool: mpool.Pool, tmp_path: Path, request: pytest.FixtureRequest,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    model: Path = request.getfixturevalue(MODELS[name])
    found = {key: pair for key, pair in matrices(model, 4, 1, ("query", "value", "dense")).items() if ".layer." in key
             or key.startswith("encoder.")}
    path = save_peft(tmp_path / "lora", found, 16.0, task_type="FEATURE_EXTRACTION")
    pool.load(model, adapters={"law": path})
    arguments, numbers, computed = COMMANDS[name]
    with_adapter, without = (computed(pool, model, adapter=adapter) for adapter in ("law", None))
    assert np.shape(with_adapter) != np.shape(without) or np.abs(np.subtract(with_adapter, without)).max() > 1e-3
    for more, wanted in (([], without), (["--adapter", f"law={path}"], with_adapter)):
        lines = numbers(printed(capsys, arguments[0], "-m", str(model), *more, *arguments[1:]))
        np.testing.assert_allclose(lines, wanted, rtol=1e-6, atol=1e-6)


def test_adapters_in_the_files_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from taskmodels import adapters_v3, make_v3, write_v3

    network = make_v3(1)
    model = str(write_v3(tmp_path / "v3", network, adapters_v3(network)))
    for name in ("separation", "text-matching"):
        lines = printed(capsys, "embed", "-m", model, "--adapter", name)
        with mpool.Pool() as other:
            wanted = other.embed(TEXTS, model, adapter=name)
        assert np.array_equal(np.float32([line["embedding"] for line in lines]), wanted)


@pytest.mark.parametrize("command", [["embed"], ["embed", "--precision", "binary"], ["search", "q"], ["rerank", "q"],
                                     ["classify"], ["classify", "--tokens"]], ids=" ".join)
@pytest.mark.parametrize(("given", "words"), [
    ("", "--adapter must be NAME or NAME=PATH"), ("=x", "--adapter must be NAME or NAME=PATH"),
    ("law=", "--adapter must be NAME or NAME=PATH"), ("law", "the model has no adapters"),
    ("law=missing", "missing")])
def test_refused_adapters(command: list[str], given: str, words: str, request: pytest.FixtureRequest,
                          capsys: pytest.CaptureFixture[str]) -> None:
    model = {"embed": "bert", "search": "bert", "rerank": "ranker", "classify": "sentiment"}[command[0]]
    model = "tagger" if "--tokens" in command else model
    folder = str(request.getfixturevalue(model))
    assert main([command[0], "-m", folder, "--adapter", given, *command[1:], "text"]) == 1
    found = capsys.readouterr()
    assert words in found.err and not found.out
