"""The reader of GGUF tables: keys, tensors, end tokens, chat templates."""

import random
import types
from typing import Any

import pytest

from mpool import errors
from mpool.models import files
from mpool.models.families import granite
from mpool.models.formats import gguf_model
from mpool.models.describing import describe
from mpool.models.fields import Fields
from mpool.models.spec import ModelDescription, TensorEntry

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "<|im_end|>", "c", "<|im_end|>x", "d"]
LLAMA: dict[str, Any] = {
    "general.architecture": "llama", "general.license": "mit", "general.name": "x",
    "llama.block_count": 2, "llama.context_length": 64, "llama.embedding_length": 8, "llama.feed_forward_length": 12,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": 2, "llama.rope.freq_base": 1e5,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 3, 1, 1, 1], "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "{{ x }}",
}
BERT: dict[str, Any] = {
    "general.architecture": "bert", "bert.block_count": 1, "bert.context_length": 16, "bert.embedding_length": 6,
    "bert.feed_forward_length": 10, "bert.attention.head_count": 2, "bert.attention.layer_norm_epsilon": 1e-12,
    "bert.attention.causal": False, "bert.pooling_type": 2, "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": TOKENS,
}


def llama_shapes(layers: int = 2, rows: int = 9, *, qwen: bool = False,
                 output: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (rows, 8), "output_norm.weight": (8,)}
    if output:
        shapes["output.weight"] = (rows, 8)
    for i in range(layers):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in {
            "attn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8),
            "ffn_norm": (8,), "ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12)}.items()}
        if qwen:
            shapes |= {f"blk.{i}.attn_q.bias": (8,), f"blk.{i}.attn_k.bias": (4,), f"blk.{i}.attn_v.bias": (4,)}
    return shapes


def bert_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (9, 6), "position_embd.weight": (16, 6), "token_types.weight": (2, 6),
        "token_embd_norm.weight": (6,), "token_embd_norm.bias": (6,)}
    for name, out, size in (("attn_q", 6, 6), ("attn_k", 6, 6), ("attn_v", 6, 6), ("attn_output", 6, 6),
                            ("ffn_up", 10, 6), ("ffn_down", 6, 10)):
        shapes |= {f"blk.0.{name}.weight": (out, size), f"blk.0.{name}.bias": (out,)}
    for name in ("attn_output_norm", "layer_output_norm"):
        shapes |= {f"blk.0.{name}.weight": (6,), f"blk.0.{name}.bias": (6,)}
    return shapes


