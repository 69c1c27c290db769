"""A plugin of pytest that runs vLLM's tests of tool parsers with mpool's parser, without vLLM.

`pytest -p vllmparsers tests/tool_parsers/...` in a folder with vLLM's sources makes up the modules of vLLM that the
tests import. Each class of a tool parser there is :class:`Parser` with the format of :data:`FORMATS`.
MPOOL_PEER_OUTCOMES names the JSON file to write: the outcome of each test.
"""

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import transformers

from mpool.conversation import tool_formats as formats
from mpool.conversation.tool_calls import ToolCallParser

#: Name of a parser's class, or of a parser in vLLM's table -> format.
FORMATS = {"Hermes2ProToolParser": formats.HERMES, "Granite4ToolParser": formats.HERMES,
           "deepseek_v3": formats.DEEPSEEK_V3, "DeepSeekV31ToolParser": formats.DEEPSEEK_V31,
           "granite": formats.GRANITE3, "GraniteEngineToolParser": formats.GRANITE3,
           "phi4_mini_json": formats.PHI4, "KimiK2ToolParser": formats.KIMI_K2,
           "Qwen3CoderToolParser": formats.QWEN3_CODER, "Qwen3EngineToolParser": formats.QWEN3_CODER,
           "Llama3JsonToolParser": formats.LLAMA3}
_WORD = re.compile(r"<[^<>\s]{1,40}>|\w+|\s+|.", re.DOTALL)
outcomes: dict[str, str] = {}


class _AnyFunction(Mapping[str, Mapping[str, Any]]):
    """Parameters of the functions of a request; without tools, it has a function of every name."""

    def __init__(self, request: Any) -> None:
        tools = [getattr(tool, "function", None) or tool for tool in getattr(request, "tools", None) or ()]
        self._known = {tool.name: tool.parameters or {} for tool in tools}

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._known[name] if self._known else {}

    def __contains__(self, name: object) -> bool:
        return not self._known or name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Parser:
    """vLLM's interface of a tool parser, for one format of mpool."""

    format = formats.HERMES

    def __init__(self, tokenizer: Any = None, tools: Any = None, **_: Any) -> None:
        self.model_tokenizer, self._tools, self._stream = tokenizer, tools, None  # type: ignore[var-annotated]

    def _make(self, request: Any) -> ToolCallParser:
        functions = _AnyFunction(request if getattr(request, "tools", None) else SimpleNamespace(tools=self._tools))
        return ToolCallParser(self.format, functions, False, lambda number: f"call_{number}")

    def adjust_request(self, request: Any) -> Any:
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        parser = self._make(request)
        text, _ = parser.feed(model_output, True)
        calls = [ToolCall(id=call.id, function=FunctionCall(
            name=call.name, arguments=call.raw)) for call in parser.calls]
        return SimpleNamespace(tools_called=bool(calls), tool_calls=calls, content=text or None)

    def extract_tool_calls_streaming(self, previous_text: str = "", current_text: str = "", delta_text: str = "",
                                     *_: Any, request: Any = None, **more: Any) -> Any:
        if self._stream is None or current_text and current_text == delta_text:
            self._stream = self._make(request)
        text, parts = self._stream.feed(delta_text)
        if not text and not parts:
            return None
        return DeltaMessage(content=text or None, tool_calls=[DeltaToolCall(
            index=part.number, id=part.id, type="function" if part.id else None,
            function=DeltaFunctionCall(name=part.name, arguments=part.arguments)) for part in parts])


class _Record(SimpleNamespace):
    """An object of vLLM's protocol: the fields that a test gives, None for others."""

    def __init__(self, **fields: Any) -> None:
        if isinstance(fields.get("function"), dict):
            fields["function"] = SimpleNamespace(**{"parameters": None, **fields["function"]})
        super().__init__(**{name: _record(value) for name, value in fields.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return vars(self)


def _record(value: Any) -> Any:
    if isinstance(value, dict) and "function" in value:
        return _Record(**value)
    return [_record(one) for one in value] if isinstance(value, list) else value


class FunctionCall(_Record): ...
class DeltaFunctionCall(_Record): ...
class DeltaToolCall(_Record): ...


class ToolCall(_Record):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"type": "function", **fields})


class DeltaMessage(_Record):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"content": None, "tool_calls": [], **fields})


class Tokenizer:
    """Words, tags, and spaces as tokens."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.words.setdefault(word, len(self.words)) for word in _WORD.findall(text)]

    def decode(self, ids: Any, **_: Any) -> str:
        names = list(self.words)
        return "".join(names[id] for id in ([ids] if isinstance(ids, int) else ids))

    def convert_ids_to_tokens(self, ids: list[int], **_: Any) -> list[str]:
        return [self.decode(id) for id in ids]

    def get_vocab(self) -> dict[str, int]:
        return dict(self.words)

    def __getattr__(self, name: str) -> Any:
        return MagicMock()


def detokenize_incrementally(tokenizer: Tokenizer, all_input_ids: list[int], prev_tokens: list[str] | None,
                             **_: Any) -> tuple[list[str], str, int, int]:
    """Return the last token, its text, and two offsets, which a caller passes again."""
    text = tokenizer.decode(all_input_ids[-1])
    return [text], text, 0, 0


def _tokenizer(*_: Any, **more: Any) -> Tokenizer:
    return Tokenizer()


def _parser(name: str) -> type[Parser]:
    return type(name, (Parser,), {"format": FORMATS.get(name, formats.HERMES)})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = globals().get(name)
        if name == "ToolParserManager":
            found = SimpleNamespace(get_tool_parser=_parser)
        elif name in ("get_tokenizer", "TokenizerLike"):
            found = _tokenizer if name == "get_tokenizer" else Tokenizer
        elif name.endswith("ToolParser"):
            found = _parser(name)
        elif not callable(found):
            found = type(name, (_Record,), {})
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("vllm", "xgrammar"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []  # type: ignore[attr-defined]


sys.meta_path.insert(0, _Finder())
transformers.AutoTokenizer.from_pretrained = _tokenizer  # type: ignore[method-assign]


def pytest_runtest_logreport(report: Any) -> None:
    """Note the worst outcome of a test's phases."""
    outcome = "passed" if str(report.longrepr).startswith("[XPASS(strict)]") else report.outcome  # vLLM's own fails
    if report.when == "call" or outcome != "passed":
        outcomes.setdefault(report.nodeid, outcome)
        if outcome == "failed":
            outcomes[report.nodeid] = "failed"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes."""
    Path(os.environ["MPOOL_PEER_OUTCOMES"]).write_text(json.dumps(outcomes, indent=1))
