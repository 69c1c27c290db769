"""Peers that convert the embedding model into files of their own: ONNX Runtime, OpenVINO, CTranslate2.

``prepare`` converts the folder's weights, with torch and the peers' converters, once per version of a peer. The result
is kept in a folder named by the weights' hash, and no measure includes the conversion. HF ``tokenizers`` reads the
folder's tokenizer.json and truncates texts to the folder's maximum length. Batches hold 32 texts sorted by length, as
in sentence-transformers. Vectors are mean-pooled and have length 1.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

if __package__:
    from . import texts as sentences
else:  # worker.py runs by path, without a package
    import texts as sentences  # type: ignore[no-redef]

BATCH = 32
#: Texts on which OpenVINO's int8 model is calibrated. Their turn belongs to no measure.
CALIBRATION, CALIBRATION_TURN = 300, 99


class Tokens:
    """Tokenizes texts to padded ids and masks, int64 (texts, longest)."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        self.one = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        settings = Path(path) / "sentence_bert_config.json"
        most = json.loads(settings.read_text()).get("max_seq_length", 512) if settings.exists() else 512
        self.one.no_padding()
        self.one.enable_truncation(most)

    def batches(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return batches of (indices of the texts, ids, mask)."""
        found = [encoding.ids for encoding in self.one.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda index: -len(found[index]))
        batches = []
        for start in range(0, len(order), BATCH):
            which = order[start:start + BATCH]
            ids = np.zeros((len(which), len(found[which[0]])), dtype=np.int64)
            mask = np.zeros_like(ids)
            for row, index in enumerate(which):
                ids[row, :len(found[index])] = found[index]
                mask[row, :len(found[index])] = 1
            batches.append((np.array(which), ids, mask))
        return batches


class Converted:
    """Base of the three peers.

    Attributes:
        module: the Python module, and the name of its distribution.
        variants: compute types; the first is the default.
        settings: ways to use the threads, each measured as an engine of its own; the first is the default.
        parallel: batches of a list that are computed at the same time.
    """

    module: str
    variants: tuple[str, ...] = ()
    settings: tuple[str, ...] = ("",)
    parallel = 1

    def __init__(self, variant: str, folder: str, setting: str = "") -> None:
        self.variant, self.setting = variant or self.variants[0], setting or self.settings[0]
        if self.variant not in self.variants or self.setting not in self.settings:
            raise ValueError(f"{type(self).__name__} has {', '.join(self.variants)}, each with the settings "
                             f"{', '.join(self.settings) if any(self.settings) else '(none)'}")
        self.folder = Path(folder) / f"{self.module}-{version(self.module)}"

    def imports(self) -> None:
        """Import the library and the tokenizers."""
        raise NotImplementedError

    def prepare(self, path: str) -> None:
        """Write the files that ``load`` reads, unless they exist. Runs in a process of its own."""
        raise NotImplementedError

    def start(self, threads: int) -> None:
        """Load the files that ``prepare`` wrote."""
        raise NotImplementedError

    def hidden(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the last hidden states of a batch (texts, longest, d)."""
        raise NotImplementedError

    def load(self, path: str, threads: int) -> None:
        """See Embedder."""
        self.tokens = Tokens(path)
        self.start(threads)
        self.executor = ThreadPoolExecutor(self.parallel) if self.parallel > 1 else None

    def embed(self, texts: list[str]) -> np.ndarray:
        """See Embedder."""
        batches = self.tokens.batches(texts)
        together = self.executor.map if self.executor is not None and len(batches) > 1 else map
        found = list(together(self.vectors, batches))
        out = np.empty((len(texts), found[0].shape[1]), dtype=np.float32)
        for (which, _, _), rows in zip(batches, found):
            out[which] = rows
        return out

    def vectors(self, batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
        """Return the mean-pooled vectors of a batch, with length 1."""
        _, ids, mask = batch
        pooled = np.einsum("tld,tl->td", self.hidden(ids, mask), mask.astype(np.float32)) / mask.sum(1, keepdims=True)
        rows: np.ndarray = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return rows


class OnnxRuntime(Converted):
    """ONNX Runtime over a graph whose attention, GELU and norms its own optimiser has fused. Its own quantiser makes
    the int8 variant.
    """

    module, variants = "onnxruntime", ("float32", "int8")

    def imports(self) -> None:
        """See Converted."""
        import onnxruntime
        import tokenizers  # noqa: F401

        self.lib = onnxruntime

    def prepare(self, path: str) -> None:
        """See Converted."""
        if not (self.folder / "plain.onnx").exists():
            export(path, self.folder / "plain.onnx")
        self.fuse(path)

    def fuse(self, path: str) -> None:
        """Write the fused graph and the quantised one, unless they exist. ``path`` is the folder of the weights."""
        plain, fused, int8 = (self.folder / name for name in ("plain.onnx", "float32.onnx", "int8.onnx"))
        if not fused.exists():
            from onnxruntime.transformers.optimizer import optimize_model

            config = json.loads((Path(path) / "config.json").read_text())
            optimize_model(str(plain), model_type="bert", num_heads=config["num_attention_heads"],
                           hidden_size=config["hidden_size"]).save_model_to_file(str(part(fused)))
            part(fused).rename(fused)
        if not int8.exists():
            from onnx import TensorProto
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(str(fused), str(part(int8)), weight_type=QuantType.QInt8, per_channel=True,
                             op_types_to_quantize=["MatMul", "Attention"],
                             extra_options={"DefaultTensorType": TensorProto.FLOAT})
            part(int8).rename(int8)

    def start(self, threads: int) -> None:
        """See Converted."""
        options = self.lib.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self.session = self.lib.InferenceSession(str(self.folder / f"{self.variant}.onnx"), options,
                                                 providers=["CPUExecutionProvider"])

    def hidden(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See Converted."""
        found: np.ndarray = self.session.run(None, {"ids": ids, "mask": mask})[0]
        return found


class OpenVino(Converted):
    """OpenVINO over the plain graph with the given inference precision, or over the graph that NNCF quantised. The
    setting is its performance hint. With the hint for throughput, it computes several batches at the same time.
    """

    module, variants, settings = "openvino", ("float32", "bfloat16", "int8"), ("latency", "throughput")

    def imports(self) -> None:
        """See Converted."""
        import openvino
        import tokenizers  # noqa: F401

        self.lib = openvino

    def prepare(self, path: str) -> None:
        """See Converted."""
        plain = self.folder / "plain.onnx"
        if not plain.exists():
            export(path, plain)
        if self.variant == "int8" and not (self.folder / "int8.xml").exists():
            self.quantise(path)

    def quantise(self, path: str) -> None:
        """Quantise weights and activations by NNCF, for transformers, with its default accuracy."""
        import nncf
        import openvino

        batches = Tokens(path).batches(sentences.mixed(CALIBRATION, CALIBRATION_TURN))
        samples = [{"ids": ids, "mask": mask} for _, ids, mask in batches]
        made = nncf.quantize(openvino.Core().read_model(str(self.folder / "plain.onnx")), nncf.Dataset(samples),
                             model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))
        whole = self.folder / "int8-part.xml"
        openvino.save_model(made, str(whole), compress_to_fp16=False)
        whole.with_suffix(".bin").rename(self.folder / "int8.bin")
        whole.rename(self.folder / "int8.xml")

    def start(self, threads: int) -> None:
        """See Converted."""
        import threading

        graph = "int8.xml" if self.variant == "int8" else "plain.onnx"
        self.model = self.lib.Core().compile_model(str(self.folder / graph), "CPU", {
            "INFERENCE_PRECISION_HINT": "bf16" if self.variant == "bfloat16" else "f32",
            "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": self.setting.upper()})
        if self.setting == "throughput":
            self.parallel = int(self.model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        self.mine = threading.local()

    def hidden(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See Converted."""
        if not hasattr(self.mine, "request"):
            self.mine.request = self.model.create_infer_request()
        found: np.ndarray = self.mine.request.infer({"ids": ids, "mask": mask})[self.model.output(0)]
        return found


class CTranslate2(Converted):
    """CTranslate2's Encoder over a model from its own converter. With two inter threads, each has half of the threads,
    and two batches are computed at the same time.
    """

    module, variants, settings = "ctranslate2", ("float32", "int8"), ("inter1", "inter2")

    def imports(self) -> None:
        """See Converted."""
        import ctranslate2
        import tokenizers  # noqa: F401

        self.lib = ctranslate2

    def prepare(self, path: str) -> None:
        """See Converted."""
        import ctranslate2

        out = self.folder / f"ctranslate2-{self.variant}"
        if not out.exists():
            whole = part(out)
            shutil.rmtree(whole, ignore_errors=True)
            ctranslate2.converters.TransformersConverter(path).convert(str(whole), quantization=self.variant)
            whole.rename(out)

    def start(self, threads: int) -> None:
        """See Converted."""
        self.parallel = int(self.setting.removeprefix("inter"))
        self.encoder = self.lib.Encoder(str(self.folder / f"ctranslate2-{self.variant}"), device="cpu",
                                        compute_type=self.variant, inter_threads=self.parallel,
                                        intra_threads=max(1, threads // self.parallel))

    def hidden(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See Converted."""
        given = self.lib.StorageView.from_array(ids.astype(np.int32))
        lengths = self.lib.StorageView.from_array(mask.sum(1).astype(np.int32))
        return np.array(self.encoder.forward_batch(given, lengths).last_hidden_state)


def part(out: Path) -> Path:
    """Return the temporary name of an output. The file gets its final name when it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.with_name(out.name + ".part")


def export(path: str, out: Path) -> None:
    """Export a BERT folder as an ONNX graph: ids and mask (texts, longest), int64 -> last hidden states."""
    export_network(bert(path), out, "hidden")


def bert(path: str) -> Any:
    """Build the encoder of a BERT folder: ids and mask (texts, longest), int64 -> last hidden states.

    It is written in plain operations (Devlin et al., arXiv:1810.04805): the graph does not depend on how a version of
    transformers builds its masks.
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn import functional

    config = json.loads((Path(path) / "config.json").read_text())
    weights = load_file(Path(path) / "model.safetensors")
    weights = {name.removeprefix("bert."): tensor.float() for name, tensor in weights.items()}
    heads, wide, eps = config["num_attention_heads"], config["hidden_size"], config["layer_norm_eps"]
    size = wide // heads

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, (wide,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    class Bert(torch.nn.Module):
        """The encoder of ``bert``."""

        def forward(self, ids: Any, mask: Any) -> Any:
            """Compute one batch."""
            texts, longest = ids.shape[0], ids.shape[1]
            words = functional.embedding(ids, weights["embeddings.word_embeddings.weight"])
            types = functional.embedding(torch.zeros_like(ids), weights["embeddings.token_type_embeddings.weight"])
            places = functional.embedding(torch.arange(longest).unsqueeze(0),
                                          weights["embeddings.position_embeddings.weight"])
            x = norm(words + types + places, "embeddings.LayerNorm")
            bias = (1.0 - mask[:, None, None, :].float()) * -10000.0
            for index in range(config["num_hidden_layers"]):
                layer = f"encoder.layer.{index}"

                def split(part: str, layer: str = layer, x: Any = x) -> Any:
                    return linear(x, f"{layer}.attention.self.{part}").view(texts, longest, heads,
                                                                            size).permute(0, 2, 1, 3)

                scores = torch.matmul(split("query"), split("key").transpose(-1, -2)) / size ** 0.5 + bias
                mixed = torch.matmul(torch.softmax(scores, -1), split("value")).permute(0, 2, 1, 3).contiguous()
                mixed = linear(mixed.view(texts, longest, wide), f"{layer}.attention.output.dense")
                x = norm(mixed + x, f"{layer}.attention.output.LayerNorm")
                inner = functional.gelu(linear(x, f"{layer}.intermediate.dense"))
                x = norm(linear(inner, f"{layer}.output.dense") + x, f"{layer}.output.LayerNorm")
            return x

    return Bert().eval()


def export_network(network: Any, out: Path, output: str, inputs: tuple[str, str] = ("ids", "mask")) -> None:
    """Export a network over ids and mask (texts, longest) as an ONNX graph. The axes of its output are free, too."""
    import torch

    free = {0: "texts", 1: "longest"}
    sample = torch.ones(2, 9, dtype=torch.long)
    torch.onnx.export(network, (sample, sample), str(part(out)), input_names=list(inputs), output_names=[output],
                      dynamic_axes={name: free for name in (*inputs, output)}, opset_version=17, dynamo=False)
    part(out).rename(out)
