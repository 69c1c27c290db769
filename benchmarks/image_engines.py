"""Engines that embed images: mpool and its peers, on the same weights. Runs by path in a process of its own, like
worker.py.

A shape is a transformers folder with seeded weights: rates depend on sizes only. Images are arrays of pixels in the
model's input size, or JPEG files. Peers decode JPEG with Pillow and preprocess with transformers' processor.
"""

import io
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import own_process
from own_process import rss, run_task
from timing import percentile, seconds_of, together

BATCH = 16
#: Name -> configuration class, model class, sizes, processor.
SHAPES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "clip-b32": ("CLIPConfig", "CLIPModel", {
        "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                          "num_attention_heads": 12, "image_size": 224, "patch_size": 32},
        "text_config": {"num_hidden_layers": 1}, "projection_dim": 512},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224},
         "crop_size": {"height": 224, "width": 224}, "resample": 3}),
    "clip-l336": ("CLIPConfig", "CLIPModel", {
        "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                          "num_attention_heads": 16, "image_size": 336, "patch_size": 14},
        "text_config": {"num_hidden_layers": 1}, "projection_dim": 768},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
         "crop_size": {"height": 336, "width": 336}, "resample": 3}),
    "dinov2-s": ("Dinov2Config", "Dinov2Model", {
        "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "mlp_ratio": 4, "image_size": 518,
        "patch_size": 14},
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 224},
         "crop_size": {"height": 224, "width": 224}, "resample": 3}),
}


def side(shape: str) -> int:
    """Return the side of the model's input image, in pixels."""
    return int(SHAPES[shape][3]["crop_size"]["height"])


def make_folder(shape: str, folder: Path) -> None:
    """Write the model, its processor and a placeholder tokenizer, unless the folder is complete."""
    import torch
    import transformers

    if (folder / "ready").exists():
        return
    config, model, sizes, processor = SHAPES[shape]
    torch.manual_seed(3)
    getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "ready").touch()


def plain_model(folder: str) -> Any:
    """Build transformers' network from pixels (n, 3, h, w) to vectors."""
    import torch
    import transformers

    clip = json.loads((Path(folder) / "config.json").read_text())["model_type"] == "clip"
    whole = (transformers.CLIPModel if clip else transformers.Dinov2Model).from_pretrained(folder).eval()

    class Vectors(torch.nn.Module):
        """The image encoder and its projection."""

        def __init__(self) -> None:
            super().__init__()
            self.whole = whole.vision_model if clip else whole
            self.project = whole.visual_projection if clip else torch.nn.Identity()

        def forward(self, pixels: Any) -> Any:
            """Compute one batch."""
            return self.project(self.whole(pixels).pooler_output)

    return Vectors().eval()


