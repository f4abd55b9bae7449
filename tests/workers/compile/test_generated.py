"""Generated code without its compiler: what it needs is kept, what it must not need is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.library import Library

from parallel.library import register_op
from workers.compile.generated import GeneratedCode, NotPortableError, extract, loop_file, make_callable

HEADER = '''
"""Compile-time auto-tuning block"""
from ctypes import c_void_p
import torch
from torch.library import Library
import math
from math import inf, nan
from torch._inductor.hooks import run_intermediate_hooks
from torch import device, empty_strided
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
alias_of_nothing = torch.no_such_thing
async_compile = AsyncCompile()
double = async_compile.cpp_pybinding(['float*', 'float*'], """
some C++
""")
async_compile.wait(globals())
del async_compile
'''

FOOTER = """
runner = Runner(partitions=[])
call = runner.call

def get_args():
    from torch._dynamo.testing import rand_strided
    return [rand_strided((1,), (1,))]

if __name__ == "__main__":
    from torch._inductor.wrapper_benchmark import compiled_module_main
    compiled_module_main()
"""

EXTERN = SimpleNamespace(mm=torch.mm, bmm=lambda *_: None)


def module(*body: str) -> str:
    lines = "\n".join(f"        {line}" for line in body)
    runner = f"class Runner:\n    def __init__(self, partitions):\n        pass\n    def call(self, args):\n{lines}\n"
    return HEADER + runner + FOOTER


BODY = ("a, n = args", "args.clear()", "buf = empty_strided_cpu((n, 2), (2, 1), torch.float32)", "double(a, buf)")


def test_only_what_the_function_needs_is_kept_and_runs() -> None:
    code = extract(module(*BODY, "return (extern_kernels.mm(buf, buf), )"), 2, EXTERN)
    assert (code.loops, code.extern) == (("double",), ("mm",))
    for gone in (
        "_inductor",
        "_dynamo.testing",
        "async_compile",
        "C++",
        "alias_of_nothing",
        "aten",
        "math",
        "__main__",
    ):
        assert gone not in code.source
    run = make_callable(code, {"double": lambda source, target: target.copy_(source).mul_(2)}, "test")
    arguments = [torch.eye(2), 2]
    torch.testing.assert_close(run(arguments)[0], torch.eye(2) * 4)
    assert arguments == []


def test_our_ops_are_called_as_the_functions_that_they_are() -> None:
    """Others, and ours without a function for the CPU, by the dispatcher."""
    library = Library("lockstep", "FRAGMENT")
    seen: list[object] = []
    loops = {"double": print}

    def direct(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return torch.zeros(1)

    register_op("made_for_cpu", direct, target_library=library, dispatch_key="CPU")
    register_op("made_for_meta", direct, target_library=library, dispatch_key="Meta")
    calls = "torch.ops.lockstep.made_for_cpu.default(a), torch.ops.aten.neg.default(b)"
    code = extract(module("a, b = args", "args.clear()", f"return ({calls})"), 2, EXTERN)
    out = make_callable(code, loops, "test")(["no tensor: the dispatcher would refuse it", torch.ones(1)])
    assert seen == ["no tensor: the dispatcher would refuse it"]
    assert [value.item() for value in out] == [0.0, -1.0]
    meta = extract(module("a, b = args", "return (torch.ops.lockstep.made_for_meta.default(a), b)"), 2, EXTERN)
    with pytest.raises(RuntimeError, match="made_for_meta"):
        make_callable(meta, loops, "test")(["no tensor", 1])


@pytest.mark.parametrize(
    ("last", "names"),
    [
        ("return (run_intermediate_hooks(buf), )", "run_intermediate_hooks"),
        ("return (buf + _tensor_constant0, )", "_tensor_constant0"),
        ("return (extern_kernels.bmm(buf, buf), )", "extern_kernels.bmm"),
        ("return (extern_kernels.of_no_library(buf), )", "extern_kernels.of_no_library"),
    ],
)
def test_code_that_needs_the_compiler_is_refused(last: str, names: str) -> None:
    with pytest.raises(NotPortableError, match=names):
        extract(module(*BODY, last), 2, EXTERN)


@pytest.mark.parametrize(
    "source", [module("a, = args", "return (a, )"), module("return args"), "call = print", "def call(a):\n    return a"]
)
def test_another_signature_is_refused(source: str) -> None:
    with pytest.raises(NotPortableError):
        extract(source, 2, EXTERN)


def test_a_loop_that_comes_from_no_file_is_refused() -> None:
    with pytest.raises(NotPortableError):
        loop_file(lambda: None)


def test_tracebacks_name_the_subgraph() -> None:
    run = make_callable(GeneratedCode("def call(args):\n    raise ValueError(inf)\n", (), ()), {}, "0123abc")
    with pytest.raises(NameError) as caught:
        run([])
    assert caught.traceback[-1].path.__str__().endswith("<compiled subgraph 0123abc>")
