"""Build the request of each verb from its arguments, in two stages.

Stage one, the function of this module, validates the arguments that need no model and returns a :class:`Validated`.
Stage two, its ``prepare``, reads the model's files, tokenizes the inputs and returns the request. The stages are
separate because :mod:`mpool.aio` runs a slow ``prepare`` on a thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..checks import integer, is_same, items_of, refuse
from ..conversation import reasoning
from ..errors import InvalidArgument, MpoolError, Unsupported
from ..host import native_calls
from ..host.resources import list_of_caller, of_caller
from ..models.catalogue import load as load_catalogue
from . import options as _options
from . import rerank as reranking
from . import text_embedding as embedding
from . import text_to_text as generation
from . import vectors
from .options import (
    ClassifyOptions,
    ClassifyTokensOptions,
    EmbedIterOptions,
    EmbedOptions,
    GenerateImageOptions,
    ImageOptions,
    RerankOptions,
    TokenScoresOptions,
)
from .output_table import OUTPUTS, TextOutput
from .steps import IterRequest, VectorRequest
from .verbs import DESCRIBE

if TYPE_CHECKING:
    from ..runtime.entry import Entry
    from ..runtime.hosts import Host
    from .options import Call
    from .text_to_image import Request as ImageRequest
    from .text_to_text import Request as TextRequest

T = TypeVar("T")
#: Maximum number of inputs of a request without a limit.
_NO_LIMIT = sys.maxsize

#: Number of characters that take as long as checking one token id; see :func:`mpool.host.native_calls.are_many`.
_ID = 16


@dataclass(slots=True)
class Validated:
    """Validated arguments of a request.

    Attributes:
        prepare: function that builds the request.
        model, capability, compute: the model that ``prepare`` opens.
        long: True if ``prepare`` is slow even when the model's files have been read.
        chat: True if ``prepare`` renders the model's chat template.
        images: True if ``prepare`` reads images.
    """

    prepare: Callable[[], Any]
    model: Any
    capability: str
    compute: Any
    long: bool = False
    chat: bool = False
    images: bool = False


def _chosen(model: Any, compute: Any) -> Any:
    """Return the compute type of a request. ``"auto"`` defers to that of the :class:`mpool.Model`, if it has one."""
    own = getattr(model, "_compute", "auto") if is_same(compute, "auto") else "auto"
    return compute if own == "auto" else own


def _limit(pool: Host, max_inputs: Any) -> int:
    if max_inputs is None:
        return _NO_LIMIT if pool.config.max_embed_inputs is None else pool.config.max_embed_inputs
    most = integer(max_inputs)
    if most is None or most < 1:
        refuse("max_inputs", max_inputs, "an integer of 1 or more, or None for `PoolConfig.max_embed_inputs`")
    return most


def _parsed(pool: Host, model: Any, options: type[T], of: str, given: dict[str, Any],
            capability: str = "text_embedding") -> T:
    """Return the options dataclass of a request for vectors, scores or labels, with its values checked."""
    found = _options.parse_options(options, of, given)
    if given:
        with before(pool, model, capability):
            vectors.check_options(found)
    return found


@contextmanager
def before(pool: Host, model: Any, capability: str | None = "text_embedding") -> Iterator[None]:
    """Check inside the ``with`` block, before the model's reference is resolved. Errors get the name of the model."""
    try:
        yield
    except MpoolError as error:
        if error.key is None:
            known = pool._known(model, capability)
            error.key = known.key if known is not None else \
                os.fspath(model) if isinstance(model, (str, os.PathLike)) else getattr(model, "key", None)
        raise


def _is_unread(pool: Host, model: Any, capability: str | None = "text_embedding") -> bool:
    """Return True if the files of a model are unread. A preparation then also makes the checks that need no model but
    take time, so that nothing is downloaded for a request that every model refuses. If the files are known, the request
    makes these checks where it converts its inputs."""
    known = pool._known(model, capability)
    return known is None or known.files.known is None


