"""Stress test of forks of a process with a warm pool, and of interpreters that exit with requests in flight.

These are slow tests with 50 forks by default. ``MPOOL_STRESS=1000 pytest --slow test_stress_ends.py`` sets the number
of forks; the number of exits is a tenth of it. Nothing hangs, no process remains or becomes a zombie, and every result
is correct.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from processes import HEAD

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
COUNT = int(os.environ.get("MPOOL_STRESS", "50"))
ISOLATION = ["thread", "process"]

WATCH = """
def descendants(root):
    "Return the descendants of a process, including zombies: (id, state, name)."
    rows = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    stat = file.read()
            except OSError:
                continue
            name, _, rest = stat.partition("(")[2].rpartition(")")
            rows[int(entry)] = (int(rest.split()[1]), rest.split()[0], name)
    found, below = [], {root}
    for _ in rows:
        more = {pid for pid, (parent, _, _) in rows.items() if parent in below} - below
        if not more:
            break
        below |= more
        found += [(pid, *rows[pid][1:]) for pid in sorted(more)]
    return found
"""

FORKS = WATCH + """
faulthandler.cancel_dump_traceback_later()
count, isolation = int(sys.argv[3]), sys.argv[4]
LIMIT = 30
pool = mpool.Pool(mpool.PoolConfig(threads=2, max_workers_per_model=1, isolation=isolation))
TEXTS = [f"text {number} " * (1 + number % 9) for number in range(16)]
right = {text: pool.embed(text, bert).tobytes() for text in TEXTS}
wrong, hung, slowest, quit = 0, 0, 0.0, threading.Event()
served = 0

def busy():
    "Send requests from the parent, so that forks happen with requests in flight."
    global wrong, served
    number = 0
    while not quit.is_set():
        text = TEXTS[number % len(TEXTS)]
        wrong += pool.embed(text, bert).tobytes() != right[text]
        served, number = served + 1, number + 1

thread = threading.Thread(target=busy)
thread.start()
files = len(os.listdir("/proc/self/fd"))
for number in range(count):
    text, began = TEXTS[number % len(TEXTS)], time.monotonic()
    child = os.fork()
    if child == 0:
        code = 3
        try:
            faulthandler.dump_traceback_later(LIMIT - 5, exit=True)
            code = 0 if pool.embed(text, bert).tobytes() == right[text] else 2
            if number % 3 == 0:
                pool.close()
        finally:
            os._exit(code)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - began > LIMIT:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            hung, status = hung + 1, 0
            break
        time.sleep(0.001)
    wrong += status != 0
    slowest = max(slowest, time.monotonic() - began)
    text = TEXTS[(number + 5) % len(TEXTS)]
    wrong += pool.embed(text, bert).tobytes() != right[text]
quit.set()
thread.join(60)
hung += thread.is_alive()
end = time.monotonic() + 20
own = {pid for row in pool.ps() for pid in row.processes}
while time.monotonic() < end and [one for one in descendants(os.getpid()) if one[0] not in own]:
    time.sleep(0.02)
left = [one for one in descendants(os.getpid()) if one[0] not in own]
more = len(os.listdir("/proc/self/fd")) - files
pool.close()
left += descendants(os.getpid())
print(json.dumps(dict(forks=count, served=served, wrong=wrong, hung=hung, left=left, files=more, slowest=slowest)))
"""

EXITS = """
import asyncio
faulthandler.cancel_dump_traceback_later()
faulthandler.dump_traceback_later(25, exit=True)
isolation, how, number = sys.argv[3], sys.argv[4], int(sys.argv[5])
pool = mpool.Pool(mpool.PoolConfig(threads=2, isolation=isolation, shutdown_grace=0.2))
LONG = dict(max_tokens=1900, n=4, ignore_eos=True)
TEXTS = ["some text to embed " * 8] * 3000

def endless(number):
    try:
        while True:
            if number % 2:
                pool.generate("a b c", llama, **LONG)
            else:
                pool.embed([f"{number} " + text for text in TEXTS], bert)
    except mpool.PoolError:
        pass

def threads():
    for number in range(6):
        threading.Thread(target=endless, args=(number,), daemon=True).start()
    time.sleep(0.02 * (number % 7))

def tasks():
    async def one(number):
        if number % 2:
            await mpool.aio.generate("a b c", llama, pool=pool, **LONG)
        else:
            await mpool.aio.embed([f"{number} " + text for text in TEXTS], bert, pool=pool)

    async def main():
        left = [asyncio.ensure_future(one(number)) for number in range(6)]
        await asyncio.sleep(0.02 * (number % 7))
        return left  # asyncio.run cancels the remaining tasks

    asyncio.run(main())

# odd numbers: the model is loaded; even numbers: it is still loading
right = pool.embed("a", bert) if number % 2 else None
if how == "threads":
    threads()
else:
    tasks()
if right is not None and not np.array_equal(right, pool.embed("a", bert)):
    os._exit(4)
if number % 5 == 0:
    raise SystemExit(0)
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HEAD + code, *map(str, arguments)], capture_output=True, text=True,
                          timeout=60 + 40 * COUNT, cwd=tempfile.gettempdir())


@pytest.mark.parametrize("isolation", ISOLATION)
def test_forks_of_a_warm_pool(bert: Path, llama: Path, isolation: str) -> None:
    """Each child embeds one text and exits, while the parent has requests in flight."""
    done = run(FORKS, bert, llama, COUNT, isolation)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(isolation, found)
    assert (found["wrong"], found["hung"], found["left"]) == (0, 0, []), found
    assert found["files"] <= 1 and found["served"] > 0, found


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_interpreters_exit_with_requests_in_flight(bert: Path, llama: Path, isolation: str, how: str) -> None:
    """No interpreter hangs, crashes or prints to standard error, and no worker process remains."""
    slowest = 0.0
    for number in range(max(2, COUNT // 10)):
        began = time.monotonic()
        command = [sys.executable, "-c", HEAD + EXITS, str(bert), str(llama), isolation, how, str(number)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  cwd=tempfile.gettempdir(), start_new_session=True)
        try:
            out, err = parent.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            parent.kill()
            raise AssertionError(f"number {number} hangs: {parent.communicate()}") from None
        slowest = max(slowest, time.monotonic() - began)
        assert parent.returncode == 0 and not err.strip(), f"number {number}: exit {parent.returncode}\n{err[-3000:]}"
        assert not _session(parent.pid), f"number {number}: processes remain"
    print(isolation, how, dict(exits=number + 1, slowest=round(slowest, 2)))


def _session(leader: int) -> list[str]:
    """Return the processes of a session that are still running after 5 seconds."""
    found: list[str] = []
    for _ in range(250):
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = stat.read_text()
            except OSError:
                continue
            if int(text.rpartition(")")[2].split()[3]) == leader:
                found.append(text)
        if not found:
            return []
        time.sleep(0.02)
    return found
