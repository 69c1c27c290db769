"""The options of ``mpool serve``: one table for the command line, the environment, the configuration file and
docs/settings.md. Imports nothing that takes long: the parser of the command line reads the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..checks import shown
from ..errors import InvalidArgument
from ..names import CAPABILITIES, COMPUTE, ISOLATION, KV_DTYPES, WEIGHTS

#: Beginning of the environment variables of the options.
PREFIX = "MPOOL_SERVER_"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
#: End of the core's messages about a lack of memory: the names of the limit in Python.
_LIMIT = re.compile(r"\((process_memory of PoolConfig, )?memory_bytes, MPOOL_MEMORY_MB\)")
_SWITCH = {"1": True, "on": True, "yes": True, "true": True, "0": False, "off": False, "no": False, "false": False}


def with_options(message: str) -> str:
    """Return a message about a lack of memory with the options of ``mpool serve`` in place of the names in Python."""
    return _LIMIT.sub(lambda found: "(--process-memory, --memory)" if found[1] else "(--memory)", message)


class Kind(NamedTuple):
    """How the value of an option is read.

    Attributes:
        read: Converts a text of the command line or of a variable; raises ValueError.
        types: Types of values in the configuration file. A text of another kind than texts is converted by ``read``.
        allowed: Allowed values, as a phrase that completes "must be ...".
        metavar: Name of the value in the help; "": the option has no value.
        many: The option may be repeated. A variable has the values separated by commas, the file a list.
        choices: The allowed texts; (): there is no such list.
    """

    read: Callable[[str], Any]
    types: tuple[type, ...]
    allowed: str
    metavar: str
    many: bool = False
    choices: tuple[str, ...] = ()


class Option(NamedTuple):
    """One option of ``mpool serve``.

    Attributes:
        name: Name in the configuration file. The variable is ``MPOOL_SERVER_`` with this name in capitals.
        kind: How a value is read.
        meaning: Description for the help and docs/settings.md.
        default: Default, as the help shows it; "": the meaning has it, or there is none.
        pool: Field of :class:`mpool.PoolConfig`; "": the option is none.
        server: Field of :class:`mpool.server.settings.Settings`; "": the option is none.
        singular: Option of the command line, if its name differs: that of a list may be repeated.
    """

    name: str
    kind: Kind
    meaning: str
    default: str = ""
    pool: str = ""
    server: str = ""
    singular: str = ""

    @property
    def dest(self) -> str:
        """Attribute of the parsed command line."""
        return self.singular or self.name

    @property
    def flag(self) -> str:
        """Option of the command line."""
        return "--" + self.dest.replace("_", "-")

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name.upper()


def size_of(text: str) -> int:
    """Return a size in bytes: ``4G``, ``4GB`` and ``4GiB`` are 4 x 2**30.

    Raises:
        ValueError: The text is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or len(text) > 32:
        raise ValueError(text)
    return int(float(found[1]) * 2 ** _POWERS[found[2].upper()]) if found[2] or "." in found[1] else int(found[1])


def _switch_of(text: str) -> bool:
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def _seconds_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


