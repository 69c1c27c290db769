"""Captures: records of the layer outputs during generation, from the core to a file (mpool/tasks/captures.py)."""

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.tasks import captures
from mpool.tasks.capture_files import CaptureRecord
from realmodels import real_path

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(pool: mpool.Pool, llama: Path) -> mpool.Model:
    """A tiny language model."""
    return pool.load(llama)


def layers_of(model: mpool.Model) -> int:
    return int(model.description.spec.kv["llama.block_count"])


def stages(layers: int) -> list[str]:
    return ["embedding", *(f"layer.{number}" for number in range(layers)), "norm", "logits"]


def places(records: Any) -> list[tuple[str, int, str]]:
    return [(record.job_id, record.token_idx, record.checkpoint) for record in records]


# ---- records ---------------------------------------------------------------------------------------------------------

def test_each_sampled_token_has_one_record_per_stage(model: mpool.Model, tmp_path: Path) -> None:
    """One record per layer and three others per sampled token. The first token is sampled from the last prompt row."""
    layers, path = layers_of(model), tmp_path / "run.jsonl"
    with mpool.debug.capture(path, values=7) as capture:
        done = model.generate("A cat sat on", max_tokens=14, capture=capture, **GREEDY)
    assert done.usage.completion_tokens == 14
    found = capture.records()
    assert places(found) == [("1", token, stage) for token in range(14) for stage in stages(layers)]
    assert (capture.written, capture.dropped, capture.failed) == (1, 0, 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(found) == 14 * (layers + 3)
    wide = {"logits": model.tokenizer.vocab_size}
    hidden = int(model.description.spec.kv["llama.embedding_length"])
    for line, record in zip(lines, found):
        assert line == {"checkpoint": record.checkpoint, "team": "mpool", "token_idx": record.token_idx, "job_id": "1",
                        "dtype": "float32", "shape": [wide.get(record.checkpoint, hidden)],
                        "values": list(record.values)}
        assert len(record.values) == 7 and all(value is not None for value in record.values)
    # at every stage after the embedding, the values differ between all tokens
    for stage in stages(layers)[1:]:
        assert len({record.values for record in found if record.checkpoint == stage}) == 14


def test_a_sampled_stop_token_has_records(model: mpool.Model) -> None:
    """The stop token is not part of the completion, but it was sampled from a row."""
    ends = model.generate("Once", max_tokens=1, **GREEDY).token_ids
    with mpool.debug.capture() as capture:
        done = model.generate("Once", temperature=0, max_tokens=5, stop_token_ids=list(ends), capture=capture)
    assert (done.usage.completion_tokens, done.finish_reason) == (0, "stop")
    assert places(capture.records()) == [("1", 0, stage) for stage in stages(layers_of(model))]


def test_logits_are_those_that_tokens_are_sampled_from(pool: mpool.Pool, model: mpool.Model) -> None:
    """The largest logit is the sampled token, and the embedding is that of the previous token."""
    with mpool.debug.capture(values=1 << 20) as capture:
        done = model.generate("A cat sat on", max_tokens=6, capture=capture, **GREEDY)
    logits = [record.values for record in capture.records() if record.checkpoint == "logits"]
    assert [int(np.argmax(np.array(values))) for values in logits] == list(done.token_ids)
    with mpool.debug.capture(values=1 << 20) as again:
        model.generate(list(done.token_ids[:3]), max_tokens=1, capture=again, **GREEDY)
    rows = [record.values for record in capture.records() if record.checkpoint == "embedding"]
    assert [record.values for record in again.records() if record.checkpoint == "embedding"] == [rows[3]]


def test_capturing_does_not_change_completions(model: mpool.Model) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 40, "logprobs": True, "top_logprobs": 5}
    without = model.generate("The dog", **options)
    with mpool.debug.capture() as capture:
        captured = model.generate("The dog", capture=capture, **options)
        streamed = list(model.generate("The dog", stream=True, capture=capture, **options))
    assert captured.choices == without.choices
    assert "".join(chunk.text for chunk in streamed) == without.text and capture.written == 2


