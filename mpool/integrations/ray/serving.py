"""An application of Ray Serve: a front, and replicas of pools behind it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ._share import connect  # isort: skip - before Ray is imported

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from ...config import PoolConfig
from ...errors import InvalidArgument, SpawnFailed
from ...pool import Pool
from ...server.models import Models
from ...server.settings import Settings, token_of
from . import routing
from .front import Front
from .pools import Pools

#: Name of the application; seconds between reports of replicas; seconds over which calls are averaged, and for which
#: replicas may be too few or too many.
NAME, _REPORTS, _LOOK_BACK, _UP, _DOWN = "mpool", 1.0, 15.0, 10.0, 300.0


@dataclass(frozen=True)
class Plan:
    """What is to be served, and by how many.

    Attributes:
        models: as of ``mpool serve --model``: keys, paths or references, each also as ``NAME=REF``.
        only: no keys of the catalogue that are on the machine.
        load: load the models before the first request.
        compute, offline: see :func:`mpool.embed` and :class:`mpool.PoolConfig`.
        replicas: pools, each in a process of its own.
        max_replicas: with more than ``replicas``, there are as many as the calls in their pools ask for: one for each
            ``calls``.
        calls: in a pool, those that wait and those that run, at which requests for its models go to others too.
        cpus: threads of a replica, and CPUs that Ray keeps for it.
        memory_mb: megabytes of a replica; 0: its share of the machine, as ``cpus`` are of the CPUs that Ray has there.
        settings: where, for whom, how much.

    Raises:
        InvalidArgument: a number is out of range.
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
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for name, low, high in (("replicas", 1, 10_000), ("max_replicas", 0, 10_000), ("cpus", 1, 256),
                                ("memory_mb", 0, 1 << 40), ("calls", 0.1, 1e6)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise InvalidArgument(f"{name} is {value!r}, allowed: {low} to {high}")


def make(plan: Plan) -> serve.Application:
    """The application of a plan, to be run by ``serve.run``.

    The front takes requests at the address of Ray Serve's proxy, and checks Host, Origin and token as ``mpool serve``
    does; sizes of heads, numbers of connections and the time that they take are the proxy's.
    """
    settings = plan.settings
    scaled: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.max_replicas > plan.replicas:
        scaled = {"autoscaling_config": AutoscalingConfig(
            min_replicas=plan.replicas, max_replicas=plan.max_replicas, upscale_delay_s=_UP, downscale_delay_s=_DOWN,
            look_back_period_s=_LOOK_BACK,
            policy=AutoscalingPolicy(policy_function=routing.CallsPolicy, policy_kwargs={"calls": plan.calls}))}
    pools = serve.deployment(Pools).options(
        name="Pools", ray_actor_options={"num_cpus": plan.cpus}, max_ongoing_requests=settings.max_connections,
        graceful_shutdown_timeout_s=settings.grace + 5.0, health_check_period_s=5.0, max_constructor_retry_count=3,
        request_router_config=RequestRouterConfig(request_router_class=routing.WarmRouter,
                                                  request_router_kwargs={"calls": plan.calls},
                                                  request_routing_stats_period_s=_REPORTS), **scaled)
    # the front's settings have the token; replicas take what the front passes on
    replica = pools.bind(plan.models, not plan.only, plan.compute, replace(settings, token=None, host="127.0.0.1"),
                         plan.load, plan.cpus, plan.memory_mb, plan.offline)
    front = serve.deployment(serve.ingress()(Front)).options(
        name="Front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=settings.max_connections,
        graceful_shutdown_timeout_s=settings.grace + 5.0)
    return front.bind(replica, settings)


def application(arguments: Mapping[str, str]) -> serve.Application:
    """For Ray's own command: ``serve run mpool.integrations.ray:application models=KEY,NAME=REF replicas=2 port=8000``.

    Args:
        arguments: fields of :class:`Plan` and of :class:`mpool.server.settings.Settings`; ``models`` and others that
            are lists with commas between; ``port`` and ``host`` are those of Ray Serve's proxy (8000 and 127.0.0.1,
            unless its configuration says otherwise); ``token_file`` as of ``mpool serve``.

    Raises:
        InvalidArgument: an argument is unknown, or its value is not allowed.
    """
    given = {"port": "8000", **arguments}
    token_file = given.pop("token_file", None)
    settings = _read(Settings, {name: given.pop(name) for name in list(given) if name in _names(Settings)})
    if token_file is not None:
        settings["token"] = token_of(token_file)
    return make(Plan(**_read(Plan, given), settings=Settings(**settings)))


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)} - {"settings", "token"}


def _read(kind: type, given: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a dataclass, from texts."""
    found: dict[str, Any] = {}
    kinds = {field.name: str(field.type) for field in fields(kind)}
    for name, text in given.items():
        if name not in _names(kind):
            raise InvalidArgument(f"{name} is no argument, allowed: "
                                  + ", ".join(sorted(_names(Plan) | _names(Settings) | {"token_file"})))
        try:
            if kinds[name].startswith("tuple"):
                found[name] = tuple(part for part in str(text).split(",") if part)
            elif kinds[name].startswith("bool"):
                found[name] = {"true": True, "1": True, "false": False, "0": False}[str(text).lower()]
            else:
                found[name] = {"int": int, "float": float}.get(kinds[name], str)(text)
        except (KeyError, ValueError):
            raise InvalidArgument(f"{name} is {text!r}, allowed: {kinds[name]}") from None
    return found


def run(plan: Plan, address: str | None = None, ready: Callable[[str], object] | None = None) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        plan: what is to be served.
        address: of a cluster (``"auto"``: the one of this machine or of ``RAY_ADDRESS``); None: Ray is started here,
            for as long as this runs.
        ready: called with the URL when requests are answered.

    Raises:
        InvalidArgument: the CPUs that Ray has are too few, or a model cannot be served by its name.
        SpawnFailed: the replicas cannot be started; what Ray Serve says of it is in the message.
        and what :func:`mpool.register` raises about a model, if Ray is started here.
    """
    settings = plan.settings
    if address is None:
        with Pool(PoolConfig(offline=plan.offline)) as pool:  # here errors say what is wrong
            Models(pool, plan.models, not plan.only, plan.compute)
    connect(address)
    try:
        there = int(ray.cluster_resources().get("CPU", 0))
        if there < plan.replicas * plan.cpus:
            raise InvalidArgument(f"{plan.replicas} replicas of {plan.cpus} CPUs are asked for; Ray has {there} CPUs")
        over = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: over.set())
        serve.start(http_options={"host": settings.host, "port": settings.port})
        try:
            serve.run(make(plan), name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise SpawnFailed(f"Ray Serve does not start: {error}") from None
        if ready is not None:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            ready(f"http://{host}:{settings.port}")
        over.wait()
        if address is None:
            serve.shutdown()
        else:
            serve.delete(NAME)
    finally:
        ray.shutdown()


__all__ = ["NAME", "Plan", "application", "make", "run"]
