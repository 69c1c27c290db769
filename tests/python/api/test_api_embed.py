"""mpool.embed and mpool.embed_iter with small seeded checkpoints: shapes, options, prompts, invalid inputs, precision,
many texts."""

from __future__ import annotations

import functools
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import defaultmodels
import instructionsets
import mpool
import tinymodels
from mpool.tasks import text_embedding as embedding
from mpool.tasks.vectors import DEPTH, quantize
from waiting import idle

TEXTS = ["A cat sat on the mat.", "The dog barked.", "Numbers 1 2 3.", "äöü", "x"]


def reference(folder: Path):  # type: ignore[no-untyped-def]
    """Return the model as loaded by sentence-transformers."""
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


# ---- shapes and values ---------------------------------------------------------------------------------------------

def test_shapes(pool: mpool.Pool, bert: Path) -> None:
    one, many, none = pool.embed(TEXTS[0], bert), pool.embed(TEXTS, bert), pool.embed([], bert)
    assert (one.shape, many.shape, none.shape) == ((32,), (5, 32), (0, 32))
    assert one.dtype == many.dtype == none.dtype == np.float32
    assert many.flags.c_contiguous and many.flags.writeable
    assert np.array_equal(one, many[0])


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_tuples_and_arrays_of_texts(pool: mpool.Pool, bert: Path, kind) -> None:  # type: ignore[no-untyped-def]
    assert np.array_equal(pool.embed(kind(TEXTS), bert), pool.embed(TEXTS, bert))


def test_vectors_equal_those_of_sentence_transformers(pool: mpool.Pool, bert: Path) -> None:
    want = reference(bert).encode(TEXTS)
    assert np.abs(pool.embed(TEXTS, bert, compute="float32") - want).max() <= 1e-4


def test_a_vector_does_not_depend_on_other_inputs(pool: mpool.Pool, bert: Path) -> None:
    texts = [f"Sentence {number} of {number % 7}." * (1 + number % 5) for number in range(1500)]
    whole = pool.embed(texts, bert)
    assert np.array_equal(whole[::97], np.stack([pool.embed(text, bert) for text in texts[::97]]))
    assert np.array_equal(whole, np.stack(list(pool.embed_iter(iter(texts), bert))))


# ---- options -------------------------------------------------------------------------------------------------------

def test_tasks_and_prompts(pool: mpool.Pool, prompted: Path) -> None:
    model = reference(prompted)
    exact = functools.partial(pool.embed, compute="float32")
    cases = {
        "default": (exact(TEXTS, prompted), model.encode(TEXTS)),
        "query": (exact(TEXTS, prompted, task="query"), model.encode_query(TEXTS)),
        "document": (exact(TEXTS, prompted, task="document"), model.encode(TEXTS, prompt_name="passage")),
        "name": (exact(TEXTS, prompted, prompt_name="passage"), model.encode(TEXTS, prompt_name="passage")),
        "text": (exact(TEXTS, prompted, prompt="cat: "), model.encode(TEXTS, prompt="cat: ")),
        "none": (exact(TEXTS, prompted, prompt=""), model.encode(TEXTS, prompt="")),
    }
    for name, (got, want) in cases.items():
        assert np.abs(got - want).max() <= 1e-4, name
    values = [got.tobytes() for got, _ in cases.values()]
    assert len(set(values)) == 5  # "document" and "name" use the same prompt


def test_task_has_no_effect_for_a_model_without_prompts(pool: mpool.Pool, bert: Path) -> None:
    assert np.array_equal(pool.embed(TEXTS, bert, task="query"), pool.embed(TEXTS, bert))


def test_a_text_that_is_truncated_within_its_prompt(pool: mpool.Pool, prompted: Path) -> None:
    vectors = pool.embed(["cat", "dog"], prompted, prompt="cat sat on the mat " * 40)
    assert np.isfinite(vectors).all()


