"""Runs Inductor's generated CPU code without importing Inductor.

Inductor compiles a subgraph to a Python module: C++ loops, each an extension module, and a function ``call`` that
allocates buffers and calls the loops and a few torch ops in order. Importing such a module imports the whole compiler,
which takes seconds in every start. :func:`extract` keeps the statements that ``call`` needs, and
:func:`make_callable` runs them with the compiled loops. Code that needs anything else is refused
(:class:`NotPortableError`) and kept in Inductor's own form.

AOTInductor packages, the alternative, were measured in the same runs on the demo model (bf16, one thread): a decode
step at batch 1 takes 12.72 ms with packages and 12.54 ms with this module, because a package calls our ops through the
dispatcher. Compiling the three subgraphs takes 66 s against 30 s, loading them 5.7 ms of CPU time against 3.5 ms.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from parallel.library import NAMESPACE, python_implementations

ENTRY = "kernel"
"""The name of the function in every compiled loop's extension module."""

_COMPILER_PACKAGES = ("torch._inductor", "torch._dynamo", "torch._functorch", "triton")
_EXTERN_KERNELS = "extern_kernels"
_OUR_OP = re.compile(rf"\btorch\.ops\.{NAMESPACE}\.(\w+)\.default\(")


class NotPortableError(Exception):
    """The generated code needs names that torch itself does not have; the message lists them."""


@dataclass(frozen=True)
class GeneratedCode:
    """The portable code of a subgraph.

    Attributes:
        source: Python with a function ``call(args)`` that takes a list of inputs, empties it, and returns a tuple.
        loops: names of the compiled loops in ``source``, in order.
        extern: functions of torch that the code calls as ``extern_kernels.<name>``.
    """

    source: str
    loops: tuple[str, ...]
    extern: tuple[str, ...]


def extract(module_source: str, num_inputs: int, extern_kernels: Any) -> GeneratedCode:
    """The statements of a generated module that run without Inductor.

    Args:
        module_source: text of the module.
        num_inputs: number of inputs that ``call`` has to take.
        extern_kernels: Inductor's table of library functions, compared with torch's.

    Raises:
        NotPortableError: the code uses a name that torch does not have, or has an unknown form.
    """
    kept: list[ast.stmt] = []
    loops: list[str] = []
    for statement in ast.parse(module_source).body:
        name = _loop_name(statement)
        if name is not None:
            loops.append(name)
        elif not _is_scaffold(statement):
            kept.append(statement)
    kept = _without_unused(kept)
    _check_signature(kept, num_inputs)
    unknown = _loaded(kept) - _defined(kept) - set(dir(builtins)) - set(loops) - {_EXTERN_KERNELS}
    if unknown:
        raise NotPortableError(f"the generated code uses {', '.join(sorted(unknown))}")
    extern = tuple(sorted(_attributes_of(kept, _EXTERN_KERNELS)))
    for name in extern:
        ours = getattr(torch, name, None)
        if ours is None or getattr(extern_kernels, name, None) is not ours:
            raise NotPortableError(f"the generated code calls {_EXTERN_KERNELS}.{name}, which is not torch.{name}")
    return GeneratedCode(ast.unparse(ast.Module(kept, [])), tuple(loops), extern)


