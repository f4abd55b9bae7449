"""Compiles the kernels that an op would launch, for GPUs that are not here, and reads what the machine code uses.

Launches are recorded instead of carried out, so what is compiled has the block sizes and specialisations of a real
call. ``ptxas`` and ``cuobjdump`` come with Triton.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.kernels.triton_launch import Kernel

SHARED_MEMORY = {80: 163, 90: 227, 100: 227}
"""KiB of shared memory that a program may use, by compute capability."""

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments it was launched with."""

    kernel: Kernel
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What a program of a compiled kernel uses: registers of a thread, bytes of its stack, bytes of shared memory.

    A thread has a stack if registers are spilled to it (or an array is indexed at run time).
    """

    registers: int
    stack: int
    shared: int


def record(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> list[Launch]:
    """The launches that ``call`` would make."""
    launches: list[Launch] = []

    def launcher(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in _OPTIONS if name in named}
            given = dict(zip(kernel.jit.arg_names, arguments, strict=False)) | named
            launches.append(Launch(kernel, given, options))

        assert all(size > 0 for size in grid)
        return launch

    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "__getitem__", launcher)
        call()
    return launches


def compile_for(launch: Launch, capability: int, folder: Path) -> Resources:
    """Compile as the driver would, in every detail that does not need a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    jit = launch.kernel.jit
    for parameter in jit.params:
        value = launch.arguments[parameter.name]
        varying = parameter.name in launch.kernel.varying
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not varying):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        aligned = value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else value % 16 == 0 and not varying
        if aligned and not isinstance(value, float):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(jit, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    binary = folder / f"{jit.__name__}.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    return Resources(*_usage(binary), compiled.metadata.shared)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _usage(binary: Path) -> tuple[int, int]:
    """Registers and stack bytes of a thread, of a file with one kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [tool, "--dump-resource-usage", binary]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump said nothing of registers:\n{text}"
    return int(found[1]), int(found[2])
