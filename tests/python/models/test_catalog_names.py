"""Names of the catalogue: keys and aliases in any case, one pool entry per model, options and estimates of the rows."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import errors
from mpool.models import HubRef, KeyRef, catalogue, describe, describing, load_catalogue, parse_reference
from mpool.models.catalogue import estimate, read

#: Every model that users were promised -> spellings that find it.
SPELLINGS = {
    "Qwen3-0.6B": ["qwen3:0.6b"], "Qwen3-1.7B": ["qwen3:1.7b", "QWEN3:1.7B", "Qwen/Qwen3-1.7B-GGUF"],
    "Qwen3-4B": ["qwen3:4b"], "Qwen3-8B": ["qwen3:8b", "qwen3", "qwen3:latest"], "Qwen3-32B": ["qwen3:32b"],
    "Qwen3-Coder-30B-A3B-Instruct": ["qwen3-coder:30b", "qwen3-coder-30b-a3b"],
    "granite-4.0-h-tiny": ["granite4:tiny-h", "granite4:7b-a1b-h"], "granite-4.0-micro": ["granite4"],
    "granite-4.0-h-small": ["granite4:small-h"], "granite-4.0-h-micro": ["granite4:micro-h"],
    "Falcon-H1-0.5B-Instruct": ["falcon-h1:0.5b"], "Nemotron-3-Nano-4B": ["nemotron-3-nano:4b"],
    "Nemotron-3-Nano-30B-A3B": ["nemotron-3-nano:30b", "unsloth/Nemotron-3-Nano-30B-A3B-GGUF"],
    "LFM2.5-1.2B-Instruct": ["lfm2.5:1.2b"], "LFM2.5-8B-A1B": ["lfm2.5", "lfm2.5:8b-a1b"], "Qwen3.8-27B": ["qwen3.8"],
    "Qwen3.5-0.8B": ["qwen3.5:0.8b"],
    "Qwen3.5-4B": ["qwen3.5:4b", "unsloth/Qwen3.5-4B-GGUF", "qwen3.5:4b-q4_K_M"],
    "Qwen3.5-9B": ["qwen3.5"],
    "Olmo-3-7B-Instruct": ["olmo-3"], "GLM-4-9B-0414": ["glm4:9b"], "ERNIE-4.5-0.3B-PT": ["ernie4.5:0.3b"],
    "EXAONE-4.0-1.2B": ["exaone4:1.2b"], "EXAONE-4.0-32B": ["exaone4"], "c4ai-command-r7b-12-2024": ["command-r7b"],
    "Ministral-3-3B-Instruct-2512": ["ministral-3:3b"], "Ministral-3-8B-Instruct-2512": ["ministral-3"],
    "granite-3.1-1b-a400m-instruct": ["granite3.1-moe:1b"], "granite-3.1-3b-a800m-instruct": ["granite3.1-moe"],
    "Qwen1.5-MoE-A2.7B-Chat": ["qwen1.5-moe"], "Mixtral-8x7B-Instruct-v0.1": ["mixtral"],
    "Seed-OSS-36B-Instruct": ["seed-oss"],
    "Qwen3.6-35B-A3B": ["qwen3.6", "qwen3.6:35b", "qwen3.6:35b-a3b-q4_K_M"],
    "Qwen3-Next-80B-A3B-Instruct": ["qwen3-next:80b"],
    "Qwen2.5-0.5B-Instruct": ["qwen2.5:0.5b", "Qwen2.5-0.5B"], "Phi-3-mini-4k-instruct": ["phi3", "phi3:mini",
                                                                          "microsoft/Phi-3-mini-4k-instruct-gguf"],
    "Phi-4": ["phi4"], "Phi-4-reasoning": ["phi4-reasoning"], "gpt-oss-20b": ["gpt-oss:20b", "GPT-OSS-20B"],
    "Kimi-K2-Instruct": ["kimi-k2"], "DeepSeek-V3": ["deepseek-v3:671b", "deepseek-v3"],
    "SmolLM2-135M-Instruct": ["smollm2:135m"], "SmolLM3-3B": ["smollm3"], "gemma-3-1b-it": ["gemma3:1b"],
    "gemma-3-4b-it": ["gemma3:4b"], "gemma-4-E2B-it": ["gemma4:e2b", "gemma-4-e2b-it"],
    "granite-3.3-2b-instruct": ["granite3.3:2b"],
    "all-MiniLM-L6-v2": ["all-minilm", "all-minilm:latest", "ALL-minilm-l6-V2",
                         "sentence-transformers/all-MiniLM-L6-v2"],
    "bge-small-en-v1.5": ["BAAI/bge-small-en-v1.5"], "e5-base-v2": ["intfloat/e5-base-v2", "e5"], "gte-base": [],
    "gte-Qwen2-1.5B-instruct": ["Alibaba-NLP/gte-Qwen2-1.5B-instruct"],
    "stella_en_1.5B_v5": ["dunzhang/stella_en_1.5B_v5", "NovaSearch/stella_en_1.5B_v5"],
    "stella_en_400M_v5": ["dunzhang/stella_en_400M_v5"], "jina-embeddings-v2-base-en": ["JinaBERT"],
    "jina-embeddings-v3": ["jinaai/jina-embeddings-v3"], "jina-colbert-v2": [], "jina-embeddings-v5-text-small": [],
    "jina-embeddings-v5-text-nano": [],
    "NV-Embed-v2": ["nvidia/NV-Embed-v2", "NV-Embed"], "nomic-embed-text-v1.5": ["nomic-embed-text"],
    "embeddinggemma-300m": ["embeddinggemma"], "Qwen3-Embedding-0.6B": ["qwen3-embedding:0.6b"],
    "bge-reranker-v2-m3": [], "Qwen3-Reranker-0.6B": [], "clip-vit-base-patch32": ["openai/clip-vit-base-patch32",
                                                                                             "clip"],
    "clip-vit-large-patch14-336": [], "siglip2-base-patch16-224": ["siglip2"], "dinov2-small": ["DINOv2"],
    "dinov2-base": [],
    "llava-1.5-7b-hf": ["llava-hf/llava-1.5-7b-hf"], "SmolVLM-256M-Instruct": [], "Qwen2.5-VL-3B-Instruct": [
        "qwen2.5vl:3b", "qwen2.5-vl:3b"], "Qwen2.5-VL-7B-Instruct": ["qwen2.5-vl"],
    "SmolVLM2-2.2B-Instruct": ["SmolVLM2"], "LFM2-VL-450M": ["LiquidAI/LFM2-VL-450M"], "pixtral-12b": ["pixtral"],
    "Qwen2-VL-2B-Instruct": [], "Qwen3-VL-2B-Instruct": ["qwen3-vl:2b"], "Qwen3-VL-8B-Instruct": ["qwen3-vl"],
    "FLUX.1-schnell": ["black-forest-labs/FLUX.1-schnell", "flux-schnell"],
    "stable-diffusion-3.5-large-turbo": ["stabilityai/stable-diffusion-3.5-large-turbo"],
    "stable-diffusion-3.5-medium": ["sd3.5-medium"],
}


@pytest.mark.parametrize("key", SPELLINGS)
def test_spellings(key: str) -> None:
    """Keys and aliases are found in any case; every row has a licence, a size of the download and an estimate."""
    found = load_catalogue()
    row = found.rows[key]
    for name in (key, key.lower(), key.upper(), *SPELLINGS[key], *row.aliases):
        assert found.find(parse_reference(name)) is row, name
    assert found.get(f"{row.aliases[0] if row.aliases else key}-m") is None  # no quantisation of the file
    assert row.license and row.est_memory_allocation_mb > 48
    assert row.download_bytes or row.capability == "text_embedding"


def test_a_revision_quantisation_or_file_is_no_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_catalogue()
    for name in ("BAAI/bge-small-en-v1.5@main", "microsoft/Phi-3-mini-4k-instruct-gguf:Q4_K_M",
                 "hf://microsoft/Phi-3-mini-4k-instruct-gguf/Phi-3-mini-4k-instruct-fp16.gguf", "org/qwen3"):
        assert found.find(parse_reference(name)) is None, name
    row = found.get("phi3")
    assert row is not None and row.refs == (HubRef("microsoft/Phi-3-mini-4k-instruct-gguf",
                                                   file="Phi-3-mini-4k-instruct-q4.gguf"),)
    monkeypatch.chdir(tmp_path)  # an existing folder of the name takes precedence
    (tmp_path / "BAAI" / "bge-small-en-v1.5").mkdir(parents=True)
    assert found.find(parse_reference("BAAI/bge-small-en-v1.5")) is None
    with pytest.raises(errors.FormatError, match="holds no model"):
        mpool.models.resolve("BAAI/bge-small-en-v1.5")


def test_all_spellings_share_one_pool_entry() -> None:
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        one = {id(pool.get(name)._entry) for name in ("Qwen3-1.7B", "qwen3:1.7b", "QWEN3:1.7b", "qwen/qwen3-1.7b-gguf",
                                                      "Qwen/Qwen3-1.7B-GGUF")}
        assert len(one) == 1 and pool.get("qwen3:1.7b").key == "Qwen3-1.7B"
        assert list(pool._names.by_key) == ["Qwen3-1.7B"]
        assert pool.get("mpool:digits-clip")._entry is pool.get("digits-clip")._entry
        names = len(pool._names.by_name)
        for name in ("Qwen3:1.7B", "qWEN3:1.7B", "qwEN3:1.7B"):  # spellings that clients make up take no memory
            pool.get(name)
        assert len(pool._names.by_name) == names
        with pytest.raises(errors.UnknownModel, match=r"qwen3:1\.7b"):
            pool.get("qwen3:1.8b")


def test_a_default_model_that_cannot_be_read_keeps_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for another capability reads the files, fails, and forgets the entry under all its names."""
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        names = pool._names
        key = names.find(None, "image_embedding").key
        with pytest.raises(errors.OfflineError):
            names.find(key, "text_embedding")
        assert names.find(None, "image_embedding") is names.find(key) is names.by_key[key]


