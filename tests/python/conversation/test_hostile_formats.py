"""Formats of hostile clients: each would take gigabytes, minutes or the stack if this process compiled it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toolmodels as tm

import mpool

llguidance = pytest.importorskip("llguidance")

from mpool.conversation import enforced_schemas, grammar, grammar_trial  # noqa: E402


def chain(rules: int, is_is: str = ":", first: str = "start") -> str:
    """A grammar of rules that each refer to the next one."""
    return (f"{first} {is_is} r0\n" + "".join(f'r{at} {is_is} "a" r{at + 1}\n' for at in range(rules))
            + f'r{rules} {is_is} "b"')


def doubled(times: int) -> str:
    """A grammar of a terminal with ``2 ** times`` optional characters."""
    return f"start: T{times}\nT0: /a?/\n" + "".join(f"T{at}: T{at - 1} T{at - 1}\n" for at in range(1, times + 1))


HOSTILE: dict[str, dict[str, Any]] = {
    "chain of rules": {"type": "grammar", "grammar": chain(2800)},
    "doubled terminals": {"type": "grammar", "grammar": doubled(16)},
    "optional characters": {"type": "regex", "regex": "a?" * 30000},
    "multiples": {"anyOf": [{"type": "integer", "multipleOf": 10007 + at} for at in range(100)]},
    "chain of rules in GBNF": {"type": "grammar", "grammar": chain(2800, "::=", "root")},
}


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[grammar_trial.Children]:
    """Processes of the test's own, with a second instead of three."""
    children = grammar_trial.Children(grammar_trial.PROGRAM)
    monkeypatch.setattr(grammar_trial, "_children", children)
    monkeypatch.setattr(grammar_trial, "SECONDS", 1.0)
    yield children


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


@pytest.mark.sample(3)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_formats_are_refused(pool: mpool.Pool, llama: Path, kind: str) -> None:
    """The error names the option; this process neither ends nor grows, and compiles the next format."""
    done = pool.generate("Once", llama, response_format={"type": "regex", "regex": "ab"}, max_tokens=8)
    before = resident()
    with pytest.raises(mpool.LimitError, match="`response_format`: the .* is too complex: it needs more") as caught:
        pool.generate("Once", llama, response_format=HOSTILE[kind])
    assert caught.value.param == "response_format" and caught.value.hint
    assert resident() - before < 32 << 20
    assert done.text == pool.generate("Once", llama, response_format={"type": "regex", "regex": "(ab)"},
                                      max_tokens=8).text == "ab"


def test_large_formats_are_compiled(pool: mpool.Pool, llama: Path) -> None:
    """The limits leave room for large formats that are linear."""
    words = "|".join(f"w{at}.*z" for at in range(5000))
    for wanted in ({"type": "regex", "regex": words}, {"enum": [f"e{at}" for at in range(5000)]},
                   {"type": "grammar", "grammar": chain(200)}, {"type": "grammar", "grammar": doubled(5)},
                   {"type": "object", "properties": {f"key{at}": {"type": "integer"} for at in range(500)}}):
        assert pool.generate("Once", llama, response_format=wanted, max_tokens=1).finish_reason in ("length", "stop")


def test_the_deepest_grammar_that_passes_does_not_overflow_the_stack(pool: mpool.Pool, llama: Path) -> None:
    """A thread of this process has twice the stack of the process that tries a grammar."""
    trial = grammar._compiler(pool.get(llama).tokenizer)._trial

    def passes(rules: int) -> bool:
        try:
            return trial.compile(llguidance.LLMatcher.grammar_from_lark(chain(rules))) >= 0
        except grammar_trial.Refused:
            return False

    low, high = 200, 2900
    assert passes(low) and not passes(high)
    while high - low > 20:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    assert pool.generate("Once", llama, response_format={"type": "grammar", "grammar": chain(low)}, max_tokens=1).text


