"""Commands and their options. Imports nothing that is slow, so that ``--help`` answers at once."""

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
    ("max_body", int, "bytes of a request's body (default: 32 MiB)"),
    ("max_connections", int, "connections at once (default: 2048)"),
    ("max_streams", int, "answers streamed at once (default: 512)"),
    ("max_n", int, "answers or pictures a request (default: 16)"),
    ("max_tokens", int, "tokens an answer (default: 16384)"),
    ("header_timeout", float, "for a request's head to arrive (default: 10)"),
    ("body_timeout", float, "for its body (default: 60)"),
    ("write_timeout", float, "for which an answer may be left unread (default: 30)"),
    ("idle_timeout", float, "for which a connection may be silent (default: 75)"),
    ("grace", float, "for requests to end when the server is stopped (default: 5)"),
)
_EPILOG = ("A model is a key of `mpool models`, a path (folder or .gguf), org/name, org/name:Q4_K_M, "
           "hf://org/name@rev/file, or pip:package==version/path. Environment: `mpool show`.")


def _lazy(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        result: int = getattr(import_module(f".{module}", __package__), name)(arguments)
        return result

    return run


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; the chosen command's function is ``run`` of its result."""
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

    _embed(add("embed", "vectors of texts: arguments, files or standard input, one text a line",
               _lazy("embedding", "embed")))
    _embed_image(add("embed-image", "vectors of images: files, or paths on standard input, one a line",
                     _lazy("embedding", "embed_image")))
    _generate(add("generate", "continue a text", _lazy("talking", "generate")))
    _chat(add("chat", "talk with a model", _lazy("talking", "chat")))
    _capture(add("capture", "record what a model's layers give out, to be held against another engine",
                 _lazy("capturing", "capture")))
    _vision(add("vision", "answer a question about images", _lazy("talking", "vision")))
    _pull(add("pull", "fetch models to this machine", _lazy("models", "pull")))
    _models(add("models", "list the known models, and which are here", _lazy("models", "models")))
    _show(add("show", "show what a model is, or what this installation runs on", _lazy("models", "show")))
    _serve(add("serve", "serve models over HTTP, by OpenAI's and Ollama's protocols", _lazy("serving", "serve")))
    _ray(add("ray", "several pools, in processes or on machines of their own, by Ray", _lazy("scaling", "serve")))
    _worker(add("worker", "serve one model over HTTP to one job at a time", _lazy("serving", "worker")))
    _demo(add("demo", "rank sentences, answer a question, look at images and draw some, and say how fast",
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
    command.add_argument("text", nargs="*", help="texts; without any, and without --file, standard input is read")
    command.add_argument("-f", "--file", action="append", default=[], metavar="PATH",
                         help="a file with one text a line; - is standard input; may be repeated")
    _model(command, "the catalogue's, see `mpool models`")
    _vectors(command, "text")
    command.add_argument("--task", choices=_options.TASKS, help="use the model's prompt for it")
    command.add_argument("--prompt", help="a text to put before every text")
    command.add_argument("--prompt-name", metavar="NAME", help="one of the model's prompts")
    command.add_argument("--no-truncate", action="store_true", help="refuse texts that are too long for the model")


def _vectors(command: argparse.ArgumentParser, unit: str) -> None:
    """Options of vectors, of texts and of images."""
    command.add_argument("-o", "--output", metavar="PATH", help="where to write (default: standard output)")
    command.add_argument("--format", choices=("jsonl", "npy"),
                         help=f"jsonl: a line with the vector for each {unit}; npy: one numpy array (default: by "
                              "--output's ending)")
    command.add_argument("--dimensions", type=int, metavar="N", help="only the first N components")
    command.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="whether vectors have length 1 "
                                                                                    "(default: as the model says)")
    command.add_argument("--precision", default="float32", choices=_options.PRECISIONS,
                         help="of the output (default: float32)")
    command.add_argument("--on-error", default="raise", choices=_options.ON_ERROR,
                         help=f"null: {unit}s that cannot be embedded give null (npy: NaN) and the rest goes on")
    command.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def _embed_image(command: argparse.ArgumentParser) -> None:
    command.add_argument("image", nargs="*", help="files (PNG, JPEG, WebP), or URLs with --allow-urls; without any, "
                                                  "standard input is read")
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
                         help="a model to serve, and what clients call it; may be repeated. Keys of `mpool models` "
                              "that are on this machine can be used unasked")
    command.add_argument("--only", action="store_true", help="serve nothing but --model")
    command.add_argument("--load", action="store_true", help="load the models of --model before the first request")


def _listening(command: argparse.ArgumentParser, rows: Iterable[tuple[str, type, str]]) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1). One that "
                                                             "other machines reach needs a token: one is made if "
                                                             "none is given")
    command.add_argument("--port", type=int, default=11435, metavar="N", help="0: one that is free (default: 11435)")
    command.add_argument("--token-file", metavar="PATH", help="require the token in this file (mode 0600), which is "
                                                              "made if it is not there")
    command.add_argument("--allow-host", action="append", default=[], metavar="HOST[:PORT]",
                         help="a further value of the Host header: the name or address by which other machines "
                              "reach the server, or a proxy in front; may be repeated")
    command.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN",
                         help="an origin whose pages may call, as https://page.example; may be repeated")
    limits = command.add_argument_group("limits")
    for name, kind, meaning in rows:
        limits.add_argument("--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS,
                            metavar="N" if kind is int else "SECONDS", help=meaning)


