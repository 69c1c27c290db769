"""``Llama`` with the interface of llama-cpp-python, computed by mpool. Needs no extra.

As in llama-cpp-python, results are dicts in OpenAI's format. In addition, any number of threads may use one object, and
models are also found by reference (``Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M``). Constrained output needs the extra
``grammar``.
"""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..api.functions import pool_of
from ..checks import integer, items_of, missing_attribute, real, refuse
from ..errors import InvalidArgument, Unsupported
from ..model import Model
from ._choices import call_limit, logprobs_of

if TYPE_CHECKING:
    from ..completions import Chunk, Completion, TokenLogprob, Usage

_FILE = "mpool uses the value that the file states"
_ADAPTER = "Merge the adapter into the weights, or use mpool.load(..., adapters={name: path}) and adapter=name"
#: Arguments of the constructor that would change the result and that mpool lacks -> the default in llama-cpp-python,
#: and what to do instead.
_CONSTRUCTOR: dict[str, tuple[Any, str]] = {
    **{name: (default, _FILE) for name, default in (
        ("rope_scaling_type", -1), ("rope_freq_base", 0.0), ("rope_freq_scale", 0.0), ("yarn_ext_factor", -1.0),
        ("yarn_attn_factor", 1.0), ("yarn_beta_fast", 32.0), ("yarn_beta_slow", 1.0), ("yarn_orig_ctx", 0),
        ("pooling_type", -1), ("attention_type", -1), ("tokenizer", None))},
    "lora_base": (None, _ADAPTER), "lora_path": (None, _ADAPTER), "lora_scale": (1.0, _ADAPTER),
    "kv_overrides": (None, "Change the file's keys with the gguf package"),
    "vocab_only": (False, "Load the model: its weights are mapped when they are needed"),
    "chat_format": (None, "mpool uses the file's chat template; mpool.register(..., chat_template=...) replaces it"),
    "chat_handler": (None, "mpool.vision answers questions about images"),
    "draft_model": (None, "mpool.load(..., draft=NAME) adds a draft model"),
    "type_k": (None, 'mpool.load(..., kv_dtype="int8")'), "type_v": (None, 'mpool.load(..., kv_dtype="int8")'),
    "spm_infill": (False, "create_completion(suffix=...) puts the prompt before the suffix"),
}
#: Arguments of the constructor that have no effect: they choose devices, threads, batches and output.
_UNUSED = frozenset((
    "n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "use_mmap", "use_mlock", "n_batch", "n_ubatch",
    "n_threads", "n_threads_batch", "logits_all", "embedding", "offload_kqv", "flash_attn", "op_offload", "swa_full",
    "no_perf", "last_n_tokens_size", "numa", "verbose"))
#: Sampling arguments that mpool lacks, and the value that has no effect.
_NEUTRAL = {"typical_p": 1.0, "tfs_z": 1.0, "mirostat_mode": 0, "logits_processor": None, "stopping_criteria": None,
            "functions": None, "function_call": None}
_INSTEAD = {"logits_processor": "logit_bias= adds constants to logits", "functions": "Pass tools=",
            "function_call": "Pass tool_choice="}


class LlamaGrammar:
    """A grammar in GBNF."""

    def __init__(self, grammar: str | None = None, *, schema: Any = None) -> None:
        if schema is None and (not isinstance(grammar, str) or ":" not in grammar):  # every rule has a colon
            refuse("grammar", grammar, "a grammar in GBNF, with the rule root ::= ...")
        self._format: dict[str, Any] = {"type": "grammar", "grammar": grammar} if schema is None else \
            _schema_format(schema)

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """Return the grammar of a text in GBNF."""
        return cls(grammar)

    @classmethod
    def from_file(cls, file: str | os.PathLike[str], verbose: bool = True) -> LlamaGrammar:
        """Return the grammar of a file in GBNF."""
        with open(file, encoding="utf-8") as opened:
            return cls(opened.read())

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """Return the grammar of a JSON schema, given as JSON text."""
        try:
            return cls(schema=json.loads(json_schema))
        except ValueError as error:
            raise InvalidArgument(param="json_schema", got=str(error), allowed="a JSON schema as JSON text") from None


