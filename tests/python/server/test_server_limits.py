"""Limits and texts of the server that need no model: sizes of responses, codes of errors, a worker's jobs."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import mpool

pytest.importorskip("starlette")
pytest.importorskip("msgspec")

from mpool import errors as library  # noqa: E402
from mpool.server import bodies, classifying, fill_in, labelling, ollama, ollama_models, operations  # noqa: E402
from mpool.server import sampling, worker  # noqa: E402
from mpool.server.errors import TABLE, Refusal, refusal_of  # noqa: E402
from mpool.server.openai import namespaces, text  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402
from mpool.server.state import State  # noqa: E402
from mpool.tokenizers.tokenizer import Tokenizer  # noqa: E402

MIB = 2**20


def refused(call: Any) -> Refusal:
    """Return the refusal of a call."""
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def test_size_of_a_response() -> None:
    """A response may have 64 MiB; the error has the size and the limit."""
    operations.check_response(64 * MIB, "input")
    found = refused(lambda: operations.check_response(64 * MIB + 1, "input"))
    assert (found.code, found.param, found.detail) == (
        "request_too_large", "input", "The response of `input` would have about 67,108,865 bytes; at most 67,108,864 "
        "are allowed. Send fewer inputs per request.")
    assert (operations.MAX_RESPONSE, operations.NUMBER_BYTES) == (64 * MIB, 22)
    assert operations.MAX_NUMBERS == 64 * MIB // 22 * 4


@pytest.mark.parametrize("labels, inputs", [(False, 8 * MIB // 10), (True, 8 * MIB // 11)])
def test_size_of_scores(labels: bool, inputs: int) -> None:
    """A score has 40 bytes, and its label those of its name: 80 bytes for two labels, 88 with their names."""
    served: Any = SimpleNamespace(model=SimpleNamespace(description=SimpleNamespace(embedding=SimpleNamespace(
        classifier=SimpleNamespace(labels=("four", "äé"))))))
    size = 88 if labels else 80
    assert asyncio.run(classifying._check_size(served, "input", inputs, labels=labels)) == inputs * size <= 64 * MIB
    found = refused(lambda: asyncio.run(classifying._check_size(served, "input", inputs + 1, labels=labels)))
    assert (found.code, found.param) == ("request_too_large", "input")
    assert found.detail == (f"The response of `input` would have {(inputs + 1) * size:,} bytes, for {inputs + 1:,} "
                            "inputs and 2 labels; at most 67,108,864 are allowed. Send fewer inputs per request.")


@pytest.mark.parametrize("name, most, make, words", [
    ("_MAX_CONTAINERS", 7, lambda n: [[]] * (n - 1), "lists and objects"),
    ("_MAX_FIELDS", 5, lambda n: {str(at): 0 for at in range(n)}, "fields"),
    ("_MAX_VALUES", 9, lambda n: [0] * n, "values")])
def test_numbers_of_parts_of_a_body(monkeypatch: pytest.MonkeyPatch, name: str, most: int, make: Any,
                                    words: str) -> None:
    for limit in ("_MAX_CONTAINERS", "_MAX_FIELDS", "_MAX_VALUES"):
        monkeypatch.setattr(bodies, limit, most if limit == name else 1000)
    bodies.Counts().add(json.dumps(make(most)).encode())
    found = refused(lambda: bodies.Counts().add(json.dumps(make(most + 1)).encode()))
    assert (found.code, found.detail) == ("request_too_large", f"A body must have at most {most} {words}.")


def test_a_prompt_with_a_suffix_has_special_tokens_once() -> None:
    """Special tokens stand once, before the whole prompt."""
    def tokenize(text: str, add_special: bool = True) -> list[int]:
        return [1] * add_special + [ord(char) for char in text]

    def served(tokens: tuple[int, int, int] | None) -> Any:
        tokenizer = SimpleNamespace(fill_in_tokens=lambda: tokens, prefix_ids=(1,))
        tokenizer.fill_in_prompt = partial(Tokenizer.fill_in_prompt, tokenizer)
        return SimpleNamespace(model=SimpleNamespace(tokenize=tokenize, tokenizer=tokenizer))

    assert asyncio.run(fill_in.prompt_ids(served((5, 6, 7)), "ab", "c")) == [1, 5, 97, 98, 6, 99, 7]
    found = refused(lambda: asyncio.run(fill_in.prompt_ids(served(None), "ab", "c")))
    assert (found.code, found.param) == ("unsupported_parameter", "suffix")


def test_size_of_spans() -> None:
    """A span has 128 bytes, and 12 for each character of its label and of its word."""
    def span(label: str, word: str) -> Any:
        return SimpleNamespace(label=label, word=word)

    assert labelling._size([]) == labelling._size([[]]) == 0  # type: ignore[arg-type]
    assert labelling._size([[span("ab", "xyz")], [span("", ""), span("a", "")]]) == 3 * 128 + 6 * 12  # type: ignore


@pytest.mark.parametrize("numbers, elsewhere", [(0, False), (32_767, False), (32_768, True)])
def test_large_responses_are_encoded_on_another_thread(numbers: int, elsewhere: bool) -> None:
    """The event loop encodes responses of fewer than 32,768 numbers itself."""
    threads = list[bool]()

    def made() -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return [1, 2]

    found = asyncio.run(operations.large_response(made, numbers))
    assert (found.body, found.media_type, found.status_code) == (b"[1,2]", "application/json", 200)
    assert threads == [not elsewhere]


@pytest.mark.parametrize("error, reason", [
    (library.OfflineError("x"), "Downloads are disabled (offline)."),
    (library.IntegrityError("x"), "The files are not those that the catalogue states."),
    (library.LimitError("x"), "The disk has too little free space."),
    (library.DownloadError("http://secret"), "The server's log has the details."),
    (library.FileError("/secret"), "The server's log has the details.")])
def test_reasons_of_failed_downloads(error: mpool.MpoolError, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients see why a download failed, but no path and no address."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "MPOOL_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    assert ollama_models._reason(error) == reason
    if isinstance(error, library.DownloadError):
        error._reason = "the server did not answer"
        assert ollama_models._reason(error) == "The server did not answer."


@pytest.mark.parametrize("code", TABLE)
def test_statuses_and_types_of_errors_agree(code: str) -> None:
    """A client repeats a request only after an error of the server, a conflict or a limit of rates."""
    row = Refusal(code).row
    assert 400 <= row.status < 600 and row.kind.endswith("_error") and row.text.endswith((".", "?"))
    assert (row.kind == "server_error") == (row.status >= 500)
    assert row.retry_after == 0 or row.status >= 500 or row.status in (409, 429)


#: Error of the library -> code of the server, also for the classes below it.
CODES = {"ContextOverflow": "context_length_exceeded", "LimitError": "request_too_large",
         "InvalidArgument": "invalid_value", "Unsupported": "unsupported_parameter",
         "WrongCapability": "wrong_capability", "TemplateError": "template_refused", "UnknownModel": "model_not_found",
         "OfflineError": "model_not_found", "SpawnTimeout": "load_failed", "SpawnFailed": "load_failed",
         "DownloadError": "download_failed", "IntegrityError": "load_failed", "FormatError": "load_failed",
         "FileError": "load_failed", "UnsafeFormat": "load_failed", "Timeout": "timeout",
         "MemoryExhausted": "out_of_memory", "Overloaded": "overloaded", "CircuitOpen": "circuit_open",
         "ShuttingDown": "shutting_down", "RecvError": "worker_lost", "SendError": "worker_lost",
         "NoWorkers": "worker_lost", "ModelError": "model_failed", "NumericError": "model_failed",
         "Cancelled": "cancelled"}


@pytest.mark.parametrize("name", CODES)
def test_codes_of_the_librarys_errors(name: str) -> None:
    """Each error has its code. Only errors about the request itself have a detail, cut to 300 characters, and a lack
    of memory, cut to 600."""
    found = refusal_of(getattr(library, name)("x" * 700), "id")
    detailed = CODES[name] in ("invalid_value", "unsupported_parameter", "context_length_exceeded", "request_too_large")
    detail = "X" + "x" * 299 + "." if detailed else "None: " + "x" * 700 + "." if name == "WrongCapability" else \
        "x" * 600 + "." if name == "MemoryExhausted" else ""
    assert (found.code, found.detail.lower()) == (CODES[name], detail.lower())


@pytest.mark.parametrize("error, code", [
    (asyncio.CancelledError(), "shutting_down"), (MemoryError(), "out_of_memory"), (ValueError("x"), "internal"),
    (Refusal("busy"), "busy")])
def test_codes_of_other_errors(error: BaseException, code: str) -> None:
    """Errors of Python have no detail, and a refusal stays as it is."""
    found = refusal_of(error, "id")
    assert (found.code, found.detail, found.param) == (code, "", None) and (found is error) == (code == "busy")


@pytest.mark.parametrize("path, shown", [
    ("/srv/a/m.gguf", "m.gguf"), ("/home/my own/models/m x", "m x"), ("~/a/m", "m"), ("org/m", "m"), ("m", "m"),
    ("/srv/a, b/c: d; e (1), f/m, 2", "m, 2"), ("secret, old/m:q4", "m:q4"), ("/a 5 MB (x)/m", "m"), ("/a\n/m", "m")])
def test_a_lack_of_memory_names_models_without_their_folders(path: str, shown: str) -> None:
    """Folders may have any character in their names, also those that separate the parts of a message."""
    for words in ("{0} needs 9 B, but 0.0 MB of 5.0 MB are free; use a smaller model (memory_bytes)",
                  "{0}: the request needs 9 B. In memory: {0} 2.0 MB (idle), {0} 900 B (in use, pinned)"):
        message = refusal_of(library.MemoryExhausted(words.format(path)), "id").message
        assert message.endswith(f" {words.format(shown)}.")


@pytest.mark.parametrize("param, field", [
    ("temperature", "temperature"), ("stop[1]", "stop"), ("response_format.json_schema", "response_format"),
    ("messages[0].content", "messages"), ("documents", None), (None, None), ("guidance_scale", "guidance_scale")])
def test_fields_of_the_librarys_errors(param: str | None, field: str | None) -> None:
    """The error names a field of the request only if it has the name of the parameter."""
    assert refusal_of(library.InvalidArgument("x", param=param), "id").param == field
    for name in ("response_format", "tools"):  # too complex, not too long
        assert refusal_of(library.LimitError("x", param=name), "id").code == "invalid_value"


@pytest.mark.parametrize("given, most, found", [
    ({"min_tokens": 9}, 5, {"min_tokens": 5, "max_tokens": 5}),
    ({"min_tokens": 3}, 5, {"min_tokens": 3, "max_tokens": 5}),
    ({"top_p": 0}, 5, {"top_k": 1, "max_tokens": 5}), ({"top_p": 0.0, "top_k": 7}, 5, {"top_k": 1, "max_tokens": 5}),
    ({"top_p": 0.5, "top_k": 7}, 5, {"top_p": 0.5, "top_k": 7, "max_tokens": 5}), ({}, None, {"max_tokens": 7}),
    ({"seed": -1}, 5, {"seed": 2**64 - 1, "max_tokens": 5}), ({"seed": 0}, 5, {"seed": 0, "max_tokens": 5}),
    ({"n": 2}, 5, {"n": 2, "max_tokens": 5}), ({}, 50, {"max_tokens": 20})])
def test_sampling_options(given: dict[str, Any], most: int | None, found: dict[str, Any]) -> None:
    """Options that are set, within the limits of the server, and its default number of tokens."""
    settings = Settings(default_max_tokens=7, max_tokens=20, max_n=2)
    context: Any = SimpleNamespace(state=SimpleNamespace(settings=settings))
    body: Any = SimpleNamespace(**{"seed": None, **given})
    assert sampling.sampling(context, SimpleNamespace(defaults={}), body, most) == found  # type: ignore[arg-type]
    defaults = {"temperature": 0.5, "max_tokens": 3}
    wanted = {"temperature": 0.5, **found, **({"max_tokens": 3} if most is None else {})}
    served = SimpleNamespace(defaults=defaults)
    assert sampling.sampling(context, served, body, most) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("count, valid", [(1, True), (2, True), (3, False)])
def test_number_of_results(count: int, valid: bool) -> None:
    """The limit itself is allowed."""
    if valid:
        sampling.check_count(count, 2)
    else:
        assert refused(lambda: sampling.check_count(count, 2)).param == "n"


@pytest.mark.parametrize("seconds, whole", [(0.0, 0), (1.5, 1_500_000_000), (-1.0, 0), (1e-9, 1)])
def test_nanoseconds(seconds: float, whole: int) -> None:
    """Ollama's durations are never negative."""
    assert ollama.nanoseconds(seconds) == whole
    assert ollama.now().endswith("Z") and "+" not in ollama.now()


