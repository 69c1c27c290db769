"""Texts of ``mpool.ps()`` and ``mpool.show_config()`` (mpool/debug/show.py), column by column and line by line."""

import math
from typing import Any

import pytest

import mpool
from mpool.debug.show import ModelTable, _lines, age, megabytes, table
from mpool.stores import Store

from catalogues import row

DECODER: dict[str, Any] = {"compute": "int8", "kv_dtype": "int16", "weights": "packed"}
WORKERS = [{"node": 0, "process": 41}, {"node": 1, "process": 0}, {"node": -1, "process": 43}]


def cell(name: str, changes: dict[str, Any], **more: Any) -> str:
    """Text of one column for a model with these fields."""
    shown = table([row(**changes)], **more)
    return dict(zip(shown._head(), shown._cells()[0]))[name]


@pytest.mark.parametrize("count, text", [
    (0, "-"), (1, "0 MB"), (499_999, "0 MB"), (1_000_000, "1 MB"), (5_400_000, "5 MB"), (12_345_678_901, "12,346 MB")])
def test_megabytes(count: int, text: str) -> None:
    """A megabyte is 10**6 bytes."""
    assert megabytes(count) == text


@pytest.mark.parametrize("seconds, text", [
    (0.0, "0 s"), (119.0, "119 s"), (120.0, "2 min"), (7199.0, "120 min"), (7200.0, "2 h"), (90_000.0, "25 h")])
def test_ages(seconds: float, text: str) -> None:
    """Seconds up to 2 minutes, minutes up to 2 hours, then hours."""
    assert age(seconds) == text


@pytest.mark.parametrize("column, changes, text", [
    ("STATE", {}, "ready"),
    ("STATE", {"pinned": True}, "ready, pinned"),
    ("STATE", {"breaker": "open"}, "ready, breaker open"),
    ("STATE", {"state": "busy", "pinned": True, "breaker": "half-open"}, "busy, pinned, breaker half-open"),
    ("COMPUTE", {"facts": {}}, "-"),
    ("COMPUTE", {"facts": DECODER}, "int8"),
    ("KV", {}, "-"),
    ("KV", {"facts": DECODER}, "int16"),
    ("WEIGHTS", {}, "5 MB"),
    ("WEIGHTS", {"model_bytes": 0}, "-"),
    ("WEIGHTS", {"facts": DECODER}, "5 MB"),
    ("WEIGHTS", {"facts": {"weights": "mapped"}}, "5 MB, mapped"),
    ("WEIGHTS", {"facts": {"weights": "packing"}}, "5 MB, packing"),
    ("WEIGHTS", {"facts": {"experts": "packing", "expert_bytes": 3_000_000}}, "5 MB, 3 MB of experts packing"),
    ("WEIGHTS", {"facts": {"experts": "mapped", "expert_bytes": 9_000_000, "thrashing": True}},
     "5 MB, 9 MB of experts mapped, thrashing"),
    ("CACHES", {}, "-"),
    ("CACHES", {"engine_bytes": 2_000_000}, "2 MB"),
    ("CACHES", {"engine_bytes": 9_000_000, "snapshot_bytes": 4_000_000, "snapshots": 1}, "9 MB, 4 MB of 1 snapshot"),
    ("CACHES", {"engine_bytes": 9_000_000, "snapshot_bytes": 4_000_000, "snapshots": 2}, "9 MB, 4 MB of 2 snapshots"),
    ("WORKERS", {}, "0/1"),
    ("WORKERS", {"workers": 3, "busy": 2}, "2/3"),
    ("WORKERS", {"workers": 0}, "-"),
    ("WORKERS", {"workers": 2, "dead": 1}, "0/2 (1 dead)"),
    ("WORKERS", {"workers": 0, "dead": 3}, "- (3 dead)"),
    ("RUNNING", {"running": 4, "queued": 6}, "4"),
    ("QUEUED", {"running": 4, "queued": 6}, "6"),
    ("REQUESTS", {}, "3 (1 failed)"),
    ("REQUESTS", {"errors": 0}, "3"),
    ("IDLE", {}, "7 s of 5 min"),
    ("IDLE", {"keep_alive": math.inf}, "7 s"),
    ("IDLE", {"state": "busy"}, "-"),
    ("IDLE", {"state": "cold", "keep_alive": math.inf}, "-")])
def test_columns(column: str, changes: dict[str, Any], text: str) -> None:
    """Each column states its field, and a dash where there is nothing to state."""
    assert cell(column, changes) == text


