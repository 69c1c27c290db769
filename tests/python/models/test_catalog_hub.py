"""Hub references, resolved against a local HTTP server that implements the routes of the hub."""

import json
import os
import subprocess
import sys
from pathlib import Path
from collections.abc import Iterator

import pytest
from adapterfiles import matrices, save_peft
from hubserver import Child, Hub, Repo, commit, sha256

huggingface_hub = pytest.importorskip("huggingface_hub")

ROOT = Path(__file__).resolve().parent.parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "corpus"))
import make_safetensors as make  # noqa: E402

@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def environment(hub: Hub, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "MPOOL_CACHE": str(home / "mpool"),
            "HF_HUB_DISABLE_TELEMETRY": "1", "HOME": str(home)}


@pytest.fixture(scope="module")
def online(environment: dict[str, str]) -> Iterator[Child]:
    child = Child(environment)
    yield child
    child.close()


@pytest.fixture(scope="module")
def offline(environment: dict[str, str]) -> Iterator[Child]:
    child = Child({**environment, "HF_HUB_OFFLINE": "1"})
    yield child
    child.close()


def folder_files(tmp_path: Path) -> dict[str, bytes]:
    make.write_folder(str(tmp_path / "model"), make.base())
    root = tmp_path / "model"
    found = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    return {**found, "README.md": b"# x", "pytorch_model.bin": b"PK" * 5000, "onnx/model.onnx": b"o" * 5000,
            "custom.py": b"raise SystemExit", "2_Dense/pytorch_model.bin": b"PK", ".gitattributes": b"*"}


@pytest.mark.builds
def test_folder(hub: Hub, online: Child, offline: Child, home: Path, tmp_path: Path) -> None:
    files = folder_files(tmp_path)
    hub.repos["org/folder"] = Repo(files, commit(1))
    before = offline.resolve("org/folder")
    assert before["error"] == "OfflineError" and "mpool pull org/folder" in before["text"]
    found = online.resolve("org/folder", describe=True, progress="counts")
    chosen = sum(os.path.getsize(path) for path in found["files"])
    done, total = found["counts"][-1]
    assert total == chosen and 0.9 * total < done <= total and not found["bars"]  # small files were read before
    assert (found["kind"], found["source"], found["revision"]) == ("folder", "hub", commit(1))
    assert found["tensors"] == 5 + 2 * 16 + 2 and found["described_revision"] == commit(1)
    wanted = {name for name in files if not name.endswith((".bin", ".py", ".md", ".onnx", ".gitattributes"))}
    assert set(hub.downloaded()) == wanted
    assert {os.path.relpath(path, found["path"]) for path in found["files"]} == wanted
    # the layout of the hub's cache: links to blobs, which are named after their hashes
    weights = Path(found["path"]) / "model.safetensors"
    assert weights.is_symlink() and weights.resolve().name == sha256(files["model.safetensors"])
    assert str(home / "hf" / "hub" / "models--org--folder" / "snapshots" / commit(1)) == found["path"]
    # a second resolve only queries the commit of the branch; with a commit, or offline, it sends no request
    again = online.resolve("org/folder")
    assert hub.downloaded() == [] and {**again, "log": 0} == {**online.resolve("org/folder"), "log": 0}
    hub.seen.clear()
    pinned = online.resolve(f"org/folder@{commit(1)}")
    assert pinned["path"] == found["path"] and hub.seen == []
    gone = offline.resolve("org/folder", describe=True)
    assert gone["path"] == found["path"] and gone["tensors"] == found["tensors"] and hub.seen == []
    assert online.resolve("org/folder", offline=True)["path"] == found["path"] and hub.seen == []


