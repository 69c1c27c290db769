"""Promises for every output of a text encoder: the same bytes in every form, batch, thread and process; cancellation,
time limits, bounded memory; and the same values over HTTP and from the command line."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import cli
from mpool.tasks import steps, vectors
from cancelling import cancelled_job, distinct_texts
from outputcalls import LABELS, OUTPUTS, Output, bytes_of, bytes_of_one, texts_of
from servers import ask, serving
from waiting import idle

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

TEXTS = [f"w{number % 90} The fox{number % 7} jumps, w{number % 31} over {number} dogs. " * (1 + number % 3)
         for number in range(60)]


@pytest.fixture(params=OUTPUTS)
def case(request: pytest.FixtureRequest) -> tuple[Output, str]:
    """An output and the folder of a model that has it."""
    output = OUTPUTS[request.param]
    return output, str(request.getfixturevalue(output.model))


async def _await(value: Any) -> Any:
    return await value


@pytest.mark.sample(3)
def test_same_bytes_alone_and_in_batches(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    output, model = case
    together = bytes_of(output.call(pool, TEXTS, model))
    assert len(together) == len(TEXTS) and len(set(together)) > 10
    assert [bytes_of(output.call(pool, [text], model))[0] for text in TEXTS[:12]] == together[:12]
    many = bytes_of(output.call(pool, TEXTS * 20, model))  # 1,200 texts: more than a slice
    assert many == together * 20


@pytest.mark.sample(3)
def test_same_bytes_with_any_number_of_threads(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    output, model = case
    expected = bytes_of(output.call(pool, TEXTS, model))
    with mpool.Pool(mpool.PoolConfig(threads=1)) as other:
        assert bytes_of(output.call(other, TEXTS, model)) == expected


def test_same_bytes_while_others_call(pool: mpool.Pool, request: pytest.FixtureRequest) -> None:
    """Threads that ask one pool for all outputs at once, three of them of one model, get those of a single caller."""
    cases = [(output, str(request.getfixturevalue(output.model))) for output in OUTPUTS.values()]
    expected = [bytes_of(output.call(pool, TEXTS, model)) for output, model in cases]
    wrong: list[str] = []

    def caller(at: int) -> None:
        output, model = cases[at % len(cases)]
        for start in range(0, 20):
            found = bytes_of(output.call(pool, TEXTS[start::5], model))
            if found != expected[at % len(cases)][start::5]:
                wrong.append(output.function)

    threads = [threading.Thread(target=caller, args=(at,)) for at in range(2 * len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.sample(3)
def test_same_bytes_in_every_form(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    output, model = case
    expected = bytes_of(output.call(pool, TEXTS, model))
    assert bytes_of(output.of_model(pool.get(model), TEXTS)) == expected
    assert bytes_of(asyncio.run(_await(output.acall(pool, TEXTS, model)))) == expected
    job = output.job(pool, TEXTS, model)
    assert bytes_of(job.result(60)) == expected and bytes_of(job.result(60)) == expected
    assert bytes_of(asyncio.run(_await(output.job(pool, TEXTS, model)))) == expected


@pytest.mark.sample(3)
def test_same_bytes_in_a_worker_process(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    output, model = case
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation="process")) as isolated:
        assert bytes_of(output.call(isolated, TEXTS, model)) == bytes_of(output.call(pool, TEXTS, model))
        found = [bytes_of_one(one) for one in output.iterate(isolated, iter(TEXTS), model)]
        assert found == bytes_of(output.call(pool, TEXTS, model))


# ---- embed_iter ----------------------------------------------------------------------------------------------------

@pytest.mark.sample(4)
def test_iterators_have_the_same_bytes(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    output, model = case
    texts = TEXTS * 20
    expected = bytes_of(output.call(pool, texts, model))
    assert [bytes_of_one(one) for one in output.iterate(pool, iter(texts), model)] == expected
    for size in (1, 7, 256, 5000):
        batches = [bytes_of(batch) for batch in output.iterate(pool, iter(texts), model, size)]
        assert [len(batch) for batch in batches[:-1]] == [size] * (len(texts) // size - (len(texts) % size == 0))
        assert sum(batches, []) == expected

    async def each() -> list[bytes]:
        async def source() -> Any:
            for text in texts:
                yield text

        return [bytes_of_one(one) async for one in output.aiterate(pool, source(), model)]

    assert asyncio.run(each()) == expected
    assert list(output.iterate(pool, iter(()), model)) == []
    iterator = output.iterate(pool, texts, model)
    assert sum(1 for _ in iterator) == iterator.done == len(texts) and iterator.failed == 0


def test_iterators_of_models(pool: mpool.Pool, m3: Path) -> None:
    model = pool.get(m3)
    for name in ("dense", "sparse", "tokens", "all"):
        output = OUTPUTS[name]
        found = [bytes_of_one(one) for one in model.embed_iter(TEXTS, "document", output=output.submit)]
        assert found == bytes_of(output.call(pool, TEXTS, m3, task="document"))


@pytest.mark.sample(4)
def test_iterators_read_a_bounded_number_of_texts_ahead(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    output, model = case
    read = 0

    def source() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield TEXTS[read % len(TEXTS)]

    with output.iterate(pool, source(), model) as iterator:
        for _ in range(5):
            next(iterator)
        assert read <= 4097
    with pytest.raises(StopIteration):
        next(iterator)
    idle(pool, 20)


def test_iterators_begin_with_small_slices(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    """The first result does not wait for large slices, which share the passes of the model."""
    output, model = case
    read = 0

    def source() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield TEXTS[read % len(TEXTS)]

    with output.iterate(pool, source(), model) as iterator:
        next(iterator)
    labels = len(output.options.get("labels", "-"))  # zero-shot: each text with each label; slices have whole texts
    assert read * labels <= steps.FIRST_TEXTS * (2**vectors.DEPTH - 1) + (vectors.DEPTH + 1) * labels
    idle(pool, 20)


@pytest.mark.parametrize("name", ("tokens", "all"))
def test_iterators_have_no_limit_of_results(m3: Path, name: str) -> None:
    """1,500 texts of 64 tokens with 48 components have 18.4 MB: more than a quarter of the pool's memory limit."""
    output, texts = OUTPUTS[name], ["w1 " * 62] * 1500
    with mpool.Pool(mpool.PoolConfig(threads=2, memory_bytes=64 << 20)) as small:
        with pytest.raises(mpool.LimitError, match="a quarter of the pool's memory limit"):
            output.call(small, texts, m3)
        assert sum(1 for _ in output.iterate(small, texts, m3)) == 1500


