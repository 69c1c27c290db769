"""The look-alikes of sentence-transformers' classes, compared with that library on the same folders."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.integrations.sentence_transformers import CrossEncoder, SentenceTransformer

torch = pytest.importorskip("torch")
library = pytest.importorskip("sentence_transformers")

TEXTS = ["one", "the quick brown fox jumps over the lazy dog", "", "two three four five"]
PAIRS = [("what is this", "a text"), ("another query", "one two three"), ("what is this", "the lazy dog")]


@pytest.fixture(scope="module", params=["bert", "prompted"])
def both(request: Any) -> Iterator[tuple[Any, Any]]:
    folder = str(request.getfixturevalue(request.param))
    yield SentenceTransformer(folder), library.SentenceTransformer(folder, device="cpu")


@pytest.fixture(scope="module")
def rankers(ranker: Path) -> tuple[Any, Any]:
    return CrossEncoder(str(ranker)), library.CrossEncoder(str(ranker), device="cpu")


def _same(found: Any, wanted: Any) -> None:
    """Check type, shape, dtype, and values to 1e-4 of the scale."""
    assert type(found) is type(wanted), (type(found), type(wanted))
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            _same(one, other)
        return
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    one, other = (np.asarray(value, dtype=np.float64) for value in (found, wanted))
    assert other.size == 0 or np.abs(one - other).max() <= 1e-4 * max(1.0, np.abs(other).max())


@pytest.mark.sample(4)
@pytest.mark.parametrize("inputs", [TEXTS, "one text", ["one text"], [], np.array(TEXTS), tuple(TEXTS)],
                         ids=["list", "str", "one", "none", "array", "tuple"])
@pytest.mark.parametrize("options", [
    {}, {"convert_to_tensor": True}, {"convert_to_numpy": False}, {"normalize_embeddings": True},
    {"truncate_dim": 8}, {"truncate_dim": 8, "normalize_embeddings": True}, {"truncate_dim": 100_000},
    {"prompt": "query: "}, {"batch_size": 2, "show_progress_bar": False, "device": "cpu"},
    {"precision": "binary"}, {"precision": "ubinary"}], ids=str)
def test_encode(both: tuple[Any, Any], inputs: Any, options: dict[str, Any]) -> None:
    ours, theirs = both
    found, wanted = ours.encode(inputs, **options), theirs.encode(inputs, **options)
    if str(options.get("precision", "")).endswith("binary") and len(wanted):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        wrong = np.unpackbits((found ^ wanted).view(np.uint8)).mean()  # a component of about 0 may have either sign
        assert wrong < 0.05
        return
    _same(found, wanted)


def test_scalar_precisions(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    texts = [f"text number {at}" for at in range(120)]
    for precision in ("int8", "uint8"):
        found, wanted = (model.encode(texts, precision=precision) for model in both)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert np.abs(found.astype(int) - wanted.astype(int)).max() <= 1
    assert ours.encode(texts).shape == theirs.encode(texts).shape


@pytest.mark.parametrize("inputs", [TEXTS[:2], "one text"], ids=["list", "str"])
def test_token_embeddings(both: tuple[Any, Any], inputs: Any) -> None:
    found, wanted = (model.encode(inputs, output_value="token_embeddings") for model in both)
    _same(found, wanted)


def test_prompts(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    assert ours.prompts == theirs.prompts and ours.default_prompt_name == theirs.default_prompt_name
    for method in ("encode", "encode_query", "encode_document"):
        _same(getattr(ours, method)(TEXTS), getattr(theirs, method)(TEXTS))
        _same(getattr(ours, method)("one", prompt="x "), getattr(theirs, method)("one", prompt="x "))
    for name in ours.prompts:
        _same(ours.encode(TEXTS, prompt_name=name), theirs.encode(TEXTS, prompt_name=name))


def test_prompts_of_the_constructor(prompted: Path) -> None:
    options: dict[str, Any] = {"prompts": {"query": "find: ", "own": "own: "}, "default_prompt_name": "own"}
    ours = SentenceTransformer(prompted, **options)
    theirs = library.SentenceTransformer(str(prompted), device="cpu", **options)
    for method in ("encode", "encode_query", "encode_document"):
        _same(getattr(ours, method)(TEXTS), getattr(theirs, method)(TEXTS))


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean", "manhattan", None])
def test_similarity(bert: Path, metric: Any) -> None:
    ours = SentenceTransformer(bert, similarity_fn_name=metric)
    theirs = library.SentenceTransformer(str(bert), device="cpu", similarity_fn_name=metric)
    assert ours.similarity_fn_name == str(theirs.similarity_fn_name)
    rows = ours.encode(TEXTS)
    for one, other in ((rows, rows[:2]), (rows[0], rows)):
        _same(ours.similarity(torch.as_tensor(one), torch.as_tensor(other)), theirs.similarity(one, other))
        assert isinstance(ours.similarity(one, other), np.ndarray)
    _same(ours.similarity_pairwise(list(torch.as_tensor(rows)), rows), theirs.similarity_pairwise(rows, rows))


def test_facts(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    assert ours.max_seq_length == theirs.max_seq_length == ours.get_max_seq_length()
    assert ours.get_sentence_embedding_dimension() == theirs.get_sentence_embedding_dimension()
    with ours.truncate_sentence_embeddings(8), theirs.truncate_sentence_embeddings(8):
        assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == 8
        _same(ours.encode(TEXTS), theirs.encode(TEXTS))
    assert ours.truncate_dim is None
    found, wanted = (model.tokenize(TEXTS) for model in both)
    for name in ("input_ids", "attention_mask"):
        assert found[name].dtype == wanted[name].dtype
        assert torch.equal(found[name] * found["attention_mask"], wanted[name] * wanted["attention_mask"])


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"precision": "int4"}, {"prompt_name": "none"},
                                     {"unknown": 1}], ids=str)
def test_errors_are_of_the_same_kind(both: tuple[Any, Any], options: dict[str, Any]) -> None:
    for model in both:
        with pytest.raises(ValueError, match="(?i)" + next(iter(options)).split("_")[0]):
            model.encode(TEXTS, **options)


def test_options_that_do_not_exist_say_what_to_do(bert: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SentenceTransformer(bert)
    for options, name in (({"device": "cuda"}, "device"), ({"output_value": None}, "output_value")):
        with pytest.raises(mpool.InvalidArgument, match=name):
            model.encode("a", **options)  # type: ignore[arg-type]
    with pytest.raises(mpool.Unsupported, match="revision") as caught:
        SentenceTransformer(bert, revision="main")
    assert "owner/name@revision" in (caught.value.hint or "")
    with pytest.raises(TypeError, match="unknown"):
        SentenceTransformer(bert, unknown=1)
    with pytest.raises(mpool.InvalidArgument, match="^`normalise` is not an argument of this method"):
        model.encode("a", normalise=True)
    assert model.to("cpu") is model.cpu() is model.eval() is model
    with pytest.raises(mpool.InvalidArgument, match="device"):
        model.to("cuda")
    assert SentenceTransformer(bert, backend="torch", trust_remote_code=False).device == "cpu"
    with pytest.raises(mpool.WrongCapability):
        SentenceTransformer(llama)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert model.encode("a").ndim == 1
    with pytest.raises(mpool.Unsupported, match="torch"):
        model.encode("a", convert_to_tensor=True)


def test_predict(rankers: tuple[Any, Any]) -> None:
    ours, theirs = rankers
    for options in ({}, {"convert_to_tensor": True}, {"convert_to_numpy": False}):
        _same(ours.predict(PAIRS, **options), theirs.predict(PAIRS, **options))
    _same(ours.predict([list(pair) for pair in PAIRS]), theirs.predict([list(pair) for pair in PAIRS]))
    found, wanted = (model.predict(PAIRS[0]) for model in rankers)
    assert type(found) is type(wanted) and abs(found - wanted) <= 1e-4
    for bad in ([("a",)], [("a", 3)], [("a", "b"), 3], "text"):
        with pytest.raises(mpool.InvalidArgument, match="inputs"):
            ours.predict(bad)
    assert ours.predict([]).shape == (0,)
    with pytest.raises(mpool.InvalidArgument, match="activation_fn"):
        ours.predict(PAIRS, activation_fn="identity")
    with pytest.raises(mpool.InvalidArgument, match="`apply_softmax` must be False for a model with one score, got Tr"):
        ours.predict(PAIRS, apply_softmax=True)


@pytest.mark.parametrize("function", [torch.nn.Identity(), torch.nn.Tanh(), torch.nn.Sigmoid()], ids=str)
def test_activations_of_the_caller(rankers: tuple[Any, Any], ranker: Path, function: Any) -> None:
    ours, theirs = rankers
    documents = [document for _, document in PAIRS]
    _same(ours.predict(PAIRS, activation_fn=function), theirs.predict(PAIRS, activation_fn=function))
    _same(CrossEncoder(str(ranker), activation_fn=function).predict(PAIRS),
          library.CrossEncoder(str(ranker), device="cpu", activation_fn=function).predict(PAIRS))
    found, wanted = (model.rank("what is this", documents, activation_fn=function) for model in rankers)
    assert [one["corpus_id"] for one in found] == [one["corpus_id"] for one in wanted]


def test_pairs_in_other_containers(rankers: tuple[Any, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    ours, theirs = rankers
    wanted = theirs.predict(PAIRS)
    table = pandas.DataFrame(PAIRS, columns=["q", "d"], index=[7, 3, 5])
    for given in (np.array(PAIRS), np.array(PAIRS, dtype=object), zip(table["q"], table["d"]), table.to_numpy(),
                  pandas.Series(PAIRS, index=[2, 1, 0]), [np.array(pair) for pair in PAIRS], iter(PAIRS)):
        _same(ours.predict(given), wanted)
    assert abs(ours.predict(np.array(PAIRS[0])) - theirs.predict(np.array(PAIRS[0]))) <= 1e-4
    for bad in (table, table[["q", "d"]], {"q": "d"}, {("q", "d")}, b"qd", np.array("qd"), torch.zeros(2, 2)):
        with pytest.raises(mpool.InvalidArgument, match="inputs"):
            ours.predict(bad)


def test_rank_returns_rows_of_a_series(rankers: tuple[Any, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    documents = [document for _, document in PAIRS]
    for series in (pandas.Series(documents, index=[2, 0, 1]), pandas.Series(documents, index=["x", "y", "z"])):
        found = rankers[0].rank("what is this", series, return_documents=True)
        assert all(one["text"] == documents[one["corpus_id"]] for one in found)
        wanted = rankers[1].rank("what is this", documents)
        assert [one["corpus_id"] for one in found] == [one["corpus_id"] for one in wanted]
        assert [type(one["score"]) for one in found] == [type(one["score"]) for one in wanted] == [float] * 3
    for bad in (pandas.DataFrame({"d": documents}), "text", {"d": "e"}):
        with pytest.raises(mpool.InvalidArgument, match="documents"):
            rankers[0].rank("what is this", bad)


def test_rank(rankers: tuple[Any, Any]) -> None:
    documents = [document for _, document in PAIRS]
    for options in ({}, {"top_k": 2}, {"return_documents": True}):
        found, wanted = (model.rank("what is this", documents, **options) for model in rankers)
        assert [one.keys() for one in found] == [one.keys() for one in wanted]
        assert [(one["corpus_id"], one.get("text")) for one in found] \
            == [(one["corpus_id"], one.get("text")) for one in wanted]
        assert all(abs(one["score"] - other["score"]) <= 1e-4 for one, other in zip(found, wanted))


# ---- every public argument ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["encode", "encode_query", "encode_document", "encode_multi_process", "similarity",
                                  "similarity_pairwise", "start_multi_process_pool", "stop_multi_process_pool",
                                  "truncate_sentence_embeddings", "get_max_seq_length",
                                  "get_sentence_embedding_dimension", "predict", "rank"])
def test_arguments_have_the_names_defaults_and_order_of_the_original(name: str) -> None:
    classes = ("CrossEncoder", "SentenceTransformer") if name in ("predict", "rank") else ("SentenceTransformer",)

    def arguments(module: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(getattr(getattr(module, classes[0]), name)).parameters.values()
        return [(one.name, one.default, one.kind) for one in found if one.kind is not inspect.Parameter.VAR_KEYWORD]

    assert arguments(sys.modules["mpool.integrations.sentence_transformers"]) == arguments(library)


@pytest.mark.sample(4)
@pytest.mark.parametrize("method", ["encode_query", "encode_document"])
@pytest.mark.parametrize("arguments", [
    (None, None, 2, False), (None, "find: "), ("own",), (None, None, 2, None, "token_embeddings"),
    (None, None, 2, None, "sentence_embedding", "ubinary"),
    (None, None, 2, None, "sentence_embedding", "float32", False),
    (None, None, 2, None, "sentence_embedding", "float32", True, True, "cpu", True, 6)], ids=str)
def test_positional_arguments(prompted: Path, method: str, arguments: tuple[Any, ...]) -> None:
    options: dict[str, Any] = {"prompts": {"own": "own: ", "query": "find: "}}
    found = getattr(SentenceTransformer(prompted, **options), method)(TEXTS[:2], *arguments)
    wanted = getattr(library.SentenceTransformer(str(prompted), device="cpu", **options), method)(TEXTS[:2], *arguments)
    if "ubinary" in arguments:
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert np.unpackbits(found ^ wanted).mean() < 0.05  # a component of about 0 may have either sign
    else:
        _same(found, wanted)


@pytest.mark.parametrize("method", ["encode_query", "encode_document"])
def test_subclasses_replace_encode(bert: Path, method: str) -> None:
    """Both methods call ``encode``, with the names of its arguments. The texts had another name in earlier versions."""
    calls: list[dict[str, Any]] = []

    class Own(SentenceTransformer):
        def encode(self, inputs: Any, **options: Any) -> Any:
            calls.append(options)
            return super().encode(inputs, **options)

    class Former(SentenceTransformer):
        def encode(self, sentences: Any, **options: Any) -> Any:  # type: ignore[override]
            calls.append(options)
            return super().encode(sentences, **options)

    for made in (Own, Former):
        assert getattr(made(bert), method)("a text", truncate_dim=8).shape == (8,)
    assert [call["prompt_name"] for call in calls] == [method.removeprefix("encode_")] * 2


def test_a_prompt_and_its_name_are_too_much(prompted: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in the library, the prompt counts, and a warning says so."""
    model = SentenceTransformer(prompted, prompts={"own": "own: "})
    _same(model.encode(TEXTS, prompt="find: ", prompt_name="own"), model.encode(TEXTS, prompt="find: "))
    assert [record.getMessage() for record in caplog.records if record.name == "mpool"] == [
        "`prompt` and `prompt_name` are both given: `prompt_name` is ignored"]


