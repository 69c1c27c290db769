"""Kimi's tokenizer in ``tiktoken.model``: ids compared with tiktoken's, malformed files, and a folder as published."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tiktoken = pytest.importorskip("tiktoken")

import mpool  # noqa: E402
from kimifiles import BYTES, NAMED, WORDS, rank_file, settings, trained, write  # noqa: E402
from make_lines import lines  # noqa: E402
from mpool.errors import FormatError, LimitError  # noqa: E402
from mpool.models.formats import tiktoken_ranks  # noqa: E402
from mpool.models.sources.hub_files import choose_folder  # noqa: E402
from mpool.models.spec import TokenizerSource  # noqa: E402
from mpool.tokenizers import open_tokenizer  # noqa: E402
from mpool.tokenizers.tokenizer import Tokenizer  # noqa: E402


def opened(folder: Path, **config: Any) -> Tokenizer:
    return open_tokenizer(TokenizerSource(json_path=str(folder / "tiktoken.model"), config=config))


def reference(tokens: Sequence[bytes]) -> Any:
    first = len(tokens)
    special = {NAMED.get(at, (f"<|reserved_token_{first + at}|>", True))[0]: first + at for at in range(256)}
    return tiktoken.Encoding("kimi", pat_str=WORDS, mergeable_ranks=dict(zip(tokens, range(first))),
                             special_tokens=special)


def test_ids_as_tiktoken(tmp_path: Path) -> None:
    tokenizer, want = opened(write(tmp_path, trained()), eos_token="[EOS]"), reference(trained())
    texts = ["", "getUserName's iPhone, HELLOWorld 12345", "\u4f60\u597dabc\u4e16\u754c \u3042\u30a2\u4e9c",
             *lines(3000)]
    packed = tokenizer.encode_batch(texts, add_special=False)
    ids, ends = packed.ids.tolist(), packed.offsets.tolist()
    rows = [ids[start:end] for start, end in zip(ends, ends[1:])]
    assert rows == [want.encode_ordinary(text) for text in texts]
    assert max(map(len, rows)) > 50 and len({token for row in rows for token in row}) > 2000
    for text, row in zip(texts[::9], rows[::9]):
        assert tokenizer.decode(row) == text
    assert tokenizer.vocab_size == len(trained()) + 256
    assert tokenizer.eog_ids == (len(trained()) + 1, len(trained()) + 2)
    assert tokenizer.encode("a").tolist() == tokenizer.encode("a", add_special=False).tolist()  # no [BOS]


def test_special_tokens_as_tiktoken(tmp_path: Path) -> None:
    tokenizer, want = opened(write(tmp_path, trained())), reference(trained())
    text = (f"[BOS]hi <|im_user|> [EOS] <|reserved_token_{len(trained()) + 5}|>[PAD] "
            "<|reserved_token_1|><|tool_calls_section_begin|>")
    assert tokenizer.encode(text, parse_special=True).tolist() == want.encode(text, allowed_special="all")
    # A special token in plain text is text; the marks of tool calls are tokens everywhere, as in tokenizer.json.
    plain = text.removesuffix(NAMED[11][0])
    assert tokenizer.encode(plain).tolist() == want.encode_ordinary(plain)
    assert tokenizer.encode(NAMED[11][0]).tolist() == [len(trained()) + 11]
    for at in range(256):
        name = NAMED.get(at, (f"<|reserved_token_{len(trained()) + at}|>", True))[0]
        assert tokenizer.token_text(len(trained()) + at) == name


@pytest.mark.parametrize("seed", range(40))
def test_merges_of_any_ranks_as_tiktoken(tmp_path: Path, seed: int) -> None:
    """Random tokens of few letters overlap in every way; the ranks need not follow their lengths."""
    rng = random.Random(seed)
    letters = "ab" if seed % 2 else "abc"
    made = {"".join(rng.choices(letters, k=rng.randint(2, 6))).encode() for _ in range(60)}
    tokens = [*BYTES, *rng.sample(sorted(made), len(made))]
    tokenizer, want = opened(write(tmp_path, tokens)), reference(tokens)
    texts = ["".join(rng.choices(letters, k=rng.randint(1, 40))) for _ in range(400)]
    wrong = [text for text in texts if tokenizer.encode(text).tolist() != want.encode_ordinary(text)]
    assert not wrong, wrong[:3]


def edited(edit: Callable[[list[str]], object]) -> str:
    rows = rank_file(BYTES).splitlines()
    edit(rows)
    return "\n".join(rows)


#: Name of a case -> content of the file, and expression for the place that the message names.
FILES: dict[str, tuple[str, str]] = {
    "empty": ("", r"line 1\b"),
    "an empty line": (edited(lambda rows: rows.insert(7, "")), r"line 8\b"),
    "no rank": (edited(lambda rows: rows.__setitem__(7, "Bw==")), r"line 8\b.*Bw=="),
    "an empty token": (edited(lambda rows: rows.__setitem__(7, " 7")), r"line 8\b"),
    "not base64": (edited(lambda rows: rows.__setitem__(7, "B w= 7")), r"line 8\b"),
    "bad padding": (edited(lambda rows: rows.__setitem__(7, "Bwx=a 7")), r"line 8\b"),
    "incomplete base64": (edited(lambda rows: rows.__setitem__(7, "BwxxB 7")), r"line 8\b"),
    "negative": (edited(lambda rows: rows.__setitem__(7, "Bw== -7")), r"line 8\b"),
    "a huge rank": (edited(lambda rows: rows.__setitem__(7, "Bw== " + "9" * 5000)), r"line 8\b"),
    "a rank beyond the end": (edited(lambda rows: rows.__setitem__(7, "Bw== 256")), r"rank in line 8.*256.*0 to 255"),
    "a rank twice": (edited(lambda rows: rows.__setitem__(7, "Bw== 6")), r"rank in line 8.*6, the rank of an earlier"),
    "a token twice": (edited(lambda rows: rows.append("Bw== 256")), "1 that occur twice"),
    "a missing byte": (edited(lambda rows: rows.__setitem__(7, "BwcH 7")), "none for the byte 0x07"),
    "not text": ("\x00\xff" * 50, r"line 1\b"),
}


@pytest.mark.parametrize("name", FILES)
def test_malformed_files(tmp_path: Path, name: str) -> None:
    content, message = FILES[name]
    write(tmp_path, BYTES)
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(FormatError, match=message) as raised:
        opened(tmp_path)
    assert str(tmp_path / "tiktoken.model") in str(raised.value) and len(str(raised.value)) < 700


def test_long_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are too long, too many, or too long together for all of their splits to be tried."""
    write(tmp_path, [*BYTES, b"x" * 4097])
    with pytest.raises(LimitError, match=r"line 257 has 4,097 bytes, the limit is 4,096"):
        opened(tmp_path)
    write(tmp_path, [*BYTES, *(bytes((one,)) * 4000 + bytes((two,)) for one in range(5) for two in range(5, 9))])
    with pytest.raises(LimitError, match="the squares of their lengths add up to"):
        opened(tmp_path)
    monkeypatch.setattr(tiktoken_ranks, "MAX_TOKENS", 300)
    write(tmp_path, [*BYTES, *(b"x" * size for size in range(2, 47))])
    with pytest.raises(LimitError, match="301 tokens, the limit is 300"):
        opened(tmp_path)
    monkeypatch.setattr(tiktoken_ranks, "MAX_BYTES", 2000)
    with pytest.raises(FormatError, match="at most 2000 bytes"):
        opened(tmp_path)


