"""The look-alike of llama-cpp-python's class: its arguments, its results, and that they are those of mpool."""

import inspect
import json
import random
from pathlib import Path
from typing import Any

import chainmodels
import numpy as np
import pytest
import toolmodels

import mpool
from tooldata import WORDS, WRITES
from mpool.integrations.llama_cpp import _CONSTRUCTOR, _UNUSED, Llama, LlamaGrammar, LlamaState

#: Arguments of llama-cpp-python 0.3.36, read from its source.
CONSTRUCTOR = """n_gpu_layers split_mode main_gpu tensor_split vocab_only use_mmap use_mlock kv_overrides seed n_ctx
    n_batch n_ubatch n_threads n_threads_batch rope_scaling_type pooling_type attention_type rope_freq_base
    rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow yarn_orig_ctx logits_all embedding
    offload_kqv flash_attn op_offload swa_full no_perf last_n_tokens_size lora_base lora_scale lora_path numa
    chat_format chat_handler draft_model tokenizer type_k type_v spm_infill verbose""".split()
#: Arguments that would change the result -> their defaults in the same source. -1: unspecified.
DEFAULTS = {**dict.fromkeys(("rope_scaling_type", "pooling_type", "attention_type", "yarn_ext_factor"), -1),
            **dict.fromkeys(("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"), 0),
            **dict.fromkeys(("yarn_attn_factor", "yarn_beta_slow", "lora_scale"), 1), "yarn_beta_fast": 32,
            **dict.fromkeys(("vocab_only", "spm_infill"), False),
            **dict.fromkeys(("tokenizer", "lora_base", "lora_path", "kv_overrides", "chat_format", "chat_handler",
                             "draft_model", "type_k", "type_v"))}
METHODS = {
    "create_completion": """prompt suffix max_tokens=16 temperature=0.8 top_p=0.95 min_p=0.05 typical_p=1.0 logprobs
        echo stop frequency_penalty=0.0 presence_penalty=0.0 repeat_penalty=1.0 top_k=40 stream seed tfs_z=1.0
        mirostat_mode=0 mirostat_tau=5.0 mirostat_eta=0.1 model stopping_criteria logits_processor grammar
        logit_bias""",
    "create_chat_completion": """messages functions function_call tools tool_choice temperature=0.2 top_p=0.95 top_k=40
        min_p=0.05 typical_p=1.0 stream stop seed response_format max_tokens presence_penalty=0.0 frequency_penalty=0.0
        repeat_penalty=1.0 tfs_z=1.0 mirostat_mode=0 mirostat_tau=5.0 mirostat_eta=0.1 model logits_processor grammar
        logit_bias logprobs top_logprobs""",
    "tokenize": "text add_bos special", "detokenize": "tokens prev_tokens special",
    "embed": "input normalize truncate return_count", "create_embedding": "input model"}
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def small(llama: Path) -> Llama:
    return Llama(str(llama), n_gpu_layers=-1, n_threads=2, verbose=False, seed=7)


def test_arguments_are_those_of_the_library() -> None:
    assert {*_CONSTRUCTOR, *_UNUSED, "seed", "n_ctx"} == set(CONSTRUCTOR)
    for name, text in METHODS.items():
        found = list(inspect.signature(getattr(Llama, name)).parameters.values())[1:]
        assert [one.name for one in found] == [word.partition("=")[0] for word in text.split()]
        for one, word in zip(found, text.split()):
            if "=" in word:
                assert one.default == json.loads(word.partition("=")[2]), (name, one.name)


def test_saved_states(llama: Path) -> None:
    """A program that saves a state, completes other prompts and loads the state gets the completion that it got
    before, and the prompt comes from the prefix cache."""
    with mpool.Pool() as pool:
        model = Llama(pool.get(str(llama), "text_to_text"))
        prompt, options = "the quick brown fox jumps over the lazy dog. " * 12, {"max_tokens": 8, "temperature": 0.0}
        model(prompt, max_tokens=1)
        state = model.save_state()
        assert isinstance(state, LlamaState)
        first = model(prompt, **options)
        model("numbers 0 1 2 3", max_tokens=4, temperature=1.0)
        model.reset()
        assert model.load_state(state) is None
        again = model._model.generate(prompt, **options)
        assert again.text == first["choices"][0]["text"] and 0 < again.usage.cached_tokens < again.usage.prompt_tokens


