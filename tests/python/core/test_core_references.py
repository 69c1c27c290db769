"""Calls of the C extension keep no reference and no memory, whether they succeed or fail. No test needs torch."""

import gc
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
import waiting
from mpool import _core

sys.path.append(str(Path(__file__).resolve().parents[2] / "corpus"))
import make_gguf as make  # noqa: E402

WIDTH, VOCAB, ROUNDS = 8, 40, 200

#: Ids below this one have other texts: Python keeps small integers, whose references cannot be counted.
FIRST = 1000
#: A byte-pair vocabulary of three letters and two merges, and a value of each type.
KEYS: dict[str, Any] = {
    "general.architecture": "llama", "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [*(f"<{n}>" for n in range(FIRST)), "a", "b", "c", "ab", "abc"],
    "tokenizer.ggml.token_type": [1] * (FIRST + 5), "tokenizer.ggml.merges": ["a b", "ab c"],
    "a.bool": True, "a.int": -1, "a.float": -1.0,
    "a.bools": [True, False], "a.ints": [-1, 2], "a.floats": [-1.0, 0.5], "a.bytes": b"\xff"}


def write_gguf(path: Path) -> Path:
    kinds = {bool: make.BOOL, int: make.I32, float: make.F32, str: make.STRING, bytes: make.STRING}
    values = [make.array(key, kinds[type(value[0])], value) if isinstance(value, list)
              else make.kv(key, kinds[type(value)], value) for key, value in KEYS.items()]
    path.write_bytes(make.gguf(values, [make.info("weight", (3, 2))], np.arange(6, dtype=np.float32).tobytes()))
    return path


def make_world(folder: Path) -> SimpleNamespace:
    """Return a registry with a static embedding, and arguments. The cases pass these objects themselves."""
    table = np.random.default_rng(3).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    (folder / "table.bin").write_bytes(table.tobytes())
    spec = _core.Spec("static_embedding")
    spec.add_file(str(folder / "table.bin"))
    for name, number in (("embedding_length", WIDTH), ("context_length", 64), ("vocab_size", VOCAB)):
        spec.set(f"static_embedding.{name}", number)
    spec.add_tensor("token_embd.weight", "F32", (VOCAB, WIDTH), 0, 0, table.nbytes)
    registry = _core.Registry(threads=1)
    registry.add("m", spec)
    registry.load("m", timeout=60)
    path = str(write_gguf(folder / "tiny.gguf"))
    gguf = _core.read_gguf(path)
    ids, offsets = np.array([1, 2, 3, 4, 5], np.int32), np.array([0, 2, 5], np.int64)
    ticket = registry.submit_embed("m", ids, offsets)
    assert ticket.wait(60)
    many = 10**5  # no small number, which all modules share
    return SimpleNamespace(
        registry=registry, spec=spec, gguf=gguf, bpe=gguf.bpe(), path=path, table=table, ids=ids, offsets=offsets,
        ticket=ticket, key="m" + "x" * 9, words=["abc", "cab"], letters=["a", b"b"], reals=[0.5, many], number=many,
        ends=np.array([0, VOCAB], np.int64), wide=np.ones((3, WIDTH + 1), np.float32),
        int8=np.ones((4, WIDTH), np.int8),
        scales=np.ones(4, np.float32), out=np.empty((1, 1), np.float32), notifier=_core.Notifier(),
        data=np.ones(64, np.float32).tobytes(), error=mpool.InvalidArgument)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_world(tmp_path_factory.mktemp("references"))


def search(w: SimpleNamespace) -> _core.Search:
    made = _core.Search(w.registry, w.table, 3, True, 0.5)
    made.add(w.table)
    return made


def maxsim(w: SimpleNamespace) -> _core.MaxSim:
    return _core.MaxSim(w.registry, w.table, w.ends, 1)


