"""Loads weights: fills a model that was built on the meta device from a safetensors checkpoint.

Names, types and shapes are checked against the files' headers, and all errors are reported at once, before any data is
read. Then each tensor is visited once, in file order, and its parameter's loader copies this rank's slice. safetensors
returns slices as views of the mapped file (copies in old versions), so memory peaks at the shard plus at most one
slice; the file's pages stay in the page cache, shared by the ranks of a host. The layers in ``parallel/`` define the
shards, ``runtime/common/checkpoint.py`` reads the headers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from parallel.parameter import ParallelModule, ParameterLoader, ShapeError
from runtime.common.checkpoint import Checkpoint, TensorInfo
from runtime.common.errors import CheckpointError
from workers.models.decoder import DecoderForCausalLM

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
"""Types of weights in a safetensors header; a parameter's loader says which of them it accepts."""


@dataclass(frozen=True)
class LoadReport:
    """Statistics of loading: bytes of the slices read, bytes of all tensors in the checkpoint, and seconds."""

    bytes_read: int
    bytes_total: int
    seconds: float


@runtime_checkable
class HasBuffers(Protocol):
    """A module with buffers that are computed, not loaded."""

    def fill_buffers(self, device: torch.device) -> None:
        """Compute the buffers on ``device``."""


def load_weights(
    model: DecoderForCausalLM,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Materialize the model on ``device`` and load this rank's shard of the checkpoint.

    Args:
        model: on the meta device.
        checkpoint: from :func:`~runtime.common.checkpoint.inspect_checkpoint`.
        device: of the rank.
        progress: called after each tensor with the bytes of the tensors visited so far, and of all tensors.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of another shape or type than the model's; the message
            lists all of them with their files.
    """
    started = time.perf_counter()
    # Like to_empty(), which on meta tensors imports torch's symbolic shapes first: half a second per start.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    targets = _match(model, checkpoint)
    done = bytes_read = 0
    with ExitStack() as stack, torch.no_grad():
        files = {file: stack.enter_context(_open(checkpoint, file)) for file in checkpoint.files}
        for name, info in checkpoint.tensors.items():
            if name in targets:
                loader, shard_id = targets[name]
                source = _Slices(name, info, files[info.file])
                _load(checkpoint, source, loader, shard_id)
                bytes_read += source.bytes_read
            done += info.nbytes
            if progress is not None:
                progress(done, checkpoint.total_bytes)
    _finish(model, device)
    return LoadReport(bytes_read, checkpoint.total_bytes, time.perf_counter() - started)


Target = tuple[ParameterLoader, str | int | None]
"""Destination of a checkpoint tensor: the parameter's loader, and the shard id of the tensor (None: all of it)."""


class _Slices:
    """A checkpoint tensor that is read in slices (``parallel.parameter.TensorSource``)."""

    def __init__(self, name: str, info: TensorInfo, file: Any) -> None:
        self.name = name
        self.shape = info.shape
        self.bytes_read = 0
        self._file = file

    def read(self, *slices: slice) -> torch.Tensor:
        """The part selected by one slice per dimension; adds its size to ``bytes_read``."""
        part: torch.Tensor = self._file.get_slice(self.name)[slices]
        self.bytes_read += part.nbytes
        return part


def _open(checkpoint: Checkpoint, file: str) -> Any:
    try:
        return safe_open(checkpoint.folder / file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint.folder / file} cannot be opened: {error}; fetch it again") from error


def _load(checkpoint: Checkpoint, source: _Slices, loader: ParameterLoader, shard_id: str | int | None) -> None:
    try:
        loader.load(source, shard_id)
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint.path_of(source.name)}: tensor {source.name}: {error}") from error


def _match(model: DecoderForCausalLM, checkpoint: Checkpoint) -> dict[str, Target]:
    """The destination of every checkpoint tensor, except those that the model ignores.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of the wrong type or shape; see :func:`load_weights`.
    """
    loaders = dict(_loaders(model))
    targets: dict[str, Target] = {}
    problems: list[str] = []
    for name, info in checkpoint.tensors.items():
        if name.endswith(model.ignored_weights):
            continue
        layer, shard_id = _layer_of(model, name)
        fused = f"{layer} is stored whole too" if shard_id is not None and layer in checkpoint.tensors else ""
        if layer not in loaders or fused:
            problems.append(f"unexpected: {name} in {info.file}" + (f" ({fused})" if fused else ""))
            continue
        targets[name] = (loaders[layer], shard_id)
        problems.extend(_header_errors(name, info, *targets[name]))
    missing = _expected(model, loaders, checkpoint) - set(targets)
    problems.extend(f"missing: {name}, in none of {', '.join(checkpoint.files)}" for name in missing)
    if problems:
        raise CheckpointError(
            f"the weights in {checkpoint.folder} do not fit its config.json ({model.config.architecture}):\n  "
            + "\n  ".join(sorted(problems))
        )
    return targets


def _loaders(model: nn.Module) -> Iterator[tuple[str, ParameterLoader]]:
    """Every parameter's loader by the parameter's name in the model."""
    for name, parameter in model.named_parameters():
        loader = getattr(parameter, "loader", None)
        if not isinstance(loader, ParameterLoader):
            raise TypeError(f"parameter {name} carries no loader; its layer has to set one")
        yield name, loader


def _layer_of(model: DecoderForCausalLM, tensor: str) -> tuple[str, str | int | None]:
    """The parameter that a checkpoint tensor belongs to, and its shard id there."""
    path, _, kind = tensor.rpartition(".")
    parent, _, layer = path.rpartition(".")
    if layer not in model.fused_weights:
        return tensor, None
    fused, shard_id = model.fused_weights[layer]
    return f"{parent}.{fused}.{kind}", shard_id


def _expected(model: DecoderForCausalLM, loaders: dict[str, ParameterLoader], checkpoint: Checkpoint) -> set[str]:
    """The tensors that a checkpoint of this model must hold; a fused layer is stored as one tensor or in parts."""
    expected: set[str] = set()
    for name in loaders:
        path, _, kind = name.rpartition(".")
        parent, _, layer = path.rpartition(".")
        parts = [part for part, (fused, _) in model.fused_weights.items() if fused == layer]
        whole = not parts or name in checkpoint.tensors
        expected.update([name] if whole else [f"{parent}.{part}.{kind}" for part in parts])
    return expected


def _header_errors(name: str, info: TensorInfo, loader: ParameterLoader, shard_id: str | int | None) -> Iterator[str]:
    """Errors of a tensor that belongs to a parameter: wrong type, wrong shape."""
    allowed = [stored for stored, dtype in DTYPES.items() if loader.accepts(dtype)]
    if info.dtype not in allowed:
        yield f"wrong type: {name} in {info.file} is stored as {info.dtype}; allowed: {', '.join(allowed)}"
    try:
        loader.check_shape(name, info.shape, shard_id)
    except ShapeError as error:
        yield f"wrong shape: {name} in {info.file}: {error}"


def _finish(model: DecoderForCausalLM, device: torch.device) -> None:
    """Check that every parameter was filled, compute buffers, and let layers process their loaded weights."""
    left = [part for _, loader in _loaders(model) for part in loader.missing()]
    if left:
        raise RuntimeError(f"parameters were matched but not filled: {', '.join(left)}")
    for module in model.modules():
        if isinstance(module, HasBuffers):
            module.fill_buffers(device)
        if isinstance(module, ParallelModule):
            module.process_after_loading()