def test_defaults_of_the_library_are_accepted(llama: Path) -> None:
    assert set(DEFAULTS) == set(_CONSTRUCTOR)
    Llama(str(llama), **DEFAULTS).close()
    for name, default in DEFAULTS.items():
        with pytest.raises(mpool.Unsupported, match=f"`{name}` is not available here"):
            Llama(str(llama), **{name: True if default in (None, False) else default + 2})


def test_calls_without_a_seed_differ_and_can_be_reproduced(llama: Path) -> None:
    """The seeds are those that llama-cpp-python draws: Random(last).randint(0, 2**32), from the constructor's on."""
    def texts(seed: int, *calls: dict[str, Any]) -> list[str]:
        made = Llama(str(llama), seed=seed, verbose=False)
        return [made("the quick", max_tokens=12, temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, **one)["choices"][0]
                ["text"] for one in calls]

    first = random.Random(42).randint(0, 2**32)
    second = random.Random(first).randint(0, 2**32)
    found = texts(42, {}, {}, {"seed": 42}, {})
    assert found[0] != found[1] and found[3] == found[0]
    assert found[:2] == texts(1, {"seed": first}, {"seed": second}) == texts(42, {}, {})


def test_completions_are_those_of_mpool(small: Llama, llama: Path) -> None:
    found = small.create_completion("the quick", max_tokens=12, temperature=0.7, top_k=9, seed=3, logprobs=2)
    wanted = mpool.generate("the quick", str(llama), max_tokens=12, temperature=0.7, top_k=9, top_p=0.95, min_p=0.05,
                            seed=3, logprobs=2, parse_special=True)
    assert set(found) == {"id", "object", "created", "model", "choices", "usage"} and found["model"] == str(llama)
    (choice,) = found["choices"]
    assert set(choice) == {"text", "index", "logprobs", "finish_reason"} and found["object"] == "text_completion"
    assert (choice["text"], choice["finish_reason"]) == (wanted.text, wanted.finish_reason)
    assert found["usage"] == {"prompt_tokens": wanted.usage.prompt_tokens, "completion_tokens": 12,
                              "total_tokens": wanted.usage.prompt_tokens + 12}
    assert wanted.logprobs is not None
    assert choice["logprobs"]["token_logprobs"] == [one.logprob for one in wanted.logprobs]
    assert choice["logprobs"]["text_offset"][0] == len("the quick")
    assert all(1 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])  # tokens can have equal texts
    assert max(len(top) for top in choice["logprobs"]["top_logprobs"]) > 1
    assert small("the quick", max_tokens=12, temperature=0.7, top_k=9, seed=3)["choices"][0]["text"] == wanted.text
    echoed = small.create_completion("the quick", max_tokens=2, temperature=0.0, echo=True)["choices"][0]["text"]
    plain = small.create_completion("the quick", max_tokens=2, temperature=0.0)["choices"][0]["text"]
    assert echoed == "the quick" + plain
    ids = small.tokenize(b"the quick")
    assert small.create_completion(ids, max_tokens=2, temperature=0.0)["choices"][0]["text"] == plain


def test_options_have_effects(small: Llama) -> None:
    def text(**options: Any) -> str:
        found = small.create_completion("the", **{"max_tokens": 24, "temperature": 0.0, **options})
        return str(found["choices"][0]["text"])

    plain = text()
    assert text(max_tokens=3) != plain and plain.startswith(text(max_tokens=3))
    first = small.create_completion("the", max_tokens=1, temperature=0.0)["usage"]["completion_tokens"]
    assert first == 1 and text(stop=plain[4:6]) == plain[:plain.index(plain[4:6])]
    (token,) = mpool.generate("the", small._model, max_tokens=1, temperature=0).token_ids
    assert text(logit_bias={token: -100}) != plain
    assert text(repeat_penalty=1.8) != plain and text(presence_penalty=2.0, frequency_penalty=2.0) != plain
    assert text(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=1) != text(
        temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=2)
    for narrow in ({"top_k": 1}, {"top_p": 1e-3}, {"min_p": 1.0}):
        assert text(temperature=5.0, **narrow) == plain
    sampled = []
    for _ in range(2):  # a request without a seed draws the next one from the seed that was set
        small.set_seed(11)
        sampled.append([text(temperature=5.0), text(temperature=5.0)])
    assert sampled[0] == sampled[1] and sampled[0][0] != sampled[0][1]
    small.set_seed(0xFFFFFFFF)
    assert len({text(temperature=5.0) for _ in range(4)}) > 1


