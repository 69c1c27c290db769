"""The modules below all others: durations, arguments, errors, errors of the system, the interpreter of child processes,
and what a configuration passes to the core."""

from __future__ import annotations

import errno
import inspect
import math
import pickle
import re
import sys
import types
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy as np
import pytest

import mpool
from mpool import chaos, checks, config, errors
from mpool.host import interpreter, resources
from mpool.durations import seconds_of
from mpool.runtime.history import PoolHistory, TrackedRequest
from mpool.tasks import streams


# ---- durations -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("given", ["", "-", "m", "5 m", "5x", "5m!", "x5m", "--5", "1e3", "5.", ".5", "+5", True,
                                   False, math.nan, None, [], b"5"])
def test_other_durations_are_refused(given: Any) -> None:
    allowed = 'a number of seconds (below 0: forever), or a text such as "5m", "1h30m" or "300ms"'
    with pytest.raises(mpool.InvalidArgument, match=re.escape(f"must be {allowed}, got")) as caught:
        seconds_of(given, "some_name")
    assert (caught.value.param, caught.value.got) == ("some_name", checks.shown(given))


@pytest.mark.parametrize("given", ["9" * 65, "1h" * 33, " " * 64 + "5", "1h" * 2_000_000], ids=len)
def test_long_durations_are_refused_before_they_are_matched(given: str) -> None:
    """The matcher of a text with units kept about 200 bytes for each part, and took seconds for millions of parts."""
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(mpool.InvalidArgument, match="at most 64 characters such as") as caught:
            seconds_of(given, "keep_alive")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (caught.value.param, caught.value.got) == ("keep_alive", checks.shown(given)) and peak < 200_000
    assert len(caught.value.message) < 250


# ---- values in messages --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value, shown", [
    (math.nan, "NaN"), (math.inf, "inf"), (2**1024 - 1, repr(2**1024 - 1)[:57] + "..."),
    (2**1024, "a number of 1,025 bits"), (np.zeros((2, 3)), "an array of shape (2, 3)"), (np.float32(2), "2.0"),
    ("x" * 58, repr("x" * 58)), ("x" * 59, "'" + "x" * 56 + "..."), (b"x", "b'x'"), (None, "None"), (True, "True"),
    ([1], "list"), ({}, "dict"), (object, "type")])
def test_values_in_messages(value: Any, shown: str) -> None:
    found = checks.shown(value)
    assert (found == shown or found in ("np.float32(2.0)",)) and len(found) <= 60


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_keeps_its_fields_in_a_pickle(name: str) -> None:
    """Each parameter of a class becomes the attribute of that name, and survives a pickle."""
    cls = getattr(errors, name)
    given: dict[str, Any] = {one: f"the {one}" for one in inspect.signature(cls.__init__).parameters
                             if one not in ("self", "message")}
    for error in (cls("words", **given), pickle.loads(pickle.dumps(cls("words", **given)))):
        assert type(error) is cls and error.message == "words"
        assert {one: getattr(error, one) for one in given} == given
        assert str(error) == "the key: words. the hint"


def test_messages_of_errors_with_places() -> None:
    assert str(mpool.errors.FormatError(file="f", field="x", got=1, allowed="2")) == "f: x is 1, allowed: 2"
    error = mpool.errors.FormatError(file="f", offset=0, field="x", got=1, allowed="2")
    assert str(error) == "f at byte 0: x is 1, allowed: 2"
    assert str(mpool.ContextOverflow(tokens=7, limit=5)) == "the input has 7 tokens, the model accepts at most 5"


# ---- errors of the system ------------------------------------------------------------------------------------------