class LlamaState:
    """A state that :meth:`Llama.save_state` returns. It is empty: a prompt that begins like an earlier one reuses the
    common part from the prefix cache."""


class Llama:
    """A language model or embedding model, as llama-cpp-python's class of this name.

    Args:
        model_path: path of a GGUF file or of a folder, a reference, or a :class:`mpool.Model`.
        n_ctx: maximum number of tokens of a prompt and its completion; 0 (the default): the model's context. In
            llama-cpp-python, the default is 512.
        seed: first seed of requests without one: each draws the seed of the next, so that a program's texts differ and
            can be reproduced; 4294967295 (the default): a random one for each request.
        options: other arguments of that class. Those that choose devices, threads and batches have no effect; those
            that would change results raise :class:`mpool.Unsupported`, which says what to do instead.
    """

    _seed: int

    def __init__(self, model_path: str | os.PathLike[str] | Model, *, n_ctx: int = 0, seed: int = 0xFFFFFFFF,
                 **options: Any) -> None:
        for name, value in options.items():
            if name not in _CONSTRUCTOR and name not in _UNUSED:
                raise TypeError(f"Llama() got an unexpected keyword argument {name!r}")
            if name in _CONSTRUCTOR and value != _CONSTRUCTOR[name][0]:
                raise Unsupported(f"`{name}` is not available here", hint=_CONSTRUCTOR[name][1])
        context = integer(n_ctx)
        if context is None or context < 0:
            refuse("n_ctx", n_ctx, "an integer of 0 or more; 0 is the model's context")
        self.set_seed(seed)
        self.model_path = str(getattr(model_path, "ref", model_path))
        self._model = pool_of(model_path).get(model_path)
        self._settings = self._model.description.generation
        self._context = context or None

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes
        __getattr__ = missing_attribute

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None = None, **options: Any) -> Llama:
        """Return the model of a repository.

        Args:
            repo_id: ``owner/name``.
            filename: name of its file, or ``*`` and the end of the name, such as ``*q4_k_m.gguf``; None: the
                repository has one model.
            options: as for the class.
        """
        for name, value in (("repo_id", repo_id), ("filename", filename or "")):
            if not isinstance(value, str):
                refuse(name, value, "a str")
        if filename is None:
            return cls(repo_id, **options)
        if "*" not in filename:
            return cls(f"hf://{repo_id}/{filename}", **options)
        quantisation = filename.removesuffix(".gguf").strip("*").lstrip("-_.").upper()
        return cls(f"{repo_id}:{quantisation}", **options)

    # ---- completions -----------------------------------------------------------------------------------------------

    def create_completion(self, prompt: str | Sequence[int], suffix: str | None = None, max_tokens: int | None = 16,
                          temperature: float = 0.8, top_p: float = 0.95, min_p: float = 0.05, typical_p: float = 1.0,
                          logprobs: int | None = None, echo: bool = False, stop: str | Sequence[str] | None = (),
                          frequency_penalty: float = 0.0, presence_penalty: float = 0.0, repeat_penalty: float = 1.0,
                          top_k: int = 40, stream: bool = False, seed: int | None = None, tfs_z: float = 1.0,
                          mirostat_mode: int = 0, mirostat_tau: float = 5.0, mirostat_eta: float = 0.1,
                          model: str | None = None, stopping_criteria: Any = None, logits_processor: Any = None,
                          grammar: LlamaGrammar | str | None = None,
                          logit_bias: Mapping[int, float] | None = None) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Continue a prompt.

        Args:
            prompt: a text, in which the names of control tokens become those tokens, or token ids.
            suffix: the completion belongs between the prompt and this text. Names of control tokens in both texts are
                plain text.
            max_tokens: maximum number of tokens; None or less than 1: up to the end of the context.
            logprobs: number of most probable tokens to return at each position.
            echo: begin the text with the prompt; not together with ``logprobs`` or token ids.
            repeat_penalty: applies to all tokens of prompt and completion; in llama-cpp-python, to the last 64.
            stream: True: return an iterator over parts of the completion.
            model: name of the model in the result.
            grammar: a :class:`LlamaGrammar`, or a text in GBNF.

        Returns:
            A dict in the format of OpenAI's ``/v1/completions``, or an iterator over such dicts.

        Raises:
            Unsupported: ``typical_p``, ``tfs_z``, ``mirostat_mode``, ``stopping_criteria`` or ``logits_processor`` is
                in use, or there is a ``suffix`` and the vocabulary has no tokens to fill in the middle.
            MpoolError: as for :func:`mpool.generate`.
        """
        _refuse_unless_neutral(typical_p=typical_p, tfs_z=tfs_z, mirostat_mode=mirostat_mode,
                               stopping_criteria=stopping_criteria, logits_processor=logits_processor)
        if echo and (logprobs is not None or not isinstance(prompt, str)):
            raise Unsupported("`echo` is not available with log probabilities or token ids",
                              hint="Put the prompt before the text yourself")
        options = self._sampling(max_tokens, temperature, top_p, min_p, top_k, frequency_penalty, presence_penalty,
                                 repeat_penalty, stop, seed, grammar, None, logit_bias)
        if logprobs is not None:
            options["logprobs"] = logprobs
        head = _head("cmpl", "text_completion", model or self.model_path)
        begin = prompt if echo and isinstance(prompt, str) else ""
        at = len(prompt) if isinstance(prompt, str) else 0
        if suffix is not None:
            prompt = self._fill_in_prompt(prompt, suffix)
            options["stop_token_ids"] = list(self._model.tokenizer.fill_in_ends())
        if stream:
            chunks = self._model.generate(prompt, parse_special=True, stream=True, **options)
            return self._completion_parts(head, chunks, begin, at)
        done = self._model.generate(prompt, parse_special=True, **options)
        choice = {"text": begin + done.text, "index": 0, "logprobs": _completion_logprobs(done.logprobs, at),
                  "finish_reason": done.finish_reason}
        return {**head, "choices": [choice], "usage": _usage(done.usage)}

    __call__ = create_completion

    def _fill_in_prompt(self, prompt: str | Sequence[int], suffix: str) -> list[int]:
        """Return the token ids of a prompt whose completion belongs between ``prompt`` and ``suffix``."""
        before = self._model.tokenize(prompt, add_special=False) if isinstance(prompt, str) else prompt
        found = self._model.tokenizer.fill_in_prompt(before, self._model.tokenize(suffix, add_special=False))
        if found is None:
            raise Unsupported("`suffix` needs a model whose vocabulary has tokens to fill in the middle",
                              param="suffix", key=self._model.key,
                              hint="Use a code model, such as Qwen2.5-Coder-0.5B-Instruct")
        return found

    @staticmethod
    def _completion_parts(head: dict[str, Any], chunks: Any, begin: str, at: int) -> Iterator[dict[str, Any]]:
        def part(text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
            return {**head, "choices": [{"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}]}

        with chunks:
            if begin:
                yield part(begin, None, None)
            for chunk in chunks:
                if chunk.text or chunk.logprobs:  # a stop string removes text, not tokens
                    yield part(chunk.text, _completion_logprobs(chunk.logprobs, at), None)
                    at += sum(len(one.token) for one in chunk.logprobs or ())
                if chunk.finish_reason:
                    yield part("", None, chunk.finish_reason)

    def create_chat_completion(self, messages: Sequence[Mapping[str, Any]], functions: Any = None,
                               function_call: Any = None, tools: Sequence[Mapping[str, Any]] | None = None,
                               tool_choice: Any = None, temperature: float = 0.2, top_p: float = 0.95, top_k: int = 40,
                               min_p: float = 0.05, typical_p: float = 1.0, stream: bool = False,
                               stop: str | Sequence[str] | None = (), seed: int | None = None,
                               response_format: Mapping[str, Any] | None = None, max_tokens: int | None = None,
                               presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
                               repeat_penalty: float = 1.0, tfs_z: float = 1.0, mirostat_mode: int = 0,
                               mirostat_tau: float = 5.0, mirostat_eta: float = 0.1, model: str | None = None,
                               logits_processor: Any = None, grammar: LlamaGrammar | str | None = None,
                               logit_bias: Mapping[int, float] | None = None, logprobs: bool | None = None,
                               top_logprobs: int | None = None) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Complete a conversation, with the model's chat template.

        Args:
            messages: as for :func:`mpool.chat`.
            tools, tool_choice: as for :func:`mpool.chat`.
            response_format: ``{"type": "json_object"}``, also with ``"schema"``, or as for :func:`mpool.chat`.
            max_tokens: None or less than 1: up to the end of the context.

        The other arguments are as for :meth:`create_completion`.

        Returns:
            A dict in the format of OpenAI's ``/v1/chat/completions``, or an iterator over its stream events. A message
            has ``reasoning_content`` if the model separates its reasoning from the response.

        Raises:
            Unsupported: ``functions``, ``function_call``, ``typical_p``, ``tfs_z``, ``mirostat_mode`` or
                ``logits_processor`` is in use.
            MpoolError: as for :func:`mpool.chat`.
        """
        _refuse_unless_neutral(functions=functions, function_call=function_call, typical_p=typical_p, tfs_z=tfs_z,
                               mirostat_mode=mirostat_mode, logits_processor=logits_processor)
        options = self._sampling(max_tokens, temperature, top_p, min_p, top_k, frequency_penalty, presence_penalty,
                                 repeat_penalty, stop, seed, grammar, response_format, logit_bias)
        options |= {name: value for name, value in (("tools", tools), ("tool_choice", tool_choice),
                                                    ("logprobs", logprobs), ("top_logprobs", top_logprobs))
                    if value is not None}
        head = _head("chatcmpl", "chat.completion.chunk" if stream else "chat.completion", model or self.model_path)
        if stream:
            return self._chat_parts(head, self._model.chat(messages, stream=True, **options))
        done = self._model.chat(messages, **options)
        choice = {"index": 0, "message": _message(done), "logprobs": logprobs_of(done.logprobs),
                  "finish_reason": done.finish_reason, **call_limit(done)}
        return {**head, "choices": [choice], "usage": _usage(done.usage)}

    @staticmethod
    def _chat_parts(head: dict[str, Any], chunks: Any) -> Iterator[dict[str, Any]]:
        def part(delta: dict[str, Any], logprobs: Any = None, reason: str | None = None,
                 **more: Any) -> dict[str, Any]:
            return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason,
                                         **more}]}

        with chunks:
            yield part({"role": "assistant"})
            for chunk in chunks:
                delta = _delta(chunk)
                if delta or chunk.logprobs:
                    yield part(delta, logprobs_of(chunk.logprobs))
                if chunk.finish_reason:
                    yield part({}, None, chunk.finish_reason, **call_limit(chunk))

    def _sampling(self, max_tokens: int | None, temperature: float, top_p: float, min_p: float, top_k: int,
                  frequency_penalty: float, presence_penalty: float, repeat_penalty: float,
                  stop: str | Sequence[str] | None, seed: int | None, grammar: LlamaGrammar | str | None,
                  response_format: Mapping[str, Any] | None, logit_bias: Mapping[int, float] | None) -> dict[str, Any]:
        """Return options of mpool for those of llama-cpp-python."""
        # None: not a number, and the request refuses it
        most, heat, count = integer(max_tokens), real(temperature), integer(top_k)
        found: dict[str, Any] = {
            "max_tokens": self._model.context_length if max_tokens is None or most is not None and most <= 0 else
            max_tokens,
            "temperature": 0.0 if heat is not None and heat < 0 else temperature, "top_p": top_p, "min_p": min_p,
            "top_k": 0 if count is not None and count < 0 else top_k,
            "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
            "repetition_penalty": repeat_penalty, "context_length": self._context}
        if stop is not None and not (isinstance(stop, (str, list, tuple)) and not stop):
            found["stop"] = list(stop) if isinstance(stop, tuple) else stop
        if seed is not None:
            self.set_seed(seed)
        elif _is_fixed(self._seed):
            self._seed = random.Random(self._seed).randint(0, 2**32)
        if _is_fixed(self._seed):
            found["seed"] = self._seed
        if logit_bias is not None and logit_bias != {}:
            found["logit_bias"] = logit_bias
        if grammar is not None:
            found["response_format"] = _format_of(grammar)
        elif response_format is not None and response_format != {"type": "text"}:
            schema = response_format.get("schema") if response_format.get("type") == "json_object" else None
            found["response_format"] = response_format if schema is None else _schema_format(schema)
        return found

    # ---- tokens and vectors ----------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the token ids of a text in UTF-8.

        Args:
            text: the text.
            add_bos: add the special tokens that the model expects around a text.
            special: convert the names of control tokens in the text to those tokens.
        """
        if not isinstance(text, bytes):
            raise InvalidArgument(param="text", got=type(text).__name__, allowed="bytes", hint="Use text.encode()")
        try:
            plain = text.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument(param="text", got=str(error), allowed="text in UTF-8") from None
        return self._model.tokenize(plain, add_special=add_bos, parse_special=special)

    def detokenize(self, tokens: Iterable[int], prev_tokens: Iterable[int] | None = None,
                   special: bool = False) -> bytes:
        """Return the text of token ids in UTF-8, which may begin or end with a part of a character.

        Args:
            tokens: the ids.
            prev_tokens: ids before them, whose text is left out.
            special: write control tokens by name.
        """
        before, ids = list(prev_tokens or ()), list(tokens)
        whole = self._model.detokenize([*before, *ids], skip_special=not special)
        start = self._model.detokenize(before, skip_special=not special) if before else ""
        if "\ufffd" not in start + whole:
            return whole[len(start):].encode()
        # Texts have U+FFFD in place of a part of a character: its bytes are in the table of tokens.
        tokenizer = self._model.tokenizer
        name_of = tokenizer.token_text
        found = b"".join(tokenizer.token_bytes(token) or (name_of(token).encode() if special else b"") for token in ids)
        drops_space = not before and found.startswith(b" ") and not whole.startswith(" ")
        return found[1:] if drops_space else found

    def embed(self, input: str | Sequence[str], normalize: bool = False, truncate: bool = True,
              return_count: bool = False) -> Any:
        """Return the vector of a text as a list of floats, or a list of vectors for several texts.

        Args:
            input: a text or a list of texts.
            normalize: scale vectors to length 1.
            truncate: cut texts that are too long.
            return_count: return a tuple of the vectors and the number of tokens.

        Raises:
            WrongCapability: the model is not an embedding model.
        """
        texts = [input] if isinstance(input, str) else list(items_of("input", input, "a str or a list of str"))
        vectors = self._model.embed(input if isinstance(input, str) else texts, normalize=normalize,
                                    truncate=truncate).tolist()
        if not return_count:
            return vectors
        return vectors, sum(self._model.count_tokens(text) for text in texts)

    def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> dict[str, Any]:
        """Return vectors in the format of OpenAI's ``/v1/embeddings``."""
        texts = [input] if isinstance(input, str) else list(items_of("input", input, "a str or a list of str"))
        vectors, count = self.embed(texts, return_count=True)
        rows = [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)]
        return {"object": "list", "data": rows, "model": model or self.model_path,
                "usage": {"prompt_tokens": count, "total_tokens": count}}

    # ---- facts and states ------------------------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """Return the maximum number of tokens of a prompt and its completion."""
        return min(self._context or self._model.context_length, self._model.context_length)

    def n_vocab(self) -> int:
        """Return the number of tokens of the vocabulary."""
        return self._model.tokenizer.vocab_size

    def n_embd(self) -> int:
        """Return the number of components of a vector."""
        return self._model.dimensions

    def token_bos(self) -> int:
        """Return the id of the token at the beginning of a text; -1: there is none."""
        found = None if self._settings is None else self._settings.bos_token_id
        return -1 if found is None else found

    def token_eos(self) -> int:
        """Return the first id of a token that ends a generation; -1: there is none."""
        return next(iter(() if self._settings is None else self._settings.eog_token_ids), -1)

    def set_seed(self, seed: int) -> None:
        """Set the seed of requests without one: each has another seed, which follows from that of the request before
        it, as in llama-cpp-python."""
        number = integer(seed)
        if number is None:
            refuse("seed", seed, "an integer")
        self._seed = number

    def set_cache(self, cache: Any) -> None:
        """Do nothing: the prefix cache is always on."""

    def reset(self) -> None:
        """Do nothing: requests share no state."""

    def save_state(self) -> LlamaState:
        """Return an empty state, see :class:`LlamaState`."""
        return LlamaState()

    def load_state(self, state: LlamaState) -> None:
        """Do nothing, see :class:`LlamaState`."""

    def close(self) -> None:
        """Do nothing: the pool unloads models that are idle; :meth:`mpool.Model.unload` does it now."""

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# ---- formats ---------------------------------------------------------------------------------------------------------

