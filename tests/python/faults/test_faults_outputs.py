"""Faults of tests/FAULTS.md and hostile texts, for every output of a text encoder."""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from cancelling import distinct_texts
from isolated import processes, signal_all
from outputcalls import OUTPUTS, Output, bytes_of, bytes_of_one
from waiting import idle, until

CLEAN = ["A cat sat on w1 and w2", "b c d e w30 w40", "twice 0 1 2"]
#: A text with tokens that no other text has, and as many tokens as the models take.
BAD = "w9 fox z " * 40


@pytest.fixture(params=OUTPUTS)
def case(request: pytest.FixtureRequest) -> tuple[Output, Path]:
    """An output and the folder of a model that has it."""
    output = OUTPUTS[request.param]
    return output, request.getfixturevalue(output.model)


def _spoil(pool: mpool.Pool, folder: Path, value: float) -> None:
    """Write ``value`` into rows of the embeddings that only BAD reads: that of a late position; or those of its own
    tokens, if the network has no positions."""
    from safetensors.numpy import load_file, save_file

    file = folder / "model.safetensors"
    if not file.exists():
        (file,) = folder.glob("document_0*/model.safetensors")
    tensors = dict(load_file(file))
    names = [name for name in tensors if name.endswith("position_embeddings.weight")]
    if names:
        tensors[names[0]][61] = value
    else:
        own, others = ({token for text in texts for token in pool.tokenize(text, folder, add_special=False)}
                       for texts in ([BAD], [*CLEAN, "unknown#"]))
        assert own - others
        name, = (name for name in tensors if name.endswith(("word_embeddings.weight", "tok_embeddings.weight"))
                 or name == "embeddings")
        tensors[name][sorted(own - others)] = value
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.sample(4)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_only_texts_that_read_nan_weights_fail(case: tuple[Output, Path], tmp_path: Path, value: float) -> None:
    """Row 36: a row of the embeddings is NaN or infinite. Texts that do not read it keep their bytes, also in requests
    that are computed together with one that fails."""
    output, folder = case[0], Path(shutil.copytree(case[1], tmp_path / "model"))
    if not output.queued:
        pytest.skip("a table; test_a_table_of_nan_weights_is_refused")
    with mpool.Pool(mpool.PoolConfig(threads=2, breaker_threshold=0)) as pool:
        expected = bytes_of(output.call(pool, CLEAN, folder))
        output.call(pool, [BAD], folder)
        pool.unload(folder)
        _spoil(pool, folder, value)
        pool.unload(folder)
        for texts in ([BAD], [*CLEAN, BAD]):
            with pytest.raises(mpool.NumericError):
                output.call(pool, texts, folder)
        jobs = [output.job(pool, [text], folder) for text in [BAD, *CLEAN] * 5]
        for at, job in enumerate(jobs):
            if at % 4:
                assert bytes_of(job.result(60)) == [expected[at % 4 - 1]]
            else:
                with pytest.raises(mpool.NumericError):
                    job.result(60)
        found: list[bytes] = []
        with pytest.raises(mpool.NumericError):
            found.extend(map(bytes_of_one, output.iterate(pool, iter([BAD]), folder)))
        assert found == [] and bytes_of(output.call(pool, CLEAN, folder)) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_table_of_nan_weights_is_refused(query_table: Path, tmp_path: Path, value: float) -> None:
    from safetensors.numpy import load_file, save_file

    folder = Path(shutil.copytree(query_table, tmp_path / "model"))
    file = folder / "query_0_SparseStaticEmbedding" / "model.safetensors"
    tensors = dict(load_file(file))
    tensors["weight"][7] = value
    save_file(tensors, file)
    with mpool.Pool() as pool:
        for call in (pool.embed_sparse, pool.embed_all):
            with pytest.raises(mpool.errors.FormatError, match="weight.*finite weights") as caught:
                call(CLEAN, folder, task="query")
            assert str(file) in str(caught.value)
        assert len(pool.embed_sparse(CLEAN, folder, task="document")) == len(CLEAN)


@pytest.mark.sample(4)
def test_requests_survive_a_kill_of_their_worker(case: tuple[Output, Path]) -> None:
    """Row 32: the process of the worker is killed while it computes; the second try has the same bytes."""
    output, folder = case
    if not output.queued:
        pytest.skip("no worker computes it")
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation="process")) as pool:
        expected = bytes_of(output.call(pool, CLEAN, folder))
        for seed in range(10):
            texts = distinct_texts(1000, seed)
            before, job = processes(pool), output.job(pool, texts, folder)
            until(lambda: job.done() or any(row.running for row in pool.ps()), 20)
            signal_all(pool, signal.SIGKILL)
            found = bytes_of(job.result(60))
            assert found == bytes_of(output.call(pool, texts, folder))
            if pool.metrics()["worker_faults"]:
                break
        assert pool.metrics()["worker_faults"] and set(processes(pool)).isdisjoint(before)
        assert bytes_of(output.call(pool, CLEAN, folder)) == expected
        idle(pool, 10)


