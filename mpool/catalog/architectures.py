"""The architectures that mpool knows: their tensors, under both names and with their shapes, and their sizes.

One row an architecture. Hyper-parameters are named as in GGUF whatever the file was
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#standardized-key-value-pairs); ``hf_config`` translates a
``config.json`` into that naming. Letters in shapes stand for sizes:

    V vocabulary   T token types   P positions   D hidden size   F feed-forward size   R rotated dimensions / 2
    Q heads x key length   K KV heads x key length   U KV heads x value length   O heads x value length
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import FormatError, LimitError, Unsupported
from .fields import Fields
from .json_strict import shorten
from .spec import TensorEntry, Value

MAX_LAYERS = 512
MAX_CONTEXT = 1 << 24
MAX_VOCABULARY = 1 << 20
MAX_WIDTH = 1 << 20


@dataclass(frozen=True)
class Tensor:
    """One tensor: its name in transformers (empty if it has none), its name in GGUF, its shape in letters.

    ``{}`` stands for the layer. ``when`` says that a file may do without: ``"tied"``, the output layer that falls back
    on the embedding; ``"gguf"``, a tensor that only GGUF files have; ``"types"``, the table of token types, which a
    GGUF file may leave out.
    """

    hf: str
    gguf: str
    shape: str
    when: str = ""


def _layer(hf: str, gguf: str, shape: str, *, bias: str | None = None) -> tuple[Tensor, ...]:
    """Rows of one linear layer or norm in every block: the weight and, if ``bias`` names a size, the bias."""
    rows = [Tensor(f"{hf}.weight", f"blk.{{}}.{gguf}.weight", shape)]
    if bias is not None:
        rows.append(Tensor(f"{hf}.bias", f"blk.{{}}.{gguf}.bias", bias))
    return tuple(rows)


_BERT = "encoder.layer.{}"
_BERT_TENSORS = (
    Tensor("embeddings.word_embeddings.weight", "token_embd.weight", "VD"),
    Tensor("embeddings.position_embeddings.weight", "position_embd.weight", "PD"),
    Tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "TD", "types"),
    Tensor("embeddings.LayerNorm.weight", "token_embd_norm.weight", "D"),
    Tensor("embeddings.LayerNorm.bias", "token_embd_norm.bias", "D"),
    *_layer(f"{_BERT}.attention.self.query", "attn_q", "QD", bias="Q"),
    *_layer(f"{_BERT}.attention.self.key", "attn_k", "KD", bias="K"),
    *_layer(f"{_BERT}.attention.self.value", "attn_v", "UD", bias="U"),
    *_layer(f"{_BERT}.attention.output.dense", "attn_output", "DO", bias="D"),
    *_layer(f"{_BERT}.attention.output.LayerNorm", "attn_output_norm", "D", bias="D"),
    *_layer(f"{_BERT}.intermediate.dense", "ffn_up", "FD", bias="F"),
    *_layer(f"{_BERT}.output.dense", "ffn_down", "DF", bias="D"),
    *_layer(f"{_BERT}.output.LayerNorm", "layer_output_norm", "D", bias="D"),
)


def _decoder(qkv_bias: bool) -> tuple[Tensor, ...]:
    block = "layers.{}"
    return (
        Tensor("embed_tokens.weight", "token_embd.weight", "VD"),
        Tensor("norm.weight", "output_norm.weight", "D"),
        Tensor("lm_head.weight", "output.weight", "VD", "tied"),
        Tensor("", "rope_freqs.weight", "R", "gguf"),
        *_layer(f"{block}.input_layernorm", "attn_norm", "D"),
        *_layer(f"{block}.self_attn.q_proj", "attn_q", "QD", bias="Q" if qkv_bias else None),
        *_layer(f"{block}.self_attn.k_proj", "attn_k", "KD", bias="K" if qkv_bias else None),
        *_layer(f"{block}.self_attn.v_proj", "attn_v", "UD", bias="U" if qkv_bias else None),
        *_layer(f"{block}.self_attn.o_proj", "attn_output", "DO"),
        *_layer(f"{block}.post_attention_layernorm", "ffn_norm", "D"),
        *_layer(f"{block}.mlp.gate_proj", "ffn_gate", "FD"),
        *_layer(f"{block}.mlp.up_proj", "ffn_up", "FD"),
        *_layer(f"{block}.mlp.down_proj", "ffn_down", "DF"),
    )


@dataclass(frozen=True)
class Architecture:
    """One row.

    Attributes:
        name: as in GGUF's ``general.architecture``.
        capability: the pool that serves it.
        classes: names in ``architectures`` of config.json whose weights hold this network.
        prefixes: what may stand before the names of the network's tensors in a transformers folder.
        tensors: every tensor of the network.
        harmless: patterns of tensors that may be present and take no part (heads, buffers).
        epsilon: key of the norm's epsilon, without the architecture.
        rope: whether positions are rotated into queries and keys (else they have a table).
        activation: what a GGUF file means without saying so.
        full_layers: for families whose configuration switches its sliding window off unless it says otherwise: how
            many of the first layers attend to everything when it does not say (transformers' default); None for
            families where a window that is given is in use.
    """

    name: str
    capability: str
    classes: tuple[str, ...]
    prefixes: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    harmless: tuple[str, ...]
    epsilon: str
    rope: bool
    activation: str
    full_layers: int | None = None


ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in (
    Architecture(
        name="bert", capability="text_embedding",
        classes=("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForNextSentencePrediction",
                 "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
                 "BertForMultipleChoice"),
        prefixes=("", "bert."), tensors=_BERT_TENSORS,
        harmless=(r"(bert\.)?embeddings\.position_ids", r"(bert\.)?embeddings\.token_type_ids", r"(bert\.)?pooler\..*",
                  r"cls\..*", r"classifier\..*", r"qa_outputs\..*"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu"),
    Architecture(
        name="llama", capability="text_to_text", classes=("LlamaForCausalLM",), prefixes=("model.",),
        tensors=_decoder(qkv_bias=False),
        harmless=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
        epsilon="attention.layer_norm_rms_epsilon", rope=True, activation="silu"),
    Architecture(
        name="qwen2", capability="text_to_text", classes=("Qwen2ForCausalLM",), prefixes=("model.",),
        tensors=_decoder(qkv_bias=True),
        harmless=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
        epsilon="attention.layer_norm_rms_epsilon", rope=True, activation="silu",
        full_layers=28),
)}


def find(name: str, *, file: str, field: str) -> Architecture:
    """The row of an architecture. Raises FormatError if there is none."""
    row = ARCHITECTURES.get(name)
    if row is None:
        raise FormatError(file=file, field=field, got=shorten(repr(name)), allowed=", ".join(sorted(ARCHITECTURES)),
                          hint="This version of mpool does not know the architecture")
    return row


def _capped(kv: Fields, key: str, cap: int, what: str, default: int | None = None) -> int:
    value = kv.int(key, low=1) if default is None else kv.int(key, default, low=1)
    if value > cap:
        raise LimitError(f"{kv.file}: {kv.name(key)} is {value}, mpool takes at most {cap} {what}")
    return value


def sizes(row: Architecture, kv: Mapping[str, Value], *, file: str, token_types: int | None = None) -> dict[str, int]:
    """Sizes of a model by their letters, after checking that its hyper-parameters fit each other.

    Args:
        kv: hyper-parameters under GGUF's names.
        file: path named in errors.
        token_types: rows of the table of token types, where the architecture has one.

    Raises:
        FormatError: a key is missing, of the wrong type, out of range or at odds with another.
        LimitError: more layers, positions or tokens than mpool takes.
    """
    a = row.name
    table = Fields(kv, file=file)
    layers = _capped(table, f"{a}.block_count", MAX_LAYERS, "layers")
    context = _capped(table, f"{a}.context_length", MAX_CONTEXT, "positions")
    vocabulary = _capped(table, f"{a}.vocab_size", MAX_VOCABULARY, "tokens")
    hidden = table.int(f"{a}.embedding_length", low=1, high=MAX_WIDTH)
    feed_forward = table.int(f"{a}.feed_forward_length", low=1, high=MAX_WIDTH)
    heads = table.int(f"{a}.attention.head_count", low=1, high=MAX_WIDTH)
    kv_heads = table.int(f"{a}.attention.head_count_kv", heads, low=1, high=MAX_WIDTH)
    if heads % kv_heads:
        table.fail(f"{a}.attention.head_count_kv", kv_heads, f"a divisor of the {heads} heads")
    if f"{a}.attention.key_length" not in kv and hidden % heads:
        table.fail(f"{a}.attention.head_count", heads, f"a divisor of the embedding length {hidden}")
    key_length = table.int(f"{a}.attention.key_length", hidden // heads, low=1, high=MAX_WIDTH)
    value_length = table.int(f"{a}.attention.value_length", key_length, low=1, high=MAX_WIDTH)
    epsilon = table.number(f"{a}.{row.epsilon}", above=0.0)
    if epsilon >= 1.0:
        table.fail(f"{a}.{row.epsilon}", epsilon, "a number below 1")
    rotated = 0
    if row.rope:
        rotated = table.int(f"{a}.rope.dimension_count", key_length, low=2, high=MAX_WIDTH)
        if rotated % 2 or rotated > key_length:
            table.fail(f"{a}.rope.dimension_count", rotated, f"an even number, at most the head's {key_length}")
        table.number(f"{a}.rope.freq_base", above=0.0)
    return {"V": vocabulary, "D": hidden, "F": feed_forward, "P": context, "T": token_types or 0, "R": rotated // 2,
            "Q": heads * key_length, "K": kv_heads * key_length, "U": kv_heads * value_length,
            "O": heads * value_length, "layers": layers}


def expected(row: Architecture, size: Mapping[str, int]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Every tensor of a model: GGUF name -> (transformers name without prefix, shape row-major, ``when``)."""
    table: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for tensor in row.tensors:
        shape = tuple(size[letter] for letter in tensor.shape)
        if "{}" in tensor.gguf:
            for layer in range(size["layers"]):
                table[tensor.gguf.replace("{}", str(layer))] = (tensor.hf.replace("{}", str(layer)), shape, tensor.when)
        else:
            table[tensor.gguf] = (tensor.hf, shape, tensor.when)
    return table


def check_shape(entry: TensorEntry, shape: tuple[int, ...], file: str) -> None:
    """Raises FormatError unless a tensor has the shape that its model's sizes imply."""
    if entry.shape != shape:
        raise FormatError(file=file, offset=entry.offset, field=f"shape of {shorten(entry.name)}",
                          got=list(entry.shape), allowed=list(shape))


def _listed(names: list[str]) -> str:
    shown = ", ".join(shorten(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def missing(names: list[str], *, file: str) -> FormatError:
    """The error for tensors that a model needs and its files do not have."""
    return FormatError(file=file, field="tensors", got=f"{_listed(names)} missing",
                       allowed="every tensor of the architecture")


def surplus(row: Architecture, names: list[str], *, file: str) -> FormatError:
    """The error for tensors that an architecture has no place for."""
    return FormatError(file=file, field="tensors", got=f"{_listed(names)}, which {row.name} does not have",
                       allowed="the tensors of the architecture",
                       hint="The model is a variant that this version of mpool would compute wrongly")


def map_folder(row: Architecture, size: Mapping[str, int], tensors: Mapping[str, TensorEntry], paths: tuple[str, ...],
               *, file: str, tied: bool, same: Callable[[TensorEntry, TensorEntry], bool]) -> list[TensorEntry]:
    """Tensors of a transformers folder under their GGUF names, every shape checked.

    Args:
        tensors: by their names in the files; ``paths`` are those files.
        file: what errors about missing or surplus tensors name.
        tied: whether the output layer is the embedding. If the files have both, they are compared as transformers
            does: equal, the output layer is left out; different, it stays.
        same: whether two tensors hold the same bytes.

    Raises:
        FormatError: tensors missing, left over, under two names, or of another shape.
    """
    table = expected(row, size)
    found: dict[str, TensorEntry] = {}
    left = {_modern(name): entry for name, entry in tensors.items()}
    if len(left) != len(tensors):
        raise FormatError(file=file, field="tensors", got="a LayerNorm under both its old and its new name",
                          allowed="each tensor once")
    first = next(hf for hf, _, _ in table.values() if hf)
    prefixes = [p for p in row.prefixes if p + first in left] or [row.prefixes[-1]]
    if len(prefixes) > 1:
        raise FormatError(file=file, field="tensors", got=f"{first} with and without a prefix",
                          allowed="each tensor once")
    for gguf, (hf, _, _) in table.items():
        name = hf if hf == "lm_head.weight" else prefixes[0] + hf
        if hf and name in left:
            found[gguf] = left.pop(name)
    if tied and "output.weight" in found:
        if "token_embd.weight" not in found:
            found["token_embd.weight"] = found.pop("output.weight")
        elif same(found["output.weight"], found["token_embd.weight"]):
            del found["output.weight"]
    absent = [prefixes[0] + hf if hf != "lm_head.weight" else hf for gguf, (hf, _, when) in table.items()
              if gguf not in found and when != "gguf" and not (when == "tied" and tied)]
    if absent:
        raise missing(absent, file=file)
    harmless = re.compile("|".join(row.harmless))
    extra = [name for name in left if not harmless.fullmatch(name)]
    if extra:
        raise surplus(row, extra, file=file)
    for gguf, entry in found.items():
        check_shape(entry, table[gguf][1], paths[entry.file])
    return [TensorEntry(gguf, entry.dtype, entry.shape, entry.file, entry.offset, entry.nbytes)
            for gguf, entry in sorted(found.items(), key=lambda item: (item[1].file, item[1].offset))]


def _modern(name: str) -> str:
    """Name of a tensor today: the first BERT checkpoints called a norm's weight and bias gamma and beta."""
    if name.endswith("LayerNorm.gamma"):
        return name[:-len("gamma")] + "weight"
    return name[:-len("beta")] + "bias" if name.endswith("LayerNorm.beta") else name


def check_gguf(row: Architecture, size: Mapping[str, int], tensors: tuple[TensorEntry, ...],
               paths: tuple[str, ...]) -> None:
    """Checks that a GGUF file has the tensors of its architecture, no others, and their shapes.

    Raises:
        FormatError: a tensor is missing, surplus or of another shape.
        Unsupported: the tensors are those of a known variant (experts) that mpool does not compute.
    """
    table = expected(row, size)
    names = {entry.name for entry in tensors}
    experts = [name for name in names if re.search(r"_exps\.|\.ffn_gate_inp\.|\.\d+\.weight$", name)]
    if experts:
        raise Unsupported(f"{paths[0]}: {sorted(experts)[0]} belongs to a mixture of experts, which mpool's {row.name} "
                          "does not compute")
    absent = [name for name, (_, _, when) in table.items() if name not in names and not when]
    if absent:
        raise missing(absent, file=paths[0])
    heads = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias") if row.name == "bert" else ()
    extra = [entry.name for entry in tensors if entry.name not in table and entry.name not in heads]
    if extra:
        raise surplus(row, sorted(extra), file=paths[0])
    for entry in tensors:
        if entry.name in table:
            check_shape(entry, table[entry.name][1], paths[entry.file])
