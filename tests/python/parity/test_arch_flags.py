"""Every flag of every row of archs.def is covered by a parity test: flipping it makes one fail.

Each flip is built in a copy of the sources and tested with the seeded checkpoints and GGUF files. The failure must be a
comparison of numbers. An error is accepted only if the core cannot load such a model at all.
"""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import tinygguf

import mpool

from paritymodels import FOLDERS_ONLY

ROOT = Path(__file__).resolve().parents[3]
HEADER = (ROOT / "csrc/models/arch.h").read_text(encoding="utf-8")
#: Family -> flags that its loader reads: all flags of its enum in arch.h. Vision models share the enum of vit.
FLAGS = {**{family: re.findall(rf"MP_{family.upper()}_(\w+) = 1 <<", HEADER)
            for family in ("encoder", "decoder", "diffusion")},
         "vit": ["CLASS_TOKEN", "INPUT_NORM", "LAYER_SCALE", "ANY_SIZE", "SMOOTH_SIZE", "ATTENTION_POOL"],
         "vision": ["ANY_SIZE", "ROOT_NORMS", "AXIAL", "ALIGNED", "SIDES", "NORMED_HEADS", "INPUT_NORM",
                    "SMOOTH_SIZE", "LINEAR_SIZE", "STAGGERED"], "lookup": []}
#: Flips that make a model unloadable -> part of the error.
REFUSED: dict[tuple[str, str], str] = {("flux", "SINGLE_BLOCKS"): "transformer.position_side",
                                       ("sd3", "SINGLE_BLOCKS"): "transformer.axes",
                                       ("qwen2_5_vl", "ROOT_NORMS"): "v.post_ln.bias is missing",
                                       ("gemma4_vision", "ROOT_NORMS"): "v.blk.0.ln1.bias is missing",
                                       ("gemma4_vision", "ANY_SIZE"): "the model takes squares of",
                                       ("gemma4_vision", "SIDES"): "mm.soft_emb_norm.weight is missing",
                                       ("gemma4_unified_vision", "ANY_SIZE"): "the model takes squares of",
                                       ("gemma4_unified_vision", "SIDES"): "vision_config.num_hidden_layers is 0",
                                       **{(f"qwen{name}_vl", flag): words for name in ("2", "2_5", "3")
                                          for flag, words in (("ANY_SIZE", "the model takes squares of"),
                                                              ("AXIAL", "v.patch_embd.weight is of shape"))}}
#: Decoders: flag -> part of the error in a row that gets the flag. For a flag that adds tensors or keys, the error says
#: that one is missing; a row that loses the flag then has tensors "not part of this architecture". A flag that removes
#: tensors has it the other way round: its entry here says that a tensor is left over, and its entry in DECODERS_NEED
#: names the tensor that is missing in a row that loses the flag. ROPE_NEOX concerns no tensors: the logits differ.
DECODERS_REFUSE = {"SINKS": "attn_sinks", "HEAD_NORMS": "attn_q_norm",
                   "OUTPUT_NORMS": "post_attention_norm", "LATENT_ATTENTION": "attention.kv_lora_rank",
                   "QUERY_NORMS": "attn_q_norm", "NO_INPUT_NORMS": "attn_norm", "GATED_HEADS": "attn_q.weight"}
#: Decoders: flag that removes or widens tensors -> part of the error in a row that loses the flag.
DECODERS_NEED = {"NO_INPUT_NORMS": "attn_norm", "GATED_HEADS": "attn_q.weight"}
#: Encoders: flag -> part of the error when the flag is set, because its tensors or keys are missing.
REFUSED_WHEN_SET = {"LEARNED_POSITIONS": "position_embd.weight", "POST_NORM": "norm.weight", "BIAS": "attn_q.bias",
                    "GATED": "ffn_gate.weight", "RMS_NORM": "epsilon", "HEAD_NORMS": "attn_q_norm.weight",
                    "OUTPUT_NORMS": "post_attention_norm.weight", "RELATIVE_BIAS": "attn_rel_b.weight",
                    "LATENTS": "latent_heads", "QUERY_NORMS": "attn_q_norm.weight",
                    "INPUT_TWICE": "attn_norm_2.weight", "DISENTANGLED": "relative_span"}
