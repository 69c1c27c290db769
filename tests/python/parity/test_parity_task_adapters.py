"""Models with one adapter per task, compared with transformers: the same network with the merged weights of a task.

The formulas and names are those of modeling_lora.py in jinaai/xlm-roberta-flash-implementation (jina-embeddings-v3),
and of modeling_jina_embeddings_v5.py and vLLM's jina.py (jina-embeddings-v5).
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.errors import FormatError, InvalidArgument, LimitError, Unsupported
from mpool.models.formats.hf_folder import describe_folder

from adapterfiles import matrices, save_peft
from corelib import token_vectors
from encodermodels import VOCAB, Encoder, save_tensors
from paritymodels import torch
from taskmodels import (
    ALPHA,
    INSTRUCTIONS,
    RANK,
    V3_TASKS,
    V5_PROMPTS,
    V5_TASKS,
    adapters_v3,
    adapters_v5,
    config_v3,
    make_v3,
    make_v5,
    merged_v3,
    merged_v5,
    stored_v3,
    write_v3,
    write_v5,
)

TOLERANCE = 1e-4
TEXTS = ["w20 w21 w22", "w40", "w50 w51 w50 w52 w53 w54 w55 w56 w57 w58 w59 w60 w61"]
ENCODER = Encoder(make_v3, 96)


def _ids() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(5, VOCAB, n).tolist() for n in (1, 2, 17, 64, 96)]


def _pooled(model: Any, text: str, pooling: str, dimensions: int | None = None) -> np.ndarray:
    """Return the normalised embedding of a text whose words are ``w`` and an id."""
    states = ENCODER.expected(model, [int(word[1:]) for word in text.split()])
    vector = (states.mean(0) if pooling == "mean" else states[-1])[:dimensions]
    return vector / np.linalg.norm(vector)


def _error(got: list[np.ndarray], model: Any) -> float:
    wanted = [ENCODER.expected(model, ids) for ids in _ids()]
    return max(float(np.abs(a - b).max()) / max(1.0, float(np.abs(b).max())) for a, b in zip(got, wanted))


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    model = make_v3()
    found = adapters_v3(model)
    return str(write_v3(tmp_path_factory.mktemp("v3"), model, found)), model, found


@pytest.fixture(scope="module", params=["small", "nano"])
def v5(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    model = make_v5(request.param)
    found = adapters_v5(model)
    return str(write_v5(tmp_path_factory.mktemp("v5"), model, found)), model, found


@pytest.fixture
def pool() -> Iterator[mpool.Pool]:
    with mpool.Pool() as made:
        yield made


# ---- jina-embeddings-v3 --------------------------------------------------------------------------------------------

def test_v3_states(v3: tuple[str, Any, Any], pool: mpool.Pool) -> None:
    """Every token of every task, and of the model without an adapter."""
    folder, model, found = v3
    pool.load(folder, compute="float32")
    plain = token_vectors(pool, folder, _ids())
    assert _error(plain, model) <= TOLERANCE
    for task in V3_TASKS:
        got = token_vectors(pool, folder, _ids(), adapter=task)
        assert _error(got, merged_v3(model, found, task)) <= TOLERANCE
        for other in (*(merged_v3(model, found, name) for name in V3_TASKS if name != task), model):
            assert _error(got, other) > 50 * TOLERANCE


@pytest.mark.parametrize("part", ["word_embeddings", "token_type_embeddings", "Wqkv", "out_proj", "fc1", "fc2"])
def test_v3_parts(tmp_path: Path, pool: mpool.Pool, part: str) -> None:
    """Each kind of weight has an update that reaches the result by itself."""
    model = make_v3()
    found = {name: (a, b if name.endswith(part) else torch.zeros_like(b)) for name, (a, b) in
             adapters_v3(model).items()}
    folder = str(write_v3(tmp_path, model, found))
    got = token_vectors(pool, folder, _ids(), adapter="separation")
    assert _error(got, merged_v3(model, found, "separation")) <= TOLERANCE
    assert _error(got, model) > 50 * TOLERANCE


@pytest.mark.sample(4)
@pytest.mark.parametrize("options, task, prompt", [
    ({"adapter": "text-matching"}, "text-matching", ""),
    ({"adapter": "retrieval.query"}, "retrieval.query", "w7 w8 w9 "),
    ({"prompt_name": "retrieval.passage"}, "retrieval.passage", "w10 w11 "),
    ({"prompt_name": "classification"}, "classification", ""),
    ({"task": "query"}, "retrieval.query", "w7 w8 w9 "), ({"task": "document"}, "retrieval.passage", "w10 w11 "),
    ({"adapter": "retrieval.query", "prompt": ""}, "retrieval.query", ""),
    ({"adapter": "separation", "prompt": "w3 "}, "separation", "w3 "), ({}, None, ""), ({"prompt": "w3 "}, None, "w3 "),
    ({"adapter": "separation", "dimensions": 16}, "separation", ""),
])
def test_v3_embeddings(v3: tuple[str, Any, Any], pool: mpool.Pool, options: dict[str, Any], task: str | None,
                       prompt: str) -> None:
    folder, model, found = v3
    reference = model if task is None else merged_v3(model, found, task)
    got = pool.embed(TEXTS, folder, compute="float32", **options)
    wanted = [_pooled(reference, prompt + text, "mean", options.get("dimensions")) for text in TEXTS]
    assert np.abs(got - wanted).max() <= 1e-5


def test_v3_look_alike(v3: tuple[str, Any, Any]) -> None:
    """``task`` of the look-alike chooses the adapter, ``prompt_name`` the instruction; encode_query chooses both."""
    from mpool.integrations.sentence_transformers import SentenceTransformer

    folder, model, found = v3
    ours = SentenceTransformer(folder)

    def expected(task: str, prompt: str) -> np.ndarray:
        return np.stack([_pooled(merged_v3(model, found, task), INSTRUCTIONS[prompt] + text, "mean") for text in TEXTS])

    rows = {("retrieval.query", "retrieval.query"): ours.encode_query(TEXTS),
            ("retrieval.passage", "retrieval.passage"): ours.encode_document(TEXTS),
            ("separation", "retrieval.query"): ours.encode(TEXTS, task="separation", prompt_name="retrieval.query"),
            ("retrieval.passage", "separation"): ours.encode(TEXTS, task="retrieval.passage"),
            ("retrieval.query", "separation"): ours.encode(TEXTS, task="query")}
    for (task, prompt), got in rows.items():
        assert np.abs(got - expected(task, prompt)).max() <= TOLERANCE, (task, prompt)
    tokens = ours.encode(TEXTS, task="separation", output_value="token_embeddings")
    assert np.abs(tokens[1].numpy().mean(0) / np.linalg.norm(tokens[1].numpy().mean(0))
                  - expected("separation", "separation")[1]).max() <= TOLERANCE
    with pytest.raises(InvalidArgument, match="task.*text-matching"):
        ours.encode(TEXTS, task="none")


def test_v3_settings(v3: tuple[str, Any, Any]) -> None:
    settings = describe_folder(v3[0], key="k", ref="r").embedding
    assert settings is not None and settings.adapters == V3_TASKS and settings.default_adapter is None
    assert dict(settings.prompts) == INSTRUCTIONS and settings.dimensions == (8, 16, 48)
    assert settings.normalize and settings.pooling == ("mean",)


def test_v3_instructions_of_the_configuration(tmp_path: Path) -> None:
    """Without modules of sentence-transformers, the instructions are those of config.json."""
    model = make_v3(1)
    folder = write_v3(tmp_path, model, adapters_v3(model))
    (folder / "modules.json").unlink()
    settings = describe_folder(str(folder), key="k", ref="r").embedding
    assert settings is not None and dict(settings.prompts) == INSTRUCTIONS


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "int8"])
def test_tasks_share_batches(v3: tuple[str, Any, Any], pool: mpool.Pool, compute: str) -> None:
    """Requests of all tasks at the same time, and with and without an adapter, give the bytes of each task alone."""
    folder, chosen = v3[0], [None, *V3_TASKS]
    alone = {task: np.concatenate([pool.embed([text], folder, adapter=task, compute=compute) for text in TEXTS])
             for task in chosen}
    assert len({vectors.tobytes() for vectors in alone.values()}) == len(chosen)
    with ThreadPoolExecutor(12) as threads:
        for _ in range(4):
            together = threads.map(lambda task: (task, pool.embed(TEXTS, folder, adapter=task, compute=compute)),
                                   chosen * 2)
            for task, vectors in together:
                assert vectors.tobytes() == alone[task].tobytes()


@pytest.mark.parametrize("model, tasks", [("v3", V3_TASKS), ("v5", V5_TASKS)])
def test_tasks_in_worker_processes(tmp_path: Path, pool: mpool.Pool, model: str, tasks: tuple[str, ...]) -> None:
    made = make_v3() if model == "v3" else make_v5("small")
    folder = str(write_v3(tmp_path, made, adapters_v3(made)) if model == "v3" else
                 write_v5(tmp_path, made, adapters_v5(made)))
    wanted = {task: pool.embed(TEXTS, folder, adapter=task).tobytes() for task in tasks}
    assert len(set(wanted.values())) == len(tasks)
    with mpool.Pool(mpool.PoolConfig(isolation="process")) as isolated:
        assert {task: isolated.embed(TEXTS, folder, adapter=task).tobytes() for task in tasks} == wanted


def test_other_adapters_beside_the_tasks(v3: tuple[str, Any, Any], pool: mpool.Pool, tmp_path: Path) -> None:
    folder, model, found = v3
    before = pool.embed(TEXTS, folder, adapter="separation", compute="float32")
    fused = {f"encoder.layers.{layer}.mixer.out_proj": pair for layer, pair in enumerate(
        matrices(model, 3, 8, ("o_proj",)).values())}
    save_peft(tmp_path / "lora", fused, 3.0)
    pool.load(folder, adapters={"mine": tmp_path / "lora"}, compute="float32")
    mine = pool.embed(TEXTS, folder, adapter="mine", compute="float32")
    assert pool.embed(TEXTS, folder, adapter="separation", compute="float32").tobytes() == before.tobytes()
    assert np.abs(mine - pool.embed(TEXTS, folder, compute="float32")).max() > 1e-3
    with pytest.raises(InvalidArgument, match="retrieval.query.*mine or None"):
        pool.embed(TEXTS, folder, adapter="retrieval")
    with pytest.raises(InvalidArgument, match="other names than"):
        pool.load(folder, adapters={"separation": tmp_path / "lora"})
    with pytest.raises(InvalidArgument, match="at most 59 adapters"):
        pool.load(folder, adapters={f"a{at}": tmp_path / "lora" for at in range(60)})


# ---- jina-embeddings-v5 --------------------------------------------------------------------------------------------

def test_v5_states(v5: tuple[str, Any, Any], pool: mpool.Pool) -> None:
    folder, model, found = v5
    pool.load(folder, compute="float32")
    for task in V5_TASKS:
        got = token_vectors(pool, folder, _ids(), adapter=task)
        assert _error(got, merged_v5(model, found[task])) <= TOLERANCE
        for other in V5_TASKS:
            assert other == task or _error(got, merged_v5(model, found[other])) > 50 * TOLERANCE


@pytest.mark.sample(4)
@pytest.mark.parametrize("options, task, prompt", [
    ({}, "retrieval", "document"), ({"task": "query"}, "retrieval", "query"),
    ({"task": "document"}, "retrieval", "document"), ({"prompt_name": "query"}, "retrieval", "query"),
    ({"adapter": "text-matching"}, "text-matching", "document"),
    ({"adapter": "clustering", "prompt_name": "query"}, "clustering", "query"),
    ({"adapter": "classification", "dimensions": 12}, "classification", "document")])
def test_v5_embeddings(v5: tuple[str, Any, Any], pool: mpool.Pool, options: dict[str, Any], task: str,
                       prompt: str) -> None:
    folder, model, found = v5
    got = pool.embed(TEXTS, folder, compute="float32", **options)
    reference = merged_v5(model, found[task])
    wanted = [_pooled(reference, V5_PROMPTS[prompt] + text, "lasttoken", options.get("dimensions")) for text in TEXTS]
    assert np.abs(got - wanted).max() <= 1e-5


# ---- files that are refused ----------------------------------------------------------------------------------------

WQKV = "roberta.encoder.layers.0.mixer.Wqkv.parametrizations.weight.0.lora_"
WORDS = "roberta.embeddings.word_embeddings.parametrizations.weight.0.lora_"
#: Change of the tensors -> words of the error.
TENSORS: dict[str, tuple[Any, str]] = {
    "no B": (lambda t: t.pop(WQKV + "B"), "no matrix B"),
    "no A of the words": (lambda t: t.pop(WORDS + "A"), "no matrix A"),
    "four tasks": (lambda t: t.update({WQKV + "A": t[WQKV + "A"][:4]}), r"\[5, \*, \*\]"),
    "two dimensions": (lambda t: t.update({WQKV + "A": t[WQKV + "A"][0]}), r"\[5, \*, \*\]"),
    "another rank": (lambda t: t.update({WQKV + "A": t[WQKV + "A"][:, :3], WQKV + "B": t[WQKV + "B"][:, :, :3]}),
                     "rank of.*4, the lora_rank"),
    "ranks of A and B": (lambda t: t.update({WQKV + "B": t[WQKV + "B"][:, :, :3]}), r"\[\*, 4\], the rank"),
    "a rank of the words": (lambda t: t.update({WORDS + "A": t[WORDS + "A"][..., :3],
                                                WORDS + "B": t[WORDS + "B"][:, :3]}), "lora_rank"),
    "ranks of the words": (lambda t: t.update({WORDS + "B": t[WORDS + "B"][:, :3]}), r"\[4, \*\]"),
    "few words": (lambda t: t.update({WORDS + "A": t[WORDS + "A"][:, :9]}), f"{VOCAB}, 4"),
    "a narrow B of the words": (lambda t: t.update({WORDS + "B": t[WORDS + "B"][:, :, :9]}), r"\[4, 48\]"),
    "few inputs": (lambda t: t.update({WQKV + "A": t[WQKV + "A"][:, :, :9]}), r"\[4, 48\]"),
    "few outputs": (lambda t: t.update({WQKV + "B": t[WQKV + "B"][:, :9]}), r"\[144, 4\]"),
    "integers": (lambda t: t.update({WQKV + "A": t[WQKV + "A"].to(torch.int8)}), "dtype I8"),
    "another module": (lambda t: t.update({"roberta.emb_ln.parametrizations.weight.0.lora_A": torch.zeros(5, 4, 48)}),
                       "updates.*emb_ln"),
    "two names": (lambda t: t.update({"roberta.encoder.layers.0.mlp.fc1.weight": torch.zeros(100, 48)}),
                  "with and without .parametrizations"),
}


@pytest.mark.parametrize("change", TENSORS)
def test_hostile_tensors(tmp_path: Path, change: str) -> None:
    model = make_v3(1)
    folder = write_v3(tmp_path, model, adapters_v3(model))
    tensors = stored_v3(model, adapters_v3(model))
    apply, words = TENSORS[change]
    apply(tensors)
    save_tensors(tensors, config_v3(model), folder)
    with pytest.raises((FormatError, Unsupported), match=words):
        describe_folder(str(folder), key="k", ref="r")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [WORDS + "A", WORDS + "B", WQKV + "A", WQKV + "B",
                                  "roberta.embeddings.token_type_embeddings.parametrizations.weight.0.lora_A"])
def test_values_that_are_not_finite(tmp_path: Path, pool: mpool.Pool, name: str, value: float) -> None:
    model = make_v3(1)
    folder = write_v3(tmp_path, model, adapters_v3(model))
    tensors = stored_v3(model, adapters_v3(model))
    tensors[name][4, 0, 0] = value
    save_tensors(tensors, config_v3(model), folder)
    with pytest.raises(FormatError, match="finite"):
        pool.load(str(folder))


@pytest.mark.sample(4)
@pytest.mark.parametrize("key, value, words", [
    ("lora_adaptations", None, "no lora_adaptations"),
    ("lora_adaptations", ["a", "a", "b", "c", "d"], "different names"),
    ("lora_adaptations", [1], "lora_adaptations"), ("lora_adaptations", ["a"] * 17, "at most 16"),
    ("lora_adaptations", [*V3_TASKS[:4], ""], "1 to 128 characters"), ("lora_adaptations", [], "no lora_adaptations"),
    ("lora_adaptations", list(V3_TASKS[:4]), "task_instructions"),
    ("task_instructions", {"a": ""}, "task_instructions"),
    ("task_instructions", {**INSTRUCTIONS, "separation": 3}, "separation"), ("lora_rank", 0, "lora_rank"),
    ("lora_rank", 5, "lora_rank"), ("lora_rank", 1 << 40, "lora_rank"), ("lora_alpha", 0, "lora_alpha"),
    ("lora_alpha", 1e12, "lora_alpha"), ("lora_alpha", "1", "lora_alpha"),
    ("position_embedding_type", "absolute", "position_embedding_type"),
    ("position_embedding_type", None, "position_embedding_type"), ("rotary_emb_base", 0, "rotary_emb_base"),
    ("rotary_emb_dim", 8, "rotary_emb_dim"), ("rotary_emb_interleaved", True, "rotary_emb_interleaved"),
    ("rotary_emb_scale_base", 512, "rotary_emb_scale_base"), ("emb_pooler", "cls", "emb_pooler"),
    ("truncate_dim", 8, "truncate_dim"), ("hidden_act", "relu", "hidden_act"), ("is_decoder", True, "is_decoder"),
])
def test_hostile_configurations(tmp_path: Path, key: str, value: object, words: str) -> None:
    model = make_v3(1)
    folder = write_v3(tmp_path, model, adapters_v3(model), **{key: value})
    with pytest.raises((FormatError, Unsupported), match=words):
        describe_folder(str(folder), key="k", ref="r")


def test_ranks_are_limited(tmp_path: Path) -> None:
    model = make_v3(1)
    folder = write_v3(tmp_path, model, adapters_v3(model, 1025), lora_rank=1025)
    with pytest.raises(LimitError, match="at most 1024"):
        describe_folder(str(folder), key="k", ref="r")


def test_a_rank_above_the_width_of_embeddings(tmp_path: Path, pool: mpool.Pool) -> None:
    model = make_v3(1)
    folder = write_v3(tmp_path, model, adapters_v3(model, 49), lora_rank=49)
    with pytest.raises(LimitError, match="rank 49, mpool supports at most 48"):
        pool.load(str(folder))


@pytest.mark.parametrize("key, value, words", [
    ("task_names", ["text-matching"], "a list with retrieval"), ("task_names", None, "a list with retrieval"),
    ("task_names", ["retrieval", ".."], "task_names"),
    ("task_names", ["retrieval", "absent"], "absent.*adapter_config"),
    ("task_names", ["retrieval", "/etc"], "task_names")])
def test_hostile_tasks_of_v5(tmp_path: Path, key: str, value: object, words: str) -> None:
    model = make_v5("nano", 1)
    folder = write_v5(tmp_path / "model", model, adapters_v5(model), **{key: value})
    with pytest.raises(FormatError, match=words):
        describe_folder(str(folder), key="k", ref="r")


def test_adapters_outside_the_folder(tmp_path: Path) -> None:
    model = make_v5("nano", 1)
    folder = write_v5(tmp_path / "model", model, adapters_v5(model))
    (folder / "adapters/clustering").rename(tmp_path / "elsewhere")
    (folder / "adapters/clustering").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="task_names.*a link to"):
        describe_folder(str(folder), key="k", ref="r")


@pytest.mark.parametrize("change, words", [
    (lambda rows: rows[0].update(type="other.Transformer"), "other.Transformer"),
    (lambda rows: rows[0].update(kwargs=["code"]), "kwargs"),
    (lambda rows: rows[0].update(kwargs={"task": 1}), "kwargs"),
    (lambda rows: rows.pop(1), "idx is 2"), (lambda rows: rows.__delitem__(slice(1, None)), "Pooling"),
    (lambda rows: rows[1].update(type="custom_st.Pooling"), "custom_st.Pooling")])
def test_hostile_modules(tmp_path: Path, change: Any, words: str) -> None:
    model = make_v3(1)
    folder = write_v3(tmp_path, model, adapters_v3(model))
    rows = json.loads((folder / "modules.json").read_text())
    change(rows)
    (folder / "modules.json").write_text(json.dumps(rows))
    with pytest.raises(FormatError, match=words):
        describe_folder(str(folder), key="k", ref="r")


def test_own_modules_of_other_families_are_refused(tmp_path: Path) -> None:
    """Only for jina-embeddings-v3 and v5 does mpool know what the module of the repository computes."""
    from encodermodels import ENCODERS, built, write_modules

    folder = ENCODERS["bert_xlm_roberta"].write(built("bert_xlm_roberta", 1), tmp_path)
    write_modules(folder, "mean")
    rows = json.loads((folder / "modules.json").read_text())
    rows[0]["type"] = "custom_st.Transformer"
    (folder / "modules.json").write_text(json.dumps(rows))
    with pytest.raises(FormatError, match="custom_st.Transformer.*never imports"):
        describe_folder(str(folder), key="k", ref="r")


def test_scale(tmp_path: Path, pool: mpool.Pool) -> None:
    """The factor is ``lora_alpha / lora_rank``, also if both have their defaults."""
    model = make_v3()
    found = adapters_v3(model)
    folder = str(write_v3(tmp_path, model, found, lora_alpha=1))
    got = token_vectors(pool, folder, _ids(), adapter="classification")
    assert _error(got, merged_v3(model, found, "classification", 1 / RANK)) <= TOLERANCE
    assert ALPHA != 1 and _error(got, merged_v3(model, found, "classification")) > 50 * TOLERANCE
