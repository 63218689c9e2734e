"""Reads the settings: default, TOML file, environment, flags; later sources win.

`load_settings` remembers where each value came from, so that `hosted-tinker config` can say it.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from hosted_tinker.backend_configs import BACKEND_CONFIGS
from hosted_tinker.errors import SettingsError
from hosted_tinker.settings import ENV_PREFIX, Settings

SECRET_FIELDS = {"api_key", "vllm_api_key"}


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and for each field that is not a default the source that set it."""

    settings: Settings
    origins: Mapping[str, str]


def load_settings(
    flags: Mapping[str, Any], config_path: Path | None, environ: Mapping[str, str] = os.environ
) -> LoadedSettings:
    """Merges file, environment and flags. Raises SettingsError with a sentence for the operator."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = [
        (f"file {config_path}", read_toml(config_path) if config_path else {}),
        ("environment", read_environment(environ)),
        ("flag", flags),
    ]
    for origin, layer in layers:
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    try:
        values["backend_config"] = load_backend_config(values)
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(describe_errors(error, origins)) from error
    return LoadedSettings(settings, origins)


def load_backend_config(values: Mapping[str, Any]) -> Any:
    """The section of the chosen backend; what is no section at all is left for `Settings`."""
    backend, config = values.get("backend", "pytorch"), values.get("backend_config", {})
    if isinstance(config, str):
        config = parse_json_object(config, "backend_config")
    if backend in BACKEND_CONFIGS and isinstance(config, Mapping):
        return BACKEND_CONFIGS[backend].model_validate(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The file's top-level table."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"config file {path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"config file {path} is not valid TOML: {error}") from error


def read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of variables such as HOSTED_TINKER_PORT; unknown ones are refused like any other."""
    return {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX)
    }


def parse_json_object(text: str, name: str) -> dict[str, Any]:
    """Raises SettingsError, naming the setting."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{name} {text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{name} {text!r} is not a JSON object")
    return cast("dict[str, Any]", value)


def describe_errors(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One sentence per wrong field: its name, the value, what is accepted, where it was set."""
    prefix = [] if error.title == Settings.__name__ else ["backend_config"]
    sentences: list[str] = []
    for item in error.errors():
        parts = prefix + [str(part) for part in item["loc"]]
        field = ".".join(parts)
        if item["type"] == "extra_forbidden":
            accepted = ", ".join(accepted_keys(error.title))
            sentence = f"unknown setting {field!r}; accepted: {accepted}"
        else:
            message = item["msg"].removeprefix("Value error, ")
            value = "(hidden)" if field in SECRET_FIELDS else repr(item["input"])
            sentence = f"{field} = {value}: {message}" if field else message
        origin = origins.get(parts[0]) if parts else None
        sentences.append(f"{sentence} (from {origin})" if origin else sentence)
    return "; ".join(sentences)


def accepted_keys(title: str) -> list[str]:
    """Field names of the settings model of that title."""
    models: tuple[type[BaseModel], ...] = (Settings, *BACKEND_CONFIGS.values())
    model = next(model for model in models if model.__name__ == title)
    return list(model.model_fields)
