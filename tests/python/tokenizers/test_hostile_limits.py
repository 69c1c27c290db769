"""Sizes that the tokenizer files of an adversary may have: characters of control tokens, steps, lines, values, ids."""

import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.errors import FormatError
from mpool.conversation.template import _ControlTokenGuard
from mpool.models.spec import TokenizerSource
from mpool.tokenizers import growth, json_tokenizer, limits, older_files, open_tokenizer, tiktoken_file
from mpool.tokenizers.gguf_vocab import GGUFVocab


def added(token: int, text: str, special: bool = True, **more: Any) -> dict[str, Any]:
    return {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": special} | more


def content(**sections: Any) -> dict[str, Any]:
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}} | sections


def opened(folder: Path, value: dict[str, Any] | str, name: str = "tokenizer.json", **config: Any) -> Any:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return open_tokenizer(TokenizerSource(json_path=str(path), config=config))


def peak(function: Callable[[], object]) -> int:
    """Return the most memory that Python and NumPy hold during a call, in bytes."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Control tokens

LONG, MANY = ["<|" + "x" * 252 + "|>", "<|" + "x" * 253 + "|>"], [f"<|{at:04}" + "x" * 57 + "|>" for at in range(4096)]


def gguf_vocabulary(model: str, texts: list[str], kind: int) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "a", *texts]
    found = {"model": model, "pre": "qwen2", "tokens": tokens, "token_type": [2, 3, 3, 1] + [kind] * len(texts),
             "scores": [0.0] * len(tokens), "bos_token_id": 1, "eos_token_id": 2, "merges": []}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def wordpiece_folder(folder: Path, texts: list[str]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {
        str(5 + at): {"content": text, "special": True} for at, text in enumerate(texts)}}))


VOCAB_TXT = "[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\n"


@pytest.mark.parametrize(("texts", "message"), [
    (LONG, "a control (?:or user-defined )?token of 257 characters, the limit is 256"),
    (MANY, r"control (?:or user-defined )?tokens with together 2\d\d,\d\d\d characters, the limit is 262,144")])
def test_characters_of_control_tokens_are_limited(tmp_path: Path, texts: list[str], message: str) -> None:
    """A regular expression of all control tokens takes CPU time and memory for every character."""
    fits = texts[:-300] or texts[:1]
    for some, refused in ((fits, False), (texts, True)):
        wordpiece_folder(tmp_path, some)
        readers: list[tuple[Callable[[], Any], str]] = [
            (lambda: opened(tmp_path, content(added_tokens=[added(3 + at, text) for at, text in enumerate(some)])),
             r"tokenizer\.json: added_tokens has "),
            (lambda: opened(tmp_path, VOCAB_TXT, "vocab.txt"), r"tokenizer_config\.json: added_tokens_decoder has "),
            (lambda: GGUFVocab(gguf_vocabulary("gpt2", some, 3), file="v.gguf"), "v.gguf: tokenizer.ggml.tokens has "),
            (lambda: GGUFVocab(gguf_vocabulary("llama", some, 4), file="v.gguf"), "v.gguf: tokenizer.ggml.tokens has ")]
        for read, place in readers:
            if refused:
                with pytest.raises(mpool.LimitError, match=place + message):
                    read()
            else:
                read()


def test_characters_of_added_tokens_are_limited(tmp_path: Path) -> None:
    """HF tokenizers takes about 1 us and 70 bytes for every character."""
    for count, refused in ((255, False), (257, True)):
        texts = [f"{at:04}" + "x" * 4092 for at in range(count)]
        for read in (lambda: growth.read(json.dumps(content(added_tokens=[
                added(3 + at, text, False) for at, text in enumerate(texts)])).encode(), "t.json"),
                lambda: GGUFVocab(gguf_vocabulary("gpt2", texts, 4))):
            if refused:
                with pytest.raises(mpool.LimitError, match="together 1,052,672 characters, the limit is 1,048,576"):
                    read()
            else:
                read()


def test_special_tokens_of_a_tiktoken_file_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpool.models.formats.tiktoken_ranks import Ranks

    monkeypatch.setattr("mpool.models.formats.tiktoken_ranks.read", lambda *_: Ranks(["a"], [("x" * 257, True)]))
    with pytest.raises(mpool.LimitError, match="tokenizer_config.json: added_tokens_decoder has a control token of 2"):
        tiktoken_file.build(str(tmp_path / "tiktoken.model"))


@pytest.mark.parametrize("texts", [
    [f"<unused{at}>" for at in range(6242)],  # Gemma
    [f"<SPECIAL_{at}>" for at in range(1000)],  # Mistral
    [f"<|vision_reserved_special_token_{at}|>" for at in range(1048)],  # Llama 4
    [f"<|reserved_{200013 + at}|>" for at in range(1100)],  # gpt-oss
    [f"<\uff5cplace\u2581holder\u2581no\u2581{at}\uff5c>" for at in range(800)]])  # DeepSeek
def test_control_tokens_of_published_models_fit(tmp_path: Path, texts: list[str]) -> None:
    tokenizer = opened(tmp_path, content(added_tokens=[added(3 + at, text) for at, text in enumerate(texts)]))
    assert list(tokenizer.encode(texts[-1], parse_special=True)) == [2 + len(texts)]
    assert GGUFVocab(gguf_vocabulary("llama", texts, 3)).ids[texts[-1]] == 3 + len(texts)


def test_parts_of_control_tokens_are_found() -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choices("<|ab>", k=rng.randint(2, 7))) for _ in range(40)] + ["<|end|>", "<|", "ab"]
    guard = _ControlTokenGuard(texts)
    heads = {text[:size] for text in texts for size in range(1, len(text)) if set(text[:size]) & set("<|>")}
    tails = {text[size:] for text in texts for size in range(1, len(text)) if set(text[size:]) & set("<|>")}
    for _ in range(2000):
        text = "".join(rng.choices("<|ab>end", k=rng.randint(0, 9)))
        assert guard._has_part(text, True) == any(text[at:] in heads for at in range(len(text)))
        assert guard._has_part(text, False) == any(text[:at + 1] in tails for at in range(len(text)))


# Keys and steps

def test_a_second_model_is_refused() -> None:
    """For each model, the rest of the file was copied and searched: 40,000 models took 13 s."""
    for text, key in (('"model":0,' * 40_000, "model"), ('"model": {}, "mod\\u0065l": {},', "model"),
                      ('"normalizer": null, "normalizer": null,', "normalizer"), ('"x": 1, "x": 2,', "x")):
        began = time.process_time()
        with pytest.raises(FormatError, match=f"t.json: tokenizer.json is an object with two keys '{key}', all"):
            growth.read(('{"version":"1.0",' + text + '"decoder":null}').encode(), "t.json")
        assert time.process_time() - began < 5


def steps(section: str, count: int) -> dict[str, Any]:
    names = {"normalizer": ("normalizers", {"type": "NFC"}), "pre_tokenizer": ("pretokenizers", {"type": "Whitespace"}),
             "post_processor": ("processors", {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                                               "use_regex": False}), "decoder": ("decoders", {"type": "Fuse"})}
    inner, step = names[section]
    half = {"type": "Sequence", inner: [step] * (count // 2 - 1)}
    return {section: {"type": "Sequence", inner: [half, half]}}


@pytest.mark.parametrize("section", ["normalizer", "pre_tokenizer", "post_processor", "decoder"])
def test_number_of_steps_is_limited(tmp_path: Path, section: str) -> None:
    """Each step reads the whole text, and cannot be interrupted."""
    assert list(opened(tmp_path, content(**steps(section, 63))).encode("a")) == [0]
    with pytest.raises(mpool.LimitError, match=f"tokenizer.json: {section} has more than 64 steps. Raise mpool"):
        opened(tmp_path, content(**steps(section, 64)))


def test_empty_lists_of_steps_count(tmp_path: Path) -> None:
    nested: dict[str, Any] = {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}] * 64}
    with pytest.raises(mpool.LimitError, match="normalizer has more than 64 steps"):
        opened(tmp_path, content(normalizer=nested))


# Ids

def template(token: int) -> dict[str, Any]:
    first = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [first, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [first, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"[SEP]": {"id": "[SEP]", "ids": [1, token], "tokens": ["b", "b"]}}}


@pytest.mark.parametrize(("processor", "field"), [
    (template, r"post_processor\.special_tokens\['\[SEP\]'\]\.ids"),
    (lambda token: {"type": "BertProcessing", "sep": ["b", token], "cls": ["a", 0]}, r"post_processor\.sep\[1\]"),
    (lambda token: {"type": "RobertaProcessing", "sep": ["b", 1], "cls": ["a", token], "trim_offsets": True,
                    "add_prefix_space": False}, r"post_processor\.cls\[1\]"),
    (lambda token: {"type": "Sequence", "processors": [template(token)]},
     r"post_processor\.processors\[0\]\.special_tokens\['\[SEP\]'\]\.ids")])
def test_ids_of_post_processors_are_those_of_tokens(tmp_path: Path, processor: Callable[[int], dict[str, Any]],
                                                    field: str) -> None:
    for token in (3, 2**31, 2**32 - 1):
        with pytest.raises(FormatError, match=rf"{field} is {token}, allowed: 0 to 2, ids of the vocabulary"):
            opened(tmp_path, content(post_processor=processor(token)))
    assert 2 in opened(tmp_path, content(post_processor=processor(2))).encode("a", add_special=True)


def test_ids_of_post_processors_with_gaps_in_the_vocabulary(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 9}, "unk_token": "[UNK]"}
    assert opened(tmp_path, content(model=model, post_processor=template(9))).suffix_ids == (1, 9)


def test_ids_of_added_tokens_are_those_that_they_get(tmp_path: Path) -> None:
    """HF tokenizers numbers added tokens itself, and only logs that an id differs."""
    for tokens, got, given in (([added(2**31, "[X]")], 2**31, 3), ([added(4, "[X]")], 4, 3), ([added(1, "a")], 1, 0),
                               ([added(3, "[X]"), added(5, "[Y]")], 5, 4)):
        with pytest.raises(FormatError, match=f"id of the added token '.*' is {got}, allowed: {given}, the id"):
            opened(tmp_path, content(added_tokens=tokens))
    twice = [added(3, "[X]"), added(9, "[X]"), added(4, ""), added(0, "a")]
    assert list(opened(tmp_path, content(added_tokens=twice)).encode("[X]", parse_special=True)) == [3]


# Panics of the library, which print a backtrace

@pytest.mark.parametrize(("sections", "message"), [
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, r"pre_tokenizer\.length is 0, allowed: 1 or more"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 0}]}},
     r"pre_tokenizer\.pretokenizers\[0\]\.length is 0"),
    ({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 1}}, r"decoder\.stop is 1, allowed: 0"),
    ({"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 2**63}}, r"decoder\.stop is 922"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Strip", "content": "a", "start": 0, "stop": 9}]}},
     r"decoder\.decoders\[0\]\.stop is 9")])
def test_steps_that_panic_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], sections: dict[str, Any],
                                      message: str) -> None:
    with pytest.raises(FormatError, match=message):
        opened(tmp_path, content(**sections)).encode("a b")
    assert "panicked" not in capfd.readouterr().err


def test_steps_at_these_limits_do_not_panic(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for start in (0, 1, 2, 2**63):
        tokenizer = opened(tmp_path, content(decoder={"type": "Strip", "content": "a", "start": start, "stop": 0}))
        assert tokenizer.decode([0, 1]) == ("ab" if start == 0 else "b")
    for length in (1, 2**63):
        pre_tokenizer = {"type": "FixedLength", "length": length}
        assert opened(tmp_path, content(pre_tokenizer=pre_tokenizer)).encode("ab").tolist() == (
            [0, 1] if length == 1 else [2])
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize(("prefix", "second"), [("\u00e9", "b"), ("##", "bbb"), ("#", "bb"), ("\u00e9", "bc")])
def test_second_parts_of_merges_begin_with_the_prefix(tmp_path: Path, capfd: pytest.CaptureFixture[str], prefix: str,
                                                      second: str) -> None:
    words = ["a", "b", "bb", "bbb", "bc", "ab", "abb", "##b", "\u00e9"]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "continuing_subword_prefix": prefix,
             "end_of_word_suffix": None, "byte_fallback": False, "vocab": {word: at for at, word in enumerate(words)},
             "merges": [["a", second]]}
    with pytest.raises(FormatError, match=r"model\.merges\[0\] is .*begins with continuing_subword_prefix"):
        opened(tmp_path, content(model=model))
    assert "panicked" not in capfd.readouterr().err


# Sizes of files

@pytest.mark.parametrize("vocabulary", ["object", "list", "escaped"])
def test_tokens_are_counted_before_the_file_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      vocabulary: str) -> None:
    """HF tokenizers took 7 s and 1.35 GB for a model of 2,000,000 tokens, which was then refused."""
    import tokenizers

    monkeypatch.setattr(limits, "max_vocab_tokens", 1000)
    loads: list[int] = []
    real = tokenizers.Tokenizer

    class Loading:
        @staticmethod
        def from_buffer(data: bytes) -> Any:
            loads.append(len(data))
            return real.from_buffer(data)

    monkeypatch.setattr("mpool.tokenizers.json_tokenizer.HFTokenizer", Loading)
    for count in (1000, 1001):
        words = [f'{at}"\\,:[' for at in range(count)]
        model: dict[str, Any] = {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(words)},
                                 "unk_token": words[0]}
        if vocabulary == "list":
            model = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [[word, -1.5] for word in words]}
        text = json.dumps(content(model=model), indent=1 if vocabulary == "object" else None)
        text = text.replace('"vocab"', '"voc\\u0061b"') if vocabulary == "escaped" else text
        if count == 1000:
            assert opened(tmp_path, text).vocab_size == 1000
        else:
            with pytest.raises(mpool.LimitError, match="tokenizer.json: model.vocab has more than 1,000 tokens"):
                opened(tmp_path, text)
    assert len(loads) == 1


def test_values_are_counted_before_the_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges, ids and lists take up to 200 bytes for each value."""
    for sections in ({"x": [[]] * 10_000}, {"x": [{}] * 10_000}, {"x": [0] * 20_000}):
        data = json.dumps(content(**sections)).encode()
        growth.read(data, "t.json")
        with monkeypatch.context() as patch:
            patch.setattr(limits, "max_tokenizer_json_values", 20_000)
            with pytest.raises(mpool.LimitError, match=r"t.json: up to 20,0\d\d values, the limit is 20,000"):
                growth.read(data, "t.json")