def test_evaluators_of_the_library(both: tuple[Any, Any], rankers: tuple[Any, Any]) -> None:
    """They call encode, similarity and the model card, and give the same metrics."""
    evaluation = pytest.importorskip("sentence_transformers.evaluation")
    texts = [f"text number {at}" for at in range(12)]
    evaluators = [
        evaluation.TripletEvaluator(texts[:4], texts[4:8], texts[8:], name="t"),
        evaluation.InformationRetrievalEvaluator({"q": texts[0]}, dict(zip("abcd", texts[1:5])), {"q": {"a", "c"}}),
        evaluation.EmbeddingSimilarityEvaluator(texts[:4], texts[4:8], [0.1, 0.5, 0.3, 0.9])]
    for one in evaluators:
        found, wanted = (one(model) for model in both)
        assert found.keys() == wanted.keys() and np.allclose(list(found.values()), list(wanted.values()), atol=1e-4)
    ranking = pytest.importorskip("sentence_transformers.cross_encoder.evaluation")
    one = ranking.CrossEncoderCorrelationEvaluator([list(pair) for pair in PAIRS], [0.1, 0.9, 0.5])
    found, wanted = (one(model) for model in rankers)
    assert found.keys() == wanted.keys() and np.allclose(list(found.values()), list(wanted.values()), atol=1e-4)
    assert [model.num_labels for model in rankers] == [1, 1]


