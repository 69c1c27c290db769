"""Small checkpoints with seeded random weights, created by transformers and tokenizers when a test needs them."""

import json
from pathlib import Path

import pytest

TEXTS = ["The quick brown fox jumps over the lazy dog.", "A cat sat on the mat, and the dog barked at it twice.",
         "def main(argument):\n    return argument + 1\n", "Ein Satz mit Umlauten: äöü, und noch einer.",
         "Numbers 0 1 2 3 4 5 6 7 8 9, signs !?.,;:()[]{}<>|=+-*/", "日本語の文章です。 Ελληνικά. Русский текст."] * 4

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def _need() -> None:
    for module in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(module)


#: Vocabulary trained once on TEXTS. The trainer breaks ties arbitrarily, and failures must be reproducible.
BERT_VOCABULARY = r"""
[PAD] [UNK] [CLS] [SEP] [MASK] ! ( ) * + , - . / 0 1 2 3 4 5 6 7 8 9 : ; < = > ? [ ] a b c d e f g h i j k l m n
o p q r s t u v w x y z { | } α ε η ι κ λ ν е и к р с т у 。 す て の 文 日 本 章 語 ##m ##l ##a ##u ##t ##e ##n ##z ##r
##g ##i ##o ##w ##λ ##η ##ν ##ι ##κ ##α ##す ##v ##h ##x ##f ##d ##s ##y ##c ##k ##у ##с ##к ##и ##b ##p ##е ##т
th ##at ##um the ##en ##er ##in ar do ein sat ##nd ##gum ##ic ##ent argum dog argument at ao and ba br cat de fo
it jum la ma mi mat no num on ov qu re si tw um und ελ ру те てす ##la ##ut ##ur ##tur ##ed ##ns ##zy ##rk ##gns
##ow ##λη ##νι ##κα ##ch ##сс ##ст ##ки ##кст ##ber ##ps einer satz ##ice ##ick aou bark brow def fox jumps lazy
main mit noch number over quick retur signs twice umla ελλη русс текст ##uten ##νικα ##кии barked brown numbers
return umlauten ελληνικα русскии
""".split()


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def bert(folder: Path, *, prompts: dict[str, str] | None = None, include_prompt: bool = True, normalize: bool = True,
         matryoshka: list[int] | None = None, default_prompt_name: str | None = None) -> Path:
    """Save a sentence-transformers model: BERT with 2 layers and 32 dimensions, mean pooling, 64 tokens."""
    _need()
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(BERT_VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(BERT_VOCABULARY[:5])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "model_max_length": 64,
                                              "do_lower_case": True, "cls_token": "[CLS]", "sep_token": "[SEP]",
                                              "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"})
    torch.manual_seed(7)
    config = transformers.BertConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2,
                                     num_attention_heads=4, intermediate_size=72, max_position_embeddings=64,
                                     initializer_range=0.3)
    transformers.BertModel(config).eval().save_pretrained(folder)
    if matryoshka:
        written = json.loads((folder / "config.json").read_text())
        _write(folder / "config.json", {**written, "matryoshka_dimensions": matryoshka})
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    _write(folder / "modules.json", [{"idx": at, "name": str(at), "path": place,
                                      "type": f"sentence_transformers.models.{kind}"}
                                     for at, (kind, place) in enumerate(modules)])
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})
    for _, place in modules[1:]:
        (folder / place).mkdir()
    _write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True,
                                              "include_prompt": include_prompt})
    if prompts is not None:
        _write(folder / "config_sentence_transformers.json",
               {"prompts": prompts, "default_prompt_name": default_prompt_name, "similarity_fn_name": "cosine"})
    return folder


def unigram(folder: Path) -> int:
    """Write a tokenizer like XLM-RoBERTa's, a unigram model with two separators between the texts of a pair.

    Returns:
        The size of its vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS, trainers.UnigramTrainer(
        vocab_size=180, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], unk_token="<unk>",
        show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "bos_token": "<s>", "eos_token": "</s>",
        "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
        "model_input_names": ["input_ids", "attention_mask"]})
    return tokenizer.get_vocab_size()


def _decoder_tokenizer(folder: Path) -> int:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=380, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                                              "chat_template": CHATML})
    return tokenizer.get_vocab_size()


def _decoder(folder: Path, family: str, generation: dict[str, object] | None, context: int) -> Path:
    _need()
    import torch
    import transformers

    folder.mkdir(parents=True)
    vocab = _decoder_tokenizer(folder)
    torch.manual_seed(11)
    make = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
            "lfm3": (transformers.Lfm3Config, transformers.Lfm3ForCausalLM),
            "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)}[family]
    extra = {"lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
             "lfm3": {"layer_types": ["conv", "sliding_attention"], "sliding_window": 100, "head_dim": 20},
             "qwen3_5": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
                         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
                         "linear_value_head_dim": 20}}.get(family, {})
    config = make[0](vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.4, bos_token_id=0,
                     eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, **extra)
    make[1](config).eval().save_pretrained(folder)
    _write(folder / "generation_config.json", {"eos_token_id": 2, **(generation or {})})
    return folder


def llama(folder: Path, generation: dict[str, object] | None = None, context: int = 16384) -> Path:
    """Save a transformers model: Llama with 2 layers, grouped-query attention, a byte-level BPE and ChatML."""
    return _decoder(folder, "llama", generation, context)


def qwen2(folder: Path, generation: dict[str, object] | None = None, context: int = 512) -> Path:
    """Save the same model as a Qwen2."""
    return _decoder(folder, "qwen2", generation, context)


def lfm2(folder: Path, generation: dict[str, object] | None = None, context: int = 16384) -> Path:
    """Save the same model as an LFM2, whose first layer has a state."""
    return _decoder(folder, "lfm2", generation, context)


def lfm3(folder: Path, generation: dict[str, object] | None = None, context: int = 16384) -> Path:
    """Save an LFM3 of these sizes, whose first layer has a state and whose second layer has a sliding window."""
    return _decoder(folder, "lfm3", generation, context)


def qwen3_5(folder: Path, generation: dict[str, object] | None = None, context: int = 16384) -> Path:
    """Save a Qwen3.5 of these sizes, whose first layer is a gated delta net."""
    return _decoder(folder, "qwen3_5", generation, context)


_made: dict[str, Path] = {}


def cached(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return the folder of a checkpoint, created once per session: bert, prompted, llama, lfm2 or qwen2."""
    if name not in _made:
        folder = factory.mktemp("tiny") / name
        if name == "bert":
            bert(folder)
        elif name == "prompted":
            bert(folder, prompts={"query": "find: ", "passage": "text: ", "other": "other: "}, include_prompt=False,
                 matryoshka=[8, 16, 32], default_prompt_name="other")
        elif name == "llama":
            llama(folder)
        elif name == "lfm2":
            lfm2(folder)
        else:
            qwen2(folder, {"do_sample": True, "temperature": 0.5, "top_p": 0.9})
        _made[name] = folder
    return _made[name]
