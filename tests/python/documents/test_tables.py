"""The tables of measured rates in README.md and docs/ come from committed records, and the records are complete."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import record as records  # noqa: E402
from benchmarks import compare, plot, report, tables  # noqa: E402
from benchmarks.probe import Frame  # noqa: E402

NEAR = {"round_trip_ns": 105.0, "read_1": 40.0, "read_2": 53.0, "fp32": 100.0, "bf16": 0.0, "int8": 200.0}
FAR = {**NEAR, "round_trip_ns": 520.0}
PATH = "benchmarks/results/2026-11-23-cpu.json"


def turn(engine: str, number: int, measures: dict[str, float], topic: str = "embed", state: dict[str, float] = NEAR,
         others: float = 0.0, compute: str | None = None, **more: Any) -> records.Turn:
    """Return a turn of an engine in a round. ``more``: counts and samples."""
    result = {"measures": measures, "rss MB": 100.0, "compute": compute, "counts": {}, **more}
    return records.Turn(topic, engine, number, result, Frame(state, state, others))


def record(turns: list[records.Turn], **changes: Any) -> dict[str, Any]:
    """Return a complete record of these turns, as the benchmarks write it."""
    made = records.build(
        "compare", 2, {"rounds": 5}, turns, summary=report.summary(turns), agreement={}, failures=[],
        weights={"embed": {"name": "encoder", "path": "model", "sha256": "0"},
                 "generate": {"name": "decoder", "path": "decoder.Q4_K_M.gguf", "sha256": "1"}},
        versions={engine: "1.0" for engine in dict.fromkeys(turn.engine for turn in turns)})
    return {**made, "commit": "0123456789abcdef0123456789abcdef01234567", **changes}


def five(ours: float = 200.0, theirs: float = 100.0) -> list[records.Turn]:
    """Return five undisturbed rounds of mpool and a peer."""
    return [turn(engine, number, {"mixed texts/s": rate + number}, compute=compute) for number in range(5)
            for engine, rate, compute in (("mpool", ours, "float32"), ("openvino:float32:latency", theirs, None))]


# ---- the repository --------------------------------------------------------------------------------------------------

def test_documents_agree_with_their_records(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m benchmarks tables --check` finds nothing."""
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", records.all_records(), ids=lambda path: str(path.name))
def test_committed_records_are_complete(path: Path) -> None:
    """A record has every field that the benchmarks write, and its summary follows from its turns."""
    found = records.read(path)
    assert path.name.startswith(found["machine"]["date"] + "-")


def test_the_readme_has_a_table_from_a_record() -> None:
    """The README's rates come from a record, and so do the tables of the page on benchmarks."""
    assert [found[1] for found in tables.MARKED.findall((ROOT / "README.md").read_text())] == ["speed"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert {found[1] for found in tables.MARKED.findall(page)} == {"embeddings", "text", "plot"}


# ---- differences are found -------------------------------------------------------------------------------------------

@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with the documents and records of the repository."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png", "*.py"))
    shutil.copytree(records.RESULTS, tmp_path / "benchmarks" / "results")
    return tmp_path


def test_a_changed_digit_is_found_and_repaired(clone: Path) -> None:
    """A document or plot that differs from its record is named. Writing makes it equal again."""
    readme, figure_file = clone / "README.md", clone / tables.PLOT
    good = readme.read_text()
    head, rest = good.split("<!-- table: speed", 1)
    figure = re.search(r"[1-9](?= (?:texts|tokens)/s)", rest)
    assert figure is not None
    readme.write_text(f"{head}<!-- table: speed{rest[:figure.start()]}{(int(figure[0]) + 1) % 10}{rest[figure.end():]}")
    figure_file.write_text(figure_file.read_text().replace("n=", "m=", 1))
    found = tables.check(clone)
    assert len(found) == 2 and "README.md differs" in found[0] and "speed.svg differs" in found[1]
    assert tables.check(clone, write=True) == [] and tables.check(clone) == [] and readme.read_text() == good


