"""``python -m benchmarks tables``: write the tables of README.md and docs/ from the committed records.

A table stands between ``<!-- table: NAME from benchmarks/results/FILE.json -->`` and ``<!-- end -->``. Everything
between these markers is made from that record: machine, date, versions, number of undisturbed turns, spread, and the
table. ``plot`` and ``ratios`` also write an SVG into ``docs/_static``. ``--check`` writes nothing, and fails if a
document or a plot differs from what the records give.
"""

import re
import sys
import textwrap
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from . import plot
from . import record as records
from .engines import EMBEDDERS, MODULES, split
from .options import parser_of
from .report import number

#: A cell with fewer undisturbed turns says how many it has.
ENOUGH = 5
#: Calls in a turn from which a 99th percentile is printed without their number.
ENOUGH_CALLS = 2000
#: Width of the text above a table.
COLUMNS = 138
NAMES = {"sentence-transformers": "sentence-transformers", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO",
         "ctranslate2": "CTranslate2", "llama-cpp": "llama.cpp", "ik": "ik_llama.cpp", "mpool": "mpool"}
SETTINGS = {"latency": "LATENCY", "throughput": "THROUGHPUT", "inter1": "one inter thread",
            "inter2": "two inter threads"}
MARKED = re.compile(r"(<!-- table: (\w+) from (benchmarks/results/\S+\.json) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)
MARKER = re.compile(r"<!-- (?:table:|end)")

#: Topic and measure of each row -> its label; ``{calls}`` becomes the number of calls if it is small.
EMBEDDING_ROWS = {
    ("embed", "mixed texts/s"): "texts of natural length (31 tokens on average), texts/s",
    ("embed", "short texts/s"): "texts of 10 words, texts/s",
    ("embed", "long texts/s"): "texts of 90 words, texts/s",
    ("embed", "one text ms"): "one text of 9 words, ms",
    ("embed", "8 threads calls/s"): "8 threads with one text each, requests/s",
    ("embed", "8 threads p99 ms"): "99th percentile of those requests{calls}, ms",
    ("cold-embed", "start of Python to first vector s"): "start of Python to the first vector, s",
    ("embed", "memory MB"): "peak memory of the process, MB",
}
TEXT_ROWS = {r"first pp(\d+) tokens/s": "first prompt, of {} tokens, tokens/s",
             r"pp(\d+) tokens/s": "prompt of {} tokens, tokens/s",
             r"tg@(\d+) tokens/s": "decode after {} tokens, tokens/s",
             r"(\d+) streams tokens/s": "decode of {} sequences at once, tokens/s",
             r"load to first token s": "load to the first token, s", r"memory MB": "peak memory of the process, MB"}


# ---- parts of a table ------------------------------------------------------------------------------------------------

def source(record: dict[str, Any], path: str) -> str:
    """Describe the machine, the versions and the weights, and name the record."""
    machine = record["machine"]
    versions = {"mpool": ""}
    for engine, version in record["versions"].items():  # the longest also names what a variant depends on
        versions[split(engine)[0]] = max(versions.get(split(engine)[0], ""), re.sub(r"-\S+", "", version), key=len)
    named_versions = [f"{NAMES.get(name, name)} {version}" for name, version in versions.items()]
    named_versions[0] += f" (commit {short(record['commit'])})"  # mpool runs first
    weights = ", ".join(f"`{found['path']}`" if Path(found["path"]).suffix else found["name"]
                        for found in record["weights"].values())
    return (
        f"{machine['date']}, {described(machine)}, {machine['cpus']} CPUs, {machine['threads']} threads; "
        + ", ".join(named_versions)
        + (f"; weights: {weights}" if weights else "") + f". Every turn is in `{path}`.")


def about(record: dict[str, Any], path: str, shown: list[dict[str, Any]], more: str = "") -> str:
    """Describe the machine, the versions, the number of turns and their spread, for the cells that a table shows."""
    parts = [source(record, path)]
    counts = [cell["n"] for cell in shown if cell["n"] >= ENOUGH]
    if not counts:
        parts.append("Each cell states n, the number of its undisturbed turns.")
    else:
        span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        parts.append(f"A figure is the median of n undisturbed turns; n is {span} unless a cell says otherwise.")
    if any(cell["n"] == 0 for cell in shown):
        parts.append("With n = 0, every turn was disturbed, and the figure is the median of these turns.")
    spreads = [max(cell["max"] / cell["median"] - 1, 1 - cell["min"] / cell["median"])
               for cell in shown if cell["turns"] > 1]
    if spreads:
        parts.append(f"The turns of a cell differ from its figure by at most {max(spreads):.0%}.".replace("%", " %"))
    parts += [more] if more else []
    return wrapped(" ".join(parts))


def wrapped(text: str) -> str:
    """Break a paragraph into lines."""
    return "\n".join(textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False))


