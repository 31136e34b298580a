"""The bindings of the enterprise package over empty libraries: does `tensorrt` have all that this package uses of it?

Its real libraries take gigabytes and a GPU. The bindings alone declare the whole API, and import over any libraries of
the right names; without real ones nothing can be called, so that signatures are compared with the RTX package's.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from clef_trt import tensorrt_package
from clef_trt.tensorrt_package import USED, USED_OF_RTX

VERSIONS = ("11.0.0.114", "11.4.0.106")  # the oldest that pyproject.toml takes, and the newest tried
# What build.py and network.py use of both packages, and of the RTX package besides; USED is what the runtime uses.
USED_TO_BUILD = (
    *("__version__", "MemoryPoolType.WORKSPACE", "BuilderFlag.TF32", "IProgressMonitor.__init__"),
    *("IProgressMonitor.phase_start", "IProgressMonitor.step_complete", "IProgressMonitor.phase_finish"),
    *("Builder.__init__", "Builder.create_network", "Builder.create_builder_config"),
    *("Builder.create_optimization_profile", "Builder.build_serialized_network"),
    *("OnnxParser.__init__", "OnnxParser.parse", "OnnxParser.num_errors", "OnnxParser.get_error"),
    *("ParserError.node_operator", "ParserError.node_name", "ParserError.desc", "ParserError.file"),
    *("ParserError.line", "ParserError.func", "INetworkDefinition.num_inputs", "INetworkDefinition.get_input"),
    *("INetworkDefinition.num_outputs", "INetworkDefinition.get_output", "INetworkDefinition.num_layers"),
    *("INetworkDefinition.get_layer", "ILayer.name", "ILayer.type", "ILayer.num_inputs", "ILayer.get_input"),
    *("ILayer.num_outputs", "ILayer.get_output", "ITensor.name", "ITensor.shape", "ITensor.dtype"),
    *("IBuilderConfig.set_memory_pool_limit", "IBuilderConfig.builder_optimization_level"),
    *("IBuilderConfig.set_flag", "IBuilderConfig.clear_flag", "IBuilderConfig.add_optimization_profile"),
    *("IBuilderConfig.create_timing_cache", "IBuilderConfig.set_timing_cache", "IBuilderConfig.progress_monitor"),
    *("ITimingCache.serialize", "IOptimizationProfile.set_shape"),
)
USED_TO_BUILD_FOR_RTX = (
    *("ComputeCapability", "IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability"),
)
# Names in build.py and network.py that hold objects of the package → their class.
OWNERS = {
    "trt": None,
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "shapes": "IOptimizationProfile",
    "cache": "ITimingCache",
    "e": "ParserError",
    "x": "ILayer",
    "t": "ITensor",
    "tensor": "ITensor",
}


def signatures(trt: Any, names: Iterable[str]) -> dict[str, list[str] | None]:
    """The overloads of each name, without the package's name; none of what is no method; None of what is missing."""
    found: dict[str, list[str] | None] = {}
    for name in names:
        try:
            text = reduce(getattr, name.split("."), trt).__doc__ or ""
        except AttributeError:
            found[name] = None
        else:
            lines = re.findall(r"^(?:\d+\. )?(\w+\(self: .*)$", text, re.MULTILINE)
            found[name] = [re.sub(r"\btensorrt\w*\.tensorrt\w*\.", "", line) for line in lines]
    return found


def missing(found: dict[str, list[str] | None]) -> list[str]:
    return [name for name, overloads in found.items() if overloads is None]


def write_stubs(bindings: Path, folder: Path) -> None:
    """Libraries under the names `bindings` asks for; what the interpreter does not have, they define to return 0."""
    dynamic = subprocess.run(["readelf", "-dW", bindings], check=True, capture_output=True, text=True).stdout
    symbols = subprocess.run(["nm", "-D", "--undefined-only", bindings], check=True, capture_output=True, text=True)
    libraries = re.findall(r"\(NEEDED\).*\[(libnv.+)\]", dynamic)
    present = ctypes.CDLL(None)
    absent = [name for name in re.findall(r" U (\w+)$", symbols.stdout, re.MULTILINE) if not hasattr(present, name)]
    assert len(libraries) == 3, dynamic
    assert "createInferBuilder_INTERNAL" in absent
    folder.mkdir()
    source = folder / "stub.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in absent), encoding="utf-8")
    for library in libraries:
        target = ["-o", folder / library, source]
        subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", *target], check=True, capture_output=True)


