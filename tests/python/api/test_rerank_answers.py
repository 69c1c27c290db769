"""Rerankers that are language models, such as Qwen3-Reranker: the score is the probability of the token "yes" after a
question about the document. Compared with sentence-transformers' CrossEncoder on a small seeded model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.errors import FormatError
from mpool.tasks import text_embedding as embedding
from mpool.tasks.options import RerankOptions
from mpool.tasks.rerank import plan_of
from mpool.tasks.requests import text_plan

from answerrankers import BEFORE, BEHIND, DEFAULT, TEMPLATE, make, seeded, write_tokenizer
from paritymodels import torch, transformers

CrossEncoder = pytest.importorskip("sentence_transformers").CrossEncoder

QUERY = "Where did the cat sit?"
DOCUMENTS = ["A cat sat on the mat.", "Numbers 0 1 2 3", "no", "yes " * 300, "日本語"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory)


@pytest.fixture(scope="module")
def pool():
    with mpool.Pool() as made:
        yield made


def _expected(folder: Path, **options: Any) -> np.ndarray:
    model = CrossEncoder(str(folder), device="cpu")
    with torch.no_grad():
        return model.predict([(QUERY, document) for document in DOCUMENTS], convert_to_numpy=True, **options)


def _compare(pool: mpool.Pool, folder: Path, **options: Any) -> None:
    expected = _expected(folder, **options)
    found = pool.rerank(QUERY, DOCUMENTS, str(folder), compute="float32", **options)
    assert np.ptp(expected) > 0.1
    assert np.abs(np.array(found.scores) - expected).max() <= 2e-5 * max(1, np.abs(expected).max())


def _changed(folder: Path, to: Path, file: str, **changes: Any) -> Path:
    """Copy a folder and set keys of one of its JSON files."""
    copy = shutil.copytree(folder, to)
    kept = json.loads((copy / file).read_text()) | changes
    (copy / file).write_text(json.dumps(kept))
    return copy


def test_scores_match_cross_encoder(pool: mpool.Pool, folder: Path) -> None:
    """One document is too long: its end is truncated, and the rest of the prompt is kept."""
    _compare(pool, folder)
    near = pool.rerank(QUERY, DOCUMENTS, str(folder), compute="bfloat16")
    assert np.abs(np.array(near.scores) - _expected(folder)).max() <= 0.1
    with pytest.raises(mpool.ContextOverflow, match=r"`documents\[3\]` with the query has .* the limit is 500"):
        pool.rerank(QUERY, DOCUMENTS, str(folder), truncate=False)


def test_a_pair_of_exactly_the_maximum_length(pool: mpool.Pool, folder: Path, tmp_path: Path) -> None:
    """The pair is complete. With one token less, the document loses its last token; the rest of the prompt is kept."""
    def score(document: str, limit: int, **options: Any) -> float:
        at = tmp_path / str(limit)
        if not at.exists():
            _changed(folder, at, "tokenizer_config.json", model_max_length=limit)
        return pool.rerank(QUERY, [document], str(at), **options).scores[0]

    document = DOCUMENTS[0]
    with pytest.raises(mpool.ContextOverflow) as refused:
        score(document, 30, truncate=False)
    tokens = refused.value.tokens
    assert refused.value.limit == 30 and tokens is not None
    assert score(document, tokens, truncate=False) == score(document, 500)
    with pytest.raises(mpool.ContextOverflow, match=f"has {tokens} tokens, the limit is {tokens - 1}"):
        score(document, tokens - 1, truncate=False)
    shorter = score(document, tokens - 1)
    assert shorter == score(document[:-1], 500) != score(document, 500)  # a token is a byte
    with pytest.raises(mpool.InvalidArgument, match="`max_length` must be more than .* after a document"):
        score(document, 10)


@pytest.mark.parametrize("a, b, same", [([1, 2, 3], [9, 2, 3], [2, 3]), ([2, 3], [1, 2, 3], [2, 3]), ([1], [2], []),
                                        ([1, 2], [1, 2], [1, 2]), ([], [1], [])])
def test_common_end(a: list[int], b: list[int], same: list[int]) -> None:
    assert embedding.common_end(a, b) == embedding.common_end(b, a) == same


def test_prompts(pool: mpool.Pool, folder: Path, tmp_path: Path) -> None:
    copy = _changed(folder, tmp_path / "m", "config_sentence_transformers.json", default_prompt_name="code",
                    prompts={"code": "Find code", "web": "Search the web"})
    _compare(pool, copy)
    _compare(pool, copy, prompt="Something else")
    _compare(pool, copy, prompt_name="web")
    scores = [pool.rerank(QUERY, DOCUMENTS, str(at), **options).scores[0] for at, options in (
        (folder, {}), (copy, {}), (copy, {"prompt_name": "web"}), (copy, {"prompt": "Search the web"}))]
    assert len(set(scores)) == 3 and scores[2] == scores[3]
    with pytest.raises(mpool.InvalidArgument, match="`prompt_name` must be one of code, web, got 'nought'"):
        pool.rerank(QUERY, DOCUMENTS, str(copy), prompt_name="nought")


def test_one_token_and_no_function(pool: mpool.Pool, folder: Path, tmp_path: Path) -> None:
    """The score is the logit of one token, without a sigmoid."""
    copy = _changed(folder, tmp_path / "m", "1_LogitScore/config.json", false_token_id=None, true_token_id=17)
    _compare(pool, _changed(copy, tmp_path / "n", "config_sentence_transformers.json",
                            activation_fn="torch.nn.modules.linear.Identity"))


def test_untied_output_layer(pool: mpool.Pool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    seeded(False).save_pretrained(tmp_path)
    saved = tmp_path / "saved"
    CrossEncoder(str(tmp_path), device="cpu").save_pretrained(str(saved))
    _compare(pool, saved)


def test_generation_prompt_of_the_template(pool: mpool.Pool, folder: Path, tmp_path: Path) -> None:
    """The template may have a generation prompt, which the folder's settings enable."""
    copy = _changed(folder, tmp_path / "m", "sentence_bert_config.json",
                    processing_kwargs={"chat_template": {"add_generation_prompt": True}})
    asked = TEMPLATE.replace(BEHIND, "<|im_end|>\n{% if add_generation_prompt %}" + BEHIND[11:] + "{% endif %}")
    for at in (copy, shutil.copytree(folder, tmp_path / "n")):
        (at / "chat_template.jinja").write_text(asked)
        _compare(pool, at)
    one, other = (pool.rerank(QUERY, DOCUMENTS, str(at)).scores for at in (copy, tmp_path / "n"))
    assert one != other


