"""Text embedding and reranking before the core: plans, prompts, validation, tokenizing and slicing.

vectors.py contains the part that is shared with image embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import integer, items_of, nearest, refuse, surrogate_of
from ..errors import ContextOverflow, FormatError, InvalidArgument, LimitError, MpoolError, Unsupported, WrongCapability
from ..host import native_calls
from ..host.resources import list_of_caller, of_caller
from .options import PRECISIONS
from .output_table import OUTPUTS
from .sampling import MAX_VOCAB, check_id
from .steps import Cutter, IterRequest
from .vectors import MAX_CHARS as MAX_CHARS
from .vectors import Bar, Kind, VectorPlan, check_choice, plan_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..conversation.template import ChatTemplate
    from ..models.spec import EmbeddingSettings
    from ..runtime.entry import Entry
    from ..tokenizers import Packed, Tokenizer
    from .options import Call

#: Maximum size of a slice, in characters and in texts. Tokenizing a slice takes about 20 ms.
SLICE_CHARS, SLICE_TEXTS = 1 << 16, 1024
#: Task -> names that models use for its prompt; the first one that a model has is used.
TASKS = {"query": ("query",), "document": ("document", "passage", "corpus")}
#: Ids of some texts in OpenAI's vocabulary cl100k_base, which its embedding models have: the vocabulary of a model that
#: has all of them is cl100k_base.
_CL100K = {0: b"!", 11: b",", 83: b"t", 374: b" is", 1609: b"ik", 1917: b" world", 2294: b" great", 5963: b"token",
           9906: b"Hello", 15339: b"hello"}


# ---- options -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Plan(VectorPlan):
    """Settings of a text request, derived from the options and the model.

    Attributes:
        tokenizer: tokenizer of the model.
        prompt: text that is prepended to every text; for a reranker that is a language model, the instruction.
        skip: number of leading prompt tokens that pooling ignores; 0: none.
        cut: number of components to keep of the vectors that the core returns.
        max_tokens: longest sequence that the model accepts.
        truncate: True if longer texts are truncated, False if they raise ContextOverflow.
        parse_special: True if the texts of control tokens become those tokens, False if they are plain text.
        allow_ids: True if inputs may be token ids whatever the vocabulary is.
        query: for a reranker, the query that each document is scored against; else None.
        padding: side on which every sequence is padded to ``max_tokens`` (``"left"`` or ``"right"``); ``""``: no
            padding.
        template: for a reranker that is a language model, the chat template that renders a pair; else None.
        generation_prompt: True if the template appends the start of an assistant message to a rendered pair.
        special_tokens: True if the tokenizer's special tokens are put around a text.
        needs_tokens: False if a text without tokens has a vector of zeros, as static embeddings have it in model2vec
            and sentence-transformers.
        most_chars: number of characters to which truncation cuts a text before it is tokenized; None: no limit.
        adapter: id of the adapter in the core; 0: none. Not part of cached plans.
    """

    tokenizer: Tokenizer
    prompt: str
    skip: int
    cut: int
    max_tokens: int
    truncate: bool
    parse_special: bool
    allow_ids: bool
    padding: str
    template: ChatTemplate | None
    generation_prompt: bool
    special_tokens: bool
    needs_tokens: bool
    most_chars: int | None
    query: str | None = None
    adapter: int = 0


def plan(entry: Entry, options: Any) -> Plan:
    """Return the plan for the options of a request.

    On the first use of a model this reads its files, loads its tokenizer and makes the core load its weights.

    Raises:
        InvalidArgument: an option is invalid for this model, or the model has no adapter of the name.
        WrongCapability: the model is a reranker and the request is for vectors, or the reverse.
    """
    entry = entry.for_task(options.task)
    if options.adapter is not None and options.adapter in entry.setup.own_adapters():
        options = _with_instruction(entry, options)
    found = plan_of(entry, options, (options.dimensions, options.normalize, options.truncate, options.parse_special,
                                      getattr(options, "allow_token_ids", True)), _make_plan)
    name = options.adapter if options.adapter is not None else _own_adapter(entry, options)
    return found if name is None else replace(found, adapter=entry.setup.adapter_id(name))


def _own_adapter(entry: Entry, options: Any) -> str | None:
    """Return the adapter in the model's files that ``task`` or ``prompt_name`` choose; None: no adapter."""
    settings = entry.describe().embedding
    if settings is None or not settings.adapters:
        return None
    name = getattr(options, "prompt_name", None)
    if name in settings.adapters:
        return str(name)
    return settings.task_adapters.get(options.task or "", settings.default_adapter)


