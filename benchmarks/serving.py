"""``python -m benchmarks serving overhead`` measures the cost of HTTP, ``serving embeddings`` the rates of clients that
embed, and ``serving throughput`` compares with llama.cpp's servers.

``overhead``: the same requests through the library and over HTTP, in turns, to one pool in one process. The client is a
separate process and does not hold the server's interpreter lock. An embedding request has one short text, never the
same twice; a stream has ``--tokens`` tokens, always the same completion. Prints medians over rounds of the extra cost
of HTTP: in time, as the client sees it, and in CPU time of the server's thread, compared with a thread that awaits
``mpool.aio``.

``embeddings``: ``mpool serve`` in its own process; 1, 8 and 64 clients, each of which posts requests of 1 or 32 texts
of natural length to ``/v1/embeddings``, one after the other on one connection. No text is sent twice. A 99th percentile
needs 2,000 requests.

``throughput``: ``mpool serve``, llama.cpp's ``llama-server`` (``--llama-server``) and ``llama_cpp.server``
(``--peer-python``) in turns, each alone in its own process. 1, 8 and 32 clients stream completions of ``--tokens``
tokens; ``logit_bias`` bars the end-of-sequence tokens, and no prompt is sent twice. ``llama-server`` has as many slots
(``-np``) as the largest number of clients, with ``--context`` tokens each. Speculation in mpool is off, because the
peers have none, unless ``--speculation`` is given.

The CPU share of other processes is printed with the figures: on a machine in use by others they mean little.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from . import http_client, texts
from .options import add_threads, found_here, parser_of
from .probe import Watch
from .timing import percentile, spread

#: Requests from which a 99th percentile is printed.
MIN_REQUESTS = 2000
PROMPT = "Write a long story about a lighthouse."


# ---- overhead: the process with the pool -----------------------------------------------------------------------------

class Host:
    """A pool with a server on a thread, and the same requests through the library. Runs one command per input line."""

    def __init__(self, args: argparse.Namespace) -> None:
        import mpool
        from mpool.server.serving import Serving
        from mpool.server.settings import Settings

        self.mpool = mpool
        self.pool = mpool.Pool(mpool.PoolConfig(threads=args.threads, shutdown_grace=1.0))
        self.server = Serving(Settings(port=0), self.pool, [f"embedding={args.embedding}", f"text={args.text}"], False)
        self.embedding, self.text = (self.pool.load(served.model) for served in self.server.state.models.all())
        up = threading.Event()
        self.thread = threading.Thread(target=self.server.run, args=(up.set,))
        self.thread.start()
        up.wait()
        assert self.thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self.thread.ident)

    def clock(self) -> float:
        """Return the CPU seconds of the server's thread."""
        return time.clock_gettime(self._clock)

    def port(self) -> int:
        """Return the server's port."""
        return self.server.port

    def embed(self, texts: list[str]) -> list[float]:
        """Return the seconds of each library call, from a blocking thread."""
        found = []
        for text in texts:
            began = time.perf_counter()
            self.embedding.embed(text)
            found.append(time.perf_counter() - began)
        return found

    def await_embed(self, texts: list[str]) -> float:
        """Return the CPU seconds per request of an event loop's thread."""
        async def work() -> float:
            await self.mpool.aio.embed(texts[0], self.embedding, pool=self.pool)
            began = time.thread_time()
            for text in texts[1:]:
                await self.mpool.aio.embed(text, self.embedding, pool=self.pool)
            return (time.thread_time() - began) / (len(texts) - 1)

        return asyncio.run(work())

    def stream(self, tokens: int) -> dict[str, Any]:
        """Await a stream on an event loop. Return the arrival time of every chunk, and the CPU time of the loop's
        thread.
        """
        async def work() -> dict[str, Any]:
            messages = [{"role": "user", "content": PROMPT}]
            began, clock, times = time.perf_counter(), time.thread_time(), []
            async for _ in self.mpool.aio.chat(messages, self.text, stream=True, pool=self.pool, temperature=0,
                                               max_tokens=tokens, ignore_eos=True):
                times.append(time.perf_counter() - began)
            return {"times": times, "cpu": time.thread_time() - clock}

        return asyncio.run(work())

    def run_commands(self, commands: TextIO, results: TextIO) -> None:
        """Run commands until the input ends."""
        for command in commands:
            name, *arguments = json.loads(command)
            print(json.dumps(getattr(self, name)(*arguments)), file=results, flush=True)
        self.server.stop()
        self.thread.join()


