"""Hostile chat templates: every builtin of jinja2 with arguments that take very long, and templates that cannot end.

Each is an error, or a text, within its limit, while other threads render and compile other templates.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import jinja2.defaults
import jinja2.sandbox
import pytest

from mpool.conversation import renderer, rendering
from mpool.conversation.template import ChatTemplate
from mpool.errors import FormatError, LimitError, MpoolError, TemplateError
from mpool.tokenizers import limits

from waiting import until

USER = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
#: `ns.v` and `ns.w` are pairs of pairs with 2^40 leaves. `t` has two million characters; `u` is half as long.
HEAD = ("{% set ns = namespace(v=(1,), w=(1,)) %}{% for i in range(40) %}{% set ns.v = (ns.v, ns.v) %}"
        "{% set ns.w = (ns.w, ns.w) %}{% endfor %}{% set t = 'a' * 2000000 %}{% set u = 'ab' ~ 'a' * 1000000 %}")
FILTERS, TESTS = sorted(jinja2.defaults.DEFAULT_FILTERS), sorted(jinja2.defaults.DEFAULT_TESTS)
GLOBALS = sorted(renderer.Environment().globals)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixth of the usual CPU time, which shortens the tests."""
    monkeypatch.setattr(limits, "max_template_seconds", limits.max_template_seconds / 6)


@pytest.fixture(scope="module")
def others() -> Iterator[list[int]]:
    """The number of texts that another thread has rendered so far; it compiles a new template for every tenth."""
    count, over = [0], threading.Event()

    def work() -> None:
        while not over.is_set():
            template = ChatTemplate(PLAIN + f"{{# {count[0] // 10} #}}")
            assert template.render(USER) == "[user]hi"
            count[0] += 1
            time.sleep(0.002)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield count
    over.set()
    thread.join(30)
    assert not thread.is_alive()


def outcome(source: str, others: list[int]) -> str | MpoolError:
    """Render a template and return its text or its error. Fail if that hangs, or if the other thread must wait."""
    before, began = others[0], time.monotonic()
    try:
        found: str | MpoolError = ChatTemplate(HEAD + source).render(USER)
    except (TemplateError, FormatError, LimitError) as error:
        found = error
    elapsed = time.monotonic() - began
    assert elapsed < 60, f"{elapsed:.1f} s"  # the limit is below 0.1 s of CPU time
    until(lambda: others[0] >= before + 2, 60)  # other templates are rendered
    return found


#: The arguments of the second and third column take minutes or all memory with some of the builtins.
CALLS = {"value": "{0}ns.v {1} {2}{3}", "same": "{0}ns.v {1} {2}(ns.w){3}", "text": "{0}t {1} {2}(u){3}",
         "two": "{0}t {1} {2}(9 ** 9, u){3}", "list": "{0}[t] * 99999 {1} {2}(t){3}",
         "number": "{0}ns.v {1} {2}(9 ** 9){3}"}
BY_DEFAULT = ("same",)


def calls() -> list[Any]:
    return [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]


@pytest.mark.sample(4)
@pytest.mark.parametrize("call", calls())
@pytest.mark.parametrize("name", FILTERS)
def test_filters(name: str, call: str, others: list[int]) -> None:
    outcome(CALLS[call].format("{{ ", "|", name, " }}"), others)


@pytest.mark.sample(4)
@pytest.mark.parametrize("call", calls())
@pytest.mark.parametrize("name", TESTS)
def test_tests(name: str, call: str, others: list[int]) -> None:
    outcome(CALLS[call].format("{{ ", "is", name, " }}"), others)


@pytest.mark.parametrize("call", ["(ns.v)", *(pytest.param(call, marks=pytest.mark.slow) for call in (
    "(t)", "([(ns.v, 1)])", "(t, u)", "(9 ** 9)", "(ns.v, ns.w)"))])
@pytest.mark.parametrize("name", GLOBALS)
def test_globals(name: str, call: str, others: list[int]) -> None:
    outcome("{{ " + name + call + " }}", others)


@pytest.mark.sample(4)
@pytest.mark.parametrize("source", [
    # hash, repr and str of the nested value
    "{{ dict([(ns.v, 1)]) }}", "{{ namespace([(ns.v, 1)]) }}", "{{ raise_exception(ns.v) }}",
    "{{ {'a': 1}[ns.v].foo }}", "{{ 'abc'[ns.v].foo }}", "{{ ns.v.foo.bar }}", "{{ messages[ns.v].foo }}",
    "{{ [1].index(ns.v, ns.v) }}", "{{ ns.v is filter }}", "{{ ns.v is test }}", "{{ ns.v is upper }}",
    "{{ ns.v is lower }}", "{{ '%s' % (ns.v,) }}", "{{ 'x' ~ ns.v }}", "{{ '{}'.format(ns.v) }}",
    "{{ '{x[0]}'.format_map({'x': ns.v}) }}", "{{ {ns.v: 1} }}", "{{ ns.v < ns.w }}", "{{ [ns.v].count(ns.w) }}",
    # searches of n characters in m that compare n times m
    "{{ t.rfind(u) }}", "{{ t.rindex(u) }}", "{{ t.rsplit(u) }}", "{{ t.rpartition(u) }}",
    # long results
    "{{ t % 1 }}", "{{ ('%s' * 1000000) % ((t,) * 1000000) }}", "{{ t * 1000000 }}", "{{ t.join([t] * 1000) }}",
    "{{ t | join(t) }}", "{{ ('\\n' * 2000000) | indent(1000) }}", "{{ t | wordwrap(1, wrapstring=t) }}",
    "{{ ('a ' * 1000000) | wordwrap(1) | length }}", "{{ ('a\\n' * 1000000) | wordwrap(1, wrapstring=t) }}",
    "{{ t | replace('', t) }}", "{{ t.replace('', t) }}", "{{ t.expandtabs() ~ t.zfill(10 ** 10) }}",
    "{{ 10 ** (10 ** 8) }}", "{{ (7 ** 3000000) | string | length }}", "{{ (t ~ 'b') | urlize }}",
    # constant expressions, which jinja2 computes while it compiles
    "{{ 'a' * 10 ** 9 }}", "{{ 'a' * 10 ** 8 }}", "{{ ('a' * 10 ** 7) | upper | lower | list }}", "{{ [0] * 10 ** 9 }}",
    "{{ ('a' * 3000000).rfind('ab' ~ 'a' * 1500000) }}", "{% set x = 9 ** (9 ** 9) %}",
    "{% if false %}{{ 9 ** (9 ** 9) }}{% endif %}", "{{ '%1000000000d' % 1 }}", "{{ 'a' | center(10 ** 9) }}",
], ids=lambda source: source[:40])
def test_operations(source: str, others: list[int]) -> None:
    outcome(source, others)


