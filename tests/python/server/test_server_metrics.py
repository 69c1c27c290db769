"""The series of a server, and what `deploy/` builds on them: scrape configuration, alert rules, Grafana dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Raw, ask, limits, server_idle, serving
from waiting import busy, until

parser = pytest.importorskip("prometheus_client.parser")

DEPLOY = Path(__file__).parents[3] / "deploy"
if not DEPLOY.exists():
    pytest.skip("needs the repository", allow_module_level=True)
TEXT = {"model": "llama", "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path) -> Iterator[Any]:
    """A server that has answered requests of every kind, and has refused others."""
    with serving([f"llama={llama}", f"bert={bert}"]) as made:
        chat = {**TEXT, "messages": [{"role": "user", "content": "abc"}]}
        assert ask(made, "/v1/chat/completions", chat)[0] == 200
        assert ask(made, "/v1/embeddings", {"model": "bert", "input": ["a", "b"]})[0] == 200
        for path, body, status in (("/v1/chat/completions", {**chat, "model": 'evil"}\nmodel'}, 404),
                                   ("/v1/models/evil%0Amodel", None, 404), ("/evil/path", None, 404),
                                   ("/v1/embeddings", {"model": "llama"}, 400)):
            assert ask(made, path, body)[0] == status, path
        with Raw(made) as raw:
            assert raw.request("/v1/models", None, host="evil.example").response()[0] == 421
        made.state.stopping = True
        assert ask(made, "/v1/models")[0] == 503
        made.state.stopping = False
        with Raw(made) as raw:
            assert raw.send(b"EVIL\r\n\r\n").response()[0] == 400
        with limits(made, body_timeout=0.2), Raw(made) as raw:
            assert raw.request("/api/embed", b"{", length=100).response()[0] == 408
        with Raw(made) as raw:  # the client leaves before the response begins
            raw.request("/v1/completions", json.dumps({**TEXT, "prompt": "a", "max_tokens": 4000}).encode())
            until(lambda: busy(made.state.pool))
        server_idle(made)
        yield made


def samples(server: Any) -> list[Any]:
    with Raw(server) as raw:
        text = raw.request("/metrics").response()[2].decode()
    return [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]


def values(server: Any, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(one.labels[label] for label in labels): one.value for one in samples(server)
            if one.name == name and one.value}


def test_requests_are_counted_by_route_and_status(server: Any) -> None:
    found = values(server, "mpool_http_requests_total", "route", "status")
    found.pop(("/metrics", "200"), None)
    assert found == {("/v1/chat/completions", "200"): 1, ("/v1/embeddings", "200"): 1, ("", "404"): 1,
                     ("/v1/chat/completions", "404"): 1, ("/v1/models/{id}", "404"): 1, ("/v1/models", "421"): 1,
                     ("/v1/models", "503"): 1, ("/v1/embeddings", "400"): 1, ("", "400"): 1, ("/api/embed", "408"): 1,
                     ("/v1/completions", "499"): 1}
    times = values(server, "mpool_http_request_seconds_count", "route")
    assert times["/v1/chat/completions",] == 2 and times["/v1/models",] == 2 and times["",] == 2


def test_names_of_clients_become_no_labels(server: Any) -> None:
    found = samples(server)
    assert not [one for one in found if any("evil" in value for value in one.labels.values())]
    assert {one.labels["model"] for one in found if "model" in one.labels} == {"llama", "bert", ""}


def test_histograms_by_model(server: Any) -> None:
    count = {name: values(server, f"mpool_{name}_seconds_count", "model")
             for name in ("request", "queue", "time_to_first_token", "time_per_output_token")}
    once = {("llama",): 1, ("bert",): 1}  # neither those that were refused nor the one whose client left
    assert count["request"] == count["queue"] == once
    assert count["time_to_first_token"] == count["time_per_output_token"] == {("llama",): 1}


def test_names_follow_the_rules_of_prometheus(server: Any) -> None:
    """Counters end in _total, and no other series does; values of seconds and bytes name their unit at the end."""
    with Raw(server) as raw:
        text = raw.request("/metrics").response()[2].decode()
    for family in parser.text_string_to_metric_families(text):
        names = {one.name for one in family.samples}
        assert family.name.startswith("mpool_") and family.documentation
        assert all(name.endswith("_total") == (family.type == "counter") for name in names), names
        assert re.search(r"_(seconds|bytes)(?!$)", family.name) is None
        for unit in re.findall(r"\b(?:seconds|bytes)\b", family.documentation)[:1]:
            assert family.name.endswith(f"_{unit}"), (family.name, family.documentation)
    promtool = shutil.which("promtool")
    if promtool:
        done = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- deploy/ ------------------------------------------------------------------------------------------------------

def selectors(query: str) -> list[tuple[str, list[tuple[str, str, str]], set[str]]]:
    """Return the series that a query in PromQL reads: name, matchers (label, operator, value), and the labels by which
    the query groups."""
    groups = {label.strip() for found in re.findall(r"\bby \(([^)]*)\)", query) for label in found.split(",")}
    bare = re.sub(r"\bby \([^)]*\)", "", query)
    names = re.findall(r"\b(mpool_\w+|up)\b(?:\{([^}]*)\})?", bare)
    assert names, query
    return [(name, re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers), groups) for name, matchers in names]


def missing(query: str, found: list[Any]) -> list[str]:
    """Return the series that a query reads and a server does not have."""
    scraped = {"job": "mpool", "instance": "localhost:11435"}
    known = [(one.name, {**scraped, **one.labels}) for one in found] + [("up", scraped)]
    out = []
    for name, matchers, groups in selectors(query):
        def fits(labels: dict[str, str], matchers: list[tuple[str, str, str]] = matchers) -> bool:
            for label, operator, value in matchers:
                equal = (re.fullmatch(value, labels.get(label, "")) is not None if "~" in operator
                         else labels.get(label, "") == value)
                if equal == operator.startswith("!"):
                    return False
            return True
        if not any(one == name and groups <= labels.keys() and fits(labels) for one, labels in known):
            out.append(f"{name} {matchers} by {groups}")
    return out


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))["panels"]
    return [one for one in found if one["type"] != "row"]


def test_every_query_of_the_dashboard_finds_a_series(server: Any) -> None:
    found = samples(server)
    fill_in = {"$job": "mpool", "$instance": ".*", "$model": ".*", "$__rate_interval": "1m"}
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in fill_in.items():
                query = query.replace(name, value)
            assert "$" not in query and missing(query, found) == [], (panel["title"], query)
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert all(labels <= groups for _, _, groups in selectors(query)), (panel["title"], labels)
    assert missing("rate(mpool_gone_total[1m])", found) and missing('mpool_memory_pressure{kind="a"}', found)
    assert missing("sum by (gone) (mpool_memory_pressure)", found)


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    variables = {one["name"] for one in board["templating"]["list"]}
    assert board["title"] == "mpool" and board["uid"] and variables == {"datasource", "job", "instance", "model"}
    assert "id" not in board  # Grafana would replace the board that has this number
    numbers = [one["id"] for one in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken = set[tuple[int, int]]()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_alert_finds_a_series(server: Any) -> None:
    yaml = pytest.importorskip("yaml")
    found = samples(server)
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text("utf-8"))["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 5
    for rule in group["rules"]:
        assert missing(rule["expr"], found) == [], rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        text = " ".join(rule["annotations"].values())
        labels = set(re.findall(r"\$labels\.(\w+)", text))
        by = set().union(*(groups for _, _, groups in selectors(rule["expr"])))
        assert not by or labels <= by, rule["alert"]


def test_promtool_accepts_the_files(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (package prometheus)")
    for name in ("alerts.yml", "prometheus.yml"):
        shutil.copy(DEPLOY / name, tmp_path)
    (tmp_path / "mpool.token").write_text("token", "ascii")
    done = subprocess.run([promtool, "check", "config", "prometheus.yml"], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"alerts\.yml\s+SUCCESS: \d+ rules found", done.stdout)


def test_the_scrape_example_reaches_the_server(server: Any) -> None:
    """The example has the server's default port, and the name and the scheme that its token guard reads."""
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    from mpool.server.settings import Settings

    assert job["job_name"] == "mpool" and config["rule_files"] == ["alerts.yml"]
    assert target.lower() in Settings().hosts(Settings().port)
    assert job["authorization"] == {"credentials_file": "mpool.token"}  # type Bearer is Prometheus' default
    with Raw(server) as raw:
        assert raw.request(job["metrics_path"]).response()[0] == 200
