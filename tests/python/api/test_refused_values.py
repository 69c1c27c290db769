"""Values that requests refuse (mpool/tasks): for each check, the error's parameter, value, allowed values and hint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

IMAGE = np.zeros((8, 8, 3), np.uint8)
ONE_CALL = "For several prompts, call generate once for each; for several completions of one prompt, use n="
ONE_IMAGE = "For several prompts, call generate_image once for each; for several images of one prompt, use n="
IDS, LISTS = [101, 102], "Pass token ids as a list of lists, one for each text: [[101, 102]]"
FLAT = ("Pass the texts in one flat list, not in lists. Only token ids are in lists, one list for each text, and "
        "without texts beside them")
ONE_DIMENSION = "Pass an array of one dimension"
DENSE = "It applies to dense vectors only"
NAMES = "critical, high, normal, low, batch, or an integer from 0 to 4"

#: Verb, model, arguments; then parameter, value and allowed values of the error, and the hint, if there is one.
ROWS: list[tuple[Any, ...]] = [
    # every request
    ("embed", "bert", {"inputs": "x", "fail_fast": 1}, "fail_fast", "1", "True, False or None"),
    ("embed", "bert", {"inputs": "x", "policy": "fast"}, "policy", "'fast'",
     "one of shared, pack, p2c, sequential, or None"),
    ("embed", "bert", {"inputs": "x", "priority": 5}, "priority", "5", f"one of {NAMES}"),
    ("embed", "bert", {"inputs": "x", "priority": -1}, "priority", "-1", f"one of {NAMES}"),
    ("embed", "bert", {"inputs": "x", "priority": "top"}, "priority", "'top'", f"one of {NAMES}"),
    *(("embed", "bert", {"inputs": "x", "tenant": value}, "tenant", repr(value),
       "a name, an integer from 1 to 2**64 - 1, or None")
      for value in (0, 2**64, "", True)),
    # vectors
    *(("embed", "bert", {"inputs": value}, "inputs", got, "a str or a list of str", hint)
      for value, got, hint in (({"x"}, "set", "A set has no order: pass a list"),
                               (iter(["x"]), "list_iterator", "embed_iter accepts any iterable"),
                               (None, "None", None), (5, "5", None),
                               (b"x", "b'x'", "Decode it first, for example with decode()"),
                               (Path("x"), type(Path("x")).__name__, None), (np.array(5), "array(5)", ONE_DIMENSION),
                               (np.zeros((2, 2)), "an array of shape (2, 2)", ONE_DIMENSION),
                               (np.array(IDS), "an array of int64", LISTS),
                               ({"a": "x"}, "dict", "Pass list(d.values()) for the values of a dict"))),
    *(("embed", "bert", {"inputs": value}, "inputs[0]", got, "a str of 0 to 1,000,000 characters", hint)
      for value, got, hint in ((IDS, "int", LISTS), ([["a", "b"]], "list", FLAT))),
    ("embed", "bert", {"inputs": "x", "max_inputs": 0}, "max_inputs", "0",
     "an integer of 1 or more, or None for `PoolConfig.max_embed_inputs`"),
    ("embed", "bert", {"inputs": "x", "progress": 1}, "progress", "1",
     "True, False, None or a function of (done, total)"),
    ("embed", "bert", {"inputs": "x", "dimensions": 0}, "dimensions", "0", "an integer of 1 or more, or None"),
    ("embed", "bert", {"inputs": "x", "dimensions": 33}, "dimensions", "33", "an integer from 1 to 32"),
    *((verb, model, {name: text, option: value}, option, repr(value), allowed)
      for verb, model, name, text, option, allowed, values in (
        ("embed", "bert", "inputs", "x", "dimensions", "an integer of 1 or more, or None", (8.0, True)),
        ("embed_image", "dino", "images", IMAGE, "dimensions", "an integer of 1 or more, or None", (8.0, True)),
        ("generate", "llama", "prompt", "x", "max_tokens",
         "an integer from 1 to 2**31 - 1, or None to generate until the context is full", (2.0, True)),
        ("generate", "llama", "prompt", "x", "seed", "an integer from 0 to 2**64 - 1, or None for a random seed",
         (1.0, True)),
        ("generate", "llama", "prompt", "x", "top_p", "a number above 0 and at most 1 (off)", (True,)))
      for value in values),
    ("embed", "bert", {"inputs": "x", "precision": "int8"}, "precision", "'int8'",
     "float32, binary or ubinary for a single input", "The range of each component is computed over all vectors of a "
     "request: pass many inputs to one call"),
    ("embed", "bert", {"inputs": ["x"], "precision": "uint8"}, "precision", "'uint8'",
     "float32, binary or ubinary for a single input", "The range of each component is computed over all vectors of a "
     "request: pass many inputs to one call"),
    ("embed", "bert", {"inputs": "x", "precision": "int4"}, "precision", "'int4'",
     "one of float32, int8, uint8, binary, ubinary"),
    ("embed", "bert", {"inputs": "x", "on_error": "null", "precision": "binary"}, "on_error", "'null'",
     "'raise' with precision 'binary'", "Only float32 can represent NaN: embed as float32, remove the NaN rows, then "
     "quantise"),
    ("embed", "bert", {"inputs": "x", "truncate": 1}, "truncate", "1", "one of True, False"),
    ("embed", "bert", {"inputs": "x", "normalize": 0}, "normalize", "0", "one of None, True, False"),
    ("embed", "bert", {"inputs": "x", "allow_token_ids": 1}, "allow_token_ids", "1", "one of True, False"),
    ("embed", "bert", {"inputs": [[5], "x"]}, "inputs[1]", "'x'", "a list of token ids, as the first input"),
    ("embed", "bert", {"inputs": "x", "prompt_name": "query"}, "prompt_name", "'query'",
     "None, because the model has no prompts"),
    ("embed", "prompted", {"inputs": "x", "prompt_name": "qeury"}, "prompt_name", "'qeury'",
     "one of query, passage, other", "Did you mean 'query'?"),
    ("embed", "prompted", {"inputs": "x", "prompt_name": "query", "prompt": "x"}, "prompt_name", "'query'",
     "None if prompt is given"),
    ("embed", "prompted", {"inputs": "x", "prompt": "x" * 1_000_001}, "prompt", "1,000,001 characters",
     "text of at most 1,000,000 characters"),
    ("embed", "prompted", {"inputs": "x", "prompt": 5}, "prompt", "5", "text of at most 1,000,000 characters"),
    ("embed_iter", "bert", {"iterable": "text"}, "iterable", "'text'", "an iterable of str"),
    ("embed_iter", "bert", {"iterable": 5}, "iterable", "5", "an iterable of str"),
    *((verb, "m3", {name: ["x"], "progress": 1}, "progress", "1", "True, False, None or a function of (done, total)")
      for verb, name in (("embed_iter", "iterable"), ("embed_sparse", "inputs"), ("embed_tokens", "inputs"),
                         ("embed_all", "inputs"))),
    *((verb, model, {name: value, "progress": 1}, "progress", "1", "True, False, None or a function of (done, total)")
      for verb, model, name, value in (("embed_image", "dino", "images", [IMAGE]),
                                       ("classify", "ranker", "texts", ["x"]),
                                       ("classify_tokens", "tagger", "texts", ["x"]))),
    ("embed_iter", "bert", {"iterable": [], "batch_size": 0}, "batch_size", "0",
     "an integer of 1 or more, or None for single vectors"),
    ("embed_iter", "bert", {"iterable": [], "precision": "int8"}, "precision", "'int8'",
     "float32, binary or ubinary in embed_iter",
     "The range of each component is known only after all vectors were computed: use embed"),
    ("embed_iter", "m3", {"iterable": [], "output": "text"}, "output", "'text'",
     "one of dense, sparse, tokens, all, labels, spans"),
    *(("embed_iter", "m3", {"iterable": [], "output": output, "max_active": 3}, "max_active", "3",
       f"None with output={output!r}", "Only sparse vectors have a maximum number of weights")
      for output in ("dense", "tokens", "all")),
    *(("embed_iter", "m3", {"iterable": [], "output": output, name: value}, name, repr(value),
       f"{default!r} with output={output!r}", DENSE) for output in ("sparse", "tokens", "all")
      for name, value, default in (("dimensions", 4, None), ("normalize", True, None),
                                   ("precision", "binary", "float32"), ("on_error", "null", "raise"))),
    *(("embed_sparse", "m3", {"inputs": "x", "max_active": value}, "max_active", repr(value),
       "an integer of 1 or more, or None")
      for value in (0, -1, 1.5)),
    ("embed_image", "dino", {"images": IMAGE, "dimensions": 0}, "dimensions", "0", "an integer of 1 or more, or None"),
    ("embed_image", "dino", {"images": IMAGE, "dimensions": 49}, "dimensions", "49", "an integer from 1 to 48"),
    ("embed_image", "dino", {"images": IMAGE, "allow_urls": 1}, "allow_urls", "1", "one of True, False"),
    # rankings and labels
    ("rerank", "ranker", {"query": "x", "documents": "y"}, "documents", "one str", "a list of str"),
    ("rerank", "ranker", {"query": "x", "documents": ["y"], "top_k": 0}, "top_k", "0",
     "an integer of 1 or more, or None for all documents"),
    *(("rerank", "ranker", {"query": "x", "documents": ["y"], name: "x"}, name, "'x'",
       "None for this model, which reads only the query and the document",
       "Only rerankers that are language models have prompts") for name in ("prompt", "prompt_name")),
    ("rerank", "ranker", {"query": "x", "documents": ["y"], "function_to_apply": "softmax"}, "function_to_apply",
     "'softmax'", "one of None, sigmoid, none"),
    ("classify", "ranker", {"texts": "x", "top_k": 0}, "top_k", "0", "an integer of 1 or more, or None for all labels"),
    ("classify", "ranker", {"texts": "x", "multi_label": True}, "multi_label", "True", "False without labels",
     "Pass labels=[...] for zero-shot classification"),
    ("classify", "ranker", {"texts": "x", "template": "{}?"}, "template", "'{}?'",
     "'This example is {}.' without labels", "Pass labels=[...] for zero-shot classification"),
    ("classify", "ranker", {"texts": [("x", "y")], "labels": ["a"]}, "texts", "'pairs'",
     "single texts with labels: each label makes the second text of a pair"),
    ("classify", "ranker", {"texts": [("x", "y"), ("x",)]}, "texts[1]", "1 texts", "a pair of texts, as the first one"),
    ("classify", "ranker", {"texts": [("x", "y"), "x"]}, "texts[1]", "str", "a pair of texts, as the first one"),
    ("classify", "ranker", {"texts": "x", "labels": ["a"], "function_to_apply": "none"}, "function_to_apply", "'none'",
     "None with labels"),
    ("classify", "ranker", {"texts": "x", "labels": "a,b"}, "labels", "'a,b'", "a list of at least one str",
     "Split it: labels.split(',')"),
    ("classify", "ranker", {"texts": "x", "labels": []}, "labels", "list", "a list of at least one str"),
    ("classify", "ranker", {"texts": "x", "labels": ["a", "b", "a"]}, "labels[2]", "'a'",
     "a label that is not in the list yet"),
    *(("classify", "ranker", {"texts": "x", "labels": ["a"], "template": text}, "template", got,
       "a text with {} once, for the label, and without other braces")
      for text, got in (("no", "'no'"), ("{} {}", "'{} {}'"), ("{} }", "'{} }'"), ("{} {", "'{} {'"),
                        ("x" * 101, "'101 characters'"))),
    ("classify_tokens", "tagger", {"texts": "x", "aggregation": "best"}, "aggregation", "'best'",
     "one of none, simple, first, average, max"),
    ("classify_tokens", "tagger", {"texts": "x", "stride": -1, "aggregation": "simple"}, "stride", "-1",
     "an integer of 0 or more tokens, or None"),
    ("classify_tokens", "tagger", {"texts": "x", "stride": 0}, "stride", "0", 'None with aggregation="none"',
     'Overlapping windows are merged by their spans: use aggregation="simple"'),
    ("classify_tokens", "tagger", {"texts": "x", "stride": 1, "aggregation": "simple", "truncate": False}, "truncate",
     "False", "True with stride, which omits no part of a text"),
    ("classify_tokens", "tagger", {"texts": "x", "ignore_labels": "O"}, "ignore_labels", "'O'", "a list of str",
     "Pass ['O']"),
    ("classify_tokens", "tagger", {"texts": "x", "ignore_labels": "x" * 101}, "ignore_labels",
     repr("x" * 101)[:57] + "...", "a list of str"),
    ("classify_tokens", "tagger", {"texts": "x", "ignore_labels": ["O", 5]}, "ignore_labels[1]", "5", "a str"),
    *((verb, model, {"texts": texts}, param, "NoneType", "a str of 0 to 1,000,000 characters",
       "Fill missing texts first, for example with fillna('')")
      for verb, model, texts, param in (("classify", "ranker", [("x", "y"), ("x", None)], "texts[1][1]"),
                                        ("classify_tokens", "tagger", ["x", None], "texts[1]"))),
    # text
    ("generate", "llama", {"prompt": 5}, "prompt", "5", None),
    ("generate", "llama", {"prompt": ["x"]}, "prompt", "list", None, ONE_CALL),
    ("generate", "llama", {"prompt": ""}, "prompt", "0 characters", "a text of 1 to 1,000,000 characters"),
    ("generate", "llama", {"prompt": []}, "prompt", "an empty list", "a text or at least one token id"),
    ("generate", "llama", {"prompt": np.array(5)}, "prompt", "a 0-d array of dtype int64", None),
    ("generate", "llama", {"prompt": np.zeros((1, 2))}, "prompt", "an array of shape (1, 2) and dtype float64", None),
    ("generate", "llama", {"prompt": "x", "parse_special": 1}, "parse_special", "1", "True or False"),
    ("generate", "llama", {"prompt": "x", "stream": 1}, "stream", "1", "True or False"),
    ("generate", "llama", {"prompt": "x", "context_length": 1}, "context_length", "1",
     "an integer of 2 or more, or None"),
    ("generate", "llama", {"prompt": "x", "capture": "file"}, "capture", "'file'",
     "the result of mpool.capture(), or of its job()"),
    ("generate", "llama", {"prompt": "x", "min_tokens": 6, "max_tokens": 5}, "min_tokens", "6",
     "an integer from 0 to max_tokens, which is 5"),
    ("generate", "llama", {"prompt": "x", "stop": ["a", ""]}, "stop[1]", "''",
     "Unicode text of 1 to 1,024 bytes in UTF-8"),
    ("generate", "llama", {"prompt": "x", "stop": ["é" * 513]}, "stop[0]", repr("é" * 513)[:57] + "...",
     "Unicode text of 1 to 1,024 bytes in UTF-8"),
    ("generate", "llama", {"prompt": "x", "stop": ["a"] * 65}, "stop", "65 strings",
     "a string or a list of at most 64 strings"),
    ("generate", "llama", {"prompt": "x", "stop": 5}, "stop", "5", "a string or a list of at most 64 strings"),
    ("generate", "llama", {"prompt": "x", "stop_token_ids": [1] * 4097}, "stop_token_ids", "4,097 ids",
     "a list of at most 4,096 token ids"),
    ("generate", "llama", {"prompt": "x", "stop_token_ids": "1"}, "stop_token_ids", "'1'",
     "a list of at most 4,096 token ids"),
    ("generate", "llama", {"prompt": "x", "logit_bias": {at: 1 for at in range(4097)}}, "logit_bias", "4,097 entries",
     "a dict from token id to bias with at most 4,096 entries"),
    ("generate", "llama", {"prompt": "x", "logit_bias": [1]}, "logit_bias", "list",
     "a dict from token id to bias with at most 4,096 entries"),
    ("generate", "llama", {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias['5']", "101",
     "a number from -100 to 100"),
    ("generate", "llama", {"prompt": "x", "logit_bias": {5: -101}}, "logit_bias[5]", "-101",
     "a number from -100 to 100"),
    ("generate", "llama", {"prompt": "x", "logprobs": 21}, "logprobs", "21", "True, False, or an integer from 0 to 20"),
    ("generate", "llama", {"prompt": "x", "top_logprobs": 21}, "top_logprobs", "21", "an integer from 0 to 20"),
    ("generate", "llama", {"prompt": "x", "top_logprobs": 1, "logprobs": False}, "top_logprobs", "1",
     "0 or None if logprobs is False", "Set logprobs=True, or omit it"),
    ("chat", "llama", {"messages": [{"role": "user", "content": "x"}], "template_options": {1: 2}}, "template_options",
     "dict", "a dict of names and plain values"),
    ("vision", "llava", {"images": IMAGE, "prompt": ""}, "prompt", "''", "a text of at least 1 character"),
    ("vision", "llava", {"images": [], "prompt": "x"}, "images", "an empty list", "an image or a list of images",
     "For text without images use mpool.chat or mpool.generate"),
    ("vision", "llava", {"images": IMAGE, "prompt": "x", "allow_urls": 1}, "allow_urls", "1", "True or False"),
    ("describe_image", "llava", {"path": 5}, "path", "5", "a path",
     "mpool.vision accepts bytes, arrays and PIL images"),
    ("describe_url", "llava", {"url": "a/b"}, "url", "'a/b'", "an http or https URL",
     "mpool.describe_image accepts a path"),
    # images
    ("generate_image", "flux", {"prompt": 5}, "prompt", "5", "a str"),
    ("generate_image", "flux", {"prompt": ["x"]}, "prompt", "list", "a str", ONE_IMAGE),
    ("generate_image", "flux", {"prompt": "x", "negative_prompt": "y"}, "negative_prompt", "'y'",
     "None, because this model does not support negative prompts"),
    ("generate_image", "sd3", {"prompt": "x", "negative_prompt": 5}, "negative_prompt", "5", "a str"),
    ("generate_image", "sd3", {"prompt": "x", "negative_prompt": "x" * 1_000_001}, "negative_prompt",
     "1,000,001 characters", None),
    *(("generate_image", "flux", {"prompt": "x", name: value}, name, repr(value), f"an integer from {low} to {high:,}")
      for name, low, high in (("num_inference_steps", 1, 1000), ("n", 1, 64), ("preview_every", 0, 1000),
                              ("seed", 0, 2**64 - 1), ("width", 1, 8192), ("height", 1, 8192))
      for value in (low - 1, high + 1)),
    *(("generate_image", "flux", {"prompt": "x", "guidance_scale": value}, "guidance_scale", repr(value),
       "a number from 0 to 1000") for value in (-0.5, 1000.5)),
    *(("generate_image", "flux", {"prompt": "x", name: value}, name, repr(value),
       f"a multiple of 8 up to 8192 (the nearest is {near})")
      for name in ("width", "height") for value, near in ((1, 8), (30, 32), (8191, 8192), (33, 32))),
    ("generate_image", "flux", {"prompt": "x", "width": 16, "height": 16, "latents": "x"}, "latents", "'x'",
     "an array of floats of shape (n, channels, height / 8, width / 8)"),
    ("generate_image", "flux", {"prompt": "x", "width": 16, "height": 16, "latents": np.zeros((1, 4, 4))}, "latents",
     "an array of shape (1, 4, 4)", "an array of floats of shape (1, 4, 4, 4) or (1, 4, 16)"),
]


@pytest.fixture(scope="module")
def sd3() -> str:
    """A model for images that takes negative prompts."""
    return "digits-sd3"


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> Callable[[str], Path | str]:
    """Folders or names of models, made when they are needed."""
    return lambda name: request.getfixturevalue(name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[3]}-{row[4]}"[:60])
def test_refused_value(pool: mpool.Pool, models: Callable[[str], Path | str], row: tuple[Any, ...]) -> None:
    """The error names the parameter, the value and the allowed values, in this order."""
    verb, model, arguments, param, got, allowed, hint = (*row, None)[:7]
    with pytest.raises(mpool.InvalidArgument) as caught:
        made = getattr(pool, verb)(**arguments, model=models(model))
        if verb == "embed_iter":
            next(made, None)
    error = caught.value
    assert (error.param, error.got, error.hint) == (param, got, hint)
    assert allowed is None or error.allowed == allowed