def test_concurrent_requests_have_separate_records(model: mpool.Model, tmp_path: Path) -> None:
    """Requests of several lengths, from threads and from an event loop, have the same records as when run alone."""
    prompts = {f"job {number}": "cat " * (1 + 7 * number) for number in range(6)}
    alone = {}
    for name, prompt in prompts.items():
        with mpool.debug.capture() as capture:
            model.generate(prompt, max_tokens=20, capture=capture.job(name), **GREEDY)
        alone[name] = capture.records()
    with mpool.debug.capture(tmp_path / "all.jsonl") as capture, ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(lambda name: model.generate(prompts[name], max_tokens=20, capture=capture.job(name), **GREEDY),
                         prompts))

    async def both(job: Any) -> None:
        await asyncio.gather(*(mpool.aio.generate(prompt, model, max_tokens=20, capture=job(name), **GREEDY)
                               for name, prompt in prompts.items()))

    with mpool.debug.capture(tmp_path / "folder") as other:
        asyncio.run(both(other.job))
    assert len(list((tmp_path / "folder").iterdir())) == len(prompts)
    for found in (capture.records(), other.records()):
        assert len(found) == sum(map(len, alone.values()))
        for name, wanted in alone.items():
            assert tuple(record for record in found if record.job_id == name) == wanted


def test_a_cached_prompt_has_the_same_records(model: mpool.Model) -> None:
    prompt = "one two three four " * 60
    with mpool.debug.capture() as first, mpool.debug.capture() as second:
        model.generate(prompt, max_tokens=3, capture=first, **GREEDY)
        done = model.generate(prompt, max_tokens=3, capture=second, **GREEDY)
    assert done.usage.cached_tokens > 0 and first.records() == second.records()


def test_vision_models(pool: mpool.Pool) -> None:
    """The decoder's layers are recorded, and the completion does not change."""
    image = np.zeros((28, 28, 3), np.uint8)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
    plain = pool.vision(image, "Which digit is this?", "mpool:digits-llava", **options)
    with mpool.debug.capture() as capture:
        done = pool.vision(image, "Which digit is this?", "mpool:digits-llava", capture=capture, **options)
    sampled = done.usage.completion_tokens + (done.finish_reason == "stop")
    assert done.text == plain.text and sampled > 0
    assert [record.token_idx for record in capture.records() if record.checkpoint == "logits"] == list(range(sampled))


def test_constrained_completions(model: mpool.Model) -> None:
    """Rows that wait for a grammar mask have one set of records, equal in both runs."""
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 30,
                               "response_format": {"type": "regex", "regex": "[a-z]{9,12}"}}
    plain = model.generate("A cat", **options)
    with mpool.debug.capture() as first, mpool.debug.capture() as second:
        done = model.generate("A cat", capture=first, **options)
        model.generate("A cat", capture=second, **options)
    sampled = done.usage.completion_tokens + (done.finish_reason == "stop")
    assert done.choices == plain.choices and first.records() == second.records()
    assert [record.token_idx for record in first.records() if record.checkpoint == "norm"] == list(range(sampled))


def test_rejected_drafts_leave_no_records(tmp_path: Path) -> None:
    """Rows of rejected draft tokens have no records; rows of accepted draft tokens have one set."""
    program = """if True:
        import sys, mpool
        with mpool.debug.capture(sys.argv[2]) as capture:
            mpool.generate("la la la di da la la la di da la la", sys.argv[1], temperature=0, max_tokens=48,
                           ignore_eos=True, capture=capture)
        print(mpool.metrics()["accepted_draft_tokens"])
    """
    accepted = {}
    for ways in ("0", "2"):
        done = subprocess.run([sys.executable, "-c", program, real_path("smollm2"), str(tmp_path / f"{ways}.jsonl")],
                              capture_output=True, text=True, timeout=300,
                              env={**os.environ, "MPOOL_SPECULATION": ways})
        assert done.returncode == 0, done.stderr
        accepted[ways] = int(done.stdout)
    assert accepted["0"] == 0 < accepted["2"]
    found = (tmp_path / "2.jsonl").read_text()
    assert found == (tmp_path / "0.jsonl").read_text() and found.count("\n") == 48 * 33


def test_records_beyond_the_limit_are_dropped_and_counted(model: mpool.Model) -> None:
    each = layers_of(model) + 3
    with mpool.debug.capture(records=3 * each + 1) as capture:
        model.generate("A cat", max_tokens=9, capture=capture, **GREEDY)
    found = capture.records()
    assert len(found) == 3 * each and capture.dropped == 6 * each and capture.written == 1
    with mpool.debug.capture() as whole:
        model.generate("A cat", max_tokens=9, capture=whole, **GREEDY)
    assert whole.records()[:3 * each] == found and whole.dropped == 0
    with pytest.raises(mpool.InvalidArgument, match=f"captured records must be .*got {each - 1}"):
        model.generate("A cat", max_tokens=9, capture=mpool.debug.capture(records=each - 1), **GREEDY)