@pytest.mark.sample(4)
def test_iterators_fail_at_the_text_that_is_invalid(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    output, model = case
    seen = 0
    with pytest.raises(mpool.InvalidArgument, match=r"`texts\[1500\](\[1\])?` must be a str"):
        for _ in output.iterate(pool, [*TEXTS * 25, 3, "w1"], model):
            seen += 1
    assert seen <= 1500
    idle(pool, 20)


@pytest.mark.parametrize(("output", "option", "value", "words"), [
    ("sparse", "dimensions", 4, "None with output='sparse'"), ("tokens", "normalize", True, "None with"),
    ("all", "precision", "binary", "'float32' with"), ("sparse", "on_error", "null", "'raise' with"),
    ("sparse", "dimensions", np.zeros(2), "None with"), ("tokens", "max_active", 3, "None with output='tokens'"),
    ("dense", "max_active", 3, "None with output='dense'"), ("sparse", "max_active", 0, "1 or more"),
    ("labels", "task", "query", "None with output='labels'"), ("spans", "prompt", "p", "None with output='spans'"),
    ("labels", "aggregation", "simple", "'none' with output='labels'"), ("dense", "top_k", 3, "None with"),
    ("spans", "function_to_apply", "none", "None with"), ("labels", "ignore_labels", [], "with output='labels'"),
    ("labels", "top_k", 0, "1 or more, or None"), ("spans", "stride", 2, 'None with aggregation="none"'),
    ("labels", "function_to_apply", "x", "softmax"), ("spans", "aggregation", "x", "one of none, simple"),
    ("scores", "output", "scores", "one of dense, sparse, tokens, all, labels, spans"),
    (None, "output", None, "one of dense"),
    (["sparse"], "output", ["sparse"], "one of dense"), ("sparse", "batch_size", 0, "1 or more")])
def test_options_of_iterators(pool: mpool.Pool, m3: Path, output: Any, option: str, value: Any, words: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=words) as caught:
        pool.embed_iter(["a"], m3, **{"output": output, option: value})
    assert caught.value.param == option


def test_iterators_refuse_outputs_that_a_model_does_not_have(pool: mpool.Pool, bert: Path) -> None:
    with pytest.raises(mpool.WrongCapability, match="has no sparse vectors"):
        pool.embed_iter(["a"], bert, output="sparse")
    assert next(pool.embed_iter(["a"], bert, output="all", batch_size=4)).sparse is None


@pytest.mark.parametrize(("output", "words"), [("labels", "a sequence classifier"), ("spans", "a token classifier")])
def test_iterators_of_labels_need_a_classifier(pool: mpool.Pool, m3: Path, output: Any, words: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=f"`model` must be {words}, got None"):
        pool.embed_iter(["a"], output=output)
    with pytest.raises(mpool.WrongCapability):
        pool.embed_iter(["a"], m3, output=output)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"output": "dense", "labels": ["a"]}, mpool.InvalidArgument, "`labels` must be None with output='dense', got"),
    ({"output": "spans", "multi_label": True}, mpool.InvalidArgument,
     "`multi_label` must be False with output='spans'"),
    ({"output": "sparse", "template": "{}!"}, mpool.InvalidArgument, "'This example is {}.' with output='sparse'"),
    ({"candidate_labels": ["a"]}, mpool.InvalidArgument,
     "`candidate_labels` is not an option of embed_iter; use `labels`"),
    ({"labels": ["a"], "hypothesis_template": "{}"}, mpool.InvalidArgument, "; use `template`"),
    ({"multi_label": True}, mpool.InvalidArgument, "`multi_label` must be False without labels"),
    ({"template": "{}"}, mpool.InvalidArgument, "`template` must be 'This example is {}.' without labels"),
    ({"labels": []}, mpool.InvalidArgument, "`labels` must be a list of at least one str, got"),
    ({"labels": "a,b"}, mpool.InvalidArgument, "`labels` must be a list of at least one str, got 'a,b'"),
    ({"labels": {"a": 1}}, mpool.InvalidArgument, "`labels` must be a list"),
    ({"labels": ["a", 3]}, mpool.InvalidArgument, r"`labels\[1\]` must be .*, got int"),
    ({"labels": ["a\udc00"]}, mpool.InvalidArgument, r"`labels\[0\]` must be Unicode text"),
    ({"labels": ["a", "a"]}, mpool.InvalidArgument, r"`labels\[1\]` must be a label that is not in the list yet"),
    ({"labels": ["a"], "multi_label": 1}, mpool.InvalidArgument, "`multi_label` must be one of True, False"),
    ({"labels": ["a"], "function_to_apply": "none"}, mpool.InvalidArgument, "must be None with labels"),
    ({"labels": ["a"], "template": "It is."}, mpool.InvalidArgument, "`template` must be a text with {} once"),
    ({"labels": ["a"], "template": "{0.__class__}"}, mpool.InvalidArgument, "without other braces"),
    ({"labels": ["a"], "top_k": 0}, mpool.InvalidArgument, "`top_k` must be an integer of 1 or more"),
    ({"labels": [str(at) for at in range(1000)], "template": "x" * 999_998 + "{}"}, mpool.LimitError,
     "`template` with all labels must have at most 1,000,000 characters"),
    ({"labels": ["dog " * 70]}, mpool.ContextOverflow, r"`labels\[0\]` has a hypothesis of \d+ tokens"),
], ids=lambda value: str(value)[:40])
def test_options_of_iterators_of_zero_shot_classification(pool: mpool.Pool, nli: Path, options: dict[str, Any],
                                                          error: type[Exception], words: str) -> None:
    """A refused option raises when the iterator is made, or on an event loop with its first text. No text is read."""
    read: list[str] = []
    texts = (read.append(text) or text for text in TEXTS)  # type: ignore[func-returns-value]
    with pytest.raises(error, match=words):
        pool.embed_iter(texts, nli, **{"output": "labels", **options})
    with pytest.raises(error, match=words):
        asyncio.run(_await(anext(mpool.aio.embed_iter(texts, nli, pool=pool, **{"output": "labels", **options}))))
    assert not read