RIGHT: dict[str, Callable[[SimpleNamespace], Any]] = {
    "tables": lambda w: (_core.status_table(), _core.architectures(), _core.capabilities(), _core.options(),
                         _core.config(), _core.metrics(), _core.event_names(), _core.events_dropped()),
    "log and events": lambda w: (_core.drain_log(), _core.drain_events()),
    "dequantize": lambda w: _core.dequantize("F32", w.data, 64),
    "quantize": lambda w: _core.quantize("Q8_0", "F32", w.data, 64),
    "read_gguf": lambda w: _core.read_gguf(w.path).kv,
    "gguf": lambda w: (w.gguf.kv, w.gguf.keys, w.gguf.tensors, w.gguf.files, w.gguf.architecture, w.gguf.spec()),
    "gguf values": lambda w: [w.gguf.value(key) for key in KEYS],
    "bpe": lambda w: (w.gguf.bpe(), w.bpe.find("ab"), w.bpe.find("zz"), w.bpe.part(w.words, 10**6)),
    "bpe without room": lambda w: w.bpe.part(w.words, 1),
    "spec": lambda w: [_core.Spec("llama").set("k", value) for value in (
        True, w.number, 0.5, "text", b"bytes", w.words, w.letters, w.reals, [True], [w.number], [])],
    "spec with tokens": lambda w: _core.Spec("llama").set_tokens(b"abc", np.array([0, 1, 3]), bytes(2), [1]),
    "spec with a tensor": lambda w: (made := _core.Spec("llama")).add_file(w.path) or made.add_tensor(
        "t", "F32", (2, 3), 0, 0, 24),
    "spec with a draft": lambda w: _core.Spec("llama").set_draft(w.spec),
    "weights": lambda w: w.spec.weights(),
    "search": lambda w: (made := search(w)).counts().sum() and made.nearest(),
    "maxsim": lambda w: maxsim(w).add(w.table, w.ends, None, w.out),
    "maxsim with scales": lambda w: (made := maxsim(w)).add(w.int8, np.array([0, 4]), w.scales, None)
    or made.nearest(),
    "notifier": lambda w: (made := _core.Notifier()).take() or made.close(),
    "registry": lambda w: _core.Registry(threads=1, queue_capacity={"vision": (3, 4)}, policy={"vision": "p2c"}),
    "entries": lambda w: (w.registry.entries(), w.registry.stats(), w.registry.number()),
    "add and remove": lambda w: w.registry.add(w.key, w.spec, revision=3) or w.registry.remove(w.key, timeout=60),
    "stage and withdraw": lambda w: w.registry.add("m", w.spec, revision=9, staged=True)
    or w.registry.withdraw("m", 9),
    "keep_alive": lambda w: w.registry.keep_alive("m", 1e6),
    "embed": lambda w: w.registry.embed("m", w.ids, w.offsets),
    "submit_embed": lambda w: (made := w.registry.submit_embed("m", w.ids, w.offsets)).wait(60) and made.vectors(),
    "ticket": lambda w: (w.ticket.vectors(), w.ticket.times(), w.ticket.position(), w.ticket.eta(), w.ticket.check(),
                         w.ticket.texts_done(), w.ticket.done(), w.ticket.cancel(), w.ticket.wait_progress(0)),
    "bind": lambda w: w.registry.submit_embed("m", w.ids, w.offsets).bind(w.notifier, w.number) or w.notifier.take(),
}