def test_a_cancelled_request_has_the_computed_records(model: mpool.Model) -> None:
    with mpool.debug.capture() as capture:
        stream = model.generate("Once", max_tokens=100_000, stream=True, capture=capture, **GREEDY)
        next(stream)
        stream.close()
    assert capture.written == 1 and capture.records()[0].token_idx == 0


def test_dropping_a_stream_cancels_its_request(model: mpool.Model) -> None:
    """The writer thread also holds the ticket, but does not keep the request running."""
    with mpool.debug.capture() as capture:
        stream = model.generate("Once", max_tokens=None, stream=True, capture=capture, **GREEDY)
        ticket = stream._ticket
        del stream
        gc.collect()
        ticket.wait(60)
        assert ticket.done()
        with pytest.raises(mpool.Cancelled):
            ticket.check()


# ---- files -----------------------------------------------------------------------------------------------------------

def test_a_file_is_replaced_and_a_folder_is_extended(model: mpool.Model, tmp_path: Path) -> None:
    path, folder = tmp_path / "run.jsonl", tmp_path / "runs"
    path.write_text("old")
    (tmp_path / "run.jsonl.tmp").write_text("another program's")
    for _ in range(2):
        with mpool.debug.capture(path) as one, mpool.debug.capture(folder) as many:
            for name in ("a", "b"):
                for capture in (one, many):
                    model.generate("A cat", max_tokens=2, capture=capture.job(name), **GREEDY)
        assert {record.job_id for record in mpool.debug.read_capture(path)} == {"a", "b"}
        assert sorted(os.listdir(tmp_path)) == ["run.jsonl", "run.jsonl.tmp", "runs"]
        assert (tmp_path / "run.jsonl.tmp").read_text() == "another program's"
    assert sorted(os.listdir(folder)) == [f"00000{number}.jsonl" for number in (1, 2, 3, 4)]
    assert (folder / "000001.jsonl").read_bytes() + (folder / "000002.jsonl").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("ending", ["run.jsonl", "runs"])
