"""Chat templates: render a conversation to the text format that a model was trained on, and encode it to token ids.

A template is part of a model and written in Jinja. It is rendered as transformers does it, in a process that can be
killed (:mod:`mpool.conversation.rendering`). Only the template itself can write control tokens: their texts in
messages, such as ``<|im_end|>``, are encoded as plain text.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checks import shown
from ..errors import FormatError, InvalidArgument, LimitError, MpoolError, TemplateError, Unsupported
from ..host import native_calls
from ..host.resources import list_of_caller
from ..tokenizers import limits
from ..tokenizers.specials import compile_trie
from ..tokenizers.tokenizer import MARKS, Tokenizer
from . import rendering, turns
from .turns import REASONING

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "

#: Names that a caller's variables cannot have: variables that every template gets, and keywords with which
#: transformers selects another template.
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "template", "chat_template", "range",
                       "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now", "bos_token",
                       "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "self", "loop",
                       "caller", "varargs", "kwargs"))

_NON_WORD = re.compile(r"\W")
#: Where a template reads the reasoning of a message as a part of its content (Ministral 3, Magistral).
_THINKING_PART = re.compile(r"""\btype\b['"\]]*\s*==\s*['"]thinking['"]""")

#: Status of a rendering that exceeded a limit -> the unit of the limit, and its setting in ``limits``.
_LIMITS = {"time": ("s of CPU time", "max_template_seconds"), "memory": ("of memory", "max_template_memory"),
           "size": ("characters of text", "max_template_text")}
_FAULTY = "The template of this model is faulty or malicious"
_READS = "Give every message the keys that this model's template reads"


class ChatPrompt(NamedTuple):
    """A rendered and encoded conversation.

    Attributes:
        ids: token ids, int32 ``[tokens]``. -1 stands for an image whose model has no token for it.
        text: rendered text.
    """

    ids: np.ndarray
    text: str


class ImageTexts(NamedTuple):
    """The texts that replace the images of a conversation in its prompt.

    Attributes:
        marks: texts that stand for an image, and for a video, in the rendered conversation; the latter may be absent.
        kinds: for each image and video, the index of its mark.
        texts: text that replaces each of them, with the image tokens of the model.
        char: a character in ``texts`` whose id is -1, whatever the vocabulary contains; None: there is none.
    """

    marks: Sequence[str]
    kinds: Sequence[int]
    texts: Sequence[str]
    char: str | None

    def replaced(self, text: str) -> str:
        """Return the text with all images replaced.

        Raises:
            InvalidArgument: the text has another number of images.
        """
        parts = re.split("(" + "|".join(map(re.escape, self.marks)) + ")", text)
        wanted = [self.marks[kind] for kind in self.kinds]
        if len(parts) == 2 * len(wanted) + 1 and parts[1::2] != wanted:
            raise InvalidArgument("the chat template does not keep the order of images and videos", param="images",
                                  got="images and videos", allowed="images, or videos",
                                  hint="Pass one kind per request")
        parts = parts[::2]
        if len(parts) != len(self.texts) + 1:
            raise InvalidArgument(f"the number of images must equal the number of image tokens in the prompt, got "
                                  f"{len(self.texts)} images and {len(parts) - 1} tokens", param="images",
                                  got=f"{len(self.texts)} images", allowed=f"{len(parts) - 1} images",
                                  hint="The model's chat template writes the image tokens"
                                  if self.texts else "Pass the images, or remove the image tokens from the prompt")
        return parts[0] + "".join(image + part for image, part in zip(self.texts, parts[1:]))


class ChatTemplate:
    """A model's chat template. Thread-safe. Compiled on first use, never in this process.

    Args:
        source: the template, in Jinja.
        special: texts of special tokens by the names that templates use (``bos_token``, ...), as returned by
            :meth:`mpool.tokenizers.tokenizer.Tokenizer.special_texts`.
        file: path of the template's file, for error messages.
        key: the model's key, for error messages.

    Raises:
        InvalidArgument: ``source`` is not a string.
        LimitError: ``source`` is longer than :data:`mpool.tokenizers.limits.max_template_chars`.
    """

    def __init__(self, source: str, *, special: Mapping[str, str] | None = None, file: str | None = None,
                 key: str | None = None) -> None:
        if not isinstance(source, str):
            raise InvalidArgument(param="chat_template", got=type(source).__name__, allowed="str")
        if len(source) > limits.max_template_chars:
            raise LimitError(f"{file or 'the model'}: the chat template has {len(source):,} characters, the limit is "
                             f"{limits.max_template_chars:,}",
                             hint="Raise mpool.tokenizers.limits.max_template_chars")
        self.source = source
        self._text = rendering.Source(source)
        self._special = dict(special or {})
        self._file, self._key = file, key
        self._accepts_images: bool | None = None

    @classmethod
    def for_model(cls, source: str | None, tokenizer: Tokenizer, *, key: str | None = None,
                  file: str | None = None) -> ChatTemplate:
        """Create the template of a model.

        Args:
            source: the model's template; None or empty if it has none.
            tokenizer: the model's tokenizer.
            key: the model's key, for error messages.
            file: path of the template's file, for error messages.

        Raises:
            Unsupported: the model has no chat template.
        """
        if not source:
            raise Unsupported("this model has no chat template", key=key,
                              hint="Use generate() with a raw prompt, or register the model with chat_template=, the "
                                   "template that its authors publish")
        template = cls(source, special=tokenizer.special_texts(), file=file, key=key)
        rendering.renderers().children.start()
        return template

    def render(self, /, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
               documents: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = False,
               continue_final_message: bool = False, deadline: float | None = None, **variables: Any) -> str:
        """Render a conversation to text, as transformers' ``apply_chat_template(tokenize=False)`` does.

        Args:
            messages: at least one message; each has a ``role``, and ``content`` or other keys that the template reads.
            tools: tools in OpenAI's format, ``{"type": "function", "function": {...}}``.
            documents: dicts that templates for retrieval read.
            add_generation_prompt: end the prompt with the start of the assistant's message.
            continue_final_message: leave the last message open, so that the model continues it.
            deadline: ``time.monotonic()`` at which the request ends; None: only the limits of templates apply.
            variables: other variables that the template reads (``enable_thinking=False``), plain data.

        Returns:
            The prompt.

        Raises:
            InvalidArgument: an argument is malformed, or a variable has a reserved name.
            TemplateError: the template rejects the conversation, fails, or exceeds a limit.
            LimitError: an argument is nested too deeply, or the template is too large.
            FormatError: ``source`` is not a valid template, or uses a feature that is not allowed in chat templates.
            SpawnFailed: the process that renders templates could not be started.
            Timeout: the deadline has passed.
        """
        data = _plain_data(messages, tools, documents, variables)
        return self._render(data, add_generation_prompt, continue_final_message, deadline)

    def prompt(self, /, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *,
               tools: Sequence[Mapping[str, Any]] | None = None,
               documents: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool | None = None,
               continue_final_message: bool = False, images: ImageTexts | None = None,
               merge_turns: bool = False, deadline: float | None = None,
               check_length: Callable[[int], object] | None = None, **variables: Any) -> ChatPrompt:
        """Render a conversation and encode it.

        Texts of control tokens in ``messages``, ``tools``, ``documents`` or ``variables`` become plain text; only the
        template's own text yields control tokens. Without such texts, the ids equal those of the rendered text.

        The other arguments and the errors are those of :meth:`render`.

        Args:
            tokenizer: the model's tokenizer.
            add_generation_prompt: as in :meth:`render`; None: on unless the last message is continued.
            images: what replaces the images of the conversation; None: it has none.
            merge_turns: if the template rejects the conversation, join consecutive messages of one role, and give
                the user those of the system after the first, or all of them.
            check_length: function that is called with a number of tokens that the prompt has at least, before it is
                encoded. It raises an error if these are too many.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        def copied() -> tuple[dict[str, Any], str | None]:
            data = _plain_data(messages, tools, documents, variables)
            return data, _ControlTokenGuard.of(tokenizer).apply(data)

        data, mark = native_calls.converted((messages, variables), copied)
        text = self._render(data, add_generation_prompt, continue_final_message, deadline, merge_turns)
        if check_length is not None:
            check_length(tokenizer.least_tokens(text, True))
        if images is not None:
            text = images.replaced(text)
        char = None if images is None else images.char
        if mark is None:
            return ChatPrompt(tokenizer.encode_marked(text, None, char), text)
        text = text.replace(f"\\u{ord(mark):04x}", mark)  # tojson(ensure_ascii=true) escapes the mark
        return ChatPrompt(tokenizer.encode_marked(text, mark, char), text.replace(mark, ""))

    def accepts_image_parts(self, token: str) -> bool:
        """Return True if the template accepts content as a list of parts and writes ``token`` for an image part."""
        if self._accepts_images is None:
            probe = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "probe"}]}]
            try:
                text = self.render(probe, add_generation_prompt=True)
            except TemplateError:
                if self.exceeded:
                    raise
                text = ""
            self._accepts_images = \
                token in text and "probe" in text and "'type'" not in text and '"type"' not in text
        return self._accepts_images

    def _render(self, data: dict[str, Any], add_generation_prompt: bool, continue_final_message: bool,
                deadline: float | None, merge_turns: bool = False) -> str:
        if "reasoning_content" not in self.source and _THINKING_PART.search(self.source) is not None:
            data["messages"] = list(map(_with_thinking_part, data["messages"]))
        if continue_final_message:
            final = _open_last(data["messages"][-1], add_generation_prompt)
        variables = {**self._special, **data, "add_generation_prompt": bool(add_generation_prompt)}
        others = [turns.merged(data["messages"], system) for system in (True, False)] if merge_turns else []
        text = self._run("render", variables, deadline, [{**variables, "messages": merged} for merged in others
                                                         if merged != data["messages"]])
        if not continue_final_message:
            return text
        at = text.rfind(_CONTINUE.strip())
        if at < 0 or final.strip() not in text:
            raise TemplateError("the last message cannot be continued: the chat template drops or changes its text")
        # If the template trims messages, it dropped the space at the tag's end: trim the prompt, too.
        return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()

    def variables(self) -> frozenset[str]:
        """Return the names of the variables that a caller can pass: those that the template reads and may not set.

        Raises:
            FormatError, LimitError, TemplateError, SpawnFailed: as :meth:`render`.
        """
        return frozenset(self._run("variables").split("\n")) - {""}

    @property
    def exceeded(self) -> bool:
        """True if the last rendering exceeded a limit: code that probes the template must stop."""
        return rendering.renderers().exceeded(self._text)

    def _run(self, kind: str, variables: dict[str, Any] | None = None, deadline: float | None = None,
             others: Sequence[dict[str, Any]] = ()) -> str:
        """Return the text of a renderer's result, or raise its error. ``others``: variables for further tries, if the
        template rejects the conversation."""
        result = rendering.renderers().run(self._text, kind, variables, deadline)
        for changed in others:
            if result.status != "rejected":
                break
            second = rendering.renderers().run(self._text, kind, changed, deadline)
            result = result if second.status == "rejected" else second
        if result.status == "text":
            return result.text
        error = self._error(result)
        error.key = error.key or self._key
        raise error

    def _error(self, result: rendering.TemplateResult) -> MpoolError:
        """Return the error for the status of a result."""
        status, text = result.status, result.text
        name = f"{self._file}: the chat template" if self._file else "the chat template"
        if status in _LIMITS:
            if result.refused:
                name = f"{name} cannot be used for {result.refused:.1f} s, because at least " \
                       f"{rendering.STRIKES} times in a row it"
            limit, setting = _LIMITS[status]
            value = getattr(limits, setting)
            value = text if status == "time" else f"{value >> 20} MiB" if status == "memory" else f"{value:,}"
            return TemplateError(f"{name} exceeded its limit of {value} {limit}",
                                 hint=f"{_FAULTY}, or raise mpool.tokenizers.limits.{setting}")
        if status in ("died", "silent"):
            what = f"ended twice ({text})" if status == "died" else "did not respond"
            return TemplateError(f"{name} failed: the process that renders it {what}", hint=_FAULTY)
        if status == "depth":
            return TemplateError(f"{name} exceeded its limit of nested calls", hint=_FAULTY)
        if status == "security":
            return TemplateError(f"{name} used an operation that is not allowed in chat templates", hint=_FAULTY)
        if status == "surrogate":
            return TemplateError(f"{name} wrote half of a surrogate pair, which is not Unicode text", hint=_FAULTY)
        if status == "undefined":
            return TemplateError(f"{name} read a value that is not defined: {text}", hint=_READS)
        if status == "rejected":
            return TemplateError(f"{name} rejected this conversation: {text}")
        if status == "type":
            return TemplateError(f"{name} failed on this conversation: {text}", hint=_READS)
        if status == "nodes":
            return LimitError(f"{self._file or 'the model'}: the chat template has more than "
                              f"{limits.max_template_nodes:,} nodes",
                              hint="Raise mpool.tokenizers.limits.max_template_nodes")
        if status == "nested":
            return LimitError(f"{self._file or 'the model'}: the chat template is nested too deeply")
        if status == "forbidden":
            return self._bad(text, "statements and expressions of one template")
        if status == "syntax":
            line, _, reason = text.partition(": ")
            return self._bad(f"a template with an error in line {line}: {reason}", "a Jinja template")
        if status == "uncompilable":
            return self._bad(f"a template that does not compile ({text})", "a Jinja template")
        return TemplateError(f"{name} failed on this conversation ({text})", hint=_READS)

    def _bad(self, got: str, allowed: str) -> FormatError:
        return FormatError(file=self._file or "the model", field="chat_template", got=got, allowed=allowed)


