"""The dashboard's playground in headless Chromium: conversations, results, snippets, Markdown.

Skipped if Chromium is not installed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browsers import (  # noqa: F401 - fixtures
    WAITS, attach, choose, click, clipboard, driver, every_task, fill, find, needs_browser, page, text, until,
    wait_done)
from servers import server_idle, serving

from selenium.webdriver.common.by import By  # noqa: E402 - browsers.py skips the tests if it is not installed
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = [needs_browser, pytest.mark.builds]
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with every_task(llama, bert, tmp_path_factory.mktemp("ranker")) as made:
        yield made


# ---- the playground --------------------------------------------------------------------------------------------------

def test_only_models_that_fit_are_offered(page: Any) -> None:
    wanted = {"chat": ["llama", "digits-llava"], "embed": ["bert", "digits-clip"], "rerank": ["ranker"],
              "embed_image": ["digits-clip"], "image": ["digits-sd3"]}
    for task, models in wanted.items():
        choose(page, task, models[0])
        assert [one.text for one in find(page, "#model option")] == models
        assert page.find_element(By.ID, "attach").is_displayed() == (task == "embed_image")
    choose(page, "chat", "digits-llava")
    assert page.find_element(By.ID, "attach").is_displayed()  # a model that sees


def test_tasks_without_a_model_are_disabled(driver: Any, bert: Path) -> None:
    with serving([f"bert={bert}"]) as made:
        driver.get(made.url + "/#/playground")
        until(lambda: find(driver, "#model option"))
        enabled = [one.get_attribute("value") for one in find(driver, "#tasks input") if one.is_enabled()]
        assert enabled == ["embed"] and driver.find_element(By.ID, "task-embed").is_selected()
        driver.get("about:blank")


def test_conversation_agrees_with_the_library(page: Any, server: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name <b>three</b> colours."}]
    choose(page, "chat", "llama")
    for name, value in (("system", "Be brief."), ("tokens", "60"), ("temperature", "0")):
        fill(page, name, value)
    for turn in range(2):
        wanted = server.state.pool.chat(messages, "llama", temperature=0, max_tokens=60)
        page.find_element(By.ID, "message").send_keys(messages[-1]["content"], Keys.ENTER)
        until(lambda: len(find(page, ".turn.assistant:not([aria-busy])")) == turn + 1)
        assert wait_done(page) == "done"
        answer = find(page, ".turn.assistant")[-1]
        assert f"{wanted.usage.completion_tokens} completion tokens" in answer.text
        assert f"{wanted.usage.prompt_tokens} prompt tokens" in answer.text
        answer.find_element(By.CSS_SELECTOR, ".turn-tools button").click()
        until(lambda: clipboard(page) == wanted.text)
        messages += [{"role": "assistant", "content": wanted.text}, {"role": "user", "content": "And <i>two</i> more?"}]
    assert find(page, ".turn.user")[0].text == "Name <b>three</b> colours."
    assert not find(page, ".turn b, .turn i, .turn script")
    find(page, ".again")[-1].click()  # the same request again gives the same answer
    until(lambda: len(find(page, ".turn.assistant:not([aria-busy])")) == 2 and wait_done(page) == "done")
    find(page, ".turn.assistant .turn-tools button")[-2].click()
    until(lambda: clipboard(page) == wanted.text)
    click(page, "new")
    assert not find(page, ".turn")


def test_stop_keeps_the_answer_so_far(page: Any, server: Any) -> None:
    choose(page, "chat", "llama")
    fill(page, "tokens", "100000")
    fill(page, "message", "Hello")
    page.execute_async_script("""
        const done = arguments[0], real = window.fetch;
        window.fetch = (path, options) => real(path, options.body  // a random model may end its answer after few tokens
            ? { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) } : options);
        document.getElementById('run').click();
        const wait = () => {
            if (!(document.querySelector('.markdown')?.textContent.length > 50)) return setTimeout(wait, 2);
            document.getElementById('stop').click();
            window.fetch = real;
            done();
        };
        wait();""")
    assert wait_done(page) == "stopped"
    server_idle(server)
    assert page.execute_script("return document.querySelector('.markdown').textContent.length") > 50
    fill(page, "tokens", "5")
    fill(page, "message", "Again")
    click(page, "run")
    until(lambda: wait_done(page) == "done")
    assert len(find(page, ".turn.assistant")) == 2


def test_errors_of_a_request_are_shown(page: Any) -> None:
    choose(page, "chat", "llama")
    page.execute_script("document.getElementById('temperature').max = ''")
    fill(page, "temperature", "1e9")
    fill(page, "message", "Hello")
    click(page, "run")
    until(lambda: "temperature" in wait_done(page))
    assert "temperature" in find(page, ".turn [role=alert]")[0].text
    assert [entry for entry in page.get_log("browser") if "400" in entry["message"]]  # the browser logs it, too


def test_images_in_a_conversation(page: Any, server: Any) -> None:
    choose(page, "chat", "digits-llava")
    fill(page, "tokens", "8")
    fill(page, "temperature", "0")
    files = attach(page, 2)
    until(lambda: len(find(page, "#attached img")) == 2)
    fill(page, "message", "Which digits are these?")
    click(page, "run")
    until(lambda: wait_done(page) == "done" and find(page, ".turn.assistant"))
    wanted = server.state.pool.vision(files, "Which digits are these?", "digits-llava", max_tokens=8, temperature=0)
    find(page, ".turn.assistant .turn-tools button")[0].click()
    until(lambda: clipboard(page) == wanted.text)
    assert len(find(page, ".turn.user img")) == 2 and not find(page, "#attached img")


def test_vectors_rankings_and_images(page: Any, server: Any) -> None:
    pool = server.state.pool
    choose(page, "embed", "bert")
    fill(page, "text", "one two\nthree\nfour")
    click(page, "run")
    until(lambda: "3 vectors of 32 numbers" in wait_done(page))
    rows = pool.embed(["one two", "three", "four"], "bert").astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    shown = np.array([float(one.text) for one in find(page, ".matrix td span")]).reshape(3, 3)
    assert np.abs(shown - rows @ rows.T).max() < 0.006
    choose(page, "rerank", "ranker")
    fill(page, "query", "a b")
    fill(page, "text", "c\na b\nd e")
    click(page, "run")
    until(lambda: "tokens" in wait_done(page))
    ranking = pool.rerank("a b", ["c", "a b", "d e"], "ranker")
    assert [one.text for one in find(page, ".ranking li span")] == [one.text for one in ranking.results]
    assert [one.text for one in find(page, ".ranking strong")] == [f"{one.score:.4f}" for one in ranking.results]
    choose(page, "embed_image", "digits-clip")
    attach(page, 2)
    time.sleep(0.2)
    click(page, "run")
    until(lambda: "2 vectors" in wait_done(page))
    assert len(find(page, "#output svg rect")) > 2
    choose(page, "image", "digits-sd3")
    fill(page, "text", "a three")
    click(page, "run")
    until(lambda: "generated" in wait_done(page))
    assert page.execute_script("return document.querySelector('#output img').naturalWidth") > 0


# ---- snippets --------------------------------------------------------------------------------------------------------

def _events(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.decode().splitlines()
            if line.startswith("data: {")]


#: Program that runs programs, and prints what they print. Reads {name: program}.
_RUN = """
import contextlib, io, json, sys
found = {}
for name, program in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
    found[name] = printed.getvalue()
