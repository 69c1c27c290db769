"""``response_format``: completions that match a format by construction. The models are small and have random weights,
so their unconstrained output is noise: a completion matches only because of the masks, at any temperature."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import defaultmodels
import pytest

import mpool

llguidance = pytest.importorskip("llguidance")

from grammarsamples import accepts  # noqa: E402
from mpool.conversation import gbnf, grammar  # noqa: E402
from waiting import idle  # noqa: E402

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["Katze", "собака", "鳥", "a \"quoted\" one"]},
        "count": {"type": "integer", "minimum": -3, "maximum": 40},
        "weight": {"type": "number", "minimum": 0, "maximum": 10},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "owner": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6},
                                                   "born": {"type": ["null", "integer"], "minimum": 1900,
                                                            "maximum": 2020}},
                  "required": ["name", "born"], "additionalProperties": False},
    },
    "required": ["kind", "count", "weight", "flags", "owner"],
    "additionalProperties": False,
}
HOT: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "max_tokens": 400}
WORD = {"type": "regex", "regex": "[a-z]{3,8}( [a-z]{3,8}){4}"}
SHORT: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
                         "required": ["a", "b"], "additionalProperties": False}


@pytest.fixture(params=["llama", "qwen2"])
def tiny(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Delays all masks but the first of each completion until the event is set."""
    gate = threading.Event()
    lock, advance = threading.Lock(), grammar._MaskedRequest.advance
    waiting: list[grammar._MaskedRequest] = []

    def delayed(self: grammar._MaskedRequest) -> bool:
        with lock:
            if not gate.is_set():
                waiting.append(self)
                return not self.ticket.done()
            return advance(self)

    def deliver() -> None:
        gate.wait()
        with lock:  # only one thread may use a request
            for request in waiting:
                advance(request)

    monkeypatch.setattr(grammar._MaskedRequest, "advance", delayed)
    thread = threading.Thread(target=deliver)
    thread.start()
    yield gate
    gate.set()
    thread.join()


def validate(value: Any, schema: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema").validate(value, schema)


def check_matches(done: mpool.Completion, schema: dict[str, Any]) -> None:
    for choice in done.choices:
        assert choice.finish_reason == "stop", choice.text
        assert choice.parsed == json.loads(choice.text)
        validate(choice.parsed, schema)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(6))
def test_schema_at_any_temperature(pool: mpool.Pool, tiny: Path, seed: int) -> None:
    check_matches(pool.generate("Once", tiny, response_format=NESTED, seed=seed, n=4, **HOT), NESTED)


def test_schema_in_openai_shape_and_greedy(pool: mpool.Pool, llama: Path) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": NESTED}}
    check_matches(pool.generate("Once", llama, response_format=wanted, temperature=0, max_tokens=400), NESTED)


def test_json_object(pool: mpool.Pool, llama: Path) -> None:
    options = {**HOT, "max_tokens": 60}
    done = pool.generate("Once", llama, response_format={"type": "json_object"}, seed=3, n=8, **options)
    for choice in done.choices:
        if choice.finish_reason == "stop":
            assert isinstance(choice.parsed, dict)
        else:  # truncated: the start of an object, not parsed
            assert choice.finish_reason == "length" and choice.parsed is None
        assert choice.text.lstrip(" \n").startswith("{")


@pytest.mark.parametrize("seed", range(4))
def test_regex_and_grammar(pool: mpool.Pool, tiny: Path, seed: int) -> None:
    done = pool.generate("Once", tiny, response_format=WORD, seed=seed, **HOT)
    assert re.fullmatch(WORD["regex"], done.text) and done.finish_reason == "stop" and done.parsed is None
    lark = {"type": "grammar", "grammar": 'start: sum\nsum: num ("+" num)~1..3\nnum: /[1-9][0-9]{0,2}/'}
    done = pool.generate("1", tiny, response_format=lark, seed=seed, **HOT)
    assert re.fullmatch(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}", done.text)


#: Grammars in GBNF, from the features that llama.cpp documents in grammars/README.md, and the texts that they allow.
GBNF = [
    ('root ::= sum\nsum ::= num ("+" num){1,3} # a comment\nnum ::= [1-9] [0-9]? [0-9]?',
     r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}"),
    ('root ::= item+\nitem ::= "- " word "\\n"\nword ::= ("yes" | "no" | [^a-z \\n]{2})',
     r"(- (yes|no|[^a-z \n]{2})\n)+"),
    ('root ::= "(" (root | "x") ")"', None),
]


