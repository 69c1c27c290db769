"""Bad values in every JSON file of model folders and adapters, and tensors that do not fit, also in GGUF adapters, with
the whole text of each error.

``bad_folders.json`` has the outcomes. This writes them again, after a reader or a text changed on purpose:

    PYTHONPATH=tests/python/helpers python tests/python/models/test_bad_folders.py
"""

import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import badvalues
import mpool
from mpool.errors import FormatError
import test_hf_embedding as encoders
from mpool.models.formats.adapters import read_adapter
from mpool.models.formats.gguf_tables import read_gguf
from mpool.models.formats.hf_folder import describe_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))
import make_gguf  # noqa: E402
import make_safetensors as make  # noqa: E402

_TOP = "config_sentence_transformers.json"
SNAPSHOT = Path(__file__).with_name("bad_folders.json")


# ---- kinds of folders ------------------------------------------------------------------------------------------------

def _vocabulary(rows: int) -> dict[str, Any]:
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(rows - 2))]
    return {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None, "decoder": None, "truncation": None, "padding": None,
            "model": {"type": "WordLevel", "unk_token": "[UNK]",
                      "vocab": {word: number for number, word in enumerate(words)}}}


def _model2vec() -> dict[str, Any]:
    """The files of a static embedding of model2vec with a table of rows and a factor for each token."""
    return {"config.json": {"model_type": "model2vec", "normalize": True, "max_length": 9},
            "tokenizer.json": _vocabulary(6), "model.safetensors": {"tensors": {
                "embeddings": ("F32", [4, 3]), "weights": ("F32", [6]), "mapping": ("I64", [6])}}}


def _static() -> dict[str, Any]:
    """The files of a static embedding of sentence-transformers."""
    kind = "sentence_transformers.models"
    return {"modules.json": [{"idx": 0, "name": "0", "path": "0_StaticEmbedding", "type": f"{kind}.StaticEmbedding"},
                             {"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{kind}.Normalize"}],
            "0_StaticEmbedding/tokenizer.json": _vocabulary(6),
            "0_StaticEmbedding/model.safetensors": {"tensors": {"embedding.weight": ("F32", [6, 3])}}}


def _router() -> dict[str, Any]:
    """The files of a Router with an encoder for queries and one for documents, whose vectors have one size."""
    files: dict[str, Any] = {
        "modules.json": [{"idx": 0, "name": "0", "path": "",
                          "type": "sentence_transformers.base.modules.router.Router"}],
        "router_config.json": {"types": {}, "structure": {}, "parameters": {"default_route": "document",
                                                                            "allow_empty_key": True}}}
    config = files["router_config.json"]
    for side in ("query", "document"):
        files |= encoders._encoder(f"{side}_0/") | {f"{side}_1/config.json": {
            "word_embedding_dimension": encoders.HIDDEN, "pooling_mode_mean_tokens": True}}
        config["structure"][side] = [f"{side}_0", f"{side}_1"]
        config["types"] |= {f"{side}_0": "sentence_transformers.models.Transformer",
                            f"{side}_1": "sentence_transformers.models.Pooling"}
    return files


def _bge_m3() -> dict[str, Any]:
    """The files of an encoder with BGE-M3's heads beside it."""
    return encoders._encoder("") | {
        "colbert_linear.safetensors": {"tensors": {"weight": ("F32", [6, encoders.HIDDEN]), "bias": ("F32", [6])}},
        "sparse_linear.safetensors": {"tensors": {"weight": ("F32", [1, encoders.HIDDEN]), "bias": ("F32", [1])}}}


def _classifier(kind: str) -> dict[str, Any]:
    """The files of a classifier of texts (``Sequence``) or tokens (``Token``) with three labels."""
    names = {str(number): f"label {number}" for number in range(3)}
    config = encoders.CONFIG | {"architectures": [f"BertFor{kind}Classification"], "id2label": names,
                                "label2id": {name: int(number) for number, name in names.items()},
                                "problem_type": "single_label_classification"}
    hidden = encoders.HIDDEN
    head = encoders._linear("classifier", 3, hidden)
    if kind == "Sequence":
        head |= encoders._linear("bert.pooler.dense", hidden, hidden)
    return encoders._encoder("") | {"config.json": config, "model.safetensors": {
        name: shape for name, shape in encoders.SHAPES.items() if not name.startswith("cls.")} | head}


