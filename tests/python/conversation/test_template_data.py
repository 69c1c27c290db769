"""Data that a chat template gets, and the error for each status of its renderer (mpool/conversation/template.py)."""

import collections
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import pytest

from mpool.conversation import messages as check, renderer
from mpool.conversation.rendering import TemplateResult
from mpool.conversation.template import ChatTemplate, _dicts, _map_strings, _to_plain, _with_reasoning, each_string
from mpool.errors import FormatError, InvalidArgument, LimitError, TemplateError
from mpool.tokenizers import limits

USER = [{"role": "user", "content": "hi"}]


class Text(str):
    """A str with methods of its own."""


class Number(int):
    """An int with methods of its own."""


class Real(float):
    """A float with methods of its own."""


class Model:
    """An object that can write itself as a dict, as pydantic's models can."""

    def model_dump(self) -> dict[str, Any]:
        return {"name": Text("n"), "inner": [Number(2)]}


@dataclasses.dataclass
class Document:
    """A dataclass, whose fields a template may read."""

    title: str
    pages: tuple[Any, ...]


@pytest.mark.parametrize("value, plain", [
    (None, None), (True, True), (False, False), (2.5, 2.5), (Real(2.5), 2.5), (7, 7), (Number(7), 7), ("é", "é"),
    (Text("é"), "é"), (np.int64(3), 3), (np.float32(0.5), 0.5), (np.bool_(True), True), ([1, Text("a")], [1, "a"]),
    ((Number(1), [2]), (1, [2])), ({"a": {Text("b"): (1,)}}, {"a": {"b": (1,)}}), ({1: 2}, {1: 2}),
    (collections.OrderedDict(a=1), {"a": 1}), (Document("t", (1, Text("b"))), {"title": "t", "pages": (1, "b")}),
    (Model(), {"name": "n", "inner": [2]}), (Document, "<type>"), (object(), "<object>"), (b"x", "<bytes>"),
    ({1}, "<set>")])
def test_data_becomes_plain(value: Any, plain: Any) -> None:
    """The renderer's process gets builtin types alone, and equal values."""
    def types(value: Any) -> Any:
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) \
            else []
        return type(value), [types(one) for one in inner]

    found = _to_plain(value, "messages")
    assert found == plain and types(found) == types(plain)


@pytest.mark.parametrize("value, where", [
    ("a\ud800", "x"), ({"a": "a\ud800"}, "x.a"), ([0, {"b": ["a\ud800"]}], "x[1].b[0]"), ({7: "a\ud800"}, "x[7]"),
    ({"a b": {"c": "a\ud800"}}, "x['a b'].c"), ({"k" * 90: "a\ud800"}, f"x['{'k' * 56}...]"),
    ([[[["a\ud800"]]]], "x[0][0][0]"), (Document("a\ud800", ()), "x"), ({"a\ud800": 1}, "x")])
def test_half_of_a_surrogate_pair(value: Any, where: str) -> None:
    """The error names the text as a field of a request is named, down to three levels, and the character."""
    with pytest.raises(InvalidArgument) as caught:
        _to_plain(value, "x")
    assert caught.value.param == where
    assert caught.value.got == "half of a surrogate pair at character 1" and caught.value.allowed == "Unicode text"


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"a": inner}, lambda inner: (inner,),
                                  lambda inner: Document("t", (inner,))])
def test_depth_of_data(make: Any) -> None:
    """Data may be nested as deeply as the limit, and no deeper. A dataclass with a tuple is two levels."""
    value: Any = 1
    while True:
        deeper = make(value)
        try:
            _to_plain(deeper, "x")
        except LimitError as error:
            assert "x is nested deeper than 64 levels" in str(error).replace("[0]", "").replace(".a", "")
            assert error.hint == "Raise mpool.tokenizers.limits.max_data_depth"
            break
        value = deeper
    depth, inner = 0, value
    while inner != 1:
        inner = inner[0] if isinstance(inner, (list, tuple)) else inner["a"] if isinstance(inner, dict) else inner.pages
        depth += 1
    assert depth == limits.max_data_depth == 64


