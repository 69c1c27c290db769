"""Namespaces of ``/v1/responses``: tools that group functions, as Codex sends the tools of an MCP server.

A tool of the type ``namespace`` has a name and functions. A call of such a function has the fields ``namespace`` and
``name``. Models know functions only, so each function of a namespace is offered under a joined name. The joined name
depends only on these two names, so an earlier call in the input can be converted without the list of tools.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ...checks import shown
from ...conversation.tool_schemas import MAX_NAME
from .. import formats
from ..errors import Refusal

if TYPE_CHECKING:
    from ..operations import Context

#: Joined name -> name of the namespace, and name of the function within it.
Origins = dict[str, tuple[str, str]]
#: Text between the names of the namespace and the function; number of digits of a digest.
_SEPARATOR, _DIGITS = "__", 8


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name under which a model knows a function.

    It is ``mcp__files__read`` for the function ``read`` of the namespace ``mcp__files`` or ``mcp__files__``. If it has
    more characters than names of functions may have, a digest replaces its end.
    """
    if not namespace:
        return name
    joined = namespace.removesuffix(_SEPARATOR) + _SEPARATOR + name
    if len(joined) <= MAX_NAME:
        return joined
    digest = hashlib.blake2b(joined.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return f"{joined[:MAX_NAME - _DIGITS - 1]}_{digest}"


def functions_of(context: Context, tools: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]], Origins]:
    """Return the tools that are functions, those of namespaces under their joined names, and the origins of the latter.

    Tools of other types are ignored, also within a namespace. The description of a namespace is ignored as well: chat
    templates have no place for it.

    Raises:
        Refusal: A namespace has no name or no list of tools, or a tool has another type and the server is strict.
    """
    found: list[dict[str, Any]] = []
    origins: Origins = {}
    for at, tool in enumerate(tools or ()):
        if tool.get("type") != "namespace":
            found += formats.functions_of(context, [tool], first=at)
            continue
        namespace, inner, where = tool.get("name"), tool.get("tools"), f"tools[{at}]"
        if not isinstance(namespace, str) or not namespace:
            raise Refusal("invalid_value", f"`{where}.name` must be the name of the namespace, got {shown(namespace)}.",
                          f"{where}.name")
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise Refusal("invalid_value", f"`{where}.tools` must be a list of tools.", f"{where}.tools")
        for function in formats.functions_of(context, inner, path=f"{where}.tools"):
            name = function.get("name")
            if not isinstance(name, str) or not name:
                raise Refusal("invalid_value", f"`{where}.tools` must have functions with a `name`.", f"{where}.tools")
            joined = joined_name(namespace, name)
            origins[joined] = namespace, name
            found.append({**function, "name": joined})
    return found, origins


def joined_choice(choice: Any, functions: list[dict[str, Any]], origins: Origins) -> Any:
    """Return a ``tool_choice`` with joined names in place of the names of functions of namespaces.

    A name without a namespace selects the plain function of this name, or else the function of this name in a
    namespace, if exactly one namespace has it.
    """
    def with_joined(one: Any) -> Any:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str):
            return one
        namespace = one.get("namespace")
        if not isinstance(namespace, str) and name not in plain:
            spaces = [space for space, inner in origins.values() if inner == name]
            namespace = spaces[0] if len(spaces) == 1 else None
        return {**one, "name": joined_name(namespace, name)} if isinstance(namespace, str) else one

    plain = {function.get("name") for function in functions} - origins.keys()
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {**choice, "tools": [with_joined(one) for one in choice["tools"]]}
    return with_joined(choice)


def shown_tools(tools: list[dict[str, Any]] | None, names: set[str]) -> list[dict[str, Any]]:
    """Return the tools of a request that have an effect, as the client sent them.

    Args:
        tools: Tools of the request.
        names: Names of the functions that the model knows.
    """
    def has_effect(tool: dict[str, Any]) -> bool:
        if tool.get("type") != "namespace":
            return tool.get("type", "function") == "function" and formats.name_of(tool) in names
        return any(joined_name(tool["name"], name) in names for one in tool["tools"]
                   if (name := formats.name_of(one)) is not None)

    return [tool for tool in tools or () if has_effect(tool)]


__all__ = ["Origins", "functions_of", "joined_choice", "joined_name", "shown_tools"]