def _opened(pool: Host, model: Any, options: Any, capability: str = "text_embedding") -> tuple[Entry, Any]:
    """Return the entry of a model, and the options with the compute type of the request."""
    entry, compute = pool._find(model, capability), _chosen(model, options.compute)
    return entry, options if compute is options.compute else replace(options, compute=compute)


# ---- vectors ---------------------------------------------------------------------------------------------------------

def text_plan(pool: Host, model: Any, options: Any) -> Any:
    """Return the plan for embedding or scoring texts with a model."""
    return embedding.plan(*_opened(pool, model, options))


def embed(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.embed`."""
    inputs, model = given.pop("inputs"), given.pop("model", None)
    options = _parsed(pool, model, EmbedOptions, "embed", given)
    most, single = _limit(pool, options.max_inputs), isinstance(inputs, (str, Mapping))
    vectors.check_progress(options.progress)
    texts = [inputs] if single else embedding.texts_of(inputs, most)
    vectors.check_precision(options.precision, len(texts))
    null = options.on_error == "null"
    mixed = _has_dicts(texts)
    capability = "image_embedding" if mixed and _mixed().are_images(texts) else "text_embedding"

    def finish(rows: Any) -> Any:
        return vectors.quantize(rows[0] if single else rows, options.precision)

    def prepare() -> Any:
        unread = _is_unread(pool, model, capability)
        with before(pool, model, capability):
            embedding.check_inputs(texts, "inputs", single, null, unread, mixed)
            if mixed and not null:
                _mixed().check(texts, "inputs", single, options.allow_urls, call, unread)
        entry, own = _opened(pool, model, options, capability)
        if entry.describe().vision is not None:
            return _mixed().request(_mixed().plan(entry, own), texts, single, options.progress, call, finish)
        if mixed:
            return _mixed().split_request(pool, entry, texts, single, own, call, finish)
        return VectorRequest(embedding.TEXTS, embedding.plan(entry, own), texts, embedding.slices, single,
                             options.progress, call, finish)

    return Validated(prepare, model, capability, options.compute, long=mixed, images=mixed)


def _has_dicts(inputs: list[Any]) -> bool:
    """Return True if an input is a dict, which may have images. Takes a few nanoseconds per input."""
    return any(issubclass(kind, Mapping) for kind in set(map(type, inputs)))


def _mixed() -> Any:
    """Return the module for inputs of texts and images."""
    from . import mixed_inputs

    return mixed_inputs


def embed_iter(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.embed_iter`."""
    items, model = given.pop("texts"), given.pop("model", None)
    if isinstance(items, str):
        refuse("texts", items, "an iterable of str")
    if not isinstance(items, AsyncIterable):
        items = items_of("texts", items, "an iterable of str")
    options = _options.parse_options(EmbedIterOptions, "embed_iter", given)
    vectors.check_progress(options.progress)
    batch_size = embedding.check_streamable(options, options.batch_size)
    output, own = _output_of(options)
    with before(pool, model):
        vectors.check_options(options)
    model = _named(model, output)
    module = output.module()
    checked = module.iter_check(own, _limit(pool, None))

    def prepare() -> IterRequest:
        unread = _is_unread(pool, model)
        with before(pool, model):
            if unread and (isinstance(items, (list, tuple)) or hasattr(items, "dtype")):  # not used up by a first pass
                try:
                    module.check_items(list_of_caller(items), options.on_error == "null")
                except MpoolError as error:
                    error.rename({"inputs": "texts"})
                    raise
        entry, chosen = _opened(pool, model, own)
        mixed = output.function == "embed" and entry.describe().vision is not None
        plan = _mixed().plan(entry, chosen) if mixed else module.iter_plan(entry, chosen, checked)
        try:
            total = len(items)
        except TypeError:
            total = None
        bar = vectors.Bar(options.progress, total, plan.entry.key)
        try:
            request: IterRequest = _mixed().iter_request(plan, items, batch_size, bar, call) if mixed else \
                module.iter_request(plan, items, batch_size, bar, own, checked, call)
        except BaseException:
            bar.close()
            raise
        return request

    return Validated(prepare, model, "text_embedding", options.compute, long=getattr(checked, "is_long", False))


#: Option of embed_iter -> hint for an output that does not have it; without a row, the hint names the outputs that do.
_HINTS = {**dict.fromkeys(("dimensions", "normalize", "precision", "on_error"), "It applies to dense vectors only"),
         **dict.fromkeys(("task", "prompt", "prompt_name"), "Classifiers have no prompts"),
         "max_active": "Only sparse vectors have a maximum number of weights"}


def _output_of(options: EmbedIterOptions) -> tuple[TextOutput, Any]:
    """Return the output that the options of embed_iter choose, and the options of its function.

    Raises:
        InvalidArgument: the output does not exist, or does not have an option that is set.
    """
    vectors.check_choice("output", options.output, _options.ITERATED)
    output, given = OUTPUTS[options.output], {one.name: getattr(options, one.name) for one in fields(options)}
    for one in fields(options):
        having = [name for name, row in OUTPUTS.items() if one.name in row.option_names]
        if having and options.output not in having and not is_same(given[one.name], one.default):
            needed = " or ".join(f'"{name}"' for name in having)
            refuse(one.name, given[one.name], f"{one.default!r} with output={options.output!r}",
                   hint=_HINTS.get(one.name, f"It needs output={needed}"))
    return output, output.options(**{name: value for name, value in given.items() if name in output.option_names})


def _outputs(pool: Host, given: dict[str, Any], call: Call, name: str) -> Validated:
    """Validate a request for sparse vectors, token vectors or all outputs."""
    from . import outputs

    output = OUTPUTS[name]
    inputs, model = given.pop("inputs"), _named(given.pop("model", None), output)
    options: Any = _parsed(pool, model, output.options, output.function, given)
    vectors.check_progress(options.progress)
    texts = outputs.inputs_of(inputs, _limit(pool, options.max_inputs))

    def prepare() -> Any:
        unread = _is_unread(pool, model)
        with before(pool, model):
            embedding.check_inputs(texts, "inputs", isinstance(inputs, str), full=unread)
        plan = outputs.plan(*_opened(pool, model, options))
        return outputs.OutputsRequest(plan, texts, options.progress, call, outputs.FINISH[name])

    return Validated(prepare, model, "text_embedding", options.compute)


def embed_sparse(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.embed_sparse`."""
    return _outputs(pool, given, call, "sparse")


def embed_tokens(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.embed_tokens`."""
    return _outputs(pool, given, call, "tokens")


def embed_all(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.embed_all`."""
    return _outputs(pool, given, call, "all")


def rerank(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.rerank`."""
    query, documents, model = given.pop("query"), given.pop("documents"), given.pop("model", None)
    if model is None:
        model = load_catalogue().default("rerank").key
    options = _parsed(pool, model, RerankOptions, "rerank", given)
    texts, count = reranking.check(query, documents, options.top_k, _limit(pool, None))
    mixed = _has_dicts([query, *texts])

    def prepare() -> VectorRequest:
        unread = _is_unread(pool, model)
        with before(pool, model):
            embedding.check_inputs(texts, "documents", full=unread, dicts=mixed)
            if mixed:
                _mixed().check([query], "query", True, options.allow_urls, call, unread)
                _mixed().check(texts, "documents", False, options.allow_urls, call, unread)

        def finish(rows: Any) -> Any:
            return reranking.ranking(plan.entry, texts, rows, count, options.function_to_apply)

        entry, own = _opened(pool, model, options)
        plan: Any
        if entry.describe().vision is not None:
            plan = _mixed().with_query(_mixed().plan(entry, own), query, call)
            return _mixed().request(plan, texts, False, False, call, finish)  # type: ignore[no-any-return]
        if mixed:
            raise Unsupported("this reranker reads texts only, got a query or document with images", key=entry.key,
                              hint="Pass str, or use a model such as Qwen3-VL-Reranker")
        plan = reranking.plan_of(embedding.plan(entry, own), query)
        return VectorRequest(embedding.TEXTS, plan, texts, embedding.slices, False, False, call, finish)

    return Validated(prepare, model, "text_embedding", options.compute, long=mixed, images=mixed)


def _named(model: Any, output: TextOutput) -> Any:
    """Return the model that computes an output: that of the caller, or the key of the default model of the output's
    function. None: the default model of the capability.

    Raises:
        InvalidArgument: the caller names no model, and the output has no default model.
    """
    if model is None and output.needs is not None:
        refuse("model", None, output.needs, hint="This function has no default model: pass a folder or reference")
    return load_catalogue().defaults.get(output.function) if model is None else model


def classify(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.classify`."""
    from . import classification

    texts, model = given.pop("texts"), _named(given.pop("model", None), OUTPUTS["labels"])
    options = _parsed(pool, model, ClassifyOptions, "classify", given)
    vectors.check_progress(options.progress)
    checked = classification.check(texts, options, _limit(pool, options.max_inputs))

    def prepare() -> VectorRequest:
        unread = _is_unread(pool, model)
        with before(pool, model):
            classification.check_texts(checked, unread)
        return classification.request(text_plan(pool, model, options), checked, options, call)

    return Validated(prepare, model, "text_embedding", options.compute, long=checked.is_long)


def classify_tokens(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.classify_tokens`."""
    from . import token_classification

    texts, model = given.pop("texts"), _named(given.pop("model", None), OUTPUTS["spans"])
    options = _parsed(pool, model, ClassifyTokensOptions, "classify_tokens", given)
    vectors.check_progress(options.progress)
    checked = token_classification.check(texts, options, _limit(pool, options.max_inputs))

    def prepare() -> Any:
        unread = _is_unread(pool, model)
        with before(pool, model):
            embedding.check_inputs(checked.texts, "texts", checked.single, full=unread)
        entry, own = _opened(pool, model, options)
        return token_classification.request(entry, checked, own, call)

    return Validated(prepare, model, "text_embedding", options.compute)


def token_scores(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :data:`mpool.tasks.verbs.TOKEN_SCORES`."""
    from . import outputs, token_classification

    inputs, model = given.pop("inputs"), _named(given.pop("model", None), OUTPUTS["spans"])
    options = _parsed(pool, model, TokenScoresOptions, "token_scores", given)
    texts = outputs.inputs_of(inputs, _limit(pool, None))

    def prepare() -> Any:
        unread = _is_unread(pool, model)
        with before(pool, model):
            embedding.check_inputs(texts, "inputs", isinstance(inputs, str), full=unread)
        plan = token_classification.scores_plan(*_opened(pool, model, options))
        return outputs.OutputsRequest(plan, texts, False, call, outputs.token_vectors)

    return Validated(prepare, model, "text_embedding", options.compute)


def embed_image(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.embed_image`."""
    from . import image_embedding

    images, model = given.pop("images"), given.pop("model", None)
    options = _parsed(pool, model, ImageOptions, "embed_image", given, "image_embedding")
    most = _limit(pool, options.max_inputs)
    vectors.check_progress(options.progress)
    found = image_embedding.images_of(images, most)
    single = found is None
    vectors.check_precision(options.precision, 1 if found is None else len(found))

    def prepare() -> VectorRequest:
        unread = _is_unread(pool, model, "image_embedding")
        with before(pool, model, "image_embedding"):
            if unread and options.on_error != "null":
                image_embedding.check_images([images] if found is None else found, single, options.allow_urls, call)
        def finish(rows: Any) -> Any:
            return vectors.quantize(rows[0] if single else rows, options.precision)

        entry, own = _opened(pool, model, options, "image_embedding")
        several = [images] if found is None else found
        if entry.describe().vision is not None:
            inputs = _mixed().of_images(several, single)
            request: VectorRequest = _mixed().request(_mixed().plan(entry, own), inputs, single, options.progress,
                                                      call, finish)
            request.kind = request.kind.called(inputs="images")
            return request
        return VectorRequest(image_embedding.IMAGES, image_embedding.plan(entry, own), several, image_embedding.slices,
                             single, options.progress, call, finish)

    return Validated(prepare, model, "image_embedding", options.compute, images=True)


# ---- text ------------------------------------------------------------------------------------------------------------

def _text_entry(pool: Host, model: Any, options: dict[str, Any], capability: str = "text_to_text") -> tuple[Entry, Any]:
    entry: Entry = pool._find(model, capability)
    compute = _chosen(model, options.pop("compute", "auto"))
    return entry, compute


def prompt_request(pool: Host, prompt: Any, model: Any, options: dict[str, Any]) -> TextRequest:
    """Return the request for a raw prompt. Consumes ``options``."""
    special = options.pop("parse_special", False)
    unread = _is_unread(pool, model, "text_to_text")
    with before(pool, model, "text_to_text"):
        for name in ("tools", "tool_choice", "parallel_tool_calls", "template_options", "allow_urls", "image_tokens"):
            if options.pop(name, None) is not None:
                raise InvalidArgument(f"`{name}` applies only to `chat`, not to a raw prompt", param=name,
                                      hint="Pass the prompt as a message: mpool.chat([{'role': 'user', 'content': "
                                           "...}])")
        generation.check_prompt(prompt, special)
        generation.check_options(options, unread)
    entry, compute = _text_entry(pool, model, options)
    ids = generation.prompt_ids(entry, prompt, special, options.get("context_length"))
    if entry.capability == "vision":
        from . import vision as seeing

        seeing.check_raw(entry, ids, "prompt",
                         "Use mpool.vision(images, prompt, model), or mpool.chat with image parts")
    return generation.prepare(entry, ids, compute, options)


def _chat_prompt() -> Any:
    """Return the module that renders conversations."""
    from . import chat_prompt

    return chat_prompt


def chat_request(pool: Host, messages: Any, model: Any, options: dict[str, Any], call: Call | None = None,
                 capability: str = "text_to_text") -> TextRequest:
    """Return the request for a conversation. Consumes ``options``."""
    chat_prompt = _chat_prompt()
    unread = _is_unread(pool, model, capability)
    with before(pool, model, capability):
        conversation = chat_prompt.check(messages, options)
        generation.check_options(options, unread, conversation.tools)
        if unread:
            chat_prompt.check_content(conversation, call)
    entry, compute = _text_entry(pool, model, options, capability)
    context = options.get("context_length")
    prompt, images, tools = chat_prompt.prompt_of(entry, conversation, call,
                                                  lambda least: generation.check_length(entry, least, context))
    splitter = reasoning.of_template(entry.template().source, prompt.text, tools is not None)
    off = splitter is not None and reasoning.is_off(splitter, prompt.text, conversation.variables)
    return generation.prepare(entry, prompt.ids, compute, options, splitter, images, tools, off)


def chat_ids(pool: Host, messages: Any, model: Any, options: dict[str, Any], call: Call) -> list[int]:
    """Return the token ids of the prompt of a conversation, as :func:`chat_request` makes it. Consumes ``options``."""
    chat_prompt = _chat_prompt()
    unread = _is_unread(pool, model, "text_to_text")
    with before(pool, model, "text_to_text"):
        conversation = chat_prompt.check(messages, options)
        if unread:
            chat_prompt.check_content(conversation, call)
    entry: Entry = pool._find(model, "text_to_text")
    ids: list[int] = chat_prompt.prompt_of(entry, conversation, call)[0].ids.tolist()
    return ids


def vision_request(pool: Host, images: Any, prompt: Any, model: Any, options: dict[str, Any],
                   call: Call | None = None) -> TextRequest:
    """Return the request for a question about images. Consumes ``options``."""
    from . import vision as seeing

    messages = seeing.messages_of(images, prompt)
    return chat_request(pool, messages, model, options, call, "vision")


def _text(given: dict[str, Any], model: Any, chars: int, chat: bool, capability: str,
          prepare: Callable[[dict[str, Any]], TextRequest], images: bool = False) -> Validated:
    # these two options compile a grammar, which takes milliseconds
    grammar = any(given.get(name) is not None for name in ("response_format", "tools"))
    long = grammar or chars >= native_calls.LONG_ON_LOOP
    compute = _chosen(model, given.get("compute", "auto"))
    return Validated(lambda: prepare(dict(given)), model, capability, compute, long, chat, images)


def generate(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.generate`."""
    prompt, model = given.pop("prompt"), given.pop("model", None)
    chars = len(prompt) if isinstance(prompt, str) else _ID * len(prompt) if isinstance(prompt, (list, tuple)) else 0
    return _text(given, model, chars, False, "text_to_text",
                 lambda options: prompt_request(pool, prompt, model, options))


def chat(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.chat`."""
    messages, model = given.pop("messages"), given.pop("model", None)
    return _text(given, model, 0, True, "text_to_text",
                 lambda options: chat_request(pool, messages, model, options, call), has_images(messages))


def vision(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.vision`."""
    images, prompt, model = given.pop("images"), given.pop("prompt"), given.pop("model", None)
    return _text(given, model, 0, True, "vision",
                 lambda options: vision_request(pool, images, prompt, model, options, call), True)


def describe_image(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.describe_image`."""
    path = given.pop("path")
    if not isinstance(path, (str, os.PathLike)):
        refuse("path", path, "a path", hint="mpool.vision accepts bytes, arrays and PIL images")
    if _is_url(path):
        refuse("path", path, "a path", hint="mpool.describe_url accepts a URL")
    return _described(pool, "path", Path(path), given, call)


def describe_url(pool: Host, given: dict[str, Any], call: Call) -> Validated:
    """See :func:`mpool.describe_url`."""
    url = given.pop("url")
    if not _is_url(url):
        refuse("url", url, "an http or https URL", hint="mpool.describe_image accepts a path")
    given.setdefault("allow_urls", True)
    return _described(pool, "url", url, given, call)


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and value[:8].lower().startswith(("http:", "https:"))


def _described(pool: Host, name: str, image: Any, given: dict[str, Any], call: Call) -> Validated:
    """Return the request about one image, whose parameter is ``name``."""
    query, model = given.pop("query", DESCRIBE), given.pop("model", None)

    def prepare(options: dict[str, Any]) -> TextRequest:
        try:
            return vision_request(pool, image, query, model, options, call)
        except MpoolError as error:
            error.rename({"images": name, "prompt": "query"})
            raise

    return _text(given, model, 0, True, "vision", prepare, True)


def has_images(messages: Any) -> bool:
    """Return True if a conversation may contain images; False also for invalid messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return False
    with of_caller():
        for message in messages:
            if isinstance(message, Mapping):
                content = message.get("content")
                if message.get("images") is not None or not isinstance(content, str) and any(
                        isinstance(part, Mapping) and part.get("type") != "text"
                        for part in (content if isinstance(content, (list, tuple)) else (content,))):
                    return True
        return False


# ---- image generation ------------------------------------------------------------------------------------------------

def image_request(pool: Host, prompt: Any, model: Any, given: Mapping[str, Any], watched: bool = True) -> ImageRequest:
    """Return the request for images. ``watched``: True if the caller streams the denoising steps."""
    from . import text_to_image

    options = _options.parse_options(GenerateImageOptions, "generate_image", given)
    unread = _is_unread(pool, model, "text_to_image")
    with before(pool, model, "text_to_image"):
        text_to_image.check(prompt, options, unread)
    entry, own = _opened(pool, model, options, "text_to_image")
    return text_to_image.prepare(entry, prompt, own, watched)


def generate_image(pool: Host, given: dict[str, Any], call: Call, watched: bool = True) -> Validated:
    """See :func:`mpool.generate_image`."""
    prompt, model = given.pop("prompt"), given.pop("model", None)
    return Validated(lambda: image_request(pool, prompt, model, given, watched), model, "text_to_image", None, True)