def make_callable(
    code: GeneratedCode, loops: Mapping[str, Callable[..., Any]], label: str
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The function ``call`` of the code.

    Our own ops are called as Python functions: a step has hundreds of calls, and the dispatcher takes 5 to 8
    microseconds for each.

    Args:
        code: from :func:`extract`, in this process or an earlier one.
        loops: the compiled function of each of ``code.loops``.
        label: for tracebacks.
    """
    names: dict[str, Any] = {name: loops[name] for name in code.loops}
    names[_EXTERN_KERNELS] = SimpleNamespace(**{name: getattr(torch, name) for name in code.extern})
    direct = python_implementations("CPU")

    def bind(found: re.Match[str]) -> str:
        function = direct.get(getattr(getattr(torch.ops, NAMESPACE), found[1]).default)
        if function is None:
            return found[0]
        names[f"op_{found[1]}"] = function
        return f"op_{found[1]}("

    exec(compile(_OUR_OP.sub(bind, code.source), f"<compiled subgraph {label}>", "exec"), names)
    return names["call"]


def load_loop(path: Path, label: str) -> Callable[..., Any]:
    """The compiled loop in an extension module. The file is executed, so the caller verifies its content first.

    Args:
        path: of the shared object, which has to exist while this process runs.
        label: unique in the process for this content.

    Raises:
        ImportError: the file is no extension module of this Python version.
    """
    # When it is loaded, the module reads the address of a torch function from this variable, as from an argument.
    # Inductor passes it in the same way.
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # pyright: ignore[reportAttributeAccessIssue]
    os.putenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", str(address))
    loader = importlib.machinery.ExtensionFileLoader(f"lockstep_{label}.{ENTRY}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None, "a loader has a spec"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return getattr(module, ENTRY)


def loop_file(function: Any) -> Path:
    """The file of the extension module of a compiled loop of this process.

    Raises:
        NotPortableError: the loop is not from an extension module.
    """
    path = getattr(getattr(function, "__self__", None), "__file__", None)
    if not path:
        raise NotPortableError(f"the compiled loop {function!r} is not from a file")
    return Path(path)


def _loop_name(statement: ast.stmt) -> str | None:
    """``name`` of a statement ``name = async_compile.cpp_pybinding(...)``."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
        return None
    function, target = statement.value.func, statement.targets[0]
    if isinstance(function, ast.Attribute) and function.attr == "cpp_pybinding" and isinstance(target, ast.Name):
        return target.id
    return None


def _is_scaffold(statement: ast.stmt) -> bool:
    """Whether a statement is for the compiler or for a benchmark of the module."""
    if isinstance(statement, ast.ImportFrom):
        return (statement.module or "").startswith(_COMPILER_PACKAGES)
    if isinstance(statement, ast.Import):
        return any(alias.name.startswith(_COMPILER_PACKAGES) for alias in statement.names)
    if isinstance(statement, ast.FunctionDef):
        return statement.name in ("get_args", "benchmark_compiled_module")
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    return isinstance(statement, ast.If) or bool(_loaded([statement]) & {"AsyncCompile", "async_compile"}) or (
        isinstance(statement, ast.Delete)
    )  # fmt: skip


def _without_unused(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements without unused imports and aliases at the top level; ``call`` counts as used."""
    while True:
        used = _loaded(statements) | {"call"}
        kept: list[ast.stmt] = []
        for statement in statements:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                statement.names = [x for x in statement.names if (x.asname or x.name.partition(".")[0]) in used]
                if statement.names:
                    kept.append(statement)
            elif not isinstance(statement, ast.Assign) or _defined([statement]) & used:
                kept.append(statement)
        if len(kept) == len(statements):
            return kept
        statements = kept


def _check_signature(statements: list[ast.stmt], num_inputs: int) -> None:
    """Check that ``call`` takes a list with one entry for each input of the subgraph."""
    functions = [node for s in statements for node in ast.walk(s) if isinstance(node, ast.FunctionDef)]
    for function in (f for f in functions if f.name == "call"):
        first = function.body[0]
        if isinstance(first, ast.Assign) and isinstance(first.targets[0], ast.Tuple):
            if len(first.targets[0].elts) == num_inputs:
                return
            raise NotPortableError(f"the generated code takes {len(first.targets[0].elts)} inputs, not {num_inputs}")
    raise NotPortableError("the generated code has no function call(args) of a known form")


def _walk(statements: Iterable[ast.stmt]) -> Iterable[ast.AST]:
    return (node for statement in statements for node in ast.walk(statement))


def _loaded(statements: Iterable[ast.stmt]) -> set[str]:
    return {n.id for n in _walk(statements) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _defined(statements: Iterable[ast.stmt]) -> set[str]:
    """Every name that the statements bind, in any scope."""
    names: set[str] = set()
    for node in _walk(statements):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def _attributes_of(statements: Iterable[ast.stmt], name: str) -> set[str]:
    return {
        node.attr
        for node in _walk(statements)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }
