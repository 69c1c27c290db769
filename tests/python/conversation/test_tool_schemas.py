"""Schemas of tools that are functions, dataclasses or pydantic classes."""

import dataclasses
import enum
from typing import Annotated, Any, Literal, TypedDict

import pytest

import mpool
from mpool.conversation import tool_schemas


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


class Place(TypedDict):
    city: str


@dataclasses.dataclass
class Span:
    days: int
    hours: int = 0


def forecast(city: str, unit: Unit, kind: Literal["short", "long"], place: Place, span: Span, names: list[str],
             more: dict[str, int], pair: tuple[int, str], anything: Any, note: Annotated[str, "What to note."],
             days: int = 3, wind: float | None = None, rain: bool | str = True) -> str:
    """Says how the weather will be.

    At any place.

    Args:
        city: The city,
            in any language.
        days (int): How many days.

    Returns:
        what: a text.
    """
    return f"{city}{unit}{kind}{place}{span}{names}{more}{pair}{anything}{note}{days}{wind}{rain}"


def test_functions_become_schemas() -> None:
    (made,) = tool_schemas.read([forecast])
    function = made["function"]
    assert (made["type"], function["name"]) == ("function", "forecast")
    assert function["description"] == "Says how the weather will be.\n\nAt any place."
    assert function["parameters"] == {
        "type": "object", "properties": {
            "city": {"type": "string", "description": "The city, in any language."},
            "unit": {"enum": ["celsius", "fahrenheit"]}, "kind": {"enum": ["short", "long"]},
            "place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                      "additionalProperties": False},
            "span": {"type": "object", "properties": {"days": {"type": "integer"}, "hours": {"type": "integer"}},
                     "required": ["days"], "additionalProperties": False},
            "names": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object", "additionalProperties": {"type": "integer"}},
            "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2,
                     "maxItems": 2},
            "anything": {}, "note": {"type": "string", "description": "What to note."},
            "days": {"type": "integer", "description": "How many days.", "default": 3},
            "wind": {"type": ["number", "null"], "default": None},
            "rain": {"type": ["boolean", "string"], "default": True}},
        "required": ["city", "unit", "kind", "place", "span", "names", "more", "pair", "anything", "note"]}


def test_classes_become_schemas() -> None:
    pydantic = pytest.importorskip("pydantic")
    Weather = pydantic.create_model("Weather", __doc__="The weather.", city=str, days=(int, 3))
    (made,) = tool_schemas.read([Weather])
    assert made["function"]["name"] == "Weather" and made["function"]["description"] == "The weather."
    assert made["function"]["parameters"]["required"] == ["city"]

    def nested(weather: Any) -> None:
        """Takes a Weather."""

    nested.__annotations__["weather"] = Weather
    assert tool_schemas.read([nested])[0]["function"]["parameters"]["properties"]["weather"]["required"] == ["city"]


def untyped(city):  # type: ignore[no-untyped-def]
    """Has a parameter without an annotation."""


def starred(*cities: str) -> None:
    """Has a variadic parameter."""


def positional(city: str, /) -> None:
    """Has a positional-only parameter."""


def takes_bytes(city: bytes) -> None:
    """Has a type without a JSON schema."""


def takes_integer_keys(cities: dict[int, str]) -> None:
    """Has a dict whose keys are not strings."""


@pytest.mark.parametrize("tool, message", [
    (untyped, "parameter city must have a type annotation"),
    (starred, r"parameter \*cities: .* must be one that can be passed by name"),
    (positional, "must be one that can be passed by name"), (takes_bytes, "is of type bytes, which has no JSON schema"),
    (takes_integer_keys, "is of type dict"), (print, "must have a type annotation|passed by name|cannot be read")])
def test_functions_without_a_usable_signature(tool: Any, message: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=message) as caught:
        tool_schemas.read([tool])
    assert tool.__name__ in str(caught.value) and "tools[0]" in str(caught.value)


def test_tools_without_a_description_get_none() -> None:
    """A template renders ``""`` as a line: it costs tokens and changes answers."""
    pydantic = pytest.importorskip("pydantic")

    class Place(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        name: str

    def bare(name: str) -> str:
        return name

    for tool in ({"type": "function", "function": {"name": "f"}}, bare, Place,
                 {"type": "function", "function": {"name": "f", "description": None}}):
        (found,) = tool_schemas.read([tool])
        assert "description" not in found["function"]
    (given,) = tool_schemas.read([{"type": "function", "function": {"name": "f", "description": ""}}])
    assert given["function"]["description"] == ""