@pytest.mark.slow
def test_adapters(hub: Hub, environment: dict[str, str], bert: Path, home: Path, tmp_path: Path) -> None:
    """``mpool.load`` takes the adapter of a repository, and downloads its two files only. An adapter is no model of
    ``mpool list``."""
    folder = save_peft(tmp_path / "lora", matrices(bert, 3, 1, ("query", "dense")), 6.0)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repos["org/lora"] = Repo({**files, "README.md": b"# x", "tokenizer.json": b"{}", "optimizer.pt": b"PK"},
                                 commit(9))
    hub.downloaded()
    program = ("import sys, mpool\n"
               "with mpool.Pool() as pool:\n"
               "    pool.load(sys.argv[1], adapters={'it': sys.argv[2]})\n"
               "    print(pool.embed('a cat', sys.argv[1], adapter='it').tobytes().hex())\n")

    def run(place: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program, str(bert), place], capture_output=True, text=True,
                              timeout=120, env={**os.environ, **environment, **more}, cwd=tmp_path)

    missing = run("org/lora", HF_HUB_OFFLINE="1")
    assert "OfflineError" in missing.stderr and "org/lora" in missing.stderr
    first = run("org/lora")
    assert first.returncode == 0, first.stderr[-2000:]
    assert hub.downloaded() == ["adapter_config.json", "adapter_model.safetensors"]
    assert first.stdout == run(str(folder)).stdout == run("org/lora", HF_HUB_OFFLINE="1").stdout
    failed = run("org/none").stderr
    # the error has the hub's reason; the frames of huggingface_hub and its HTTP client say nothing to a caller
    assert "DownloadError" in failed and "huggingface_hub" not in failed and "direct cause" not in failed, failed
    listed = [json.loads(path.read_text())["ref"] for path in (home / "mpool" / "downloaded").glob("*.json")]
    assert not [ref for ref in listed if "org/lora" in ref]


def test_cached_folder_without_a_record(hub: Hub, online: Child, offline: Child, home: Path, tmp_path: Path) -> None:
    hub.repos["org/other"] = Repo(folder_files(tmp_path), commit(2))
    found = online.resolve("org/other")
    for record in (home / "mpool" / "hub").rglob("org--other/**/*.json"):
        record.unlink()
    assert offline.resolve("org/other")["path"] == found["path"]
    # a blob whose content does not match its name is detected without network access
    blob = (Path(found["path"]) / "2_Dense" / "config.json").resolve()
    data = blob.read_bytes()
    blob.write_bytes(data.replace(b"12", b"21"))
    damaged = offline.resolve("org/other")
    assert damaged["error"] == "IntegrityError" and not blob.exists()
    missing = offline.resolve("org/other", describe=True)
    # if the library caches the listing of a commit, the missing file is detected; otherwise reading the file fails
    has_listing = hasattr(huggingface_hub, "get_cached_repo_tree")
    assert missing["error"] == ("OfflineError" if has_listing else "FileError")
    assert online.resolve("org/other")["path"] == found["path"] and blob.read_bytes() == data


