"""Image generation: validation, tokenization, noise schedule, requests, steps and images."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import caller_stacklevel, integer, one_of, real, refuse, shown, surrogate_of
from ..errors import Cancelled, InvalidArgument, MemoryExhausted
from ..host import native_calls
from ..host.resources import typed
from ..names import COMPUTE
from ..tokenizers import pipeline_tokenizers
from .images_result import GeneratedImage, GeneratedImages, ImageStep, to_image
from .options import PLAIN, GenerateImageOptions
from .streams import TicketStream
from .text_to_text import errors_with_key
from .vectors import MAX_CHARS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..models.spec import PipelineSettings, TextInput
    from ..runtime.entry import Entry
    from ..runtime.history import TrackedRequest
    from .options import Call

#: Limits: pixels of a side, steps, and images per request.
MAX_SIDE, MAX_STEPS, MAX_IMAGES = 8192, 1000, 64
#: Largest magnitude of a latent: the core accepts no other.
MAX_LATENT = 1e6


# ---- options -------------------------------------------------------------------------------------------------------

def _check_integer(name: str, value: Any, low: int, high: int, key: str | None = None) -> int:
    number = integer(value)
    if number is None or not low <= number <= high:
        refuse(name, value, f"an integer from {low} to {high:,}", key=key)
    return number


def check(prompt: Any, options: GenerateImageOptions, full: bool = False) -> None:
    """Check the arguments of a request before its model is known.

    ``full``: also what :func:`prepare` checks for the model, as far as it goes.

    Raises:
        InvalidArgument: an argument has a value that no model allows.
    """
    _check_text("prompt", prompt)
    if options.negative_prompt is not None:
        _check_text("negative_prompt", options.negative_prompt)
    for name in ("width", "height"):
        if getattr(options, name) is not None:
            side = _check_integer(name, getattr(options, name), 1, MAX_SIDE)
            if full and side % 2:
                refuse(name, side, "an even number: a multiple of 16 for most models")
    for name, low, high in (("num_inference_steps", 1, MAX_STEPS), ("seed", 0, 2**64 - 1),
                            ("max_sequence_length", 1, MAX_CHARS)):
        if getattr(options, name) is not None:
            _check_integer(name, getattr(options, name), low, high)
    scale = 0.0 if options.guidance_scale is None else real(options.guidance_scale)
    if scale is None or not 0 <= scale <= 1000:
        refuse("guidance_scale", options.guidance_scale, "a number from 0 to 1000")
    _check_integer("n", options.n, 1, MAX_IMAGES)
    _check_integer("preview_every", options.preview_every, 0, MAX_STEPS)
    one_of("compute", options.compute, COMPUTE)
    latents = None if options.latents is None else _numeric_array(options.latents)
    if options.latents is not None and (latents is None or full and latents.ndim not in (3, 4)):
        refuse("latents", options.latents, "an array of floats of shape (n, channels, height / 8, width / 8)")
    if latents is not None and (not (np.abs(latents) <= MAX_LATENT).all() or
                                full and latents.ndim == 4 and len(latents) != options.n):
        refuse("latents", latents, f"{options.n} arrays of finite numbers of at most {MAX_LATENT:g}")


def _check_side(name: str, value: Any, multiple: int, largest: int, key: str) -> int:
    number = _check_integer(name, value, 1, MAX_SIDE, key)
    if number % multiple or number > largest:
        nearest = min(max(multiple, round(number / multiple) * multiple), largest)
        refuse(name, number, f"a multiple of {multiple} up to {largest} (the nearest is {nearest})", key=key)
    return number


# ---- schedule ------------------------------------------------------------------------------------------------------

def _shift(sigmas: NDArray[Any], mu: float, kind: str) -> NDArray[Any]:
    factor = math.exp(min(mu, 700.0)) if kind == "exponential" else mu
    return factor / (factor + (1 / sigmas - 1) ** 1.0)


def schedule(settings: PipelineSettings, steps: int, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the timesteps that condition the model, float32 ``[steps]``, and the noise levels (sigmas), float32
    ``[steps + 1]``, which decrease to 0.

    Args:
        settings: settings of the model.
        steps: number of steps.
        rows: number of image tokens of the transformer; a dynamic shift depends on it.

    Raises:
        InvalidArgument: the model's scheduler settings do not give a valid schedule for these steps and rows.

    Source:
        "Scaling Rectified Flow Transformers" (arXiv:2403.03206), section 5.3.2; values and order of rounding are those
        of diffusers' FlowMatchEulerDiscreteScheduler and its pipelines.
    """
    with np.errstate(all="ignore"):
        times, sigmas = _schedule(settings, steps, rows)
    low, high = float(sigmas.min()), float(sigmas.max())
    if not (np.isfinite(times).all() and -1e-3 <= low and high <= 1 + 1e-3):  # also true for NaN
        got = f"{low:g} to {high:g}"
        raise InvalidArgument(f"the model's noise levels for {steps} steps and {rows:,} image tokens must be from 0 to "
                              f"1, got {got}", got=got, allowed="from 0 to 1",
                              hint="Change width, height or num_inference_steps; scheduler_config.json has the shift")
    return times, sigmas