@pytest.mark.sample(3)
@pytest.mark.parametrize("added, message", [
    ("| a | rate |\n|---|---|\n| x | 5 tokens/s |\n", "no machine"),
    ("2026-11-20, a Xeon:\n\n| a | ratio |\n|---|---|\n| x | 1.5x |\n", ""),
    ("On a Xeon:\n\n| a | ratio |\n|---|---|\n| x | 1.5x |\n", "date"),
    ("2026-11-20, a Xeon:\n\n| a | time | of |\n|---|---|---|\n| x | 1.5 ms | Zen 4 |\n", "found Xeon, Zen 4"),
    ("2026-11-20, Zen 4 and Zen 5:\n\n| images/s |\n|---|\n| 7 |\n", "found Zen 4, Zen 5"),
    ("| option | default |\n|---|---|\n| timeout | 5 seconds |\n", ""),
    ("```text\n| x | 5 tokens/s |\n```\n", ""),
    ("<!-- table: speed -->\n", "marker"),
    ("<!-- table: speed from benchmarks/results/none.json -->\n<!-- end -->\n", "none.json"),
    ("<!-- table: fast from benchmarks/results/none.json -->\n<!-- end -->\n", "no table is named fast"),
])
def test_tables_outside_of_markers(clone: Path, added: str, message: str) -> None:
    """Measured rates outside markers need a date and one machine, and markers name a table and a record."""
    page = clone / "docs" / "troubleshooting.md"
    page.write_text(page.read_text() + f"\n## Added\n\n{added}")
    found = tables.check(clone)
    assert len(found) == bool(message) and message in "".join(found)


def test_a_record_with_wrong_figures_makes_no_table(clone: Path) -> None:
    """A summary that does not follow from the turns is refused."""
    named = re.search(r"table: speed from benchmarks/results/(\S+)", (clone / "README.md").read_text(encoding="utf-8"))
    assert named is not None
    path = clone / "benchmarks" / "results" / named[1]
    found = records.read(path)
    topic = next(iter(found["summary"].values()))
    next(iter(next(iter(topic.values())).values()))["median"] *= 2
    records.write(found, str(path))
    assert any("does not follow from the turns" in fault for fault in tables.check(clone))


