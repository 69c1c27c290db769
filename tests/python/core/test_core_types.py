"""The C extension without models: tables, specs, GGUF, errors, dequantisation."""

import builtins
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpool
from mpool import _core, errors
from mpool.names import CAPABILITIES


def test_status_rows_match_the_error_classes() -> None:
    rows = _core.status_table()
    assert rows[0][:2] == (0, "OK")
    classes = {getattr(errors, name) for name in errors.__all__} - {errors.MpoolError, errors.PoolError}
    seen = set()
    for code, name, text, python_class, builtin in rows[1:]:
        cls = getattr(errors, python_class)
        assert (cls.code, cls.name) == (code, name)
        assert text and issubclass(cls, errors.MpoolError)
        assert issubclass(cls, getattr(builtins, builtin))
        assert issubclass(cls, errors.PoolError) == (50 <= code <= 80)
        seen.add(cls)
    assert seen == classes


def test_tables() -> None:
    assert tuple(row[0] for row in _core.capabilities()) == CAPABILITIES
    names = set(CAPABILITIES)
    assert _core.architectures() and all(capability in names for _, capability in _core.architectures())
    assert all(variable.startswith("MPOOL_") and meaning for variable, _, _, meaning in _core.options())
    config = _core.config()
    assert set(config) >= {"cpu", "kernels", "blas", "compute_threads", "nodes", "memory_bytes", "compiler", "version",
                           "sanitizer"}
    assert config["nodes"] and all(set(node) == {"number", "cpus"} for node in config["nodes"])
    assert config["compute_threads"] >= 1 and config["memory_bytes"] > 1 << 28
    assert config["blas"]["why"] and config["cpu"]["level"]
    assert all(variant for variant in config["kernels"].values())
    assert _core.__version__ == config["version"]


def test_dequantize() -> None:
    assert _core.dequantize("F32", np.array([1.5, -2.0], np.float32).tobytes(), 2).tolist() == [1.5, -2.0]
    assert _core.dequantize("F16", np.array([0.5], np.float16).tobytes(), 1).tolist() == [0.5]
    assert _core.dequantize("Q8_0", b"", 0).shape == (0,)
    for args, words in [(("Q9", b"", 0), "no storage type"), (("I8", b"a", 1), 'weights .*got "I8"'),
                        (("F64", b"a" * 8, 1), 'weights .*got "F64"'), (("AWQ4", b"a" * 16, 32), "weights .*got"),
                        (("Q4_0", b"a" * 18, 31), "multiple of 32"), (("Q4_0", b"a" * 17, 32), "18 bytes, got 17"),
                        (("F32", b"", -1), "`n` must be a multiple of 1, 0 or more, got -1")]:
        with pytest.raises(mpool.InvalidArgument, match=words):
            _core.dequantize(*args)


# --- specs ---


def test_spec_accepts_every_type_of_value() -> None:
    spec = _core.Spec("llama")
    for name, value in {"bool": True, "int": -5, "float": 0.5, "str": "é", "bytes": b"\xff", "bools": [True, False],
                        "ints": [1, 2, 3], "floats": [1, 0.5], "strings": ["a", "bc", b"\xfe"], "none": [],
                        "tuple": (1, 2)}.items():
        spec.set(name, value)
    with pytest.raises(mpool.errors.FormatError, match="bool"):
        spec.set("bool", 1)  # a key can be set once
    for value in (None, object(), {"a": 1}, [1, "a"], ["a", 1], [[1]], [True, 2], [1.0, "x"]):
        with pytest.raises(TypeError):
            spec.set("wrong", value)
    for value in (2**63, [2**63], -2**63 - 1):
        with pytest.raises(ValueError, match="64 bits"):
            spec.set("large", value)


def test_spec_checks_tensors_and_tokens() -> None:
    spec = _core.Spec("llama")
    spec.add_file("/nowhere/model.safetensors")
    spec.add_tensor("a", "F32", (2, 3), 0, 64, 24)
    for args in [("a", "F32", (2, 3), 0, 64, 24), ("b", "F33", (2,), 0, 0, 8), ("b", "F32", (2,), 0, -1, 8),
                 ("b", "F32", (1,) * 9, 0, 0, 4), ("b", "F32", (2**63,), 0, 0, 8), ("b", "F32", (2,), 0, 0, 2**65)]:
        with pytest.raises(mpool.errors.FormatError):
            spec.add_tensor(*args)
    offsets = np.array([0, 1, 1, 3], np.int64)
    for change in (dict(offsets=np.array([0, 2, 1, 3])), dict(offsets=np.array([1, 1, 1, 3])), dict(data=b"abcd"),
                   dict(control=bytes(2)), dict(offsets=np.zeros(0, np.int64)), dict(offsets=np.zeros(3))):
        with pytest.raises(mpool.InvalidArgument):
            spec.set_tokens(**{**dict(data=b"abc", offsets=offsets, control=bytes(3), eog=[2]), **change})
    with pytest.raises(mpool.errors.FormatError):
        spec.set_tokens(b"abc", offsets, bytes(3), [3])  # no such token
    with pytest.raises(OverflowError):
        spec.set_tokens(b"abc", offsets, bytes(3), [2**32 + 1])
    spec.set_tokens(b"abc", offsets, bytes(3), [2])


