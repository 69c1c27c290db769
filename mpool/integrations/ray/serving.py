"""The Ray Serve application: a front, and replicas with pools behind it."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ._share import connect  # isort: skip - before Ray is imported

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from ...checks import integer, one_of, real, refuse, shown, unknown_option
from ...config import MAX_QUEUE_CAPACITY, PoolConfig
from ...durations import seconds_of
from ...errors import InvalidArgument, SpawnFailed
from ...names import COMPUTE, KV_DTYPES, WEIGHTS
from ...pool import Pool
from ...records import logger
from ...server.models import Models, read_refs, split_adapter
from ...server.option_table import OPTIONS, convert_text
from ...server.serving import listen
from ...server.settings import Settings, token_of
from . import routing
from .front import Front
from .pools import Pools
from .proxy import ENVIRONMENT

#: Records that an operator needs also without ``-v``.
notices = logger("mpool.serve")
#: Name of the application.
NAME = "mpool"
#: Seconds between two reports of a replica, seconds over which the number of requests is averaged, and seconds for
#: which the load must be too high before replicas are added, or too low before they are removed.
_REPORT_PERIOD, _LOOK_BACK, _UPSCALE_DELAY, _DOWNSCALE_DELAY = 1.0, 15.0, 10.0, 300.0


@dataclass(frozen=True)
class Plan:
    """The models to serve and the number of replicas.

    Attributes:
        models: keys, paths or references, each also as ``NAME=REF``, like ``mpool serve --model``.
        only: True: do not serve the downloaded models of the catalogue.
        load: True: load the models before the first request.
        compute: compute type, see :func:`mpool.embed`.
        offline: see :class:`mpool.PoolConfig`.
        replicas: number of pools, each in a process of its own.
        max_replicas: maximum number of replicas. If larger than ``replicas``, the number follows the load: one replica
            per ``calls`` requests.
        calls: number of queued and running requests in a pool from which requests for its models also go to other
            pools.
        cpus: number of compute threads of a replica, and of CPUs that Ray reserves for it.
        memory_mb: memory of a replica in MiB; 0: the machine's memory for pools, divided in proportion to
            ``cpus`` and Ray's CPUs.
        fronts: number of processes that receive requests; 0: one per node of the cluster, and at least two.
        settings: address, clients and limits.
        weights: see :class:`mpool.PoolConfig`; with ``"mapped"``, the replicas of a machine share the pages of
            the files.
        adapters: adapters of the models, like ``mpool serve --adapter``; their paths must exist on every node.
        keep_alive, kv_dtype, queue_capacity: like the options of ``mpool serve``, for each replica.
        pool: further fields of :class:`mpool.PoolConfig`, for each replica.

    Raises:
        InvalidArgument: a value is not allowed.
    """

    models: tuple[str, ...] = ()
    only: bool = False
    load: bool = False
    compute: str = "auto"
    offline: bool | None = None
    replicas: int = 1
    max_replicas: int = 0
    calls: float = routing.CALLS
    cpus: int = 1
    memory_mb: int = 0
    fronts: int = 0
    settings: Settings = field(default_factory=Settings)
    weights: str = "auto"
    adapters: tuple[str, ...] = ()
    keep_alive: str = "5m"
    kv_dtype: str = "auto"
    queue_capacity: int | None = None
    pool: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        models = tuple(read_refs(self.models))
        for one in self.adapters:
            split_adapter(one, models)
        one_of("compute", self.compute, COMPUTE)
        one_of("weights", self.weights, WEIGHTS)
        one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        seconds_of(self.keep_alive, "keep_alive")
        for name, low, high in (("replicas", 1, 10_000), ("max_replicas", 0, 10_000), ("cpus", 1, 256),
                                ("memory_mb", 0, 1 << 40), ("calls", 0.1, 1e6), ("fronts", 0, 10_000),
                                ("queue_capacity", 1, MAX_QUEUE_CAPACITY)):
            value = getattr(self, name)
            if name == "queue_capacity" and value is None:
                continue
            number = real(value) if name == "calls" else integer(value)
            if number is None or not low <= number <= high:
                refuse(name, value, f"{'a number' if name == 'calls' else 'an integer'} from {low:,} to {high:,}")
            object.__setattr__(self, name, number)  # NumPy scalars become Python's numbers


def make(plan: Plan, nodes: int) -> serve.Application:
    """Return the application of a plan, for ``serve.run``.

    A front receives the requests from Ray Serve's proxy on its node, and checks Host, Origin and token as ``mpool
    serve`` does. The proxy limits the size of headers, and the number and duration of connections.

    Args:
        plan: the plan.
        nodes: number of nodes of the cluster. The fronts are spread evenly over them.
    """
    settings = plan.settings
    scaled: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.max_replicas > plan.replicas:
        scaled = {"autoscaling_config": AutoscalingConfig(
            min_replicas=plan.replicas, max_replicas=plan.max_replicas, upscale_delay_s=_UPSCALE_DELAY,
            downscale_delay_s=_DOWNSCALE_DELAY, look_back_period_s=_LOOK_BACK,
            policy=AutoscalingPolicy(policy_function=routing.CallsPolicy, policy_kwargs={"calls": plan.calls}))}
    pools = serve.deployment(Pools).options(
        name="Pools", ray_actor_options={"num_cpus": plan.cpus}, max_ongoing_requests=settings.max_connections,
        graceful_shutdown_timeout_s=settings.grace + 5.0, health_check_period_s=5.0, max_constructor_retry_count=3,
        request_router_config=RequestRouterConfig(request_router_class=routing.WarmRouter,
                                                  request_router_kwargs={"calls": plan.calls},
                                                  request_routing_stats_period_s=_REPORT_PERIOD), **scaled)
    # only the front has the token: replicas trust the front
    replica = pools.bind(plan.models, not plan.only, plan.compute, replace(settings, token=None, host="127.0.0.1"),
                         plan.load, plan.cpus, plan.memory_mb, plan.offline, plan.weights, plan.adapters,
                         plan.keep_alive, plan.kv_dtype, plan.queue_capacity, plan.pool)
    fronts = plan.fronts or max(2, nodes)
    front = serve.deployment(serve.ingress()(Front)).options(
        name="Front", num_replicas=fronts, max_replicas_per_node=math.ceil(fronts / nodes),
        ray_actor_options={"num_cpus": 0}, max_ongoing_requests=settings.max_connections,
        graceful_shutdown_timeout_s=settings.grace + 5.0, health_check_period_s=5.0)
    return front.bind(replica, settings)


def application(arguments: Mapping[str, str]) -> serve.Application:
    """Return the application for Ray's command ``serve run``: ``serve run mpool.integrations.ray:application
    models=KEY,NAME=REF replicas=2 port=8000``.

    Args:
        arguments: fields of :class:`Plan` and of :class:`mpool.server.settings.Settings`, and options of
            ``mpool serve`` for the pool, such as ``stall_timeout``; list items (``models``, ``adapters``) are separated
            by commas. ``host`` and ``port`` are the address of Ray Serve's proxy (default: 127.0.0.1 and 8000).
            ``token_file`` is the option of ``mpool serve``.

    Raises:
        InvalidArgument: an argument is unknown, or its value is not allowed.
    """
    given = {"port": "8000", **arguments}
    token_file = given.pop("token_file", None)
    settings = _read(Settings, {name: given.pop(name) for name in list(given) if name in _names(Settings)})
    pool = {OPTIONS[name].pool: convert_text(OPTIONS[name], given.pop(name), name) for name in list(given)
            if name in OPTIONS and OPTIONS[name].pool and name not in _names(Plan) | {"threads", "memory"}}
    PoolConfig(**pool)
    if token_file is not None:
        settings["token"] = token_of(token_file)
    return make(Plan(**_read(Plan, given), settings=Settings(**settings), pool=pool), _nodes())


def _nodes() -> int:
    """Return the number of live nodes of the cluster; 1 if this process is not connected to Ray."""
    return max(1, sum(node["Alive"] for node in ray.nodes())) if ray.is_initialized() else 1


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)} - {"settings", "token", "pool"}


def _read(kind: type, given: Mapping[str, str]) -> dict[str, Any]:
    """Convert strings to the types of a dataclass's fields."""
    found: dict[str, Any] = {}
    kinds = {field.name: str(field.type) for field in fields(kind)}
    for name, text in given.items():
        if name not in _names(kind):
            raise unknown_option(name, sorted(_names(Plan) | _names(Settings) | {"token_file"}), of="application")
        try:
            if kinds[name].startswith("tuple"):
                found[name] = tuple(part for part in str(text).split(",") if part)
            elif kinds[name].startswith("bool"):
                found[name] = {"true": True, "1": True, "false": False, "0": False}[str(text).lower()]
            else:
                found[name] = {"int": int, "float": float}.get(kinds[name].partition(" ")[0], str)(text)
        except (KeyError, ValueError):
            raise InvalidArgument(param=name, got=shown(text), allowed=f"of type {kinds[name]}") from None
    return found