@pytest.mark.parametrize("source, allowed", GBNF)
def test_grammar_of_llama_cpp(pool: mpool.Pool, tiny: Path, source: str, allowed: str | None) -> None:
    for seed in range(4):
        done = pool.generate("1", tiny, response_format={"type": "grammar", "grammar": source}, seed=seed, **HOT)
        if allowed is None:
            depth = done.text.count("(")
            assert done.finish_reason == "length" or done.text == "(" * depth + "x" + ")" * depth
        elif done.finish_reason == "stop":
            assert re.fullmatch(allowed, done.text), done.text
        else:
            assert done.text.startswith("- ")  # the list has no end of its own


def lark(source: str, token_of: Any = lambda text: {"<think>": 65, "<|a|>": 66}.get(text)) -> str:
    return llguidance.LLMatcher.grammar_from_lark(gbnf.to_lark(source, token_of, 257, [256]))


#: Grammars in GBNF -> texts that they allow, texts that they do not allow. From grammars/README.md of llama.cpp.
GBNF_TEXTS: list[tuple[str, list[str], list[str]]] = [
    (r'root ::= "\x41\u0042\u00e9\U0001F600\u30a2\u0009"', ["AB\u00e9\U0001f600\u30a2\t"], ["AB", "\x41"]),
    (r"root ::= [\x41-\u0043\-\]\[\\]+", ["ABC-][\\"], ["D", "^"]),
    (r"root ::= [^\u0041\U0001F600]", ["B", "\u00e9", "\n", "\U0001f601"], ["A", "\U0001f600"]),
    (r"root ::= [\U0001F600-\U0001F64F] [\u0400-\u04FF]", ["\U0001f610\u0416"], ["\U0001f650\u0416", "a\u0416"]),
    (r"root ::= [\-a] [a\-] [a-] [-a]", ["-a--", "a-aa"], ["b---"]),
    ("root ::= [a&&b~-] [/]", ["&/", "a/", "~/", "-/"], ["c/", "a"]),
    ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx"], ["x", "ab"]),
    ('root ::= [a-z] [a-z] "!" | "ab" "?"', ["ab!", "ab?", "cd!"], ["cd?"]),
    ("root ::= . .", ["\na", "\u30a2/"], ["a"]), ('root ::= "{}" [{}]', ["{}{"], ["{}"]),
    ('root ::= (\n  # first\n "a" | \n "b"\n)+ # last\n', ["abab"], ["", "c"]),
    ('root ::= "a"{2} "b"{1,} "c"{0,2} [d]{ 1 , 2 }', ["aabbccdd", "aabd"], ["abd", "aabcccd", "aabcddd"]),
    ('root ::= fooBar foo_bar 1x Check-Mate\nfooBar ::= "1"\nfoo_bar ::= "2"\n1x ::= "3"\nCheck-Mate ::= "4"',
     ["1234"], ["1"]),
    ('root ::= "" | "a"', ["", "a"], ["b"]), ('root ::= "(" (root | "x") ")"', ["(x)", "((x))"], ["((x)", "x"]),
]


@pytest.mark.parametrize(("source", "allowed", "others"), GBNF_TEXTS, ids=range(len(GBNF_TEXTS)))
def test_texts_of_gbnf(source: str, allowed: list[str], others: list[str]) -> None:
    made = lark(source)
    assert all(accepts(made, text) for text in allowed) and not any(accepts(made, text) for text in others)


def test_invalid_gbnf() -> None:
    """The error has the line and what it must have, or the name that does not exist."""
    for source, words in (('root ::= "a', "line 1 must have a text that ends"), ("root ::= [a", "a class that ends"),
                          ("\nroot ::= [z-a]", "line 2 must have a range"), ("root ::= x", "the rule x is not defined"),
                          ('x ::= "a"', "no rule root"), (r'root ::= "\uD83D"', "a character of Unicode"),
                          (r'root ::= "\u12"', "an escape sequence"),
                          (r'root ::= "\U00110000"', "a character of Unicode"), ("root ::= (", r"have \)"),
                          ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
                          ("root ::= <none>", "<none> is not a single token"),
                          ("root ::= <[257]>", "257 does not exist"),
                          ('root ::= "a" )', "the end of the rule"), ('root ::= "a"{3,2}', "at least 3 repetitions")):
        with pytest.raises(ValueError, match=words):
            lark(source)


