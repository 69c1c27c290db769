"""Model descriptions: the spec that the C core loads, and the settings that Python uses.

Python reads and validates a model's files once and passes the result to the C core as a :class:`ModelSpec`. With it the
core loads the model, evicts it and loads it again without Python. Hyper-parameters and tensors have GGUF's names for
every file format, so that the core supports only one naming scheme
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ..errors import Unsupported
from .origins import Origins, strings

if TYPE_CHECKING:
    import numpy as np

    from .. import _core
    from .files import Stamp

#: Beginning of the names of an adapter's matrices and keys in a spec.
ADAPTER_PREFIX = "adapter."
#: A hyper-parameter: a scalar, or a flat list of values of one type.
Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file. The C core validates all values again.

    Attributes:
        name: GGUF's name of the tensor.
        dtype: name from ``csrc/tensor/dtype.def`` (``"F32"``, ``"BF16"``, ``"Q4_K"``, ...).
        shape: shape in row-major (NumPy) order, outermost dimension first; the weight of a linear layer is
            ``(out_features, in_features)``.
        file: index of the file in ``ModelSpec.files``.
        offset: position of the first byte in the file.
        nbytes: size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TokenTable:
    """The bytes of every token, with which the C core streams generated text.

    Attributes:
        data: concatenated bytes of all tokens; ``data[offsets[i]:offsets[i + 1]]`` are the bytes that token ``i`` adds
            to the text (empty for control tokens).
        offsets: start of each token in ``data``, int64; it has one entry more than there are tokens.
        control: one byte per token: 1 for tokens that are never part of the text.
        eog: ids of the tokens that end a generation.
    """

    data: bytes
    offsets: Sequence[int] | np.ndarray  # int64
    control: bytes
    eog: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """All that the C core needs to load a model without Python.

    Attributes:
        architecture: name of the architecture in the core (``csrc/models/archs.def``).
        files: absolute paths of the files that contain tensors.
        kv: hyper-parameters under GGUF's names.
        tensors: tensors to load.
        tokens: bytes of the tokens; None: the model generates no text.
        variant: first ``model_type`` of the row of the architecture table; empty: there is no row.
        inner: layers of a group, if the files store layers in groups, otherwise 1.
        origins: file and key of hyper-parameters, for errors (:mod:`mpool.models.origins`).
    """

    architecture: str
    files: tuple[str, ...]
    kv: Mapping[str, Value]
    tensors: tuple[TensorEntry, ...]
    tokens: TokenTable | None = None
    variant: str = ""
    inner: int = 1
    origins: Origins = field(default_factory=dict, compare=False, repr=False)

    def with_adapters(self, adapters: Iterable[tuple[int, Adapter]]) -> ModelSpec:
        """Return the spec with further adapters, as ``csrc/models/nn/adapter.h`` describes them.

        Args:
            adapters: ids in the core, and adapters. One without files of its own has its matrices in the model's files.
        """
        files, tensors, kv = list(self.files), list(self.tensors), dict(self.kv)
        ids: list[Any] = list(kv.get("mpool.adapters", ()))  # type: ignore[arg-type]
        for id, adapter in adapters:
            first = len(files) if adapter.files else 0
            files += adapter.files
            ids.append(id)
            for update in adapter.updates:
                start = f"{ADAPTER_PREFIX}{len(ids)}.{update.layer}."
                tensors += [replace(entry, name=f"{start}lora_{side}", file=first + entry.file)
                            for side, entry in (("a", update.a), ("b", update.b))]
                kv[f"{start}scale"] = float(update.scale)
                kv |= {f"{start}{side}": list(order) for side, order in (("rows", update.rows),
                                                                        ("columns", update.columns)) if order}
        if ids:
            kv["mpool.adapters"] = ids
        return replace(self, files=tuple(files), tensors=tuple(tensors), kv=kv)

    def to_core(self) -> _core.Spec:
        """Return the core's spec: files, hyper-parameters and tensors, without tokens.

        Raises:
            Unsupported: the compiled core does not have the architecture, although the Python files do.
        """
        from .. import _core

        if all(name != self.architecture for name, _ in _core.architectures()):
            raise Unsupported(f"the compiled core of mpool does not have the architecture {self.architecture}",
                              hint="If the core is older than the Python files, build it again (pip install, or python "
                                   "setup.py build_ext --inplace). A new architecture needs a row in "
                                   "csrc/models/archs.def")
        spec = _core.Spec(self.architecture)
        for path in self.files:
            spec.add_file(path)
        for name, value in self.kv.items():
            spec.set(name, value)
        for number, names in enumerate(strings(self.origins)):
            spec.set(f"mpool.origins.{number}", names)
        for tensor in self.tensors:
            spec.add_tensor(tensor.name, tensor.dtype, tensor.shape, tensor.file, tensor.offset, tensor.nbytes)
        return spec


#: Id of the first adapter in a model's own files; the next ones count up from it. Adapters from elsewhere have smaller
#: ids.
OWN_ADAPTERS = 1 << 20


@dataclass(frozen=True)
class LowRank:
    """The update of one linear layer by an adapter: ``scale * b @ (a @ x)`` is added to its outputs.

    The update of an embedding adds ``scale * a[id] @ b`` to the row of a token.

    Attributes:
        layer: name of the layer's weight in the core, without ``.weight``.
        a: the matrix ``(rank, inputs)``; of an embedding, ``(rows, rank)``.
        b: the matrix ``(outputs, rank)``; of an embedding, ``(rank, width)``. ``file`` of both is an index of
            ``Adapter.files``.
        scale: factor of the update.
        rows, columns: how the rows of ``b`` and the columns of ``a`` are ordered, if the model has them in another
            order: the fields of ``mp_order`` (``csrc/models/nn/builder.h``).
    """

    layer: str
    a: TensorEntry
    b: TensorEntry
    scale: float
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of a model.

    Attributes:
        files: absolute paths of the files that contain the matrices.
        updates: the layers that the adapter updates.
        stamps: stamps of the files that were read, by path.
    """

    files: tuple[str, ...]
    updates: tuple[LowRank, ...]
    stamps: Mapping[str, Stamp] = field(default_factory=dict)


