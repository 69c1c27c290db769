"""The tables of measured rates in README.md and docs/ come from committed records, and the records are complete."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import record as records  # noqa: E402
from benchmarks import tables  # noqa: E402

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
