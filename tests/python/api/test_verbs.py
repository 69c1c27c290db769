"""Features that follow from the single definition of each verb: rerank jobs, token ids as inputs, one mapping of queue
capacities, and agreement of server fields and command-line options with the verbs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rerankers import make_reranker
from tokenclassifiers import make_token_classifier

import mpool
from mpool.tasks import options, verbs


@pytest.fixture(scope="module")
def pool() -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        yield pool


def test_token_ids_can_be_embedded(pool: mpool.Pool, bert: Path) -> None:
    texts = ["hello world", "a b c"]
    ids = [pool.tokenize(text, bert) for text in texts]
    want = pool.embed(texts, bert)
    assert np.array_equal(pool.embed(ids, bert), want)
    assert np.array_equal(pool.get(bert).embed(ids), want)
    assert np.array_equal(pool.submit("text_embedding", inputs=ids, model=bert).result(60), want)
    assert np.array_equal(asyncio.run(mpool.aio.embed(ids, bert, pool=pool)), want)
    assert np.array_equal(np.stack(list(pool.embed_iter(ids, bert))), want)
    with pytest.raises(mpool.InvalidArgument, match=r"inputs\[1\]\[0\]"):
        pool.embed([ids[0], [10**9]], bert)


#: Fields that only the protocols have, or that they spell in their own way.
PROTOCOL = {"model", "input", "messages", "prompt", "query", "documents", "stream", "stream_options", "user"}


def test_server_request_fields_are_options_of_verbs() -> None:
    structs = pytest.importorskip("mpool.server.openai.structs")
    for struct, verb, own in (
            (structs.EmbeddingsRequest, verbs.EMBED, {
                "encoding_format", "embedding_type", "late_chunking", "normalized", "return_multivector",
                "add_special_tokens", "add_generation_prompt", "continue_final_message"}),
            (structs.RerankRequest, verbs.RERANK, {"top_n", "return_documents"})):
        fields = set(struct.__struct_fields__) - PROTOCOL - own
        assert fields <= set(verb.names), fields - set(verb.names)


@pytest.mark.parametrize("command", ["embed", "embed-image", "generate", "chat", "vision"])
def test_command_line_choices_and_defaults_match_the_options(command: str) -> None:
    import argparse

    from mpool.cli.parser import make_parser

    commands = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    verb = verbs.VERBS[command.replace("-", "_")]
    fields = {field.name: field for field in options.fields(verb.options)}
    seen = 0
    for action in commands.choices[command]._actions:
        field = fields.get(action.dest)
        if field is None:
            continue
        seen += 1
        if action.choices is not None:
            assert tuple(action.choices) == tuple(one for one in field.metadata["choices"] if one is not None)
        if action.default not in (argparse.SUPPRESS, None) and not isinstance(action.default, bool):
            assert action.default == field.default
    assert seen >= 5


#: Verb -> positional arguments, with names of models of :func:`test_arrays_are_no_options`.
INPUTS: dict[str, tuple[object, ...]] = {
    "embed": (["a cat"], "bert"), "embed_iter": (["a cat"], "bert"), "embed_tokens": (["a cat"], "bert"),
    "embed_sparse": (["a cat"], "bert"), "embed_all": (["a cat"], "bert"), "rerank": ("a", ["b"], "reranker"),
    "classify": (["a"], "classifier"), "classify_tokens": (["a"], "tagger"), "generate": ("a", "llama"),
    "chat": ([{"role": "user", "content": "a"}], "llama"), "embed_image": ([np.zeros((8, 8, 3), np.uint8)],
                                                                            "digits-clip"),
    "vision": (np.zeros((8, 8, 3), np.uint8), "a", "digits-llava"), "generate_image": ("seven", "digits-sd3")}


@pytest.mark.parametrize("name", INPUTS)
def test_arrays_are_no_options(pool: mpool.Pool, name: str, bert: Path, llama: Path, tmp_path: Path) -> None:
    """An array has no truth value and compares its elements: options that are strings are checked by their type."""
    folders = {"bert": bert, "llama": llama}
    *inputs, model = INPUTS[name]
    if model in ("reranker", "classifier"):
        folders[model] = make_reranker(tmp_path / "model", "bert", 1 if model == "reranker" else 3)
    elif model == "tagger":
        folders[model] = make_token_classifier(tmp_path / "model", "bert")
    for option in verbs.VERBS[name].names:
        few = {"max_tokens": 1} if "max_tokens" in verbs.VERBS[name].names else {}
        with contextlib.suppress(mpool.MpoolError):
            found = getattr(pool, name)(*inputs, folders.get(str(model), model), **few | {option: np.array([1, 2])})
            assert name != "embed_iter" or list(found)