def _with_instruction(entry: Entry, options: Any) -> Any:
    """Return options with the prompt of the adapter that they name, unless they choose a prompt."""
    settings = entry.describe().embedding
    given = (getattr(options, name, None) for name in ("task", "prompt", "prompt_name"))
    if settings is None or options.adapter not in settings.prompts or not hasattr(options, "prompt_name") \
            or any(one is not None for one in given):
        return options
    return replace(options, prompt_name=options.adapter)


def _make_plan(entry: Entry, options: Any) -> Plan:
    """Validate the options and build a plan; :func:`plan_of` caches it."""
    allow_ids = getattr(options, "allow_token_ids", True)
    description = entry.describe()
    settings = description.embedding
    assert settings is not None, "the caller has checked the capability"
    if options.result not in settings.outputs:
        error = wrong_output(settings, options.result, entry.key)
        error.wanted = options.result
        raise error
    if options.result == "scores" and settings.answering is None:
        for name in ("prompt", "prompt_name"):
            if getattr(options, name) is not None:
                refuse(name, getattr(options, name), "None for this model, which reads only the query and the document",
                       key=entry.key, hint="Only rerankers that are language models have prompts")
    if settings.answering is not None and options.parse_special:
        refuse("parse_special", True, "False for this model, whose chat template writes the control tokens",
               key=entry.key)
    if options.result == "vectors":
        check_output(entry, settings, getattr(options, "embedding", "dense"))
    if description.vision is not None:
        raise Unsupported("this function takes no model with images", key=entry.key,
                          hint="Use mpool.embed or mpool.rerank")
    width = settings.output_size
    dimensions, cut = 0, settings.truncate_dim or width
    if options.dimensions is not None:
        dimensions = cut = dimensions_of(options.dimensions, width, settings, entry.key)
    prompt = prompt_of(options, settings, entry.key)
    core_key = entry.core_key(options.compute)
    tokenizer = entry.tokenizer()
    skip = 0
    if prompt and not settings.include_prompt:
        skip = tokenizer.count(prompt, parse_special=options.parse_special) - len(tokenizer.suffix_ids)
    return Plan(entry=entry, registry=entry.pool.registry, core_key=core_key, tokenizer=tokenizer, prompt=prompt,
                skip=skip, dimensions=0 if dimensions == width else dimensions, cut=cut,
                width=cut if cut in settings.sizes else min(cut, width),
                normalize=-1 if options.normalize is None else int(options.normalize), max_tokens=settings.max_tokens,
                truncate=options.truncate, parse_special=options.parse_special, allow_ids=allow_ids,
                null=options.on_error == "null", precision=options.precision,
                padding=settings.padding, template=None if settings.answering is None else _pairs_of(entry),
                generation_prompt=bool(settings.answering), special_tokens=settings.special_tokens,
                needs_tokens=settings.special_tokens,  # only static embeddings put none around a text
                most_chars=settings.max_tokens * tokenizer.median_length() if settings.cut_characters and
                options.truncate else None)


def wrong_output(settings: EmbeddingSettings, wanted: str, key: str) -> WrongCapability:
    """Return the error for a model that does not compute the output of a function."""
    found, has = settings.kind, min(settings.outputs)
    hint = "Use " + ("mpool.rerank(query, documents, model)" if has == "scores"
                     else _function("dense" if has == "vectors" else has))
    if wanted == "spans":
        return WrongCapability(f"is {found}, not a token classifier", key=key,
                               hint=f"{hint}, or another model: a folder whose config.json names a class "
                                    "ForTokenClassification")
    if wanted == "vectors":
        does = "scores pairs of texts" if settings.scores else "scores labels of tokens" if settings.token_labels \
            else "scores labels"
        return WrongCapability(f"is {found}, which {does} and returns no vectors", key=key, hint=hint)
    if wanted == "labels":
        return WrongCapability(f"is {found}, not a sequence classifier" if settings.token_labels
                               else f"is {found}, not a classifier", key=key,
                               hint=f"{hint}, or another model: a folder whose config.json names a class "
                                    "ForSequenceClassification")
    if settings.classifier is not None:
        return WrongCapability(f"is {found}, not a reranker: its files do not say which label means relevance", key=key,
                               hint="Use mpool.classify([(query, document), ...], model), and rank by the score of a "
                                    "label")
    if settings.token_labels:
        return WrongCapability(f"is {found}, not a reranker", key=key, hint=hint)
    return WrongCapability(f"is {found}, not a reranker", key=key,
                           hint="Rank with mpool.embed and mpool.similarity, or use a cross-encoder with mpool.rerank")