@pytest.mark.parametrize("prompts", [{"passage": "passage: "}, {"corpus": "corpus: ", "query": "q: "},
                                     {"document": "d: ", "passage": "p: "}], ids=str)
def test_prompt_of_documents(bert: Path, prompts: dict[str, str]) -> None:
    ours, theirs = SentenceTransformer(bert, prompts=prompts), library.SentenceTransformer(str(bert), device="cpu",
                                                                                           prompts=prompts)
    for method in ("encode_document", "encode_query", "encode"):
        _same(getattr(ours, method)(TEXTS), getattr(theirs, method)(TEXTS))


@pytest.mark.parametrize("pairs", [PAIRS, [list(pair) for pair in PAIRS], tuple(PAIRS), [("what is this", "")],
                                   PAIRS * 3, [("a", "naïve café 😀"), ("a", "dog " * 300)]],
                         ids=["tuples", "lists", "tuple", "empty document", "repeated", "long"])
def test_predict_takes_what_the_original_takes(rankers: tuple[Any, Any], pairs: Any) -> None:
    ours, theirs = rankers
    _same(ours.predict(pairs, None, None, 2, False), theirs.predict(pairs, None, None, 2, False))


@pytest.mark.parametrize("form", ["float64", "float16", "lists", "list of arrays", "list of tensors"])
def test_similarity_takes_what_the_original_takes(both: tuple[Any, Any], form: str) -> None:
    ours, theirs = both
    rows = ours.encode(TEXTS)
    forms = {"lists": rows.tolist(), "list of arrays": list(rows), "list of tensors": list(torch.as_tensor(rows))}
    given: Any = forms[form] if form in forms else rows.astype(form)
    found, wanted = ours.similarity(given, given), theirs.similarity(given, given)
    assert found.shape == tuple(wanted.shape) and np.abs(np.asarray(found) - np.asarray(wanted)).max() <= 2e-3


