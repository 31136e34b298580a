"""The build: a bundle's graphs → plans for the recipe's target, one step after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .bundle import MANIFEST_FILE, Bundle, FileRecord, Manifest, PlanRecord, read_manifest
from .contract import CONTRACTS
from .errors import EngineError, SettingError
from .hashes import cache_file, sha256_of_files
from .network import Parsed, parse_graph
from .recipe import BuildSettings, Recipe, RecipeProfile
from .tensorrt_package import MODULES, import_tensorrt

Progress = Callable[[str], None]
UNFINISHED = ".build-"  # folders of builds that are running, or were killed


def build(
    bundle: Bundle,
    recipe: Recipe,
    *,
    trt: Any = None,
    profiles: Iterable[str] | None = None,
    progress: Progress = lambda _: None,
    force: bool = False,
) -> Manifest:
    """Build the plans of `recipe` into the bundle's folder, and return its new manifest.

    `trt`: the target's module, imported where it is None. `profiles`: see BuildSettings.selected. Either all plans and
    their entry in the manifest appear, or none. Raises SettingError for a recipe that does not suit the bundle, whose
    plans exist (unless `force`) or that needs no plan, MissingExtraError, and EngineError with TensorRT's own messages.
    """
    if recipe.precision != bundle.manifest.precision:
        raise SettingError(
            f"recipe {recipe.name} builds {recipe.precision}, {bundle.folder} is {bundle.manifest.precision}: choose "
            f"another recipe, or export the release with precision {recipe.precision}"
        )
    if recipe.build is None:
        raise SettingError(f"recipe {recipe.name} is for {recipe.target}, which runs the graphs themselves: no plan")
    chosen = recipe.build.selected(profiles)
    trt = trt if trt is not None else import_tensorrt(MODULES[recipe.target])
    with _only_build(bundle.folder) as work:
        manifest = read_manifest(bundle.folder)
        _refuse_existing(manifest, recipe, force)
        files = {name: f"{recipe.name}.{name}.plan" for name in manifest.graphs}
        for name, file in files.items():
            progress(f"{name}: reading the graph")
            parsed = parse_graph(bundle, name, trt, longest_tokens(chosen))
            progress(f"{name}: building {len(chosen[name])} profiles over {parsed.network.num_layers} layers")
            with _configured(trt, parsed, name, recipe, chosen[name], manifest.model.sizes) as (config, built_for):
                _write(work / file, _serialised(trt, parsed, config, partial(_tell, progress, name)))
            cards = built_for
        record = PlanRecord(
            recipe=recipe.name,
            recipe_sha256=recipe.sha256,
            target=recipe.target,
            builder_version=trt.__version__,
            precision=recipe.precision,
            compute_capabilities=cards,
            runtime={} if recipe.build.runtime is None else dataclasses.asdict(recipe.build.runtime),
            profiles={n: {p.name: {a: list(r) for a, r in p.axes.items()} for p in chosen[n]} for n in files},
            files=files,
        )
        return _publish(bundle.folder, work, manifest, record)


def longest_tokens(chosen: dict[str, tuple[RecipeProfile, ...]]) -> int:
    """Tokens of the longest record any of the text profiles takes."""
    return max(profile.axes["sequence"][2] for profile in chosen["text"])


@contextlib.contextmanager
def _configured(
    trt: Any, parsed: Parsed, graph: str, recipe: Recipe, profiles: Sequence[RecipeProfile], sizes: dict[str, int]
) -> Iterator[tuple[Any, list[str]]]:
    """The builder's configuration, and the compute capabilities the plan will run on."""
    settings = recipe.build
    assert settings is not None, "recipes without a build are refused"
    config = parsed.builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(settings.workspace_gib * 2**30))
    config.builder_optimization_level = settings.optimization_level
    (config.set_flag if settings.tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
    for profile in profiles:
        shapes = parsed.builder.create_optimization_profile()
        for name, (_, axes) in CONTRACTS[graph].inputs.items():
            shapes.set_shape(name, *profile.shapes(axes, sizes))
        if config.add_optimization_profile(shapes) < 0:
            raise EngineError(f"profile {profile.name} of the {graph} graph is refused: {parsed.told()}")
    target = {"tensorrt": _tensorrt, "tensorrt_rtx": _tensorrt_rtx}[recipe.target]
    with target(trt, config, settings) as cards:
        yield config, cards


@contextlib.contextmanager
def _tensorrt(trt: Any, config: Any, settings: BuildSettings) -> Iterator[list[str]]:
    """What only `tensorrt` has: builds for the card that is present, and a timing cache."""
    from .device import CudaDevice

    major, minor = CudaDevice().compute_capability()
    cache, path = None, cache_file().parent / f"tensorrt-{trt.__version__}-sm{major}{minor}.timing"
    if settings.timing_cache:
        stored = path.read_bytes() if path.is_file() else b""
        cache = config.create_timing_cache(stored)
        if cache is None or not config.set_timing_cache(cache, False):  # made on another card: begin anew
            cache = config.create_timing_cache(b"")
            config.set_timing_cache(cache, False)
    yield [f"{major}.{minor}"]
    if cache is not None:
        with contextlib.suppress(OSError):  # a read-only home costs time, not the plan
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, cache.serialize())