def _function(output: str) -> str:
    """Return the call of the function for an output of the model, for hints."""
    return f"mpool.{OUTPUTS[output].function}(texts, model)"


def check_output(entry: Entry, settings: EmbeddingSettings, output: str) -> None:
    """Raise WrongCapability unless the model has the output.

    A model without a head for token vectors returns its hidden states, so every encoder has the output ``tokens``.
    """
    if (output in ("all", "tokens") and settings.answering is None) or output in settings.embeddings:
        return
    error = WrongCapability(f"has no {output} vectors; it has: " + ", ".join(settings.embeddings), key=entry.key,
                            hint="Use " + " or ".join(_function(one) for one in settings.embeddings))
    error.wanted = output
    raise error


def _pairs_of(entry: Entry) -> ChatTemplate:
    """Return the chat template that renders a pair of query and document.

    Raises:
        FormatError: the rendered text does not contain both.
    """
    template, parts = entry.template(), ("the query", "the document")
    text = template.render(_pair("", *parts), add_generation_prompt=False)
    for part in parts:
        if part not in text:
            raise FormatError(file=entry.ref, field="chat_template", got=f"a template that omits {part}",
                              allowed="one that renders messages of the roles query and document")
    return template


def _pair(prompt: str, query: str, document: str) -> list[dict[str, str]]:
    """Return the messages that represent a pair; ``prompt`` is the system message, empty for none."""
    system_message = [{"role": "system", "content": prompt}] if prompt else []
    return [*system_message, {"role": "query", "content": query}, {"role": "document", "content": document}]


def dimensions_of(value: Any, width: int, settings: EmbeddingSettings, key: str) -> int:
    """Return the option ``dimensions`` if the model supports that number of components."""
    sizes = settings.sizes or settings.dimensions
    listed = {*sizes, width} if sizes else ()
    allowed = "one of " + ", ".join(map(str, sorted(listed))) if listed else f"an integer from 1 to {width}"
    number = integer(value)
    if number is None or (number not in listed if listed else not 1 <= number <= width):
        refuse("dimensions", value, allowed, key=key)
    return number


def prompt_of(options: Any, settings: EmbeddingSettings, key: str) -> str:
    """Return the prompt for a request, or "" for none.

    Args:
        options: options dataclass of the request.
        settings: settings of the model, with its prompts.
        key: key of the model, for errors.
    """
    prompts, default = settings.prompts, settings.default_prompt_name
    if options.prompt is not None:
        return options.prompt
    name = options.prompt_name
    if name is not None:
        if not isinstance(name, str) or name not in prompts:
            near = nearest(name, prompts, 1) if isinstance(name, str) else []
            allowed = "one of " + ", ".join(prompts) if prompts else "None, because the model has no prompts"
            refuse("prompt_name", name, allowed, hint=f"Did you mean {near[0]!r}?" if near else None, key=key)
        return prompts[name]
    if options.task is not None:
        # As in sentence-transformers, the default prompt is not used for a task for which the model has no prompt.
        names = (*TASKS[options.task], settings.task_adapters.get(options.task, ""))
        return next((prompts[name] for name in names if name in prompts), "")
    return prompts.get(default, "") if default is not None else ""


# ---- texts ---------------------------------------------------------------------------------------------------------

