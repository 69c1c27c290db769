"""Seeded checkpoints with sparse heads and token heads, in the layouts of sentence-transformers, PyLate and ColBERT."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import mpool

from paritymodels import randomise, torch, transformers

VOCAB = 197
#: Sizes that the models share: odd sizes, three heads of 16.
SIZES: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=48, num_attention_heads=3, intermediate_size=90,
                             num_hidden_layers=2)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
MARKS = list(".,!?'-")
WORDS = [*SPECIAL, *MARKS, *(f"w{number}" for number in range(VOCAB - len(SPECIAL) - len(MARKS) - 2)), "[Q] ", "[D] "]
TEXTS = ["w1 w2, w3. w4 w9", "w7", "w5 w5 w5 w6! w11 - w12 w13 w14 w15 w16 w17", "w8 w9? w10 w100 w101 w102 w99"]


def write_tokenizer(folder: Path, length: int = 64, markers: tuple[str, ...] = ("[Q] ", "[D] ")) -> None:
    """Write a tokenizer of VOCAB words that puts [CLS] and [SEP] around a text. ``markers``: its last two words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate((*WORDS[:-2], *markers))},
                                            unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL[:5]])
    tokenizer.add_tokens([AddedToken(word, normalized=True) for word in markers])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "pad_token": "[PAD]",
        "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}))


def write_metaspace_tokenizer(folder: Path, markers: tuple[str, str], length: int = 64) -> None:
    """Write a tokenizer like that of XLM-RoBERTa: tokens that mark spaces, and <s> and </s> around a text."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *markers]
    plain = [*MARKS, *"0123456789w", "\u2581", "\u2581w", "\u2581!", *(f"\u2581w{number}" for number in range(200))]
    scores = [(word, 0.0) for word in special] + [(word, -float(at)) for at, word in enumerate(plain, 1)]
    tokenizer = Tokenizer(models.Unigram(scores[:VOCAB], unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0),
                                                                                                    ("</s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "pad_token": "<pad>",
        "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>", "eos_token": "</s>",
        "mask_token": "<mask>"}))


def masked_model(kind: str, **more: Any) -> Any:
    """Return a seeded masked language model.

    Args:
        kind: ``bert``, ``roberta``, ``xlm_roberta``, ``modernbert``, ``mpnet``, ``distilbert``, ``electra``, or
            ``lfm2``, a causal model.
        more: further keys of the configuration.
    """
    sizes: dict[str, Any] = dict(SIZES, max_position_embeddings=80)
    if kind == "modernbert":
        sizes |= dict(pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
                      local_attention=128, global_attn_every_n_layers=2)
    elif kind in ("roberta", "xlm_roberta", "mpnet"):
        sizes |= dict(pad_token_id=0, bos_token_id=2, eos_token_id=3)
    elif kind == "distilbert":
        sizes = dict(vocab_size=sizes["vocab_size"], max_position_embeddings=80, dim=sizes["hidden_size"],
                     hidden_dim=sizes["intermediate_size"], n_layers=sizes["num_hidden_layers"],
                     n_heads=sizes["num_attention_heads"])
    elif kind == "electra":
        sizes |= dict(embedding_size=24)
    elif kind == "lfm2":
        sizes |= dict(num_key_value_heads=1, pad_token_id=0, eos_token_id=3, block_auto_adjust_ff_dim=False,
                      layer_types=["full_attention", *["conv"] * (sizes["num_hidden_layers"] - 1)])
    names = {"bert": "Bert", "roberta": "Roberta", "xlm_roberta": "XLMRoberta", "modernbert": "ModernBert",
             "mpnet": "MPNet", "distilbert": "DistilBert", "electra": "Electra", "lfm2": "Lfm2"}
    config = getattr(transformers, f"{names[kind]}Config")(**sizes, **more)
    model = getattr(transformers, f"{names[kind]}For{'CausalLM' if kind == 'lfm2' else 'MaskedLM'}")(config).eval()
    randomise(model, 7)
    model.tie_weights()
    return model


def write_masked(folder: Path, kind: str, **more: Any) -> Path:
    """Write a masked language model of :func:`masked_model` with its tokenizer."""
    folder.mkdir(parents=True)
    masked_model(kind, **more).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


#: Package of the modules of sparse encoders, as sentence-transformers 5.0 wrote it.
SPARSE_MODULES = "sentence_transformers.sparse_encoder.models"


def _write_modules(folder: Path, modules: list[tuple[str, str]]) -> None:
    """Write modules.json. ``modules``: path and class of each."""
    (folder / "modules.json").write_text(json.dumps([
        {"idx": at, "name": str(at), "path": path, "type": kind} for at, (path, kind) in enumerate(modules)]))


def _write_sparse_encoder(folder: Path, pooling: str) -> None:
    """Write the type of a sparse encoder, and its pooling."""
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"}))
    (folder / pooling).mkdir()
    (folder / pooling / "config.json").write_text(json.dumps({
        "pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": VOCAB}))


def write_splade(folder: Path, kind: str, **more: Any) -> Path:
    """Write a SPLADE model: a masked language model of :func:`masked_model` with max pooling."""
    write_masked(folder, kind, **more)
    _write_sparse_encoder(folder, "1_SpladePooling")
    _write_modules(folder, [("", f"{SPARSE_MODULES}.MLMTransformer"),
                            ("1_SpladePooling", f"{SPARSE_MODULES}.SpladePooling")])
    return folder


def query_weights() -> Any:
    """Return a weight for each token of the vocabulary, like inverse document frequencies; those of ten tokens are 0,
    those of ten others 1."""
    weights = torch.rand(VOCAB, generator=torch.Generator().manual_seed(3))
    weights[20:30] = 0
    weights[30:40] = 1
    return weights


def write_query_table(folder: Path, kind: str = "bert", table: str = f"{SPARSE_MODULES}.SparseStaticEmbedding") -> Path:
    """Write a sparse encoder in the layout of opensearch-neural-sparse-encoding-doc-v3: queries are looked up in a
    table of weights, documents pass through a masked language model.

    Args:
        folder: the folder.
        kind: kind of the masked language model, as for :func:`masked_model`.
        table: class of the query's module.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    write_masked(folder / "document_0_MLMTransformer", kind)
    _write_sparse_encoder(folder, "document_1_SpladePooling")
    queries = folder / "query_0_SparseStaticEmbedding"
    queries.mkdir()
    write_tokenizer(queries)
    save_file({"weight": query_weights()}, str(queries / "model.safetensors"))
    (queries / "config.json").write_text(json.dumps({"frozen": True}))
    _write_modules(folder, [("", "sentence_transformers.models.Router")])
    (folder / "router_config.json").write_text(json.dumps({
        "types": {"query_0_SparseStaticEmbedding": table,
                  "document_0_MLMTransformer": f"{SPARSE_MODULES}.MLMTransformer",
                  "document_1_SpladePooling": f"{SPARSE_MODULES}.SpladePooling"},
        "structure": {"query": ["query_0_SparseStaticEmbedding"],
                      "document": ["document_0_MLMTransformer", "document_1_SpladePooling"]},
        "parameters": {"default_route": None, "allow_empty_key": True}}))
    return folder


