"""The dashboard in headless Chromium, driven by selenium: fixtures and actions of its tests.

Importing this module skips the tests if selenium is not installed.
"""

import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from clientpackages import package
from docmodels import cross_encoder
import waiting
from servers import serving

package("selenium", "browser")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver "
                                   "(apt-get install chromium chromium-driver)")
MODELS = ["digits-clip", "digits-llava", "digits-sd3"]
TABS = ["overview", "models", "requests", "playground"]
WAITS = 60.0
until = functools.partial(waiting.until, seconds=WAITS)


@contextmanager
def every_task(llama: Path, bert: Path, folder: Path) -> Iterator[Any]:
    """A server with a model for every task of the playground: llama, bert, ranker and ``MODELS``."""
    ranker = cross_encoder(folder / "ranker")
    with serving([f"llama={llama}", f"bert={bert}", f"ranker={ranker}", *MODELS], max_tokens=200_000) as made:
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
    made.set_script_timeout(WAITS)
    try:
        yield made
    finally:
        made.quit()


@pytest.fixture
def page(driver: Any, server: Any) -> Any:
    """The page, reloaded, with its first snapshot. Warnings and errors in the browser's log fail the test."""
    driver.get("about:blank")
    driver.get_log("browser"), driver.get_log("performance")
    driver.set_window_size(1400, 1000)
    driver.execute_cdp_cmd("Browser.grantPermissions", {
        "origin": server.url, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    driver.get(server.url + "/")
    until(lambda: text(driver, "status") == "healthy")
    yield driver
    assert not [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def text(driver: Any, name: str) -> str:
    found: str = driver.execute_script("return document.getElementById(arguments[0]).textContent", name)
    return found


def find(driver: Any, selector: str) -> list[Any]:
    found: list[Any] = driver.find_elements(By.CSS_SELECTOR, selector)
    return found


def click(driver: Any, name: str) -> None:
    driver.find_element(By.ID, name).click()


def choose_task(driver: Any, task: str) -> None:
    """Choose a task of the playground. Narrow screens have the settings behind a button."""
    opener = driver.find_element(By.ID, "open-settings")
    if opener.is_displayed():
        opener.click()
    click(driver, f"task-{task}")
    if opener.is_displayed():
        click(driver, "close-settings")


def choose(driver: Any, task: str, model: str) -> None:
    click(driver, "tab-playground")
    until(lambda: find(driver, "#model option"))
    choose_task(driver, task)
    driver.find_element(By.CSS_SELECTOR, f"#model option[value='{model}']").click()


def fill(driver: Any, name: str, value: str) -> None:
    field = driver.find_element(By.ID, name)
    field.clear()
    field.send_keys(value)


def attach(driver: Any, count: int) -> list[bytes]:
    """Choose images of digits. Returns the files."""
    folder = resources.files("mpool").joinpath("demo_models/images")
    files = sorted(str(one) for one in folder.iterdir() if one.name.endswith(".png"))[:count]
    driver.find_element(By.ID, "files").send_keys("\n".join(files))
    return [Path(file).read_bytes() for file in files]


def wait_done(driver: Any) -> str:
    """Wait until the playground has no request in flight. Returns its message."""
    until(lambda: driver.execute_script("return document.getElementById('stop').disabled"))
    return text(driver, "progress")


def clipboard(driver: Any) -> str:
    found: str = driver.execute_async_script(
        "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(String(error)))")
    return found


def violations(driver: Any) -> list[tuple[str, list[str]]]:
    """Check the page as it is against the rules of axe. Returns the broken rules, and the elements that break them."""
    rules = package("axe_core_python", "browser")
    driver.execute_script(resources.files(rules).joinpath("axe.min.js").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = driver.execute_async_script("""
        const done = arguments[0];
        axe.run({ resultTypes: ['violations'] }).then(({ violations }) => done(violations),
            (error) => done([{ id: String(error), nodes: [] }]));""")
    return [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found]


def resize(driver: Any, width: int, height: int = 900) -> None:
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
