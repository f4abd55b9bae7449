"""Inspects a checkpoint folder by its safetensors headers: which file holds which tensor, its dtype and shape.

Headers (an 8-byte little-endian length, then JSON) are parsed here and checked against the file's size, so that a
broken checkpoint is refused before any process is started, with the names of file and tensor. The library's
``safe_open`` makes the same checks, but its errors name no file and, for a wrong size, dtype or truncation, no tensor.
Tensor data is read by ``workers/weights.py`` through the library. Nothing is executed, and pickle files are never
opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from runtime.common.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The longest header the safetensors format allows."""

MAX_JSON_BYTES = 256 * 1024 * 1024
"""A longer JSON file of a checkpoint is refused before it is read."""

LFS_MARK = b"version https://git-lfs.github.com/spec/"

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element, by the safetensors name of its type. Types below one byte are not read by anything here."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor is: file name within the folder, safetensors type, shape, size and place of its bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    """Of the first byte, from the start of the file."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, in the order in which their bytes lie in its files."""

    folder: Path
    files: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    total_bytes: int
    """Bytes of all tensors, headers not counted."""

    def path_of(self, tensor: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self.tensors[tensor].file


def inspect_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the headers of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Raises:
        CheckpointError: there are no such files, a shard is missing, a file is truncated, garbage, or a Git LFS
            pointer, or the index names a tensor that its file does not hold. The message names file and tensor.
    """
    folder = checked_folder(folder)
    weight_map: dict[str, str] = {}
    if (folder / SINGLE_FILE).exists():
        files: tuple[str, ...] = (SINGLE_FILE,)
    elif (folder / INDEX_FILE).exists():
        weight_map = _read_weight_map(folder / INDEX_FILE)
        files = tuple(sorted(set(weight_map.values())))
    else:
        raise CheckpointError(_no_weights(folder))
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_header(folder / file, weight_map, file).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} is in both {tensors[name].file} and {file} of {folder}")
            tensors[name] = info
    absent = sorted(name for name, file in weight_map.items() if name not in tensors or tensors[name].file != file)
    if absent:
        listed = ", ".join(f"{name} in {weight_map[name]}" for name in absent)
        raise CheckpointError(
            f"{folder / INDEX_FILE} names {len(absent)} tensor(s) that the files do not hold: {listed}; the index and "
            "the shards are of different checkpoints, fetch them again together"
        )
    return Checkpoint(folder, files, tensors, sum(info.nbytes for info in tensors.values()))


def checked_folder(folder: str | Path) -> Path:
    """The folder as a path. Raises :class:`CheckpointError` if there is no such folder."""
    path = Path(folder)
    if path.is_dir():
        return path
    found = "it is a file" if path.exists() else "there is no such folder"
    raise CheckpointError(
        f"model {str(folder)!r}: {found}; give the folder of a Hugging Face checkpoint (config.json, tokenizer.json, "
        "*.safetensors), or 'demo'"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        CheckpointError: the file is missing, too long, a Git LFS pointer, or not one JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    _refuse_lfs_pointer(path, data)
    return _parse_object(data, str(path))


def _parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in ``data``; the same name twice, NaN and Infinity are refused as ambiguous."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object but a {type(value).__name__}; fetch the file again")
    return cast("dict[str, Any]", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_lfs_pointer(path: Path, data: bytes) -> None:
    if data.startswith(LFS_MARK):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent} or fetch it again"
        )


def _no_weights(folder: Path) -> str:
    """What to say about a folder without the files we read: most often it holds pickles or other formats."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    other = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    wanted = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if other:
        return f"{wanted}, only {', '.join(other)}; convert it with transformers' save_pretrained"
    if pickles:
        return (
            f"{wanted}, only pickle files ({', '.join(pickles)}), which can run code when they are loaded and are "
            "never opened here; convert them with transformers' save_pretrained on a machine you can lose"
        )
    return f"{wanted}; it holds no weights: {', '.join(names) or 'it is empty'}"


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint's index; every file exists and lies in the same folder."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files; fetch the file again")
    result: dict[str, str] = {}
    for name, file in cast("dict[str, Any]", weight_map).items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} puts tensor {name} in {file!r}, which is no .safetensors file beside it")
        result[name] = file
    missing = sorted({file for file in result.values() if not (path.parent / file).exists()})
    if missing:
        tensor = min(name for name, file in result.items() if file == missing[0])
        raise CheckpointError(
            f"{path.parent} lacks {', '.join(missing)}, which {path.name} names (for {tensor} among others); fetch the "
            "missing shard(s)"
        )
    return result


def _read_header(path: Path, weight_map: Mapping[str, str], file: str) -> dict[str, TensorInfo]:
    """The tensors of one file by their place in it; their bytes fill the file exactly."""
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            start = stream.read(len(LFS_MARK))
            _refuse_lfs_pointer(path, start)
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length < 2 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(_bad_length(path, size, length, weight_map))
            stream.seek(8)
            header = _parse_object(stream.read(length), f"the header of {path}")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    infos = {name: _tensor_info(path, file, name, entry, 8 + length) for name, entry in header.items()}
    ordered = sorted(infos.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    _check_places(path, ordered, 8 + length, size)
    return dict(ordered)


def _bad_length(path: Path, size: int, length: int, weight_map: Mapping[str, str]) -> str:
    tensors = sorted(name for name, file in weight_map.items() if file == path.name)
    lost = f" (it should hold {tensors[0]} and {len(tensors) - 1} more)" if tensors else ""
    return (
        f"{path}{lost} is not a whole safetensors file: it has {size} bytes and claims a header of {length}; it is "
        "truncated or of another format, fetch it again"
    )


def _tensor_info(path: Path, file: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    """One entry of a header, checked: a type we know, a shape, and as many bytes as the two need."""
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointError(f"{path}: the header's entry for tensor {name} is malformed; fetch the file again")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name} has type {dtype}; known: {', '.join(ITEM_BYTES)}")
    nbytes = offsets[1] - offsets[0]
    if nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(
            f"{path}: tensor {name} of type {dtype} and shape {list(shape)} needs "
            f"{math.prod(shape) * ITEM_BYTES[dtype]} bytes, the header gives it {nbytes}; fetch the file again"
        )
    return TensorInfo(file, dtype, shape, nbytes, data_start + offsets[0])


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of sizes as a tuple, None if it is anything else."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in items):
        return None
    return tuple(items)


def _check_places(path: Path, ordered: Iterable[tuple[str, TensorInfo]], start: int, size: int) -> None:
    """Each tensor begins where the one before it ends, and the last ends with the file."""
    position, last = start, "the header"
    for name, info in ordered:
        if info.offset != position:
            raise CheckpointError(
                f"{path}: tensor {name} begins at byte {info.offset}, but {last} ends at {position}; fetch it again"
            )
        position, last = info.offset + info.nbytes, f"tensor {name}"
        if position > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {position}, the file at {size}; fetch it again"
            )
    if position != size:
        raise CheckpointError(f"{path} has {size} bytes, but {last} ends at {position}; fetch the file again")