def check_arguments(messages: Any, tools: Any, options: Mapping[str, Any]) -> None:
    """Check the arguments of :meth:`ChatTemplate.prompt` that need no template.

    Args:
        messages: the conversation.
        tools: its tools in OpenAI's format, or None.
        options: keyword arguments, and other variables.

    Raises:
        InvalidArgument, LimitError: as :meth:`ChatTemplate.prompt`.
    """
    own = ("documents", "add_generation_prompt", "continue_final_message")
    data = _plain_data(messages, tools, options.get("documents"),
                       {name: value for name, value in options.items() if name not in own})
    if options.get("continue_final_message"):
        _open_last(data["messages"][-1], options.get("add_generation_prompt"))


def _plain_data(messages: Any, tools: Any, documents: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the caller's input and copy it to plain data."""
    for name in variables:
        if name in _RESERVED or name.startswith("_"):
            raise InvalidArgument(f"`template_options` must not contain {name}", param="template_options",
                                  hint="The template is set when a model is loaded; a request cannot change it"
                                  if "template" in name else None)
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidArgument(param="messages", got=type(messages).__name__, allowed="a list of dicts")
    chat = _to_plain(list_of_caller(messages), "messages")
    if not chat:
        raise InvalidArgument(param="messages", got="an empty list", allowed="a list of at least one message")
    for at, message in enumerate(chat):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidArgument(param=f"messages[{at}]", got=shown(message), allowed="a message",
                                  hint='A message is a dict such as {"role": "user", "content": "Hello"}')
    for name, value in (("tools", tools), ("documents", documents)):
        if value is not None and (isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable)):
            raise InvalidArgument(param=name, got=type(value).__name__, allowed="a list of dicts")
    return {
        "messages": list(map(_with_reasoning, chat)),
        "tools": None if tools is None else _dicts(_to_plain(list_of_caller(tools), "tools"), "tools"),
        "documents": None if documents is None else _dicts(_to_plain(list_of_caller(documents), "documents"),
                                                           "documents"),
        **{name: _to_plain(value, f"template_options.{name}") for name, value in variables.items()},
    }


