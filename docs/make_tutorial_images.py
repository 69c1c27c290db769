"""Makes the images of the tutorials: runs the blocks of their pages, and keeps what the reader gets.

    python docs/make_tutorial_images.py                       # all, into docs/_static
    python docs/make_tutorial_images.py agent --model PATH    # one, with the model of a GGUF file

Needs the extras ``test``, ``ray`` and ``browser``, FastAPI, chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path += [str(DOCS.parent / "tests" / "python" / "helpers")]

import docrunner  # noqa: E402
from make_screenshot import save  # noqa: E402

#: Name -> page, and the file that its program writes; None: a screenshot.
IMAGES = {"notes": ("search-your-notes.md", "notes.svg"), "agent": ("agent-with-tools.md", None),
            "reviews": ("million-texts.md", "reviews.svg")}
QUESTIONS = ("Where is my order 1001?", "How much are two teapots?", "Has order 1002 been sent?")


def ask(driver: Any, url: str) -> None:
    """Ask the agent's page the questions, and take the screenshot."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(url)
    for number, question in enumerate(QUESTIONS, 1):
        driver.find_element(By.ID, "question").send_keys(question)
        driver.find_element(By.TAG_NAME, "button").click()
        WebDriverWait(driver, 300).until(lambda found, count=number: [  # type: ignore[misc]
            one.text != "..." for one in found.find_elements(By.CLASS_NAME, "answer")] == [True] * count)
    save(driver, "tutorial-agent.png", 580, width=720)


def make(name: str, folder: Path) -> None:
    """Run a tutorial in a folder, and keep its image."""
    from selenium import webdriver

    page, output = IMAGES[name]
    docrunner.copy_inputs(folder)
    run = docrunner.PageRun(DOCS / "tutorials" / page, folder)
    try:
        run.run()
        if output is not None:
            shutil.copy(folder / output, DOCS / "_static" / f"tutorial-{output}")
            return
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                         "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"):
            options.add_argument(argument)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            ask(driver, f"http://127.0.0.1:{run.port}/")
        finally:
            driver.quit()
    finally:
        run.close()


def main() -> int:
    """Make the images that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(IMAGES)} (default: all)")
    parser.add_argument("--count", type=int, default=20_000, help="number of texts (default: 20000)")
    parser.add_argument("--model", metavar="REF", help="model of the agent (default: that of the page)")
    arguments = parser.parse_args()
    docrunner.TIMEOUT = 3600
    docrunner.REPLACED = {"COUNT = 1_000_000": f"COUNT = {arguments.count:_}"}
    docrunner.STAND_INS = {"Qwen2.5-Coder-0.5B-Instruct": arguments.model} if arguments.model else {}
    for name in arguments.names or IMAGES:
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