def paths(value: Any, before: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of all fields that records.FIELDS names."""
    if isinstance(value, list):
        return paths(value[0], (*before, 0)) if isinstance(value[0], dict) else []
    if not isinstance(value, dict):
        return []
    return [path for key, inner in value.items() for path in ((*before, key), *paths(inner, (*before, key)))]


@pytest.mark.parametrize("path", paths(records.FIELDS), ids=lambda path: ".".join(map(str, path)))
def test_a_missing_field_is_found(path: tuple[str | int, ...]) -> None:
    """The benchmarks write complete records, and a record without any one of the fields is refused."""
    made = record(five())
    assert records.problems(made) == []
    place: Any = made
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    name = ".".join(map(str, path)).replace(".0", "[]")
    assert records.problems(made) == [f"{name} is missing"]


@pytest.mark.parametrize("change, message", [
    (lambda made: made["turns"][0].update(disturbed="noise"), "its probes give None"),
    (lambda made: made["turns"][0]["measures"].clear(), "no measures"),
    (lambda made: made["turns"][0].update(samples={"mixed texts/s": [1.0]}), "samples of mixed texts/s"),
    (lambda made: made["turns"][0]["frame"]["after"].pop("int8"), "after.int8"),
    (lambda made: made["turns"][0]["frame"].update(before=None), "frame.before is None"),
    (lambda made: made["machine"].update(instruction_sets=[]), "no instruction sets"),
    (lambda made: made["turns"].clear(), "no turns"),
    (lambda made: made["versions"].clear(), "versions lacks mpool"),
    (lambda made: made["options"].update(quick=True), "--quick measures nothing"),
    (lambda made: made.update(commit="main"), "commit is 'main'"),
    (lambda made: made.update(schema=1), "schema is 1"),
])
def test_contradictions_are_found(change: Any, message: str) -> None:
    """A record whose fields contradict each other is refused."""
    made = copy.deepcopy(record(five()))
    change(made)
    assert message in "; ".join(records.problems(made))


# ---- the text of a table ---------------------------------------------------------------------------------------------

def test_enough_turns_need_no_count() -> None:
    """With five undisturbed turns, the text says n and the cell its median and spread."""
    found = " ".join(tables.embeddings(record(five()), PATH).split())
    assert "| 202 (200 to 204) | 1.98x OpenVINO float32 (LATENCY) (1.96 to 2.00) |" in found
    assert "n is 5 unless a cell says otherwise" in found and "differ from its figure by at most 2 %." in found
    assert "commit 01234567" in found and PATH in found and "OpenVINO 1.0" in found


def test_few_turns_say_their_number() -> None:
    """A cell with fewer than five undisturbed turns says its n, and so does a ratio."""
    turns = [found for found in five() if found.round < 4]
    turns.append(turn("mpool", 4, {"mixed texts/s": 900.0}, others=0.5, compute="float32"))
    found = " ".join(tables.embeddings(record(turns), PATH).split())
    assert "| 202 (200 to 203, n = 4) | 1.99x OpenVINO float32 (LATENCY) (1.97 to 2.00, n = 4) |" in found
    assert "Each cell states n" in found


def test_no_ratio_without_comparable_turns() -> None:
    """Turns in different states of the machine give no ratio, even if a slower peer has comparable turns."""
    turns = [turn("mpool", 0, {"mixed texts/s": 200.0}, compute="float32"),
             turn("openvino:float32", 0, {"mixed texts/s": 150.0}, state=FAR),
             turn("sentence-transformers", 0, {"mixed texts/s": 50.0})]
    for name in ("embeddings", "speed"):
        found = tables.TABLES[name](record(turns), PATH)
        assert "no turns comparable with OpenVINO float32" in found and not re.search(r"\d\.\d\dx", found)


def test_only_disturbed_turns() -> None:
    """A cell without an undisturbed turn says so."""
    found = " ".join(tables.speed(record([turn("mpool", 0, {"mixed texts/s": 200.0}, others=0.5)]), PATH).split())
    assert "mpool 1.0 (commit 01234567); weights" in found
    assert "200 texts/s (n = 0 of 1)" in found and "With n = 0, every turn was disturbed" in found


def test_the_better_setting_of_the_same_compute_type_is_the_peer() -> None:
    """The better one of a peer's settings counts in each cell. A faster peer in another compute type does not."""
    rates = {"mpool": (200.0, 50.0), "openvino:float32:latency": (90.0, 40.0),
             "openvino:float32:throughput": (110.0, 30.0), "onnxruntime:int8": (500.0, 500.0)}
    turns = [turn(engine, number, {"mixed texts/s": lists, "8 threads calls/s": alone},
                  compute="float32" if engine == "mpool" else None)
             for number in range(5) for engine, (lists, alone) in rates.items()]
    lines = tables.embeddings(record(turns), PATH).splitlines()
    assert "1.82x OpenVINO float32 (THROUGHPUT)" in lines[-3] and "1.25x OpenVINO float32 (LATENCY)" in lines[-2]
    assert not any("ONNX Runtime int8" in line for line in lines if line.startswith("|"))


@pytest.mark.parametrize("count, said", [(2000, "requests, ms"), (240, "requests (240 calls in a turn), ms"),
                                         (None, "requests (number of calls not recorded), ms")])
def test_percentiles_of_few_calls_say_their_number(count: int | None, said: str) -> None:
    """A 99th percentile comes from 2,000 calls, or its row says from how many."""
    measure = "8 threads p99 ms"
    counts: Any = {"counts": {measure: count}} if count else {}
    assert said in tables.embeddings(record([turn("mpool", 0, {measure: 3.0}, **counts)]), PATH)


def test_generation_has_a_table_per_file() -> None:
    """Every model file has a table, with a column per peer."""
    turns = [turn(engine, number, {"pp512 tokens/s": rate, "tg@8 tokens/s": rate, "8 streams tokens/s": rate}, topic)
             for number in range(5) for engine, rate in (("mpool", 3000.0), ("llama-cpp", 1000.0))
             for topic in ("generate", "generate:b.gguf")]
    cold = turn("mpool", 0, {"load to first token s": 0.2}, "cold-generate")
    cold.result["rss MB"] = 50.0
    made = record([*turns, cold])
    made["weights"]["generate:b.gguf"] = {"name": "b", "path": "b.gguf", "sha256": "2"}
    found = tables.text(made, PATH)
    assert found.index("| `decoder.Q4_K_M.gguf` | mpool | ratio to llama.cpp |") < found.index("| `b.gguf` |")
    assert "| load to the first token, s | 0.2 (n = 1) |" in found
    assert found.count("| peak memory of the process, MB | 100 (") == 2  # the cold turn's memory is another measure
    assert "| prompt of 512 tokens, tokens/s | 3,000 (3,000 to 3,000) | 3.00x llama.cpp (3.00 to 3.00) |" in found
    assert "| `b.gguf`, decode after 8 tokens | 3,000 tokens/s | 3.00x llama.cpp |" in tables.speed(made, PATH)


def test_a_table_has_the_fastest_tenth_of_the_repetitions() -> None:
    """Turns without a comparable pair still have a ratio of their fastest repetitions. The option of mpool is named."""
    rates = {"mpool": [50.0, 60.0, 90.0], "ik": [40.0, 45.0, 75.0]}
    turns = [turn(engine, 0, {"tg@8 tokens/s": found[1]}, "generate", samples={"tg@8 tokens/s": found})
             for engine, found in rates.items()]
    made = record(turns)
    made["options"]["weights"] = "packed"
    found = tables.text(made, PATH)
    assert "| mpool | ratio to ik_llama.cpp | fastest tenth | ratio to ik_llama.cpp |" in found
    assert re.search(r"decode after 8 tokens, tokens/s \| 60 .* \| 90 \| 1\.20x \|", found)
    assert 'weights="packed"' in found and "that a tenth of all repetitions reach" in " ".join(found.split())


@pytest.mark.parametrize("cpu, family, model, name", [
    ("AMD EPYC", 25, 1, "Zen 3"), ("AMD EPYC", 25, 0x11, "Zen 4"), ("AMD EPYC", 26, 2, "Zen 5"),
    ("AMD EPYC", 23, 0x31, "Zen 2"), ("Intel(R) Xeon(R)", 6, 143, "Sapphire Rapids"), ("ARM", 8, 0xd0c, "")])
def test_generations_of_cpus(cpu: str, family: int, model: int, name: str) -> None:
    """Family and model tell the microarchitecture, which a cloud's name of the CPU hides."""
    assert tables.generation_of(cpu, family, model) == name
    said = tables.described({"cpu": cpu, "family": family, "model": model, "instruction_sets": ["avx2", "avx512f"]})
    assert said == f"{cpu} ({name + ', ' if name else ''}family {family} model {model}, AVX-512)"


def test_the_command_of_a_record_runs_again() -> None:
    """The command below the plot is made of the record, and compare understands it."""
    made = record(five())
    made["options"] = {"rounds": 5, "again": 0, "topics": ["embed"], "prompts": [128, 512], "depths": [8],
                       "engines": ["mpool", "openvino:float32:latency", "ik"], "repeat": 7, "touch": 6000,
                       "weights": "packed"}
    found = tables.command(made, PATH).replace("\\\n", " ").splitlines()[1].split()
    assert found[:4] == ["python", "-m", "benchmarks", "compare"]
    arguments = compare.parse(found[4:])
    assert {name: getattr(arguments, name) for name in made["options"]} == made["options"]
    assert arguments.json == PATH and arguments.text_model == ["decoder"]
    assert [word for word in found if "=" in word] == ["ik=FOLDER"]  # ik_llama.cpp is found by its folder only


def test_the_plot_is_made_of_the_record_alone() -> None:
    """The same record gives the same SVG, with every engine, and bars without undisturbed turns are pale."""
    made = record([turn("mpool", 0, {"a ms": 2.0}), turn("onnxruntime", 0, {"a ms": 4.0}, others=0.5)])
    found = plot.svg(made)
    assert found == plot.svg(copy.deepcopy(made)) and found.startswith("<svg ") and found.endswith("</svg>\n")
    assert found.count(">mpool<") == 2 and "embed: a ms, less is better" in found  # two panels: a ms, memory MB
    assert found.count('fill-opacity="0.4"') == 2 and "(n=0)" in found


#: Rows of the table that is typed by hand -> measures of its records.
EXPERTS = {"prompt of 128 tokens": "pp128 tokens/s", "prompt of 512 tokens": "pp512 tokens/s",
           "decode after 8 tokens": "tg@8 tokens/s", "decode after 512 tokens": "tg@512 tokens/s",
           "peak memory of the process, MB": "memory MB"}


def test_the_table_of_experts_has_the_medians_of_its_records() -> None:
    """The hand-typed table has the rounded medians and ratios, and says that every turn of mpool was disturbed."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = page.partition("## MoE models\n")[2].partition("<!-- table:")[0]
    names = ["2026-11-24-xeon-amx-moe-qwen3.json", "2026-11-24-xeon-amx-moe-gpt-oss.json"]
    made = [json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")) for name in names]
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d[^\n]*) \|$", section, re.MULTILINE))
    assert rows.keys() == EXPERTS.keys() and all(name in section for name in names)
    for row, measure in EXPERTS.items():
        for cell, found in zip(rows[row].split(" | "), made, strict=True):
            engines = found["summary"]["generate"][measure]
            rate = engines["mpool"]["median"]
            assert cell == f"{rate:,.{0 if rate >= 100 else 1}f} ({engines['ik']['ratio']:.2f}x)", row
    said = re.search(r"both turns of mpool were disturbed, because other programs used (\d+) to (\d+) % of\s+the CPUs",
                     section)
    used = [int(found["disturbed"].partition("%")[0].split()[-1]) for one in made for found in one["turns"]
            if found["engine"] == "mpool"]
    assert said and [int(said[1]), int(said[2])] == [min(used), max(used)]
