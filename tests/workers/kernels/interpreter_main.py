"""A process in which Triton interprets kernels on the CPU; it answers a line of JSON with a line of JSON.

Started by ``interpreter.py``, since Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch

from benchmarks.kernel_checks import CHECKS


def repair_bfloat16() -> None:
    """Give the interpreter real bf16: it keeps the 16 bits as an integer, which it multiplies, and rounds towards zero.

    Seen with Triton 3.9: ``tl.dot`` of two bf16 blocks is off by ten orders of magnitude.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        bits = torch.from_numpy(source.data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        return TensorHandle(bits, tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


def main() -> None:
    """Run the checks that are asked for until the input ends."""
    repair_bfloat16()
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        torch.manual_seed(request.pop("seed", 0))
        check, dtype = CHECKS[request.pop("check")], getattr(torch, request.pop("dtype"))
        try:
            answer = {"error": check("cpu", dtype, **request)}
        except Exception:  # noqa: BLE001 - the test shows it
            answer = {"traceback": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