def test_tokens_of_gbnf(pool: mpool.Pool, tiny: Path) -> None:
    """A token reference allows one token, control or not; with ``!``, all others but those that end a text. In Lark's
    language, texts, regular expressions and comments have none."""
    tokenizer = pool.get(tiny).tokenizer
    control = next(at for at, is_control in enumerate(bytes(tokenizer.token_table().control)) if is_control
                   and at not in tokenizer.eog_ids)
    name, letter = tokenizer.token_text(control), int(tokenizer.encode("a", add_special=False)[-1])
    assert re.fullmatch(r"<[^<>\s]+>", name)
    for source, wanted in ((f'root ::= {name} "b" <[{letter}]>', [control, None, letter]),
                           (f"root ::= <[{letter}]> <[{control}]>", [letter, control]),
                           (f'start: {name} /[{name[1]}]/ <[{letter}]> // {name}', [control, None, letter]),
                           (f"root ::= (!<[{letter}]>){{3}} <[{letter}]>", [-letter, -letter, -letter, letter])):
        for seed in range(3):
            done = pool.generate("1", tiny, response_format={"type": "grammar", "grammar": source}, seed=seed, **HOT)
            assert done.finish_reason == "stop"
            ids = [one for one in done.token_ids if one not in tokenizer.eog_ids]
            assert len(ids) == len(wanted) and all(
                want is None or (one != -want if want < 0 else one == want) for one, want in zip(ids, wanted)), ids
    for source, words in ((f"root ::= <[{tokenizer.vocab_size}]>", "does not exist"),
                          ("root ::= <nothing>", "not a single"), ("start: <nothing>", "not a single"),
                          (f"start: <[{tokenizer.vocab_size}]>", "does not exist")):
        with pytest.raises(mpool.InvalidArgument, match=words) as caught:
            pool.generate("1", tiny, response_format={"type": "grammar", "grammar": source})
        assert caught.value.param == "response_format"


@pytest.mark.parametrize(("kind", "source"), [
    ("regex", "a("), ("regex", "(?=a)b"), ("regex", r"a\bc"), ("grammar", "start: none"), ("grammar", 'start: "a'),
    ("grammar", 'start: %json {"type": "none"}'),
    *(("schema", one) for one in (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"pattern": "("}, {"type": "string", "format": "none"},
        {"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}, "c": {}}},
        {"patternProperties": {"a": {}, "b": {"type": "string"}}, "type": "object"}, {"minLength": 3, "maxLength": 2,
                                                                                      "type": "string"}))])
def test_words_of_refusals(pool: mpool.Pool, tiny: Path, kind: str, source: Any) -> None:
    """A refusal names neither options nor terms of the compiler of grammars, with the model and without."""
    wanted = source if kind == "schema" else {"type": kind, kind: source}
    for model in (tiny, "org/none"):
        with pytest.raises(mpool.InvalidArgument) as caught:
            pool.generate("1", model, response_format=wanted)
        assert caught.value.param == "response_format"
        assert re.search(r"coerce|Unimplemented|disjoint|Unsatis|lexer|lookaround|in regex|\d\(\d+\)|min/max",
                         str(caught.value)) is None, caught.value


def test_pydantic(pool: mpool.Pool, llama: Path) -> None:
    pydantic = pytest.importorskip("pydantic")
    Pet = pydantic.create_model("Pet", kind=(str, pydantic.Field(max_length=5)), age=(int, pydantic.Field(ge=0, le=20)))
    done = pool.generate("Once", llama, response_format=Pet, seed=1, **HOT)
    assert isinstance(done.parsed, Pet) and 0 <= done.parsed.age <= 20
    assert done.parsed == Pet.model_validate_json(done.text)


#: A schema with a keyword, a pattern and a format that a grammar cannot enforce, beside a bound that it can.
UNENFORCEABLE = {"type": "object", "properties": {
    "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "uniqueItems": True},
    "name": {"type": "string", "pattern": "^(?=a)", "maxLength": 4},
    "at": {"type": "string", "format": "odd", "maxLength": 4}},
    "required": ["tags", "name", "at"], "additionalProperties": False}