def _policy_of(text: str) -> str | dict[str, str]:
    """Return ``"p2c"`` as it is, and ``"vision=p2c,text_to_text=pack"`` as a dict."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): policy.strip() for name, _, policy in pairs}


def _choice(values: Sequence[str]) -> Kind:
    return Kind(str, (str,), f"one of {', '.join(values)}", "{" + ",".join(values) + "}", choices=tuple(values))


def _texts(metavar: str) -> Kind:
    return Kind(str, (str,), "texts", metavar, many=True)


_INT = Kind(int, (int,), "an integer", "N")
_SECONDS = Kind(float, (int, float), "a number of seconds", "SECONDS")
_SECONDS_OR_NONE = Kind(_seconds_or_none, (int, float, str), "a number of seconds, or none", "SECONDS")
_SIZE_KIND = Kind(size_of, (int, str), "a number of bytes, or a size such as 512M or 4G", "SIZE")
_TIME = Kind(str, (int, float, str), "a number of seconds, or a text such as 5m", "TIME")
_SWITCH_KIND = Kind(_switch_of, (bool,), "true or false", "")
_TEXT = Kind(str, (str,), "a text", "TEXT")
_POLICY = Kind(_policy_of, (str, dict), "a policy, or CAPABILITY=POLICY,...", "POLICY")



def _pool(name: str, kind: Kind, meaning: str, default: str = "", field: str = "", singular: str = "") -> Option:
    return Option(name, kind, meaning, default, pool=field or name, singular=singular)


def _server(name: str, kind: Kind, meaning: str, default: str = "", field: str = "", singular: str = "") -> Option:
    return Option(name, kind, meaning, default, server=field or name, singular=singular)


#: Heading -> options.
GROUPS: dict[str, tuple[Option, ...]] = {
    "models": (
        Option("models", _texts("[NAME=]REF"), "serve this model, under this name; may be repeated. Downloaded models "
               "of the catalogue (`mpool models`) are always served, unless --only is given", singular="model"),
        Option("only", _SWITCH_KIND, "serve only the models given with --model"),
        Option("load", _SWITCH_KIND, "load the models given with --model at the start"),
        Option("pin", _texts("NAME"), "load this model at the start, and keep it loaded whatever needs memory; may be "
               "repeated"),
        Option("adapters", _texts("[MODEL:]NAME=PATH"), "load this adapter (LoRA), a PEFT folder or a GGUF file, for "
               "the model that is served as MODEL; MODEL may be omitted if there is one --model. Clients select the "
               "adapter with the model name MODEL:NAME; may be repeated", singular="adapter"),
        Option("draft", _TEXT._replace(metavar="REF"), "load the one model given with --model at the start, with this "
               "draft model: a smaller language model with the same vocabulary, which proposes tokens"),
        Option("compute", _choice(COMPUTE), "compute type. auto: bfloat16 if the CPU has instructions for it, else "
               "float32, and for language models the stored type of each weight; float32: the same bytes on every "
               "x86-64 machine; float32-fast: float32 without this promise, faster with mapped weights on CPUs with "
               "AVX2 only; bfloat16: float weights rounded to bfloat16; int8: fastest for embeddings, less exact",
               "auto"),
        _pool("weights", _choice(WEIGHTS), "weights of text models. packed: copied into memory in the order of the "
              "kernels, faster; mapped: read from the mapped file, slower; auto: packed, but large models read the "
              "file until all weights are packed", "auto"),
        _pool("kv_dtype", _choice(KV_DTYPES), "keys and values of language models in the KV cache. auto: integers of "
              "16 bits, or float32 if the model is computed in float32; int8: about half of the memory, slightly "
              "different probabilities", "auto"),
        _pool("keep_alive", _TIME, "how long a model without requests stays loaded: seconds, or text such as 5m or "
              "1h30m; 0: unload at once; -1: forever. A request of Ollama's protocol can set another time", "5m"),
        _pool("offline", _SWITCH_KIND, "never download"),
        _pool("model_folders", _texts("PATH"), "folder that links in the folder of a model may lead to; may be "
              "repeated", singular="model_folder")),
    "address and access": (
        Option("host", _TEXT._replace(metavar="ADDRESS"), "address to listen on. An address that other machines can "
               "reach requires a token; without --token-file, a new token is created", "127.0.0.1", server="host"),
        _server("port", _INT, "port; 0: any free port", "11435"),
        Option("token_file", _TEXT._replace(metavar="PATH"), "require the token in this file (mode 0600); the file is "
               "created if it does not exist"),
        _server("allow_hosts", _texts("HOST[:PORT]"), "additional accepted value of the Host header: the name or "
                "address of the server or of a reverse proxy; may be repeated", field="allowed_hosts",
                singular="allow_host"),
        _server("allow_origins", _texts("ORIGIN"), "origin whose web pages may send requests (CORS), such as "
                "https://page.example, http://localhost:* or app://*; may be repeated", field="allowed_origins",
                singular="allow_origin")),
    "memory and threads": (
        _pool("memory", _SIZE_KIND, "memory limit for models, caches and queues together, such as 4G (K, M, G and T "
              "are powers of 1024)", "MPOOL_MEMORY_MB, or else 80 % of what remains after a reserve", "memory_bytes"),
        _pool("threads", _INT, "compute threads", "MPOOL_THREADS, or else one per core: `mpool show` names the cores"),
        _pool("background", _SWITCH_KIND, "compute with a lower priority than other programs (nice 10 on Linux)"),
        _pool("isolation", _choice(ISOLATION), "where workers run. thread: in this process; process: each in a process "
              "of its own, so that a crash or a kill ends one worker only, and its requests are tried again",
              "thread"),
        _pool("process_memory", _SIZE_KIND, "with --isolation process: memory of a worker for caches, scratch and "
              "requests", "4 times its use at the start, less for images"),
        _pool("max_workers_per_model", _INT, "maximum workers of a model", "4"),
        _pool("policy", _POLICY, "how a worker is chosen: shared, pack, p2c or sequential, for all capabilities or as "
              f"CAPABILITY=POLICY,... ({', '.join(CAPABILITIES)})", "by capability"),
        _pool("batch_wait", _SECONDS, "time that an idle worker waits for further requests to batch, at most 0.002",
              "0"),
        _pool("predictive_scaling", _SWITCH_KIND, "start workers before they are needed, by a forecast of the load")),
    "queues and time limits": (
        _pool("queue_capacity", _INT, "maximum queued requests per model; a text-embedding model holds N of one text, "
              "and N of several texts. Further requests wait for room",
              "100 for text generation and embeddings of one text, 50 for several texts, images and vision, 20 for "
              "image generation"),
        _pool("embed_queue_capacity", _INT, "the same for embeddings of one text", "100"),
        _pool("batch_queue_capacity", _INT, "the same for embeddings of several texts", "50"),
        _pool("prompt_queue_capacity", _INT, "the same for text generation", "100"),
        _pool("vision_queue_capacity", _INT, "the same for images with text", "50"),
        _pool("image_embed_queue_capacity", _INT, "the same for embeddings of images", "50"),
        _pool("image_gen_queue_capacity", _INT, "the same for image generation", "20"),
        _pool("fail_fast", _SWITCH_KIND, "refuse requests with status 503 if the queue or the memory is full for "
              "the moment, instead of letting them wait"),
        _pool("max_embed_inputs", _INT, "maximum inputs of a request", "10000"),
        _pool("request_timeout", _SECONDS_OR_NONE, "time without a result or progress after which a request fails with "
              "status 504; none: no limit", "30"),
        _pool("scale_timeout", _SWITCH_KIND, "let requests in a long queue wait for three times the predicted wait, at "
              "most ten times --request-timeout"),
        _pool("load_timeout", _SECONDS, "time without progress after which loading a model is aborted", "30"),
        _pool("load_ceiling", _SECONDS, "maximum time for loading a model", "600"),
        _pool("stall_timeout", _SECONDS, "time without progress in a step after which a worker is replaced", "30"),
        _pool("breaker_threshold", _INT, "faults of a model's workers within --breaker-window after which its requests "
              "are refused for a while (circuit breaker); 0: never", "5"),
        _pool("breaker_window", _SECONDS, "time over which these faults are counted", "60"),
        _pool("breaker_rest", _SECONDS, "time for which requests are then refused", "60"),
        _pool("maintenance_interval", _SECONDS, "maximum time between two checks of idle models and memory", "60"),
        Option("grace", _SECONDS, "time that active requests get to complete when the server stops", "5",
               pool="shutdown_grace", server="grace")),
    "limits of requests": (
        _server("max_body", _SIZE_KIND, "maximum size of a request body", "32M"),
        _server("max_bodies", _SIZE_KIND, "maximum size of all request bodies in memory, with their values; at least "
                "four times --max-body", "512M"),
        _server("max_text", _INT, "maximum characters of one text in a body", "1000000"),
        _server("max_header", _SIZE_KIND, "maximum size of the request line and headers", "16K"),
        _server("max_header_count", _INT, "maximum header lines", "64"),
        _server("max_connections", _INT, "maximum concurrent connections", "2048"),
        _server("max_streams", _INT, "maximum concurrent streamed responses", "512"),
        _server("max_n", _INT, "maximum completions or images per request", "16"),
        _server("max_tokens", _INT, "maximum tokens per completion", "16384"),
        _server("default_max_tokens", _INT, "maximum tokens per completion if the request sets no limit", "4096"),
        _server("allow_token_ids", _SWITCH_KIND, "accept token ids in /v1/embeddings and /pooling, which clients must "
                "take from the model's own tokenizer; without this option, each request must allow them"),
        _server("allow_image_urls", _SWITCH_KIND, "fetch images at https URLs in chat messages, from public addresses "
                "only"),
        _server("strict", _SWITCH_KIND, "refuse requests with unknown fields; without this option, they are ignored, "
                "and the response header x-mpool-ignored names them"),
        _server("header_timeout", _SECONDS, "maximum time to receive the headers of a request", "10"),
        _server("body_timeout", _SECONDS, "maximum time to receive the body of a request", "60"),
        _server("write_timeout", _SECONDS, "maximum time that a client may stop reading a response", "30"),
        _server("idle_timeout", _SECONDS, "maximum time that a connection may be idle", "75"),
        _server("ping", _SECONDS, "time without an event after which a stream gets a comment", "15")),
    "log": (
        Option("log_format", _choice(("text", "json")), "format of the log on standard error; json: one object per "
               "line", "text"),
        Option("verbose", _INT, "level of the log. 0: warnings, and each refused or failed request; 1 (-v): each "
               "request; 2 (-vv): everything", "0")),
}
#: Name -> option.
OPTIONS: dict[str, Option] = {option.name: option for group in GROUPS.values() for option in group}
#: Fields of PoolConfig that have no option: faults are injected to test a program, not to operate a server.
NOT_OPERATED = ("chaos",)


def convert(option: Option, given: Any, label: str) -> Any:
    """Return the value of an option.

    Args:
        option: The option.
        given: A text of a variable, or a value of the configuration file.
        label: Name of the variable, or of the value in the file, for the error.

    Raises:
        InvalidArgument: The value is of the wrong type.
    """
    kind = option.kind
    if kind.many:
        values = given if isinstance(given, list) else [given]
        if all(isinstance(one, str) for one in values):
            return values
        raise _wrong(label, given, "a list of texts")
    if isinstance(given, bool) and bool not in kind.types or not isinstance(given, kind.types):
        raise _wrong(label, given, kind.allowed)
    if isinstance(given, str):
        try:
            given = kind.read(given)
        except ValueError:
            raise _wrong(label, given, kind.allowed) from None
    if kind.choices and given not in kind.choices:
        raise _wrong(label, given, kind.allowed)
    return given


def convert_text(option: Option, text: str, label: str) -> Any:
    """Return the value of an option for the text of a variable; a list has its values separated by commas."""
    if option.kind.many:
        return [part.strip() for part in text.split(",") if part.strip()]
    return convert(option._replace(kind=option.kind._replace(types=(str,))), text, label)


def _wrong(label: str, given: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(param=label, got=shown(given), allowed=allowed)


__all__ = ["GROUPS", "NOT_OPERATED", "OPTIONS", "PREFIX", "Kind", "Option", "convert", "convert_text", "size_of"]
