"""Compiles a subgraph with Inductor and makes its artifact: the files from which another process loads it.

On a CPU the artifact is the generated Python and its compiled loops (``generated.py``), which a later start runs
without importing Inductor. On other devices, and for code that is not portable, it is Inductor's CompiledArtifact.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch

from runtime.common.protocol import pack
from workers.compile.cache import Entry, Store
from workers.compile.compiled_model import Run
from workers.compile.errors import CompileError
from workers.compile.generated import (
    GeneratedCode,
    NotPortableError,
    extract,
    load_loop,
    loop_file,
    make_callable,
)
from workers.compile.levels import find_cxx
from workers.compile.split import Subgraph

CODE_FILE = "code"
ARTIFACT_FILE = "artifact"

INDUCTOR_OPTIONS: Mapping[str, Any] = {
    # Binding a plan checks the inputs of its subgraphs; checking them again costs a microsecond an input.
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    # Inductor would run the C++ compiler to test vector instructions; the CPU's own list is sufficient.
    "cpp.vec_isa_ok": True,
    # A subgraph's loops are short compared with its linear layers, which have threads of their own. Waking OpenMP's
    # threads for every loop costs more than it saves (demo model, two threads: 25 ms a decode step, 16 ms without).
    "cpp.threads": 1,
    # workers/graphs/ captures the graphs, around subgraphs.
    "triton.cudagraphs": False,
}
"""Part of every subgraph's cache key."""


@dataclass(frozen=True)
class CompiledSubgraph:
    """A subgraph that this process compiled.

    Attributes:
        run: its function.
        files: its artifact.
    """

    run: Run
    files: Mapping[str, bytes]


class SubgraphCompiler:
    """Compiles subgraphs within a ``with`` block. The first one imports Inductor; a start without any does not.

    Args:
        store: provides the folder that Inductor works in.
        device: where the subgraphs run.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._stack = contextlib.ExitStack()
        self._options: dict[str, Any] | None = None
        self._graphs: list[Any] = []

    def __enter__(self) -> SubgraphCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compile(self, subgraph: Subgraph, *, portable: bool) -> CompiledSubgraph:
        """Compile a subgraph with Inductor.

        Args:
            subgraph: from ``split.py``.
            portable: whether the generated code may be called directly. If not, torch's wrapper around it makes an
                output that is a view of an input share the input's memory.

        Raises:
            CompileError: Inductor or its C++ compiler failed.
        """
        try:
            if self._options is None:
                self._stack.enter_context(own_inductor(self._store, self._device))
                self._options = inductor_options(self._device)
            self._graphs.clear()
            with torch.inference_mode():
                artifact = torch._inductor.standalone_compile(
                    subgraph.module,
                    list(subgraph.examples),
                    dynamic_shapes="from_graph",
                    options={"inner_compile": self._inner_compile, "config_patches": self._options},
                )
            if portable and self._device.type == "cpu":
                with contextlib.suppress(NotPortableError):
                    return self._portable(subgraph)
            code = pack({"form": "inductor"})
            return CompiledSubgraph(_flat(artifact), {CODE_FILE: code, ARTIFACT_FILE: _saved(artifact)})
        except Exception as error:
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            raise CompileError(
                f"Inductor cannot compile a subgraph of the model ({type(error).__name__}: {reason}); --enforce-eager "
                "runs without compiling"
            ) from error

    def _inner_compile(self, module: Any, inputs: Any, **options: Any) -> Any:
        """Inductor's compilation of one graph. Its result is kept: it has the generated code."""
        from torch._inductor.compile_fx import compile_fx_inner

        compiled = compile_fx_inner(module, inputs, **options)
        self._graphs.append(compiled)
        return compiled

    def _portable(self, subgraph: Subgraph) -> CompiledSubgraph:
        """The artifact as generated code. Raises NotPortableError if that is not the whole subgraph."""
        from torch._inductor.select_algorithm import extern_kernels

        if len(self._graphs) != 1 or not getattr(self._graphs[0], "source_code", ""):
            raise NotPortableError(f"Inductor compiled one subgraph as {len(self._graphs)} graphs")
        graph = self._graphs[0]
        code = extract(graph.source_code, len(subgraph.inputs), extern_kernels)
        function = graph.current_callable
        names: dict[str, Any] = getattr(function, "__func__", function).__globals__
        loops = {name: names[name] for name in code.loops}
        files = {_loop_file(number): loop_file(loops[name]).read_bytes() for number, name in enumerate(code.loops)}
        fields = {"form": "python", "source": code.source, "loops": list(code.loops), "extern": list(code.extern)}
        files[CODE_FILE] = pack(fields)
        return CompiledSubgraph(make_callable(code, loops, "new"), files)


@contextlib.contextmanager
def own_inductor(store: Store, device: torch.device) -> Generator[None]:
    """Import Inductor, with an empty folder in place of its own cache.

    Inductor trusts the pickles and shared objects in its cache without verifying them. On CUDA the folder stays,
    because code may be loaded from it as late as its first launch.
    """
    import torch._inductor.config as inductor_config

    # Before the compiler is imported: it would start a pool of processes that outlives the compilation.
    inductor_config.compile_threads = 1
    from torch._inductor.utils import fresh_cache

    keep = device.type != "cpu"
    with store.scratch(keep=keep) as folder, fresh_cache(dir=folder, delete=not keep):
        yield


def inductor_options(device: torch.device) -> dict[str, Any]:
    """Those of :data:`INDUCTOR_OPTIONS` that this torch version has, and the options of this machine."""
    import torch._inductor.config as inductor_config

    known = inductor_config.get_config_copy()
    options = {name: value for name, value in INDUCTOR_OPTIONS.items() if name in known}
    if device.type == "cpu" and (compiler := find_cxx()) is not None:
        options["cpp.cxx"] = (None, compiler)
    if shutil.which("openssl") is None:
        # Inductor runs this program to name precompiled headers.
        options["cpp_cache_precompile_headers"] = False
    return options


def load_subgraph(entry: Entry, key: str, store: Store, device: torch.device) -> Run:
    """Load a subgraph from its artifact.

    Raises:
        CompileError: the artifact is intact, but this process cannot run it.
    """
    try:
        fields: dict[str, Any] = msgpack.unpackb(entry.files[CODE_FILE])
        if fields["form"] == "inductor":
            with own_inductor(store, device):
                from torch._inductor import CompiledArtifact

                return _flat(CompiledArtifact.load(path=str(entry.folder / ARTIFACT_FILE), format="binary"))
        code = GeneratedCode(fields["source"], tuple(fields["loops"]), tuple(fields["extern"]))
        loops = {
            name: load_loop(entry.folder / _loop_file(number), f"{key}_{number}")
            for number, name in enumerate(code.loops)
        }
        return make_callable(code, loops, key)
    except Exception as error:
        raise CompileError(f"the artifact in {entry.folder} does not load: {type(error).__name__}: {error}") from error


def _loop_file(number: int) -> str:
    return f"loop{number}.so"


def _saved(artifact: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="lockstep-compile-") as folder:
        path = Path(folder, ARTIFACT_FILE)
        artifact.save(path=str(path), format="binary")
        return path.read_bytes()


def _flat(artifact: Any) -> Run:
    return lambda inputs: artifact(*inputs)
