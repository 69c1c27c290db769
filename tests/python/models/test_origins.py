"""Errors about values of model files name the file and the key that the user has, whichever part of mpool refuses them.

The C core refuses these values: specs name all hyper-parameters as GGUF does.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import errors

pytest.importorskip("torch")
pytest.importorskip("gguf")

import paritymodels  # noqa: E402
import tinygguf  # noqa: E402
import visionmodels  # noqa: E402
from tinygguf import gguf  # noqa: E402
from visiongguf import decoder, ollama, projector  # noqa: E402

#: Prepared model -> path, file at fault, its key, value found.
Case = tuple[Path, str, str, str]


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def _set(path: Path, key: str, value: float) -> None:
    """Change a number in a GGUF file."""
    field = gguf.GGUFReader(path, "r+").fields[key]
    field.parts[field.data[0]][0] = value


def _folder(tmp: Path) -> Case:
    paritymodels.decoder("llama", 1).save_pretrained(tmp)
    paritymodels.write_tokenizer(tmp, 96)
    _edit(tmp / "config.json", lambda values: values["rope_parameters"].update(rope_theta=1e13))
    return tmp, "config.json", "rope_parameters.rope_theta", "1e+13"


def _embedder(tmp: Path) -> Case:
    paritymodels.bert(1).save_pretrained(tmp)
    paritymodels.write_tokenizer(tmp, 211)
    _edit(tmp / "config.json", lambda values: values.update(layer_norm_eps=1e-33))
    return tmp, "config.json", "layer_norm_eps", "1e-33"


def _vision(tmp: Path, change: Callable[[dict[str, Any]], Any], file: str, key: str, got: str) -> Case:
    folder = Path(visionmodels.save(visionmodels.randomised("gemma3"), "gemma3", tmp / "model"))
    _edit(folder / file, change)
    return folder, file, key, got


def _text_of_vision(tmp: Path) -> Case:
    return _vision(tmp, lambda values: values["text_config"].update(query_pre_attn_scalar=1e-20), "config.json",
                   "scale of attention, from text_config.query_pre_attn_scalar,", "1e+10")


def _encoder_of_vision(tmp: Path) -> Case:
    return _vision(tmp, lambda values: values["vision_config"].update(layer_norm_eps=1e-33), "config.json",
                   "vision_config.layer_norm_eps", "1e-33")


def _pixels(tmp: Path) -> Case:
    return _vision(tmp, lambda values: values.update(rescale_factor=1e10), "preprocessor_config.json",
                   "rescale_factor", "1e+10")


def _renamed(tmp: Path) -> Case:
    tinygguf.write(tmp / "m.gguf", paritymodels.decoder("gpt_oss", 1))
    _set(tmp / "m.gguf", "gpt-oss.rope.freq_base", 1e13)
    return tmp / "m.gguf", "m.gguf", "gpt-oss.rope.freq_base", "1e+13"


def _local_base(tmp: Path) -> Case:
    tinygguf.write(tmp / "m.gguf", paritymodels.decoder("gemma4", 4))
    _set(tmp / "m.gguf", "gemma4.rope.freq_base_swa", 1e13)
    return tmp / "m.gguf", "m.gguf", "gemma4.rope.freq_base_swa", "1e+13"


def _pair(tmp: Path) -> None:
    model = visionmodels.randomised("gemma3")
    decoder(model, tmp / "text-F32.gguf", visionmodels.IMAGE)
    projector(model, tmp / "mmproj-F32.gguf")


def _projector(tmp: Path) -> Case:
    _pair(tmp)
    _set(tmp / "mmproj-F32.gguf", "clip.vision.attention.layer_norm_epsilon", 2.0)
    return tmp, "mmproj-F32.gguf", "clip.vision.attention.layer_norm_epsilon", "2"


def _decoder_of_pair(tmp: Path) -> Case:
    _pair(tmp)
    _set(tmp / "text-F32.gguf", "gemma3.rope.freq_base", 1e13)
    return tmp, "text-F32.gguf", "gemma3.rope.freq_base", "1e+13"


def _tensor_of_projector(tmp: Path) -> Case:
    with pytest.MonkeyPatch.context() as patch:
        add, gone = gguf.GGUFWriter.add_tensor, "v.blk.0.ln1.weight"
        patch.setattr(gguf.GGUFWriter, "add_tensor",
                      lambda self, name, *given: None if name == gone else add(self, name, *given))
        _pair(tmp)
    return tmp, "mmproj-F32.gguf", gone, "missing"


def _of_ollama(tmp: Path) -> Case:
    model = visionmodels.randomised("qwen2_5_vl")
    decoder(model, tmp / "text.gguf", visionmodels.IMAGE)
    projector(model, tmp / "image.gguf")
    path = ollama(tmp / "text.gguf", tmp / "image.gguf", tmp / "sha256-0")
    _set(path, "qwen25vl.vision.attention.layer_norm_epsilon", 2.0)
    return path, "sha256-0", "qwen25vl.vision.attention.layer_norm_epsilon", "2"


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("make", [_folder, _embedder, _text_of_vision, _encoder_of_vision, _pixels, _renamed,
                                  _local_base, _projector, _decoder_of_pair, _tensor_of_projector, _of_ollama])
def test_errors_name_the_file_and_key_of_the_user(tmp_path: Path, make: Callable[[Path], Case], isolation: Any) -> None:
    if isolation == "process" and make not in (_folder, _projector):
        pytest.skip("the same code")
    path, file, field, got = make(tmp_path)
    with mpool.Pool(mpool.PoolConfig(isolation=isolation)) as pool:
        with pytest.raises(errors.FormatError) as caught:
            pool.load(str(path), compute="float32")
    error = caught.value
    assert (Path(error.file or "").name, error.field, error.got) == (file, field, got)
    assert error.allowed and f": {field} is {got}, allowed: {error.allowed}" in str(error)