WRONG: dict[str, Callable[[SimpleNamespace], Any]] = {
    "dequantize": lambda w: _core.dequantize("Q4_0", w.data, 64),
    "dequantize to an unknown type": lambda w: _core.dequantize("Q9", w.data, 64),
    "quantize": lambda w: _core.quantize("Q8_0", "F32", w.data, 33),
    "quantize infinity": lambda w: _core.quantize("Q8_0", "F32", b"\0\0\x80\x7f" * 32, 32),
    "read_gguf": lambda w: _core.read_gguf(w.path + "x"),
    "read_gguf of another file": lambda w: _core.read_gguf(__file__),
    "gguf value": lambda w: w.gguf.value(w.key),
    "bpe words": lambda w: w.bpe.part([*w.words, w.number], 10**6),
    "bpe": lambda w: w.bpe.part(w.number, 1),
    "spec": lambda w: _core.Spec("llama").set("k", w.registry),
    "spec with a long number": lambda w: _core.Spec("llama").set("k", 2**64),
    "spec with a list of two types": lambda w: _core.Spec("llama").set("k", [w.number, "a"]),
    "spec with texts and numbers": lambda w: _core.Spec("llama").set("k", ["a", w.number]),
    "spec with a surrogate": lambda w: _core.Spec("llama").set("k", ["a", "\udc00"]),
    "spec with tokens": lambda w: _core.Spec("llama").set_tokens(b"abc", w.offsets, bytes(2), [1]),
    "spec with other offsets": lambda w: _core.Spec("llama").set_tokens(b"abc", w.table, bytes(2), [1]),
    "spec with other ends": lambda w: _core.Spec("llama").set_tokens(b"abc", np.array([0, 1, 3]), bytes(2), w.key),
    "spec with a tensor": lambda w: _core.Spec("llama").add_tensor("t", "F32", (2, 2**64), 0, 0, 24),
    "spec with a draft": lambda w: _core.Spec("llama").set_draft(w.registry),
    "a registered spec": lambda w: w.spec.set("k", w.number),
    "matrix": lambda w: _core.Matrix(w.spec, "token_embd.weight"),
    "matrix of another object": lambda w: _core.Matrix(w.gguf, "token_embd.weight"),
    "search of another object": lambda w: _core.Search(w.spec, w.table, 3, True),
    "search of texts": lambda w: _core.Search(w.registry, w.words, 3, True),
    "search without queries": lambda w: _core.Search(w.registry, w.table[:0], 3, True),
    "search of NaN": lambda w: _core.Search(w.registry, w.table * np.nan, 3, True),
    "search of other vectors": lambda w: search(w).add(w.wide),
    "search among NaN": lambda w: search(w).add(w.table * np.nan),
    "search that has ended": lambda w: (made := search(w)).nearest() and made.nearest(),
    "search with a threshold": lambda w: _core.Search(w.registry, w.table, 3, True, w.words),
    "maxsim of texts": lambda w: _core.MaxSim(w.registry, w.words, w.ends, 1),
    "maxsim with offsets": lambda w: _core.MaxSim(w.registry, w.table, w.offsets, 1),
    "maxsim with other offsets": lambda w: _core.MaxSim(w.registry, w.table, w.words, 1),
    "maxsim of empty queries": lambda w: _core.MaxSim(w.registry, w.table[:0], np.array([0, 0]), 1),
    "maxsim among texts": lambda w: maxsim(w).add(w.words, w.ends, None, None),
    "maxsim among other vectors": lambda w: maxsim(w).add(w.wide, w.ends, None, None),
    "maxsim among NaN": lambda w: maxsim(w).add(w.table * np.float32(np.nan), w.ends, None, None),
    "maxsim with scales": lambda w: maxsim(w).add(w.table, w.ends, w.scales, None),
    "maxsim with other scales": lambda w: maxsim(w).add(w.table, w.ends, w.words, None),
    "maxsim with scores": lambda w: maxsim(w).add(w.table, w.ends, None, w.scales),
    "registry option": lambda w: _core.Registry(threads=1, step_budget=-1.0),
    "registry capability": lambda w: _core.Registry(queue_capacity={w.key: 1}),
    "registry capacity": lambda w: _core.Registry(queue_capacity={"vision": (1, 0)}),
    "registry policy": lambda w: _core.Registry(policy={"vision": w.key}),
    "registry chaos": lambda w: _core.Registry(chaos=w.words),
    "registry threads": lambda w: _core.Registry(threads=-1),
    "add": lambda w: w.registry.add("m", w.spec),
    "add with a type": lambda w: w.registry.add(w.key, w.spec, w.key),
    "add of another object": lambda w: w.registry.add(w.key, w.gguf),
    "add with a command": lambda w: w.registry.add(w.key, w.spec, command=w.number),
    "add with a long command": lambda w: w.registry.add(w.key, w.spec, command=[w.path] * 17),
    "add with a number in the command": lambda w: w.registry.add(w.key, w.spec, command=[w.path, w.number]),
    "commit": lambda w: w.registry.commit((w.key,), 1),
    "commit of numbers": lambda w: w.registry.commit((w.number,), 1),
    "commit of too many": lambda w: w.registry.commit((w.key,) * 1000, 1),
    "load": lambda w: w.registry.load(w.key),
    "load with a timeout": lambda w: w.registry.load("m", timeout=w.key),
    "embed of texts": lambda w: w.registry.embed("m", w.words, w.offsets),
    "embed with offsets": lambda w: w.registry.embed("m", w.ids, w.offsets + 1),
    "embed with other offsets": lambda w: w.registry.embed("m", w.ids, w.words),
    "embed with skip": lambda w: w.registry.embed("m", w.ids, w.offsets, w.ids),
    "embed of unknown ids": lambda w: w.registry.embed("m", w.ids + VOCAB, w.offsets),
    "embed of an unknown model": lambda w: w.registry.embed(w.key, w.ids, w.offsets),
    "embed with a policy": lambda w: w.registry.embed("m", w.ids, w.offsets, policy=w.key),
    "submit_embed": lambda w: w.registry.submit_embed("m", w.ids, w.offsets, outputs=8),
    "rows": lambda w: w.ticket.rows(),
    "text": lambda w: w.ticket.text(0),
    "preview": lambda w: w.ticket.preview(0),
    "bind": lambda w: w.ticket.bind(w.registry, w.number),
}


