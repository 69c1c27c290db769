"""The worker protocol: one test per rule, over the socket of a running worker."""

from __future__ import annotations

import json
import re
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors
from mpool.results import Chunk
from realmodels import real_path
from servers import Process, Raw, ask
from workers import TERMINAL, Events, free, refused, run, text_of, until, working

from mpool.server import bodies
from mpool.server.errors import TABLE, Refusal, refusal_of, worker_code, worker_error
from mpool.server.peers import user_of
from mpool.server.worker import GRACE, TokenSplitter, Worker

GREEDY: dict[str, Any] = {"temperature": 0}
#: A prompt of several thousand tokens, which SmolLM2 processes for seconds.
LONG = "The quick brown fox jumps over the lazy dog and looks at number seventeen. " * 200
CODES = {"INVALID_REQUEST", "MODEL_LOAD_FAILED", "OOM", "INFERENCE_TIMEOUT", "CANCELLED", "INTERNAL"}


@pytest.fixture(scope="module")
def worker(llama: Path) -> Iterator[Worker]:
    """Worker with a tiny model."""
    with working(f"tiny={llama}") as made:
        yield made


@pytest.fixture(scope="module")
def slow_worker() -> Iterator[Worker]:
    """Worker with a model that takes seconds for 2,048 tokens."""
    with working(f"smol={real_path('smollm2')}") as made:
        yield made


# ---- a job -----------------------------------------------------------------------------------------------------------

def test_events_of_a_job(worker: Worker) -> None:
    found = run(worker.serving, job_id="a", prompt="A cat sat", max_tokens=40, **GREEDY)
    wanted = worker.pool.generate("A cat sat", worker.model, max_tokens=40, **GREEDY)
    assert found[0] == ("started", {"job_id": "a", "model": "tiny"})
    assert text_of(found) == wanted.text
    name, end = found[-1]
    assert name == "end" and set(end) == {"tokens_out", "decode_time_ms", "stop_reason"}
    assert end["tokens_out"] == wanted.usage.completion_tokens and end["stop_reason"] == wanted.finish_reason
    assert end["decode_time_ms"] > 0 and found[-2][1]["i"] < end["tokens_out"]


def test_every_option_reaches_the_library(worker: Worker) -> None:
    options: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1,
                               "seed": 7, "max_tokens": 60}
    plain = worker.pool.generate("A cat", worker.model, **options)
    found = run(worker.serving, job_id="o", prompt="A cat", **options)
    assert text_of(found) == plain.text
    stop = plain.text[10:12]
    wanted = worker.pool.generate("A cat", worker.model, stop=[stop], **options)
    found = run(worker.serving, job_id="o", prompt="A cat", stop=[stop], **options)
    assert text_of(found) == wanted.text == plain.text[:plain.text.index(stop)]
    assert found[-1][1]["stop_reason"] == "stop"
    assert found[-1][1]["tokens_out"] == wanted.usage.completion_tokens


def test_seed_determines_the_tokens(worker: Worker) -> None:
    options: dict[str, Any] = {"prompt": "Once", "max_tokens": 50, "temperature": 1.5}
    first, again, other = (run(worker.serving, job_id="s", seed=seed, **options)[1:-1] for seed in (3, 3, 4))
    assert first == again != other


def test_characters_are_never_split_over_two_events(worker: Worker) -> None:
    """Most tokens of the tiny model are single bytes: at a high temperature it often generates incomplete characters.
    `workers.Events` decodes each event separately."""
    complete = 0
    for seed in range(12):
        options: dict[str, Any] = {"prompt": "日本語の文章です。", "max_tokens": 120, "temperature": 1.0, "seed": seed}
        found = run(worker.serving, job_id="u", **options)
        wanted = worker.pool.generate(options.pop("prompt"), worker.model, **options)
        assert text_of(found) == wanted.text
        complete += sum(ord(char) > 127 and char != "\ufffd" for char in wanted.text)
    assert complete > 20, "the model generated too few characters of several bytes"


class Ticket:
    """Stub of the core's ticket that returns the end offsets of tokens. ``read``: total number of offsets returned."""

    def __init__(self, *ends: int) -> None:
        self.ends, self.read = list(ends), 0

    def tokens(self, choice: int, start: int = 0) -> Any:
        found = np.array(self.ends[start:], np.uint32)
        self.read += len(found)
        return None, None, found