def short(commit: str) -> str:
    """Return a commit with eight digits of its hash."""
    return commit[:8] + (" with changes" if commit.endswith("+changes") else "")


def described(machine: dict[str, Any]) -> str:
    """Return the CPU with its generation and its widest instructions."""
    sets, facts = set(machine.get("instruction_sets", [])), []
    if machine.get("family") is not None:
        generation = generation_of(machine["cpu"], machine["family"], machine["model"])
        facts.append(f"{generation + ', ' if generation else ''}family {machine['family']} model {machine['model']}")
    for flags, name in (({"amx_tile"}, "AMX"), ({"avx512f"}, "AVX-512"), ({"avx512_vnni", "avx_vnni"}, "VNNI"),
                        ({"avx512_bf16", "bf16"}, "BF16"), ({"sve2"}, "SVE2"), ({"i8mm"}, "I8MM")):
        facts += [name] if sets & flags else []
    if "avx2" in sets and "avx512f" not in sets:
        facts.append("AVX2")
    return f"{machine['cpu']} ({', '.join(facts)})" if facts else str(machine["cpu"])


def generation_of(cpu: str, family: int, model: int) -> str:
    """Return the microarchitecture's name where family and model tell it, else ""."""
    if "AMD" in cpu:
        if family == 23:
            return "Zen 2" if model >= 0x30 else "Zen"
        if family == 25:
            return "Zen 4" if 0x10 <= model < 0x20 or 0x60 <= model < 0x80 or 0xa0 <= model < 0xb0 else "Zen 3"
        return "Zen 5" if family == 26 else ""
    known = {85: "Skylake or Cascade Lake", 106: "Ice Lake", 143: "Sapphire Rapids", 173: "Granite Rapids",
             207: "Emerald Rapids"}
    return known.get(model, "") if "Intel" in cpu and family == 6 else ""


def named(engine: str) -> str:
    """Return the name of an engine for readers."""
    name, compute, setting = split(engine)
    return " ".join(part for part in (NAMES.get(name, name), compute,
                                      f"({SETTINGS.get(setting, setting)})" if setting else "") if part)


def value(cell: dict[str, Any], spread: bool) -> str:
    """Format a measured cell, with its number of turns if there are few."""
    parts = [f"{number(cell['min'])} to {number(cell['max'])}"] if spread and cell["turns"] > 1 else []
    if cell["n"] < ENOUGH:
        parts.append(f"n = {cell['n']}" + ("" if cell["n"] else f" of {cell['turns']}"))
    return number(cell["median"]) + (f" ({', '.join(parts)})" if parts else "")


def ratio(peer: str, cell: dict[str, Any], spread: bool) -> str:
    """Format the ratio to a peer. Without a pair of comparable turns there is none."""
    if not cell["pairs"]:
        return f"no turns comparable with {named(peer)}"
    parts = [f"{cell['ratio_min']:.2f} to {cell['ratio_max']:.2f}"] if spread and cell["pairs"] > 1 else []
    if cell["ratio_n"] < ENOUGH:
        parts.append(f"n = {cell['ratio_n']}")
    return f"{cell['ratio']:.2f}x {named(peer)}" + (f" ({', '.join(parts)})" if parts else "")


def computes(record: dict[str, Any]) -> dict[str, str]:
    """Return the compute type of each engine of the topic embed; "" where the record does not say it."""
    found = {}
    for turn in record["turns"]:
        if turn["topic"].endswith("embed"):
            name, compute, _ = split(turn["engine"])
            found[turn["engine"]] = compute or turn.get("compute") or ("" if name == "mpool" else "float32")
    return found