def write_colbert(folder: Path, dense: list[tuple[int, int]], kind: str = "bert", **settings: Any) -> Path:
    """Write an encoder with Dense modules for tokens in the layout of PyLate.

    Args:
        folder: the folder.
        dense: inputs and outputs of each Dense module.
        kind: kind of the encoder, as for :func:`masked_model`.
        settings: keys of config_sentence_transformers.json; none: the file is not written.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    getattr(masked_model(kind), {"modernbert": "model", "lfm2": "model"}.get(kind, kind)).save_pretrained(folder)
    write_tokenizer(folder)
    modules = [("", "sentence_transformers.models.Transformer")]
    for at, (size, out) in enumerate(dense, 1):
        path = folder / f"{at}_Dense"
        path.mkdir()
        values = torch.randn(out, size, generator=torch.Generator().manual_seed(at))
        save_file({"linear.weight": values}, str(path / "model.safetensors"))
        (path / "config.json").write_text(json.dumps({
            "in_features": size, "out_features": out, "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity"}))
        modules.append((path.name, "pylate.models.Dense.Dense"))
    _write_modules(folder, modules)
    if settings:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(
            settings | {"model_type": "ColBERT", "prompts": {}, "similarity_fn_name": "MaxSim"}))
    return folder


def save(model: Any, folder: Path) -> Path:
    """Save a model of sentence-transformers. Returns the folder."""
    model.save_pretrained(str(folder))
    return folder


def write_jina_colbert(folder: Path, reference: Path, size: int = 20, metaspace: bool = False) -> None:
    """Write a model in the layout of jina-colbert-v2, and the same model as transformers saves it, with the class and
    the settings of Stanford's ColBERT.

    Args:
        folder: the published layout: names and configuration of jinaai/xlm-roberta-flash-implementation.
        reference: the layout of transformers.
        size: rows of the linear head: 128, 96 or 64 in the published models.
        metaspace: True for a tokenizer like that of XLM-RoBERTa, False for one of whole words.
    """
    from encodermodels import flash_config, jina_v3, published_jina_v3, save_tensors
    from safetensors.torch import load_file, save_file

    model = jina_v3(2, vocab_size=VOCAB)
    randomise(model, 7)
    linear = torch.randn(size, 48, generator=torch.Generator().manual_seed(2))
    folder.mkdir()
    save_tensors({**published_jina_v3(model), "linear.weight": linear},
                 flash_config(model, architectures=["HF_ColBERT"]), folder)
    model.save_pretrained(reference)
    weights = str(reference / "model.safetensors")
    save_file({**load_file(weights), "linear.weight": linear}, weights, {"format": "pt"})
    config = json.loads((reference / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    for place in (folder, reference):
        markers = ("[QueryMarker]", "[DocumentMarker]")
        if metaspace:
            write_metaspace_tokenizer(place, markers)
        else:
            write_tokenizer(place, markers=markers)
        (place / "artifact.metadata").write_text(json.dumps({
            "query_token_id": "[QueryMarker]", "doc_token_id": "[DocumentMarker]", "query_maxlen": 13, "doc_maxlen": 15,
            "mask_punctuation": True, "attend_to_mask_tokens": True, "dim": size, "similarity": "cosine"}))


def write_bge_m3(folder: Path) -> Path:
    """Write a model with dense, sparse and token vectors, as BGE-M3."""
    from encodermodels import write_modules
    from safetensors.torch import save_file

    masked_model("roberta").roberta.save_pretrained(folder)
    write_tokenizer(folder)
    write_modules(folder, "cls")
    random = torch.Generator().manual_seed(5)
    for stem, rows in (("colbert_linear", 48), ("sparse_linear", 1)):
        save_file({"weight": torch.randn(rows, 48, generator=random), "bias": torch.randn(rows, generator=random)},
                  str(folder / f"{stem}.safetensors"))
    return folder


def bge_m3_outputs(folder: Path, texts: list[str]) -> tuple[Any, Any, list[Any]]:
    """Return the dense vectors, the sparse vectors as a matrix, and the token vectors, by the formulae of BGE-M3
    (https://arxiv.org/abs/2402.03216) in float64."""
    from safetensors.torch import load_file

    model = transformers.RobertaModel.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    colbert, sparse = (load_file(folder / f"{stem}_linear.safetensors") for stem in ("colbert", "sparse"))
    rows, weights, dense = [], np.zeros((len(texts), VOCAB)), []
    for at, text in enumerate(texts):
        encoded = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = model(input_ids=encoded["input_ids"]).last_hidden_state[0]
        dense.append(torch.nn.functional.normalize(states[0], dim=0).numpy())
        projected = states[1:] @ colbert["weight"].double().T + colbert["bias"].double()
        rows.append(torch.nn.functional.normalize(projected, dim=-1).numpy())
        each = torch.relu(states @ sparse["weight"].double().T + sparse["bias"].double())[:, 0].numpy()
        for token, weight in zip(encoded["input_ids"][0].tolist(), each):
            if token not in range(4):  # special tokens except the mask token
                weights[at, token] = max(weights[at, token], weight)
    return np.array(dense), weights, rows


def same_sparse(found: mpool.SparseVectors, expected: Any) -> None:
    """Compare sparse vectors with a matrix of NumPy: the largest difference is 1e-4 of the largest value, and the
    weights above 1e-5 belong to the same tokens."""
    dense = found.to_scipy().toarray()
    assert dense.shape == expected.shape == found.shape
    assert np.abs(dense - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.array_equal(dense > 1e-5, expected > 1e-5) and (dense > 1e-5).any() and not (dense > 1e-5).all()
    for ids, _ in found:
        assert (np.diff(ids) > 0).all()
