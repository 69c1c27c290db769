"""Seeded models with one adapter per task, in the layouts of jina-embeddings-v3 and v5.

v3: tensors with the task as the first dimension, as modeling_lora.py of jinaai/xlm-roberta-flash-implementation
registers them. v5: folders of PEFT below ``adapters``, as modeling_jina_embeddings_v5.py and vLLM read them.
"""

import copy
import json
from pathlib import Path
from typing import Any

from adapterfiles import Matrices, matrices, merged, save_peft
from encodermodels import VOCAB, eurobert, flash_config, jina_v3, published_jina_v3, qwen3, save_tensors
from paritymodels import randomise, torch, write_tokenizer

V3_TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
#: Instructions of the published tasks, in words of the tiny vocabulary.
INSTRUCTIONS = {"retrieval.query": "w7 w8 w9 ", "retrieval.passage": "w10 w11 ", "separation": "", "classification": "",
                "text-matching": ""}
RANK, ALPHA = 4, 6.0
V5_TASKS = ("retrieval", "text-matching", "clustering", "classification")
V5_PROMPTS = {"query": "w12 w13 ", "document": "w14 "}
_LORA = ".parametrizations.weight.0.lora_"

#: Name of a weight in the published files, without ``.weight`` -> A and B, one matrix per task.
Stored = dict[str, tuple[Any, Any]]


# ---- v3 ------------------------------------------------------------------------------------------------------------

def make_v3(layers: int = 2) -> Any:
    model = jina_v3(layers)
    randomise(model, 1)
    return model


def adapters_v3(model: Any, rank: int = RANK, seed: int = 3) -> Stored:
    """Return random matrices for every weight that the published code adapts, but the pooler."""
    generator = torch.Generator().manual_seed(seed)
    found: Stored = {}
    for name, tensor in published_jina_v3(model).items():
        if tensor.dim() != 2:
            continue
        rows, columns = tensor.shape
        shapes = ((rows, rank), (rank, columns)) if "embeddings." in name else ((rank, columns), (rows, rank))
        a, b = (0.3 * torch.randn(len(V3_TASKS), *shape, generator=generator) for shape in shapes)
        found[name.removesuffix(".weight")] = a, b / rank**0.5
    return found


def stored_v3(model: Any, found: Stored) -> dict[str, Any]:
    """Return all tensors of the published files, with those of the pooler, which embeddings do not use."""
    tensors = {name.removesuffix(".weight") + ".parametrizations.weight.original"
               if name.removesuffix(".weight") in found else name: tensor
               for name, tensor in published_jina_v3(model).items()}
    for name, pair in found.items():
        tensors |= {f"{name}{_LORA}{side}": matrix for side, matrix in zip("AB", pair)}
    size = model.config.hidden_size
    pooler = "roberta.pooler.dense"
    return tensors | {
        f"{pooler}.bias": torch.zeros(size), f"{pooler}.parametrizations.weight.original": torch.zeros(size, size),
        f"{pooler}{_LORA}A": torch.zeros(5, RANK, size), f"{pooler}{_LORA}B": torch.zeros(5, size, RANK)}


def config_v3(model: Any, **more: Any) -> dict[str, Any]:
    return flash_config(model, **{
        "lora_adaptations": list(V3_TASKS), "task_instructions": INSTRUCTIONS, "lora_rank": RANK, "lora_alpha": ALPHA,
        "load_trained_adapters": True, "matryoshka_dimensions": [8, 16, 48], **more})


def write_v3(folder: Path, model: Any, found: Stored, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(stored_v3(model, found), config_v3(model, **config), folder)
    write_tokenizer(folder, VOCAB)
    kinds = ["custom_st.Transformer", "sentence_transformers.models.Pooling", "sentence_transformers.models.Normalize"]
    (folder / "modules.json").write_text(json.dumps([
        {"idx": at, "name": str(at), "path": path, "type": kind, **({} if at else {"kwargs": ["task"]})}
        for at, (kind, path) in enumerate(zip(kinds, ["", "1_Pooling", "2_Normalize"]))]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps({
        "word_embedding_dimension": model.config.hidden_size, "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(
        {"prompts": INSTRUCTIONS, "default_prompt_name": None, "similarity_fn_name": "cosine"}))
    return folder


def merged_v3(model: Any, found: Stored, task: str, scale: float = ALPHA / RANK) -> Any:
    """Return a copy of the model with the weights of a task: W + scale * B A, and W + scale * A B for embeddings."""
    whole, at = copy.deepcopy(model), V3_TASKS.index(task)
    modules = dict(whole.named_modules())
    names = [("mixer.out_proj", "self_attn.o_proj"), ("encoder.layers.", "layers."), ("roberta.", "")]
    for name, (a, b) in found.items():
        for old, new in names:
            name = name.replace(old, new)
        update = scale * (a[at] @ b[at] if "embeddings." in name else b[at] @ a[at])
        parts = [name] if "Wqkv" not in name else [name.replace("mixer.Wqkv", f"self_attn.{one}_proj") for one in "qkv"]
        for part, rows in zip(parts, update.chunk(len(parts))):
            modules[part].weight.data += rows
    return whole.eval()


# ---- v5 ------------------------------------------------------------------------------------------------------------

def make_v5(kind: str, layers: int = 2) -> Any:
    """Return a seeded network: ``small`` (Qwen3) or ``nano`` (EuroBERT)."""
    model = qwen3(layers) if kind == "small" else eurobert(layers)
    randomise(model, 6)
    return model


def adapters_v5(model: Any, rank: int = 8) -> dict[str, Matrices]:
    return {task: matrices(model, rank, seed) for seed, task in enumerate(V5_TASKS)}


def write_v5(folder: Path, model: Any, found: dict[str, Matrices], alpha: float = 12.0, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    causal = config["model_type"] == "qwen3"
    config.pop("is_causal", None)
    config |= {"model_type": "jina_embeddings_v5", "architectures": ["JinaEmbeddingsV5Model"],
               "task_names": list(V5_TASKS), "is_decoder": causal, "auto_map": {
                   "AutoConfig": "configuration_jina_embeddings_v5.JinaEmbeddingsV5Config",
                   "AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"}, **more}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "inv_freq" not in name}
    save_tensors(tensors, config, folder)
    write_tokenizer(folder, VOCAB)
    for task, adapter in found.items():
        save_peft(folder / "adapters" / task, adapter, alpha, task_type="FEATURE_EXTRACTION")
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer",
         "kwargs": ["task", "truncate_dim"]}]))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(
        {"prompts": V5_PROMPTS, "default_prompt_name": "document", "similarity_fn_name": "cosine"}))
    return folder


def merged_v5(model: Any, adapter: Matrices, alpha: float = 12.0, rank: int = 8) -> Any:
    return merged(model, adapter, alpha / rank)
