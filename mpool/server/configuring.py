"""The configuration of a server: options of the command line, before variables of the environment, before a file."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..checks import nearest
from ..config import PoolConfig, same_queue_capacities
from ..errors import FileError, InvalidArgument, MpoolError
from ..records import logger
from .option_table import OPTIONS, PREFIX, convert, convert_text
from .settings import Settings, TokenFile, is_loopback

if sys.version_info >= (3, 11):
    import tomllib

log = logger("mpool.server")

#: Variable with the path of the configuration file.
CONFIG = PREFIX + "CONFIG"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The options that were given.

    Attributes:
        values: Name of an option -> value.
        labels: Name of an option -> how errors name it: attribute of the command line, variable, or name in the file.
    """

    values: Mapping[str, Any]
    labels: Mapping[str, str]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an option; the default if it was not given."""
        return self.values.get(name, default)

    def pool_config(self, **defaults: Any) -> PoolConfig:
        """Return the configuration of the pool. ``defaults``: fields that the options take precedence over."""
        given = self.fields("pool")
        capacity = given.pop("queue_capacity", None)
        with self.named("pool"):
            return PoolConfig(**{**defaults, **same_queue_capacities(capacity), **given})

    def settings(self) -> tuple[Settings, TokenFile | None]:
        """Return the settings of the server, and the token with its file; None: the server needs no token.

        A new token is in no file yet: see :meth:`mpool.server.settings.TokenFile.write`.
        """
        given = self.fields("server")
        path = self.get("token_file")
        with self.named("server"):
            file: TokenFile | None
            if path:
                file = TokenFile.named(path)
            else:
                file = None if is_loopback(given.get("host", Settings.host)) else TokenFile.default()
            return Settings(token=None if file is None else file.token, **given), file

    def fields(self, owner: str) -> dict[str, Any]:
        """Return the values by the field of ``"pool"`` or ``"server"``: see :class:`Option`."""
        rows = ((getattr(OPTIONS[name], owner), value) for name, value in self.values.items())
        return {field: value for field, value in rows if field}

    @contextmanager
    def named(self, owner: str = "") -> Iterator[None]:
        """Let errors name an option as it was given. ``owner``: the errors name its fields; "": the options."""
        try:
            yield
        except MpoolError as error:
            for name, label in self.labels.items():
                field = getattr(OPTIONS[name], owner) if owner else name
                if field and (error.param or "").partition("[")[0] == field:
                    error.rename({field: label})
                    break
            raise


def configure(given: Mapping[str, Any] | None = None, path: str | None = None) -> Configuration:
    """Return the options of the command line, of the environment, and of the configuration file.

    Args:
        given: Options of the command line, by name.
        path: Path of the file; None: that of the variable ``MPOOL_SERVER_CONFIG``, if it is set.

    Raises:
        InvalidArgument: A value has the wrong type, or the file has an unknown name.
        FileError: The file cannot be read.
    """
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    path = path or os.environ.get(CONFIG) or None
    if path is not None:
        _read_file(path, values, labels)
    for option in OPTIONS.values():
        text = os.environ.get(option.variable, "")
        if text:
            values[option.name], labels[option.name] = convert_text(option, text, option.variable), option.variable
    for name, value in (given or {}).items():
        values[name], labels[name] = value, OPTIONS[name].dest
    _warn_of_variables()
    return Configuration(values, labels)


def _warn_of_variables() -> None:
    """Warn of variables that are probably misspelt. Others may be those of a service that Kubernetes announces."""
    known = {option.variable for option in OPTIONS.values()} | {CONFIG}
    for name in os.environ:
        close = nearest(name, known, 1, cutoff=0.9) if name.startswith(PREFIX) and name not in known else ()
        if close:
            log.warning("The variable %s is no option and has no effect. Did you mean %s?", name, close[0])


def _read_file(path: str, values: dict[str, Any], labels: dict[str, str]) -> None:
    known = {option.name: option for option in OPTIONS.values()} | {option.dest: option for option in OPTIONS.values()}
    for key, value in _toml(path).items():
        option = known.get(key.replace("-", "_"))
        if option is None:
            raise _unknown(key, value, path)
        label = f"{key} in {path}"
        if option.name in values:
            raise InvalidArgument(f"{path}: {labels[option.name].partition(' ')[0]} and {key} are the same option",
                                  hint="Leave one of them out")
        values[option.name], labels[option.name] = convert(option, value, label), label


def _unknown(key: str, value: object, path: str) -> InvalidArgument:
    if isinstance(value, dict):
        return InvalidArgument(f"{path}: [{key}] is not an option; the file has no sections",
                               hint="Write each option on a line of its own, above all sections")
    close = nearest(key.replace("-", "_"), OPTIONS, 1, cutoff=0.6)
    return InvalidArgument(f"{path}: {key} is not an option" + (f"; did you mean {close[0]}?" if close else ""),
                           hint="docs/settings.md lists the options; `mpool serve --help` prints them")


def _toml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return _parsed(file.read())
    except OSError as error:
        raise FileError(f"{path}: the configuration file cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FileError(f"{path}: the configuration file is not TOML: {error}",
                        hint='A line is NAME = VALUE; texts stand in quotes: memory = "4G"') from None


def _parsed(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        return tomllib.loads(text)
    import tomli

    return tomli.loads(text)


__all__ = ["CONFIG", "Configuration", "configure"]
