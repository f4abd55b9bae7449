"""Headers of safetensors files: equal to what the safetensors library says, and every broken file refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runtime.common.checkpoint import INDEX_FILE, SINGLE_FILE, inspect_checkpoint, read_json_object
from runtime.common.errors import CheckpointError
from tests.checkpoints import tiny_checkpoint

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"


def write_header(path: Path, header: Any, data: bytes = b"") -> None:
    """A safetensors file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write_sharded(folder: Path) -> None:
    """Two shards with one tensor each, and their index."""
    save_file({"a": torch.zeros(2, 3)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(4)}, folder / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize("max_shard_size", ["1GB", "200KB"])
def test_equals_what_the_library_reads(max_shard_size: str) -> None:
    folder = tiny_checkpoint("qwen2", max_shard_size=max_shard_size)
    checkpoint = inspect_checkpoint(folder)
    assert (len(checkpoint.files) > 1) == (max_shard_size != "1GB")
    found: dict[str, tuple[Any, ...]] = {}
    for file in checkpoint.files:
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                found[name] = (file, opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape()))
    assert {name: (i.file, i.dtype, i.shape) for name, i in checkpoint.tensors.items()} == found
    for name, info in checkpoint.tensors.items():
        data = checkpoint.path_of(name).read_bytes()[info.offset : info.offset + info.nbytes]
        with safe_open(checkpoint.path_of(name), framework="pt") as opened:
            assert torch.frombuffer(bytearray(data), dtype=torch.float32).equal(opened.get_tensor(name).flatten())
    assert checkpoint.total_bytes == sum(info.nbytes for info in checkpoint.tensors.values())


def test_tensors_are_listed_in_the_order_of_their_bytes() -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama", max_shard_size="200KB"))
    places = [(info.file, info.offset) for info in checkpoint.tensors.values()]
    assert places == sorted(places)


BROKEN_FILES: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{nonsense", b"", "header of .* not valid JSON"),
    "deep JSON": (b"[" * 200_000, b"", "not valid JSON"),
    "no object": (b"[1, 2]", b"", "not a JSON object"),
    "twice": (b'{"a": 1, "a": 2}', b"", "'a' is there twice"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [1]}}, bytes(4), "tensor w is malformed"),
    "negative": ({"w": entry(-4, 0, [1])}, bytes(4), "tensor w is malformed"),
    "text as size": ({"w": entry(0, 4, ["1"])}, bytes(4), "tensor w is malformed"),  # type: ignore[list-item]
    "unknown type": ({"w": entry(0, 4, [1], "F7")}, bytes(4), "tensor w has type F7; known"),
    "wrong size": ({"w": entry(0, 4, [2])}, bytes(4), r"tensor w .*shape \[2\] needs 8 bytes"),
    "overflow": ({"w": entry(0, 4, [2**62, 2**62])}, bytes(4), "tensor w .* needs"),
    "overlap": ({"v": entry(0, 8), "w": entry(4, 12)}, bytes(12), "tensor w begins at byte .*tensor v ends at"),
    "hole": ({"v": entry(0, 4), "w": entry(8, 12)}, bytes(12), "tensor w begins at byte"),
    "truncated": ({"v": entry(0, 4), "w": entry(4, 12)}, bytes(6), "truncated: tensor w ends at byte"),
    "too long": ({"w": entry(0, 4)}, bytes(8), "tensor w ends at"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, data, message = BROKEN_FILES[case]
    write_header(tmp_path / SINGLE_FILE, header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        inspect_checkpoint(tmp_path)
    assert str(tmp_path / SINGLE_FILE) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"short", bytes(64), b"\xff" * 64, struct.pack("<Q", 2**40) + b"{}"])
def test_file_that_is_no_safetensors_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.* is not a whole safetensors file"):
        inspect_checkpoint(tmp_path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3), "b": torch.ones(2)}, tmp_path / SINGLE_FILE)
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / SINGLE_FILE).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            inspect_checkpoint(tmp_path)


def test_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(LFS_POINTER)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a Git LFS pointer.*git lfs pull"):
        inspect_checkpoint(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-2\.safetensors.*for b among others"):
        inspect_checkpoint(tmp_path)


def test_index_names_a_tensor_that_its_file_does_not_hold(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"2 tensor.*: a in model-2\.safetensors, c in model-1\.safetensors"):
        inspect_checkpoint(tmp_path)


def test_truncated_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors \(it should hold b and 0 more\)"):
        inspect_checkpoint(tmp_path)


def test_same_tensor_in_two_files(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor a is in both model-1.* and model-2"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "model.bin", 7])
def test_index_may_only_name_files_beside_it(tmp_path: Path, file: Any) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="puts tensor a in"):
        inspect_checkpoint(tmp_path)


def test_only_pickles_are_never_opened(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(code)
    with pytest.raises(CheckpointError, match=r"only pickle files \(pytorch_model\.bin\).*save_pretrained"):
        inspect_checkpoint(tmp_path)
    assert not canary.exists()


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is empty"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only weights\.gguf"):
        inspect_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="it is a file"):
        inspect_checkpoint(tmp_path / "weights.gguf")


def test_json_file_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for data, message in {
        b"\xff\xfe": "not valid JSON",
        b"[]": "list",
        b'{"a": NaN}': "NaN",
        LFS_POINTER: "LFS",
    }.items():
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            read_json_object(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json_object(tmp_path / "absent.json")
