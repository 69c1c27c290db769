"""The history of the pool: its rings, gaps and bounds, one sample's cost, and the route."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docmodels import cross_encoder
from servers import ask, server_idle, serving

import mpool  # noqa: E402
import msgspec  # noqa: E402 - servers.py skips the tests if it is not installed
from mpool.server.dashboard import SeriesResponse, UsableModels  # noqa: E402
from mpool.runtime.latency import BOUNDS, quantile, quantiles  # noqa: E402
from mpool.server.series import MODELS, RINGS, Series, columns  # noqa: E402
from waiting import until  # noqa: E402

TEXT: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path) -> Iterator[Any]:
    with serving([f"llama={llama}", f"bert={bert}"]) as made:
        yield made


class Clock:
    """A history of a pool that does not exist, with rows and a time that the test chooses."""

    def __init__(self) -> None:
        self.pool: Any = type("Pool", (), {"_closed": False, "_registry": None})()
        self.series = Series(self.pool)
        self.now = self.series._origin
        self.stats: dict[str, Any] = dict.fromkeys(("completed", "errors", "timeouts", "queue_full_rejections",
                                                    "circuit_rejections", "compute_threads_leased", "memory_used"), 0)
        self.rows: dict[str, dict[str, Any]] = {}

    def model(self, key: str, capability: str = "text_to_text") -> dict[str, Any]:
        row = {"key": key, "capability": capability, "units_in": 0, "units_out": 0, "rows": 0, "errors": 0, "queued": 0,
               "running": 0, "workers": 1, "model_bytes": 100, "engine_bytes": 10, "idle_seconds": 0.0,
               "latency": {"count": 0, "buckets": []}}
        return self.rows.setdefault(key, row)

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.series.add(self.stats, list(self.rows.values()), self.now)

    def points(self, step: int = 1, after: int = -1, model: str | None = None) -> dict[str, list[float | None]]:
        found = self.series.points(step, after)
        return columns(found["pool"] if model is None else found["models"][model])


def test_rates_are_those_of_the_counters() -> None:
    clock = Clock()
    row = clock.model("a")
    clock.tick(0)
    for second in range(20):
        clock.stats["completed"] += second
        clock.stats["timeouts"] += 1
        clock.stats["memory_used"] = 1000 + second
        row["rows"] += 7
        row["queued"] = second % 2
        row["latency"] = {"count": second, "buckets": [(1e-6 * 2**10, second)]}
        clock.tick()
    found = clock.points()
    assert found["requests"] == [float(second) for second in range(20)] and found["failed"] == [1.0] * 20
    assert found["memory"] == [float(1000 + second) for second in range(20)] and found["tokens"] == [7.0] * 20
    assert found["p50"] == [None] + [pytest.approx(1e-6 * 768, rel=1e-4)] * 19  # the middle of 512 to 1024 us
    model = clock.points(model="a")
    assert model["tokens"] == [7.0] * 20 and model["memory"] == [110.0] * 20 and model["workers"] == [1.0] * 20
    assert model["queued"] == [0.0, 1.0] * 10 and model["images"] == [0.0] * 20
    ten = clock.points(10)  # the means of ten samples
    assert ten["requests"] == [4.5, 14.5] and ten["memory"] == [1004.5, 1014.5] and ten["tokens"] == [7.0, 7.0]
    assert clock.points(120)["requests"] == [] and clock.points(1, after=17)["requests"] == [18.0, 19.0]
    assert clock.points(1, after=19)["requests"] == clock.points(1, after=500)["requests"] == []


def test_quantiles_count_the_requests_of_their_point() -> None:
    clock = Clock()
    row = clock.model("a")
    clock.tick(0)
    buckets: dict[float, int] = {}
    for second in range(10):
        bound = 1e-6 * 2**(5 if second < 9 else 15)
        buckets[bound] = buckets.get(bound, 0) + 10
        row["latency"] = {"count": 10 * second, "buckets": sorted(buckets.items())}
        clock.tick()
    found = clock.points(10)
    assert 1.6e-5 < found["p50"][0] < 3.2e-5 and 1e-6 * 2**14 < found["p99"][0] < 1e-6 * 2**15
    assert all(1.6e-5 < value < 3.2e-5 for value in clock.points()["p99"][1:9])


def test_a_stall_keeps_the_time_axis() -> None:
    """A short stall gets the mean rate; a long one, such as a suspended machine, a gap."""
    clock = Clock()
    clock.tick(0)
    clock.stats["completed"] = 1
    clock.tick()
    clock.stats["completed"] = 9
    clock.tick(4)
    assert clock.points()["requests"] == [1.0, 2.0, 2.0, 2.0, 2.0]
    clock.tick(100)
    clock.stats["completed"] += 5
    clock.tick()
    found = clock.points()["requests"]
    assert len(found) == 106 and found[5:104] == [None] * 99 and found[104:] == [0.0, 5.0]
    assert len(clock.points(10)["requests"]) == 10 and clock.points(10)["requests"][1:] == [None] * 9
    clock.tick(10**6)
    assert {name: len(values) for step in RINGS for name, values in clock.points(step).items()}["requests"] == 360
    assert len(clock.points()["requests"]) == RINGS[1]


def test_a_new_model_begins_at_zero() -> None:
    clock = Clock()
    clock.model("old")["rows"] = 1000
    clock.tick(0)
    clock.model("new")["rows"] = 6
    clock.tick()
    assert clock.points(model="new")["tokens"] == [6.0] and clock.points(model="old")["tokens"] == [0.0]
    assert clock.points()["tokens"] == [6.0]


def test_counters_that_begin_again_give_no_negative_rates() -> None:
    clock = Clock()
    row = clock.model("a")
    row["rows"] = 1000
    clock.tick(0)
    row["rows"] = 5
    clock.tick()
    assert clock.points(model="a")["tokens"] == [0.0]


def test_memory_is_bounded() -> None:
    """The number of points and of models is bounded, also if models come and go for days."""
    clock = Clock()
    clock.tick(0)
    for second in range(400):
        clock.rows.clear()
        clock.model(f"model {second // 4}")["rows"] = second
        clock.tick()
    assert len(clock.series._models) == MODELS
    tracks = [clock.series._whole, *clock.series._models.values()]
    assert all(len(track.points[step]) <= size * len(track.names) for track in tracks for step, size in RINGS.items())
    total = sum(sys.getsizeof(points) for track in tracks for points in track.points.values())
    assert total < 4_000_000
    clock.rows.clear()
    for _ in range(3):
        clock.tick(86_400)
    assert not clock.series._models


def test_an_idle_model_takes_no_place() -> None:
    clock = Clock()
    for number in range(MODELS):
        clock.model(f"m{number}")
    clock.tick(0)
    for _ in range(40):
        for number in range(1, MODELS):
            clock.rows[f"m{number}"]["rows"] += 1
        clock.tick()
    clock.model("late")["idle_seconds"] = 1000.0
    clock.tick()
    assert "late" not in clock.series._models
    clock.rows["late"]["idle_seconds"] = 0.0
    clock.tick()
    assert "late" in clock.series._models and "m0" not in clock.series._models
    clock.tick()
    assert len(clock.points(model="late")["tokens"]) == 43 and clock.points(model="late")["tokens"][:41] == [None] * 41


def test_a_page_that_opens_later_sees_the_past(server: Any) -> None:
    pool, begin = server.state.pool, time.time()
    tokens = pool.generate("Hello", "llama", **TEXT).usage.total_tokens
    pool.embed(["one", "two"], "bert")
    with pytest.raises(mpool.InvalidArgument):
        pool.embed("x", "bert", dimensions=9999)
    server_idle(server)

    def seen() -> SeriesResponse:
        status, plain = ask(server, "/api/mpool/series")
        assert status == 200
        return msgspec.convert(plain, SeriesResponse)

    def complete() -> SeriesResponse | None:
        found = seen()
        counted = sum(value or 0 for value in found.pool["requests"]) >= 1.8
        return found if counted and {"llama", "bert"} <= {one.key for one in found.models} else None

    found = until(complete, 20, seen)
    models = {one.key: one for one in found.models}
    assert (found.step, found.steps, found.sizes) == (1, list(RINGS), list(RINGS.values()))
    assert found.started <= begin <= found.time + 1 and found.time <= time.time() + 1
    lists = [*found.pool.values(), *(values for one in found.models for values in one.values.values())]
    assert {*map(len, lists)} == {min(found.last + 1, RINGS[1])}
    assert models["bert"].capability == "text_embedding" and sum(v or 0 for v in models["bert"].values["tokens"]) > 1
    assert sum(v or 0 for v in models["llama"].values["tokens"]) >= tokens * 0.9 - 1
    assert [v for v in found.pool["memory"] if v][-1] == pytest.approx(pool.metrics()["memory_used"], rel=0.5)
    _, new = ask(server, f"/api/mpool/series?step=1&after={found.last}")
    assert len(new["pool"]["requests"]) == new["last"] - found.last
    _, slow = ask(server, "/api/mpool/series?step=120")
    assert slow["step"] == 120 and len(slow["pool"]["requests"]) == slow["last"] + 1
    for query in ("step=2", "step=", "step=1e0", "after=x", "after=-2", "after=" + "9" * 13):
        status, error = ask(server, f"/api/mpool/series?{query}")
        assert status == 400 and query.partition("=")[0] in error["error"], query


def test_the_history_has_no_paths_and_no_texts(server: Any, llama: Path) -> None:
    import json

    assert str(llama.parent) not in json.dumps(ask(server, "/api/mpool/series")[1])


def test_models_have_the_tasks_for_which_they_are_fit(llama: Path, bert: Path, tmp_path: Path) -> None:
    with serving([f"llama={llama}", f"bert={bert}", "digits-clip", "digits-llava", "digits-sd3",
                  f"ranker={cross_encoder(tmp_path / 'ranker')}"]) as made:
        found = msgspec.convert(ask(made, "/api/mpool/models")[1], UsableModels)
    tasks = {one.name: sorted(one.tasks) for one in found.models}
    assert tasks == {"llama": ["chat"], "bert": ["embed"], "digits-clip": ["embed", "embed_image"],
                     "ranker": ["rerank"], "digits-llava": ["chat", "vision"], "digits-sd3": ["image"]}
    assert found.token is False


@pytest.mark.parametrize("latency, share, microseconds", [
    ({0: 1}, 0.5, 0.5), ({0: 4}, 0.75, 0.75), ({1: 1, 4: 1}, 0.5, 2.0), ({1: 1, 4: 1}, 0.75, 12.0),
    ({4: 1, 1: 2, 2: 1}, 0.5, 2.0), ({1: 99, 5: 1}, 0.99, 2.0), ({1: 98, 5: 2}, 0.99, 24.0),
    ({len(BOUNDS): 1}, 0.5, 2.0**26)])
def test_quantiles(latency: dict[int, int], share: float, microseconds: float) -> None:
    """The requests of a bucket count as spread evenly between its bounds, as in Prometheus; the last has no bound."""
    assert quantile(latency, share) == pytest.approx(1e-6 * microseconds) and math.isnan(quantile({}, share))


def test_quantiles_are_within_the_shortest_and_the_longest_request() -> None:
    entry = {"min": 3e-6, "max": 100.0, "buckets": [(4e-6, 2), (math.inf, 1)]}
    assert quantiles(entry) == {"p50": pytest.approx(3.5e-6), "p99": 100.0}
    assert quantiles(entry | {"min": 3.9e-6})["p50"] == 3.9e-6
    assert quantiles({"min": 0.0, "max": 0.0, "buckets": []}) == {"p50": 0.0, "p99": 0.0}


def test_a_point_is_the_mean_of_its_readings() -> None:
    """The first reading has no values; the others of the first ten seconds are the first point of ten seconds."""
    clock = Clock()
    for value in range(22):
        clock.stats["memory_used"] = value
        clock.tick()
    assert clock.points(1)["memory"] == [None, *range(1, 22)] and clock.points(10)["memory"] == [5.0, 14.5]