class Remote:
    """A :class:`Host` in a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = [f"--{name}={getattr(args, name)}" for name in ("embedding", "text", "threads")]
        self._process = subprocess.Popen([sys.executable, "-m", "benchmarks.serving", "host", *options],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([name, *arguments]), file=self._process.stdin, flush=True)
        result = self._process.stdout.readline()
        if not result:
            raise RuntimeError("the process with the pool has ended")
        return json.loads(result)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _pace(times: list[float]) -> float:
    """Return the seconds per chunk, from the first chunk to the last."""
    return (times[-1] - times[0]) / max(1, len(times) - 1)


def embedding_round(remote: Remote, connection: http_client.Connection, count: int, turn: int) -> dict[str, float]:
    """Return the cost of an embedding through the library and over HTTP, in microseconds."""
    single = texts.same(3 * count + 2, 9, turn)
    library = statistics.median(remote("embed", single[:count]))
    awaited = remote("await_embed", single[count:2 * count + 1])

    def post(text: str) -> float:
        return connection.post("/v1/embeddings", {"model": "embedding", "input": text})[0]

    post(single[2 * count + 1])
    clock = remote("clock")
    over = statistics.median([post(text) for text in single[2 * count + 2:]])
    served = (remote("clock") - clock) / count
    return {"library": library * 1e6, "HTTP": over * 1e6, "extra": (over - library) * 1e6, "library CPU": awaited * 1e6,
            "HTTP CPU": served * 1e6, "extra CPU": (served - awaited) * 1e6}


def stream_round(remote: Remote, connection: http_client.Connection, tokens: int) -> dict[str, float]:
    """Return the cost of a stream chunk through the library and over HTTP, in microseconds."""
    library = remote("stream", tokens)
    body = {"model": "text", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": tokens,
            "ignore_eos": True}
    clock = remote("clock")
    times = connection.stream("/v1/chat/completions", body)
    served = (remote("clock") - clock) / len(times)
    awaited = library["cpu"] / len(library["times"])
    return {"library": _pace(library["times"]) * 1e6, "HTTP": _pace(times) * 1e6,
            "extra": (_pace(times) - _pace(library["times"])) * 1e6, "library CPU": awaited * 1e6,
            "HTTP CPU": served * 1e6, "extra CPU": (served - awaited) * 1e6}


def overhead(args: argparse.Namespace) -> None:
    """Print the table of ``overhead``."""
    rows: dict[str, list[dict[str, float]]] = {"embedding": [], "stream chunk": []}
    with Watch() as watch:
        remote = Remote(args)
        try:
            connection = http_client.Connection(remote("port"))
            stream_round(remote, connection, args.tokens)  # warm-up: the first completion has to prefill the prompt
            for turn in range(args.rounds):
                rows["embedding"].append(embedding_round(remote, connection, args.count, turn + 1))
                rows["stream chunk"].append(stream_round(remote, connection, args.tokens))
            connection.close()
        finally:
            remote.close()
    print(f"{watch.describe()}; {args.rounds} rounds; microseconds, medians of rounds (min to max)")
    names = list(rows["embedding"][0])
    print(f"{'':18}" + "".join(f"{name:>24}" for name in names))
    for what, found in rows.items():
        cells = [spread([one[name] for one in found]) for name in names]
        print(f"{what:18}" + "".join(f"{cell:>24}" for cell in cells))


# ---- embeddings ------------------------------------------------------------------------------------------------------

def embedding_bodies(each: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield request bodies of ``each`` texts. All clients share ``numbers``, so that no text is sent twice."""
    for number in numbers:
        yield {"model": "embedding", "input": texts.mixed(each, number), "encoding_format": "base64"}