REFUSED_WHEN_NOT_SET = {"POST_NORM": "norm.weight", "RMS_NORM": "epsilon"}
#: The same tables for image transformers.
VIT_WHEN_SET = {"CLASS_TOKEN": "v.class_embd", "INPUT_NORM": "v.pre_ln.weight", "LAYER_SCALE": ".ls1.weight",
                "ATTENTION_POOL": "v.head."}
VIT_WHEN_NOT_SET = {"CLASS_TOKEN": "v.position_embd.weight", "ANY_SIZE": "pixels, got"}
#: Flags that are flipped only in rows that have them. In other rows they have no effect: the file lacks the tensors
#: that they concern, or another flag of the row has the same effect.
WHERE_SET = {"TOKEN_TYPES", "ROOT_NORMS", "AXIAL", "ALIGNED"}
#: Flags without an effect on complete files: see test_a_missing_bias_is_refused.
REQUIRING = {"BIAS"}
#: Family and flag -> flag beside which it has no effect.
HIDDEN_BY = {("encoder", "ALIBI"): "RELATIVE_BIAS", ("encoder", "ROPE"): "QUERY_NORMS",
             ("decoder", "HEAD_NORMS"): "QUERY_NORMS", ("decoder", "GATED_HEADS"): "LATENT_ATTENTION"}
#: Flags that have an effect only together with another flag.
ONLY_WITH = {"SMOOTH_SIZE": "ANY_SIZE"}
#: Tests that compare a row with transformers.
TESTS = ("test_parity_tiny.py", "test_parity_gguf_tiny.py", "test_parity_encoders.py",
         "test_parity_images.py", "test_parity_image_generation.py", "test_parity_vision.py")
NAMES = {"gemma4_vision": "vision and gemma4 and not unified", "gemma4_unified_vision": "gemma4_unified",
         "bert": "test_bert or layers[bert or test_encoder[bert", "clip_text": "texts and clip",
         "siglip_text": "texts and siglip"}
#: Family -> prefix of its flags. Vision models use the flags of image transformers.
PREFIX = {"encoder": "MP_ENCODER_", "decoder": "MP_DECODER_", "vit": "MP_VIT_", "vision": "MP_VIT_",
          "diffusion": "MP_DIFFUSION_", "lookup": "MP_LOOKUP_"}
ROW = re.compile(r"^MP_ARCH\((\w+), *(\w+), *(\w+), *(.*)\)$", re.M)
TABLE = (ROOT / "csrc/models/archs.def").read_text(encoding="utf-8")


def _flags(family: str, text: str) -> list[str]:
    return re.findall(PREFIX[family] + r"(\w+)", text)


CASES = [(name, flag) for name, _, family, flags in ROW.findall(TABLE) for flag in FLAGS[family]
         if flag not in REQUIRING and HIDDEN_BY.get((family, flag)) not in _flags(family, flags)
         and not (flag == "ROPE_NEOX" and name in FOLDERS_ONLY)  # it concerns GGUF files
         and (flag in _flags(family, flags)
              or family != "vision" and flag not in WHERE_SET
              and ONLY_WITH.get(flag) in [None, *_flags(family, flags)])]
REFUSED |= {(name, flag): table[flag] for name, _, family, flags in ROW.findall(TABLE) if family in ("encoder", "vit")
            for flag in FLAGS[family]
            for table in [({"encoder": REFUSED_WHEN_NOT_SET, "vit": VIT_WHEN_NOT_SET}
                           if flag in _flags(family, flags) else
                           {"encoder": REFUSED_WHEN_SET, "vit": VIT_WHEN_SET})[family]]
            if flag in table and (name, flag) in CASES}
REFUSED |= {(name, flag): DECODERS_NEED.get(flag, "not part of this architecture") if flag in _flags(family, flags)
            else refusal
            for name, _, family, flags in ROW.findall(TABLE) if family == "decoder"
            for flag, refusal in DECODERS_REFUSE.items() if (name, flag) in CASES}


