"""What a build of a C++ host needs to know: prints compiler flags, or the path of ONNX Runtime's library."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import sysconfig
from pathlib import Path

from . import include_folder


def main() -> int:
    """Print what the option asks for, on one line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m clef_trt.cpp", description=__doc__)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--includes", action="store_true", help="the flag for the headers of clef_trt")
    asked.add_argument("--embed", action="store_true", help="that, and all flags to embed this Python with pybind11")
    asked.add_argument("--folder", action="store_true", help="the headers' folder; in it lies examples/")
    asked.add_argument("--onnxruntime", action="store_true", help="the library of the installed onnxruntime")
    options = parser.parse_args()
    try:
        if options.folder:
            print(include_folder())
        elif options.includes:
            print(f"-I{include_folder()}")
        elif options.embed:
            print(" ".join(_embedding()))
        else:
            print(_onnxruntime())
    except FileNotFoundError as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


def _embedding() -> list[str]:
    """The flags of this interpreter, as its python3-config would print them, which an environment does not have."""
    pybind11 = importlib.util.find_spec("pybind11")
    if pybind11 is None or pybind11.origin is None:
        raise FileNotFoundError("pybind11 is not installed: pip install 'clef-trt[embed]'")
    variable = sysconfig.get_config_var
    # As system headers, so that a program with more warnings turned on has none from them.
    others = [sysconfig.get_path("include"), Path(pybind11.origin).parent / "include"]
    flags = [f"-I{include_folder()}", *(f"-isystem{folder}" for folder in others)]
    shared = bool(variable("Py_ENABLE_SHARED"))
    library = variable("LIBDIR") if shared else variable("LIBPL")
    flags += [f"-L{library}", f"-Wl,-rpath,{library}", f"-lpython{variable('LDVERSION')}"]
    if not shared:
        # Extension modules find the interpreter's functions in the program.
        flags += variable("LINKFORSHARED").split()
    return flags + f"{variable('LIBS')} {variable('SYSLIBS')} -pthread".split()


def _onnxruntime() -> Path:
    """Found, not imported: loading ONNX Runtime takes a while."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("onnxruntime is not installed: pip install onnxruntime")
    found = sorted(Path(spec.origin).parent.glob("capi/libonnxruntime.so.*"))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one libonnxruntime.so.* in the package onnxruntime, found {len(found)}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