def texts_of(inputs: Any, most: int, name: str = "inputs") -> list[Any]:
    """Return the inputs of a request that is not a single str, as a list. Does not check the texts themselves.

    Args:
        inputs: argument of the caller.
        most: maximum number of texts.
        name: name of the parameter, for errors.

    Raises:
        InvalidArgument: ``inputs`` is not a list, tuple, one-dimensional array or other sequence.
        LimitError: there are more than ``most`` texts.
    """
    allowed = "a str or a list of str" if name == "inputs" else "a list of str"
    inputs = items_of(name, inputs, allowed)
    if not hasattr(inputs, "__len__"):
        refuse(name, inputs, allowed, hint="embed_iter accepts any iterable" if name == "inputs" else
               f"Pass list({name})")
    with of_caller():
        size = len(inputs)
    if size > most:
        options = "PoolConfig.max_embed_inputs" if name == "documents" else "max_inputs= or PoolConfig.max_embed_inputs"
        more = "embed_iter accepts any number of texts; " if name == "inputs" else ""
        raise LimitError(f"`{name}` must hold at most {most:,} texts, got {size:,}", param=name,
                         hint=f"{more}{options} raises the limit")
    return plain_ids(list_of_caller(inputs))


def check_inputs(inputs: list[Any], name: str, single: bool = False, null: bool = False, full: bool = False,
                 dicts: bool = False) -> None:
    """Check a request's texts before its model is known.

    Args:
        inputs: the texts, or lists of token ids.
        name: name of the parameter, for errors.
        single: True if the caller passed one text that is not in a list.
        null: True if an invalid text is no error, but a row of NaN.
        full: True: everything that needs no model. False: the types and sizes of texts; :func:`pack` checks the rest.
        dicts: True if dicts with texts and images pass, which the caller checks.

    Raises:
        InvalidArgument: an input is neither a valid text nor, for ``inputs``, a list of token ids.
    """
    if name == "inputs" and are_token_ids(inputs):
        for at, sequence in enumerate(inputs if full else ()):
            _ids_of(sequence, f"{name}[{at}]", MAX_VOCAB)
        return
    for at, text in enumerate(() if null else inputs):
        if not is_sized(text, 0):
            if dicts and isinstance(text, Mapping):
                continue
            raise _misfit(text, name if single else f"{name}[{at}]", 0)
        if full and not text.isascii() and (fault := surrogate_of(text, name if single else f"{name}[{at}]")):
            raise fault


def check_items(items: list[Any], null: bool) -> None:
    """Check the items of a list for :func:`mpool.embed_iter` before its model is known. Raises as
    :func:`check_inputs`."""
    check_inputs(plain_ids(items), "inputs", null=null, full=True, dicts=True)


def plain_ids(inputs: list[Any]) -> list[Any]:
    """Return the inputs with arrays of token ids as lists."""
    if not inputs or not isinstance(inputs[0], np.ndarray):
        return inputs
    return [one.tolist() if isinstance(one, np.ndarray) and one.ndim == 1 and one.dtype.kind in "iu" else one
            for one in inputs]


def fault_of(text: Any, name: str, least: int = 1) -> MpoolError | None:
    """Return the error for a text that is not a str, too short or too long; None if it is none of these.

    Args:
        text: text of the caller.
        name: parameter with the text, with an index if it is in a list.
        least: minimum number of characters, 0 or 1.
    """
    return None if is_sized(text, least) else _misfit(text, name, least)


def _misfit(text: Any, name: str, least: int) -> MpoolError:
    """Return the error for a text that :func:`is_sized` refuses."""
    allowed = f"a str of {least} to {MAX_CHARS:,} characters"
    if not isinstance(text, str):
        return InvalidArgument(param=name, got=type(text).__name__, allowed=allowed, hint=_hint_for(text, name))
    if len(text) < least:
        return InvalidArgument(param=name, got="an empty str", allowed=allowed)
    return InvalidArgument(param=name, got=f"{len(text):,} characters", allowed=allowed, hint="Split or shorten it")


def is_sized(text: Any, least: int) -> bool:
    """Return True if a text is a str of ``least`` to ``MAX_CHARS`` characters."""
    return isinstance(text, str) and least <= len(text) <= MAX_CHARS


