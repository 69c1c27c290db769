"""Pools, requests and models that tests of options and errors share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinymodels
from poolstates import LONG
from poolstates import broken as broken
from waiting import until

import mpool

ALONE: dict[str, Any] = dict(threads=1, max_workers_per_model=1)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of one layer that is so wide that packing or multiplying one of its matrices takes tens of ms."""
    folder = tinymodels.bert(tmp_path_factory.mktemp("wide") / "bert")
    import transformers

    config = json.loads((folder / "config.json").read_text())
    transformers.BertModel(transformers.BertConfig(
        vocab_size=config["vocab_size"], max_position_embeddings=64, hidden_size=512, num_hidden_layers=1,
        num_attention_heads=8, intermediate_size=32768)).eval().save_pretrained(folder)
    pooling = folder / "1_Pooling/config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "word_embedding_dimension": 512}))
    return folder


def texts(name: object, count: int = 256) -> list[str]:
    """Return texts of 64 tokens that contain `name`, so that they differ from those of all other requests."""
    return [f"{name} {number} " + "one two " * 40 for number in range(count)]


def raised(error: type[mpool.MpoolError], tries: int, call: Callable[[], Any]) -> mpool.MpoolError:
    """Return the error that `call` raises in one of `tries` attempts. Timing decides which attempt fails."""
    for _ in range(tries):
        try:
            call()
        except error as found:
            return found
    raise AssertionError(f"{error.__name__} was not raised")


def load_once(model: Path, **options: Any) -> None:
    with mpool.Pool(mpool.PoolConfig(**{**ALONE, **options})) as pool:
        pool.load(model, compute="float32")


def held(pool: mpool.Pool, llama: Path) -> mpool.Job:
    """Submit a request that runs for a long time, and wait until it is running."""
    job = pool.submit("text_to_text", model=pool.load(llama), **LONG)
    until(lambda: job.position() == -1)
    return job


class Models:
    """The models and the captured log that a row of a test table uses."""

    def __init__(self, bert: Path, llama: Path, wide: Path, broken: tuple[Path, str],
                 caplog: pytest.LogCaptureFixture) -> None:
        self.bert, self.llama, self.wide, self.broken, self.caplog = bert, llama, wide, broken, caplog


def pool_of(**options: Any) -> mpool.Pool:
    return mpool.Pool(mpool.PoolConfig(**{**ALONE, **options}))