def test_lists_of_dicts() -> None:
    """Tools and documents are lists of dicts, which the template gets unchanged."""
    values: list[Any] = [{"a": 1}, {}]
    assert _dicts(values, "documents") is values and _dicts([], "tools") == []
    source = "{% for d in documents %}{{ d.title }},{% endfor %}{{ tools | length }}"
    assert ChatTemplate(source).render(USER, documents=[{"title": "a"}, {"title": "b"}], tools=[{"type": "f"}]) \
        == "a,b,1"
    for name in ("tools", "documents"):
        for wrong, got in (("text", "str"), (b"x", "bytes"), ({"a": 1}, "dict"), (3, "int")):
            with pytest.raises(InvalidArgument, match=f"`{name}` must be a list of dicts, got {got}") as caught:
                ChatTemplate(source).render(USER, **{name: wrong})
            assert caught.value.param == name
        with pytest.raises(InvalidArgument, match=re.escape(f"{name}[1]")) as caught:
            ChatTemplate(source).render(USER, **{name: [{}, "text"]})
        assert caught.value.param == f"{name}[1]" and "got str" in str(caught.value)


@pytest.mark.parametrize("given, found", [
    ({"content": "a"}, {"content": "a"}),
    ({"reasoning_content": "r"}, {"thinking": "r", "reasoning_content": "r"}),
    ({"thinking": "r"}, {"thinking": "r", "reasoning_content": "r"}),
    ({"reasoning": "r"}, {"thinking": "r", "reasoning": "r", "reasoning_content": "r"}),
    ({"reasoning_content": None, "thinking": "t", "reasoning": "r"},
     {"reasoning_content": "t", "thinking": "t", "reasoning": "r"}),
    ({"reasoning_content": "c", "thinking": "t"}, {"reasoning_content": "c", "thinking": "t"}),
    ({"reasoning": "r", "tool_calls": [1]},
     {"thinking": "r", "tool_plan": "r", "reasoning": "r", "tool_calls": [1], "reasoning_content": "r"}),
    ({"reasoning_content": ""}, {"thinking": "", "reasoning_content": ""})])
def test_keys_of_reasoning(given: dict[str, Any], found: dict[str, Any]) -> None:
    """Templates read reasoning under two names; the first that the message sets is the text of both."""
    assert _with_reasoning(given) == found


def test_walks_of_nested_data() -> None:
    """Strings and keys are visited in order, and changed by different functions; other keys and values stay."""
    data = {"a": ["b", ("c", 1)], 2: {"d": None}}
    texts: list[str] = []
    keys: list[str] = []
    each_string(data, texts.append, keys.append)
    assert texts == ["b", "c"] and keys == ["a", "d"]
    assert _map_strings(data, str.upper, lambda key: key * 2) == {"aa": ["B", ("C", 1)], 2: {"dd": None}}