def test_dimensions(pool: mpool.Pool, bert: Path, prompted: Path) -> None:
    whole, cut = pool.embed(TEXTS, bert), pool.embed(TEXTS, bert, dimensions=10)
    assert cut.shape == (5, 10)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(cut, whole[:, :10] / np.linalg.norm(whole[:, :10], axis=1, keepdims=True), rtol=1e-4)
    assert pool.embed(TEXTS, prompted, dimensions=16).shape == (5, 16)
    for folder, value, allowed in ((bert, 33, "an integer from 1 to 32"), (bert, 0, "an integer of 1 or more, or None"),
                                   (bert, True, "an integer of 1 or more, or None"),
                                   (bert, 1.0, "an integer of 1 or more, or None"), (prompted, 17, "one of 8, 16, 32")):
        with pytest.raises(mpool.InvalidArgument, match=f"`dimensions` must be {allowed}, got {value}") as caught:
            pool.embed(TEXTS, folder, dimensions=value)
        assert (caught.value.param, caught.value.allowed) == ("dimensions", allowed)


def test_normalize(pool: mpool.Pool, bert: Path) -> None:
    raw = pool.embed(TEXTS, bert, normalize=False)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 1e-3
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(pool.embed(TEXTS, bert, normalize=True), unit, atol=1e-6)
    assert np.array_equal(pool.embed(TEXTS, bert, normalize=True), pool.embed(TEXTS, bert))


def test_equal_texts_with_different_options(pool: mpool.Pool, bert: Path) -> None:
    """Equal texts share a vector only if nothing that changes it differs: at once, and one after the other."""
    text = "A cat sat on the mat."
    raw = pool.embed(text, bert, normalize=False).astype(np.float64)
    prompted = pool.embed("dog: " + text, bert)

    def unit(vector: np.ndarray) -> np.ndarray:
        return vector / np.linalg.norm(vector)

    wanted: list[tuple[dict[str, Any], np.ndarray]] = [
        ({"normalize": False}, raw), ({}, unit(raw)), ({"dimensions": 8}, unit(raw[:8])),
        ({"dimensions": 9}, unit(raw[:9])), ({"dimensions": 8, "normalize": False}, raw[:8]),
        ({"prompt": "dog: "}, prompted)]
    for _ in range(2):
        jobs = [pool.submit("text_embedding", inputs=text, model=bert, **options) for options, _ in wanted]
        for job, (options, vector) in zip(jobs, wanted, strict=True):
            for got in (job.result(30), pool.embed(text, bert, **options)):
                assert got.shape == vector.shape and np.abs(got - vector).max() < 1e-5, options
        wanted.reverse()


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_quantised_vectors_equal_those_of_sentence_transformers(pool: mpool.Pool, bert: Path, precision: str) -> None:
    theirs = pytest.importorskip("sentence_transformers.util.quantization").quantize_embeddings
    texts = [f"Text number {number}." for number in range(120)]
    got, want = pool.embed(texts, bert, precision=precision), theirs(pool.embed(texts, bert), precision)
    assert got.dtype == want.dtype and np.array_equal(got, want)


def test_signs_of_zeros() -> None:
    """As in sentence-transformers, zero counts as negative."""
    row = np.array([[0.0, -0.0, 1e-30, -1e-30, 1.0, 0.0, 0.0, 1.0]], dtype=np.float32)
    assert quantize(row, "ubinary").tolist() == [[0b00101001]] and quantize(row, "binary").tolist() == [[41 - 128]]


def test_a_task_without_a_prompt_does_not_take_the_default(pool: mpool.Pool, tmp_path: Path) -> None:
    folder = tinymodels.bert(tmp_path / "model", prompts={"query": "find: ", "other": "other: "}, include_prompt=True,
                             default_prompt_name="other")
    plain, default = (pool.embed(TEXTS, folder, prompt=prompt) for prompt in ("", "other: "))
    assert np.array_equal(pool.embed(TEXTS, folder), default) and not np.array_equal(plain, default)
    assert np.array_equal(pool.embed(TEXTS, folder, task="document"), plain)


