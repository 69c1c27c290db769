"""Numbers of a configuration that are no family's default: a reader that ignored the key would compute other values.

The models of the other parity tests mostly have the default base of RoPE and epsilon of norms. Here both are changed in
a copy, whose configuration is also written as older files have it, and as a GGUF file. transformers computes the
expected values. The last test checks that the models of the other parity tests have all other numbers.
"""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.models.families.table import ROWS
from mpool.models.fields import REQUIRED, Fields
from mpool.models.formats import hf_config

import encodermodels
import paritymodels
import tinygguf
from corelib import logits, token_vectors
from encodermodels import ENCODERS, Encoder, NVEmbed
from paritymodels import DECODERS, randomise, torch, write_tokenizer

TOLERANCE = 1e-4
#: Base of RoPE; base of layers with a sliding window, if they have one of their own; epsilon of norms.
CHANGES = {"base": 777.0, "local": 33.0, "epsilon": 0.07}
#: Least distance from the results without a change, in tolerances.
FAR = 20
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
#: Decoders whose layers with a window have a base of their own in folders, and not in GGUF files.
_ONE_BASE = ("olmo2_3",)
#: Decoders whose classes in transformers read ``rope_parameters`` only.
_NEVER_OLD = ("lfm3_plain", "gemma4", "gemma4_keys")
#: Values of ``model_type`` of decoders without RoPE.
_WITHOUT_ROPE = ("nemotron_h",)


def _changed(model: Any, changes: dict[str, float]) -> Any:
    """Return a copy of a model with other numbers; those that the model does not have are left out."""
    if not hasattr(model, "config") and not isinstance(model, NVEmbed):  # in plain torch
        made = copy.deepcopy(model)
        made.base, made.epsilon = changes.get("base", 0.0), changes.get("epsilon", model.epsilon)
        if "base" not in changes:
            made.base = getattr(model, "base", 0.0)
        for module in made.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = made.epsilon
        return made
    config = copy.deepcopy(model.network.config if isinstance(model, NVEmbed) else model.config)
    if "epsilon" in changes:
        for key in _EPSILONS:
            if hasattr(config, key):
                setattr(config, key, changes["epsilon"])
    rope = getattr(config, "rope_parameters", None) or {}
    for part, key in (("full_attention", "base"), ("sliding_attention", "local")):
        if part in rope and key in changes:
            rope[part]["rope_theta"] = changes[key]
    if "rope_theta" in rope and "base" in changes:
        rope["rope_theta"] = changes["base"]
    if isinstance(model, NVEmbed):
        made = NVEmbed(model.layers, rms_norm_eps=config.rms_norm_eps, rope_parameters=rope)
    else:
        made = type(model)(config, **({"add_pooling_layer": False} if getattr(model, "pooler", ...) is None else {}))
    made.load_state_dict(model.state_dict(), strict=False)
    return made.eval()


def _numbers(model: Any) -> list[str]:
    """Return the names of the numbers that a model has."""
    config = getattr(getattr(model, "network", model), "config", None)
    if config is None:
        return ["base", "epsilon"] if hasattr(model, "base") else ["epsilon"]
    rope = config.model_type not in _WITHOUT_ROPE and getattr(config, "rope_parameters", None) or {}
    return [*(["base"] if rope else []), *(["local"] if "sliding_attention" in rope else []), "epsilon"]


def _check(model: Any, compute: Callable[[Any], np.ndarray], got: dict[str, np.ndarray]) -> None:
    """Compare results with those of the changed model, and these with what each ignored change would give."""
    names = _numbers(model)
    expected = compute(_changed(model, CHANGES))
    scale = max(1.0, float(np.abs(expected).max()))
    for ignored in names:
        other = compute(_changed(model, {name: CHANGES[name] for name in names if name != ignored}))
        assert np.abs(other - expected).max() > FAR * TOLERANCE * scale, f"{ignored} has too little effect"
    for form, values in got.items():
        wanted = compute(_one_epsilon(_changed(model, CHANGES))) if form == "GGUF file" else expected
        assert np.abs(values - wanted).max() <= TOLERANCE * scale, form