@pytest.mark.parametrize("source", ["{% set x = namespace(_a=1) %}", "{% set x = namespace({'_a': 1}) %}",
                                    "{% set x = namespace({1: 1}) %}",
                                    "{% set x = namespace(a=1) %}{% set x._a = 1 %}"])
def test_attributes_of_a_namespace_that_begin_with_an_underscore(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 9 }}", "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
                                    "{{ " + "-" * 20_000 + "1 }}", "{{ 9 ** (9 ** 9) }}", "{" * (1 << 20)],
                         ids=["text", "parentheses", "signs", "power", "braces"])
def test_variables_of_a_hostile_template(source: str, others: list[int]) -> None:
    """Parsing is done by a renderer, too."""
    before = others[0]
    try:
        assert ChatTemplate(source).variables() == frozenset()
    except (TemplateError, FormatError, LimitError):
        pass
    until(lambda: others[0] >= before + 2, 60)


def test_an_exceeded_limit_is_named() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                            file="/models/x/chat_template.jinja", key="small")
    wanted = (r"^small: /models/x/chat_template.jinja: the chat template exceeded its limit of 0.0\d+ s of CPU time. "
              ".* raise mpool.tokenizers.limits.max_template_seconds$")
    with pytest.raises(TemplateError, match=wanted):
        template.render(USER)


# ---- the right text --------------------------------------------------------------------------------------------------

VALUES = ("'a b-C\\n<d>'", "[3, 1, 2]", "{'b': 1, 'a': 'x'}", "2.5", "none", "'http://x.y z'", "(['a', 'b'], ['a'])")


def expected(source: str) -> str | None:
    """Return the text of jinja2's sandbox with the options of transformers; None if it fails."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = renderer._tojson
    try:
        return environment.from_string(source).render(messages=USER)
    except Exception:
        return None


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in FILTERS if name != "random"])
def test_filters_return_what_jinja2_returns(name: str) -> None:
    """In particular, no builtin needs a module or a file that a renderer can no longer open."""
    for value in VALUES:
        for call in (name, f"{name}(1)", f"{name}('a')", f"{name}(',', 'b')", f"{name} | list"):
            compare("{{ " + f"{value} | {call}" + " }}")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", TESTS)
def test_tests_return_what_jinja2_returns(name: str) -> None:
    for value in VALUES:
        for call in (name, f"{name}(1)", f"{name}('a b-C')", f"{name}([2.5])"):
            compare("{{ " + f"{value} is {call}" + " }}")


def compare(source: str) -> None:
    text = expected(source)
    try:
        assert ChatTemplate(source).render(USER) == text, source
    except (TemplateError, FormatError):
        # objects that are not data cannot be printed
        assert text is None or " at 0x" in text, (source, text)


@pytest.mark.parametrize("source, error", [
    ("{{ '\\ud800' }}", "half of a surrogate pair"), ("{{ messages[0]['x'].y }}", "not defined: 'dict object' has no"),
    ("{{ 1 + 'a' }}", "unsupported operand"), ("{{ [1][7].x }}", "not defined"),
    ("{{ 1 // 0 }}", r"\(ZeroDivisionError\)"),
    ("{{ raise_exception('no\\ud800') }}", r"rejected this conversation: no\?"),
    ("{{ raise_exception() }}", "argument"),
    ("{{ raise_exception('x' * 100000) }}", "x{2000}$"),
])
def test_other_failures(source: str, error: str) -> None:
    with pytest.raises(TemplateError, match=error):
        ChatTemplate(source).render(USER)


def test_names_of_characters_and_identifiers() -> None:
    """Both need modules of Python that are imported at their first use."""
    assert ChatTemplate("{% set ñ = '\\N{BULLET}\\xe9' %}{{ ñ }}").render(USER) == "•é"


def test_data_arrives_unchanged() -> None:
    """Types, keys and numbers that JSON would change."""
    data = {"pair": (1, "é🙂"), "keys": {1: "a", None: "b", 2.5: "c", False: "d"}, "big": 10 ** 40, "nan": float("inf"),
            "zero": -0.0, "nul": "a\0b"}
    source = "{{ x.pair }}{{ x['keys'] }}{{ x.big }}{{ x.nan }}{{ x.zero }}{{ x.nul }}"
    assert ChatTemplate(source).render(USER, x=data) == "".join(
        str(data[name]) for name in ("pair", "keys", "big", "nan", "zero", "nul"))


def test_no_state_remains_between_renders() -> None:
    template = ChatTemplate("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
                            "{{ ns.n }}{{ seen is defined }}{% set seen = 1 %}")
    assert {template.render(USER) for _ in range(5)} == {"1False"}
    assert rendering.renderers().children._all