def best_peer(row: dict[str, dict[str, Any]], ours: str, types: dict[str, str]) -> str | None:
    """Return the peer that is fastest in a row, among those of the compute type of ``ours``."""
    rivals = {peer: cell["ratio"] for peer, cell in row.items() if cell.get("against") == ours
              and split(peer)[0] != "mpool" and (not types.get(ours) or types.get(peer) in (None, types[ours]))}
    return min(rivals, key=lambda peer: rivals[peer]) if rivals else None


def calls(record: dict[str, Any], topic: str, measure: str) -> str:
    """Return the number of calls behind a percentile, in words, if it is small."""
    counts = [turn.get("counts", {}).get(measure) for turn in record["turns"] if turn["topic"] == topic]
    if not counts or None in counts:
        return " (number of calls not recorded)"
    return f" ({min(counts)} calls in a turn)" if min(counts) < ENOUGH_CALLS else ""


def grid(head: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines).replace(
        "| --- |", "|---|").replace(" --- ", "---")


# ---- the tables ------------------------------------------------------------------------------------------------------

def embeddings(record: dict[str, Any], path: str) -> str:
    """All measures of embedding, with the best peer of each compute type."""
    summary, types = record["summary"], computes(record)
    ours = [engine for engine in types if split(engine)[0] == "mpool"]
    rows, shown = [], []
    for (topic, measure), label in EMBEDDING_ROWS.items():
        row = summary.get(topic, {}).get(measure)
        if not row:
            continue
        cells = [label.format(calls=calls(record, topic, measure) if "{calls}" in label else "")]
        for engine in ours:
            peer = best_peer(row, engine, types)
            cells += [value(row[engine], True) if engine in row else "", ratio(peer, row[peer], True) if peer else ""]
            shown += [row[name] for name in (engine, peer) if name in row]
        rows.append(cells)
    name = next((found["name"] for kind, found in record["weights"].items() if kind == "embed"), "")
    columns = [column for engine in ours for column in (
        f"mpool {split(engine)[1] or (types[engine] + ' ' if types[engine] else '') + '(default)'}", "best peer")]
    return about(record, path, shown) + "\n\n" + grid([name, *columns], rows)


def text(record: dict[str, Any], path: str) -> str:
    """All measures of generation, one table per model file."""
    shown: list[dict[str, Any]] = []
    tables = [_text_table(record, kind, found, shown) for kind, found in record["weights"].items() if kind != "embed"]
    more = []
    if record["options"].get("weights", "auto") != "auto":
        more.append(f"mpool's option: `weights=\"{record['options']['weights']}\"`.")
    if any("fast" in cell for cell in shown):
        more.append("Fastest tenth: the rate that a tenth of all repetitions reach. It compares engines on a machine "
                    "that changes its speed within turns.")
    return "\n\n".join([about(record, path, shown, " ".join(more)), *tables])


def _text_table(record: dict[str, Any], kind: str, weights: dict[str, Any], shown: list[dict[str, Any]]) -> str:
    warm, cold = (record["summary"].get(topic, {}) for topic in (kind, f"cold-{kind}"))
    found = {**warm, **{measure: row for measure, row in cold.items() if measure not in warm}}
    peers = list(dict.fromkeys(engine for row in found.values() for engine, cell in row.items()
                               if cell.get("against") == "mpool" and split(engine)[0] != "mpool"))
    rows, with_fast = [], any("fast" in row.get("mpool", {}) for row in found.values())
    for measure, row in found.items():
        label = text_label(measure)
        if label and "mpool" in row:
            rows.append([label, value(row["mpool"], True),
                         *(ratio(peer, row[peer], True) if peer in row else "" for peer in peers)])
            if with_fast:
                rows[-1] += [number(row["mpool"]["fast"]) if "fast" in row["mpool"] else "",
                             *(_fast_ratio(row.get(peer, {})) for peer in peers)]
            shown += [row[name] for name in ("mpool", *peers) if name in row]
    ratios = [f"ratio to {named(peer)}" for peer in peers]
    return grid([f"`{weights['path']}`", "mpool", *ratios, *(["fastest tenth", *ratios] if with_fast else [])], rows)


def _fast_ratio(cell: dict[str, Any]) -> str:
    return f"{cell['fast_ratio']:.2f}x" if "fast_ratio" in cell else ""