def test_memory_of_cached_formats_is_limited(pool: mpool.Pool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = grammar._compiler(pool.get(llama).tokenizer)
    needed = {"a": 50 << 20, "b": 60 << 20, "c": 70 << 20, "d": 200 << 20, "e": 1}
    monkeypatch.setattr(grammar_trial.Trial, "compile", lambda self, text: needed[json.loads(text)[
        "grammars"][0]["lark_grammar"][-2]])
    compiler._formats._entries.clear()
    kept = []
    for regex in needed:
        compiler.compiled("regex", regex)
        kept.append("".join(source for _, (_, source, _) in compiler._formats._entries))
    assert kept == ["a", "ab", "c", "d", "e"]  # 110 MB fit, 180 MB do not; the newest always stays


def test_a_hostile_schema_of_a_tool(pool: mpool.Pool, llama: Path) -> None:
    pool.register("tools", str(llama), chat_template=tm.HERMES, replace=True)
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": HOSTILE["multiples"]}, "required": ["a"]}}
    with pytest.raises(mpool.LimitError, match="`tools`: a schema is too complex: it needs") as caught:
        pool.chat([{"role": "user", "content": "Hi"}], "tools", tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"


def test_a_pattern_that_exceeds_a_limit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema is not strict: its other keywords are enforced."""
    def exceeds(source: str) -> str | None:
        if "a{4}b" in source:
            raise grammar_trial.Refused("it needs more")
        return None

    monkeypatch.setattr(grammar_trial, "fault", exceeds)
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "a{4}b", "maxLength": 9}}}
    found = enforced_schemas.enforce(json.dumps(schema), True)
    assert found.left_out == ("properties.x.pattern",)
    assert found.schema["properties"]["x"] == {"type": "string", "maxLength": 9}
    with pytest.raises(grammar_trial.Refused):
        enforced_schemas.enforce(json.dumps(schema), False)


def test_without_processes_no_format_is_compiled(pool: mpool.Pool, llama: Path, monkeypatch: pytest.MonkeyPatch,
                                                 processes: grammar_trial.Children) -> None:
    monkeypatch.setattr(processes, "program", processes.program._replace(packages=("not_installed",)))
    compiler = grammar._compiler(pool.get(llama).tokenizer)
    compiler._formats._entries.clear()
    with pytest.raises(mpool.SpawnFailed, match="not_installed"):
        pool.generate("Once", llama, response_format={"type": "regex", "regex": "unseen"})
    assert pool.generate("Once", llama, max_tokens=2, temperature=0).text


AMBIGUOUS = {"type": "grammar", "grammar": "start: s \"0\"\ns: s s s s | s s | /[a-z ]/"}


def test_a_grammar_with_slow_masks_ends_its_request(pool: mpool.Pool, llama: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mask takes longer than the one before. Without a limit, the request would occupy one of four threads."""
    unlikely = {token: -100.0 for token in pool.tokenize("0", llama, add_special=False)}
    options: dict[str, Any] = {"logit_bias": unlikely, "max_tokens": 200, "temperature": 1.0, "seed": 1}
    with monkeypatch.context() as patch:
        patch.setattr(grammar, "_MASK_SECONDS", 0.02)
        patch.setattr(grammar, "_MASK_SECONDS_PER_TOKEN", 0.0)
        with pytest.raises(mpool.LimitError, match="masks .* are too slow: .* limit is 0.02 s and 0 s per") as caught:
            pool.generate("Once", llama, response_format=AMBIGUOUS, **options)
    assert caught.value.param == "response_format"
    assert pool.generate("Once", llama, response_format={"type": "regex", "regex": "ab"}, max_tokens=8).text == "ab"


def test_the_time_of_masks_is_limited_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may use 5 s, and 0.1 s for each token of any of its completions."""
    now, sent = [0.0], list[int]()
    monkeypatch.setattr(time, "thread_time", lambda: now[0])

    def request(tokens: int, seconds: float) -> bool:
        """Return True if a request may use so many seconds for the masks after a first burst of tokens."""
        def consume(ids: list[int]) -> bool:
            now[0] += seconds / 4
            return True

        def mask() -> bytes:
            now[0] += seconds / 4
            return b"\xff"

        matchers: Any = [SimpleNamespace(consume_tokens=consume, compute_bitmask=mask, is_error=lambda: False)] * 2
        ticket: Any = SimpleNamespace(sampled_ids=lambda choice, start: ([1] * (tokens // 2), False),
                                      mask=lambda *args: sent.append(args[0]), cancel=lambda: None, done=lambda: False)
        limited: Any = SimpleNamespace(failure=None, param="response_format", _errors={})
        return grammar._MaskedRequest(ticket, limited, matchers, "key").advance()

    assert request(100, 14.99) and not request(100, 15.01)
    assert request(2, 5.19) and not request(2, 5.21)
    assert request(2000, 204.9) and not request(2000, 205.1)
    assert sent == [0, 1, 0] * 3  # a mask that exceeds the limit is not used