def _adapter() -> dict[str, Any]:
    """The files of an adapter of PEFT for queries and keys. The queries have a rank and a factor of their own."""
    layer, hidden = "base_model.model.encoder.layer.0.attention.self", encoders.HIDDEN
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "use_rslora": False, "rank_pattern": {"query": 2},
              "alpha_pattern": {"query": 3}, "bias": "none", "target_modules": ["query", "key"]}
    return {"adapter_config.json": config, "adapter_model.safetensors": {"tensors": {
        f"{layer}.{name}.lora_{side}.weight": ("F32", [2, hidden] if side == "A" else [hidden, 2])
        for name in ("query", "key") for side in "AB"}}}


#: Hidden size of the base of GGUF adapters: a row is a block of quantised types.
_WIDE = 32


def _gguf_adapter() -> dict[str, Any]:
    """The file of a GGUF adapter for queries and keys."""
    keys = {"general.architecture": "bert", "general.type": "adapter", "adapter.type": "lora",
            "adapter.lora.alpha": 4.0}
    return {"adapter.gguf": {"keys": keys, "tensors": {
        f"blk.0.{name}.weight.lora_{side}": ("F32", [2, _WIDE] if side == "a" else [_WIDE, 2])
        for name in ("attn_q", "attn_k") for side in "ab"}}}


def _base_of_adapters(kind: str) -> dict[str, Any]:
    """The files of the encoder that an adapter of this kind belongs to."""
    size = _WIDE if kind == "gguf_adapter" else encoders.HIDDEN
    shapes = {name: tuple(size if one == encoders.HIDDEN else one for one in shape)
              for name, shape in encoders.SHAPES.items()}
    return encoders._encoder("") | {
        "config.json": encoders.CONFIG | {"hidden_size": size},
        "model.safetensors": {"tensors": {name: ("F32", shape) for name, shape in shapes.items()}}}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": make.base, **encoders.KINDS, "model2vec": _model2vec, "static": _static, "router": _router,
    "bge_m3": _bge_m3, "classifier": lambda: _classifier("Sequence"), "token_classifier": lambda: _classifier("Token"),
    "adapter": _adapter, "gguf_adapter": _gguf_adapter}
#: Keys of config.json in the table of a kind; other tests have all of them (test_bad_values.py).
KEYS = {"model2vec": ("normalize", "max_length"), "classifier": ("id2label", "label2id", "problem_type", "num_labels"),
        "token_classifier": ("id2label", "label2id", "problem_type", "num_labels")}


def _files(kind: str) -> dict[str, Any]:
    """Return the files of a folder, with tensors as ``{"tensors": {name: (type, shape)}}``."""
    return json.loads(json.dumps({
        name: {"tensors": {tensor: ("F32", shape) for tensor, shape in value.items()}}
        if name.endswith(".safetensors") and "tensors" not in value else value
        for name, value in KINDS[kind]().items()}))


# ---- cases of several values -----------------------------------------------------------------------------------------

