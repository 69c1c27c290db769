"""Networks of image-generation pipelines: a key that a configuration lacks has the default of the class of transformers
or diffusers, and each value reaches its hyper-parameter."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

from mpool import errors  # noqa: E402
from mpool.models.files import Folder  # noqa: E402
from mpool.models.formats import pipelines  # noqa: E402
from mpool.models.formats.pipeline_tensors import Transformer  # noqa: E402


def defaults(cls: Any) -> dict[str, Any]:
    """Return the default of every option of a class of diffusers."""
    return {name: list(one.default) if isinstance(one.default, tuple) else one.default
            for name, one in inspect.signature(cls.__init__).parameters.items() if name != "self"}


@pytest.fixture()
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns what a method of the reader finds for a config.json, without weights and tokenizers: its result, the
    hyper-parameters and the tensors."""
    monkeypatch.setattr(pipelines._PipelineReader, "weights", lambda self, folder, kind: {})
    monkeypatch.setattr(pipelines._PipelineReader, "_tokenizer", lambda self, part, pad, clip: (part, pad))
    monkeypatch.setattr(pipelines._PipelineReader, "_single_gguf", lambda self, where, folder: None)

    def add(self: Any, slices: Any, tensors: Any, ignored: Any = ()) -> None:
        self.tensors += [*slices, ignored]

    monkeypatch.setattr(pipelines._PipelineReader, "add", add)

    def run(part: str, cls: str, values: dict[str, Any], call: Callable[[Any], Any]) -> Any:
        place = tmp_path / part
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(values))
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "X", part: ["library", cls]}))
        folder = Folder(str(tmp_path))
        reader = pipelines._PipelineReader(folder, folder.fields("model_index.json"))
        result = call(reader)
        return result, reader.kv, reader.tensors

    return run


def sizes(flux: bool, channels: int) -> Transformer:
    return Transformer(flux=flux, layers=1, singles=0, heads=1, head=64, channels=channels, texts=1, pooled=1,
                       guidance=False, qk_norm=False, dual=(), positions=1)


COMMON = set(transformers.PretrainedConfig().to_dict())
CLIP = {key: value for key, value in transformers.CLIPTextConfig().to_dict().items()
        if key not in COMMON | {"bos_token_id", "pad_token_id"}} | {"eos_token_id": 49407}
T5 = {key: value for key, value in transformers.T5Config(feed_forward_proj="gated-gelu").to_dict().items()
      if key not in COMMON}
