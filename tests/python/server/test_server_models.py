"""``/v1/models`` and ``/v1/models/{id}`` with OpenAI's and Anthropic's clients, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toolmodels as tm

import mpool
from mpool.server import operations
from mpool.server.models import Models
from servers import Raw, ask, serving

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick brown fox"}]


@pytest.fixture(scope="module")
def server(bert: Path, llama: Path, qwen2: Path) -> Iterator[Any]:
    with serving([f"llama={llama}", f"bert={bert}", f"a+b={qwen2}", f"qwen2={qwen2}"]) as made:
        yield made


# ---- models ----------------------------------------------------------------------------------------------------------

def test_openai_client(server: Any) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        listed = list(client.models.list())
        assert [model.id for model in listed] == ["llama", "bert", "a+b", "qwen2"]
        for model in listed:
            assert client.models.retrieve(model.id) == model and model.object == "model"
        assert listed[0].capabilities == ["text_to_text"] and listed[1].capabilities == ["text_embedding"]
        assert client.models.retrieve("llama:latest").id == "llama"
        for name in ("nothing", "org/name", "../llama", "/etc/passwd", "llama/", "%2e%2e/x", "x" * 5000):
            with pytest.raises(openai.NotFoundError) as raised:
                client.models.retrieve(name)
            assert raised.value.code == "model_not_found" and raised.value.type == "invalid_request_error"


def test_ids_with_slashes(server: Any) -> None:
    """An id is the rest of the path, encoded or not."""
    served = server.state.models._served
    served["org/name"] = served["llama"]
    try:
        with Raw(server) as raw:
            plain = raw.request("/v1/models/llama").answer()[2]
            for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
                status, _, data = raw.request(path).answer()
                assert (status, data) == (200, plain)
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            assert client.models.retrieve("org/name").id == "llama"
    finally:
        del served["org/name"]


def test_other_methods_and_paths(server: Any) -> None:
    with Raw(server) as raw:
        status, headers, data = raw.request("/v1/models/llama", method="POST").answer()
        assert status == 405 and headers["allow"] == "GET, HEAD"
        assert raw.request("/v1/models/").answer()[0] == 404 == raw.request("/v1/model/llama").answer()[0]


def test_anthropic_client(server: Any) -> None:
    """Pages of the models that can chat, in Anthropic's format."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        listed = list(client.models.list())
        assert [model.id for model in listed] == ["llama", "a+b", "qwen2"]
        first = listed[0]
        assert (first.type, first.display_name, first.lifecycle) == ("model", "llama", "active")
        assert first.max_input_tokens == server.state.pool.get("llama").context_length
        assert abs(first.created_at.timestamp() - server.state.models._served["llama"].since) < 1
        assert client.models.retrieve("llama") == first
        assert [model.id for model in client.models.list(limit=1)] == ["llama", "a+b", "qwen2"]  # follows the pages
        page = client.models.list(limit=2)
        assert ([model.id for model in page.data], page.has_more, page.first_id, page.last_id) == \
            (["llama", "a+b"], True, "llama", "a+b")
        page = client.models.list(limit=2, after_id="a+b")
        assert ([model.id for model in page.data], page.has_more) == (["qwen2"], False)
        page = client.models.list(limit=1, before_id="qwen2")
        assert ([model.id for model in page.data], page.has_more) == (["a+b"], True)
        page = client.models.list(after_id="qwen2")
        assert (page.data, page.first_id, page.last_id) == ([], None, None)
        with pytest.raises(anthropic.NotFoundError) as raised:
            client.models.retrieve("org/name")
        assert raised.value.type == "not_found_error"
        for query in ({"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"after_id": "bert"}, {"before_id": "none"}):
            with pytest.raises(anthropic.BadRequestError, match=f"`{next(iter(query))}`") as raised:
                client.models.list(**query)
            assert raised.value.type == "invalid_request_error"


# ---- tokens ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["llama", "bert"])
def test_tokenize_and_detokenize(server: Any, name: str) -> None:
    model = server.state.pool.get(name)
    for text in ("The quick brown fox", "äöü €", "", "</s><|im_start|>"):
        for special in (None, True, False):
            ids = model.tokenize(text, add_special=special is not False)
            status, found = ask(server, "/tokenize", {"model": name, "prompt": text, "add_special_tokens": special,
                                                      "return_token_strs": True})
            assert status == 200, found
            assert found == {"count": len(ids), "max_model_len": model.context_length, "tokens": ids,
                             "token_strs": [one.decode(errors="replace") for one in map(model.tokenizer.token_bytes,
                                                                                        ids)]}
            status, back = ask(server, "/detokenize", {"model": name, "tokens": ids})
            assert (status, back) == (200, {"prompt": model.detokenize(ids, skip_special=False)})
    assert ask(server, "/tokenize", {"model": name, "prompt": "x"})[1]["token_strs"] is None


def test_tokenize_of_a_conversation(server: Any) -> None:
    """The tokens are those of the prompt of a chat."""
    pool = server.state.pool
    done = pool.chat(CHAT, "llama", max_tokens=1)
    _, found = ask(server, "/tokenize", {"model": "llama", "messages": CHAT})
    assert found["count"] == len(found["tokens"]) == done.usage.prompt_tokens
    plain = pool.detokenize(found["tokens"], "llama", skip_special=False)
    assert plain.endswith("<|im_start|>assistant\n")
    _, less = ask(server, "/tokenize", {"model": "llama", "messages": CHAT, "add_generation_prompt": False})
    assert pool.detokenize(less["tokens"], "llama", skip_special=False) == plain.removesuffix("<|im_start|>assistant\n")
    turns = [*CHAT, {"role": "assistant", "content": "jumps"}]
    _, more = ask(server, "/tokenize", {"model": "llama", "messages": turns, "continue_final_message": True})
    assert pool.detokenize(more["tokens"], "llama", skip_special=False) == plain + "jumps"


def test_tokenize_with_tools_and_template_variables(tmp_path: Path) -> None:
    import chainmodels

    template = tm.HERMES + "{{ extra }}"
    with serving([f"only={chainmodels.save(tmp_path, template, [('a', 'b')], ['a'])}"]) as made:
        body: dict[str, Any] = {"messages": CHAT, "tools": [tm.CLOCK]}  # the only model needs no name
        _, found = ask(made, "/tokenize", body)
        assert found["count"] == made.state.pool.chat(CHAT, "only", tools=[tm.CLOCK], max_tokens=1).usage.prompt_tokens
        _, more = ask(made, "/tokenize", {**body, "chat_template_kwargs": {"extra": "abc"}})
        assert more["count"] == found["count"] + 3
        assert ask(made, "/detokenize", {"tokens": more["tokens"][-3:]})[1] == {"prompt": "abc"}


def test_tokenize_without_a_name(llama: Path, bert: Path, dino: Path) -> None:
    """The model with a tokenizer that the server was started with; without one, the one that requests have used."""
    with serving([f"llama={llama}", f"dino={dino}"]) as made:
        served = made.state.models._served
        wanted = ask(made, "/tokenize", {"model": "llama", "prompt": "w1 w2"})
        served["used"] = made.state.models._served_model("used", made.state.pool.get(bert))  # as a request does
        assert ask(made, "/tokenize", {"prompt": "w1 w2"}) == wanted and wanted[0] == 200
        assert ask(made, "/detokenize", {"tokens": wanted[1]["tokens"]})[0] == 200
        del served["llama"]
        made.state.models._given = ("dino",)
        found = ask(made, "/tokenize", {"prompt": "w1 w2"})
        assert found == ask(made, "/tokenize", {"model": "used", "prompt": "w1 w2"}) and found[0] == 200
        del served["used"]
        status, refused = ask(made, "/tokenize", {"prompt": "w1 w2"})
        assert status == 400 and "serves no model with a tokenizer" in refused["error"]["message"]


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {"prompt": "x"}, "model"), ("/detokenize", {"tokens": [1]}, "model"),
    ("/tokenize", {"model": "nothing", "prompt": "x"}, "model"), ("/tokenize", {"model": "llama"}, "prompt"),
    ("/tokenize", {"model": "llama", "prompt": "x", "messages": CHAT}, "prompt"),
    ("/tokenize", {"model": "llama", "prompt": ["x"]}, "prompt"),
    ("/tokenize", {"model": "llama", "prompt": "x", "tools": [tm.CLOCK]}, "tools"),
    ("/tokenize", {"model": "llama", "messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"model": "llama", "messages": [{"role": "x"}]}, "messages[0].role"),
    ("/tokenize", {"model": "llama", "messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
     "continue_final_message"),
    ("/tokenize", {"model": "llama", "messages": CHAT, "chat_template_kwargs": {"add_generation_prompt": False}},
     "chat_template_kwargs"),
    ("/detokenize", {"model": "llama", "tokens": "x"}, "tokens"), ("/detokenize", {"model": "llama"}, "tokens"),
    ("/detokenize", {"model": "llama", "tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"model": "llama", "tokens": [1, 1 << 30]}, "tokens[1]"),
    ("/detokenize", {"model": "llama", "tokens": [1.5]}, "tokens[0]"),
    ("/detokenize", {"model": "llama", "tokens": [True]}, "tokens[0]")], ids=str)
def test_invalid_fields_are_named(server: Any, path: str, body: dict[str, Any], param: str) -> None:
    status, found = ask(server, path, body)
    assert status == (404 if body.get("model") == "nothing" else 400) and found["error"]["param"] == param, found
    assert body.get("model") == "nothing" or f"`{param}`" in found["error"]["message"]


@pytest.mark.parametrize(("path", "body", "param", "text"), [
    ("/v1/embeddings", {"input": "a", "dimensions": 5000}, "dimensions", "`dimensions`"),
    ("/v1/embeddings", {"input": "a b " * 90, "truncate": False}, "input", "`input` has"),
    ("/v1/embeddings", {"input": ["a", "a b " * 90], "truncate": False}, "input", "`input[1]` has"),
    ("/v1/embeddings", {"input": [[1, 1 << 30]], "allow_token_ids": True}, "input", "`input[0][1]`"),
    ("/v1/embeddings", {"input": [[1]]}, "input", "`input` must be texts"),
    ("/v1/embeddings", {"input": "a", "task": "separation"}, "task", "`task`"),
    ("/v1/multi-vector", {"input": ["a", "a b " * 90], "truncate": False}, "input", "`input[1]` has"),
    ("/pooling", {"input": "a", "task": "embed", "dimensions": 5000}, "dimensions", "`dimensions`"),
    ("/v1/completions", {"model": "llama", "prompt": [1 << 30]}, "prompt", "`prompt[0]`"),
    ("/api/embed", {"input": ["a", "a b " * 90], "truncate": False}, None, "`input[1]` has")])
def test_errors_of_the_library_name_the_field(server: Any, path: str, body: dict[str, Any], param: str | None,
                                              text: str) -> None:
    """The field of the client, and not the parameter of the library."""
    status, found = ask(server, path, {"model": "bert", **body})
    error = found["error"]
    assert status == 400
    if param is not None:
        assert error["param"] == param
        error = error["message"]
    assert text in error, found


# ---- sizes of responses ----------------------------------------------------------------------------------------------

def test_detokenize_refuses_large_responses(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is known before the tokens become text: a small request may name long tokens a million times."""
    model, body = server.state.pool.get("llama"), {"model": "llama", "tokens": [7] * 100}
    text = model.detokenize(body["tokens"], skip_special=False)
    tokenizer = model.tokenizer
    assert len(text) <= tokenizer.text_bytes(body["tokens"], skip_special=False) <= len(text) + 1
    monkeypatch.setattr(operations, "MAX_RESPONSE", len(text) + 100)
    assert ask(server, "/detokenize", body) == (200, {"prompt": text})
    monkeypatch.setattr(operations, "MAX_RESPONSE", len(text) + 1)  # the JSON around the text counts, too
    assert ask(server, "/detokenize", body)[0] == 413
    monkeypatch.setattr(operations, "MAX_RESPONSE", len(text) - 10)
    monkeypatch.setattr(mpool.Model, "detokenize", lambda *_, **__: pytest.fail("the size was not checked before"))
    status, found = ask(server, "/detokenize", body)
    assert (status, found["error"]["code"], found["error"]["param"]) == (413, "request_too_large", "tokens")
    assert f"at most {len(text) - 10:,} are allowed" in found["error"]["message"]


def test_tokenize_refuses_large_responses(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown character may become a token of 4,096 bytes."""
    monkeypatch.setattr(operations, "MAX_RESPONSE", 1000)
    body = {"model": "llama", "prompt": "a b c d e f " * 10, "return_token_strs": True}
    assert ask(server, "/tokenize", {**body, "return_token_strs": False, "prompt": "a"})[0] == 200
    monkeypatch.setattr(mpool.tokenizers.Tokenizer, "token_bytes", lambda *_: pytest.fail("the size was not checked"))
    status, found = ask(server, "/tokenize", body)
    assert (status, found["error"]["code"], found["error"]["param"]) == (413, "request_too_large", "prompt")


# ---- names that the command gives ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["org//name", "org/../name", "org/", "a b", "-a", "x" * 129, ""])
def test_names_that_models_cannot_have(bert: Path, name: str) -> None:
    """The error is about the name, and not about a reference of that form."""
    with mpool.Pool() as pool, pytest.raises(mpool.InvalidArgument, match="name in NAME=MODEL must be 1 to 128"):
        Models(pool, [f"{name}={bert}"])


def test_paths_may_have_an_equals_sign(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b=c").symlink_to(bert)
    with mpool.Pool() as pool:
        assert Models(pool, ["mine=a b=c"]).names() == ["mine"]
        for path in ("a b=c", "./x=y"):
            with pytest.raises(mpool.InvalidArgument, match="no valid model name can be derived"):
                Models(pool, [path])
