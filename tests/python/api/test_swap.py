"""swap() and register(replace=True): another model takes over a name, and no request fails or mixes the two models."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import aio
from mpool.errors import (
    FormatError,
    InvalidArgument,
    MemoryExhausted,
    MpoolError,
    SendError,
    ShuttingDown,
    Timeout,
    UnknownModel,
    WrongCapability,
)
from mpool.runtime import swapping
from adapterfiles import matrices, save_peft, smaller
from childprograms import forked

TEXT: dict[str, Any] = dict(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [{"role": "user", "content": "Hello"}]
#: Chat templates of the two models: their prompts have another length.
SHORT = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEMPLATE = "{% for message in messages %}one two three four {{ message.content }}{% endfor %}"


@pytest.fixture
def own() -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as made:
        yield made


@pytest.fixture(scope="module")
def broken(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT whose description is valid, but whose weights contain NaN-free garbage of a wrong size at load."""
    folder = tmp_path_factory.mktemp("broken") / "bert"
    shutil.copytree(bert, folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    return folder


def _answers(pool: mpool.Pool, ref: Path, **settings: Any) -> Any:
    pool.register("expected" + str(len(pool._names.by_key)), ref, **settings)
    return "expected" + str(len(pool._names.by_key) - 1)


def _two(llama: Path, qwen2: Path) -> list[tuple[Path, dict[str, Any]]]:
    return [(llama, {"chat_template": SHORT}), (qwen2, {"chat_template": TEMPLATE})]


def _of(completion: Any) -> tuple[str, int]:
    """Return what tells the two models apart: the templates give prompts of different lengths."""
    return completion.text, completion.usage.prompt_tokens


def _hammer(threads: int, call: Callable[[], Any], work: Callable[[], None]) -> tuple[list[Any], list[BaseException]]:
    """Run ``call`` again and again in several threads while ``work`` runs once. Returns all results and errors."""
    found: list[Any] = []
    errors: list[BaseException] = []
    stop = threading.Event()

    def member() -> None:
        while not stop.is_set():
            try:
                found.append(call())
            except BaseException as error:
                errors.append(error)
                return

    crowd = [threading.Thread(target=member) for _ in range(threads)]
    for one in crowd:
        one.start()
    try:
        work()
    finally:
        stop.set()
        for one in crowd:
            one.join()
    return found, errors


# ---- no request fails ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_vectors_are_those_of_one_model(own: mpool.Pool, bert: Path, isolation: Any) -> None:
    """The two models pool differently; each vector is that of one of the two, and after swap() only the new one's."""
    texts = ["one text", "another text", "a third text"]
    models = [{"pooling": "cls"}, {"pooling": "max"}]
    wanted = [own.embed(texts, _answers(own, bert, **settings)) for settings in models]
    assert not np.array_equal(*wanted)
    own.register("m", bert, **models[0], isolation=isolation)
    after: list[Any] = []

    def work() -> None:
        for turn in range(1, 4 if isolation == "process" else 7):
            own.swap("m", bert, **models[turn % 2])
            after.append(np.array_equal(own.embed(texts, "m"), wanted[turn % 2]))

    found, errors = _hammer(4, lambda: own.embed(texts, "m"), work)
    assert not errors and all(after)
    seen = [[np.array_equal(rows, one) for one in wanted] for rows in found]
    assert all(any(row) for row in seen) and all(any(row[i] for row in seen) for i in (0, 1))
    assert own.metrics()["errors"] == 0


def test_prompts_never_reach_another_model(own: mpool.Pool, llama: Path, qwen2: Path) -> None:
    wanted = [_of(own.chat(PROMPT, _answers(own, ref, **settings), **TEXT)) for ref, settings in _two(llama, qwen2)]
    assert wanted[0][0] != wanted[1][0] and wanted[0][1] != wanted[1][1]
    model = own.register("m", llama, chat_template=SHORT)
    model.chat(PROMPT, **TEXT)

    def work() -> None:
        for turn in range(1, 9):
            ref, settings = _two(llama, qwen2)[turn % 2]
            own.swap("m", ref, **settings)
            assert _of(model.chat(PROMPT, **TEXT)) == wanted[turn % 2]

    calls = [lambda: _of(model.chat(PROMPT, **TEXT)),
             lambda: list(model.chat(PROMPT, stream=True, **TEXT)) and None,
             lambda: _of(own.submit("text_to_text", messages=PROMPT, model="m", **TEXT).result())]
    turn = iter(range(1 << 30))
    found, errors = _hammer(3, lambda: calls[next(turn) % 3](), work)
    assert not errors
    assert {text for text in found if text is not None} <= set(wanted)


def test_request_that_was_prepared_for_the_old_model_is_prepared_again(own: mpool.Pool, llama: Path,
                                                                       qwen2: Path) -> None:
    """The swap happens exactly between rendering and submission, in each way to submit."""
    from mpool.tasks import requests

    wanted = _of(own.chat(PROMPT, _answers(own, qwen2, chat_template=TEMPLATE), **TEXT))
    own.register("m", llama)
    own.chat(PROMPT, "m", **TEXT)
    prepare, swapped = requests.chat_request, 0

    def late(*args: Any) -> Any:
        nonlocal swapped
        made = prepare(*args)
        if not swapped:
            swapped += 1
            own.swap("m", qwen2, chat_template=TEMPLATE)
        return made

    ways: list[Callable[[], Any]] = [
        lambda: own.chat(PROMPT, "m", **TEXT),
        lambda: own.submit("text_to_text", messages=PROMPT, model="m", **TEXT).result(),
        lambda: asyncio.run(_chatted(own)),
    ]
    for way in ways:
        own.swap("m", llama, chat_template=SHORT)
        own.chat(PROMPT, "m", **TEXT)
        swapped = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(requests, "chat_request", late)
            before = own.metrics()
            assert _of(way()) == wanted and swapped == 1
            after = own.metrics()
            assert (after["errors"], after["total_requests"]) == (before["errors"], before["total_requests"] + 1)


async def _chatted(pool: mpool.Pool) -> Any:
    return await aio.chat(PROMPT, "m", pool=pool, **TEXT)


def test_accepted_request_is_completed_by_the_old_model(own: mpool.Pool, llama: Path, qwen2: Path) -> None:
    long = {**TEXT, "max_tokens": 200}
    wanted = own.chat(PROMPT, _answers(own, llama), **long).text
    own.register("m", llama)
    stream = own.chat(PROMPT, "m", stream=True, **long)
    own.swap("m", qwen2)
    assert stream.result().text == wanted


def test_iterator_does_not_mix_two_models(own: mpool.Pool, bert: Path) -> None:
    own.register("m", bert, pooling="cls")

    def texts() -> Iterator[str]:
        for at in range(20_000):
            if at == 15_000:
                own.swap("m", bert, pooling="max")
            yield f"text {at}"

    with pytest.raises(SendError, match="replaced"):
        for _ in own.embed_iter(texts(), "m"):
            pass


# ---- handles and names -----------------------------------------------------------------------------------------------

def test_handles_follow_the_name(own: mpool.Pool, bert: Path) -> None:
    model = own.register("m", bert, max_length=8)
    numbers, copy = {model: 1}, pickle.dumps(model)
    found = own.swap(model, bert, max_length=12)
    assert found == model and hash(found) == hash(model) and numbers[found] == 1
    assert model.context_length == 12 and own.get("m").context_length == 12
    assert pickle.loads(copy).context_length == 12  # the pool and its name exist in this process
    assert [row.model for row in own.ps()] == ["m"]


def test_names_of_a_replaced_model_lead_to_the_new_one(own: mpool.Pool, bert: Path) -> None:
    """A load(name=...) that began before the swap names the model after it."""
    own.register("m", bert)
    old = own.get("m")._entry
    own.swap("m", bert, normalize=False)
    own._names.by_name["late"] = old
    assert np.array_equal(own.embed("a", "late", timeout=30), own.embed("a", "m"))


def test_a_fork_in_the_middle_of_a_swap(own: mpool.Pool, bert: Path) -> None:
    """The core of the child has the new model, but its names lead to the old one, which its next request loads."""
    old = own.register("m", bert)._entry
    wanted = own.embed("a", "m")
    own.swap("m", bert, normalize=False)
    new = old.replacement.successor
    old.replacement.successor = None
    own._names.hand_over(new, old)

    def child() -> bool:
        signal.alarm(20)
        vectors = [own.embed("a", "m"), asyncio.run(aio.embed("a", "m", pool=own))]
        return all(np.array_equal(vector, wanted) for vector in vectors)

    assert forked(child)
    with pytest.raises(SendError):
        own.embed("a", "m")
    old.replacement.successor = new  # the end of the swap


def test_an_unload_that_began_before_a_swap_keeps_the_new_model(own: mpool.Pool, bert: Path) -> None:
    own.register("m", bert)
    own.embed("a", "m")
    old = own.get("m")._entry
    own.swap("m", bert, normalize=False)
    wanted, loads = own.embed("a", "m"), own.metrics()["loads"]
    swapping.renew(old, None)  # unload() calls this if the files of the old model changed
    assert np.array_equal(own.embed("a", "m"), wanted) and own.metrics()["loads"] == loads


def test_pin_keep_alive_and_load_options_stay(own: mpool.Pool, llama: Path, qwen2: Path) -> None:
    own.register("m", llama, kv_dtype="int8")
    own.load("m", pin=True, keep_alive=77)
    own.swap("m", qwen2)
    row = next(row for row in own.ps() if row.model == "m")
    assert (row.pinned, row.keep_alive, row.state) == (True, 77, "ready")
    assert own.get("m")._entry.loading.kv_dtype == "int8"


SETTINGS: dict[str, Any] = {"prompts": {"q": "query: ", "d": "text: "}, "default_prompt_name": "q", "pooling": "max",
                            "normalize": False, "max_length": 9, "weights": "mapped"}


def _settings(model: Any) -> Any:
    """Return the settings of a name that requests see."""
    found, entry = model.description.embedding, model._entry
    return (found.prompts, found.default_prompt_name, found.pooling, found.normalize, found.max_tokens,
            (entry.setup.runs_in, entry.setup.weights),
            sorted((row.model, row.pinned, row.keep_alive) for row in entry.pool.ps()))


def test_a_swap_keeps_each_setting_that_it_does_not_name(own: mpool.Pool, bert: Path, tmp_path: Path) -> None:
    """The settings of an embedding model: each swap names one of them, and the others stay."""
    new = tmp_path / "new"
    shutil.copytree(bert, new)
    model = own.register("m", bert, **SETTINGS)
    own.load(model, pin=True, keep_alive=77)
    own.load(model, pin=True, compute="float32")
    before, text = _settings(model), model.embed("a b c d e f g h")
    for ref in (bert, new):
        own.swap("m", ref)
        assert _settings(model) == before and np.array_equal(model.embed("a b c d e f g h"), text)
    for name, value in {"default_prompt_name": "d", "pooling": "cls", "normalize": True, "max_length": 8,
                        "weights": "packed", "isolation": "process", "prompts": {"q": "other: "}}.items():
        own.register("n", bert, **{**SETTINGS, name: value}, replace=True)
        own.swap("m", bert, **{name: value})
        assert _settings(model)[:6] == _settings(own.get("n"))[:6]
        assert _settings(model)[6] == before[6]
        own.swap("m", bert, **{name: {"isolation": "thread"}.get(name, SETTINGS.get(name))})
    own.register("m", bert, replace=True)  # names the whole model
    assert _settings(model)[:6] == _settings(own.register("plain", bert))[:6]


def test_a_swap_keeps_adapters_and_the_draft_model(own: mpool.Pool, llama: Path, tmp_path: Path) -> None:
    folder = save_peft(tmp_path / "adapter", matrices(llama, 8, 3), 16.0)
    model = own.register("m", llama, adapters={"one": folder}, draft=llama)
    wanted = [own.generate("Once", "m", adapter=adapter, **TEXT).token_ids for adapter in ("one", None)]
    assert wanted[0] != wanted[1]
    own.swap("m", llama)
    assert [own.generate("Once", "m", adapter=adapter, **TEXT).token_ids for adapter in ("one", None)] == wanted
    assert model._entry.loading.draft == str(llama) and [row.draft for row in own.ps()] == [str(llama)]
    other = smaller(llama, tmp_path / "other")
    with pytest.raises(MpoolError) as caught:  # the adapter does not fit the other model: refused, and not dropped
        own.swap("m", other)
    assert "`adapters`" in (caught.value.hint or "")
    assert own.generate("Once", "m", adapter="one", **TEXT).token_ids == wanted[0]
    own.swap("m", other, adapters={}, draft=False)
    assert (model._entry.loading.adapters, model._entry.loading.draft) == ((), False)


def test_a_model_that_is_read_again_keeps_its_settings(own: mpool.Pool, bert: Path, tmp_path: Path) -> None:
    """Its files changed. A request adds the key of a compute type that load() did not name: pinned as before."""
    folder = tmp_path / "bert"
    shutil.copytree(bert, folder)
    model = own.register("m", folder, **SETTINGS)
    for compute in ("auto", "float32"):
        own.load(model, pin=True, keep_alive=77, compute=compute)
    before = _settings(model)
    weights = folder / "model.safetensors"
    (tmp_path / "copy").write_bytes(weights.read_bytes())
    (tmp_path / "copy").replace(weights)
    own.load(model)
    model.embed("a", compute="float32")
    assert _settings(model) == before


def test_every_compute_type_is_replaced(own: mpool.Pool, bert: Path) -> None:
    own.register("m", bert, pooling="cls")
    old = [own.embed("a", "m", compute=compute) for compute in ("float32", "bfloat16")]
    own.swap("m", bert, pooling="max")
    new = [own.embed("a", "m", compute=compute) for compute in ("float32", "bfloat16")]
    assert not any(np.array_equal(a, b) for a, b in zip(old, new))


def test_both_networks_of_an_image_model_are_replaced(own: mpool.Pool) -> None:
    image = np.zeros((32, 32, 3), np.uint8)
    own.register("m", "mpool:digits-clip")
    first = own.embed_image(image, "m"), own.embed("seven", "m")
    own.swap("m", "mpool:digits-clip", normalize=True)
    second = own.embed_image(image, "m"), own.embed("seven", "m")
    assert not any(np.array_equal(a, b) for a, b in zip(first, second))


def test_register_replace(own: mpool.Pool, bert: Path) -> None:
    model = own.register("m", bert, pooling="cls", replace=True)  # a new name
    assert own.register("m", bert, pooling="max", replace=True) == model
    assert not own.ps()  # nothing was loaded, so nothing is
    first = model.embed("a")
    own.register("m", bert, pooling="cls", replace=True)
    assert [row.state for row in own.ps()] == ["ready"] and not np.array_equal(model.embed("a"), first)
    with pytest.raises(InvalidArgument, match="replace"):
        own.register("m", bert, replace=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="unused name"):
        own.register("m", bert)
    with pytest.raises(InvalidArgument, match="unused name"):
        own.register("all-MiniLM-L6-v2", bert, replace=True)


# ---- refused swaps ---------------------------------------------------------------------------------------------------

def test_names_that_cannot_be_swapped(own: mpool.Pool, bert: Path) -> None:
    own.register("models", bert)
    own.load(bert, name="alias")
    with pytest.raises(UnknownModel, match="register") as caught:
        own.swap("model", bert)
    assert "models" in (caught.value.hint or "")
    for name in ("alias", "all-MiniLM-L6-v2", own.get(bert)):
        with pytest.raises(InvalidArgument, match="register"):
            own.swap(name, bert)
    with pytest.raises(InvalidArgument, match="`model`"):
        own.swap(3, bert)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="ref"):
        own.swap("models", 3)  # type: ignore[arg-type]