def test_iterators_of_zero_shot_classification_need_entailment(pool: mpool.Pool, sentiment: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar of a refused request is closed."""
    closed: list[vectors.Bar] = []
    monkeypatch.setattr(vectors.Bar, "close", lambda self: closed.append(self))
    with pytest.raises(mpool.WrongCapability, match='has no label whose name begins with "entail"'):
        pool.embed_iter(["a"], sentiment, output="labels", labels=["a"])
    assert len(closed) == 1


@pytest.mark.parametrize("options", [
    {"labels": LABELS, "multi_label": True}, {"labels": LABELS, "template": "About {}!", "top_k": 2},
    {"labels": LABELS[:1]}, {"labels": [f"w{at}" for at in range(700)]},
    {"labels": [f"w{at}" for at in range(1500)]}], ids=("multi", "template", "one", "700", "1500"))
def test_zero_shot_classification_of_iterators(pool: mpool.Pool, nli: Path, options: dict[str, Any]) -> None:
    """700 labels: slices of 1,024 pairs end within texts; 1,500 labels: a text has more pairs than a slice."""
    texts = TEXTS[:5]
    expected = pool.classify(texts, nli, **options)
    progress: list[tuple[int, Any]] = []
    iterator = pool.embed_iter(iter(texts), nli, output="labels",
                               progress=lambda done, total: progress.append((done, total)), **options)
    found = []
    for one in iterator:
        found.append(one)
        assert len(found) <= iterator.done <= len(texts)
    assert found == list(expected) and [one.scores.tobytes() for one in found] == bytes_of(expected)
    assert iterator.done == len(texts) and progress[-1] == (len(texts), None)
    batches = list(pool.embed_iter(texts, nli, output="labels", batch_size=2, **options))
    assert batches == [expected[:2], expected[2:4], expected[4:]]

    async def source() -> Any:
        for text in texts:
            yield text

    async def each(given: Any) -> list[Any]:
        return [one async for one in mpool.aio.embed_iter(given, nli, output="labels", pool=pool, **options)]

    assert asyncio.run(each(source())) == asyncio.run(each(texts)) == found


@pytest.mark.parametrize(("text", "words"), [
    (("a", "b"), "a single text with labels"), (3, "a str of 0 to"), ("a\udc00", "Unicode text"),
    ("x" * 1_000_001, "a str of 0 to")],
    ids=("pair", "number", "surrogate", "long"))
def test_texts_that_zero_shot_classification_refuses(pool: mpool.Pool, nli: Path, text: Any, words: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=rf"`texts\[400\]` must be {words}"):
        list(pool.embed_iter([*(TEXTS * 7)[:400], text, "w1"], nli, output="labels", labels=LABELS))
    idle(pool, 20)


def test_zero_shot_classification_of_long_texts(pool: mpool.Pool, nli: Path) -> None:
    with pytest.raises(mpool.ContextOverflow, match=r"`texts\[1\]` with its hypothesis has"):
        list(pool.embed_iter(["w1", "w1 " * 70], nli, output="labels", labels=LABELS, truncate=False))
    long = ["w1 " * 30_000, "w2 " * 30_000, "w3"]  # two slices by their characters
    assert list(pool.embed_iter(long, nli, output="labels", labels=LABELS)) == \
        list(pool.classify(long, nli, labels=LABELS))


@pytest.mark.slow
def test_windows_of_iterators_are_counted_per_slice(tagger: Path) -> None:
    """The limit of windows bounds the memory of a slice, and not the length of an iteration."""
    texts = ["w1 w2. " * 22] * 1500
    options: Any = dict(aggregation="simple", stride=3)
    with mpool.Pool(mpool.PoolConfig(threads=2, max_embed_inputs=2500)) as small:
        with pytest.raises(mpool.LimitError, match="at most 2,500 windows"):
            small.classify_tokens(texts, tagger, **options)
        assert sum(1 for _ in small.embed_iter(texts, tagger, output="spans", **options)) == 1500
        with pytest.raises(mpool.LimitError, match="at most 2,500 windows"):
            list(small.embed_iter(["w1 " * 300_000], tagger, output="spans", **options))


def test_pairs_of_iterators(pool: mpool.Pool, ranker: Path) -> None:
    """Pairs are read as lazily as texts; their slices are bounded by the characters of both texts."""
    pairs = [(text, TEXTS[-1 - at]) for at, text in enumerate(TEXTS)] * 20
    expected = bytes_of(pool.classify(pairs, ranker))
    assert [bytes_of_one(one) for one in pool.embed_iter(iter(pairs), ranker, output="labels")] == expected
    found = bytes_of(pool.classify([list(pair) for pair in pairs[:9]], ranker))
    assert found == [bytes_of_one(one) for one in pool.embed_iter([list(pair) for pair in pairs[:9]], ranker,
                                                                  output="labels")]
    read = 0

    def long() -> Iterator[tuple[str, str]]:
        nonlocal read
        while True:
            read += 1
            yield "w1 " * 100_000, f"w{read % 9} " * 100_000

    with pool.embed_iter(long(), ranker, output="labels") as iterator:
        next(iterator)
        assert read <= 20  # 600,000 characters each: a slice of 1,024 pairs would have 614 million
    with pytest.raises(mpool.InvalidArgument, match=r"`texts\[1100\]` must be a pair of texts, as the first"):
        list(pool.embed_iter([*pairs[:1100], "w1"], ranker, output="labels"))
    with pytest.raises(mpool.InvalidArgument, match=r"`texts\[1100\]` must be a str of 0 to .* got tuple"):
        list(pool.embed_iter([*(TEXTS * 20)[:1100], ("w1", "w2")], ranker, output="labels"))


# ---- cancellation --------------------------------------------------------------------------------------------------

LONG = distinct_texts(8000)


@pytest.mark.sample(4)
def test_cancelled_requests_end(pool: mpool.Pool, case: tuple[Output, str]) -> None:
    output, model = case
    expected = bytes_of(output.call(pool, TEXTS, model))
    if output.queued:
        job = cancelled_job(lambda texts: output.job(pool, texts, model), 2000)
        with pytest.raises(mpool.Cancelled):
            job.result(60)

    async def cancelled() -> None:
        task = asyncio.ensure_future(output.acall(pool, LONG, model))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    with pytest.raises(mpool.Timeout):
        output.call(pool, LONG, model, timeout=0.02)
    with pytest.raises(mpool.Timeout):
        asyncio.run(_await(output.acall(pool, LONG, model, timeout=0.02)))
    idle(pool, 20)
    assert bytes_of(output.call(pool, TEXTS, model)) == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize("leave", ("close", "del", "break", "aclose"))
def test_iterators_that_are_left_cancel_their_requests(pool: mpool.Pool, case: tuple[Output, str],
                                                       leave: str) -> None:
    output, model = case
    iterator = output.iterate(pool, iter(LONG), model)
    next(iterator)
    if leave == "close":
        iterator.close()
    elif leave == "del":
        alive = weakref.ref(iterator)
        del iterator
        gc.collect()
        assert alive() is None
    elif leave == "break":
        with iterator:
            for _ in iterator:
                break
    else:
        async def left() -> None:
            flow = output.aiterate(pool, LONG, model)
            async for _ in flow:
                break
            await flow.aclose()

        iterator.close()
        asyncio.run(left())
    idle(pool, 20)


# ---- HTTP and commands ---------------------------------------------------------------------------------------------

def test_routes_return_what_the_library_returns(request: pytest.FixtureRequest) -> None:
    folders = {output.model: str(request.getfixturevalue(output.model)) for output in OUTPUTS.values()}
    with serving([f"{name}={folder}" for name, folder in folders.items()]) as server:
        for name, output in OUTPUTS.items():
            if not output.path:
                continue
            status, found = ask(server, output.path, output.payload(TEXTS[:8], output.model))
            assert status == 200, (name, found)
            wanted = output.call(server.state.pool, TEXTS[:8], output.model)
            assert output.of_route(found) == [output.of_text(one) for one in texts_of(wanted)], name


@pytest.mark.sample(4)
def test_commands_print_what_the_library_returns(pool: mpool.Pool, case: tuple[Output, str], tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    output, model = case
    texts = [text.strip() for text in TEXTS]
    (tmp_path / "texts").write_text("\n".join(texts) + "\n", encoding="utf-8")
    assert cli.main([*output.command, "--model", model, "--file", str(tmp_path / "texts")]) == 0
    lines = output.lines(capsys.readouterr().out)
    assert [line["text"] for line in lines] == texts
    wanted = [output.of_text(one) for one in texts_of(output.call(pool, texts, model))]
    assert [output.of_line(line) for line in lines] == (
        wanted if output.submit != "all" else [tuple(one) for one in wanted])


@pytest.mark.parametrize(("arguments", "words"), [
    (("--vectors", "sparse", "--format", "npy"), "--format npy and --vectors sparse exclude each other"),
    (("--vectors", "tokens", "--output", "x.npy"), "--output x.npy, an array, and --vectors tokens exclude each other"),
    (("--vectors", "tokens", "--precision", "int8"), "--precision and --vectors tokens exclude each other"),
    (("--vectors", "all", "--dimensions", "4"), "--dimensions and --vectors all exclude each other"),
    (("--vectors", "sparse", "--no-normalize"), "--normalize and --vectors sparse exclude each other"),
    (("--vectors", "sparse", "--on-error", "null"), "--on-error and --vectors sparse exclude each other"),
    (("--max-active", "3"), "--max-active needs --vectors sparse"),
    (("--vectors", "sparse", "--max-active", "0"), "must be an integer of 1 or more")])
def test_options_that_exclude_each_other(m3: Path, arguments: tuple[str, ...], words: str,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["embed", "--model", str(m3), *arguments, "text"]) == 1
    found = capsys.readouterr()
    assert words in found.err and not found.out


def test_sparse_command_with_a_maximum(m3: Path, tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    assert cli.main(["embed", "--model", str(m3), "--vectors", "sparse", "--max-active", "2", "-o", str(path),
                     *TEXTS[:3]]) == 0
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [len(line["sparse"]["indices"]) for line in lines] == [2, 2, 2]
    assert [line["sparse"]["indices"] == sorted(line["sparse"]["indices"]) for line in lines] == [True] * 3
