"""The invalid field of a refused body: the path that msgspec states, what is allowed there, and what the body has."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from jsonplaces import places

msgspec = pytest.importorskip("msgspec")

from mpool.server.anthropic.structs import MessagesRequest  # noqa: E402
from mpool.server.bodies import parse  # noqa: E402
from mpool.server.errors import Refusal  # noqa: E402
from mpool.server.invalid import place_of, refusal_of  # noqa: E402
from mpool.server.ollama_structs import OllamaChatRequest  # noqa: E402
from mpool.server.openai import structs  # noqa: E402
from mpool.server.worker import ExecuteRequest  # noqa: E402

CHAT = {"model": "m", "messages": [
    {"role": "user", "content": [{"type": "text", "text": "x"},
                                 {"type": "image_url", "image_url": {"url": "u", "detail": "d"}}]},
    {"role": "assistant", "content": "x", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
    "temperature": 1, "stop": ["a"], "logit_bias": {"5": 1.0}, "stream_options": {"include_usage": True}, "n": 1}
VALID: list[tuple[Any, dict[str, Any]]] = [
    (structs.ChatRequest, CHAT),
    (structs.EmbeddingsRequest, {"model": "m", "input": ["x", [1, 2], 3], "dimensions": 4}),
    (structs.ImagesRequest, {"model": "m", "prompt": "x", "size": "32x32", "n": 1}),
    (structs.RerankRequest, {"model": "m", "query": "x", "documents": ["x", {"text": "y"}], "top_n": 1}),
    (OllamaChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}],
                         "options": {"temperature": 1, "stop": ["x"]}}),
    (MessagesRequest, {"model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "x"}], "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "x"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text",
                                                                                             "text": "x"}]}]}],
                       "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
                       "thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["x"]}),
    (ExecuteRequest, {"job_id": "1", "prompt": "x", "stop": ["a"], "seed": 3})]
VALUES: list[Any] = [None, True, -1, 0, 1.5, 10**30, 1e300, "", "x", [], [1], ["x"], {}, {"a": 1}, {"type": "none"},
                     {"text": 3}, {"type": "text"}]


def damaged(rng: random.Random, value: dict[str, Any]) -> bytes:
    """A body with one or two values removed, added or replaced."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 2])):
        *parents, last = rng.choice(list(places(value)))
        at: Any = value
        for key in parents:
            at = at[key]
        action = rng.random()
        if action < 0.2 and len(value) > 1:
            del at[last]
        elif action < 0.35 and isinstance(at, dict):
            at["zz"] = 1
        else:
            at[last] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(value).encode()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "valid"), VALID, ids=lambda value: getattr(value, "__name__", ""))
def test_faults_name_the_field_that_msgspec_refuses(kind: Any, valid: dict[str, Any]) -> None:
    """Also of bodies in JSON, where msgspec reads the fields in the same order."""
    msgspec.json.decode(json.dumps(valid).encode(), type=kind)
    rng, refused = random.Random(7), 0
    while refused < 1500:
        body = damaged(rng, valid)
        try:
            msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            place, refused = place_of(error), refused + 1
            refusal = refusal_of(json.loads(body), kind, place)
            path = "".join("[...]" if step is None else f"[{step}]" if isinstance(step, int) else f".{step}"
                           for step in place.steps)
            assert f"`${path}`" in str(error) or not path
            assert (refusal.param or "") == (f"{path}.{place.name}" if place.name else path).removeprefix(".")
            assert (refusal.code == "unsupported_parameter") == (place.kind == "unknown")
            assert place.kind != "value" or "must be " in refusal.detail and "must be any value" not in refusal.detail


def test_names_of_clients_lead_nowhere() -> None:
    """The name of an unknown field may look like a path of msgspec."""
    for name in ("zz` - at `$.messages[7].content", "` - at `$", "zz` - at `$[...]", "$", "a.b[0]", ""):
        with pytest.raises(Refusal) as refused:
            parse(json.dumps({**CHAT, name: 1}).encode(), structs.ChatRequest)
        assert refused.value.row.status == 400
        ignored: list[str] = []
        try:
            assert parse(json.dumps({**CHAT, name: 1}).encode(), structs.ChatRequest, ignored).model == "m"
        except Refusal as refusal:
            assert refusal.row.status == 400 and " - at " in name


@pytest.mark.parametrize(("change", "code", "param", "text"), [
    ({"temperature": -1}, "invalid_value", "temperature", "`temperature` must be a number from 0 to 100, got -1."),
    ({"top_p": -0.5}, "invalid_value", "top_p", "`top_p` must be a number from 0 to 1, got -0.5."),
    ({"n": True}, "invalid_value", "n", "`n` must be an integer from 1 to 128, got true."),
    ({"stop": 3}, "invalid_value", "stop",
     "`stop` must be a string of at least 1 character or a list of at most 64 items, got 3."),
    ({"messages": []}, "invalid_value", "messages",
     "`messages` must be a string of at least 1 character or a list of 1 to 10,000 items, got a list of 0."),
    ({"messages": [{"role": "x"}]}, "invalid_value", "messages[0].role",
     "`messages[0].role` must be one of assistant, developer, system, tool, user, got 'x'."),
    ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "invalid_value", "messages[0].content[0].type",
     "`messages[0].content[0].type` must be one of text, image_url, refusal, video, video_url, got 'sound'."),
    ({"messages": [{"content": "x"}]}, "invalid_value", "messages[0].role", "`messages[0].role` is required."),
    ({"messages": [{"role": "user", "zz": 1}]}, "unsupported_parameter", "messages[0].zz",
     "`messages[0].zz` is not a parameter of this route."),
    ({"zz": 1}, "unsupported_parameter", "zz", "`zz` is not a parameter of this route.")])