def _hint_for(value: Any, name: str) -> str | None:
    """Return what to do with a value in a list of texts that is not a text; None: nothing in particular.

    Args:
        value: the value.
        name: its parameter, with an index. ``inputs`` may also be token ids.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType") or isinstance(value, float) and value != value:
        return "Fill missing texts first, for example with fillna('')"
    if hasattr(value, "as_py"):  # a scalar of pyarrow
        return "Call to_pylist() of the array first"
    if name.startswith("inputs") and (getattr(value, "ndim", 0) in (2, 3) or type(value).__module__.startswith("PIL.")):
        return 'Pass images in dicts: {"image": image}, or alone to embed_image'
    if isinstance(value, bytes):
        return "Decode it first, for example with decode()"
    if name.startswith("inputs") and integer(value) is not None:
        return "Pass token ids as a list of lists, one for each text: [[101, 102]]"
    if name.startswith("inputs") and isinstance(value, (list, tuple)):
        return ("Pass the texts in one flat list, not in lists. Only token ids are in lists, one list for each text, "
                "and without texts beside them")
    return None


def cutter(kind: type[Cutter] = Cutter) -> Cutter:
    """Return a :class:`Cutter`, or an instance of a subclass, with the slice limits of texts."""
    return kind(SLICE_CHARS, SLICE_TEXTS)


def slices(items: Iterable[Any], kind: type[Cutter] = Cutter) -> Iterator[tuple[int, list[Any]]]:
    """Cut an iterable of texts into slices; yields the index of a slice's first text, and its texts.

    ``kind``: class of the :class:`Cutter`, for items that are not texts.
    """
    cut = cutter(kind)
    for item in items:
        if (full := cut.add(item)) is not None:
            yield full
    if (full := cut.rest()) is not None:
        yield full


@dataclass(frozen=True, slots=True)
class Pack:
    """Texts of a slice in the form that the core accepts.

    Attributes:
        ids: token ids of all valid texts, concatenated, int32 ``(tokens,)``.
        offsets: offset of each valid text in ``ids``, and the end, int64 ``(valid texts + 1,)``.
        skip: number of leading tokens that pooling ignores, int32 ``(valid texts,)``; None: none.
        count: number of texts, including invalid ones.
        faults: index in the slice and error of each invalid text.
        second: for pairs, index of the first token of the second text of each pair, int32 ``(valid texts,)``; else
            None.
        attended: number of leading tokens of each text that its tokens attend to, int32 ``(valid texts,)``; None: all.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    skip: NDArray[np.int32] | None
    count: int
    faults: tuple[tuple[int, MpoolError], ...] = ()
    second: NDArray[np.int32] | None = None
    attended: NDArray[np.int32] | None = None


def pack(plan: Plan, texts: list[Any], start: int = 0, single: bool = False, deadline: float | None = None) -> Pack:
    """Validate and tokenize the texts of a slice.

    Args:
        plan: plan of the request.
        texts: texts of the slice, or documents if the plan has a query.
        start: index of the first text in the request.
        single: True if the text is the whole request and not in a list.
        deadline: ``time.monotonic()`` at which rendering of pairs ends; None: no deadline.

    Raises:
        InvalidArgument: a text is not a str, too long, not Unicode or without a token, and ``plan.null`` is False.
        ContextOverflow: a text has more tokens than the model accepts, and ``plan.truncate`` and ``plan.null`` are
            False.
    """
    if plan.query is not None:
        return _pack_pairs(plan, texts, start, deadline)
    least = 1 if plan.null else 0
    faults = [(at, _misfit(text, _name(start + at, single), least)) for at, text in enumerate(texts)
              if not is_sized(text, least)]
    if faults and not plan.null:
        raise _keyed(faults[0][1], plan)
    bad = {at for at, _ in faults}
    valid = [text for at, text in enumerate(texts) if at not in bad] if bad else texts
    prompted = [plan.prompt + text for text in valid] if plan.prompt else valid
    failure: MpoolError | None = None
    try:
        ids, offsets = _encoded(plan, prompted)
    except (InvalidArgument, ContextOverflow) as error:
        failure = error
    if failure is not None or plan.needs_tokens and not np.diff(offsets).all():
        late = [(at, fault) for at, text in enumerate(texts) if at not in bad
                and (fault := _tokenizing_fault(plan, plan.prompt + text, _name(start + at, single))) is not None]
        if not late and failure is not None:
            raise failure
        if late and not plan.null:
            raise _keyed(late[0][1], plan)
        faults = sorted([*faults, *late], key=lambda fault: fault[0])
        bad = {at for at, _ in faults}
        prompted = [plan.prompt + text for at, text in enumerate(texts) if at not in bad]
        ids, offsets = _encoded(plan, prompted)
    if plan.padding:
        ids, offsets = _padded(plan, ids, offsets)
    skip = None
    if plan.skip:
        # Pooling needs at least one token, even if a text was truncated within its prompt.
        skip = np.minimum(plan.skip, np.diff(offsets) - 1).astype(np.int32)
    return Pack(ids, offsets, skip, len(texts), tuple(faults))


