"""Options of ``mpool serve``: one table for the command line, the environment and the configuration file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import mpool

pytest.importorskip("starlette")
pytest.importorskip("msgspec")

from mpool.cli import main  # noqa: E402
from mpool.cli.parser import make_parser  # noqa: E402
from mpool.cli.serving import configured  # noqa: E402
from mpool.config import PoolConfig, same_queue_capacities  # noqa: E402
from mpool.server import application, create_app  # noqa: E402
from mpool.server.option_table import GROUPS, NOT_OPERATED, OPTIONS, size_of  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
#: Option -> a value on the command line; the value of its field. Every other option is a list of texts.
VALUES: dict[str, tuple[str, Any]] = {
    "compute": ("int8", "int8"), "weights": ("mapped", "mapped"), "kv_dtype": ("int8", "int8"),
    "keep_alive": ("1h30m", "1h30m"), "memory": ("1.5G", 3 << 29), "process_memory": ("64MiB", 64 << 20),
    "isolation": ("process", "process"), "policy": ("vision=p2c,text_to_text=pack",
                                                    {"vision": "p2c", "text_to_text": "pack"}),
    "batch_wait": ("0.001", 0.001), "request_timeout": ("none", None), "max_body": ("64K", 65_536),
    "max_bodies": ("1M", 1 << 20), "max_header": ("2048", 2048), "host": ("::1", "::1"), "log_format": ("json", "json"),
    "draft": ("d", "d"), "token_file": ("/t", "/t")}
FIELDS = {"pool": {field.name for field in dataclasses.fields(PoolConfig)},
          "server": {field.name for field in dataclasses.fields(Settings)}}


def given_to(name: str) -> tuple[str, Any]:
    """Return a text for an option, and the value that it stands for."""
    kind = OPTIONS[name].kind
    if kind.many:
        text = {"allow_origins": "https://a.example", "allow_hosts": "a.example"}.get(name, "/a")
        return text, [text]
    if name in VALUES:
        return VALUES[name]
    return ("true", True) if bool in kind.types else ("1", 1) if name == "verbose" else ("9", 9)


def test_every_field_is_an_option() -> None:
    """Fields of the pool and of the server, except those that no operator sets, and the token, which is in a file."""
    assert FIELDS["pool"] - {option.pool for option in OPTIONS.values()} == set(NOT_OPERATED)
    assert FIELDS["server"] - {option.server for option in OPTIONS.values()} == {"token"}


def test_defaults_are_those_of_the_fields() -> None:
    checked = 0
    for option in OPTIONS.values():
        for owner, held in (("pool", PoolConfig()), ("server", Settings())):
            default = getattr(held, getattr(option, owner), None)
            if option.default and " " not in option.default and default is not None:  # others are words
                assert option.kind.read(option.default) == default, option.name
                checked += 1
    assert checked >= 39


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("host", "verbose")])
def test_an_option_a_variable_and_a_line_have_the_same_value(name: str, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """The value arrives in the field; the command line takes precedence over the variable, and that over the file."""
    option, (text, value) = OPTIONS[name], given_to(name)
    parse = make_parser().parse_args
    switch = [option.flag] if bool in option.kind.types else [option.flag, text]
    path = tmp_path / "f.toml"
    path.write_text(f"{name} = {value!r}\n".replace("True", "true").replace("'", '"') if not isinstance(value, dict)
                    and value is not None else f'{name} = "{text}"\n')
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path))
    found = [configured(parse(["serve", *switch])), configured(parse(["serve", "--config", str(path)]))]
    monkeypatch.setenv(option.variable, text)
    found.append(configured(parse(["serve"])))
    for one in found:
        assert one.values == {name: value}
        if option.pool in FIELDS["pool"] and name != "model_folders":
            assert getattr(one.pool_config(), option.pool) == value
        elif name == "queue_capacity":
            assert one.pool_config() == PoolConfig(**same_queue_capacities(9))
        if option.server:
            held = getattr(one.settings()[0], option.server)
            assert (list(held) if isinstance(held, tuple) else held) == value


def test_the_command_line_precedes_variables_and_these_the_file(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.toml"
    path.write_text('memory = "1G"\nthreads = 1\nmax-n = 1\nonly = true\nmodels = ["a"]\n')
    monkeypatch.setenv("MPOOL_SERVER_CONFIG", str(path))
    monkeypatch.setenv("MPOOL_SERVER_THREADS", "2")
    monkeypatch.setenv("MPOOL_SERVER_MAX_N", "2")
    monkeypatch.setenv("MPOOL_SERVER_ONLY", "0")
    monkeypatch.setenv("MPOOL_SERVER_MODELS", "b, c=d,")
    found = configured(make_parser().parse_args(["serve", "--max-n", "3"])).values
    assert found == {"memory": 1 << 30, "threads": 2, "max_n": 3, "only": False, "models": ["b", "c=d"]}
    found = configured(make_parser().parse_args(["serve", "e", "-m", "f", "--threads", "4"])).values
    assert (found["models"], found["threads"]) == (["f", "e"], 4)


@pytest.mark.parametrize("line, said", [
    ('memry = "4G"', "memry is not an option; did you mean memory?"), ('memory = "4X"', "memory in {} must be "),
    ('threads = "4"', "threads in {} must be an integer, got '4'"), ("threads = 999", "threads in {} must be "),
    ("strict = 1", "strict in {} must be true or false"), ("port = 99999", "port in {} must be "),
    ("[server]\nport = 1", "[server] is not an option"), ("memory = ", "is not TOML"),
    ("keep_alive = 'soon'", "keep_alive in {} must be "), ("models = 5", "models in {} must be a list of texts"),
    ("isolation = 'proces'", "isolation in {} must be one of thread, process"),
    ('token = "t0kent0kent0kent0ken"', "token is not an option; did you mean token_file?"),
    ('model = "a"\nmodels = ["b"]', "model and models are the same option"),
    ('allow_hosts = ["a b"]', "allow_hosts in {} must be "), ("pin = 'absent'", "pin in {} must be ")])
def test_lines_that_are_refused(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded; the error names the line, what it has and what is allowed, and shows no token."""
    path = tmp_path / "f.toml"
    path.write_text(line)
    assert main(["serve", "--only", "--port", "0", "--config", str(path)] if "port" not in line
                else ["serve", "--only", "--config", str(path)]) == 1
    told = capsys.readouterr().err
    assert said.format(path) in told and "t0ken" not in told


