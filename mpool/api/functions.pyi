"""Functions of the package. Written by ``python -m mpool.api.stubs``: do not edit."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from ..completions import Completion
from ..debug import ModelTable
from ..images.loading import ImageInput
from ..model import Model
from ..pool import Pool
from ..runtime.health import Health
from ..tasks.captures import Capture, CaptureJob
from ..tasks.classification import Classification, Classifications
from ..tasks.embedding_results import SparseVectors, TextEmbeddings, TokenVectors
from ..tasks.images_result import GeneratedImages
from ..tasks.iterating import EmbedIterator
from ..tasks.jobs import Job
from ..tasks.options import Compute, Input, Policy, Precision, Priority, Progress
from ..tasks.rerank import Ranking
from ..tasks.streams import Stream
from ..tasks.text_to_image import ImageStream
from ..tasks.token_labels import TokenClassification, TokenClassifications

FORWARDED: tuple[str, ...]
_default: Pool | None

def default_pool() -> Pool: ...
def pool_of(*arguments: object) -> Pool: ...
def is_default(pool: Pool) -> bool: ...
def install() -> None: ...
def begin_shutdown() -> None: ...
def submit(capability: str, **request: Any) -> Job: ...
def count_tokens(text: str, model: str | os.PathLike[str] | Model) -> int: ...
def detokenize(ids: Sequence[int] | NDArray[np.integer], model: str | os.PathLike[str] | Model, *,
               skip_special: bool = True) -> str: ...
def get(model: str | os.PathLike[str] | Model, capability: str | None = None) -> Model: ...
def health() -> Health: ...
def init_maintenance() -> None: ...
def load(model: str | os.PathLike[str] | Model, *, name: str | None = None, pin: bool = False,
         keep_alive: float | str | None = None, compute: Compute = 'auto', progress: bool | None = None,
         timeout: float | None = None, isolation: Literal['thread', 'process'] | None = None,
         weights: Literal['auto', 'mapped', 'packed'] | None = None, kv_dtype: Literal['auto', 'int8'] | None = None,
         draft: str | os.PathLike[str] | Model | Literal[False] | None = None,
         adapters: Mapping[str, str | os.PathLike[str]] | None = None) -> Model: ...
@overload
def metrics(format: Literal["dict"] = "dict") -> dict[str, Any]: ...
@overload
def metrics(format: Literal["prometheus"]) -> str: ...
def ps() -> ModelTable: ...
def register(name: str, model: str | os.PathLike[str], *, prompts: Mapping[str, str] | None = None,
             default_prompt_name: str | None = None, pooling: str | None = None, normalize: bool | None = None,
             max_length: int | None = None, chat_template: str | None = None,
             isolation: Literal['thread', 'process'] | None = None,
             weights: Literal['auto', 'mapped', 'packed'] | None = None,
             kv_dtype: Literal['auto', 'int8'] | None = None,
             draft: str | os.PathLike[str] | Model | Literal[False] | None = None,
             adapters: Mapping[str, str | os.PathLike[str]] | None = None, replace: bool = False) -> Model: ...
def swap(model: str | Model, new: str | os.PathLike[str], *, timeout: float | None = None,
         prompts: Mapping[str, str] | None = None, default_prompt_name: str | None = None, pooling: str | None = None,
         normalize: bool | None = None, max_length: int | None = None, chat_template: str | None = None,
         isolation: Literal['thread', 'process'] | None = None,
         weights: Literal['auto', 'mapped', 'packed'] | None = None, kv_dtype: Literal['auto', 'int8'] | None = None,
         draft: str | os.PathLike[str] | Model | Literal[False] | None = None,
         adapters: Mapping[str, str | os.PathLike[str]] | None = None) -> Model: ...
def tokenize(text: str, model: str | os.PathLike[str] | Model, *, add_special: bool = True, parse_special: bool = False
) -> list[int]: ...
def unload(model: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> None: ...
def embed(inputs: Input | Sequence[Input] | Sequence[Sequence[int]],
          model: str | os.PathLike[str] | Model | None = None, *, dimensions: int | None = None,
          normalize: bool | None = None, precision: Precision = 'float32', compute: Compute = 'auto',
          on_error: Literal['raise', 'null'] = 'raise', progress: Progress = None,
          task: Literal['query', 'document'] | None = None, prompt: str | None = None, prompt_name: str | None = None,
          truncate: bool = True, parse_special: bool = False, adapter: str | None = None, allow_urls: bool = False,
          max_inputs: int | None = None, allow_token_ids: bool = True, timeout: float | None = None,
          priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
          policy: Policy | None = None, fail_fast: bool | None = None) -> NDArray[Any]: ...
def embed_iter(texts: Iterable[Input | Sequence[int]], model: str | os.PathLike[str] | Model | None = None, *,
               dimensions: int | None = None, normalize: bool | None = None, precision: Precision = 'float32',
               compute: Compute = 'auto', on_error: Literal['raise', 'null'] = 'raise', progress: Progress = None,
               task: Literal['query', 'document'] | None = None, prompt: str | None = None,
               prompt_name: str | None = None, truncate: bool = True, parse_special: bool = False,
               adapter: str | None = None, allow_urls: bool = False,
               output: Literal['dense', 'sparse', 'tokens', 'all', 'labels', 'spans'] = 'dense',
               batch_size: int | None = None, max_active: int | None = None, labels: Sequence[str] | None = None,
               template: str = 'This example is {}.', multi_label: bool = False,
               function_to_apply: Literal['softmax', 'sigmoid', 'none'] | None = None, top_k: int | None = None,
               aggregation: Literal['none', 'simple', 'first', 'average', 'max'] = 'none',
               ignore_labels: Sequence[str] = ('O',), stride: int | None = None, timeout: float | None = None,
               priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
               policy: Policy | None = None, fail_fast: bool | None = None) -> EmbedIterator: ...
def embed_sparse(inputs: str | Sequence[str] | Sequence[Sequence[int]],
                 model: str | os.PathLike[str] | Model | None = None, *,
                 task: Literal['query', 'document'] | None = None, prompt: str | None = None,
                 prompt_name: str | None = None, truncate: bool = True, parse_special: bool = False,
                 adapter: str | None = None, compute: Compute = 'auto', progress: Progress = None,
                 max_inputs: int | None = None, max_active: int | None = None, timeout: float | None = None,
                 priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
                 policy: Policy | None = None, fail_fast: bool | None = None) -> SparseVectors: ...
def embed_tokens(inputs: str | Sequence[str] | Sequence[Sequence[int]],
                 model: str | os.PathLike[str] | Model | None = None, *,
                 task: Literal['query', 'document'] | None = None, prompt: str | None = None,
                 prompt_name: str | None = None, truncate: bool = True, parse_special: bool = False,
                 adapter: str | None = None, compute: Compute = 'auto', progress: Progress = None,
                 max_inputs: int | None = None, timeout: float | None = None, priority: Priority = 'normal',
                 tenant: str | int | None = None, keep_alive: float | str | None = None, policy: Policy | None = None,
                 fail_fast: bool | None = None) -> TokenVectors: ...
def embed_all(inputs: str | Sequence[str] | Sequence[Sequence[int]],
              model: str | os.PathLike[str] | Model | None = None, *, task: Literal['query', 'document'] | None = None,
              prompt: str | None = None, prompt_name: str | None = None, truncate: bool = True,
              parse_special: bool = False, adapter: str | None = None, compute: Compute = 'auto',
              progress: Progress = None, max_inputs: int | None = None, timeout: float | None = None,
              priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
              policy: Policy | None = None, fail_fast: bool | None = None) -> TextEmbeddings: ...
def embed_image(images: ImageInput | Sequence[ImageInput], model: str | os.PathLike[str] | Model | None = None, *,
                dimensions: int | None = None, normalize: bool | None = None, precision: Precision = 'float32',
                compute: Compute = 'auto', on_error: Literal['raise', 'null'] = 'raise', progress: Progress = None,
                allow_urls: bool = False, max_inputs: int | None = None, timeout: float | None = None,
                priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
                policy: Policy | None = None, fail_fast: bool | None = None) -> NDArray[Any]: ...
def rerank(query: Input, documents: Sequence[Input], model: str | os.PathLike[str] | Model | None = None, *,
           top_k: int | None = None, compute: Compute = 'auto', truncate: bool = True, prompt: str | None = None,
           prompt_name: str | None = None, function_to_apply: Literal['sigmoid', 'none'] | None = None,
           parse_special: bool = False, adapter: str | None = None, allow_urls: bool = False,
           timeout: float | None = None, priority: Priority = 'normal', tenant: str | int | None = None,
           keep_alive: float | str | None = None, policy: Policy | None = None, fail_fast: bool | None = None
) -> Ranking: ...
@overload
def classify(texts: str, model: str | os.PathLike[str] | Model, *, labels: Sequence[str] | None = None,
             template: str = 'This example is {}.', multi_label: bool = False,
             function_to_apply: Literal['softmax', 'sigmoid', 'none'] | None = None, top_k: int | None = None,
             compute: Compute = 'auto', truncate: bool = True, parse_special: bool = False, adapter: str | None = None,
             max_inputs: int | None = None, progress: Progress = None, timeout: float | None = None,
             priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
             policy: Policy | None = None, fail_fast: bool | None = None) -> Classification: ...
@overload
def classify(texts: list[str] | tuple[str, ...] | NDArray[Any] | Sequence[tuple[str, str]],
             model: str | os.PathLike[str] | Model, *, labels: Sequence[str] | None = None,
             template: str = 'This example is {}.', multi_label: bool = False,
             function_to_apply: Literal['softmax', 'sigmoid', 'none'] | None = None, top_k: int | None = None,
             compute: Compute = 'auto', truncate: bool = True, parse_special: bool = False, adapter: str | None = None,
             max_inputs: int | None = None, progress: Progress = None, timeout: float | None = None,
             priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
             policy: Policy | None = None, fail_fast: bool | None = None) -> Classifications: ...
@overload
def classify_tokens(texts: str, model: str | os.PathLike[str] | Model, *,
                    aggregation: Literal['none', 'simple', 'first', 'average', 'max'] = 'none',
                    ignore_labels: Sequence[str] = ('O',), stride: int | None = None, compute: Compute = 'auto',
                    truncate: bool = True, parse_special: bool = False, adapter: str | None = None,
                    max_inputs: int | None = None, progress: Progress = None, timeout: float | None = None,
                    priority: Priority = 'normal', tenant: str | int | None = None,
                    keep_alive: float | str | None = None, policy: Policy | None = None, fail_fast: bool | None = None
) -> TokenClassification: ...
@overload
def classify_tokens(texts: list[str] | tuple[str, ...] | NDArray[Any], model: str | os.PathLike[str] | Model, *,
                    aggregation: Literal['none', 'simple', 'first', 'average', 'max'] = 'none',
                    ignore_labels: Sequence[str] = ('O',), stride: int | None = None, compute: Compute = 'auto',
                    truncate: bool = True, parse_special: bool = False, adapter: str | None = None,
                    max_inputs: int | None = None, progress: Progress = None, timeout: float | None = None,
                    priority: Priority = 'normal', tenant: str | int | None = None,
                    keep_alive: float | str | None = None, policy: Policy | None = None, fail_fast: bool | None = None
) -> TokenClassifications: ...
@overload
def generate(prompt: str | Sequence[int], model: str | os.PathLike[str] | Model | None = None, *,
             stream: Literal[False] = False, temperature: float | None = None, top_k: int | None = None,
             top_p: float | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
             presence_penalty: float | None = None, frequency_penalty: float | None = None,
             logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
             max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
             stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
             logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
             response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
             adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
             parse_special: bool = False, timeout: float | None = None, priority: Priority = 'normal',
             tenant: str | int | None = None, keep_alive: float | str | None = None, policy: Policy | None = None,
             fail_fast: bool | None = None) -> Completion: ...
@overload
def generate(prompt: str | Sequence[int], model: str | os.PathLike[str] | Model | None = None, *, stream: Literal[True],
             temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
             min_p: float | None = None, repetition_penalty: float | None = None, presence_penalty: float | None = None,
             frequency_penalty: float | None = None,
             logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
             max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
             stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
             logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
             response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
             adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
             parse_special: bool = False, timeout: float | None = None, priority: Priority = 'normal',
             tenant: str | int | None = None, keep_alive: float | str | None = None, policy: Policy | None = None,
             fail_fast: bool | None = None) -> Stream: ...
@overload
def generate(prompt: str | Sequence[int], model: str | os.PathLike[str] | Model | None = None, *, stream: bool,
             temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
             min_p: float | None = None, repetition_penalty: float | None = None, presence_penalty: float | None = None,
             frequency_penalty: float | None = None,
             logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
             max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
             stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
             logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
             response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
             adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
             parse_special: bool = False, timeout: float | None = None, priority: Priority = 'normal',
             tenant: str | int | None = None, keep_alive: float | str | None = None, policy: Policy | None = None,
             fail_fast: bool | None = None) -> Completion | Stream: ...
@overload
def chat(messages: str | Sequence[Mapping[str, Any]], model: str | os.PathLike[str] | Model | None = None, *,
         stream: Literal[False] = False, temperature: float | None = None, top_k: int | None = None,
         top_p: float | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
         presence_penalty: float | None = None, frequency_penalty: float | None = None,
         logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
         max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
         stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
         logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
         response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
         adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
         tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
         tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
         parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
         allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
         priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
         policy: Policy | None = None, fail_fast: bool | None = None) -> Completion: ...
@overload
def chat(messages: str | Sequence[Mapping[str, Any]], model: str | os.PathLike[str] | Model | None = None, *,
         stream: Literal[True], temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
         min_p: float | None = None, repetition_penalty: float | None = None, presence_penalty: float | None = None,
         frequency_penalty: float | None = None, logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
         seed: int | None = None, max_tokens: int | None = 512, min_tokens: int | None = None,
         stop: str | Sequence[str] | None = None, stop_token_ids: Sequence[int] | None = None,
         ignore_eos: bool | None = None, logprobs: bool | int | None = None, top_logprobs: int | None = None,
         n: int | None = None, response_format: Mapping[str, Any] | type | None = None,
         context_length: int | None = None, adapter: str | None = None, capture: Capture | CaptureJob | None = None,
         compute: Compute = 'auto', tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
         tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
         parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
         allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
         priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
         policy: Policy | None = None, fail_fast: bool | None = None) -> Stream: ...
@overload
def chat(messages: str | Sequence[Mapping[str, Any]], model: str | os.PathLike[str] | Model | None = None, *,
         stream: bool, temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
         min_p: float | None = None, repetition_penalty: float | None = None, presence_penalty: float | None = None,
         frequency_penalty: float | None = None, logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
         seed: int | None = None, max_tokens: int | None = 512, min_tokens: int | None = None,
         stop: str | Sequence[str] | None = None, stop_token_ids: Sequence[int] | None = None,
         ignore_eos: bool | None = None, logprobs: bool | int | None = None, top_logprobs: int | None = None,
         n: int | None = None, response_format: Mapping[str, Any] | type | None = None,
         context_length: int | None = None, adapter: str | None = None, capture: Capture | CaptureJob | None = None,
         compute: Compute = 'auto', tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
         tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
         parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
         allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
         priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
         policy: Policy | None = None, fail_fast: bool | None = None) -> Completion | Stream: ...
@overload
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: str | os.PathLike[str] | Model | None = None,
           *, stream: Literal[False] = False, temperature: float | None = None, top_k: int | None = None,
           top_p: float | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
           presence_penalty: float | None = None, frequency_penalty: float | None = None,
           logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
           max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
           stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
           logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
           response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
           adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
           tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
           tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
           parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
           allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
           priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
           policy: Policy | None = None, fail_fast: bool | None = None) -> Completion: ...
@overload
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: str | os.PathLike[str] | Model | None = None,
           *, stream: Literal[True], temperature: float | None = None, top_k: int | None = None,
           top_p: float | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
           presence_penalty: float | None = None, frequency_penalty: float | None = None,
           logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
           max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
           stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
           logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
           response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
           adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
           tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
           tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
           parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
           allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
           priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
           policy: Policy | None = None, fail_fast: bool | None = None) -> Stream: ...
@overload
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: str | os.PathLike[str] | Model | None = None,
           *, stream: bool, temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
           min_p: float | None = None, repetition_penalty: float | None = None, presence_penalty: float | None = None,
           frequency_penalty: float | None = None, logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
           seed: int | None = None, max_tokens: int | None = 512, min_tokens: int | None = None,
           stop: str | Sequence[str] | None = None, stop_token_ids: Sequence[int] | None = None,
           ignore_eos: bool | None = None, logprobs: bool | int | None = None, top_logprobs: int | None = None,
           n: int | None = None, response_format: Mapping[str, Any] | type | None = None,
           context_length: int | None = None, adapter: str | None = None, capture: Capture | CaptureJob | None = None,
           compute: Compute = 'auto', tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
           tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
           parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
           allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
           priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
           policy: Policy | None = None, fail_fast: bool | None = None) -> Completion | Stream: ...
@overload
def describe_image(path: str | os.PathLike[str], query: str = 'Describe the image.',
                   model: str | os.PathLike[str] | Model | None = None, *, stream: Literal[False] = False,
                   temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
                   min_p: float | None = None, repetition_penalty: float | None = None,
                   presence_penalty: float | None = None, frequency_penalty: float | None = None,
                   logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
                   max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
                   stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
                   logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
                   response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
                   adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
                   tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
                   tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
                   parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
                   allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
                   priority: Priority = 'normal', tenant: str | int | None = None,
                   keep_alive: float | str | None = None, policy: Policy | None = None, fail_fast: bool | None = None
) -> str: ...
@overload
def describe_image(path: str | os.PathLike[str], query: str = 'Describe the image.',
                   model: str | os.PathLike[str] | Model | None = None, *, stream: Literal[True],
                   temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
                   min_p: float | None = None, repetition_penalty: float | None = None,
                   presence_penalty: float | None = None, frequency_penalty: float | None = None,
                   logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
                   max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
                   stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
                   logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
                   response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
                   adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
                   tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
                   tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
                   parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
                   allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
                   priority: Priority = 'normal', tenant: str | int | None = None,
                   keep_alive: float | str | None = None, policy: Policy | None = None, fail_fast: bool | None = None
) -> Stream: ...
@overload
def describe_image(path: str | os.PathLike[str], query: str = 'Describe the image.',
                   model: str | os.PathLike[str] | Model | None = None, *, stream: bool,
                   temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
                   min_p: float | None = None, repetition_penalty: float | None = None,
                   presence_penalty: float | None = None, frequency_penalty: float | None = None,
                   logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
                   max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
                   stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
                   logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
                   response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
                   adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
                   tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
                   tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
                   parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
                   allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
                   priority: Priority = 'normal', tenant: str | int | None = None,
                   keep_alive: float | str | None = None, policy: Policy | None = None, fail_fast: bool | None = None
) -> str | Stream: ...
@overload
def describe_url(url: str, query: str = 'Describe the image.', model: str | os.PathLike[str] | Model | None = None, *,
                 stream: Literal[False] = False, temperature: float | None = None, top_k: int | None = None,
                 top_p: float | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
                 presence_penalty: float | None = None, frequency_penalty: float | None = None,
                 logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
                 max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
                 stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
                 logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
                 response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
                 adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
                 tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
                 tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
                 parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
                 allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
                 priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
                 policy: Policy | None = None, fail_fast: bool | None = None) -> str: ...
@overload
def describe_url(url: str, query: str = 'Describe the image.', model: str | os.PathLike[str] | Model | None = None, *,
                 stream: Literal[True], temperature: float | None = None, top_k: int | None = None,
                 top_p: float | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
                 presence_penalty: float | None = None, frequency_penalty: float | None = None,
                 logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
                 max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
                 stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
                 logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
                 response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
                 adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
                 tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
                 tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
                 parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
                 allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
                 priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
                 policy: Policy | None = None, fail_fast: bool | None = None) -> Stream: ...
@overload
def describe_url(url: str, query: str = 'Describe the image.', model: str | os.PathLike[str] | Model | None = None, *,
                 stream: bool, temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
                 min_p: float | None = None, repetition_penalty: float | None = None,
                 presence_penalty: float | None = None, frequency_penalty: float | None = None,
                 logit_bias: Mapping[int, float] | Mapping[str, float] | None = None, seed: int | None = None,
                 max_tokens: int | None = 512, min_tokens: int | None = None, stop: str | Sequence[str] | None = None,
                 stop_token_ids: Sequence[int] | None = None, ignore_eos: bool | None = None,
                 logprobs: bool | int | None = None, top_logprobs: int | None = None, n: int | None = None,
                 response_format: Mapping[str, Any] | type | None = None, context_length: int | None = None,
                 adapter: str | None = None, capture: Capture | CaptureJob | None = None, compute: Compute = 'auto',
                 tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
                 tool_choice: Literal['auto', 'none', 'required'] | Mapping[str, Any] | None = None,
                 parallel_tool_calls: bool | None = None, template_options: Mapping[str, Any] | None = None,
                 allow_urls: bool = False, image_tokens: int | None = None, timeout: float | None = None,
                 priority: Priority = 'normal', tenant: str | int | None = None, keep_alive: float | str | None = None,
                 policy: Policy | None = None, fail_fast: bool | None = None) -> str | Stream: ...
@overload
def generate_image(prompt: str, model: str | os.PathLike[str] | Model | None = None, *, stream: Literal[False] = False,
                   negative_prompt: str | None = None, width: int | None = None, height: int | None = None,
                   num_inference_steps: int | None = None, guidance_scale: float | None = None, seed: int | None = None,
                   latents: Any = None, n: int = 1, preview_every: int = 0, max_sequence_length: int | None = None,
                   compute: Compute = 'auto', timeout: float | None = None, priority: Priority = 'normal',
                   tenant: str | int | None = None, keep_alive: float | str | None = None, policy: Policy | None = None,
                   fail_fast: bool | None = None) -> GeneratedImages: ...
@overload
def generate_image(prompt: str, model: str | os.PathLike[str] | Model | None = None, *, stream: Literal[True],
                   negative_prompt: str | None = None, width: int | None = None, height: int | None = None,
                   num_inference_steps: int | None = None, guidance_scale: float | None = None, seed: int | None = None,
                   latents: Any = None, n: int = 1, preview_every: int = 0, max_sequence_length: int | None = None,
                   compute: Compute = 'auto', timeout: float | None = None, priority: Priority = 'normal',
                   tenant: str | int | None = None, keep_alive: float | str | None = None, policy: Policy | None = None,
                   fail_fast: bool | None = None) -> ImageStream: ...
@overload
def generate_image(prompt: str, model: str | os.PathLike[str] | Model | None = None, *, stream: bool,
                   negative_prompt: str | None = None, width: int | None = None, height: int | None = None,
                   num_inference_steps: int | None = None, guidance_scale: float | None = None, seed: int | None = None,
                   latents: Any = None, n: int = 1, preview_every: int = 0, max_sequence_length: int | None = None,
                   compute: Compute = 'auto', timeout: float | None = None, priority: Priority = 'normal',
                   tenant: str | int | None = None, keep_alive: float | str | None = None, policy: Policy | None = None,
                   fail_fast: bool | None = None) -> GeneratedImages | ImageStream: ...