def _encoded(plan: Plan, texts: list[str]) -> Packed:
    if plan.most_chars is not None:
        texts = [text[:plan.most_chars] for text in texts]
    return plan.tokenizer.encode_batch(texts, add_special=plan.special_tokens, parse_special=plan.parse_special,
                                       max_tokens=plan.max_tokens, truncate=plan.truncate)


def are_token_ids(inputs: list[Any]) -> bool:
    """Return True if the inputs are lists of token ids and not texts."""
    first = inputs[0] if inputs else None
    return isinstance(first, (list, tuple)) and bool(first) and not isinstance(first[0], str)


def pack_ids(plan: Any, sequences: list[list[int]], start: int = 0) -> Pack:
    """Validate sequences of token ids, which are used without prompt, special tokens and truncation.

    Args:
        plan: plan of the request.
        sequences: token ids of each text.
        start: index of the first text in the request.

    Raises:
        InvalidArgument: the plan allows no token ids, a token id is not an integer in the vocabulary, or a sequence is
            empty.
        ContextOverflow: a sequence is longer than the model accepts.
    """
    if not plan.allow_ids and not _has_openai_ids(plan.tokenizer):
        raise InvalidArgument("`input` must be texts, got token ids, which are valid only in the vocabulary that they "
                              "are from. In LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False. If the "
                              "ids are this model's, allow them with `allow_token_ids` or --allow-token-ids",
                              param="input", key=plan.entry.key)
    return native_calls.converted(sequences, _pack_ids, plan, sequences, start)


def _pack_ids(plan: Any, sequences: list[list[int]], start: int) -> Pack:
    ids: list[int] = []
    offsets = [0]
    for at, sequence in enumerate(sequences, start):
        try:
            found = _ids_of(sequence, f"inputs[{at}]", plan.tokenizer.vocab_size, plan.max_tokens)
        except (InvalidArgument, ContextOverflow) as error:
            raise _keyed(error, plan) from None
        ids += found
        offsets.append(len(ids))
    return Pack(np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64), None, len(sequences))


def _ids_of(sequence: Any, name: str, vocab: int, most: int | None = None) -> list[int]:
    """Return the token ids of an input. ``most``: maximum number; None: unknown.

    Raises:
        InvalidArgument: the input is not a list of ids below ``vocab``, or is empty.
        ContextOverflow: it has more than ``most`` ids.
    """
    if not isinstance(sequence, (list, tuple)):
        refuse(name, sequence, "a list of token ids, as the first input")
    if not sequence:
        raise InvalidArgument(param=name, got="an empty list", allowed="a list of at least one token id")
    if most is not None and len(sequence) > most:
        raise ContextOverflow(f"`{name}` has {len(sequence)} tokens, the model accepts 1 to {most}",
                              tokens=len(sequence), limit=most, param=name)
    return [check_id(f"{name}[{index}]", token, vocab) for index, token in enumerate(sequence)]


def _has_openai_ids(tokenizer: Tokenizer) -> bool:
    """Return True if the vocabulary is cl100k_base, whose ids OpenAI's clients send."""
    if tokenizer.vocab_size <= max(_CL100K):
        return False
    table = tokenizer.token_table()
    return all(bytes(table.data[table.offsets[token]:table.offsets[token + 1]]) == text
               for token, text in _CL100K.items())