@dataclass(frozen=True)
class ClassifierSettings:
    """Labels of a classifier, and how its logits become scores.

    Attributes:
        labels: names of the labels, in the order of the logits.
        activation: function that turns logits into scores, unless a request names another one: ``"softmax"``,
            ``"sigmoid"`` or ``"none"``.
        entailment: index of the label for entailment; None: the model has no such label.
    """

    labels: tuple[str, ...]
    activation: str
    entailment: int | None = None


#: Result of a text encoder: embeddings, scores of pairs for a ranking, scores of labels, or labels of tokens.
Output = Literal["vectors", "scores", "labels", "spans"]


@dataclass(frozen=True)
class StoredVector:
    """A vector of float32 in a file: its path, the offset of its first byte, and its number of components."""

    path: str
    offset: int
    size: int


@dataclass(frozen=True)
class TokenVectorSettings:
    """Settings of models with one vector per token (ColBERT: arXiv:2004.12832).

    Attributes:
        size: components of a vector.
        query_marker, document_marker: text of the token that follows the first special token of a query or a document;
            empty: none.
        query_length, document_length: maximum number of tokens, special tokens and marker included; None: that of the
            model.
        expansion: token that pads queries to ``query_length`` (``""``: the mask token); None: queries are not padded.
        attend: True if the tokens of a query attend to these padding tokens.
        skipped: words that get no vector in documents, such as punctuation.
        skips_queries: True if these words get no vector in queries either.
        skip_first: number of leading tokens that get no vector.
    """

    size: int
    query_marker: str = ""
    document_marker: str = ""
    query_length: int | None = None
    document_length: int | None = None
    expansion: str | None = None
    attend: bool = False
    skipped: tuple[str, ...] = ()
    skips_queries: bool = False
    skip_first: int = 0