def test_control_tokens_in_texts_are_plain_text(pool: mpool.Pool, folder: Path) -> None:
    text = "<|im_end|> <|im_start|>"
    plan = text_plan(pool, str(folder), RerankOptions())
    ids = embedding.pack(plan_of(plan, text), [text]).ids.tolist()
    assert ids.count(260) == 3 and ids.count(261) == 2  # only those of the template


def test_process(pool: mpool.Pool, folder: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(isolation="process")) as other:
        assert other.rerank(QUERY, DOCUMENTS, str(folder)).scores == pool.rerank(QUERY, DOCUMENTS, str(folder)).scores


@pytest.mark.parametrize("file, changes, error, match", [
    ("1_LogitScore/config.json", {"true_token_id": 270}, FormatError, "true_token_id"),
    ("1_LogitScore/config.json", {"module_input_name": "logits"}, mpool.Unsupported, "module_input_name"),
    ("sentence_bert_config.json", {"modality_config": {"message": {"format": "structured"}}}, mpool.Unsupported,
     "structured"),
    ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 5}}}, FormatError, "text"),
    ("sentence_bert_config.json", {"tokenizer_args": {"use_fast": False}}, FormatError, "tokenizer_args"),
    ("config_sentence_transformers.json", {"default_prompt_name": "nought"}, FormatError, "default_prompt_name"),
])
def test_unsupported_settings_are_refused(folder: Path, tmp_path: Path, file: str, changes: dict[str, Any],
                                          error: type[Exception], match: str) -> None:
    copy = _changed(folder, tmp_path / "m", file, **changes)
    with mpool.Pool() as pool, pytest.raises(error, match=match):
        pool.rerank(QUERY, DOCUMENTS, str(copy))


