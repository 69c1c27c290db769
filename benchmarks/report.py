"""From the turns of a run to medians, ratios and tables."""

from __future__ import annotations

import statistics
from typing import Any

#: Ends of measures of which less is better.
LESS = (" ms", " s", " MB")


def kept(turns: list[Any]) -> list[Any]:
    """Turns that count: undisturbed ones; of a topic without any, all, and the table says so."""
    good = [turn for turn in turns if turn.disturbed is None]
    without = {turn.topic for turn in turns} - {turn.topic for turn in good}
    return good + [turn for turn in turns if turn.topic in without]


def summary(turns: list[Any]) -> dict[str, Any]:
    """Topic -> measure -> engine -> median, and the median over rounds of the ratio of mpool to it: above 1, mpool is
    better."""
    found: dict[str, Any] = {}
    counted = kept(turns)
    for topic in dict.fromkeys(turn.topic for turn in turns):
        mine = [turn for turn in counted if turn.topic == topic]
        table: dict[str, Any] = {}
        for turn in mine:
            for name, value in {**turn.result["measures"], "memory MB": turn.result["rss MB"]}.items():
                table.setdefault(name, {}).setdefault(turn.engine, []).append((turn.round, value))
        found[topic] = {"rounds": len({turn.round for turn in mine}), "disturbed": any(turn.disturbed for turn in mine),
                        "measures": {name: _row(name, values) for name, values in table.items()}}
    return found


def _row(name: str, values: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    ours = dict(values.get("mpool", ()))
    for engine, pairs in values.items():
        row[engine] = {"median": statistics.median(value for _, value in pairs)}
        if engine != "mpool" and ours:
            ratios = [value / ours[number] if name.endswith(LESS) else ours[number] / value
                      for number, value in pairs if number in ours]
            if ratios:
                row[engine]["ratio"] = statistics.median(ratios)
    return row


def agreement(turns: list[Any]) -> dict[str, Any]:
    """That all computed the same: least cosine to sentence-transformers' fp32, tokens alike from the start."""
    import numpy as np

    found: dict[str, Any] = {}
    vectors = {turn.engine: np.array(turn.result["vectors"]) for turn in turns if "vectors" in turn.result}
    reference = vectors.get("sentence-transformers")
    if reference is not None:
        found["least cosine to sentence-transformers"] = {
            engine: round(float(_cosine(rows, reference).min()), 6) for engine, rows in vectors.items()}
    first = {turn.engine: turn.result["first"] for turn in turns if "first" in turn.result}
    if "llama-cpp" in first:
        found["greedy tokens alike with llama-cpp"] = {
            engine: f"{_alike(ids, first['llama-cpp'])} of {len(ids)}" for engine, ids in first.items()}
    return found


def _cosine(a: Any, b: Any) -> Any:
    import numpy as np

    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def _alike(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def text(record: dict[str, Any]) -> str:
    """Tables for people: medians, and behind each peer's how many times better mpool is."""
    machine = record["machine"]
    lines = [f"{machine['date']}, {machine['cpu']}, {machine['cpus']} CPUs, {machine['threads']} threads",
             ", ".join(f"{engine} {version}" for engine, version in record["versions"].items())]
    lines += [f"weights  {kind}: {found['path']}, sha256 {found['sha256'][:16]}"
              for kind, found in record["weights"].items()]
    for topic, found in record["summary"].items():
        engines = list(dict.fromkeys(engine for row in found["measures"].values() for engine in row))
        rows = [[topic, *engines]]
        for name, row in found["measures"].items():
            rows.append([name, *(_cell(row.get(engine)) for engine in engines)])
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        state = "DISTURBED, not to be relied on" if found["disturbed"] else f"{found['rounds']} good rounds"
        lines += ["", f"-- {state}", *("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                                          zip(row[1:], widths[1:]))]) for row in rows)]
    lines += ["", *(f"{what}: " + ", ".join(f"{engine} {value}" for engine, value in found.items())
                    for what, found in record["agreement"].items())]
    lines += [f"FAILED: {failure}" for failure in record["failures"]]
    return "\n".join([*lines, "", "In brackets: how many times better mpool is, the median of the rounds' ratios."])


def _cell(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    value = found["median"]
    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return number + (f" ({found['ratio']:.2f}x)" if "ratio" in found else "")
