r"""Pre-tokenizers by their names in ``tokenizer.ggml.pre``: how a GGUF BPE vocabulary splits text into words.

A file contains only a name. Its meaning is defined by llama.cpp (``src/llama-vocab.cpp``); every row is compared with
llama.cpp id for id (``tests/parity/text``). A row is a list of regular expressions that are applied in order: each one
splits the parts that the previous one left into its matches and the text between them.

The expressions are in the syntax of Oniguruma, which HF ``tokenizers`` uses. They reproduce llama.cpp, which sometimes
differs from the model's authors: it does not distinguish upper and lower case outside ASCII, for example (``tekken``,
``gpt-4o``). The exception is ``kimi-k2``, whose models have no ``tokenizer.json``: its expression is the authors'. If a
model has both files, its own ``tokenizer.json`` is the better source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..models.formats import byte_pairs


@dataclass(frozen=True)
class PreTokenizer:
    """A named pre-tokenizer.

    Attributes:
        patterns: regular expressions, applied in order.
        ignore_merges: True if a word that is itself a token becomes that token, whatever the merges say.
        add_bos: True if a text starts with BOS unless the file says otherwise.
        default_bos: True if BOS has the default id when the file states none.
        byte_level: True if words are written in GPT-2's byte alphabet; False if they stay UTF-8, with ``▁`` for a
            space.
        whole_newlines: True if a word of newlines that is itself a token becomes that token, whatever the merges say.
        lstrip: texts of tokens that remove the white space before them.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    default_bos: bool = True
    byte_level: bool = True
    whole_newlines: bool = False
    lstrip: tuple[str, ...] = ()


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + "|" + _WORD + r"|\p{N}{1,3}" + _SYMBOLS + _SPACES
_QWEN2 = _CONTRACTIONS + "|" + _WORD + r"|\p{N}" + _SYMBOLS + _SPACES
# llama.cpp classifies white space outside ASCII as \s only, whatever range it is in.
_CJK = "[[\u0800-\u9fa5\uac00-\ud7ff]&&[^\\s]]+"
_SENTENCE_MARKS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# In llama.cpp, an upper-case letter is any letter but a-z, and a lower-case letter is any letter but A-Z.
_UPPER = r"[\p{L}&&[^a-z]]"
_LOWER = r"[\p{L}&&[^A-Z]]"
_UPPER_MARK = r"[[\p{L}\p{M}]&&[^a-z]]"
_LOWER_MARK = r"[[\p{L}\p{M}]&&[^A-Z]]"
# Letters of one case or without case, and marks, except Chinese characters.
_HAN_LESS_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_HAN_LESS_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"


def _cased(upper: str, lower: str, suffix: str, digits: str, ends: str = r"\r\n/") -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|{digits}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[{ends}]*" + _SPACES)


_gpt2 = PreTokenizer((_GPT2,))
_digits_gpt2 = PreTokenizer((r"\p{N}", _GPT2))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_qwen2 = PreTokenizer((_QWEN2,))
_deepseek3 = PreTokenizer(byte_pairs.DEEPSEEK_V3)
_gpt4o = PreTokenizer((_cased(_UPPER, _LOWER, _CONTRACTIONS + "?", r"\p{N}{1,3}"),))
_marks = PreTokenizer((_SENTENCE_MARKS,))
_bailing = PreTokenizer((r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|" + _WORD + r"|\p{N}" + _SYMBOLS +
                         r"|\s*[\r\n]|\s+(?!\S)|\s+",))
_newlines = PreTokenizer((r"[^\n]+|[\n]+",), byte_level=False)

#: Name in ``tokenizer.ggml.pre`` -> pre-tokenizer.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    # Llama 3 and models that use its tokenizer
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
                     "jina-v5-nano"), _llama3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    "chatglm-bpe": PreTokenizer((_LLAMA3,), default_bos=False),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True, default_bos=False)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _CONTRACTIONS + "|" + _WORD + r"|\p{N}+" + _SYMBOLS + _SPACES),
                             ignore_merges=True),
    "jais-2": PreTokenizer((_CONTRACTIONS + "|" + _WORD + r"|\p{N}{1,3}" + _SYMBOLS + r"|\s*[\r\n]+|" + "|".join(
        rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s{1}",)),
    # Qwen
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open",
                     "grok-2"), _qwen2),
    "qwen35": PreTokenizer((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" +
                            _SPACES,)),
    "ufakzeka": PreTokenizer((_WORD + r"|\p{N}" + _SYMBOLS + _SPACES,)),
    "seed-coder": PreTokenizer((_CONTRACTIONS + "|" + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES,)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    # GPT-2
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais",
                     "trillion", "granite-docling", "exaone4", "jina-v1-en", "roberta-bpe"), _gpt2),
    **dict.fromkeys(("jina-v2-es", "jina-v2-de", "jina-v2-code"), replace(_gpt2, lstrip=("<mask>",))),
    "modern-bert": replace(_gpt2, lstrip=("[MASK]",)),
    # single digits, then GPT-2
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
                    _digits_gpt2),
    # DeepSeek
    "deepseek-llm": PreTokenizer((r"[\r\n]", byte_pairs.DEEPSEEK_LETTERS,
                                  "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+", r"\s+$", _CJK,
                                  r"\p{N}+")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _deepseek3),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", byte_pairs.HAN_KANA, byte_pairs.PUNCTUATION +
                              r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
                              r"\p{N}")),
    "youtu": PreTokenizer((
        "[\uac00-\ud7a3\u3131-\u318e]+|"
        "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        "|[\u3105-\u312f]+|" + byte_pairs.HAN_KANA,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+" + _CONTRACTIONS + r"?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES),
        ignore_merges=True),
    # OpenAI's o200k and Mistral's tekken: words are split where the case changes
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _gpt4o),
    "tekken": PreTokenizer((_cased(_UPPER, _LOWER, "", r"\p{N}"),), ignore_merges=True, add_bos=True),
    # Kimi K2's own expression; llama.cpp does not split words where the case changes
    "kimi-k2": PreTokenizer((r"\p{Han}+|" + _cased(_HAN_LESS_UPPER, _HAN_LESS_LOWER, "(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                                                  r"\p{N}{1,3}", r"\r\n"),)),
    "granite-embed-multi-97m": PreTokenizer((_cased(_UPPER_MARK, _LOWER_MARK, _CONTRACTIONS + "?", r"\p{N}{1,3}"),),
                                            ignore_merges=True),
    # others
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _marks),
    "viking": PreTokenizer((_SENTENCE_MARKS, r"\p{N}")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    "chameleon": PreTokenizer((r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )",
                               r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2), add_bos=True),
    "exaone-moe": PreTokenizer((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
                                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    # SentencePiece-like BPE: splits only at newlines
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), replace(_newlines, whole_newlines=True, add_bos=True)),
    "sarvam-moe": _newlines,
}
