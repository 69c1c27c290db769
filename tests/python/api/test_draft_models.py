"""Draft models: the results stay the same, byte for byte; the memory is shown; models that do not fit are refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.errors import FileError, FormatError, InvalidArgument, UnknownModel, WrongCapability
from mpool.runtime.load_options import AS_CONFIGURED

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
          "required": ["name", "n"]}
CALLS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.9, "seed": 3, "top_p": 0.95, "n": 2, "ignore_eos": True},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "stop": ["e", "q"]},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
]
PROGRAM = """
import json, sys
import mpool
model, draft, calls = sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3])
with mpool.Pool(mpool.PoolConfig(threads=2, max_workers_per_model=1)) as pool:
    pool.load(model, draft=draft)
    alone = [pool.generate("Once upon a time", model, max_tokens=48, logprobs=True, top_logprobs=2, **options)
             for options in calls]
    found = pool.metrics()
    jobs = [pool.submit("text_to_text", prompt=f"Once {number}", model=model, max_tokens=48, **options)
            for number, options in enumerate(2 * calls)]
    together = [job.result() for job in jobs]
print(json.dumps([[repr(done.choices) for done in alone + together],
                  {name: found[name] for name in ("draft_tokens", "accepted_draft_tokens")}]))
"""


@pytest.fixture(scope="module")
def twin(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model, which proposes what the model chooses."""
    return Path(shutil.copytree(llama, tmp_path_factory.mktemp("twin") / "llama"))


def run(model: Path, draft: Path | str, mode: str) -> tuple[list[str], dict[str, int]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(model), str(draft), json.dumps(CALLS)],
                          capture_output=True, text=True, timeout=600, env={**os.environ, "MPOOL_SPECULATION": mode})
    assert done.returncode == 0, done.stderr[-2000:]
    results, counts = json.loads(done.stdout)
    return results, counts


def test_results_are_the_same_bytes(llama: Path, twin: Path, qwen2: Path) -> None:
    without, none = run(llama, "", "0")
    assert none["draft_tokens"] == 0
    twins, same = run(llama, twin, "2")
    assert twins == without
    assert same["draft_tokens"] > 100
    # equal models choose equal tokens; the penalties of a request do not see the tokens of the same draft
    assert same["accepted_draft_tokens"] > 0.9 * same["draft_tokens"]
    others, other = run(llama, qwen2, "2")
    assert others == without
    assert other["accepted_draft_tokens"] < other["draft_tokens"]
    assert run(llama, twin, "1")[0] == without


def test_memory_table_and_removal(llama: Path, twin: Path) -> None:
    with mpool.Pool() as pool:
        pool.load(llama)
        before = pool.ps()[0]
        assert before.draft is None and before.facts["draft_bytes"] == 0
        pool.load(llama, draft=twin)
        row = pool.ps()[0]
        assert row.draft == str(twin) and row.facts["draft_bytes"] == row.facts["weight_bytes"]
        assert row.model_bytes == 2 * before.model_bytes
        assert "with draft" in repr(pool.ps())
        pool.load(llama)  # unchanged
        assert pool.ps()[0].draft == str(twin)
        assert pool.metrics()["memory_used"] >= row.model_bytes
        pool.load(llama, draft=False)
        assert pool.ps()[0].draft is None and pool.ps()[0].model_bytes == before.model_bytes


def test_handles_carry_it(llama: Path, twin: Path) -> None:
    with mpool.Pool() as pool, mpool.Pool() as other:
        small = pool.register("small", twin)
        handle = pickle.loads(pickle.dumps(pool.register("large", llama, draft=small)))
        entry = other._restore(*handle.__reduce__()[1][1:])._entry
        assert entry.loading.draft == str(twin)
        assert entry.loading.over(AS_CONFIGURED) == entry.loading


def test_a_changed_draft_is_read_again(llama: Path, twin: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(twin, tmp_path / "copy"))
    with mpool.Pool() as pool:
        handle = pool.load(llama, draft=copy)
        assert handle._entry.changed() is None
        (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
        assert handle._entry.changed() == str(copy / "config.json")
        pool.load(llama)
        assert handle._entry.changed() is None and pool.ps()[0].draft == str(copy)


@pytest.mark.parametrize("value", [True, 7, b"x"])
def test_other_values_are_refused(value: Any, llama: Path) -> None:
    with mpool.Pool() as pool:
        for call in (lambda: pool.load(llama, draft=value), lambda: pool.register("x", llama, draft=value)):
            with pytest.raises(InvalidArgument) as caught:
                call()
            assert caught.value.param == "draft"


def test_models_that_do_not_fit_are_refused(llama: Path, twin: Path, bert: Path, tmp_path: Path) -> None:
    longer = Path(shutil.copytree(twin, tmp_path / "longer"))
    text = json.loads((longer / "tokenizer.json").read_text())
    first, second = list(text["model"]["vocab"])[300:302]
    ids = text["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    (longer / "tokenizer.json").write_text(json.dumps(text))
    with mpool.Pool() as pool:
        with pytest.raises(InvalidArgument, match="vocabulary of the model: token 300 differs"):
            pool.load(llama, draft=longer)
        with pytest.raises(WrongCapability, match="text_embedding"):
            pool.load(llama, draft=bert)
        with pytest.raises(InvalidArgument, match="only text_to_text models") as caught:
            pool.load(bert, draft=llama)
        assert caught.value.param == "draft"
        with pytest.raises(InvalidArgument, match='isolation="thread"'):
            pool.load(llama, draft=twin, isolation="process")
        pool.load(llama, draft=twin)
        assert pool.generate("x", llama, max_tokens=2).usage.completion_tokens <= 2
        with pytest.raises(InvalidArgument, match='isolation="thread"'):  # the model keeps its draft model
            pool.load(llama, isolation="process")
        pool.load(llama, draft=False, isolation="process")
        with pytest.raises(InvalidArgument, match='isolation="thread"'):  # and its isolation
            pool.load(llama, draft=twin)


def test_a_draft_that_cannot_be_read_is_refused_when_it_is_named(llama: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(llama, tmp_path / "broken"))
    (broken / "config.json").write_text("{")
    cases: list[tuple[Path, type[Exception]]] = [(broken, FormatError), (tmp_path / "none", FileError)]
    with mpool.Pool() as pool:
        for draft, error in cases:
            with pytest.raises(error):
                pool.register("large", llama, draft=draft)
            with pytest.raises(UnknownModel):
                pool.get("large")


def test_serve_needs_one_model(llama: Path, twin: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "mpool", "serve", "--draft", str(twin), "-m", f"a={llama}", "-m",
                           f"b={llama}"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "--draft must be used with exactly one --model" in done.stderr
