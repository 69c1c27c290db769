"""Settings that only a model card states: the prompt of Qwen3-Reranker, compared with its published usage with
transformers, and the prompt for queries of gte-Qwen, on seeded models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.errors import FormatError
from mpool.models import describing
from mpool.models.sources import Resolved

from paritymodels import randomise, torch, transformers
from retrievalmodels import TEXTS, masked_model, write_tokenizer

QUERY = "Where did the cat sit?"
DOCUMENTS = ["A cat sat on the mat.", "Numbers 0 1 2 3", "no", "日本語", 'a "quoted" \\ line\nand {{ braces }}']
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def tokens(folder: Path, words: tuple[str, ...] = ("ye", "yes", "no")) -> None:
    """Write a tokenizer of single bytes, three merges, the ChatML tokens, and a chat template for conversations."""
    import tokenizers

    vocabulary = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *words]
    merges = [("y", "e"), ("ye", "s"), ("n", "o")] if len(words) == 3 else []
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(vocabulary)}, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 900, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model as Qwen published its rerankers: without modules of sentence-transformers."""
    folder = tmp_path_factory.mktemp("reranker")
    tokens(folder)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=270, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=97,
        max_position_embeddings=900, num_hidden_layers=2, eos_token_id=261, tie_word_embeddings=True)).eval()
    randomise(model, 3)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path, repository: str, key: str | None = None) -> None:
    """Resolve every reference to a folder that the hub would have served."""
    monkeypatch.setattr(describing, "resolve",
                        lambda *args, **options: Resolved(repository, "folder", str(folder), "hub", key=key))


