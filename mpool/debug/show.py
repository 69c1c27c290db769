"""Tables of the models in use, and the configuration of this build."""

from __future__ import annotations

import html
import platform
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, overload

from ..checks import one_of
from ..host.resources import typed
from ..records import one_line
from ..runtime import saturation
from ..stores import STORES, Store


def megabytes(count: int) -> str:
    """Format a number of bytes as megabytes (10**6 bytes); ``-`` for 0."""
    return f"{count / 1e6:,.0f} MB" if count else "-"


def age(seconds: float) -> str:
    """Format a duration with a suitable unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Snapshot of one model of a pool.

    Attributes:
        model: name of the model. A compute type other than ``"auto"`` is appended in parentheses.
        capability: capability of the model.
        state: ``"cold"`` (not in memory), ``"loading"``, ``"ready"``, ``"busy"``, ``"evicting"``, ``"failed"``.
        compute: compute type; None before the model is loaded.
        weights: how the weights are used now: ``"packed"``; ``"mapped"``: read from the file on every use;
            ``"packing"``: read from the file until they are packed, see ``PoolConfig.weights``. None before the model
            is loaded.
        experts: how the experts of a mixture-of-experts model are used now: ``"mapped"``: read from the file on every
            use; ``"packing"``: packed copies of a part of them are in memory; ``"packed"``: of all of them. None for
            models without experts, and before the model is loaded.
        thrashing: True while experts that were used before are read from the disk again, because the experts in use do
            not fit into memory. Always False for workers that are processes, which log it.
        kv_dtype: type of the keys and values in the KV cache: ``"int16"``, ``"float32"`` or ``"int8"``; None for models
            without one, and before the model is loaded.
        draft: reference of the draft model; None: the model has none.
        adapters: names of the adapters that requests can choose.
        isolation: where the workers run: ``"thread"``, or ``"process"`` (each in its own process).
        processes: ids of the worker processes.
        workers: number of workers that serve the model.
        busy: number of workers with an active request.
        dead: number of workers that were abandoned because they made no progress.
        queued: number of waiting requests.
        running: number of active requests.
        breaker: state of the circuit breaker: ``"closed"``; after worker faults ``"open"`` or ``"half-open"``.
        policy: policy that chooses the worker of a request.
        keep_alive: seconds that the idle model stays loaded; inf: forever.
        last_error: name of the error of the last failed request; empty: none failed.
        pinned: True after ``load(..., pin=True)``.
        model_bytes: bytes of the weights, which all workers share. Includes those of the draft model.
        engine_bytes: bytes of scratch and caches of the workers, as of their last steps.
        state_bytes: part of ``engine_bytes`` for the states and draft rows of running sequences; 0 for models without
            recurrent layers.
        snapshot_bytes: part of ``engine_bytes`` for snapshots: copies of states, from which later prompts continue.
        snapshots: number of snapshots.
        prefix_tokens: tokens of the prompts of completed requests that were found in the prefix cache, and with a
            snapshot if the model has recurrent layers, and therefore not computed.
        nodes: memory nodes (NUMA) of the workers; empty on a machine with one node.
        calls: number of accepted requests since the pool was created.
        errors: number of failed requests since the pool was created.
        idle_seconds: seconds since the last request.
        facts: architecture, context_length, parameters and further facts; of language models also ``kv_token_bytes``,
            the bytes of a token in the KV cache, and ``sequence_state_bytes``, those of the state of a sequence in
            recurrent layers. Empty before the model is loaded.
    """

    model: str
    capability: str
    state: str
    compute: str | None
    weights: str | None
    experts: str | None
    thrashing: bool
    kv_dtype: str | None
    draft: str | None
    adapters: tuple[str, ...]
    isolation: str
    processes: tuple[int, ...]
    workers: int
    busy: int
    dead: int
    queued: int
    running: int
    breaker: str
    policy: str
    keep_alive: float
    last_error: str
    pinned: bool
    model_bytes: int
    engine_bytes: int
    state_bytes: int
    snapshot_bytes: int
    snapshots: int
    prefix_tokens: int
    nodes: tuple[int, ...]
    calls: int
    errors: int
    idle_seconds: float
    facts: dict[str, Any]


