"""The functions of the module: methods of a process-wide pool that is made on first use."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _options
from ._health import CapabilityPools, Health, Pong
from .config import PoolConfig
from .pool import DESCRIBE, Pool, all_pools

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._options import Compute, EmbedOptions, ImageOptions, PictureOptions, RerankOptions, TextOptions
    from .drawing import PictureStream
    from .embedding import EmbedIterator
    from .images import ImageInput
    from .jobs import Job
    from .model import Model
    from .pictures import Pictures
    from .reranking import Ranking
    from .results import Completion
    from .show import ModelTable
    from .streams import Stream

    ModelLike = str | os.PathLike[str] | Model | None

_lock = threading.Lock()
_default: Pool | None = None
_installed = False
_ending = False  # begin_shutdown was called: no new pool takes the place of the closed one


def default_pool() -> Pool:
    """The pool that the functions of the module use."""
    global _default
    if _default is None or (_default._closed and not _ending):
        with _lock:
            if _default is None or (_default._closed and not _ending):
                _default = Pool(PoolConfig())
    return _default


def is_default(pool: Pool) -> bool:
    """Whether it is that one."""
    return pool is _default


def install() -> None:
    """Before the first registry: has all of them closed when the interpreter ends."""
    global _installed
    with _lock:
        if not _installed:
            _installed = True
            atexit.register(_at_exit)


def _at_exit() -> None:
    from . import _logging

    pools = all_pools()
    for pool in pools:
        pool.begin_shutdown()
    for pool in pools:
        pool.close()
    captures = sys.modules.get("mpool.captures")
    if captures is not None:
        captures.finish()
    _logging.stop()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@_options.spelt_out
def embed(inputs: str | Sequence[str], model: ModelLike = None, *, task: Literal["query", "document"] | None = None,
          max_inputs: int | None = None, **options: Unpack[EmbedOptions]) -> NDArray[Any]:
    """Vectors of a text, or of a list of texts.

    A vector does not depend on what else is in the call or runs beside it: the same text, model, options and version
    give the same bytes.

    Args:
        inputs: a text of 1 to 1,000,000 characters, or a list (tuple, array, Series) of them.
        model: a key of the catalogue, a name given by :func:`load` or :func:`register`, a path, a reference such as
            ``"org/name"``, or a :class:`mpool.Model`; None: all-MiniLM-L6-v2.
        task: ``"query"`` or ``"document"``: puts the prompt before the texts that the model has for it, if it has one
            (``document`` also under the names ``passage`` and ``corpus``).
        prompt: a text to put before every text, instead of one of the model's prompts.
        prompt_name: the name of one of the model's prompts. Without ``task``, ``prompt`` and ``prompt_name`` the
            model's default prompt is used, if it names one.
        dimensions: first so many components of each vector, for models trained for that (Matryoshka); what is cut is
            normalised again if the vectors are normalised at all. None: all, or what the model's folder says.
        normalize: True: length 1; False: as pooled; None: as the model's files say.
        precision: ``"float32"``; ``"int8"`` or ``"uint8"`` (256 levels over the range of each component among the
            vectors of this call, so it takes at least two texts and wants hundreds); ``"binary"`` or ``"ubinary"``
            (signs, eight to a byte). As ``quantize_embeddings`` of sentence-transformers.
        compute: class of arithmetic: ``"float32"``, ``"bfloat16"``, ``"int8"``; ``"auto"``: the fastest on this CPU
            whose vectors have a cosine of at least 0.9999 to those of float32; models of more than 12 layers that
            were published in 16 bits are computed in them. Who compares bytes between machines takes ``"float32"``.
        truncate: cut a text to what the model takes; False: raise ContextOverflow instead.
        on_error: ``"null"``: a text that cannot be embedded (empty, too long, not text, NaN) gives a row of NaN, and
            the log a warning with the count, instead of an error. Only for float32.
        progress: True: a bar; a function: called with (done, total); None: a bar for long calls if the logger
            ``mpool`` is at INFO.
        timeout, priority, tenant, keep_alive, policy, fail_fast: see :class:`mpool.CallOptions`.
        max_inputs: texts that the call may have; None: ``PoolConfig.max_embed_inputs``, 10,000.

    Returns:
        ``(d,)`` for a text, ``(n, d)`` for a list; float32, or int8 or uint8 as ``precision`` says, with d/8 bytes
        (rounded up) for the binary ones.

    Raises:
        InvalidArgument: an argument or a text is not as described; the message says which and what was allowed.
        LimitError: more texts than ``max_inputs``.
        ContextOverflow: ``truncate=False``, and a text is longer than the model takes; carries both lengths.
        UnknownModel, WrongCapability: no such model, or it is for something else; the nearest is named.
        OfflineError, DownloadError, IntegrityError: the model is not here and could not be fetched.
        Timeout: no answer in time. Nothing is left running.
        Overloaded: ``fail_fast``, and as many calls wait for the model as may.
        MemoryExhausted, NumericError, ShuttingDown: see :mod:`mpool.errors`.

    Example:
        >>> vectors = mpool.embed(["A cat sits on the mat.", "A dog barks.", "Shares fell."])
        >>> vectors.shape, vectors.dtype.name
        ((3, 384), 'float32')
        >>> query = mpool.embed("Where is the cat?", task="query")
        >>> int(mpool.similarity(query, vectors).argmax())
        0

    Source:
        Names and conventions follow ``SentenceTransformer.encode``
        (https://sbert.net/docs/package_reference/sentence_transformer/model.html).
    """
    return default_pool().embed(inputs, model, task=task, max_inputs=max_inputs, **options)


def rerank(query: str, documents: Sequence[str], model: str | os.PathLike[str] | Model, *, top_k: int | None = None,
           **options: Unpack[RerankOptions]) -> Ranking:
    """Documents by how well they answer a query, as a cross-encoder reads each with it.

    Args:
        query: a text of 1 to 1,000,000 characters.
        documents: a list (tuple, array, Series) of such texts.
        model: a cross-encoder: a folder or reference of a sequence classifier with one label (BERT, RoBERTa,
            XLM-RoBERTa, ModernBERT, MPNet, GTE), or a GGUF file of a reranker. There is no default.
        top_k: name only so many documents in the result; None: all.
        compute: class of arithmetic, as of :func:`embed`.
        truncate: cut the longer text of a pair to what the model takes; False: raise ContextOverflow instead.
        timeout, priority, tenant, keep_alive, policy, fail_fast: see :class:`mpool.CallOptions`.

    Returns:
        A :class:`mpool.reranking.Ranking`: the documents, best first, with scores and places. Scores equal those of
        ``CrossEncoder.predict`` of sentence-transformers, and do not depend on the other documents.

    Raises:
        InvalidArgument: an argument or a text is not as described.
        LimitError: more documents than ``PoolConfig.max_embed_inputs``.
        WrongCapability: the model gives vectors or text, not scores.
        ContextOverflow: a pair is too long and not to be cut.
        And what :func:`embed` raises about models and pools.
    """
    return default_pool().rerank(query, documents, model, top_k=top_k, **options)


@_options.spelt_out
def embed_iter(iterable: Iterable[str], model: ModelLike = None, *, task: Literal["query", "document"] | None = None,
               batch_size: int | None = None, **options: Unpack[EmbedOptions]) -> EmbedIterator:
    """Vectors of any number of texts, lazily and in order.

    The iterable is read a few thousand texts ahead at most, the next texts are tokenised while the last ones are
    computed, and memory does not grow with the length. Leaving early cancels what is in flight.

    Args:
        iterable: texts; a generator, a file, a column of a table.
        batch_size: None: one vector ``(d,)`` at a time; else arrays ``(batch_size, d)``, the last maybe shorter. It
            changes neither speed nor results.
        precision: as for :func:`embed`, without int8 and uint8, whose ranges need all vectors at once.
        timeout: seconds for all of it.
        priority, tenant, keep_alive, policy, fail_fast: see :class:`mpool.CallOptions`.
        model, task, prompt, prompt_name, dimensions, normalize, compute, truncate, on_error, progress: as for
            :func:`embed`.

    Returns:
        an iterator and context manager, with the counts ``done`` and ``failed``.

    Raises:
        as :func:`embed`; faults of texts at the place in the iteration where they occur, with the texts before
        already given.

    Example:
        >>> lines = (f"Line {number}." for number in range(3000))
        >>> sum(1 for vector in mpool.embed_iter(lines))
        3000
    """
    return default_pool().embed_iter(iterable, model, task=task, batch_size=batch_size, **options)


@_options.spelt_out
def embed_image(images: ImageInput | Sequence[ImageInput], model: ModelLike = None, *, max_inputs: int | None = None,
                **options: Unpack[ImageOptions]) -> NDArray[Any]:
    """Vectors of an image, or of a list of images.

    Models such as CLIP and SigLIP embed texts into the same space: :func:`embed` with the same model gives vectors that
    :func:`similarity` compares with these. An image is prepared as the model's files say, as transformers' image
    processors on Pillow do it: turned upright, transparency put onto white, resized, cropped, normalised.

    Args:
        images: a path; the bytes of a file; base64 text or a ``data:`` URL; a URL (see ``allow_urls``); a Pillow image;
            an array ``[height, width, 3]`` (or 1 or 4 channels, or none) of uint8, or of floats from 0 to 1; or a list
            of these. Files are PNG, JPEG or WebP of at most 64 MiB, 67,108,864 pixels, 2 to 32,768 a side, one side at
            most 200 times the other, with one frame.
        model: as for :func:`embed`, for image_embedding. There is no default: which vectors are good depends on what
            they are for (DINOv2 for how images look, CLIP and SigLIP for what texts say of them).
        dimensions: first so many components of each vector. None: all.
        normalize: True: length 1; False: as the model gives them; None: as the model's files say, which for CLIP,
            SigLIP and DINOv2 is as they are. :func:`similarity` does not care.
        precision, compute, progress, max_inputs: as for :func:`embed`.
        on_error: ``"null"``: an image that cannot be read or embedded gives a row of NaN, and the log a warning with
            the count, instead of an error. Only for float32.
        allow_urls: fetch ``http`` and ``https`` URLs, within 30 seconds. Off, because whoever passes on URLs of others
            lets them reach whatever this machine reaches.
        timeout, priority, tenant, keep_alive, policy, fail_fast: see :class:`mpool.CallOptions`.

    Returns:
        ``(d,)`` for an image, ``(n, d)`` for a list; float32, or as ``precision`` says.

    Raises:
        InvalidArgument: an argument or an image is not as described; the message says which and what was allowed.
        FileError, DownloadError: a path cannot be read, a URL cannot be fetched.
        LimitError: more images than ``max_inputs``.
        UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded, ...: as for :func:`embed`.

    Source:
        Preparation: https://huggingface.co/docs/transformers/main_classes/image_processor
    """
    return default_pool().embed_image(images, model, max_inputs=max_inputs, **options)


@overload
def generate(prompt: str | Sequence[int], model: ModelLike = None, *, stream: Literal[False] = False,
             **sampling: Unpack[TextOptions]) -> Completion: ...
@overload
def generate(prompt: str | Sequence[int], model: ModelLike = None, *, stream: Literal[True],
             **sampling: Unpack[TextOptions]) -> Stream: ...
def generate(prompt: str | Sequence[int], model: ModelLike = None, *, stream: bool = False,
             **sampling: Any) -> Completion | Stream:
    """Continues a text.

    The prompt goes to the model as it is; for instructions and conversations, :func:`chat` puts them into the form
    that the model was trained on. The same seed gives the same tokens, whatever else runs.

    Args:
        prompt: a text of 1 to 1,000,000 characters, before which the model's BOS token is put if it wants one; or token
            ids, taken as they are.
        model: as for :func:`embed`; None: SmolLM2-135M-Instruct.
        stream: True: a :class:`mpool.Stream` of pieces instead of the whole.
        **sampling: every one optional. What is left out is taken from the model's ``generation_config.json`` if that
            asks for sampling, else it is as given here.

            temperature (0.7): 0 always takes the likeliest token.
            top_k (40), top_p (0.95), min_p (0): filters; 0, 1 and 0 are off.
            repetition_penalty (1; also repeat_penalty), presence_penalty (0), frequency_penalty (0).
            logit_bias: dict, token id -> -100 to 100, added to its logit.
            seed: 0 to 2**64 - 1; None: a random one, which the result tells.
            max_tokens (512; also max_new_tokens, max_completion_tokens, num_predict): None: until the context is full.
            min_tokens (0): no end before so many.
            stop: a string, or up to 64; the text ends before it.
            stop_token_ids: ids that end the text.
            ignore_eos (False): go on after the model's own end.
            logprobs (False), top_logprobs: log probabilities of the tokens, and of up to 20 alternatives.
            n (1): so many answers to one reading of the prompt.
            response_format: what the answer must look like; no other token is drawn. ``{"type": "json_object"}``,
                ``{"type": "json_schema", "json_schema": {"schema": {...}}}``, a JSON schema, a pydantic class,
                ``{"type": "regex", "regex": ...}``, or ``{"type": "grammar", "grammar": ...}`` (llguidance's Lark). The
                model may end only where the form is complete; what ``max_tokens`` or a stop string cuts is a piece of
                it, with ``finish_reason`` ``"length"`` or a ``stop``. ``parsed`` of the result is what JSON says.
                Needs the extra ``grammar``.
            capture: what :func:`capture` returns, or a ``job()`` of it: records of what the model's layers give out.
            parse_special (False): take texts of control tokens in the prompt for those tokens.
            compute ("auto"): as for :func:`embed`.
            timeout, priority, tenant, keep_alive, policy, fail_fast: see :class:`mpool.CallOptions`.

    Returns:
        a :class:`mpool.Completion`; with ``stream=True`` a :class:`mpool.Stream`.

    Raises:
        InvalidArgument: an option is unknown (the nearest is named) or out of range, or the prompt is empty, too long
            or not text.
        ContextOverflow: the prompt leaves no room for an answer; carries both lengths.
        UnknownModel, WrongCapability, OfflineError, Timeout, ...: as for :func:`embed`.

    Example:
        >>> done = mpool.generate("The capital of France is", temperature=0, max_tokens=4)
        >>> done.text, done.finish_reason, done.usage.completion_tokens
        (' Paris.\\n\\n', 'length', 4)
        >>> for chunk in mpool.generate("One, two, three,", temperature=0, max_tokens=6, stream=True):
        ...     print(chunk, end="")
         four, five, six,

    Source:
        Names follow vLLM's SamplingParams (https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html) and OpenAI's
        completions.
    """
    return default_pool().generate(prompt, model, stream=stream, **sampling)  # type: ignore[call-overload]


@overload
def chat(messages: Sequence[Mapping[str, Any]], model: ModelLike = None, *, stream: Literal[False] = False,
         **sampling: Unpack[TextOptions]) -> Completion: ...
@overload
def chat(messages: Sequence[Mapping[str, Any]], model: ModelLike = None, *, stream: Literal[True],
         **sampling: Unpack[TextOptions]) -> Stream: ...
def chat(messages: Sequence[Mapping[str, Any]], model: ModelLike = None, *, stream: bool = False,
         **sampling: Any) -> Completion | Stream:
    """Answers a conversation.

    The model's own chat template makes the prompt. What messages say is plain text there: the text of a control token
    in them is no control token.

    Args:
        messages: dicts ``{"role": ..., "content": ...}``; roles are system, developer, user, assistant, tool; content
            is a text, or a list of ``{"type": "text", "text": ...}``. For a model that reads images a part may be one,
            ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`` or ``{"type": "image",
            "image": ...}`` with what :func:`embed_image` takes; or a message has ``"images": [...]``. An assistant's
            may have ``tool_calls``, as OpenAI and Ollama write them; their results are messages of the role tool, with
            ``tool_call_id``, or ``name``.
        model: as for :func:`generate`.
        stream: as for :func:`generate`.
        **sampling: as for :func:`generate`, without ``parse_special``; and
            template_options: dict of what else the model's template reads, such as ``{"enable_thinking": False}``.
            tools: what the model may call, at most 128: OpenAI's dicts ``{"type": "function", "function": {"name":
            ..., "description": ..., "parameters": JSON schema, "strict": bool}}``, Python functions whose parameters
            have annotations (what they are for is read from the docstring), pydantic classes.
            tool_choice ("auto"): "auto": the model may answer, or call; "required": it has to call; ``{"type":
            "function", "function": {"name": ...}}``: it has to call this one; "none": as if no tools were given.
            parallel_tool_calls (True): an answer may have several calls.
            allow_urls (False): fetch images at http and https URLs.

    Returns:
        as :func:`generate`; ``message`` of the result is ready to be appended to ``messages``. What a model thinks
        before it answers (Qwen3's ``<think>``, GPT-OSS's channels but for the final one) is not in ``text`` but in
        ``reasoning``, of results and of the pieces of a stream; stop strings and ``max_tokens`` count in both. With a
        ``response_format``, and no tools, it answers without.

        With ``tools``, the calls that the model asks for are in ``tool_calls``, and ``finish_reason`` is
        ``"tool_calls"``. With the extra ``grammar`` they are valid by construction: nothing can be written but the
        model's own form of calls, names that were given, and arguments that fit the schema, without properties that it
        does not list. Keywords that a grammar cannot keep (``uniqueItems``, unknown formats) are refused of tools that
        are strict, and not kept of others. Without the extra, calls are parsed: what is none, or calls what was not
        given, is text; nothing can be required. With a ``response_format`` as well, JSON or a regular expression, an
        answer is calls or that, and no other text; of models whose calls have no mark (Llama 3), JSON that cannot
        begin with a property ``name``.

    Raises:
        InvalidArgument: the messages or tools are not as described, a schema cannot be used, or tools are given with a
            ``response_format`` that cannot stand beside them, ``min_tokens`` or ``ignore_eos``.
        LimitError: there are more tools than 128, or they are larger than 262,144 characters as JSON.
        Unsupported: the model has no chat template, tools are given and the template does not speak of any, a call is
            required and the extra ``grammar`` is not installed, or a message has images and the model reads text only.
        TemplateError: the template refuses the conversation.
        others as for :func:`generate`.

    Example:
        >>> messages = [{"role": "user", "content": "Say hello."}]
        >>> answer = mpool.chat(messages, temperature=0, max_tokens=2)
        >>> answer.text.startswith("Hello")
        True
        >>> messages.append(answer.message)

    Source:
        Shape of messages: https://platform.openai.com/docs/api-reference/chat
    """
    return default_pool().chat(messages, model, stream=stream, **sampling)  # type: ignore[call-overload]


@overload
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: ModelLike = None, *,
           stream: Literal[False] = False, **sampling: Unpack[TextOptions]) -> Completion: ...
@overload
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: ModelLike = None, *,
           stream: Literal[True], **sampling: Unpack[TextOptions]) -> Stream: ...
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: ModelLike = None, *, stream: bool = False,
           **sampling: Any) -> Completion | Stream:
    """Answers a question about images.

    One turn of :func:`chat` whose message is the images, then the text. What the model makes of an image is kept by the
    image's content: another question about it, also together with other images, does not look at it again.

    Args:
        images: an image, or a list of them; each a path, a URL if allowed, bytes of a PNG, JPEG or WebP file, base64
            text, a Pillow image, or an array ``[height, width, 3]`` of uint8 or of floats from 0 to 1.
        prompt: what is asked.
        model: a key, reference, path or :class:`mpool.Model` of a model that reads images.
        stream: as for :func:`generate`.
        **sampling: as for :func:`chat`; ``allow_urls=True`` fetches http and https URLs.

    Returns:
        as :func:`generate`. ``usage.prompt_tokens`` counts a token for each row of an image.

    Raises:
        InvalidArgument: an image is none, broken or beyond a limit, the prompt is empty, or an option is wrong.
        FileError, DownloadError: an image that cannot be read.
        ContextOverflow: the images are more tokens than the model takes; carries both lengths.
        WrongCapability: the model reads text only.
        Unsupported: the model has no chat template, or its workers are to be processes.
        others as for :func:`generate`.

    Example:
        >>> def ask(photo):  # the model is a folder, as transformers saves LLaVA
        ...     return mpool.vision(photo, "What is on the table?", "models/llava-1.5-7b", max_tokens=100).text

    Source:
        Visual instruction tuning, https://arxiv.org/abs/2310.03744
    """
    return default_pool().vision(images, prompt, model, stream=stream, **sampling)  # type: ignore[call-overload]


def describe_image(path: str | os.PathLike[str], query: str = DESCRIBE, model: ModelLike = None,
                   **sampling: Unpack[TextOptions]) -> str:
    """What a model says about an image file; the text of :func:`vision`.

    Args:
        path: of a PNG, JPEG or WebP file; never a URL.
        query: what is asked.
        model, **sampling: as for :func:`vision`.

    Raises:
        as :func:`vision`.
    """
    return default_pool().describe_image(path, query, model, **sampling)


def describe_url(url: str, query: str = DESCRIBE, model: ModelLike = None, **sampling: Unpack[TextOptions]) -> str:
    """What a model says about an image at an http or https URL, which is fetched; the text of :func:`vision`.

    Args:
        url: of a PNG, JPEG or WebP file.
        query: what is asked.
        model, **sampling: as for :func:`vision`; ``allow_urls`` is on.

    Raises:
        InvalidArgument: no such URL.
        others as :func:`vision`.
    """
    return default_pool().describe_url(url, query, model, **sampling)


@overload
def generate_image(prompt: str, model: ModelLike = None, *, stream: Literal[False] = False,
                   **options: Unpack[PictureOptions]) -> Pictures: ...
@overload
def generate_image(prompt: str, model: ModelLike = None, *, stream: Literal[True],
                   **options: Unpack[PictureOptions]) -> PictureStream: ...
def generate_image(prompt: str, model: ModelLike = None, *, stream: bool = False,
                   **options: Any) -> Pictures | PictureStream:
    """Makes pictures of what a text says.

    Text encoders, transformer and decoder are loaded when they are needed and give their memory to each other when it
    is short; what the encoders made of a text is kept for the next call. The same seed gives the same picture.

    Args:
        prompt: what to draw. What is too long for a text encoder is cut off, with a warning, as in diffusers.
        model: a folder of diffusers (``model_index.json``) of FLUX.1 or Stable Diffusion 3 / 3.5, or a repository of
            the hub with one; a GGUF file of their transformer inside such a folder (T5 may be one in its own folder
            there); or what :func:`load` and :func:`get` return.
        stream: True: a :class:`mpool.PictureStream` of steps instead of the pictures.
        **options: every one optional.

            negative_prompt: what not to draw; for models that are guided (Stable Diffusion 3), with a guidance_scale
                above 1.
            width, height: pixels; None: as the model was trained.
            num_inference_steps (or steps): None: 28; 4 for FLUX.1-schnell. Stable Diffusion 3.5 large turbo wants 4.
            guidance_scale (or cfg_scale): None: 7 for Stable Diffusion 3 (turbo wants 0), 3.5 for FLUX.1-dev.
            seed: 0 to 2**64 - 1; None: a random one, which the result tells.
            latents: what to start from instead of noise of the seed: an array (n, channels, height / 8, width / 8), as
                diffusers takes it, of numpy or torch.
            n (1), or num_images_per_prompt: so many pictures.
            preview_every (0): steps between previews of a stream or job; each takes a pass of the decoder.
            max_sequence_length: tokens for T5; None: 256, or 512 for FLUX.1-dev.
            compute ("auto"): as for :func:`embed`; "auto" keeps quantised weights as they are stored.
            timeout, priority, tenant, keep_alive, policy, fail_fast: see :class:`mpool.CallOptions`.

    Returns:
        :class:`mpool.Pictures`: ``.image`` is a PIL image, ``.array`` float32 (height, width, 3) from 0 to 1;
        notebooks show it. With ``stream=True`` a :class:`mpool.PictureStream`.

    Raises:
        InvalidArgument: an option is unknown (the nearest is named) or out of range, or the model cannot make pictures
            of that size (the nearest it can is named).
        MemoryExhausted: the largest stage does not fit into memory.
        UnknownModel, WrongCapability, OfflineError, Timeout, ...: as for :func:`embed`.

    Example::

        picture = mpool.generate_image("a lighthouse at dusk", "./FLUX.1-schnell", seed=7)
        picture.save("lighthouse.png")

    Source:
        Names follow diffusers' pipelines (https://huggingface.co/docs/diffusers/api/pipelines/flux).
    """
    return default_pool().generate_image(prompt, model, stream=stream, **options)  # type: ignore[call-overload]


def submit(capability: str, **request: Any) -> Job:
    """Starts a call without waiting for it.

    Reading the model's files (on its first use) and tokenising are done before this returns; loading the weights and
    computing are not waited for, nor is a full queue.

    Args:
        capability: ``"text_embedding"``, ``"text_to_text"``, ``"image_embedding"``, ``"vision"`` or
            ``"text_to_image"``.
        **request: the arguments of :func:`embed` (``inputs=...``) or :func:`embed_image` (``images=...``) without
            ``progress``, or of :func:`generate`, :func:`chat` (``prompt=...`` or ``messages=...``), :func:`vision`
            (``images=..., prompt=...``, or ``messages=...``) or :func:`generate_image` without ``stream``, by name.

    Returns:
        a :class:`mpool.Job`: ``result(timeout)``, ``done()``, ``cancel()``, ``position()``; awaitable; one that
        generates can be iterated over.

    Raises:
        InvalidArgument: an unknown capability or argument, and what the functions raise for their arguments.
        Overloaded: as many calls wait for the model as ``PoolConfig.embed_queue_capacity`` or
            ``prompt_queue_capacity`` allows. Take the result of a job first. One job takes many texts.

    Example:
        >>> jobs = [mpool.submit("text_embedding", inputs=text) for text in ("one", "two")]
        >>> [job.result(timeout=60).shape for job in jobs]
        [(384,), (384,)]
    """
    return default_pool().submit(capability, **request)


def get(key: str | os.PathLike[str] | Model, capability: str | None = None) -> Model:
    """A model by name. Nothing is loaded yet.

    Args:
        key: a key of the catalogue, a name given by :func:`register` or :func:`load`, a path or a reference.
        capability: what the model must be for; None: anything.

    Raises:
        UnknownModel: no model has that name; the nearest is named.
        WrongCapability: it is for something else; the nearest that fits is named.
        InvalidArgument: not a name, or no capability.

    Example:
        >>> mpool.get("all-MiniLM-L6-v2", "text_embedding").batch_embed(["one", "two"]).shape
        (2, 384)
        >>> mpool.get("all-MiniLM-L6-v3")
        Traceback (most recent call last):
            ...
        mpool.errors.UnknownModel: ...the nearest are all-MiniLM-L6-v2...
    """
    return default_pool().get(key, capability)


def load(ref: str | os.PathLike[str] | Model, *, alias: str | None = None, pin: bool = False,
         keep_alive: float | str | None = None, compute: Compute = "auto", progress: bool | None = None,
         timeout: float | None = None, isolation: Literal["thread", "process"] | None = None) -> Model:
    """Loads a model now, fetching it first if it is not here, and waits until it serves.

    Loading beforehand is never needed; it moves the wait to a time of your choice.

    Args:
        ref: as ``model`` of :func:`embed`.
        alias: a further name for it: 1 to 128 letters, digits and ``. _ + -``.
        pin: never unload it to make room for another, nor for want of work.
        keep_alive: how long it stays without work, instead of what ``PoolConfig.keep_alive`` says: seconds, ``"5m"``;
            0: not at all; below 0: for ever.
        compute: as for :func:`embed`.
        progress: whether to show a bar for downloads; None: if standard error is a terminal.
        timeout: seconds for loading; the loading goes on when they are over. Downloads are not counted.
        isolation: where its workers run from now on, ``"thread"`` or ``"process"``; see ``PoolConfig.isolation``. None:
            as it is. A model that is loaded serves until it is loaded anew.

    Raises:
        InvalidArgument: the alias is no name or is taken, or the reference has no known form.
        UnknownModel, OfflineError, DownloadError, IntegrityError, FormatError, Unsupported, UnsafeFormat: it cannot be
            found, fetched or read.
        MemoryExhausted: it does not fit into the pool's memory beside what cannot be unloaded for it: models that have
            calls, are pinned, are being loaded or have not served yet (all others are, by themselves). The hint names
            those that are pinned and idle, so that :func:`unload` would make room.
        SpawnFailed, SpawnTimeout, Timeout: it could not be loaded.

    Example:
        >>> mpool.load("all-MiniLM-L6-v2", alias="mini").key
        'all-MiniLM-L6-v2'
        >>> mpool.embed("A sentence.", "mini").shape
        (384,)
    """
    return default_pool().load(ref, alias=alias, pin=pin, keep_alive=keep_alive, compute=compute, progress=progress,
                               timeout=timeout, isolation=isolation)


def unload(alias: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> None:
    """Frees a model's memory, once its running calls are done, pinned or not.

    Its names stay: the next call loads it again.

    Args:
        alias: any of its names, or the model.
        timeout: seconds to wait for running calls.

    Raises:
        UnknownModel: no model has that name.
        Timeout: calls still run; it is freed when they are done.
    """
    default_pool().unload(alias, timeout=timeout)


def register(key: str, ref: str | os.PathLike[str], *, prompts: Mapping[str, str] | None = None,
             default_prompt_name: str | None = None, pooling: str | None = None, normalize: bool | None = None,
             max_length: int | None = None, chat_template: str | None = None,
             isolation: Literal["thread", "process"] | None = None) -> Model:
    """Makes a model known under a name, from then on like one of the catalogue.

    Reads its files, fetching them if need be; loads no weights.

    Args:
        key: its name: 1 to 128 letters, digits and ``. _ + -``.
        ref: where it is: a path or a reference.
        prompts: name -> text, instead of the prompts its files have; default_prompt_name: the one used unasked.
        pooling: cls, mean, max, mean_sqrt_len, weightedmean or lasttoken, instead of what its files say.
        normalize: whether vectors have length 1, instead of what its files say.
        max_length: tokens of a text, at most what its files say.
        chat_template: Jinja, instead of what its files say.
        isolation: where its workers run, ``"thread"`` or ``"process"``; None: as ``PoolConfig.isolation`` says.

    Raises:
        InvalidArgument: the key is no name or is taken, or a setting does not fit the model.
        and what :func:`load` raises for a reference that cannot be found or read.

    Example:
        >>> model = mpool.register("mini-with-prompts", "all-MiniLM-L6-v2", prompts={"query": "Search for: "})
        >>> bool((model.embed("cats", "query") == mpool.embed("Search for: cats")).all())
        True
    """
    return default_pool().register(key, ref, prompts=prompts, default_prompt_name=default_prompt_name, pooling=pooling,
                                   normalize=normalize, max_length=max_length, chat_template=chat_template,
                                   isolation=isolation)


def ps() -> ModelTable:
    """The models in use: state, memory, calls. Shows itself as a table in a terminal and in a notebook.

    Returns:
        a sequence of :class:`mpool.show.ModelRow`, in order of key.

    Example:
        >>> _ = mpool.embed("A sentence.")
        >>> [row.capability for row in mpool.ps() if row.key == "all-MiniLM-L6-v2"]
        ['text_embedding']
    """
    return default_pool().ps()


@overload
def metrics(format: Literal["dict"] = "dict") -> dict[str, Any]: ...
@overload
def metrics(format: Literal["prometheus"]) -> str: ...
def metrics(format: Literal["dict", "prometheus"] = "dict") -> dict[str, Any] | str:
    """What the pool has counted.

    Args:
        format: ``"dict"``, or ``"prometheus"``: text for a scrape, with names that begin with ``mpool_``; needs the
            package prometheus_client (``pip install "mpool[server]"``).

    Returns:
        a dict: counters by name (``total_requests``, ``errors``, ``timeouts``, ``queue_full_rejections``, ...;
        ``units_in`` and ``units_out`` are tokens read and written); ``memory_limit``, ``memory_used`` in bytes and
        ``bytes_by_kind``; ``lanes``, ``lanes_leased``; ``queue_depths`` by capability; ``models``: key -> its state,
        counts and ``latency`` in seconds, with a histogram of (upper bound, count). Or the text.

    Raises:
        InvalidArgument: another format.
        Unsupported: prometheus_client is not installed.

    Example:
        >>> _ = mpool.embed("A sentence.")
        >>> mpool.metrics()["total_requests"] > 0
        True
    """
    return default_pool().metrics(format)  # type: ignore[call-overload]


def health() -> Health:
    """How the pool is. Cheap: it waits for no work.

    Returns:
        a :class:`mpool.Health`: ``"degraded"`` while a queue stays full, a worker is much slower than its mates or does
        not move, a model has failed or its breaker is not closed, or memory is critical; ``"unhealthy"`` when the pool
        is closed or shuts down, or all models in use have failed.

    Example:
        >>> mpool.health().status
        'healthy'
    """
    return default_pool().health()


def ping(key: str | os.PathLike[str] | Model | None = None) -> tuple[Pong, ...]:
    """Whether workers are there. Never waits behind work, loads nothing, and does not count as work.

    Args:
        key: a model; None: all.

    Returns:
        a :class:`mpool.Pong` for each worker; none for a model that is not loaded.

    Raises:
        UnknownModel, InvalidArgument: no model has that name.

    Example:
        >>> _ = mpool.embed("A sentence.")
        >>> mpool.ping("all-MiniLM-L6-v2")[0].queue_depth
        0
    """
    return default_pool().ping(key)


def check(key: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> float:
    """Has a model compute something, ahead of everything that waits: a text embedded, or one token generated.

    Loads it if need be.

    Args:
        key: the model.
        timeout: seconds.

    Returns:
        seconds that it took.

    Raises:
        as :func:`embed` and :func:`generate`.

    Example:
        >>> mpool.check("all-MiniLM-L6-v2", timeout=60) < 60
        True
    """
    return default_pool().check(key, timeout=timeout)


#: Capability -> :class:`mpool.CapabilityPool`: policy, workers, queue and models of it, as they are when asked for.
#: ``mpool.pools["text_embedding"].queue_depth``
pools = CapabilityPools(default_pool)


def init_maintenance() -> None:
    """Starts the thread that looks after deadlines, workers without work and memory; it starts by itself with the first
    load. Idempotent.

    Raises:
        ShuttingDown: :func:`begin_shutdown` was called.
    """
    default_pool().init_maintenance()


def begin_shutdown() -> None:
    """Refuses new calls from now on (ShuttingDown), for the rest of the process; those in flight go on. Idempotent.

    It concerns the functions of the module. A :class:`mpool.Pool` has a method of this name.
    """
    global _ending
    _ending = True
    default_pool().begin_shutdown()


def count_tokens(text: str, model: str | os.PathLike[str] | Model) -> int:
    """Tokens that a text has for a model, those put around it included.

    Example:
        >>> mpool.count_tokens("A sentence.", "all-MiniLM-L6-v2")
        5
    """
    return default_pool().count_tokens(text, model)


def tokenize(text: str, model: str | os.PathLike[str] | Model, *, add_special: bool = True,
             parse_special: bool = False) -> list[int]:
    """Token ids of a text.

    Args:
        text: a text of 0 to 1,000,000 characters.
        model: as for :func:`embed`.
        add_special: with the tokens that the model wants around a text.
        parse_special: take texts of control tokens (``"<|im_end|>"``) for those tokens.

    Raises:
        InvalidArgument: not text, too long, or half of a surrogate pair in it.

    Example:
        >>> mpool.tokenize("A sentence.", "all-MiniLM-L6-v2")
        [101, 1037, 6251, 1012, 102]
    """
    return default_pool().tokenize(text, model, add_special=add_special, parse_special=parse_special)


def detokenize(ids: Sequence[int] | NDArray[np.integer], model: str | os.PathLike[str] | Model, *,
               skip_special: bool = True) -> str:
    """Text of token ids. Bytes that are no character (one cut in two) become U+FFFD.

    Args:
        ids: token ids, ``(n,)``.
        model: as for :func:`embed`.
        skip_special: leave control tokens out; False shows them by name.

    Raises:
        InvalidArgument: an id is not in the vocabulary.

    Example:
        >>> mpool.detokenize(mpool.tokenize("Hello, world!", "SmolLM2-135M-Instruct"), "SmolLM2-135M-Instruct")
        'Hello, world!'
    """
    return default_pool().detokenize(ids, model, skip_special=skip_special)
