"""Settings of ``tokenizer_config.json`` that replace those of ``tokenizer.json``.

Some classes of transformers apply arguments of their constructors to the tokenizer that ``tokenizer.json`` describes.
The tables list the settings that versions 4 and 5 of transformers apply alike. An argument that the file does not state
has the default of the class. ``PreTrainedTokenizerFast``, ``TokenizersBackend`` and classes that no table lists apply
none. A folder that names no class has the class of its architecture: only stated settings apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Classes with the arguments of BERT's tokenizer, without the suffixes "Tokenizer" and "TokenizerFast".
_BERT = frozenset((
    "Bert", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "DPRReader", "DistilBert", "Electra", "Funnel",
    "LayoutLM", "LayoutLMv2", "Lxmert", "MPNet", "MobileBert", "RetriBert", "Splinter", "SqueezeBert"))
#: Argument of these classes -> its default, and the name that it has in a ``BertNormalizer``.
_NORMALIZER: dict[str, tuple[bool | None, str]] = {
    "do_lower_case": (True, "lowercase"), "strip_accents": (None, "strip_accents"),
    "tokenize_chinese_chars": (True, "handle_chinese_chars")}
#: Class with a byte-level pre-tokenizer -> the default of its argument ``add_prefix_space``.
_BYTE_LEVEL = {
    **dict.fromkeys(("Bart", "CodeGen", "Deberta", "GPT2", "GPTNeoX", "LED", "Longformer", "Luke", "Mvp", "Roberta",
                     "Whisper"), False), "Blenderbot": True, "LayoutLMv3": True}
#: Classes whose argument ``trim_offsets`` says if the place of a token in the text excludes the space before it.
_TRIMMED = ("Bart", "LED", "Longformer", "Mvp", "Roberta")


def normalizer_settings(config: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return attributes of a ``BertNormalizer`` that ``tokenizer_config.json`` sets: those of all arguments of a BERT
    class, or the stated ones if the file names no class."""
    name = _class_of(config)
    if name is not None and name not in _BERT:
        return {}
    return {attribute: _value(config, key, default) for key, (default, attribute) in _NORMALIZER.items()
            if name is not None or key in config}


def byte_level_settings(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return ``add_prefix_space`` and ``trim_offsets`` as ``tokenizer_config.json`` sets them; see
    :func:`normalizer_settings`."""
    name, found = _class_of(config), {}
    if name in _BYTE_LEVEL or name is None and "add_prefix_space" in config:
        found["add_prefix_space"] = bool(_value(config, "add_prefix_space", _BYTE_LEVEL.get(name or "", False)))
    if name in _TRIMMED:
        found["trim_offsets"] = bool(_value(config, "trim_offsets", True))
    return found


def _class_of(config: Mapping[str, Any]) -> str | None:
    name = config.get("tokenizer_class")
    return name.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(name, str) else None


def _value(config: Mapping[str, Any], key: str, default: bool | None) -> bool | None:
    value = config.get(key)
    return value if isinstance(value, bool) else default


__all__ = ["byte_level_settings", "normalizer_settings"]
