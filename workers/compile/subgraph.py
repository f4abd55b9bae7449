"""One subgraph through Inductor, and its artifact: the files from which another process runs it without compiling.

On a CPU the artifact is the generated Python and its compiled loops (``generated.py``), which a warm start runs
without importing Inductor. Elsewhere, and for code that does not allow it, it is Inductor's own CompiledArtifact.
Where files are kept is ``cache.py``'s; which subgraphs there are is ``split.py``'s.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch

from runtime.common.protocol import pack
from workers.compile.cache import Entry, Store
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

Run = Callable[[list[Any]], Sequence[Any]]
"""A compiled subgraph: inputs in order, in a list that it may empty, to outputs in order."""

CODE_FILE = "code"
ARTIFACT_FILE = "artifact"

INDUCTOR_OPTIONS: Mapping[str, Any] = {
    # What a subgraph is given was checked when the model was bound; looking again costs a microsecond an input.
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    # Asking the compiler which vector instructions work starts a compiler or two; the CPU's own list is as good.
    "cpp.vec_isa_ok": True,
    # A subgraph's loops are short beside its linear layers, which have threads of their own; waking OpenMP's for every
    # loop costs more than it saves (the demo model by two threads: 25 ms a decode step with them, 16 ms without).
    "cpp.threads": 1,
    # Our graphs are captured by workers/graphs/, around the subgraphs.
    "triton.cudagraphs": False,
}
"""Part of every subgraph's key."""


@dataclass(frozen=True)
class CompiledSubgraph:
    """A subgraph that was compiled in this process.

    Attributes:
        run: the subgraph.
        files: its artifact.
    """

    run: Run
    files: Mapping[str, bytes]


class SubgraphCompiler:
    """Compiles subgraphs while it is open. Opening it imports Inductor, so a start that finds everything never does.

    Args:
        store: lends the folder Inductor works in.
        device: where the subgraphs run.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._stack = contextlib.ExitStack()
        self._options: dict[str, Any] | None = None
        self._made: list[Any] = []

    def __enter__(self) -> SubgraphCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compile(self, subgraph: Subgraph, *, portable: bool) -> CompiledSubgraph:
        """Put a subgraph through Inductor.

        Args:
            subgraph: from ``split.py``.
            portable: whether its outputs may be taken as the generated code gives them. Without, torch's wrapper
                around that code makes sure that an output that is a view of an input shares its memory.

        Raises:
            CompileError: Inductor or its C++ compiler failed.
        """
        try:
            if self._options is None:
                self._stack.enter_context(own_inductor(self._store, self._device))
                self._options = inductor_options(self._device)
            self._made.clear()
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
        """Inductor's compilation of one graph, whose result is noted: it alone has the generated code."""
        from torch._inductor.compile_fx import compile_fx_inner

        compiled = compile_fx_inner(module, inputs, **options)
        self._made.append(compiled)
        return compiled

    def _portable(self, subgraph: Subgraph) -> CompiledSubgraph:
        """The artifact as generated code. Raises NotPortableError where that is not all of the subgraph."""
        from torch._inductor.select_algorithm import extern_kernels

        if len(self._made) != 1 or not getattr(self._made[0], "source_code", ""):
            raise NotPortableError(f"Inductor made {len(self._made)} graphs of one subgraph")
        made = self._made[0]
        code = extract(made.source_code, len(subgraph.inputs), extern_kernels)
        function = made.current_callable
        names: dict[str, Any] = getattr(function, "__func__", function).__globals__
        loops = {name: names[name] for name in code.loops}
        files = {_loop_file(number): loop_file(loops[name]).read_bytes() for number, name in enumerate(code.loops)}
        fields = {"form": "python", "source": code.source, "loops": list(code.loops), "extern": list(code.extern)}
        files[CODE_FILE] = pack(fields)
        return CompiledSubgraph(make_callable(code, loops, "new"), files)


@contextlib.contextmanager
def own_inductor(store: Store, device: torch.device) -> Generator[None]:
    """Import Inductor, and let it work in an empty folder instead of its own cache.

    It trusts what lies in its cache, pickles and shared objects alike. In an empty folder it finds nothing that is
    truncated or foreign. CUDA code may be loaded from there as late as its first launch, so that the folder stays.
    """
    import torch._inductor.config as inductor_config

    # Before the compiler is imported: it would start a pool of processes, which nobody would end.
    inductor_config.compile_threads = 1
    from torch._inductor.utils import fresh_cache

    keep = device.type != "cpu"
    with store.scratch(keep=keep) as folder, fresh_cache(dir=folder, delete=not keep):
        yield


def inductor_options(device: torch.device) -> dict[str, Any]:
    """:data:`INDUCTOR_OPTIONS`, as far as this torch knows them, and what this machine has to compile with."""
    import torch._inductor.config as inductor_config

    known = inductor_config.get_config_copy()
    options = {name: value for name, value in INDUCTOR_OPTIONS.items() if name in known}
    if device.type == "cpu" and (compiler := find_cxx()) is not None:
        options["cpp.cxx"] = (None, compiler)
    if shutil.which("openssl") is None:
        # Inductor names precompiled headers by a digest that it asks this program for.
        options["cpp_cache_precompile_headers"] = False
    return options


def load_subgraph(entry: Entry, key: str, store: Store, device: torch.device) -> Run:
    """A subgraph from its artifact.

    Raises:
        CompileError: the artifact is whole, but this process cannot run it.
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
