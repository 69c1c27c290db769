"""Shares of the machine's limits: the work of a measure, and the probe's figures."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mpool.models
import tinymodels

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import limits, report  # noqa: E402
from benchmarks.probe import Frame  # noqa: E402
from benchmarks.record import Turn  # noqa: E402


def test_share_of_the_hardware_limit() -> None:
    """The share is computed from arithmetic by precision and threads, or from bytes read. It is None if the probe did
    not measure that limit."""
    frame = Frame({"read_1": 10.0, "read_2": 20.0, "fp32": 100.0, "bf16": 200.0}, {"read_2": 25.0}, 0.0)
    for measure, arithmetic, part in (({"operations": 2e9}, "float32", 0.1), ({"operations": 2e9}, "bfloat16", 0.05),
                                      ({"operations": 2e9}, "int8", None), ({"bytes": 5e8}, "int8", 0.2)):
        assert limits.share(measure, 10.0, frame, 2, arithmetic) == part
    assert limits.share({"bytes": 1.0}, 1.0, Frame(None, None, None), 2, "int8") is None
    state = {"round_trip_ns": 90.0, "read_2": 30.0, "fp32": 100.0}
    result = {"measures": {"mixed texts/s": 10.0}, "rss MB": 100.0}
    found = report.summary([Turn("embed", "mpool:float32", 0, result, Frame(state, state, 0.0))],
                           {"embed": {"mixed texts/s": {"operations": 1e9}}}, 2)
    assert found["embed"]["mixed texts/s"]["mpool:float32"]["limit"] == 0.05


def test_operations_and_bytes_are_counted(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Operations per text grow with its length, and generating a token reads every weight once."""
    paths = {"embed": str(tinymodels.cached(tmp_path_factory, "bert")),
             "generate": str(tinymodels.cached(tmp_path_factory, "llama"))}
    found = limits.work(paths, 48, [16, 32], [8])
    assert found["embed"]["short texts/s"]["operations"] < found["embed"]["long texts/s"]["operations"]
    found = found["generate"]
    assert found["pp16 tokens/s"]["operations"] < found["pp32 tokens/s"]["operations"]
    weights = sum(file.stat().st_size for file in Path(paths["generate"]).glob("*.safetensors"))
    assert 0.3 * weights < found["tg@8 tokens/s"]["bytes"] <= weights


def test_experts_count_as_often_as_rows_choose_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row multiplies two of four experts, whether a tensor has one expert or all. Biases and norms do not count."""
    shapes = {"token_embd.weight": (100, 8), "output.weight": (100, 8), "blk.0.attn_q.weight": (8, 8),
              "blk.0.attn_norm.weight": (8,), "blk.0.ffn_gate_inp.weight": (4, 8),
              "blk.0.ffn_up_exps.weight": (4, 16, 8), "blk.0.ffn_up_exps.bias": (4, 16),
              **{f"blk.0.ffn_down.{expert}.weight": (8, 16) for expert in range(4)}}
    tensors = [SimpleNamespace(name=name, shape=shape, nbytes=1000 * len(shape)) for name, shape in shapes.items()]
    spec = SimpleNamespace(tensors=tensors, architecture="a", kv={
        "a.block_count": 1, "a.embedding_length": 8, "a.expert_count": 4, "a.expert_used_count": 2})
    monkeypatch.setattr(mpool.models, "describe", lambda path: SimpleNamespace(spec=spec))
    found: dict[str, Any] = limits.work({"generate": "a"}, 0, [1], [8])["generate"]
    assert found["tg@8 tokens/s"]["bytes"] == 3 * 2000 + 3000 / 2 + 4 * 2000 / 2
    weights = 8 * 8 + 4 * 8 + 2 * 16 * 8 + 2 * 8 * 16
    assert found["pp1 tokens/s"]["operations"] == 2 * weights + 4 * 1 * 8 * 1
