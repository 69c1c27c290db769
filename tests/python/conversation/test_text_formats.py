"""``format`` in JSON schemas: the texts that a grammar allows are those that strict validators accept."""

import datetime
import ipaddress
import json
import re
import urllib.parse
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from grammarsamples import accepts, samples

llguidance = pytest.importorskip("llguidance")

from mpool.conversation import grammar, tool_formats, tool_grammar, tools  # noqa: E402
from mpool.conversation.text_formats import PATTERNS  # noqa: E402
from mpool.conversation.tool_formats import Function  # noqa: E402


def source(name: str, kind: str = "schema") -> str:
    made = grammar._enforceable(kind, json.dumps({"type": "string", "format": name}), None)
    assert made[3] == ()
    return llguidance.LLMatcher.grammar_from_json_schema(made[1])


def is_date(text: str) -> bool:
    return len(text) == 10 and bool(datetime.date.fromisoformat(text))


def is_time(text: str, day: str = "2016-12-31") -> bool:
    """By RFC 3339, which needs an offset; the only leap second is 23:59:60."""
    if re.match("23:59:60", text):
        text = text.replace("60", "59", 1)
    return re.search(r"([zZ]|[+-]\d\d:\d\d)$", text) is not None and bool(datetime.datetime.fromisoformat(
        f"{day}T{text.upper()}".replace("Z", "+00:00")))


def is_date_time(text: str) -> bool:
    return is_date(text[:10]) and text[10] in "Tt" and is_time(text[11:], text[:10])


def is_hostname(text: str) -> bool:
    return len(text) <= 253 and all(re.fullmatch(r"(?!-)(?!..--)[A-Za-z0-9-]{1,63}(?<!-)", label)
                                    for label in text.split("."))


def is_email(text: str) -> bool:
    local, _, domain = text.rpartition("@")
    address = domain[1:-1] if domain[:1] == "[" else ""
    return len(text) <= 254 and len(local) <= 64 and re.fullmatch(r"[^\s@.\[\]()<>,:;\\\"]+(\.[^\s@.]+)*", local) \
        is not None and (bool(ipaddress.IPv4Address(address)) if address else is_hostname(domain))


def is_uri(text: str) -> bool:
    parts = urllib.parse.urlsplit(text)
    return bool(parts.scheme) and (parts.port or 0) < 65536 and is_reference(text)


def is_reference(text: str) -> bool:
    """All characters are those of RFC 3986, and so are the escapes."""
    urllib.parse.urlsplit(text)
    return re.fullmatch(r"([\w.~!$&'()*+,;=:@/?#\[\]-]|%[0-9a-fA-F]{2})*", text, re.ASCII) is not None


def is_duration(text: str) -> bool:
    found = re.fullmatch(r"P(?:(\d+)W|(?:(\d+)Y)?(?:(\d+)M)?(?:(\d+)D)?(T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?)", text)
    return found is not None and any(found.groups()) and found[5] != "T"


VALID: dict[str, Callable[[str], Any]] = {
    "date": is_date, "time": is_time, "date-time": is_date_time, "duration": is_duration, "hostname": is_hostname,
    "email": is_email, "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address, "uuid": uuid.UUID, "uri": is_uri,
    "uri-reference": is_reference, "json-pointer": lambda text: re.fullmatch("(/([^~/]|~[01])*)*", text),
    "relative-json-pointer": lambda text: re.fullmatch("(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)", text)}


@pytest.mark.parametrize("name", PATTERNS)
def test_samples_are_valid(name: str) -> None:
    """By own strict validators, and by those of jsonschema that are installed."""
    jsonschema = pytest.importorskip("jsonschema")
    checker, texts = jsonschema.Draft202012Validator.FORMAT_CHECKER, samples(source(name), 400, ends=0.2)
    assert len(texts) > 100 and len(set(texts)) > 50
    for text in map(json.loads, texts):
        assert VALID[name](text), text
        # the times of jsonschema have no leap second, and its relative pointers no 0 within a number
        if name not in ("time", "relative-json-pointer") and ":60" not in text:
            checker.check(text, name)