def test_bad_new_model_leaves_the_old_one(own: mpool.Pool, bert: Path, llama: Path, broken: Path,
                                          tmp_path: Path) -> None:
    own.register("m", bert)
    wanted = own.embed("a", "m")

    def work() -> None:
        for ref, error in ((broken, FormatError), (tmp_path / "none", MpoolError), (llama, WrongCapability)):
            with pytest.raises(error):
                own.swap("m", ref)
        with pytest.raises(InvalidArgument, match="pooling"):
            own.swap("m", bert, pooling="none")

    found, errors = _hammer(2, lambda: own.embed("a", "m"), work)
    assert not errors and all(np.array_equal(rows, wanted) for rows in found)
    own.swap("m", bert, normalize=False)  # a later swap succeeds
    assert not np.array_equal(own.embed("a", "m"), wanted)


def test_model_that_fails_to_load_leaves_the_old_one(own: mpool.Pool, bert: Path, tmp_path: Path) -> None:
    """The files are valid when they are described, and gone when the core loads them."""
    from mpool.runtime import swapping

    folder = tmp_path / "bert"
    shutil.copytree(bert, folder)
    own.register("m", bert)
    wanted = own.embed("a", "m")
    stage = swapping._Swap._stage

    def spoil(self: Any) -> Any:
        found = stage(self)
        (folder / "model.safetensors").write_bytes(b"")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swapping._Swap, "_stage", spoil)
        with pytest.raises(MpoolError):
            own.swap("m", folder)
    assert np.array_equal(own.embed("a", "m"), wanted)
    assert own.health().status == "healthy"
    own.swap("m", bert, normalize=False)


