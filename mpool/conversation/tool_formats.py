"""Tool-call formats of models: one :class:`ToolFormat` per format, recognised by the markers in the model's chat
template. It states the text around a call once for its three users: the grammar that constrains a completion
(:mod:`mpool.conversation.tool_grammar`), the parser of completions (:mod:`mpool.conversation.tool_calls`), and
:meth:`ToolFormat.render` for templates that do not write calls themselves.

Sources:
    Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4: the templates; https://github.com/NousResearch/Hermes-Function-Calling
    Qwen3-Coder, Qwen3.5 and later, Nemotron 3: the templates.
    LFM3: the ``response_template`` of its tokenizer's configuration.
    Seed-OSS, GLM-4.5 to 4.7, Nemotron Nano 2: the templates.
    Command R7B and A: the templates; https://docs.cohere.com/docs/command-r7b-hf
    Llama 3: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
    Mistral: https://docs.mistral.ai/capabilities/function_calling, and mistral-common's tokenizers, versions 3 and 11.
    Phi-4-mini, Granite 3, DeepSeek V3, R1 and V3.1, Kimi K2: the model cards and templates.
    OLMo 3: its template.
    LFM2 and LFM2.5: the templates; https://docs.liquid.ai/lfm/key-concepts/tool-use
    Gemma 4: its template.
    GPT-OSS: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from . import python_calls, quoted_calls, reasoning

#: An opening that is a tag: the tag that ends it replaces the end marker of the format.
TAG = re.compile(r"<(\w+)>")


class Function(NamedTuple):
    """A function that a model may call.

    Attributes:
        name: function name.
        parameters: JSON schema of the arguments object.
        strict: True if a schema keyword that a grammar cannot enforce is an error.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A tool-call format.

    Attributes:
        name: name of the format, for messages and tests.
        body: content of a call. ``"json"``: ``head``, the function's name as JSON, the key ``key`` and an object with
            the arguments; ``"marked"``: the function's name, ``middle``, and an object with the arguments; ``"xml"``:
            the function's name, ``middle``, then each argument in tags. ``"python"``: a call in Python's syntax with
            named arguments (:mod:`mpool.conversation.python_calls`). ``"quoted"``: the function's name and the
            arguments of Gemma 4 (:mod:`mpool.conversation.quoted_calls`).
        open, close: text before and after each call.
        namespace: text before each function's name, which models may leave out.
        section, end: text before the first and after the last call. If ``listed``, ``[`` and ``]`` enclose the calls
            between them.
        between: text between two calls.
        listed: True if the calls are a JSON list.
        head: start of a call object, up to the function's name.
        key: key of the arguments in a call object.
        middle: text between a function's name and its arguments.
        tags: texts before the name of an argument, between it and the value, and after the value.
        numbered: True if a function's name is followed by ``:`` and a number; both together are the call's id.
        markerless: True if calls have no marker. A completion that begins with a call object is then a call.
        marker_optional: True if calls may lack the marker, because models with little training on the format
            (Qwen2.5-Coder) omit it. A completion that begins with a call object, also in a code fence, is then a call.
        openings: texts that models write instead of ``prefix``, because they leave out a marker or use that of another
            version of the format. The first word of each is a marker.
        max_calls: maximum number of calls in a completion; 0: no limit.
    """

    name: str
    body: Literal["json", "marked", "xml", "python", "quoted"]
    open: str = ""
    close: str = ""
    namespace: str = ""
    section: str = ""
    end: str = ""
    between: str = ""
    listed: bool = False
    head: str = '{"name": '
    key: str = "arguments"
    middle: str = ""
    tags: tuple[str, str, str] = ("<parameter=", ">\n", "\n</parameter>\n")
    numbered: bool = False
    markerless: bool = False
    marker_optional: bool = False
    openings: tuple[str, ...] = ()
    max_calls: int = 0

    @property
    def prefix(self) -> str:
        """Text before the first call's name or object."""
        return self.section + "[" * self.listed + self.open

    @property
    def marker(self) -> str:
        """Marker that starts the calls in a completion: the first line of ``prefix``. Empty if ``markerless``."""
        return (self.section or self.open).strip().partition("\n")[0]

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers that start calls in a completion, :attr:`marker` first. Empty if ``markerless``."""
        return tuple(dict.fromkeys(found for found in (self.marker, *(
            text.partition("\n")[0] for text in self.openings)) if found))

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts of which the first ends a call, or the last call. Empty if only the end of the completion does."""
        tags = (TAG.fullmatch(opening) for opening in self.openings)
        found = [text.strip("`\n").partition("\n")[0] for text in (self.close, self.end)]
        return tuple(dict.fromkeys(filter(None, (*found, *(f"</{tag[1]}>" for tag in tags if tag is not None)))))

    def around_arguments(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a call, between ``open`` and ``close``."""
        if self.body == "json":
            return f'{self.head}{json.dumps(name)}, "{self.key}": ', "}"
        if self.body == "python":
            return f"{name}(", ")"
        if self.body == "quoted":
            return name + "{", "}"
        return self.namespace + name + ":0" * self.numbered + self.middle, ""

    def render(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of calls (function name, arguments) as a model writes them."""
        texts = []
        for name, arguments in calls:
            before, after = self.around_arguments(name)
            if self.body == "xml":
                before_key, before_value, after_value = self.tags
                inside = "".join(before_key + key + before_value + _tag_value(value) + after_value
                                 for key, value in arguments.items())
            else:
                inside = python_calls.write(arguments) if self.body == "python" else \
                    quoted_calls.write(arguments)[1:-1] if self.body == "quoted" else \
                    json.dumps(arguments, ensure_ascii=False)
            texts.append(self.open + before + inside + after + self.close)
        return self.section + "[" * self.listed + self.between.join(texts) + "]" * self.listed + self.end


def _tag_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


HERMES = ToolFormat("hermes", "json", "<tool_call>\n", "\n</tool_call>", between="\n", marker_optional=True,
                    openings=("<tools>",))
QWEN3_CODER = ToolFormat("qwen3_coder", "xml", "<tool_call>\n<function=", "</function>\n</tool_call>", between="\n",
                         middle=">\n", openings=("<function=",))
SEED_OSS = ToolFormat("seed_oss", "xml", "<seed:tool_call>\n<function=", "</function>\n</seed:tool_call>", between="\n",
                      middle=">\n", tags=("<parameter=", ">", "</parameter>\n"), openings=("<function=",))
GLM4_5 = ToolFormat("glm4_5", "xml", "<tool_call>", "</tool_call>", between="\n", middle="\n",
                    tags=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"))
GLM4_7 = ToolFormat("glm4_7", "xml", "<tool_call>", "</tool_call>",
                    tags=("<arg_key>", "</arg_key><arg_value>", "</arg_value>"))
NEMOTRON2 = ToolFormat("nemotron2", "json", section="<TOOLCALL>", end="</TOOLCALL>", listed=True, between=", ")
COHERE = ToolFormat("cohere", "json", "\n    ", section="<|START_ACTION|>", end="<|END_ACTION|>", listed=True,
                    between=",", head='{"tool_call_id": "0", "tool_name": ', key="parameters")
LLAMA3 = ToolFormat("llama3", "json", key="parameters", markerless=True, max_calls=1)
MISTRAL = ToolFormat("mistral", "json", section="[TOOL_CALLS]", listed=True, between=", ")
MISTRAL_SPACED = ToolFormat("mistral_spaced", "json", section="[TOOL_CALLS] ", listed=True, between=", ")
MISTRAL_MARKED = ToolFormat("mistral_marked", "marked", "[TOOL_CALLS]", middle="[ARGS]")
PHI4 = ToolFormat("phi4", "json", section="<|tool_call|>", end="<|/tool_call|>", listed=True, between=", ",
                  openings=("functools[",))
PHI4_SINGLE = ToolFormat("phi4_single", "json", "<|tool_call|>", "<|/tool_call|>", openings=("functools[",))
GRANITE3 = ToolFormat("granite3", "json", section="<|tool_call|>", listed=True, between=", ",
                      openings=("<tool_call>",))
DEEPSEEK_V3 = ToolFormat("deepseek_v3", "marked", "<｜tool▁call▁begin｜>", "\n```<｜tool▁call▁end｜>",
                         "function<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n",
                         middle="\n```json\n", openings=("<｜tool▁call▁begin｜>",))
DEEPSEEK_V31 = ToolFormat("deepseek_v31", "marked", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "",
                          "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", middle="<｜tool▁sep｜>",
                          openings=("<｜tool▁call▁begin｜>",))
KIMI_K2 = ToolFormat("kimi_k2", "marked", "<|tool_call_begin|>", "<|tool_call_end|>", "functions.",
                     "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                     middle="<|tool_call_argument_begin|>", numbered=True,
                     openings=("<|tool_call_begin|>", "<|tool_call_section_begin|>\n<|tool_call_begin|>"))
LFM2 = ToolFormat("lfm2", "python", section="<|tool_call_start|>", end="<|tool_call_end|>", listed=True, between=", ")
OLMO3 = ToolFormat("olmo3", "python", section="<function_calls>", end="</function_calls>", between="\n")
GEMMA4 = ToolFormat("gemma4", "quoted", "<|tool_call>call:", "<tool_call|>")
#: The format that :class:`mpool.conversation.reasoning.HarmonyCallSplitter` writes. The grammar
#: (:mod:`mpool.conversation.tool_grammar`) has the spelling that models use.
HARMONY = ToolFormat("harmony", "marked", reasoning.CALL_HEADER, "<|call|>", middle="<|message|>", max_calls=1)


#: Texts of templates with ``<tool_call>`` whose formats are not supported: those of MiniMax-M3 and Apriel 1.5.
_OTHER_TOOL_CALLS = ("<invoke name=", "<tool_calls>")


def of_template(source: str) -> ToolFormat | None:
    """Return the tool-call format of a model with this chat template, or None if the format is not supported."""
    if reasoning.is_harmony(source):
        return HARMONY
    if LFM2.section in source or "<|tool_list_start|>" in source:
        return LFM2
    if OLMO3.section in source:
        return OLMO3
    if GEMMA4.open in source:
        return GEMMA4
    if DEEPSEEK_V31.section in source:
        return DEEPSEEK_V3 if "```json" in source else DEEPSEEK_V31
    if KIMI_K2.section in source:
        return KIMI_K2
    if MISTRAL.section in source:
        return MISTRAL_MARKED if "[ARGS]" in source else MISTRAL_SPACED if "[TOOL_CALLS] " in source else MISTRAL
    for one in (SEED_OSS, NEMOTRON2, COHERE):
        if one.marker in source:
            return one
    if "<tool_call>" in source:
        if "<arg_key>" in source:
            return GLM4_7 if GLM4_7.tags[1] in source else GLM4_5
        if any(other in source for other in _OTHER_TOOL_CALLS):
            return None
        return QWEN3_CODER if "<function=" in source and "<parameter=" in source else HERMES
    if "<|tool|>" in source:
        return PHI4_SINGLE if '<|tool_call|>{"name"' in source else PHI4
    if GRANITE3.section in source:
        return GRANITE3
    if '{"name": function name' in source or \
            "<|python_tag|>" in source and '"parameters"' in source and "<function=" not in source:
        return LLAMA3
    # templates of LFM2.5 that do not write calls contain no marker of them
    return LFM2 if '"List of tools: ' in source and "<|im_start|>" in source else None