@pytest.mark.parametrize("name", ["vocab.txt", "merges.txt"])
def test_lines_are_counted_before_they_are_split(tmp_path: Path, name: str) -> None:
    """vocab.txt with 3,000,000 lines took 12 s and 1.2 GB before it was refused. merges.txt could repeat a merge."""
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a": 2, "b": 3, "ab": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    path, line = tmp_path / name, "a b\n" if name == "merges.txt" else "a\n"
    path.write_text(line * 3_000_000)

    def read() -> None:
        with pytest.raises(mpool.LimitError, match=rf"{name}: 3,000,000 lines, the limit is 1,048,576"):
            older_files.wordpiece(str(path), {}) if name == "vocab.txt" else older_files.clip(str(tmp_path), "a")

    assert peak(read) < 32 << 20


def test_ends_of_lines_of_older_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_vocab_tokens", 6)
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a": 2, "b</w>": 3, "ab</w>": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    for text in ("#version: 0.2\na b</w>\n", "a b</w>", "\r\na b</w>\r\n\r\n", "a b</w>\n" * 6):
        (tmp_path / "merges.txt").write_bytes(text.encode())
        assert older_files.clip(str(tmp_path), "<|endoftext|>").encode("ab").ids == [0, 4, 1]
    (tmp_path / "merges.txt").write_bytes(b"a b</w> c" + b" " * 1_000_000)
    with pytest.raises(FormatError, match="line 1 is a b</w> c .*allowed: two tokens separated by a space"):
        older_files.clip(str(tmp_path), "<|endoftext|>")
    for text in (VOCAB_TXT, VOCAB_TXT[:-1], VOCAB_TXT.replace("\n", "\r\n")):
        (tmp_path / "vocab.txt").write_bytes(text.encode())
        assert older_files.wordpiece(str(tmp_path / "vocab.txt"), {}).get_vocab_size() == 5
    (tmp_path / "vocab.json").write_text(json.dumps({**vocab, "c": 5, "d": 6}))
    with pytest.raises(FormatError, match="vocab.json at byte .*more than 7 values"):
        older_files.clip(str(tmp_path), "<|endoftext|>")


