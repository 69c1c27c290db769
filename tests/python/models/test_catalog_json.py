"""The strict JSON parser and typed fields."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpool.models import json_strict
from mpool.models.fields import Fields
from mpool.errors import FormatError


def refused(text: bytes | str, **limits: object) -> FormatError:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(FormatError) as caught:
        json_strict.loads(data, file="x.json", **limits)
    assert caught.value.file == "x.json"
    return caught.value


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2**63, 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))),
                                                                inner, max_size=5), max_leaves=25)


@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
@settings(max_examples=200, deadline=None)
def test_agrees_with_the_standard_parser(value: object, ascii_only: bool, indent: object) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert json_strict.loads(f" \n{text}\r\t".encode(), file="x") == json.loads(text)


@given(st.binary(max_size=40) | st.text('{}[]",:\\u0123456789.eE+- truefalsn', max_size=40).map(str.encode))
@settings(max_examples=400, deadline=None)
def test_arbitrary_bytes_parse_or_raise_format_error(data: bytes) -> None:
    try:
        value = json_strict.loads(data, file="x")
    except FormatError as error:
        assert error.field and error.allowed
        return
    assert json.loads(data) == value


@pytest.mark.parametrize("text, field, offset", [
    ("", "JSON", 0), ("  ", "JSON", 2), ("nul", "JSON", 0), ("truex", "JSON", 4), ("[1,]", "[1]", 3),
    ("[1 2]", "[1]", 3), ('{"a":1,}', "a", 7), ('{"a"}', "a", 4), ("{a:1}", "JSON", 1), ("{'a':1}", "JSON", 1),
    ("01", "JSON", 1), ("+1", "JSON", 0), (".5", "JSON", 0), ("1.", "JSON", 1), ("-", "JSON", 0), ("0x10", "JSON", 1),
    ("NaN", "JSON", 0), ("[Infinity]", "[0]", 1), ('{"x":-Infinity}', "x", 5), ('"\x01"', "JSON", 1),
    ('"abc', "JSON", 0), ('"\\q"', "JSON", 1), ("{} {}", "JSON", 3), ("[1]//x", "JSON", 3),
    ('{"a":{"b":[0,tru]}}', "a.b[1]", 13),
])
def test_error_of_malformed_text_states_field_and_offset(text: str, field: str, offset: int) -> None:
    error = refused(text)
    assert (error.field, error.offset) == (field, offset)


def test_offsets_count_bytes_not_characters() -> None:
    error = refused('{"ä漢":1,"b":tru}')
    assert error.offset == '{"ä漢":1,"b":tru}'.encode().index(b"tru")
    with pytest.raises(FormatError) as caught:
        json_strict.loads(b"[x", file="f", offset=100)
    assert caught.value.offset == 101


def test_duplicate_keys_at_every_level() -> None:
    assert refused('{"a":1,"a":1}').field == "a"
    assert refused('{"x":[{"k":0},{"k":1,"k":2}]}').field == "x[1].k"
    # the escaped key is equal to the first key
    assert refused('{"a":1,"\\u0061":2}').got == "a duplicate key"


def test_not_utf8_and_byte_order_mark() -> None:
    assert refused(b'{"a":"\xff"}').offset == 6
    assert refused(b'"\xed\xa0\x80"').offset == 1
    assert refused("\ufeff{}").offset == 0
    assert refused('"x"'.encode("utf-16")).offset == 0


def test_half_a_surrogate_pair() -> None:
    assert refused('["\\ud83d"]').got == "half of a surrogate pair"
    assert json_strict.loads(b'"\\ud83d\\ude00"', file="x") == "\U0001f600"


def test_numbers() -> None:
    assert json_strict.loads(b"[18446744073709551615, -9223372036854775808, 1e-400, -0.0]", file="x") == [
        2**64 - 1, -2**63, 0.0, -0.0]
    assert refused("18446744073709551616").allowed == "a 64-bit integer"
    assert refused("1e999").allowed == "a number in the range of a 64-bit float"
    assert refused("9" * 5000).got == "a number of 5000 characters"
    assert json_strict.loads(b"1000000000000000019884624838656", file="x", wide_ints=True) == int(1e30)
    refused("9" * 49, wide_ints=True)


def test_limits_of_size_depth_and_count() -> None:
    assert refused("[" * 65 + "]" * 65).field.endswith("...")
    assert json_strict.loads(b"[" * 64 + b"]" * 64, file="x") is not None
    assert refused("[[1]]", max_depth=1).got == "nesting deeper than 1"
    assert refused("[1,2,3]", max_values=3).allowed == "at most 3 values"
    assert refused("[1,2]", max_bytes=4).field == "size"


@pytest.mark.parametrize("text", [
    b"[" * 100_000, b'{"a":' * 100_000, b"[" * 60 + b"9" * 5000, b'"' + b'\\"' * 500_000, b'{"' + b"a" * 1_000_000,
    b"-" * 1_000_000, b"1" + b"0" * 1_000_000, b" " * 2_000_000, b"[" + b"0," * 300_000, b'["\\ud800",' * 50_000,
    b'{"' + b'a":1,"' * 100_000,
])
def test_hostile_texts_are_refused_in_linear_time(text: bytes) -> None:
    start = time.process_time()
    refused(text)
    assert time.process_time() - start < 10.0


def test_error_texts_are_short_and_printable() -> None:
    error = refused(b'{"' + b"k" * 10_000 + b'":nul}')
    assert len(str(error)) < 400
    assert str(refused('["a\x00b"]')).isprintable()


def test_fields_validate_types() -> None:
    fields = Fields({"i": 3, "f": 1.5, "b": True, "s": "x", "l": [1, 2], "o": {"k": 1}, "n": None}, file="c.json",
                    at="top")
    assert fields.int("i") == 3 and fields.number("f") == 1.5 and fields.number("i") == 3.0
    assert fields.bool("b") and fields.str("s") == "x" and fields.list("l", of=int) == [1, 2]
    assert fields.section("o").int("k") == 1 and fields.int("n", 7) == 7 and fields.int("none", None) is None
    for call in (lambda: fields.int("b"), lambda: fields.int("f"), lambda: fields.number("b"), lambda: fields.bool("i"),
                 lambda: fields.str("i"), lambda: fields.list("o"), lambda: fields.section("l"),
                 lambda: fields.int("missing"), lambda: fields.int("n"), lambda: fields.int("i", high=2),
                 lambda: fields.number("f", above=1.5), lambda: fields.str("s", choices=("y",)),
                 lambda: fields.list("l", of=str), lambda: fields.list("l", limit=1), lambda: fields.only({"i"})):
        with pytest.raises(FormatError) as caught:
            call()
        assert caught.value.file == "c.json" and caught.value.field.startswith("top.")
    with pytest.raises(FormatError) as caught:
        fields.section("o").str("k")
    assert caught.value.field == "top.o.k"
    with pytest.raises(FormatError):
        Fields.of([], file="c.json")
