"""Tokenizer files of an adversary: steps that multiply text, expressions that take exponential time, panics."""

import base64
import json
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.tokenizers import growth, limits, native, open_tokenizer
from mpool.tokenizers.charsmap import CharsMap
from mpool.tokenizers.isolated import IsolatedTokenizer
from mpool.tokenizers.patterns import Cost, cost
from mpool.models.spec import TokenizerSource

import childprograms

CATASTROPHE = r"(a|aa)+$"
FDFA = "\ufdfa"


def tokenizer_json(**sections: Any) -> dict[str, Any]:
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}} | sections


def opened(folder: Path, content: dict[str, Any] | str, **config: Any) -> Any:
    path = folder / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return open_tokenizer(TokenizerSource(json_path=str(path), config=config))


def chain(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def template(count: int) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * count, "pair": [
        {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}}


TIMES_1000 = replace({"String": "a"}, "a" * 1000)
#: Sections of a file -> the step that the message names.
GROWING: dict[str, tuple[dict[str, Any], str]] = {
    "six steps of 1,000 times": ({"normalizer": chain(*[TIMES_1000] * 6)}, r"normalizer\.normalizers\[1\] \(Replace\)"),
    "nested": ({"normalizer": chain(chain(TIMES_1000), chain(TIMES_1000))}, r"normalizers\[1\]\.normalizers\[0\]"),
    "Prepend": ({"normalizer": {"type": "Prepend", "prepend": "a" * 5_000_000}}, r"normalizer \(Prepend\)"),
    "an expression that matches nothing": ({"normalizer": replace({"Regex": "x*"}, "a" * 5000)}, "Replace"),
    "alternatives, one of them empty": ({"normalizer": chain(replace({"Regex": "x|"}, "a" * 100),
                                                             replace({"Regex": "(?=a)"}, "a" * 100))}, "Replace"),
    "NFKD of what a step made": ({"normalizer": chain({"type": "NFKD"}, replace({"String": " "}, FDFA * 50),
                                                      {"type": "NFKD"}, replace({"String": " "}, FDFA * 50))},
                                 r"normalizers\[2\]"),
    "many NFKD": ({"normalizer": chain(*[{"type": "NFKD"}, replace({"String": "\u0644"}, FDFA)] * 6)}, "NFKD"),
    "bytes of bytes": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 20}}, "ByteLevel"),
    "spaces before spaces": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False}] * 40}}, "Metaspace"),
    "a template that repeats": ({"post_processor": {"type": "Sequence", "processors": [template(1000)] * 6}},
                                r"processors\[1\]"),
    "special tokens of many ids": ({"post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "s", "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"s": {"id": "s", "ids": [0] * 10_000, "tokens": ["a"] * 10_000}}}},
        "TemplateProcessing"),
    "a template that removes the text, then special tokens of many ids": ({"post_processor": {
        "type": "Sequence", "processors": [template(0) | {"pair": []}, template(1) | {
            "single": [{"SpecialToken": {"id": "s", "type_id": 0}}],
            "special_tokens": {"s": {"id": "s", "ids": [0] * 10_000, "tokens": ["a"] * 10_000}}}]}},
        r"processors\[1\]"),
    "decoder": ({"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "a" * 1000)] * 3}},
                r"decoder\.decoders\[0\]"),
    "decoder, empty pattern": ({"decoder": replace({"String": ""}, "a" * 1000)}, "decoder"),
    "added tokens": ({"normalizer": TIMES_1000, "added_tokens": [
        {"id": 3 + i, "content": "a" * 100 + str(i), "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": True, "special": False} for i in range(100)]}, "added tokens"),
}


@pytest.fixture(autouse=True)
def memory_stays_flat() -> Any:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # 2 GB


@pytest.mark.parametrize("name", GROWING)
def test_step_that_multiplies_is_named_at_load(tmp_path: Path, name: str) -> None:
    sections, step = GROWING[name]
    with pytest.raises(mpool.LimitError, match=step):
        opened(tmp_path, tokenizer_json(**sections))