def text_label(measure: str) -> str | None:
    """Return the label of a measure of generation."""
    for pattern, label in TEXT_ROWS.items():
        if match := re.fullmatch(pattern, measure):
            return label.format(*(f"{int(part):,}" for part in match.groups()))
    return None


#: Row of the README's table: label, cell of mpool, unit, and the peers with their cells.
SpeedRow = tuple[str, dict[str, Any], str, dict[str, dict[str, Any]]]


def speed_rows(record: dict[str, Any]) -> list[SpeedRow]:
    """Return the rows of the README's table: embeddings with the best peer of their type, text with every peer."""
    types = computes(record)
    rows: list[SpeedRow] = []

    def add(label: str, row: dict[str, dict[str, Any]], engine: str, unit: str, peers: list[str | None]) -> None:
        if engine in row:
            rows.append((label, row[engine], unit, {peer: row[peer] for peer in peers if peer in row and peer}))

    for measure, label in (("mixed texts/s", "texts of natural length"),
                           ("8 threads calls/s", "8 threads, one text each")):
        row = record["summary"].get("embed", {}).get(measure, {})
        for engine in types:
            if split(engine)[0] == "mpool" and (measure == "mixed texts/s" or engine == "mpool"):
                kind = split(engine)[1] or " ".join(part for part in (types[engine], "(default)") if part)
                add(f"{record['weights']['embed']['name']} {kind}, {label}", row, engine,
                    "texts/s" if measure == "mixed texts/s" else "requests/s", [best_peer(row, engine, types)])
    for kind, weights in record["weights"].items():
        for measure, row in record["summary"].get(kind, {}).items() if kind != "embed" else ():
            if re.fullmatch(r"pp512 .*|tg@8 .*|8 streams .*", measure):
                label = str(text_label(measure)).rpartition(",")[0]
                add(f"`{weights['path']}`, {label}", row, "mpool", "tokens/s",
                    [peer for peer in row if row[peer].get("against") == "mpool" and split(peer)[0] not in EMBEDDERS])
    return rows


def speed(record: dict[str, Any], path: str) -> str:
    """The README's table: a few rows, each with the best peer, without the spread of each cell."""
    shown, rows = list[dict[str, Any]](), list[list[str]]()
    for label, ours, unit, peers in speed_rows(record):
        number_of, _, turns = value(ours, False).partition(" (")
        rows.append([label, f"{number_of} {unit}" + (f" ({turns}" if turns else ""),
                     ", ".join(ratio(peer, cell, False) for peer, cell in peers.items())])
        shown.extend([ours, *peers.values()])
    return about(record, path, shown) + "\n\n" + grid(["", "mpool", "ratio"], rows)


def ratios_plot(record: dict[str, Any]) -> str:
    """Return the plot of the ratios of the README's table."""
    bars = [(label.replace("`", ""), f"{number(ours['median'])} {unit}",
             [(named(peer), cell["ratio"]) for peer, cell in peers.items() if cell["pairs"]])
            for label, ours, unit, peers in speed_rows(record)]
    machine = record["machine"]
    return plot.ratios(f"mpool's rate relative to others, {machine['date']}, {machine['threads']} threads", bars)


def ratios(record: dict[str, Any], path: str) -> str:
    """The image of the ratios, for documents in docs/."""
    return f"![mpool's rate relative to that of other engines](_static/{Path(PLOTS['ratios'][0]).name})"


def command(record: dict[str, Any], path: str) -> str:
    """Return the command that makes such a record."""
    options = record["options"]
    texts = [f"--text-model {found['name']}" for kind, found in record["weights"].items() if kind != "embed"]
    numbers = " ".join(f"--{name} {','.join(map(str, value)) if isinstance(value, list) else value}"
                       for name in ("rounds", "again", "repeat", "topics", "prompts", "depths", "touch", "weights")
                       if (value := options.get(name)) is not None)
    engines = options.get("engines", [])
    programs = [f"--program {name}=FOLDER" for name in dict.fromkeys(split(engine)[0] for engine in engines)
                if MODULES.get(name) == ""]
    lines = [f"python -m benchmarks compare {numbers}", f"--engines {','.join(engines)}",
             " ".join([*programs, *texts, f"--json {path}"])]
    return "```text\n" + " \\\n    ".join(lines) + "\n```"


