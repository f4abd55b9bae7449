"""Models of the Hugging Face hub: ``ORG/NAME[@REVISION]`` is downloaded into the hub's cache by huggingface_hub.

The library reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE itself and comes with tokenizers, so it adds no
dependency. Only the files that Lockstep reads are downloaded: configuration, safetensors, tokenizer and chat template;
never pickles or code. ``prepare.py`` decides whether a MODEL is a folder, ``demo`` or a hub name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from launch.progress import Bar, Progress
from runtime.common.errors import InputError

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")

FILES = ("*.safetensors", "*.json", "*.jinja")
IGNORED_FILES = ("*/*", "consolidated*")
"""Patterns of the files to download, and of those to leave out: subfolders and Mistral's second copy of the weights."""


class HubError(InputError):
    """A hub model is not available: unknown, access denied, or neither reachable nor cached."""


def is_hub_name(model: str) -> bool:
    """Whether ``model`` has the form ORG/NAME or ORG/NAME@REVISION."""
    return _NAME.fullmatch(model) is not None


def served_name(model: str) -> str:
    """The name of a model in the API unless the user gives one: a hub name without its revision, else ``model``."""
    found = None if os.path.exists(model) else _NAME.fullmatch(model)
    return model if found is None else found["repo"]


def download_model(
    model: str, progress: Progress, *, endpoint: str | None = None, cache_dir: Path | None = None
) -> Path:
    """Download a hub model, unless the cache holds it, and return its folder.

    Args:
        model: ORG/NAME[@REVISION]; the revision is a branch, tag or commit, by default ``main``.
        progress: shows the downloaded bytes.
        endpoint: default: HF_ENDPOINT, or https://huggingface.co.
        cache_dir: default: the hub's cache, under HF_HOME.

    Raises:
        HubError: the name, revision or access is wrong, or the hub cannot be reached and the cache lacks files.
    """
    found = _NAME.fullmatch(model)
    if found is None:
        raise HubError(f"model {model!r} is not a hub name; give ORG/NAME or ORG/NAME@REVISION")

    from huggingface_hub import constants, errors

    settings: dict[str, Any] = {
        "revision": found["revision"],
        "allow_patterns": list(FILES),
        "ignore_patterns": list(IGNORED_FILES),
        "endpoint": endpoint,
        "cache_dir": cache_dir,
    }
    try:
        return _download(model, found["repo"], settings, progress)
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{found['repo']} has no revision {found['revision'] or 'main'!r}; check it on the hub"
        ) from None
    except errors.GatedRepoError:
        raise HubError(
            f"access to {found['repo']} is restricted; accept its terms on the hub and set HF_TOKEN to your token"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"model {found['repo']!r} is neither a folder nor a repository on the hub that you may read; check the "
            "name, or set HF_TOKEN for a private one"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub is not reachable ({_cause(error)})"
        raise HubError(
            f"{model} is not completely in the hub's cache and {reason}; download it first, or give a checkpoint folder"
        ) from None
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        raise HubError(
            f"{model} could not be downloaded: {_cause(error)}; try again or give a checkpoint folder"
        ) from None


def _download(model: str, repo: str, settings: dict[str, Any], progress: Progress) -> Path:
    """Download the files that the cache lacks. Raises huggingface_hub's errors."""
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.errors import DryRunError

    if constants.HF_HUB_OFFLINE:
        return Path(hub.snapshot_download(repo, **settings, local_files_only=True))
    try:
        files = hub.snapshot_download(repo, **settings, dry_run=True, tqdm_class=_count_bytes(None))
    except DryRunError:  # The hub does not answer: the call below uses the cache, or raises the exact error.
        files = []
    total = sum(file.file_size or 0 for file in files if file.will_download)
    if not total:
        return Path(hub.snapshot_download(repo, **settings, tqdm_class=_count_bytes(None)))
    progress.say(f"lockstep: downloading {model} ({total / 1e6:.0f} MB)")
    with progress.stage("download"), progress.bar("download", total) as bar:
        return Path(hub.snapshot_download(repo, **settings, tqdm_class=_count_bytes(bar)))


def _cause(error: BaseException) -> str:
    """The first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".partition("\n")[0].strip()


def _count_bytes(bar: Bar | None) -> Any:
    """A tqdm class that draws nothing and reports the bytes written by huggingface_hub to ``bar``."""
    from tqdm.auto import tqdm

    class CountBytes(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The library has one bar for files and two for bytes: received and written.
            self._counts = kwargs.get("unit") == "B" and "Downloading" not in str(kwargs.get("desc"))
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            if bar is not None and self._counts and n:
                bar.advance(int(n))
            return super().update(n)

    return CountBytes