@pytest.mark.parametrize("chunks, wanted", [
    ([("ab", (1, 2), False), ("c", (1, 2, 3), True)], [("a", 0), ("b", 1), ("c", 2)]),
    ([("aß", (1, 1, 3), True)], [("a", 0), ("ß", 2)]),  # two tokens form one character
    ([("aß", (1, 2, 3), True)], [("a", 0), ("ß", 2)]),
    ([("ab", (3,), False), ("c", (3,), True)], [("abc", 0)]),  # the end of a token is held back and then released
    ([("ab", (1, 4), True)], [("a", 0), ("b", 1)]),  # the end of a token belongs to a stop string
    ([("a", (1, 1), False), ("\ufffd", (1, 4), True)], [("a", 0), ("\ufffd", 1)]),  # the text ends inside a character
    ([("a", (), False), ("b", (1, 2), True)], [("a", 0), ("b", 1)]),  # the text arrives before its token
    ([("", (0, 0), True)], [])])
def test_events_are_split_by_token(chunks: list[Any], wanted: list[Any]) -> None:
    stream: Any = SimpleNamespace(_ticket=None)
    splitter, found = TokenSplitter(stream), []
    for text, ends, last in chunks:
        stream._ticket = Ticket(*ends)
        found += [(token.t, token.i) for token in splitter.split(Chunk(text, finish_reason="stop" if last else None))]
    assert found == wanted


def test_tokens_are_streamed_while_the_job_runs(slow_worker: Worker) -> None:
    """The client receives tokens before the job is complete."""
    events = Events(slow_worker.serving, job_id="made", prompt="Count: one, two,", max_tokens=400, **GREEDY)
    seen = 0
    for name, _ in events:
        if name == "token":
            seen += 1
            if seen == 3:
                running = slow_worker.jobs.running
                assert running is not None and running.stream is not None and running.stream._ticket is not None
                assert not running.stream._ticket.done()
    assert seen > 100 and name == "end"


# ---- invalid requests ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, value", [
    ("job_id", ""), ("job_id", 3), ("job_id", "x" * 257), ("prompt", ""), ("prompt", "x" * 32_769), ("prompt", None),
    ("max_tokens", 0), ("max_tokens", 2049), ("max_tokens", True), ("max_tokens", 1.5), ("temperature", -0.1),
    ("temperature", 2.1), ("temperature", "1"), ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("min_p", -1),
    ("min_p", 1.5), ("repetition_penalty", 0), ("stop", ["a"] * 5), ("stop", [""]), ("stop", "a"), ("seed", -1),
    ("seed", 2**64), ("path", "/etc/passwd"), ("model", "tiny")])
def test_400_names_the_invalid_parameter(worker: Worker, name: str, value: Any) -> None:
    status, found = refused(worker.serving, **{"job_id": "a", "prompt": "b", name: value})
    assert status == 400 and found["code"] == "INVALID_REQUEST" and found["retriable"] is False
    assert (found["param"] or "").split("[")[0] == name and name in found["message"]


def test_400_names_the_missing_parameter(worker: Worker) -> None:
    for name, body in (("prompt", {"job_id": "a"}), ("job_id", {"prompt": "a"})):
        status, found = refused(worker.serving, **body)
        assert (status, found["code"], found["param"]) == (400, "INVALID_REQUEST", name)


def test_limits_are_inclusive(worker: Worker) -> None:
    found = run(worker.serving, job_id="x" * 256, prompt="a", max_tokens=1, temperature=2, top_p=1, top_k=0, min_p=0,
                repetition_penalty=1, stop=["zq"] * 4, seed=2**64 - 1)
    assert found[-1][0] == "end"
    # a prompt that exceeds the context window is refused before it is queued
    status, error = refused(worker.serving, job_id="long", prompt="𝄞" * 32_768)
    assert (status, error["code"], error["param"]) == (400, "INVALID_REQUEST", "prompt")
    assert "tokens" in error["message"]


def test_malformed_requests_are_refused(worker: Worker) -> None:
    for body in (b"{", b"[]", b'{"job_id": "a", "job_id": "b", "prompt": "c"}', b"\xff"):
        status, found = ask(worker.serving, "/execute", body)
        assert status == 400 and found["code"] == "INVALID_REQUEST"
    with Raw(worker.serving) as raw:
        status, headers, data = raw.request("/execute").answer()
        assert status == 405 and headers["allow"] == "POST" and json.loads(data)["code"] == "INVALID_REQUEST"


