"""Tool-call formats of models: one row per format, recognised by the words of the model's chat template. A row states
the text around a call, for all three that have to agree: the grammar that constrains a model
(:mod:`mpool.conversation.tool_grammar`), the parser of completions (:mod:`mpool.conversation.tool_calls`), and the text
for templates that do not write calls themselves.

Sources:
    Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4: the templates; https://github.com/NousResearch/Hermes-Function-Calling
    Qwen3-Coder: its template.
    Llama 3: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
    Mistral: https://docs.mistral.ai/capabilities/function_calling, and mistral-common's tokenizers, versions 3 and 11.
    Phi-4-mini, Granite 3, DeepSeek V3, R1 and V3.1, Kimi K2: the models' cards and templates.
    GPT-OSS: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from . import reasoning


class Function(NamedTuple):
    """A function that a model may call. ``parameters``: the JSON schema of the arguments object; ``strict``: a schema
    keyword that a grammar cannot enforce is an error."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of calls.

    Attributes:
        name: for messages and tests.
        body: ``"json"``: a call is an object of ``name`` and ``key``; ``"marked"``: its name, ``middle``, and an object
            of arguments; ``"xml"``: its name, then each argument in tags.
        open, close: around each call.
        section, end: around all of them, with ``[`` and ``]`` if ``listed``.
        between: two calls.
        key: the key of the arguments in an object.
        middle: between a name and its arguments.
        numbered: a name is followed by ``:`` and a number, and both together are the id of the call.
        leads: an answer that begins with such an object is a call: there is no mark.
        bare: an answer that begins with such an object, fenced or not, is a call, too: models that were trained little
            on the form (Qwen2.5-Coder) leave the marks out.
        most: how many calls an answer can have; 0: any number.
    """

    name: str
    body: Literal["json", "marked", "xml"]
    open: str = ""
    close: str = ""
    section: str = ""
    end: str = ""
    between: str = ""
    listed: bool = False
    key: str = "arguments"
    middle: str = ""
    numbered: bool = False
    leads: bool = False
    bare: bool = False
    most: int = 0

    @property
    def prefix(self) -> str:
        """The text before the first call."""
        return self.section + "[" * self.listed + self.open

    @property
    def mark(self) -> str:
        """The marker that starts calls in a completion: the first word of ``prefix``. Empty if ``leads``."""
        return (self.section or self.open).strip().partition("\n")[0]

    def around(self, name: str) -> tuple[str, str]:
        """The text before and after the arguments of a call, between ``open`` and ``close``."""
        if self.body == "json":
            return f'{{"name": {json.dumps(name)}, "{self.key}": ', "}"
        return name + ":0" * self.numbered + (">\n" if self.body == "xml" else self.middle), ""

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls as a model writes them."""
        texts = []
        for name, arguments in calls:
            before, after = self.around(name)
            if self.body == "xml":
                inside = "".join(f"<parameter={key}>\n{_shown(value)}\n</parameter>\n"
                                 for key, value in arguments.items())
            else:
                inside = json.dumps(arguments, ensure_ascii=False)
            texts.append(self.open + before + inside + after + self.close)
        return self.section + "[" * self.listed + self.between.join(texts) + "]" * self.listed + self.end


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


HERMES = ToolFormat("hermes", "json", "<tool_call>\n", "\n</tool_call>", between="\n", bare=True)
QWEN3_CODER = ToolFormat("qwen3_coder", "xml", "<tool_call>\n<function=", "</function>\n</tool_call>", between="\n")
LLAMA3 = ToolFormat("llama3", "json", key="parameters", leads=True, most=1)
MISTRAL = ToolFormat("mistral", "json", section="[TOOL_CALLS]", listed=True, between=", ")
MISTRAL_SPACED = ToolFormat("mistral_spaced", "json", section="[TOOL_CALLS] ", listed=True, between=", ")
MISTRAL_MARKED = ToolFormat("mistral_marked", "marked", "[TOOL_CALLS]", middle="[ARGS]")
PHI4 = ToolFormat("phi4", "json", section="<|tool_call|>", end="<|/tool_call|>", listed=True, between=", ")
PHI4_SINGLE = ToolFormat("phi4_single", "json", "<|tool_call|>", "<|/tool_call|>")
GRANITE3 = ToolFormat("granite3", "json", section="<|tool_call|>", listed=True, between=", ")
DEEPSEEK_V3 = ToolFormat("deepseek_v3", "marked", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                         "\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n",
                         middle="\n```json\n")
DEEPSEEK_V31 = ToolFormat("deepseek_v31", "marked", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                          "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", middle="<｜tool▁sep｜>")
KIMI_K2 = ToolFormat("kimi_k2", "marked", "<|tool_call_begin|>functions.", "<|tool_call_end|>",
                     "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                     middle="<|tool_call_argument_begin|>", numbered=True)
#: As :class:`mpool.conversation.reasoning.HarmonyCalls` gives them; the grammar has the spelling that models use.
HARMONY = ToolFormat("harmony", "marked", reasoning.CALL, "<|call|>", middle="<|message|>", most=1)


def of_template(source: str) -> ToolFormat | None:
    """The form of calls of a model with this chat template; None if it is none of these."""
    if reasoning.is_harmony(source):
        return HARMONY
    if DEEPSEEK_V31.section in source:
        return DEEPSEEK_V3 if "```json" in source else DEEPSEEK_V31
    if KIMI_K2.section in source:
        return KIMI_K2
    if MISTRAL.section in source:
        return MISTRAL_MARKED if "[ARGS]" in source else MISTRAL_SPACED if "[TOOL_CALLS] " in source else MISTRAL
    if "<tool_call>" in source:
        if "<arg_key>" in source:  # GLM's
            return None
        return QWEN3_CODER if "<function=" in source and "<parameter=" in source else HERMES
    if "<|tool|>" in source:
        return PHI4_SINGLE if '<|tool_call|>{"name"' in source else PHI4
    if GRANITE3.section in source:
        return GRANITE3
    if '{"name": function name' in source or \
            "<|python_tag|>" in source and '"parameters"' in source and "<function=" not in source:
        return LLAMA3
    return None
