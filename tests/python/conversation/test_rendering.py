"""Renderers: processes that are killed, stopped, refused and forked, their limits, and their ends."""

from __future__ import annotations

import errno
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpool.conversation import rendering
from mpool.conversation.template import ChatTemplate
from mpool.errors import SpawnFailed, TemplateError, Timeout
from mpool.tokenizers import limits

USER = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
#: Takes hours, and tenths of a second.
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW = "{% for i in range(1500) %}{% for j in range(1500) %}{% endfor %}{% endfor %}done"


def until(met: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "the condition is still false"
        time.sleep(0.005)


def children(parent: int | None = None) -> dict[int, str]:
    """Return the state of each renderer of a process, by its process id; "Z" is a zombie."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == (parent or os.getpid()) and (b"renderer.py" in command or fields[0] == "Z"):
            found[int(entry)] = fields[0]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def renderers(monkeypatch: pytest.MonkeyPatch) -> Iterator[rendering.Renderers]:
    """Renderers of this test alone."""
    before = set(children())
    made = rendering.Renderers()
    monkeypatch.setattr(rendering, "_renderers", made)
    yield made
    for renderer in [*made._all]:
        renderer.process.kill()
    made._idle.clear()
    until(lambda: all(state == "Z" for pid, state in children().items() if pid not in before))
    for renderer in [*made._all, *made._unreaped]:
        renderer.socket.close()
        renderer.process.wait(10)
    made._all.clear()


def pids(made: rendering.Renderers) -> list[int]:
    return [renderer.process.pid for renderer in made._all]


class Thread(threading.Thread):
    """A thread that keeps the result or the error of a function, and the time that it took."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function, self.result, self.error, self.seconds = function, None, None, 0.0  # type: Any, Any, Any, float
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - began

    def ended(self, seconds: float = 60.0) -> Thread:
        self.join(seconds)
        assert not self.is_alive()
        return self


# ---- death -----------------------------------------------------------------------------------------------------------

def test_a_killed_renderer_is_replaced(renderers: rendering.Renderers) -> None:
    """Killed while idle: the request goes to a new renderer, and no zombie remains."""
    template = ChatTemplate(PLAIN)
    for _ in range(3):
        assert template.render(USER) == "[user]hi"
        (pid,) = pids(renderers)
        os.kill(pid, signal.SIGKILL)
        assert template.render(USER) == "[user]hi"
        assert pids(renderers) != [pid] and pid not in children()


def test_a_renderer_killed_during_work_is_replaced(renderers: rendering.Renderers,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_template_seconds", 30.0)
    template = ChatTemplate(SLOW)
    work = Thread(lambda: template.render(USER))
    until(lambda: pids(renderers) and renderers._all[0].ready)
    time.sleep(0.03)
    os.kill(pids(renderers)[0], signal.SIGKILL)
    assert work.ended().result == "done" and not template.exceeded


def test_a_renderer_that_dies_twice_fails_the_request(renderers: rendering.Renderers,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_template_seconds", 30.0)
    work = Thread(lambda: ChatTemplate(ENDLESS).render(USER))
    killed: set[int] = set()
    while len(killed) < 2:
        for renderer in [*renderers._all]:
            if renderer.ready and renderer.process.pid not in killed:
                killed.add(renderer.process.pid)
                os.kill(renderer.process.pid, signal.SIGSEGV)
        time.sleep(0.005)
    assert isinstance(work.ended().error, TemplateError) and "ended twice (signal 11)" in str(work.error)
    assert ChatTemplate(PLAIN).render(USER) == "[user]hi"


def test_a_renderer_that_dies_while_idle_leaves_no_zombie(renderers: rendering.Renderers) -> None:
    ChatTemplate(PLAIN).render(USER)
    (pid,) = pids(renderers)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not renderers._all and pid not in children())
    until(lambda: renderers._tidying is None)  # its thread ended, too


def test_idle_renderers_end(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "IDLE_SECONDS", 0.1)
    ChatTemplate(PLAIN).render(USER)
    (pid,) = pids(renderers)
    until(lambda: not renderers._all and pid not in children())
    until(lambda: renderers._tidying is None)
    assert ChatTemplate(PLAIN).render(USER) == "[user]hi"


# ---- limits and deadlines --------------------------------------------------------------------------------------------

def test_an_endless_template_fails_within_a_second(renderers: rendering.Renderers) -> None:
    """With the default limits. The bound is wide, because the machine may be busy: it is CPU time that is limited."""
    ChatTemplate(PLAIN).render(USER)
    work = Thread(lambda: ChatTemplate(ENDLESS).render(USER)).ended()
    assert isinstance(work.error, TemplateError) and "0.4 s of CPU time" in str(work.error) and work.seconds < 8
    assert limits.max_template_seconds * 2 < 1


def test_the_deadline_of_the_request_ends_a_render(renderers: rendering.Renderers,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_template_seconds", 600.0)
    ChatTemplate(PLAIN).render(USER)
    (pid,) = pids(renderers)
    began = time.monotonic()
    with pytest.raises(Timeout, match="Increase timeout"):
        ChatTemplate(ENDLESS).render(USER, deadline=time.monotonic() + 0.1)
    assert time.monotonic() - began < 5 and not alive(pid)
    assert ChatTemplate(PLAIN).render(USER, deadline=time.monotonic() + 60) == "[user]hi"


def test_a_deadline_during_the_start_keeps_the_renderer(renderers: rendering.Renderers) -> None:
    with pytest.raises(Timeout):
        ChatTemplate(PLAIN).render(USER, deadline=time.monotonic() + 0.001)
    (pid,) = pids(renderers)
    assert ChatTemplate(PLAIN).render(USER) == "[user]hi" and pids(renderers) == [pid]


def test_a_stopped_renderer_does_not_hold_its_request(renderers: rendering.Renderers) -> None:
    template = ChatTemplate(PLAIN)
    template.render(USER)
    (pid,) = pids(renderers)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Timeout):
        template.render(USER, deadline=time.monotonic() + 0.2)
    assert template.render(USER) == "[user]hi" and not alive(pid)


def test_endless_templates_leave_renderers_to_others(renderers: rendering.Renderers,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests for a template that does not end, four for one that ended before: others render meanwhile."""
    monkeypatch.setattr(limits, "max_template_seconds", 3.0)
    depends = ChatTemplate("{% if loops %}" + ENDLESS + "{% endif %}fine")
    assert depends.render(USER) == "fine"
    plain = ChatTemplate(PLAIN)
    plain.render(USER)
    hostile = [Thread(lambda: ChatTemplate(ENDLESS).render(USER)) for _ in range(4)]
    hostile += [Thread(lambda: depends.render(USER, loops=True)) for _ in range(1)]
    time.sleep(0.2)
    for _ in range(50):
        assert plain.render(USER) == "[user]hi"
    assert all(thread.is_alive() for thread in hostile)  # the others did not wait for them
    assert len(renderers._all) <= rendering.MOST
    for renderer in [*renderers._all]:
        renderer.process.send_signal(signal.SIGPROF)  # as if their limit had been reached
    monkeypatch.setattr(limits, "max_template_seconds", 0.05)
    for thread in hostile:
        assert isinstance(thread.ended().error, TemplateError)


def test_a_hostile_template_is_remembered(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few renders over the limit it fails at once, for a time that doubles; one that succeeds is forgotten."""
    monkeypatch.setattr(limits, "max_template_seconds", 0.05)
    template = ChatTemplate("{% if loops %}" + ENDLESS + "{% endif %}fine")
    for _ in range(rendering.STRIKES):
        assert not template.exceeded or renderers._records
        with pytest.raises(TemplateError, match="chat template exceeded its limit of 0.05"):
            template.render(USER, loops=True)
    assert template.exceeded
    record = renderers._records[template._text.digest]
    before = pids(renderers)
    with pytest.raises(TemplateError, match=r"is refused for \d\.\d s, because .* exceeded its limit of 0.05\d* s of"):
        template.render(USER)
    assert pids(renderers) == before and ChatTemplate(PLAIN).render(USER) == "[user]hi"
    record.until = 0.0  # the time has passed
    with pytest.raises(TemplateError, match="^the chat template exceeded"):
        template.render(USER, loops=True)
    assert 1 < record.until - time.monotonic() <= 2
    record.until = 0.0
    monkeypatch.setattr(limits, "max_template_seconds", 60.0)
    trial = Thread(lambda: template.render(USER, loops=True))
    until(lambda: record.active and renderers._all and renderers._all[0].ready)
    with pytest.raises(TemplateError, match="is refused"):  # the others do not wait for the one that tries
        template.render(USER)
    for renderer in renderers._all:
        renderer.process.send_signal(signal.SIGPROF)
    assert isinstance(trial.ended().error, TemplateError)
    record.until = 0.0
    assert template.render(USER) == "fine" and not template.exceeded


def test_the_limit_of_time_survives_the_signals_of_the_parent(renderers: rendering.Renderers) -> None:
    """Blocked and ignored signals pass to child processes; with SIGCHLD ignored, exit codes are lost."""
    code = ("import signal; from mpool.conversation.template import ChatTemplate\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF, signal.SIGTERM])\n"
            "signal.signal(signal.SIGPROF, signal.SIG_IGN); signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
            f"user = {USER!r}\n"
            f"try: ChatTemplate({ENDLESS!r}).render(user)\n"
            "except Exception as error: print(error)\n"
            f"print(ChatTemplate({PLAIN!r}).render(user))")
    lines = run(code).splitlines()
    assert "0.4 s of CPU time" in lines[0] and lines[1] == "[user]hi"


# ---- inherited by a renderer ----------------------------------------------------------------------------------------

def test_a_renderer_inherits_nothing(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPOOL_SECRET", "secret")
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        ChatTemplate(PLAIN).render(USER)
    (pid,) = pids(renderers)
    links = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert links.pop(0).startswith("socket:") and {links.pop(1), links.pop(2)} == {"/dev/null"}
    assert set(links.values()) <= {f"/proc/{pid}/statm"}
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.getsid(pid) != os.getsid(0)  # Ctrl-C in a terminal does not reach it
    limits_of = Path(f"/proc/{pid}/limits").read_text()
    assert [line.split()[3] for line in limits_of.splitlines() if line.startswith("Max open files")] == ["1"]
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 64 << 20  # the documented 20 MB, with a margin for other versions of Python


def test_memory_of_renders_does_not_accumulate(renderers: rendering.Renderers) -> None:
    """A renderer that keeps much memory after an answer ends; large compiled templates count, too."""
    template = ChatTemplate("{% for m in messages %}{{ m.content | upper | lower }}{% endfor %}")
    for at in range(4):
        text = "é" * 1_000_000 + str(at)
        assert template.render([{"role": "user", "content": text}]) == text
        for renderer in renderers._all:
            resident = int(Path(f"/proc/{renderer.process.pid}/statm").read_text().split()[1])
            assert resident * os.sysconf("SC_PAGE_SIZE") < 200 << 20
    assert len(renderers._all) <= 1


def test_compiled_templates_are_bounded(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "COMPILED", 3)
    templates = [ChatTemplate(PLAIN + str(at)) for at in range(8)]
    for order in (range(8), reversed(range(8)), (0, 7, 0, 3, 3, 0)):
        for at in order:
            assert templates[at].render(USER) == f"[user]hi{at}"
            assert templates[at].variables() == {"messages"}
    (renderer,) = renderers._all
    assert len(renderer.compiled) == 3


# ---- no process ------------------------------------------------------------------------------------------------------

def test_without_processes_templates_fail(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused)
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(rendering.MOST + 1):  # none of the failures uses up a place
            with pytest.raises(SpawnFailed, match="no process could be started to render the chat template.*never in "):
                ChatTemplate(PLAIN).render(USER)
        with pytest.raises(SpawnFailed):
            ChatTemplate(PLAIN).variables()
        assert len(os.listdir("/proc/self/fd")) <= files
    assert ChatTemplate(PLAIN).render(USER) == "[user]hi"


def test_an_application_is_not_started_as_a_renderer(renderers: rendering.Renderers,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    python = multiprocessing.spawn.get_executable()
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    multiprocessing.set_executable("/usr/bin/uwsgi")
    try:
        with pytest.raises(SpawnFailed, match="does not look like a Python"):
            ChatTemplate(PLAIN).render(USER)
    finally:
        multiprocessing.set_executable(python)


def test_a_program_that_ends_at_once(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_command", lambda: [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(SpawnFailed, match="ended while it started: exit status 7"):
        ChatTemplate(PLAIN).render(USER)


def test_no_thread_for_the_ends_of_renderers(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert ChatTemplate(PLAIN).render(USER) == "[user]hi"
    assert renderers._tidying is None


# ---- other processes -------------------------------------------------------------------------------------------------

def run(code: str, *arguments: str, **options: Any) -> str:
    """Run a script and return its output. Fails if it writes to standard error."""
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60,
                          **{"cwd": tempfile.gettempdir(), **options})
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stdout, done.stderr)
    return done.stdout


START = ("import os, sys, time\nfrom mpool.conversation import rendering\n"
         "from mpool.conversation.template import ChatTemplate\n"
         f"template = ChatTemplate({PLAIN!r})\nuser = {USER!r}\n"
         "def render(): return template.render(user)\n"
         "def pids(): return [one.process.pid for one in rendering.renderers()._all]\n")


def test_nothing_of_jinja2_is_in_this_process() -> None:
    assert run(START + "render(); template.variables()\nprint('jinja2' in sys.modules, '__main__' in sys.modules)") \
        == "False True\n"


def test_forks(tmp_path: Path) -> None:
    """A forked child has renderers of its own and leaves those of its parent alone, also at its exit."""
    code = START + """
render()
before = pids()
child = os.fork()
if not child:
    import subprocess
    assert not pids() and render() == "[user]hi" and pids() and pids() != before
    sys.exit(0)  # runs the exit handlers
assert os.waitpid(child, 0)[1] == 0
assert render() == "[user]hi" and pids() == before
import multiprocessing
for method in ("fork", "spawn", "forkserver"):
    process = multiprocessing.get_context(method).Process(target=render)
    if method == "fork":
        process.start(); process.join(); assert process.exitcode == 0, method
assert render() == "[user]hi" and pids() == before
"""
    run(code)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing(method: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(START + "if __name__ == '__main__':\n"
                                      "    import multiprocessing\n"
                                      f"    with multiprocessing.get_context({method!r}).Pool(2) as pool:\n"
                                      "        print(pool.starmap(render, [()] * 4))\n")
    done = subprocess.run([sys.executable, "work.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout == f"{['[user]hi'] * 4}\n" and not done.stderr


def test_a_script_on_standard_input() -> None:
    """There is no main module that could be imported again, as in a notebook."""
    done = subprocess.run([sys.executable, "-"], input=START + "print(render())\n", capture_output=True, text=True,
                          timeout=60)
    assert done.stdout == "[user]hi\n" and not done.stderr


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2), (2,)], ids=str)
def test_closed_standard_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Text that the program prints does not reach a renderer."""
    code = START + (f"for fd in {closed}: os.close(fd)\n"
                    "assert render() == '[user]hi'\n"
                    "assert min(one.socket.fileno() for one in rendering.renderers()._all) > 2\n"
                    f"for fd in {closed}:\n"
                    "    try: os.write(fd, b'x' * 100)\n    except OSError: pass\n"
                    "assert render() == '[user]hi'\n"
                    f"open({str(tmp_path / 'fine')!r}, 'w').close(); os._exit(0)\n")
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, stdin=subprocess.DEVNULL)
    assert (tmp_path / "fine").exists()


def test_no_folder_is_needed(tmp_path: Path) -> None:
    """Neither a folder for temporary files nor the working directory."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = START + "os.rmdir(os.getcwd()); print(render())"
    assert run(code, cwd=gone, env={**os.environ, "TMPDIR": "/nowhere", "HOME": "/nowhere"}) == "[user]hi\n"


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_no_renderer_survives_this_process(end: str) -> None:
    """Neither an idle one nor one that is busy; and the exit does not wait for it."""
    code = START + f"""
import threading
from mpool.tokenizers import limits
limits.max_template_seconds = 1.5
render()
endless = ChatTemplate({ENDLESS!r})
threading.Thread(target=lambda: endless.render(user), daemon=True).start()
while rendering.renderers()._idle: time.sleep(0.01)
render()
time.sleep(0.05)
print(*pids(), flush=True)
{end}
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    found = [int(pid) for pid in done.stdout.split()]
    assert len(found) == 2 and not done.stderr, done
    until(lambda: not any(map(alive, found)), 30)
    assert time.monotonic() - began < 60


def test_an_interrupt_ends_the_render() -> None:
    """Ctrl-C raises KeyboardInterrupt at once, and the renderer is not used again."""
    code = START + f"""
import signal, threading
from mpool.tokenizers import limits
limits.max_template_seconds = 600
render()
before = pids()
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
signal.signal(signal.SIGINT, signal.default_int_handler)
try: ChatTemplate({ENDLESS!r}).render(user)
except KeyboardInterrupt: print("interrupted")
print(render(), pids() != before)
"""
    assert run(code) == "interrupted\n[user]hi True\n"


def test_many_threads() -> None:
    """Renders of many threads never mix, with compiled templates evicted and renderers killed all the time."""
    failures: list[Any] = []
    over = threading.Event()

    def work(number: int) -> None:
        try:
            for at in range(40):
                template = ChatTemplate(PLAIN + f"{{# {at % 5} {number % 3} #}}{number}")
                text = f"{number} {at} " * (1 + at * 50)
                assert template.render([{"role": "user", "content": text}]) == f"[user]{text}{number}"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    assert not failures and len(rendering.renderers()._all) <= rendering.MOST