def test_precision_of_a_single_text(pool: mpool.Pool, bert: Path) -> None:
    assert pool.embed("x", bert, precision="ubinary").shape == (4,)
    for inputs in ("x", ["x"]):
        with pytest.raises(mpool.InvalidArgument, match="`precision` must be float32, binary or ubinary for a single "
                                                        "input, got 'int8'") as caught:
            pool.embed(inputs, bert, precision="int8")
        assert caught.value.param == "precision"
    assert pool.embed([], bert, precision="int8").shape == (0, 32)


def test_integer_precision_of_few_vectors_logs_a_warning(pool: mpool.Pool, bert: Path,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpool"):
        pool.embed(TEXTS, bert, precision="uint8")
    assert "only 5 vectors" in caplog.text


def test_the_error_suggests_the_most_similar_prompt_name(pool: mpool.Pool, prompted: Path) -> None:
    with pytest.raises(mpool.InvalidArgument, match="`prompt_name` must be one of query, passage, other, got "
                                                    "'pasage'. Did you mean 'passage'") as caught:
        pool.embed(TEXTS, prompted, prompt_name="pasage")
    assert caught.value.param == "prompt_name"


def test_a_progress_function_may_raise_or_embed(pool: mpool.Pool, bert: Path) -> None:
    texts = [f"Some text to embed {number}." for number in range(3000)]

    def broken(done: int, total: int | None) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pool.embed(texts, bert, progress=broken)
    idle(pool)
    again: list[np.ndarray] = []
    pool.embed(texts, bert, progress=lambda done, total: again.append(pool.embed("x", bert)))
    assert len(again) > 1


def test_progress(pool: mpool.Pool, bert: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    texts = [f"Some text to embed {number}." for number in range(2100)]
    pool.embed(texts, bert, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2100, 2100) and len(seen) > 1 and seen == sorted(seen)


# ---- invalid inputs ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "message"), [
    ("x" * 1_000_001, "must be a str of 0 to 1,000,000 characters, got 1,000,001 characters"),
    (None, "must be a str of 0 to 1,000,000 characters, got NoneType"), (b"x", "must be a str .*, got bytes"),
    (3.5, "must be a str .*, got float"),
    ("ab\ud800", r"must be Unicode text, got half of a surrogate pair \(U\+D800\) at character 2")])
def test_texts_that_cannot_be_embedded(pool: mpool.Pool, bert: Path, text: object, message: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=r"`inputs\[2\]` " + message) as caught:
        pool.embed(["fine", "good", text], bert)
    assert caught.value.param == "inputs[2]" and caught.value.key == str(bert)
    if isinstance(text, str):
        with pytest.raises(mpool.InvalidArgument, match="`inputs` " + message):
            pool.embed(text, bert)
    rows = pool.embed(["fine", text, "good"], bert, on_error="null")
    assert np.isnan(rows).all(axis=1).tolist() == [False, True, False]
    assert np.array_equal(rows[[0, 2]], pool.embed(["fine", "good"], bert))


def test_an_empty_text_has_the_vector_of_its_special_tokens(pool: mpool.Pool, bert: Path) -> None:
    """As in sentence-transformers. ``on_error="null"`` gives NaN instead."""
    wanted = reference(bert).encode(["", "x"])
    rows = pool.embed(["", "x"], bert)
    assert np.abs(pool.embed(["", "x"], bert, compute="float32") - wanted).max() <= 1e-4
    assert np.array_equal(pool.embed("", bert), rows[0]) and np.array_equal(pool.embed(["", ""], bert), rows[[0, 0]])
    assert np.array_equal(np.stack(list(pool.embed_iter(["", "x"], bert))), rows)
    assert np.isnan(pool.embed(["", "x"], bert, on_error="null")).all(axis=1).tolist() == [True, False]


def test_an_error_has_the_index_of_the_text_in_the_request(pool: mpool.Pool, bert: Path) -> None:
    texts = ["A sentence that goes on for a while."] * 3000
    texts[2789] = "\udc00"
    with pytest.raises(mpool.InvalidArgument, match=r"`inputs\[2789\]` must be Unicode text, got half"):
        pool.embed(texts, bert)
    idle(pool)