READS = "Give every message the keys that this model's template reads"
FAULTY = "The template of this model is faulty or malicious"
STATUSES: dict[str, tuple[type, str, str | None]] = {
    "undefined": (TemplateError, "f.jinja: the chat template read a value that is not defined: TEXT", READS),
    "rejected": (TemplateError, "f.jinja: the chat template rejected this conversation: TEXT", None),
    "type": (TemplateError, "f.jinja: the chat template failed on this conversation: TEXT", READS),
    "failed": (TemplateError, "f.jinja: the chat template failed on this conversation (TEXT)", READS),
    "depth": (TemplateError, "f.jinja: the chat template exceeded its limit of nested calls", FAULTY),
    "security": (TemplateError, "f.jinja: the chat template used an operation that is not allowed in chat templates",
                 FAULTY),
    "surrogate": (TemplateError,
                  "f.jinja: the chat template wrote half of a surrogate pair, which is not Unicode text", FAULTY),
    "died": (TemplateError, "f.jinja: the chat template failed: the process that renders it ended twice (TEXT)",
             FAULTY),
    "silent": (TemplateError, "f.jinja: the chat template failed: the process that renders it did not respond", FAULTY),
    "time": (TemplateError, "f.jinja: the chat template exceeded its limit of TEXT s of CPU time",
             f"{FAULTY}, or raise mpool.tokenizers.limits.max_template_seconds"),
    "memory": (TemplateError, "f.jinja: the chat template exceeded its limit of "
               f"{limits.max_template_memory >> 20} MiB of memory",
               f"{FAULTY}, or raise mpool.tokenizers.limits.max_template_memory"),
    "size": (TemplateError, "f.jinja: the chat template exceeded its limit of "
             f"{limits.max_template_text:,} characters of text",
             f"{FAULTY}, or raise mpool.tokenizers.limits.max_template_text"),
    "nodes": (LimitError, f"f.jinja: the chat template has more than {limits.max_template_nodes:,} nodes",
              "Raise mpool.tokenizers.limits.max_template_nodes"),
    "nested": (LimitError, "f.jinja: the chat template is nested too deeply", None)}


@pytest.mark.parametrize("status", STATUSES)
def test_error_of_a_status(status: str) -> None:
    """Each status has its own message, and names the file if the template comes from one."""
    kind, message, hint = STATUSES[status]
    error = ChatTemplate("x", file="f.jinja")._error(TemplateResult(status, "TEXT"))
    assert (type(error), error.hint) == (kind, hint)
    assert str(error).split("\n")[0].startswith(message)
    if kind is TemplateError:
        other = ChatTemplate("x")._error(TemplateResult(status, "TEXT"))
        assert str(other).startswith(message.removeprefix("f.jinja: "))


def test_error_of_a_refused_template() -> None:
    """A template that is refused for a while states for how long, and why."""
    error = ChatTemplate("x", file="f")._error(TemplateResult("time", "5", 2.25))
    assert str(error).startswith("f: the chat template cannot be used for 2.2 s, because at least 3 times in a row it "
                                 "exceeded its limit of 5 s of CPU time")


@pytest.mark.parametrize("status, text, got, allowed", [
    ("forbidden", "an import", "an import", "statements and expressions of one template"),
    ("syntax", "3: a: b", "a template with an error in line 3: a: b", "a Jinja template"),
    ("uncompilable", "ValueError", "a template that does not compile (ValueError)", "a Jinja template")])
def test_error_of_a_template_that_is_none(status: str, text: str, got: str, allowed: str) -> None:
    """The file is wrong, so the error is one of the file's format."""
    for file, name in (("f.jinja", "f.jinja"), ("", "the model")):
        error = ChatTemplate("x", file=file)._error(TemplateResult(status, text))
        assert isinstance(error, FormatError)
        assert (error.file, error.field, error.got, error.allowed) == (name, "chat_template", got, allowed)


def _raising(error: BaseException) -> Any:
    def function(text: str, most: int) -> Any:
        raise error
    return function


@pytest.mark.parametrize("error, found", [
    (renderer.TooManyNodes(), ("nodes", b"")), (renderer.ForbiddenNode("an import"), ("forbidden", b"an import")),
    (jinja2.TemplateSyntaxError("Unknown tag.", 7), ("syntax", b"7: Unknown tag")),
    (jinja2.TemplateSyntaxError("", 7), ("syntax", b"7: no reason given")), (RecursionError(), ("nested", b"")),
    (ValueError("secret"), ("uncompilable", b"ValueError"))])
def test_status_of_a_refused_source(error: Exception, found: tuple[str, bytes]) -> None:
    """An error of the compiler becomes a status; the message of an unexpected one is not passed on."""
    assert renderer._compiled(_raising(error), "x", 1) == found