@pytest.mark.parametrize("text", ['{"x": ' + "[" * 6_000_000, "\\" * 6_000_000, '{"x": "' + '\\"' * 3_000_000])
def test_depth_of_a_malformed_file_takes_little_memory(tmp_path: Path, text: str) -> None:
    """The depth of 60 MB took 2.6 GB."""
    path = tmp_path / "tokenizer.json"
    path.write_text(text)

    def load() -> None:
        with pytest.raises(mpool.LimitError if "[" in text else FormatError,
                           match="nested deeper than 127" if "[" in text else "tokenizer.json is malformed"):
            json_tokenizer.load(str(path))

    assert peak(load) < 80 << 20  # the buffer that reads the file has 64 MB


def test_depth_across_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    monkeypatch.setattr(json_tokenizer, "_MAX_JSON_DEPTH", 3)
    for _ in range(3000):
        text = "".join(rng.choices(['"', "\\", "[", "{", "]", "}", "a"], [4, 2, 4, 4, 3, 3, 1], k=rng.randint(1, 40)))
        depth = most = 0
        inside = escaped = False
        for char in text:
            if inside:
                inside, escaped = char != '"' or escaped, char == "\\" and not escaped
            elif char == '"':
                inside = True
            else:
                depth += (char in "[{") - (char in "]}")
                most = max(most, depth)
        monkeypatch.setattr(json_tokenizer, "_SLICE", rng.randint(1, 9))
        assert json_tokenizer._is_deep(text.encode()) == (most > 3), text


# Messages
