"""mpool on Ray, without a cluster: routing, autoscaling, and plans of deployments."""

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clientpackages import package

package("ray.serve", "ray")
httpx = pytest.importorskip("httpx")

from ray import serve  # noqa: E402

import mpool  # noqa: E402
from mpool.cli.parser import make_parser  # noqa: E402
from mpool.integrations.ray import _share, parquet, proxy, routing, serving  # noqa: E402
from mpool.integrations.ray.front import model_of  # noqa: E402
from mpool.integrations.ray.pools import Pools  # noqa: E402
from mpool.integrations.ray.serving import Plan, application, make  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402

from raycalls import SETTINGS, TOKEN  # noqa: E402


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster, Ray does not report a number of CPUs: use 2."""
    monkeypatch.setattr(_share, "_cpus_here", lambda: 2)


def replica(*models: str, calls: int = 0) -> SimpleNamespace:
    return SimpleNamespace(replica_id=object(), routing_stats={"models": list(models), "calls": calls})


def test_requests_go_to_replicas_with_their_model() -> None:
    warm, other, busy, new = replica("a"), replica("b"), replica("a", calls=8), replica()
    for _ in range(20):
        first, rest = routing.ranks([warm, other, busy, new], "a")
        assert first == [warm] and len(rest) == 2
    assert len(routing.ranks([other, busy, new], "a")) == 1  # no replica with the model has capacity: use any replica
    assert len(routing.ranks([warm, other], "")) == 1
    assert routing.ranks([], "a") == []
    assert model_of(b'{"messages": [], "model": "small:latest"}') == "small"
    for body in (b"", b"{", b"[1]", b'{"model": 3}', b'{"x": "model"}', b"[" * 100_000, b"\xff"):
        assert model_of(body) == ""


def test_suspects_are_avoided() -> None:
    """A replica is a suspect from its first failure until it accepts a request or ``SUSPICION`` seconds are over."""
    now = 100.0
    tracker = routing.RequestTracker(lambda: now)
    tracker.sent("1", "a")
    tracker.sent("2", "b")
    tracker.accepted("2", "b", "second")
    assert tracker.suspects() == set() and tracker.loads() == {"b": 1}
    now += routing.PATIENCE + 0.01
    assert tracker.suspects() == {"a"}
    tracker.accepted("1", "a", "first")
    assert tracker.suspects() == set() and tracker.loads() == {"a": 1, "b": 1}
    tracker.silent(["first", "unknown"])
    assert tracker.suspects() == {"a"}
    now += routing.SUSPICION + 0.01
    assert tracker.suspects() == set()
    tracker.failed("b")
    assert tracker.suspects() == {"b"}
    tracker.sent("3", "b")
    tracker.accepted("3", "b", "third")
    assert tracker.suspects() == set()
    for request in ("1", "2", "3"):
        tracker.completed(request)
    tracker.sent("4", "a")
    tracker.completed("4")  # Ray may report the end first
    tracker.accepted("4", "a", "fourth")
    assert tracker.loads() == {}
    tracker.sent("5", "a")
    now += routing.SUSPICION + 0.01
    assert tracker.suspects() == set()  # the request was given up long ago: try the replica again


def test_the_router_skips_a_replica_at_its_first_failure() -> None:
    now = 0.0
    router = routing.WarmRouter.__new__(routing.WarmRouter)
    router.initialize_state(4.0)
    router.tracker = routing.RequestTracker(lambda: now)
    one, two = replica("a"), replica("a")

    def choose(request: str, silent: tuple[str, ...] = ()) -> list[Any]:
        found = asyncio.run(router.choose_replicas([one, two], pending_request(request, silent)))
        assert all(len(group) == 1 for group in found)
        return [group[0] for group in found]

    def pending_request(request: str, silent: tuple[str, ...] = ()) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(internal_request_id=request, multiplexed_model_id="a"),
                               args=[{routing.ATTEMPT: f"attempt {request}", routing.SILENT: silent}, b""])

    first, other = choose("1")
    router.on_request_routed(pending_request("1"), first.replica_id, None)
    assert [choose(f"2{number}")[0] for number in range(20)] == [other] * 20  # it has fewer requests
    router.on_request_routed(pending_request("219"), other.replica_id, None)
    for number in range(20):
        router.on_request_completed(other.replica_id, f"2{number}")
    assert choose("3", ("attempt 1",)) == [other]
    router.on_request_completed(first.replica_id, "1")
    assert [choose(f"4{number}") for number in range(20)] == [[other]] * 20
    router.tracker.failed(other.replica_id)
    assert len(choose("suspects only")) == 2
    now += routing.SUSPICION + 1.0
    assert {choose(f"5{number}")[0].replica_id for number in range(50)} == {one.replica_id, two.replica_id}


def test_number_of_replicas_follows_the_requests() -> None:
    policy = routing.CallsPolicy(4)

    def wanted(depths: list[float], current: int = 2, target: int = 2) -> float:
        return policy(SimpleNamespace(aggregated_metrics={routing.DEPTH: dict(enumerate(depths))},
                                      current_num_replicas=current, target_num_replicas=target))[0]

    assert [wanted(depths) for depths in ([0, 0], [4, 0], [4, 1], [8, 9])] == [1, 1, 2, 5]
    assert wanted([9], current=2, target=3) == 3  # one replica has not reported yet
    assert wanted([], current=0, target=1) == 1


def test_pools_share_the_memory() -> None:
    whole = _share._limit()
    assert _share.config(1, 0, None).memory_bytes == whole // 2 and _share.config(2, 0, None).memory_bytes == whole
    config = _share.config(1, 300, True)
    assert (config.memory_bytes, config.threads, config.offline) == (300 << 20, 1, True)


class Deployments:
    """Stands in for ``serve.deployment``, and records the options and arguments of each deployment."""

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.targets: dict[str, Any] = {}

    def deployment(self, target: Any) -> Any:
        def options(name: str, **given: Any) -> Any:
            self.options[name], self.targets[name] = given, target

            def bind(*arguments: Any) -> str:
                self.arguments[name] = arguments
                return name

            return SimpleNamespace(bind=bind)

        return SimpleNamespace(options=options)


def deployed(plan: Plan, nodes: int, monkeypatch: pytest.MonkeyPatch) -> Deployments:
    """Return what the application of a plan consists of. Ray must accept the same plan."""
    assert isinstance(make(plan, nodes), serve.Application)
    found = Deployments()
    with monkeypatch.context() as patched:
        patched.setattr(serving.serve, "deployment", found.deployment)
        assert make(plan, nodes) == "Front"  # the deployment that gets the requests
    return found


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number of processes, their resources and limits."""
    settings = Settings(port=8000, token=TOKEN, host="0.0.0.0", max_connections=99, grace=7.0, max_tokens=5)
    found = deployed(Plan(("small=x", "y"), True, True, "int8", True, 3, calls=2.0, cpus=2, memory_mb=300,
                          settings=settings, weights="mapped", adapters=("small:one=z",), keep_alive="9m",
                          kv_dtype="int8", queue_capacity=8, pool={"stall_timeout": 9.0}), 1, monkeypatch)
    pools, front = found.options["Pools"], found.options["Front"]
    assert found.targets["Pools"] is Pools
    assert (pools["num_replicas"], pools["ray_actor_options"]) == (3, {"num_cpus": 2})
    assert pools["max_ongoing_requests"] == 99
    assert (pools["graceful_shutdown_timeout_s"], pools["health_check_period_s"]) == (12.0, 5.0)
    assert pools["max_constructor_retry_count"] == 3 and "autoscaling_config" not in pools
    router = pools["request_router_config"]
    assert router.get_request_router_class().__name__ == "WarmRouter"
    assert (router.request_router_kwargs, router.request_routing_stats_period_s) == ({"calls": 2.0}, 1.0)
    replica_settings = replace(settings, token=None, host="127.0.0.1")  # the front has checked the token
    assert found.arguments["Pools"] == (("small=x", "y"), False, "int8", replica_settings, True, 2, 300, True, "mapped",
                                        ("small:one=z",), "9m", "int8", 8, {"stall_timeout": 9.0})
    config = _share.config(2, 300, True, weights="mapped", keep_alive="9m", kv_dtype="int8", queue_capacity=8,
                           pool={"stall_timeout": 9.0})
    assert (config.keep_alive, config.kv_dtype, config.stall_timeout) == ("9m", "int8", 9.0)
    assert config.vision_queue_capacity == config.batch_queue_capacity == 8
    assert found.arguments["Front"] == ("Pools", settings)
    assert front == {"num_replicas": 2, "max_replicas_per_node": 2, "ray_actor_options": {"num_cpus": 0},
                     "max_ongoing_requests": 99, "graceful_shutdown_timeout_s": 12.0, "health_check_period_s": 5.0}
    for nodes, fronts, expected in ((1, 0, (2, 2)), (2, 0, (2, 1)), (5, 0, (5, 1)), (2, 3, (3, 2)), (4, 1, (1, 1))):
        front = deployed(Plan(fronts=fronts), nodes, monkeypatch).options["Front"]
        assert (front["num_replicas"], front["max_replicas_per_node"]) == expected