def _schedule(settings: PipelineSettings, steps: int, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
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
        sigmas = _shift(sigmas, mu, s["time_shift_type"])
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


def noise(seed: int, index: int, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Return the initial latents of the image with this index: normally distributed float32 ``shape``. The same seed
    and index give the same latents."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
    return generator.standard_normal(shape, dtype=np.float32)


def _check_memory(entry: Entry, core_key: str, n: int, pixels: int, latents: int) -> None:
    """Raise the core's MemoryExhausted before the noise is generated, which can take gigabytes."""
    limit, needed = int(entry.pool.registry.stats()["memory_limit"]), 4 * n * (2 * latents + 3 * pixels)
    if needed > limit:
        raise MemoryExhausted(f"{core_key.splitlines()[0]}: the request needs {needed / 1e6:,.1f} MB, the limit is "
                              f"{limit / 1e6:,.1f} MB", key=entry.key, hint="Request fewer or smaller images at once")


# ---- prompts -------------------------------------------------------------------------------------------------------

def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        hint = "For several prompts, call generate_image once for each; for several images of one prompt, use n="
        refuse(name, text, "a str", hint=hint if isinstance(text, (list, tuple)) else None)
    if len(text) > MAX_CHARS:
        raise InvalidArgument(param=name, got=f"{len(text):,} characters",
                              allowed=f"at most {MAX_CHARS:,} characters long")
    fault = surrogate_of(text, name)
    if fault is not None:
        raise fault


def _tokens(inputs: Sequence[TextInput | None], text: str, lengths: Sequence[int],
            name: str, truncations: list[str]) -> list[NDArray[np.int32] | None]:
    """Return the token ids for each text encoder, and append a message to ``truncations`` for each truncated prompt.
    The caller issues the warnings: on a tokenizer thread they would not point at the user's code."""
    found: list[NDArray[np.int32] | None] = []
    for encoder, length in zip(inputs, lengths):
        if encoder is None or encoder.folder is None:
            found.append(None)
            continue
        ids, removed = pipeline_tokenizers.encode(encoder.folder, text, length, encoder.pad, encoder.clip)
        if removed:
            truncations.append(f"`{name}` is too long for the text encoder {'CLIP' if encoder.clip else 'T5'}, which "
                               f"supports {length} tokens; it ignores {shown(removed)}")
        found.append(np.array(ids, dtype=np.int32))
    return found


# ---- requests ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Request:
    """A validated image generation request.

    Attributes:
        entry: the model.
        core_key: key of the core's model.
        width, height: size of an image in pixels.
        ids: token ids, int32 ``[tokens]``, for each prompt and each text encoder; None: the encoder is not used.
        counts: number of tokens for each text encoder.
        noise: initial latents, float32 ``[n, channels, latent height, latent width]``.
        times: timesteps, float32 ``[steps]``.
        sigmas: noise levels, float32 ``[steps + 1]``.
        guidance: guidance scale.
        preview_every: number of steps between two previews; 0: no previews.
        seed: seed of the noise.
        parameters: metadata of the images.
        keep: True: keep the latents of every step (for tests).
    """

    entry: Entry
    core_key: str
    width: int
    height: int
    ids: list[list[NDArray[np.int32] | None]]
    counts: tuple[int, int, int]
    noise: NDArray[np.float32]
    times: NDArray[np.float32]
    sigmas: NDArray[np.float32]
    guidance: float
    preview_every: int
    seed: int
    parameters: dict[str, Any] = field(default_factory=dict)
    keep: bool = False

    def submit(self, call: Call | None, fail_fast: bool | None = None, uncounted: bool = False) -> _core.Ticket:
        """Submit the request; ``fail_fast`` and ``uncounted`` are those of :meth:`Call.keywords`."""
        keywords = (call or PLAIN).keywords(self.entry, fail_fast, uncounted)
        try:
            return self.entry.pool.registry.submit_image_generation(
                self.core_key, self.width, self.height, self.ids, self.counts, self.noise.reshape(-1), self.times,
                self.sigmas, n=len(self.noise), guidance=self.guidance, preview_every=self.preview_every,
                keep=self.keep, **keywords)
        except MemoryExhausted as error:
            self.entry.pool._name_idle(error, self.core_key)
            raise

    def reader(self, ticket: _core.Ticket) -> Reader:
        """Return a reader for the ticket of this request."""
        return Reader(self, ticket)


def prepare(entry: Entry, prompt: Any, options: GenerateImageOptions, previews: bool = True,
            keep: bool = False) -> Request:
    """Make a request from the arguments of :func:`mpool.generate_image`.

    Args:
        entry: the model.
        prompt: the prompt.
        options: the options.
        previews: False: ignore ``preview_every``, because no caller can see the steps.
        keep: see :class:`Request`.

    Raises:
        InvalidArgument: an option is out of range, or the model does not support it.
    """
    settings, key = entry.describe().pipeline, entry.key
    assert settings is not None, "the entry must have the right capability"
    core_key = entry.core_key(options.compute)
    multiple = 2 * settings.scale
    positions = entry.describe().spec.kv.get("transformer.position_side")
    largest = int(positions) * multiple if isinstance(positions, int) else MAX_SIDE
    side = min(settings.side, largest)
    width = _check_side("width", side if options.width is None else options.width, multiple, largest, key)
    height = _check_side("height", side if options.height is None else options.height, multiple, largest, key)
    check(prompt, options)
    steps = int(settings.steps if options.num_inference_steps is None else options.num_inference_steps)
    scale = float(settings.guidance_scale if options.guidance_scale is None else options.guidance_scale)
    n, every = int(options.n), int(options.preview_every)
    seed = int.from_bytes(np.random.SeedSequence().generate_state(1).tobytes(), "little") if options.seed is None \
        else int(options.seed)
    texts = [prompt]
    if options.negative_prompt is not None and not settings.guided:
        refuse("negative_prompt", options.negative_prompt, "None, because this model does not support negative prompts",
               key=key)
    negative = options.negative_prompt or ""
    if settings.guided and scale > 1:
        texts.append(negative)
    longest = settings.inputs[2].length if settings.inputs[2] is not None else 0
    tokens = _check_integer("max_sequence_length", min(settings.text_tokens, longest)
                            if options.max_sequence_length is None else options.max_sequence_length, 1, longest, key)
    counts = [0 if encoder is None else encoder.length for encoder in settings.inputs]
    counts[2] = tokens
    shape = (settings.channels, height // settings.scale, width // settings.scale)
    _check_memory(entry, core_key, n, width * height, math.prod(shape))
    with errors_with_key(entry):
        times, sigmas = schedule(settings, steps, shape[1] * shape[2] // 4)
        truncations: list[str] = []
        ids = [native_calls.tokenized(len(text), _tokens, settings.inputs, text, counts,
                                      "negative_prompt" if i else "prompt", truncations)
               for i, text in enumerate(texts)]
    for message in truncations:
        warnings.warn(message, stacklevel=caller_stacklevel())
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
                   every if previews else 0, seed, parameters, keep)


def _latents(given: Any, settings: PipelineSettings, n: int, shape: tuple[int, int, int],
             key: str) -> NDArray[np.float32]:
    """Return the caller's latents as float32 ``[n, channels, height, width]``. For FLUX, diffusers' packed shape
    ``[n, height / 2 * width / 2, 4 * channels]`` is accepted too."""
    channels, height, width = shape
    packed = (n, height * width // 4, 4 * channels)
    packed_too = f" or {packed}" if settings.architecture == "flux" else ""
    allowed = f"an array of floats of shape {(n, *shape)}{packed_too}"
    array = _numeric_array(given)
    if array is None:
        refuse("latents", given, allowed, key=key)
    if settings.architecture == "flux" and array.shape == packed:
        array = array.reshape(n, height // 2, width // 2, channels, 2, 2).transpose(0, 3, 1, 4, 2, 5).reshape(n, *shape)
    if array.shape == shape and n == 1:
        array = array[None]
    if array.shape != (n, *shape):
        refuse("latents", array, allowed, key=key)
    with np.errstate(over="ignore"):  # the core rejects infinite values
        return np.ascontiguousarray(array, dtype=np.float32)


def _numeric_array(given: Any) -> NDArray[Any] | None:
    """Convert a list, NumPy array or torch tensor (of any float type, with gradients, or on another device) to a NumPy
    array. Return None if it does not have real numbers."""
    try:
        if all(hasattr(given, name) for name in ("detach", "cpu", "float", "is_complex")):
            given = given.detach().cpu()
            given = given if given.is_complex() else given.float()
        array = np.asarray(given)
    except MemoryError:
        raise
    except Exception:  # the conversion of an arbitrary object can raise any error
        return None
    return array if array.dtype.kind in "fiu" or array.dtype.name == "bfloat16" else None


# ---- steps ---------------------------------------------------------------------------------------------------------

class Reader:
    """Converts the progress of a ticket to steps, and a finished ticket to images. Not thread-safe."""

    def __init__(self, request: Request, ticket: _core.Ticket) -> None:
        self.request, self.ticket = request, ticket
        self._steps = 0

    def take(self) -> list[ImageStep]:
        """Return the steps that were completed since the last call. A step with a preview is returned once its preview
        is decoded, or without it if the request failed or was cancelled before that."""
        finished = self.ticket.done()
        done, previews, _, previews_per_image = self.ticket.image_progress()
        steps_per_image = len(self.request.times)
        total = steps_per_image * len(self.request.noise)
        every, steps = self.request.preview_every, []
        while self._steps < done:
            step = self._steps + 1
            image, within = divmod(step - 1, steps_per_image)
            preview = None
            if every and (within + 1) % every == 0 and within + 1 < steps_per_image:
                index = image * previews_per_image + (within + 1) // every - 1
                if index < previews:
                    preview = to_image(np.array(self.ticket.preview(index)))
                elif not finished:
                    break  # the preview is not decoded yet
            self._steps = step
            steps.append(ImageStep(step, total, image, preview))
        return steps

    def check(self) -> None:
        """Raise the error of a finished ticket, if it has one."""
        try:
            self.ticket.check()
        except MemoryExhausted as error:
            self.request.entry.pool._name_idle(error, self.request.core_key)
            raise

    @property
    def ended(self) -> bool:
        """False: steps can follow until the ticket is finished."""
        return False

    def result(self) -> GeneratedImages:
        """Return the images of a finished ticket without an error."""
        request, found = self.request, self.ticket.generated_images()
        return GeneratedImages(tuple(
            GeneratedImage(found["pixels"][i], found["latents"][i], {**request.parameters, "index": i})
            for i in range(len(request.noise))), request.seed, request.entry.key)


class ImageStream(TicketStream[ImageStep]):
    """Steps of images while they are generated. Returned by ``generate_image(..., stream=True)``.

    Iterating yields :class:`mpool.results.ImageStep` s. Leaving the loop early, ``close()``, the end of a ``with``
    block and dropping the stream cancel the request, even within a step. The request is submitted when the stream is
    created, not at the first iteration, and generation does not wait for a slow reader. Only one thread at a time may
    iterate.

    Example::

        stream = mpool.generate_image("a lighthouse", "./FLUX.1-schnell", stream=True)
        for step in stream:
            print(f"{step.progress:.0%}")
        stream.result().save("lighthouse.png")
    """

    _reader: Reader

    def __init__(self, request: Request, call: Call | None, running: TrackedRequest, fail_fast: bool | None = None,
                 again: Callable[[], ImageStream] | None = None) -> None:
        ticket = request.submit(call, fail_fast)
        super().__init__(ticket, request.reader(ticket), request, running, again)

    @typed
    def result(self) -> GeneratedImages:
        """Waits for the images and returns them, even if steps were already read.

        Raises:
            Cancelled: the stream was closed early.
            MpoolError: the request failed.
        """
        self._wait_done()
        if self._cancelled:
            raise Cancelled("the stream was closed before its images were complete", key=self._key)
        self._check()
        return self._reader.result()