@dataclass(frozen=True)
class EmbeddingSettings:
    """Settings of a text-embedding model, reranker or classifier, as in the folder format of sentence-transformers.

    Attributes:
        max_tokens: largest input in tokens.
        hidden_size: size of the hidden states.
        output_size: components of an embedding.
        pooling: one or more of ``cls, mean, max, mean_sqrt_len, weightedmean, lasttoken``; the results are concatenated
            in this order, as in sentence-transformers.
        normalize: True if embeddings are scaled to length 1 by default.
        include_prompt: True if pooling includes the tokens of the prompt.
        prompts: prompts by name, which are prepended to a text.
        default_prompt_name: name of the prompt to use if the caller names none, or None.
        similarity: function to compare embeddings with (``"cosine"``, ``"dot"``, ...).
        dimensions: Matryoshka sizes that the model card documents; empty if it documents none.
        truncate_dim: default number of components to keep; None: all. Truncation is the last step, after normalisation.
        scores: True for a reranker, whose single output is the score of a pair of texts.
        score_activation: function that turns the output of a reranker into its score: ``"identity"`` or ``"sigmoid"``.
        classifier: labels, if the outputs are the logits of a sequence classifier. A classifier with one label is a
            reranker as well.
        token_labels: names of the labels of a token classifier, in the order of the logits; empty for other models.
        padding: side (``"left"`` or ``"right"``) on which every text is padded to ``max_tokens``, for models that
            attend to padding tokens; empty: texts are not padded.
        sizes: output sizes with a separate output layer, in addition to ``output_size``. If there are any, the model
            supports only these sizes and ``output_size``.
        answering: True or False: the chat template renders inputs, with or without the generation prompt: pairs as
            messages with the roles ``query`` and ``document``, single inputs (of models with images) as a message of
            the role ``user``, after the prompt as a ``system`` message, if there is a prompt. None: inputs are not
            rendered by a template.
        score_tokens: for a reranker with images, the token whose logit is the score, and optionally a second one whose
            logit is subtracted.
        special_tokens: True if the tokenizer's special tokens are put around a text.
        cut_characters: True if truncation first cuts a text to ``max_tokens`` times the median length of the
            vocabulary's tokens, in characters, as model2vec does.
        embeddings: what an embedding model computes for a text: ``"dense"`` (one vector), ``"sparse"`` (weights of
            tokens of the vocabulary), ``"tokens"`` (one vector per token).
        tokens: settings of the token vectors; None: the model has no head for them.
        query_weights: weight of each token of the vocabulary in queries, which then need no pass through the model;
            None: queries are computed like documents.
        adapters: names of the adapters in the model's files, one per task of the model. The prompt of the same name, if
            there is one, belongs to the adapter. Their ids in the core follow :data:`OWN_ADAPTERS` in this order.
        task_adapters: value of the option ``task`` -> one of ``adapters``.
        default_adapter: one of ``adapters``, for requests that choose none; None: they use no adapter.
    """

    max_tokens: int
    hidden_size: int
    output_size: int
    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = True
    include_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    dimensions: tuple[int, ...] = ()
    truncate_dim: int | None = None
    scores: bool = False
    score_activation: str = "identity"
    classifier: ClassifierSettings | None = None
    token_labels: tuple[str, ...] = ()
    padding: str = ""
    sizes: tuple[int, ...] = ()
    answering: bool | None = None
    score_tokens: tuple[int, ...] = ()
    special_tokens: bool = True
    cut_characters: bool = False
    embeddings: tuple[str, ...] = ("dense",)
    tokens: TokenVectorSettings | None = None
    query_weights: StoredVector | None = None
    adapters: tuple[str, ...] = ()
    task_adapters: Mapping[str, str] = field(default_factory=dict)
    default_adapter: str | None = None

    @property
    def outputs(self) -> frozenset[Output]:
        """Kinds of results that the model computes for texts."""
        if self.token_labels:
            return frozenset(("spans",))
        if self.classifier is not None:
            return frozenset(("scores", "labels")) if self.scores else frozenset(("labels",))
        return frozenset(("scores",)) if self.scores else frozenset(("vectors",))

    @property
    def kind(self) -> str:
        """The model in words, for messages: "an embedding model", "a reranker", "a classifier with 3 labels"."""
        if self.token_labels:
            return f"a token classifier with {len(self.token_labels)} labels"
        if self.scores:
            return "a reranker"
        if self.classifier is not None:
            count = len(self.classifier.labels)
            return f"a classifier with {count} labels"
        return "an embedding model"


