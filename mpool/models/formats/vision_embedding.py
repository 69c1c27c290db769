"""Reader of sentence-transformers folders whose Transformer is a vision model, such as Qwen3-VL-Embedding and
Qwen3-VL-Reranker (arXiv:2601.04720).

The chat template renders each input, a text with any number of images, or each pair of query and document. An embedding
is the hidden state of the last token, a score the logit of one token (minus that of another) after the prompt. Of
EmbeddingGemma 2, an embedding is the output of the model's head, which reads the mean of the hidden states. The core
runs the model as a decoder with images; :mod:`mpool.tasks.mixed_inputs` makes the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import Unsupported
from ..fields import Fields
from ..files import Folder
from ..json_strict import shorten
from ..layout import TRANSFORMER_CONFIGS
from ..spec import EmbeddingSettings, ModelDescription, VisionSettings
from . import hf_parts, scoring, sentence_folder, vision_model

#: Most tokens of an input whose rows all attend to each other: the context of EmbeddingGemma 2, by its model card. The
#: memory of a pass grows with its rows.
_MEAN_TOKENS = 8192


@dataclass(frozen=True)
class _Rendering:
    """Settings of a Transformer module that renders its inputs.

    Attributes:
        generation_prompt: True if prompts end with the start of the assistant's message.
        max_tokens: maximum number of tokens of a prompt; None: that of the tokenizer.
        pixels: smallest and largest number of pixels of an image; None: those of the image processor.
    """

    generation_prompt: bool = False
    max_tokens: int | None = None
    pixels: tuple[int | None, int | None] = (None, None)


def _read_transformer(folder: Folder, scores: bool) -> _Rendering:
    """Read ``sentence_bert_config.json``. ``scores``: True for a reranker.

    Raises:
        FormatError: a key is unknown or malformed.
        Unsupported: an option selects a computation that mpool does not implement.
    """
    name = next((name for name in TRANSFORMER_CONFIGS if folder.has(name)), None)
    if name is None:
        return _Rendering()
    config = folder.fields(name)
    config.only(sentence_folder.TRANSFORMER_KEYS)
    tasks, output = (("text-generation", "any-to-any", "image-text-to-text"), "causal_logits") if scores else \
        (("feature-extraction",), "token_embeddings")
    for key, allowed in (("transformer_task", tasks), ("module_output_name", (output,))):
        if config.str(key, allowed[0]) not in allowed:
            raise Unsupported(f"{config.file}: {key} is {shorten(config.get(key))}; mpool supports "
                              + ", ".join(allowed))
    kwargs = config.section("processing_kwargs", None)
    options = {key: value for key, value in config.values.items() if key != "processing_kwargs"}
    sentence_folder.refuse_options(Fields(options, file=config.file),
                                   ("query_length", "document_length", "query_expansion"))
    _check_modalities(config, "logits" if scores else "last_hidden_state")
    limit = config.int("max_seq_length", None, low=1)
    if kwargs is None:
        return _Rendering(max_tokens=limit)
    kwargs.only({"chat_template", "image"})
    chat, image = kwargs.section("chat_template", None), kwargs.section("image", None)
    prompted = False
    if chat is not None:
        chat.only({"add_generation_prompt"})
        prompted = chat.bool("add_generation_prompt", False)
    pixels: tuple[int | None, int | None] = (None, None)
    if image is not None:
        image.only({"min_pixels", "max_pixels"})
        pixels = image.int("min_pixels", None, low=1), image.int("max_pixels", None, low=1)
    return _Rendering(prompted, limit, pixels)


def _check_modalities(config: Fields, output: str) -> None:
    """Raise Unsupported unless inputs become messages with lists of parts, and the module's output is ``output``."""
    modality = config.section("modality_config", None)
    if modality is None:
        return
    for kind in modality:
        entry = modality.section(kind)
        if (entry.str("method", "forward"), entry.str("method_output_name", output)) != ("forward", output):
            raise Unsupported(f"{config.file}: {entry.at} must select the method forward and its output {output}")
    message = modality.section("message", None)
    if message is None or message.str("format", "auto") not in ("structured", "auto"):
        raise Unsupported(f"{config.file}: modality_config.message.format must be structured: mpool renders texts and "
                          "images with the chat template")


def _with_pixels(settings: VisionSettings, pixels: tuple[int | None, int | None]) -> VisionSettings:
    """Return image settings with another range of pixels."""
    if pixels == (None, None):
        return settings
    if settings.pixels is None:
        raise Unsupported("processing_kwargs.image sets a number of pixels, which this image processor does not use")
    least, most = (own if given is None else given for own, given in zip(settings.pixels, pixels))
    most = min(most, vision_model.MAX_PATCHES * settings.image.patch_size ** 2)
    return replace(settings, pixels=(min(least, most), most))


def embedder(found: ModelDescription, folder: Folder, encoder: Folder,
             rerank: Sequence[Folder] = ()) -> ModelDescription:
    """Return the description of an embedding model or reranker.

    Args:
        found: the vision model.
        folder: the model folder.
        encoder: folder of its Transformer module.
        rerank: for a CrossEncoder, the folders of its modules; empty: a SentenceTransformer.

    Raises:
        FormatError: a value is malformed.
        Unsupported: mpool does not support a module or an option.
    """
    assert found.generation is not None and found.vision is not None
    scores, name = bool(rerank), found.spec.architecture
    if len(rerank) == 1:
        raise Unsupported(f"{folder.path}: the cross-encoder has no module LogitScore; of models with images, mpool "
                          "supports those that score by the logits of tokens")
    if found.chat_template is None:
        raise Unsupported(f"{folder.path}: the model has no chat template, which must render texts and images")
    hidden, vocab = (found.spec.kv[f"{name}.{key}"] for key in ("embedding_length", "vocab_size"))
    assert isinstance(hidden, int) and isinstance(vocab, int)
    rendering = _read_transformer(encoder, scores)
    tokenizer = encoder.fields(hf_parts.TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True)
    own = sentence_folder.ModuleSettings(encoder, max_seq_length=rendering.max_tokens)
    # one position is left for the token that the core samples
    limit = sentence_folder.max_tokens(own, tokenizer.values, found.generation.context_length - 1)
    if scores:
        prompts, default = scoring.read_prompts(folder)
        settings = EmbeddingSettings(
            max_tokens=limit, hidden_size=hidden, output_size=1, pooling=("lasttoken",), normalize=False, scores=True,
            score_activation=scoring.score_activation(folder, encoder.fields(hf_parts.CONFIG_NAME)),
            prompts=prompts, default_prompt_name=default, answering=rendering.generation_prompt,
            score_tokens=scoring.read_score_tokens(rerank[1], vocab))
    else:
        pools = found.spec.kv.get("mpool.whole_prompts") is True
        width = next(entry.shape[0] for entry in found.spec.tensors if entry.name == "output.weight") if pools \
            else hidden
        pooling = "mean" if pools else "lasttoken"
        limit = min(limit, _MEAN_TOKENS) if pools else limit
        normalize = sentence_folder.pooled_modules(folder, width, pooling)
        sentence_folder.read_model_config(folder, own)
        settings = EmbeddingSettings(
            max_tokens=limit, hidden_size=hidden, output_size=width, pooling=(pooling,), normalize=normalize,
            prompts=own.prompts, default_prompt_name=own.default_prompt_name, similarity=own.similarity,
            truncate_dim=None if own.truncate_dim is None or own.truncate_dim > width else own.truncate_dim,
            answering=rendering.generation_prompt)
    return replace(found, capability="text_embedding", embedding=settings,
                   vision=_with_pixels(found.vision, rendering.pixels))
