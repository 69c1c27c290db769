"""Engines that compute sparse vectors, token vectors and labels: mpool and its peers, on the same weights. Runs by
path in a process of its own, like worker.py.

A shape is a folder of sentence-transformers or transformers with seeded weights: rates depend on sizes only. The bias
of the SPLADE model's head leaves about 150 values in a vector, as trained models do.
"""

import json
import shutil
import statistics
import string
from pathlib import Path
from typing import Any

import numpy as np
import own_process
import peers
import texts
from own_process import rss, run_task
from timing import seconds_of, together

VOCAB, COMPONENTS, LABELS, VALUES = 30522, 96, 2, 150
#: Name -> hidden size, feed-forward size, layers, heads.
SHAPES = {"splade": (768, 3072, 12, 12), "colbert": (384, 1536, 12, 12), "classifier": (768, 3072, 6, 12)}
#: Token ids of "[unused0]" and "[unused1]", which mark queries and documents of a ColBERT model.
MARKS = ("[unused0]", "[unused1]")
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


def make_folder(shape: str, folder: Path, tokenizer: Path) -> None:
    """Write the model with its tokenizer, unless the folder is complete."""
    import torch
    import transformers

    if (folder / "ready").exists():
        return
    wide, inner, layers, heads = SHAPES[shape]
    torch.manual_seed(5)
    config = transformers.BertConfig(vocab_size=VOCAB, hidden_size=wide, intermediate_size=inner, num_labels=LABELS,
                                     num_hidden_layers=layers, num_attention_heads=heads)
    made = {"splade": transformers.BertForMaskedLM, "colbert": transformers.BertModel,
            "classifier": transformers.BertForSequenceClassification}[shape](config).eval()
    base = folder / "base"
    made.save_pretrained(base)
    for name in FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, base / name)
    if shape == "splade":
        _make_sparse(made, base)
    getattr(_Folders, shape)(base, folder)
    (folder / "ready").touch()


