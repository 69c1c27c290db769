"""Reader of diffusers folders of image-generation models: ``model_index.json`` and one folder per network.

Supported are FLUX.1 and Stable Diffusion 3 and 3.5. The transformer comes from its own folder, or from a GGUF file next
to ``model_index.json``. An unknown configuration key raises an error, because it could change the computation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...checks import shown
from ...errors import FormatError, InvalidArgument, Unsupported
from ..fields import Fields
from ..files import Folder, refuse_missing_weights
from ..spec import ModelDescription, ModelSpec, PipelineSettings, TensorEntry, TextInput, Value
from . import pipeline_tensors, safetensors_header
from .gguf_tables import read_gguf
from .pipeline_tensors import Transformer

_PIPELINES = {"FluxPipeline": "flux", "StableDiffusion3Pipeline": "sd3"}
_WEIGHTS = {"model": "model", "diffusion": "diffusion_pytorch_model"}
_CLIP = ("clip_l", "clip_g")
#: Maximum text length of a T5 encoder, in tokens; the limit of diffusers.
_MAX_TOKENS = 512
#: Name of an activation in configurations -> in the core.
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
                "relu": "relu", "silu": "silu"}
#: Keys of a network's config.json that do not affect the computation.
_NEUTRAL = frozenset({"_class_name", "_diffusers_version", "_name_or_path", "architectures", "dtype", "torch_dtype",
                     "model_type", "transformers_version", "initializer_factor", "initializer_range", "dropout",
                     "attention_dropout", "dropout_rate", "classifier_dropout", "bos_token_id", "pad_token_id",
                     "decoder_start_token_id", "use_cache", "output_past", "task_specific_params", "n_positions",
                     "is_encoder_decoder", "is_decoder", "num_decoder_layers", "tie_word_embeddings",
                     "gradient_checkpointing", "return_dict", "output_hidden_states", "output_attentions",
                     "_commit_hash", "problem_type", "scale_decoder_outputs"})


def describe_pipeline(folder: Folder, *, key: str, ref: str) -> ModelDescription:
    """Describe a diffusers folder.

    Args:
        folder: the folder with ``model_index.json``.
        key, ref: key and reference of the model, stored in the result.

    Returns:
        A description with the capability ``text_to_image``.

    Raises:
        FormatError: a file is missing or malformed, or contradicts another file.
        UnsafeFormat: a network has only pickled weights.
        Unsupported: mpool does not support the pipeline or a computation of one of its networks.
    """
    return _describe(folder, None, key=key, ref=ref)


def describe_with_gguf(path: str, tensors: Sequence[TensorEntry], files: Sequence[str], *, key: str,
                       ref: str) -> ModelDescription:
    """Describe a diffusers folder whose transformer is a GGUF file.

    Args:
        path: the GGUF file, in the folder with ``model_index.json``.
        tensors: tensors of the GGUF file.
        files: paths of all parts of the GGUF file.
        key, ref: key and reference of the model, stored in the result.

    Raises:
        FormatError: the folder has no ``model_index.json``.
        FormatError, UnsafeFormat, Unsupported: on the conditions of :func:`describe_pipeline`.
    """
    folder = Folder(os.path.dirname(path))
    if not folder.has("model_index.json"):
        raise FormatError(file=path, field="folder", got="without model_index.json",
                          allowed="the diffusers folder of the pipeline",
                          hint="A GGUF file of FLUX or Stable Diffusion 3 has only the transformer: put it into the "
                               "folder of the pipeline, which has the text encoders, the decoder and the tokenizers")
    return _describe(folder, (path, tensors, files), key=key, ref=ref)


#: Path, tensors and parts of a GGUF file.
_Gguf = tuple[str, Sequence[TensorEntry], Sequence[str]]


def _describe(folder: Folder, gguf: _Gguf | None, *, key: str, ref: str) -> ModelDescription:
    """Describe a pipeline, with its transformer from ``gguf`` if that is not None."""
    index = folder.fields("model_index.json")
    name = index.str("_class_name")
    if name not in _PIPELINES:
        raise Unsupported(f"{index.file}: the pipeline is {name}; mpool supports {', '.join(_PIPELINES)}")
    flux = _PIPELINES[name] == "flux"
    reader = _PipelineReader(folder, index)
    inputs: list[TextInput | None] = [None, None, None]
    if flux:
        inputs[0] = reader.clip(0, "text_encoder", "tokenizer", projected=False)
        inputs[2] = reader.t5("text_encoder_2", "tokenizer_2")
    else:
        for i, suffix in enumerate(("", "_2")):
            inputs[i] = reader.clip(i, f"text_encoder{suffix}", f"tokenizer{suffix}", projected=True)
        if reader.has("text_encoder_3"):
            inputs[2] = reader.t5("text_encoder_3", "tokenizer_3")
        else:
            inputs[2] = TextInput(None, _MAX_TOKENS)
    size, sample = reader.transformer(flux, gguf)
    scale, channels = reader.decoder(size)
    reader.put("pipeline", index, side=sample)
    scheduler = _scheduler(folder.sub("scheduler", declared_in=index.file, field="scheduler"))
    settings = PipelineSettings(
        architecture=_PIPELINES[name], inputs=(inputs[0], inputs[1], inputs[2]), scheduler=scheduler,
        channels=channels, scale=scale, side=sample * scale,
        steps=4 if flux and not size.guidance else 28, guidance_scale=(3.5 if size.guidance else 0.0) if flux else 7.0,
        guided=not flux, distilled=size.guidance, text_tokens=512 if size.guidance else 256)
    return ModelDescription(
        key=key, ref=ref, capability="text_to_image", pipeline=settings,
        spec=ModelSpec(_PIPELINES[name], tuple(reader.paths), reader.kv, tuple(reader.tensors),
                       origins=reader.origins))


class _PipelineReader:
    """Reader of the networks of a pipeline, which collects their files, hyper-parameters and tensors.

    Attributes:
        folder, index: the folder and its ``model_index.json``.
        paths: paths of the weight files of the networks read so far.
        kv, origins: hyper-parameters of the networks, and their files for errors.
        tensors: tensors of the networks under the core's names.
    """

    def __init__(self, folder: Folder, index: Fields) -> None:
        self.folder, self.index = folder, index
        self.paths: list[str] = []
        self.kv: dict[str, Value] = {}
        self.origins: dict[str, tuple[str, str]] = {}
        self.tensors: list[TensorEntry] = []

    def has(self, part: str) -> bool:
        """Return True if the pipeline has the part. Diffusers writes null for an omitted part."""
        value = self.index.get(part)
        return isinstance(value, list) and len(value) == 2 and value[0] is not None

    def config(self, part: str, classes: tuple[str, ...]) -> tuple[Folder, Fields]:
        """Return the folder of a part and its config.json.

        Raises:
            FormatError: the part is missing, or its class is not one of ``classes``.
        """
        value = self.index.get(part)
        if not self.has(part) or value[1] not in classes:
            got = "missing" if not self.has(part) else str(value[1])
            self.index.fail(part, got, " or ".join(classes))
        subfolder = self.folder.sub(part, declared_in=self.index.file, field=part)
        return subfolder, subfolder.fields("config.json")

    def weights(self, subfolder: Folder, kind: str) -> Mapping[str, TensorEntry]:
        """Read the stored tensors of a network by name; the caller then passes them to :meth:`add`.

        ``kind`` is ``"model"`` for a network of transformers and ``"diffusion"`` for one of diffusers.
        """
        found = safetensors_header.read_folder(subfolder, _WEIGHTS[kind])
        if found is None:
            refuse_missing_weights(subfolder, f"{_WEIGHTS[kind]}.safetensors or "
                                              f"{_WEIGHTS[kind]}.safetensors.index.json")
        paths, tensors = found
        self._new_paths = list(paths)
        for entry in tensors.values():
            safetensors_header.require_weight_dtype(entry, paths[entry.file])
        return tensors

    def add(self, slices: Iterable[pipeline_tensors.TensorSlice], tensors: Mapping[str, TensorEntry],
            ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Add the tensors that the core needs from those that :meth:`weights` returned."""
        self.tensors += pipeline_tensors.select(iter(slices), tensors, file=self._new_paths[0],
                                                file_offset=len(self.paths), ignored_prefixes=ignored_prefixes)
        self.paths += self._new_paths

    def clip(self, index: int, part: str, tokenizer: str, projected: bool) -> TextInput:
        """Read a CLIP text encoder.

        Args:
            index: 0 for CLIP-L, 1 for CLIP-G.
            part, tokenizer: names of the encoder and its tokenizer in the pipeline.
            projected: True if a projection is applied to the pooled embedding.
        """
        subfolder, config = self.config(part, ("CLIPTextModelWithProjection",) if projected else ("CLIPTextModel",))
        _check_keys(config, {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                             "num_attention_heads", "max_position_embeddings", "projection_dim", "hidden_act",
                             "layer_norm_eps", "eos_token_id"})
        tensors = self.weights(subfolder, "model")
        prefix = "text_model." if any(name.startswith("text_model.") for name in tensors) else ""
        hidden, heads = config.int("hidden_size", low=1), config.int("num_attention_heads", low=1)
        projection = config.int("projection_dim", 512, low=1) if projected else 0
        vocabulary, length = config.int("vocab_size", low=1), config.int("max_position_embeddings", low=2)
        layers, ffn = config.int("num_hidden_layers", low=1), config.int("intermediate_size", low=1)
        name = _CLIP[index]
        # Older files have the id 2, which transformers interprets as "the token with the highest id".
        end = config.int("eos_token_id", 49407, low=0)
        self.put(name, config, block_count=layers, embedding_length=hidden, head_count=heads,
                 head_length=hidden // heads,
                 feed_forward_length=ffn, context_length=length, projection_length=projection,
                 end_token=-1 if end == 2 else end, norm_epsilon=config.number("layer_norm_eps", 1e-5),
                 activation=_activation(config, "hidden_act", "quick_gelu"))
        self.add(pipeline_tensors.clip(name, prefix, hidden=hidden, ffn=ffn, layers=layers, vocabulary=vocabulary,
                                     positions=length, projection=projection), tensors,
                 (f"{prefix}embeddings.position_ids", *(() if projected else ("text_projection",))))
        at, pad = self._tokenizer(tokenizer, "<|endoftext|>", clip=True)
        return TextInput(at, length, pad, clip=True)

    def t5(self, part: str, tokenizer: str) -> TextInput:
        """Read a T5 encoder, from safetensors or from the only GGUF file of its folder."""
        subfolder, config = self.config(part, ("T5EncoderModel",))
        _check_keys(config, {"vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "feed_forward_proj",
                             "dense_act_fn", "is_gated_act", "layer_norm_epsilon", "relative_attention_max_distance",
                             "relative_attention_num_buckets", "eos_token_id"})
        if not config.str("feed_forward_proj", "relu").startswith("gated-"):
            raise Unsupported(f"{config.file}: feed_forward_proj is {config.get('feed_forward_proj')}; mpool supports "
                              "T5 encoders with gated-gelu, gated-silu and gated-relu")
        gate = config.str("feed_forward_proj").removeprefix("gated-")
        act = _ACTIVATIONS["gelu_new" if gate == "gelu" else gate] if gate in _ACTIVATIONS else \
            config.fail("feed_forward_proj", gate, "gated-gelu, gated-silu or gated-relu")
        hidden, heads, head = config.int("d_model", low=1), config.int("num_heads", low=1), config.int("d_kv", low=1)
        layers, ffn = config.int("num_layers", low=1), config.int("d_ff", low=1)
        vocabulary = config.int("vocab_size", low=1)
        buckets = config.int("relative_attention_num_buckets", 32, low=4)
        self.put("t5", config, block_count=layers, embedding_length=hidden, head_count=heads, head_length=head,
                 feed_forward_length=ffn, context_length=_MAX_TOKENS, relative_buckets=buckets, activation=act,
                 relative_distance=config.int("relative_attention_max_distance", 128, low=4),
                 norm_epsilon=config.number("layer_norm_epsilon", 1e-6))
        gguf = self._single_gguf(subfolder, subfolder)
        sizes = dict(hidden=hidden, width=heads * head, heads=heads, ffn=ffn, layers=layers, vocabulary=vocabulary,
                     buckets=buckets)
        if gguf is not None:
            self._new_paths = list(gguf[2])
            self.add(pipeline_tensors.t5_gguf(**sizes), {entry.name: entry for entry in gguf[1]})
            return self._t5_input(tokenizer)
        tensors = self.weights(subfolder, "model")
        tokens = "shared.weight" if "shared.weight" in tensors else "encoder.embed_tokens.weight"
        self.add(pipeline_tensors.t5(tokens, **sizes), tensors, ("encoder.embed_tokens.",))
        return self._t5_input(tokenizer)

    def _t5_input(self, tokenizer: str) -> TextInput:
        """Return the input of a T5 encoder with this tokenizer."""
        at, pad = self._tokenizer(tokenizer, "<pad>", clip=False)
        return TextInput(at, _MAX_TOKENS, pad)

    def transformer(self, flux: bool, gguf: _Gguf | None) -> tuple[Transformer, int]:
        """Read the transformer from its folder or from a GGUF file.

        Returns:
            The sizes of the transformer, and the default side of an image in latents.
        """
        subfolder, config = self.config("transformer", ("FluxTransformer2DModel" if flux else "SD3Transformer2DModel",))
        _check_keys(config, {"patch_size", "in_channels", "out_channels", "num_layers", "num_attention_heads",
                             "attention_head_dim", "joint_attention_dim", "pooled_projection_dim", "guidance_embeds",
                             "num_single_layers", "axes_dims_rope", "sample_size", "caption_projection_dim",
                             "pos_embed_max_size", "dual_attention_layers", "qk_norm"})
        patch, rows = config.int("patch_size", 1 if flux else 2, low=1), config.int("in_channels", 64 if flux else 16)
        if patch != (1 if flux else 2) or (flux and rows % 4):
            config.fail("patch_size", f"{patch} with {rows} channels",
                        "1 with a multiple of 4 channels" if flux else "2")
        norm = None if flux else config.get("qk_norm")
        dual = () if flux else tuple(config.list("dual_attention_layers", [], of=int, limit=1024))
        size = Transformer(
            flux=flux, layers=config.int("num_layers", 19 if flux else 18, low=1),
            singles=config.int("num_single_layers", 38, low=0) if flux else 0,
            heads=config.int("num_attention_heads", 24 if flux else 18, low=1),
            head=config.int("attention_head_dim", 128 if flux else 64, low=8), channels=rows // 4 if flux else rows,
            texts=config.int("joint_attention_dim", 4096, low=1),
            pooled=config.int("pooled_projection_dim", 768 if flux else 2048, low=1),
            guidance=config.bool("guidance_embeds", False) if flux else False, qk_norm=flux or norm == "rms_norm",
            dual=dual, positions=0 if flux else config.int("pos_embed_max_size", 96, low=1, high=4096))
        if norm not in (None, "rms_norm"):
            config.fail("qk_norm", str(norm), "rms_norm or null")
        out = config.int("out_channels", rows, low=1)
        if out != rows:
            config.fail("out_channels", out, f"{rows}, the value of in_channels")
        if not flux and config.int("caption_projection_dim", 1152) != size.hidden:
            config.fail("caption_projection_dim", config.get("caption_projection_dim"),
                        f"{size.hidden}, the hidden size")
        self.put("transformer", config, block_count=size.layers, single_block_count=size.singles, head_count=size.heads,
                 head_length=size.head, channels=size.channels, text_length=size.texts, pooled_length=size.pooled,
                 guidance=size.guidance, qk_norm=size.qk_norm)
        if flux:
            self.put("transformer", config, axes=config.list("axes_dims_rope", [16, 56, 56], of=int, limit=3))
        else:
            self.put("transformer", config, position_side=size.positions, dual_layers=list(dual) or [-1])
        gguf = gguf or self._single_gguf(self.folder, subfolder)
        if gguf is None:
            self.add(pipeline_tensors.transformer(size, False), self.weights(subfolder, "diffusion"))
        else:
            path, entries, files = gguf
            tensors = {entry.name.removeprefix(pipeline_tensors.PREFIX): entry for entry in entries}
            self._new_paths = list(files)
            self.add(pipeline_tensors.transformer(size, True), tensors)
        return size, 128 if flux else config.int("sample_size", 128, low=1, high=4096)

    def _single_gguf(self, where: Folder, subfolder: Folder) -> _Gguf | None:
        """Return the only GGUF file of the folder ``where``; None if it has none, or if the network's own folder
        ``subfolder`` has safetensors files.

        Raises:
            InvalidArgument: ``where`` has several GGUF files.
        """
        if any(name.endswith(".safetensors") for name in subfolder.names()):
            return None
        names = [name for name in where.names() if name.endswith(".gguf")]
        if len(names) != 1:
            if names:
                raise InvalidArgument(f"{where.path} has {len(names)} GGUF files, and {subfolder.path} has no weights",
                                      param="model", got=where.path, allowed="a folder with one GGUF file",
                                      hint="Keep one GGUF file in the folder, or pass the path of the transformer's "
                                           "GGUF file")
            return None
        path = where.path_of(names[0])
        _, entries, files = read_gguf(path)
        return path, entries, files

    def decoder(self, size: Transformer) -> tuple[int, int]:
        """Read the decoder of the autoencoder, for latents of a transformer with the sizes ``size``.

        Returns:
            The side of the square that one latent covers, in pixels, and the number of latent channels.
        """
        subfolder, config = self.config("vae", ("AutoencoderKL",))
        _check_keys(config, {"in_channels", "out_channels", "down_block_types", "up_block_types", "block_out_channels",
                             "layers_per_block", "act_fn", "latent_channels", "norm_num_groups", "sample_size",
                             "scaling_factor", "shift_factor", "force_upcast", "use_quant_conv", "use_post_quant_conv",
                             "latents_mean", "latents_std", "mid_block_add_attention"})
        channels = config.list("block_out_channels", [64], of=int, limit=8)
        if not channels or min(channels) < 1:
            config.fail("block_out_channels", str(channels), "one to eight positive integers")
        ups = config.list("up_block_types", ["UpDecoderBlock2D"], of=str, limit=8)
        for name, found, supported in (
                ("use_post_quant_conv", config.bool("use_post_quant_conv", True), False),
                ("act_fn", config.str("act_fn", "silu"), "silu"), ("latents_mean", config.get("latents_mean"), None),
                ("latents_std", config.get("latents_std"), None), ("out_channels", config.int("out_channels", 3), 3),
                ("up_block_types", ups, ["UpDecoderBlock2D"] * len(channels))):
            if found != supported:
                raise Unsupported(f"{config.file}: a decoder with `{name}` {shown(found)} is not supported: it must be "
                                  f"{supported!r}", param=name, got=shown(found), allowed=repr(supported))
        latents = config.int("latent_channels", 4, low=1)
        if latents != size.channels:
            config.fail("latent_channels", latents, f"{size.channels}, the latent channels of the transformer")
        layers, attention = config.int("layers_per_block", 1, low=1), config.bool("mid_block_add_attention", True)
        self.put("vae", config, channels=channels, layers=layers, attention=attention,
                 groups=config.int("norm_num_groups", 32, low=1),
                 scaling_factor=config.number("scaling_factor", 0.18215, above=0),
                 shift_factor=config.number("shift_factor", None) or 0.0)
        self.add(pipeline_tensors.decoder(channels, latents=latents, layers=layers, attention=attention),
                 self.weights(subfolder, "diffusion"), ("encoder.", "quant_conv."))
        return 1 << (len(channels) - 1), latents

    def put(self, part: str, config: Fields, **values: Any) -> None:
        """Set hyper-parameters of a part, from its configuration."""
        self.kv |= {f"{part}.{name}": value for name, value in values.items()}
        self.origins |= {f"{part}.{name}": (config.file, "") for name in values}

    def _tokenizer(self, part: str, pad: str, clip: bool) -> tuple[str, str]:
        """Return the path of a tokenizer's folder and the text of its padding token, ``pad`` if it sets none.

        Raises:
            FormatError: the folder has no tokenizer.
        """
        subfolder = self.folder.sub(part, declared_in=self.index.file, field=part)
        has_vocabulary = clip and subfolder.has("vocab.json") and subfolder.has("merges.txt")
        if not subfolder.has("tokenizer.json") and not has_vocabulary:
            raise FormatError(file=subfolder.path, field="tokenizer.json", got="missing",
                              allowed="the tokenizer in one file" + (", or vocab.json and merges.txt" if clip else ""),
                              hint="Write it with AutoTokenizer.from_pretrained(...).save_pretrained(...) of "
                                   "transformers")
        config = subfolder.fields("tokenizer_config.json", missing_ok=True, wide_ints=True)
        special = subfolder.fields("special_tokens_map.json", missing_ok=True)
        for fields in (special, config):
            value = fields.get("pad_token")
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                pad = value
        return subfolder.path, pad