def plotted(record: dict[str, Any], path: str) -> str:
    """The plot's image, for documents in docs/, and the command that makes such a record."""
    shown = [cell for rows in record["summary"].values() for row in rows.values() for cell in row.values()]
    peers = len({split(engine)[0] for engine in record["versions"]} - {"mpool"})
    return (f"![Rates, latency and memory of mpool and {peers} peers](_static/{Path(PLOTS['plot'][0]).name})\n\n"
            + about(record, path, shown, "Pale bars have no undisturbed turn. Lines span all turns.")
            + "\n\nThis command makes such a record:\n\n" + command(record, path))


def search(record: dict[str, Any], path: str) -> str:
    """nDCG@10 of mpool and of sentence-transformers."""
    options, engines = record["options"], list(record["versions"])
    same = record["agreement"]["queries with the same first ten documents"]
    rows = []
    for measure, row in record["summary"]["search"].items():
        name = measure.rpartition(", ")[0]
        if name in same:
            rows.append([name, *(f"{row[engine]['median']:.4f}" for engine in engines),
                         f"{same[name]} of {options['queries']}"])
    counts = (f"Topics and index of Python {record['machine']['python']}: {options['queries']} queries, "
              f"{options['documents']} documents, {options['passages']} passages, "
              f"{options['judgements']} judgements.")
    return wrapped(f"{source(record, path)} {counts}") + "\n\n" + grid(
        ["nDCG@10", *(named(engine) for engine in engines), "queries with the same first ten"], rows)


TABLES: dict[str, Callable[[dict[str, Any], str], str]] = {"embeddings": embeddings, "text": text, "speed": speed,
                                                           "plot": plotted, "ratios": ratios, "search": search}
#: Table that shows a plot -> the plot's file and what makes it.
PLOTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "plot": ("docs/_static/speed.svg", plot.svg), "ratios": ("docs/_static/ratios.svg", ratios_plot)}
#: Table -> the benchmark whose records it is made from, if it is not compare.
BENCHMARKS = {"search": "search"}


# ---- documents -------------------------------------------------------------------------------------------------------

def documents(root: Path) -> list[Path]:
    """Return the documents that may have tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def made(text: str, root: Path) -> tuple[str, dict[str, str]]:
    """Return a document with its tables made from their records, and the plots that they show: path -> content.

    Raises:
        ValueError: a marker or a record is wrong.
    """
    plots: dict[str, str] = {}

    def one(match: re.Match[str]) -> str:
        head, name, path, _, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"no table is named {name}. Tables: {', '.join(TABLES)}")
        record = records.read(root / path)
        if record["benchmark"] != (wanted := BENCHMARKS.get(name, "compare")):
            raise ValueError(f"{path} is a record of {record['benchmark']}; the table {name} is made from records of "
                             f"{wanted}")
        if name in PLOTS:
            plots[PLOTS[name][0]] = PLOTS[name][1](record)
        return f"{head}\n{TABLES[name](record, path)}\n\n{end}"

    out, count = MARKED.subn(one, text)
    if len(MARKER.findall(text)) != 2 * count:
        raise ValueError("a marker is not `<!-- table: NAME from benchmarks/results/FILE.json -->` on a line of its "
                         "own, or its `<!-- end -->` is missing")
    return out, plots


def check(root: Path, write: bool = False) -> list[str]:
    """Return what is wrong with the documents, after writing them if ``write``."""
    found = []
    shown: dict[str, str] = {}
    for path in documents(root):
        given, name = path.read_text(), str(path.relative_to(root))
        try:
            wanted, plots = made(given, root)
        except ValueError as error:
            found.append(f"{name}: {error}")
            continue
        if wanted != given and not write:
            old, new = next(pair for pair in zip_longest(given.split("\n"), wanted.split("\n")) if pair[0] != pair[1])
            found.append(f"{name} differs from its record: {old!r}, the record gives {new!r}. "
                         "Run `python -m benchmarks tables`")
        if wanted != given and write:
            path.write_text(wanted)
        shown |= plots
    for name, content in shown.items():
        path = root / name
        if write:
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            found.append(f"{name} differs from its record. Run `python -m benchmarks tables`")
    return found


def main(argv: list[str] | None = None) -> int:
    """Write or check the documents."""
    parser = parser_of("tables", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document differs")
    arguments = parser.parse_args(argv)
    found = check(records.ROOT, not arguments.check)
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