print(json.dumps(found))
"""


def test_curl_and_python_give_what_the_playground_shows(page: Any, server: Any, tmp_path: Path) -> None:
    """Every snippet is run as it was copied, and its content is compared with that of the library."""
    pytest.importorskip("openai")
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    pool, snippets = server.state.pool, {}

    def take(task: str) -> None:
        for language in ("curl", "python"):
            click(page, language)
            until(lambda: "Copied" in text(page, "snippet-note"))
            snippets[task, language] = clipboard(page)
            shown = text(page, "snippet-text")
            assert snippets[task, language].startswith(shown.removesuffix("\u2026"))
            page.execute_script("document.getElementById('snippet-note').textContent = ''")
            click(page, "snippet-close")

    odd = "It's \"odd\": $HOME `id` \\n END_OF_BODY {x}\u2028\U0001f600"
    choose(page, "chat", "llama")
    for name, value in (("system", "Be 'brief'."), ("tokens", "12"), ("temperature", "0"), ("seed", "3")):
        fill(page, name, value)
    page.execute_script("document.getElementById('message').value = arguments[0]", odd)
    take("chat")
    choose(page, "chat", "digits-llava")
    (image,) = attach(page, 1)
    until(lambda: find(page, "#attached img"))
    take("vision")
    choose(page, "embed", "bert")
    page.execute_script("document.getElementById('text').value = arguments[0]", odd + "\ntwo")
    take("embed")
    choose(page, "rerank", "ranker")
    take("rerank")
    query, documents = "What makes a dough grow?", page.find_element(By.ID, "text").get_property("value").split("\n")
    choose(page, "embed_image", "digits-clip")
    files = attach(page, 2)
    time.sleep(0.3)
    take("embed_image")
    choose(page, "image", "digits-sd3")
    fill(page, "text", "a three")
    fill(page, "seed", "5")
    take("image")

    def run(command: list[str], given: str = "") -> bytes:
        done = subprocess.run(command, cwd=tmp_path, input=given.encode(), capture_output=True, timeout=WAITS,
                              env={**os.environ, "NO_PROXY": "*"})
        assert done.returncode == 0 and not done.stderr, (command[-1][:100], done.stderr[-2000:])
        return done.stdout

    found = {key: run(["bash", "-euc", code]) for key, code in snippets.items() if key[1] == "curl"}
    programs = {task: code for (task, language), code in snippets.items() if language == "python"}
    printed = json.loads(run([sys.executable, "-c", _RUN], json.dumps(programs)))  # one process: the import is slow
    found.update({(task, "python"): text.encode() for task, text in printed.items()})

    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 3}
    system = {"role": "system", "content": "Be 'brief'."}
    chat = pool.chat([system, {"role": "user", "content": odd}], "llama", **options).text
    parts = [{"type": "image", "image": image}, {"type": "text", "text": odd}]
    vision = pool.chat([system, {"role": "user", "content": parts}], "digits-llava", **options).text
    answers = {"chat": chat, "vision": vision}
    for task, wanted in answers.items():
        assert "".join(choice["delta"].get("content") or "" for event in _events(found[task, "curl"])
                       for choice in event["choices"]) == wanted
        assert found[task, "python"].decode() == wanted + "\n"
    vectors = {"embed": pool.embed([odd, "two"], "bert"),
               "embed_image": pool.embed_image(files, "digits-clip")}
    for task, rows in vectors.items():
        given = [one["embedding"] for one in json.loads(found[task, "curl"])["data"]]
        assert np.array_equal(np.array(given, np.float32), rows)
        first = [line.split(maxsplit=2) for line in found[task, "python"].decode().splitlines()]
        assert [(int(at), int(size)) for at, size, _ in first] == [(0, rows.shape[1]), (1, rows.shape[1])]
        assert np.allclose([json.loads(values) for *_, values in first], rows[:, :4], atol=1e-6)
    ranking = [(one.index, one.score) for one in pool.rerank(query, documents, "ranker").results]
    assert [(one["index"], pytest.approx(one["relevance_score"]))
            for one in json.loads(found["rerank", "curl"])["results"]] == ranking
    assert [(int(line.split()[0]), pytest.approx(float(line.split()[1])))
            for line in found["rerank", "python"].decode().splitlines()] == ranking
    last = _events(found["image", "curl"])[-1]
    assert last["type"] == "image_generation.completed"
    assert (tmp_path / "image.png").read_bytes() == base64.b64decode(last["b64_json"])


def test_snippets_name_the_token_and_do_not_contain_it(driver: Any, llama: Path) -> None:
    with serving([f"llama={llama}"], token=TOKEN) as made:
        driver.get(made.url.replace("http://", f"http://me:{TOKEN}@") + "/#/playground")
        until(lambda: text(driver, "status") == "healthy")
        until(lambda: find(driver, "#model option"))
        fill(driver, "message", "Hello")
        for language, wanted in (("curl", "Bearer $MPOOL_TOKEN"), ("python", 'os.environ["MPOOL_TOKEN"]')):
            click(driver, language)
            until(lambda: "MPOOL_TOKEN" in text(driver, "snippet-note"))
            shown = text(driver, "snippet-text")
            assert wanted in shown and TOKEN not in shown
            click(driver, "snippet-close")
            if language == "curl" and shutil.which("curl"):
                fill(driver, "tokens", "3")
                done = subprocess.run(["bash", "-c", shown], env={**os.environ, "MPOOL_TOKEN": TOKEN},
                                      capture_output=True)
                assert _events(done.stdout)
        driver.get("about:blank")
