"""Reader of Hugging Face model folders: transformers, sentence-transformers and diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import FormatError, Unsupported
from .. import architectures, layout, origins
from ..families.rows import Architecture, Config, Head
from ..fields import Fields
from ..files import Folder
from ..spec import (
    EmbeddingSettings,
    ModelDescription,
    ModelSpec,
    TensorEntry,
    Value,
)
from . import (
    hf_config,
    hf_embedding,
    hf_quantised,
    image_folder,
    published,
    router_folder,
    safetensors_header,
    scoring,
    sentence_folder,
    static_folder,
    task_adapters,
    vision_embedding,
    vision_folder,
)
from .hf_parts import (
    CONFIG_NAME,
    PIPELINE_NAME,
    TOKENIZER_CONFIG_NAME,
    chat_template,
    generation,
    refuse_weights,
    tokenizer_of,
    weights,
)
from .pipelines import describe_pipeline


def describe_folder(path: str, *, key: str, ref: str, repository: str = "", images: bool = True) -> ModelDescription:
    """Describe the model in a folder.

    Args:
        path: the folder. With ``model_index.json`` it is a diffusers pipeline, with ``modules.json`` a
            sentence-transformers model, else a transformers model with ``config.json``, safetensors weights and
            ``tokenizer.json``.
        key, ref: key and reference of the model, stored in the result.
        repository: repository of the folder, ``org/name``, whose published settings apply (:mod:`.published`).
        images: False to describe only the language model of a vision model that can be read without images.

    Raises:
        FormatError: a file is missing or malformed, refers to a path outside the folder, or contradicts another file.
        UnsafeFormat: the folder has only pickled weights, or a configuration requires code from the model's repository.
        Unsupported: the model uses a computation that mpool does not implement.
    """
    folder = Folder(path)
    if folder.has(PIPELINE_NAME):
        return describe_pipeline(folder, key=key, ref=ref)
    folder, template = published.completed(folder, repository)
    found = router_folder.describe_router(folder, lambda side: _describe(side, key, ref)) \
        or _describe(folder, key, ref, images)
    return found if template is None else replace(found, chat_template=template)


def _describe(folder: Folder, key: str, ref: str, reads_images: bool = True) -> ModelDescription:
    """Describe the model in a folder that is not a pipeline and has no Router with two encoders."""
    images = image_folder.describe_modules(folder, key=key, ref=ref)
    if images is not None:
        return images
    static = static_folder.describe_static(folder, key=key, ref=ref)
    if static is not None:
        return static
    special = hf_embedding.find(folder)
    module_folders = [] if special else scoring.module_folders(folder)
    encoder = special.encoder if special else module_folders[0] if module_folders \
        else sentence_folder.encoder_folder(folder)
    if not encoder.has(CONFIG_NAME):
        raise FormatError(file=encoder.path, field=CONFIG_NAME, got="missing",
                          allowed="a folder of transformers or sentence-transformers, or a .gguf file")
    config = encoder.fields(CONFIG_NAME)
    if config.get("model_type") in image_folder.MODEL_TYPES:
        return image_folder.describe_images(folder, config, key=key, ref=ref)
    if vision_folder.sees(encoder, config, reads_images):
        embeds = folder.has(layout.MODULES_NAME)
        found = vision_folder.describe_vision(encoder, config, key=key, ref=ref, embeds=embeds)
        if not embeds:
            _refuse_embedder(encoder, found.spec.kv)
            return found
        return vision_embedding.embedder(found, folder, encoder, module_folders)
    scheme = hf_quantised.read_scheme(config)
    plain = config if scheme is None else Fields(
        {name: value for name, value in config.values.items() if name != "quantization_config"}, file=config.file)
    row, read = hf_config.read_config(plain, folder.has(layout.MODULES_NAME),
                                      lambda: hf_quantised.combine(scheme, _entries(encoder)[1], _entries(encoder)[0])
                                      .entries)
    kv = read.kv
    _refuse_embedder(encoder, kv)
    if scheme is not None:
        if row.capability != "text_to_text":
            raise Unsupported(f"{config.file}: quantization_config states that the weights are quantised by "
                              f"{scheme.method}, which mpool supports only for language models",
                              hint="Use the unquantised model, or a quantised .gguf of it")
        kv |= scheme.kv
    if row.capability != "text_embedding" and folder.has(layout.MODULES_NAME):
        raise Unsupported(f"{folder.path}: the folder is an embedding model of architecture {row.name}; mpool supports "
                          f"{row.name} for text generation only")
    size = architectures.sizes(row, kv, file=config.file, token_types=read.token_types,
                               own=lambda key: origins.key_in_config(config, key, row.name)) | read.sizes
    entry_paths, stored = _entries(encoder)
    quantised = hf_quantised.combine(scheme, stored, entry_paths, _biases(row, size) if scheme else frozenset())
    entries = quantised.entries
    paths, tensors = weights(encoder, row, size, read.tied, entry_paths, quantised)
    tokenizer_config = encoder.fields(TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True)
    hf_config.refuse_remote_code(tokenizer_config, row)
    network = _Network(folder, encoder, config, tokenizer_config, size, kv, entry_paths, entries, paths, tensors)
    embedding = generation_settings = None
    lower_case = False
    end_ids: tuple[int, ...] = ()
    if len(module_folders) == 2:
        embedding = _decoder_reranker(network, module_folders)
    elif row.capability == "text_embedding":
        embedding, lower_case = _text_encoder(network, row, read, special, bool(module_folders))
    else:
        generation_settings = generation(encoder, config, tokenizer_config, size)
        end_ids = generation_settings.eog_token_ids
    described = ModelDescription(
        key=key, ref=ref, capability=row.capability,
        spec=ModelSpec(row.name, tuple(paths), kv, tuple(tensors), variant=next(iter(row.in_config), ""),
                       inner=size.get("inner", 1), origins=origins.in_config(config, kv, row.name)),
        tokenizer=tokenizer_of(encoder, tokenizer_config, lower_case, end_ids, read.append_eos),
        chat_template=chat_template(encoder, tokenizer_config), embedding=embedding, generation=generation_settings)
    return task_adapters.add_task_adapters(described, read.adapters, encoder, entries)


def _refuse_embedder(folder: Folder, kv: Mapping[str, Value]) -> None:
    """Raise Unsupported if a folder has the network of an embedding model, and not the files around it."""
    if "mpool.whole_prompts" in kv:
        raise Unsupported(f"{folder.path}: the network is that of EmbeddingGemma 2, which generates no text; mpool "
                          f"supports folders with {layout.MODULES_NAME}, an image encoder and an image processor")


@dataclass(frozen=True)
class _Network:
    """The network of a folder, and its spec under construction.

    Attributes:
        folder: the model folder.
        encoder: folder of the network.
        config: its ``config.json``.
        tokenizer: its ``tokenizer_config.json``.
        size: sizes of the network by letter.
        kv, paths, tensors: hyper-parameters, paths of the files, and tensors of the spec.
        stored_paths, stored: paths of the weight files, and their tensors by name.
    """

    folder: Folder
    encoder: Folder
    config: Fields
    tokenizer: Fields
    size: dict[str, int]
    kv: dict[str, Value]
    stored_paths: tuple[str, ...]
    stored: dict[str, TensorEntry]
    paths: list[str]
    tensors: list[TensorEntry]

    def max_tokens(self, settings: sentence_folder.ModuleSettings | None = None) -> int:
        """Return the maximum input length; without ``settings``, that of a folder without modules."""
        return sentence_folder.max_tokens(settings or sentence_folder.ModuleSettings(self.encoder),
                                          self.tokenizer.values, self.size["P"])


def _decoder_reranker(network: _Network, module_folders: list[Folder]) -> EmbeddingSettings:
    """Read a reranker that is a language model; adds the rows of the output layer that give the score."""
    rows, answering = scoring.read_decoder(module_folders, network.config, network.tensors, network.stored, network.kv)
    network.tensors.extend(rows)
    prompts, default = scoring.read_prompts(network.folder)
    module_config = network.encoder.fields(layout.TRANSFORMER_CONFIGS[0], missing_ok=True)
    limit = sentence_folder.ModuleSettings(network.encoder,
                                           max_seq_length=module_config.int("max_seq_length", None, low=1))
    return EmbeddingSettings(
        max_tokens=network.max_tokens(limit), hidden_size=network.size["D"], output_size=1, pooling=("lasttoken",),
        normalize=False, scores=True, score_activation=scoring.score_activation(network.folder, network.config),
        prompts=prompts, default_prompt_name=default, answering=answering)


def _text_encoder(network: _Network, row: Architecture, read: Config, special: hf_embedding.Found | None,
                  is_cross_encoder: bool) -> tuple[EmbeddingSettings, bool]:
    """Read the head of a text encoder. Returns the settings, and True if texts are converted to lower case."""
    if special is not None:
        heads = hf_embedding.Tensors(network.paths, network.tensors)
        return hf_embedding.read(special, network.config, network.stored, network.stored_paths, network.size,
                                 network.kv, heads, network.tokenizer.values)
    if is_cross_encoder or not network.folder.has(layout.MODULES_NAME):
        head = scoring.find_head(row, network.config, network.stored, network.stored_paths[0], is_cross_encoder)
        if head is not None:
            return _classifier(network, *head), False
        head = scoring.find_token_head(row, network.config, network.stored, network.stored_paths[0])
        if head is not None:
            return _token_classifier(network, *head), False
    return _embedder(network, read)


def _classifier(network: _Network, layers: Head, labels: int) -> EmbeddingSettings:
    """Read a sequence classifier; adds the tensors of its head."""
    network.tensors.extend(scoring.read_head(layers, labels, network.stored, network.stored_paths, network.size["D"],
                                             network.kv))
    activation = scoring.score_activation(network.folder, network.config) if labels == 1 else "identity"
    return EmbeddingSettings(
        max_tokens=network.max_tokens(), hidden_size=network.size["D"], output_size=labels, pooling=(layers.pooling,),
        normalize=False, scores=labels == 1, score_activation=activation,
        classifier=scoring.read_classifier(network.config, labels))


def _token_classifier(network: _Network, layers: Head, labels: int) -> EmbeddingSettings:
    """Read a token classifier; adds the tensors of its head."""
    network.tensors.extend(scoring.read_token_head(layers, labels, network.stored, network.stored_paths,
                                                   network.size["D"], network.kv))
    return EmbeddingSettings(
        max_tokens=network.max_tokens(), hidden_size=network.size["D"], output_size=labels, normalize=False,
        token_labels=scoring.label_names(network.config, labels))


def _embedder(network: _Network, read: Config) -> tuple[EmbeddingSettings, bool]:
    """Read the modules around an encoder of dense vectors; adds their tensors."""
    found = sentence_folder.read_modules(network.folder, network.size["D"], read.module)
    network.kv.update(found.kv)
    for entry, file in found.dense:
        if file not in network.paths:
            network.paths.append(file)
        network.tensors.append(TensorEntry(entry.name, entry.dtype, entry.shape, network.paths.index(file),
                                           entry.offset, entry.nbytes))
    embedding = EmbeddingSettings(
        max_tokens=network.max_tokens(found), hidden_size=network.size["D"],
        output_size=found.output_size, pooling=found.pooling, normalize=found.normalize,
        include_prompt=found.include_prompt and not read.exclude_prompt, prompts=found.prompts,
        default_prompt_name=found.default_prompt_name, similarity=found.similarity,
        dimensions=tuple(sorted(set(network.config.list("matryoshka_dimensions", [], of=int, limit=64)))),
        truncate_dim=found.truncate_dim, sizes=found.sizes)
    embedding = hf_embedding.add_token_heads(network.folder, network.encoder, embedding, network.size, network.kv,
                                             hf_embedding.Tensors(network.paths, network.tensors))
    return embedding, found.do_lower_case


def _biases(row: Architecture, size: dict[str, int]) -> frozenset[str]:
    """Return the names of the biases of an architecture, without the prefix of the family."""
    return frozenset(name for tensor in architectures.expected(row, size).values() for name in tensor.hf
                     if name.endswith(".bias"))


def _entries(folder: Folder) -> tuple[tuple[str, ...], dict[str, TensorEntry]]:
    """Return the paths of a folder's weight files and their tensors by name; raise an error if it has none."""
    found = safetensors_header.read_folder(folder)
    if found is None:
        refuse_weights(folder)
    return found[0], dict(found[1])