def test_gguf_quantisations(hub: Hub, online: Child, offline: Child) -> None:
    files = {name: b"GGUF" + name.encode() * 200 for name in (
        "m-IQ4_0.gguf", "m-Q2_K.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-TQ1_0.gguf", "m-Q8_0-00001-of-00002.gguf",
        "m-Q8_0-00002-of-00002.gguf", "mmproj-m-F16.gguf", "sub/m-F16.gguf")}
    hub.seen.clear()
    hub.repos["org/gguf"] = Repo({**files, "README.md": b"x", "config.json": b"{}"}, commit(3))
    found = online.resolve("org/gguf")
    assert found["kind"] == "gguf" and found["path"].endswith("/m-Q4_K_M.gguf")
    assert hub.downloaded() == ["m-Q4_K_M.gguf", "mmproj-m-F16.gguf"]
    assert found["projector"].endswith("/mmproj-m-F16.gguf")
    assert Path(found["path"]).read_bytes() == files["m-Q4_K_M.gguf"]
    split = online.resolve("org/gguf:q8_0")
    assert split["path"].endswith("m-Q8_0-00001-of-00002.gguf") and split["projector"] == found["projector"]
    assert len(split["files"]) == 3
    assert hub.downloaded() == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert online.resolve("org/gguf:Q4_0")["path"].endswith("m-Q4_0.gguf")
    single = online.resolve("hf://org/gguf@main/sub/m-F16.gguf")  # the name of a file is the way to get no projector
    assert single["path"].endswith("sub/m-F16.gguf") and single["projector"] is None
    hub.downloaded()
    unknown = online.resolve("org/gguf:Q6_K")
    assert unknown["error"] == "InvalidArgument"
    assert "Available: F16, IQ4_0, Q2_K, Q4_0, Q4_K_M, Q8_0, TQ1_0" in unknown["text"]
    absent = online.resolve("hf://org/gguf/n.gguf")
    assert absent["error"] == "DownloadError" and "m-Q4_K_M.gguf" in absent["text"] and hub.downloaded() == []
    assert offline.resolve("org/gguf")["path"] == found["path"]
    assert offline.resolve("org/gguf:Q8_0")["path"] == split["path"]
    assert offline.resolve("org/gguf:Q2_K")["error"] == "OfflineError"
    del hub.repos["org/gguf"].files["m-Q8_0-00002-of-00002.gguf"]
    hub.repos["org/gguf"].commit = commit(4)
    assert "00002-of-00002.gguf missing" in online.resolve("org/gguf:Q8_0")["text"]


def test_shards_and_folder_of_a_repository(hub: Hub, online: Child, tmp_path: Path) -> None:
    case = json.loads((ROOT / "tests" / "corpus" / "folder" / "valid" / "shards.json").read_text())
    make.write_folder(str(tmp_path / "m"), {**make.base(), **case["edit"]})
    files = {f"sub/{p.relative_to(tmp_path / 'm')}": p.read_bytes() for p in (tmp_path / "m").rglob("*") if p.is_file()}
    hub.seen.clear()
    hub.repos["org/shards"] = Repo({**files, "sub/unrelated.safetensors": b"x", "config.json": b"{}"}, commit(5))
    found = online.resolve("hf://org/shards@refs/pr/1/sub", describe=True)
    assert found["path"].endswith("/sub") and found["tensors"] == 39 and found["revision"] == commit(5)
    assert set(hub.downloaded()) == set(files)
    assert "no file or folder" in online.resolve("hf://org/shards/none")["text"]


def test_pipeline_of_a_repository(hub: Hub, online: Child, offline: Child, tmp_path: Path) -> None:
    """Only the networks, their configurations and the tokenizers of a diffusers repository are downloaded."""
    import pipelinemodels

    pipeline = pipelinemodels.sd3(tmp_path, layers=1, dual=())
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    pipeline.transformer.save_pretrained(tmp_path / "transformer", max_shard_size="30KB")
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    unrelated = {"sd3.safetensors": b"x", "vae/diffusion_pytorch_model.fp16.safetensors": b"x", "README.md": b"# x",
                 "text_encoder/pytorch_model.bin": b"PK", "transformer/code.py": b"raise SystemExit"}
    assert any(name.endswith("index.json") for name in files)
    hub.seen.clear()
    hub.repos["org/pipeline"] = Repo({**files, **unrelated}, commit(12))
    found = online.resolve("org/pipeline", describe=True)
    assert (found["kind"], found["revision"]) == ("folder", commit(12)) and found["tensors"] > 200
    # files with the same content are downloaded once
    assert {files[name] for name in hub.downloaded()} == set(files.values())
    assert {os.path.relpath(path, found["path"]) for path in found["files"]} == set(files)
    assert offline.resolve("org/pipeline")["path"] == found["path"]


