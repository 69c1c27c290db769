"""A small reranker that is a language model, in the form of Qwen3-Reranker."""

import json
from pathlib import Path
from typing import Any

import pytest

from paritymodels import randomise, transformers

BEFORE = ('<|im_start|>system\nJudge whether the Document meets the requirements. Note that the answer can only be '
          '"yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: ')
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
DEFAULT = "Find passages that answer"


def _of(role: str, default: str = "") -> str:
    return f'{{{{ messages | selectattr("role", "eq", "{role}") | map(attribute="content") | first{default} }}}}'


TEMPLATE = (BEFORE + _of("system", f' | default("{DEFAULT}")') + "\n<Query>: " + _of("query") + "\n<Document>: "
            + _of("document") + BEHIND + "\n")  # Jinja drops one line break at the end of a template


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes, three merges and the ChatML tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    words = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ye", "yes", "no"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)},
                                                      [("y", "e"), ("ye", "s"), ("n", "o")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 500, "chat_template": TEMPLATE}))


def seeded(tied: bool) -> Any:
    """Return a small seeded Qwen3."""
    config = transformers.Qwen3Config(
        vocab_size=270, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
        max_position_embeddings=600, num_hidden_layers=2, eos_token_id=261, tie_word_embeddings=tied)
    made = transformers.Qwen3ForCausalLM(config).eval()
    randomise(made, 3)
    made.tie_weights()
    return made


def make(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model saved by CrossEncoder of sentence-transformers."""
    library = pytest.importorskip("sentence_transformers")
    plain = tmp_path_factory.mktemp("plain")
    write_tokenizer(plain)
    seeded(True).save_pretrained(plain)
    saved = tmp_path_factory.mktemp("saved") / "model"
    library.CrossEncoder(str(plain), device="cpu").save_pretrained(str(saved))
    return saved