def test_404_names_paths_that_the_worker_has(worker: Worker) -> None:
    status, found = ask(worker.serving, "/v1/models", b"{}")
    named = re.findall(r"(?:GET|POST) (/[\w./]*\w)", json.dumps(found))
    assert status == 404 and "/execute" in named
    for path in set(named) - {"/shutdown"}:
        with Raw(worker.serving) as raw:
            assert raw.request(path, b"{").answer()[0] != 404


# ---- one job at a time -----------------------------------------------------------------------------------------------

@pytest.fixture
def overlaps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every request submitted to the core, the number of earlier requests that are not done at that time."""
    from mpool.tasks.text_to_text import Request

    tickets: list[Any] = []
    found: list[int] = []
    submit = Request.submit

    def counting(self: Request, *args: Any, **more: Any) -> Any:
        found.append(sum(not ticket.done() for ticket in tickets))
        tickets.append(submit(self, *args, **more))
        return tickets[-1]

    monkeypatch.setattr(Request, "submit", counting)
    return found


@pytest.mark.parametrize("path", ["/execute", "/cancel"])
def test_bodies_of_many_values_are_refused(worker: Worker, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The event loop parses these bodies: it must not be silent for long."""
    monkeypatch.setattr(bodies, "parse", lambda *given: pytest.fail("the body was decoded"))
    with Raw(worker.serving) as raw:
        status, _, found = raw.request(path, b'{"job_id":[' + b",".join([b"[1]"] * 60_000) + b"]}").answer()
    assert status == 413 and b"lists and objects" in found


def test_jobs_run_strictly_one_after_the_other(worker: Worker, overlaps: list[int]) -> None:
    """When a request is submitted to the core, all earlier ones are done. Responses do not overlap either."""
    done: list[Any] = []

    def client(number: int) -> None:
        done.append(run(worker.serving, job_id=f"job{number}", prompt=f"Number {number}", max_tokens=60, **GREEDY))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert overlaps == [0] * 12
    assert len(done) == 12 and {found[-1][0] for found in done} == {"end"}
    free(worker)


@pytest.mark.parametrize("how", ["leave", "cancel"])
def test_aborted_job_ends_before_the_next_begins(slow_worker: Worker, overlaps: list[int], how: str) -> None:
    """The job is aborted during the prefill of a long prompt, where the core needs some time to release the request."""
    for number in range(4):
        prompt = f"{time.time_ns()} {LONG}"
        first = Events(slow_worker.serving, job_id=f"g{number}", prompt=prompt, max_tokens=5, **GREEDY)
        until(lambda: any(row.running for row in slow_worker.pool.ps()))
        with Raw(slow_worker.serving) as raw:
            raw.request("/execute", b'{"job_id": "next", "prompt": "x", "max_tokens": 1}')
            until(lambda: slow_worker.jobs.waiting == 1)
            if how == "leave":
                first.close()
            else:
                assert ask(slow_worker.serving, "/cancel", {"job_id": f"g{number}"})[1]["cancelled"] is True
                assert list(first)[-1][1]["code"] == "CANCELLED"
            assert raw.answer()[0] == 200
        free(slow_worker)
    assert overlaps == [0] * 8


def test_second_job_is_queued(slow_worker: Worker) -> None:
    first = Events(slow_worker.serving, job_id="first", prompt="Once upon a time", max_tokens=2048, **GREEDY)
    found: list[Any] = []
    second = threading.Thread(target=lambda: found.append(
        run(slow_worker.serving, job_id="second", prompt="Hello", max_tokens=3, **GREEDY)))
    second.start()
    until(lambda: slow_worker.jobs.waiting == 1)
    assert not found and slow_worker.jobs.running is not None and slow_worker.jobs.running.id == "first"
    assert ask(slow_worker.serving, "/health")[1]["waiting"] == 1
    assert ask(slow_worker.serving, "/cancel", {"job_id": "first"}) == (200, {"job_id": "first", "cancelled": True})
    assert list(first)[-1][1]["code"] == "CANCELLED"
    second.join(60)
    assert found and found[0][-1][0] == "end"
    free(slow_worker)