def test_plans_that_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = deployed(Plan(replicas=2, max_replicas=4, calls=3.0), 1, monkeypatch).options["Pools"]
    scaling = pools["autoscaling_config"]
    assert "num_replicas" not in pools
    assert (scaling.min_replicas, scaling.max_replicas, scaling.initial_replicas) == (2, 4, None)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s, scaling.look_back_period_s) == (10.0, 300.0, 15.0)
    assert scaling.policy.policy_kwargs == {"calls": 3.0}
    assert scaling.policy.policy_function.endswith("CallsPolicy")
    for fixed in (Plan(replicas=3), Plan(replicas=3, max_replicas=3), Plan(replicas=3, max_replicas=2)):
        pools = deployed(fixed, 1, monkeypatch).options["Pools"]
        assert pools["num_replicas"] == 3 and "autoscaling_config" not in pools


def test_plans_from_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``serve run`` and the command line give the plan that they describe."""
    token, made = tmp_path / "token", list[tuple[Plan, int]]()
    monkeypatch.setattr(serving, "make", lambda plan, nodes: made.append((plan, nodes)))
    application({"models": "all-MiniLM-L6-v2,small=./x", "replicas": "2", "max_replicas": "3", "only": "true",
                 "calls": "2.5", "cpus": "2", "fronts": "4", "load": "0", "max_body": "4096", "grace": "7.5",
                 "token_file": str(token), "host": "0.0.0.0", "adapters": "small:one=y,small:two=z",
                 "keep_alive": "-1", "kv_dtype": "int8", "queue_capacity": "8", "isolation": "process"})
    application({})
    assert made == [(Plan(("all-MiniLM-L6-v2", "small=./x"), True, replicas=2, max_replicas=3, calls=2.5, cpus=2,
                          fronts=4, settings=Settings("0.0.0.0", 8000, token.read_text().strip(), max_body=4096,
                                                      grace=7.5), adapters=("small:one=y", "small:two=z"),
                          keep_alive="-1", kv_dtype="int8", queue_capacity=8, pool={"isolation": "process"}), 1),
                    (Plan(settings=SETTINGS), 1)]
    for wrong, words in (({"modles": "x"}, "`modles` is not an option of application; did you mean `models`"),
                         ({"replicas": "two"}, "`replicas` must be of type int, got 'two'"),
                         ({"only": "perhaps"}, "`only` must be of type bool, got 'perhaps'"),
                         ({"replicas": "0"}, "`replicas` must be an integer from 1 to .*, got 0"),
                         ({"fronts": "-1"}, "`fronts` must be an integer from 0 to .*, got -1"),
                         ({"queue_capacity": "0"}, "`queue_capacity` must be an integer from 1 to .*, got 0"),
                         ({"keep_alive": "soon"}, "`keep_alive` must be "),
                         ({"kv_dtype": "int4"}, "`kv_dtype` must be "),
                         ({"host": "0.0.0.0"}, "`host` must be a loopback address unless there is a token"),
                         ({"token": "x" * 20}, "`token` is not an option of application")):
        with pytest.raises(mpool.InvalidArgument, match=words):
            application(wrong)
    ran = list[tuple[Any, ...]]()
    monkeypatch.setattr(serving, "run", lambda *given: ran.append(given[:2]))
    found = make_parser().parse_args(["ray", "serve", "-m", "small=x", "--replicas", "2", "--max-replicas", "5",
                                      "--cpus", "3", "--calls", "4", "--fronts", "6", "--memory-mb", "7", "--only",
                                      "--load", "--offline", "--max-body", "4096", "--address", "auto", "--weights",
                                      "mapped", "--adapter", "one=y", "--adapter", "small:two=z", "--keep-alive", "0",
                                      "--kv-dtype", "int8", "--queue-capacity", "9", "--isolation", "process"])
    assert found.run(found) == 0
    assert ran == [(Plan(("small=x",), True, True, "auto", True, 2, 5, 4.0, 3, 7, 6,
                         Settings(port=11435, max_body=4096), "mapped", ("one=y", "small:two=z"), "0", "int8", 9,
                         {"isolation": "process"}),
                    "auto")]
    found = make_parser().parse_args(["ray", "serve"])
    assert found.run(found) == 0 and ran[1:] == [(Plan(settings=Settings(port=11435)), None)]


def test_options_of_ray_embed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of `mpool ray embed` reaches `embed_parquet`, and without options the defaults do."""
    ran = list[tuple[Any, Any]]()
    monkeypatch.setattr(parquet, "embed_parquet", lambda *given, **options: ran.append((given, options))
                        or parquet.Embedded(1, 1, 0))
    for options in ([], ["--column", "c", "--output", "o", "-m", "x", "--cpus", "2", "--actors", "3",
                         "--memory-mb", "4", "--weights", "mapped", "--address", "auto", "-q", "--overwrite",
                         "--task", "query", "--compute", "float32", "--dimensions", "8", "--on-error", "null",
                         "--adapter", "a=b"],
                    ["--vectors", "sparse", "--max-active", "5", "--adapter", "own"]):
        found = make_parser().parse_args(["ray", "embed", "from", "to", *options])
        assert found.run(found) == 0
    plain = {"column": "text", "output": "embedding", "model": None, "cpus": 1, "actors": None, "memory_mb": 0,
             "weights": "auto", "address": None, "progress": True, "overwrite": False, "task": None, "compute": "auto",
             "adapters": None, "adapter": None}
    assert ran == [(("from", "to"), options) for options in (
        {**plain, "vectors": "dense", "dimensions": None, "on_error": "raise"},
        {"column": "c", "output": "o", "model": "x", "cpus": 2, "actors": 3, "memory_mb": 4, "weights": "mapped",
         "address": "auto", "progress": False, "overwrite": True, "task": "query", "compute": "float32",
         "vectors": "dense", "dimensions": 8, "on_error": "null", "adapters": {"a": "b"}, "adapter": "a"},
        {**plain, "vectors": "sparse", "max_active": 5, "adapter": "own"})]


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_proxies_are_on_every_node(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run`` starts proxies on all nodes with the plan's address, and one front per live node."""
    events = list[Any]()
    for name in proxy.ENVIRONMENT:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(serving, "connect", lambda given: events.append(("connect", given, dict(os.environ))))
    monkeypatch.setattr(serving, "make", lambda plan, nodes: ("application", nodes))
    monkeypatch.setattr(serving, "ray", SimpleNamespace(
        cluster_resources=lambda: {"CPU": 2.0}, is_initialized=lambda: True, shutdown=lambda: events.append("ended"),
        nodes=lambda: [{"Alive": True}, {"Alive": False}, {"Alive": True}]))
    for called in ("start", "run", "shutdown", "delete"):
        monkeypatch.setattr(serving.serve, called, partial(lambda called, *given, **options: events.append(
            (called, given, options)), called))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        serving.run(Plan(only=True, replicas=2, settings=Settings(host="::1", port=8123)), address,
                    lambda url: (events.append(url), signal.raise_signal(signal.SIGTERM)))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    connected, *rest = events
    assert connected[:2] == ("connect", address)
    # the variables are those of Ray's processes: on a cluster, they belong to `ray start`
    given = {name: connected[2].get(name) for name in proxy.ENVIRONMENT}
    assert given == (proxy.ENVIRONMENT if address is None else dict.fromkeys(proxy.ENVIRONMENT))
    assert rest == [
        ("start", (), {"proxy_location": "EveryNode", "http_options": {"host": "::1", "port": 8123}}),
        ("run", (("application", 2),), {"name": "mpool", "route_prefix": "/"}), "http://[::1]:8123",
        ("shutdown", (), {}) if address is None else ("delete", ("mpool",), {}), "ended"]


def test_fronts_take_the_bodies_that_servers_take() -> None:
    """A front keeps a body of the largest default size, so that it can send the request again."""
    assert proxy.MAX_BODY == Settings().max_body == 32 * 2**20