def test_streams_add_up(small: Llama) -> None:
    options: dict[str, Any] = {"max_tokens": 15, "temperature": 0.9, "seed": 5}
    whole = small.create_completion("the quick", **options)["choices"][0]
    parts = list(small.create_completion("the quick", stream=True, echo=True, **options))
    assert "".join(part["choices"][0]["text"] for part in parts) == "the quick" + whole["text"]
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == whole["finish_reason"]
    assert all(part["choices"][0]["finish_reason"] is None for part in parts[:-1])
    assert len({part["id"] for part in parts}) == 1
    answer = small.create_chat_completion(MESSAGES, **options)
    deltas = [part["choices"][0] for part in small.create_chat_completion(MESSAGES, stream=True, **options)]
    assert deltas[0]["delta"] == {"role": "assistant"} and deltas[-1]["delta"] == {}
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == answer["choices"][0]["message"]["content"]
    assert deltas[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]
    abandoned = small.create_completion("the quick", stream=True, max_tokens=1000)
    next(abandoned)
    abandoned.close()


def test_chats_are_those_of_mpool(small: Llama, llama: Path) -> None:
    found = small.create_chat_completion(MESSAGES, max_tokens=9, temperature=0.0, logprobs=True, top_logprobs=3)
    wanted = mpool.chat(MESSAGES, str(llama), max_tokens=9, temperature=0)
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text} and found["object"] == "chat.completion"
    assert len(choice["logprobs"]["content"]) == 9 and len(choice["logprobs"]["content"][0]["top_logprobs"]) == 3


