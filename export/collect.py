"""Collecting the ranges of a release: its text model in eager torch, requests run through it, counts that add up."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clef_trt.batch import collate
from clef_trt.encode import Encoder
from clef_trt.errors import ExportError, Fault, ReleaseError, RequestError, SettingError
from clef_trt.request import parse_request
from clef_trt.types import Encoding

from .ranges import (
    FORMAT_VERSION,
    MAX_LENGTH,
    ActivationRange,
    Ranges,
    WeightRange,
    activation_of,
    large_linears,
    read_checked,
    write_ranges,
    write_whole,
)
from .release import Release, StoredTensor, open_release
from .trace import TextModel, checkpoint_name, vision_checkpoint_name
from .vision import VisionTower
from .weights import stored_as

STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The histogram of |x|: 32 bins in each octave of 2^-40 … 2^40, their edges the float32 values whose mantissa has no
# more than five bits. A value's bin is then a shift of its bits, the same on every device; smaller ones count as zero.
OCTAVES, FIRST_EXPONENT, MANTISSA_BITS = 80, -40, 5
BINS, SHIFT = OCTAVES << MANTISSA_BITS, 23 - MANTISSA_BITS
FIRST_BITS = (127 + FIRST_EXPONENT) << MANTISSA_BITS
BLOCK_VALUES = 2**24  # at once, so that a long record's histogram takes little memory
Progress = Callable[[str], None]


def load_text_model(release: Release, device: str | torch.device, dtype: torch.dtype) -> TextModel:
    """TextModel with the release's weights, read from their stored regions one by one; tied embeddings stay one tensor.

    Raises ReleaseError when tensors are missing, of another shape or left over (see `stored_as`), or a file ends early.
    """
    with torch.device("meta"):
        model, vision = TextModel(release.config), VisionTower(release.config.vision)
    shapes = {vision_checkpoint_name(name): tuple(p.shape) for name, p in vision.named_parameters()}
    shapes |= {checkpoint_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    stored = stored_as(release, shapes)
    tensors = {name: stored[checkpoint_name(name)] for name, _ in model.named_parameters()}
    try:
        loaded = {tensor: _values(release, tensor).to(device, dtype) for tensor in dict.fromkeys(tensors.values())}
    except (AssertionError, RuntimeError) as fault:  # torch has no CUDA, the device no room, …
        raise SettingError(f"the model cannot be put on {device}: {fault}") from fault
    model.load_state_dict({name: loaded[tensor] for name, tensor in tensors.items()}, assign=True)
    return model.eval().requires_grad_(False)


def _values(release: Release, tensor: StoredTensor) -> Tensor:
    buffer, path = bytearray(tensor.length_bytes), release.root / tensor.file
    with path.open("rb") as file:
        file.seek(tensor.offset_bytes)
        if file.readinto(buffer) != tensor.length_bytes:
            raise ReleaseError(f"{path} ended while it was read")
    return torch.frombuffer(buffer, dtype=STORED_DTYPES[tensor.dtype]).reshape(tensor.shape)


@dataclass(frozen=True)
class Tally:
    """What was seen so far, and of what: the content of RANGES.json.partial."""

    source_sha256: str
    requests_sha256: str
    dtype: str
    requests: int  # done, in their order
    maxima: dict[str, float]
    counts: dict[str, list[int]]  # [BINS] per activation

    def plus(self, seen: dict[str, tuple[float, np.ndarray]]) -> Tally:
        """With one more request; an interrupt leaves either this tally or that one, never half of a request."""
        assert seen.keys() == self.maxima.keys(), "every activation is computed for every request"
        maxima = {name: max(self.maxima[name], amax) for name, (amax, _) in seen.items()}
        counts = {name: (np.array(self.counts[name]) + counts).tolist() for name, (_, counts) in seen.items()}
        return dataclasses.replace(self, requests=self.requests + 1, maxima=maxima, counts=counts)

    def range(self, name: str, percentiles: Sequence[float]) -> ActivationRange:
        """The range of one activation over all requests done."""
        amax, counts = self.maxima[name], self.counts[name]
        return ActivationRange(amax, {f"{p:.10g}": percentile(counts, amax, p) for p in percentiles}, sum(counts))


def collect_ranges(
    release: Release,
    requests: Sequence[dict[str, Any]],
    target: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    percentiles: Sequence[float] = (99.9, 99.99),
    progress: Progress = lambda _: None,
    every: int = 20,
) -> Ranges:
    """Run text requests, one at a time so that nothing is padding, and write the ranges they give to `target`.

    Every `every` requests, and when it is interrupted, the state is saved as `target` + ".partial"; called again with
    the same release, requests and dtype, it goes on from there to the same file. States are cut to MAX_LENGTH tokens.
    Raises RequestError for requests that are wrong or hold media, SettingError for impossible settings, ReleaseError,
    and ExportError when `target` exists, the partial file is of other inputs, or a value is not finite.
    """
    from .pipeline import hash_weights, source_sha256  # here: the pipeline reads ranges, too

    if every < 1 or not percentiles or not all(0 < percentile < 100 for percentile in percentiles):
        raise SettingError(f"every is {every}, percentiles {percentiles}; expected at least 1, and between 0 and 100")
    if target.exists() or not target.parent.is_dir():
        raise ExportError(f"{target} exists already, or its folder does not; choose another name, or remove it")
    encodings = _encoded(release, requests)
    linears = large_linears(release.config)
    names = list(dict.fromkeys(activation_of(linear) for linear in linears))
    begun = Tally(
        source_sha256=source_sha256(release, hash_weights(release, progress)),
        requests_sha256=_ids_sha256(encodings),
        dtype=str(dtype).removeprefix("torch."),
        requests=0,
        maxima=dict.fromkeys(names, 0.0),
        counts={name: [0] * BINS for name in names},
    )
    state_file = target.with_name(f"{target.name}.partial")
    tally = _resumed(state_file, begun, len(encodings), progress)
    saved = tally.requests
    progress(f"loading the model in {begun.dtype}")
    model = load_text_model(release, device, dtype)
    weights = {linear: WeightRange(_weight_max(model, linear)) for linear in linears}
    try:
        for index in range(saved, len(encodings)):
            tally = tally.plus(observe(model, linears, encodings[index], f"request {index}"))
            if tally.requests % every == 0:
                _save(tally, state_file)
                saved = tally.requests
                progress(f"{saved} of {len(encodings)} requests")
        tokens = sum(encoding.tokens for encoding in encodings)
        activations = {name: tally.range(name, percentiles) for name in names}
        ranges = Ranges(tally.source_sha256, len(encodings), tokens, tally.requests_sha256, activations, weights)
        write_ranges(ranges, target)
    except BaseException:
        if tally.requests > saved:
            _save(tally, state_file)
        raise
    state_file.unlink(missing_ok=True)
    return ranges


def _save(tally: Tally, path: Path) -> None:
    write_whole(path, {"format_version": FORMAT_VERSION} | dataclasses.asdict(tally))


def _resumed(path: Path, begun: Tally, requests: int, progress: Progress) -> Tally:
    """The saved tally of these inputs, or `begun`."""
    if not path.exists():
        return begun
    tally: Tally = read_checked(path, Tally)
    for name in ("source_sha256", "requests_sha256", "dtype"):
        if getattr(tally, name) != getattr(begun, name):
            raise ExportError(
                f"{path} was begun with another {name}: {getattr(tally, name)}, now it is {getattr(begun, name)}; "
                "go on with the inputs it was begun with, or remove it"
            )
    sizes = {name: len(counts) for name, counts in tally.counts.items()}
    if (
        tally.requests > requests
        or tally.maxima.keys() != begun.maxima.keys()
        or sizes != dict.fromkeys(begun.counts, BINS)
    ):
        raise ExportError(f"{path} does not hold the state of these requests and activations; remove it to begin again")
    progress(f"going on after {tally.requests} of {requests} requests")
    return tally


def _encoded(release: Release, requests: Sequence[dict[str, Any]]) -> list[Encoding]:
    """All requests as the model reads them; every fault is raised at once, with the request's index."""
    encoder = Encoder(release.folder / "tokenizer.json")
    max_length = min(MAX_LENGTH, release.config.text.max_position_embeddings)
    encodings, faults = [], []
    for index, body in enumerate(requests):
        media = [key for key in ("images", "videos") if isinstance(body, dict) and body.get(key)]
        faults += [Fault((index, key), "ranges are collected from text only; leave it out", "media") for key in media]
        if media:
            continue
        try:
            encodings.append(encoder.encode(parse_request(body), max_length))
        except RequestError as error:
            faults += [Fault((index, *fault.loc), fault.message, fault.kind) for fault in error.faults]
    if faults:
        raise RequestError(faults)
    if not encodings:
        raise RequestError([Fault((), "there are no requests to collect ranges from", "empty")])
    return encodings


