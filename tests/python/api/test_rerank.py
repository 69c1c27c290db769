"""mpool.rerank compared with sentence-transformers' CrossEncoder on small seeded models; results; errors."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import tinymodels
from paritymodels import torch, transformers
from rerankers import make_reranker

CrossEncoder = pytest.importorskip("sentence_transformers").CrossEncoder

QUERY = "Where did the cat sit?"
DOCUMENTS = ["A cat sat on the mat, and the dog barked at it twice.", "Numbers 0 1 2 3 4 5", "The quick brown fox.",
             "def main(argument):\n    return argument + 1\n", "dog " * 80, "The quick brown fox.", ""]


NAMES = ["bert", "xlm_roberta", "mpnet", "gte", "modern_bert", "modern_bert_mean", "distilbert", "electra", "albert",
         "eurobert_bos", "eurobert_mean", "deberta_v3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_reranker(tmp_path_factory.mktemp(name) / "model", name) for name in NAMES}


@pytest.fixture(scope="module")
def pool():
    with mpool.Pool() as made:
        yield made


def _expected(folder: Path, documents: list[str] = DOCUMENTS, **options: Any) -> np.ndarray:
    model = CrossEncoder(str(folder), **options)
    with torch.no_grad():
        return model.predict([(QUERY, document) for document in documents], convert_to_numpy=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_scores_match_cross_encoder(pool: mpool.Pool, folders: dict[str, Path], name: str) -> None:
    expected = _expected(folders[name])
    found = pool.rerank(QUERY, DOCUMENTS, str(folders[name]), compute="float32")
    assert np.ptp(expected) > 0.01  # the scores of the documents differ
    assert np.abs(np.array(found.scores) - expected).max() <= 1e-5
    assert [result.index for result in found] == np.argsort(-np.array(found.scores), kind="stable").tolist()
    assert [result.score for result in found] == sorted(found.scores, reverse=True)
    assert [result.text for result in found] == [DOCUMENTS[result.index] for result in found]
    # bfloat16 has 8 bits of precision: the scores of these models are up to 0.016 from those in float32
    near = pool.rerank(QUERY, DOCUMENTS, str(folders[name]), compute="bfloat16")
    assert np.abs(np.array(near.scores) - expected).max() <= 0.03


def test_saved_by_cross_encoder(pool: mpool.Pool, folders: dict[str, Path], tmp_path: Path) -> None:
    """A folder written by sentence-transformers, with another activation function."""
    model = CrossEncoder(str(folders["bert"]), activation_fn=torch.nn.Identity())
    model.save_pretrained(str(tmp_path / "saved"))
    expected = _expected(tmp_path / "saved")
    found = pool.rerank(QUERY, DOCUMENTS, str(tmp_path / "saved"), compute="float32")
    assert np.abs(expected).max() > 1 or expected.min() < 0
    assert np.abs(np.array(found.scores) - expected).max() <= 1e-4


def test_old_key_of_the_activation(pool: mpool.Pool, folders: dict[str, Path], tmp_path: Path) -> None:
    """The ms-marco models use this key."""
    folder = shutil.copytree(folders["bert"], tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    name = "sbert_ce_default_activation_function"
    (folder / "config.json").write_text(json.dumps({**config, name: "torch.nn.modules.linear.Identity"}))
    found = pool.rerank(QUERY, DOCUMENTS, str(folder), compute="float32")
    assert np.abs(np.array(found.scores) - _expected(folder)).max() <= 1e-4
    (folder / "config.json").write_text(json.dumps({**config, name: "some.Code"}))
    with mpool.Pool() as other, pytest.raises(mpool.Unsupported,
                                                  match="/config.json: the activation .* is some.Code"):
        other.rerank(QUERY, DOCUMENTS, str(folder))


LISTED = ["input_ids", "token_type_ids", "attention_mask"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("config", "types"), [
    ({"model_input_names": ["input_ids", "attention_mask"]}, False),
    ({"model_input_names": LISTED}, True),
    ({"tokenizer_class": "BertTokenizerFast"}, True), ({"tokenizer_class": "ElectraTokenizer"}, True),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, False), ({"tokenizer_class": "TokenizersBackend"}, False),
    ({"tokenizer_class": "DistilBertTokenizer"}, False),
    ({"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": LISTED}, True),
    ({"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": LISTED,
      "file's type": 0}, False),
    ({"tokenizer_class": "BertTokenizer", "model_input_names": LISTED, "file's type": 0},
     True),
], ids=str)
def test_token_types_are_those_of_transformers(pool: mpool.Pool, folders: dict[str, Path], tmp_path: Path,
                                               config: dict[str, Any], types: bool) -> None:
    """`model_input_names` decides if the model gets token types, else the class of the tokenizer."""
    folder = shutil.copytree(folders["bert"], tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for part in tokenizer["post_processor"]["pair"][3:]:
        next(iter(part.values()))["type_id"] = config.get("file's type", 1)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    old = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**old, **config}))
    expected = _expected(folder)
    assert (np.abs(expected - _expected(folders["bert"])).max() < 1e-6) == types  # the fixture tells the two apart
    found = pool.rerank(QUERY, DOCUMENTS, str(folder), compute="float32")
    assert np.abs(np.array(found.scores) - expected).max() <= 1e-5


def test_the_second_text_has_its_own_type(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    """Equal ids with different starts of the second text give different scores."""
    folder = str(folders["bert"])
    key = pool.get(folder)._entry.core_key("float32")
    ids, offsets = np.array([2, 9, 10, 3, 11, 12, 3], np.int32), np.array([0, 7], np.int64)
    one = pool.registry.embed(key, ids, offsets, second=np.array([4], np.int32))
    other = pool.registry.embed(key, ids, offsets, second=np.array([5], np.int32))
    none = pool.registry.embed(key, ids, offsets)
    assert len({float(x[0, 0]) for x in (one, other, none)}) == 3
    for second in (0, 7, -1):
        with pytest.raises(mpool.InvalidArgument, match="second text begins"):
            pool.registry.embed(key, ids, offsets, second=np.array([second], np.int32))
    with pytest.raises(mpool.InvalidArgument, match="`second` must have .* got 2"):
        pool.registry.embed(key, ids, offsets, second=np.array([1, 2], np.int32))


@pytest.mark.parametrize("lengths", [(3, 200), (200, 3), (200, 200), (40, 41), (31, 30), (30, 31), (61, 1)])
def test_pairs_are_truncated_like_transformers(folders: dict[str, Path], lengths: tuple[int, int]) -> None:
    entry = mpool.Pool().get(str(folders["bert"]))._entry
    theirs = transformers.AutoTokenizer.from_pretrained(folders["bert"])
    a, b = ("cat " * lengths[0]).strip(), ("dog " * lengths[1]).strip()
    expected = theirs(a, b, truncation="longest_first", max_length=64)
    found = entry.tokenizer().encode_pairs(a, [b], max_tokens=64)
    assert found.ids.tolist() == expected["input_ids"]
    assert found.second.tolist() == [expected["token_type_ids"].index(1)]


@pytest.mark.parametrize("name", ["bert", "xlm_roberta"])
def test_special_tokens_in_texts_are_plain_text(folders: dict[str, Path], name: str) -> None:
    tokenizer = mpool.Pool().get(str(folders[name])).tokenizer
    before, between, behind = tokenizer.pair_ids
    assert len(between) == (1 if name == "bert" else 2)
    text = "[SEP] </s> a [CLS] <s>"
    found = tokenizer.encode_pairs(text, [text], max_tokens=64)
    special = {*before, *between, *behind}
    assert sum(int(i) in special for i in found.ids) == len(before) + len(between) + len(behind)


def test_top_k_ties_and_sequence(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    model = pool.get(str(folders["bert"]))
    whole = model.rerank(QUERY, DOCUMENTS)
    assert [result.index for result in whole].index(2) + 1 == [result.index for result in whole].index(5)
    assert whole.scores[2] == whole.scores[5]
    best = model.rerank(QUERY, tuple(DOCUMENTS), top_k=2)
    assert len(best) == 2 and best.results == whole.results[:2] and best.scores == whole.scores
    assert best[0] == whole[0] and str(best[0]) == DOCUMENTS[best[0].index] and best.model == model.key
    assert len(model.rerank(QUERY, DOCUMENTS, top_k=100)) == len(DOCUMENTS)
    assert len(model.rerank(QUERY, [])) == 0
    assert pickle.loads(pickle.dumps(best)) == best
    alone = [model.rerank(QUERY, [document]).scores[0] for document in DOCUMENTS]
    assert tuple(alone) == whole.scores


@pytest.mark.parametrize("query, documents, options, error, message", [
    ("", DOCUMENTS, {}, mpool.InvalidArgument, "`query` must be a str of 1 to 1,000,000 characters, got an empty str"),
    (7, DOCUMENTS, {}, mpool.InvalidArgument, "`query` must be a str of 1 to 1,000,000 characters, got int"),
    ("a\ud800", DOCUMENTS, {}, mpool.InvalidArgument, "`query` must be Unicode text, got half of a surrogate pair"),
    (QUERY, "one", {}, mpool.InvalidArgument, "`documents` must be a list of str, got one str"),
    (QUERY, {"a": 1}, {}, mpool.InvalidArgument, "`documents` must be a list of str, got dict"),
    (QUERY, None, {}, mpool.InvalidArgument, "`documents` must be a list of str, got None"),
    (QUERY, ["good", 3], {}, mpool.InvalidArgument, r"`documents\[1\]` must be .*, got int"),
    (QUERY, ["good", "b\udc00"], {}, mpool.InvalidArgument, r"`documents\[1\]` must be .* half of a surrogate"),
    (QUERY, ["x" * 1_000_001], {}, mpool.InvalidArgument, "got 1,000,001 characters"),
    (QUERY, DOCUMENTS, {"top_k": 0}, mpool.InvalidArgument, "`top_k` must be an integer of 1 or more, .*, got 0"),
    (QUERY, DOCUMENTS, {"top_k": 1.5}, mpool.InvalidArgument, "`top_k` must be an integer of 1 or more, .*, got 1.5"),
    (QUERY, DOCUMENTS, {"truncate": False}, mpool.ContextOverflow, "the limit is 64"),
    (QUERY, DOCUMENTS, {"compute": "int3"}, mpool.InvalidArgument, "`compute` must be one of .*, got 'int3'"),
    (QUERY, DOCUMENTS, {"normalize": True}, mpool.InvalidArgument, "`normalize` is not an option of rerank"),
    (QUERY, DOCUMENTS, {"prompt": "Find"}, mpool.InvalidArgument, "`prompt` must be None for this .*, got 'Find'"),
    (QUERY, DOCUMENTS, {"timeout": -1}, mpool.InvalidArgument, "timeout"),
])
def test_bad_input(pool: mpool.Pool, folders: dict[str, Path], query: Any, documents: Any, options: dict[str, Any],
                   error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        pool.rerank(query, documents, str(folders["bert"]), **options)
    if error is mpool.InvalidArgument:
        assert caught.value.param in (*options, "query", "documents", "documents[0]", "documents[1]")


def test_other_models_are_refused(pool: mpool.Pool, folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = tinymodels.bert(tmp_path / "encoder")
    with pytest.raises(mpool.WrongCapability, match="is an embedding model, not a reranker"):
        pool.rerank(QUERY, DOCUMENTS, str(encoder))
    with pytest.raises(mpool.WrongCapability, match="is a reranker"):
        pool.embed("A text.", str(folders["bert"]))
    with pytest.raises(mpool.WrongCapability, match="is a reranker"):
        pool.get(str(folders["bert"])).dimensions
    with mpool.Pool(mpool.PoolConfig(offline=True)) as offline, \
            pytest.raises(mpool.errors.OfflineError, match=r"ms-marco-MiniLM-L6-v2"):  # the default
        offline.rerank(QUERY, DOCUMENTS)
    labels = make_reranker(tmp_path / "labels", "bert", 3)
    (labels / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "",
                                                      "type": "sentence_transformers.models.Transformer"}]))
    (labels / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    with mpool.Pool() as other, pytest.raises(mpool.WrongCapability, match="with 3 labels, not a rer"):
        other.rerank(QUERY, DOCUMENTS, str(labels))


def test_gguf(pool: mpool.Pool, folders: dict[str, Path], tmp_path: Path) -> None:
    """XLM-RoBERTa rerankers in the layout of llama.cpp's converter: pooling type 4, head in cls and cls.output."""
    gguf = pytest.importorskip("gguf")
    source = json.loads((folders["xlm_roberta"] / "tokenizer.json").read_text())
    model = transformers.XLMRobertaForSequenceClassification.from_pretrained(folders["xlm_roberta"]).eval()
    path = tmp_path / "reranker.gguf"
    writer = gguf.GGUFWriter(str(path), "bert")
    for add, value in ((writer.add_block_count, 2), (writer.add_context_length, 64), (writer.add_embedding_length, 32),
                       (writer.add_feed_forward_length, 72), (writer.add_head_count, 4),
                       (writer.add_layer_norm_eps, model.config.layer_norm_eps), (writer.add_causal_attention, False),
                       (writer.add_pooling_type, gguf.PoolingType.RANK)):
        add(value)
    vocab = source["model"]["vocab"]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _ in vocab])
    writer.add_token_scores([score for _, score in vocab])
    writer.add_token_types([2 if i == 3 else 3 if i in (0, 1, 2, 4) else 1 for i in range(len(vocab))])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    for name, token in (("bos", 0), ("eos", 2), ("unknown", 3), ("seperator", 2), ("padding", 1)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2)
    for key, tensor in model.state_dict().items():
        data = tensor.numpy()
        if key.endswith("position_embeddings.weight"):
            data = data[2:]
        found = names.get_name(key.removeprefix("roberta."), try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        writer.add_tensor(found, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    documents = DOCUMENTS[:3]
    found = pool.rerank(QUERY, documents, str(path), compute="float32")
    assert np.abs(np.array(found.scores) - _expected(folders["xlm_roberta"], documents)).max() <= 1e-4


def test_scores_that_saturate_are_ranked_by_logits(ranker: Path, tmp_path: Path) -> None:
    """The sigmoid of every logit is 1; the order is that of the logits, for each interface."""
    from safetensors.numpy import load_file, save_file

    from mpool.integrations import _requests
    from mpool.integrations.sentence_transformers import CrossEncoder

    folder = Path(shutil.copytree(ranker, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.bias"] = tensors["classifier.bias"] + np.float32(60)
    save_file(tensors, folder / "model.safetensors")
    documents = [f"one two {'three ' * at}lazy dog" for at in range(9)]
    logits = mpool.rerank("what", documents, str(folder), function_to_apply="none").scores
    assert len(set(logits)) == 9 and min(logits) > 20
    wanted = sorted(range(9), key=lambda at: -logits[at])
    assert wanted != list(range(9))
    found = mpool.rerank("what", documents, str(folder))
    assert set(found.scores) == {1.0} and [one.index for one in found] == wanted
    assert [one.index for one in mpool.rerank("what", documents, str(folder), top_k=3)] == wanted[:3]
    assert [one["corpus_id"] for one in CrossEncoder(folder).rank("what", documents)] == wanted
    scores = _requests.scores(str(folder), "what", documents, {})
    assert scores.best() == wanted and scores.values.tolist() == list(found.scores)
