"""Frames of videos compared with transformers in float32: the prompt with its times, resized frames, logits."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors
from mpool.images import tiling
from mpool.images.tiling import frame_positions
from mpool.models.spec import VideoSettings
from mpool.tasks import chat_prompt
from mpool.tasks.requests import chat_request

import visionmodels
from paritymodels import torch
from visionmodels import IMAGE, image
from visionparity import relative, run

TOLERANCE = 1e-4
VIDEO = 156
#: Families whose prompts have no texts between frames: M-RoPE has the times.
TIMED = ("qwen2_vl", "qwen2_5_vl")
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
TEMPLATE = ("{% for message in messages %}{{ message['role'] }} : {% for part in message['content'] %}"
            "{% if part['type'] == 'image' %}{{ 'w20 <image> w21 ' }}{% elif part['type'] == 'video' %}{{ 'w156 ' }}"
            "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}assistant : ")


def frames(count: int, height: int = 24, width: int = 40) -> list[np.ndarray]:
    return [image(seed, height, width) for seed in range(count)]


def save(name: str, folder: Path, **processor: Any) -> Any:
    """Save a model whose template keeps the order of parts, with a configuration for videos."""
    model = visionmodels.randomised(name)
    visionmodels.save(model, name, folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({
        "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "image_mean": MEAN, "image_std": STD,
        "video_processor_type": "Qwen2VLVideoProcessor" if name in TIMED else "Qwen3VLVideoProcessor", **processor}))
    return model


@pytest.fixture(scope="module", params=[*TIMED, "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save(request.param, folder, do_resize=False)
    with mpool.Pool() as pool:
        yield model, folder, pool


def asked(pool: mpool.Pool, folder: Path, content: list[dict[str, Any]], **options: Any) -> Any:
    return chat_request(pool, [{"role": "user", "content": content}], str(folder), {"compute": "float32", **options},
                        None, "vision")


def processed(video: list[np.ndarray]) -> dict[str, Any]:
    """Return what Qwen3VLVideoProcessor returns for frames that are not resized. The class needs torchvision."""
    video = [*video, *video[-1:] * (len(video) % 2)]
    mean, std = (np.array(value) for value in (MEAN, STD))
    values = torch.tensor((np.stack(video) / 255 - mean) / std, dtype=torch.float32).permute(0, 3, 1, 2)
    count, _, height, width = values.shape
    patches = values.view(1, count // 2, 2, 3, height // 8, 2, 4, width // 8, 2, 4)
    return {"pixel_values_videos": patches.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(-1, 96),
            "video_grid_thw": torch.tensor([[count // 2, height // 4, width // 4]])}


def positions(model: Any, ids: Any, kinds: Any, given: dict[str, Any]) -> Any:
    """Return the positions of transformers, but tokens after a video follow its last position, in time, too, as the
    paper has it (arXiv:2409.12191). Version 5.24 does so after the prompt only."""
    found = model.model.get_rope_index(ids, kinds, **{
        name: value for name, value in given.items() if "pixel" not in name})[0]
    made, start, longest = found.clone(), 0, 0
    for kind, group in itertools.groupby(range(ids.shape[1]), lambda at: int(kinds[0, at])):
        own = list(group)
        made[:, 0, own] += start - found[0, 0, own[0]]
        start = int(made[:, 0, own].max()) + 1
        if kind == 2:
            longest = max(int((made[axis, 0, own] - made[axis, 0, own[0]]).max()) for axis in range(3))
            if longest < int(given["video_grid_thw"][0, 1:].max()) // 2:
                return found
    return made


def logits(model: Any, made: Any, video: list[np.ndarray], pixels: np.ndarray | None, after: tuple[int, ...] = (),
           fps: float = 2) -> np.ndarray:
    ids = torch.from_numpy(np.append(made.prompt, after).astype(np.int64))[None]
    rows = video[0].shape[0] * video[0].shape[1] // 64 * ((len(video) + 1) // 2)
    places = torch.nonzero(ids[0] == IMAGE)[:, 0]
    ids[0, places[:rows]] = VIDEO
    given = processed(video)
    if pixels is not None:
        seen = visionmodels.processed("qwen3_vl", pixels)
        given |= {"pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if model.mpool_family == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([2 / fps])
    if model.mpool_family in TIMED:
        given["position_ids"] = positions(model, ids, kinds, given)
    with torch.no_grad():
        return model(input_ids=ids, mm_token_type_ids=kinds, **given).logits[0].numpy()


@pytest.mark.parametrize("count", [2, 3, 6])
def test_logits(family: Any, count: int) -> None:
    """A part is two different frames; the last frame of an odd number is repeated. An image may follow."""
    model, folder, pool = family
    video, photo = frames(count), image(9, 33, 41)
    for pixels in (None, photo):
        content: list[dict[str, Any]] = [{"type": "video", "video": video, "fps": 2}]
        if pixels is not None:
            content.append({"type": "image", "image": pixels})
        made = asked(pool, folder, [*content, {"type": "text", "text": "w40 w41"}])
        assert len(made.images.runs) == 3 * ((count + 1) // 2 + (pixels is not None))
        found = run(pool, made, prompt_logits=True, max_tokens=3, ignore_eos=True)
        after = found.tokens(0)[0].tolist()
        if not {IMAGE, VIDEO}.isdisjoint(after):  # transformers would look for further images
            after = after[:1]
        wanted = logits(model, made, video, pixels, after[:-1])
        assert relative(found.prompt_logits(), wanted[:len(made.prompt)]) <= TOLERANCE
        assert wanted[len(made.prompt) - 1:].argmax(-1).tolist() == after


@pytest.mark.parametrize("fps", [0.5, 1.7, 30, None])
def test_times_of_frames(fps: float | None, tmp_path: Path) -> None:
    """The same frames at other times are another prompt, whose rows the prefix cache does not have."""
    model = save("qwen2_5_vl", tmp_path, do_resize=False)
    video, seen = frames(9), []  # 75 tokens, more than a block of the prefix cache
    times = {"timestamps": [0, 0.9, 1.1, 4, 9.4, 9.4, 10, 10, 11]} if fps is None else {"fps": fps}
    for given in (({"fps": 2}, times), (times,)):
        with mpool.Pool() as pool:
            for own in given:
                made = asked(pool, tmp_path, [{"type": "video", "video": video, **own}, {"type": "text",
                                                                                        "text": "w40"}])
                found = run(pool, made, max_tokens=4, logprobs=0, ignore_eos=True)
                seen.append(found.tokens(0)[1].tolist())
            assert made.images.times.tolist() == [-1, *{0.5: (16, 32, 48, 64), 1.7: (4, 9, 14, 18), 30: (0, 0, 0, 1),
                                                        None: (4, 37, 40, 44)}[fps]]
            if fps is not None:
                values = run(pool, made, prompt_logits=True).prompt_logits()
                assert relative(values, logits(model, made, video, None, fps=fps)) <= TOLERANCE
    assert seen[1] == seen[2] != seen[0]


def test_positions_round_like_those_of_transformers() -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    video = VideoSettings(0, None, 2, None, None, 3, 2.0)
    for fps in (0.3, 0.7, 1.1, 2, 3, 5, 6, 7, 12, 24, 25, 29.97, 49, 60, 98):
        times = [at / fps for at in range(601)]
        step = 2.0 * torch.tensor([2 / fps])[0]
        wanted = Qwen2_5_VLModel.get_vision_position_ids(None, 0, torch.tensor([301, 1, 1]), 1, 1, step)[0]
        assert frame_positions(times, fps, video) == wanted.tolist()
    assert frame_positions(times, 7, VideoSettings(0, None, 2, None, None, 3)) == list(range(301))


def test_frames_in_a_process_and_later_questions(family: Any) -> None:
    """Another first frame changes the result, an image of the first frame is another tile, and a worker process gives
    the same tokens."""
    _, folder, pool = family
    video = frames(4)
    options = {"compute": "float32", "temperature": 0, "max_tokens": 5, "ignore_eos": True}

    def tokens(pool: mpool.Pool, shown: list[np.ndarray]) -> Any:
        messages = [{"role": "user", "content": [{"type": "video", "video": shown, "fps": 1}, "w40"]}]
        return pool.chat(messages, str(folder), logprobs=True, **options).choices[0]

    first, again = tokens(pool, video), tokens(pool, video)
    pool.vision(video[0], "w40", str(folder), **options)
    assert first.token_ids == again.token_ids == tokens(pool, video).token_ids
    other = tokens(pool, [video[0], video[0], *video[2:]])
    assert [one.logprob for one in other.logprobs] != [one.logprob for one in first.logprobs]
    with mpool.Pool(mpool.PoolConfig(isolation="process")) as apart:
        assert tokens(apart, video).token_ids == first.token_ids


def test_frames_are_of_one_run(family: Any) -> None:
    """A run that shows the same frames as an image each would read behind the pixels of the second one."""
    _, folder, pool = family
    made = asked(pool, folder, [{"type": "video", "video": frames(2), "fps": 2}, {"type": "text", "text": "w40"}])
    _, rows, tiles = made.images.runs
    assert tiles == 2
    made = replace(made, prompt=np.concatenate([made.prompt, np.full(2 * rows, IMAGE, np.int32), made.prompt[-1:]]),
                   images=replace(made.images, run_keys=np.concatenate([made.images.run_keys, made.images.run_keys]),
                                  runs=np.array([*made.images.runs, len(made.prompt), 2 * rows, 0], np.int32)))
    with pytest.raises(errors.InvalidArgument, match="run 0 has"):
        run(pool, made)


def test_times_belong_to_a_video(tmp_path: Path) -> None:
    """A run with a time follows at once a run of the same size, and not earlier."""
    save("qwen2_vl", tmp_path, do_resize=False)
    with mpool.Pool() as pool:
        made = asked(pool, tmp_path, [{"type": "video", "video": frames(6), "fps": 2}, {"type": "text", "text": "w40"}])
        images, (one, two, three) = made.images, np.split(made.images.runs, 3)
        assert images.times.tolist() == [-1, 1, 2]
        apart = np.concatenate([made.prompt[:two[0]], made.prompt[-1:], made.prompt[two[0]:]])
        wrong = [replace(made, images=replace(images, times=np.array(times, np.int32)))
                 for times in ([0, 1, 2], [-1, 2, 1])]
        wrong.append(replace(made, prompt=apart, images=replace(images, runs=np.concatenate(
            [one, two + [1, 0, 0], three + [1, 0, 0]]).astype(np.int32))))
        sizes = images.sizes.copy()
        sizes[-4:] = [40, 24, 40, 24]
        wrong.append(replace(made, images=replace(images, sizes=sizes)))
        for request in wrong:
            with pytest.raises(errors.InvalidArgument, match="does not continue the video"):
                run(pool, request)
        run(pool, made)


@pytest.mark.parametrize("name", TIMED)
def test_prompt_without_texts_between_frames(tmp_path: Path, name: str) -> None:
    """The chat template writes what is around a video."""
    from tokenizers import Tokenizer

    save(name, tmp_path, do_resize=False)
    with mpool.Pool() as pool:
        made = asked(pool, tmp_path, [{"type": "video", "video": frames(5), "fps": 2}, {"type": "text", "text": "w40"}])
    text = f"user : {'<image>' * 45} w40 assistant : "
    assert made.prompt.tolist() == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(
        text, add_special_tokens=False).ids


def test_prompt_around_frames(tmp_path: Path) -> None:
    """The text with the times of the parts equals that of transformers' processor."""
    from tokenizers import Tokenizer
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    save("qwen3_vl", tmp_path, do_resize=False)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for count, times in ((4, {"fps": 1.5}), (5, {"timestamps": [0, 0.5, 3, 3.2, 10]}), (3, {"fps": 30})):
        with mpool.Pool() as pool:
            made = asked(pool, tmp_path, [{"type": "video", "video": frames(count), **times}, {"type": "text",
                                                                                                "text": "w40"}])
        if "fps" in times:
            means = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), times["fps"], 2)
        else:
            means = [0.25, 3.1, 10.0]
        shown = "".join(f"<{at:.1f} seconds>w158{'<image>' * 15}w157" for at in means)
        text = f"user : {shown} w40 assistant : "
        assert made.prompt.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("size", [(60, 90), (33, 41), (300, 24), (17, 64), (5, 40)])