def _to_plain(value: Any, where: str, depth: int = 0) -> Any:
    """Copy ``value`` to str, int, float, bool, None, lists, tuples and dicts.

    Other objects (the image in a message) become a string that names their type: templates only test whether they are
    present.
    """
    if value is None or isinstance(value, (bool, float)):
        return value if value is None or type(value) in (bool, float) else float(value)
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidArgument(param=where, got=f"half of a surrogate pair at character {error.start}",
                                      allowed="Unicode text") from None
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if depth >= limits.max_data_depth:
        raise LimitError(f"{where} is nested deeper than {limits.max_data_depth} levels",
                         hint="Raise mpool.tokenizers.limits.max_data_depth")
    if isinstance(value, Mapping):
        return {_to_plain(key, where, depth + 1):
                _to_plain(item, _member(where, key) if depth < 3 else where, depth + 1)
                for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_to_plain(item, f"{where}[{at}]" if depth < 3 else where, depth + 1) for at, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return _to_plain(value.item(), where, depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _to_plain(getattr(value, entry.name), where, depth + 1)
                for entry in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic
        return _to_plain(value.model_dump(), where, depth + 1)
    return f"<{type(value).__name__}>"


def _member(where: str, key: Any) -> str:
    """Return the name of a member of a mapping, as in ``messages[0].content``."""
    plain = isinstance(key, str) and key.isidentifier() and len(key) <= 60
    return f"{where}.{key}" if plain else f"{where}[{shown(key)}]"


def _dicts(values: list[Any], name: str) -> list[Any]:
    for at, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidArgument(param=f"{name}[{at}]", got=type(value).__name__, allowed="a dict")
    return values


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy a message's reasoning to every key under which templates read it. ``tool_plan`` is that of Command R7B."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    plan = {"tool_plan": reasoning} if message.get("tool_calls") else {}
    return {"thinking": reasoning, **plan, **message, "reasoning_content": reasoning}


def _with_thinking_part(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content has its reasoning, too."""
    thoughts, content = message.get("reasoning_content"), message.get("content")
    if message["role"] != "assistant" or not isinstance(thoughts, str) or not thoughts:
        return message
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return {**message, "content": [{"type": "thinking", "thinking": thoughts}, *parts]}


def _open_last(message: dict[str, Any], add_generation_prompt: Any) -> str:
    """Append a tag to the message's text, in place. Returns the text without the tag.

    Raises:
        InvalidArgument: the message has no text, or another message is to begin.
    """
    if add_generation_prompt:
        raise InvalidArgument("`add_generation_prompt` and `continue_final_message` cannot both be set",
                              param="continue_final_message")
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
        return content
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text = part["text"]
                part["text"] = text + _CONTINUE
                return text
    raise InvalidArgument("the last message has no text to continue", param="messages")


class _ControlTokenGuard:
    """Encodes texts of control tokens in a caller's strings as plain text.

    Before rendering, the guard inserts a mark after the first character of each such text. The tokenizer then does not
    recognise the control token, and drops the mark. A string that ends or begins with part of a control token's text is
    marked at that end, since the template may join it with the other part. All other strings stay unchanged, and so
    does the prompt.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        texts = [text for text in texts if len(text) > 1]
        self._find = compile_trie(texts)
        # In alphabetical order, the texts that begin with a part follow that part. For parts at the end, reverse both.
        self._starts, self._ends = sorted(set(texts)), sorted({text[::-1] for text in texts})
        self._first, self._last = {text[0] for text in texts}, {text[-1] for text in texts}
        self._longest = max(map(len, texts), default=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _ControlTokenGuard:
        """Return the guard of a tokenizer, cached on the tokenizer."""
        guard = getattr(tokenizer, "_chat_guard", None)
        if guard is None:
            guard = cls(tokenizer.control_texts)
            tokenizer._chat_guard = guard  # type: ignore[attr-defined]
        return guard

    def apply(self, data: dict[str, Any]) -> str | None:
        """Mark strings of ``data``, in place. Returns the mark, or None if no string needs one."""
        strings: list[str] = []
        keys: list[str] = []
        each_string(data, strings.append, keys.append)
        if not (any(map(self._needs_mark, strings)) or any(map(self._find.search, keys))):
            return None
        strings += keys
        mark = next((char for char in MARKS if not any(char in text for text in strings)), None)
        if mark is None:
            raise InvalidArgument(param="messages", got="text with all of U+FDD0 to U+FDD3",
                                  allowed="text without these noncharacters")
        for name, value in list(data.items()):
            data[name] = _map_strings(value, lambda text: self._mark(text, mark),
                                      lambda text: self._break(text, mark))
        return mark

    def _needs_mark(self, text: str) -> bool:
        return bool(self._find.search(text)) or self._has_part(text.rstrip(), True) \
            or self._has_part(text.lstrip(), False)

    def _has_part(self, text: str, end: bool) -> bool:
        """Return True if the end of ``text`` may begin a control token, or (not ``end``) its start may end one."""
        edges = self._first if end else self._last
        for size in range(1, min(self._longest, len(text) + 1)):
            if text[-size if end else size - 1] not in edges:
                continue
            part = text[-size:] if end else text[:size]
            # Skip parts that consist of letters only: templates compare such strings ("user", "text").
            if _NON_WORD.search(part) and (_is_start(part, self._starts) if end else
                                           _is_start(part[::-1], self._ends)):
                return True
        return False

    def _break(self, text: str, mark: str) -> str:
        """Insert the mark into each text of a control token."""
        while self._find.search(text):
            text = self._find.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return text

    def _mark(self, text: str, mark: str) -> str:
        """Insert the mark into each text of a control token, and at the ends if they hold part of one."""
        text = self._break(text, mark)
        body = text.rstrip()
        if self._has_part(body, True):
            text = body + mark + text[len(body):]
        body = text.lstrip()
        if self._has_part(body, False):
            text = text[:len(text) - len(body)] + mark + body
        return text


def _is_start(part: str, ordered: list[str]) -> bool:
    """Return True if a text starts with ``part`` and is longer. The texts are in alphabetical order, each once."""
    at = bisect_right(ordered, part)
    return at < len(ordered) and ordered[at].startswith(part)


def each_string(value: Any, visit: Callable[[str], Any], visit_key: Callable[[str], Any]) -> None:
    """Call ``visit`` on every string in nested plain data, and ``visit_key`` on every string key of its dicts."""
    if isinstance(value, str):
        visit(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                visit_key(key)
            each_string(item, visit, visit_key)
    elif isinstance(value, (list, tuple)):
        for item in value:
            each_string(item, visit, visit_key)


def _map_strings(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change_key(key) if isinstance(key, str) else key: _map_strings(item, change, change_key)
                for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_map_strings(item, change, change_key) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