def embeddings(args: argparse.Namespace) -> None:
    """Print the table of ``embeddings``."""
    rates: dict[tuple[int, int], list[float]] = {}
    times: dict[tuple[int, int], list[float]] = {}
    numbers = itertools.count()
    first = next(embedding_bodies(1, numbers))
    with Watch() as watch, running("mpool", "embedding", args, "/v1/embeddings", first) as port:
        for _ in range(args.rounds):
            for clients, each in itertools.product(args.clients, args.texts):
                bodies = [embedding_bodies(each, numbers) for _ in range(clients)]
                seconds, spent = asyncio.run(http_client.repeat(port, "/v1/embeddings", bodies, args.seconds))
                rates.setdefault((clients, each), []).append(len(spent) * each / seconds)
                times.setdefault((clients, each), []).extend(spent)
    print(f"{watch.describe()}; {args.rounds} rounds; medians of rounds (min to max)")
    print(f"{'clients':>8}{'texts':>8}{'texts/s':>26}{'request p50, p99 ms':>24}{'requests':>10}")
    for (clients, each), found in rates.items():
        waits = times[clients, each]
        last = f"{percentile(waits, 0.99) * 1e3:8.1f}" if len(waits) >= MIN_REQUESTS else f"{'-':>8}"
        print(f"{clients:8}{each:8}{spread(found):>26}{percentile(waits, 0.5) * 1e3:15.1f},{last}{len(waits):10}")


# ---- throughput ------------------------------------------------------------------------------------------------------