def test_rows_of_nan_are_counted_in_a_warning(pool: mpool.Pool, bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpool"):
        rows = pool.embed(["", "x", None], bert, on_error="null")
    assert np.isnan(rows[:, 0]).tolist() == [True, False, True]
    assert "2 of 3 texts have no vector" in caplog.text and "`inputs[0]` must be a str" in caplog.text
    assert np.isnan(pool.embed("", bert, on_error="null")).all()
    assert np.isnan(pool.embed(["", ""], bert, on_error="null")).all()


def test_nul_characters_and_very_long_words(pool: mpool.Pool, bert: Path) -> None:
    assert np.isfinite(pool.embed(["a\0b", "x" * 26_000, " ", "\n"], bert)).all()


def test_truncation(pool: mpool.Pool, bert: Path) -> None:
    long = "cat " * 500
    assert np.isfinite(pool.embed(long, bert)).all()
    with pytest.raises(mpool.ContextOverflow) as caught:
        pool.embed(["x", long], bert, truncate=False)
    assert caught.value.limit == 64 and caught.value.tokens is not None and caught.value.tokens > 500
    assert f"`inputs[1]` has {caught.value.tokens} tokens, the model accepts at most 64" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    rows = pool.embed(["x", long], bert, truncate=False, on_error="null")
    assert np.isnan(rows[:, 0]).tolist() == [False, True]


def test_the_limit_on_the_number_of_texts(bert: Path) -> None:
    texts = np.array(["x"] * 20_000, dtype=object)
    with mpool.Pool() as own:
        assert own.embed(texts, bert).shape == (20_000, 32)
        with pytest.raises(mpool.LimitError, match="`inputs` must hold at most 3 texts, got 20,000.*embed_iter"):
            own.embed(texts, bert, max_inputs=3)
    with mpool.Pool(mpool.PoolConfig(max_embed_inputs=2)) as small:
        with pytest.raises(mpool.LimitError, match="at most 2"):
            small.embed(["x"] * 3, bert)


def test_timeout(pool: mpool.Pool, bert: Path) -> None:
    with pytest.raises(mpool.Timeout) as caught:
        pool.embed([f"A sentence of some length. {number} " * 5 for number in range(9000)], bert, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.hint == "Raise `timeout`" and str(caught.value).endswith(". Raise `timeout`")
    idle(pool)


# ---- slices ----------------------------------------------------------------------------------------------------------

# ---- many texts ----------------------------------------------------------------------------------------------------

def test_iter_yields_vectors_in_order(pool: mpool.Pool, bert: Path) -> None:
    texts = [f"Text {number}." for number in range(2500)]
    rows = list(pool.embed_iter((text for text in texts), bert))
    assert len(rows) == 2500 and rows[0].shape == (32,) and rows[0].base is None
    assert np.array_equal(rows[1234], pool.embed(texts[1234], bert))


@pytest.mark.parametrize("size", [1, 7, 1000, 5000])
def test_iter_in_batches(pool: mpool.Pool, bert: Path, size: int) -> None:
    texts = [f"Text {number}." for number in range(2003)]
    batches = list(pool.embed_iter(texts, bert, batch_size=size))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert np.array_equal(np.concatenate(batches), pool.embed(texts, bert))


def test_iter_reads_a_bounded_number_of_texts_ahead(pool: mpool.Pool, bert: Path) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"Text {read}."

    with pool.embed_iter(endless(), bert) as vectors:
        for _ in range(3000):
            next(vectors)
        assert read <= 3000 + (DEPTH + 1) * embedding.SLICE_TEXTS + 1
        assert vectors.done >= 3000
    idle(pool)
    with pytest.raises(StopIteration):
        next(vectors)


def test_closing_an_iterator_early_cancels_its_requests(pool: mpool.Pool, bert: Path) -> None:
    for leave in ("break", "del", "never"):
        vectors = pool.embed_iter((f"Text {number}." * 20 for number in range(100_000)), bert)
        if leave != "never":
            next(vectors)
        if leave == "break":
            for _ in vectors:
                break
        del vectors
        gc.collect()
        idle(pool)


def test_iter_counts_invalid_texts(pool: mpool.Pool, bert: Path) -> None:
    texts = ["fine", "", "good", None] * 600
    vectors = pool.embed_iter(texts, bert, on_error="null")
    rows = np.stack(list(vectors))
    assert vectors.done == 2400 and vectors.failed == 1200 == int(np.isnan(rows[:, 0]).sum())


def test_iter_yields_the_vectors_before_an_invalid_text(pool: mpool.Pool, bert: Path) -> None:
    vectors = pool.embed_iter([*["fine"] * 5000, None, "never"], bert)
    count = 0
    with pytest.raises(mpool.InvalidArgument, match=r"`texts\[5000\]` must be a str .*, got NoneType"):
        for _ in vectors:
            count += 1
    assert 1024 <= count <= 5000


def test_iter_raises_the_error_of_the_iterable(pool: mpool.Pool, bert: Path) -> None:
    def broken() -> Iterator[str]:
        yield "fine"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(pool.embed_iter(broken(), bert))
    idle(pool)


def test_iter_with_binary_precision(pool: mpool.Pool, bert: Path) -> None:
    rows = np.stack(list(pool.embed_iter(TEXTS, bert, precision="binary")))
    assert np.array_equal(rows, pool.embed(TEXTS, bert, precision="binary"))


def test_iter_of_an_empty_list(pool: mpool.Pool, bert: Path) -> None:
    assert list(pool.embed_iter([], bert)) == []


# ---- NaN -----------------------------------------------------------------------------------------------------------

def test_only_the_text_that_gives_nan_is_lost(tmp_path: Path) -> None:
    import safetensors.numpy

    folder = tinymodels.bert(tmp_path / "poisoned")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    with mpool.Pool() as own:
        bad_id = own.tokenize("dog", folder, add_special=False)[0]
        weights[name][bad_id] = np.nan
        safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        texts = ["cat", "mat", "dog", "fox", "cat sat"]
        with pytest.raises(mpool.NumericError):
            own.embed(texts, folder)
        rows = own.embed(texts, folder, on_error="null")
        assert np.isnan(rows).all(axis=1).tolist() == [False, False, True, False, False]
        assert np.array_equal(rows[[0, 1, 3, 4]], own.embed(["cat", "mat", "fox", "cat sat"], folder))
        many = own.embed(texts * 600, folder, on_error="null")
        assert int(np.isnan(many[:, 0]).sum()) == 600


# ---- real weights --------------------------------------------------------------------------------------------------

def test_real_model_ranks_sentences() -> None:
    defaultmodels.use_default_models()
    documents = ["Paris is the capital of France.", "Bread is baked from flour.", "The moon orbits the earth."]
    query = mpool.embed("Which city is the capital of France?", task="query")
    assert int(mpool.similarity(query, mpool.embed(documents, task="document")).argmax()) == 0


@pytest.mark.parametrize("cpu", ["", "avx512vnni", "avxvnni", "avx2", "ref"])
def test_auto_selects_the_fastest_accurate_compute_type(bert: Path, cpu: str) -> None:
    if cpu not in ("", "ref", *(instructionsets.of_this_cpu() or ())):
        pytest.skip(f"this CPU lacks {cpu}")
    script = ("import sys, mpool\n"
              "with mpool.Pool() as pool:\n"
              "    auto = pool.embed('A cat sat.', sys.argv[1])\n"
              "    [row] = pool.ps()\n"
              "    same = (auto == pool.embed('A cat sat.', sys.argv[1], compute=row.compute)).all()\n"
              "    print(row.compute, mpool.show_config('dicts')['cpu']['level'], same)\n")
    run = subprocess.run([sys.executable, "-c", script, str(bert)], capture_output=True, text=True,
                         env={**os.environ, "MPOOL_CPU": cpu})
    assert run.returncode == 0, run.stderr
    compute, used, same = run.stdout.split()
    assert (compute, same) == ("bfloat16" if used in ("avx512bf16", "amx") else "float32", "True")
