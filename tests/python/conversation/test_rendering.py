"""Renderers: processes that are killed, stopped, refused and forked, and their limits."""

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpool.conversation import rendering
from mpool.conversation.template import ChatTemplate
from mpool.conversation.tool_templates import tool_support
from mpool.errors import SpawnFailed, TemplateError, Timeout
from mpool.tokenizers import limits

import childprograms
from childprograms import alive, end, forked, states
from waiting import until

USER = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
#: Takes hours, and tenths of a second.
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW = "{% for i in range(1500) %}{% for j in range(1500) %}{% endfor %}{% endfor %}done"


@pytest.fixture
def renderers(monkeypatch: pytest.MonkeyPatch) -> Iterator[rendering.Renderers]:
    """Renderers of this test alone."""
    made = rendering.Renderers()
    monkeypatch.setattr(rendering, "_renderers", made)
    yield made
    end(made.children)


def pids(made: rendering.Renderers) -> list[int]:
    return childprograms.pids(made.children)


class Thread(threading.Thread):
    """A thread that keeps the result or the error of a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function, self.result, self.error = function, None, None  # type: Any, Any, Any
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error

    def ended(self, seconds: float = 60.0) -> "Thread":
        self.join(seconds)
        assert not self.is_alive()
        return self


# ---- death -----------------------------------------------------------------------------------------------------------

def test_a_killed_renderer_is_replaced(renderers: rendering.Renderers) -> None:
    """A renderer is killed while idle: the request goes to a new one, and no zombie remains."""
    template = ChatTemplate(PLAIN)
    for _ in range(3):
        assert template.render(USER) == "[user]hi"
        (pid,) = pids(renderers)
        os.kill(pid, signal.SIGKILL)
        assert template.render(USER) == "[user]hi"
        assert pids(renderers) != [pid] and pid not in states()


def test_a_renderer_killed_during_work_is_replaced(renderers: rendering.Renderers,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_template_seconds", 30.0)
    template = ChatTemplate(SLOW)
    work = Thread(lambda: template.render(USER))
    until(lambda: pids(renderers) and renderers.children._all[0].ready)
    time.sleep(0.03)
    os.kill(pids(renderers)[0], signal.SIGKILL)
    assert work.ended().result == "done" and not template.exceeded


def test_a_renderer_that_dies_twice_fails_the_request(renderers: rendering.Renderers,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_template_seconds", 30.0)
    work = Thread(lambda: ChatTemplate(ENDLESS).render(USER))
    killed: set[int] = set()
    while len(killed) < 2:
        for renderer in [*renderers.children._all]:
            if renderer.ready and renderer.process.pid not in killed:
                killed.add(renderer.process.pid)
                os.kill(renderer.process.pid, signal.SIGSEGV)
        time.sleep(0.005)
    assert isinstance(work.ended().error, TemplateError) and "ended twice (signal 11)" in str(work.error)
    assert ChatTemplate(PLAIN).render(USER) == "[user]hi"


# ---- limits and deadlines --------------------------------------------------------------------------------------------

def test_an_endless_template_fails_within_a_second(renderers: rendering.Renderers) -> None:
    """With the default limits, which are limits of CPU time: a busy machine needs longer."""
    ChatTemplate(PLAIN).render(USER)
    work = Thread(lambda: ChatTemplate(ENDLESS).render(USER)).ended()
    assert isinstance(work.error, TemplateError) and "0.4 s of CPU time" in str(work.error)
    assert limits.max_template_seconds * 2 < 1


def test_the_deadline_of_the_request_ends_a_render(renderers: rendering.Renderers,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_template_seconds", 600.0)
    ChatTemplate(PLAIN).render(USER)
    (pid,) = pids(renderers)
    with pytest.raises(Timeout, match="Raise `timeout`"):
        ChatTemplate(ENDLESS).render(USER, deadline=time.monotonic() + 0.1)
    assert not alive(pid)
    assert ChatTemplate(PLAIN).render(USER, deadline=time.monotonic() + 60) == "[user]hi"


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
    monkeypatch.setattr(limits, "max_template_seconds", 60.0)
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
    assert len(renderers.children._all) <= rendering.MAX
    for renderer in [*renderers.children._all]:
        renderer.process.send_signal(signal.SIGPROF)  # as if their limit had been reached
    monkeypatch.setattr(limits, "max_template_seconds", 0.05)
    for thread in hostile:
        assert isinstance(thread.ended().error, TemplateError)


def test_a_hostile_template_is_remembered(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    """After STRIKES renders over the limit, the template fails at once for a time that doubles; a success ends this."""
    monkeypatch.setattr(limits, "max_template_seconds", 0.05)
    template = ChatTemplate("{% if loops %}" + ENDLESS + "{% endif %}fine")
    for _ in range(rendering.STRIKES):
        assert not template.exceeded or renderers._records
        with pytest.raises(TemplateError, match="chat template exceeded its limit of 0.05"):
            template.render(USER, loops=True)
    assert template.exceeded
    record = renderers._records[template._text.digest]
    record.until += 60  # the machine may be slow
    before = pids(renderers)
    wanted = r"cannot be used for \d+\.\d s, because .* exceeded its limit of 0.05\d* s"
    with pytest.raises(TemplateError, match=wanted):
        template.render(USER)
    assert pids(renderers) == before and ChatTemplate(PLAIN).render(USER) == "[user]hi"
    record.until, begun = 0.0, time.monotonic()  # the time has passed
    with pytest.raises(TemplateError, match="^the chat template exceeded"):
        template.render(USER, loops=True)
    assert begun + 2 <= record.until <= time.monotonic() + 2
    record.until = 0.0
    monkeypatch.setattr(limits, "max_template_seconds", 60.0)
    trial = Thread(lambda: template.render(USER, loops=True))
    until(lambda: record.active and renderers.children._all and renderers.children._all[0].ready)
    with pytest.raises(TemplateError, match="cannot be used"):  # the others do not wait for the one that tries
        template.render(USER)
    for renderer in renderers.children._all:
        renderer.process.send_signal(signal.SIGPROF)
    assert isinstance(trial.ended().error, TemplateError)
    record.until = 0.0
    assert template.render(USER) == "fine" and not template.exceeded


@pytest.mark.parametrize("probe", [tool_support, lambda template: template.accepts_image_parts("<image>")])
def test_probes_of_a_template_stop_at_the_first_limit(monkeypatch: pytest.MonkeyPatch, probe: Any) -> None:
    """Each further probe would take as long as the first. A template that only refuses a probe is probed on."""
    renders: list[Any] = []

    def render(*arguments: Any, **options: Any) -> str:
        renders.append(arguments)
        raise TemplateError("the chat template refuses this")

    monkeypatch.setattr(ChatTemplate, "render", render)
    for exceeded in (False, True):
        monkeypatch.setattr(ChatTemplate, "exceeded", exceeded)
        renders.clear()
        if exceeded:
            with pytest.raises(TemplateError, match="refuses this"):
                probe(ChatTemplate(PLAIN))
            assert len(renders) == 1
        else:
            assert probe(ChatTemplate(PLAIN)) in (False, (None, "content", "")) and renders


# ---- memory ----------------------------------------------------------------------------------------------------------

def test_memory_of_renders_does_not_accumulate(renderers: rendering.Renderers) -> None:
    """A renderer that keeps much memory after a render ends; large compiled templates count, too."""
    template = ChatTemplate("{% for m in messages %}{{ m.content | upper | lower }}{% endfor %}")
    for at in range(4):
        text = "é" * 1_000_000 + str(at)
        assert template.render([{"role": "user", "content": text}]) == text
        for renderer in renderers.children._all:
            resident = int(Path(f"/proc/{renderer.process.pid}/statm").read_text().split()[1])
            assert resident * os.sysconf("SC_PAGE_SIZE") < 200 << 20
    assert len(renderers.children._all) <= 1


# ---- no process ------------------------------------------------------------------------------------------------------

def test_without_processes_templates_fail(renderers: rendering.Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused)
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(rendering.MAX + 1):  # none of the failures uses up a place
            with pytest.raises(SpawnFailed, match="no process could be started to render the chat template.*ulimit -u"):
                ChatTemplate(PLAIN).render(USER)
        with pytest.raises(SpawnFailed):
            ChatTemplate(PLAIN).variables()
        assert len(os.listdir("/proc/self/fd")) <= files
    assert ChatTemplate(PLAIN).render(USER) == "[user]hi"


# ---- other processes -------------------------------------------------------------------------------------------------

def test_a_forked_process_has_renderers_of_its_own(renderers: rendering.Renderers) -> None:
    """Also while its parent renders the same template for the first time, which one renderer may do."""
    template = ChatTemplate(PLAIN)
    record, _ = renderers._enter(template._text, None)

    def render() -> bool:
        fine = template.render(USER, deadline=time.monotonic() + 30) == "[user]hi"
        rendering.renderers().children.__del__()
        return fine and rendering.renderers() is not renderers

    assert forked(render)
    record.active -= 1
    assert template.render(USER) == "[user]hi"


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
    assert not failures and len(rendering.renderers().children._all) <= rendering.MAX
