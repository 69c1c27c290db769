"""The dashboard's playground in headless Chromium: two models side by side, the picture of vectors, images by drop and
paste, tool calls and reasoning, narrow screens, accessibility.

Skipped if Chromium is not installed. ``MPOOL_SCREENSHOTS=FOLDER`` saves screenshots in three widths, light and dark.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import numpy as np
import pytest
import toolmodels as tm

from browsers import (  # noqa: F401 - fixtures
    choose, choose_task, click, driver, every_task, fill, find, needs_browser, page, resize, text, until, violations,
    wait_done)
from servers import server_idle, serving
from tooldata import WORDS, WRITES

from selenium import webdriver  # noqa: E402 - browsers.py skips the tests if it is not installed
from selenium.webdriver.common.actions.action_builder import ActionBuilder  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = [needs_browser, pytest.mark.builds]
EVIL = "<img src=x onerror=alert(1)>.png"


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with every_task(llama, bert, tmp_path_factory.mktemp("ranker")) as made:
        yield made


#: Records the bodies of chat requests in window.sent. Answers the first one with the given deltas, if there are some.
_STREAM = """
    const deltas = arguments[0], real = window.fetch, encoder = new TextEncoder();
    window.sent = [];
    window.fetch = (path, options) => {
        if (!String(path).endsWith('/v1/chat/completions')) return real(path, options);
        sent.push(JSON.parse(options.body));
        if (!deltas || sent.length > 1) return real(path, options);
        const events = [...deltas.map((delta) => ({ choices: [{ index: 0, delta }] })),
            { choices: [{ index: 0, delta: {}, finish_reason: 'tool_calls' }] },
            { choices: [], usage: { prompt_tokens: 7, completion_tokens: 9 } }];
        return Promise.resolve(new Response(new ReadableStream({ start(stream) {
            for (const event of events) stream.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\n\\n`));
            stream.close();
        } })));
    };"""
#: Makes images of the given names, and drops or pastes them.
_GIVE = """
    const [kind, names, type, done] = arguments, data = new DataTransfer();
    Promise.all(names.map((name, at) => new Promise((resolve) => {
        const canvas = document.createElement('canvas');
        canvas.width = canvas.height = 24 + at;
        canvas.getContext('2d').fillRect(0, 0, 9, 9 + at);
        canvas.toBlob((blob) => resolve(new File([blob], name, { type })), 'image/png');
    }))).then((files) => {
        for (const file of files) data.items.add(file);
        const event = kind === 'drop' ? new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true })
            : new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
        const taken = !document.getElementById('message').dispatchEvent(event);
        setTimeout(() => done(taken), 200);
    });"""


def _answers(driver: Any) -> list[Any]:
    return find(driver, ".exchange:last-child .turn.assistant")


def _say(driver: Any, message: str, state: str = "done") -> None:
    fill(driver, "message", message)
    driver.find_element(By.ID, "message").send_keys(Keys.ENTER)
    until(lambda: wait_done(driver) == state)


def _compare(driver: Any, task: str, models: tuple[str, str]) -> None:
    choose(driver, task, models[0])
    if driver.find_element(By.ID, "compare").get_attribute("aria-pressed") == "false":
        click(driver, "compare")
    driver.find_element(By.CSS_SELECTOR, f"#other option[value='{models[1]}']").click()


# ---- two models ------------------------------------------------------------------------------------------------------

def test_two_models_answer_side_by_side(page: Any, server: Any) -> None:
    """Each model gets the same messages and its own answers; each answer is that of the library."""
    models = ("llama", "digits-llava")
    _compare(page, "chat", models)
    page.execute_script(_STREAM, None)
    fill(page, "tokens", "20")
    fill(page, "temperature", "0")
    talks: dict[str, list[dict[str, str]]] = {name: [] for name in models}
    for question in ("Name a digit.", "And another?"):
        _say(page, question)
        for name, answer in zip(models, _answers(page), strict=True):
            talks[name].append({"role": "user", "content": question})
            wanted = server.state.pool.chat(talks[name], name, temperature=0, max_tokens=20)
            body = page.execute_script("return sent.findLast((one) => one.model === arguments[0])", name)
            assert body["messages"] == talks[name] and body["stream"]
            talks[name].append({"role": "assistant", "content": wanted.text})
            assert f"{wanted.usage.completion_tokens} completion tokens" in answer.text
            assert "first token" in answer.text and ("tokens/s" in answer.text or wanted.usage.completion_tokens < 2)
            assert answer.find_element(By.CSS_SELECTOR, ".model-name").text == name
    left, right = (one.rect for one in _answers(page))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    find(page, ".again")[-1].click()  # only the second model answers again
    until(lambda: wait_done(page) == "done" and page.execute_script("return sent.length") == 5)
    assert page.execute_script("return sent.at(-1)")["messages"] == talks[models[1]][:-1]
    click(page, "compare")  # the conversation goes on with the first model
    _say(page, "Thanks")
    assert page.execute_script("return sent.at(-1)")["messages"][:-1] == talks[models[0]] and len(_answers(page)) == 1


def test_both_models_stream_at_once_and_stop_together(page: Any, server: Any) -> None:
    _compare(page, "chat", ("llama", "llama"))
    fill(page, "tokens", "100000")
    fill(page, "message", "Hello")
    page.execute_async_script("""
        const done = arguments[0], real = window.fetch;
        window.fetch = (path, options) => real(path, options.body  // a random model may end its answer after few tokens
            ? { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) } : options);
        document.getElementById('run').click();
        const wait = () => {
            const busy = [...document.querySelectorAll('.turn[aria-busy] .markdown')]
                .map((one) => one.textContent.length);
            if (busy.length < 2 || Math.min(...busy) < 50) return setTimeout(wait, 2);
            document.getElementById('stop').click();
            done();
        };
        wait();""")
    assert wait_done(page) == "stopped"
    server_idle(server)
    assert all(len(one.text) >= 50 for one in find(page, ".turn.assistant .markdown"))


def test_one_model_that_fails_leaves_the_other(page: Any, server: Any) -> None:
    _compare(page, "chat", ("llama", "digits-llava"))
    page.execute_script("""
        const real = window.fetch;
        window.fetch = (path, options) => real(path, options.body
            ? { ...options, body: options.body.replace('llama', 'gone') } : options);""")
    fill(page, "tokens", "5")
    fill(page, "message", "Hello")
    click(page, "run")
    until(lambda: "gone" in wait_done(page))
    failed, answered = _answers(page)
    assert "gone" in failed.find_element(By.CSS_SELECTOR, "[role=alert]").text
    assert "completion tokens" in answered.text
    assert not answered.find_element(By.CSS_SELECTOR, "[role=alert]").is_displayed()
    assert [entry for entry in page.get_log("browser") if "404" in entry["message"]]  # the browser logs it, too


def test_two_models_of_other_tasks_are_compared(page: Any) -> None:
    _compare(page, "embed", ("bert", "digits-clip"))
    fill(page, "text", "a\nb\nc")
    click(page, "run")
    until(lambda: len(find(page, "#output .picture")) == 2 and wait_done(page))
    assert [one.text.split(" in ")[0] for one in find(page, "#output .speeds")] \
        == ["3 vectors of 32 numbers", "3 vectors of 64 numbers"]
    choose_task(page, "rerank")  # one model for this task
    assert not page.find_element(By.ID, "compare").is_enabled() and not page.find_element(By.ID, "other").is_displayed()


# ---- tool calls and reasoning ----------------------------------------------------------------------------------------

def test_reasoning_and_tool_calls_are_folded_and_results_are_sent(page: Any) -> None:
    deltas = [{"role": "assistant"}, {"reasoning_content": "<b>why</b> "}, {"reasoning_content": "not"},
              {"content": "I **ask**."},
              {"tool_calls": [{"index": 0, "id": "one", "type": "function",
                               "function": {"name": "<i>f</i>", "arguments": ""}}]},
              *({"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"x": "<u>', '</u>"}')),
              {"tool_calls": [{"index": 1, "id": "two", "type": "function",
                               "function": {"name": "g", "arguments": "{}"}}]}]
    choose(page, "chat", "llama")
    page.execute_script(_STREAM, deltas)
    fill(page, "tokens", "4")
    page.execute_script("document.getElementById('tools').value = '{'")
    fill(page, "message", "Hello")
    click(page, "run")
    until(lambda: "Tools" in wait_done(page))  # an invalid list is refused before anything is sent
    click(page, "tools-example")
    click(page, "run")
    until(lambda: wait_done(page) == "done")
    assert page.execute_script("return sent[0].tools[0].function.name") == "get_weather"
    assert [one.get_attribute("open") for one in find(page, ".turn details")] == [None] * 3
    assert page.execute_script("return document.querySelector('.thought pre').textContent") == "<b>why</b> not"
    assert page.execute_script("return document.querySelector('.call pre').textContent") == '{\n  "x": "<u></u>"\n}'
    assert not find(page, ".turn b, .turn i, .turn u") and find(page, ".turn .markdown strong")
    for call, result in zip(find(page, ".call"), ("sunny", "12:00"), strict=True):
        call.find_element(By.TAG_NAME, "summary").click()
        call.find_element(By.TAG_NAME, "textarea").send_keys(result)
    page.execute_script("document.getElementById('tools').value = ''")  # the test's model has no format of tool calls
    page.find_element(By.ID, "message").send_keys(Keys.ENTER)  # no message: the results alone
    until(lambda: page.execute_script("return sent.length") == 2 and wait_done(page) != "running")
    assistant, *results = page.execute_script("return sent[1].messages.slice(1)")
    assert assistant["content"] == "I **ask**." and [one["function"] for one in assistant["tool_calls"]] \
        == [{"name": "<i>f</i>", "arguments": '{"x": "<u></u>"}'}, {"name": "g", "arguments": "{}"}]
    assert results == [{"role": "tool", "tool_call_id": "one", "content": "sunny"},
                       {"role": "tool", "tool_call_id": "two", "content": "12:00"}]


def test_tool_call_of_a_model_and_its_result(driver: Any, tmp_path: Path) -> None:
    """The server accepts the messages that the page sends, and the template shows the result to the model."""
    pytest.importorskip("llguidance")
    model = chainmodels.save(tmp_path, tm.HERMES, WRITES, WORDS)
    with serving([f"writes={model}"]) as made:
        driver.get(made.url + "/#/playground")
        until(lambda: find(driver, "#model option"))
        driver.execute_script(_STREAM, None)
        driver.execute_script("document.getElementById('tools').value = arguments[0]", json.dumps([tm.CLOCK]))
        for name, value in (("tokens", "60"), ("temperature", "0"), ("message", "Time?")):
            fill(driver, name, value)
        click(driver, "run")
        (call,) = until(lambda: wait_done(driver) == "done" and find(driver, ".call"))
        assert "clock" in call.text
        call.find_element(By.TAG_NAME, "summary").click()
        call.find_element(By.TAG_NAME, "textarea").send_keys("noon")
        _say(driver, "Thanks")
        user, assistant, result, last = driver.execute_script("return sent[1].messages")
        assert (result["content"], last["content"]) == ("noon", "Thanks")
        assert assistant["tool_calls"][0]["id"] == result["tool_call_id"]
        assert not find(driver, ".exchange:last-child [role=alert]")[0].is_displayed()
        driver.get("about:blank")


# ---- images ----------------------------------------------------------------------------------------------------------

def test_images_by_drop_and_paste(page: Any) -> None:
    choose(page, "chat", "llama")
    assert page.execute_async_script(_GIVE, "drop", ["a.png"], "image/png")  # the browser does not open the file
    assert not find(page, "#attached li") and "llama" in text(page, "progress")
    choose(page, "chat", "digits-llava")
    page.execute_script(_STREAM, None)
    assert page.execute_async_script(_GIVE, "drop", ["a.png", EVIL, "c.png"], "image/png")
    assert page.execute_async_script(_GIVE, "paste", ["d.png"], "image/png")
    assert [one.get_attribute("alt") for one in find(page, "#attached img")] == ["a.png", EVIL, "c.png", "d.png"]
    assert page.execute_async_script(_GIVE, "drop", ["e.exe"], "application/x-msdownload")
    assert "e.exe" in text(page, "progress") and len(find(page, "#attached li")) == 4
    find(page, "#attached button")[0].click()
    assert page.execute_script("return document.activeElement.getAttribute('aria-label')") == f"Remove {EVIL}"
    urls = page.execute_script("return [...document.querySelectorAll('#attached img')].map((one) => one.src)")
    fill(page, "tokens", "3")
    _say(page, "Which digits?")
    (message,) = page.execute_script("return sent[0].messages")
    assert [part["image_url"]["url"] for part in message["content"][:-1]] == urls and len(set(urls)) == 3
    assert message["content"][-1] == {"type": "text", "text": "Which digits?"}
    assert len(find(page, ".turn.user img")) == 3 and not find(page, "#attached img")


# ---- the picture of vectors ------------------------------------------------------------------------------------------

def test_points_show_texts_on_hover_and_focus(page: Any, server: Any) -> None:
    choose(page, "embed", "bert")
    lines = ["one two", "<b>three</b>", "four", "one two", "five six seven"]
    page.execute_script("document.getElementById('text').value = arguments[0]", "\n".join(lines))
    click(page, "run")
    until(lambda: "5 vectors" in wait_done(page))
    points = find(page, ".point")
    rows = server.state.pool.embed(lines, "bert").astype(np.float64)
    left, values, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    wanted = np.abs(np.subtract.outer(left[:, 0], left[:, 0]) * values[0])
    at = np.array([one.rect["x"] for one in points])
    shown = np.abs(np.subtract.outer(at, at))
    assert shown / shown.max() == pytest.approx(wanted / wanted.max(), abs=0.02)  # distances along the first component
    page.execute_script("arguments[0].scrollIntoView({ block: 'center' })", points[2])
    webdriver.ActionChains(page).move_to_element(points[2]).perform()
    until(lambda: "3. four" in find(page, ".told")[0].text)
    assert points[2].find_element(By.CSS_SELECTOR, ".label").is_displayed()
    webdriver.ActionChains(page).move_to_element(page.find_element(By.ID, "run")).perform()
    until(lambda: "four" not in find(page, ".told")[0].text)
    assert [one.get_attribute("tabindex") for one in points].count("0") == 1
    points[0].send_keys(Keys.HOME)
    seen = set()
    for _ in lines:  # the arrow keys reach every point, also those at the same place
        active = page.switch_to.active_element
        number = int(active.get_attribute("aria-label").split(":")[0])
        seen.add(number)
        assert f"{number}. {lines[number - 1]}" in find(page, ".told")[0].text and not find(page, ".told b")
        active.send_keys(Keys.ARROW_RIGHT)
    assert seen == {1, 2, 3, 4, 5}


def test_points_of_images_and_of_many_texts(page: Any) -> None:
    choose(page, "embed_image", "digits-clip")
    page.execute_async_script(_GIVE, "drop", ["a.png", EVIL, "c.png"], "image/png")
    click(page, "run")
    until(lambda: "3 vectors" in wait_done(page))
    assert len(find(page, ".point img")) == 3 and find(page, ".point .label")[1].get_attribute("textContent") == EVIL
    choose(page, "embed", "bert")
    page.execute_script("document.getElementById('text').value = arguments[0]", "\n".join(map(str, range(1200))))
    click(page, "run")
    until(lambda: "1200 vectors" in wait_done(page))
    assert page.execute_script("return document.querySelectorAll('#output *').length") < 20_000


# ---- narrow screens, accessibility -----------------------------------------------------------------------------------

def test_phone_shows_the_chat_first_and_settings_behind_a_button(page: Any) -> None:
    choose(page, "chat", "llama")
    try:
        resize(page, 390, 844)
        settings, opener, run = (page.find_element(By.ID, name) for name in ("settings", "open-settings", "run"))
        assert not settings.is_displayed() and opener.get_attribute("aria-expanded") == "false"
        assert page.execute_script("return document.documentElement.scrollHeight") <= 844
        turns = page.find_element(By.ID, "turns").rect
        assert turns["height"] > 300 and turns["y"] + turns["height"] <= run.rect["y"] < 844
        opener.send_keys(Keys.ENTER)
        assert settings.is_displayed() and opener.get_attribute("aria-expanded") == "true"
        assert page.execute_script("return document.getElementById('settings').contains(document.activeElement)")
        fill(page, "tokens", "3")
        page.switch_to.active_element.send_keys(Keys.ESCAPE)
        assert not settings.is_displayed() and page.switch_to.active_element == opener
        opener.click()
        beside = ActionBuilder(page)
        beside.pointer_action.move_to_location(195, 20).click()
        beside.perform()
        until(lambda: not settings.is_displayed())
        _say(page, "Hello")
        assert "3 completion tokens" in _answers(page)[0].text
        choose_task(page, "embed")
        assert page.find_element(By.ID, "text").is_displayed() and not settings.is_displayed()
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


_ANSWER = """# Title

Text with `code`, *emphasis* and [a link](https://a.example).

> quoted

| a | b |
|---|---|
| 1 | 2 |

```python
@x
def f(a=1):  # why
    return "s" if None else g(a)
```
```json
{"a": [true, 1]}
```"""


def _save(driver: Any, name: str) -> None:
    folder = os.environ.get("MPOOL_SCREENSHOTS")
    if folder:
        driver.save_screenshot(os.path.join(folder, name + ".png"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_playground_breaks_no_rule_of_accessibility(page: Any, scheme: str) -> None:
    """Names, roles, contrast and keyboard, as axe checks them, in every state of the playground."""
    page.execute_cdp_cmd("Emulation.setEmulatedMedia",
                         {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        for width in (1400, 820, 390):
            resize(page, width)
            choose(page, "chat", "llama")
            click(page, "new")
            assert violations(page) == [], (width, "empty")
            page.execute_script(_STREAM, [
                {"reasoning_content": "because"}, {"content": _ANSWER},
                {"tool_calls": [{"index": 0, "id": "one", "function": {"name": "f", "arguments": '{"x": 1}'}}]}])
            _say(page, "Hello")
            assert violations(page) == [], (width, "folded")
            for fold in find(page, ".turn summary"):
                fold.click()
            assert violations(page) == [], (width, "answer")
            _save(page, f"answer-{width}-{scheme}")
            _compare(page, "chat", ("llama", "digits-llava"))
            page.execute_script("document.getElementById('tokens').value = 5")
            _say(page, "Hello")
            assert violations(page) == [], (width, "compare")
            _save(page, f"compare-{width}-{scheme}")
            click(page, "compare")
            choose(page, "embed", "bert")
            click(page, "run")
            until(lambda: "vectors" in wait_done(page))
            page.execute_script("document.querySelector('.point').focus()")
            assert violations(page) == [], (width, "picture")
            _save(page, f"picture-{width}-{scheme}")
            if width < 832:
                click(page, "open-settings")
                assert violations(page) == [], (width, "settings")
                _save(page, f"settings-{width}-{scheme}")
                click(page, "close-settings")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