#: Format -> texts that are valid, texts that are not. From JSON-Schema-Test-Suite, and the limits of the RFCs.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2020-02-29", "2000-02-29", "0004-02-29", "2021-02-28", "9999-12-31", "0001-01-01"],
             ["2021-02-29", "1900-02-29", "2100-02-29", "0000-02-29", "0000-01-01", "2020-02-30", "2020-04-31",
              "2020-13-01", "2020-00-10", "2020-01-00", "20-01-01", "2020-1-1", "12020-01-01"]),
    "time": (["08:30:06Z", "23:59:59+00:00", "23:59:60Z", "23:20:50.52z", "08:30:06-23:59"],
             ["24:00:00Z", "22:59:60Z", "23:58:60Z", "00:60:00Z", "12:00:00", "12:00Z", "12:00:00.Z", "12:00:00+24:00",
              "12:00:00+00:60", "23:59:61Z"]),
    "date-time": (["1963-06-19T08:30:06.283185Z", "1998-12-31T23:59:60Z", "2020-02-29t00:00:00z"],
                  ["1990-02-31T15:59:59Z", "2021-02-29T00:00:00Z", "1998-12-31T23:58:60Z", "1998-12-31T22:59:60Z",
                   "1990-12-31T15:59:59-24:00", "1963-06-19 08:30:06Z", "0000-01-01T00:00:00Z", "1963-06-19"]),
    "duration": (["P4DT12H30M5S", "P1Y2M", "PT36H", "P2W", "PT0S"],
                 ["P", "PT", "P1", "P1YT", "PT1D", "P2D1Y", "4DT5S"]),
    "hostname": (["a", "www.example.com", "1host", "a-b", "xn.a--b", "a" * 63, ".".join(["a" * 63] * 3 + ["b" * 61])],
                 ["", "-a", "a-", "a.-b", "a..b", ".a", "a.", "a_b", "ab--c", "a" * 64,
                  ".".join(["a" * 63] * 3 + ["b" * 62])]),
    "email": (["joe.bloggs@example.com", "te~st@example.com", "a@[127.0.0.1]", "a" * 64 + "@b.c"],
              ["2962", "a@", "@b", ".a@b.c", "a.@b.c", "a..b@c.d", "a" * 65 + "@b.c", "a@-b.c", "a@b.c-", "a@b@c",
               "a@" + "b" * 64, "a@[127.0.0.300]"]),
    "ipv4": (["192.168.0.1", "0.0.0.0"], ["256.1.1.1", "01.2.3.4", "1.2.3", "1.2.3.4.5"]),
    "ipv6": (["::1", "::", "1::", "1:2:3:4:5:6:7:8", "::ffff:192.168.0.1", "1:2:3:4:5:6:1.2.3.4", "1::2:3:4:5:6:7",
              "1:2:3:4:5:6:7::"],
             ["12345::", "1:2:3:4:5:6:7", "1::2::3", ":1", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:1.2.3.4", "::1%eth0",
              "1:2:3:4:5:6:7:8::", "::1.2.3.300"]),
    "uuid": (["2EB8AA08-AA98-11EA-B4AA-73B441D16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa"]),
    "uri": (["http://foo.bar/?baz=qux#quux", "mailto:a@b.c", "urn:oasis:names", "http://[::1]:80/", "ftp://a@b/c%20d",
             "tel:+1-816-555-1212"],
            ["//foo.bar", "/abc", "foo", "http://a b", ":// x", "http://a\\b", "http://[::g]/", "a:%zz", "1a:b"]),
    "uri-reference": (["/abc", "//a/b", "#x", "", "a?b", "http://a"], ["\\\\a", "a b", "%zz", "1a:b"]),
    "json-pointer": (["", "/a~0/~1", "/a/"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "0#", "120/a/b"], ["/a", "01/a", "-1/a", "0##"])}


@pytest.mark.parametrize("name", PATTERNS)
def test_texts_of_each_format(name: str) -> None:
    """The same in a response format, strict or not, and in arguments of tools in JSON and in tags."""
    functions, left_out = tools._enforceable([Function("f", {"type": "object", "properties": {
        "a": {"type": "string", "format": name}}, "required": ["a"]})])
    assert not left_out
    grammars = [(source(name), "", '"', '"'), (source(name, "lenient"), "", '"', '"')]
    for form, start, end in ((tool_formats.HERMES, '{"a": "', '"}'), (tool_formats.QWEN3_CODER, "<parameter=a>\n", (
            "\n</parameter>\n"))):
        made = tool_grammar.build_grammar(form, functions, forced=True, single=True, splitter=None).lark
        before, after = form.around_arguments("f")
        grammars.append((made, form.prefix + before, start, end + after + form.close + form.end))
    for text, right in [(text, True) for text in CASES[name][0]] + [(text, False) for text in CASES[name][1]]:
        for made, before, start, end in grammars:
            shown = json.dumps(text)[1:-1] if '"' in start else text
            assert accepts(made, before + start + shown + end) is right, (text, start)