@pytest.mark.parametrize("name, text", [("MEMORY", "4X"), ("THREADS", "-1"), ("STRICT", "perhaps"),
                                        ("ISOLATION", "fork"), ("ALLOW_ORIGINS", "x"), ("PORT", "tcp://10.0.0.1:80")])
def test_variables_that_are_refused(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable; also where another ASGI server runs the application."""
    monkeypatch.setenv(f"MPOOL_SERVER_{name}", text)
    assert main(["serve", "--only"]) == 1
    with pytest.raises(mpool.InvalidArgument) as caught:
        create_app()
    assert caught.value.param == f"MPOOL_SERVER_{name}"


def test_the_application_has_the_options_of_the_environment(bert: Path, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "f.toml", list[Any]()
    path.write_text(f'models = ["b={bert}"]\nonly = true\nmemory = "2G"\nmax_n = 3\n')
    monkeypatch.setenv("MPOOL_SERVER_CONFIG", str(path))
    monkeypatch.setenv("MPOOL_SERVER_ISOLATION", "process")
    make = application.State
    monkeypatch.setattr(application, "State", lambda *given: made.append(make(*given)) or made[0])
    create_app()
    with made[0].pool as pool:
        assert (pool.config.memory_bytes, pool.config.isolation) == (2 << 30, "process")
        assert made[0].settings.max_n == 3 and [one.name for one in made[0].models.here()] == ["b"]


@pytest.mark.parametrize("text, size", [("1024", 1024), ("4G", 4 << 30), ("4GB", 4 << 30), ("4gib", 4 << 30),
                                        ("1.5k", 1536), (" 2 M ", 2 << 20), ("1T", 1 << 40)])
def test_sizes(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "4X", "4 G G", "1e9", "nan", "9" * 40])
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        size_of(text)


def documented() -> str:
    """Return the tables of docs/settings.md. ``python tests/python/server/test_server_configuring.py`` prints them."""
    parts = []
    for title, options in GROUPS.items():
        rows = [(f"`{option.flag}`" + (f"; in a file `{option.name}`" if option.name != option.dest else ""),
                 f"`{option.variable}`", option.meaning + (f" (default: {option.default})" if option.default else ""))
                for option in options]
        parts += [f"### {title[0].upper()}{title[1:]}", "\n".join(
            f"| {' | '.join(row)} |" for row in (("option", "variable", "meaning"), ("---",) * 3, *rows))]
    return "\n\n".join(parts).replace("*", "\\*")


def test_settings_are_documented() -> None:
    """docs/settings.md has the tables."""
    assert documented() in (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), documented()


if __name__ == "__main__":
    print(documented())
