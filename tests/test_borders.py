"""Where things live and what they may load: the rules that only running Python can check."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("launch", "runtime", "workers", "parallel", "benchmarks")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

STANDARD_LIBRARY_NAMES_ALLOWED = {"platform"}
"""parallel/platform.py: absolute imports keep the two apart, and the word is the right one."""

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ImportError(f"{name} must not be imported here")

refused = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
for folder in sys.argv[2:]:
    package = importlib.import_module(folder)
    for module in pkgutil.walk_packages(package.__path__, folder + "."):
        # The server is the one package that needs an extra as a whole: commands import it once they run.
        if not module.name.startswith("runtime.server.") or "pydantic" not in refused:
            importlib.import_module(module.name)
import runtime.server.options
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_runtime_can_be_imported_without_torch() -> None:
    done = run_python(IMPORT_EVERYTHING, "torch,triton,ray,transformers", "runtime")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_everything_can_be_imported_without_the_optional_libraries() -> None:
    optional = "ray transformers accelerate gguf fastapi pydantic uvicorn starlette prometheus_client llguidance triton"
    done = run_python(IMPORT_EVERYTHING, ",".join([*optional.split(), "matplotlib"]), *FOLDERS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "from lockstep import LLM, SamplingParams, EngineConfig, LockstepError",
        "from launch.cli.main import main; assert main(['--help']) == 0",
        "from launch.cli.main import main; assert main(['generate', '--help']) == 0",
        "from launch.cli.main import main; assert main(['bench', 'latency', '--help']) == 0",
        "from launch.cli.main import main; assert main(['launch', '--help']) == 0",
        "from launch.cli.main import main; assert main(['doctor', '--help']) == 0",
        "from launch.cli.main import main; assert main(['serve', '--help']) == 0",
        "from launch.cli.main import main; assert main(['chat', '--help']) == 0",
        "from launch.cli.main import main; assert main(['run-batch', '--help']) == 0",
    ],
)
def test_the_api_and_every_help_load_no_torch(code: str) -> None:
    heavy = {"torch", "ray", "transformers", "fastapi", "pydantic"}
    done = run_python(f"{code}\nimport sys\nassert not {heavy} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    import lockstep

    for name in set(lockstep.__all__) - {"__version__"}:
        assert getattr(lockstep, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'AsyncLLMM'"):
        _ = lockstep.AsyncLLMM


def test_the_root_is_no_package() -> None:
    assert not (ROOT / "__init__.py").exists()


def test_no_module_is_named_like_a_library() -> None:
    installed = {name for name in importlib.metadata.packages_distributions() if not name.startswith("_")}
    libraries = (installed | set(sys.stdlib_module_names)) - STANDARD_LIBRARY_NAMES_ALLOWED - {*FOLDERS, "lockstep"}
    names = {(path.parent.name if path.stem == "__init__" else path.stem): path for path in MODULES}
    assert not {str(path.relative_to(ROOT)) for name, path in names.items() if name in libraries}