def test_branch_that_moves(hub: Hub, online: Child, offline: Child) -> None:
    old, new = {"m-Q4_K_M.gguf": b"GGUF old"}, {"m-Q4_K_M.gguf": b"GGUF new"}
    hub.repos["org/moves"] = repo = Repo(old, commit(6))
    first = online.resolve("org/moves")
    repo.files, repo.commit, repo.older = new, commit(7), {commit(6): old}
    assert offline.resolve("org/moves")["path"] == first["path"]
    second = online.resolve("org/moves")
    assert second["revision"] == commit(7) and Path(second["path"]).read_bytes() == b"GGUF new"
    assert offline.resolve("org/moves")["path"] == second["path"]
    assert online.resolve(f"org/moves@{commit(6)}")["path"] == first["path"]


def test_interrupted_download_is_resumed(hub: Hub, online: Child) -> None:
    # the library writes chunks of 10 MiB, so a download is resumed at a multiple of 10 MiB
    data = b"GGUF" + os.urandom(1 << 20) * 22
    hub.repos["org/cut"] = Repo({"m.gguf": data}, commit(8), cut_once={"m.gguf"})
    hub.seen.clear()
    found = online.resolve("org/cut")
    if not hasattr(huggingface_hub, "get_cached_repo_tree"):
        # older versions of the library fail, and resume the download at the next call
        assert found["error"] == "DownloadError"
        found = online.resolve("org/cut")
    assert Path(found["path"]).read_bytes() == data
    ranges = [wanted for verb, path, wanted in hub.seen if verb == "GET" and path.endswith("m.gguf")]
    assert len(ranges) == 2 and ranges[0] is None and ranges[1] is not None
    assert 10 << 20 <= int(ranges[1].removeprefix("bytes=").partition("-")[0]) < len(data)


def test_wrong_hash_and_wrong_size(hub: Hub, online: Child, home: Path) -> None:
    for number, (name, size) in enumerate((("large", 5000), ("small", 100))):
        data = b"GGUF" + os.urandom(size)
        hub.repos[f"org/{name}"] = repo = Repo({"m.gguf": data}, commit(20 + number), corrupt={"m.gguf"})
        wrong = online.resolve(f"org/{name}")
        assert wrong["error"] == "IntegrityError" and ("sha256" if name == "large" else "git") in wrong["text"]
        # the damaged file was removed from the cache, so the next attempt downloads it again
        stored = home / "hf" / "hub" / f"models--org--{name}"
        assert [p for p in stored.rglob("*") if p.is_file() and p.stat().st_size == len(data)] == []
        repo.corrupt.clear()
        assert Path(online.resolve(f"org/{name}")["path"]).read_bytes() == data
    hub.repos["org/short"] = Repo({"m.gguf": b"GGUF" + bytes(5000)}, commit(22), short={"m.gguf"})
    assert online.resolve("org/short")["error"] == "DownloadError"


def test_errors_of_the_hub(hub: Hub, online: Child) -> None:
    files = {"m.gguf": b"GGUF"}
    hub.repos["org/gated"] = Repo(files, commit(9), gated=True)
    hub.repos["org/broken"] = Repo(files, commit(10), broken=True)
    hub.repos["org/fine"] = Repo(files, commit(11))
    hub.seen.clear()
    hub.repos["org/pickle"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"PK"}, commit(12))
    for ref, error, text in (("org/none", "DownloadError", "the hub has no repository org/none, or it is private"),
                             ("org/gated", "DownloadError", "hf auth login"),
                             ("org/broken", "DownloadError", "org/broken could not be downloaded"),
                             ("org/fine@nope", "DownloadError", "org/fine@nope"),
                             ("org/pickle", "UnsafeFormat", "`hf download org/pickle --local-dir .`"),
                             ("hf://org/pickle/pytorch_model.bin", "UnsafeFormat", "glob('pytorch_model*.bin')"),
                             ("hf://org/pickle/config.json", "InvalidArgument", "Use org/pickle")):
        found = online.resolve(ref)
        assert found.get("error") == error and text in found["text"], found
    assert hub.downloaded() == []