@pytest.mark.sample(4)
def test_expired_requests_leave_the_rest_of_their_batch(case: tuple[Output, Path]) -> None:
    """Row 37: every second request may expire; the others have the bytes of their texts alone."""
    output, folder = case
    texts = distinct_texts(24)
    with mpool.Pool(mpool.PoolConfig(threads=1, embed_queue_capacity=1000)) as pool:
        alone = [bytes_of(output.call(pool, [text], folder)) for text in texts]
        late = repeat = 0
        while repeat < 3 or (output.queued and not late and repeat < 16):  # the first rounds may expire nothing
            limit = 0.0003 * (1 + repeat) if repeat < 3 else 0.0003 / 2 ** repeat
            jobs: list[tuple[int, mpool.Job]] = []
            for at, text in enumerate(texts):
                try:
                    jobs.append((at, output.job(pool, [text], folder,
                                                timeout=limit + 0.0003 * (at % 5) if at % 2 else None)))
                except mpool.Timeout:
                    assert at % 2
                    late += 1
            for at, job in jobs:
                try:
                    assert bytes_of(job.result(60)) == alone[at]
                except mpool.Timeout:
                    assert at % 2
                    late += 1
            repeat += 1
        assert late or not output.queued
        idle(pool, 10)


# ---- hostile texts ---------------------------------------------------------------------------------------------------

@pytest.mark.sample(4)
@pytest.mark.parametrize(("text", "words"), [
    ("a \ud800 b", "surrogate"), ("\udfff", "surrogate"), ("x" * 1_000_001, "1,000,000 characters"),
    (b"bytes", "must be a str"), (None, "must be a str"), (float("nan"), "must be a str"), (7, "must be a str")],
    ids=lambda one: type(one).__name__ if not isinstance(one, str) else one[:12].encode("unicode_escape").decode())
def test_texts_that_are_refused(pool: mpool.Pool, case: tuple[Output, Path], text: Any, words: str) -> None:
    """The error names the text; the same request without it has the bytes of each text alone."""
    output, folder = case
    alone = [bytes_of(output.call(pool, [one], folder))[0] for one in CLEAN]
    for call in (output.call, lambda *given: output.job(*given).result(60),
                 lambda *given: list(output.iterate(given[0], given[1], given[2]))):
        with pytest.raises(mpool.InvalidArgument, match=words) as caught:
            call(pool, [*CLEAN, text], folder)
        assert "3" in str(caught.value)
    assert bytes_of(output.call(pool, CLEAN, folder)) == alone


@pytest.mark.sample(4)
def test_texts_that_are_hard_to_tokenize(pool: mpool.Pool, case: tuple[Output, Path]) -> None:
    """NUL, names of special tokens, combining marks, and a run of characters without a break: the same bytes alone and
    beside other texts, in bounded time."""
    output, folder = case
    texts = ["a\0b", "[CLS] [SEP] [MASK] <s> </s> [Q] [D]", "\ufdfa" * 3000, "e\u0301" * 5000, "a" * 26_000,
             "\u202e\u200b\ufeff w1", "0" * 100_000]
    begun = time.monotonic()
    together = bytes_of(output.call(pool, [*CLEAN, *texts], folder))
    assert [bytes_of(output.call(pool, [text], folder))[0] for text in texts] == together[len(CLEAN):]
    assert time.monotonic() - begun < 120  # 2 s on an idle machine


@pytest.mark.parametrize(("ids", "where"), [
    ([[5, -1]], r"inputs\[0\]\[1\]"), ([[5], [6, 1 << 40]], r"inputs\[1\]\[1\]"), ([[5, 6.5]], r"inputs\[0\]\[1\]"),
    ([[5], "text"], r"inputs\[1\]"), ([[True]], r"inputs\[0\]\[0\]"), ([[5, float("nan")]], r"inputs\[0\]\[1\]"),
    ([[5, "6"]], r"inputs\[0\]\[1\]"), ([[5, 197]], r"inputs\[0\]\[1\]"), ([[]], r"`inputs\[0\]` must be a str"),
    (np.array([[5, 197]]), "inputs")], ids=str)
@pytest.mark.parametrize("name", [name for name, one in OUTPUTS.items() if one.model in ("m3", "splade", "colbert")])
def test_token_ids_that_are_refused(pool: mpool.Pool, name: str, ids: Any, where: str,
                                    request: pytest.FixtureRequest) -> None:
    """The vocabularies of these models have 197 tokens."""
    output = OUTPUTS[name]
    folder = request.getfixturevalue(output.model)
    assert len(bytes_of(output.call(pool, [[5, 196]], folder))) == 1  # type: ignore[list-item]
    for call in (output.call, lambda *given: output.job(*given).result(60)):
        with pytest.raises(mpool.InvalidArgument, match=where):
            call(pool, ids, folder)