class Peer:
    """Base of the peers: preprocessing by transformers' processor, and batches."""

    variants: tuple[str, ...] = ("float32",)

    def __init__(self, variant: str) -> None:
        self.variant = variant or self.variants[0]
        if self.variant not in self.variants:
            raise ValueError(f"{type(self).__name__} has {', '.join(self.variants)}")

    def load(self, folder: str, threads: int) -> None:
        """Load the model in this process."""
        import transformers

        options = json.loads((Path(folder) / "preprocessor_config.json").read_text())
        name = options.pop("image_processor_type")
        self.processor = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
        self.processor = self.processor(**options)
        self.mean = np.array(self.processor.image_mean, np.float32)
        self.std = np.array(self.processor.image_std, np.float32)
        self.start(folder, threads)

    def start(self, folder: str, threads: int) -> None:
        """Load the network."""
        raise NotImplementedError

    def run(self, pixels: np.ndarray) -> np.ndarray:
        """Compute one batch of pixels (n, 3, h, w)."""
        raise NotImplementedError

    def _batches(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([self.run(np.stack(parts[at:at + BATCH])) for at in range(0, len(parts), BATCH)])

    def embed(self, images: list[np.ndarray]) -> np.ndarray:
        """Embed images that have the model's input size."""
        return self._batches([np.ascontiguousarray((((image / np.float32(255)) - self.mean) / self.std)
                                                   .transpose(2, 0, 1)) for image in images])

    def embed_files(self, files: list[bytes]) -> np.ndarray:
        """Embed JPEG files."""
        from PIL import Image

        found = self.processor([Image.open(io.BytesIO(file)).convert("RGB") for file in files], return_tensors="np")
        return self._batches(list(found["pixel_values"]))


class Torch(Peer):
    """PyTorch with its fused attention."""

    variants = ("float32", "bfloat16")

    def start(self, folder: str, threads: int) -> None:
        """See Peer."""
        import torch

        torch.set_num_threads(threads)
        self.lib, self.model = torch, plain_model(folder).to(getattr(torch, self.variant))

    def run(self, pixels: np.ndarray) -> np.ndarray:
        """See Peer."""
        with self.lib.inference_mode():
            found = self.model(self.lib.from_numpy(pixels).to(getattr(self.lib, self.variant)))
            return np.asarray(found.float().numpy())


def graph_of(folder: str) -> str:
    """Return the path of the network's ONNX graph, exported on first use. The batch size is free."""
    import torch

    path = Path(folder) / "network.onnx"
    if not path.exists():
        part, size = path.with_suffix(".part"), side(Path(folder).name)
        torch.onnx.export(plain_model(folder), (torch.zeros(2, 3, size, size),), str(part), input_names=["pixels"],
                          output_names=["vectors"], dynamic_axes={"pixels": {0: "n"}, "vectors": {0: "n"}},
                          opset_version=17, dynamo=False)
        part.rename(path)
    return str(path)


class OnnxRuntime(Peer):
    """ONNX Runtime with all optimisations."""

    def start(self, folder: str, threads: int) -> None:
        """See Peer."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self.session = onnxruntime.InferenceSession(graph_of(folder), options, providers=["CPUExecutionProvider"])

    def run(self, pixels: np.ndarray) -> np.ndarray:
        """See Peer."""
        return np.asarray(self.session.run(None, {"pixels": pixels})[0])


class OpenVino(Peer):
    """OpenVINO with the given inference precision and the latency hint."""

    variants = ("float32", "bfloat16")

    def start(self, folder: str, threads: int) -> None:
        """See Peer."""
        import threading

        import openvino

        precision = {"float32": "f32", "bfloat16": "bf16"}[self.variant]
        self.model = openvino.Core().compile_model(graph_of(folder), "CPU", {
            "INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"})
        self.mine = threading.local()

    def run(self, pixels: np.ndarray) -> np.ndarray:
        """See Peer."""
        if not hasattr(self.mine, "request"):
            self.mine.request = self.model.create_infer_request()
        return np.array(self.mine.request.infer({"pixels": pixels})[self.model.output(0)])


class Mpool(own_process.Mpool):
    """mpool, all images in one call. Images of the model's input size pass through its processor as well, which does
    not change them.
    """

    def load(self, folder: str, threads: int, **config: Any) -> None:
        """Open a pool and load the model."""
        super().load(folder, threads, **config)
        self.embed([np.zeros((side(Path(folder).name),) * 2 + (3,), np.uint8)])

    def embed(self, images: list[np.ndarray]) -> np.ndarray:
        """See Peer."""
        return self.pool.embed_image(images, self.folder, compute=self.compute)

    embed_files = embed


ENGINES: dict[str, Any] = {"mpool": Mpool, "torch": Torch, "onnxruntime": OnnxRuntime, "openvino": OpenVino}


def random_images(count: int, size: int, seed: int) -> list[np.ndarray]:
    """Return random images, all different."""
    chance = np.random.default_rng(seed)
    return [chance.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(count)]


def files(count: int, seed: int) -> list[bytes]:
    """Return JPEG files of 640 x 480. Their smooth content makes the decoding cost similar to that of photographs."""
    from PIL import Image

    found = []
    for image in random_images(count, 24, seed):
        part = io.BytesIO()
        Image.fromarray(image).resize((640, 480), resample=3).save(part, "JPEG", quality=90)
        found.append(part.getvalue())
    return found


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Measure images/s of lists and of files, milliseconds of one image, and calls/s of 8 threads."""
    name, _, variant = task["engine"].partition(":")
    engine = ENGINES[name](variant)
    engine.load(task["folder"], task["threads"])
    count, repeat, size = task["images"], task["repeat"], side(Path(task["folder"]).name)
    first = engine.embed(random_images(4, size, 0))
    found: dict[str, float] = {}
    lists = [random_images(count, size, turn + 1) for turn in range(repeat)]
    found["list images/s"] = count / statistics.median(seconds_of(lambda: engine.embed(part)) for part in lists)
    written = [files(count, turn + 1) for turn in range(repeat)]
    found["files images/s"] = count / statistics.median(
        seconds_of(lambda: engine.embed_files(part)) for part in written)
    single = random_images(3 * count // 2, size, 99)
    found["one image ms"] = statistics.median(seconds_of(lambda: engine.embed([one])) for one in single) * 1e3
    times: list[float] = []

    def work(number: int) -> None:
        times.extend([seconds_of(lambda: engine.embed([one])) for one in single[number::8]])

    found["8 threads calls/s"] = len(single) / together(8, work)
    found["8 threads p99 ms"] = percentile(times, 0.99) * 1e3
    return {"measures": found, "vectors": first.tolist(), "rss MB": rss()}


def prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Convert the weights for an engine, before it is measured."""
    name = task["engine"].partition(":")[0]
    if name == "folder":
        make_folder(task["shape"], Path(task["folder"]))
    elif name in ("onnxruntime", "openvino"):
        graph_of(task["folder"])
    return {}


if __name__ == "__main__":
    run_task({"measure": measure, "prepare": prepare})
