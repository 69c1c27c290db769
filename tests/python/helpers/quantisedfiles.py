"""GGUF files that ``mpool quantize`` makes of seeded model folders.

    python tests/python/helpers/quantisedfiles.py FOLDER    # torch, transformers, tokenizers

writes the files of which ``tests/parity/decoder/make_quantised_goldens.py`` records llama.cpp's results.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import paritymodels
from paritymodels import torch

VOCAB = 320
#: Id of ``<|endoftext|>``.
END = VOCAB - 3
#: Rows of the token embedding: some vocabularies are padded.
ROWS = 336
TEXT = "Hello, world! It's 12345 o'clock.\n\n  The quick   brown fox."
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
#: Expressions of published tokenizer.json files, by the name of the pre-tokenizer.
EXPRESSIONS = {
    "llama-bpe": WORDS + r"\p{N}{1,3}" + REST, "dbrx": WORDS + r"\p{N}{1,3}" + REST, "qwen2": WORDS + r"\p{N}" + REST,
    "qwen35": WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+") + r"\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES,
    "seed-coder": WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}" "\r\n]+" + SPACES,
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
              r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
              r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES}
#: The expressions in DeepSeek-V3's tokenizer.json.
V3_WORDS = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|""" "[^\r\n" r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+" "[\r\n]*" r"|\s*" "[\r\n]+" r"|\s+(?!\S)|\s+")
#: The norms of latents have the same epsilon as all others, as in DeepSeek's models.
LATENT = {"rms_norm_eps": 1e-6}
#: Name -> family, settings of the model, pre-tokenizer. Sizes of 96 have no whole superblocks.
FOLDERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {"layers": 9, "hidden": 256, "num_attention_heads": 8}, "llama-bpe"),
    "llama_tied": ("llama_rope3", {"tie": True}, "smollm"),
    "llama_linear": ("llama_linear", {}, "gpt-2"),
    "llama_yarn": ("llama_yarn", {}, "qwen2"),
    "llama_mixtral": ("llama_mixtral", {}, "llama-bpe"),
    "qwen2": ("qwen2", {}, "qwen2"),
    "qwen3": ("qwen3", {"tie": True}, "qwen2"),
    "qwen3moe": ("qwen3moe", {"layers": 3}, "qwen2"),
    "smollm3": ("smollm3", {"layers": 5}, "llama-bpe"),
    "granite": ("granite", {"tie": True}, "gpt-2"),
    "granite_biased": ("granite_biased", {}, "smollm"),
    "granite_hybrid": ("granite_hybrid", {"tie": True}, "gpt-2"),
    "deepseek2": ("deepseek2", {"layers": 3, **LATENT}, "deepseek-v3"),
    "deepseek2_kimi": ("deepseek2_kimi", {"layers": 3, **LATENT}, "deepseek-v3"),
    "deepseek2_lite": ("deepseek2_lite", LATENT, "deepseek-llm"),
    "deepseek2_v2": ("deepseek2_v2", LATENT, "deepseek-llm"),
    "phi3": ("phi3", {}, "spm-prepend"),
    "phi3_partial": ("phi3_partial", {}, "spm-metaspace"),
    "phi3_long": ("phi3_long", {}, "spm-prepend"),
    "gemma2": ("gemma2", {"layers": 3, "tie": True}, "spm-plain"),
    "gemma3": ("gemma3", {"layers": 7, "tie": True}, "spm-plain"),
    "olmo2": ("olmo2", {}, "gpt-2"),
    "olmo2_3": ("olmo2_3", {"layers": 3}, "dbrx"),
    "qwen2moe": ("qwen2moe", {}, "qwen2"),
    "qwen3next": ("qwen3next", {"layers": 3}, "qwen2"),
    "qwen35": ("qwen35", {"layers": 3, "tie": True}, "qwen35"),
    "qwen35moe": ("qwen35moe", {"layers": 3}, "qwen35"),
    "lfm2": ("lfm2", {"layers": 3, "tie": True}, "llama-bpe"),
    "lfm2moe": ("lfm2moe", {"layers": 3, "tie": True}, "llama-bpe"),
    "granitehybrid": ("granitehybrid", {"layers": 3, "tie": True}, "dbrx"),
    "granitemoe": ("granitemoe", {"tie": True}, "smollm"),
    "granitemoe_shared": ("granitemoe_shared", {"tie": True}, "smollm"),
    "nemotron_h": ("nemotron_h", {"layers": 3}, "tekken"),
    "falcon_h1": ("falcon_h1", {}, "llama-bpe"),
    "falcon_h1_tied": ("falcon_h1", {"tie": True, "mamba_rms_norm": False, "mamba_norm_before_gate": True},
                       "llama-bpe"),
    "cohere2": ("cohere2", {"layers": 5, "tie": True}, "smollm"),
    "mistral3": ("mistral3", {}, "tekken"),
    "glm4": ("glm4", {}, "dbrx"),
    "ernie4_5": ("ernie4_5", {"tie": True}, "spm-plain"),
    "exaone4": ("exaone4", {"layers": 3}, "gpt-2"),
    "exaone4_window": ("exaone4_window", {"layers": 3}, "gpt-2"),
    "seed_oss": ("seed_oss", {}, "seed-coder"),
}
#: Folders whose files are compared with those of ``tinygguf``, which llama.cpp has read.
AS_CONVERTED = ("deepseek2", "deepseek2_kimi", "deepseek2_lite", "deepseek2_v2",
                *(name for name in list(FOLDERS)[list(FOLDERS).index("olmo2_3"):] if name != "falcon_h1_tied"))
