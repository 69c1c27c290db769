"""Settings that the authors of a repository state in its model card, and not in its files.

They apply to references of these repositories, and to rows of the catalogue whose first reference is one of them. A
file of the folder that has a setting takes precedence.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from ...errors import FormatError
from ..fields import Fields
from ..files import Folder, Overlay
from ..json_strict import Json, shorten
from ..layout import MODEL_CONFIG, MODULES_NAME, TOKENIZER_NAME, TRANSFORMER_CONFIGS
from .scoring import MESSAGE_OF_ROLE


@dataclass(frozen=True)
class Answering:
    """A reranker that is a language model: the prompt of a pair, and the two tokens whose logits give the score.

    Attributes:
        before: text before the instruction.
        instruction: default instruction.
        query, document: texts before the query and the document.
        after: text after the document.
        yes, no: the tokens.
        max_tokens: maximum length of the prompt, in tokens.
    """

    before: str
    instruction: str
    query: str
    document: str
    after: str
    yes: str = "yes"
    no: str = "no"
    max_tokens: int = 8192

    def template(self) -> str:
        """Return the chat template that renders messages of the roles system (the instruction), query and document."""
        instruction = f"({MESSAGE_OF_ROLE.format('system')} | default({json.dumps(self.instruction)}))"
        parts = [json.dumps(self.before), instruction, json.dumps(self.query), MESSAGE_OF_ROLE.format("query"),
                 json.dumps(self.document), MESSAGE_OF_ROLE.format("document"), json.dumps(self.after)]
        return "{{ " + " ~ ".join(parts) + " }}"


#: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
_QWEN3_RERANKER = Answering(
    before="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
           "provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: ",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
    query="\n<Query>: ", document="\n<Document>: ",
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
#: Repository, in lower case -> prompt of its reranker. These repositories have no modules of sentence-transformers.
RERANKERS: dict[str, Answering] = {f"qwen/qwen3-reranker-{size}": _QWEN3_RERANKER for size in ("0.6b", "4b", "8b")}
#: Texts and images of a message's content in Qwen3-VL's form; the images come first, as in the code of its authors.
_QWEN3_VL_PARTS = (
    "{%- macro parts(content) -%}"
    "{%- for part in content if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- endfor -%}"
    "{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}{%- endmacro -%}"
    "{%- macro of(role, usual) -%}{%- set found = messages | selectattr('role', 'eq', role) | list -%}"
    "{%- if found -%}{{ parts(found[0].content) }}{%- else -%}{{ usual }}{%- endif -%}{%- endmacro -%}")
_QWEN3_VL_END = "{{ '<|im_end|>\n' }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
#: Chat template of Qwen3-VL-Embedding (https://github.com/QwenLM/Qwen3-VL-Embedding).
_QWEN3_VL_EMBEDDING = (
    _QWEN3_VL_PARTS + "{{ '<|im_start|>system\n' ~ of('system', \"Represent the user's input.\") ~ "
    "'<|im_end|>\n<|im_start|>user\n' ~ of('user', '') }}" + _QWEN3_VL_END)
#: Chat template of Qwen3-VL-Reranker (https://github.com/QwenLM/Qwen3-VL-Embedding).
_QWEN3_VL_RERANKER = (
    _QWEN3_VL_PARTS + "{{ '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
    "and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: ' ~ of('system', 'Given a search query, retrieve relevant candidates that answer the query.') ~ "
    "'<Query>:' ~ of('query', '') ~ '\n<Document>:' ~ of('document', '') }}" + _QWEN3_VL_END)
#: Repository, in lower case -> the template of its inputs and their maximum number of tokens.
WITH_IMAGES: dict[str, tuple[str, int]] = {
    f"qwen/qwen3-vl-{kind}-{size}": found for size in ("2b", "8b") for kind, found in (
        ("embedding", (_QWEN3_VL_EMBEDDING, 8192)), ("reranker", (_QWEN3_VL_RERANKER, 10240)))}
#: Range of the pixels of an image for these models.
_QWEN3_VL_PIXELS = {"min_pixels": 4 * 32 * 32, "max_pixels": 1800 * 32 * 32}
#: Repository, in lower case -> its prompts (https://huggingface.co/Alibaba-NLP/gte-Qwen2-1.5B-instruct).
PROMPTS: dict[str, dict[str, str]] = {
    f"alibaba-nlp/gte-qwen{name}-instruct": {
        "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "}
    for name in ("1.5-7b", "2-1.5b", "2-7b")}


def completed(folder: Folder, repository: str) -> tuple[Folder, str | None]:
    """Return a folder with the published settings that its files lack, and a chat template that replaces its own.

    Args:
        folder: the model folder.
        repository: repository of the folder, ``org/name``; "": unknown.

    Returns:
        The folder itself and None if no settings are published for the repository, or its files have them.

    Raises:
        FormatError: the tokenizer does not have the tokens of the answers.
    """
    name = repository.lower()
    found = RERANKERS.get(name)
    if found is not None and not folder.has(MODULES_NAME):
        ids = _ids_of(folder, (found.yes, found.no))
        return Overlay(folder, _cross_encoder(found.max_tokens, *ids)), found.template()
    if name in WITH_IMAGES and not folder.has(MODULES_NAME):
        template, limit = WITH_IMAGES[name]
        files = _cross_encoder(limit, *_ids_of(folder, ("yes", "no"))) if "reranker" in name else _sentence(limit)
        settings = {"max_seq_length": limit, "processing_kwargs": {
            "chat_template": {"add_generation_prompt": True}, "image": _QWEN3_VL_PIXELS}}
        return Overlay(folder, {**files, TRANSFORMER_CONFIGS[0]: settings}), template
    prompts = PROMPTS.get(name)
    config = folder.fields(MODEL_CONFIG, missing_ok=True) if prompts is not None else None
    if config is not None and not config.get("prompts"):
        return Overlay(folder, {MODEL_CONFIG: {**config.values, "prompts": prompts}}), None
    return folder, None


def _modules(*kinds: str) -> list[Json]:
    """Return the ``modules.json`` of a chain of modules of sentence-transformers."""
    return [{"idx": at, "name": str(at), "path": f"{at}_{kind.rpartition('.')[2]}" if at else "",
             "type": f"sentence_transformers.{kind}"} for at, kind in enumerate(kinds)]


def _sentence(limit: int) -> dict[str, Json]:
    """Return the files that a SentenceTransformer would have whose embedding is that of the last token, normalised.

    Args:
        limit: maximum number of tokens.
    """
    return {
        MODULES_NAME: _modules("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling",
                               "base.modules.normalize.Normalize"),
        MODEL_CONFIG: {"model_type": "SentenceTransformer"},
        TRANSFORMER_CONFIGS[0]: {"max_seq_length": limit}, "1_Pooling/config.json": {"pooling_mode": "lasttoken"}}


def _cross_encoder(limit: int, yes: int, no: int) -> dict[str, Json]:
    """Return the files that a CrossEncoder of sentence-transformers would have.

    Args:
        limit: maximum number of tokens.
        yes, no: ids of the tokens whose logits give the score.
    """
    return {
        MODULES_NAME: _modules("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"),
        MODEL_CONFIG: {"model_type": "CrossEncoder"}, TRANSFORMER_CONFIGS[0]: {"max_seq_length": limit},
        "1_LogitScore/config.json": {"true_token_id": yes, "false_token_id": no}}


def _ids_of(folder: Folder, tokens: tuple[str, str]) -> list[int]:
    """Return the ids of two tokens in the vocabulary of ``tokenizer.json``."""
    file = os.path.join(folder.path, TOKENIZER_NAME)
    model = Fields.of(folder.fields(TOKENIZER_NAME).get("model"), file=file, at="model")
    vocab = model.get("vocab")
    ids = []
    for token in tokens:
        number = vocab.get(token) if isinstance(vocab, dict) else None
        if type(number) is not int or number < 0:
            raise FormatError(file=file, field=f"model.vocab.{token}", got=shorten(number),
                              allowed="the id of the token, which the score of this reranker needs")
        ids.append(number)
    return ids
