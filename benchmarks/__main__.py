"""``python -m benchmarks COMMAND``: measure mpool and, for most commands, its peers.

    compare            embeddings and text compared with each installed peer, as ratios (the default)
    images             image embeddings compared with torch, ONNX Runtime and OpenVINO
    outputs            sparse vectors, token vectors and labels compared with sentence-transformers and others
    vision             questions about images compared with llama.cpp's mtmd
    serving            HTTP overhead, and throughput compared with llama.cpp's servers
    pool               overhead of the pool
    masks              overhead of structured output
    kernels            each kernel as per cent of the machine's peak
    search             nDCG@10 on the topics of pydoc, compared with sentence-transformers
    contexts           prompts and decoding by the length of the context
    turns              the second turn of a chat, with and without snapshots of states
    low-bits           decode, prefill and memory with weights of two and three bits
    half-memory        a model of experts in half of the memory that its file needs, compared with llama.cpp
    success            the success criteria: time to load large files, memory, logs, times of a worker
    replay             recorded passes replayed on threads of unequal speeds, for ten laptops and servers
    tables             write the tables of README.md and docs/ from the committed records, or check them
    synthetic          write a GGUF file with the shapes of a published model and random values

``python -m benchmarks COMMAND --help`` lists the options of a command. ``benchmarks/README.md`` describes the method.
"""

import compileall
import importlib
import importlib.util
import os
import sys

#: Command -> module of this package with a ``main()`` that reads ``sys.argv``.
COMMANDS = {"compare": "compare", "images": "images", "outputs": "outputs", "vision": "vision", "serving": "serving",
            "pool": "pool", "masks": "masks", "kernels": "kernel_rates", "search": "search", "contexts": "contexts",
            "turns": "turns", "low-bits": "low_bits", "half-memory": "half_memory", "success": "success",
            "replay": "replay", "tables": "tables", "synthetic": "synthetic"}


def write_bytecode() -> None:
    """Compile the sources of mpool, as an installation does, and let the processes that measure write bytecode, too.

    Without bytecode that is newer than the sources, the first request of a process takes 0.1 s longer.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    spec = importlib.util.find_spec("mpool")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        compileall.compile_dir(folder, quiet=2)


def main() -> int:
    """Run the command in ``sys.argv``; options without a command go to ``compare``."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "compare"
    if command not in COMMANDS:
        print(f"`{command}` is not a benchmark. Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    write_bytecode()
    sys.argv = [f"python -m benchmarks {command}", *arguments]
    code: int = importlib.import_module(f".{COMMANDS[command]}", __package__).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