def _cases(kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the name of a case, a file, and its content. Tables change one value at a time and miss these cases."""
    files = _files(kind)
    for name, value in files.items():
        if isinstance(value, dict) and "tensors" in value:
            yield "no tensors", name, {**value, "tensors": {}}
    if kind == "model2vec":
        yield from _more(files, "two tables", "model.safetensors", {"embedding.weight": ("F32", [4, 3])})
        vocabulary = {"type": "Unigram", "unk_id": -1, "vocab": [["a", 0.0]]}
        yield "unk_id -1", "tokenizer.json", files["tokenizer.json"] | {"model": vocabulary}
    if kind == "static":
        modules = files["modules.json"]
        yield "two norms", "modules.json", [*modules, {**modules[1], "idx": 2, "name": "2", "path": "2_Normalize"}]
        yield "a norm first", "modules.json", [{**one, "idx": at} for at, one in enumerate(reversed(modules))]
    if kind == "router":
        yield from _router_cases(files["router_config.json"])
    if kind == "bge_m3":
        for name, rows in (("colbert_linear.safetensors", 65537), ("sparse_linear.safetensors", 2)):
            yield f"{rows} rows", name, {"tensors": {"weight": ("F32", [rows, encoders.HIDDEN]),
                                                     "bias": ("F32", [rows])}}
    if kind.endswith("classifier"):
        yield from _classifier_cases(files)
    if kind == "adapter":
        yield from _adapter_cases(files)
    if kind == "gguf_adapter":
        yield from _gguf_cases(files["adapter.gguf"])


def _more(files: dict[str, Any], case: str, name: str, tensors: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield a case with other tensors beside those of a file, or in place of them."""
    yield case, name, {**files[name], "tensors": {**files[name]["tensors"], **tensors}}


def _router_cases(config: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    structure, types = config["structure"], config["types"]
    for case, routes in (("a third route", {**structure, "other": ["query_0", "query_1"]}),
                         ("one route", {"query": structure["query"]}), ("an empty route", {**structure, "query": []}),
                         ("a route outside", {**structure, "query": ["../x"]}),
                         ("an absolute route", {**structure, "query": ["/x"]}),
                         ("65 modules", {**structure, "query": ["query_0"] * 65})):
        yield case, "router_config.json", {**config, "structure": routes,
                                           "types": {**types, "../x": types["query_0"], "/x": types["query_0"]}}
    yield "a mean and a first token", "query_1/config.json", {
        "word_embedding_dimension": encoders.HIDDEN, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    yield "a masked head", "router_config.json", {**config, "types": {
        **types, "query_0": "sentence_transformers.sparse_encoder.modules.MLMTransformer"}}
    yield "no default", "router_config.json", {**config, "parameters": {"allow_empty_key": False}}
    yield "mappings", "router_config.json", {**config, "parameters": {"route_mappings": {"a": "query"}}}


def _classifier_cases(files: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    config, labels = files["config.json"], files["config.json"]["id2label"]
    for case, names in (("an empty label", {**labels, "1": ""}), ("a label twice", {**labels, "2": "label 0"}),
                        ("1,001 characters", {**labels, "1": "x" * 1001}), ("a label of another number",
                                                                           {**labels, "3": "x"})):
        yield case, "config.json", {**config, "id2label": names, "label2id": None}
    yield "65,537 ids", "config.json", {**config, "label2id": {str(number): 0 for number in range(65537)}}
    yield "id 3", "config.json", {**config, "label2id": {"label 0": 3}}
    yield from _more(files, "65,537 labels", "model.safetensors", {
        "classifier.weight": ("F32", [65537, encoders.HIDDEN]), "classifier.bias": ("F32", [65537])})


def _adapter_cases(files: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    config, name, size = files["adapter_config.json"], "adapter_model.safetensors", encoders.HIDDEN
    stem = "base_model.model.encoder.layer.0.attention.self.query"
    for rank in (3, 1024, 1025):
        yield from _more(files, f"rank {rank}", name, {f"{stem}.lora_A.weight": ("F32", [rank, size]),
                                                       f"{stem}.lora_B.weight": ("F32", [size, rank])})
    yield from _more(files, "a matrix twice", name, {f"{stem}.lora_A.default.weight": ("F32", [2, size])})
    yield from _more(files, "a prefix", name, {f"{stem.replace('.encoder', '.bert.encoder')}.lora_A.weight": (
        "F32", [2, size])})
    for layer in ("layer.1.attention.self.query", "layer.0.attention.self.other", "layer.0.attention.output.LayerNorm"):
        yield from _more(files, layer, name, {f"base_model.model.encoder.{layer}.lora_{side}.weight": (
            "F32", [2, size] if side == "A" else [size, 2]) for side in "AB"})
    for case, change in (("PiSSA", {"init_lora_weights": "pissa_niter_4"}), ("an expression", {"rank_pattern": {
            "(query)+": 2}}), ("4,097 patterns", {"alpha_pattern": {f"x{number}": 2 for number in range(4097)}}),
                         ("DoRA", {"use_dora": True}), ("biases", {"bias": "all"})):
        yield case, "adapter_config.json", {**config, **change}


def _gguf_cases(file: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    name, stem, other = "adapter.gguf", "blk.0.attn_q.weight.lora_", "blk.0.{}.lora_{}"
    sides = {"a": [2, _WIDE], "b": [_WIDE, 2]}
    for rank in (1024, 1025):
        yield from _more({name: file}, f"rank {rank}", name, {f"{stem}a": ("F32", [rank, _WIDE]),
                                                              f"{stem}b": ("F32", [_WIDE, rank])})
    for dtype in ("F16", "BF16", "Q8_0", "Q4_0", "I8"):
        yield from _more({name: file}, f"{dtype}, rank 32", name, {f"{stem}{side}": (dtype, [_WIDE, _WIDE])
                                                                   for side in "ab"})
    for target in ("attn_other.weight", "attn_norm.weight", "attn_q.bias", "attn_q", "attn_qkv.weight"):
        yield from _more({name: file}, target, name, {other.format(target, side): ("F32", shape)
                                                      for side, shape in sides.items()})
    for target in ("blk.1.attn_q.weight.lora_a", "token_embd.weight.lora_a", "blk.0.attn_q.weight.lora_c",
                   "blk.0.attn_q.weight", "blk.0.attn_v.weight.lora_a"):
        yield from _more({name: file}, target, name, {target: ("F32", [2, _WIDE])})
    for key, values in {
            "adapter.lora.alpha": (None, float("nan"), float("inf"), 0.0, 1e-30, 1e30, -4.0, 4, "4"),
            "general.type": (None, "model", 1), "adapter.type": (None, "other", 1),
            "general.architecture": (None, "llama", 1), "adapter.alora.invocation_tokens": (1,)}.items():
        for value in values:
            yield f"{key} {value!r}", name, {**file, "keys": {**file["keys"], key: value}}


# ---- tables ----------------------------------------------------------------------------------------------------------

def _gguf(keys: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """Return a GGUF file. Its values are from 0 to 1 as float32, zeros as other types. Shapes are outermost first."""
    kinds = {str: make_gguf.STRING, float: make_gguf.F32, int: make_gguf.U16}
    infos, data = [], b""
    for name, (dtype, shape) in tensors.items():
        sizes = list(reversed(shape))
        size = make_gguf.nbytes(dtype, sizes)
        infos.append(make_gguf.info(name, sizes, make_gguf.DTYPES[dtype][0], len(data)))
        data += make_gguf.pad(np.linspace(0, 1, size // 4, dtype=np.float32).tobytes() if dtype == "F32"
                              else bytes(size), 32)
    return make_gguf.gguf([make_gguf.kv(key, kinds[type(value)], value) for key, value in keys.items()
                           if value is not None], infos, data)


def _write(folder: Path, files: dict[str, Any]) -> None:
    """Write the files of a folder."""
    make.write_folder(str(folder), {name: value for name, value in files.items() if not name.endswith(".gguf")})
    for name, value in files.items():
        if name.endswith(".gguf"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(_gguf(**value))


class Folder:
    """A folder of which one file at a time is changed."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind, self.files, self.keys = path / "m", kind, _files(kind), KEYS.get(kind, ())
        self.hidden = {f"{self.path}/": "", str(self.path): "folder"}
        _write(self.path, self.files)
        self.describe: Callable[[], Any] = lambda: describe_folder(str(self.path), key="k", ref="r")
        if kind.endswith("adapter"):
            _write(path / "base", _base_of_adapters(kind))
            base = describe_folder(str(path / "base"), key="k", ref="r")
            place = self.path / "adapter.gguf" if kind == "gguf_adapter" else self.path
            self.describe = lambda: replace(read_adapter(place, base), stamps=())  # those of rewritten files differ

    def reader(self, name: str) -> Callable[[Any], Any]:
        """Return a function that describes the folder with another value in a file."""
        def read(value: Any) -> Any:
            try:
                _write(self.path, {name: value})
                return self.describe()
            finally:
                _write(self.path, {name: self.files[name]})
        return read

    def tables(self) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
        hidden = self.hidden
        for name, base in self.files.items():
            if name.endswith("tokenizer.json") or "model_type" in base and not self.keys and name != _TOP:
                continue  # other tests: test_bad_values.py, and those of tokenizers
            if name == "config.json":
                yield name, badvalues.table(self.reader(name), base, name=name, hidden=hidden,
                                            places=lambda where: where[0] in self.keys)
            elif name.endswith((".safetensors", ".gguf")):
                yield name, dict(_tensors(self.reader(name), base, hidden))
            else:  # in memory, a side of a Router is a list of modules
                yield name, badvalues.table(self.reader(name), base, name=name, hidden=hidden,
                                            places=lambda where: isinstance(base, list) or isinstance(where[0], str))

    def cases(self) -> dict[str, str]:
        """Return the outcome of each case: an error, or whether the description is that of the unchanged folder."""
        usual = self.describe()
        found = {}
        for case, name, value in _cases(self.kind):
            text, result = badvalues.outcome(self.reader(name), value, self.hidden)
            found[f"{name}: {case}"] = text or ("accepted" if result == usual else "used")
        return found


def _tensors(read: Callable[[Any], Any], base: Any, hidden: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the outcomes of a tensor that is missing, has another shape or type, or is not part of the model."""
    names = [name for name in base["tensors"] if not ("encoder.layer" in name or "blk." in name)
             or "0.attention.self.query" in name or "attn_q" in name]
    for name in [*names, "other.weight"]:
        dtype, shape = base["tensors"].get(name, ("F32", [2, 3]))
        changes: dict[str, Any] = {"longer": (dtype, [shape[0] + 1, *shape[1:]]),
                                   "wider": (dtype, [*shape[:-1], shape[-1] + 1]), "deeper": (dtype, [*shape, 1]),
                                   "empty": (dtype, [0, *shape[1:]]), "I64": ("I64", shape), "F64": ("F64", shape)}
        if "keys" in base:  # a GGUF file
            changes |= {"flat": (dtype, [shape[0] * shape[1]]), "F16": ("F16", shape), "BF16": ("BF16", shape),
                        "Q8_0": ("Q8_0", shape)}
        if len(shape) == 1:
            del changes["wider"]
        row: dict[str, str] = {}
        for change, value in {"missing": None, **changes}.items():
            tensors = {**base["tensors"], name: value}
            if value is None:
                del tensors[name]
                if name == "other.weight":
                    continue
            row[change] = badvalues.outcome(read, {**base, "tensors": tensors}, hidden)[0] or "accepted"
        yield name, row


def found(kind: str, path: Path) -> dict[str, Any]:
    folder = Folder(path, kind)
    return {f"{name}: {place}": row for name, rows in folder.tables() for place, row in rows.items()} | folder.cases()


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_outcomes_are_the_committed_ones(kind: str, tmp_path: Path) -> None:
    badvalues.compare(json.loads(SNAPSHOT.read_text("utf-8"))[kind], found(kind, tmp_path), "test_bad_folders.py")


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize(("dtype", "bits"), [("F32", "<I"), ("F16", "<H"), ("BF16", "<H")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_of_gguf_adapters_are_finite(side: str, dtype: str, bits: str, value: float, tmp_path: Path) -> None:
    """Reading the tables reads no values: the load refuses one that is not finite, and names the file and tensor."""
    files = _gguf_adapter()["adapter.gguf"]
    tensor = f"blk.0.attn_k.weight.lora_{side}"
    files["tensors"] = {name: (dtype if name == tensor else "F32", shape)
                        for name, (_, shape) in files["tensors"].items()}
    _write(tmp_path / "base", _base_of_adapters("gguf_adapter"))
    place = tmp_path / "adapter.gguf"
    place.write_bytes(_gguf(**files))
    with mpool.Pool() as pool:
        pool.load(tmp_path / "base", adapters={"it": place})
        _, tensors, _ = read_gguf(str(place))
        at = next(one.offset for one in tensors if one.name == tensor) + 5 * struct.calcsize(bits)
        whole = np.float32(value).view(np.uint32) if dtype != "F16" else np.float16(value).view(np.uint16)
        data = bytearray(place.read_bytes())
        struct.pack_into(bits, data, at, int(whole) >> (16 if dtype == "BF16" else 0))
        place.write_bytes(data)
    words = rf"adapter\.gguf: adapter\.1\.blk\.0\.attn_k\.lora_{side} is infinity or NaN at index 5"
    with mpool.Pool() as pool, pytest.raises(FormatError, match=words):
        pool.load(tmp_path / "base", adapters={"it": place})


def _two_files(folder: Path, **changes: Any) -> Path:
    """Write an adapter of two files, with the queries in the first one. ``changes``: tensors of the second one.

    Returns:
        The first file.
    """
    whole = _gguf_adapter()["adapter.gguf"]
    for number, part in enumerate(("attn_q", "attn_k")):
        tensors = {name: value for name, value in whole["tensors"].items() if part in name}
        keys = {**(whole["keys"] if number == 0 else {}), "split.no": number, "split.count": 2,
                "split.tensors.count": 4 + len(changes)}
        _write(folder, {f"it-0000{number + 1}-of-00002.gguf": {
            "keys": keys, "tensors": {**tensors, **(changes if number == 1 else {})}}})
    return folder / "it-00001-of-00002.gguf"


def test_gguf_adapters_of_two_files(tmp_path: Path) -> None:
    """The matrices of both files are used, and errors name the file."""
    _write(tmp_path / "base", _base_of_adapters("gguf_adapter"))
    base = describe_folder(str(tmp_path / "base"), key="k", ref="r")
    place = _two_files(tmp_path / "two")
    found = read_adapter(place, base)
    assert [(one.layer, one.a.file, one.b.file) for one in found.updates] == [("blk.0.attn_q", 0, 0),
                                                                              ("blk.0.attn_k", 1, 1)]
    vectors = []
    for adapter in (place, None):
        with mpool.Pool() as pool:
            if adapter is None:  # the same values in one file
                adapter = tmp_path / "one.gguf"
                whole = bytearray(_gguf(**_gguf_adapter()["adapter.gguf"]))
                for old, new in zip([*found.updates], read_adapter(_one(adapter, whole), base).updates, strict=True):
                    for a, b in ((old.a, new.a), (old.b, new.b)):
                        whole[b.offset:b.offset + b.nbytes] = Path(found.files[a.file]).read_bytes()[
                            a.offset:a.offset + a.nbytes]
                _one(adapter, whole)
            pool.load(tmp_path / "base", adapters={"it": adapter})
            vectors.append([pool.embed(["w1 w2", "w3"], tmp_path / "base", adapter=name).tobytes()
                            for name in (None, "it")])
    assert vectors[0] == vectors[1] and vectors[0][0] != vectors[0][1]
    name = "blk.0.attn_v.weight.lora_"
    for changes, error, words in (
            ({f"{name}a": ("F32", [2, 33]), f"{name}b": ("F32", [_WIDE, 2])}, FormatError, r"is \[2, 33\]"),
            ({f"{name}a": ("F32", [2, _WIDE]), f"{name}b": ("F32", [_WIDE, 3])}, FormatError, "the rank of"),
            ({f"{name}a": ("F64", [2, _WIDE]), f"{name}b": ("F32", [_WIDE, 2])}, mpool.Unsupported, "dtype F64"),
            ({"other.weight": ("F32", [2, 2])}, mpool.Unsupported, "is not a matrix"),
            ({"blk.0.other.weight.lora_a": ("F32", [2, _WIDE])}, mpool.Unsupported, "the adapter updates blk.0.other")):
        with pytest.raises(error, match=f"it-00002-of-00002.gguf.*{words}"):
            read_adapter(_two_files(tmp_path / "bad", **changes), base)


def _one(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        SNAPSHOT.write_text(badvalues.written({kind: found(kind, Path(folder) / kind) for kind in KINDS}),
                            "utf-8")
