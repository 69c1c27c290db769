"""Readers of checkpoints written by transformers and sentence-transformers: names, sizes, pooling modes, modules.

Tensor names are compared with the ``gguf`` package's table, which is independent of mpool's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from mpool import errors  # noqa: E402
from mpool.models.formats.hf_folder import describe_folder  # noqa: E402
from mpool.models.spec import ModelDescription  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(26))]


def save_tokenizer(path: Path) -> None:
    (path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny seeded models by name, with grouped-query attention, odd sizes and random norms and biases."""
    torch.manual_seed(0)
    decoder = dict(vocab_size=31, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                   intermediate_size=36, max_position_embeddings=128, rms_norm_eps=1e-5)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}
    models = {
        "bert": transformers.BertModel(transformers.BertConfig(
            vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
            max_position_embeddings=48, hidden_act="gelu_new")),
        "bert_mlm": transformers.BertForMaskedLM(transformers.BertConfig(
            vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
            max_position_embeddings=48)),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoder, rope_parameters=rope)),
        "llama_tied": transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoder, tie_word_embeddings=True,
                                                                             head_dim=8)),
        "qwen2": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**decoder, tie_word_embeddings=True)),
    }
    paths = {}
    for name, model in models.items():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.1 if parameter.ndim == 1 else 0.0, 0.05)
        paths[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(paths[name])
        save_tokenizer(paths[name])
    models["qwen2"].save_pretrained(tmp_path_factory.getbasetemp() / "sharded", max_shard_size="20KB")
    paths["qwen2_sharded"] = tmp_path_factory.getbasetemp() / "sharded"
    save_tokenizer(paths["qwen2_sharded"])
    models["llama"].to(torch.bfloat16).save_pretrained(tmp_path_factory.getbasetemp() / "half")
    paths["llama_bf16"] = tmp_path_factory.getbasetemp() / "half"
    save_tokenizer(paths["llama_bf16"])
    return paths


def described(path: Path) -> ModelDescription:
    """Describe a folder."""
    return describe_folder(str(path), key="k", ref="r")


def raw(spec: Any, name: str) -> bytes:
    """Return the stored bytes of a tensor."""
    tensor = next(t for t in spec.tensors if t.name == name)
    with open(spec.files[tensor.file], "rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


@pytest.mark.parametrize("name", ["bert", "bert_mlm", "llama", "llama_tied", "qwen2", "qwen2_sharded", "llama_bf16"])
def test_tensor_names_are_those_of_the_gguf_package(checkpoints: dict[str, Path], name: str) -> None:
    from safetensors import safe_open

    path = checkpoints[name]
    spec = described(path).spec
    arch = {"bert": gguf.MODEL_ARCH.BERT, "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[
        spec.architecture]
    table = gguf.get_tensor_name_map(arch, int(spec.kv[f"{spec.architecture}.block_count"]))
    seen = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), "pt") as stored:
            for source in stored.keys():
                if source.removeprefix("bert.").startswith(("pooler.", "cls.")):
                    continue
                bare = source if spec.architecture != "bert" else source.removeprefix("bert.")
                expected = table.get_name(bare, (".weight", ".bias"))
                assert expected is not None, source
                value = stored.get_tensor(source)
                stored_bytes = value.contiguous().view(torch.uint8).numpy().tobytes()
                assert raw(spec, expected) == stored_bytes, (source, expected)
                entry = next(t for t in spec.tensors if t.name == expected)
                assert entry.shape == tuple(value.shape)
                assert entry.dtype == {torch.float32: "F32", torch.bfloat16: "BF16"}[value.dtype]
                seen.add(expected)
    assert seen == {t.name for t in spec.tensors}
    assert len(spec.files) == len(list(path.glob("*.safetensors"))) == (len(spec.files) if "sharded" in name else 1)
    assert len(spec.files) > 1 or "sharded" not in name


def test_hyper_parameters(checkpoints: dict[str, Path]) -> None:
    kv = described(checkpoints["bert"]).spec.kv
    assert kv["mpool.activation"] == "gelu_tanh" and kv["bert.attention.head_count"] == 3
    assert described(checkpoints["bert_mlm"]).spec.kv["mpool.activation"] == "gelu"
    llama = described(checkpoints["llama"])
    assert llama.spec.kv["llama.rope.freq_base"] == 5e5 and llama.spec.kv["llama.rope.scaling.type"] == "llama3"
    assert llama.spec.kv["llama.rope.scaling.original_context_length"] == 64
    assert llama.generation is not None and llama.generation.eog_token_ids == (2,)
    assert described(checkpoints["llama_tied"]).spec.kv["llama.attention.key_length"] == 8
    names = {t.name for t in described(checkpoints["llama_tied"]).spec.tensors}
    assert "output.weight" not in names
    assert "output.weight" in {t.name for t in llama.spec.tensors}
    assert described(checkpoints["qwen2"]).spec.kv["qwen2.rope.dimension_count"] == 6


def test_old_configuration_gives_the_same_parameters(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """transformers 4 wrote ``rope_scaling`` and ``rope_theta`` in place of ``rope_parameters``."""
    old = tmp_path / "old"
    old.mkdir()
    for file in checkpoints["llama"].iterdir():
        (old / file.name).write_bytes(file.read_bytes())
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (old / "config.json").write_text(json.dumps(config))
    assert dict(described(old).spec.kv) == dict(described(checkpoints["llama"]).spec.kv)


def test_pickled_weights_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "pickle"
    path.mkdir()
    for file in checkpoints["bert"].iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    torch.save({"w": torch.zeros(2)}, path / "pytorch_model.bin")
    with pytest.raises(errors.UnsafeFormat, match="safetensors"):
        described(path)
    from mpool.models import resolve

    torch.save({"w": torch.zeros(2)}, path / "weights")
    for name in ("pytorch_model.bin", "weights"):
        with pytest.raises(errors.UnsafeFormat):
            resolve(str(path / name))


@pytest.mark.builds
def test_the_command_of_the_hint_converts_pickled_weights(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The error's command, run unchanged in a shell, makes the folder readable. Shards and shared tensors included."""
    for file in checkpoints["bert"].iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    state = transformers.BertModel.from_pretrained(checkpoints["bert"]).state_dict()
    names = sorted(state)
    for i, part in enumerate((names[::2], names[1::2])):
        torch.save({name: state[name] for name in part}, tmp_path / f"pytorch_model-{i}.bin")
    torch.save({"pooler.twin": state[names[0]], names[0]: state[names[0]]}, tmp_path / "pytorch_model-9.bin")
    with pytest.raises(errors.UnsafeFormat, match="To convert the model, run this in the model's folder") as caught:
        described(tmp_path)
    command = str(caught.value.hint).partition("are installed: ")[2]
    assert command.startswith("python -c ")
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, cwd=tmp_path, timeout=120)
    converted = described(tmp_path)
    wanted = described(checkpoints["bert"])
    assert {tensor.name for tensor in converted.spec.tensors} == {tensor.name for tensor in wanted.spec.tensors}


@pytest.mark.parametrize("modes, dense, normalize", [
    (["mean"], None, True), (["cls"], None, False), (["max"], "Tanh", True),
    (["mean_sqrt_len_tokens"], "Identity", False),
    (["weightedmean"], "GELU", True), (["lasttoken"], "ReLU", False), (["mean", "cls", "max"], "SiLU", True)])
def test_sentence_transformers_folder(checkpoints: dict[str, Path], tmp_path: Path, modes: list[str], dense: str | None,
                                      normalize: bool) -> None:
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules as models

    modules = [models.Transformer(str(checkpoints["bert"])),
               models.Pooling(24, pooling_mode=modes if len(modes) > 1 else modes[0], include_prompt=not normalize)]
    if dense:
        modules.append(models.Dense(24 * len(modes), 10, bias=dense != "GELU",
                                    activation_function=getattr(torch.nn, dense)()))
    if normalize:
        modules.append(models.Normalize())
    model = st.SentenceTransformer(modules=modules, device="cpu", prompts={"query": "find: "},
                                   default_prompt_name="query", similarity_fn_name="dot")
    model.max_seq_length = 20
    model.save(str(tmp_path / "st"), create_model_card=False)
    found = described(tmp_path / "st")
    again = st.SentenceTransformer(str(tmp_path / "st"), device="cpu", local_files_only=True)
    embedding = found.embedding
    assert embedding is not None
    assert embedding.max_tokens == again.max_seq_length == 20
    assert embedding.output_size == again.get_embedding_dimension()
    assert list(embedding.pooling) == [mode.replace("_tokens", "") for mode in modes]
    assert embedding.normalize is normalize and embedding.include_prompt is not normalize
    assert embedding.prompts == again.prompts and embedding.default_prompt_name == again.default_prompt_name == "query"
    assert embedding.similarity == again.similarity_fn_name == "dot"
    kv = found.spec.kv
    assert kv["mpool.dense_count"] == (1 if dense else 0)
    if dense:
        assert kv["mpool.dense.0.activation"] == dense.lower()
        linear = again[2].linear
        assert raw(found.spec, "dense.0.weight") == linear.weight.detach().numpy().tobytes()
        assert ("dense.0.bias" in {t.name for t in found.spec.tensors}) is (dense != "GELU")


def test_defaults_without_modules_are_those_of_sentence_transformers(checkpoints: dict[str, Path]) -> None:
    st = pytest.importorskip("sentence_transformers")
    model = st.SentenceTransformer(str(checkpoints["bert"]), device="cpu", local_files_only=True)
    embedding = described(checkpoints["bert"]).embedding
    assert embedding is not None
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling"]
    assert model[1].pooling_mode == "mean" and embedding.pooling == ("mean",) and not embedding.normalize
    assert embedding.max_tokens == model.max_seq_length == 48
    assert os.path.exists(str(described(checkpoints["bert"]).tokenizer.json_path))  # type: ignore[union-attr]


def test_every_module_class_of_sentence_transformers_is_known() -> None:
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules as models

    from mpool.models.formats.sentence_folder import CLASSES

    assert st.__version__
    for kind in ("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LSTM", "CNN", "BoW", "WordEmbeddings",
                 "WordWeights", "LayerNorm", "WeightedLayerPooling", "CLIPModel", "Router", "StaticEmbedding"):
        cls = getattr(models, kind)
        assert CLASSES[f"{cls.__module__}.{cls.__name__}"] == kind
        assert CLASSES[f"sentence_transformers.models.{kind}"] == kind