def test_keys_after_the_model_or_in_disguise_are_read(tmp_path: Path) -> None:
    bomb = json.dumps(chain(*[TIMES_1000] * 6))
    whole = json.dumps(tokenizer_json())[:-1]
    head = whole.replace('"normalizer": null, ', "")
    for text in (f'{head}, "normalizer": {bomb}}}', whole.replace('"normalizer": null', f'"normalizer": {bomb}') + "}",
                 f'{head}, "\\u006eormalizer": {bomb}}}', f'{head}, "normalize\\u0072": {bomb}}}'):
        with pytest.raises(mpool.LimitError, match="Replace"):
            opened(tmp_path, text)


UNTYPED = {key: value for key, value in TIMES_1000.items() if key != "type"}
AS_A_LIST = [{"String": "a"}, "a" * 1000]
REGEX_AS_A_LIST = [{"Regex": CATASTROPHE}, "b"]


@pytest.mark.parametrize(("sections", "place"), [
    ({"normalizer": UNTYPED}, "normalizer"), ({"normalizer": TIMES_1000 | {"type": "Other"}}, "normalizer"),
    ({"normalizer": TIMES_1000 | {"type": []}}, "normalizer"), ({"normalizer": AS_A_LIST}, "normalizer"),
    ({"normalizer": {"normalizers": [TIMES_1000]}}, "normalizer"), ({"normalizer": [[AS_A_LIST]]}, "normalizer"),
    ({"normalizer": chain(TIMES_1000 | {"type": "sequence"})}, r"normalizer\.normalizers\[0\]"),
    ({"normalizer": chain({"type": "NFC"}, AS_A_LIST)}, r"normalizer\.normalizers\[1\]"),
    ({"post_processor": {key: value for key, value in template(1000).items() if key != "type"}}, "post_processor"),
    ({"decoder": replace({"Regex": CATASTROPHE}, "b") | {"type": None}}, "decoder"),
    ({"decoder": {"type": "Sequence", "decoders": [REGEX_AS_A_LIST]}}, r"decoder\.decoders\[0\]"),
    ({"pre_tokenizer": "Whitespace"}, "pre_tokenizer"), ({"pre_tokenizer": split(CATASTROPHE) | {"type": 1}},
                                                         "pre_tokenizer")])
def test_steps_whose_type_only_the_library_would_know_are_refused(tmp_path: Path, sections: dict[str, Any],
                                                                  place: str) -> None:
    """HF tokenizers derives the type of most of these steps from their fields, so that no bound would be known."""
    with pytest.raises(mpool.errors.FormatError, match=f"{place}.type is .*, allowed: ") as refused:
        opened(tmp_path, tokenizer_json(**sections))
    assert "Sequence" in str(refused.value.allowed)


def test_every_step_of_the_library_is_known() -> None:
    import tokenizers

    for section, module, others in (("normalizer", tokenizers.normalizers, {"Normalizer"}),
                                    ("pre_tokenizer", tokenizers.pre_tokenizers, {"PreTokenizer"}),
                                    ("post_processor", tokenizers.processors, {"PostProcessor"}),
                                    ("decoder", tokenizers.decoders, {"Decoder", "DecodeStream"})):
        found = {name for name, value in vars(module).items() if isinstance(value, type)}
        assert found - others <= growth._TYPES[section]


@pytest.mark.parametrize("text", ['{"x": %s}' % ("9" * 5000), '{"version": "1.0", "model": }', "[1]", "", "{",
                                  '{"a" 1}', "{" + '"model": {}, ' * 3 + "}",
                                  json.dumps({**tokenizer_json(), "version": "x" * 5000})])
