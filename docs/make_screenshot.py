"""Takes the screenshot of the dashboard: a real server under load, shown by chromium.

    python docs/make_screenshot.py            # writes docs/_static/dashboard.png

Needs chromium, chromedriver and the ``test`` extra. The dashboard's texts change with the program: run this after a
change to ``mpool/server/dashboard``.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

TARGET = Path(__file__).resolve().parent / "_static" / "dashboard.png"
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
        ("/v1/chat/completions", {"model": MODELS[0], "max_tokens": 400, "ignore_eos": True,
                                  "messages": [{"role": "user", "content": "Tell a story about a lighthouse."}]}),
        ("/v1/chat/completions", {"model": MODELS[0], "max_tokens": 400, "ignore_eos": True,
                                  "messages": [{"role": "user", "content": "List the months and their weather."}]}),
        ("/v1/embeddings", {"model": MODELS[1], "input": [f"Sentence number {n}." for n in range(64)]}),
        ("/v1/images/generations", {"model": MODELS[4], "prompt": "a handwritten seven"}),
    ]

    def client(path: str, body: dict[str, object]) -> None:
        while not stop.is_set():
            post(url + path, body)
            stop.wait(0.2)

    threads = [threading.Thread(target=client, args=pair, daemon=True) for pair in bodies]
    for thread in threads:
        thread.start()
    return threads


def main() -> int:
    """Start the server, keep it busy, take the screenshot."""
    from selenium import webdriver

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mpool", "serve", "--port", str(port), "--load"]
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
                driver.set_window_size(1200, 1010)
                driver.get(url + "/")
                time.sleep(25)  # the plots need 25 s of history
                TARGET.parent.mkdir(exist_ok=True)
                driver.save_screenshot(str(TARGET))
            finally:
                driver.quit()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        server.terminate()
        server.wait(30)
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