def test_a_registered_name_takes_precedence_over_an_alias() -> None:
    """Keys are reserved; aliases may be registered, so that new aliases break no program."""
    path = mpool.models.resolve("digits-clip").path
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        said = "'phi4' now names .*; in the catalogue, 'phi4' is an alias of Phi-4$"
        with pytest.warns(UserWarning, match=said) as warned:
            made = pool.register("phi4", path)
        assert warned[0].filename == __file__
        assert pool.get("phi4")._entry is made._entry
        with pytest.warns(UserWarning, match="'smollm2' now names .*an alias of SmolLM2-1.7B-Instruct"):
            pool.load(path, name="smollm2")
        for key in ("Phi-4", "phi-4", "PHI-4"):  # load finds the model of the catalogue under each
            with pytest.raises(errors.InvalidArgument, match=f"{key} is a name of Phi-4, a model of the catalogue"):
                pool.register(key, path)
            with pytest.raises(errors.InvalidArgument, match=f"{key} is a name of Phi-4, a model of the catalogue"):
                pool.load(path, name=key)


def test_names_of_the_catalogue_as_aliases_of_their_own_model(recwarn: pytest.WarningsRecorder) -> None:
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        for alias in ("DIGITS-CLIP", "own"):
            assert pool.load("digits-clip", name=alias)._entry is pool.get(alias)._entry
        assert not recwarn.list


