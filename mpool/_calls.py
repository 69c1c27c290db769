"""The functions of the module that compute: methods of the process-wide pool (_runtime.py)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from ._runtime import default_pool
from .pool import DESCRIBE
from .tasks import options as _options

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from .images import ImageInput
    from .model import Model
    from .results import Completion
    from .tasks.images_result import Pictures
    from .tasks.jobs import Job
    from .tasks.options import EmbedOptions, ImageOptions, PictureOptions, RerankOptions, TextOptions
    from .tasks.rerank import Ranking
    from .tasks.streams import Stream
    from .tasks.text_embedding import EmbedIterator
    from .tasks.text_to_image import PictureStream

    ModelLike = str | os.PathLike[str] | Model | None


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
            XLM-RoBERTa, ModernBERT, MPNet, GTE), a model of text whose folder says that it is one (Qwen3-Reranker, as
            sentence-transformers saves it), or a GGUF file of a reranker. There is no default.
        top_k: name only so many documents in the result; None: all.
        compute: class of arithmetic, as of :func:`embed`.
        truncate: cut the longer text of a pair, or the document where the model is one of text, to what the model
            takes; False: raise ContextOverflow instead.
        prompt: for a model of text, what to look for, instead of one of the model's prompts.
        prompt_name: the name of one of those. Without both the model's own counts, if it has one.
        timeout, priority, tenant, keep_alive, policy, fail_fast: see :class:`mpool.CallOptions`.

    Returns:
        A :class:`mpool.tasks.rerank.Ranking`: the documents, best first, with scores and places. Scores equal those of
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
        Unsupported: the model has no chat template.
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