def read(kv: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> ModelDescription:
    """Describe a file with these keys (the value "absent" removes a key) and float32 tensors of these shapes."""
    tensors, at = [], 4096
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        tensors.append(TensorEntry(name, "F32", shape, 0, at, size))
        at += size
    return gguf_model.describe_tables({k: v for k, v in kv.items() if v != "absent"}, tensors, ["/m/x.gguf"], key="k",
                                      ref="r")


def llama(shapes: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> ModelDescription:
    """Describe a small Llama with some keys changed."""
    return read({**LLAMA, **changes}, shapes or llama_shapes())


def test_sliding_window_pattern() -> None:
    """The key is a flag per layer, or the distance n of layers with full attention; its default is the family's."""
    from mpool.models.families.llama import window_pattern

    def windowed(pattern: object) -> list[bool]:
        keys = {"g.block_count": 4, **({} if pattern is None else {"g.attention.sliding_window_pattern": pattern})}
        return window_pattern(Fields(keys, file="m.gguf"), "g", 2)

    assert windowed(None) == [True, False, True, False] and windowed(3) == [True, True, False, True]
    assert windowed([False, True, True, False]) == [False, True, True, False] and windowed(1) == [False] * 4
    with pytest.raises(errors.FormatError, match="4 values, one per layer"):
        windowed([True])


def test_unsupported_reranker_lists_the_supported_architectures() -> None:
    keys = {"qwen3.pooling_type": 4}
    with pytest.raises(errors.Unsupported, match="qwen3.pooling_type is 4, a reranker.*for the architectures .*bert"):
        gguf_model._embedding(Fields(keys, file="m.gguf"), "qwen3", {}, {"P": 64, "D": 32}, [])


def test_normalisation_of_expert_weights_follows_the_file() -> None:
    from mpool.models.families import qwen_moe

    complete = qwen_moe.ROWS[0].complete
    assert complete is not None
    for keys, normalised in (({}, True), ({"qwen3moe.expert_weights_norm": False}, False)):
        kv: dict[str, Any] = {}
        complete(Fields(keys, file="m.gguf"), "qwen3moe", kv)
        assert kv["mpool.expert_normalise"] is normalised


def test_llama() -> None:
    found = llama()
    assert (found.capability, found.spec.architecture, found.license) == ("text_to_text", "llama", "mit")
    kv = found.spec.kv
    assert "mpool.rope_neox" not in kv and kv["mpool.activation"] == "silu" and kv["llama.vocab_size"] == 9
    assert kv["llama.rope.freq_base"] == 1e5 and not any(name.startswith(("tokenizer.", "general.")) for name in kv)
    assert found.tokenizer is not None and found.tokenizer.gguf is not None
    assert set(found.tokenizer.gguf) == {name for name in LLAMA if name.startswith("tokenizer.")}
    assert found.tokenizer.config == {"file": "/m/x.gguf"}
    assert found.chat_template == "{{ x }}" and len(found.spec.tensors) == 3 + 18
    generation = found.generation
    assert generation is not None
    # an end-of-turn token ends a generation in addition to eos, but only as a control token with exactly that text
    assert generation.eog_token_ids == (2, 5) and generation.bos_token_id == 1 and not generation.add_bos
    assert generation.context_length == 64


def test_defaults_of_missing_keys() -> None:
    kv = llama(**{"llama.rope.freq_base": "absent", "llama.rope.dimension_count": "absent",
                  "llama.attention.head_count_kv": "absent"},
               shapes=llama_shapes() | {f"blk.{i}.attn_{n}.weight": (8, 8) for i in range(2) for n in "kv"}).spec.kv
    assert kv["llama.rope.freq_base"] == 10000.0 and kv["llama.rope.dimension_count"] == 2
    assert kv["llama.attention.head_count_kv"] == 4
    assert "output.weight" not in {t.name for t in llama(llama_shapes(output=False)).spec.tensors}
    spm = {"tokenizer.ggml.model": "llama"}
    assert llama(**spm).generation.add_bos  # type: ignore[union-attr]
    assert not llama(**spm, **{"tokenizer.ggml.add_bos_token": False}).generation.add_bos  # type: ignore[union-attr]
    assert len(llama({**llama_shapes(), "rope_freqs.weight": (1,)}).spec.tensors) == 22


def test_layer_sizes_as_a_list() -> None:
    """A list with equal values per layer means the same as one number."""
    layers = {"llama.attention.head_count_kv": [LLAMA["llama.attention.head_count_kv"]] * 2}
    assert read(LLAMA | layers, llama_shapes()).spec == read(LLAMA, llama_shapes()).spec
    with pytest.raises(U, match="head_count_kv differs"):
        read(LLAMA | {"llama.attention.head_count_kv": [1, 2]}, llama_shapes())
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        for count in (1, 3, 1000):
            with pytest.raises(errors.FormatError, match=f"{key} is {count:,} values, allowed: 2 values, one"):
                read(LLAMA | {f"llama.{key}": [LLAMA[f"llama.{key}"]] * count}, llama_shapes())
    with pytest.raises(errors.FormatError, match="head_count_kv.*empty"):
        read(LLAMA | {"llama.attention.head_count_kv": []}, llama_shapes())


def test_granite_4() -> None:
    """Zero KV heads mean a Mamba layer."""
    hybrid = {name.replace("llama.", "granitehybrid."): value for name, value in LLAMA.items()} | {
        "general.architecture": "granitehybrid", "granitehybrid.attention.head_count_kv": [2, 2],
        "granitehybrid.ssm.conv_kernel": 4, "granitehybrid.rope.scaling.finetuned": True,
        "granitehybrid.logit_scale": 10.0, "granitehybrid.attention.scale": 0.5}
    spec = read(hybrid, llama_shapes()).spec
    assert spec.kv["granitehybrid.attention.head_count_kv"] == 2 and "mpool.layer_mixers" not in spec.kv
    assert (spec.kv["mpool.output_scale"], spec.kv["mpool.attention_scale"]) == (0.1, 0.5)
    with pytest.raises(errors.FormatError, match="granitehybrid.ssm.time_step_rank is missing"):
        read(hybrid | {"granitehybrid.attention.head_count_kv": [0, 2]}, llama_shapes())
    with pytest.raises(U, match="some layers have attention"):
        read(hybrid | {"granitehybrid.attention.head_count_kv": [0, 0]}, llama_shapes())


@pytest.mark.parametrize("architecture", ["granite", "granitehybrid"])
def test_granite_without_rope(architecture: str) -> None:
    """``rope.scaling.finetuned`` false means "no RoPE" in llama.cpp, for Granite but for no other family."""
    values = {name.replace("llama.", f"{architecture}."): value for name, value in LLAMA.items()} | {
        "general.architecture": architecture}
    for more, layers in (({}, None), ({"rope.scaling.finetuned": True}, None),
                         ({"rope.scaling.finetuned": False}, [-1, -1])):
        found = read(values | {f"{architecture}.{key}": value for key, value in more.items()}, llama_shapes()).spec
        assert found.kv.get("mpool.rope_layers") == layers
    assert "mpool.rope_layers" not in llama(**{"llama.rope.scaling.finetuned": False}).spec.kv


def test_qwen2() -> None:
    kv = {name.replace("llama.", "qwen2."): value for name, value in LLAMA.items()} | {"general.architecture": "qwen2"}
    found = read(kv, llama_shapes(qwen=True))
    assert "blk.0.attn_q.bias" in {entry.name for entry in found.spec.tensors}
    with pytest.raises(errors.FormatError, match="attn_q.bias"):
        read(kv, llama_shapes())


def test_embedding_may_have_more_rows_than_tokens() -> None:
    assert llama(llama_shapes(rows=12)).spec.kv["llama.vocab_size"] == 12
    assert llama(llama_shapes(rows=12), **{"llama.vocab_size": 9}).spec.kv["llama.vocab_size"] == 12


def test_bert_and_its_poolings() -> None:
    for kind, pooling in ((1, "mean"), (2, "cls"), (3, "lasttoken"), (0, "mean"), ("absent", "mean")):
        found = read({**BERT, "bert.pooling_type": kind}, bert_shapes())
        assert found.embedding is not None and found.generation is None and found.chat_template is None
        assert found.embedding.pooling == (pooling,) and found.embedding.normalize
        assert found.spec.kv["mpool.pooling"] == [pooling] and found.spec.kv["mpool.dense_count"] == 0
        assert found.embedding.max_tokens == 16 and found.embedding.output_size == 6
    without = {name: shape for name, shape in bert_shapes().items() if name != "token_types.weight"}
    assert len(read(BERT, without).spec.tensors) == len(bert_shapes()) - 1
    # the head of a classifier is not used and is omitted from the spec
    assert "cls.weight" not in {t.name for t in read(BERT, {**bert_shapes(), "cls.weight": (6, 6)}).spec.tensors}


F, L, U = errors.FormatError, errors.LimitError, errors.Unsupported


@pytest.mark.parametrize("shapes, error, names", [
    ({"output_norm.weight": None}, F, "output_norm.weight missing"), ({"blk.1.attn_q.weight": None}, F, "attn_q"),
    ({"token_embd.weight": None}, F, "token_embd.weight missing"), ({"blk.2.attn_q.weight": (8, 8)}, F, "blk.2.attn_q"),
    ({"blk.0.attn_q.bias": (7,)}, F, "shape of blk.0.attn_q.bias"),
    ({"blk.0.attn_q.weight": (8, 4)}, F, "shape of blk.0.attn_q"),
    ({"output.weight": (8, 8)}, F, "shape of output.weight"), ({"token_embd.weight": (9, 7)}, F, "shape of token_embd"),
    ({"blk.0.ffn_gate_exps.weight": (2, 12, 8)}, U, "mixture of experts"),
    ({"blk.0.ffn_up.3.weight": (12, 8)}, U, "mixture of experts"), ({"rope_freqs.weight": (3,)}, F, "rope_freqs"),
])
def test_refused_tensors(shapes: dict[str, Any], error: type[Exception], names: str) -> None:
    changed = {name: shape for name, shape in {**llama_shapes(), **shapes}.items() if shape is not None}
    with pytest.raises(error, match=names.replace(".", r"\.")):
        llama(changed)


def test_mutated_tables_raise_only_mpool_errors() -> None:
    rng = random.Random(0)
    odd = [True, 0, -1, 1, 3, 1 << 33, 1 << 63, 0.5, float("nan"), "", "x", "linear", [], [1], ["x"], [[]], b"x",
           "absent"]
    refused = 0
    for _ in range(600):
        kv, shapes = (LLAMA, llama_shapes()) if rng.random() < 0.6 else (BERT, bert_shapes())
        key = rng.choice([*kv, "llama.pooling_type", "llama.vocab_size", "llama.expert_count", "llama.attention.causal",
                          "llama.rope.scaling.type", "llama.attention.sliding_window", "general.license"])
        changed: dict[str, Any] = {**kv, key: rng.choice(odd)}
        if rng.random() < 0.3:
            shapes = {**shapes, rng.choice(list(shapes)): tuple(rng.choices([0, 1, 6, 8, 9], k=rng.randint(0, 3)))}
        try:
            assert read(changed, shapes).spec.tensors
        except errors.MpoolError as error:
            refused += 1
            assert "/m/x.gguf" in str(error)
    assert 200 < refused < 600


def test_describe_reads_through_the_core(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    table = types.SimpleNamespace(
        keys=list(LLAMA), value=LLAMA.__getitem__, files=[str(path)], stamps=[files.stamp(str(path))],
        tensors=[(name, "F32", list(shape), 0, 64, 4) for name, shape in llama_shapes().items()])
    core = pytest.importorskip("mpool._core", reason="mpool's C core is not built")
    monkeypatch.setattr(core, "read_gguf", lambda given: table if given == str(path) else None)
    found = describe(path, key="mine")
    assert found.key == "mine" and found.ref == str(path) and found.spec.files == (str(path),)
    assert found.spec.tensors[0] == TensorEntry("token_embd.weight", "F32", (9, 8), 0, 64, 4)
    # the path of a folder with one GGUF model refers to that model
    assert describe(tmp_path).spec.files == (str(path),)


@pytest.mark.parametrize("texts, ends", [(("<|end|>", "<|call|>", "<|im_end|>"), (3, 5)),
                                         (("<|end|>", "<|call|>", "<|return|>"), (4, 5))])
def test_end_of_a_harmony_message_does_not_end_the_completion(texts: tuple[str, ...], ends: tuple[int, ...]) -> None:
    """GPT-OSS ends each message with ``<|end|>`` and its completion with ``<|return|>`` or ``<|call|>``."""
    tokens = [*TOKENS[:3], *texts, *TOKENS[6:]]
    generation = llama(**{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [2, 3, 3, 3, 3, 3, 1, 1, 1],
                          "tokenizer.ggml.eos_token_id": 5}).generation
    assert generation is not None and generation.eog_token_ids == ends


@pytest.mark.parametrize("name", ["smollm3", "gemma3", "gpt-oss", "qwen3moe"])
def test_layer_count_is_checked_before_allocation(name: str) -> None:
    """A small file that claims billions of layers costs neither time nor memory."""
    table = {key.replace("llama", name): value for key, value in LLAMA.items() if key != "general.architecture"}
    with pytest.raises(errors.LimitError, match="layers"):
        read(table | {"general.architecture": name, f"{name}.block_count": 4_000_000_000}, llama_shapes())


def test_expert_count_is_checked_before_allocation() -> None:
    table = {key.replace("llama", "qwen3moe"): value for key, value in LLAMA.items() if key != "general.architecture"}
    many = {"block_count": 512, "expert_count": 4096, "expert_used_count": 8, "expert_feed_forward_length": 8}
    with pytest.raises(errors.LimitError, match="experts"):
        read(table | {"general.architecture": "qwen3moe"} | {f"qwen3moe.{key}": value for key, value in many.items()},
             llama_shapes())


def test_unsupported_activation_is_refused() -> None:
    assert llama(**{"llama.hidden_activation": "silu"}).spec.architecture == "llama"
    with pytest.raises(errors.Unsupported, match="hidden_activation"):
        llama(**{"llama.hidden_activation": "gelu"})
    with pytest.raises(errors.FormatError, match="hidden_activation"):
        llama(**{"llama.hidden_activation": "wavy"})


@pytest.mark.parametrize("value, used", [(None, None), (0.0, None), (0.25, 0.25), (1.0, 1.0)])
@pytest.mark.parametrize("key, ours", [("embedding_scale", "embedding_scale"), ("residual_scale", "residual_scale"),
                                       ("attention.scale", "attention_scale")])
def test_factors_of_granite_that_a_file_does_not_set(key: str, ours: str, value: float | None,
                                                     used: float | None) -> None:
    """0 and a missing key mean that the model has no such factor, so that attention has its usual scale."""
    kv: dict[str, Any] = {}
    table = Fields.of({} if value is None else {f"granite.{key}": value}, file="m.gguf")
    granite._complete(table, "granite", kv)
    assert kv == {"mpool.output_scale": 1.0} | ({} if used is None else {f"mpool.{ours}": used})