def write_catalogue(path: Path, **change: Any) -> catalogue.Catalogue:
    row = {"key": "m", "capability": "text_to_image", "refs": ["org/name"], "license": "mit", "origin": "x",
           "est_memory_allocation_mb": 53, **change}
    path.write_text(json.dumps({"format": 1, "defaults": {}, "models": [row]}))
    return read(str(path))


def test_row_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A row's default options reach the description. An estimate that is off by more than 10 % is logged once."""
    found = mpool.models.resolve("digits-sd3")
    own = describe("digits-sd3")
    given = write_catalogue(tmp_path / "c.json", options={"num_inference_steps": 4, "guidance_scale": 0},
                            est_memory_allocation_mb=round(1.2 * estimate(own)))
    monkeypatch.setattr(catalogue, "load", lambda: given)
    monkeypatch.setattr(logging.getLogger("mpool"), "propagate", True)
    from dataclasses import replace

    with caplog.at_level(logging.WARNING, "mpool.models"):
        for _ in range(2):
            described = describing.describe_resolved(replace(found, key="m"))
    assert described.pipeline is not None and own.pipeline is not None
    assert (described.pipeline.steps, described.pipeline.guidance_scale) == (4, 0.0) != (own.pipeline.steps,
                                                                                         own.pipeline.guidance_scale)
    messages = [record.message for record in caplog.records if "estimates" in record.message]
    assert len(messages) == 1 and f"its files give {estimate(own)} MB" in messages[0]


def test_options_of_the_turbo_models() -> None:
    for key in ("FLUX.1-schnell", "stable-diffusion-3.5-large-turbo"):
        assert load_catalogue().rows[key].options == {"num_inference_steps": 4, "guidance_scale": 0.0}


def test_estimates_of_bundled_models_follow_the_formula() -> None:
    for key in ("digits-clip", "digits-llava", "digits-sd3"):
        described = describe(key)
        assert abs(estimate(described) - (described.est_memory_allocation_mb or 0)) <= 1, key


def test_key_references_with_a_tag() -> None:
    assert parse_reference("a:b") == KeyRef("a:b")


def test_a_server_finds_aliases_under_the_key() -> None:
    """Spellings that clients make up add no names to a server."""
    import asyncio

    from mpool.server.models import Models

    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        with pytest.warns(UserWarning, match="an alias of Phi-4"):
            models = Models(pool, ["phi4=mpool:digits-llava"])  # an alias of the catalogue may name another model
        for name in ("digits-clip", "DIGITS-clip", "Digits-CLIP:latest"):
            assert asyncio.run(models.find(name)).name == "digits-clip"
        assert asyncio.run(models.find("phi4")).model.key == "phi4"
        assert models.names() == ["phi4", "digits-clip"]
        assert models.is_in_catalogue("qwen3:1.7b") and not models.is_in_catalogue("qwen3:1.8b")