@contextlib.contextmanager
def _tensorrt_rtx(trt: Any, config: Any, settings: BuildSettings) -> Iterator[list[str]]:
    """What only TensorRT for RTX has: builds for named cards, none of which need be present."""
    cards = settings.compute_capabilities
    config.num_compute_capabilities = len(cards)
    for index, card in enumerate(cards):
        config.set_compute_capability(getattr(trt.ComputeCapability, "SM" + card.replace(".", "")), index)
    yield list(cards)


def _serialised(trt: Any, parsed: Parsed, config: Any, progress: Progress) -> Any:
    """The plan as a host buffer.

    Built in a thread of its own: Python handles Ctrl-C in the main thread only, which must not wait inside TensorRT.
    """
    stop = threading.Event()
    faults: list[BaseException] = []
    plans: list[Any] = []

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.depths: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.depths[phase_name] = self.depths.get(parent_phase or "", -1) + 1
            if self.depths[phase_name] < 2:
                self.tell(f"{phase_name} ({num_steps} steps)")

        def step_complete(self, phase_name: str, step: int) -> bool:
            return not stop.is_set()

        def phase_finish(self, phase_name: str) -> None:
            pass

        def tell(self, text: str) -> None:
            try:
                progress(text)
            except BaseException as fault:  # must not pass through TensorRT: raised below instead
                faults.append(fault)
                stop.set()

    def work() -> None:
        try:
            plans.append(parsed.builder.build_serialized_network(parsed.network, config))
        except BaseException as fault:
            faults.append(fault)

    monitor = Monitor()  # lives until the build is over
    config.progress_monitor = monitor
    parsed.told()
    thread = threading.Thread(target=work, name="clef-trt build")
    thread.start()
    while True:
        try:
            while thread.is_alive():
                thread.join(0.2)
            break
        except KeyboardInterrupt as fault:
            faults.append(fault)
            stop.set()  # TensorRT ends at its next step
    if faults:
        raise faults[0]
    if plans == [None]:
        said = parsed.told()
        short = "OutOfMemory" in said or "workspace" in said
        advice = "\nraise the recipe's workspace_gib, or build without its longest profile" if short else ""
        raise EngineError(f"{trt.__name__} {trt.__version__} cannot build the graph:\n  {said}{advice}")
    return plans[0]


def _tell(progress: Progress, graph: str, text: str) -> None:
    progress(f"{graph}: {text}")


@contextlib.contextmanager
def _only_build(folder: Path) -> Iterator[Path]:
    """A folder inside the bundle for unfinished plans, while no other build runs in that bundle."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EngineError(f"another build is running in {folder}; wait for it to end") from None
        for left in folder.glob(UNFINISHED + "*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder) as work:
            yield Path(work)
    finally:
        os.close(descriptor)


def _refuse_existing(manifest: Manifest, recipe: Recipe, force: bool) -> None:
    for plan in manifest.plans:
        if plan.recipe == recipe.name and not force:
            same = plan.recipe_sha256 == recipe.sha256
            raise SettingError(
                f"the bundle has a plan of recipe {recipe.name} already, of {'this' if same else 'an earlier'} version "
                f"of the recipe, by {plan.target} {plan.builder_version}; replace it with --force"
            )


def _publish(folder: Path, work: Path, manifest: Manifest, record: PlanRecord) -> Manifest:
    """Move the finished plans into the bundle and record them; at every moment the manifest on disk holds."""
    hashes = sha256_of_files([work / file for file in record.files.values()])
    records = {path.name: FileRecord(path.stat().st_size, digest) for path, digest in hashes.items()}
    old = [plan for plan in manifest.plans if plan.recipe == record.recipe]
    gone = {file for plan in old for file in plan.files.values()}
    kept = {name: file for name, file in manifest.files.items() if name not in gone}
    plans = [plan for plan in manifest.plans if plan.recipe != record.recipe]
    if old:
        _write_manifest(folder, work, dataclasses.replace(manifest, files=kept, plans=plans))
        for file in gone:
            (folder / file).unlink(missing_ok=True)
    result = dataclasses.replace(manifest, files=kept | records, plans=[*plans, record])
    try:
        for file in records:
            os.replace(work / file, folder / file)
        _write_manifest(folder, work, result)
    except BaseException:
        if read_manifest(folder) != result:  # an interrupt may also come just after the last step
            for file in records:
                (folder / file).unlink(missing_ok=True)
        raise
    return result


def _write_manifest(folder: Path, work: Path, manifest: Manifest) -> None:
    _write(work / MANIFEST_FILE, manifest.to_json().encode())
    os.replace(work / MANIFEST_FILE, folder / MANIFEST_FILE)


def _write(path: Path, content: Any) -> None:
    """A buffer as a file, on the disk before this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
