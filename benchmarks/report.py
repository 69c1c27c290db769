"""Medians, ratios and tables from the turns of a run."""

import statistics
from pathlib import Path
from typing import Any

from . import limits
from .engines import EMBEDDERS, split
from .probe import disturbance
from .timing import percentile

#: Suffixes of measures for which less is better.
LESS = (" ms", " s", " MB")


def last_line(text: str) -> str:
    """Return the last line of a traceback, with the home folder as ``~``: a record names no folder of the machine."""
    lines = text.strip().splitlines()
    return lines[-1].replace(str(Path.home()), "~")[-300:] if lines else ""


def comparable(a: Any, b: Any) -> bool:
    """Return True if two turns of a topic saw the same machine state and no other processes."""
    return a.disturbed is None and b.disturbed is None and disturbance([a.frame, b.frame]) is None


def arithmetic(turn: Any) -> str:
    """Return the compute type of an engine's turn; quantised weights count as int8."""
    compute = split(turn.engine)[1]
    named = [name for name in (compute, turn.result.get("compute")) if name in limits.PEAKS]
    return named[0] if named else "int8" if turn.topic.startswith("generate") else "float32"


def against(engine: str, engines: list[str]) -> str | None:
    """Return the mpool variant to compare an engine with: the one of its compute type if it takes part, else the
    default. Peers that only generate compute with the weights as stored, as mpool's default does.
    """
    name, compute, _ = split(engine)
    own = f"mpool:{compute or 'float32'}"
    if name != "mpool" and name in EMBEDDERS and own in engines:
        return own
    return "mpool" if engine != "mpool" and "mpool" in engines else None


def summary(turns: list[Any], work: dict[str, Any] | None = None, threads: int = 1) -> dict[str, Any]:
    """Return topic -> measure -> engine -> its median, and by which factor mpool is better.

    ``median``, ``min`` and ``max`` are over the undisturbed turns, of which there are ``n`` among ``turns``. ``ratio``,
    ``ratio_min`` and ``ratio_max`` are over pairs of comparable turns of one round; ``pairs`` is the number of the
    pairs, and ``ratio_n`` that of the turns of the engine that has fewer turns in them. If ``n`` or ``pairs`` is 0,
    these figures are computed from all turns. ``fast`` is the rate that a tenth of all repetitions reach, and
    ``fast_ratio`` compares these rates: virtual machines change their speed within a turn, and the fastest repetitions
    of each engine are those of the machine's fastest state. ``limit`` is the share of the machine's limit (limits.py),
    for measures whose ``work`` is known: topic -> measure -> work (``limits.work``).
    """
    found: dict[str, Any] = {}
    for topic in dict.fromkeys(turn.topic for turn in turns):
        mine = [turn for turn in turns if turn.topic == topic]
        names = dict.fromkeys(name for turn in mine for name in measures(turn))
        engines = dict.fromkeys(turn.engine for turn in mine)
        found[topic] = {name: {engine: cell for engine in engines if (cell := _cell_of(name, engine, mine))}
                        for name in names}
        known = (work or {}).get(topic, {})
        for name, row in found[topic].items():
            for engine, cell in row.items():
                shares = [share for turn in mine if turn.engine == engine and name in measures(turn)
                          and name in known and (share := limits.share(
                              known[name], measures(turn)[name], turn.frame, threads, arithmetic(turn))) is not None]
                if shares:
                    cell["limit"] = statistics.median(shares)
    return found


def measures(turn: Any) -> dict[str, float]:
    """Return the measures of a turn, memory included."""
    return {**turn.result["measures"], "memory MB": turn.result["rss MB"]}


def _cell_of(name: str, engine: str, turns: list[Any]) -> dict[str, Any]:
    mine = [turn for turn in turns if turn.engine == engine and name in measures(turn)]
    if not mine:
        return {}
    good = [turn for turn in mine if turn.disturbed is None]
    values = [measures(turn)[name] for turn in good or mine]
    cell: dict[str, Any] = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(good),
                            "turns": len(mine)}
    fast = _fast(name, mine)
    if fast:
        cell["fast"] = fast
    rival = against(engine, [turn.engine for turn in turns])
    ours = [turn for turn in turns if turn.engine == rival and name in measures(turn)]
    pairs = [(a, b) for a in ours for b in mine if a.round == b.round]
    if pairs:
        sound = [(a, b) for a, b in pairs if comparable(a, b)]
        ratios = [_ratio(name, measures(a)[name], measures(b)[name]) for a, b in sound or pairs]
        cell |= {"against": rival, "ratio": statistics.median(ratios), "ratio_min": min(ratios),
                 "ratio_max": max(ratios), "pairs": len(sound),
                 "ratio_n": min(len({id(pair[side]) for pair in sound}) for side in (0, 1))}
        if fast and (best := _fast(name, ours)):
            cell["fast_ratio"] = best / fast
    return cell


