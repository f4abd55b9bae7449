"""From a user's settings to a model folder, a resolved configuration and a launcher. Nothing is started here.

The model is found in a folder, as ``demo`` (``demo_model.py``) or on the Hugging Face hub (``hub.py``). ``llm.py``
starts the worker group with the result.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

from launch.demo_model import ensure_demo_model
from launch.environment import read_environment, torchrun_ranks
from launch.hub import download_model, is_hub_name
from launch.local import LocalLauncher
from launch.progress import Progress
from parallel.shard import ShardError, check_tp_size
from runtime.common.checkpoint import inspect_checkpoint
from runtime.common.config import EngineConfig, resolve
from runtime.common.errors import ConfigError
from runtime.common.model_config import ModelConfig
from runtime.executor.launcher import Launcher

DEMO = "demo"


def find_model(model: str, cache_dir: Path, progress: Progress) -> str:
    """The checkpoint folder of MODEL. The demo model and hub models are downloaded on first use.

    Raises:
        HubError: a hub model is not available.
        DemoModelError: the demo model could not be made.
    """
    if model == DEMO and not os.path.isdir(model):
        return str(ensure_demo_model(cache_dir, progress))
    folder = os.path.abspath(os.path.expanduser(model))
    if not os.path.exists(folder) and is_hub_name(model):
        return str(download_model(model, progress))
    return folder


def prepare(asked: EngineConfig, folder: str, model: ModelConfig) -> tuple[EngineConfig, Launcher]:
    """The resolved configuration and the launcher for it.

    Raises:
        InputError: the checkpoint is damaged, or the model does not support the configuration.
    """
    inspect_checkpoint(folder)
    executor = choose_executor(asked)
    ranks = torchrun_ranks()
    if executor == "torchrun" and ranks is not None and asked.tensor_parallel_size == 1:
        # torchrun's world size replaces the default size.
        asked = dataclasses.replace(asked, tensor_parallel_size=ranks.world_size)
    try:
        check_tp_size(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            intermediate_size=model.intermediate_size,
            vocab_size=model.vocab_size,
            tp_size=asked.tensor_parallel_size,
        )
    except ShardError as error:
        raise ConfigError(str(error)) from None
    config = resolve(
        dataclasses.replace(asked, model=folder), model, device=find_device(asked.device), executor=executor
    )
    return config, make_launcher(executor)


def choose_executor(config: EngineConfig) -> str:
    """The executor: as configured; auto: torchrun under torchrun, one local process for TP 1, Ray otherwise."""
    if config.distributed_executor_backend != "auto":
        return config.distributed_executor_backend
    if torchrun_ranks() is not None:
        return "torchrun"
    return "local" if config.tensor_parallel_size == 1 else "ray"


def make_launcher(executor: str) -> Launcher:
    """The launcher of an executor. Ray and torchrun are imported only when they are used."""
    if executor == "ray":
        from launch.ray_launcher import RayLauncher

        return RayLauncher()
    if executor == "torchrun":
        from launch.torchrun_launcher import TorchrunLauncher

        return TorchrunLauncher()
    return LocalLauncher()


def find_device(asked: str) -> str:
    """The device, "cpu" or "cuda", found without importing torch into the driver.

    Raises:
        ConfigError: "cuda" on a host without a visible NVIDIA device, or with a torch built without CUDA.
    """
    spec = importlib.util.find_spec("torch")
    library = Path(spec.origin).parent / "lib" / "libtorch_cuda.so" if spec and spec.origin else None
    has_device = os.path.exists("/dev/nvidiactl") and read_environment().cuda_visible_devices != ""
    usable = has_device and library is not None and library.exists()
    if asked == "cuda" and not usable:
        reason = "torch was built without CUDA" if has_device else "this host has no NVIDIA device that is visible"
        raise ConfigError(f"device is 'cuda', but {reason}; use --device cpu or auto")
    return "cuda" if usable and asked != "cpu" else "cpu"
