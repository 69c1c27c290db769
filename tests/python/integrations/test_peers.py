"""Cases of other projects' own test suites, with the results that those projects expect.

MPOOL_PEERS names a folder with checkouts, or parts of them: CONTRIBUTING.md lists their names. peers.json has the known
differences, each with its reason; a case that differs and is not covered there fails the test. Each test prints counts.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mpool
import peerchats
from mpool.conversation import grammar, reasoning, tools
from mpool.conversation.template import ChatTemplate

KNOWN: dict[str, Any] = json.loads(Path(__file__).with_name("peers.json").read_text())
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
#: One file of MaskBench in so many is read.
SAMPLE = int(os.environ.get("MPOOL_PEERS_SAMPLE", "20"))


def folder(name: str) -> Path:
    """Return the folder of a project, or skip the test."""
    root = os.environ.get("MPOOL_PEERS")
    if not root:
        pytest.skip("MPOOL_PEERS names no folder with the tests of other projects")
    found = Path(root).resolve() / name
    if not found.is_dir():
        pytest.skip(f"MPOOL_PEERS has no folder {name}")
    return found


def compare(found: Mapping[str, int], known: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what differs more often than the list of known differences says."""
    most = {row["where"]: row["most"] for row in known}
    return [f"{where}: {count} cases differ, {most.get(where, 0)} are known" for where, count in sorted(found.items())
            if count > most.get(where, 0)]


def show(capsys: pytest.CaptureFixture[str], name: str, counts: Mapping[str, int]) -> None:
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))


def test_differences_are_compared() -> None:
    known = [{"where": "a.json", "most": 2, "reason": "r"}]
    assert compare({"a.json": 2}, known) == compare({}, known) == []
    assert compare({"a.json": 3, "b.json": 1}, known) == ["a.json: 3 cases differ, 2 are known",
                                                          "b.json: 1 cases differ, 0 are known"]


def test_known_differences_have_reasons() -> None:
    for rows in (*KNOWN["schemas"].values(), KNOWN["chats"]):
        assert len({row["where"] for row in rows}) == len(rows)
        assert all(row["reason"] and row["most"] > 0 for row in rows)
    names = [name for group in KNOWN["parsers"]["excluded"] for name in group["tests"]]
    assert len(set(names)) == len(names) and all(group["reason"] for group in KNOWN["parsers"]["excluded"])


# ---- JSON schemas ----------------------------------------------------------------------------------------------------

class Schemas:
    """Counts of instances by what a strict format does with them."""

    def __init__(self, llama: Path, pool: mpool.Pool) -> None:
        self.pool, self.model = pool, pool.get(llama, "text_to_text")
        self.tokenizer = self.model.tokenizer
        self.counts: Counter[str] = Counter()
        self.differ: dict[str, Counter[str]] = {"accepted": Counter(), "rejected": Counter()}

    def check(self, where: str, schema: Any, cases: Iterable[Mapping[str, Any]]) -> None:
        """Compare the instances of a schema. ``where``: the place in the list of differences."""
        wanted = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
        try:
            format = grammar.prepare(wanted, self.tokenizer, SimpleNamespace(ignore_eos=False, min_tokens=0))
        except (mpool.InvalidArgument, mpool.LimitError):
            self.counts["schemas refused"] += 1
            return
        assert format is not None
        self.counts["schemas"] += 1
        for case in cases:
            text = json.dumps(case["data"], ensure_ascii=False)
            ids = self.pool.tokenize(text, self.model, add_special=False)
            matcher = format.matcher.deep_copy()
            accepts = matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())
            self.counts[("valid" if case["valid"] else "invalid") + (" accepted" if accepts else " rejected")] += 1
            if accepts != case["valid"]:
                self.differ["accepted" if accepts else "rejected"][where] += 1

    def wrong(self) -> list[str]:
        return [f"{what} {text}" for what, found in self.differ.items()
                for text in compare(found, KNOWN["schemas"][what])]


@pytest.mark.slow
def test_maskbench(llama: Path, pool: mpool.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder("jsonschemabench") / "maskbench" / "data"
    seen = Schemas(llama, pool)
    for file in sorted(data.glob("*.json"))[::SAMPLE]:
        case = json.loads(file.read_text(encoding="utf-8"))
        seen.check("MaskBench", case["schema"], case.get("tests", ()))
    show(capsys, "MaskBench", seen.counts)
    assert seen.counts["valid accepted"] and not seen.wrong()


@pytest.mark.slow
def test_json_schema_test_suite(llama: Path, pool: mpool.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    tests = folder("JSON-Schema-Test-Suite") / "tests"
    seen = Schemas(llama, pool)
    for draft in ("draft2020-12", "draft7"):
        root = tests / draft
        for file in sorted([*root.glob("*.json"), *(root / "optional" / "format").glob("*.json")]):
            for group in json.loads(file.read_text(encoding="utf-8")):
                seen.check(f"{draft}/{file.name}", group["schema"], group["tests"])
    show(capsys, "JSON-Schema-Test-Suite", seen.counts)
    assert seen.counts["valid accepted"] and not seen.wrong()


# ---- completions of chats --------------------------------------------------------------------------------------------

def read_completion(template: ChatTemplate, case: peerchats.Case) -> tuple[str, str, list[tuple[str, Any]]] | None:
    """Return the reasoning, the text and the calls that mpool reads from a completion; None: the model's format of tool
    calls is not supported."""
    wanted = tools.read_options({"tools": case.tools} if case.tools else {})
    try:
        found = tools.of_options(lambda: template, "", wanted)
    except mpool.Unsupported:
        return None
    prompt = template.render([{"role": "user", "content": "Hey"}], tools=wanted.definitions or None,
                             add_generation_prompt=True, enable_thinking=case.options.get("enable_thinking", True))
    kind: Any = reasoning.of_template(template.source, prompt, found is not None)
    if found is not None and kind is not None and issubclass(kind, reasoning.ThinkSplitter):
        why, text = reasoning.split(lambda: found.splitter(kind), case.text)
    else:
        why, text = reasoning.split(kind, case.text)
    if found is None:
        return why or "", text, []
    parser = found.parser(b"")
    text, _ = parser.feed(text, True)
    return why or "", text, [(call.name, call.arguments) for call in parser.results()]


@pytest.mark.slow
def test_chats_of_llama_cpp(capsys: pytest.CaptureFixture[str]) -> None:
    """Blanks around texts do not count: mpool drops those around calls and reasoning."""
    root = folder("llama.cpp")
    cases, unread = peerchats.read(root / "tests" / "test-chat.cpp")
    templates: dict[str, ChatTemplate] = {}
    counts, differ = Counter({"chains of the file not read": unread}), Counter[str]()
    for case in cases:
        template = templates.setdefault(case.template, ChatTemplate(
            (root / case.template).read_text(encoding="utf-8"), special={"bos_token": "<s>", "eos_token": "</s>"}))
        if {"is_partial", "json_schema"} & set(case.options):
            counts["of partial completions or formats"] += 1
            continue
        try:
            found = read_completion(template, case)
        except mpool.errors.TemplateError:
            counts["templates that need more than a message"] += 1
            continue
        if found is None:
            counts["tool calls in unsupported formats"] += 1
            continue
        calls = [(name, json.loads(arguments or "{}")) for name, arguments in case.calls]
        if (found[0].strip(), found[1].strip(), found[2]) == (case.reasoning.strip(), case.content.strip(), calls):
            counts["agree"] += 1
        elif found[2] == calls and str(case.options.get("reasoning_format", "NONE")).endswith("NONE"):
            counts["with reasoning in the text, which mpool separates"] += 1
        else:
            counts["differ"] += 1
            differ[Path(case.template).stem] += 1
    show(capsys, "llama.cpp's chats", counts)
    assert counts["agree"] and not compare(differ, KNOWN["chats"])


@pytest.mark.slow
def test_tool_parsers_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, known, out = folder("vllm"), KNOWN["parsers"], tmp_path / "outcomes.json"
    files = [f"tests/tool_parsers/{file}" for file in known["files"]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "vllmparsers", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-c", os.devnull, "--rootdir", str(root), *files], cwd=root, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS.parents[2]), str(HELPERS), str(root)]),
             "MPOOL_PEER_OUTCOMES": str(out)})
    assert out.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    outcomes: dict[str, str] = json.loads(out.read_text())
    show(capsys, "vLLM's tool parsers", Counter(outcomes.values()))
    excluded = {name for group in known["excluded"] for name in group["tests"]}
    assert [name for name, outcome in outcomes.items() if outcome == "failed"
            and name.partition("[")[0].rpartition("/")[2] not in excluded] == []
    assert "passed" in outcomes.values()