def _fast(name: str, turns: list[Any]) -> float | None:
    """Return the rate that a tenth of the repetitions in all turns reach; None if the turns have no repetitions."""
    rates = [rate for turn in turns for rate in turn.result.get("samples", {}).get(name, [])]
    return percentile(rates, 0.9) if rates else None


def _ratio(name: str, ours: float, theirs: float) -> float:
    return theirs / ours if name.endswith(LESS) else ours / theirs


def agreement(turns: list[Any]) -> dict[str, Any]:
    """Compare the engines' results: least cosine to sentence-transformers' fp32, and the length of the common token
    prefix.
    """
    import numpy as np

    found: dict[str, Any] = {}
    vectors = {turn.engine: np.array(turn.result["vectors"]) for turn in turns if "vectors" in turn.result}
    reference = vectors.get("sentence-transformers")
    if reference is not None:
        found["least cosine to sentence-transformers"] = {
            engine: round(float(cosine(rows, reference).min()), 6) for engine, rows in vectors.items()}
    for topic in dict.fromkeys(turn.topic for turn in turns):
        first = {turn.engine: turn.result["first"] for turn in turns if turn.topic == topic and "first" in turn.result}
        if "llama-cpp" in first:
            found[f"{topic}: greedy tokens alike with llama-cpp"] = {
                engine: f"{_alike(ids, first['llama-cpp'])} of {len(ids)}" for engine, ids in first.items()}
    return found


def cosine(a: Any, b: Any) -> Any:
    """Return the cosines of the rows of two matrices."""
    import numpy as np

    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def _alike(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def text(record: dict[str, Any]) -> str:
    """Format tables as text: medians, and for each peer the factor by which mpool is better."""
    machine = record["machine"]
    lines = [f"{machine['date']}, {machine['cpu']}, {machine['cpus']} CPUs, {machine['threads']} threads",
             ", ".join(f"{engine} {version}" for engine, version in record["versions"].items())]
    lines += [f"weights  {kind}: {found['path']}, sha256 {found['sha256'][:16]}"
              for kind, found in record["weights"].items()]
    for topic, found in record["summary"].items():
        engines = list(dict.fromkeys(engine for row in found.values() for engine in row))
        rows = [[topic, *engines]]
        rows += [[name, *(_cell(row.get(engine)) for engine in engines)] for name, row in found.items()]
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines += ["", *("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                              zip(row[1:], widths[1:]))]) for row in rows)]
    lines += ["", *(f"{what}: " + ", ".join(f"{engine} {value}" for engine, value in found.items())
                    for what, found in record["agreement"].items())]
    lines += [f"FAILED: {failure}" for failure in record["failures"]]
    return "\n".join([*lines, "", "In brackets: the factor by which mpool is better (its default, or the compute type",
                      "that is named), and the number of pairs of comparable turns behind it. ?: no pair of turns "
                      "was comparable,",
                      "because the machine was busy or changed its state: disregard the factor. %: share of the",
                      "machine's limit, from the probes before and after the turn. fast: the rate of the fastest tenth",
                      "of the repetitions in all turns, which the machine's fastest state gives."])


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    figure = number(found["median"])
    if "limit" in found:
        figure += f" {found['limit']:.0%}"
    rival = "" if found.get("against", "mpool") == "mpool" else " of " + found["against"].partition(":")[2]
    if "ratio" in found:
        figure += f" ({found['ratio']:.2f}x{rival}, {found['pairs'] or '?'})"
    if "fast" in found:
        figure += f" fast {number(found['fast'])}"
    return f"{figure} ({found['fast_ratio']:.2f}x{rival})" if "fast_ratio" in found else figure


def number(value: float) -> str:
    """Format a figure with three digits, or as an integer from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
