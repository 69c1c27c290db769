"""Language models with known completions: a Llama whose layers have no effect and whose output matrix defines the next
token of each token."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

#: Control tokens of every model; the first two end a completion.
SPECIAL = ["<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]


def save(folder: Path, template: str, chains: Sequence[tuple[str, ...]], words: Sequence[str],
         control: Sequence[str] = ()) -> Path:
    """Save a model to a folder.

    Args:
        template: chat template.
        chains: a token and its possible successors, the most probable first; single bytes in GPT-2's alphabet.
        words: texts that are one token each, in addition to single bytes and :data:`SPECIAL`.
        control: texts that are one control token each, in addition to :data:`SPECIAL`.

    Returns:
        The folder.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL, *control]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in words])
    size = tokenizer.get_vocab_size()
    heads = -(-size // 16)
    hidden = heads * 16
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=size, hidden_size=hidden, intermediate_size=32, num_hidden_layers=1, num_attention_heads=heads,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None))
    for parameter in model.parameters():
        parameter.data.zero_()
    model.model.norm.weight.data.fill_(1.0)
    model.model.embed_tokens.weight.data[:, :size] = torch.eye(size, hidden)[:, :size]
    for before, *after in chains:
        for rank, text in enumerate(after):
            ids = [tokenizer.token_to_id(name.replace("Ġ", " ") if len(name) > 1 else name) for name in (text, before)]
            model.lm_head.weight.data[ids[0], ids[1]] = 1.0 - 0.05 * rank
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {"content": text, "special": True} for text in special}}))
    return folder