def test_util_computes_what_the_original_computes(both: tuple[Any, Any]) -> None:
    from mpool.integrations.sentence_transformers import util

    rows = both[0].encode(TEXTS)
    theirs = library.util
    for name in ("cos_sim", "dot_score", "pairwise_cos_sim", "pairwise_dot_score"):
        for given in (rows, torch.as_tensor(rows)):
            found, wanted = getattr(util, name)(given, given), getattr(theirs, name)(given, given)
            assert isinstance(found, torch.Tensor) == (given is not rows) and found.shape == wanted.shape
            assert np.abs(np.asarray(found) - np.asarray(wanted)).max() <= 1e-5
    for query in (rows[:2], rows[0], torch.as_tensor(rows[1])):
        for score in ("cos_sim", "dot_score"):
            found = util.semantic_search(query, rows, top_k=2, score_function=getattr(util, score))
            wanted = theirs.semantic_search(query, rows, top_k=2, score_function=getattr(theirs, score))
            assert [[hit["corpus_id"] for hit in hits] for hits in found] == \
                [[hit["corpus_id"] for hit in hits] for hits in wanted]
            assert all(abs(one["score"] - other["score"]) <= 1e-5 for one, other in zip(found[0], wanted[0]))
    with pytest.raises(mpool.InvalidArgument, match="`score_function` must be util.cos_sim or util.dot_score, got"):
        util.semantic_search(rows, rows, score_function=theirs.euclidean_sim)
    with pytest.raises(AttributeError, match=r"'community_detection'; use mpool.search.community_detection\(vectors\)"):
        util.community_detection
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        util.nothing


