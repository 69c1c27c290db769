"""Descriptions of models: the spec from which the C core loads, and the settings that Python keeps.

Python reads a model's own files once, strictly, and states the result as a :class:`ModelSpec`; from it the C core
loads, evicts and loads again without Python. Hyper-parameters use GGUF's key names and tensors use GGUF's tensor
names, whatever the file format was, so that the core knows one naming only
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from .files import Stamp

#: A value of the key-value table: a scalar or a flat list of one kind.
Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file. ``shape`` is in row-major (numpy) order, outermost first: a linear layer's weight is
    ``(out_features,
    in_features)``. ``dtype`` is a name of ``csrc/tensor/dtype.def`` (``"F32"``, ``"BF16"``, ``"Q4_K"``, ...).
    ``offset`` and ``nbytes`` are bytes within ``ModelSpec.files[file]``; C checks all of them again.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TokenTable:
    """Bytes of every token, for streaming text out of C.

    ``data[offsets[i]:offsets[i + 1]]`` are the bytes that token ``i`` adds to the text (empty for control tokens);
    ``offsets`` has one entry more than there are tokens. ``control[i]`` is 1 for tokens that never show as text.
    ``eog`` are the ids that end a generation.
    """

    data: bytes
    offsets: Sequence[int] | np.ndarray  # int64
    control: bytes
    eog: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """Everything the C core needs to load a model without Python."""

    architecture: str
    files: tuple[str, ...]
    kv: Mapping[str, Value]
    tensors: tuple[TensorEntry, ...]
    tokens: TokenTable | None = None


@dataclass(frozen=True)
class EmbeddingSettings:
    """Settings of a text-embedding model (sentence-transformers' folder conventions).

    ``pooling`` is a list of one or more of ``cls, mean, max, mean_sqrt_len, weightedmean, lasttoken``; several are
    concatenated in that order, as sentence-transformers does. ``dimensions`` lists the Matryoshka sizes that the
    model is documented to hold up at, or is empty when any prefix is as good as any other (none known).
    ``truncate_dim`` is the size to which the model's authors cut the output unless the caller asks for another; the
    cut is the last step, after normalisation. ``scores``: it is a cross-encoder, whose one output is a score of the two
    texts of a pair. ``padding`` says at which side (``"left"``, ``"right"``) every text is filled up to ``max_tokens``
    with the padding token, for models that attend to it; ``""``: it is not. ``sizes``: numbers of components for which
    the model has a layer of its own, beside ``output_size``: then it gives vectors of those sizes and no others.
    ``answering``: a pair is rendered by the chat template, as messages of the roles ``query`` and ``document``, behind
    a prompt as that of ``system`` if there is one, with the start of an answer (True) or not; None: it is not.
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
    padding: str = ""
    sizes: tuple[int, ...] = ()
    answering: bool | None = None


@dataclass(frozen=True)
class ImageSettings:
    """Input and output settings of an image-embedding model.

    The steps are those of transformers' image processors, in their order: resize, then crop; mean and deviation are
    the core's to apply (``mpool.image.*`` of the spec).

    Attributes:
        hidden_size, output_size: components of a row, and of a vector.
        resize: None; ``("shortest", n)``: the shorter side to n pixels, the longer in proportion; ``("exact", height,
            width)``.
        resample: Pillow's number of the filter (2 bilinear, 3 bicubic, ...).
        crop: (height, width) cut out of the middle, with black around what is smaller; None: nothing is cut.
        patch_size: pixels a side of a patch.
        image_size: pixels a side that the model was trained on.
        any_size: whether it takes other sizes.
        normalize: default of normalising vectors to length 1.
        similarity: how vectors are compared.
        pad_square: the colour with which an image is made square before it is resized; None: it is not.
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
class VisionSettings:
    """Image settings of a vision model.

    Attributes:
        scheme: the way an image is cut: ``"one"``, one tile that stands for the whole; ``"tiles"``, that, and the
            image at one of the sizes of ``grid`` cut into tiles; ``"split"``, tiles with a text before each, then the
            whole; ``"any"``, one tile of the image's own proportions.
        image: how a tile is prepared.
        image_token_id: the placeholder that stands in the prompt for a row of an image; -1: the vocabulary has none.
        keep_class: the image encoder's class token is a row, too.
        merge: patches a side that become one row.
        grid: (height, width) in pixels, of whole tiles.
        longest, split: for ``"split"``: pixels of the longer side before an image is cut, None: as it is; whether it is
            cut at all.
        pixels: for ``"any"``: the fewest and the most of an image; None: it is cut to whole patches, not resized.
    """

    scheme: str
    image: ImageSettings
    image_token_id: int
    keep_class: bool = False
    merge: int = 1
    grid: tuple[tuple[int, int], ...] = ()
    longest: int | None = None
    split: bool = False
    pixels: tuple[int, int] | None = None


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a language model: context length, end-of-generation ids, defaults that its authors recommend."""

    context_length: int
    eog_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    add_bos: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TextInput:
    """Input of a text encoder of a pipeline: exactly or at most ``length`` tokens, padded with ``pad``.

    ``folder`` holds its tokenizer; None: there is no such encoder, and its rows are zeros. ``clip``: the tokenizer may
    be a ``vocab.json`` with ``merges.txt``.
    """

    folder: str | None
    length: int
    pad: str = ""
    clip: bool = False


@dataclass(frozen=True)
class DrawingSettings:
    """Settings of an image-generation model.

    ``inputs`` are those of CLIP-L, CLIP-G and T5. ``scheduler`` holds the numbers of its noise schedule, as diffusers
    names them. ``guided``: it supports a negative prompt; ``distilled``: it takes the guidance scale as an input
    instead.
    """

    architecture: str
    inputs: tuple[TextInput | None, TextInput | None, TextInput | None]
    scheduler: Mapping[str, Any]
    channels: int
    scale: int  # pixels a side of a latent
    side: int  # default width and height, in pixels
    steps: int
    guidance_scale: float
    guided: bool
    distilled: bool
    text_tokens: int  # default for T5


@dataclass(frozen=True)
class TokenizerSource:
    """The source of a tokenizer: a ``tokenizer.json`` (with its neighbours' facts in ``config``), or the file that
    stands for one in an older folder, or ``gguf``: the ``tokenizer.*`` keys of a GGUF file.

    ``config`` holds, for a folder, the keys of ``tokenizer_config.json`` and ``special_tokens_map.json`` as they stand
    (special tokens as text), without the chat template and the added tokens, as ``eos_token_id`` the list of ids that
    end a generation, and ``always_add_eos`` if every text is to end with the end of text; for a GGUF file, ``file``:
    its path, for messages.
    """

    json_path: str | None = None
    gguf: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelDescription:
    """A model as Python knows it after reading its files once."""

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
    drawing: DrawingSettings | None = None
    #: The same model's other networks, each for a capability of its own, in one space of vectors with this one.
    towers: tuple[ModelDescription, ...] = ()
    revision: str | None = None
    license: str | None = None
    est_memory_allocation_mb: int | None = None
    #: Files and folders that were read for it -> what they were; see :func:`mpool.models.files.stamp`.
    stamps: Mapping[str, Stamp] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokenizes(self) -> bool:
        """The model takes texts, tokenised by one tokenizer."""
        return self.image is None and self.drawing is None