def test_malformed_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(mpool.errors.FormatError, match="tokenizer.json is ") as refused:
        opened(tmp_path, text)
    assert len(str(refused.value)) < 800


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ['"type": "Unigram", ', ""])
def test_long_tokens_of_unigram_models_do_not_overflow_the_stack(tmp_path: Path, kind: str) -> None:
    """The library frees the trie of the tokens by recursion, also that of a tokenizer that is refused."""
    vocab = '[["<unk>", 0.0], ["b", -1.0], [ "%s", -1.0]]'
    text = '{"version": "1.0", "model": {%s"unk_id": 0, "byte_fallback": false, "vocab": %s}}'
    load = "from mpool.tokenizers import json_tokenizer; import sys; json_tokenizer.load(sys.argv[1])"
    path = tmp_path / "tokenizer.json"
    for token, ends in (("a" * 400_000, "LimitError"), (r"\u0061" * 70_000, "LimitError"), ("a" * 4000, "")):
        path.write_text(text % (kind, vocab % token), encoding="utf-8")
        done = subprocess.run([sys.executable, "-c", load, path], capture_output=True, text=True)
        assert done.returncode == (1 if ends else 0) and ends in done.stderr, (done.returncode, done.stderr[-300:])


def test_vocabularies_of_no_token_and_of_one(tmp_path: Path) -> None:
    def words(*tokens: str) -> dict[str, Any]:
        vocab = {token: number for number, token in enumerate(tokens)}
        return tokenizer_json(model={"type": "WordLevel", "vocab": vocab, "unk_token": "a"})

    with pytest.raises(mpool.errors.FormatError, match="model.vocab is nothing, allowed: at least one token"):
        opened(tmp_path, words())
    assert opened(tmp_path, words("a")).vocab_size == 1


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mpool.LimitError, match="nested deeper than 127 levels"):
        opened(tmp_path, json.dumps(tokenizer_json())[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}")


@pytest.mark.parametrize(("prefix", "merge", "refused"), [
    ("##", ["a", "b"], True), ("##", "a b", True), ("##", ["a", "##b"], False), ("##", "a ##b", False),
    ("#", ["a", "\u00e9"], True), ("", ["a", "b"], False), (None, ["a", "b"], False), ("##", ["a"], True)])
def test_merges_shorter_than_the_prefix_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], prefix: Any,
                                                    merge: Any, refused: bool) -> None:
    """HF tokenizers cuts the prefix off without a check, panics, and prints a backtrace."""
    words = ["a", "b", "##b", "ab", "\u00e9", "a\u00e9"]
    content = tokenizer_json(model={"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
                                    "continuing_subword_prefix": prefix, "end_of_word_suffix": None,
                                    "byte_fallback": False, "vocab": {word: at for at, word in enumerate(words)},
                                    "merges": [merge]})
    if refused:
        for text in (json.dumps(content), json.dumps(content).replace("merges", "merge\\u0073")):
            with pytest.raises(mpool.errors.FormatError, match=r"model\.merges\[0\] is "):
                opened(tmp_path, text)
    else:
        opened(tmp_path, content)
    assert "panicked" not in capfd.readouterr().err


def test_a_word_without_a_token_is_an_error_of_the_text(tmp_path: Path) -> None:
    """The library fails on such a word if the vocabulary lacks the token for unknown words."""
    tokenizer = opened(tmp_path, tokenizer_json(model={
        "type": "WordPiece", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100}))
    assert list(tokenizer.encode("a")) == [0]
    with pytest.raises(mpool.InvalidArgument, match=r"Missing \[UNK\]") as refused:
        tokenizer.encode("c")
    assert refused.value.param == "text" and "download it again" in (refused.value.hint or "")


def test_dropout_of_training_is_off(tmp_path: Path) -> None:
    """With dropout, a text would have other tokens in every call."""
    tokenizer = opened(tmp_path, tokenizer_json(model={
        "type": "BPE", "dropout": 0.5, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}))
    assert {tuple(tokenizer.encode("abab")) for _ in range(40)} == {(2, 2)}


def charsmap(units: list[int], replacements: bytes) -> str:
    """Return a precompiled character map in base64."""
    trie = b"".join(unit.to_bytes(4, "little") for unit in units)
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + replacements).decode()