def test_a_killed_process_keeps_complete_records(llama: Path, tmp_path: Path, ending: str) -> None:
    """Killed during a request, the process leaves the complete records of all earlier requests."""
    program = """if True:
        import sys, mpool
        capture = mpool.debug.capture(sys.argv[2])
        for number in range(3):
            mpool.generate("A cat", sys.argv[1], temperature=0, ignore_eos=True, max_tokens=5, capture=capture)
        capture.flush()
        stream = mpool.generate("A cat", sys.argv[1], max_tokens=None, ignore_eos=True, stream=True, capture=capture)
        next(stream)
        print("now", flush=True)
        stream.result()
    """
    child = subprocess.Popen([sys.executable, "-c", program, str(llama), str(tmp_path / ending)],
                             stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "now\n"
    child.kill()
    child.communicate()
    found = mpool.debug.read_capture(tmp_path / ending)
    assert {record.job_id for record in found} == {"1", "2", "3"} and len({*places(found)}) == len(found)
    assert {record.token_idx for record in found} == set(range(5))


def test_the_exit_of_the_interpreter_waits_for_completed_requests(llama: Path, tmp_path: Path) -> None:
    program = """if True:
        import sys, mpool
        mpool.generate("A cat", sys.argv[1], temperature=0, max_tokens=5, ignore_eos=True,
                       capture=mpool.debug.capture(sys.argv[2]))
    """
    subprocess.run([sys.executable, "-c", program, str(llama), str(tmp_path / "a.jsonl")], check=True, timeout=120)
    assert {record.token_idx for record in mpool.debug.read_capture(tmp_path / "a.jsonl")} == set(range(5))


def test_a_full_disk_harms_no_request(model: mpool.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RLIMIT_FSIZE stops the file from growing. Complete records stay, no temporary file is left, completions do not
    change, and the next request is written again once there is room."""
    plain = model.generate("A cat", max_tokens=8, **GREEDY)
    path, soft = tmp_path / "run.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with mpool.debug.capture(path) as capture, caplog.at_level(logging.WARNING, "mpool"):
            model.generate("A cat", max_tokens=8, capture=capture, **GREEDY)
            capture.flush()
            whole = path.read_bytes()
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, soft[1]))
            done = model.generate("A cat", max_tokens=8, capture=capture, **GREEDY)
            capture.flush()
            assert done.text == plain.text and (capture.written, capture.failed) == (1, 1)
            assert path.read_bytes() == whole and os.listdir(tmp_path) == ["run.jsonl"]
            assert "Job '2' was not captured: [Errno 27] File too large" in caplog.text
            resource.setrlimit(resource.RLIMIT_FSIZE, soft)
            model.generate("A cat", max_tokens=8, capture=capture, **GREEDY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
        signal.signal(signal.SIGXFSZ, before)
    assert {record.job_id for record in capture.records()} == {"1", "3"} and path.read_bytes().startswith(whole)


def test_a_removed_folder_harms_no_request(model: mpool.Model, tmp_path: Path) -> None:
    with mpool.debug.capture(tmp_path / "runs") as capture:
        (tmp_path / "runs").rmdir()
        assert model.generate("A cat", max_tokens=3, capture=capture, **GREEDY).usage.completion_tokens == 3
    assert (capture.written, capture.failed) == (0, 1)


def test_a_blocked_disk_blocks_no_request(model: mpool.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests continue. Beyond a number of waiting captures, further captures are dropped and counted."""
    go, most = threading.Event(), 3
    put = captures.Capture._store
    monkeypatch.setattr(captures, "MAX_PENDING", most)
    monkeypatch.setattr(captures.Capture, "_store", lambda self, table: go.wait(60) and put(self, table))
    with mpool.debug.capture() as capture:
        for _ in range(most + 2):
            model.generate("A cat", max_tokens=2, capture=capture, **GREEDY)
        assert not capture.flush(0.01) and (capture.written, capture.failed) == (0, 2)
        go.set()
    assert (capture.written, capture.failed) == (most, 2)


def put(path: Path, table: captures._RecordTable) -> None:
    mpool.debug.capture(path)._store(table)


def test_a_forked_child_captures(llama: Path, tmp_path: Path) -> None:
    """The child starts its own writer thread when it needs one."""
    program = """if True:
        import os, sys, mpool
        def run(name):
            with mpool.debug.capture(sys.argv[2]) as capture:
                mpool.generate("A cat", sys.argv[1], temperature=0, max_tokens=3, ignore_eos=True,
                               capture=capture.job(name))
                return capture.flush(60)
        run("parent")
        child = os.fork()
        if not child:
            os._exit(0 if run("child") else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    subprocess.run([sys.executable, "-c", program, str(llama), str(tmp_path)], check=True, timeout=120)
    assert [record.job_id for record in mpool.debug.read_capture(tmp_path) if record.checkpoint == "logits"] \
        == ["parent"] * 3 + ["child"] * 3


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    data = np.array([[1, np.nan, np.inf, -np.inf, 1e-30, -2.5]], np.float32)
    table = captures._RecordTable('a "job" of 100 %', 2, data, 0, 2, 5)
    put(tmp_path / "a.jsonl", table)
    found = mpool.debug.read_capture(tmp_path / "a.jsonl")
    assert found == tuple(table.records()) and found[0].job_id == 'a "job" of 100 %'
    assert [record.values for record in found] == [(1.0, None), (None, None), (1e-30, -2.5)]


def test_every_float32_comes_back(tmp_path: Path) -> None:
    bits = np.random.default_rng(3).integers(0, 2**32, 3000, np.uint32).view(np.float32)
    data = bits[np.isfinite(bits)][None, :2400]
    put(tmp_path / "a.jsonl", captures._RecordTable("1", 800, data, 0, 800, 900))
    found = [value for record in mpool.debug.read_capture(tmp_path / "a.jsonl") for value in record.values]
    assert (np.array(found, np.float32).view(np.uint32) == data.view(np.uint32)).all()


# ---- refused arguments -----------------------------------------------------------------------------------------------

def test_a_file_is_written_by_one_capture_at_a_time(model: mpool.Model, tmp_path: Path) -> None:
    """Otherwise each capture would rewrite the file without the requests of the other."""
    path = tmp_path / "run.jsonl"
    os.symlink(tmp_path, tmp_path / "link")
    with mpool.debug.capture(path) as first:
        for same in (path, tmp_path / "link" / "run.jsonl"):
            with pytest.raises(mpool.errors.FileError, match="another open mpool.debug.capture"):
                mpool.debug.capture(same)
        model.generate("A", max_tokens=1, capture=first.job("a"), **GREEDY)
    with mpool.debug.capture(path) as second:
        model.generate("A", max_tokens=1, capture=second.job("b"), **GREEDY)
        with pytest.raises(mpool.errors.FileError, match="another open mpool.debug.capture"):
            model.generate("A", max_tokens=1, capture=first, **GREEDY)
    model.generate("A", max_tokens=1, capture=first.job("c"), **GREEDY)
    assert {record.job_id for record in first.records()} == {"b", "c"}
    with pytest.raises(mpool.errors.FileError, match="another open mpool.debug.capture"):
        mpool.debug.capture(path)
    del first
    gc.collect()
    mpool.debug.capture(path)


@pytest.mark.skipif(sys.platform != "linux", reason="process isolation is for Linux")
@pytest.mark.parametrize("values", [7, 1 << 20])
def test_records_of_worker_processes_are_the_same(model: mpool.Model, llama: Path, values: int) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 4}
    prompts = ["A cat sat on", "A cat sat on a mat " * 12, "A cat sat on a mat " * 12]
    with mpool.debug.capture(values=values) as here, mpool.debug.capture(values=values) as there, mpool.Pool() as pool:
        isolated = pool.load(llama, isolation="process")
        for number, prompt in enumerate(prompts):
            one = model.generate(prompt, capture=here.job(str(number)), **options)
            other = isolated.generate(prompt, capture=there.job(str(number)), **options)
            assert one.token_ids == other.token_ids
    assert here.records() == there.records() and len(here.records()) > 100 and there.dropped == 0


# ---- comparing -------------------------------------------------------------------------------------------------------

def record(token: int, checkpoint: str, *values: float | None, job: str = "1", shape: int = 8,
           team: str = "mpool") -> CaptureRecord:
    return CaptureRecord(checkpoint, team, token, job, "float32", (shape,), values)


def pair(*apart: float | None) -> tuple[list[CaptureRecord], list[CaptureRecord]]:
    """Return two captures with these differences, one per stage."""
    zero = [record(0, f"layer.{at}", 0.0, 0.0) for at in range(len(apart))]
    return zero, [record(0, f"layer.{at}", 0.0, x, job="x", team="other") for at, x in enumerate(apart)]


@pytest.mark.parametrize("apart, grade", [(0.0, "exact"), (1e-5, "exact"), (-2e-5, "close"), (1e-3, "close"),
                                          (1.1e-3, "acceptable"), (0.1, "acceptable"), (0.11, "apart"), (1e9, "apart"),
                                          (None, "apart")])
def test_grades(apart: float | None, grade: str) -> None:
    found = mpool.debug.compare_captures(*pair(0.0, apart, 0.0))
    assert found.grade == grade and [row.grade for row in found.differences] == ["exact", grade, "exact"]
    if grade != "exact":
        assert found.worst.checkpoint == "layer.1"
        assert found.worst.mean == found.worst.most / 2 and found.mean == found.worst.most / 6
        departs = found.departs()
        assert departs is not None and (departs.token_idx, departs.checkpoint) == (0, "layer.1")
    assert found.departs("apart") is None
    assert (found.departs("close") is None) == (grade in ("exact", "close"))


def test_departs_returns_the_first_record_by_token_and_stage() -> None:
    a = [record(token, stage, 0.0) for token in (0, 1) for stage in ("embedding", "layer.0", "logits")]
    b = [record(token, stage, 1e-4 * (token == 1 and stage == "layer.0") + 0.01 * (token + 1) * (stage == "logits"))
         for token in (0, 1) for stage in ("embedding", "layer.0", "logits")]
    found = mpool.debug.compare_captures(a, b)
    assert [(row.token_idx, row.checkpoint) for row in (found.departs("exact"), found.departs("close"), found.worst)
            if row is not None] == [(0, "logits"), (0, "logits"), (1, "logits")]
    assert mpool.debug.compare_captures(a, b, tokens=1).worst.most == pytest.approx(0.01)
    same = mpool.debug.compare_captures([record(0, "norm", None, 1.0)], [record(0, "norm", None, 1.0)])
    assert same.grade == "exact"


@pytest.mark.parametrize("change, said", [
    (lambda rows: rows[:-1], "the second has no layer.2 of token 0"),
    (lambda rows: [*rows, record(1, "layer.0", 0.0, 0.0, job="x")], "the first has no layer.0 of token 1"),
    (lambda rows: [*rows, rows[1]], "the second capture has layer.1 of token 0 of job 'x' twice"),
    (lambda rows: [*rows, rows[0]], "the first has no layer.0 of token 0 of job 'x', request 2"),
    (lambda rows: [*rows[:-1], record(0, "layer.2", 0.0, job="x")], "layer.2 of token 0 .* has 2 values"),
    (lambda rows: [*rows[:-1], record(0, "layer.2", 0.0, 0.0, job="x", shape=9)], "of shape"),
    (lambda rows: [*rows, record(0, "layer.0", 0.0, 0.0, job="y")], "of job '1'")])
def test_captures_that_do_not_match(change: Any, said: str) -> None:
    first, second = pair(0.0, 0.0, 0.0)
    with pytest.raises(mpool.errors.FormatError, match=said):
        mpool.debug.compare_captures(first, change(second))


def test_a_reused_job_id_is_another_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker's clients may reuse job ids. Tested with a folder, a file and records in memory."""
    from mpool.cli import main

    for name in ("runs", "run.jsonl"):
        with mpool.debug.capture(tmp_path / name) as capture:
            for job, value in (("a", 0), ("b", 1), ("a", 2)):
                capture._store(captures._RecordTable(job, 1, np.full((2, 3), value, np.float32), 0, 8, 8))
    rows = mpool.debug.read_capture(tmp_path / "runs")
    assert rows == mpool.debug.read_capture(tmp_path / "run.jsonl")
    for one in (tmp_path / "runs", tmp_path / "run.jsonl", rows):
        found = mpool.debug.compare_captures(one, rows, tokens=1)
        assert [(row.job_id, row.call, row.most) for row in found.differences[::3]] \
            == [("a", 1, 0), ("b", 1, 0), ("a", 2, 0)]
    moved = [*rows[:-1], CaptureRecord(**{**json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1]),
                                          "shape": (8,), "values": (2.5,)})]
    departs = mpool.debug.compare_captures(rows, moved).departs()
    assert departs is not None and (departs.job_id, departs.call, departs.checkpoint) == ("a", 2, "logits")
    with pytest.raises(mpool.errors.FormatError, match="the second has no embedding of token 0 of job 'a', request 2"):
        mpool.debug.compare_captures(rows, rows[:-6])
    assert main(["capture", "compare", str(tmp_path / "runs"), str(tmp_path / "runs")]) == 0
    assert "\na (request 2)  0 " in capsys.readouterr().out


