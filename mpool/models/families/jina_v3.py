"""jina-embeddings-v3 (arXiv:2409.10173) and jina-colbert-v2 (arXiv:2408.16672): XLM-RoBERTa with rotary positions.

The models are published with the code of https://huggingface.co/jinaai/xlm-roberta-flash-implementation and the model
type ``xlm-roberta``. Rotary positions and a fused matrix of queries, keys and values distinguish them from XLM-RoBERTa.
transformers has the network as ``jina_embeddings_v3``, and saves it under the same tensor names
(https://github.com/huggingface/transformers/tree/main/src/transformers/models/jina_embeddings_v3).

jina-embeddings-v3 has one low-rank adapter per task (``modeling_lora.py`` of the published code). Each weight ``W``,
also those of the token embeddings, has a tensor ``lora_A`` and a tensor ``lora_B`` whose first dimension is the task.
``lora_adaptations`` lists the tasks in this order, and ``lora_alpha / lora_rank`` is the factor.
"""

from __future__ import annotations

from dataclasses import replace

from ..fields import Fields
from .reading import activation, check_neutral, plain_rope, require_values, sizes, unsupported
from .rows import Architecture, Config, TaskAdapters, Tensor, layer

_BLOCK = "encoder.layers.{}"
_TENSORS = (
    Tensor("embeddings.word_embeddings.weight", "token_embd.weight", "VD"),
    Tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "TD", "types"),
    Tensor("emb_ln.weight", "token_embd_norm.weight", "D"),
    Tensor("emb_ln.bias", "token_embd_norm.bias", "D"),
    *layer(f"{_BLOCK}.mixer.Wqkv[0]", "attn_q", "QD", bias="Q"),
    *layer(f"{_BLOCK}.mixer.Wqkv[1]", "attn_k", "KD", bias="K"),
    *layer(f"{_BLOCK}.mixer.Wqkv[2]", "attn_v", "UD", bias="U"),
    *layer(f"{_BLOCK}.mixer.out_proj", "attn_output", "DO", bias="D"),
    *layer(f"{_BLOCK}.norm1", "attn_output_norm", "D", bias="D"),
    *layer(f"{_BLOCK}.mlp.fc1", "ffn_up", "FD", bias="F"),
    *layer(f"{_BLOCK}.mlp.fc2", "ffn_down", "DF", bias="D"),
    *layer(f"{_BLOCK}.norm2", "layer_output_norm", "D", bias="D"),
)

#: Options of the published code -> values that mpool supports.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "rotary_emb_scale_base": (None,), "rotary_emb_interleaved": (False, None), "emb_pooler": (None, "mean"),
    "last_layer_subset": (False, None), "fused_mlp": (False, None), "truncate_dim": (None,),
}
#: Keys that only concern training or the choice of kernels, or that are checked elsewhere.
_IGNORED = {"use_flash_attn", "use_reentrant", "fused_bias_fc", "fused_dropout_add_ln", "mlp_checkpoint_lvl",
            "lora_dropout_p", "lora_main_params_trainable", "load_trained_adapters", "auto_map",
            "pad_vocab_size_multiple", "matryoshka_dimensions", "tie_word_embeddings"}
#: Most tasks of a model, and longest name of one.
MAX_TASKS, MAX_TASK_NAME = 16, 128
#: Values of the option ``task`` -> task of the model.
_BY_TASK = {"query": "retrieval.query", "document": "retrieval.passage"}


def read_task_names(config: Fields, key: str) -> tuple[str, ...]:
    """Return the names of a model's tasks, each of which has an adapter; none if the key is absent."""
    if config.get(key) is None:
        return ()
    names = config.list(key, of=str, limit=MAX_TASKS)
    for name in names:
        if not 1 <= len(name) <= MAX_TASK_NAME or names.count(name) > 1:
            config.fail(key, repr(name[:MAX_TASK_NAME]), f"different names of 1 to {MAX_TASK_NAME} characters")
    return tuple(names)


def _read_adapters(config: Fields) -> TaskAdapters | None:
    names = read_task_names(config, "lora_adaptations")
    if not names:
        return None
    rank = config.int("lora_rank", 4, low=1, high=1 << 16)
    given = config.section("task_instructions", None)
    if given is not None and set(given) != set(names):
        config.fail("task_instructions", ", ".join(given) or "none", ", ".join(names) + ", the lora_adaptations")
    instructions = {} if given is None else {name: given.str(name, "", limit=100_000) for name in names}
    return TaskAdapters(names, instructions, {task: name for task, name in _BY_TASK.items() if name in names},
                        rank=rank, scale=config.number("lora_alpha", 1.0) / rank)


def read_v3(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of the published configuration, or of transformers' own."""
    a = row.name
    kv, used = sizes(config, row)
    own = row.in_config == ("jina_embeddings_v3",)
    if own:
        kv[f"{a}.rope.freq_base"] = plain_rope(config, 20000.0)
        used |= {"rope_parameters", "rope_theta", "rope_scaling"}
    else:
        if config.str("position_embedding_type", "absolute") != "rotary":
            unsupported(config, "position_embedding_type", "rotary in files with mixer.Wqkv")
        require_values(config, _SUPPORTED)
        head: int = config.int("hidden_size", low=1) // config.int("num_attention_heads", low=1)
        if config.get("rotary_emb_dim") not in (None, head):
            unsupported(config, "rotary_emb_dim", f"{head}, the size of a head")
        # flash-attention's default, on which the published code is based
        kv[f"{a}.rope.freq_base"] = config.number("rotary_emb_base", 10000.0, above=0.0)
        used |= {"position_embedding_type", "rotary_emb_base", "rotary_emb_dim", "lora_adaptations",
                 "task_instructions", "lora_rank", "lora_alpha", *_SUPPORTED}
    kv[f"{a}.attention.head_count_kv"] = kv[f"{a}.attention.head_count"]
    kv[f"{a}.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-5 if own else 1e-12, above=0.0)
    kv[f"{a}.attention.causal"] = False
    kv["mpool.activation"] = activation(config, "hidden_act", "gelu", ("gelu", "gelu_tanh"))
    types = config.int("type_vocab_size", 1 if own else 2, low=1, high=1 << 16)
    check_neutral(config, used | _IGNORED | {"layer_norm_eps", "hidden_act", "type_vocab_size"})
    return Config(kv, token_types=types, adapters=None if own else _read_adapters(config), module="")


#: ``complete`` is not needed: GGUF files are not supported.
_ROW = Architecture(
    name="jina_bert_v3", capability="text_embedding", model_types=("xlm-roberta",), gguf=(),
    classes=("XLMRobertaModel", "XLMRobertaLoRA", "XLMRobertaForMaskedLM", "HF_ColBERT"),
    prefixes=("", "roberta."), read=read_v3, tensors=_TENSORS,
    ignored=(r"(roberta\.)?embeddings\.position_ids", r"(roberta\.)?pooler\..*", r"lm_head\..*", r"cls\..*",
             r"linear\.weight", r".*rotary_emb\.inv_freq", r".*\.parametrizations\.weight\.0\.lora_[AB]"),
    epsilon="attention.layer_norm_epsilon", rope=True, activation="gelu", remote=True,
    marker=("encoder.layers.0.mixer.Wqkv.bias", ""))

ROWS = (
    _ROW,
    replace(_ROW, model_types=("jina_embeddings_v3",), remote=False, marker=("", ""),
            classes=("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM", "HF_ColBERT")),
)
