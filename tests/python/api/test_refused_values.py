"""Values that requests refuse (mpool/tasks): for each check, the error's parameter, value, allowed values and hint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import goldentexts
import mpool

IMAGE = np.zeros((8, 8, 3), np.uint8)
IDS = [101, 102]

#: Verb, model, arguments, and the parameter of the error.
ROWS: list[tuple[str, str, dict[str, Any], str]] = [
    # every request
    *(("embed", "bert", {"inputs": "x", name: value}, name) for name, values in {
        "fail_fast": (1,), "policy": ("fast",), "priority": (5, -1, "top"), "tenant": (0, 2**64, "", True),
        "max_inputs": (0,), "progress": (1,), "dimensions": (0, 33, 8.0, True), "precision": ("int8", "int4"),
        "truncate": (1,), "normalize": (0,), "allow_token_ids": (1,), "prompt_name": ("query",)}.items()
      for value in values),
    # vectors
    *(("embed", "bert", {"inputs": value}, "inputs")
      for value in ({"x"}, iter(["x"]), None, 5, b"x", Path("x"), np.array(5), np.zeros((2, 2)), np.array(IDS),
                    {"a": "x"}, {"a": "x"}.keys(), np.array([IDS]))),
    *(("embed", "bert", {"inputs": value}, "inputs[0]") for value in (IDS, [["a", "b"]])),
    ("embed", "bert", {"inputs": ["x"], "precision": "uint8"}, "precision"),
    ("embed", "bert", {"inputs": "x", "on_error": "null", "precision": "binary"}, "on_error"),
    ("embed", "bert", {"inputs": [[5], "x"]}, "inputs[1]"),
    *(("embed", "prompted", {"inputs": "x", **more}, name) for name, more in (
        ("prompt_name", {"prompt_name": "qeury"}), ("prompt_name", {"prompt_name": "query", "prompt": "x"}),
        ("prompt", {"prompt": "x" * 1_000_001}), ("prompt", {"prompt": 5}))),
    *(("embed_iter", "bert", {"texts": value}, "texts") for value in ("text", 5)),
    *((verb, model, {name: value, "progress": 1}, "progress") for verb, model, name, value in (
        ("embed_iter", "m3", "texts", ["x"]), ("embed_sparse", "m3", "inputs", ["x"]),
        ("embed_tokens", "m3", "inputs", ["x"]), ("embed_all", "m3", "inputs", ["x"]),
        ("embed_image", "dino", "images", [IMAGE]), ("classify", "ranker", "texts", ["x"]),
        ("classify_tokens", "tagger", "texts", ["x"]))),
    *(("embed_iter", "bert", {"texts": [], name: value}, name)
      for name, value in (("batch_size", 0), ("precision", "int8"))),
    ("embed_iter", "m3", {"texts": [], "output": "text"}, "output"),
    *(("embed_iter", "m3", {"texts": [], "output": output, "max_active": 3}, "max_active")
      for output in ("dense", "tokens", "all")),
    *(("embed_iter", "m3", {"texts": [], "output": output, name: value}, name)
      for output in ("sparse", "tokens", "all")
      for name, value in (("dimensions", 4), ("normalize", True), ("precision", "binary"), ("on_error", "null"))),
    *(("embed_sparse", "m3", {"inputs": "x", "max_active": value}, "max_active") for value in (0, -1, 1.5)),
    *(("embed_image", "dino", {"images": IMAGE, name: value}, name) for name, value in (
        ("dimensions", 0), ("dimensions", 49), ("dimensions", 8.0), ("dimensions", True), ("allow_urls", 1))),
    # rankings and labels
    ("rerank", "ranker", {"query": "x", "documents": "y"}, "documents"),
    *(("rerank", "ranker", {"query": "x", "documents": ["y"], name: value}, name) for name, value in (
        ("top_k", 0), ("prompt", "x"), ("prompt_name", "x"), ("function_to_apply", "softmax"))),
    *(("classify", "ranker", {"texts": "x", name: value}, name) for name, value in (
        ("top_k", 0), ("multi_label", True), ("template", "{}?"), ("labels", "a,b"), ("labels", []))),
    ("classify", "ranker", {"texts": [("x", "y")], "labels": ["a"]}, "texts"),
    *(("classify", "ranker", {"texts": [("x", "y"), value]}, "texts[1]") for value in (("x",), "x")),
    ("classify", "ranker", {"texts": "x", "labels": ["a"], "function_to_apply": "none"}, "function_to_apply"),
    ("classify", "ranker", {"texts": "x", "labels": ["a", "b", "a"]}, "labels[2]"),
    *(("classify", "ranker", {"texts": "x", "labels": ["a"], "template": text}, "template")
      for text in ("no", "{} {}", "{} }", "{} {", "x" * 101)),
    *(("classify_tokens", "tagger", {"texts": "x", **more}, name) for name, more in (
        ("aggregation", {"aggregation": "best"}), ("stride", {"stride": -1, "aggregation": "simple"}),
        ("stride", {"stride": 0}), ("truncate", {"stride": 1, "aggregation": "simple", "truncate": False}),
        ("ignore_labels", {"ignore_labels": "O"}), ("ignore_labels", {"ignore_labels": "x" * 101}),
        ("ignore_labels[1]", {"ignore_labels": ["O", 5]}))),
    ("classify", "ranker", {"texts": [("x", "y"), ("x", None)]}, "texts[1][1]"),
    ("classify_tokens", "tagger", {"texts": ["x", None]}, "texts[1]"),
    # text
    *(("generate", "llama", {"prompt": value}, "prompt")
      for value in (5, ["x"], "", [], np.array(5), np.zeros((1, 2)))),
    *(("generate", "llama", {"prompt": "x", name: value}, name) for name, values in {
        "max_tokens": (2.0, True), "seed": (1.0, True), "top_p": (True,), "parse_special": (1,), "stream": (1,),
        "context_length": (1,), "capture": ("file",), "stop": (["a"] * 65, 5), "stop_token_ids": ([1] * 4097, "1"),
        "logit_bias": ({at: 1 for at in range(4097)}, [1]), "logprobs": (21,), "top_logprobs": (21,)}.items()
      for value in values),
    *(("generate", "llama", {"prompt": "x", **more}, name) for name, more in (
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}), ("stop[1]", {"stop": ["a", ""]}),
        ("stop[0]", {"stop": ["é" * 513]}), ("logit_bias['5']", {"logit_bias": {"5": 101}}),
        ("logit_bias[5]", {"logit_bias": {5: -101}}), ("top_logprobs", {"top_logprobs": 1, "logprobs": False}))),
    ("chat", "llama", {"messages": [{"role": "user", "content": "x"}], "template_options": {1: 2}}, "template_options"),
    ("vision", "llava", {"images": IMAGE, "prompt": ""}, "prompt"),
    ("vision", "llava", {"images": [], "prompt": "x"}, "images"),
    ("vision", "llava", {"images": IMAGE, "prompt": "x", "allow_urls": 1}, "allow_urls"),
    ("describe_image", "llava", {"path": 5}, "path"), ("describe_url", "llava", {"url": "a/b"}, "url"),
    # images
    *(("generate_image", "flux", {"prompt": value}, "prompt") for value in (5, ["x"])),
    ("generate_image", "flux", {"prompt": "x", "negative_prompt": "y"}, "negative_prompt"),
    *(("generate_image", "sd3", {"prompt": "x", "negative_prompt": value}, "negative_prompt")
      for value in (5, "x" * 1_000_001)),
    *(("generate_image", "flux", {"prompt": "x", name: value}, name) for name, values in {
        "num_inference_steps": (0, 1001), "n": (0, 65), "preview_every": (-1, 1001), "seed": (-1, 2**64),
        "width": (0, 8193, 1, 30, 8191, 33), "height": (0, 8193, 1, 30, 8191, 33),
        "guidance_scale": (-0.5, 1000.5)}.items() for value in values),
    *(("generate_image", "flux", {"prompt": "x", "width": 16, "height": 16, "latents": value}, "latents")
      for value in ("x", np.zeros((1, 4, 4)))),
]


@pytest.fixture(scope="module")
def sd3() -> str:
    """A model for images that takes negative prompts."""
    return "digits-sd3"


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> Callable[[str], Path | str]:
    """Folders or names of models, made when they are needed."""
    return lambda name: request.getfixturevalue(name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[3]}")
def test_refused_value(pool: mpool.Pool, models: Callable[[str], Path | str], request: pytest.FixtureRequest,
                       row: tuple[str, str, dict[str, Any], str]) -> None:
    """The error names the parameter, the value, the allowed values, and what to do."""
    verb, model, arguments, param = row
    with pytest.raises(mpool.InvalidArgument) as caught:
        made = getattr(pool, verb)(**arguments, model=models(model))
        if verb == "embed_iter":
            next(made, None)
    error = caught.value
    assert error.param == param
    goldentexts.check(request, [error.got, error.allowed, error.hint])
