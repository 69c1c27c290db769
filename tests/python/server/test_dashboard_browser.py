"""The dashboard's page in headless Chromium: tabs, history, requests, hints, keyboard, layout.

Skipped if Chromium is not installed.

``MPOOL_SCREENSHOTS=FOLDER`` saves screenshots of every tab in three widths, light and dark.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool
from browsers import (  # noqa: F401 - fixtures
    MODELS, TABS, WAITS, choose, choose_task, click, driver, every_task, fill, find, needs_browser, page, resize,
    text, until, violations, wait_done)
from servers import ask, server_idle, serving

from selenium import webdriver  # noqa: E402 - browsers.py skips the tests if it is not installed
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = [needs_browser, pytest.mark.builds]
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with every_task(llama, bert, tmp_path_factory.mktemp("ranker")) as made:
        yield made


# ---- the page --------------------------------------------------------------------------------------------------------

def test_page_loads_nothing_from_other_servers(page: Any, server: Any) -> None:
    server.state.pool.embed("x", "bert")
    until(lambda: find(page, "#pools article"))
    seen = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = {message["params"]["request"]["url"] for message in seen
            if message["method"] == "Network.requestWillBeSent"}
    urls = {url for url in urls if not url.startswith(("data:", "about:"))}
    assert urls and all(url.startswith(server.url + "/") for url in urls), urls
    assert not [message for message in seen if message["method"] == "Network.loadingFailed"]
    used = {row.capability for row in server.state.pool.ps() if row.state != "cold"}
    until(lambda: {card.get_attribute("data-key") for card in find(page, "#pools article")} == used)
    # the browser refuses to run a script that, for example, a model's output injects
    page.execute_script("const one = document.createElement('script'); one.textContent = 'window.ran = 1';"
                        "document.body.append(one)")
    assert page.execute_script("return window.ran") is None
    complaints = [entry["message"] for entry in page.get_log("browser")]
    assert len(complaints) == 1 and "Content Security Policy" in complaints[0]


def test_tabs(page: Any, server: Any) -> None:
    """The address names the tab; arrow keys, Home and End move; exactly one panel is visible."""
    def visible() -> list[str]:
        return [name for name in TABS if page.find_element(By.ID, name).is_displayed()]

    assert visible() == ["overview"]
    click(page, "tab-models")
    assert visible() == ["models"] and page.current_url.endswith("/#/models")
    focused = page.switch_to.active_element
    for key, name in ((Keys.ARROW_RIGHT, "requests"), (Keys.END, "playground"), (Keys.ARROW_RIGHT, "overview"),
                      (Keys.ARROW_LEFT, "playground"), (Keys.HOME, "overview")):
        focused.send_keys(key)
        focused = page.switch_to.active_element
        assert visible() == [name] and focused.get_attribute("id") == f"tab-{name}"
        assert [one.get_attribute("id") for one in find(page, "[role=tab][aria-selected=true]")] == [f"tab-{name}"]
    page.get(server.url + "/#/requests")
    page.refresh()
    until(lambda: visible() == ["requests"])


def test_page_that_opens_later_shows_the_past(page: Any, server: Any) -> None:
    server.state.pool.generate("x", "llama", max_tokens=20, ignore_eos=True)
    until(lambda: server.state.series.points(1)["last"] >= 3 and "llama" in server.state.series.points(1)["models"])
    page.refresh()
    known = server.state.series.points(1)["last"]
    curves = until(lambda: [path for path in page.execute_script(
        "return [...document.querySelectorAll('#plots path.curve')].map(path => path.getAttribute('d'))") if path])
    assert curves[0].count("L") >= min(known, 300) - 2  # more points than the page can have seen
    assert "MB" in text(page, "now-memory") or "kB" in text(page, "now-memory")
    for button in find(page, "#ranges button")[::-1]:
        button.click()
        until(lambda: button.get_attribute("aria-pressed") == "true"
              and {"12 h": "12 h ago", "1 h": "60 min ago", "5 min": "5 min ago"}[button.text]
              in page.find_element(By.CSS_SELECTOR, "#plots .ticks:last-child").text)
    figure = find(page, "#plots figure")[3]
    figure.click()
    figure.send_keys(Keys.ARROW_LEFT)
    until(lambda: re.search(r"\d:\d\d:\d\d", figure.text))  # the time that the arrow keys chose
    click(page, "tab-models")
    card = until(lambda: find(page, "article[data-key='llama']"))[0]
    until(lambda: card.find_elements(By.CSS_SELECTOR, ".workers .dot"))
    assert "text generation" in card.text.lower()
    until(lambda: page.execute_script(
        "return document.querySelector(\"[data-key='llama'] path.curve\").getAttribute('d')"))


def test_a_lost_server_is_said(driver: Any, bert: Path) -> None:
    with serving([f"bert={bert}"]) as made:
        driver.get(made.url + "/")
        until(lambda: text(driver, "status") == "healthy")
    until(lambda: text(driver, "status") == "no connection")
    driver.get("about:blank")


# ---- models and events -----------------------------------------------------------------------------------------------

def test_a_model_is_loaded_pinned_and_unloaded(page: Any, server: Any) -> None:
    """With the keyboard. The list shows every model that can be served, loaded or not."""
    server.state.pool.unload("bert")
    click(page, "tab-models")

    def press(label: str) -> None:
        until(lambda: find(page, f"button[aria-label='{label}']:enabled"))[0].send_keys(Keys.ENTER)

    def listed(place: str) -> set[str]:
        return {one.get_attribute("data-key") for one in find(page, f"#{place} > [data-key]")}

    until(lambda: "bert" in listed("idle-models"))
    assert listed("idle-models") | listed("model-cards") == {"llama", "bert", "ranker", *MODELS}
    press("Load bert")
    until(lambda: "bert" in listed("model-cards"))
    press("Pin bert")
    until(lambda: find(page, "button[aria-label='Unpin bert']"))
    assert next(row.pinned for row in server.state.pool.ps() if row.model == "bert")
    press("Unload bert")
    until(lambda: "bert" in listed("idle-models") and "bert" not in listed("model-cards"))
    click(page, "tab-overview")
    until(lambda: [one.text for one in find(page, "#events li strong")][:2] == ["bert", "bert"])
    assert page.execute_script("return document.getElementById('kinds').getBoundingClientRect().width") \
        > 2 * sum(one.size["width"] for one in find(page, "#kinds span"))  # the bar has the length of the limit


def test_hostile_names_are_text(page: Any, server: Any) -> None:
    name = "<img src=x onerror=window.ran=1>"
    assert ask(server, "/v1/embeddings", {"model": name, "input": "x"})[0] == 404
    until(lambda: any(one.text == name for one in find(page, "#events li strong")))
    server.state.events.add("death", name, f"reason {name}", "RECV", worker=1)
    until(lambda: any(name in one.text for one in find(page, "#events li > span")))
    assert page.execute_script("return window.ran ?? document.querySelectorAll('main img').length") == 0


def test_refusals_are_counted_beside_failures(page: Any, server: Any) -> None:
    for _ in range(3):
        assert ask(server, "/v1/embeddings", {"model": "nothing", "input": "x"})[0] == 404
    counted = sum(one["count"] for one in ask(server, "/api/mpool/events")[1]["events"] if one["kind"] == "refusal")
    until(lambda: text(page, "now-refused").split(" ")[0] == str(counted))


def test_a_pull_shows_its_progress_or_why_there_is_none(driver: Any, bert: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def resolve(name: str, offline: bool | None = None, progress: Any = None) -> None:
        if offline:
            raise mpool.errors.OfflineError("not here")
        progress(30, 100)
        gate.wait(WAITS)
        raise mpool.errors.DownloadError("planted")

    monkeypatch.setattr("mpool.server.ollama_models.resolve", resolve)
    pull = "button[aria-label='Pull bge-small-en-v1.5']"
    for offline in (False, True):
        config = mpool.PoolConfig(shutdown_grace=1.0, offline=offline)
        with serving([f"bert={bert}"], config, catalogue=True) as made:
            driver.get(made.url + "/#/models")
            button = until(lambda: find(driver, pull))[0]
            button.send_keys(Keys.ENTER)
            if offline:
                until(lambda: text(driver, "tip") == ask(made, "/api/mpool/servable")[1]["pull_refusal"])
                assert made.state.models.downloads == {} and button.get_attribute("aria-disabled") == "true"
                continue
            bar = until(lambda: find(driver, "#catalogue progress:not([hidden])"))[0]
            until(lambda: (bar.get_property("value"), bar.get_property("max")) == (30, 100))
            gate.set()
            row = driver.find_element(By.CSS_SELECTOR, "#catalogue [data-key='bge-small-en-v1.5']")
            until(lambda: row.find_element(By.CSS_SELECTOR, ".notes").text)  # why it failed
            until(lambda: find(driver, pull)[0].is_enabled())
    driver.get("about:blank")


# ---- requests --------------------------------------------------------------------------------------------------------

def test_request_in_flight_is_shown_and_cancelled(page: Any, server: Any) -> None:
    found: list[Any] = []
    body = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16_000, "n": 8,
            "ignore_eos": True}
    click(page, "tab-requests")
    thread = threading.Thread(target=lambda: found.append(ask(server, "/v1/chat/completions", body)))
    thread.start()
    try:
        button = until(lambda: find(page, "#running button"))[0]
        button.click()
        until(lambda: "was cancelled" in text(page, "cancel-result"))
    finally:
        thread.join(WAITS)
    assert found[0][0] == 499 and found[0][1]["error"]["code"] == "cancelled"
    until(lambda: not find(page, "#running button"))
    server_idle(server)


def test_last_requests_are_listed_and_filtered(page: Any, server: Any) -> None:
    body = {"model": "llama", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
    assert ask(server, "/v1/completions", body)[0] == 200
    assert ask(server, "/v1/completions", {"model": "<b>no</b>", "prompt": "Hello"})[0] == 404
    found = ask(server, "/api/mpool/history")[1]["requests"]
    click(page, "tab-requests")
    rows = until(lambda: find(page, "#history tr th"))
    assert rows[0].text == found[0]["id"] and rows[1].text == found[1]["id"]
    cells = [one.text for one in find(page, "#history tr:nth-child(2) td")]
    assert cells[1:4] == ["/v1/completions", "llama\ntext generation", "127.0.0.1"]
    assert re.search(r"\d (µs|ms|s)$", cells[5])  # the first token
    assert cells[6:] == [str(found[1]["prompt_tokens"]), "3", "completed"]
    assert page.find_element(By.CSS_SELECTOR, "#history tr td:nth-child(4)").text == "<b>no</b>"
    fill(page, "history-filter", "<B>")
    until(lambda: len(find(page, "#history tr")) == 1)
    page.find_element(By.CSS_SELECTOR, "#history-outcome option[value=completed]").click()
    until(lambda: "None" in text(page, "history"))
    page.find_element(By.CSS_SELECTOR, "#history-outcome option[value='-']").click()
    until(lambda: "model_not_found" in text(page, "history"))


def save_screenshot(driver: Any, name: str) -> None:
    folder = os.environ.get("MPOOL_SCREENSHOTS")
    if folder:
        driver.save_screenshot(os.path.join(folder, name + ".png"))


# ---- hints, keyboard, layout -----------------------------------------------------------------------------------------

def test_page_can_be_used_with_the_keyboard(page: Any) -> None:
    """Tab reaches every control and no control traps the focus; arrow keys choose a task; Enter runs it."""
    choose(page, "chat", "llama")
    page.find_element(By.CSS_SELECTOR, "h1").click()
    seen: list[str] = []
    for _ in range(40):
        webdriver.ActionChains(page).send_keys(Keys.TAB).perform()
        seen.append(page.execute_script("return document.activeElement.id"))
        if "run" in seen:
            break
    for name in ("theme", "tab-playground", "task-chat", "model", "system", "tokens", "curl", "python", "new", "turns",
                 "message", "run"):
        assert name in seen, seen
    named = page.execute_script("""return [...document.querySelectorAll('input, select, textarea, button, meter')]
        .filter(one => !(one.labels && one.labels.length) && !one.getAttribute('aria-label') && !one.textContent.trim())
        .map(one => one.outerHTML)""")
    assert named == []
    radio = page.find_element(By.ID, "task-chat")
    radio.click()
    radio.send_keys(Keys.ARROW_DOWN)
    assert page.execute_script("return document.activeElement.id") == "task-embed"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    until(lambda: "vectors" in wait_done(page))


_CONTRAST = """
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const parts = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
                                return [...canvas.getImageData(0, 0, 1, 1).data]; };
    const light = (colour) => parts(colour).slice(0, 3).map(one => one / 255)
        .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
        .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
    const ground = (one) => {
        for (; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if (parts(colour)[3] > 127) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    return [...document.querySelectorAll('body *')].filter(one => one.checkVisibility() && !one.disabled
        && !one.querySelector(':disabled') && !['OPTION', 'NOSCRIPT'].includes(one.tagName)
        && [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())).map(one => {
        const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 80)];
    }).filter(([contrast]) => contrast < 4.5)"""
#: Texts that are cut, that stand outside the window, or that overlap others.
_LAYOUT = """
    const width = document.documentElement.clientWidth, wrong = [], boxes = [];
    const scrolls = (one) => one.closest('.code pre, .wide, .turns, dialog, textarea, select, .stack');
    for (const one of document.querySelectorAll('body *')) {
        if (!one.checkVisibility() || ['OPTION', 'NOSCRIPT'].includes(one.tagName)) continue;
        const own = [...one.childNodes].filter(node => node.nodeType === 3 && node.textContent.trim());
        const style = getComputedStyle(one), name = one.outerHTML.slice(0, 90);
        if (style.position === 'fixed' && one.getBoundingClientRect().right < 0) continue;  // only for screen readers
        if (!scrolls(one) && style.overflowX !== 'visible' && one.scrollWidth > one.clientWidth + 1
            && !one.ownerSVGElement) wrong.push(['cut', name]);
        for (const node of own) {
            const range = document.createRange();
            range.selectNodeContents(node);
            for (const at of range.getClientRects()) {
                if (at.right < -200) continue; // text for screen readers only
                if (!scrolls(one) && (at.right > width + 1 || at.left < -1)) wrong.push(['outside', name]);
                if (!one.closest('header, #tip, .turns')) boxes.push([at.left, at.top, at.right, at.bottom, one, name]);
            }
        }
        if (['BUTTON', 'INPUT', 'SELECT', 'TEXTAREA'].includes(one.tagName) && !scrolls(one)) {
            const at = one.getBoundingClientRect();
            if (at.right > width + 1 || at.left < -1) wrong.push(['outside', name]);
            if (!one.closest('header')) boxes.push([at.left, at.top, at.right, at.bottom, one, name]);
        }
    }
    boxes.sort((a, b) => a[1] - b[1]);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length && boxes[j][1] < boxes[i][3] - 3; j++) {
        const [a, b] = [boxes[i], boxes[j]];
        if (a[4].contains(b[4]) || b[4].contains(a[4])) continue;
        if (Math.min(a[2], b[2]) - Math.max(a[0], b[0]) > 3) wrong.push(['overlap', a[5], b[5]]);
    }
    const all = document.documentElement.scrollWidth;
    if (all > innerWidth) wrong.push(['scrolls', all]);
    return wrong;"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_layout_and_contrast_at_three_widths(page: Any, server: Any, scheme: str) -> None:
    """No horizontal scrolling, no cut or overlapping text, and contrast as level AA of WCAG requires, in every tab."""
    name = "a-model-with-a-name-of-the-greatest-length-" + "x" * 85
    ask(server, "/v1/completions", {"model": name, "prompt": "x"})
    page.execute_cdp_cmd("Emulation.setEmulatedMedia",
                         {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        choose(page, "chat", "llama")
        fill(page, "tokens", "30")
        fill(page, "message", "Hello " + "w" * 200)
        click(page, "run")
        until(lambda: wait_done(page) == "done")
        page.execute_async_script("""const done = arguments[0]; import('/dashboard/markdown.js').then(({ render }) => {
            render(document.querySelector('.markdown'), '# T\\n\\n' + 'long '.repeat(40) + 'y'.repeat(300)
                + '\\n\\n```py\\n' + 'z'.repeat(300) + '\\n```\\n\\n|a|b|\\n|-|-|\\n|' + 'q '.repeat(90) + '|2|');
            done(); })""")
        for width in (1400, 800, 360):
            resize(page, width)
            for tab in TABS:
                click(page, f"tab-{tab}")
                if tab == "requests":
                    until(lambda: find(page, "#history th"))
                    until(lambda: name in text(page, "history"))
                    assert width > 360 or not any(one.is_displayed() for one in find(page, "#requests thead"))
                if tab == "models":
                    until(lambda: find(page, "article[data-key='llama'] .workers .dot"))
                for task in ("embed", "rerank", "image", "chat") if tab == "playground" else ("",):
                    if task:
                        choose_task(page, task)
                    time.sleep(0.05)
                    assert page.execute_script(_LAYOUT) == [], (width, tab, task)
                assert page.execute_script(_CONTRAST) == [], (width, tab)
                if tab != "playground":
                    assert violations(page) == [], (width, tab)
                save_screenshot(page, f"{tab}-{width}-{scheme}")
        assert (page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)") \
            == (scheme == "dark")
        click(page, "theme")
        assert text(page, "theme") == "Theme: light"
        assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(244, 246, 249)"
    finally:
        page.execute_script("localStorage.clear()")
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_browser_sends_the_token_as_a_password(driver: Any, llama: Path) -> None:
    with serving([f"llama={llama}"], token=TOKEN) as made:
        driver.get(made.url.replace("http://", f"http://me:{TOKEN}@") + "/")
        until(lambda: text(driver, "status") == "healthy")
        until(lambda: text(driver, "now-memory") != "–")
        driver.get("about:blank")