def test_two_models_must_fit_into_memory(bert: Path) -> None:
    """Without room for both, swap() raises, and the old model stays loaded and serves."""
    with mpool.Pool(mpool.PoolConfig(memory_bytes=4 << 30)) as measure:  # a budget without the models of other pools
        measure.register("m", bert)
        wanted = measure.embed("a", "m")
        row = measure.registry.entries()[0]
        limit = row["predicted_bytes"] + row["worker"][0]["predicted_bytes"] + measure.metrics()["memory_used"] // 4
    with mpool.Pool(mpool.PoolConfig(memory_bytes=limit)) as pool:
        pool.register("m", bert)
        assert np.array_equal(pool.embed("a", "m"), wanted)
        with pytest.raises(MemoryExhausted) as caught:
            pool.swap("m", bert, normalize=False)
        assert "both must fit" in (caught.value.hint or "")
        assert pool.metrics()["loads"] == 1  # the old model was not evicted to make room
        assert np.array_equal(pool.embed("a", "m"), wanted)
        pool.register("n", bert)  # the old model may be evicted again
        pool.embed("a", "n")
        pool.unload("n")
        pool.unload("m")
        pool.swap("m", bert, normalize=False)
        assert not np.array_equal(pool.embed("a", "m"), wanted)


def test_timeout_drops_the_new_model(own: mpool.Pool, bert: Path) -> None:
    from mpool.runtime import swapping

    own.register("m", bert, pooling="cls")
    wanted = own.embed("a", "m")

    def late(self: Any, key: str) -> None:
        raise Timeout("not loaded in time", key=key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swapping._Swap, "_load", late)
        with pytest.raises(Timeout):
            own.swap("m", bert, pooling="max", timeout=5)
    assert np.array_equal(own.embed("a", "m"), wanted) and own.get("m")._entry.replacement.successor is None
    with pytest.raises(InvalidArgument, match="timeout"):
        own.swap("m", bert, timeout=0)