def _pack_pairs(plan: Plan, documents: list[Any], start: int, deadline: float | None) -> Pack:
    """Validate and tokenize pairs of ``plan.query`` and each document; ``start``: index of the first document."""
    assert plan.query is not None
    for at, text in enumerate(documents, start):
        fault = fault_of(text, f"documents[{at}]", 0)
        if fault is not None:
            raise _keyed(fault, plan)
    try:
        if plan.template is not None:
            return _pack_rendered(plan, plan.template, documents, start, deadline)
        found = plan.tokenizer.encode_pairs(plan.query, documents, max_tokens=plan.max_tokens, truncate=plan.truncate,
                                            parse_special=plan.parse_special)
    except (InvalidArgument, ContextOverflow) as error:
        for at, text in enumerate(documents, start):
            fault = surrogate_of(text, f"documents[{at}]")
            if fault is not None:
                raise _keyed(fault, plan) from None
        raise _keyed(error, plan) from None
    return Pack(found.ids, found.offsets, None, len(documents), (), found.second)


def _pack_rendered(plan: Plan, template: ChatTemplate, documents: list[Any], start: int,
                   deadline: float | None) -> Pack:
    """Tokenize pairs that the chat template renders.

    A pair that is too long loses the end of its document; the template's text after the document is kept.
    """
    def rendered(document: str) -> list[int]:
        assert plan.query is not None
        return template.prompt(_pair(plan.prompt, plan.query, document), plan.tokenizer,
                               add_generation_prompt=plan.generation_prompt, deadline=deadline).ids.tolist()

    ids: list[int] = []
    offsets = [0]
    suffix: list[int] = []
    for at, document in enumerate(documents, start):
        pair = rendered(document)
        if len(pair) > plan.max_tokens:
            if not plan.truncate:
                raise ContextOverflow(f"`documents[{at}]` with the query has {len(pair)} tokens, the limit is "
                                      f"{plan.max_tokens}", tokens=len(pair), limit=plan.max_tokens,
                                      param=f"documents[{at}]",
                                      hint="Shorten it, or set truncate=True")
            suffix = suffix or common_end(rendered("0"), rendered("a"))
            if len(suffix) >= plan.max_tokens:
                refuse("max_length", plan.max_tokens,
                       f"more than {len(suffix)}, the number of tokens that the chat template adds after a document")
            pair = pair[:plan.max_tokens - len(suffix)] + suffix
        ids += pair
        offsets.append(len(ids))
    return Pack(np.array(ids, np.int32), np.array(offsets, np.int64), None, len(documents))


def common_end(a: list[int], b: list[int]) -> list[int]:
    """Return the longest common suffix of two sequences."""
    same = 0
    while same < min(len(a), len(b)) and a[-1 - same] == b[-1 - same]:
        same += 1
    return a[len(a) - same:]


