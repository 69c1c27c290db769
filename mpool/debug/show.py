"""Tables for people: loaded models, and the configuration of this build."""

from __future__ import annotations

import html
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload


def megabytes(count: int) -> str:
    """A count of bytes for people, in units of 10**6."""
    return f"{count / 1e6:,.0f} MB" if count else "-"


def age(seconds: float) -> str:
    """A span of time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of a pool, at one moment.

    Attributes:
        key: its name; weights of another class of arithmetic than the automatic one have it in brackets.
        capability: capability of the model.
        state: ``"cold"`` (not in memory), ``"loading"``, ``"ready"``, ``"busy"``, ``"evicting"``, ``"failed"``.
        compute: class of arithmetic, once loaded.
        isolation: where its workers run: ``"thread"``, or ``"process"``: each in a process of its own.
        processes: ids of those processes.
        workers, busy, dead: that serve it; that have a call; set apart because they did not move.
        queued, running: calls that wait, and that run.
        breaker: ``"closed"``, or ``"open"`` or ``"half-open"`` after faults of its workers.
        policy: which worker takes a call.
        keep_alive: seconds that it stays without work; inf: for ever.
        last_error: name of the error of the last call that failed; empty: there was none.
        pinned: asked for by ``load(..., pin=True)``.
        model_bytes: weights, shared by all workers.
        engine_bytes: scratch and caches that its workers hold, as of their last steps.
        nodes: memory nodes (NUMA) that its workers are on; empty on a machine with one.
        calls, errors: since the pool was made.
        idle_seconds: since the last call.
        facts: architecture, context_length, parameters and the like, once loaded.
    """

    key: str
    capability: str
    state: str
    compute: str | None
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
    nodes: tuple[int, ...]
    calls: int
    errors: int
    idle_seconds: float
    facts: dict[str, Any]


class ModelTable(Sequence[ModelRow]):
    """Result of :func:`mpool.ps`: rows, displayed as a table in a terminal and in a notebook."""

    _HEAD = ("MODEL", "CAPABILITY", "STATE", "COMPUTE", "WEIGHTS", "WORKING", "WORKERS", "RUNNING", "QUEUED", "CALLS",
             "IDLE")

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
        return [(row.key, row.capability, _state(row), row.compute or "-", megabytes(row.model_bytes),
                 megabytes(row.engine_bytes), _workers(row), str(row.running), str(row.queued),
                 str(row.calls) + (f" ({row.errors} failed)" if row.errors else ""), _idle(row), *more)
                for row, more in zip(self._rows, last)]

    def __repr__(self) -> str:
        lines = [self._head(), *self._cells()]
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


def _idle(row: ModelRow) -> str:
    if row.state != "ready":
        return "-"
    return age(row.idle_seconds) + ("" if row.keep_alive == float("inf") else f" of {age(row.keep_alive)}")


def _workers(row: ModelRow) -> str:
    where = " processes" if row.isolation == "process" else ""
    return (f"{row.busy}/{row.workers}{where}" if row.workers else "-") + (f" ({row.dead} dead)" if row.dead else "")


def table(entries: Iterable[dict[str, Any]], isolated: Container[str] = ()) -> ModelTable:
    """Rows of the core's registry as a table.

    Args:
        entries: of ``_core.Registry.entries``.
        isolated: keys of those whose workers are processes.
    """
    rows = []
    for entry in entries:
        facts = dict(entry.get("facts") or {})
        made: dict[str, Any] = {"facts": facts, "compute": facts.get("compute"),
                "nodes": tuple(sorted({worker["node"] for worker in entry["worker"]} - {-1})),
                "isolation": "process" if entry["key"] in isolated else "thread",
                "processes": tuple(worker["process"] for worker in entry["worker"] if worker["process"])}
        rows.append(ModelRow(**made, **{name: entry[name] for name in ModelRow.__slots__ if name not in made}))
    return ModelTable(rows)


def _versions() -> dict[str, str]:
    import platform
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
def show_config(mode: Literal["stdout", "dicts"] = "stdout") -> dict[str, Any] | None:
    """Shows what this build runs on: CPU, kernels, BLAS, compute threads, memory, options, versions. For bug reports.

    Args:
        mode: ``"stdout"`` prints it; ``"dicts"`` returns it, as ``numpy.show_config`` does.

    Raises:
        InvalidArgument: another mode.
    """
    from .. import _core
    from ..errors import InvalidArgument

    if mode not in ("stdout", "dicts"):
        raise InvalidArgument(f"mode is {mode!r}, allowed: 'stdout', 'dicts'")
    found = dict(_core.config())
    found["lanes"] = found["compute_threads"]  # former name, kept for one release
    found["options"] = {name: {"value": value, "default": default, "meaning": meaning}
                        for name, value, default, meaning in _core.options()}
    found["versions"] = _versions()
    if mode == "dicts":
        return found
    print("\n".join(_lines(found)))
    return None


def _lines(found: dict[str, Any]) -> Iterable[str]:
    cpu, blas = found["cpu"], found["blas"]
    yield f"mpool {found['version']}, built with {found['compiler']}" \
        + (f", sanitizer: {found['sanitizer']}" if found["sanitizer"] else "")
    yield f"CPU       {cpu['name']}"
    yield f"features  {' '.join(cpu['features']) or 'none'}; in use: {cpu['level']}"
    yield f"threads   {found['compute_threads']}"
    for node in found["nodes"] if len(found["nodes"]) > 1 else ():
        yield f"node      {node['number']}: CPUs {node['cpus']}"
    yield f"memory    {found['memory_bytes'] / 1e6:,.0f} MB offered to this process"
    yield f"BLAS      {blas['core'] or 'none'}" + (f" ({blas['why']})" if blas["why"] else "")
    by_variant: dict[str, list[str]] = {}
    for slot, variant in found["kernels"].items():
        by_variant.setdefault(variant, []).append(slot)
    for variant, slots in by_variant.items():
        yield f"kernels   {variant}: {', '.join(slots)}"
    for name, option in found["options"].items():
        value = option["value"] or "(empty)"
        yield f"option    {name}={value}" + ("" if option["value"] == option["default"] else "  (set)")
    yield "versions  " + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
