"""The dashboard in headless Chromium, driven by selenium. Skipped if Chromium is not installed.

``MPOOL_SCREENSHOTS=FOLDER`` saves screenshots of the page: light, dark and narrow.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from servers import ask, idle, serving

pytest.importorskip("selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None,
                                reason="needs chromium and chromium-driver (apt-get install chromium chromium-driver)")
TOKEN = "a-token-of-some-length"
MODELS = ["digits-clip", "digits-llava", "digits-sd3"]
WAITS = 60.0


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[Any]:
    with serving([f"llama={llama}", *MODELS], max_tokens=200_000) as made:
        yield made


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield made
    finally:
        made.quit()


@pytest.fixture
def page(driver: Any, server: Any) -> Any:
    """The page, reloaded, with its first snapshot. Warnings and errors in the browser's log fail the test."""
    driver.get("about:blank")
    driver.get_log("browser"), driver.get_log("performance")
    driver.set_window_size(1200, 1000)
    driver.get(server.url + "/")
    until(lambda: text(driver, "status") == "healthy")
    until(lambda: driver.find_elements(By.CSS_SELECTOR, "#model option"))
    yield driver
    assert not [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def until(done: Callable[[], Any]) -> Any:
    """Wait until a function returns a true value, and return this value."""
    deadline = time.monotonic() + WAITS
    while True:
        found = done()
        if found:
            return found
        assert time.monotonic() < deadline, f"the condition was not met within {WAITS} s"
        time.sleep(0.02)


def text(driver: Any, name: str) -> str:
    found: str = driver.execute_script("return document.getElementById(arguments[0]).textContent", name)
    return found


def choose(driver: Any, task: str, model: str) -> None:
    driver.find_element(By.ID, f"task-{task}").click()
    driver.find_element(By.CSS_SELECTOR, f"#model option[value='{model}']").click()


def fill(driver: Any, name: str, value: str) -> None:
    field = driver.find_element(By.ID, name)
    field.clear()
    field.send_keys(value)


def save_screenshot(driver: Any, name: str) -> None:
    folder = os.environ.get("MPOOL_SCREENSHOTS")
    if folder:
        driver.save_screenshot(os.path.join(folder, name + ".png"))


def test_page_loads_nothing_from_other_servers(page: Any, server: Any) -> None:
    import json

    until(lambda: page.find_elements(By.CSS_SELECTOR, "#pools tr"))
    seen = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = {message["params"]["request"]["url"] for message in seen
             if message["method"] == "Network.requestWillBeSent"}
    urls = {url for url in urls if not url.startswith(("data:", "about:"))}
    assert urls and all(url.startswith(server.url + "/") for url in urls), urls
    assert not [message for message in seen if message["method"] == "Network.loadingFailed"]
    assert {row.text.split()[0] for row in page.find_elements(By.CSS_SELECTOR, "#pools tr")} \
        == set(server.state.pool.pools)
    # the browser refuses to run a script that, for example, a model's output injects
    page.execute_script("const one = document.createElement('script'); one.textContent = 'window.ran = 1';"
                        "document.body.append(one)")
    assert page.execute_script("return window.ran") is None
    complaints = [entry["message"] for entry in page.get_log("browser")]
    assert len(complaints) == 1 and "Content Security Policy" in complaints[0]


def test_chat_agrees_with_the_library(page: Any, server: Any) -> None:
    wanted = server.state.pool.chat([{"role": "user", "content": "Name three <b>colours</b>."}], "llama",
                                    temperature=0, max_tokens=60)
    choose(page, "chat", "llama")
    for name, value in (("text", "Name three <b>colours</b>."), ("tokens", "60"), ("temperature", "0")):
        fill(page, name, value)
    page.find_element(By.ID, "run").click()
    until(lambda: "completion tokens" in text(page, "progress"))
    assert page.execute_script("return document.querySelector('#output pre:last-child').textContent") == wanted.text
    assert f"{wanted.usage.completion_tokens} completion tokens" in text(page, "progress")
    assert page.execute_script("return document.querySelectorAll('#output pre *').length") == 0
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#models tr[data-key='llama'] .workers .badge"))


def test_request_in_flight_is_shown_and_cancelled(page: Any, server: Any) -> None:
    import threading

    found: list[Any] = []
    body = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16_000, "n": 8,
            "ignore_eos": True}
    thread = threading.Thread(target=lambda: found.append(ask(server, "/v1/chat/completions", body)))
    thread.start()
    try:
        button = until(lambda: page.find_elements(By.CSS_SELECTOR, "#requests button"))[0]
        button.click()
        until(lambda: "was cancelled" in text(page, "cancel-result"))
    finally:
        thread.join(WAITS)
    assert found[0][0] == 499 and found[0][1]["error"]["code"] == "cancelled"
    until(lambda: not page.find_elements(By.CSS_SELECTOR, "#requests button"))
    idle(server)