def _is_fixed(seed: int) -> bool:
    """Return True unless the seed stands for a random one."""
    return seed != 0xFFFFFFFF and seed >= 0


def _refuse_unless_neutral(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value != _NEUTRAL[name]:
            raise Unsupported(f"`{name}` is not available here", hint=_INSTEAD.get(name, "Leave it out"))


def _format_of(grammar: LlamaGrammar | str) -> dict[str, Any]:
    if isinstance(grammar, str):
        return LlamaGrammar(grammar)._format
    if isinstance(grammar, LlamaGrammar):
        return grammar._format
    raise InvalidArgument(param="grammar", got=type(grammar).__name__,
                          allowed="mpool.integrations.llama_cpp.LlamaGrammar, or a str in GBNF")


def _schema_format(schema: Any) -> dict[str, Any]:
    """Return the format of a JSON schema. Keywords that a grammar cannot enforce are left out, as in llama.cpp."""
    return {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4()}", "object": kind, "created": int(time.time()), "model": model}


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens}


def _completion_logprobs(tokens: Sequence[TokenLogprob] | None, at: int) -> dict[str, Any] | None:
    """Return log probabilities of a text that begins at character ``at``."""
    if tokens is None:
        return None
    offsets = []
    for one in tokens:
        offsets.append(at)
        at += len(one.token)
    return {"tokens": [one.token for one in tokens], "text_offset": offsets,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{**{top.token: top.logprob for top in one.top}, one.token: one.logprob} for one in tokens]}


def _message(done: Completion) -> dict[str, Any]:
    message = done.message
    if (reasoning := message.pop("reasoning", None)) is not None:
        message["reasoning_content"] = reasoning
    return message


def _delta(chunk: Chunk) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if chunk.text:
        found["content"] = chunk.text
    if chunk.reasoning:
        found["reasoning_content"] = chunk.reasoning
    if chunk.tool_calls:
        found["tool_calls"] = [{"index": one.index, "type": "function", **({} if one.id is None else {"id": one.id}),
                                "function": {"name": one.name, "arguments": one.arguments}}
                               for one in chunk.tool_calls]
    return found


__all__ = ["Llama", "LlamaGrammar", "LlamaState"]