def test_unreachable_server(hub: Hub, online: Child, environment: dict[str, str]) -> None:
    hub.repos["org/kept"] = Repo({"m.gguf": b"GGUF kept"}, commit(13))
    found = online.resolve("org/kept")
    alone = Child({**environment, "HF_ENDPOINT": "http://127.0.0.1:9"})
    try:
        cached = alone.resolve("org/kept")
        assert cached["path"] == found["path"]
        assert any("could not be asked for a newer version of org/kept" in line for line in cached["log"])
        assert cached["bars"].count("UserWarning: the hub could not be asked for a newer version of org/kept") == 1
        assert "using the cached commit" in cached["bars"]
        assert "Warning" not in alone.resolve("org/kept")["bars"]  # once per process
        absent = alone.resolve("org/never-seen")
        assert absent["error"] == "DownloadError" and "mpool pull org/never-seen" in absent["text"]
    finally:
        alone.close()


def test_two_processes_at_once(hub: Hub, online: Child, environment: dict[str, str]) -> None:
    data = {f"m-Q4_K_M-0000{i}-of-00003.gguf": b"GGUF" + os.urandom(300_000) for i in (1, 2, 3)}
    hub.repos["org/both"] = Repo(data, commit(14))
    second = Child(environment)
    try:
        assert second.resolve("org/none")["error"] == "DownloadError"
        for child in (online, second):
            child.send("org/both")
        found = [online.result(), second.result()]
    finally:
        second.close()
    assert [one.get("error") for one in found] == [None, None] and found[0]["files"] == found[1]["files"]
    assert {os.path.basename(path): Path(path).read_bytes() for path in found[0]["files"]} == data


@pytest.mark.slow
def test_list_and_rm_of_pulled_models(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    """``mpool list`` has the models that are not in the catalogue, under the names of their pulls."""
    pytest.importorskip("torch")
    import paritymodels
    import tinygguf

    model = tinygguf.write(tmp_path / "m.gguf", paritymodels.decoder("llama", 2, vocab=157)).read_bytes()
    hub.repos["org/quants"] = Repo({"m-Q4_K_M.gguf": model, "m-Q8_0.gguf": model}, commit(70))
    hub.repos["org/damaged"] = Repo({"m.gguf": b"GGUF damaged"}, commit(71))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "mpool", *arguments], capture_output=True, text=True, timeout=120,
                              env={**os.environ, **environment, "MPOOL_CACHE": str(tmp_path / "cache")}, cwd=tmp_path)

    def listed(*more: str) -> dict[str, dict[str, object]]:
        return {row["key"]: row for row in json.loads(run("list", "--json", *more).stdout) if "/" in row["key"]}

    assert listed() == {}
    pulled = run("pull", "org/quants:Q4_K_M", "hf://org/quants/m-Q8_0.gguf", "org/damaged")
    assert pulled.returncode == 0, pulled.stderr
    names = ["hf://org/quants/m-Q8_0.gguf", "org/damaged", "org/quants:Q4_K_M"]
    rows = listed()
    assert list(rows) == names
    assert rows[names[2]]["capability"] == "text_to_text" and rows[names[2]]["bytes"] == len(model)
    assert rows[names[1]]["capability"] is None and list(listed("--capability", "text_to_text")) == names[::2]
    table = run("list")
    assert all(any(line.startswith(f"{name} ") for line in table.stdout.splitlines()) for name in names), table
    assert not table.stderr and "org/quants" not in run("models").stdout
    assert run("rm", "org/quants:Q4_K_M").returncode == 0
    assert list(listed()) == names[:2]
    assert run("pull", "org/quants:Q4_K_M").returncode == 0 and list(listed()) == names
    (Path(rows[names[1]]["path"]).resolve()).unlink()  # type: ignore[arg-type]  # by another program
    assert list(listed()) == [names[0], names[2]]