def test_second_job_receives_409_with_busy_refuse() -> None:
    with working(f"smol={real_path('smollm2')}", busy="refuse") as made:
        events = Events(made.serving, job_id="first", prompt="Once upon a time", max_tokens=2048, **GREEDY)
        status, found = refused(made.serving, job_id="second", prompt="b")
        assert (status, found["code"], found["retriable"]) == (409, "INVALID_REQUEST", True)
        events.close()
        free(made)
        assert run(made.serving, job_id="third", prompt="c", max_tokens=2)[-1][0] == "end"


def test_job_id_must_be_unique(slow_worker: Worker) -> None:
    events = Events(slow_worker.serving, job_id="same", prompt="Once", max_tokens=2048, **GREEDY)
    status, found = refused(slow_worker.serving, job_id="same", prompt="Twice")
    assert (status, found["param"]) == (400, "job_id")
    events.close()
    free(slow_worker)


# ---- captures --------------------------------------------------------------------------------------------------------

def test_jobs_are_captured(llama: Path, tmp_path: Path) -> None:
    """Each job is recorded under its id in a separate file with the expected number of records. Its events equal those
    without a capture, except for the measured time."""
    def events_of(worker: Worker) -> list[Any]:
        found = [run(worker.serving, job_id=name, prompt="A cat sat", max_tokens=9, temperature=1.0, seed=5)
                 for name in ("a/../b", "b")]
        return [(name, {key: value for key, value in data.items() if key != "decode_time_ms"})
                for events in found for name, data in events]

    with working(f"tiny={llama}") as made:
        wanted = events_of(made)
    with working(f"tiny={llama}", capture=mpool.debug.capture(tmp_path / "jobs")) as made:
        assert events_of(made) == wanted
        capture = made.capture
        assert capture is not None and capture.flush(60)
        layers = int(made.model.description.spec.kv["llama.block_count"])
    found = capture.records()
    assert sorted(os.listdir(tmp_path / "jobs")) == ["000001.jsonl", "000002.jsonl"]
    assert [record.job_id for record in found] == ["a/../b"] * 9 * (layers + 3) + ["b"] * 9 * (layers + 3)
    assert (capture.written, capture.dropped, capture.failed) == (2, 0, 0)
    first, second = ([record for record in found if record.job_id == name] for name in ("a/../b", "b"))
    assert mpool.debug.compare_captures(first, second).worst.most == 0


# ---- cancellation and disconnects ------------------------------------------------------------------------------------

def test_cancel_is_idempotent(slow_worker: Worker) -> None:
    events = Events(slow_worker.serving, job_id="c", prompt="Once upon a time", max_tokens=2048, **GREEDY)
    assert ask(slow_worker.serving, "/cancel", {"job_id": "c"}) == (200, {"job_id": "c", "cancelled": True})
    found = list(events)
    assert found[-1][0] == "error" and found[-1][1]["code"] == "CANCELLED" and found[-1][1]["retriable"] is False
    assert sum(name in TERMINAL for name, _ in found) == 1
    free(slow_worker)
    for name in ("c", "never"):
        assert ask(slow_worker.serving, "/cancel", {"job_id": name}) == (200, {"job_id": name, "cancelled": False})
    assert ask(slow_worker.serving, "/cancel", {})[1]["param"] == "job_id"


def test_queued_job_can_be_cancelled(slow_worker: Worker) -> None:
    first = Events(slow_worker.serving, job_id="1", prompt="Once upon a time", max_tokens=2048, **GREEDY)
    found: list[Any] = []
    second = threading.Thread(target=lambda: found.append(refused(slow_worker.serving, job_id="2", prompt="x")))
    second.start()
    until(lambda: slow_worker.jobs.waiting == 1)
    assert ask(slow_worker.serving, "/cancel", {"job_id": "2"})[1]["cancelled"] is True
    second.join(30)
    assert found and found[0][1]["code"] == "CANCELLED" and slow_worker.jobs.running is not None
    first.close()
    free(slow_worker)


def test_disconnect_cancels_a_job_while_decoding(slow_worker: Worker) -> None:
    events = Events(slow_worker.serving, job_id="l", prompt="Once upon a time", max_tokens=2048, **GREEDY)
    for name, _ in events:
        if name == "token":
            break
    ticket = slow_worker.jobs.running.stream._ticket  # type: ignore[union-attr]
    events.close()
    free(slow_worker)
    assert ticket is not None and ticket.done() and ticket.text(0)[2] == 4 and ticket.text(0)[1] < 2048


