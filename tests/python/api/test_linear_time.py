"""Scans of untrusted text and bytes take linear time. A quadratic scan of these inputs takes hours, in one call of the
interpreter that keeps all other threads waiting. Each case runs in a process that can be killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

N = 2_000_000
CASES = {
    "JPEG, fill bytes before a segment": """
        from mpool.images import structure
        structure.check_head(b"\\xff\\xd8" + b"\\xff" * N, "x")""",
    "JPEG, fill bytes before stuffed zeros": """
        from mpool.images import structure
        structure.check_head(b"\\xff\\xd8" + (b"\\xff" * 10_000 + b"\\0") * (N // 10_000), "x")""",
    "JPEG, fill bytes within a scan": """
        from mpool.images import structure
        scan = b"\\xff\\xda\\0\\2"
        structure.check_scans(b"\\xff\\xd8" + scan + b"\\xff" * N + b"\\0" + scan * 200, 1 << 31, "x")""",
    "duration of many digits": """
        from mpool import durations
        durations.seconds_of("0" * N + "x", "keep_alive")""",
    "grammar of empty lines": """
        from mpool.conversation import grammar, response_formats
        grammar._lark("\\n" * response_formats.MAX_CHARS)""",
    "pattern of unfinished classes": """
        from mpool.conversation import tool_grammar
        tool_grammar._search("[" * N)
        tool_grammar._search("[" * N + chr(92))""",
    "required properties of a function in tags": """
        from mpool.conversation import tool_grammar
        names = [f"p{number}" for number in range(N // 10)]
        schema = {"type": "object", "properties": dict.fromkeys(names, {}), "required": names[::-1] + [[], {}]}
        tool_grammar._tagged(0, tool_grammar.Function("f", schema), [])""",
    "required properties of an object without name": """
        from mpool.conversation import tool_grammar
        names = [str(number) for number in range(N // 5)]
        schema = {"type": "object", "properties": dict.fromkeys(names, {}), "required": [f"{name}x" for name in names]}
        tool_grammar._may_start_with_name(schema)""",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_scans_take_linear_time(case: str) -> None:
    lines = [line.strip() for line in CASES[case].strip().splitlines()]
    code = "\n".join([f"N = {N}", "import mpool", "try:", *(f"    {line}" for line in lines),
                      "except mpool.InvalidArgument: pass", "print('done')"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr


def test_a_class_without_an_end_is_one_character_of_an_expression() -> None:
    from mpool.conversation.tool_grammar import _CHARS

    assert _CHARS.findall(r"a[b\]|c]|\[d[^e|f") == ["a", r"[b\]|c]", "|", r"\[", "d", "[^e|f"]
    assert _CHARS.findall("a[b" + chr(92)) == ["a", "[b" + chr(92)] and _CHARS.findall("a" + chr(92)) == ["a", chr(92)]
