"""Options under the names of other libraries: the error names the option of mpool, or says what to do."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool

TEXTS = ["one text", "another"]


@pytest.mark.parametrize("verb, name, own", [
    ("embed", "normalize_embeddings", "normalize"), ("embed", "truncate_dim", "dimensions"),
    ("embed", "show_progress_bar", "progress"), ("embed_sparse", "max_active_dims", "max_active"),
    ("rerank", "top_n", "top_k"), ("classify_tokens", "aggregation_strategy", "aggregation"),
    ("generate", "max_new_tokens", "max_tokens"), ("chat", "num_predict", "max_tokens"),
    ("vision", "max_completion_tokens", "max_tokens"), ("generate", "repeat_penalty", "repetition_penalty"),
    ("generate_image", "steps", "num_inference_steps"), ("generate_image", "cfg_scale", "guidance_scale"),
    ("generate_image", "num_images_per_prompt", "n"), ("get", "key", "model"), ("load", "ref", "model"),
    ("load", "alias", "name"), ("unload", "alias", "model"), ("register", "key", "name"), ("register", "ref", "model"),
    ("swap", "key", "model"), ("swap", "ref", "new"), ("swap", "source", "new"), ("load", "draft_model", "draft"),
    ("describe_image", "prompt", "query"), ("describe_image", "question", "query"), ("describe_image", "image", "path"),
    ("describe_image", "images", "path"), ("describe_url", "prompt", "query"), ("describe_url", "image_url", "url"),
    ("generate", "stop_sequences", "stop"), ("chat", "enable_thinking", "template_options"),
])
def test_other_names_of_an_option_name_it(pool: mpool.Pool, verb: str, name: str, own: str) -> None:
    """One option has one name. The error of another name names it, in all forms of a function."""
    for call in (getattr(pool, verb), getattr(mpool, verb)):
        values = ["x"] * sum(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD and one.name != own
                             for one in inspect.signature(call).parameters.values())
        with pytest.raises(TypeError, match=f"`{name}` is not an option of {verb}; use `{own}`") as caught:
            call(*values, **{name: 1})
        assert isinstance(caught.value, mpool.InvalidArgument) and caught.value.param == name


@pytest.mark.parametrize("name, advice", [
    ("device", "on the CPU"), ("convert_to_tensor", "torch.from_numpy"), ("batch_size", "leave it out"),
    ("trust_remote_code", "no code of model files"), ("n_threads", "PoolConfig"), ("num_ctx", "`context_length`"),
    ("quantization", "mpool quantize"), ("lora_path", "adapters="), ("options", "an argument of its own"),
    ("output", "embed_sparse"),
])
def test_other_names_say_what_to_do(pool: mpool.Pool, bert: Path, name: str, advice: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=f"`{name}` is not an option of embed; .*{advice}"):
        pool.embed(TEXTS, bert, **{name: 1})


@pytest.mark.parametrize("call, of", [
    (lambda options: mpool.Pool(**options), "Pool"), (lambda options: mpool.PoolConfig(**options), "PoolConfig"),
    (lambda options: mpool.load("x", **options), "load"),
    (lambda options: mpool.register("x", "y", **options), "register"),
])
def test_unknown_options_of_pools_and_loads(call: Any, of: str) -> None:
    """The error is not a TypeError, and says what to do or names the nearest option."""
    with pytest.raises(mpool.InvalidArgument, match=f"`n_ctx` is not an option of {of}; the context is the model's"):
        call({"n_ctx": 4096})
    with pytest.raises(mpool.InvalidArgument, match=f"`colour` is not an option of {of}"):
        call({"colour": 1})


def test_configurations_are_still_copied_and_pickled() -> None:
    config = mpool.PoolConfig(threads=1, keep_alive="10m")
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


#: Call in the habit of another library -> what the error names.
CALLS: list[tuple[Any, str]] = [
    (lambda: mpool.embed(sentences=TEXTS), "`sentences` is not an option of embed; use `inputs`"),
    (lambda: mpool.embed(), r"missing the argument 'inputs'. Call embed\(inputs, model, ...\)"),
    (lambda: mpool.embed("x", "y", "z"), "takes 2 positional arguments, got 3. Call embed.*pass all options by name"),
    (lambda: mpool.embed("x", inputs="y"), "got multiple values for argument 'inputs'"),
    (lambda: mpool.embed("all-minilm", "x"), r"The model is the second argument: embed\(inputs, 'all-minilm'\)"),
    (lambda: mpool.chat("qwen3:0.6b", [{}]), r"The model is the second argument: chat\(messages, 'qwen3:0.6b'\)"),
    (lambda: mpool.rerank([("q", "d"), ("q", "e")]), r"rerank\(query, \[document, ...\]\).*classify\(pairs, model\)"),
    (lambda: mpool.semantic_search([[1.0]], corpus_embeddings=[[1.0]]), "use `corpus`"),
    (lambda: mpool.search.community_detection([[1.0]], min_size=2), "did you mean `min_community_size`"),
    (lambda: mpool.describe_image("https://a.example/b.png"), "got 'https://a.*mpool.describe_url accepts a URL"),
    (lambda: mpool.similarity([1.0]), r"Call similarity\(a, b, ...\)"),
    (lambda: mpool.generate("x", num_beams=2), "no beam search: leave it out"),
    (lambda: mpool.load("x", rebellion=1), "`rebellion` is not an option of load. Options: model"),
    (lambda: mpool.PoolConfig(max_workers=2), "use `max_workers_per_model`"),
    (lambda: mpool.ps(1), "takes 0 positional arguments"),
    (lambda: mpool.aio.embed(sentences=TEXTS), "use `inputs`"),
    (lambda: mpool.get("all-MiniLM-L6-v2").embed("x", model="y"), r"call mpool.embed\(...\)"),
]


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_calls_in_the_habit_of_other_libraries_name_what_to_use(at: int) -> None:
    """A wrong call is an error of mpool, and a TypeError where Python raises one."""
    call, words = CALLS[at]
    with pytest.raises(mpool.MpoolError, match=words) as caught:
        call()
    assert isinstance(caught.value, (TypeError, mpool.InvalidArgument, mpool.UnknownModel))


def test_a_type_error_inside_a_function_stays_one() -> None:
    """Only arguments that do not match the parameters become errors of mpool."""
    from mpool.host.resources import typed

    @typed
    def outer(a: int) -> None:
        inner()  # type: ignore[call-arg]

    def inner(b: int) -> None: ...

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'") as caught:
        outer(1)
    assert not isinstance(caught.value, mpool.MpoolError)


def test_attributes_of_results_and_models_say_what_to_use(pool: mpool.Pool, llama: Path) -> None:
    model: Any = pool.get(llama)
    completion: Any = model.generate("One", max_tokens=2)
    stream: Any = model.generate("One", max_tokens=2, stream=True)
    cases = [(model, "encode", r"model\.embed"), (completion, "content", "use `text`"), (stream, "text", "result()"),
             (completion, "done_reason", "`finish_reason`"), (completion.choices[0], "message", "use `text`"),
             (next(iter(stream)), "delta", "use `text`")]
    for value, name, use in cases:
        with pytest.raises(AttributeError, match=f"'{type(value).__name__}' object has no attribute '{name}'; .*{use}"):
            getattr(value, name)
        with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
            value.nothing
    with pytest.raises(TypeError, match="is not a dict: use its attributes"):
        completion["choices"]
    with pytest.raises(TypeError, match="not iterable"):
        list(completion)
    assert pickle.loads(pickle.dumps(completion)) == copy.deepcopy(completion) == completion
    assert pickle.loads(pickle.dumps(model)).key == model.key


@pytest.mark.parametrize("module", ["aio", "debug", "errors", "results", "search"])
def test_names_of_other_modules_name_their_module(module: str) -> None:
    for name in getattr(mpool, module).__all__:
        if name not in mpool.__all__ and name[0] != "_":
            with pytest.raises(AttributeError, match=f"no attribute '{name}'; use mpool.{module}.{name}$"):
                getattr(mpool, name)


@pytest.mark.parametrize("name, use", [("check", r"\.check\(\)"), ("ping", r"\.ping\(\)"), ("pools", r"pool\.pools"),
                                       ("history", r"pool\.history\(\)")])
def test_methods_that_are_no_functions_name_their_object(name: str, use: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; use mpool\.get\(model\).*{use}$"):
        getattr(mpool, name)


def test_asynchronous_loads_name_the_option() -> None:
    """``load``, ``unload`` and ``swap`` of ``mpool.aio`` have the options and errors of the functions."""
    for name, values in (("load", ()), ("unload", ()), ("swap", ("x",))):
        own = inspect.signature(getattr(mpool, name)).parameters
        assert {*own, "pool"} == set(inspect.signature(getattr(mpool.aio, name)).parameters)
        with pytest.raises(TypeError, match=f"`ref` is not an option of {name}; use `{'new' if values else 'model'}`"):
            asyncio.run(getattr(mpool.aio, name)(*values, ref="y"))


def test_vectors_are_not_texts() -> None:
    for call in (lambda: mpool.similarity("a", "b"), lambda: mpool.semantic_search("a", ["b"])):
        with pytest.raises(mpool.InvalidArgument, match=r"got text. Embed texts first: mpool\.embed\(texts\)"):
            call()


@pytest.mark.sample(3)
@pytest.mark.parametrize("module, missing, package", [
    ("sklearn", "sklearn", "scikit-learn"), ("langchain", "langchain_core", "langchain-core"),
    ("haystack", "haystack", "haystack-ai"), ("chroma", "chromadb", "chromadb"), ("lancedb", "lancedb", "lancedb"),
    ("llama_index", "llama_index", "llama-index-core"), ("ray", "ray", "ray")])
def test_an_integration_without_its_library_says_what_to_install(module: str, missing: str, package: str) -> None:
    code = (f"import sys; sys.modules[{missing!r}] = None\n"
            f"try: from mpool.integrations.{module} import {'EmbedBatches' if module == 'ray' else 'anything'}\n"
            "except ModuleNotFoundError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    extra = module.replace("_", "-")
    assert (package in done.stdout and f"(the extra {extra} of mpool)" in done.stdout
            or f'pip install ".[{extra}]"' in done.stdout), done.stdout + done.stderr