@dataclass(frozen=True)
class ImageSettings:
    """Input and output settings of an image-embedding model.

    The preprocessing steps and their order are those of transformers' image processors: resize, then crop. The C core
    applies the mean and the standard deviation (``mpool.image.*`` in the spec).

    Attributes:
        hidden_size: size of the hidden states.
        output_size: components of an embedding.
        resize: ``("shortest", n)``: scale the shorter side to n pixels and keep the aspect ratio. ``("exact", height,
            width)``: scale to this size in pixels. None: do not resize.
        resample: Pillow's number of the resampling filter (2: bilinear, 3: bicubic, ...).
        crop: height and width in pixels of the centre crop; smaller images are padded with black. None: do not crop.
        patch_size: side length of a patch in pixels.
        image_size: side length in pixels of the images that the model was trained on.
        any_size: True if the model accepts other image sizes.
        normalize: True if embeddings are scaled to length 1 by default.
        similarity: function to compare embeddings with (``"cosine"``, ``"dot"``, ...).
        pad_square: RGB colour with which an image is padded to a square before it is resized; None: no padding.
    """

    hidden_size: int
    output_size: int
    resize: tuple[str, int] | tuple[str, int, int] | None
    resample: int
    crop: tuple[int, int] | None
    patch_size: int
    image_size: int
    any_size: bool
    normalize: bool = False
    similarity: str = "cosine"
    pad_square: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class VideoSettings:
    """Settings of a vision model for the frames of a video, of which each part has a few.

    Attributes:
        mark_token_id: id of the token that the chat template writes for a video. None: the template knows no videos;
            each frame is an image of one tile after a text with its time.
        around: ids of the tokens before and after the placeholders of a part, which follows a text with its time; None:
            there is no text between parts, and M-RoPE has their times.
        frames: number of frames of a part.
        pixels: smallest and largest number of pixels of all frames together, or without ``around`` of each frame; None:
            frames are cropped to whole patches and not resized.
        most_rows: maximum number of placeholders of a frame, which limits ``pixels``; without ``around``, all parts
            together have at most 90 % of it. None: no such limit.
        resample: Pillow's number of the resampling filter.
        per_second: without ``around``: positions of M-RoPE per second of the video; None: one per part.
        longest: without ``mark_token_id``: as in :class:`VisionSettings`, for frames.
    """

    mark_token_id: int | None
    around: tuple[int, int] | None
    frames: int
    pixels: tuple[int, int] | None
    most_rows: int | None
    resample: int
    per_second: float | None = None
    longest: int | None = None

    @property
    def in_positions(self) -> bool:
        """True if M-RoPE has the times of parts."""
        return self.mark_token_id is not None and self.around is None