def test_invalid_comparisons(tmp_path: Path) -> None:
    first, _ = pair(0.0)
    with pytest.raises(mpool.InvalidArgument, match="`second` must be a capture with records, got one without"):
        mpool.debug.compare_captures(first, [])
    with pytest.raises(mpool.InvalidArgument, match="`first` must be a capture with records, got one without"):
        mpool.debug.compare_captures([], first)
    for tokens in (0, -1, True, "3"):
        with pytest.raises(mpool.InvalidArgument, match="tokens"):
            mpool.debug.compare_captures(first, first, tokens=tokens)  # type: ignore[arg-type]
    with pytest.raises(mpool.InvalidArgument, match="an iterable of mpool.debug.CaptureRecord, got 3"):
        mpool.debug.compare_captures(first, [3])  # type: ignore[list-item]
    for second in (None, 3, np.array(3)):
        with pytest.raises(mpool.InvalidArgument, match="`second` must be a file, a folder, or an iterable of mpool"):
            mpool.debug.compare_captures(first, second)  # type: ignore[arg-type]
    for path, said in (("a\0", "NUL characters"), ("\ud800", "unpaired surrogates")):
        with pytest.raises(mpool.InvalidArgument, match=f"`path` must be a path without {said}"):
            mpool.debug.read_capture(path)
        with pytest.raises(mpool.InvalidArgument, match=f"`first` must be a path without {said}"):
            mpool.debug.compare_captures(path, first)
    with pytest.raises(mpool.InvalidArgument, match="grade"):
        mpool.debug.compare_captures(first, first).departs("good")  # type: ignore[arg-type]
    with pytest.raises(mpool.errors.FileError, match="cannot be read: .*none.jsonl: No such file or directory$"):
        mpool.debug.read_capture(tmp_path / "none.jsonl")