def test_columns_of_processes_drafts_and_adapters() -> None:
    """These come from the pool, not from the core's registry."""
    assert cell("WORKERS", {"workers": 2, "busy": 1}, isolated={"m"}) == "1/2 processes"
    assert cell("WORKERS", {"workers": 2}, isolated={"other"}) == "0/2"
    assert cell("WORKERS", {"workers": 0}, isolated={"m"}) == "-"
    assert cell("REUSED", {}, prefix_tokens={"m": 15_040}) == "15,040 tokens" and cell("REUSED", {}) == "-"
    assert cell("WEIGHTS", {}, drafts={"m": "small"}) == "5 MB, with draft"
    assert cell("WEIGHTS", {}, drafts={"other": "small"}, adapters={"other": ("a",)}) == "5 MB"
    assert cell("WEIGHTS", {}, adapters={"m": ("a",)}) == "5 MB, 1 adapter"
    assert cell("WEIGHTS", {}, drafts={"m": "small"}, adapters={"m": ("a", "b")}) == "5 MB, with draft, 2 adapters"


def test_fields_of_a_row() -> None:
    """A row has the entry's fields; those of facts and workers are separate attributes."""
    plain, = table([row()])
    assert (plain.compute, plain.weights, plain.experts, plain.thrashing, plain.kv_dtype) == (
        "float32", None, None, False, None)
    assert (plain.draft, plain.adapters, plain.isolation, plain.nodes, plain.processes) == (None, (), "thread", (), ())
    full, = table([row(worker=WORKERS, facts={**DECODER, "experts": "packed", "thrashing": 1})], {"m"},
                  {"m": "small"}, {"m": ("a", "b")})
    assert (full.compute, full.weights, full.experts, full.thrashing, full.kv_dtype) == (
        "int8", "packed", "packed", True, "int16")
    assert (full.draft, full.adapters, full.isolation) == ("small", ("a", "b"), "process")
    assert (full.nodes, full.processes) == ((0, 1), (41, 43))


def test_table_is_aligned_and_has_no_trailing_spaces() -> None:
    """Each column is as wide as its widest cell, and two spaces separate columns."""
    shown = table([row(), row(key="a longer name", state="cold", workers=0, calls=0, errors=0)])
    assert repr(shown).splitlines() == [
        "MODEL          CAPABILITY      STATE  COMPUTE  KV  WEIGHTS  CACHES  WORKERS  RUNNING  QUEUED  REQUESTS"
        "      REUSED  IDLE",
        "m              text_embedding  ready  float32  -   5 MB     -       0/1      0        0       3 (1 failed)"
        "  -       7 s of 5 min",
        "a longer name  text_embedding  cold   float32  -   5 MB     -       -        0        0       0"
        "             -       -"]
    assert repr(table([])) == "  ".join(ModelTable._HEAD)


def test_column_of_nodes() -> None:
    """With several memory nodes, a last column lists those of each model."""
    shown = table([row(worker=WORKERS), row(key="other")])
    assert shown._head() == (*ModelTable._HEAD, "NODES")
    assert [cells[-1] for cells in shown._cells()] == ["0,1", "-"]
    assert table([row()])._head() == ModelTable._HEAD and len(table([row()])._cells()[0]) == len(ModelTable._HEAD)


def test_a_table_is_a_sequence() -> None:
    """An index returns a row, a slice a table."""
    shown = table([row(key="a"), row(key="b"), row(key="c")])
    assert len(shown) == 3 and len(table([])) == 0 and not table([])
    assert shown[1].model == "b" and isinstance(shown[1:], ModelTable)
    assert [one.model for one in shown[1:]] == ["b", "c"]


def test_html_of_a_table() -> None:
    """Notebooks show a head and one line per model."""
    html = table([row(key="a & b")])._repr_html_()
    heads = "".join(f"<th style='text-align:left'>{name.capitalize()}</th>" for name in ModelTable._HEAD)
    cells = "".join(f"<td style='text-align:left'>{text}</td>" for text in (
        "a &amp; b", "text_embedding", "ready", "float32", "-", "5 MB", "-", "0/1", "0", "0", "3 (1 failed)", "-",
        "7 s of 5 min"))
    assert html == f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"


FAST = {"cores": 4, "cpus": 8, "cpu_list": "0-7", "speed": 1.0, "used": True}
SLOW = {"cores": 8, "cpus": 8, "cpu_list": "8-15", "speed": 0.59, "used": True}
ISLAND = {"cores": 2, "cpus": 2, "cpu_list": "16-17", "speed": 0.42, "used": False}


def config(**changes: Any) -> dict[str, Any]:
    """A configuration as ``show_config("dicts")`` returns it."""
    return {"version": "1.2.3", "compiler": "gcc 13", "sanitizer": "", "compute_threads": 8, "memory_bytes": 16e9,
            "cpu": {"name": "A CPU", "features": ["avx2", "fma"], "level": "avx2"},
            "nodes": [{"number": 0, "cpus": "0-7"}], "threads_from": "cores",
            "cores": {"packages": 1, "source": "highest_perf", "classes": [FAST]}, "decode_threads": {},
            "blas": {"why": "", "core": "Haswell"},
            "kernels": {"dot": "avx2", "norm": "plain", "axpy": "avx2"},
            "options": {"MPOOL_A": {"value": "1", "default": "1"}}, "versions": {"python": "3.11", "numpy": "2.0"},
            "stores": {"a": Store("texts", 1000, 2 << 20, "--max-a", "")._asdict(),
                       "b": Store("texts", None, None, "MPOOL_B", "")._asdict()}, **changes}