def test_disconnect_cancels_a_job_during_prefill(slow_worker: Worker) -> None:
    prompt = f"{time.time_ns()} {LONG}"  # unique, so that no prefix of it is cached
    events = Events(slow_worker.serving, job_id="p", prompt=prompt, max_tokens=5, **GREEDY)
    ticket = slow_worker.jobs.running.stream._ticket  # type: ignore[union-attr]
    assert ticket is not None
    until(lambda: any(row.running for row in slow_worker.pool.ps()))
    events.close()
    free(slow_worker)
    assert ticket.done() and ticket.text(0)[1] == 0, "the worker processed the whole prompt"


def test_disconnect_removes_a_queued_job(slow_worker: Worker) -> None:
    first = Events(slow_worker.serving, job_id="1", prompt="Once upon a time", max_tokens=2048, **GREEDY)
    with Raw(slow_worker.serving) as raw:
        raw.request("/execute", b'{"job_id": "2", "prompt": "x"}')
        until(lambda: slow_worker.jobs.waiting == 1)
    until(lambda: slow_worker.jobs.waiting == 0)
    assert slow_worker.jobs.running is not None and slow_worker.jobs.running.id == "1"
    first.close()
    free(slow_worker)


# ---- faults: exactly one final event ---------------------------------------------------------------------------------