GOOD = {"checkpoint": "norm", "team": "x", "token_idx": 0, "job_id": "1", "dtype": "float16", "shape": [2, 3],
        "values": [1, None, -2.5]}


@pytest.mark.parametrize("name, value", [
    ("checkpoint", 3), ("checkpoint", ""), ("team", None), ("token_idx", -1), ("token_idx", 1.0), ("token_idx", True),
    ("token_idx", 2**31), ("job_id", "x" * 257), ("dtype", []), ("shape", 3), ("shape", [0]), ("shape", [True]),
    ("shape", [2] * 9), ("values", []), ("values", ["1"]), ("values", [True]), ("values", [0.0] * 7), ("values", {}),
    ("values", [10**400]), ("more", 1)])
def test_invalid_records(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    assert mpool.debug.read_capture(path)[0].values == (1.0, None, -2.5)
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, name: value}) + "\n")
    with pytest.raises(mpool.errors.FormatError, match="a.jsonl, line 2: not a capture record"):
        mpool.debug.read_capture(path)


@pytest.mark.parametrize("line, said", [
    (b"{", "the line is truncated"), (json.dumps(GOOD).encode()[:-1], "the line is truncated"),
    (b"[]\n", "the line must be an object with the fields checkpoint, team"),
    (b"[]", "the line must be an object with the fields checkpoint, team"),
    (b"\xff\n", "the line is not UTF-8"), (b"[" * 100_000 + b"\n", "the JSON is nested too deeply"),
    (b"\n", "the line is not JSON: Expecting value, column 1"),
    (b"9" * 5000 + b"\n", "a number has too many digits")])