def _check_keys(config: Fields, handled: set[str]) -> None:
    """Raise Unsupported for a key that is not in ``handled`` and could change the computation."""
    for name in config:
        if name not in handled and name not in _NEUTRAL:
            raise Unsupported(f"{config.file}: the key {name} is unknown and may change the computation")


def _activation(config: Fields, name: str, default: str) -> str:
    """Return the core's name of the activation under the key ``name``."""
    value = config.str(name, default)
    if value not in _ACTIVATIONS:
        config.fail(name, value, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[value]


def _scheduler(folder: Folder) -> Mapping[str, Any]:
    """Return the parameters of a flow-matching noise schedule, under the names of diffusers.

    Raises:
        FormatError: a value is malformed.
        Unsupported: mpool does not support the scheduler or an option of it.
    """
    config = folder.fields("scheduler_config.json")
    if config.str("_class_name") != "FlowMatchEulerDiscreteScheduler":
        raise Unsupported(f"{config.file}: the scheduler is {config.get('_class_name')}; mpool supports "
                          "FlowMatchEulerDiscreteScheduler")
    for name in ("invert_sigmas", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas",
                 "stochastic_sampling"):
        if config.bool(name, False):
            raise Unsupported(f"{config.file}: {name} is true, which mpool does not support")
    kind = config.str("time_shift_type", "exponential")
    if kind not in ("exponential", "linear"):
        config.fail("time_shift_type", kind, "exponential or linear")
    found: dict[str, Any] = {name: config.number(name, default, above=above, most=most)
                             for name, default, above, most in (
        ("shift", 1.0, 0.0, 1e4), ("base_shift", 0.5, -1e2, 1e2), ("max_shift", 1.15, -1e2, 1e2),
        ("shift_terminal", None, -1e-9, 0.999))}
    found |= {name: config.int(name, default, low=1, high=10**6) for name, default in (
        ("num_train_timesteps", 1000), ("base_image_seq_len", 256), ("max_image_seq_len", 4096))}
    if found["max_image_seq_len"] <= found["base_image_seq_len"]:
        config.fail("max_image_seq_len", found["max_image_seq_len"], "more than "
                    f"{found['base_image_seq_len']}, the value of base_image_seq_len")
    return found | {"use_dynamic_shifting": config.bool("use_dynamic_shifting", False), "time_shift_type": kind}
