"""Texts of the help: groups of commands, descriptions, and two examples of each command."""

from __future__ import annotations

#: Headings of the help, and the commands below each.
COMMAND_GROUPS = {
    "use": ("run", "chat", "generate", "embed", "search", "rerank", "classify", "vision", "embed-image",
            "generate-image"),
    "models": ("models", "list", "show", "pull", "rm", "quantize"),
    "serve": ("serve", "ps", "stop", "ray", "worker"),
    "tools": ("demo", "capture", "completion"),
}
#: Option -> its help, where docs/settings.md has the whole meaning.
BRIEF = {"compute": "number type of the computation (default: auto); see docs/settings.md",
         "weights": "copy the weights of text models into memory (packed, faster), or read the mapped file (default: "
                    "auto); see docs/settings.md"}
MEMORY = "MPOOL_MEMORY_MB limits the memory of models, caches and queues."
_TEXTS = "Texts come from arguments, files or standard input, one per line."
_PASSAGES = ("Files and folders are cut into passages of one or more paragraphs. Texts come from arguments or standard "
             "input, one per line.")
_PROCESS = "The model is loaded into this process; with --server, a running `mpool serve` replies."
#: Command -> sentences of its description that follow its summary.
MORE = {
    "run": "With PROMPT, print the reply and exit; without it, chat in the terminal, where /? lists the commands. "
           f"{_PROCESS} An embedding model prints the vector of PROMPT. mpool chat needs no MODEL, and mpool "
           "generate uses no chat template.",
    "chat": "In a terminal, /? lists the commands; from a pipe, each line is a message. "
            f"{_PROCESS} To answer one prompt: mpool run MODEL PROMPT.",
    "generate": "The text is the whole prompt, without roles: to ask a chat model something, use mpool run or mpool "
                "chat.",
    "embed": _TEXTS, "search": _PASSAGES, "rerank": _PASSAGES,
    "classify": f"{_TEXTS} With --labels, a model of natural language inference chooses among labels of your own.",
    "embed-image": "Images come from arguments, or from standard input, one path per line.",
    "capture": "mpool capture compare compares the records with those of another engine.",
    "completion": "It completes commands, options, names of models, and files.",
}
#: Command, without ``mpool`` -> two command lines.
EXAMPLES: dict[str, tuple[str, str]] = {
    "": ('mpool run SmolLM2-135M-Instruct "Why is the sky blue?"', 'mpool embed "A sentence." "Another one."'),
    "run": ('mpool run SmolLM2-135M-Instruct', 'cat notes.txt | mpool run model.gguf "Summarise these notes"'),
    "chat": ("mpool chat", 'mpool chat --model model.gguf --system "Answer in one sentence."'),
    "generate": ('mpool generate "The three primary colours are"', "mpool generate --model model.gguf - < prompt.txt"),
    "embed": ('mpool embed "A sentence." "Another one."', "mpool embed --file texts.txt --output vectors.npy"),
    "search": ('mpool search "blue sky" notes/', 'mpool search "pets" "A cat." "A car." "A dog."'),
    "rerank": ('mpool rerank "blue sky" --file texts.txt', 'mpool rerank "pets" "A cat." "A car." --top-k 1'),
    "classify": ('mpool classify -m distilbert-base-uncased-finetuned-sst-2-english "Great!"',
                 'mpool classify -m bert-base-NER --tokens "Ada lives in London."'),
    "vision": ('mpool vision "What is this?" --image photo.jpg',
               'mpool vision "What changed?" -i before.png -i after.png'),
    "embed-image": ("mpool embed-image photo.jpg", "ls *.png | mpool embed-image --output vectors.npy"),
    "generate-image": ('mpool generate-image "a handwritten five" --model digits-sd3',
                       'mpool generate-image "a boat" -n 4 --output boat.png'),
    "models": ("mpool models --task chat --fits", "mpool models --wide"),
    "list": ("mpool list", "mpool list --task embed --json"),
    "show": ("mpool show", "mpool show model.gguf"),
    "pull": ("mpool pull SmolLM2-135M-Instruct", "mpool pull org/name:Q4_K_M --verify"),
    "rm": ("mpool rm org/name:Q4_K_M", "mpool rm --dry-run org/name"),
    "quantize": ("mpool quantize org/name model.gguf --type Q4_K_M",
                 "mpool quantize folder model.gguf --type Q8_0 --force"),
    "serve": ("mpool serve", "mpool serve chat=model.gguf --only --load --port 8000"),
    "ps": ("mpool ps", "mpool ps --url http://192.0.2.1:11435 --token-file token"),
    "stop": ("mpool stop SmolLM2-135M-Instruct", "mpool stop chat --url http://127.0.0.1:8000"),
    "worker": ("mpool worker --model chat=model.gguf --port 8001",
               "mpool worker -m model.gguf --port 0 --token-file token"),
    "ray serve": ("mpool ray serve --replicas 4", "mpool ray serve chat=model.gguf --cpus 8 --address auto"),
    "ray embed": ("mpool ray embed texts/ vectors/", "mpool ray embed texts/ vectors/ --column body --cpus 2"),
    "capture": ('mpool capture --prompt "The sky is" --out capture.jsonl',
                'mpool capture -p "The sky is" -o captures/ --compute float32'),
    "capture compare": ("mpool capture compare first.jsonl second.jsonl",
                        "mpool capture compare first/ second/ --least close"),
    "demo": ("mpool demo", 'mpool demo --question "Why is grass green?" --json'),
    "completion": ("mpool completion bash > ~/.local/share/bash-completion/completions/mpool",
                   "mpool completion fish > ~/.config/fish/completions/mpool.fish"),
}
EXAMPLES["ray"] = (EXAMPLES["ray serve"][0], EXAMPLES["ray embed"][0])


def epilog(command: str, more: str = "") -> str:
    """Return the end of a command's help: its examples, and a paragraph."""
    return "\n  ".join(("examples:", *EXAMPLES[command])) + (f"\n\n{more}" if more else "")


__all__ = ["BRIEF", "COMMAND_GROUPS", "EXAMPLES", "MEMORY", "MORE", "epilog"]