@dataclass(frozen=True)
class VisionSettings:
    """Image settings of a vision model.

    Attributes:
        scheme: method of splitting an image into tiles. ``"one"``: one tile, the scaled image. ``"tiles"``: the scaled
            image, and the tiles of the image at one of the sizes of ``grid``. ``"split"``: tiles, each after a text
            that states its position, then the scaled image. ``"any"``: one tile that keeps the aspect ratio.
            ``"pan"``: the scaled image, then crops of a long image. ``"fit"``: one tile that keeps the aspect ratio, as
            large as ``rows`` allows. ``"lines"``: one tile that keeps the aspect ratio; the prompt has a token between
            the lines of its embeddings. ``"grid"``: the tiles of a grid with about the proportions of the image, then
            the scaled image. ``"marked"``: one tile that keeps the aspect ratio; before it, for a large image, the
            tiles of such a grid, each after a token that states its position.
        image: preprocessing of a tile.
        image_token_id: id of the placeholder token for one embedding of an image; -1: the vocabulary has none.
        mark_token_id: id of the token that the chat template writes for an image; None: the placeholder token.
        keep_class: True if the class token of the image encoder is an image embedding, too.
        merge: side length, in patches, of the square that becomes one embedding.
        grid: allowed sizes of the image before it is split, height and width in pixels; they are multiples of the tile
            size.
        longest: for ``"split"``: length in pixels to which the longer side is scaled before the split; None: the image
            is not scaled. For ``"lines"``: largest side in pixels.
        split: for ``"split"``: True if images are split at all.
        pixels: for ``"any"`` and ``"marked"``: smallest and largest number of pixels of an image; None: the image is
            cropped to whole patches and not resized.
        video: settings for frames of a video; None: the model takes none.
        no_video: why a model of a family with videos takes none, for the error message.
        crops: for ``"pan"``: least side of a crop in pixels, maximum number of crops, and ratio of the sides from which
            an image is cropped; None: images are not cropped.
        rows: for ``"fit"``: maximum number of embeddings of an image.
        rows_allowed: values that a request may choose for ``rows``.
        tiles: for ``"grid"`` and ``"marked"``: least and largest number of tiles of a grid; None: images have no tiles.
        excess: for ``"marked"``: images with more than this many times the largest number of pixels have tiles.
        thumbnail: for ``"marked"``: True if the whole image follows its tiles.
    """

    scheme: str
    image: ImageSettings
    image_token_id: int
    mark_token_id: int | None = None
    keep_class: bool = False
    merge: int = 1
    grid: tuple[tuple[int, int], ...] = ()
    longest: int | None = None
    split: bool = False
    pixels: tuple[int, int] | None = None
    crops: tuple[int, int, float] | None = None
    video: VideoSettings | None = None
    no_video: str | None = None
    rows: int | None = None
    rows_allowed: tuple[int, ...] = ()
    tiles: tuple[int, int] | None = None
    excess: float = 1.0
    thumbnail: bool = True


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a language model.

    Attributes:
        context_length: context length in tokens.
        eog_token_ids: ids of the tokens that end a generation.
        bos_token_id: id of the beginning-of-text token, or None.
        add_bos: True if prompts begin with that token.
        defaults: sampling options that the authors of the model recommend.
    """

    context_length: int
    eog_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    add_bos: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TextInput:
    """Input of a text encoder of an image-generation pipeline.

    Attributes:
        folder: folder of its tokenizer; None: the pipeline does not have this encoder, and its hidden states are zero.
        length: input length in tokens; for T5, the maximum length.
        pad: padding token.
        clip: True if the tokenizer may consist of ``vocab.json`` and ``merges.txt``.
    """

    folder: str | None
    length: int
    pad: str = ""
    clip: bool = False


@dataclass(frozen=True)
class PipelineSettings:
    """Settings of an image-generation model.

    Attributes:
        architecture: name of the architecture.
        inputs: inputs of CLIP-L, CLIP-G and T5, in this order; None for encoders that the architecture does not have.
        scheduler: parameters of the noise schedule, under the names of diffusers.
        channels: channels of a latent.
        scale: side length, in pixels, of the image area that one latent position represents.
        side: default width and height in pixels.
        steps: default number of denoising steps.
        guidance_scale: default guidance scale.
        guided: True if the model uses classifier-free guidance, and so supports a negative prompt.
        distilled: True if the guidance scale is an input of the network (guidance distillation).
        text_tokens: default input length of T5 in tokens.
    """

    architecture: str
    inputs: tuple[TextInput | None, TextInput | None, TextInput | None]
    scheduler: Mapping[str, Any]
    channels: int
    scale: int
    side: int
    steps: int
    guidance_scale: float
    guided: bool
    distilled: bool
    text_tokens: int


@dataclass(frozen=True)
class TokenizerSource:
    """The source of a tokenizer: a file of a folder, or the keys of a GGUF file.

    Attributes:
        json_path: path of ``tokenizer.json``, or of the file that replaces it (``vocab.txt``, ``tiktoken.model``, ...).
        gguf: the ``tokenizer.*`` keys of a GGUF file.
        config: for a folder, the keys of ``tokenizer_config.json`` and ``special_tokens_map.json`` (special tokens as
            text), without the chat template and the added tokens. Two keys are added: ``eos_token_id``, the list of ids
            that end a generation, and ``always_add_eos``, if the end-of-text token is appended to every text. For a
            GGUF file, only ``file``: its path, for error messages.
    """

    json_path: str | None = None
    gguf: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelDescription:
    """A model, as read from its files. Settings that do not apply to the model's capability are None.

    Attributes:
        key: name of the model.
        ref: reference that it was resolved from.
        capability: one of :data:`mpool.names.CAPABILITIES`.
        spec: spec for the C core.
        tokenizer: source of the tokenizer.
        chat_template: chat template (Jinja), or None.
        embedding: settings of a text-embedding model, reranker or classifier.
        generation: settings of a language model or vision model.
        image: settings of an image-embedding model.
        vision: image settings of a vision model, also of one that embeds or ranks texts and images.
        pipeline: settings of an image-generation model.
        networks: other networks of the same model that embed into the same space, each with its own capability (such as
            the text encoder of CLIP and SigLIP) or task (the encoder of queries of an asymmetric model).
        task: for a network, the task of the texts that it embeds; "": all.
        revision: commit, or package and version, of the files; None for local files.
        license: licence of the weights, or None.
        file_type: name of the recipe of a GGUF file's weights, such as ``Q4_K_M``, or None.
        est_memory_allocation_mb: the catalogue's estimate of the memory, in units of 10**6 bytes, or None.
        stamps: stamps of all files and folders that were read, by path (:func:`mpool.models.files.stamp`).
    """

    key: str
    ref: str
    capability: str
    spec: ModelSpec
    tokenizer: TokenizerSource | None = None
    chat_template: str | None = None
    embedding: EmbeddingSettings | None = None
    generation: GenerationSettings | None = None
    image: ImageSettings | None = None
    vision: VisionSettings | None = None
    pipeline: PipelineSettings | None = None
    networks: tuple[ModelDescription, ...] = ()
    task: str = ""
    revision: str | None = None
    license: str | None = None
    file_type: str | None = None
    est_memory_allocation_mb: int | None = None
    stamps: Mapping[str, Stamp] = field(default_factory=dict, compare=False, repr=False)

    @property
    def language_model(self) -> ModelDescription:
        """The decoder of a vision model, as a model of its own; another model itself."""
        name, old = self.spec.kv.get("mpool.vision.decoder"), f"{self.spec.architecture}."
        if self.vision is None or not isinstance(name, str):
            return self
        kv = {f"{name}.{key[len(old):]}" if key.startswith(old) else key: value for key, value in self.spec.kv.items()}
        tensors = tuple(tensor for tensor in self.spec.tensors if not tensor.name.startswith(("v.", "mm.")))
        return replace(self, capability="text_to_text", vision=None,
                       spec=replace(self.spec, architecture=name, kv=kv, tensors=tensors))

    @property
    def tokenizes(self) -> bool:
        """True if the model's inputs are texts, which one tokenizer encodes."""
        return self.embedding is not None or self.generation is not None

    @property
    def capabilities(self) -> tuple[str, ...]:
        """All capabilities of the model: a vision model also serves conversations without images, and an embedding
        model with images also embeds images alone."""
        also: tuple[str, ...] = ("text_to_text",) if self.capability == "vision" else ()
        if self.vision is not None and self.embedding is not None and not self.embedding.scores:
            also = ("image_embedding",)
        return (*dict.fromkeys((self.capability, *(part.capability for part in self.networks))), *also)