def _ids_sha256(encodings: Sequence[Encoding]) -> str:
    state = hashlib.sha256()
    for encoding in encodings:
        state.update(encoding.tokens.to_bytes(8, "little") + encoding.input_ids.astype("<i8").tobytes())
    return state.hexdigest()


def _weight_max(model: TextModel, linear: str) -> float:
    amax = float(model.get_parameter(f"{linear}.weight").abs().max())
    if not math.isfinite(amax):
        raise ExportError(f"{linear}.weight holds values that are not finite")
    return amax


def observe(
    model: TextModel, linears: Sequence[str], encoding: Encoding, where: str
) -> dict[str, tuple[float, np.ndarray]]:
    """One request through the model: max |x| and the histogram of |x| [BINS] of each activation the linears read.

    Raises ExportError, naming the activation and `where`, for values that are not finite.
    """
    seen: dict[str, tuple[float, np.ndarray]] = {}

    def look(name: str, _: nn.Module, arguments: tuple[Tensor]) -> None:
        amax = float(torch.stack(arguments[0].aminmax()).abs().max())  # NaN stays NaN; nothing large is copied
        if not math.isfinite(amax):
            raise ExportError(f"{name} holds values that are not finite, in {where}")
        seen[name] = (amax, histogram(arguments[0]).cpu().numpy())

    readers = {activation_of(linear): linear for linear in linears}  # one of those that share it
    device = model.lm_head.weight.device
    inputs = collate([encoding], [], model.lm_head.in_features)
    with contextlib.ExitStack() as stack, torch.inference_mode():
        for name, linear in readers.items():
            handle = model.get_submodule(linear).register_forward_pre_hook(partial(look, name))
            stack.callback(handle.remove)
        model(**{name: torch.from_numpy(array).to(device) for name, array in inputs.items()})
    return seen