def test_lines_of_a_configuration() -> None:
    """One node is not worth a line; kernels are listed by variant."""
    assert list(_lines(config())) == [
        "mpool 1.2.3, built with gcc 13", "CPU       A CPU", "features  avx2 fma; in use: avx2",
        "threads   8: one per core", "cores     4 with 8 CPUs", "memory    16,000 MB available to this process",
        "BLAS      Haswell", "kernels   avx2: dot, axpy",
        "kernels   plain: norm", "option    MPOOL_A=1", "store     a: 1,000, 2 MiB, --max-a", "store     b: MPOOL_B",
        "versions  python 3.11, numpy 2.0"]


def test_lines_of_classes_of_cores() -> None:
    """Each class has a line with its CPUs and speed. Unused classes say so, if cores decide the number of threads."""
    cores = {"packages": 1, "source": "highest_perf", "classes": [FAST, SLOW, ISLAND]}
    shown = [line.split(None, 1)[1] for line in _lines(config(cores=cores)) if line.startswith("cores")]
    assert shown == [
        "4 with 8 CPUs (0-7), speed 1.00 by highest_perf", "8 with 8 CPUs (8-15), speed 0.59 by highest_perf",
        "2 with 2 CPUs (16-17), speed 0.42 by highest_perf: no threads, because another class is more than twice as "
        "fast"]
    asked = [line for line in _lines(config(cores=cores, threads_from="MPOOL_THREADS")) if line.startswith("cores")]
    assert asked[-1].endswith("highest_perf")
    levels = [{**FAST, "cpu_list": ""}, {**SLOW, "cpu_list": ""}]  # macOS does not number its CPUs
    assert "cores     4 with 8 CPUs, speed 1.00 by perflevel" in list(_lines(config(
        cores={"packages": 1, "source": "perflevel", "classes": levels})))


@pytest.mark.parametrize("changes, line", [
    ({"threads_from": "quota"}, "threads   8: the CPU quota of the control group"),
    ({"threads_from": "cpus", "cores": {"packages": 1, "source": "equal", "classes": []}}, "threads   8: one per CPU"),
    ({"decode_threads": {"1": {"threads": 4, "from": "measured"}}},
     "decode    4 threads saturate the memory in passes of 1 row: measured by this process"),
    ({"decode_threads": {"2-3": {"threads": 5, "from": "file"}}},
     "decode    5 threads saturate the memory in passes of 2-3 rows: measured by an earlier process"),
    ({"sanitizer": "address"}, "mpool 1.2.3, built with gcc 13, sanitizer: address"),
    ({"cpu": {"name": "A CPU", "features": [], "level": "plain"}}, "features  none; in use: plain"),
    ({"nodes": [{"number": 0, "cpus": "0-3"}, {"number": 1, "cpus": "4-7"}]}, "node      1: CPUs 4-7"),
    ({"blas": {"why": "MPOOL_BLAS is 0", "core": "Haswell"}}, "BLAS      MPOOL_BLAS is 0"),
    ({"blas": {"why": "", "core": ""}}, "BLAS      none"),
    ({"options": {"MPOOL_A": {"value": "2", "default": "1"}}}, "option    MPOOL_A=2  (set)"),
    ({"options": {"MPOOL_A": {"value": "", "default": ""}}}, "option    MPOOL_A=(empty)"),
    ({"options": {"MPOOL_A": {"value": "", "default": "1"}}}, "option    MPOOL_A=(empty)  (set)")])
def test_a_line_of_a_configuration(changes: dict[str, Any], line: str) -> None:
    """Lines that depend on the machine and on the environment."""
    assert line in list(_lines(config(**changes)))


def test_mode_of_show_config() -> None:
    """An unknown mode is refused with the allowed ones, and nothing is printed."""
    with pytest.raises(mpool.InvalidArgument) as caught:
        mpool.show_config("dict")  # type: ignore[call-overload]
    assert str(caught.value).startswith('`mode` must be') and caught.value.param == "mode"
    assert "stdout" in str(caught.value) and "dicts" in str(caught.value)
    found = mpool.show_config("dicts")
    assert all(set(option) == {"value", "default", "meaning"} for option in found["options"].values())
    assert set(found["versions"]) == {"python", "numpy", "tokenizers", "huggingface_hub", "jinja2", "Pillow", "tqdm"}
