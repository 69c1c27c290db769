"""Signals, forks and exits, each in a separate process, on small seeded checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import METER, process, script_result


REQUESTS = {
    "embed": "mpool.embed([f'Some text to embed. {i} ' * 10 for i in range(10_000)], bert)",
    "embed_iter": "[None for _ in mpool.embed_iter(('Some text. ' * 20 for _ in range(10**6)), bert)]",
    "generate": "mpool.generate('The', llama, max_tokens=2000, ignore_eos=True, temperature=0, n=8)",
    "stream": "[None for _ in mpool.generate('The', llama, max_tokens=2000, ignore_eos=True, n=8, stream=True)]",
    "result": "mpool.submit('text_to_text', prompt='The', model=llama, max_tokens=2000, ignore_eos=True, n=8).result()",
    "tokenize": "[mpool.tokenize('word and word ' * 70_000, llama) for _ in range(5)]",
    "prompt": "mpool.get(llama).tokenize('word and word ' * 70_000)",
    "asyncio": "asyncio.run(mpool.aio.generate('The', llama, max_tokens=2000, ignore_eos=True, n=8))",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("call", REQUESTS)
def test_ctrl_c_interrupts_at_once_and_cancels_only_its_request(bert: Path, llama: Path, call: str) -> None:
    script = METER + f"""
import asyncio
mpool.load(bert), mpool.load(llama)
want = mpool.generate("A cat", llama, max_tokens=40, temperature=0, ignore_eos=True).token_ids
late, mates = [], []
for attempt in range(5):
    # only the request of the main thread is cancelled
    mate = threading.Thread(target=lambda: mates.append(
        mpool.generate("A cat", llama, max_tokens=40, temperature=0, ignore_eos=True).token_ids == want))
    sent = []
    def interrupt():
        time.sleep(0.05 + 0.013 * attempt)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    mate.start()
    killer = threading.Thread(target=interrupt)
    killer.start()
    try:
        {REQUESTS[call]}
    except KeyboardInterrupt:
        late.append(time.monotonic() - sent[0])
    except mpool.ContextOverflow:
        pass
    try:
        killer.join()
        time.sleep(0.02)
    except KeyboardInterrupt:
        pass
    mate.join()
print(json.dumps([late, lateness(), mates, idle()]))
"""
    late, machine, mates, idle = script_result(script, bert, llama)
    assert len(late) >= 3, "the request had ended before the signal arrived"
    assert sorted(late)[len(late) // 2] <= 0.1 + 2 * machine, (late, machine)
    assert mates == [True] * 5 and idle


def test_an_uncaught_error_ends_the_process(bert: Path) -> None:
    status, _, err = process("mpool.embed([None], bert)", bert, bert)
    assert status == 1
    assert "mpool.errors.InvalidArgument: `inputs[0]` must be a str of 0 to 1,000,000 characters, got NoneType" \
        in err.replace(f"{bert}: ", "")


def test_a_forked_child_can_load_further_models(bert: Path, llama: Path) -> None:
    script = """
mpool.embed("x", bert)
child = os.fork()
if child == 0:
    signal.alarm(20)
    done = mpool.generate("The", llama, max_tokens=3)
    import asyncio
    asyncio.run(mpool.aio.embed("x", bert))
    mpool.Pool().embed("x", bert)
    os._exit(0)
print(json.dumps(os.waitpid(child, 0)[1]))
"""
    assert script_result(script, bert, llama, TOKENIZERS_PARALLELISM="false") == 0


def test_a_signal_interrupts_the_child_of_a_thread(bert: Path, llama: Path) -> None:
    """The thread that forks is the main thread of the child: its waits run signal handlers and cancel the request."""
    script = """
pool = mpool.Pool()
pool.generate("The", llama, max_tokens=2)
class Alarm(Exception):
    pass
def raise_alarm(number, frame):
    while frame and frame.f_code.co_name != "result":
        frame = frame.f_back
    if frame is None:  # a busy machine: the wait has not begun
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return
    raise Alarm
def work():
    child = os.fork()
    if child == 0:
        job = pool.submit("text_to_text", prompt="The", model=llama, max_tokens=16000, ignore_eos=True)
        signal.signal(signal.SIGALRM, raise_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            job.result()
        except Alarm:
            try:
                job.result(60)
            except mpool.Cancelled:
                os._exit(7)
            os._exit(3)
        os._exit(4)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
statuses = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(json.dumps(statuses))
"""
    assert script_result(script, bert, llama, TOKENIZERS_PARALLELISM="false") == [7]


def test_a_fork_while_another_thread_uses_a_model_for_the_first_time(bert: Path, llama: Path) -> None:
    """The core has the model's key, but the thread has not noted it in the model's entry yet."""
    script = """
entry = mpool.register("m", bert)._entry
entry.core_key()
entry.keys._keys.clear()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if mpool.embed("x", "m").shape == (32,) else 3)
print(json.dumps([os.waitpid(child, 0)[1], mpool.embed("x", "m").shape == (32,), entry.core_keys()]))
"""
    assert script_result(script, bert, llama, TOKENIZERS_PARALLELISM="false") == [0, True, ["m"]]


@pytest.mark.builds
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(bert: Path, method: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"""
import multiprocessing, sys
import numpy as np
import mpool

def work(job):
    model, text = job
    return model.embed(text)

if __name__ == "__main__":
    model = mpool.get(sys.argv[1])
    texts = [f"Text {{number}}." for number in range(8)]
    want = model.embed(texts)
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        got = pool.map(work, [(model, text) for text in texts])
    print(bool(np.array_equal(np.stack(got), want)))
""", encoding="utf-8")
    done = subprocess.run([sys.executable, str(script), str(bert)], capture_output=True, text=True, timeout=150,
                          env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    assert done.stdout.strip() == "True" and done.returncode == 0, done.stderr


def test_records_of_the_core_reach_logging_and_nothing_is_printed(bert: Path) -> None:
    script = """
import logging
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.name, record.levelname))
logging.getLogger("mpool").addHandler(Keep())
logging.getLogger("mpool").setLevel("DEBUG")
mpool.embed("x", bert)
mpool.unload(bert)
time.sleep(0.6)
print(json.dumps([records, [thread.name for thread in threading.enumerate()]]))
"""
    records, threads = script_result(script, bert, bert)
    assert all(name.startswith("mpool") for name, _ in records)
    assert threads.count("mpool-log") == 1