# Unit 0 of the trie is the root, whose children start at unit 256 (offset 1 << 8). The child of "a" is unit 256 ^ 97;
# its value is in unit 256 ^ 97 ^ 97 = 256.
ROOT, A = 256 << 10, 256 ^ 97
LEAF_A = 97 | 0x100 | 97 << 10


def mapped(root: int = ROOT, leaf: int = LEAF_A, value: int = 0x80000000, units: int = 512) -> list[int]:
    """Return a trie with one row: "a" has the replacement at byte ``value``."""
    found = [0] * units
    found[0] = root
    if units > A:
        found[A], found[256] = leaf, value
    return found


def test_a_sound_precompiled_map_is_applied(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, tokenizer_json(normalizer={
        "type": "Precompiled", "precompiled_charsmap": charsmap(mapped(), b"b\0")}))
    assert list(tokenizer.encode("a")) == list(tokenizer.encode("b")) == [1]


@pytest.mark.parametrize(("encoded", "got"), [
    (charsmap(mapped(root=1 << 20), b"b\0"), "a trie that points to unit"),
    (charsmap(mapped(units=256), b"b\0"), "a trie that points to unit"),
    (charsmap(mapped(leaf=LEAF_A | 1 << 30), b"b\0"), "a trie that points to unit"),
    (charsmap(mapped(value=0x80000002), b"b\0"), "a replacement at byte 2 of 2"),
    (charsmap(mapped(value=0x80000001), "\u00e9\0".encode()), "inside a character"),
    (charsmap(mapped(), b"\xff\0"), "not UTF-8"), (charsmap(mapped(), b"b"), "do not end in NUL"),
    (charsmap([], b"b\0"), "a trie of 0 bytes"), (base64.b64encode(b"\xff\xff\xff\x7f" + b"x").decode(), "a trie of"),
    (base64.b64encode(b"abc").decode(), "3 bytes"), ("", "0 bytes"), ("?", "'\\?'"), ([1, 2], r"\[1, 2\]"),
    (None, "None")])
def test_malformed_precompiled_maps_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], encoded: Any,
                                                got: str) -> None:
    """HF tokenizers would panic on them, at load or at the first text, and print a backtrace."""
    with pytest.raises(mpool.errors.FormatError, match=f"normalizer.precompiled_charsmap is .*{got}"):
        opened(tmp_path, tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": encoded}))
    assert "panicked" not in capfd.readouterr().err


def test_a_long_replacement_of_a_precompiled_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mpool.LimitError, match="Precompiled"):
        opened(tmp_path, tokenizer_json(normalizer={
            "type": "Precompiled", "precompiled_charsmap": charsmap(mapped(), b"x" * 10_000 + b"\0")}))


def test_a_map_that_multiplies_its_sequences_takes_little_memory() -> None:
    """All children of the states lead to one state, so each byte multiplies the sequences by 255: a fourth step would
    need gigabytes.
    """
    units = [0] * 768
    units[0] = 256 << 10
    for label in range(1, 256):
        units[256 ^ label] = (256 ^ label ^ 512) << 10 | label
        units[512 ^ label] = label << 10 | label
    tracemalloc.start()
    try:
        with pytest.raises(mpool.errors.FormatError, match="a trie with more sequences of bytes"):
            CharsMap(base64.b64decode(charsmap(units, b"b\0")))
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("special", "field"), [
    ({}, r"single\[0\]\.SpecialToken\.id"), ({"t": {"id": "t", "ids": [0], "tokens": ["a"]}}, r"single\[0\]"),
    ({"s": ["s", [0] * 10_000, ["a"] * 10_000]}, r"special_tokens\['s'\]")])