def _one_epsilon(model: Any) -> Any:
    """Give the norms of DeepSeek's latents the epsilon of the other norms: GGUF files have one epsilon, transformers'
    class has a constant for these norms. Returns the model."""
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = CHANGES["epsilon"]
    return model


def _write_old(folder: Path) -> None:
    """Rewrite ``rope_parameters`` as older files have them."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (folder / "config.json").write_text(json.dumps(config))


# ---- decoders ------------------------------------------------------------------------------------------------------

def _decoders() -> dict[str, str]:
    """Return ``model_type`` -> its first model in DECODERS; of Gemma 3 and LFM3, the one whose first layers have both
    kinds of attention."""
    found: dict[str, str] = {}
    for name, (config, _, _) in DECODERS.items():
        found.setdefault(paritymodels.find_class(config).model_type, name)
    return {**found, "gemma3_text": "gemma3_types", "lfm3": "lfm3_plain"}


OF_TYPE = _decoders()


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", OF_TYPE.values())
def test_decoder(tmp_path: Path, family: str) -> None:
    model = paritymodels.decoder(family, 2, tie=family in paritymodels.TIED)
    randomise(model, 3)
    model.tie_weights()
    tokens = np.random.default_rng(6).integers(2, 96, 60)
    changed = _changed(model, CHANGES)
    got = {}
    with mpool.Pool() as pool:
        for form in ("folder", *([] if family in _NEVER_OLD else ["old folder"])):
            place = tmp_path / form
            changed.save_pretrained(place)
            write_tokenizer(place, 96)
            if form == "old folder":
                _write_old(place)
            got[form] = logits(pool, str(place), tokens, "float32")
        if family not in (*paritymodels.FOLDERS_ONLY, *_ONE_BASE):
            path = tinygguf.write(tmp_path / "m.gguf", changed)
            got["GGUF file"] = logits(pool, str(path), tokens, "float32")

    def compute(one: Any) -> np.ndarray:
        with torch.no_grad():
            return one(torch.tensor(tokens[None])).logits[0].numpy()  # type: ignore[no-any-return]

    _check(model, compute, got)


#: Family and its scaled RoPE: no number is the default.
SCALED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_type": "yarn", "rope_theta": 777.0, "factor": 5.0, "beta_fast": 6.0, "beta_slow": 0.5,
               "attention_factor": 1.4, "original_max_position_embeddings": 100}),
    ("llama", {"rope_type": "yarn", "rope_theta": 777.0, "factor": 5.0, "mscale": 3.0, "mscale_all_dim": 0.5,
               "original_max_position_embeddings": 100}),
    ("llama", {"rope_type": "proportional", "rope_theta": 777.0, "factor": 5.0, "partial_rotary_factor": 0.45}),
    ("phi3", {"rope_type": "longrope", "rope_theta": 777.0, "partial_rotary_factor": 0.75, "attention_factor": 1.4,
              "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.6], "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
              "original_max_position_embeddings": 100})]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family, rope", SCALED, ids=["yarn", "yarn_mscale", "proportional", "longrope"])
def test_scaled_rope(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    """Each number has an effect, and mpool reads all of them, also from the keys of older files."""
    def compute(settings: dict[str, Any]) -> np.ndarray:
        model = paritymodels.decoder(family, 2, rope_parameters=copy.deepcopy(settings))
        randomise(model, 3)
        if settings is rope:
            model.save_pretrained(tmp_path)
            write_tokenizer(tmp_path, 96)
        with torch.no_grad():
            return model(torch.tensor(tokens[None])).logits[0].numpy()  # type: ignore[no-any-return]

    tokens = np.random.default_rng(6).integers(2, 96, 60)
    expected = compute(rope)
    scale = float(np.abs(expected).max())
    for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", *(
            ("factor", "partial_rotary_factor") if rope["rope_type"] == "proportional" else ())):
        if key in rope:
            other = compute({name: value for name, value in rope.items() if name != key})
            assert np.abs(other - expected).max() > FAR * TOLERANCE * scale, f"{key} has too little effect"
    with mpool.Pool() as pool:
        assert np.abs(logits(pool, str(tmp_path), tokens, "float32") - expected).max() <= TOLERANCE * scale
    _write_old(tmp_path)
    with mpool.Pool() as pool:
        assert np.abs(logits(pool, str(tmp_path), tokens, "float32") - expected).max() <= TOLERANCE * scale


# ---- encoders ------------------------------------------------------------------------------------------------------

#: Model of ENCODERS -> its ``model_type``.
ENCODER_TYPES = {
    "bert_roberta": "roberta", "bert_xlm_roberta": "xlm-roberta", "bert_electra": "electra", "bert_albert": "albert",
    "nomic_bert": "nomic_bert", "nomic_bert_published": "nomic_bert", "nomic_bert_moe": "nomic_bert",
    "mpnet": "mpnet", "deberta_v2": "deberta-v2", "modern_bert": "modernbert", "modern_bert_old": "modernbert",
    "gte": "gte", "gte_arctic": "gte", "qwen3_embedding": "qwen3", "llama_embedding_qwen2": "qwen2",
    "llama_embedding_published": "qwen2", "llama_embedding_eurobert": "eurobert",
    "llama_embedding_eurobert_published": "eurobert", "llama_embedding_mistral": "mistral",
    "gemma_embedding": "gemma3_text", "nv_embed": "nvembed", "jina_bert_v3": "jina_embeddings_v3",
    "lfm2_embedding": "lfm2", "lfm2_embedding_causal": "lfm2",
    "jina_bert_v3_published": "xlm-roberta", "jina_bert_v2": "bert", "jina_bert_v2_code": "bert"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["bert", *ENCODER_TYPES])
def test_encoder(tmp_path: Path, name: str) -> None:
    encoder = Encoder(paritymodels.bert, 70) if name == "bert" else ENCODERS[name]
    model = encoder.make(2)
    randomise(model, 3)
    tinygguf.without_dropped(model)
    changed = _changed(model, CHANGES)
    ids = np.random.default_rng(6).integers(5, encodermodels.VOCAB, 60).tolist()
    folder = encoder.write(changed, tmp_path / "folder")
    assert json.loads((folder / "config.json").read_text())["model_type"] == ENCODER_TYPES.get(name, "bert")
    with mpool.Pool() as pool:
        got = {"folder": token_vectors(pool, str(folder), [ids])[0]}
        if name in tinygguf.ENCODERS:
            path = tinygguf.write_encoder(tmp_path / "m.gguf", name, changed)
            got["GGUF file"] = token_vectors(pool, str(path), [ids])[0]
    _check(model, lambda one: encoder.expected(one, ids), got)


# ---- every family is tested ----------------------------------------------------------------------------------------

#: Capability and ``model_type`` -> why no test above has it.
ELSEWHERE = {
    ("text_embedding", "camembert"): "read as roberta",
    ("text_embedding", "distilbert"): "no RoPE; the epsilon is a constant of its class",
    ("text_embedding", "new"): "read as gte; test_parity_encoders.py has its scaled RoPE, with a base of 500",
    ("text_embedding", "jina_embeddings_v5"): "read as qwen3 and eurobert",
    ("text_embedding", "llama"): "read as mistral",
    ("text_embedding", "lfm2_bidirectional"): "read as lfm2",
    ("text_to_text", "kimi_k2"): "read as deepseek_v3",
    ("text_to_text", "qwen3_5"): "its text_config is read as qwen3_5_text",
    ("text_to_text", "qwen3_5_moe"): "its text_config is read as qwen3_5_moe_text",
    ("text_to_text", "qwen3_vl_moe_text"): "read as qwen3_moe; test_parity_vision.py has its experts",
    ("text_to_text", "mistral3"): "its text_config is read as ministral3",
    ("text_to_text", "gemma3"): "its text_config is read as gemma3_text",
    ("text_to_text", "gemma3n"): "its text_config is read as gemma3n_text",
    ("text_to_text", "embedding_gemma2_text"): "test_parity_embedding_gemma2.py has its numbers",
    ("text_to_text", "gemma4"): "its text_config is read as gemma4_text",
    ("text_to_text", "gemma4_unified"): "its text_config is read as gemma4_unified_text"}


def test_every_family_has_a_case() -> None:
    """A new ``model_type`` needs a model in DECODERS, or in ENCODERS and ENCODER_TYPES."""
    tested = {*(("text_to_text", kind) for kind in OF_TYPE), ("text_embedding", "bert"),
              *(("text_embedding", kind) for kind in ENCODER_TYPES.values())}
    known = {(row.capability, kind) for row in ROWS for kind in row.in_config}
    assert known - tested == set(ELSEWHERE)


#: Numbers that need no model with another value than the default: the tests above change them (bases, epsilons, numbers
#: of scaled RoPE), or mpool refuses other values (``factor`` of RoPE without scaling, ``partial_rotary_factor`` of
#: families that rotate whole heads), or a key of every family's YaRN that one family has (mistral3).
EXEMPT = re.compile(r"(rope_theta|rotary_emb_base|rope_local_base_freq|_eps|epsilon|beta_fast|beta_slow|mscale"
                    r"|mscale_all_dim|attention_factor|rope_parameters.*factor|partial_rotary_factor"
                    r"|llama_4_scaling_beta)$")


def _configurations(tmp_path: Path) -> list[tuple[bool, dict[str, Any], list[str]]]:
    """Return for each model of DECODERS and ENCODERS: whether it embeds, its config.json, the names of its tensors."""
    found = []
    for name in DECODERS:
        with torch.device("meta"):
            model = paritymodels.decoder(name, 2)
        values = json.loads(model.config.to_json_string(use_diff=False))
        found.append((False, {**values, "architectures": [type(model).__name__]}, list(model.state_dict())))
    for name, encoder in ENCODERS.items():
        model, folder = encoder.make(2), tmp_path / name
        folder.mkdir()
        encoder.save(model, folder)
        found.append((True, json.loads((folder / "config.json").read_text()), list(encoder.published(model))))
    return found


def test_every_number_has_another_value_than_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each number that a reader asks for, it reads one of the models otherwise if it ignores the number. The tests
    of all layers compare these models with transformers, so they notice that."""
    plain, ignored, asked = Fields.number, "", set[str]()
    matters: dict[tuple[bool, str, str], bool] = {}

    def number(self: Fields, key: str, default: Any = REQUIRED, **limits: Any) -> Any:
        asked.add(self.name(key))
        value = plain(self, key, default, **limits)
        return value if self.name(key) != ignored else 2 * value if default is REQUIRED else default

    monkeypatch.setattr(Fields, "number", number)
    for embeds, values, names in _configurations(tmp_path):
        def read() -> Any:
            config = Fields.of(values, file="config.json")  # noqa: B023
            try:
                return hf_config.read_config(config, embeds, lambda: names)[1]  # noqa: B023
            except mpool.errors.MpoolError:
                return None

        ignored = ""
        asked.clear()
        usual = read()
        assert usual is not None
        for ignored in sorted(asked):
            if not EXEMPT.search(ignored):
                place = embeds, str(values["model_type"]), ignored
                matters[place] = matters.get(place, False) or read() != usual
    assert len(matters) > 10 and [place for place, found in matters.items() if not found] == []
