"""Vision engines: mpool, and transformers on torch, on the same weights. Runs by path in a process of its own.

The time to the first token is that of a completion of one token: preprocessing, image encoder, prefill. A second
question about the same image is measured too: mpool caches image embeddings, transformers does not.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import own_process
from own_process import rss, run_task
from timing import seconds_of

SIDE, IMAGE = 336, 32000
#: Shape -> sizes of the image encoder and of the decoder.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava-7b-4": ({"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
                   {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4,
                    "num_attention_heads": 32}),
}
PROCESSOR = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE},
             "crop_size": {"height": SIDE, "width": SIDE}, "do_center_crop": True, "resample": 3}
TEMPLATE = ("{% for message in messages %}USER: {% for part in message['content'] %}{% if part['type'] == 'image' %}"
            "<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}ASSISTANT:")
QUESTION = " ".join(f"w{word}" for word in range(100, 132))


def make_folder(shape: str, folder: Path) -> None:
    """Write the model, its processor and a word-level tokenizer, unless the folder is complete."""
    import torch
    import transformers

    if (folder / "ready").exists():
        return
    torch.manual_seed(3)
    image_encoder, decoder = SHAPES[shape]
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 14, "projection_dim": 768,
                       **image_encoder},
        text_config={"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "bos_token_id": 1,
                     "eos_token_id": 2, **decoder},
        image_token_id=IMAGE, vision_feature_layer=-2, vision_feature_select_strategy="default")
    transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16).eval().save_pretrained(folder)
    special = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE}
    words = special | {"USER:": 3, "ASSISTANT:": 4} | {f"w{i}": i for i in range(5, IMAGE)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "decoder": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [{"id": at, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for word, at in special.items()],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "eos_token": "</s>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "ready").touch()


class Mpool(own_process.Mpool):
    """mpool, by one call."""

    def first(self, image: np.ndarray, question: str) -> str:
        """Return the first token."""
        return self.pool.vision([image], question, self.folder, compute=self.compute, max_tokens=1,
                                temperature=0).text.strip()


class Torch:
    """transformers: from the processor's pixels and the prompt's ids to the logits of the last row."""

    def __init__(self, variant: str) -> None:
        self.variant = variant or "float32"

    def load(self, folder: str, threads: int) -> None:
        """Load the model, with ``threads`` threads."""
        import tokenizers
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.lib, self.type = torch, getattr(torch, self.variant)
        self.model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=self.type).eval()
        self.words = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        kind = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
        self.processor = kind(**{key: value for key, value in PROCESSOR.items() if key != "image_processor_type"})

    def first(self, image: np.ndarray, question: str) -> str:
        """See Mpool."""
        pixels = self.processor(image, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
        ids = self.words.encode(f"USER: <image> {question} ASSISTANT:").ids
        at = ids.index(IMAGE)
        ids[at:at + 1] = [IMAGE] * (SIDE // 14) ** 2
        with self.lib.inference_mode():
            generated = self.model.generate(input_ids=self.lib.tensor([ids]), pixel_values=pixels.to(self.type),
                                            attention_mask=self.lib.ones(1, len(ids), dtype=self.lib.long),
                                            max_new_tokens=1, do_sample=False)
        return str(self.words.id_to_token(int(generated[0, -1])))


ENGINES: dict[str, Any] = {"mpool": Mpool, "torch": Torch}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds to the first token, for a new image and for one seen before."""
    name, _, variant = task["engine"].partition(":")
    engine = ENGINES[name](variant)
    engine.load(task["folder"], task["threads"])
    chance = np.random.default_rng(7)
    new, seen = [], []
    for turn in range(task["repeat"] + 1):
        image = chance.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        new.append(seconds_of(lambda: engine.first(image, f"w{200 + turn} {QUESTION}")))
        seen.append(seconds_of(lambda: engine.first(image, f"w{300 + turn} {QUESTION}")))
    return {"measures": {"first token ms": statistics.median(new[1:]) * 1e3,
                         "first token, image seen before ms": statistics.median(seen[1:]) * 1e3}, "rss MB": rss()}


def prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Make the folder."""
    if task["engine"] == "folder":
        make_folder(task["shape"], Path(task["folder"]))
    return {}


if __name__ == "__main__":
    run_task({"measure": measure, "prepare": prepare})