def _caused(error: BaseException, cause: BaseException, depth: int) -> BaseException:
    """Return an error that a cause explains, with other errors between them."""
    for number in range(depth):
        between = ValueError(str(number))
        between.__context__ = cause
        cause = between
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error, cls, words, hint", [
    (MemoryError(), mpool.MemoryExhausted, "Python could not allocate memory", "ulimit -v"),
    (MemoryError("more"), mpool.MemoryExhausted, "could not allocate memory: more", "ulimit -v"),
    (OSError(errno.ENOMEM, "no"), mpool.MemoryExhausted, "could not allocate memory", "ulimit -v"),
    (RuntimeError("Can't allocate lock"), mpool.MemoryExhausted, "Can't allocate lock", "ulimit -v"),
    (ImportError("x: failed to map segment from y"), mpool.MemoryExhausted, "failed to map", "ulimit -v"),
    (_caused(ImportError("x"), MemoryError(), 0), mpool.MemoryExhausted, "could not allocate", "ulimit -v"),
    (_caused(ImportError("x"), MemoryError(), 9), mpool.MemoryExhausted, "could not allocate", "ulimit -v"),
    (_caused(ImportError("x"), MemoryError(), 10), mpool.Unsupported, "could not be imported: x", "pip install"),
    (_caused(RuntimeError("x"), MemoryError(), 0), None, "", ""),
    (ImportError("no module x"), mpool.Unsupported, "a module could not be imported: no module x", "--force-reinstall"),
    (ImportError("cannot load module more than once per process"), mpool.Unsupported, "more than once per process",
     "Restart Python"),
    (ImportError("x", name="mpool._core"), None, "", ""),
    (OSError(errno.EMFILE, "Too many", "/f"), mpool.errors.FileError, "/f: Too many", "ulimit -n"),
    (OSError(errno.ENFILE, "Too many"), mpool.errors.FileError, "Too many", "ulimit -n"),
    (OSError(errno.ENOSPC, "Full", b"/f"), mpool.errors.FileError, "/f: Full", "Free space on the disk"),
    (OSError(errno.EIO, "Broken"), mpool.errors.FileError, "Broken", ""),
    (OSError("of a caller"), None, "", ""),
    (RuntimeError("can't start new thread"), mpool.SpawnFailed, "a thread could not be started: can't start", ""),
    (RuntimeError("cannot schedule new futures after shutdown"), mpool.ShuttingDown, "interpreter is shutting",
     ""),
    (RuntimeError("other"), None, "", ""), (ValueError("cannot allocate memory"), None, "", ""),
    (mpool.errors.FileError("words"), None, "", "")])
def test_errors_of_the_system(error: Exception, cls: Any, words: str, hint: str) -> None:
    found = resources.error_of(error)
    if cls is None:
        assert found is None
        return
    assert type(found) is cls and words in found.message and hint in (found.hint or "")

    @resources.typed
    def function() -> None:
        raise error

    with pytest.raises(cls) as caught:
        function()
    assert caught.value.__cause__ is error


# ---- the interpreter of child processes ----------------------------------------------------------------------------

@pytest.mark.parametrize("executable, chosen, frozen, path, reason", [
    ("/usr/bin/python3.11", None, False, "/usr/bin/python3.11", ""), ("/x/PYPY3", None, False, "/x/PYPY3", ""),
    ("/x/graalpy", None, False, "/x/graalpy", ""), ("/x/py", None, False, "/x/py", "does not look like a Python"),
    ("/x/app", None, False, "/x/app", "sys.executable is /x/app, which does not look like a Python interpreter"),
    ("", None, False, "", "sys.executable is empty"), (None, None, False, "", "sys.executable is empty"),
    ("/x/app", "/y/mine", False, "/y/mine", ""), ("/x/app", b"/y/mine", True, "/y/mine", ""),
    ("/x/python", None, True, "/x/python", "this application is frozen"),
    ("/x/python", "/x/python", True, "/x/python", "this application is frozen"),
    ("", "/y/python", False, "/y/python", ""),
    ("/x/app", "", False, "/x/app", "does not look like a Python")])
def test_the_interpreter(monkeypatch: pytest.MonkeyPatch, executable: Any, chosen: Any, frozen: bool, path: str,
                         reason: str) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setitem(sys.modules, "multiprocessing.spawn", SimpleNamespace(
        get_executable=lambda: executable if chosen is None else chosen))
    found = interpreter.find()
    assert found[0] == path and reason in found[1] and bool(found[1]) == bool(reason)


# ---- injected faults -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("given, rates", [
    ("fail=1", (0, 1, 0, 0, 0, 0)), ("seed=0,stall=0.25", (0, 0, 0.25, 0, 0, 0)),
    ({"seed": 2**64 - 1, "die": 1.0}, (2**64 - 1, 0, 0, 1, 0, 0)),
    ({"slow": 0.5, "memory": 0.5}, (0, 0, 0, 0, 0.5, 0.5)),
    ({"seed": np.int64(5), "fail": np.float32(0.25), "die": np.int32(0)}, (5, 0.25, 0, 0, 0, 0)),
    ({"seed": 1, "fail": 0, "stall": 0.1, "die": 0.2, "slow": 0.3, "memory": 0.4}, (1, 0, 0.1, 0.2, 0.3, 0.4))])
def test_probabilities_of_faults(given: Any, rates: tuple[float, ...]) -> None:
    assert chaos.chaos_of(given) == rates