@contextmanager
def running(engine: str, kind: str, args: argparse.Namespace, path: str, first: dict[str, Any]) -> Iterator[int]:
    """Start a server in its own process, wait for the response to ``first``, and yield its port.

    Args:
        engine: "mpool", "llama-server" or "llama-cpp-python".
        kind: "text" or "embedding": the model to serve.
        args: arguments of the command line.
        path, first: a first request.
    """
    port = _free_port()
    command = _command(engine, kind, args, port)
    speculation = {} if args.speculation else {"MPOOL_SPECULATION": "0"}
    # run elsewhere: in the clone, Python would import its sources instead of the installed package
    process = subprocess.Popen(command, env={**os.environ, **speculation}, cwd=os.sep, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                connection = http_client.Connection(port)
                connection.post(path, first)
                connection.close()
                break
            except (OSError, http_client.Loading):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the server of {engine} did not start: {' '.join(command)}") from None
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(engine: str, kind: str, args: argparse.Namespace, port: int) -> list[str]:
    """Return the command of a server."""
    threads = str(args.threads)
    if engine == "mpool":
        return [sys.executable, "-m", "mpool", "serve", "--model", f"{kind}={getattr(args, kind)}", "--only", "--load",
                f"--port={port}", "--threads", threads]
    file = _file_of(args.text)
    if engine == "llama-server":
        slots = max(args.clients)
        return [args.llama_server, "-m", file, "--alias", "text", "--host", "127.0.0.1", "--port", str(port), "-t",
                threads, "-tb", threads, "-np", str(slots), "-c", str(slots * args.context), "--no-webui"]
    return [args.peer_python, "-m", "llama_cpp.server", f"--model={file}", "--model_alias=text", "--host=127.0.0.1",
            f"--port={port}", f"--n_threads={threads}", f"--n_ctx={args.context}", f"--n_threads_batch={threads}",
            "--interrupt_requests=False", "--verbose=False"]


def _free_port() -> int:
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def _file_of(reference: str) -> str:
    """Return the GGUF file of a model reference."""
    from mpool.models import resolve

    return str(resolve(reference, progress=False).path)


def _end_tokens(reference: str) -> tuple[int, ...]:
    """Return the ids of the tokens that end a generation."""
    from mpool.models import describe
    from mpool.tokenizers import Tokenizer

    return Tokenizer.from_source(describe(reference).tokenizer).eog_ids


def bodies(clients: int, each: int, tokens: int, turn: int, barred: dict[str, int]) -> list[list[dict[str, Any]]]:
    """Return the clients' request bodies: prompts of 32 words, different in each turn.

    Args:
        barred: ``logit_bias`` that bars the model's end-of-generation tokens.
    """
    prompts = iter(texts.same(clients * each, 32, turn))
    return [[{"model": "text", "prompt": next(prompts), "max_tokens": tokens, "temperature": 0, "logit_bias": barred}
             for _ in range(each)] for _ in range(clients)]


def throughput(args: argparse.Namespace) -> None:
    """Print the table of ``throughput``."""
    engines = ["mpool", *["llama-server"] * bool(args.llama_server), *["llama-cpp-python"] * bool(args.peer_python)]
    rates: dict[tuple[str, int], list[float]] = {}
    first: dict[tuple[str, int], list[float]] = {}
    barred = {str(token): -100 for token in _end_tokens(args.text)}
    with Watch() as watch:
        for turn in range(args.rounds):
            for engine in engines:
                warm_up = bodies(1, 1, args.tokens, 0, barred)[0][0]
                with running(engine, "text", args, "/v1/completions", warm_up) as port:
                    for clients in args.clients:
                        asked = bodies(clients, max(2, 4000 // clients), args.tokens, 1 + turn, barred)
                        found = asyncio.run(http_client.load(port, "/v1/completions", asked, args.seconds))
                        rates.setdefault((engine, clients), []).append(found.responses * args.tokens / found.seconds)
                        first.setdefault((engine, clients), []).extend(found.first)
    print(f"{watch.describe()}; {args.rounds} rounds; completions of {args.tokens} tokens; medians (min to max)")
    print(f"{'clients':>8}  {'server':18}{'tokens/s':>28}{'first chunk p50, p99 ms':>26}{'mpool is':>12}")
    for clients, engine in itertools.product(args.clients, engines):
        found, waits = rates[engine, clients], first[engine, clients]
        ratio = statistics.median(rates["mpool", clients]) / statistics.median(found)
        print(f"{clients:8}  {engine:18}{spread(found):>28}{percentile(waits, 0.5) * 1e3:17.0f},"
              f"{percentile(waits, 0.99) * 1e3:8.0f}" + (f"{ratio:11.2f}x" if engine != "mpool" else ""))


def main() -> int:
    """Run the command line."""
    parser = parser_of("serving", __doc__)
    parser.add_argument("what", choices=("overhead", "embeddings", "throughput", "host"),
                        help="host: internal to overhead")
    parser.add_argument("--embedding", type=found_here, default="all-MiniLM-L6-v2",
                        help="embedding model (default: %(default)s)")
    parser.add_argument("--text", type=found_here, default="SmolLM2-135M-Instruct",
                        help="language model (default: %(default)s)")
    add_threads(parser, 2)
    parser.add_argument("--rounds", type=int, default=0, help="default: 15 for overhead, else 2")
    parser.add_argument("--count", type=int, default=300, help="embeddings per round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=0,
                        help="tokens of a completion; default: 400 for overhead, 64 for throughput")
    parser.add_argument("--clients", type=int, nargs="+", default=[],
                        help="numbers of concurrent clients (default: 1 8 32, of embeddings 1 8 64)")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 32],
                        help="texts in each request of embeddings (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0,
                        help="duration of each cell of embeddings and throughput (default: %(default)s)")
    parser.add_argument("--speculation", action="store_true", help="leave mpool's speculative decoding on")
    parser.add_argument("--peer-python", type=found_here, metavar="PATH",
                        help="interpreter that has llama-cpp-python[server]")
    parser.add_argument("--llama-server", type=found_here, metavar="PATH", help="llama.cpp's program llama-server")
    parser.add_argument("--context", type=int, default=2048,
                        help="context of a sequence in the peers, in tokens (default: %(default)s)")
    args = parser.parse_args()
    over = args.what in ("overhead", "host")
    args.rounds, args.tokens = args.rounds or (15 if over else 2), args.tokens or (400 if over else 64)
    args.clients = args.clients or ([1, 8, 64] if args.what == "embeddings" else [1, 8, 32])
    if args.what == "host":
        Host(args).run_commands(sys.stdin, sys.stdout)
    else:
        {"overhead": overhead, "embeddings": embeddings, "throughput": throughput}[args.what](args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
