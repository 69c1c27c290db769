"""mpool.embed and embed_iter: shapes, options, prompts, faults, precision, bulk. On small seeded checkpoints."""

from __future__ import annotations

import functools
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import defaultmodels
import mpool
import tinymodels
from mpool.tasks import text_embedding as embedding
from mpool.tasks.vectors import DEPTH
from idling import idle

TEXTS = ["A cat sat on the mat.", "The dog barked.", "Numbers 1 2 3.", "äöü", "x"]


def reference(folder: Path):  # type: ignore[no-untyped-def]
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


# ---- shapes and values

def test_shapes(pool: mpool.Pool, bert: Path) -> None:
    one, many, none = pool.embed(TEXTS[0], bert), pool.embed(TEXTS, bert), pool.embed([], bert)
    assert (one.shape, many.shape, none.shape) == ((32,), (5, 32), (0, 32))
    assert one.dtype == many.dtype == none.dtype == np.float32
    assert many.flags.c_contiguous and many.flags.writeable
    assert np.array_equal(one, many[0])


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_what_counts_as_a_list(pool: mpool.Pool, bert: Path, kind) -> None:  # type: ignore[no-untyped-def]
    assert np.array_equal(pool.embed(kind(TEXTS), bert), pool.embed(TEXTS, bert))


def test_values_are_those_of_the_reference(pool: mpool.Pool, bert: Path) -> None:
    want = reference(bert).encode(TEXTS)
    assert np.abs(pool.embed(TEXTS, bert, compute="float32") - want).max() <= 1e-4


def test_a_vector_does_not_depend_on_its_mates(pool: mpool.Pool, bert: Path) -> None:
    texts = [f"Sentence {number} of {number % 7}." * (1 + number % 5) for number in range(1500)]
    whole = pool.embed(texts, bert)
    assert np.array_equal(whole[::97], np.stack([pool.embed(text, bert) for text in texts[::97]]))
    assert np.array_equal(whole, np.stack(list(pool.embed_iter(iter(texts), bert))))


# ---- options

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
    assert len(set(values)) == 5  # document and name are one


def test_task_of_a_model_without_prompts(pool: mpool.Pool, bert: Path) -> None:
    assert np.array_equal(pool.embed(TEXTS, bert, task="query"), pool.embed(TEXTS, bert))


def test_a_text_cut_down_to_its_prompt(pool: mpool.Pool, prompted: Path) -> None:
    vectors = pool.embed(["cat", "dog"], prompted, prompt="cat sat on the mat " * 40)
    assert np.isfinite(vectors).all()


def test_dimensions(pool: mpool.Pool, bert: Path, prompted: Path) -> None:
    whole, cut = pool.embed(TEXTS, bert), pool.embed(TEXTS, bert, dimensions=10)
    assert cut.shape == (5, 10)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(cut, whole[:, :10] / np.linalg.norm(whole[:, :10], axis=1, keepdims=True), rtol=1e-4)
    assert pool.embed(TEXTS, prompted, dimensions=16).shape == (5, 16)
    for folder, value, allowed in ((bert, 33, "1 to 32"), (bert, 0, "1 to 32"), (bert, True, "1 to 32"),
                                   (bert, 1.0, "1 to 32"), (prompted, 17, "8, 16, 32")):
        with pytest.raises(mpool.InvalidArgument, match=f"dimensions is {value}, allowed: {allowed}"):
            pool.embed(TEXTS, folder, dimensions=value)


def test_normalize(pool: mpool.Pool, bert: Path) -> None:
    raw = pool.embed(TEXTS, bert, normalize=False)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 1e-3
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(pool.embed(TEXTS, bert, normalize=True), unit, atol=1e-6)
    assert np.array_equal(pool.embed(TEXTS, bert, normalize=True), pool.embed(TEXTS, bert))


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precision_is_that_of_sentence_transformers(pool: mpool.Pool, bert: Path, precision: str) -> None:
    quantize = pytest.importorskip("sentence_transformers.util.quantization").quantize_embeddings
    texts = [f"Text number {number}." for number in range(120)]
    got, want = pool.embed(texts, bert, precision=precision), quantize(pool.embed(texts, bert), precision)
    assert got.dtype == want.dtype and np.array_equal(got, want)


def test_precision_of_a_single_text(pool: mpool.Pool, bert: Path) -> None:
    assert pool.embed("x", bert, precision="ubinary").shape == (4,)
    for inputs in ("x", ["x"]):
        with pytest.raises(mpool.InvalidArgument, match="precision is 'int8' for a single text"):
            pool.embed(inputs, bert, precision="int8")
    assert pool.embed([], bert, precision="int8").shape == (0, 32)