def test_dicts_with_a_text(both: tuple[Any, Any]) -> None:
    """``{"text": ...}`` is one text, as in sentence-transformers; other dicts are refused by both."""
    ours, theirs = both
    for inputs in ({"text": TEXTS[1]}, [{"text": TEXTS[1]}, {"text": TEXTS[3]}]):
        _same(ours.encode(inputs), theirs.encode(inputs))
    for inputs in ({"a": 1}, {"a": "b"}, {}, [{"a": 1}], {"text": "a", "image": "b"}):
        for model in both:
            with pytest.raises(ValueError):
                model.encode(inputs)


@pytest.mark.parametrize(("inputs", "words"), [
    ({"a": 1}, r"`inputs\[0\]` must be a str, or a dict .*, got a dict with the key 'a'"),
    ({"image": "a.png"}, "not image_embedding"), ([TEXTS[0], {"b": "c"}], "a dict with the key 'b'"),
    ({"one", "two"}, "A set has no order: pass a list"), (5, "`inputs` must be a text, or a sequence of texts, got 5"),
    (None, "`inputs` must be a text"), (b"ab", "`inputs` must be a text"), (np.array("ab"), "got array"),
    (torch.ones(2), "inputs")],
    ids=["keys", "image", "item", "set", "number", "None", "bytes", "0-d", "tensor"])
def test_inputs_that_are_no_texts(bert: Path, inputs: Any, words: str) -> None:
    """Keys of a dict, members of a set and bytes are not embedded."""
    model = SentenceTransformer(bert)
    for method in (model.encode, model.encode_query, model.encode_document):
        with pytest.raises((mpool.InvalidArgument, mpool.errors.WrongCapability), match=words):
            method(inputs)