def _make_sparse(made: Any, base: Path) -> None:
    """Set the bias of the head so that ``VALUES`` values of a text's vector are positive on average."""
    import torch

    batches = peers.Tokens(str(base)).batches(texts.mixed(32, 77))
    with torch.inference_mode():
        most = torch.cat([torch.where(
            torch.from_numpy(mask).bool()[:, :, None],
            made(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits, -1e9).amax(1)
            for _, ids, mask in batches])
        made.cls.predictions.bias -= most.flatten().float().sort(descending=True).values[VALUES * len(most)]
    made.save_pretrained(base)


class _Folders:
    """Writers of the folders that the engines load, from a folder of transformers."""

    @staticmethod
    def splade(base: Path, folder: Path) -> None:
        """As sentence-transformers writes a SparseEncoder."""
        from sentence_transformers import SparseEncoder

        SparseEncoder(str(base), device="cpu").save_pretrained(str(folder / "model"))

    @staticmethod
    def colbert(base: Path, folder: Path) -> None:
        """As PyLate writes a ColBERT model."""
        import torch
        from safetensors.torch import save_file

        model, dense = folder / "model", folder / "model" / "1_Dense"
        shutil.copytree(base, model, dirs_exist_ok=True)
        dense.mkdir(exist_ok=True)
        wide = SHAPES["colbert"][0]
        save_file({"linear.weight": torch.randn(COMPONENTS, wide) / wide ** 0.5}, str(dense / "model.safetensors"))
        (dense / "config.json").write_text(json.dumps({
            "in_features": wide, "out_features": COMPONENTS, "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity"}))
        (model / "modules.json").write_text(json.dumps([
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": dense.name, "type": "pylate.models.Dense.Dense"}]))
        (model / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 299, "do_lower_case": False}))
        (model / "config_sentence_transformers.json").write_text(json.dumps({
            "model_type": "ColBERT", "query_prefix": MARKS[0], "document_prefix": MARKS[1], "query_length": 32,
            "document_length": 300, "attend_to_expansion_tokens": False,
            "skiplist_words": list(string.punctuation), "do_query_expansion": True}))

    @staticmethod
    def classifier(base: Path, folder: Path) -> None:
        """As transformers writes it."""
        shutil.copytree(base, folder / "model", dirs_exist_ok=True)


def network_of(shape: str, folder: str, finished: bool = True) -> Any:
    """Build the whole network in plain operations: ids and mask (texts, longest) -> (texts, vocabulary), (texts,
    longest, components) or (texts, labels).

    Args:
        shape: key of ``SHAPES``.
        folder: folder of the weights.
        finished: False leaves out what follows the last linear operation: its output has a row for each token.
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn import functional

    encoder, weights = peers.bert(folder), load_file(Path(folder) / "model.safetensors")
    dense = load_file(Path(folder) / "1_Dense" / "model.safetensors")["linear.weight"] if shape == "colbert" else None
    words = weights.get("bert.embeddings.word_embeddings.weight")

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    class Outputs(torch.nn.Module):
        """The encoder and its head."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, ids: Any, mask: Any) -> Any:
            """Compute one batch."""
            hidden = self.encoder(ids, mask)
            if shape == "colbert":
                projected = functional.linear(hidden, dense)
                return functional.normalize(projected, dim=-1) if finished else projected
            if shape == "classifier":
                return torch.softmax(linear(torch.tanh(linear(hidden[:, 0], "bert.pooler.dense")), "classifier"), -1)
            head = "cls.predictions.transform"
            inner = functional.layer_norm(
                functional.gelu(linear(hidden, f"{head}.dense")), (SHAPES[shape][0],),
                weights[f"{head}.LayerNorm.weight"], weights[f"{head}.LayerNorm.bias"], 1e-12)
            logits = functional.linear(inner, words, weights["cls.predictions.bias"])
            return torch.log1p(functional.relu(logits) * mask[:, :, None]).amax(1) if finished else logits

    return Outputs().eval()


class Tokens(peers.Tokens):
    """Tokenizes texts, and for ColBERT puts the mark of documents behind the first token."""

    def __init__(self, path: str, shape: str) -> None:
        super().__init__(path)
        self.marked = shape == "colbert"
        self.mark = self.one.token_to_id(MARKS[1])
        self.skipped = np.array([self.one.token_to_id(word) for word in string.punctuation])

    def batches(self, given: list[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """See peers.Tokens."""
        found = super().batches(given)
        if not self.marked:
            return found
        return [(which, np.insert(ids, 1, self.mark, 1), np.insert(mask, 1, 1, 1)) for which, ids, mask in found]


class Graph:
    """An engine over an ONNX graph of the whole network."""

    def load(self, task: dict[str, Any]) -> None:
        """Load the tokenizer and the graph."""
        self.shape = task["shape"]
        self.tokens = Tokens(f"{task['folder']}/model", self.shape)
        self.inner.folder = Path(task["folder"])
        self.inner.load(f"{task['folder']}/model", task["threads"])

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        inner.imports()

    def embed(self, given: list[str]) -> list[Any]:
        """Return a sparse vector (ids, values), a matrix of token vectors, or label scores for each text."""
        batches = self.tokens.batches(given)
        runner = self.inner.executor.map if self.inner.executor is not None and len(batches) > 1 else map
        found: list[Any] = [None] * len(given)
        for (which, ids, mask), rows in zip(batches, runner(lambda one: self.inner.hidden(*one[1:]), batches)):
            for at, index in enumerate(which):
                found[index] = self._output(rows[at], ids[at], mask[at])
        return found

    def _output(self, row: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> Any:
        if self.shape == "splade":
            places = np.flatnonzero(row)
            return places, row[places]
        if self.shape == "colbert":
            return row[(mask > 0) & ~np.isin(ids, self.tokens.skipped)]
        return row


class SentenceTransformers:
    """sentence-transformers, with its own batches of 32 texts; the classifier by transformers, with texts sorted by
    length. The default precision is fp32; the variant is bfloat16.
    """

    def __init__(self, variant: str) -> None:
        self.dtype = variant or "float32"

    def load(self, task: dict[str, Any]) -> None:
        """Load the model on the CPU."""
        import torch

        self.torch, self.shape, path = torch, task["shape"], f"{task['folder']}/model"
        torch.set_num_threads(task["threads"])
        dtype = getattr(torch, self.dtype)
        if self.shape == "classifier":
            import transformers

            self.model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).eval()
            self.tokens = Tokens(path, self.shape)
            return
        import sentence_transformers

        kind = "SparseEncoder" if self.shape == "splade" else "MultiVectorEncoder"
        self.model = getattr(sentence_transformers, kind)(path, device="cpu", model_kwargs={"dtype": dtype})
        self.model.eval()

    def embed(self, given: list[str]) -> list[Any]:
        """See Graph."""
        if self.shape == "colbert":
            return [one.float().numpy() for one in self.model.encode_document(
                given, batch_size=peers.BATCH, show_progress_bar=False, convert_to_numpy=False)]
        if self.shape == "splade":
            rows = self.model.encode(given, batch_size=peers.BATCH, show_progress_bar=False).coalesce().float()
            counts = self.torch.bincount(rows.indices()[0], minlength=len(given)).cumsum(0)[:-1].tolist()
            return list(zip(np.split(rows.indices()[1].numpy(), counts), np.split(rows.values().numpy(), counts)))
        found: list[Any] = [None] * len(given)
        with self.torch.inference_mode():
            for which, ids, mask in self.tokens.batches(given):
                logits = self.model(input_ids=self.torch.from_numpy(ids),
                                    attention_mask=self.torch.from_numpy(mask)).logits
                for index, row in zip(which, logits.float().softmax(-1).numpy()):
                    found[index] = row
        return found


class Fastembed:
    """fastembed, over ONNX graphs as it expects them: pooling and normalisation are its own, in NumPy."""

    #: Shape -> class of fastembed, and the model of its list whose files the folder replaces.
    KINDS = {"splade": ("SparseTextEmbedding", "prithivida/Splade_PP_en_v1"),
             "colbert": ("LateInteractionTextEmbedding", "colbert-ir/colbertv2.0")}

    def load(self, task: dict[str, Any]) -> None:
        """Load the graph."""
        import fastembed

        kind, name = self.KINDS[task["shape"]]
        self.sparse = task["shape"] == "splade"
        self.model = getattr(fastembed, kind)(name, threads=task["threads"],
                                              specific_model_path=f"{task['folder']}/fastembed")

    def embed(self, given: list[str]) -> list[Any]:
        """See Graph."""
        found = self.model.embed(given, batch_size=peers.BATCH)
        return [(one.indices, one.values) for one in found] if self.sparse else list(found)

    @staticmethod
    def prepare(folder: Path, shape: str) -> None:
        """Write the graph and the tokenizer, unless they exist."""
        if shape not in Fastembed.KINDS:
            raise ValueError(f"fastembed has no {shape} models")
        out = folder / "fastembed"
        if (out / "model.onnx").exists():
            return
        out.mkdir(exist_ok=True)
        for name in (*FILES, "config.json"):
            if (folder / "base" / name).exists():
                shutil.copy(folder / "base" / name, out / name)
        peers.export_network(network_of(shape, str(folder / "model"), finished=False), out / "model.onnx", "outputs",
                             ("input_ids", "attention_mask"))


class Mpool(own_process.Mpool):
    """mpool, all texts in one call."""

    def load(self, task: dict[str, Any]) -> None:  # type: ignore[override]
        """Open a pool and load the model."""
        super().load(f"{task['folder']}/model", task["threads"])
        self.shape = task["shape"]
        self.embed(["A text."])
        self.used = self.pool.ps()[0].compute

    def embed(self, given: list[str]) -> list[Any]:
        """See Graph."""
        if self.shape == "splade":
            return list(self.pool.embed_sparse(given, self.folder, compute=self.compute))
        if self.shape == "colbert":
            return list(self.pool.embed_tokens(given, self.folder, task="document", compute=self.compute))
        return [[score for _, score in sorted(zip(one.labels, one.scores))]
                for one in self.pool.classify(given, self.folder, compute=self.compute)]


def make(engine: str) -> Any:
    """Return an engine by name."""
    name, variant, setting, *_ = [*engine.split(":"), "", ""]
    if name == "mpool":
        return Mpool(variant)
    if name == "sentence-transformers":
        return SentenceTransformers(variant)
    if name == "fastembed":
        return Fastembed()
    return Graph({"onnxruntime": peers.OnnxRuntime, "openvino": peers.OpenVino}[name](variant, "", setting))


def rows_of(shape: str, found: list[Any]) -> list[list[float]]:
    """Return the outputs of texts as rows of equal length."""
    if shape == "splade":
        rows = np.zeros((len(found), VOCAB), np.float32)
        for row, (ids, values) in zip(rows, found):
            row[ids] = values
        # a record of every component would be large: sums of 100 groups, with signs that do not cancel differences
        return np.asarray(np.add.reduceat(rows, np.arange(0, VOCAB, VOCAB // 100), axis=1)).tolist()
    rows = np.concatenate([np.atleast_2d(np.asarray(one, np.float32)) for one in found])
    return np.asarray(rows).tolist()


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Measure texts/s of lists of natural lengths, milliseconds of one text, and calls/s of 8 threads."""
    engine = make(task["engine"])
    engine.load(task)
    count, repeat = task["texts"], task["repeat"]
    first = engine.embed(texts.mixed(8))
    engine.embed(texts.mixed(32, 50))
    lists = [texts.mixed(count, turn + 1) for turn in range(repeat)]
    found = {"mixed texts/s": count / statistics.median(seconds_of(lambda: engine.embed(part)) for part in lists)}
    single = texts.same(count // 2, 9, 1)
    found["one text ms"] = statistics.median(seconds_of(lambda: engine.embed([text])) for text in single) * 1e3
    single = texts.same(count // 2, 9, 2)

    def work(number: int) -> None:
        for text in single[number::8]:
            engine.embed([text])

    found["8 threads calls/s"] = len(single) / together(8, work)
    return {"measures": found, "vectors": rows_of(task["shape"], first), "rss MB": rss(),
            "compute": getattr(engine, "used", None)}


def prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Convert the weights for an engine, before it is measured."""
    folder = Path(task["folder"])
    if task["engine"] == "folder":
        make_folder(task["shape"], folder, Path(task["tokenizer"]))
        return {}
    if task["engine"] == "fastembed":
        Fastembed.prepare(folder, task["shape"])
    elif task["engine"].startswith(("onnxruntime", "openvino")):
        graph = folder / "plain.onnx"
        if not graph.exists():
            peers.export_network(network_of(task["shape"], str(folder / "model")), graph, "outputs")
        engine = make(task["engine"])
        engine.inner.folder = folder
        if hasattr(engine.inner, "fuse"):
            engine.inner.fuse(str(folder / "model"))
    return {}


if __name__ == "__main__":
    run_task({"measure": measure, "prepare": prepare})