def test_refusals(change: dict[str, Any], code: str, param: str, text: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse(json.dumps({**CHAT, **change}).encode(), structs.ChatRequest)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.message.endswith(text), refused.value.message


@pytest.mark.parametrize(("kind", "body", "wanted"), [
    (structs.ChatRequest, {**CHAT, "n": 1.0, "user": None, "zz": None}, ["n", 1]),
    (structs.ChatRequest, {**CHAT, "stop_token_ids": [1.0, 2]}, ["stop_token_ids", [1, 2]]),
    (structs.EmbeddingsRequest, {"model": "m", "input": [1.0, 2.0]}, ["input", [1, 2]]),
    (structs.EmbeddingsRequest, {"model": "m", "input": "x", "dimensions": 2.0**60}, None),
    (structs.EmbeddingsRequest, {"model": "m", "input": "x", "dimensions": 1.5}, None)])
def test_whole_numbers_and_nulls(kind: Any, body: dict[str, Any], wanted: list[Any] | None) -> None:
    """A float that may stand for several integers is none."""
    if wanted is None:
        with pytest.raises(Refusal) as refused:
            parse(json.dumps(body).encode(), kind)
        assert refused.value.param == "dimensions"
    else:
        found = getattr(parse(json.dumps(body).encode(), kind), wanted[0])
        assert found == wanted[1] and "." not in repr(found)


@pytest.mark.parametrize("text", [
    '"\\ud800"', '"\\udc00 \\ud83d\\ude00"', '"\\\\ud83d\\ude00"', "1e999", '[{"a": -1e400}]'])
def test_values_that_no_program_could_send_again(text: str) -> None:
    """Halves of surrogate pairs, and floats that are too large, also in values of free form and beside each other."""
    for more in ("", ', "zz": 1e999'):
        body = '{"model": "m", "input": "x", "user": ' + text + more + "}"
        with pytest.raises(Refusal) as refused:
            parse(body.encode(), structs.EmbeddingsRequest, [])
        assert refused.value.row.status == 400
    pairs = parse(b'{"model": "m", "input": "\\ud83d\\ude00 \\\\ud800"}', structs.EmbeddingsRequest)
    assert pairs.input == "\U0001f600 \\ud800"


@pytest.mark.parametrize(("kind", "field"), [(structs.EmbeddingsRequest, "dimensions"), (structs.ChatRequest, "stop"),
                                             (structs.EmbeddingsRequest, "input")])
def test_deeply_nested_value(kind: Any, field: str) -> None:
    body = json.dumps({"model": "m", "input": "x"} if kind is structs.EmbeddingsRequest else CHAT)[:-1].encode()
    with pytest.raises(Refusal) as refused:
        parse(body + b', "' + field.encode() + b'": ' + b"[" * 5000 + b"]" * 5000 + b"}", kind)
    assert refused.value.row.status == 400 and (refused.value.param or field).startswith(field)


@pytest.mark.parametrize("body", [b"0 x", b'0"', b"[1]]", b'{"model": 3, "x', b'{"model": 3}}', b'"a" "b"', b"true1"])
@pytest.mark.parametrize("kind", [structs.ChatRequest, MessagesRequest])
def test_invalid_values_before_invalid_json(kind: Any, body: bytes) -> None:
    """msgspec refuses a value of the wrong type before it has read the rest of the body."""
    with pytest.raises(Refusal) as refused:
        parse(body, kind)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(("body", "detail"), [
    (b"", "It is empty."), (b'{"model": "m"', "It ends too early, or has half of a surrogate pair."),
    (b'{"model": "\\ud800"}', "It ends too early, or has half of a surrogate pair."),
    (b'{"model": "\xff"}', "It is not UTF-8."), (b'{"model": NaN}', "At byte 10, counted from 0: invalid character."),
    (b'{"model": 3, "zz": NaN}', "At byte 19, counted from 0: invalid character."),
    (b'\xef\xbb\xbf', "It is empty."),
    (b'{"model": "m",}', "At byte 14, counted from 0: trailing comma in object."),
    (b"{'model': 1}", "At byte 1, counted from 0: object keys must be")])
def test_bodies_that_are_no_json(body: bytes, detail: str) -> None:
    """The message says what is wrong, and where. It holds nothing of the body."""
    with pytest.raises(Refusal) as refused:
        parse(body, structs.EmbeddingsRequest)
    assert refused.value.code == "invalid_json" and refused.value.detail.startswith(detail), refused.value.message


def test_byte_order_mark() -> None:
    found = parse(b'\xef\xbb\xbf{"model": "m", "input": "x"}', structs.EmbeddingsRequest)
    assert (found.model, found.input) == ("m", "x")


def test_body_must_be_an_object() -> None:
    with pytest.raises(Refusal) as refused:
        parse(b"[1]", structs.ChatRequest)
    assert refused.value.param is None and "The body must be an object, got a list of 1." in refused.value.message
