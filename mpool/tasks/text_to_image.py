"""Image generation: prompts to tokens, the noise schedule, the request, steps and images."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import integer, real, shown
from ..errors import Cancelled, InvalidArgument, MemoryExhausted
from ..runtime import threads as _threads
from ..runtime.awaiting import Waiter
from .images_result import GeneratedImage, GeneratedImages, ImageStep, to_image
from .options import PLAIN, GenerateImageOptions
from .streams import Flow
from .text_embedding import MAX_CHARS, surrogate_of
from .text_to_text import keyed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..models.spec import DrawingSettings, TextInput
    from ..runtime.entry import Entry
    from .options import Call

MAX_SIDE, MAX_STEPS, MAX_PICTURES = 8192, 1000, 64


# ---- options -------------------------------------------------------------------------------------------------------

def _whole(name: str, value: Any, low: int, high: int, key: str) -> int:
    number = integer(value)
    if number is None or not low <= number <= high:
        raise InvalidArgument(f"{name} is {shown(value)}, allowed: {low} to {high:,}", key=key)
    return number


def _scale(value: Any, key: str) -> float:
    number = real(value)
    if number is None or not 0 <= number <= 1000:
        raise InvalidArgument(f"guidance_scale is {shown(value)}, allowed: 0 to 1000", key=key)
    return number


def _size(name: str, value: Any, grain: int, most: int, key: str) -> int:
    number = _whole(name, value, 1, MAX_SIDE, key)
    if number % grain or number > most:
        near = min(max(grain, round(number / grain) * grain), most)
        raise InvalidArgument(f"{name} is {number}, allowed: multiples of {grain} up to {most}; the nearest is {near}",
                              key=key)
    return number


# ---- schedule ------------------------------------------------------------------------------------------------------

def _shifted(t: NDArray[Any], mu: float, kind: str) -> NDArray[Any]:
    bend = math.exp(min(mu, 700.0)) if kind == "exponential" else mu
    return bend / (bend + (1 / t - 1) ** 1.0)


def schedule(settings: DrawingSettings, steps: int, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Times that the model is told, ``[steps]``, and shares of noise, ``[steps + 1]``.

    Args:
        settings: settings of the model.
        steps: how many.
        rows: rows of the transformer for one image; a dynamic shift depends on them.

    Raises:
        InvalidArgument: the model's files give no schedule for this count of steps and this size.

    Source:
        "Scaling Rectified Flow Transformers" (arXiv:2403.03206), section 5.3.2; the numbers and their order of rounding
        are those of diffusers' FlowMatchEulerDiscreteScheduler and its pipelines.
    """
    with np.errstate(all="ignore"):
        times, sigmas = _schedule(settings, steps, rows)
    low, high = float(sigmas.min()), float(sigmas.max())
    if not (np.isfinite(times).all() and -1e-3 <= low and high <= 1 + 1e-3):  # NaN is in no range
        raise InvalidArgument(f"the model's schedule of noise gives shares from {low:g} to {high:g} for {steps} steps "
                              f"of a picture of {rows:,} rows, allowed: 0 to 1",
                              hint="Another width, height or num_inference_steps; scheduler_config.json says the shift")
    return times, sigmas