@pytest.mark.parametrize("busy", ["never", "", None])
def test_what_a_busy_worker_does(busy: Any) -> None:
    """The error has the allowed values, and no model is loaded."""
    with pytest.raises(mpool.InvalidArgument) as caught:
        worker.Worker("no such model", Settings(), mpool.PoolConfig(), busy=busy)
    assert (caught.value.param, caught.value.allowed, caught.value.got) == ("busy", "'wait' or 'refuse'", repr(busy))


def test_queue_of_a_worker() -> None:
    """Jobs run one after the other, in order of arrival. A job that was cancelled while it was queued is left out."""
    async def work() -> None:
        queue, jobs = worker.JobQueue(), [worker.Job(name) for name in "abcd"]
        await queue.wait(jobs[0])
        waits = [asyncio.ensure_future(queue.wait(job)) for job in jobs[1:]]
        await asyncio.sleep(0)
        assert (queue.running, queue.waiting) == (jobs[0], 3)
        assert [queue.find(name) for name in "adx"] == [jobs[0], jobs[3], None]
        queue.cancel(jobs[1])
        queue.cancel(jobs[0])
        assert jobs[0].cancelled and jobs[1].cancelled and not jobs[2].cancelled and not jobs[0].turn.done()
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as caught:
            await waits[0]
        assert caught.value.code == "cancelled"
        queue.release(jobs[0])
        assert queue.running is jobs[2] and queue.waiting == 1
        await waits[1]
        queue.release(jobs[3])  # its client left while it was queued
        assert queue.waiting == 0 and queue.running is jobs[2]
        queue.release(jobs[2])
        assert queue.running is None and not waits[2].done()
        waits[2].cancel()

    asyncio.run(work())


