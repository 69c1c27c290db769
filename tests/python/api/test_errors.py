"""Texts of errors."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import aio
from mpool.checks import refuse, unknown_option
from mpool.errors import ContextOverflow, InvalidArgument, MpoolError, OfflineError, sentence


@pytest.mark.parametrize(("value", "text"), [
    (0, "`top_k` must be 1 or more, got 0. Omit it"),
    ("x" * 80, "`top_k` must be 1 or more, got '" + "x" * 56 + "... Omit it")])
def test_hint_follows_as_a_sentence(value: object, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        refuse("top_k", value, "1 or more", hint="Omit it")
    assert str(caught.value) == text


def test_question_ends_without_a_full_stop() -> None:
    error = unknown_option("topk", ["top_k", "seed"], of="generate")
    assert error.message == "`topk` is not an option of generate; did you mean `top_k`?"
    assert str(error) == error.message + " Options: top_k, seed"
    assert sentence(error.message) == error.message


@pytest.mark.parametrize(("names", "param", "text"), [
    ({"inputs": "texts"}, "texts[3]", "`texts[3]` has 9 tokens"),
    ({"inputs[3]": "line 7 of a.txt"}, "line 7 of a.txt", "line 7 of a.txt has 9 tokens"),
    ({"inputs": "--text"}, "--text[3]", "--text[3] has 9 tokens"),
    ({"input": "texts", "inputs[30]": "x"}, "inputs[3]", "`inputs[3]` has 9 tokens")])
def test_the_caller_s_name_replaces_the_parameter(names: dict[str, str], param: str, text: str) -> None:
    """In the field and at the start of the message. Values of the caller stay as they are."""
    error = ContextOverflow("`inputs[3]` has 9 tokens", tokens=9, limit=5, param="inputs[3]",
                            hint="Shorten `inputs[3]`")
    error.rename(names)
    assert (error.param, error.message) == (param, text)
    assert str(error) == text + ". Shorten `inputs[3]`"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    other = InvalidArgument(param="inputs[3]", got="'`inputs[3]`'", allowed="a str")
    other.rename(names)
    assert other.message == text.replace("has 9 tokens", "must be a str, got '`inputs[3]`'")


def test_a_message_about_another_subject_keeps_its_words() -> None:
    error = MpoolError("the prompt with `top_k` is long", param="top_k")
    error.rename({"top_k": "k"})
    assert (error.param, error.message, error.problem) == ("k", "the prompt with `top_k` is long", None)
    without = MpoolError("`top_k` is long")
    without.rename({"top_k": "k"})
    assert (without.param, without.message) == (None, "`top_k` is long")
    error.message = "another text"
    assert error.message == "another text"


def test_an_offline_error_has_its_parts_as_fields() -> None:
    error = OfflineError(missing="no complete copy of a/b", cause="downloads are disabled", hint="Run it")
    assert error.message == "no complete copy of a/b, and downloads are disabled"
    error.addition = "there is no file a either"
    assert error.missing == "no complete copy of a/b"
    assert str(error) == error.message + ". Run it" and error.message.endswith("disabled; there is no file a either")
    assert OfflineError("no copy").missing == "no copy"


# ---- tracebacks ------------------------------------------------------------------------------------------------------

def _frames(call: Callable[[], Any]) -> list[str]:
    """Return the files of the frames below the caller's line, of the error and of its causes."""
    try:
        call()
    except MpoolError as error:
        printed = traceback.TracebackException.from_exception(error)
    found: list[str] = []
    while printed is not None:
        found += [frame.filename for frame in printed.stack]
        printed = printed.__cause__ or (None if printed.__suppress_context__ else printed.__context__)
    own = [at for at, name in enumerate(found) if name == __file__]
    return [name for name in found[own[-1] + 1:] if "/asyncio/" not in name]


async def _stream(pool: mpool.Pool) -> None:
    async for _ in aio.generate("x", "org/none", pool=pool, stream=True):
        pass


def _llama() -> Any:
    from mpool.integrations.llama_cpp import Llama

    return Llama("org/none")


def _sentence_transformer() -> Any:
    from mpool.integrations.sentence_transformers import SentenceTransformer

    return SentenceTransformer("org/none")


@pytest.mark.parametrize("call", [
    lambda pool: pool.embed("x", "org/none"), lambda pool: pool.embed("x", "org/none", dimensions=0),
    lambda pool: pool.embed("x", "nothing"), lambda pool: pool.embed("x", "/none"), lambda pool: pool.load("org/none"),
    lambda pool: pool.register("x", "org/none"), lambda pool: pool.tokenize("x", "org/none"),
    lambda pool: pool.generate("x", "org/none"), lambda pool: list(pool.generate("x", "org/none", stream=True)),
    lambda pool: pool.submit("text_to_text", prompt="x", model="org/none"),
    lambda pool: pool.embed("x", "org/none", none=1), lambda pool: list(pool.embed_iter(["x"], "org/none")),
    lambda pool: asyncio.run(aio.embed("x", "org/none", pool=pool)),
    lambda pool: asyncio.run(aio.load("org/none", pool=pool)), lambda pool: asyncio.run(_stream(pool)),
    lambda pool: mpool.similarity([1.0], [1.0, 2.0]), lambda pool: _llama(), lambda pool: _sentence_transformer()])
def test_a_traceback_has_few_frames(monkeypatch: pytest.MonkeyPatch, call: Callable[[mpool.Pool], Any]) -> None:
    """Those of the package say nothing to a caller: a failed download had 26."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        assert len(_frames(lambda: call(pool))) <= 4


def test_a_traceback_has_the_frames_of_a_callers_code(bert: Path) -> None:
    def texts() -> Iterator[str]:
        yield "x"
        raise InvalidArgument("of the caller")

    with mpool.Pool() as pool, pytest.raises(InvalidArgument) as caught:
        list(pool.embed_iter(texts(), bert))
    assert "texts" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_error_of_the_system_has_few_frames(bert: Path, tmp_path: Path) -> None:
    with mpool.Pool() as pool:
        assert len(_frames(lambda: pool.embed_image(str(tmp_path / "none.png"), bert))) <= 4
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        assert len(_frames(lambda: pool.load(tmp_path / "model.gguf"))) <= 4
