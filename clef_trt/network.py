"""A bundle's graph as a TensorRT network."""

from __future__ import annotations

import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bundle import Bundle
from .contract import CONTRACTS, Contract
from .errors import EngineError, MissingExtraError
from .tensorrt_package import EXTRAS, _logger


@dataclass(frozen=True)
class LayerTypes:
    """A layer of a parsed network with the types of its tensors, such as BF16; a missing optional input is "-"."""

    name: str
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Parsed:
    """A network, and what has to live as long as it does."""

    network: Any
    parser: Any
    builder: Any
    errors: deque[str]  # what TensorRT logged last

    def told(self) -> str:
        """The errors logged since the last call."""
        return told(self.errors)


def parse_graph(bundle: Bundle, name: str, trt: Any, max_tokens: int) -> Parsed:
    """A graph of the bundle as a TensorRT network. Raises EngineError with all that the parser found."""
    content, locations = _inlined(
        bundle.path(bundle.manifest.graphs[name].file), max_tokens, EXTRAS.get(trt.__name__, "tensorrt")
    )
    errors, log = _logger(trt)
    errors.clear()
    try:
        builder = trt.Builder(log)
    except (TypeError, RuntimeError) as fault:  # a factory that returned nothing, say without a card
        raise EngineError(
            f"{trt.__name__} {trt.__version__} cannot start a builder: {fault}; {told(errors)}"
        ) from fault
    network = builder.create_network(0)  # both targets type every network strongly
    parser = trt.OnnxParser(network, log)
    with _weights_folder(bundle, locations) as root:
        good = parser.parse(content, path=str(root / "x.onnx"))
    if not good:
        faults = [parser.get_error(index) for index in range(parser.num_errors)]
        lines = [
            f"{e.node_operator() or 'graph'} {e.node_name()!r}: {e.desc()} ({e.file()}:{e.line()}, {e.func()})"
            for e in faults
        ]
        raise EngineError(f"{trt.__name__} {trt.__version__} cannot take the {name} graph:\n  " + "\n  ".join(lines))
    _check_tensors(network, CONTRACTS[name], bundle.manifest.model.sizes)
    return Parsed(network, parser, builder, errors)


def _check_tensors(network: Any, contract: Contract, sizes: dict[str, int]) -> None:
    """Raises EngineError unless the network takes and returns the contract's tensors; -1 stands for any size."""
    found = {t.name: list(t.shape) for t in map(network.get_input, range(network.num_inputs))}
    found |= {t.name: list(t.shape) for t in map(network.get_output, range(network.num_outputs))}
    axes = {name: axes for name, (_, axes) in contract.inputs.items()} | {contract.output: contract.output_axes}
    expected = {name: [a if isinstance(a, int) else sizes.get(a, -1) for a in axes[name]] for name in axes}
    for name in expected.keys() | found.keys():
        came, due = found.get(name), expected.get(name)
        if came is None or due is None or len(came) != len(due):
            good = False
        else:
            good = all(-1 in pair or pair[0] == pair[1] for pair in zip(came, due, strict=True))
        if not good:
            raise EngineError(f"{name} of the {contract.name} graph is {came}; the contract says {due}")


def network_types(network: Any) -> list[LayerTypes]:
    """What types a parsed network computes in, layer by layer."""

    def types(count: int, tensor_at: Callable[[int], Any]) -> tuple[str, ...]:
        tensors = map(tensor_at, range(count))
        return tuple("-" if tensor is None else tensor.dtype.name for tensor in tensors)

    layers = map(network.get_layer, range(network.num_layers))
    return [
        LayerTypes(x.name, x.type.name, types(x.num_inputs, x.get_input), types(x.num_outputs, x.get_output))
        for x in layers
    ]


def told(errors: deque[str]) -> str:
    """The logged errors, which are forgotten."""
    lines = "\n  ".join(errors)
    errors.clear()
    return lines or "it gave no reason"


def _inlined(path: Path, max_tokens: int, extra: str) -> tuple[bytes, set[str]]:
    """The graph with the bodies for TensorRT in place of its `clef` operators, and the weight files it points into."""
    try:
        import onnx
        import onnx.inliner

        from .functions import DOMAIN
        from .tensorrt_functions import tensorrt_functions
    except ImportError as fault:
        raise MissingExtraError("building a plan", extra, fault) from None
    model = onnx.load(path, load_external_data=False)
    used = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    bodies = {function.name: function for function in tensorrt_functions(max_tokens)}
    if unknown := sorted(used - bodies.keys()):
        raise EngineError(f"{path} uses {DOMAIN} operators {unknown}; TensorRT has bodies for {sorted(bodies)}")
    others = [function for function in model.functions if function.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend([*others, *(bodies[name] for name in sorted(used))])
    locations = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return onnx.inliner.inline_local_functions(model).SerializeToString(), locations


@contextlib.contextmanager
def _weights_folder(bundle: Bundle, locations: set[str]) -> Iterator[Path]:
    """A folder that holds all weight files: the weights' own, or one of links where some lie in the bundle itself."""
    root, manifest = bundle.weights_root.resolve(), bundle.manifest
    if locations <= manifest.weights.files.keys():
        yield root
        return
    if unknown := sorted(locations - manifest.weights.files.keys() - manifest.files.keys()):
        raise EngineError(f"{bundle.folder}: a graph points into {unknown}, which the manifest does not record")
    with tempfile.TemporaryDirectory() as folder:
        for location in locations:
            source = root if location in manifest.weights.files else bundle.folder.resolve()
            link = Path(folder) / location
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source / location)
        yield Path(folder)
