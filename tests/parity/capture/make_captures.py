"""Makes the reference captures for mpool's: the same records from llama.cpp and from transformers.

Both engines read the weights of a small model's quantised GGUF file, converted to a GGUF file in F32: no quantisation
of activations hides a difference. The prompt is that of haiku.json; decoding is greedy. Records are packed, in the
format of mpool.debug.capture (mpool.debug.CaptureRecord).

Run by hand. The last command needs an interpreter of its own, because llama-cpp-python compiles for minutes:

    python make_captures.py float32 MODEL.gguf F32.gguf            # gguf
    python make_captures.py transformers F32.gguf transformers.jsonl.xz     # torch, transformers, gguf
    python make_captures.py llama F32.gguf llama.jsonl.xz          # llama-cpp-python
"""

import ctypes
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
#: Number of generated tokens; numbers per record.
TOKENS, VALUES = 24, 10
HAIKU: dict[str, Any] = json.loads((HERE / "haiku.json").read_text())


class Records:
    """Records of an engine, in the order of mpool's."""

    def __init__(self, team: str, layers: int) -> None:
        self.team = team
        self._stages = ["embedding", *(f"layer.{number}" for number in range(layers)), "norm", "logits"]
        self._found: dict[tuple[int, str], np.ndarray] = {}

    def add(self, token: int, stage: str, row: np.ndarray) -> None:
        """Add the record of one stage."""
        assert (token, stage) not in self._found and row.ndim == 1 and row.dtype == np.float32
        self._found[token, stage] = row.copy()

    def write(self, path: Path) -> None:
        """Write the packed lines."""
        assert len(self._found) == TOKENS * len(self._stages)
        lines = []
        for token in range(TOKENS):
            for stage in self._stages:
                row = self._found[token, stage]
                lines.append(json.dumps({
                    "checkpoint": stage, "team": self.team, "token_idx": token, "job_id": "haiku", "dtype": "float32",
                    "shape": [len(row)], "values": [float(f"{value:.9g}") for value in row[:VALUES].tolist()]}) + "\n")
        path.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))


def answer(step: Callable[[list[int], int], np.ndarray]) -> None:
    """Generate with an engine: ``step`` computes tokens, the last of which has number ``token``, and returns the
    logits.
    """
    tokens, found = list(HAIKU["tokens"]), []
    for token in range(TOKENS):
        found.append(int(step(tokens, token).argmax()))
        tokens = found[-1:]
    assert found == HAIKU["answer"], f"another answer: {found}"


def float32(source: Path, target: Path) -> None:
    """Write the model with all its tensors in F32."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value: Any = 0 if field.name == "general.file_type" else field.contents()  # 0: all in F32
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], inner)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        writer.add_tensor(tensor.name, np.ascontiguousarray(data.reshape(tensor.shape[::-1])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers(model: Path, out: Path) -> None:
    """Capture transformers with hooks on its modules."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32,
                                               attn_implementation="eager").eval()
    records, at, past = Records("transformers", len(net.model.layers)), 0, None

    def watch(module: Any, stage: str) -> None:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            records.add(at, stage, rows[0, -1].numpy())

        module.register_forward_hook(hook)

    watch(net.model.embed_tokens, "embedding")
    for number, layer in enumerate(net.model.layers):
        watch(layer, f"layer.{number}")
    watch(net.model.norm, "norm")
    watch(net.lm_head, "logits")

    def step(tokens: list[int], token: int) -> np.ndarray:
        nonlocal at, past
        at = token
        done = net(torch.tensor([tokens]), past_key_values=past, use_cache=True)
        past = done.past_key_values
        return done.logits[0, -1].numpy()

    with torch.no_grad():
        answer(step)
    records.write(out)


def llama(model: Path, out: Path) -> None:
    """Capture llama.cpp with its evaluation callback: llama.cpp offers each tensor, then passes its data."""
    import llama_cpp
    from llama_cpp import llama_cpp as low

    stages = {"embd": "embedding", "result_norm": "norm", "result_output": "logits"}
    low.llama_backend_init()
    params = low.llama_model_default_params()
    params.n_gpu_layers = 0
    loaded = low.llama_model_load_from_file(str(model).encode(), params)
    layers, width = low.llama_model_n_layer(loaded), low.llama_model_n_embd(loaded)
    vocab = low.llama_vocab_n_tokens(low.llama_model_get_vocab(loaded))
    stages |= {f"l_out-{number}": f"layer.{number}" for number in range(layers)}
    records, at = Records("llama.cpp", layers), 0

    base = _ggml(Path(llama_cpp.__file__).parent / "lib")
    failed: list[BaseException] = []

    def seen(tensor: Any, ask: bool, _data: Any) -> bool:
        try:
            stage = stages.get(base.ggml_get_name(tensor).decode())
            if not ask and stage is not None:
                size = vocab if stage == "logits" else width
                rows = base.ggml_nelements(tensor) // size
                row = np.empty(size, np.float32)
                assert base.ggml_nbytes(tensor) == rows * row.nbytes, "llama.cpp passed a tensor that is not float32"
                base.ggml_backend_tensor_get(tensor, row.ctypes.data, (rows - 1) * row.nbytes, row.nbytes)
                records.add(at, stage, row)
            return not ask or stage is not None
        except BaseException as error:  # ctypes prints an exception of the callback, and goes on
            failed.append(error)
            return False

    made = low.llama_context_default_params()
    made.n_ctx, made.n_batch, made.n_ubatch, made.n_threads, made.n_threads_batch = 512, 512, 512, 2, 2
    made.type_k = made.type_v = low.GGML_TYPE_F32
    made.flash_attn_type = low.LLAMA_FLASH_ATTN_TYPE_DISABLED
    callback = low.ggml_backend_sched_eval_callback(seen)
    made.cb_eval = callback
    context = low.llama_init_from_model(loaded, made)

    def step(tokens: list[int], token: int) -> np.ndarray:
        nonlocal at
        at = token
        ids = (low.llama_token * len(tokens))(*tokens)
        assert low.llama_decode(context, low.llama_batch_get_one(ids, len(tokens))) == 0 and not failed, failed
        return np.ctypeslib.as_array(low.llama_get_logits_ith(context, -1), (vocab,)).copy()

    answer(step)
    records.write(out)


def _ggml(folder: Path) -> Any:
    """Bind the ggml functions that llama-cpp-python's low-level interface lacks."""
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    for name, result, arguments in (("ggml_get_name", ctypes.c_char_p, [ctypes.c_void_p]),
                                    ("ggml_nelements", ctypes.c_int64, [ctypes.c_void_p]),
                                    ("ggml_nbytes", ctypes.c_size_t, [ctypes.c_void_p]),
                                    ("ggml_backend_tensor_get", None, [ctypes.c_void_p, ctypes.c_void_p,
                                                                       ctypes.c_size_t, ctypes.c_size_t])):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


if __name__ == "__main__":
    made = {"float32": float32, "transformers": transformers, "llama": llama}[sys.argv[1]]
    made(Path(sys.argv[2]), Path(sys.argv[3]))