def changed(token: str, **fields: Any) -> dict[str, Any]:
    decoder = settings(256)["added_tokens_decoder"]
    return {**decoder, token: {**decoder.get(token, {"content": "<new>", "special": True}), **fields}}


@pytest.mark.parametrize(("decoder", "message"), [
    (changed("255"), "255.*256 to 511"), (changed("512"), "512.*256 to 511"), (changed("-1"), "-1.*256 to 511"),
    (changed("x"), "256 to 511"), (changed("9" * 5000), "256 to 511"), (changed("\u0663\u0660\u0660"), "256 to 511"),
    (changed("256", content="[EOS]"), "a text that another token has"),
    (changed("300", content="<|reserved_token_301|>"), "a text that another token has"),
    (changed("256", content="a"), "a text that another token has"), (changed("256", content=7), "content.*text"),
    (changed("256", special="yes"), "special.*true or false"), (changed("256", lstrip=True), "lstrip.*allowed: false"),
    ({"256": "[BOS]"}, "an object"), ([], "an object"),
], ids=["below", "above", "negative", "no number", "huge", "other digits", "twice", "reserved", "a byte", "a number",
        "no boolean", "lstrip", "no object", "a list"])
def test_malformed_special_tokens(tmp_path: Path, decoder: Any, message: str) -> None:
    write(tmp_path, BYTES, added_tokens_decoder=decoder)
    with pytest.raises(FormatError, match=message) as raised:
        opened(tmp_path)
    assert "tokenizer_config.json" in str(raised.value) and len(str(raised.value)) < 1000