def _flip(table: str, name: str, flag: str) -> str:
    def row(match: re.Match[str]) -> str:
        if match[1] != name:
            return match[0]
        prefix = PREFIX[match[3]]
        flags = set(_flags(match[3], match[4])) ^ {flag}
        return f"MP_ARCH({name}, {match[2]}, {match[3]}, {' | '.join(prefix + f for f in sorted(flags)) or '0'})"

    flipped = ROW.sub(row, table)
    assert flipped != table
    return flipped


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources that the tests modify."""
    tree = tmp_path_factory.mktemp("flags") / "tree"
    tree.mkdir()
    for name in ("csrc", "mpool"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_libs"))
    (tree / "tests").mkdir()
    for name in ("python", "parity"):
        shutil.copytree(ROOT / "tests" / name, tree / "tests" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "tools").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "tools/trim_openblas.py"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def _failures(tree: Path, name: str) -> tuple[int, list[str]]:
    """Build the copy and run the parity tests of one row. Returns the number of tests that ran, and the message of each
    failure."""
    build = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, capture_output=True,
                           text=True, timeout=900)
    assert build.returncode == 0, build.stderr[-2000:]
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
                          NAMES.get(name, name), f"--junitxml={report}",
                          *(str(tree / "tests/python/parity" / test) for test in TESTS)],
                         cwd=tree, capture_output=True, text=True, timeout=900,
                         env={**os.environ, "PYTHONPATH": str(tree)})
    assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert not any(case.find("error") is not None for case in cases), run.stdout[-2000:]
    return (sum(case.find("skipped") is None for case in cases),
            [failure.get("message", "") for case in cases for failure in case.iter("failure")])


def test_every_flag_is_flipped() -> None:
    """Every flag of arch.h is flipped. A new flag needs an entry in the tables above."""
    for prefix in set(PREFIX.values()):
        listed = {flag for family, flags in FLAGS.items() if PREFIX[family] == prefix for flag in flags}
        assert set(re.findall(prefix + r"(\w+) = 1 <<", HEADER)) == listed, "list the flag in FLAGS"
    assert {"ROPE_NEOX", *DECODERS_REFUSE} == set(FLAGS["decoder"]), "list the error of the flag in DECODERS_REFUSE"
    assert set(DECODERS_NEED) <= set(DECODERS_REFUSE)
    for family, flag in HIDDEN_BY:
        assert flag in FLAGS[family] and HIDDEN_BY[family, flag] in FLAGS[family]
    assert set(REFUSED) <= set(CASES)
    assert len(ROW.findall(TABLE)) == len(re.findall(r"^MP_ARCH\(", TABLE, re.M)), "ROW misses a row of archs.def"


def test_a_missing_bias_is_refused(tmp_path: Path, pool: mpool.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag BIAS requires the biases that other rows may lack. So does the table of architectures, before the core
    sees the file."""
    gguf = pytest.importorskip("gguf")
    add, model = gguf.GGUFWriter.add_tensor, tinygguf.model("bert")
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"):
        def add_others(writer: Any, tensor: str, *more: Any, left_out: str = f"{name}.bias", **options: Any) -> None:
            if not tensor.endswith(left_out):
                add(writer, tensor, *more, **options)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_others)
        with pytest.raises(mpool.errors.FormatError, match=rf"blk\.0\.{name}\.bias.* missing"):
            pool.embed("x", str(tinygguf.write(tmp_path / f"{name}.gguf", model)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, family, _ in ROW.findall(TABLE) if FLAGS[family]])
def test_unflipped_passes(tree: Path, name: str) -> None:
    ran, failures = _failures(tree, name)
    assert ran >= 4 and not failures


@pytest.mark.slow
@pytest.mark.parametrize("name, flag", CASES)
def test_flipped_fails(tree: Path, name: str, flag: str) -> None:
    path = tree / "csrc/models/archs.def"
    path.write_text(_flip(TABLE, name, flag), encoding="utf-8")
    try:
        _, failures = _failures(tree, name)
    finally:
        path.write_text(TABLE, encoding="utf-8")
    assert failures
    if (name, flag) in REFUSED:
        assert all(REFUSED[name, flag] in failure for failure in failures), failures
    else:
        assert all(failure.startswith(("AssertionError", "assert ")) for failure in failures), failures