def test_few_vectors_for_ranges_are_worth_a_warning(pool: mpool.Pool, bert: Path,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpool"):
        pool.embed(TEXTS, bert, precision="uint8")
    assert "only 5 vectors" in caplog.text


@pytest.mark.parametrize("options", [
    {"task": "qeury"}, {"precision": "float16"}, {"compute": "fp32"}, {"normalize": 1}, {"truncate": "yes"},
    {"on_error": "ignore"}, {"prompt_name": "nope"}, {"prompt": 5}, {"prompt": "a", "prompt_name": "b"}, {"timeout": 0},
    {"timeout": -1}, {"timeout": True}, {"timeout": float("nan")}, {"progress": "yes"}, {"max_inputs": 0},
    {"on_error": "null", "precision": "int8"}, {"task": ["query"]}, {"normalize": [1]}])
def test_options_out_of_range(pool: mpool.Pool, bert: Path, options: dict[str, object]) -> None:
    with pytest.raises(mpool.InvalidArgument) as caught:
        pool.embed(TEXTS, bert, **options)
    assert caught.value.code == 10


def test_the_nearest_prompt_is_named(pool: mpool.Pool, prompted: Path) -> None:
    with pytest.raises(mpool.InvalidArgument, match="the nearest is passage, allowed: query, passage, other"):
        pool.embed(TEXTS, prompted, prompt_name="pasage")


def test_computes_are_entries_of_their_own(bert: Path) -> None:
    with mpool.Pool() as own:
        own.embed("x", bert)
        assert len(own.ps()) == 1
        base = own.ps()[0].compute
        own.embed("x", bert, compute=base)
        assert len(own.ps()) == 1, "the automatic entry computes just so"
        other = "bfloat16" if base == "float32" else "float32"
        coarse = own.embed("x", bert, compute=other)
        assert {row.compute for row in own.ps()} == {base, other}
        assert float(mpool.similarity(coarse, own.embed("x", bert))) > 0.99


def test_a_progress_function_that_raises_or_calls_back(pool: mpool.Pool, bert: Path) -> None:
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


# ---- faults

@pytest.mark.parametrize(("text", "message"), [
    ("", "is empty, allowed: 1 to 1,000,000 characters"),
    ("x" * 1_000_001, "has 1,000,001 characters"),
    (None, "is NoneType, allowed: str"), (b"x", "is bytes, allowed: str"), (3.5, "is float, allowed: str"),
    ("ab\ud800", r"has half of a surrogate pair \(U\+D800\) at character 2")])
def test_texts_that_cannot_be_embedded(pool: mpool.Pool, bert: Path, text: object, message: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match="text 2 " + message):
        pool.embed(["fine", "good", text], bert)
    if isinstance(text, str):
        with pytest.raises(mpool.InvalidArgument, match="the text " + message):
            pool.embed(text, bert)
    rows = pool.embed(["fine", text, "good"], bert, on_error="null")
    assert np.isnan(rows).all(axis=1).tolist() == [False, True, False]
    assert np.array_equal(rows[[0, 2]], pool.embed(["fine", "good"], bert))


def test_the_fault_is_named_by_its_place_in_the_call(pool: mpool.Pool, bert: Path) -> None:
    texts = ["A sentence that goes on for a while."] * 3000
    texts[2789] = "\udc00"
    with pytest.raises(mpool.InvalidArgument, match="text 2789 has half"):
        pool.embed(texts, bert)
    idle(pool)


def test_a_warning_counts_rows_of_nan(pool: mpool.Pool, bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpool"):
        rows = pool.embed(["", "x", None], bert, on_error="null")
    assert np.isnan(rows[:, 0]).tolist() == [True, False, True]
    assert "2 of 3 texts have no vector" in caplog.text and "text 0 is empty" in caplog.text
    assert np.isnan(pool.embed("", bert, on_error="null")).all()
    assert np.isnan(pool.embed(["", ""], bert, on_error="null")).all()


def test_nul_and_long_words_are_text(pool: mpool.Pool, bert: Path) -> None:
    assert np.isfinite(pool.embed(["a\0b", "x" * 26_000, " ", "\n"], bert)).all()


def test_truncation(pool: mpool.Pool, bert: Path) -> None:
    long = "cat " * 500
    assert np.isfinite(pool.embed(long, bert)).all()
    with pytest.raises(mpool.ContextOverflow) as caught:
        pool.embed(["x", long], bert, truncate=False)
    assert caught.value.limit == 64 and caught.value.tokens is not None and caught.value.tokens > 500
    assert "text 1 has" in str(caught.value) and isinstance(caught.value, ValueError)
    rows = pool.embed(["x", long], bert, truncate=False, on_error="null")
    assert np.isnan(rows[:, 0]).tolist() == [False, True]


@pytest.mark.parametrize("inputs", [b"bytes", {"a": 1}, {"a"}, 5, None, iter(["a"]), np.array([["a"]]), np.array("a")])
def test_what_is_no_list(pool: mpool.Pool, bert: Path, inputs: object) -> None:
    with pytest.raises(mpool.InvalidArgument, match="allowed: a str or a list of str"):
        pool.embed(inputs, bert)


def test_ten_thousand_texts_unless_raised(bert: Path) -> None:
    texts = ["x"] * 10_001
    with mpool.Pool() as own:
        with pytest.raises(mpool.LimitError, match="10,001 texts, one call takes at most 10,000.*embed_iter"):
            own.embed(texts, bert)
        assert own.embed(texts, bert, max_inputs=10_001).shape == (10_001, 32)
    with mpool.Pool(mpool.PoolConfig(max_embed_inputs=2)) as small:
        with pytest.raises(mpool.LimitError, match="at most 2"):
            small.embed(["x"] * 3, bert)


def test_timeout(pool: mpool.Pool, bert: Path) -> None:
    with pytest.raises(mpool.Timeout) as caught:
        pool.embed([f"A sentence of some length. {number} " * 5 for number in range(9000)], bert, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    idle(pool)


# ---- bulk

def test_iter_gives_vectors_in_order(pool: mpool.Pool, bert: Path) -> None:
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


def test_iter_reads_no_further_ahead_than_it_says(pool: mpool.Pool, bert: Path) -> None:
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


def test_iter_left_early_stops_its_work(pool: mpool.Pool, bert: Path) -> None:
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


def test_iter_counts_faults(pool: mpool.Pool, bert: Path) -> None:
    texts = ["fine", "", "good", None] * 600
    vectors = pool.embed_iter(texts, bert, on_error="null")
    rows = np.stack(list(vectors))
    assert vectors.done == 2400 and vectors.failed == 1200 == int(np.isnan(rows[:, 0]).sum())


def test_iter_gives_what_came_before_a_fault(pool: mpool.Pool, bert: Path) -> None:
    vectors = pool.embed_iter([*["fine"] * 5000, "", "never"], bert)
    count = 0
    with pytest.raises(mpool.InvalidArgument, match="text 5000 is empty"):
        for _ in vectors:
            count += 1
    assert 1024 <= count <= 5000


def test_iter_passes_on_the_iterables_own_error(pool: mpool.Pool, bert: Path) -> None:
    def broken() -> Iterator[str]:
        yield "fine"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(pool.embed_iter(broken(), bert))
    idle(pool)


@pytest.mark.parametrize(("iterable", "options"), [
    ("text", {}), (b"bytes", {}), (5, {}), ({"a": 1}, {}), (["a"], {"batch_size": 0}), (["a"], {"batch_size": True}),
    (["a"], {"precision": "int8"}), (["a"], {"precision": "uint8"})])
def test_iter_arguments(pool: mpool.Pool, bert: Path, iterable: object, options: dict[str, object]) -> None:
    with pytest.raises(mpool.InvalidArgument, match="allowed"):
        pool.embed_iter(iterable, bert, **options)


def test_iter_of_signs(pool: mpool.Pool, bert: Path) -> None:
    rows = np.stack(list(pool.embed_iter(TEXTS, bert, precision="binary")))
    assert np.array_equal(rows, pool.embed(TEXTS, bert, precision="binary"))


def test_iter_of_nothing(pool: mpool.Pool, bert: Path) -> None:
    assert list(pool.embed_iter([], bert)) == []


# ---- a text that gives NaN

def test_nan_is_found_and_the_others_survive(tmp_path: Path) -> None:
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


# ---- real weights

def test_real_model_ranks_sentences() -> None:
    defaultmodels.use_default_models()
    documents = ["Paris is the capital of France.", "Bread is baked from flour.", "The moon orbits the earth."]
    query = mpool.embed("Which city is the capital of France?", task="query")
    assert int(mpool.similarity(query, mpool.embed(documents, task="document")).argmax()) == 0


@pytest.mark.parametrize("cpu", ["", "avx512vnni", "avx2", "ref"])
def test_auto_is_the_fastest_class_that_is_near(bert: Path, cpu: str) -> None:
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