def _schedule(settings: DrawingSettings, steps: int, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    s = settings.scheduler
    train, shift, dynamic = s["num_train_timesteps"], s["shift"], s["use_dynamic_shifting"]
    if settings.architecture == "flux":
        sigmas: NDArray[Any] = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
    else:
        ends = np.array([train, 1], dtype=np.float32) / np.float32(train)
        if not dynamic:
            ends = shift * ends / (1 + (shift - 1) * ends)
        first, last = float(ends[0]), float(ends[1])
        sigmas = np.linspace(first * train, last * train, steps) / train
    if dynamic:
        slope = (s["max_shift"] - s["base_shift"]) / (s["max_image_seq_len"] - s["base_image_seq_len"])
        mu = rows * slope + (s["base_shift"] - slope * s["base_image_seq_len"])
        sigmas = _shifted(sigmas, mu, s["time_shift_type"])
    else:
        sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    if s["shift_terminal"]:
        left = 1 - sigmas
        sigmas = 1 - left / (left[-1] / (1 - s["shift_terminal"]))
    sigmas = sigmas.astype(np.float32)
    times = sigmas * np.float32(train)
    if settings.architecture == "flux":
        times = times / np.float32(1000) * np.float32(1000)
    return times.astype(np.float32), np.append(sigmas, np.float32(0))


def noise(seed: int, picture: int, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Initial latents: normally distributed, a function of the seed and the number of the image."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, picture], dtype=np.uint64)))
    return generator.standard_normal(shape, dtype=np.float32)


def _check_memory(entry: Entry, core_key: str, n: int, pixels: int, latents: int) -> None:
    """Raises the core's MemoryExhausted before the noise, which may be gigabytes, is generated."""
    limit, needed = int(entry.pool.registry.stats()["memory_limit"]), 4 * n * (2 * latents + 3 * pixels)
    if needed > limit:
        raise MemoryExhausted(f"{core_key.splitlines()[0]}: the call needs {needed / 1e6:,.1f} MB, "
                              f"{limit / 1e6:,.1f} MB are the limit", key=entry.key,
                              hint="Ask for fewer or smaller pictures at once")


# ---- texts ---------------------------------------------------------------------------------------------------------

def _check_text(name: str, text: Any, key: str) -> str:
    if not isinstance(text, str):
        raise InvalidArgument(f"{name} is {shown(text)}, allowed: a text", key=key,
                              hint="For several prompts, call generate_image once for each, or n= for several pictures"
                              if isinstance(text, (list, tuple)) else None)
    if len(text) > MAX_CHARS:
        raise InvalidArgument(f"{name} has {len(text):,} characters, allowed: at most {MAX_CHARS:,}", key=key)
    fault = surrogate_of(text, name)
    if fault is not None:
        fault.key = key
        raise fault
    return text


def _callers_level() -> int:
    """How many frames up the first one outside of the package is, for a warning of the function that asks."""
    import sys

    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "mpool":
        frame, level = frame.f_back, level + 1
    return level


def _tokens(inputs: Sequence[TextInput | None], text: str, lengths: Sequence[int],
            name: str, told: list[str]) -> list[NDArray[np.int32] | None]:
    """Token ids for each encoder. Adds to ``told`` what is cut off: this may run on a thread, where no caller can be
    warned."""
    from ..tokenizers import pipeline_tokenizers

    found: list[NDArray[np.int32] | None] = []
    for take, length in zip(inputs, lengths):
        if take is None or take.folder is None:
            found.append(None)
            continue
        ids, removed = pipeline_tokenizers.encode(take.folder, text, length, take.pad, take.clip)
        if removed:
            encoder = "CLIP" if take.clip else "T5"
            told.append(f"{name} is too long for {encoder}, which takes {length} tokens; it does not see "
                        f"{shown(removed)}")
        found.append(np.array(ids, dtype=np.int32))
    return found


# ---- a call --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Request:
    """A request for images, ready for the core."""

    entry: Entry
    core_key: str
    width: int
    height: int
    ids: list[list[NDArray[np.int32] | None]]
    counts: tuple[int, int, int]
    noise: NDArray[np.float32]  # (n, channels, high, wide)
    times: NDArray[np.float32]
    sigmas: NDArray[np.float32]
    guidance: float
    preview_every: int
    seed: int
    parameters: dict[str, Any] = field(default_factory=dict)
    keep: bool = False

    def submit(self, call: Call | None, fail_fast: bool | None = None, again: bool = False) -> _core.Ticket:
        """Starts it. ``fail_fast``, ``again``: as of Call.keywords."""
        keywords = (call or PLAIN).keywords(self.entry.key, fail_fast, again)
        try:
            return self.entry.pool.registry.submit_image_generation(
                self.core_key, self.width, self.height, self.ids, self.counts, self.noise.reshape(-1), self.times,
                self.sigmas, n=len(self.noise), guidance=self.guidance, preview_every=self.preview_every,
                keep=self.keep, **keywords)
        except MemoryExhausted as error:
            self.entry.pool._name_idle(error, self.core_key)
            raise

    def reader(self, ticket: _core.Ticket) -> Reader:
        """The reader of the request's ticket."""
        return Reader(self, ticket)


def prepare(entry: Entry, prompt: Any, options: GenerateImageOptions, watched: bool = True,
            keep: bool = False) -> Request:
    """Makes a request from arguments. Without ``watched``, no previews are made.

    Raises:
        InvalidArgument: an option is out of range, or asks for what the model cannot make.
    """
    settings, key = entry.describe().drawing, entry.key
    assert settings is not None, "entries of another capability are refused before"
    core_key = entry.core_key(options.compute)
    prompt = _check_text("prompt", prompt, key)
    grain = 2 * settings.scale
    positions = entry.describe().spec.kv.get("transformer.position_side")
    most = int(positions) * grain if isinstance(positions, int) else MAX_SIDE
    side = min(settings.side, most)
    width = _size("width", side if options.width is None else options.width, grain, most, key)
    height = _size("height", side if options.height is None else options.height, grain, most, key)
    steps = _whole("num_inference_steps", settings.steps if options.num_inference_steps is None
                   else options.num_inference_steps, 1, MAX_STEPS, key)
    scale = _scale(settings.guidance_scale if options.guidance_scale is None else options.guidance_scale, key)
    n = _whole("n", options.n, 1, MAX_PICTURES, key)
    every = _whole("preview_every", options.preview_every, 0, MAX_STEPS, key)
    seed = int.from_bytes(np.random.SeedSequence().generate_state(1).tobytes(), "little") if options.seed is None \
        else _whole("seed", options.seed, 0, 2**64 - 1, key)
    texts = [prompt]
    if options.negative_prompt is not None and not settings.guided:
        raise InvalidArgument("negative_prompt is given, but this model is not guided away from a text", key=key,
                              hint="Leave it out")
    away = "" if options.negative_prompt is None else _check_text("negative_prompt", options.negative_prompt, key)
    if settings.guided and scale > 1:
        texts.append(away)
    longest = settings.inputs[2].length if settings.inputs[2] is not None else 0
    tokens = _whole("max_sequence_length", min(settings.text_tokens, longest) if options.max_sequence_length is None
                    else options.max_sequence_length, 1, longest, key)
    counts = [0 if take is None else take.length for take in settings.inputs]
    counts[2] = tokens
    shape = (settings.channels, height // settings.scale, width // settings.scale)
    _check_memory(entry, core_key, n, width * height, math.prod(shape))
    with keyed(entry):
        times, sigmas = schedule(settings, steps, shape[1] * shape[2] // 4)
        told: list[str] = []
        ids = [_threads.interruptible(_tokens, settings.inputs, text, counts,
                                      "negative_prompt" if i else "prompt", told, chars=len(text))
               for i, text in enumerate(texts)]
    for warning in told:
        warnings.warn(warning, stacklevel=_callers_level())
    if options.latents is None:
        start = np.empty((n, *shape), dtype=np.float32)
        for i in range(n):
            start[i] = noise(seed, i, shape)
    else:
        start = _latents(options.latents, settings, n, shape, key)
    parameters = {"model": key, "prompt": prompt, "negative_prompt": options.negative_prompt, "width": width,
                  "height": height, "num_inference_steps": steps, "guidance_scale": scale, "seed": seed,
                  "max_sequence_length": tokens, "n": n, "compute": options.compute,
                  "latents": "of the seed" if options.latents is None else "given"}
    return Request(entry, core_key, width, height, ids, (counts[0], counts[1], counts[2]), start, times, sigmas, scale,
                   every if watched else 0, seed, parameters, keep)


def _latents(given: Any, settings: DrawingSettings, n: int, shape: tuple[int, int, int],
             key: str) -> NDArray[np.float32]:
    """(n, channels, high, wide); FLUX's also as diffusers packs them, (n, high / 2 * wide / 2, 4 channels)."""
    channels, high, wide = shape
    packed = (n, high * wide // 4, 4 * channels)
    array = _array_of(given)
    if array is None:
        raise InvalidArgument(f"latents is {shown(given)}, allowed: an array of floats, {(n, *shape)}", key=key)
    if settings.architecture == "flux" and array.shape == packed:
        array = array.reshape(n, high // 2, wide // 2, channels, 2, 2).transpose(0, 3, 1, 4, 2, 5).reshape(n, *shape)
    if array.shape == shape and n == 1:
        array = array[None]
    if array.shape != (n, *shape):
        more = f" or {packed}" if settings.architecture == "flux" else ""
        raise InvalidArgument(f"latents is an array of shape {array.shape}, allowed: {(n, *shape)}{more}", key=key)
    with np.errstate(over="ignore"):  # what is infinite then is refused by the core
        return np.ascontiguousarray(array, dtype=np.float32)


def _array_of(given: Any) -> NDArray[Any] | None:
    """Numbers as an array: of numpy, a list, or a tensor of torch, which may be bfloat16, need gradients or be on
    another device. None: they are none."""
    try:
        if all(hasattr(given, name) for name in ("detach", "cpu", "float", "is_complex")):
            given = given.detach().cpu()
            given = given if given.is_complex() else given.float()
        array = np.asarray(given)
    except Exception:  # a caller's object, which may raise anything
        return None
    return array if array.dtype.kind in "fiu" or array.dtype.name == "bfloat16" else None


# ---- steps ---------------------------------------------------------------------------------------------------------

class Reader:
    """Reads what a ticket has done since it was read last. One thread at a time."""

    def __init__(self, request: Request, ticket: _core.Ticket) -> None:
        self.request, self.ticket = request, ticket
        self._steps = self._previews = 0

    def take(self) -> list[ImageStep]:
        """Steps that were done; a preview comes with the step after which it was made. A call that failed or was
        cancelled while it made one gives the step without."""
        over = self.ticket.done()
        done, previews, _, each = self.ticket.image_progress()
        one, total = len(self.request.times), len(self.request.times) * len(self.request.noise)
        every, steps = self.request.preview_every, []
        while self._steps < done:
            step = self._steps + 1
            picture, within = divmod(step - 1, one)
            preview = None
            if every and (within + 1) % every == 0 and within + 1 < one:
                index = picture * each + (within + 1) // every - 1
                if index < previews:
                    preview = to_image(np.array(self.ticket.preview(index)))
                elif not over:
                    break  # it is being made
            self._steps = step
            steps.append(ImageStep(step, total, picture, preview))
        return steps

    def check(self) -> None:
        """Raises the error of a ticket that is done, if it has one."""
        self.ticket.check()

    @property
    def ended(self) -> bool:
        """Images are there with the end of the ticket, not before."""
        return False

    def result(self) -> GeneratedImages:
        """The pictures of a ticket that is done.

        Raises:
            MpoolError: the call failed.
        """
        request = self.request
        try:
            found = self.ticket.generated_images()
        except MemoryExhausted as error:
            request.entry.pool._name_idle(error, request.core_key)
            raise
        return GeneratedImages(tuple(
            GeneratedImage(found["pixels"][i], found["latents"][i], {**request.parameters, "picture": i})
            for i in range(len(request.noise))), request.seed, request.entry.key)


class ImageStream(Flow[ImageStep]):
    """Steps of pictures that are being made. Made by ``generate_image(..., stream=True)``.

    Iterating gives :class:`mpool.ImageStep` s. Leaving early, by ``break``, ``close()``, the end of a ``with``, or by
    dropping the stream, stops the work, within a step too. The work starts with the call, not with the first iteration,
    and does not wait for a slow reader. One thread at a time may iterate.

    Example::

        stream = mpool.generate_image("a lighthouse", "./FLUX.1-schnell", stream=True)
        for step in stream:
            print(f"{step.progress:.0%}")
        stream.result().save("lighthouse.png")
    """

    _reader: Reader

    def __init__(self, request: Request, call: Call | None, fail_fast: bool | None = None) -> None:
        ticket = request.submit(call, fail_fast)
        super().__init__(ticket, request.reader(ticket), request.entry.key)

    def result(self) -> GeneratedImages:
        """Waits for the pictures, whatever was iterated over before.

        Raises:
            Cancelled: the stream was left early.
            MpoolError: the call failed.
        """
        with Waiter(self._ticket):
            self._ticket.wait()
        if self._left:
            raise Cancelled("the stream was left before its pictures were done", key=self._key)
        return self._reader.result()


def __getattr__(name: str) -> Any:
    from .._renamed import of_module

    return of_module(__name__, name)
