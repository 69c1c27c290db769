"""Folders and inputs of EmbeddingGemma 2 that mpool refuses, before it loads anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import mpool
from mpool import errors
from mpool.models.formats.hf_folder import describe_folder

import visionmodels
from paritymodels import torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embedding_gemma2")
    visionmodels.embedding_gemma2(made)
    return made


def described(folder: Path) -> Any:
    return describe_folder(str(folder), key="k", ref="r")


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / name
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_the_folder_is_read(folder: Path, tmp_path: Path) -> None:
    """Weights of the audio encoder, which published folders have, are ignored."""
    found = described(folder)
    assert (found.capability, found.spec.architecture) == ("text_embedding", "gemma4_vision")
    assert found.embedding is not None and found.embedding.output_size == 44 and found.embedding.normalize
    assert dict(found.embedding.prompts) == {"query": "w30 w31 ", "document": "w32 "}
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    path = whole / "model.safetensors"
    save_file({**load_file(path), "audio_tower.norm.weight": torch.ones(3),
               "embed_audio.embedding_projection.weight": torch.ones(3, 2)}, path, {"format": "pt"})
    edit(whole, "config.json", lambda values: values.update(audio_config={"model_type": "gemma4_audio"}))
    assert [one.name for one in described(whole).spec.tensors] == [one.name for one in found.spec.tensors]


def _text(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda values: values["text_config"].update(changes)


@pytest.mark.parametrize("name, change, error, field", [
    ("config.json", lambda values: values.update(vision_config=None), errors.Unsupported, "vision_config"),
    ("config.json", lambda values: values.update(architectures=["EmbeddingGemma2TextModel"]), errors.FormatError,
     "architectures"),
    ("config.json", _text(embedding_dim=43), errors.FormatError, "embedding_projection"),
    ("config.json", _text(hidden_size_per_layer_input=0), errors.FormatError, "hidden_size_per_layer_input"),
    ("config.json", _text(sliding_window=0), errors.FormatError, "sliding_window"),
    ("config.json", _text(hidden_activation="sin"), errors.FormatError, "hidden_activation"),
    ("config.json", lambda values: values["text_config"]["per_layer_config"].update({"1": {"head_dim": 20}}),
     errors.Unsupported, "per_layer_config"),
    ("config.json", lambda values: values.update(quantization_config={"quant_method": "awq"}), errors.Unsupported,
     "quantization_config"),
    ("1_module/config.json", lambda values: values.update(pooling_mode="lasttoken"), errors.Unsupported, "mean"),
    ("1_module/config.json", lambda values: values.update(include_prompt=False), errors.Unsupported, "include_prompt"),
    ("1_module/config.json", lambda values: values.update(embedding_dimension=60), errors.FormatError,
     "embedding_dimension"),
    ("sentence_bert_config.json", lambda values: values["modality_config"]["message"].update(format="flat"),
     errors.Unsupported, "format"),
    ("sentence_bert_config.json", lambda values: values["modality_config"]["audio"].update(method="listen"),
     errors.Unsupported, "modality_config.audio"),
    ("preprocessor_config.json", lambda values: values.update(patch_size=8), errors.FormatError, "patch_size"),
    ("chat_template.json", lambda values: values.pop("chat_template"), errors.Unsupported, "chat template"),
])
def test_bad_folders(folder: Path, tmp_path: Path, name: str, change: Any, error: type[Exception], field: str) -> None:
    """The error names what is wrong."""
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    edit(broken, name, change)
    with pytest.raises(error, match=field):
        described(broken)


def test_a_folder_of_the_network_alone_is_no_language_model(folder: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(folder, tmp_path / "alone"))
    (alone / "modules.json").unlink()
    with pytest.raises(errors.Unsupported, match="modules.json"):
        described(alone)
    text = json.loads((alone / "config.json").read_text())["text_config"]
    (alone / "config.json").write_text(json.dumps({**text, "architectures": ["EmbeddingGemma2TextModel"]}))
    with pytest.raises(errors.Unsupported, match="modules.json"):
        described(alone)


@pytest.mark.parametrize("key", ["audio", "video"])
def test_audio_and_video_are_refused(folder: Path, key: str) -> None:
    with mpool.Pool() as pool:
        for model in (str(folder), "no/such-model"):  # before the model is looked up
            with pytest.raises(errors.InvalidArgument) as caught:
                pool.embed([{"text": "w40"}, {key: "sound.wav"}], model)
            assert caught.value.param == "inputs[1]" and key in str(caught.value.hint)
        assert not pool.ps()
        with pytest.raises(errors.WrongCapability):
            pool.generate("w40", str(folder))
