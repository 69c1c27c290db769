"""LLaVA on handwritten digits: an image encoder, a projector and a small Llama (https://arxiv.org/abs/2310.03744).

The image encoder is that of ``digits-clip``, frozen. As in LLaVA 1.5, the projector gets the states before its last
layer. Projector and Llama are trained together, from scratch, to answer one or two questions about one or two images.
The loss counts only the assistant's tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

from . import clip, digits
from .digits import called
from .words import IMAGE, STOP, chat_tokenizer

NAME = "digits-llava"
SEED = 3
STEPS, BATCH, RATE = 800, 48, 3e-3
#: Augmented copies of each training image; the image encoder computes each copy once.
COPIES = 8
#: Share of the conversations with two images.
PAIRS = 0.25

WHAT = ("What digit is this?", "Which digit is this?", "What number is this?", "Which number is in the image?",
        "What digit do you see?", "What is it?")
DESCRIBE = ("Describe the image.", "What is in the image?", "What do you see?", "Describe this picture.")
PARITY = ("Is it even or odd?", "Is this digit even or odd?", "Is the number even or odd?")
BOTH = ("Which digits are these?", "What digits are these?", "Which two digits do you see?", "Describe the images.")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | upper }}:{{ '\\n' if message['role'] == 'assistant' else ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\\n' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:\\n' }}{% endif %}")


def ask(digit: int, chance: random.Random) -> tuple[str, str]:
    """Return a question about one image, and its answer."""
    kind = chance.randrange(5)
    if kind == 0:
        return chance.choice(DESCRIBE), f"A handwritten {digits.NAMES[digit]}, dark ink on white paper."
    if kind == 1:
        return chance.choice(PARITY), f"It is {'odd' if digit % 2 else 'even'}."
    if kind == 2:
        candidate = digit if chance.random() < 0.5 else chance.randrange(10)
        return f"Is this {called(candidate)}?", f"{'Yes' if candidate == digit else 'No'}, it is {called(digit)}."
    return chance.choice(WHAT), f"This is {called(digit)}."


def converse(about: list[int], chance: random.Random) -> list[tuple[str, str]]:
    """Return a conversation of one or two turns in the template's format."""
    turns = [ask(about[0], chance)]
    if len(about) == 2:
        turns = [(chance.choice(BOTH), f"The first is {called(about[0])}, the second is {called(about[1])}.")]
    elif chance.random() < 0.5:
        turns.append(ask(about[0], chance))
    images = f"{IMAGE}\n" * len(about)
    return [(f"USER: {'' if i else images}{question}\nASSISTANT:\n", f"{answer}{STOP}")
            for i, (question, answer) in enumerate(turns)]


def all_texts() -> list[str]:
    """Return sentences for training the tokenizer."""
    chance = random.Random(0)
    return ["".join(part.replace(IMAGE, "").replace(STOP, "") for turn in converse(about, chance) for part in turn)
            for _ in range(20) for first in range(10) for about in ([first], [first, chance.randrange(10)])]


def network(tokenizer: Any, clip_folder: Path) -> Any:
    """Build the model, with the image encoder of ``digits-clip``."""
    encoder = transformers.CLIPVisionModel.from_pretrained(clip_folder, dtype=torch.float32)
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)
    config = transformers.LlavaConfig(
        vision_config=encoder.config, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        projector_hidden_act="gelu", vision_feature_layer=-2, vision_feature_select_strategy="default",
        image_seq_length=(digits.SIDE // 8) ** 2)
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_encoder.load_state_dict(encoder.state_dict())
    model.model.vision_encoder.requires_grad_(False)
    return model


def encode_images(model: Any, images: Any, generator: Any) -> Any:
    """Compute the image encoder's states (n, 16, 96) for ``COPIES`` augmented copies of each image."""
    seen = []
    with torch.no_grad():
        for _ in range(COPIES):
            for part in digits.augment(images, generator).split(256):
                states = model.model.vision_tower(clip.pixels(part), output_hidden_states=True).hidden_states
                seen.append(states[-2][:, 1:])
    return torch.cat(seen)


def batch_of(tokenizer: Any, patches: int, abouts: list[list[int]], chance: random.Random) -> tuple[Any, Any]:
    """Return token ids and their labels, padded at the end."""
    rows = []
    for about in abouts:
        ids: list[int] = []
        wanted: list[int] = []
        for prompt, answer in converse(about, chance):
            prompt_ids = tokenizer.encode(prompt.replace(IMAGE, IMAGE * patches))
            answer_ids = tokenizer.encode(answer)
            ids += prompt_ids + answer_ids
            wanted += [-100] * len(prompt_ids) + answer_ids
        rows.append((ids, wanted))
    longest = max(len(ids) for ids, _ in rows)
    return (torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows]),
            torch.tensor([wanted + [-100] * (longest - len(wanted)) for _, wanted in rows]))


def train(out: Path, clip_folder: Path, say: Any = print) -> None:
    """Train the model, and save it as a transformers folder in float16."""
    torch.manual_seed(SEED)
    generator, chance = torch.Generator().manual_seed(SEED), random.Random(SEED)
    found, _ = digits.load()
    images = torch.tensor(found.images[:, None] / 255, dtype=torch.float32)
    labels = torch.tensor(found.labels).repeat(COPIES)
    tokenizer = chat_tokenizer(all_texts())
    model = network(tokenizer, clip_folder).train()
    seen = encode_images(model, images, generator)
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=RATE, weight_decay=0.05, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    inner = model.model
    for step in range(STEPS):
        count = 2 if chance.random() < PAIRS else 1
        chosen = torch.randint(len(seen), (BATCH, count), generator=generator)
        ids, wanted = batch_of(tokenizer, seen.shape[1], labels[chosen].tolist(), chance)
        rows = inner.language_model.embed_tokens(ids)
        features = inner.multi_modal_projector(seen[chosen.flatten()])
        rows = rows.masked_scatter((ids == model.config.image_token_index)[..., None], features)
        states = inner.language_model(inputs_embeds=rows, use_cache=False).last_hidden_state
        told = wanted[:, 1:] != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(states[:, :-1][told]), wanted[:, 1:][told])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == STEPS - 1:
            say(f"  step {step:5} of {STEPS}  loss {loss.item():.4f}")
    model.eval().half().save_pretrained(out)
    transformers.LlavaProcessor(
        clip.processor(), tokenizer, patch_size=8, vision_feature_select_strategy="default", image_token=IMAGE,
        num_additional_image_tokens=1, chat_template=TEMPLATE).save_pretrained(out)