def test_a_folder_without_added_tokens(tmp_path: Path) -> None:
    """All special tokens are reserved ones; a missing tokenizer_config.json says nothing else."""
    write(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = opened(tmp_path)
    assert tokenizer.token_text(256) == "<|reserved_token_256|>" and tokenizer.vocab_size == 512


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small Kimi K2 with the files of its repository, and the network in torch."""
    torch = pytest.importorskip("torch")
    paritymodels = pytest.importorskip("paritymodels")
    folder = tmp_path_factory.mktemp("kimi")
    model = paritymodels.decoder("deepseek2_kimi", 2, vocab=len(trained()) + 256)
    paritymodels.randomise(model, 11)
    model.save_pretrained(folder)
    write(folder, trained())
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "kimi_k2", "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "eos_token_id": len(trained()) + 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": len(trained()) + 2, "max_length": 400}))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('mpool ran the code of a repository')")
    return folder, (torch, model.eval())


def test_a_folder_as_published(published: tuple[Path, Any]) -> None:
    """The ids of a chat prompt are tiktoken's, and the completion is that of the network in torch."""
    folder, (torch, model) = published
    want = reference(trained())
    prompt = ("<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Wie geht's, \u4f60\u597d?"
              "<|im_end|><|im_assistant|>assistant<|im_middle|>")
    ids = want.encode(prompt, allowed_special="all")
    found = mpool.chat([{"role": "system", "content": "Be brief."},
                        {"role": "user", "content": "Wie geht's, \u4f60\u597d?"}], str(folder), compute="float32",
                       max_tokens=12, temperature=0, ignore_eos=True)
    assert found.usage.prompt_tokens == len(ids)
    with torch.no_grad():
        for _ in range(12):
            row = model(torch.tensor([ids])).logits[0, -1]
            row[len(trained()) + 1:len(trained()) + 3] = -np.inf  # tokens that end a completion are not sampled
            ids.append(int(row.argmax()))
    table = open_tokenizer(TokenizerSource(json_path=str(folder / "tiktoken.model"))).token_table()
    shown = b"".join(table.data[table.offsets[token]:table.offsets[token + 1]] for token in ids[-12:])
    assert str(found) == shown.decode("utf-8", "replace")


def test_another_class_does_not_read_the_file(published: tuple[Path, Any], tmp_path: Path) -> None:
    """The rules are Kimi's: a folder of another class with a file of this name has no tokenizer."""
    for file in published[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    other = settings(len(trained()), tokenizer_class="QWenTokenizer")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(other))
    with pytest.raises(FormatError, match=re.escape("tokenizer.json")):
        mpool.generate("a", str(tmp_path), max_tokens=1)


def test_a_download_includes_the_file() -> None:
    files = ["config.json", "model.safetensors", "tiktoken.model", "tokenization_kimi.py", "tokenizer_config.json"]
    assert choose_folder(files, "", lambda name: {}, where="moonshotai/Kimi-K2-Instruct") == [
        "config.json", "model.safetensors", "tiktoken.model", "tokenizer_config.json"]