def published(folder: Path, instruction: str) -> tuple[np.ndarray, np.ndarray]:
    """The scores by the steps of the model card: prompt, logits of the last token, softmax over "no" and "yes". Also
    returns the differences of the logits."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = tokenizer.convert_tokens_to_ids(["no", "yes"])
    system = ("Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
              'Note that the answer can only be "yes" or "no".')
    scores, differences = [], []
    for document in DOCUMENTS:
        text = (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
                f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
                "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits[0, -1]
        scores.append(float(logits[answers].softmax(-1)[1]))
        differences.append(float(logits[answers[1]] - logits[answers[0]]))
    return np.array(scores), np.array(differences)


@pytest.mark.parametrize(("repository", "model", "key"), [
    ("Qwen/Qwen3-Reranker-0.6B", "Qwen3-Reranker-0.6B", "Qwen3-Reranker-0.6B"),
    ("Qwen/Qwen3-Reranker-4B", "Qwen/Qwen3-Reranker-4B", None),
    ("Qwen/Qwen3-Reranker-8B", "Qwen/Qwen3-Reranker-8B", None)])
def test_rerankers(monkeypatch: pytest.MonkeyPatch, reranker: Path, repository: str, model: str,
                   key: str | None) -> None:
    serve(monkeypatch, reranker, repository, key)
    with mpool.Pool() as pool:
        wanted, logits = published(reranker, INSTRUCTION)
        assert np.ptp(logits) > 0.5
        scores = pool.rerank(QUERY, DOCUMENTS, model, compute="float32").scores
        assert np.abs(scores - wanted).max() <= 1e-5
        options: Any = dict(compute="float32", function_to_apply="none")
        found = np.array(pool.rerank(QUERY, DOCUMENTS, model, **options).scores)
        assert np.abs(found - logits).max() <= 1e-4 * np.abs(logits).max()
        other = np.array(pool.rerank(QUERY, DOCUMENTS, model, prompt="Find the cat.", **options).scores)
        wanted = published(reranker, "Find the cat.")[1]
        assert np.abs(other - wanted).max() <= 1e-4 * np.abs(wanted).max()
        assert np.abs(other - logits).max() > 0.1
        settings = pool.get(model).description.embedding
        assert settings is not None and settings.max_tokens == 900


def test_other_repositories_are_language_models(monkeypatch: pytest.MonkeyPatch, reranker: Path) -> None:
    serve(monkeypatch, reranker, "someone/Qwen3-Reranker-0.6B-copy")
    with mpool.Pool() as pool:
        assert pool.get("someone/Qwen3-Reranker-0.6B-copy").capability == "text_to_text"
    with mpool.Pool() as pool:
        assert pool.get(str(reranker)).capability == "text_to_text"


def test_settings_of_the_folder_take_precedence(monkeypatch: pytest.MonkeyPatch, reranker: Path,
                                                tmp_path: Path) -> None:
    cross_encoder = pytest.importorskip("sentence_transformers").CrossEncoder
    text = "{{ (messages | selectattr('role', 'eq', '%s') | map(attribute='content') | first) }}"
    template = f"<|im_start|>{text % 'query'} ? {text % 'document'}<|im_end|>"
    saved = cross_encoder(str(reranker), device="cpu")
    saved.tokenizer.chat_template = template
    saved.save_pretrained(str(tmp_path / "saved"))
    serve(monkeypatch, tmp_path / "saved", "Qwen/Qwen3-Reranker-0.6B")
    with mpool.Pool() as pool:
        found = pool.get("Qwen/Qwen3-Reranker-4B").description.chat_template
        assert found is not None and "?" in found and "Judge" not in found


def test_tokenizers_without_the_answers(monkeypatch: pytest.MonkeyPatch, reranker: Path, tmp_path: Path) -> None:
    for path in reranker.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokens(tmp_path, ("ye",))
    serve(monkeypatch, tmp_path, "Qwen/Qwen3-Reranker-4B")
    with mpool.Pool() as pool, pytest.raises(FormatError, match=r"model\.vocab\.yes"):
        pool.rerank(QUERY, DOCUMENTS, "Qwen/Qwen3-Reranker-4B")


@pytest.mark.parametrize("name", ["Alibaba-NLP/gte-Qwen2-1.5B-instruct", "Alibaba-NLP/gte-Qwen2-7B-instruct",
                                  "Alibaba-NLP/gte-Qwen1.5-7B-instruct"])
def test_prompts_of_gte_qwen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    st = pytest.importorskip("sentence_transformers")
    from encodermodels import write_modules

    masked_model("bert").bert.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    write_modules(tmp_path, "mean")
    reference = st.SentenceTransformer(str(tmp_path), device="cpu")
    serve(monkeypatch, tmp_path, name, "gte-Qwen2-1.5B-instruct" if "2-1.5B" in name else None)
    with mpool.Pool() as pool:
        queries = pool.embed(TEXTS, name, task="query", compute="float32")
        documents = pool.embed(TEXTS, name, task="document", compute="float32")
    prompt = f"Instruct: {INSTRUCTION}\nQuery: "
    assert np.abs(queries - reference.encode(TEXTS, prompt=prompt)).max() <= 1e-4 * np.abs(queries).max()
    assert np.abs(documents - reference.encode(TEXTS)).max() <= 1e-4 * np.abs(documents).max()
    assert np.abs(queries - documents).max() > 1e-2
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "w7 "}}))
    with mpool.Pool() as pool:
        found = pool.get(name).description.embedding
        assert found is not None and dict(found.prompts) == {"query": "w7 "}


def test_names_of_the_catalogue() -> None:
    """Rows of the catalogue whose model has published settings name one of the repositories."""
    from mpool.models import load_catalogue
    from mpool.models.formats.published import PROMPTS, RERANKERS

    repositories: list[Any] = [getattr(row.refs[0], "repo", "").lower() for row in load_catalogue().rows.values()]
    assert {one for one in repositories if one in RERANKERS} == {"qwen/qwen3-reranker-0.6b"}
    assert {one for one in repositories if one in PROMPTS} == {"alibaba-nlp/gte-qwen2-1.5b-instruct"}