def test_interruption_after_the_core_has_switched(own: mpool.Pool, bert: Path) -> None:
    """Ctrl-C between the core's switch and the names of the pool: the names follow all the same."""
    from mpool.runtime import swapping

    own.register("m", bert, pooling="cls")
    old = own.embed("a", "m")
    names, calls, locks = swapping._Swap._take_names, 0, []

    def interrupted(self: Any) -> None:
        nonlocal calls
        calls += 1
        locks.extend([*(part.lock for part, _ in self.parts), self.pool._names.lock])
        assert all(lock._is_owned() for lock in locks)  # no request may take a key or a name meanwhile
        if calls == 1:
            raise KeyboardInterrupt
        names(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swapping._Swap, "_take_names", interrupted)
        own.swap("m", bert, pooling="max")
    assert calls == 2 and not np.array_equal(own.embed("a", "m"), old)
    assert len(locks) == 4


def test_swaps_of_one_name_run_one_after_the_other(own: mpool.Pool, bert: Path) -> None:
    own.register("m", bert)
    errors: list[BaseException] = []

    def member(pooling: str) -> None:
        try:
            for _ in range(3):
                own.swap("m", bert, pooling=pooling)
        except BaseException as error:
            errors.append(error)

    crowd = [threading.Thread(target=member, args=(name,)) for name in ("cls", "max", "mean")]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert not errors and len(own.ps()) == 1
    assert own.embed("a", "m").shape == own.embed("a", bert).shape


def test_closing_the_pool_ends_a_swap(bert: Path) -> None:
    pool = mpool.Pool()
    pool.register("m", bert)
    pool.embed("a", "m")
    ended: list[Any] = []

    def swaps() -> None:
        try:
            while True:
                pool.swap("m", bert)
        except BaseException as error:
            ended.append(error)

    worker = threading.Thread(target=swaps)
    worker.start()
    pool.close()
    worker.join(60)
    assert not worker.is_alive() and isinstance(ended[0], ShuttingDown)