def test_keywords_that_cannot_be_enforced(pool: mpool.Pool, llama: Path) -> None:
    """Such keywords are left out with ``strict`` False and in pydantic classes, which check the completion themselves.
    Otherwise they are errors. All other keywords are enforced in any case."""
    def wanted(**options: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"schema": UNENFORCEABLE, **options}}

    relaxed = json.loads(pool.generate("Once", llama, response_format=wanted(strict=False), seed=2, **HOT).text)
    assert len(relaxed["tags"]) <= 3 and len(relaxed["name"]) <= 4 and len(relaxed["at"]) <= 4
    for options in ({}, {"strict": None}, {"strict": True}):
        with pytest.raises(mpool.InvalidArgument, match="the JSON schema cannot be used"):
            pool.generate("Once", llama, response_format=wanted(**options))
    unique = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}
    with pytest.raises(mpool.InvalidArgument, match="uniqueItems") as caught:
        pool.generate("Once", llama, response_format=unique)
    assert "strict" in caught.value.hint
    with pytest.raises(mpool.InvalidArgument, match="json_schema.strict` must be True or False, got 3"):
        pool.generate("Once", llama, response_format=wanted(strict=3))
    pydantic = pytest.importorskip("pydantic")
    few = pydantic.Field(max_length=2)
    Tags = pydantic.create_model("Tags", tags=(set[bool], few))
    parsed = {pool.generate("Once", llama, response_format=Tags, seed=seed, **HOT).parsed is None for seed in range(4)}
    assert False in parsed  # the class turns repeated values into one


def test_same_tokens_alone_and_among_others(pool: mpool.Pool, llama: Path) -> None:
    """The result is the same streamed or not, alone or with concurrent requests, with and without draft tokens."""
    def one(seed: int, stream: bool = False) -> tuple[str, str]:
        options = {**HOT, "response_format": NESTED, "seed": seed, "logprobs": True, "top_logprobs": 2}
        if not stream:
            done = pool.generate("Once", llama, **options)
        else:
            flow = pool.generate("Once", llama, stream=True, **options)
            text = "".join(chunk.text for chunk in flow)
            done = flow.result()
            assert text == done.text
        assert len(done.logprobs or ()) == len(done.token_ids)
        return done.text, repr(done.logprobs)

    alone = [one(seed) for seed in range(8)]
    with ThreadPoolExecutor(12) as threads:
        noise = [threads.submit(pool.generate, "Twice", llama, max_tokens=60, ignore_eos=True, seed=at)
                 for at in range(4)]
        assert list(threads.map(lambda seed: one(seed, stream=True), range(8))) == alone
        assert all(len(task.result().token_ids) == 60 for task in noise)


def test_late_masks_delay_no_other_request(pool: mpool.Pool, llama: Path, gate: threading.Event) -> None:
    expected: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        masked = [threads.submit(pool.generate, "Once", llama, response_format=NESTED, seed=seed, n=2, **HOT)
                  for seed in range(3)]
        others = pool.generate("Twice", llama, max_tokens=40, ignore_eos=True, seed=1)
        assert len(others.token_ids) == 40
        assert not any(task.done() for task in masked)
        again = pool.generate("Twice", llama, max_tokens=40, ignore_eos=True, seed=1)  # while all others wait for masks
        assert again.token_ids == others.token_ids
        gate.set()
        for task in masked:
            check_matches(task.result(timeout=60), NESTED)
            expected.append(task.result().text)
    assert expected == [pool.generate("Once", llama, response_format=NESTED, seed=seed, n=2, **HOT).text
                        for seed in range(3)]


def test_cancel_and_deadline_while_waiting(pool: mpool.Pool, llama: Path, gate: threading.Event) -> None:
    flow = pool.generate("Once", llama, stream=True, response_format=NESTED, seed=1, **HOT)
    next(flow)  # the first token: its mask was submitted with the request
    flow.close()
    assert flow.result().finish_reason == "cancelled"
    with pytest.raises(mpool.Timeout):
        pool.generate("Once", llama, response_format=NESTED, seed=1, timeout=0.3, **HOT)
    dropped = pool.generate("Once", llama, stream=True, response_format=NESTED, seed=2, **HOT)
    del dropped
    idle(pool, 30)  # masks are computed after the test