def test_last_requests_are_listed_and_filtered(page: Any, server: Any) -> None:
    body = {"model": "llama", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
    assert ask(server, "/v1/completions", body)[0] == 200
    assert ask(server, "/v1/completions", {"model": "<b>no</b>", "prompt": "Hello"})[0] == 404
    found = ask(server, "/api/mpool/history")[1]["requests"]
    page.find_element(By.CSS_SELECTOR, "#history-section summary").click()
    rows = until(lambda: page.find_elements(By.CSS_SELECTOR, "#history tr th"))
    assert rows[0].text == found[0]["id"] and rows[1].text == found[1]["id"]
    cells = [one.text for one in page.find_elements(By.CSS_SELECTOR, "#history tr:nth-child(2) td")]
    assert cells[1:4] == ["/v1/completions", "llama\ntext_to_text", "127.0.0.1"]
    assert cells[5:] == [str(found[1]["prompt_tokens"]), "3", "completed"]
    assert page.find_element(By.CSS_SELECTOR, "#history tr td:nth-child(4)").text == "<b>no</b>"
    fill(page, "history-filter", "<B>")
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#history tr")) == 1)
    save_screenshot(page, "history")


def test_image_tasks_of_the_playground(page: Any, server: Any) -> None:
    folder = resources.files("mpool").joinpath("demo_models/images")
    files = sorted(str(one) for one in folder.iterdir() if one.name.endswith(".png"))[:2]
    choose(page, "embed_image", "digits-clip")
    page.find_element(By.ID, "files").send_keys("\n".join(files))
    page.find_element(By.ID, "run").click()
    until(lambda: "2 vectors" in text(page, "progress"))
    assert len(page.find_elements(By.CSS_SELECTOR, "#output svg rect")) > 2
    choose(page, "vision", "digits-llava")
    fill(page, "text", "What digit is it?")
    fill(page, "tokens", "8")
    page.find_element(By.ID, "run").click()
    until(lambda: "completion tokens" in text(page, "progress"))
    choose(page, "image", "digits-sd3")
    fill(page, "text", "a three")
    page.find_element(By.ID, "run").click()
    until(lambda: "generated" in text(page, "progress"))
    assert page.execute_script("return document.querySelector('#output img').naturalWidth") > 0
    save_screenshot(page, "light")


def test_page_can_be_used_with_the_keyboard(page: Any) -> None:
    """Tab reaches every control and no control traps the focus; arrow keys choose a task; Enter runs it."""
    seen: list[str] = []
    for _ in range(60):
        webdriver.ActionChains(page).send_keys(Keys.TAB).perform()
        seen.append(page.execute_script("const at = document.activeElement; return at.id || at.className ||"
                                        "at.getAttribute('aria-labelledby') || at.tagName"))
        if "output" in seen:
            break
    for name in ("skip", "model", "text", "run", "output"):
        assert name in seen, seen
    named = page.execute_script("""return [...document.querySelectorAll('input, select, textarea, button, meter')]
        .filter(one => !(one.labels && one.labels.length) && !one.getAttribute('aria-label') && !one.textContent.trim())
        .map(one => one.outerHTML)""")
    assert named == []
    radio = page.find_element(By.ID, "task-chat")
    radio.click()
    radio.send_keys(Keys.ARROW_DOWN)
    assert page.execute_script("return document.activeElement.id") == "task-vision"
    assert page.find_element(By.ID, "files").is_displayed()
    page.switch_to.active_element.send_keys(Keys.ARROW_UP)
    fill(page, "tokens", "5")
    page.switch_to.active_element.send_keys(Keys.ENTER)
    until(lambda: "completion tokens" in text(page, "progress"))
    page.find_element(By.ID, "text").send_keys(Keys.SHIFT, Keys.TAB)
    assert page.execute_script("return document.activeElement.id") == "model"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_narrow_screens(page: Any, scheme: str) -> None:
    """Text has a contrast ratio of at least 4.5, as level AA of WCAG requires, and the page fits a narrow screen."""
    page.execute_cdp_cmd("Emulation.setEmulatedMedia",
                         {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        until(lambda: page.find_elements(By.CSS_SELECTOR, "#pools tr"))
        time.sleep(0.1)
        low = page.execute_script("""
            const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
            const light = (colour) => parts(colour).slice(0, 3).map(one => one / 255)
                .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
                .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
            const ground = (one) => {
                for (; one; one = one.parentElement) {
                    const colour = getComputedStyle(one).backgroundColor;
                    if ((parts(colour)[3] ?? 1) > 0.5) return colour;
                }
                return 'rgb(255, 255, 255)';
            };
            return [...document.querySelectorAll('body *')].filter(one => one.checkVisibility() && !one.disabled
                && [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())).map(one => {
                const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
                return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 80)];
            }).filter(([contrast]) => contrast < 4.5)""")
        assert low == []
        assert (page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)") \
            == (scheme == "dark")
        save_screenshot(page, f"whole-{scheme}")
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                             {"width": 340, "height": 800, "deviceScaleFactor": 1, "mobile": False})
        assert page.execute_script("return document.documentElement.scrollWidth") <= 340
        save_screenshot(page, f"narrow-{scheme}")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_browser_sends_the_token_as_a_password(driver: Any, llama: Path) -> None:
    with serving([f"llama={llama}"], token=TOKEN) as made:
        driver.get(made.url.replace("http://", f"http://me:{TOKEN}@") + "/")
        until(lambda: text(driver, "status") == "healthy")
        until(lambda: driver.find_elements(By.CSS_SELECTOR, "#model option"))
        driver.get("about:blank")