def test_malformed_lines(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(mpool.errors.FormatError, match=f"a.jsonl, line 1: not a capture record: {said}"):
        mpool.debug.read_capture(tmp_path)


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD))
    assert [found.values for found in mpool.debug.read_capture(tmp_path)] == [(1.0, None, -2.5)] * 2


def test_the_writer_thread_polls_rarely_during_generation(model: mpool.Model) -> None:
    """The number of polls does not grow with every token."""
    with mpool.debug.capture() as capture:
        stream = model.generate("Once", max_tokens=2000, stream=True, capture=capture, **GREEDY)
        next(stream)
        writer = captures._instance
        assert writer is not None and len(writer._pending) == 1
        looks: list[float] = []
        sweep = writer._write_finished
        writer._write_finished = lambda: (looks.append(time.monotonic()), sweep())[1]  # type: ignore[method-assign]
        tokens = stream.result().usage.completion_tokens
        capture.flush()
        del writer._write_finished  # type: ignore[method-assign]
    assert tokens == 2000 and len(looks) < tokens / 4


# ---- the command -----------------------------------------------------------------------------------------------------

def test_the_command_captures_and_compares(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mpool.cli import main

    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    for path, job in ((a, "a"), (b, "b")):
        assert main(["capture", "-m", str(llama), "--prompt", "A cat", "--out", path, "--max-tokens", "3",
                     "--ignore-eos", "--job-id", job]) == 0
        assert f"wrote the records of 3 tokens to {path}" in capsys.readouterr().err
    assert main(["capture", "-m", str(llama), "--prompt", "A cat", "--out", str(tmp_path / "c.jsonl"),
                 "--max-tokens", "1", "--ignore-eos"]) == 0
    assert "wrote the records of 1 token to" in capsys.readouterr().err
    found = mpool.debug.read_capture(a)
    assert {record.job_id for record in found} == {"a"} and {record.token_idx for record in found} == {0, 1, 2}
    assert main(["capture", "compare", a, b, "--least", "exact"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["token", "checkpoint", "max", "mean", "grade"]
    assert said[1].split() == ["0", "embedding", "0", "0", "exact"]
    assert said[-1] == f"exact: max 0, mean 0, {len(found)} records" and len(said) == len(found) + 3
    lines = [json.loads(line) for line in Path(b).read_text().splitlines()]
    lines[-2]["values"][3] += 0.05
    Path(b).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["capture", "compare", a, b]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-3:-1] == [f"first difference that is not {grade}: norm of token 2, by 0.05"
                           for grade in ("exact", "close")]
    assert main(["capture", "compare", a, b, "--least", "close", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["grade"] == "acceptable" and told["departs"]["checkpoint"] == "norm"
    assert main(["capture", "compare", a, b, "--least", "exact", "--tokens", "2"]) == 0
    capsys.readouterr()