def _padded(plan: Plan, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> tuple[Any, Any]:
    """Pad all sequences to ``plan.max_tokens`` with the padding token; returns ids and offsets."""
    token = plan.tokenizer.special.get("pad")
    if token is None:
        raise FormatError(file=plan.entry.ref, field="pad_token", got="missing",
                          allowed="a padding token, because this model attends to padding")
    lengths, most = np.diff(offsets), plan.max_tokens
    padded = np.full((len(lengths), most), token, dtype=np.int32)
    columns = np.arange(most)
    is_token = columns >= most - lengths[:, None] if plan.padding == "left" else columns < lengths[:, None]
    padded[is_token] = ids
    return padded.reshape(-1), np.arange(len(lengths) + 1, dtype=np.int64) * most


def _name(at: int, single: bool) -> str:
    """Return the name of a text in errors."""
    return "inputs" if single else f"inputs[{at}]"


def _keyed(error: MpoolError, plan: VectorPlan) -> MpoolError:
    """Add the key of the model to an error that has none."""
    error.key = error.key or plan.entry.key
    return error


def _tokenizing_fault(plan: Plan, text: str, name: str) -> MpoolError | None:
    """Return the error for a text that is not Unicode, or has no token or too many; None if it is none of these."""
    fault: MpoolError | None = surrogate_of(text, name)
    if fault is None:
        tokens = plan.tokenizer.count(text, add_special=plan.special_tokens, parse_special=plan.parse_special)
        if not tokens and plan.needs_tokens:
            fault = InvalidArgument(param=name, got="a text without tokens",
                                    allowed="a text with at least one token of this model's vocabulary",
                                    hint="Leave it out, or call embed with on_error='null', which returns a row of NaN "
                                         "for it")
        elif tokens > plan.max_tokens and not plan.truncate:
            fault = too_long(name, tokens, plan)
    return fault


def too_long(name: str, tokens: int, plan: Any, hint: str = "Shorten it, or set truncate=True") -> ContextOverflow:
    """Return the error for a text with too many tokens. ``name``: parameter with the text, and its index."""
    return ContextOverflow(f"`{name}` has {tokens} tokens, the model accepts at most {plan.max_tokens}", tokens=tokens,
                           limit=plan.max_tokens, param=name, hint=hint, key=plan.entry.key)


def halves(pack: Pack) -> tuple[Pack, ...]:
    """Split the valid texts of a pack into two packs; empty if there is only one text."""
    middle = (len(pack.offsets) - 1) // 2
    if not middle:
        return ()
    edge = int(pack.offsets[middle])
    first, last = pack.offsets[:middle + 1], pack.offsets[middle:] - edge
    skips = (None, None) if pack.skip is None else (pack.skip[:middle], pack.skip[middle:])
    seconds = (None, None) if pack.second is None else (pack.second[:middle], pack.second[middle:])
    return (Pack(pack.ids[:edge], first, skips[0], middle, (), seconds[0]),
            Pack(pack.ids[edge:], last, skips[1], len(last) - 1, (), seconds[1]))


def packed(plan: Plan, texts: list[Any], start: int, single: bool, call: Call) -> Pack:
    """Pack texts, or sequences of token ids; long texts are tokenized on threads for native calls."""
    texts = plain_ids(texts)
    if are_token_ids(texts):
        return pack_ids(plan, texts, start)
    chars = sum(len(text) for text in texts if isinstance(text, str)) + len(plan.query or "")
    return native_calls.tokenized(chars, pack, plan, texts, start, single, deadline=call.deadline)


def _valid(pack: Pack) -> int:
    return len(pack.offsets) - 1


def _embed(plan: Plan, pack: Pack, **keywords: Any) -> NDArray[np.float32]:
    return plan.registry.embed(plan.core_key, pack.ids, pack.offsets, pack.skip, second=pack.second,
                               adapter=plan.adapter, **keywords)


def _start(plan: Plan, pack: Pack, **keywords: Any) -> _core.Ticket:
    return plan.registry.submit_embed(plan.core_key, pack.ids, pack.offsets, pack.skip, second=pack.second,
                                      adapter=plan.adapter, **keywords)


def _heavy(plan: Plan, inputs: list[Any]) -> bool:
    """Return True if tokenizing these inputs, or rendering them, would block an event loop for too long."""
    return plan.template is not None or native_calls.are_many(inputs)


def _tokens(pack: Pack) -> int:
    return int(pack.offsets[-1])


TEXTS = Kind("text", packed, _valid, _embed, _start, halves, _heavy, _tokens, native_calls.TEXTS)


# ---- many texts ----------------------------------------------------------------------------------------------------

def iter_check(options: Any, most: int) -> None:
    """Do nothing: :func:`check_streamable` has checked the options."""


def iter_plan(entry: Entry, options: Any, checked: None) -> Plan:
    """Return the plan for an iterable of texts. Raises as :func:`plan`."""
    return plan(entry, options)


def iter_request(plan: Plan, items: Any, batch_size: int | None, bar: Bar, options: Any, checked: None,
                 call: Call) -> IterRequest:
    """Return the request for the vectors of an iterable of texts."""
    return IterRequest(TEXTS, plan, items, cutter(), batch_size, bar, call)


def check_streamable(options: Any, batch_size: Any) -> int | None:
    """Check the options that are specific to :func:`mpool.embed_iter`; returns ``batch_size`` as an int or None.

    Raises:
        InvalidArgument: the precision is int8 or uint8, whose ranges are computed over all vectors, or ``batch_size``
            is invalid.
    """
    check_choice("precision", options.precision, PRECISIONS)
    if options.precision in ("int8", "uint8"):
        refuse("precision", options.precision, "float32, binary or ubinary in embed_iter",
               hint="The range of each component is known only after all vectors were computed: use embed")
    size = integer(batch_size)
    if batch_size is not None and (size is None or size < 1):
        refuse("batch_size", batch_size, "an integer of 1 or more, or None for single vectors")
    return size