def run(plan: Plan, address: str | None = None, ready: Callable[[str], object] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        plan: the models and replicas.
        address: address of a cluster (``"auto"``: the cluster of this machine or of ``RAY_ADDRESS``); None: start Ray,
            and stop it when this function returns.
        ready: function that is called with the URL once the server accepts requests.

    Raises:
        InvalidArgument: Ray has too few CPUs, or a model's name is invalid.
        FileError: the address is taken; only if this function starts Ray.
        SpawnFailed: the proxies or the replicas cannot be started; the message has Ray Serve's reason.
        MpoolError: a model is invalid, see :func:`mpool.register`; only if this function starts Ray.
    """
    settings = plan.settings
    if address is None:
        listen(settings).close()  # before files are read or downloaded
        with Pool(PoolConfig(offline=plan.offline)) as pool:  # an error raised in a replica would lose its class
            Models(pool, plan.models, not plan.only, plan.compute, plan.adapters)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    connect(address)
    try:
        available = int(ray.cluster_resources().get("CPU", 0))
        if available < plan.replicas * plan.cpus:
            refuse("replicas", plan.replicas, f"at most {available // plan.cpus}",
                   hint=f"Ray has {available} CPUs, and each replica needs {plan.cpus}")
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        try:
            serve.start(proxy_location="EveryNode", http_options={"host": settings.host, "port": settings.port})
            serve.run(make(plan, _nodes()), name=NAME, route_prefix="/")
        except (RuntimeError, TimeoutError, RayError) as error:
            raise SpawnFailed(f"Ray Serve cannot start the application: {error}") from None
        if ready is not None:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            ready(f"http://{host}:{settings.port}")
        stop.wait()
        notices.info("Stopping: waiting up to %g s for requests in the pools", settings.grace)
        if address is None:
            serve.shutdown()
        else:
            serve.delete(NAME)
    finally:
        ray.shutdown()


__all__ = ["NAME", "Plan", "application", "make", "run"]