def _counts(world: SimpleNamespace) -> dict[str, int]:
    return {name: sys.getrefcount(value) for name, value in vars(world).items()}


def _core_bytes(world: SimpleNamespace) -> int:
    """Return the memory of the C core, of all registries of the process."""
    return sum(world.registry.stats()["bytes_by_tag"].values())


def _check(call: Callable[[SimpleNamespace], Any], world: SimpleNamespace, fails: bool) -> None:
    def rounds(count: int) -> None:
        for _ in range(count):
            try:
                call(world)
            except (mpool.MpoolError, TypeError, ValueError, LookupError, OverflowError):
                assert fails
            else:
                assert not fails

    rounds(ROUNDS // 10)  # caches
    for attempt in range(2):  # Python's caches may grow once; a leak also grows the second time
        gc.collect()
        counts, memory, blocks = _counts(world), _core_bytes(world), sys.getallocatedblocks()
        rounds(ROUNDS)
        gc.collect()
        grown = sys.getallocatedblocks() - blocks
        if attempt or grown < ROUNDS // 2:
            break
    assert grown < ROUNDS // 2, f"{grown} blocks of Python's memory"
    changed = {name: (counts[name], now) for name, now in _counts(world).items() if abs(now - counts[name]) > 2}
    assert not changed, changed
    waiting.until(lambda: _core_bytes(world) < memory + ROUNDS, 5)  # a worker releases a request just after its result


@pytest.mark.slow
def test_calls_keep_nothing(tmp_path: Path) -> None:
    """Successful and refused calls, in a new process: its blocks of memory are those of these calls alone."""
    found = [str(Path(waiting.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300,
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(found)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(RIGHT) + len(WRONG))]


def test_values_of_a_gguf_file(world: SimpleNamespace) -> None:
    assert world.gguf.kv == KEYS and world.gguf.keys == list(KEYS)
    for key, value in KEYS.items():
        found = world.gguf.value(key)
        assert found == value and type(found) is type(value)
    with pytest.raises(KeyError, match="none"):
        world.gguf.value("none")
    assert world.gguf.tensors[0][:3] == ("weight", "F32", (2, 3)) and world.gguf.files == [world.path]


def test_parts_of_a_vocabulary(world: SimpleNamespace) -> None:
    assert [world.bpe.find(text) for text in ("a", "abc", "", "bc")] == [FIRST, FIRST + 4, None, None]
    assert world.bpe.part(["ab"], 10**6) == ({"a": FIRST, "b": FIRST + 1, "ab": FIRST + 3}, [("a", "b")])
    assert world.bpe.part(["abc", "b"], 10**6)[1] == [("a", "b"), ("ab", "c")]
    assert world.bpe.part([], 0) == ({}, [])
    least = next(most for most in range(10**6) if world.bpe.part(["abc"], most) is not None)
    assert world.bpe.part(["abc", "abc"], least) is None is world.bpe.part(["abc", "abc"], 2 * least - 1)
    assert world.bpe.part(["abc", "abc"], 2 * least) == world.bpe.part(["abc"], least)


@pytest.mark.parametrize(("call", "message"), [
    (lambda w: w.registry.commit(("x",) * 1000, 1), "`keys` must have at most 16 items, got 1000"),
    (lambda w: _core.quantize("Q8_0", "F16", w.data, 33), "`n` must be a multiple of 1 and 32, 0 or more, got 33"),
    (lambda w: _core.quantize("Q8_0", "F32", w.data, 32), "32 items of F32 must have 128 bytes, got 256"),
    (lambda w: _core.dequantize("F16", w.data, 3), "3 items of F16 must have 6 bytes, got 256"),
    (lambda w: w.registry.embed("m", w.table, w.offsets), "`ids` must be a one-dimensional array of int32"),
    (lambda w: w.registry.embed("m", w.ids, w.table), "`offsets` must be a one-dimensional array of int64"),
    (lambda w: w.registry.embed("m", w.ids, w.offsets, w.table), "`skip` must be a one-dimensional array of int32"),
    (lambda w: w.registry.embed_images("m", w.table, w.ids), "`pixels` must be a one-dimensional array of uint8"),
    (lambda w: search(w).add(w.wide), "`vectors` must have 8 components, like the queries, got 9"),
    (lambda w: maxsim(w).add(w.wide, w.ends, None, None),
     "`documents` must have 8 components, like the queries, got 9"),
    (lambda w: maxsim(w).add(w.table, w.ends, w.scales, None),
     "`scales` must have one number for each row, 40, got 4"),
    (lambda w: maxsim(w).add(w.table, w.ends, None, w.table), "`scores` must be a writable float32 array [1, 1]"),
    (lambda w: w.registry.add("y", w.spec, command=["x"] * 17), "`command` must have 1 to 16 parts, got 17"),
    (lambda w: w.registry.load("m", timeout=-2.5),
     "`timeout` must be a number of seconds of 0 or more, or None, got -2.5"),
    (lambda w: w.registry.embed("m", w.ids, w.offsets, patience=math.nan),
     "`patience` must be a number of seconds of 0 or more, got nan"),
    (lambda w: w.registry.embed("m", w.ids, w.offsets, keep_alive=math.nan),
     "`keep_alive` must be a number of seconds of 0 or more, got nan"),
    (lambda w: w.registry.embed("m", w.ids, w.offsets, policy="none"), "`policy` must be one of default, shared"),
    (lambda w: w.registry.embed("m", w.ids, w.offsets, dimensions=5000), "`dimensions` must be 1 to "),
    (lambda w: _core.Registry(memory_bytes=-1), "`memory_bytes` must be 1 to 2^63 - 1, or 0 for the limit of the "
                                                "process, got -1"),
    (lambda w: _core.Registry(queue_capacity={"vision": (3, 1000001)}),
     "`queue_capacity` of vision must be 1 to 1,000,000, got 1000001"),
    (lambda w: w.ticket.rows(), "the request did not ask for this output: `outputs` must have bit 4, got 1"),
    (lambda w: w.ticket.text(0), "this ticket is for a request of text_embedding, not of text_to_text"),
])
def test_messages_have_their_numbers(world: SimpleNamespace, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(mpool.MpoolError) as caught:
        call(world)
    assert message in str(caught.value)


def test_a_notifier_gives_all_ids_at_once(world: SimpleNamespace) -> None:
    """More than the 256 that the core takes at a time."""
    notifier = _core.Notifier()
    tickets = [world.registry.submit_embed("m", world.ids, world.offsets) for _ in range(300)]
    for number, ticket in enumerate(tickets):
        assert ticket.wait(60)
        ticket.bind(notifier, number)
    assert sorted(notifier.take()) == list(range(300)) and notifier.take() == []
    notifier.close()


@pytest.mark.parametrize(("name", "arguments"), [
    ("text", (0,)), ("sampled_ids", (0, 0)), ("tokens", (0,)), ("top_logprobs", (0,)), ("mask", (0, 0, b"1234")),
    ("usage", ()), ("prompt_logits", ()), ("capture", ()), ("image_rows", ()), ("image_progress", ()),
    ("preview", (0,)), ("generated_images", ())])
def test_a_ticket_has_results_of_its_capability_alone(world: SimpleNamespace, name: str, arguments: Any) -> None:
    with pytest.raises(mpool.WrongCapability, match="this ticket is for a request of text_embedding, not of text_to_"):
        getattr(world.ticket, name)(*arguments)


def main() -> int:
    """Check each call in a folder of the command line. Prints the number of calls that keep nothing."""
    world, passed = make_world(Path(sys.argv[1])), 0
    for fails, cases in ((False, RIGHT), (True, WRONG)):
        for name, call in cases.items():
            try:
                _check(call, world, fails)
                passed += 1
            except AssertionError:
                print(f"{name}, which {'is refused' if fails else 'succeeds'}:", file=sys.stderr)
                traceback.print_exc()
    print(passed)
    return passed < len(RIGHT) + len(WRONG)


if __name__ == "__main__":
    raise SystemExit(main())