def test_errors_of_the_mask_thread(pool: mpool.Pool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: grammar._MaskedRequest, choice: int) -> None:
        raise mpool.LimitError("too complex")

    monkeypatch.setattr(grammar._MaskedRequest, "_advance", broken)
    with pytest.raises(mpool.LimitError, match="too complex"):
        pool.generate("Once", llama, response_format=NESTED, seed=1, **HOT)
    with pytest.raises(mpool.LimitError, match="too complex"):
        list(pool.generate("Once", llama, stream=True, response_format=NESTED, seed=1, **HOT))
    monkeypatch.undo()
    check_matches(pool.generate("Once", llama, response_format=NESTED, seed=1, **HOT), NESTED)


@pytest.mark.parametrize("error", [MemoryError("no memory"), ValueError("no such text")], ids=repr)
def test_an_error_of_the_tokenizer_is_named(pool: mpool.Pool, llama: Path, monkeypatch: pytest.MonkeyPatch,
                                            error: Exception) -> None:
    """An error of the tokenizer while a mask is computed is no limit of the grammar."""
    encode, failing = grammar._TokenizerAdapter._encode, [True]

    def fails(self: grammar._TokenizerAdapter, text: str) -> list[int]:
        if failing[0] and threading.current_thread().name.startswith("mpool-masks"):
            raise error
        return encode(self, text)

    monkeypatch.setattr(grammar._TokenizerAdapter, "_encode", fails)
    kind = mpool.MemoryExhausted if isinstance(error, MemoryError) else mpool.InternalError
    with pytest.raises(kind, match=str(error)):
        pool.generate("Once", llama, response_format=NESTED, seed=1, **HOT)
    failing[0] = False
    check_matches(pool.generate("Once", llama, response_format=NESTED, seed=1, **HOT), NESTED)