def test_templates_with_unknown_special_tokens_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                           special: Any, field: str) -> None:
    with pytest.raises(mpool.errors.FormatError, match=rf"post_processor\.{field}"):
        opened(tmp_path, tokenizer_json(post_processor=template(1) | {"special_tokens": special, "single": [
            {"SpecialToken": {"id": "s", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}))
    assert "panicked" not in capfd.readouterr().err


def test_text_times_growth_is_bounded(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, tokenizer_json(normalizer=TIMES_1000))
    assert len(tokenizer.encode("ab")) == 1
    for text in ("a" * 1_000_000, "b" * 100 + "a" * 10_000):
        with pytest.raises(mpool.LimitError, match="after the normalizer"):
            tokenizer.encode(text)
    with pytest.raises(mpool.LimitError, match="after the normalizer"):
        tokenizer.encode_batch(["b", "a" * 1_000_000])
    assert len(tokenizer.encode("b" * 1_000_000)) == 1  # "b" does not grow: mpool measures the length
    many = tokenizer.encode_batch(["a" * 1000] * 40)  # 40,000,000 characters, but never at the same time
    assert many.offsets[-1] == 40


def test_compatibility_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_normalized_chars", 500_000)
    steps = chain(*[{"type": "NFKD"}, {"type": "Lowercase"}, {"type": "NFKC"}, {"type": "StripAccents"}] * 2)
    tokenizer = opened(tmp_path, tokenizer_json(normalizer=steps))
    assert len(tokenizer.encode(FDFA * 2000)) == 1
    with pytest.raises(mpool.LimitError, match="after the normalizer"):
        tokenizer.encode(FDFA * 100_000)
    assert len(tokenizer.encode("\u4e00" * 20_000)) == 1


@pytest.mark.parametrize(("sections", "field"), [
    ({"model": {"type": "WordPiece", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]",
                "continuing_subword_prefix": "#" * 10_000_000, "max_input_chars_per_word": 100}}, "a token has"),
    ({"model": {"type": "WordPiece", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]",
                "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9}}, "max_input_chars_per_word"),
    ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b" * 100_000: 1}, "unk_token": "a"}}, "a token has"),
])
def test_models_that_multiply_work_are_refused(tmp_path: Path, sections: dict[str, Any], field: str) -> None:
    with pytest.raises(mpool.LimitError, match=field):
        opened(tmp_path, tokenizer_json(**sections))


# ---- regular expressions ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pattern", [
    r"(a+)+$", r"(a|aa)+$", r"(a|a)*b", r"a*a*b", r"(.*)(.*)x", r"(x+x+)+y", r"(?:a{0,1000}){0,1000}x",
    r"(a?){30}a{30}", r"(?=(a+)+b)", r"^(([a-z])+.)+[A-Z]([a-z])+$", r"(?<n>a+)\k<n>", r"(a)\1*b", r"(?:\s?a)*b",
    r"(.|\n)*?x", r"(?:a|a){1,8}b", r"(?:a|a)?" * 6 + "b", "(" * 100,
    "a" * 30_000, r"(?x) a*", r"[", r"(a", r"a)", r"*a"])
def test_costs_that_are_not_bounded(pattern: str) -> None:
    assert cost(pattern) is Cost.UNKNOWN


@pytest.mark.parametrize(("pattern", "found"), [
    (r"\s+", Cost.CONSTANT), (r" {2,}", Cost.CONSTANT), (r"a++b", Cost.CONSTANT), (r"(?>a+)b", Cost.CONSTANT),
    (r"[^\s]+|\s+", Cost.CONSTANT), (r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", Cost.CONSTANT), (r"[]a]+", Cost.CONSTANT),
    (r"[[:alpha:]&&[^a]]+", Cost.CONSTANT), (r"\d{1,3}", Cost.CONSTANT), (r"a{,3}", Cost.CONSTANT),
    (r"a|\s*[\r\n]+|\s+(?!\S)|\s+", Cost.CONSTANT), (r"a*b|\s+(?!\S)|\s+", Cost.LINEAR),
    (r"[|\s+(?!\S)|\s+]*b", Cost.LINEAR), (r"(?:a|\s+(?!\S)|\s+)*b", Cost.UNKNOWN), (r"\s+$", Cost.LINEAR),
    (r"(?:a|a){1,7}b", Cost.CONSTANT), (r"(?:a|a){1,20}", Cost.CONSTANT), (r"(?>(?:a|a){1,20})b", Cost.CONSTANT),
    (r"a*b", Cost.LINEAR), (r"a+?b", Cost.LINEAR), (r"\s+(?!\S)", Cost.LINEAR)])
def test_costs(pattern: str, found: Cost) -> None:
    assert cost(pattern) is found


@pytest.mark.parametrize("known, unknown", [
    ("a{0,255}b", "a{0,256}b"), ("a{1,256}b", "a{1,257}b"), ("(?:a|ab){0,7}c", "(?:a|ab){0,8}c"),
    ("(?:a|ab){8}c", "(?:a|ab){9}c")])
def test_ways_of_a_repetition(known: str, unknown: str) -> None:
    """An expression that can match in at most 256 ways before what follows has a known cost."""
    assert (cost(known), cost(unknown)) == (Cost.CONSTANT, Cost.UNKNOWN)


_PANIC = """
import json, sys
from pathlib import Path
from mpool.tokenizers import open_tokenizer
from mpool.models.spec import TokenizerSource
import mpool
tokenizer = open_tokenizer(TokenizerSource(json_path=sys.argv[1], config={}))
for call in (lambda: tokenizer.encode("a" * 200 + "b"), lambda: tokenizer.encode_batch(["b", "a" * 200 + "b"]),
             lambda: tokenizer.encode("a" * 5000 + "b"), lambda: tokenizer.count("a" * 200 + "b", parse_special=True)):
    try:
        call()
        print("no error")
    except mpool.InvalidArgument as error:
        print("InvalidArgument", error)
print(tokenizer.encode("aaa").tolist())
"""


@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_panic_is_an_error_with_nothing_on_stderr(tmp_path: Path, where: str) -> None:
    section = split(CATASTROPHE) if where == "pre_tokenizer" else replace({"Regex": CATASTROPHE}, "b")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(**{where: section})))
    done = subprocess.run([sys.executable, "-c", _PANIC, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and all(line.startswith("InvalidArgument") for line in lines[:4]), done.stdout
    assert lines[4] in ("[2]", "[1]")


def test_isolated_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    import tokenizers

    plain = split(r"(?:a|b)+?c|.")
    tokenizer = opened(tmp_path, tokenizer_json(pre_tokenizer=plain, added_tokens=[
        {"id": 3, "content": "[X]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}]))
    direct = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("", "a", "abc ab", "a[X]b", "\u00e9" * 3000, "ab " * 2000):
        assert tokenizer.encode(text, parse_special=True).tolist() == direct.encode(text).ids
    assert 3 not in tokenizer.encode("a[X]b")
    assert 3 in tokenizer.encode("a[X]b", parse_special=True)
    with pytest.raises(mpool.InvalidArgument, match="surrogate"):
        tokenizer.encode("a\ud800")
    assert tokenizer.decode([0, 1]) == direct.decode([0, 1])


def test_slow_expression_has_a_limit_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_tokenizing_seconds", 0.25)
    tokenizer = opened(tmp_path, tokenizer_json(pre_tokenizer=split(r"a*a*[cd]")))
    began = time.monotonic()
    with pytest.raises(mpool.LimitError, match="needs more than 0.25 seconds"):
        tokenizer.encode("a" * 3000 + "bd")  # 4,500,000 steps at each of 3,000 positions: below the limit of a match
    assert time.monotonic() - began < 60
    monkeypatch.setattr(limits, "max_tokenizing_seconds", 60.0)
    assert len(tokenizer.encode("aad")) == 1  # the process starts again


def test_square_of_a_long_text_leaves_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = opened(tmp_path, tokenizer_json(pre_tokenizer=split(r"a*c")))
    called: list[int] = []

    def encode(self: IsolatedTokenizer, texts: Any, add_special: bool, places: bool) -> Any:
        called.extend(map(len, texts))
        return [[0] for _ in texts], [[] for _ in texts]

    monkeypatch.setattr(IsolatedTokenizer, "encode", encode)
    tokenizer.encode_batch(["a" * 10, "b" * 3000, "b" * 2000])
    assert called == []
    tokenizer.encode("a" * 30_000)
    assert called == [30_000]


def test_isolated_process_that_dies_is_started_again(tmp_path: Path) -> None:
    made = IsolatedTokenizer(json.dumps(tokenizer_json()), False)
    assert made.encode(["a", "b"], False) == ([[0], [1]], [[], []])
    before = childprograms.pids(made._children)
    os.kill(before[0], signal.SIGKILL)
    assert made.encode(["a"], False) == ([[0]], [[]])  # killed by another program: the text is not at fault
    assert childprograms.pids(made._children) != before

    def encode(made: Any = made) -> bool:
        fine = made.encode(["b"], False) == ([[1]], [[]])
        made._children.__del__()
        return fine

    assert childprograms.forked(encode)
    assert made.encode(["b"], False) == ([[1]], [[]])  # the child has not taken the parent's process
    process = made._children._all[0].process
    del made, encode
    assert process.poll() is not None


@pytest.mark.parametrize(("status", "data"), [("text", b"\1\0\0\0\0\0\0\0"), ("ids", b""), ("ids", b"\1\0\0"),
                                              ("ids", b"\2\0\0\0\0\0\0\0"), ("ids", b"\1\0\0\0" * 3)])
def test_wrong_response_of_the_process(monkeypatch: pytest.MonkeyPatch, status: str, data: bytes) -> None:
    made = IsolatedTokenizer(json.dumps(tokenizer_json()), False)
    monkeypatch.setattr(made._children, "run", lambda *arguments: (status, data))
    with pytest.raises(mpool.LimitError):
        made.encode(["a"], False)


@pytest.mark.parametrize("lengths, factor", [((8,), None), ((9,), 9), ((2, 4), None), ((3, 3), 9), ((1, 1, 8), None)])
def test_limit_of_the_factor_of_decoders(lengths: tuple[int, ...], factor: int | None) -> None:
    steps = [replace({"String": "a"}, "b" * length) for length in lengths]
    data = json.dumps(tokenizer_json(decoder={"type": "Sequence", "decoders": steps})).encode()
    if factor is None:
        assert growth.read(data, "t.json").normalizer == 1
        return
    with pytest.raises(mpool.LimitError) as caught:
        growth.read(data, "t.json")
    last = len(lengths) - 1
    assert str(caught.value) == (f"t.json: decoder.decoders[{last}] can make a text {factor} times as long, together "
                                 "with the steps before it; the limit is 8")


LONG = {"String": "a" * 257}
TRAILING = {"Regex": r"\s+$"}  # needs the square of the length of a run of white space
UNIGRAM = {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
           "vocab": [["<unk>", 0.0], *(["a" * size, -1.0] for size in range(1, 66))]}
WORDPIECE = {"type": "WordPiece", "vocab": {"a": 0, "##a": 1, "[UNK]": 2}, "unk_token": "[UNK]",
             "continuing_subword_prefix": "##", "max_input_chars_per_word": 201}


def splitting(pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("sections", "longest"), [
    ({"normalizer": replace(LONG, "b")}, 3000), ({"pre_tokenizer": splitting(LONG)}, 3000),
    ({"pre_tokenizer": splitting(TRAILING)}, 3000), ({"model": UNIGRAM}, 3000), ({"model": WORDPIECE}, 3000),
    # a text that grows before the slow step must be shorter
    ({"normalizer": chain(replace({"String": "a"}, "a" * 100), replace(TRAILING, ""))}, 30),
    ({"normalizer": replace({"String": "a"}, "a" * 100), "pre_tokenizer": splitting(TRAILING)}, 30),
    ({"normalizer": replace({"String": "a"}, "a" * 10), "model": UNIGRAM}, 300),
    ({"normalizer": replace({"String": "a"}, "a" * 10), "model": WORDPIECE, "pre_tokenizer": {
        "type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}}, 150),
    # growth after the slow step does not matter
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitting(TRAILING), {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}}, 3000),
    # as in published files, at any length
    ({"model": UNIGRAM | {"vocab": UNIGRAM["vocab"][:65]}}, None),
    ({"pre_tokenizer": splitting({"String": "a" * 256})}, None),
    ({"model": WORDPIECE | {"max_input_chars_per_word": 200}}, None)])
def test_long_texts_of_slow_steps_are_encoded_in_a_process(tmp_path: Path, sections: dict[str, Any],
                                                           longest: int | None) -> None:
    """Each of these steps takes minutes for a text of a million characters. No call in this process can be stopped."""
    tokenizer = opened(tmp_path, tokenizer_json(**sections))
    found = tokenizer._native
    assert longest is None or found._free == longest
    ids = [list(tokenizer.encode("a" * size)) for size in ((longest or 4000), (longest or 4000) + 1)]
    assert (found._isolated is not None) == (longest is not None)
    assert ids[0] and ids[1] and (len(ids[1]) - len(ids[0])) in (0, 1)


def test_text_for_which_a_slow_step_takes_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_tokenizing_seconds", 0.5)
    vocab = [["<unk>", 0.0], *(["a" * size, -1.0] for size in range(1, 1024))]
    tokenizer = opened(tmp_path, tokenizer_json(model=UNIGRAM | {"vocab": vocab}))
    with pytest.raises(mpool.LimitError, match="more than 0.5 seconds"):
        tokenizer.encode("a" * 500_000)
    assert list(tokenizer.encode("aa")) == [2]


def test_added_tokens_of_a_slow_normalizer_are_refused(tmp_path: Path) -> None:
    """HF tokenizers normalises them while it reads the file."""
    def added(size: int) -> list[dict[str, Any]]:
        return [{"id": 3, "content": "b" * size, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": True, "special": False}]

    for normalizer, longest in ((replace(LONG, "b"), 3000), (replace(TRAILING, ""), 3000),
                                (chain(replace({"String": "b"}, "b" * 10), replace(TRAILING, "")), 300)):
        opened(tmp_path, tokenizer_json(normalizer=normalizer, added_tokens=added(longest)))
        with pytest.raises(mpool.LimitError, match="added tokens have"):
            opened(tmp_path, tokenizer_json(normalizer=normalizer, added_tokens=added(longest + 1)))


def test_panic_of_the_library_is_converted() -> None:
    panic = type("PanicException", (BaseException,), {})

    def fail() -> None:
        raise panic("at the end")

    with pytest.raises(mpool.InvalidArgument, match="cannot process this text: at the end"):
        native.call(fail)
    with pytest.raises(KeyboardInterrupt):
        native.call(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "factor"), list(growth._NORMALIZERS.items()))
def test_factors_of_normalizers_hold_for_every_character(kind: str, factor: int) -> None:
    import tokenizers

    made = {"BertNormalizer": lambda: tokenizers.normalizers.BertNormalizer()}.get(
        kind, lambda: getattr(tokenizers.normalizers, kind)())()
    points = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    step, largest = 4096, 1
    for at in range(0, len(points), step):
        text = "".join(points[at:at + step])
        if len(made.normalize_str(text)) > len(text):  # most blocks do not grow: look at their characters only if so
            separator = made.normalize_str("\n")
            if kind == "ByteLevel":  # in one call: each character becomes its bytes, and only a line end has its byte
                each = made.normalize_str("\n".join(points[at:at + step])).split(separator)
                assert len(each) >= step or at + step > len(points)
            else:
                each = [made.normalize_str(char) for char in points[at:at + step]]
            largest = max(largest, *map(len, each))
    # BertNormalizer also removes the accents that it decomposes
    assert largest == (3 if kind == "BertNormalizer" else factor)