@pytest.fixture(scope="module", params=VERSIONS)
def enterprise(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str] | None]:
    """`signatures` of everything used, in the enterprise package of that version."""
    if sys.platform != "linux" or not all(map(shutil.which, ("gcc", "nm", "readelf"))):
        pytest.skip("needs Linux with gcc and binutils")
    folder = tmp_path_factory.mktemp("tensorrt")
    wanted = f"tensorrt-cu13-bindings=={request.param}"
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=0")
    try:
        subprocess.run(
            [*pip, "--no-deps", "--only-binary=:all:", f"--dest={folder}", wanted],
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{wanted} cannot be downloaded in time")
    except subprocess.CalledProcessError as fault:
        pytest.skip(f"{wanted} cannot be downloaded: {(fault.stderr.splitlines() or ['pip says nothing'])[-1]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    write_stubs(folder / "tensorrt_bindings" / "tensorrt.so", folder / "stubs")
    (folder / "tensorrt").mkdir()  # the package `tensorrt` itself is these two lines
    lines = "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"
    (folder / "tensorrt" / "__init__.py").write_text(lines, encoding="utf-8")
    here = Path(__file__).parent
    code = (
        "import json, sys; from test_enterprise_bindings import signatures, tensorrt_package; "
        "trt = tensorrt_package.import_tensorrt('tensorrt'); "
        "print(json.dumps([trt.__version__, signatures(trt, json.load(sys.stdin))]))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=json.dumps([*USED, *USED_OF_RTX, *USED_TO_BUILD, *USED_TO_BUILD_FOR_RTX, "IRuntimeCache"]),
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(folder / "stubs"),
            "PYTHONPATH": os.pathsep.join(map(str, (folder, here, here.parent))),
        },
    )
    assert run.returncode == 0, run.stderr
    version, found = json.loads(run.stdout)
    assert version == request.param
    return found


def test_the_enterprise_package_has_all_that_is_used(enterprise: dict[str, list[str] | None]) -> None:
    assert missing({name: enterprise[name] for name in (*USED, *USED_TO_BUILD)}) == []
    assert "IRuntimeCache" in missing(enterprise), "this is how the package is told from the RTX one"


def test_the_enterprise_package_takes_the_arguments_the_rtx_package_takes(
    enterprise: dict[str, list[str] | None],
) -> None:
    rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed")
    compared = 0
    for name, expected in signatures(rtx, (*USED, *USED_TO_BUILD)).items():
        assert set(expected or ()) <= set(enterprise[name] or ()), name
        compared += len(expected or ())
    assert compared > 40


def test_the_rtx_package_has_all_that_builds_use() -> None:
    """What the runtime uses of it is looked for in test_tensorrt.py."""
    rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed")
    assert missing(signatures(rtx, (*USED_TO_BUILD, *USED_TO_BUILD_FOR_RTX))) == []
    assert missing(signatures(rtx, ["Builder.nothing", "Nothing.at_all"])) == ["Builder.nothing", "Nothing.at_all"]


def attributes(tree: ast.AST) -> Iterator[str]:
    """What a source uses of the package, as in USED_TO_BUILD."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in OWNERS:
                yield node.attr if OWNERS[name] is None else f"{OWNERS[name]}.{node.attr}"
            elif isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "trt":
                yield f"{owner.attr}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("trt."):
            yield f"{ast.unparse(node.func).removeprefix('trt.')}.__init__"
        elif isinstance(node, ast.ClassDef):
            for base in map(ast.unparse, node.bases):
                methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
                yield from (f"{base.removeprefix('trt.')}.{name}" for name in methods if base.startswith("trt."))


def test_the_table_is_what_builds_use() -> None:
    package = Path(tensorrt_package.__file__).parent
    found: set[str] = set()
    for file in ("build.py", "network.py"):
        found.update(attributes(ast.parse((package / file).read_text(encoding="utf-8"))))
    listed = {*USED_TO_BUILD, *USED_TO_BUILD_FOR_RTX}
    classes = {name.split(".")[0] for name in listed if "." in name}
    # Of any module; the Monitor's own; of a tensor of ONNX.
    other = {"__name__", "IProgressMonitor.tell", "ITensor.data_location", "ITensor.external_data"}
    assert found - classes - other == listed
    elsewhere = {path.name for path in package.glob("*.py") if re.search(r"\btrt\.[A-Z]", path.read_text("utf-8"))}
    assert elsewhere <= {"build.py", "network.py", "tensorrt_package.py"}