def _ray(command: argparse.ArgumentParser) -> None:
    commands = command.add_subparsers(title="commands", metavar="command", required=True)
    serve = commands.add_parser("serve", help="as mpool serve, by several pools", description="Serve models over HTTP "
                                "by several pools, each in a process of its own.")
    serve.set_defaults(run=_lazy("scaling", "serve"))
    _served(serve)
    _compute(serve)
    serve.add_argument("--replicas", type=int, default=1, metavar="N", help="pools (default: 1)")
    serve.add_argument("--max-replicas", type=int, default=0, metavar="N",
                       help="with more calls, up to so many (default: --replicas)")
    serve.add_argument("--calls", type=float, default=8.0, metavar="N",
                       help="calls in a pool, waiting and running, at which others are asked too (default: 8)")
    _listening(serve, [row for row in SERVER_LIMITS if row[0].startswith("max_") or row[0] == "grace"])
    embed = commands.add_parser("embed", help="vectors for a folder of Parquet files", description="Write the Parquet "
                                "files of a folder again, with vectors of one column's texts. Files that are there "
                                "already are skipped.")
    embed.set_defaults(run=_lazy("scaling", "embed"))
    embed.add_argument("source", help="the folder")
    embed.add_argument("target", help="another folder, for the files with vectors")
    embed.add_argument("--column", default="text", metavar="NAME", help="of the texts (default: text)")
    embed.add_argument("--output", default="embedding", metavar="NAME", help="of the vectors (default: embedding)")
    embed.add_argument("-m", "--model", metavar="REF", help="the model (default: the catalogue's, see `mpool models`)")
    embed.add_argument("--task", choices=_options.TASKS, help="use the model's prompt for it")
    embed.add_argument("--dimensions", type=int, metavar="N", help="only the first N components")
    embed.add_argument("--on-error", default="raise", choices=_options.ON_ERROR,
                       help="null: texts that cannot be embedded have no vector, and the rest goes on")
    embed.add_argument("--actors", type=int, metavar="N", help="processes (default: as many as there are CPUs for)")
    embed.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    _compute(embed)
    for one in (serve, embed):
        one.add_argument("-v", "--verbose", action="count", default=0, help="log to standard error; -vv: all of it")
        one.add_argument("--cpus", type=int, default=1, metavar="N", help="threads of each process, and CPUs that Ray "
                                                                          "keeps for it (default: 1)")
        one.add_argument("--memory-mb", type=int, default=0, metavar="N",
                         help="megabytes of each process (default: its share of the machine, by CPUs)")
        one.add_argument("--address", metavar="ADDRESS", help="of a Ray cluster; auto: the one of this machine "
                                                              "(default: Ray is started for as long as this runs)")
    serve.add_argument("--offline", action="store_true", help="never download")


def _worker(command: argparse.ArgumentParser) -> None:
    command.add_argument("-m", "--model", metavar="[NAME=]REF", required=True, help="the model")
    _pool(command)
    command.add_argument("--port", type=int, required=True, metavar="N", help="port of 127.0.0.1; 0: one that is free")
    command.add_argument("--token-file", metavar="PATH", help="require the token in this file (mode 0600), which is "
                                                              "made if it is not there")
    command.add_argument("--busy", choices=("wait", "refuse"), default="wait",
                         help="what becomes of a job while there is another one: it waits for its turn, or gets 409 "
                              "(default: wait)")
    command.add_argument("--timeout", type=float, metavar="SECONDS", help="that a job may take once it has its turn "
                                                                          "(default: any)")
    command.add_argument("--capture", metavar="PATH", help="record what the layers give out for every job: a folder, "
                                                           "which gets a .jsonl file a job, or a .jsonl file")


def _number_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _bias(text: str) -> tuple[str, float]:
    token, separator, value = text.partition("=")
    if not separator or not token.isascii() or not token.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: ID=VALUE")
    return token, float(value)