FLUX, SD3 = defaults(diffusers.FluxTransformer2DModel), defaults(diffusers.SD3Transformer2DModel)
VAE = defaults(diffusers.AutoencoderKL) | {"use_post_quant_conv": False}
#: Part -> name of the class, its configuration, keys that are required, method.
PARTS: dict[str, tuple[str, dict[str, Any], set[str], Callable[[Any], Any]]] = {
    "clip": ("CLIPTextModel", CLIP, {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                     "num_attention_heads", "max_position_embeddings"},
             lambda reader: reader.clip(0, "clip", "words", False)),
    "projected": ("CLIPTextModelWithProjection", CLIP, {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings"}, lambda reader: reader.clip(1, "projected", "words", True)),
    "t5": ("T5EncoderModel", T5, {"vocab_size", "d_model", "d_ff", "d_kv", "num_layers", "num_heads",
                                  "feed_forward_proj"}, lambda reader: reader.t5("t5", "words")),
    "vae": ("AutoencoderKL", VAE, {"use_post_quant_conv"}, lambda reader: reader.decoder(sizes(False, 4)))}


@pytest.mark.parametrize("part", PARTS)
def test_a_key_that_is_missing_has_the_default_of_its_class(read: Callable[..., Any], part: str) -> None:
    cls, base, required, call = PARTS[part]
    whole = read(part, cls, base, call)
    for key in base:
        given = {name: value for name, value in base.items() if name != key}
        if key in required:
            with pytest.raises(errors.MpoolError):
                read(part, cls, given, call)
        else:
            assert read(part, cls, given, call) == whole, key


@pytest.mark.parametrize("flux", [False, True])
def test_a_missing_key_of_a_transformer_has_the_default_of_its_class(read: Callable[..., Any], flux: bool) -> None:
    cls, base = ("FluxTransformer2DModel", FLUX) if flux else ("SD3Transformer2DModel", SD3)
    whole = read("transformer", cls, base, lambda reader: reader.transformer(flux, None))
    for key in base:
        given = {name: value for name, value in base.items() if name != key}
        assert read("transformer", cls, given, lambda reader: reader.transformer(flux, None)) == whole, key


def test_a_missing_key_of_a_scheduler_has_the_default_of_its_class(tmp_path: Path) -> None:
    base = defaults(diffusers.FlowMatchEulerDiscreteScheduler) | {"_class_name": "FlowMatchEulerDiscreteScheduler"}

    def found(values: dict[str, Any]) -> Any:
        (tmp_path / "scheduler_config.json").write_text(json.dumps(values))
        return pipelines._scheduler(Folder(str(tmp_path)))

    whole = found(base)
    assert whole == {name: base[name] for name in whole}
    for key in set(base) - {"_class_name"}:
        assert found({name: value for name, value in base.items() if name != key}) == whole, key
    for key, given in (("shift", 2.5), ("base_shift", 0.25), ("max_shift", 1.5), ("shift_terminal", 0.1),
                       ("num_train_timesteps", 7), ("base_image_seq_len", 5), ("max_image_seq_len", 300),
                       ("use_dynamic_shifting", True), ("time_shift_type", "linear")):
        assert found(base | {key: given}) == whole | {key: given}
    for key in ("invert_sigmas", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas",
                "stochastic_sampling"):
        with pytest.raises(errors.Unsupported, match=f"{key} is true"):
            found(base | {key: True})
    assert found(base | {"base_image_seq_len": 4095})
    for values, field, got in (({"base_image_seq_len": 4096}, "max_image_seq_len", 4096),
                               ({"time_shift_type": "other"}, "time_shift_type", "other"),
                               ({"shift": 0.0}, "shift", "0.0"), ({"shift_terminal": 1.0}, "shift_terminal", "1.0"),
                               ({"num_train_timesteps": 0}, "num_train_timesteps", "0")):
        with pytest.raises(errors.FormatError) as caught:
            found(base | values)
        assert (caught.value.field, caught.value.got) == (field, got)


@pytest.mark.parametrize("part, changes, expected", [
    ("clip", {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 45, "num_hidden_layers": 2,
              "max_position_embeddings": 70, "eos_token_id": 9, "layer_norm_eps": 0.5, "hidden_act": "gelu"},
     {"block_count": 2, "embedding_length": 24, "head_count": 3, "head_length": 8, "feed_forward_length": 45,
      "context_length": 70, "projection_length": 0, "end_token": 9, "norm_epsilon": 0.5, "activation": "gelu"}),
    ("clip", {"eos_token_id": 2}, {"end_token": -1}), ("projected", {"projection_dim": 33}, {"projection_length": 33}),
    ("t5", {"d_model": 24, "num_heads": 3, "d_kv": 5, "num_layers": 2, "d_ff": 45, "layer_norm_epsilon": 0.5,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
     {"block_count": 2, "embedding_length": 24, "head_count": 3, "head_length": 5, "feed_forward_length": 45,
      "norm_epsilon": 0.5, "relative_buckets": 8, "relative_distance": 20}),
    ("vae", {"block_out_channels": [8, 16], "up_block_types": ["UpDecoderBlock2D"] * 2, "layers_per_block": 3,
             "norm_num_groups": 4, "scaling_factor": 1.5, "shift_factor": 0.25, "mid_block_add_attention": False},
     {"channels": [8, 16], "layers": 3, "groups": 4, "scaling_factor": 1.5, "shift_factor": 0.25,
      "attention": False})])
def test_each_value_reaches_its_hyper_parameter(read: Callable[..., Any], part: str, changes: dict[str, Any],
                                                expected: dict[str, Any]) -> None:
    cls, base, _, call = PARTS[part]
    result, kv, _ = read(part, cls, base | changes, call)
    name = {"clip": pipelines._CLIP[0], "projected": pipelines._CLIP[1]}.get(part, part)
    assert {key: kv[f"{name}.{key}"] for key in expected} == expected
    if part == "vae":
        assert result == (2, 4)


@pytest.mark.parametrize("flux, changes, expected", [
    (True, {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 5, "attention_head_dim": 16,
            "in_channels": 8, "joint_attention_dim": 40, "pooled_projection_dim": 24, "guidance_embeds": True,
            "axes_dims_rope": [4, 4, 8]},
     {"block_count": 2, "single_block_count": 3, "head_count": 5, "head_length": 16, "channels": 2, "text_length": 40,
      "pooled_length": 24, "guidance": True, "qk_norm": True, "axes": [4, 4, 8]}),
    (False, {"num_layers": 2, "num_attention_heads": 5, "attention_head_dim": 16, "caption_projection_dim": 80,
             "in_channels": 8, "out_channels": 8, "joint_attention_dim": 40, "pooled_projection_dim": 24,
             "qk_norm": "rms_norm", "pos_embed_max_size": 12, "dual_attention_layers": [1]},
     {"block_count": 2, "single_block_count": 0, "head_count": 5, "head_length": 16, "channels": 8, "text_length": 40,
      "pooled_length": 24, "guidance": False, "qk_norm": True, "position_side": 12, "dual_layers": [1]}),
    (False, {}, {"qk_norm": False, "dual_layers": [-1]})])
def test_each_value_of_a_transformer_reaches_its_hyper_parameter(read: Callable[..., Any], flux: bool,
                                                                 changes: dict[str, Any],
                                                                 expected: dict[str, Any]) -> None:
    cls, base = ("FluxTransformer2DModel", FLUX) if flux else ("SD3Transformer2DModel", SD3)
    (size, side), kv, _ = read("transformer", cls, base | changes, lambda reader: reader.transformer(flux, None))
    assert {key: kv[f"transformer.{key}"] for key in expected} == expected and side == 128
    assert (size.heads, size.head, size.flux) == (kv["transformer.head_count"], kv["transformer.head_length"], flux)


def test_other_classes_and_keys_are_refused(read: Callable[..., Any]) -> None:
    for part, (cls, base, _, call) in PARTS.items():
        with pytest.raises(errors.FormatError) as caught:
            read(part, "Other", base, call)
        assert (caught.value.field, caught.value.got, caught.value.allowed) == (part, "Other", cls)
        with pytest.raises(errors.Unsupported, match="the key new_key is unknown"):
            read(part, cls, base | {"new_key": 1}, call)