@pytest.mark.parametrize("given, words", [
    ({"seed": -1, "fail": 1}, "`seed` must be an integer from 0 to 2**64 - 1, got -1"),
    ({"seed": 2**64, "fail": 1}, "`seed` must be"), ({"seed": True, "fail": 1}, "`seed` must be"),
    ({"seed": 1.0, "fail": 1}, "`seed` must be"),
    ({"fail": -0.01}, "`fail` must be a probability from 0 to 1, got -0.01"),
    ({"die": 1.01}, "`die` must be"), ({"slow": True}, "`slow` must be"), ({"memory": "1"}, "`memory` must be"),
    ({"other": 1}, "'other' is unknown"), ("fail=1,fail=1", "'fail' is given twice"),
    ("fail", "'fail' is not name=number"),
    ("fail=", "is not name=number"), ("=1", "is not name=number"), ({"fail": 0.6, "die": 0.41}, "at most 1, got 1.01"),
    ({"seed": 3}, "every probability is 0"), (5, "neither a string nor a mapping")])
def test_invalid_probabilities_of_faults(given: Any, words: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=re.escape(words)):
        chaos.chaos_of(given)


# ---- configuration -------------------------------------------------------------------------------------------------

#: Field -> value, and what the core gets for it.
PASSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "threads": (3, {"threads": 3}), "memory_bytes": (5, {"memory_bytes": 5}),
    "keep_alive": ("2m", {"keep_alive": 120.0}),
    "max_workers_per_model": (7, {"max_workers": 7}), "breaker_threshold": (0, {"breaker_threshold": -1}),
    "batch_wait": (0.001, {"batch_wait": 0.001}),
    "request_timeout": (9, {"request_timeout": 9.0}), "predictive_scaling": (True, {"predictive_scaling": True}),
    "scale_timeout": (True, {"scale_timeout": True}), "background": (True, {"background": True}),
    "policy": ("shared", {"policy": dict.fromkeys(config.CAPABILITIES, "shared")}),
    "chaos": ("fail=0.5", None),
    **{name: (11, {name: 11.0}) for name in ("shutdown_grace", "load_timeout", "load_ceiling", "stall_timeout",
                                             "maintenance_interval", "breaker_window", "breaker_rest")}}


@pytest.mark.parametrize("name", [name for name, (_, wanted) in PASSED.items() if wanted is not None])
def test_an_option_reaches_the_core(name: str) -> None:
    """The option changes one argument of the core and no other."""
    value, wanted = PASSED[name]
    usual = mpool.PoolConfig()._registry_options()
    assert mpool.PoolConfig(**{name: value})._registry_options() == usual | wanted and usual.items() != wanted.items()


def test_options_that_are_left_to_the_core() -> None:
    usual = mpool.PoolConfig()._registry_options()
    assert not {"batch_wait", "chaos"} & set(usual) and usual["request_timeout"] == 30.0
    assert "request_timeout" not in mpool.PoolConfig(request_timeout=None)._registry_options()
    assert usual["breaker_threshold"] == 5 and usual["keep_alive"] == 300.0 and usual["policy"] == {}


@pytest.mark.parametrize("field, capability", [
    (field, capability) for capability, names in config.CAPACITIES.items() for field in names])
def test_capacities_of_queues(field: str, capability: str) -> None:
    usual = mpool.PoolConfig()._registry_options()["queue_capacity"]
    found = mpool.PoolConfig(**{field: 13})._registry_options()["queue_capacity"]
    assert {name for name in usual if usual[name] != found[name]} == {capability}
    place = config.CAPACITIES[capability].index(field)
    pair = found[capability] if isinstance(found[capability], tuple) else (found[capability],)
    assert pair[place] == 13


@pytest.mark.parametrize("name, bad, allowed", [
    ("request_timeout", 0, "a number of seconds above 0, or None"),
    ("request_timeout", True, "a number of seconds above"),
    ("request_timeout", "5", "a number of seconds above 0, or None"),
    ("request_timeout", math.nan, "a number of seconds"),
    ("isolation", "fork", "one of thread, process"), ("weights", "big", "one of auto, mapped, packed"),
    ("fail_fast", 1, "True or False"), ("predictive_scaling", None, "True or False"),
    ("scale_timeout", "yes", "True or False"), ("offline", 1, "True, False or None"),
    ("background", 10, "True or False"),
    ("policy", "best", "one of shared, pack, p2c, sequential, or a dict"),
    ("policy", np.array(["pack", "p2c"]), "one of shared, pack, p2c, sequential, or a dict"),
    ("keep_alive", "soon", "a number of seconds (below 0: forever)"),
    ("threads", 257, "an integer from 0 to 256"), ("batch_wait", 61, "a number of seconds from 0.0 to 0.002")])
