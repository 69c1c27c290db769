"""Run each fuzz target for 10 seconds. `python tests/fuzz/fuzz.py --seconds 600` runs them for longer."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).resolve().parents[2] / "fuzz" / "fuzz.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mpool_fuzz", FUZZ)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fuzz = load()


#: Targets that compile in seconds. The others have the kernels and the models in them.
QUICK = [target for target in fuzz.TARGETS if target != "model"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path]:
    clang = fuzz.find_clang()
    if clang is None:
        pytest.skip("no clang with libFuzzer on this machine")
    out = tmp_path_factory.mktemp("fuzz")
    return fuzz.build(clang, out, QUICK), out


@pytest.mark.builds
@pytest.mark.parametrize("target", QUICK)
def test_fuzz(target: str, programs: tuple[dict[str, Path], Path]) -> None:
    built, out = programs
    seconds = int(os.environ.get("MPOOL_FUZZ_SECONDS", "10"))
    said = fuzz.run(target, built[target], out, seconds, seed=0)
    match = re.search(r"stat::number_of_executed_units:\s*(\d+)", said)
    assert match, said
    assert int(match[1]) > 1000, f"only {match[1]} inputs in {seconds} s"


@pytest.mark.slow
def test_fuzz_model(tmp_path: Path) -> None:
    """Compiling takes minutes. By default, tests/c/test_models_hostile.c runs the corpus and 300 seeded inputs."""
    clang = fuzz.find_clang()
    if clang is None:
        pytest.skip("no clang with libFuzzer on this machine")
    seconds = int(os.environ.get("MPOOL_FUZZ_SECONDS", "120"))
    said = fuzz.run("model", fuzz.build(clang, tmp_path, ["model"])["model"], tmp_path, seconds, seed=0)
    match = re.search(r"stat::number_of_executed_units:\s*(\d+)", said)
    assert match and int(match[1]) >= seconds, said