def test_a_template_without_the_roles(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "m")
    (copy / "chat_template.jinja").write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with mpool.Pool() as pool, pytest.raises(FormatError, match="omits the query.*query and document"):
        pool.rerank(QUERY, DOCUMENTS, str(copy))


def _gguf(path: Path, folder: Path, rerank: str | None) -> Path:
    """Write Qwen3-Reranker in the layout of llama.cpp's converter: the head is the two rows of the output layer."""
    gguf = pytest.importorskip("gguf")
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    config, tokens = model.config, json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(path), "qwen3")
    for add, value in ((writer.add_block_count, 2), (writer.add_context_length, 500), (writer.add_embedding_length, 64),
                       (writer.add_feed_forward_length, 96), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
                       (writer.add_key_length, 16), (writer.add_value_length, 16),
                       (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
                       (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
                       (writer.add_pooling_type, gguf.PoolingType.RANK), (writer.add_tokenizer_model, "gpt2"),
                       (writer.add_tokenizer_pre, "gpt-2"), (writer.add_add_bos_token, False),
                       (writer.add_eos_token_id, 261), (writer.add_classifier_output_labels, ["yes", "no"])):
        add(value)
    vocab = list(tokens["model"]["vocab"])
    writer.add_token_list([*vocab, *(token["content"] for token in tokens["added_tokens"])])
    writer.add_token_types([1] * len(vocab) + [3] * 3)
    writer.add_token_merges([" ".join(merge) for merge in tokens["model"]["merges"]])
    if rerank is not None:
        writer.add_chat_template([{"name": "rerank", "template": rerank}])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for key, tensor in model.state_dict().items():
        if key != "lm_head.weight":
            found = names.get_name(key, try_suffixes=(".weight",))
            assert found is not None, key
            writer.add_tensor(found, tensor.numpy())
    yes, no = (tokens["model"]["vocab"][word] for word in ("yes", "no"))
    writer.add_tensor("cls.output.weight", model.lm_head.weight.detach().numpy()[[yes, no]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf(pool: mpool.Pool, folder: Path, tmp_path: Path) -> None:
    """The pair is inserted at the placeholders of the file's template, whatever other text the template contains."""
    rerank = BEFORE + DEFAULT + "\n<Query>: {query}\n<Document>: {document}" + BEHIND
    path = _gguf(tmp_path / "m.gguf", folder, rerank)
    found = pool.rerank(QUERY, DOCUMENTS, str(path), compute="float32")
    assert np.abs(np.array(found.scores) - _expected(folder)).max() <= 2e-5
    odd = _gguf(tmp_path / "odd.gguf", folder, '{{ 1 }}"\\n{% if %}' + rerank)
    plan = text_plan(pool, str(odd), RerankOptions())
    assert plan.template.render(embedding._pair("", "Q", "D"), add_generation_prompt=False) \
        == '{{ 1 }}"\\n{% if %}' + rerank.replace("{query}", "Q").replace("{document}", "D")


@pytest.mark.parametrize("rerank", [None, "{query}", "{document} {query}"])
def test_gguf_without_a_template(pool: mpool.Pool, folder: Path, tmp_path: Path, rerank: str | None) -> None:
    with pytest.raises(mpool.Unsupported, match="template rerank"):
        pool.rerank(QUERY, DOCUMENTS, str(_gguf(tmp_path / "m.gguf", folder, rerank)))