def test_refused_options_of_a_configuration(name: str, bad: Any, allowed: str) -> None:
    with pytest.raises(mpool.InvalidArgument) as caught:
        mpool.PoolConfig(**{name: bad})
    assert (caught.value.param, caught.value.got) == (name, checks.shown(bad))
    assert (caught.value.allowed or "").startswith(allowed)


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    given = {"threads": np.int64(2), "load_timeout": np.float32(2.5), "request_timeout": np.int32(9)}
    made = mpool.PoolConfig(**given, keep_alive=np.int64(7))  # type: ignore[arg-type]
    assert made == mpool.PoolConfig(threads=2, load_timeout=2.5, request_timeout=9, keep_alive=7)
    assert {name: type(getattr(made, name)) for name in given} == {
        "threads": int, "load_timeout": float, "request_timeout": float}
    assert made._registry_options()["keep_alive"] == 7.0
    for name, bad in (("threads", np.float64(2)), ("threads", np.bool_(True)), ("load_timeout", np.float32("nan"))):
        with pytest.raises(mpool.InvalidArgument, match=f"`{name}` must be"):
            mpool.PoolConfig(**{name: bad})


def test_a_request_timeout_beyond_a_float_is_no_limit() -> None:
    assert mpool.PoolConfig(request_timeout=10**400)._registry_options()["request_timeout"] == math.inf


def test_policies_of_capabilities() -> None:
    given = {"vision": "pack", "text_embedding": "shared"}
    assert mpool.PoolConfig(policy=given)._registry_options()["policy"] == given
    for bad in ({"audio": "pack"}, {"vision": "best"}):
        (capability, policy), = bad.items()
        with pytest.raises(mpool.InvalidArgument) as caught:
            mpool.PoolConfig(policy=bad)
        assert (caught.value.param, caught.value.got) == ("policy", f"{capability!r}: {policy!r}")
    with pytest.raises(mpool.InvalidArgument, match=r"'vision': an array of shape \(2,\)"):
        mpool.PoolConfig(policy={"vision": np.array(["pack", "p2c"])})  # type: ignore[dict-item]
    assert hash(mpool.PoolConfig(policy=given)) == hash(mpool.PoolConfig(policy=dict(reversed(given.items()))))
    assert hash(mpool.PoolConfig(threads=1)) != hash(mpool.PoolConfig(threads=2))
    assert {field.name for field in fields(mpool.PoolConfig)} >= set(PASSED) and replace(mpool.PoolConfig(), threads=1)


class Ticket:
    """A finished ticket."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def times(self) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0

    def check(self) -> None:
        pass


class Reader:
    """Gives two items, then nothing or an error."""

    ended = True

    def __init__(self, error: Exception | None = None) -> None:
        self.items, self.error = [1, 2], error

    def take(self) -> list[int]:
        found, self.items = self.items, []
        return found

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def ticket_stream(reader: Reader) -> Any:
    """Return the stream of a finished ticket."""
    ticket: Any = Ticket()
    request: Any = types.SimpleNamespace(entry=types.SimpleNamespace(key="m"))
    return streams.TicketStream(ticket, reader, request, TrackedRequest(PoolHistory(), "", {}), None)


@pytest.mark.parametrize("error", [None, mpool.Timeout("too late")], ids=["complete", "failed"])
def test_a_loop_to_the_end_of_a_stream_runs_no_code_in_del(error: Exception | None) -> None:
    """Python prints and drops a KeyboardInterrupt in ``__del__``: a Ctrl-C at the end of a loop was lost."""
    stream = ticket_stream(Reader(error))
    seen, called = [], []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        for item in stream:
            seen.append(item)
    except mpool.Timeout as found:
        assert found.with_traceback(None) is error  # the traceback keeps the iterator
    finally:
        sys.setprofile(None)
    assert seen == [1, 2] and "__next__" in called and "__del__" not in called


def test_a_dropped_iterator_cancels_its_stream() -> None:
    stream = ticket_stream(Reader())
    for _ in stream:
        break
    assert stream._exhausted and not stream._ready
    ended = iter(stream)
    assert list(ended) == [] and type(ended) is streams.StreamIterator and list(ended) == []


@pytest.mark.parametrize("cancelled, done, state", [(True, True, "cancelled"), (True, False, "cancelled"),
                                                    (False, True, "done"), (False, False, "running")])
def test_states_of_streams(cancelled: bool, done: bool, state: str) -> None:
    stream: Any = object.__new__(streams.Stream)
    stream._cancelled, stream._key, stream._ticket = cancelled, "m", SimpleNamespace(done=lambda: done)
    assert repr(stream) == f"<mpool.Stream of m, {state}>"