FAULTS = [(errors.MemoryExhausted("x"), "OOM", True), (errors.Timeout("x"), "INFERENCE_TIMEOUT", True),
          (errors.SpawnFailed("x"), "MODEL_LOAD_FAILED", True), (errors.ModelError("x"), "INTERNAL", False),
          (errors.RecvError("x"), "INTERNAL", True), (errors.Cancelled("x"), "CANCELLED", False),
          (errors.ShuttingDown("x"), "CANCELLED", True), (errors.InvalidArgument("x"), "INVALID_REQUEST", False),
          (RuntimeError("a secret"), "INTERNAL", False), (MemoryError(), "OOM", True)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("fault, code, retriable", FAULTS, ids=[type(fault).__name__ for fault, _, _ in FAULTS])
@pytest.mark.parametrize("after", [0, 3])
def test_fault_during_a_job_is_one_final_event(slow_worker: Worker, monkeypatch: pytest.MonkeyPatch, after: int,
                                               fault: Exception, code: str, retriable: bool) -> None:
    """The fault occurs before the first token, or after some tokens."""
    from mpool.tasks.text_to_text import Reader

    take, calls = Reader.take, [0]

    def failing(self: Reader) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise fault
        return take(self)

    monkeypatch.setattr(Reader, "take", failing)
    found = run(slow_worker.serving, job_id="f", prompt="Once upon a time", max_tokens=2048, **GREEDY)
    name, error = found[-1]
    assert (len(found) > 2) == (after > 0)
    assert name == "error" and set(error) == {"code", "message", "retriable", "param"}
    assert (error["code"], error["retriable"]) == (code, retriable) and "secret" not in json.dumps(error)
    monkeypatch.undo()
    free(slow_worker)
    assert run(slow_worker.serving, job_id="f", prompt="A cat", max_tokens=3)[-1][0] == "end"


@pytest.mark.parametrize("fault, code, retriable", FAULTS, ids=[type(fault).__name__ for fault, _, _ in FAULTS])
def test_fault_before_the_head_is_an_http_error(worker: Worker, monkeypatch: pytest.MonkeyPatch,
                                                fault: Exception, code: str, retriable: bool) -> None:
    from mpool.tasks.text_to_text import Request

    def failing(self: Request, *args: Any, **more: Any) -> Any:
        raise fault

    monkeypatch.setattr(Request, "submit", failing)
    status, error = refused(worker.serving, job_id="f", prompt="A cat")
    assert status >= 400 and (error["code"], error["retriable"]) == (code, retriable)
    monkeypatch.undo()
    assert run(worker.serving, job_id="f", prompt="A cat", max_tokens=3)[-1][0] == "end"


def test_faults_in_the_core_are_one_final_event_each(llama: Path) -> None:
    """Seeded fault injection: failed steps, failed allocations and slow steps. `run` checks the events of each job."""
    limits = {"chaos": "seed=5,fail=0.02,memory=0.02,slow=0.02", "breaker_threshold": 0}
    with working(f"tiny={llama}", limits) as made:
        ends: Counter[str] = Counter()
        for number in range(40):
            name, data = run(made.serving, job_id=f"c{number}", prompt="A cat", max_tokens=60, **GREEDY)[-1]
            ends[name if name == "end" else data["code"]] += 1
        assert set(ends) <= {"end"} | CODES and ends["end"] > 0 and len(ends) > 1, ends
        assert made.pool.metrics()["chaos_faults"] > 0


def test_timeout_of_a_job(slow_worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_worker, "_options", {"timeout": 0.2})
    prompt = f"{time.time_ns()} {LONG}"
    found = run(slow_worker.serving, job_id="t", prompt=prompt, max_tokens=2048, **GREEDY)
    assert found[-1][0] == "error" and found[-1][1]["code"] == "INFERENCE_TIMEOUT" and found[-1][1]["retriable"]
    free(slow_worker)


def test_all_errors_have_one_of_six_codes() -> None:
    found = {worker_code(Refusal(code)) for code in TABLE}
    assert found == CODES
    assert worker_code(refusal_of(errors.FormatError("x"), "id")) == "MODEL_LOAD_FAILED"
    assert json.loads(worker_error(Refusal("busy"))) == {
        "code": "INVALID_REQUEST", "message": "The worker is running a job.", "retriable": True, "param": None}


# ---- health and metrics ----------------------------------------------------------------------------------------------

def test_fields_of_health(worker: Worker, llama: Path) -> None:
    free(worker)
    status, found = ask(worker.serving, "/health")
    description = worker.model.description
    assert status == 200 and found["status"] == "ready" and found["model"] == "tiny" and found["resident"] is True
    assert found["quant_kind"] == description.spec.tensors[0].dtype and found["tokenizer_kind"] == "bpe"
    row = worker.pool.ps()[0]
    assert found["bytes_used"] == row.model_bytes + row.engine_bytes > 0
    assert found["vocab_size"] == worker.model.tokenizer.vocab_size
    assert found["context_length"] == worker.model.context_length
    assert found["waiting"] == 0 and found["uptime"] > 0


def test_health_of_a_gguf_file(slow_worker: Worker) -> None:
    found = ask(slow_worker.serving, "/health")[1]
    assert (found["quant_kind"], found["tokenizer_kind"], found["vocab_size"]) == ("Q4_1", "bpe", 49152)


def test_health_responds_while_a_job_runs(slow_worker: Worker) -> None:
    """Many health requests complete before the job does, during its prefill and during decoding. The test does not
    depend on the clock."""
    for job in ({"prompt": f"{time.time_ns()} {LONG}", "max_tokens": 2}, {"prompt": "Once", "max_tokens": 2048}):
        events = Events(slow_worker.serving, job_id="h", **job, **GREEDY)
        ticket = slow_worker.jobs.running.stream._ticket  # type: ignore[union-attr]
        for _ in range(20):
            status, found = ask(slow_worker.serving, "/health")
            assert status == 200 and found["status"] == "busy"
        assert ticket is not None and not ticket.done()
        events.close()
        free(slow_worker)


def test_metrics(worker: Worker) -> None:
    with Raw(worker.serving) as raw:
        status, headers, data = raw.request("/metrics").answer()
    assert status == 200 and headers["content-type"].startswith("text/plain") and b"mpool_model_calls" in data


# ---- the command -----------------------------------------------------------------------------------------------------

def test_load_progress_is_printed(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Process("worker", "-m", f"tiny={llama}") as process:
        process.process.terminate()
        _, stderr = process.process.communicate(timeout=30)
    shares = [int(line.split()[2]) for line in stderr.splitlines() if line.startswith("mpool: loading")]
    assert shares == [0, 25, 50, 75, 100] and process.process.returncode == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["SIGTERM", "shutdown"])
def test_stopped_worker_completes_the_running_job(how: str) -> None:
    """The running job completes, and the exit code is 0. The grace period is below the five seconds that the protocol
    allows; the next test has a job that exceeds it."""
    assert GRACE < 5
    with Process("worker", "-m", str(real_path("smollm2"))) as process:
        events = Events(process, job_id="s", prompt="Once upon a time", max_tokens=20, **GREEDY)
        if how == "SIGTERM":
            process.process.send_signal(signal.SIGTERM)
        else:
            assert ask(process, "/shutdown", b"") == (202, {"status": "stopping"})
        found = list(events)
        assert found[-1][0] == "end" and found[-1][1]["tokens_out"] == 20
        assert process.process.wait(30) == 0


@pytest.mark.slow
def test_stopped_worker_aborts_a_job_that_exceeds_the_grace_period(llama: Path) -> None:
    with working(f"smol={real_path('smollm2')}") as made:
        events = Events(made.serving, job_id="s", prompt="Once upon a time", max_tokens=2048, **GREEDY)
        waiting: list[Any] = []
        second = threading.Thread(target=lambda: waiting.append(refused(made.serving, job_id="w", prompt="x")))
        second.start()
        until(lambda: made.jobs.waiting == 1)
        made.serving.stop()
        found = list(events)
        second.join(30)
    assert found[-1][0] == "error" and found[-1][1] | {"message": ""} == {
        "code": "CANCELLED", "message": "", "retriable": True, "param": None}
    assert waiting and waiting[0][1]["code"] == "CANCELLED" and waiting[0][1]["retriable"] is True


def test_model_that_cannot_be_loaded(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mpool.cli import main

    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    assert main(["worker", "--port", "0", "-m", str(tmp_path / "bad.gguf")]) == 1
    assert "mpool: MODEL_LOAD_FAILED" in capsys.readouterr().err
    assert main(["worker", "--port", "0", "-m", str(bert)]) == 1
    assert "--model must be a text_to_text model, got " in capsys.readouterr().err
    assert main(["worker", "--port", "0", "--timeout", "-1", "-m", str(bert)]) == 1
    assert "timeout" in capsys.readouterr().err


def test_token_is_required_if_set(llama: Path, tmp_path: Path) -> None:
    with Process("worker", "-m", str(llama), "--token-file", str(tmp_path / "token")) as process:
        token = (tmp_path / "token").read_text().strip()
        for path, body in (("/execute", b"{}"), ("/cancel", b"{}"), ("/shutdown", b""), ("/metrics", None)):
            with Raw(process) as raw:
                assert raw.request(path, body, method="GET" if body is None else "POST").answer()[0] == 401
        with Raw(process) as raw:
            assert raw.request("/health").answer()[0] == 200
        assert ask(process, "/cancel", {"job_id": "x"}, f"Authorization: Bearer {token}")[0] == 200


#: Sends a POST without a body from another user, and prints the status and the code of the error.
_AS_USER = """
import os, socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20)
connection.close()  # imports and name resolution are done before the change to a user without access to Python's files
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
connection = socket.socket()
connection.settimeout(20)
connection.connect(("127.0.0.1", int(sys.argv[1])))
connection.sendall(b"POST /shutdown HTTP/1.1\\r\\nHost: 127.0.0.1:%d\\r\\n\\r\\n" % int(sys.argv[1]))
print(connection.recv(4096).decode())
"""


def _shut_down_as(user: int, port: int) -> str:
    return subprocess.run([sys.executable, "-c", _AS_USER, str(port), str(user)], capture_output=True, text=True,
                          check=True, timeout=60).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a client of another user")
def test_another_user_cannot_shut_a_worker_down(worker: Worker) -> None:
    assert "403" in _shut_down_as(65534, worker.serving.port)
    assert ask(worker.serving, "/health")[1]["status"] == "ready"


def test_shutdown_needs_the_same_user_or_the_token(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user of the client is looked up in the system's table of connections; here the worker has another user."""
    stopped: list[bool] = []
    monkeypatch.setattr(worker.serving, "stop", lambda: stopped.append(True))
    assert ask(worker.serving, "/shutdown", b"")[0] == 202 and stopped == [True]
    monkeypatch.setattr("mpool.server.operations.user_of", lambda client, server: os.geteuid() + 1)
    status, found = ask(worker.serving, "/shutdown", b"")
    assert status == 403 and found["code"] == "INVALID_REQUEST" and "token" in found["message"]
    monkeypatch.setattr("mpool.server.operations.user_of", lambda client, server: None)
    assert ask(worker.serving, "/shutdown", b"")[0] == 403
    assert stopped == [True]


def test_user_of_a_connection() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()) as client:
            server, address = listening.accept()
            with server:
                assert user_of(address, server.getsockname()) == os.geteuid()
                assert user_of((address[0], 1), server.getsockname()) is None  # no such connection
                client.close()  # the kernel reports user 0 for a socket without an owner
                assert user_of(address, server.getsockname()) is None
    assert user_of(("testclient", 50000), ("testserver", 80)) is None