def test_without_a_limit_the_context_ends_a_completion(llama: Path) -> None:
    small = Llama(str(llama), n_ctx=40)
    assert small.n_ctx() == 40
    for limit in (None, 0, -1):
        done = small.create_completion("the quick", max_tokens=limit, temperature=0.0, logit_bias={
            small.token_eos(): -100} if small.token_eos() >= 0 else None)
        assert done["usage"]["total_tokens"] in (39, 40, 41) and done["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no"', LlamaGrammar.from_string('root ::= "yes" | "no"')])
def test_grammars(small: Llama, grammar: Any, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    assert small.create_completion("the", grammar=grammar, max_tokens=20)["choices"][0]["text"] in ("yes", "no")
    (tmp_path / "g").write_text('root ::= "x"')
    assert small.create_completion("the", grammar=LlamaGrammar.from_file(tmp_path / "g"))["choices"][0]["text"] == "x"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    for options in ({"grammar": LlamaGrammar.from_json_schema(json.dumps(schema))},
                    {"response_format": {"type": "json_object", "schema": schema}}):
        answer = small.create_chat_completion(MESSAGES, max_tokens=40, **options)
        assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}


def test_tokens(small: Llama, llama: Path) -> None:
    text = "the quick brown fox"
    assert small.tokenize(text.encode()) == mpool.tokenize(text, str(llama))
    assert small.tokenize(text.encode(), add_bos=False) == mpool.tokenize(text, str(llama), add_special=False)
    ids = small.tokenize(text.encode(), add_bos=False)
    assert small.detokenize(ids) == text.encode()
    assert small.detokenize(ids[2:], prev_tokens=ids[:2]) == text.encode()[len(small.detokenize(ids[:2])):]
    assert small.token_eos() in small._model.description.generation.eog_token_ids  # type: ignore[union-attr]


def test_streams_have_the_log_probabilities_of_all_tokens(small: Llama) -> None:
    """Also of tokens that a stop string removed; offsets count the characters of tokens, as without a stream."""
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for seed in range(8):
        options["seed"] = seed
        stop = small.create_completion("hello", **options)["choices"][0]["text"][:1]
        written: dict[str, Any] = {"prompt": "hello", "logprobs": 1, "stop": [stop] if seed % 2 else [], **options}
        whole = small.create_completion(**written)["choices"][0]["logprobs"]
        parts = [one["choices"][0]["logprobs"] or {} for one in small.create_completion(**written, stream=True)]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            assert [value for part in parts for value in part.get(name, ())] == whole[name]
        talk = {"messages": MESSAGES, "logprobs": True, **options}
        stop = small.create_chat_completion(**talk)["choices"][0]["message"]["content"][:1]
        talk["stop"] = [stop]
        done = small.create_chat_completion(**talk)["choices"][0]["logprobs"]["content"]
        events = [one["choices"][0]["logprobs"] or {} for one in small.create_chat_completion(**talk, stream=True)]
        assert done and [token for event in events for token in event.get("content", ())] == done


def test_the_vocabulary_is_that_of_the_file(small: Llama, llama: Path) -> None:
    assert small.n_vocab() == json.loads((llama / "config.json").read_text())["vocab_size"]


def test_vectors(bert: Path) -> None:
    model = Llama(str(bert), embedding=True)
    texts = ["one", "two three"]
    assert np.allclose(model.embed(texts), mpool.embed(texts, str(bert), normalize=False))
    assert np.allclose(np.linalg.norm(model.embed("one", normalize=True)), 1.0)
    found = model.create_embedding(texts)
    assert [row["embedding"] for row in found["data"]] == model.embed(texts) and found["object"] == "list"
    assert found["usage"]["prompt_tokens"] == sum(mpool.count_tokens(text, str(bert)) for text in texts)
    assert model.n_embd() == 32 and model.embed("one", return_count=True)[1] == mpool.count_tokens("one", str(bert))
    with pytest.raises(mpool.WrongCapability):
        model("the")


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """A model that writes "mid" after the token for the middle, and then begins another file."""
    chains = [("<fim_middle>", "m"), ("m", "i"), ("i", "d"), ("d", "<|file_sep|>"), ("<|file_sep|>", "x"), ("x", "x")]
    tokens = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|file_sep|>"]
    return Llama(str(chainmodels.save(tmp_path_factory.mktemp("coder"), "{{ messages[0].content }}", chains, tokens)))


def test_a_suffix_fills_in_the_middle(coder: Llama) -> None:
    """The prompt has three tokens for the parts and one per letter; a token that begins another file ends the text."""
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    found = coder("ab", suffix="cde", **greedy)
    assert found["choices"][0]["text"] == "mid" and found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["prompt_tokens"] == 3 + 2 + 3
    assert coder.tokenize(b"ab", add_bos=False) != coder.tokenize(b"cde", add_bos=False)
    assert coder(coder.tokenize(b"ab", add_bos=False), suffix="cde", **greedy)["usage"] == found["usage"]
    assert coder("ab", suffix="cde", echo=True, **greedy)["choices"][0]["text"] == "abmid"
    assert "".join(part["choices"][0]["text"] for part in coder("ab", suffix="cde", stream=True, **greedy)) == "mid"
    assert coder("ab", suffix="", **greedy)["usage"]["prompt_tokens"] == 3 + 2
    assert coder("ab", **greedy)["usage"]["prompt_tokens"] == 2


def test_names_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Llama, "__init__", lambda self, path, **options: asked.append(path))
    for name in (None, "*q4_k_m.gguf", "*-Q8_0.gguf", "model-q4_0.gguf"):
        Llama.from_pretrained("org/name", filename=name)
    assert asked == ["org/name", "org/name:Q4_K_M", "org/name:Q8_0", "hf://org/name/model-q4_0.gguf"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_thread'"):
        monkeypatch.undo()
        Llama("x", n_thread=1)


def test_a_limit_of_tool_calls_is_named_beside_the_finish_reason(tmp_path: Path) -> None:
    """``tool_calls`` stays: programs run the calls of a choice because of it. LangChain's messages have both, too."""
    folder = chainmodels.save(tmp_path, toolmodels.HERMES, [*WRITES[:-1], ("</tool_call>", "<tool_call>")], WORDS)
    llama, options = Llama(str(folder), verbose=False), {"tools": [toolmodels.CLOCK], "temperature": 0}
    (choice,) = llama.create_chat_completion(MESSAGES, **options)["choices"]
    *_, last = llama.create_chat_completion(MESSAGES, stream=True, **options)
    for one in (choice, last["choices"][0]):
        assert (one["finish_reason"], one["stop_reason"]) == ("tool_calls", "repeated_tool_calls")
    assert len(choice["message"]["tool_calls"]) == 8
    langchain = pytest.importorskip("mpool.integrations.langchain", exc_type=ImportError)
    message = langchain.ChatMpool(model=str(folder), options=options).invoke("the quick brown fox")
    assert len(message.tool_calls) == 8 and message.response_metadata["finish_reason"] == "tool_calls"
    assert message.response_metadata["stop_reason"] == "repeated_tool_calls"