#: Files of which llama.cpp's results are recorded: folder and type. The other folders were added later: what mpool
#: computes of their files is compared with what it computes of the folders.
RECORDED = ("llama", "llama_tied", "llama_linear", "llama_yarn", "qwen2", "qwen3", "qwen35moe", "lfm2", "nemotron_h",
            "falcon_h1_tied", "granitehybrid")
FILES = [*((name, "F32") for name in RECORDED), ("llama", "Q8_0"), ("llama", "Q4_K_M"), ("llama", "Q6_K"),
         ("qwen3", "Q8_0"), ("qwen2", "Q5_K_M"), ("qwen3next", "Q8_0"), ("lfm2moe", "Q8_0")]


def _sentencepiece(style: str) -> Any:
    """Return a tokenizer as transformers makes it of a SentencePiece model: every split of a token is a merge."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    spaced = "▁" + TEXT.replace(" ", "▁")
    tokens = sorted(set(spaced)) + ["He", "Hel", "▁He", "▁Hel", "lo", "Hello", "▁Hello", "ll", "▁▁", "▁q", "ui", "ck",
                                    "quick", "uick", "▁quick", "▁b", "ro", "wn"]
    known = set(tokens)
    merges = [(token[:cut], token[cut:]) for token in tokens if len(token) > 1 for cut in range(1, len(token))
              if token[:cut] in known and token[cut:] in known]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>",
                                     fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", "▁")
    if style == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=False)
    else:
        tokenizer.normalizer = escape if style == "plain" else normalizers.Sequence([normalizers.Prepend("▁"), escape])
    if style == "plain":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def _byte_level(pre: str) -> Any:
    """Train a byte-level BPE tokenizer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from mpool.models.formats import byte_pairs

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    steps: list[Any] = [byte_level]
    if pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pre.startswith("deepseek"):
        words = V3_WORDS if pre == "deepseek-v3" else byte_pairs.DEEPSEEK_V2
        steps[:0] = [pre_tokenizers.Split(Regex(one), "isolated") for one in words]
        if pre == "deepseek-llm":
            steps.insert(-1, pre_tokenizers.Digits(individual_digits=True))
    elif pre != "gpt-2":
        steps.insert(0, pre_tokenizers.Split(Regex(EXPRESSIONS[pre]), "isolated"))
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else byte_level
    tokenizer.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=VOCAB - 3, show_progress=False,
                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def write_tokenizer(folder: Path, pre: str) -> None:
    """Make a small tokenizer and write its files: ``spm-`` and a style, or the name of a pre-tokenizer."""
    pytest.importorskip("tokenizers")
    from tokenizers import AddedToken

    tokenizer = _sentencepiece(pre[4:]) if pre.startswith("spm-") else _byte_level(pre)
    fill = VOCAB - 3 - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<fill{i}>", normalized=False) for i in range(fill)])
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"},
        "add_bos_token": pre in ("llama-bpe", "deepseek-v3", "tekken"),
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}))


def save(name: str, folder: Path) -> Any:
    """Save a folder of FOLDERS, and return its model."""
    return save_as(folder, *FOLDERS[name])


def save_as(folder: Path, family: str, settings: dict[str, Any], pre: str) -> Any:
    """Save a seeded model of a family of paritymodels with a tokenizer, and return the model."""
    settings = {"layers": 2, **settings}
    model = paritymodels.decoder(family, settings.pop("layers"), vocab=ROWS, **settings)
    model.config.intermediate_size = 512 if model.config.hidden_size == 256 else 160
    model.config.bos_token_id, model.config.eos_token_id = VOCAB - 2, VOCAB - 1
    model = type(model)(model.config).eval()
    paritymodels.randomise(model, 11)
    model.tie_weights()
    model.get_output_embeddings().weight.data[VOCAB:] = 0  # rows without a token are never the largest logit
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder, pre)
    return model


def write(name: str, dtype: str, folder: Path) -> Path:
    """Save a model folder and write its GGUF file below ``folder``; an existing one is kept."""
    from mpool.models.quantizing.quantize import quantize

    if not (folder / name).exists():
        save(name, folder / name)
    path = folder / f"{name}-{dtype}.gguf"
    if not path.exists():
        quantize(str(folder / name), str(path), dtype)
    return path


if __name__ == "__main__":
    torch.set_num_threads(1)
    for model_name, file_type in FILES:
        print(write(model_name, file_type, Path(sys.argv[1])))