@pytest.mark.parametrize("failing", [False, True])
def test_requests_that_run_together(failing: bool) -> None:
    """The results have the order of the requests. The first failure cancels the others."""
    ended, seen = list[str](), list[list[str]]()

    async def one(name: str, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append(name)
            raise
        if failing:
            raise ValueError(name)
        return name

    async def work(*given: tuple[str, float]) -> list[str]:
        try:
            return await text.run_concurrently([one(*each) for each in given])
        finally:
            await asyncio.sleep(0)
            seen.append(sorted(ended))  # the end of the event loop cancels all tasks

    if failing:
        with pytest.raises(ValueError, match="b"):
            asyncio.run(work(("a", 3600), ("b", 0), ("c", 3600)))
        assert seen == [["a", "c"]]
    else:
        assert asyncio.run(work(("a", 0.01), ("b", 0))) == ["a", "b"] and asyncio.run(work(("a", 0))) == ["a"]


@pytest.mark.parametrize("namespace, name, joined", [
    (None, "read", "read"), ("", "read", "read"), ("files", "read", "files__read"), ("files__", "read", "files__read"),
    ("n" * 122, "read", "n" * 122 + "__read"), ("n" * 123, "read", "n" * 119 + "_")])
def test_names_in_namespaces(namespace: str | None, name: str, joined: str) -> None:
    """A name of more than 128 characters ends in eight digits that depend on all of it."""
    found = namespaces.joined_name(namespace, name)
    assert found.startswith(joined) and len(found) == (128 if joined.endswith("_") else len(joined))
    if joined.endswith("_"):
        assert all(digit in "0123456789abcdef" for digit in found[-8:])
        assert found != namespaces.joined_name(namespace, name + "x")


@pytest.mark.parametrize("given, most", [(None, 10_000), (7, 7), (20_000, 20_000)])
def test_number_of_inputs_of_a_request(given: int | None, most: int) -> None:
    """The library has no limit by default, and the server has one."""
    with mpool.Pool(mpool.PoolConfig(max_embed_inputs=given, offline=True)) as pool:
        assert State(Settings(), pool).max_inputs == most


@pytest.mark.parametrize("wanted, most", [(None, 7), (-1, 9), (8, 8), (10, 9)])
def test_number_of_tokens_of_a_completion(wanted: int | None, most: int) -> None:
    assert Settings(default_max_tokens=7, max_tokens=9).completion_tokens(wanted) == most


def test_usage_of_several_prompts() -> None:
    """Counts of prompts are summed, those of cached tokens too."""
    done: Any = [SimpleNamespace(usage=mpool.results.Usage(prompt, written, cached))
                 for prompt, written, cached in ((10, 3, 8), (20, 4, 16), (5, 1, 0))]
    found = text.usage_of(done)
    assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (35, 8, 43)
    assert found.prompt_tokens_details == {"cached_tokens": 24}
