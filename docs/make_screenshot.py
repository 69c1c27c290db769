"""Takes the screenshots of the dashboard: a real server under load, shown by chromium.

    python docs/make_screenshot.py            # writes docs/_static/dashboard*.png

Needs chromium, chromedriver, and the extras ``test`` and ``browser``. The dashboard's texts change with the program:
run this after a change to ``mpool/server/dashboard``.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image

TARGET = Path(__file__).resolve().parent / "_static"
#: Maximum size of a file in bytes.
LARGEST = 120_000
#: Seconds of load before the screenshots.
HISTORY = 240
QUESTION = "Write a Python function that reverses a string."
MODELS = ("SmolLM2-135M-Instruct", "all-MiniLM-L6-v2", "digits-clip", "digits-llava", "digits-sd3")


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(url: str, body: dict[str, object]) -> bytes:
    """The response to a JSON body."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        data: bytes = response.read()
    return data


def keep_busy(url: str, stop: threading.Event) -> list[threading.Thread]:
    """Clients that chat, embed and generate images until ``stop``."""
    bodies = [
        ("/v1/chat/completions", {"model": MODELS[0], "max_tokens": 100, "ignore_eos": True,
                                  "messages": [{"role": "user", "content": "Tell a story about a lighthouse."}]}),
        ("/v1/embeddings", {"model": MODELS[1], "input": [f"Sentence number {n}." for n in range(64)]}),
        ("/v1/images/generations", {"model": MODELS[4], "prompt": "a handwritten seven"}),
    ]

    def client(path: str, body: dict[str, object]) -> None:
        while not stop.is_set():
            post(url + path, body)
            stop.wait(0.5)

    threads = [threading.Thread(target=client, args=pair, daemon=True) for pair in bodies]
    for thread in threads:
        thread.start()
    return threads


def make_events(url: str) -> None:
    """Requests that the server refuses, and models that are unloaded and pinned."""
    for path, body in (("/v1/embeddings", {"model": MODELS[0], "input": "x"}),
                       ("/api/mpool/unload", {"model": MODELS[2]}), ("/api/mpool/unload", {"model": MODELS[3]}),
                       ("/api/mpool/pin", {"model": MODELS[1], "pinned": True}),
                       ("/v1/chat/completions", {"model": "SmolLM2", "messages": [{"role": "user", "content": "Hi"}]})):
        with contextlib.suppress(urllib.error.HTTPError):
            post(url + path, body)


def save(driver: Any, name: str, height: int, scheme: str = "light", width: int = 1200) -> None:
    """Save a screenshot with at most 256 colours."""
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia",
                           {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})
    time.sleep(2)
    image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    path = TARGET / name
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(path, size)
    if size > LARGEST:
        raise SystemExit(f"{path} must have at most {LARGEST:,} bytes, got {size:,}")


def take_playground(driver: Any) -> None:
    """Take the screenshots of the playground: an answer, and a picture of vectors."""
    from selenium.webdriver.common.by import By

    def run() -> None:
        driver.find_element(By.ID, "run").click()
        time.sleep(1)
        while driver.find_element(By.ID, "stop").is_enabled():
            time.sleep(0.2)

    driver.find_element(By.ID, "tab-playground").click()
    time.sleep(2)
    driver.find_element(By.ID, "tokens").clear()
    driver.find_element(By.ID, "tokens").send_keys("220")
    driver.find_element(By.ID, "temperature").send_keys("0")
    driver.find_element(By.CSS_SELECTOR, f"#model option[value='{MODELS[0]}']").click()
    driver.find_element(By.ID, "message").send_keys(QUESTION)
    run()
    driver.execute_script("document.getElementById('turns').scrollTop = 0")
    save(driver, "dashboard-playground.png", 820)
    driver.find_element(By.ID, "task-embed").click()
    driver.find_element(By.CSS_SELECTOR, f"#model option[value='{MODELS[1]}']").click()
    run()
    driver.execute_script("document.querySelectorAll('.point')[1].focus()")
    save(driver, "dashboard-picture.png", 900, "dark")


def take(driver: Any) -> None:
    """Take the screenshots of all tabs."""
    from selenium.webdriver.common.by import By

    save(driver, "dashboard.png", 940)
    driver.execute_script("document.getElementById('memory-title').scrollIntoView()")
    driver.execute_script("scrollBy(0, -110)")
    save(driver, "dashboard-events.png", 640)
    driver.find_element(By.ID, "tab-models").click()
    driver.execute_script("scrollTo(0, 0)")
    save(driver, "dashboard-models.png", 1000, "dark")
    take_playground(driver)
    driver.find_element(By.ID, "tab-requests").click()
    save(driver, "dashboard-phone.png", 800, width=380)


def main() -> int:
    """Start the server, keep it busy, take the screenshots."""
    from selenium import webdriver

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mpool", "serve", "--port", str(port), "--load", "--memory", "1G"]
    for name in MODELS:
        command += ["--model", name]
    server = subprocess.Popen(command, cwd=tempfile.gettempdir())
    stop, threads = threading.Event(), []
    try:
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None:
                    return 1
                time.sleep(0.2)
        threads = keep_busy(url, stop)
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        with tempfile.TemporaryDirectory() as profile:
            for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                             "--hide-scrollbars", f"--user-data-dir={profile}"):
                options.add_argument(argument)
            driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
            try:
                driver.set_window_size(1200, 900)
                driver.get(url + "/")
                time.sleep(HISTORY)
                make_events(url)
                take(driver)
            finally:
                driver.quit()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        server.terminate()
        server.wait(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
