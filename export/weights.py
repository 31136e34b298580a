"""Graph parameters filled from a release: by reference into its safetensors, or from a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from clef_trt.errors import ExportError, ReleaseError

from .release import Release, StoredTensor, safetensors_header

ONNX_DTYPES = {"BF16": ir.DataType.BFLOAT16, "F16": ir.DataType.FLOAT16, "F32": ir.DataType.FLOAT}
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
BLOCK_BYTES = 64 * 2**20
# Part of some releases, and of no use for a single pass; anything else that is left over is an error.
UNUSED_PREFIXES = ("mtp.", "model.mtp.")


def stored_as(release: Release, shapes: dict[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """The stored tensor of every tensor {name in the checkpoint: shape} that the graphs need.

    Raises ReleaseError, naming all of them, for tensors that are missing, of another shape or dtype, or left over.
    """
    tied = release.config.text.tie_word_embeddings
    found, faults, used = {}, [], set()
    for needed, shape in shapes.items():
        name = needed
        if name == "lm_head.weight" and tied:
            name = "model.language_model.embed_tokens.weight"
        tensor = release.tensors.get(name)
        used.add(name)
        if tensor is None:
            faults.append(f"{name} is missing")
        elif tensor.shape != shape:
            faults.append(f"{name} in {tensor.file} is {list(tensor.shape)}; the configuration asks for {list(shape)}")
        elif tensor.dtype not in ONNX_DTYPES:
            faults.append(f"{name} in {tensor.file} is {tensor.dtype}; expected one of {', '.join(ONNX_DTYPES)}")
        else:
            found[needed] = tensor
    allowed = (*UNUSED_PREFIXES, "lm_head.") if tied else UNUSED_PREFIXES
    faults += [
        f"{name} is not part of this architecture"
        for name in release.tensors.keys() - used
        if not name.startswith(allowed)
    ]
    if faults:
        shown = "\n  ".join(sorted(faults)[:20])
        more = f"\n  … and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ReleaseError(f"the weights do not fit config.json and joint_head_config.json:\n  {shown}{more}")
    return found


def copied(
    release: Release, tensors: dict[str, StoredTensor], path: Path, progress: Callable[[str], None]
) -> dict[str, StoredTensor]:
    """The tensors written into one safetensors file at `path`, each once; returned with their new places."""
    sources = {tensor: name for name, tensor in reversed(tensors.items())}  # tied weights are one stored tensor
    header, data_bytes = safetensors_header({name: (t.dtype, t.shape) for t, name in sources.items()})
    places, done, told = {}, 0, 0
    with path.open("wb") as target:
        target.write(header)
        for tensor in sources:
            places[tensor] = StoredTensor(path.name, tensor.dtype, tensor.shape, target.tell(), tensor.length_bytes)
            for block in _blocks(release.root / tensor.file, tensor):
                target.write(block)
                done += len(block)
                if done - told >= 2**30:
                    told = done
                    progress(f"copied {done / 1e9:.1f} of {data_bytes / 1e9:.1f} GB")
    return {name: places[tensor] for name, tensor in tensors.items()}


def _blocks(path: Path, tensor: StoredTensor) -> Iterator[bytes]:
    with path.open("rb") as source:
        source.seek(tensor.offset_bytes)
        left = tensor.length_bytes
        while left:
            block = source.read(min(left, BLOCK_BYTES))
            if not block:
                raise ReleaseError(f"{path} ended while it was copied")
            left -= len(block)
            yield block


@dataclass(frozen=True)
class OwnTensor:
    """A tensor that the export makes: its bytes are asked for when they are written."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    content: Callable[[], bytes]


def write_own(tensors: list[OwnTensor], path: Path, progress: Callable[[str], None]) -> dict[str, StoredTensor]:
    """Tensors of ours, one after the other, into a safetensors file; returned with their places, by name."""
    header, data_bytes = safetensors_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors})
    places, told = {}, 0
    with path.open("wb") as target:
        target.write(header)
        for tensor in tensors:
            content, start = tensor.content(), target.tell()
            places[tensor.name] = StoredTensor(path.name, tensor.dtype, tensor.shape, start, len(content))
            target.write(content)
            if target.tell() - told >= 2**30:
                told = target.tell()
                progress(f"quantised {told / 1e9:.1f} of {data_bytes / 1e9:.1f} GB")
        if target.tell() != len(header) + data_bytes:
            raise ExportError(f"quantise: {target.tell():,} bytes written, {len(header) + data_bytes:,} announced")
    return places


def read_tensor(root: Path, tensor: StoredTensor) -> torch.Tensor:
    """A stored tensor, as it is stored, in memory of its own."""
    content = bytearray(b"".join(_blocks(root / tensor.file, tensor)))
    return torch.frombuffer(content, dtype=TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)


def fill_parameters(model: ir.Model, tensors: dict[str, StoredTensor]) -> None:
    """Parameters become initializers that point at their stored bytes, cast to float32 where stored otherwise.

    An embedding is cast after its Gather, so that no engine ever expands the whole table.
    """
    for value in [value for value in model.graph.inputs if value.name in tensors]:
        model.graph.inputs.remove(value)
        assert value.name is not None
        tensor = tensors[value.name]
        traced, stored = value.dtype, ONNX_DTYPES[tensor.dtype]
        assert traced is not None, "the trace gives every parameter a dtype"
        value.dtype = stored
        value.const_value = ir.ExternalTensor(
            location=tensor.file,
            offset=tensor.offset_bytes,
            length=tensor.length_bytes,
            dtype=stored,
            shape=ir.Shape(tensor.shape),
            name=value.name,
        )
        model.graph.initializers[value.name] = value
        if stored != traced:
            _cast_uses(model, value, stored, traced)


def _cast_uses(model: ir.Model, value: ir.Value, stored: ir.DataType, dtype: ir.DataType) -> None:
    uses = list(value.uses())
    if all(use.node.op_type == "Gather" and use.idx == 0 for use in uses):
        for use in uses:
            gathered = use.node.outputs[0]
            consumers = list(gathered.uses())
            gathered.dtype = stored
            cast = _cast(gathered, dtype, use.node)
            for consumer in consumers:
                consumer.node.replace_input_with(consumer.idx, cast)
        return
    first = next(node for node in model.graph if any(node is use.node for use in uses))
    cast = _cast(value, dtype, first, before=True)
    for use in uses:
        use.node.replace_input_with(use.idx, cast)


def _cast(value: ir.Value, dtype: ir.DataType, place: ir.Node, before: bool = False) -> ir.Value:
    node = ir.node("Cast", [value], {"to": dtype}, name=f"{value.name}/Cast")
    output = node.outputs[0]
    output.name, output.dtype, output.shape = f"{value.name}/{dtype.name.lower()}", dtype, value.shape
    graph = place.graph
    assert isinstance(graph, ir.Graph)
    if before:
        graph.insert_before(place, node)
    else:
        graph.insert_after(place, node)
    return output