def test_spec_is_frozen_once_registered() -> None:
    spec = _core.Spec("llama")
    registry = _core.Registry()
    registry.add("a", spec)
    with pytest.raises(mpool.InvalidArgument, match="registered"):
        spec.set("k", 1)
    with pytest.raises(mpool.InvalidArgument, match="registered"):
        spec.add_file("x")
    registry.add("b", spec)  # one spec may serve several keys
    assert [row["key"] for row in registry.entries()] == ["a", "b"]
    with pytest.raises(mpool.errors.FormatError, match="llama2000") as caught:
        registry.add("c", _core.Spec("llama2000"))
    assert caught.value.key == "c" and "llama" in caught.value.allowed
    with pytest.raises(mpool.InvalidArgument, match="bfloat16"):
        registry.add("c", spec, "float64")
    with pytest.raises(mpool.InvalidArgument, match="exists already; pass `replace`"):
        registry.add("a", spec)
    with pytest.raises(mpool.InvalidArgument, match="`key` must have 1 to 255 bytes, got 0"):
        registry.add("", spec)
    with pytest.raises(TypeError):
        registry.add("c", "a spec")
    registry.close()


def test_structured_fields_of_a_core_error_reach_the_exception() -> None:
    count = (1 << 20) + 1
    with pytest.raises(mpool.LimitError) as caught:
        _core.Spec("bert").set_tokens(bytes(count), np.arange(count + 1, dtype=np.int64), bytes(count), [0])
    error = caught.value
    assert (error.param, error.got, error.allowed) == ("tokens", str(count), "at most 1048576 (MP_SPEC_MAX_TOKENS)")


# --- GGUF ---


def write_gguf(path: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "é")
    writer.add_bool("a.bool", True)
    writer.add_uint8("a.u8", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_array("some.ints", [1, 2, 3])
    writer.add_array("some.strings", ["x", "yz", ""])
    writer.add_tensor("weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    table = _core.read_gguf(str(path))
    assert table.architecture == "llama" and table.files == [str(path)]
    assert table.kv["a.string"] == "é" and table.kv["a.bool"] is True and table.kv["a.u8"] == 7
    assert table.kv["a.float"] == 0.5 and table.kv["some.ints"] == [1, 2, 3]
    assert table.kv["some.strings"] == ["x", "yz", ""]
    assert table.kv is table.kv
    name, dtype, shape, file, offset, nbytes = table.tensors[0]
    assert (name, dtype, shape, file, nbytes) == ("weight", "F32", (2, 3), 0, 24)
    assert path.read_bytes()[offset:offset + nbytes] == np.arange(6, dtype=np.float32).tobytes()
    assert _core.read_gguf(path).architecture == "llama"  # also accepts path objects
    first, second = table.spec(), table.spec()
    first.set("more", 1)
    second.set("more", 2)  # independent copies
    with pytest.raises(mpool.errors.FormatError, match="a.u8"):
        first.set("a.u8", 8)
    with pytest.raises(TypeError):
        _core.GgufFile()


def test_gguf_strings_that_are_not_utf8_are_bytes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"yz", b"\xffz"))
    table = _core.read_gguf(str(path))
    assert table.kv["some.strings"] == [b"x", b"\xffz", b""]
    assert table.kv["a.string"] == "é"


def test_format_errors_have_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(64))
    with pytest.raises(mpool.errors.FormatError) as caught:
        _core.read_gguf(str(path))
    error = caught.value
    assert error.file == str(path) and error.offset == 4 and error.got == "9" and error.allowed and error.field
    assert str(path) in str(error) and isinstance(error, ValueError) and error.code == 11
    with pytest.raises(mpool.errors.FileError) as missing:
        _core.read_gguf(str(tmp_path / "none.gguf"))
    assert isinstance(missing.value, OSError)
    with pytest.raises(ValueError):
        _core.read_gguf("a\0b")


# --- log, notifier, module ---


def test_notifier_closes_once() -> None:
    notifier = _core.Notifier()
    assert notifier.fileno() >= 0 and notifier.take() == []
    notifier.close()
    notifier.close()
    with pytest.raises(mpool.InvalidArgument, match="closed"):
        notifier.fileno()


def test_registry_options_are_checked() -> None:
    for options in (dict(threads=-1), dict(threads=1000), dict(step_budget=-1.0), dict(keep_alive=float("nan")),
                    dict(shutdown_grace=-1.0), dict(queue_capacity={"none": 1}), dict(queue_capacity={"vision": 0})):
        with pytest.raises(mpool.InvalidArgument):
            _core.Registry(**options)
    with pytest.raises(TypeError):
        _core.Registry(queue_capacity=[1])
    with pytest.raises(TypeError):
        _core.Ticket()


def test_invalid_environment_variables_fail_the_import() -> None:
    for variable, value in (("MPOOL_THREADS", "many"), ("MPOOL_CPU", "z80")):
        run = subprocess.run([sys.executable, "-c", "import mpool._core"], env={**os.environ, variable: value},
                             capture_output=True, text=True)
        assert run.returncode == 1 and "InvalidArgument" in run.stderr
        assert variable in run.stderr and value in run.stderr


def test_sub_interpreters_are_refused() -> None:
    program = ("import _xxsubinterpreters as s, mpool._core\n"
               "i = s.create()\n"
               "try:\n    s.run_string(i, 'import mpool._core')\nexcept Exception as e:\n    print(e)\n")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if "No module named '_xxsubinterpreters'" in run.stderr:
        pytest.skip("this Python has no _xxsubinterpreters module")
    assert "ImportError" in run.stdout, run