class ModelTable(Sequence[ModelRow]):
    """Result of :func:`mpool.ps`: a sequence of rows, displayed as a table in a terminal and in a notebook."""

    _HEAD = ("MODEL", "CAPABILITY", "STATE", "COMPUTE", "KV", "WEIGHTS", "CACHES", "WORKERS", "RUNNING", "QUEUED",
             "REQUESTS", "REUSED", "IDLE")

    def __init__(self, rows: Iterable[ModelRow]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ModelRow: ...
    @overload
    def __getitem__(self, index: slice) -> ModelTable: ...
    def __getitem__(self, index: int | slice) -> ModelRow | ModelTable:
        return ModelTable(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def _on_nodes(self) -> bool:
        return any(row.nodes for row in self._rows)

    def _head(self) -> tuple[str, ...]:
        return (*self._HEAD, "NODES") if self._on_nodes() else self._HEAD

    def _cells(self) -> list[tuple[str, ...]]:
        last = [(",".join(map(str, row.nodes)) or "-",) if self._on_nodes() else () for row in self._rows]
        return [(row.model, row.capability, _state(row), row.compute or "-", row.kv_dtype or "-", _weights(row),
                 _caches(row), _workers(row), str(row.running), str(row.queued),
                 str(row.calls) + (f" ({row.errors} failed)" if row.errors else ""),
                 f"{row.prefix_tokens:,} tokens" if row.prefix_tokens else "-", _idle(row), *more)
                for row, more in zip(self._rows, last)]

    def __repr__(self) -> str:
        lines = [self._head(), *(tuple(map(one_line, line)) for line in self._cells())]
        widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{html.escape(name.capitalize())}</th>" for name in self._head())
        body = "".join("<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in line)
                       + "</tr>" for line in self._cells())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _state(row: ModelRow) -> str:
    return row.state + (", pinned" if row.pinned else "") \
        + ("" if row.breaker == "closed" else f", breaker {row.breaker}")


def _weights(row: ModelRow) -> str:
    return megabytes(row.model_bytes) + (f", {row.weights}" if row.weights in ("mapped", "packing") else "") \
        + (f", {megabytes(row.facts['expert_bytes'])} of experts {row.experts}" if row.experts else "") \
        + (", thrashing" if row.thrashing else "") + (", with draft" if row.draft else "") \
        + (f", {len(row.adapters)} adapter{'s' * (len(row.adapters) > 1)}" if row.adapters else "")


def _caches(row: ModelRow) -> str:
    return megabytes(row.engine_bytes) \
        + (f", {megabytes(row.snapshot_bytes)} of {row.snapshots} snapshot{'s' * (row.snapshots > 1)}"
           if row.snapshots else "")


def _idle(row: ModelRow) -> str:
    if row.state != "ready":
        return "-"
    return age(row.idle_seconds) + ("" if row.keep_alive == float("inf") else f" of {age(row.keep_alive)}")


def _workers(row: ModelRow) -> str:
    where = " processes" if row.isolation == "process" else ""
    return (f"{row.busy}/{row.workers}{where}" if row.workers else "-") + (f" ({row.dead} dead)" if row.dead else "")


def table(entries: Iterable[dict[str, Any]], isolated: Container[str] = (),
          drafts: Mapping[str, str] = MappingProxyType({}),
          adapters: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
          prefix_tokens: Mapping[str, int] = MappingProxyType({})) -> ModelTable:
    """Convert entries of the core's registry to a table.

    Args:
        entries: result of ``_core.Registry.entries``.
        isolated: keys of the models whose workers are processes.
        drafts: references of draft models, by the keys of their models.
        adapters: names of adapters, by the keys of their models.
        prefix_tokens: prompt tokens found in the prefix cache, by the keys of their models.
    """
    rows = []
    for entry in entries:
        facts = dict(entry.get("facts") or {})
        made: dict[str, Any] = {"model": entry["key"], "facts": facts,
                "compute": facts.get("compute"), "weights": facts.get("weights"),
                "experts": facts.get("experts"), "thrashing": bool(facts.get("thrashing")),
                "kv_dtype": facts.get("kv_dtype"), "draft": drafts.get(entry["key"]),
                "adapters": adapters.get(entry["key"], ()), "prefix_tokens": prefix_tokens.get(entry["key"], 0),
                "nodes": tuple(sorted({worker["node"] for worker in entry["worker"]} - {-1})),
                "isolation": "process" if entry["key"] in isolated else "thread",
                "processes": tuple(worker["process"] for worker in entry["worker"] if worker["process"])}
        rows.append(ModelRow(**made, **{name: entry[name] for name in ModelRow.__slots__ if name not in made}))
    return ModelTable(rows)


def limit_of(store: Store) -> str:
    """Return the limit of a store in words, such as ``512 MiB, --max-bodies``."""
    parts = [] if store.entries is None else [f"{store.entries:,}"]
    parts += [] if store.bytes is None else [f"{store.bytes >> 20:,} MiB"]
    return ", ".join(parts + [store.setting] * bool(store.setting))


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("numpy", "tokenizers", "huggingface_hub", "jinja2", "Pillow", "tqdm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
@typed
def show_config(mode: Literal["stdout", "dicts"] = "stdout") -> dict[str, Any] | None:
    """Show the configuration of this build and machine, for bug reports.

    It includes CPU, classes of cores, kernels, BLAS, compute threads, memory, options, versions, the limits of what the
    clients of a server can fill (``stores``), and the numbers of threads that saturate the memory when language models
    decode (``decode_threads``, by rows per pass; empty until fewer than all compute threads were measured to be
    faster).

    Args:
        mode: ``"stdout"``: print it; ``"dicts"``: return it as a dict, like ``numpy.show_config``.

    Raises:
        InvalidArgument: unknown mode.
    """
    from .. import _core

    one_of("mode", mode, ("stdout", "dicts"))
    found = dict(_core.config())
    found["decode_threads"] = saturation.shown()
    found["options"] = {name: {"value": value, "default": default, "meaning": meaning}
                        for name, value, default, meaning in _core.options()}
    found["versions"] = _versions()
    found["stores"] = {name: store._asdict() for name, store in STORES.items()}
    if mode == "dicts":
        return found
    print("\n".join(_lines(found)))
    return None


#: The reason for the number of compute threads in words.
_THREADS_FROM = {"MPOOL_THREADS": "MPOOL_THREADS", "cores": "one per core", "cpus": "one per CPU",
                 "quota": "the CPU quota of the control group"}


#: The origin of a number of threads for decoding in words.
_DECODE_FROM = {"measured": "measured by this process", "file": "measured by an earlier process"}


def _core_lines(found: dict[str, Any]) -> Iterable[str]:
    """One line per class of cores. Why a class has no threads matters only if cores decide the number of threads."""
    several = len(found["cores"]["classes"]) > 1
    for group in found["cores"]["classes"]:
        line = f"cores     {group['cores']} with {group['cpus']} CPUs"
        if several and group["cpu_list"]:
            line += f" ({group['cpu_list']})"
        if several:
            line += f", speed {group['speed']:.2f} by {found['cores']['source']}"
        if not group["used"] and found["threads_from"] == "cores":
            line += ": no threads, because another class is more than twice as fast"
        yield line


def _lines(found: dict[str, Any]) -> Iterable[str]:
    cpu, blas = found["cpu"], found["blas"]
    yield f"mpool {found['version']}, built with {found['compiler']}" \
        + (f", sanitizer: {found['sanitizer']}" if found["sanitizer"] else "")
    yield f"CPU       {cpu['name']}"
    yield f"features  {' '.join(cpu['features']) or 'none'}; in use: {cpu['level']}"
    yield f"threads   {found['compute_threads']}: {_THREADS_FROM[found['threads_from']]}"
    for rows, decode in found["decode_threads"].items():
        yield f"decode    {decode['threads']} threads saturate the memory in passes of {rows} " \
            + f"row{'s' * (rows != '1')}: {_DECODE_FROM[decode['from']]}"
    yield from _core_lines(found)
    for node in found["nodes"] if len(found["nodes"]) > 1 else ():
        yield f"node      {node['number']}: CPUs {node['cpus']}"
    yield f"memory    {found['memory_bytes'] / 1e6:,.0f} MB available to this process"
    yield f"BLAS      {blas['why'] or blas['core'] or 'none'}"
    by_variant: dict[str, list[str]] = {}
    for slot, variant in found["kernels"].items():
        by_variant.setdefault(variant, []).append(slot)
    for variant, slots in by_variant.items():
        yield f"kernels   {variant}: {', '.join(slots)}"
    for name, option in found["options"].items():
        value = option["value"] or "(empty)"
        yield f"option    {name}={value}" + ("" if option["value"] == option["default"] else "  (set)")
    for name, store in found["stores"].items():
        yield f"store     {name}: {limit_of(Store(**store))}"
    yield "versions  " + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