def histogram(x: Tensor) -> Tensor:
    """How many |x| lie in each bin: int64 [BINS]. Sums of histograms are those of all their values."""
    counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    for block in x.flatten().split(BLOCK_VALUES):
        bits = block.float().abs().view(torch.int32)
        bins = ((bits >> SHIFT) - FIRST_BITS).clamp(0, BINS - 1)
        counts += torch.bincount(bins, minlength=BINS)
    return counts


def percentile(counts: Sequence[int], amax: float, percent: float) -> float:
    """The upper edge of the bin that holds the value of this rank, at most amax; 0 for the lowest bin."""
    cumulative = np.cumsum(counts)
    index = int(np.searchsorted(cumulative, math.ceil(cumulative[-1] * percent / 100)))
    edge = np.array((index + 1 + FIRST_BITS) << SHIFT, np.int32).view(np.float32)
    return min(float(edge), amax) if index else 0.0


def run_ranges(
    release_source: str | Path,
    requests_path: Path,
    target: Path,
    device: str = "cpu",
    progress: Progress = lambda _: None,
    dtype: str = "float32",
) -> Ranges:
    """`collect_ranges` of a release's folder or hub name and a file of requests, one JSON object a line."""
    if dtype not in DTYPES:
        raise SettingError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    requests = []
    try:
        lines = requests_path.read_bytes().splitlines()
    except OSError as fault:
        raise RequestError([Fault((), f"{requests_path} cannot be read: {fault.strerror}", "file")]) from None
    for number, line in enumerate(lines, 1):
        try:
            requests += [json.loads(line.decode("utf-8"))] if line.strip() else []
        except (ValueError, RecursionError) as fault:
            where = f"{requests_path}, line {number}"
            raise RequestError([Fault((), f"{where}: no JSON in UTF-8: {fault}", "json")]) from None
    progress(f"reading {release_source}")
    release = open_release(release_source)
    return collect_ranges(release, requests, target, device=device, dtype=DTYPES[dtype], progress=progress)