@pytest.mark.parametrize("cap", [False, True])
def test_sizes_of_frames(tmp_path: Path, size: tuple[int, int], cap: bool) -> None:
    """They are those of transformers' video processor, with Pillow's filter."""
    from PIL import Image
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    least, most = 6000, 14000
    save("qwen3_vl", tmp_path, size={"shortest_edge": least, "longest_edge": most}, cap_pixels_per_frame=cap,
         max_video_tokens=40)
    video = frames(3, *size)
    with mpool.Pool() as pool:
        made = asked(pool, tmp_path, [{"type": "video", "video": video, "fps": 2}, {"type": "text", "text": "w40"}])
    limit = 3 * max(min(40 * 64, most // 3), int(least * 1.05)) if cap else most
    high, wide = smart_resize(3, *size, temporal_factor=2, factor=8, min_pixels=least, max_pixels=limit)
    assert made.images.sizes.reshape(-1, 2).tolist() == [[high, wide]] * 4
    wanted = [np.asarray(Image.fromarray(frame).resize((wide, high), 3)) for frame in (*video, video[-1])]
    assert np.array_equal(made.images.pixels.reshape(4, high, wide, 3), wanted)


@pytest.mark.parametrize("size", [(60, 90), (33, 41), (300, 24), (17, 64), (5, 40)])
@pytest.mark.parametrize("cap", [False, True])
def test_sizes_of_frames_one_by_one(tmp_path: Path, size: tuple[int, int], cap: bool) -> None:
    """The limits of Qwen2-VL's processor are those of a frame."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    save("qwen2_vl", tmp_path, min_pixels=2000, size={"shortest_edge": 1, "longest_edge": 5000},
         cap_pixels_per_frame=cap, max_video_tokens=101)
    with mpool.Pool() as pool:
        made = asked(pool, tmp_path, [{"type": "video", "video": frames(3, *size), "fps": 2}, {"type": "text",
                                                                                              "text": "w40"}])
    limit = max(min(5000, int(101 * 64 * 0.9) * 2 // 3), 2100) if cap else 5000
    assert made.images.sizes.reshape(-1, 2).tolist() == [list(smart_resize(*size, 8, 2000, limit))] * 4


def test_frames_span_a_limited_time(tmp_path: Path) -> None:
    save("qwen2_5_vl", tmp_path)
    with mpool.Pool() as pool:
        for times in ({"timestamps": [0, 1, 40000, 40000]}, {"fps": 1e-5}, {"fps": 1e-39}, {"fps": 1e-320}):
            with pytest.raises(errors.InvalidArgument) as caught:
                asked(pool, tmp_path, [{"type": "video", "video": frames(4), **times}, {"type": "text", "text": "w40"}])
            assert caught.value.param == f"messages[0].content[0].{next(iter(times))}"


def test_frames_beyond_the_context_are_not_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of Qwen2-VL are those of a frame, so many small frames would take gigabytes before the prompt is known."""
    save("qwen2_vl", tmp_path, size={"shortest_edge": 4000, "longest_edge": 5000})
    monkeypatch.setattr("mpool.tasks.vision.resize_frame", None)
    with mpool.Pool() as pool, pytest.raises(errors.ContextOverflow):
        asked(pool, tmp_path, [{"type": "video", "video": frames(300), "fps": 2}, {"type": "text", "text": "w40"}])


def test_limits_of_newer_folders(tmp_path: Path) -> None:
    """transformers 5 saves the configuration for videos in the file of all processors, and reads it there first."""
    save("qwen3_vl", tmp_path, size={"shortest_edge": 6000, "longest_edge": 14000})
    joint = {f"{kind}_processor": json.loads((tmp_path / name).read_text()) for kind, name in (
        ("image", "preprocessor_config.json"), ("video", "video_preprocessor_config.json"))}
    (tmp_path / "processor_config.json").write_text(json.dumps(joint))
    save("qwen3_vl", tmp_path, size={"shortest_edge": 600, "longest_edge": 1400})
    with mpool.Pool() as pool:
        made = asked(pool, tmp_path, [{"type": "video", "video": frames(2, 60, 90), "fps": 2}, "w40"])
    assert made.images.sizes.tolist() == [64, 88] * 2


@pytest.mark.parametrize("change", [{"do_normalize": False}, {"do_rescale": False}, {"rescale_factor": 0.5},
                                    {"image_std": [0.4] * 3}, {"patch_size": 8}], ids=str)
def test_frames_that_are_prepared_unlike_images_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save("qwen3_vl", tmp_path, **change)
    with mpool.Pool() as pool, pytest.raises(errors.Unsupported) as caught:
        asked(pool, tmp_path, [{"type": "video", "video": frames(2), "fps": 2}, "w40"])
    assert caught.value.message.startswith(f"video_preprocessor_config.json: {next(iter(change))} is ")


# ---- SmolVLM 2: frames are images ------------------------------------------------------------------------------------

SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}")


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder, model = tmp_path_factory.mktemp("smolvlm"), visionmodels.randomised("smolvlm")
    save_smolvlm(model, folder)
    with mpool.Pool() as pool:
        yield model, folder, pool


def save_smolvlm(model: Any, folder: Path) -> None:
    visionmodels.save(model, "smolvlm", folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": SMOLVLM_TEMPLATE}))


@pytest.mark.parametrize("given, times", [
    ({"fps": 2}, {"fps": 2}), ({"fps": 0.011}, {"fps": 0.011}), ({"fps": 1e-5}, {"fps": 1e-5}),
    ({"timestamps": [0.5, 1.25, 3, 61.999, 7200]}, {"fps": 1000, "frames_indices": [500, 1250, 3000, 61999, 7200000]})])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_prompt_of_frames_that_are_images(smolvlm: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any],
                                          times: dict[str, Any], first: int) -> None:
    """The rendered text is that of transformers' processor and its template for videos, wherever the video stands."""
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.utils.chat_template_utils import render_jinja_template
    from transformers.video_utils import VideoMetadata

    _, folder, pool = smolvlm
    parts: list[dict[str, Any]] = [{"type": "video", "video": frames(5), **given}, {"type": "text", "text": "w40"},
                                   {"type": "image", "image": image(9, 24, 32)}]
    parts = [*parts[first:], *parts[:first]]
    entry = pool._find(str(folder), "vision")
    found = chat_prompt.prompt_of(entry, chat_prompt.check([{"role": "user", "content": parts}], {}))[0].text
    monkeypatch.setattr(processing_smolvlm, "num2words", tiling._words)
    processor = SimpleNamespace(image_seq_len=1, image_token="<image>", fake_image_token="<fake_token_around_image>",
                                global_image_token="<global-img>")
    metadata = VideoMetadata(**{"total_num_frames": 5, "frames_indices": list(range(5)), **times})
    video = processing_smolvlm.SmolVLMProcessor.replace_video_token(
        processor, {"pixel_values": np.empty((1, 5)), "video_metadata": [metadata]}, 0)
    shown = processing_smolvlm._prompt_split_image(1, 3, 3, processor.fake_image_token, "<image>", "<global-img>")
    wanted = render_jinja_template([[{"role": "user", "content": parts}]], chat_template=
                                   processing_smolvlm.DEFAULT_CHAT_TEMPLATE, add_generation_prompt=True)[0][0]
    assert found == wanted.replace("<image>", shown).replace("<video>", video)


def test_numbers_in_words() -> None:
    """Recorded from num2words 0.5.14, without which transformers' processor does not run."""
    assert {number: tiling._words(number) for number in (2, 15, 20, 21, 100, 105, 340, 768)} == {
        2: "two", 15: "fifteen", 20: "twenty", 21: "twenty-one", 100: "one hundred", 105: "one hundred and five",
        340: "three hundred and forty", 768: "seven hundred and sixty-eight"}


@pytest.mark.parametrize("size", [(24, 40), (97, 31), (32, 32)])
def test_logits_of_frames_that_are_images(smolvlm: Any, size: tuple[int, int]) -> None:
    check_logits(*smolvlm, frames(3, *size), 32)


def test_logits_of_frames_with_incomplete_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SmolVLM2-2.2B, 384 pixels per side and patches of 14: the model ignores the last pixels."""
    monkeypatch.setitem(visionmodels.PROCESSORS, "smolvlm", {
        **visionmodels.PROCESSORS["smolvlm"], "max_image_size": {"longest_edge": 36}})
    monkeypatch.setitem(visionmodels.FAMILIES, "smolvlm", {
        **visionmodels.FAMILIES["smolvlm"], "vision": {"image_size": 36}})
    model = visionmodels.randomised("smolvlm")
    save_smolvlm(model, tmp_path)
    with mpool.Pool() as pool:
        check_logits(model, tmp_path, pool, frames(3), 36)


def check_logits(model: Any, folder: Path, pool: mpool.Pool, video: list[np.ndarray], side: int) -> None:
    from PIL import Image
    from transformers.models.smolvlm.video_processing_smolvlm import get_resize_output_image_size

    made = asked(pool, folder, [{"type": "video", "video": video, "fps": 1}, {"type": "text", "text": "w40 w41"}])
    high, wide = get_resize_output_image_size(torch.empty(3, 3, *video[0].shape[:2]), 96)
    values = np.stack([Image.fromarray(frame).resize((wide, high), 1).resize((side, side), 1) for frame in video])
    pixels = torch.tensor((values / 255 - 0.5) / 0.5, dtype=torch.float32).permute(0, 3, 1, 2)[None]
    found = run(pool, made, prompt_logits=True, max_tokens=3, ignore_eos=True)
    ids = np.append(made.prompt, found.tokens(0)[0]).astype(np.int64)
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids[:-1])[None], pixel_values=pixels).logits[0].numpy()
    assert relative(found.prompt_logits(), wanted[:len(made.prompt)]) <= TOLERANCE
    assert wanted[len(made.prompt) - 1:].argmax(-1).tolist() == found.tokens(0)[0].tolist()


@pytest.mark.parametrize("files, longest", [
    ({"preprocessor": {}}, 96), ({"preprocessor": {"video_sampling": {"video_size": {"longest_edge": 48}}}}, 96),
    ({"preprocessor": {"size": None, "video_sampling": {"video_size": {"longest_edge": 48}}}}, 48),
    ({"preprocessor": {"size": None}}, 1456), ({"video_preprocessor": {"size": {"longest_edge": 60}}}, 60),
    ({"preprocessor": {"image_std": [0.4] * 3}}, 96), ({"video_preprocessor": {"image_std": [0.4] * 3}}, None),
    ({"video_preprocessor": {"max_image_size": {"longest_edge": 64}}}, None),
    ({"video_preprocessor": {"do_resize": False}}, None), ({"video_preprocessor": {"do_normalize": False}}, None),
    ({"video_preprocessor": {"do_rescale": False}}, None), ({"video_preprocessor": {"rescale_factor": 0.5}}, None),
    ({"video_preprocessor": {"size": {"height": 9, "width": 9}}}, None)])
def test_sizes_of_frames_that_are_images(tmp_path: Path, files: dict[str, Any], longest: int | None) -> None:
    visionmodels.save(visionmodels.make("smolvlm", 1, 1), "smolvlm", tmp_path)
    for name, more in files.items():
        config = {key: value for key, value in {**visionmodels.PROCESSORS["smolvlm"], **more}.items()
                  if value is not None}
        (tmp_path / f"{name}_config.json").write_text(json.dumps(config))
    with mpool.Pool() as pool:
        found = pool._find(str(tmp_path), "vision").describe().vision
    assert (None if found.video is None else found.video.longest) == longest
    if longest is None:
        name, changed = next(iter(files.items()))
        assert found.no_video.startswith(f"{name}_config.json: {next(iter(changed))} ")


def test_files_for_videos_may_be_missing(tmp_path: Path) -> None:
    """Without a file, the side of a frame is that of transformers, 364 pixels."""
    visionmodels.save(visionmodels.make("smolvlm", 1, 1), "smolvlm", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": visionmodels.PROCESSORS["smolvlm"]}))
    with mpool.Pool() as pool:
        found = pool._find(str(tmp_path), "vision").describe().vision.no_video
    assert found.startswith("video_preprocessor_config.json is missing") and "max_image_size is 364" in found


@pytest.mark.parametrize("resample", [1, 2])
def test_filters_of_frames_that_are_images(tmp_path: Path, resample: int) -> None:
    """It may differ from that of images."""
    from PIL import Image

    save_smolvlm(visionmodels.make("smolvlm", 1, 1), tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(
        {**visionmodels.PROCESSORS["smolvlm"], "size": {"longest_edge": 60}, "resample": resample}))
    video = frames(2, 40, 40)
    with mpool.Pool() as pool:
        made = asked(pool, tmp_path, [{"type": "video", "video": video, "fps": 1}, {"type": "text", "text": "w40"}])
    wanted = [np.asarray(Image.fromarray(frame).resize((60, 60), resample).resize((32, 32), resample))
              for frame in video]
    assert np.array_equal(made.images.pixels.reshape(2, 32, 32, 3), wanted)


def test_frames_that_are_images_have_a_time(smolvlm: Any) -> None:
    _, folder, pool = smolvlm
    for fps in (1e-6, 1e-39, 1e-320):
        with pytest.raises(errors.InvalidArgument) as caught:
            asked(pool, folder, [{"type": "video", "video": frames(3), "fps": fps}, "w40"])
        assert caught.value.param == "messages[0].content[0].fps"
    for wrong, param in (([*frames(1), image(3, 24, 48)], "video[1]"), ([*frames(1), b"no image"], "video[1]")):
        with pytest.raises(errors.InvalidArgument) as caught:
            asked(pool, folder, [{"type": "video", "video": wrong, "fps": 1}, "w40"])
        assert caught.value.param == f"messages[0].content[0].{param}"


@pytest.mark.parametrize("part, param", [
    ({"video": "film.mp4", "fps": 2}, "messages[0].content[0].video"),
    ({"video": [], "fps": 2}, "messages[0].content[0].video"),
    ({"video": iter(frames(2)), "fps": 2}, "messages[0].content[0].video"),
    ({"video": frames(1), "fps": 2}, "messages[0].content[0].video"), ({"video": frames(2)}, "messages[0].content[0]"),
    ({"video": frames(2), "fps": 0}, "messages[0].content[0].fps"),
    ({"video": frames(2), "fps": 1, "timestamps": [0, 1]}, "messages[0].content[0]"),
    ({"video": frames(2), "timestamps": [1, 0]}, "messages[0].content[0].timestamps"),
    ({"video": frames(2), "timestamps": [1]}, "messages[0].content[0].timestamps"),
    ({"video": [*frames(1), image(3, 24, 48)], "fps": 1}, "messages[0].content[0].video[1]"),
    ({"video": [*frames(1), b"no image"], "fps": 1}, "messages[0].content[0].video[1]"),
    ({"video": frames(1) * 800, "fps": 1}, "messages[0].content[0].video")])
def test_bad_frames(family: Any, part: dict[str, Any], param: str) -> None:
    _, folder, pool = family
    with pytest.raises(errors.InvalidArgument) as caught:
        pool.chat([{"role": "user", "content": [{"type": "video", **part}, "w40"]}], str(folder))
    assert caught.value.param == param


@pytest.mark.parametrize(("key", "value"), [("patch_size", 8), ("merge_size", 1), ("temporal_patch_size", 1),
                                           ("image_mean", [0.5, 0.5, 0.25]), ("image_std", 0.75)])
def test_frames_that_are_not_prepared_like_images(tmp_path: Path, key: str, value: Any) -> None:
    save("qwen3_vl", tmp_path, **{key: value})
    with mpool.Pool() as pool, pytest.raises(errors.Unsupported) as caught:
        asked(pool, tmp_path, [{"type": "video", "video": frames(2), "fps": 1}, {"type": "text", "text": "w40"}])
    assert caught.value.param == "messages[0].content[0].video"
    found = json.loads((tmp_path / "preprocessor_config.json").read_text())
    usual = {"image_mean": MEAN, "image_std": STD}.get(key) or found[key]
    read = [value] * 3 if key == "image_std" else value
    for part in ("video_preprocessor_config.json", key, str(read), str(usual)):
        assert part in caught.value.message


def test_errors_of_frames_count_videos(tmp_path: Path) -> None:
    save("qwen3_vl", tmp_path, do_resize=False)
    with mpool.Pool() as pool:
        with pytest.raises(errors.ContextOverflow) as caught:
            asked(pool, tmp_path, [{"type": "video", "video": frames(300), "fps": 2}, {"type": "text", "text": "w40"}])
        assert "1 video," in caught.value.message
        with pytest.raises(errors.ContextOverflow) as several:
            asked(pool, tmp_path, [*[{"type": "video", "video": frames(8), "fps": 2}] * 2, {"type": "image", "image":
                  image(1, 24, 40)}, {"type": "text", "text": "w40 " * 1000}])
        made = asked(pool, tmp_path, [*[{"type": "video", "video": frames(8), "fps": 2}] * 2, {"type": "image", "image":
                     image(1, 24, 40)}, {"type": "text", "text": "w40"}])
        rows = int(made.images.runs[1::3].sum())
        assert f" {rows} of them for 1 image and 2 videos," in several.value.message
        with pytest.raises(errors.InvalidArgument) as refused:
            asked(pool, tmp_path, [{"type": "video", "video": frames(3), "timestamps": [0, 1]}])
        assert refused.value.got == "2 values"


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_models_without_frames(tmp_path: Path, name: str) -> None:
    visionmodels.save(visionmodels.make(name, 1, 2), name, tmp_path)
    with mpool.Pool() as pool:
        for part in ({"type": "video", "video": frames(2), "fps": 1}, {"type": "video_url", "video_url": {"url": "x"}}):
            with pytest.raises(errors.Unsupported) as caught:
                pool.chat([{"role": "user", "content": [part, "w40"]}], str(tmp_path))
            assert caught.value.hint and caught.value.param.startswith("messages[0].content[0]")