@pytest.mark.parametrize("regex", ["[A-Z][a-z]+ [A-Za-z ,]{20,60}", "[a-z]{1,9}( [a-z]{1,25})*", "([a-z ]|[0-9])+"])
def test_token_sets_do_not_change_masks(pool: mpool.Pool, llama: Path, regex: str) -> None:
    tokenizer = pool.get(llama).tokenizer
    compiler = grammar._compiler(tokenizer)
    plain = llguidance.LLMatcher(compiler._tokenizer.with_slices([]), llguidance.LLMatcher.grammar_from_regex(regex))
    sets, seed = compiler.compiled("regex", regex)[1].deep_copy(), 1
    for _ in range(25):
        mask = sets.compute_bitmask()
        assert mask == plain.compute_bitmask() and any(mask)
        allowed = [at for at in range(tokenizer.vocab_size) if mask[at // 8] >> at % 8 & 1]
        seed = (seed * 48271) % 2147483647
        token = allowed[seed % len(allowed)]
        if not sets.consume_token(token) or not plain.consume_token(token) or sets.is_stopped():
            break
    assert not sets.is_error() and not plain.is_error()


def test_completions_cut_by_length_or_stop_string(pool: mpool.Pool, llama: Path) -> None:
    cut = pool.generate("Once", llama, response_format=NESTED, seed=1, **{**HOT, "max_tokens": 5})
    assert cut.finish_reason == "length" and cut.parsed is None and len(cut.token_ids) == 5
    stopped = pool.generate("Once", llama, response_format=SHORT, seed=1, stop='"b"', **HOT)
    assert stopped.finish_reason == "stop" and stopped.stop == '"b"' and stopped.parsed is None


@pytest.mark.parametrize(("wanted", "match"), [
    (3, "`response_format` must be .*, got 3"), ({}, "must be"), ([], "must be"), ({"type": "xml"}, "'xml'"),
    ({"type": "regex"}, "response_format.regex"), ({"type": "regex", "regex": "(a"}, "regular expression"),
    ({"type": "regex", "regex": "\ud800"}, "Unicode"),
    ({"type": "grammar", "grammar": "start: nothing"}, "the grammar cannot be used"),
    ({"type": "grammar", "grammar": "root ::= nothing"}, "the grammar cannot be used: it is not valid GBNF"),
    ({"type": "grammar", "grammar": 'root ::= "a" ('}, "the grammar cannot be used: it is not valid GBNF"),
    ({"type": "grammar", "grammar": 'root ::= ' + "a" * 60000}, "the grammar cannot be used"),
    ({"type": "json_schema", "json_schema": {"schema": 3}}, "json_schema.schema` must be a JSON schema, got 3"),
    ({"type": "json_schema", "json_schema": {"schema": {"$ref": "http://example.org/x"}}}, "JSON schema cannot"),
    ({"type": "object", "properties": {"a": {"type": "wat"}}}, "JSON schema cannot"),
    ({"type": "object", "x": float("nan")}, "that is not JSON"),
])
def test_invalid_formats(pool: mpool.Pool, llama: Path, wanted: Any, match: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=match):
        pool.generate("Once", llama, response_format=wanted)


def test_bounds(pool: mpool.Pool, llama: Path) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    itself: dict[str, Any] = {"type": "object"}
    itself["properties"] = itself
    for wanted in (deep, itself, {"type": "regex", "regex": "a" * 70000}, {"enum": ["x" * 70000]},
                   {"type": "grammar", "grammar": "start: " + "(" * 100 + '"a"' + ")" * 100},
                   {"type": "grammar", "grammar": "root ::= " + "(" * 100 + '"a"' + ")" * 100}):
        with pytest.raises(mpool.LimitError):
            pool.generate("Once", llama, response_format=wanted)
    for name, value in (("ignore_eos", True), ("min_tokens", 3)):
        with pytest.raises(mpool.InvalidArgument, match=name):
            pool.generate("Once", llama, response_format=SHORT, **{name: value})


def test_format_text_has_no_effect(pool: mpool.Pool, llama: Path) -> None:
    wanted = pool.generate("Once", llama, temperature=0, max_tokens=9)
    got = pool.generate("Once", llama, temperature=0, max_tokens=9, response_format={"type": "text"})
    assert got.token_ids == wanted.token_ids and got.parsed is None


def test_without_llguidance(pool: mpool.Pool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(grammar, "installed", lambda: False)
    for schema in (SHORT, UNENFORCEABLE):
        wanted = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
        for form in (schema, wanted):
            with pytest.raises(mpool.Unsupported, match='pip install "llguidance'):
                pool.generate("Once", llama, response_format=form)


def test_results_of_worker_processes_are_the_same(pool: mpool.Pool, tiny: Path) -> None:
    """Processes and threads give equal results: complete and streamed, for n above 1, and for concurrent requests."""
    calls = [dict(seed=seed, n=1 + seed % 3, response_format=form)
             for seed, form in enumerate((SHORT, WORD, NESTED, None, SHORT, NESTED))]
    expected = [pool.generate("Once", tiny, **HOT, **call) for call in calls]
    with mpool.Pool(mpool.PoolConfig(threads=2, isolation="process")) as there, ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda call: there.generate("Once", tiny, **HOT, **call), calls))
        for one, other in zip(expected, found):
            assert [(choice.token_ids, choice.finish_reason) for choice in one.choices] == [
                (choice.token_ids, choice.finish_reason) for choice in other.choices]
        stream = there.generate("Once", tiny, seed=1, response_format=WORD, stream=True, **HOT)
        assert "".join(chunk.text for chunk in stream) == pool.generate("Once", tiny, seed=1, response_format=WORD,
                                                                        **HOT).text
        metrics = there.metrics()
        assert (metrics["errors"], metrics["retries"], metrics["worker_faults"]) == (0, 0, 0)


@pytest.mark.slow
def test_smollm2() -> None:
    defaultmodels.use_default_models()
    messages = [{"role": "user", "content": "Describe a pet as JSON."}]
    for seed in range(6):
        check_matches(mpool.chat(messages, response_format=NESTED, seed=seed, **HOT), NESTED)
    free = mpool.chat(messages, temperature=0, max_tokens=30)
    any_text = mpool.chat(messages, temperature=0, max_tokens=30, response_format={"type": "regex", "regex": "(?s:.*)"})
    assert any_text.token_ids == free.token_ids  # a mask that allows every sampled token changes nothing
    with ThreadPoolExecutor(8) as threads:
        flows = [mpool.chat(messages, response_format=NESTED, seed=seed, stream=True, **HOT) for seed in range(8)]
        texts = list(threads.map(lambda flow: "".join(chunk.text for chunk in flow), flows))
    for text in texts:
        validate(json.loads(text), NESTED)