@pytest.mark.parametrize("error, found", [
    (RecursionError(), ("depth", b"")), (jinja2.sandbox.SecurityError("secret"), ("security", b"")),
    (jinja2.UndefinedError("'a' is undefined"), ("undefined", b"'a' is undefined")),
    (jinja2.TemplateError("no"), ("rejected", b"no")), (jinja2.TemplateError(), ("rejected", b"no reason given")),
    (TypeError("types"), ("type", b"types")), (ValueError("secret"), ("failed", b"ValueError")),
    (TypeError("\ud800" + "x" * 100_000), ("type", b"?" + b"x" * (renderer._MESSAGE_CHARS - 1)))])
def test_status_of_a_failed_rendering(error: Exception, found: tuple[str, bytes]) -> None:
    """An error of a rendering becomes a status; messages are cut, and stay encodable."""
    template: Any = SimpleNamespace(render=lambda data: _raising(error)("", 0))
    data = b"N"  # None in marshal's format
    assert renderer.handle(template, "render", 10, 10, data) == found


@pytest.mark.parametrize("text, found", [
    ("é" * 10, ("text", ("é" * 10).encode())), ("é" * 11, ("size", b"")), ("a\ud800", ("surrogate", b""))])
def test_status_of_a_text(text: str, found: tuple[str, bytes]) -> None:
    """The limit counts characters, and a text of exactly the limit is allowed."""
    template: Any = SimpleNamespace(render=lambda data: text)
    assert renderer.handle(template, "render", 10, 10, b"N") == found


def test_variables_of_a_source() -> None:
    """The kind ``variables`` compiles the data; a source that does not compile has the same status as any other."""
    status, names = renderer.handle(None, "variables", 100, 10, "é{{ a }}{% set b = c %}{{ b }}".encode())
    assert status == "text" and sorted(names.split(b"\n")) == [b"a", b"c"]
    assert renderer.handle(None, "variables", 100, 10, b"plain") == ("text", b"")
    assert renderer.handle(None, "variables", 2, 10, b"{{ a }}{{ b }}") == ("nodes", b"")
    assert renderer.handle(None, "variables", 100, 10, b"{% if %}")[0] == "syntax"


def test_memory_errors_pass() -> None:
    """The process ends on a MemoryError: it is no status."""
    with pytest.raises(MemoryError):
        renderer._compiled(_raising(MemoryError()), "x", 1)
    with pytest.raises(MemoryError):
        renderer.handle(SimpleNamespace(render=lambda data: _raising(MemoryError())("", 0)), "render", 10, 10, b"N")


def test_a_syntax_error_names_its_line() -> None:
    """The error names line and file when a renderer process compiles the template."""
    with pytest.raises(FormatError, match="a template with an error in line 2: ") as caught:
        ChatTemplate("a\n{% if %}", file="f.jinja").render(USER)
    assert caught.value.file == "f.jinja" and caught.value.field == "chat_template"


@pytest.mark.parametrize("messages, chars", [
    (["abcde", "fghij"], 10), (["abcdef", "fghij"], 11), ([[{"type": "text", "text": "abcde"}] * 2], 10),
    ([[{"type": "text", "text": "abcde"}] * 2, "k"], 11)])
def test_characters_of_all_messages_are_limited(messages: list[Any], chars: int,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_CHARS", 10)
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": [{}] * 90}}}
    for more in ({"tool_calls": [call]}, {"reasoning_content": "x" * 90}, {"x": {"y" * 90: 1}}):
        with pytest.raises(InvalidArgument):  # also what a template writes besides the content
            check.check_messages([{"role": "assistant", "content": "a", **more}])
    given = [{"role": "assistant", "content": content} for content in messages]
    for images in (None, list[Any]()):
        if chars <= 10:
            assert len(check.check_messages(given, images)) == len(messages)
            continue
        with pytest.raises(InvalidArgument) as caught:
            check.check_messages(given, images)
        error = caught.value
        assert (error.param, error.got, error.allowed, error.hint) == (
            "messages", "11 characters", "at most 10 characters in all messages", "Remove the oldest messages")
