"""Names of the files in a model folder, and lists of files that an index or a folder name implies.

Download sources use these names to select files; format readers use them to open the files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

from ..errors import FormatError
from .fields import Fields
from .json_strict import shorten

# ---- tokenizer -----------------------------------------------------------------------------------------------------

TOKENIZER_NAME = "tokenizer.json"
#: Vocabulary of Kimi's models, the ranks of byte-pair encoding in tiktoken's format, and the class in
#: tokenizer_config.json that reads it.
RANKS_NAME, RANKS_CLASS = "tiktoken.model", "TikTokenTokenizer"


def missing_tokenizer(folder: str) -> FormatError:
    """Return the error for a folder without a tokenizer."""
    return FormatError(file=folder, field=TOKENIZER_NAME, got="missing", allowed="the tokenizer in one file",
                       hint="Write it with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers")


# ---- safetensors ---------------------------------------------------------------------------------------------------

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: Files of a folder of PEFT, which holds a low-rank adapter.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_SHARDS = 4096


def shard_names(index: Fields) -> dict[str, str]:
    """Return the ``weight_map`` of an index: file names by tensor name.

    The names are not yet checked for ``..`` or absolute paths.

    Raises:
        FormatError: the map is empty, names a file of another type, or names more than ``MAX_SHARDS`` files.
    """
    weight_map = index.section("weight_map")
    names: dict[str, str] = {}
    for tensor in weight_map:
        names[tensor] = weight_map.str(tensor, limit=1024)
        if not names[tensor].endswith(".safetensors"):
            weight_map.fail(shorten(tensor), shorten(names[tensor]), "the name of a .safetensors file")
    if not names:
        index.fail("weight_map", "empty", "at least one tensor")
    if len(set(names.values())) > MAX_SHARDS:
        index.fail("weight_map", f"{len(set(names.values()))} files", f"at most {MAX_SHARDS} files")
    return names


# ---- sentence-transformers -----------------------------------------------------------------------------------------

MODULES_NAME = "modules.json"
#: Class of the Transformer module in the Python code of jina-embeddings-v3 and v5, which mpool reimplements and never
#: imports.
OWN_MODULE = "custom_st.Transformer"
#: Folder that holds the adapters of such a model, if each is a folder of PEFT.
OWN_ADAPTERS_FOLDER = "adapters"
#: Settings of Stanford's ColBERT.
STANFORD_METADATA = "artifact.metadata"
#: Names of the file that configures a Router module: the current one, then that of Asym.
ROUTER_CONFIGS = ("router_config.json", "config.json")
#: Names of the file that configures the Transformer module: the current one, then those of older versions.
TRANSFORMER_CONFIGS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
                       "sentence_camembert_config.json", "sentence_albert_config.json",
                       "sentence_xlm-roberta_config.json", "sentence_xlnet_config.json")
MODEL_CONFIG = "config_sentence_transformers.json"
_SIZED = re.compile(r"(\d+_Dense_)([1-9]\d{0,4})")


def other_sizes(path: str, names: Iterable[str]) -> dict[int, str]:
    """Find alternative Dense layers with other output sizes, as in the models of Stella.

    Such a model has the folders ``2_Dense_1024``, ``2_Dense_256`` and so on; ``modules.json`` names one of them.

    Args:
        path: folder of the Dense module.
        names: names of all folders of the model.

    Returns:
        names of the other folders, by output size.
    """
    this = _SIZED.fullmatch(path)
    if this is None:
        return {}
    matches = (_SIZED.fullmatch(name) for name in names)
    return {int(other[2]): other[0] for other in matches
            if other is not None and other[1] == this[1] and other[2] != this[2]}


# ---- GGUF ------------------------------------------------------------------------------------------------------

#: Substrings of the names of GGUF files that accompany a model, such as image projectors and draft models.
_COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
#: Name of one file of a split model: stem, number of the part (from 1), number of parts.
SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def is_projector(name: str) -> bool:
    """Return True if a file has the name of a projector file: the image encoder of a GGUF model."""
    return name.endswith(".gguf") and "mmproj" in posixpath.basename(name).lower()


def gguf_models(names: Iterable[str]) -> list[str]:
    """Return the sorted names of the GGUF models, without companion files. A split model is named by its first part."""
    found = []
    for name in sorted(names):
        base = posixpath.basename(name)
        split = SPLIT.fullmatch(name)
        if name.endswith(".gguf") and not any(mark in base for mark in _COMPANIONS) \
                and (split is None or int(split["number"]) == 1):
            found.append(name)
    return found