def _sampling(command: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    group = command.add_argument_group("sampling", "What is left out is as the model's authors say, else as said here.")
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
                       help="end before this; may be repeated")
    group.add_argument("--stop-token-id", dest="stop_token_ids", action="append", type=int, default=unset, metavar="ID",
                       help="end at this token; may be repeated")
    group.add_argument("--logit-bias", action="append", type=_bias, default=unset, metavar="ID=X",
                       help="add X to the logit of a token; may be repeated")


def _generate(command: argparse.ArgumentParser) -> None:
    command.add_argument("prompt", nargs="?", help="the text to continue, as it is; without it, or with -, standard "
                                                   "input is read to its end")
    _model(command, "the catalogue's, see `mpool models`")
    command.add_argument("--parse-special", action="store_true", help="texts of control tokens are those tokens")
    command.add_argument("--stats", action="store_true", help="say on standard error how fast it was")
    command.add_argument("--logprobs", type=int, default=argparse.SUPPRESS, metavar="K",
                         help="log probabilities, and those of K alternatives; shown with --json")
    _json(command)
    _sampling(command)


def _capture(command: argparse.ArgumentParser) -> None:
    command.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue, as it is; -: standard input is "
                                                                "read to its end")
    command.add_argument("-o", "--out", metavar="PATH", help="a .jsonl file, which is replaced, or a folder, which "
                                                             "gets one; a new one's name ends in / if it has a suffix")
    _model(command, "the catalogue's, see `mpool models`")
    command.add_argument("--values", type=int, default=10, metavar="N", help="numbers a record (default: 10)")
    command.add_argument("--records", type=int, default=1_000_000, metavar="N",
                         help="records that have room (default: 1000000)")
    command.add_argument("--job-id", metavar="NAME", help="what the records are called (default: 1)")
    command.add_argument("--parse-special", action="store_true", help="texts of control tokens are those tokens")
    _sampling(command, leave_out=("n",))
    compare = command.add_subparsers(title="commands", metavar="compare").add_parser(
        "compare", help="hold two captures against each other; without it: capture --prompt to --out, at temperature "
                        "0 unless another is given",
        description="How far two captures of one prompt are apart, for each token and stage. Exact is up to 1e-5, "
                    "close up to 1e-3, acceptable up to 1e-1, by the largest absolute difference. The exit code is 1 "
                    "if they are not as close as --least.")
    compare.set_defaults(run=_lazy("capturing", "compare"))
    compare.add_argument("first", help="a .jsonl file, or a folder of them")
    compare.add_argument("second", help="the other")
    compare.add_argument("--tokens", type=int, metavar="N", help="only the first N tokens of each call")
    compare.add_argument("--least", default="acceptable", choices=("exact", "close", "acceptable"),
                         help="the grade that is asked for (default: acceptable)")
    _json(compare)


def _chat(command: argparse.ArgumentParser) -> None:
    _model(command, "the catalogue's, see `mpool models`")
    command.add_argument("--system", metavar="TEXT", help="a system message")
    command.add_argument("--stats", action="store_true", help="say after each answer how fast it was")
    _sampling(command, leave_out=("n",))


def _vision(command: argparse.ArgumentParser) -> None:
    command.add_argument("question", help="what to ask; -: standard input is read to its end")
    command.add_argument("-i", "--image", action="append", required=True, metavar="FILE",
                         help="a PNG, JPEG or WebP file, or a URL with --allow-urls; may be repeated")
    command.add_argument("-m", "--model", metavar="REF", required=True, help="the model, such as LLaVA")
    _pool(command)
    command.add_argument("--allow-urls", action="store_true", help="fetch http and https URLs")
    command.add_argument("--stats", action="store_true", help="say on standard error how fast it was")
    _json(command)
    _sampling(command, leave_out=("n",))


def _pull(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="+", metavar="REF", help="models to fetch")
    command.add_argument("--verify", action="store_true", help="hash every file again, also of models that are here")
    command.add_argument("--offline", action="store_true", help="only check that they are here")
    command.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    _json(command)


def _models(command: argparse.ArgumentParser) -> None:
    command.add_argument("--capability", choices=CAPABILITIES, help="only models for this")
    command.add_argument("--local", action="store_true", help="only models that are here")
    _json(command)


def _show(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", metavar="REF", help="a model that is here; without it: CPU, kernels, "
                                                                 "limits, options and versions")
    _json(command)


def _demo(command: argparse.ArgumentParser) -> None:
    command.add_argument("--embedding-model", metavar="REF", help="instead of the default one")
    command.add_argument("--text-model", metavar="REF", help="instead of the default one")
    command.add_argument("--question", default="Why is the sky blue?", help="the question (default: %(default)s)")
    _pool(command)
    _json(command)
