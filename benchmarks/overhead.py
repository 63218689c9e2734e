"""What the server adds to the backend that it runs.

    python -m benchmarks.overhead

First a `forward_backward` of 2,000 tokens on the default model: through the official SDK and HTTP, and
by the same backend in a process of its own, in turns. Then one of 8 tokens on a tiny random model,
where the backend takes next to no time, in four ways: through the SDK, with raw HTTP requests of the
same bytes, through a server with the fake backend, and by the backend itself. Raw HTTP less backend is
the server's own part, SDK less raw HTTP is the SDK's.

Last, what the device waits for between requests: many pairs of that `forward_backward` and an
`optim_step` are sent while another request keeps the trainer busy. What a pair takes from then on is
compared with what it takes the backend.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import tinker
import torch
import transformers
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.load import make_prompts, quantile
from benchmarks.servers import describe_machine, find_model, running_server
from benchmarks.train_throughput_data import SERVED, connect, make_data
from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.training.pytorch import PytorchBackend
from hosted_tinker.types import AdamParams, ForwardBackward, LoraConfig
from hosted_tinker.wire.proto_requests import decode_forward_backward, read_envelope
from hosted_tinker.workers.process import ENVIRONMENTS

RANK = 16
TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TINY_TOKENS = 8
ADAM = {"learning_rate": 1e-4}
BUSY_SEQUENCES, BUSY_LENGTH = 256, 250
"""Of the request that keeps the tiny model's trainer busy while others are sent."""
PAIRS = 40
MOMENT_S = 0.1
PROTOBUF = {"content-type": "application/x-protobuf"}
Measure = Callable[[int], list[float]]


def main() -> None:
    arguments = parse_arguments()
    if arguments.in_process is not None:
        serve_backend(arguments.in_process, with_step=arguments.with_step)
        return
    model = find_model(arguments.model)
    print(json.dumps(measure_large(model, arguments)), flush=True)
    print(json.dumps(measure_tiny(arguments)), flush=True)
    print(json.dumps({"model": model.name, "rank": RANK, **describe_machine()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="directory; unset: SmolLM2-135M-Instruct")
    parser.add_argument("--sequences", type=int, default=4, help="of the large request")
    parser.add_argument("--length", type=int, default=500, help="tokens of each of them")
    parser.add_argument("--rounds", type=int, default=7, help="of the large request")
    parser.add_argument("--tiny-rounds", type=int, default=10)
    parser.add_argument("--tiny-calls", type=int, default=50, help="of each way in a round")
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--with-step", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_large(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    prompts = make_prompts(arguments.sequences, arguments.length, seed=0)
    data = make_data(prompts)
    with (
        running_server(*server_flags(model)) as url,
        connect(url) as client,
        running_backend(model, data) as time_backend,
    ):
        time_client = make_client_measure(client, data)
        seconds = alternate({"client": time_client, "backend": time_backend}, arguments.rounds, 1)
    pairs = list(zip(seconds["client"], seconds["backend"], strict=True))
    return {
        "tokens": arguments.sequences * arguments.length,
        **{f"{way}_ms": to_ms(statistics.median(values)) for way, values in seconds.items()},
        "ratio": round(statistics.median(one / other for one, other in pairs), 4),
        "ratios": [round(one / other, 4) for one, other in pairs],
    }


def measure_tiny(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, median and 99th percentile."""
    data = make_data(make_prompts(1, TINY_TOKENS, seed=0, vocab_size=TINY_SHAPE["vocab_size"]))
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_tiny_model(directory)
        # Queued requests would share passes otherwise.
        url = stack.enter_context(running_server(*server_flags(directory), "--joint-tokens", "1"))
        vocabulary = json.dumps({"vocab_size": TINY_SHAPE["vocab_size"]})
        fake_flags = ("--backend", "fake", "--backend-config", vocabulary, *name_flags(directory))
        fake_url = stack.enter_context(running_server(*fake_flags))
        client = stack.enter_context(connect(url))
        raw = stack.enter_context(RawRun(url, data))
        fake = stack.enter_context(RawRun(fake_url, data))
        ways: dict[str, Measure] = {
            "client": make_client_measure(client, data),
            "raw_http": raw.measure,
            "raw_http_fake_backend": fake.measure,
            "backend": stack.enter_context(running_backend(directory, data)),
        }
        seconds = alternate(ways, arguments.tiny_rounds, arguments.tiny_calls)
        backend_pairs = stack.enter_context(running_backend(directory, data, with_step=True))
        pairs = {"queued_pair": raw.measure_queued_pairs, "backend_pair": backend_pairs}
        seconds |= alternate(pairs, arguments.tiny_rounds, PAIRS)
        empty = [time_call(lambda: httpx_get(raw)) for _ in range(arguments.tiny_calls)]
    medians = {way: 1000 * statistics.median(values) for way, values in seconds.items()}
    return {
        "tokens": TINY_TOKENS,
        "calls": len(seconds["client"]),
        "pairs": PAIRS * len(seconds["queued_pair"]),
        **{f"{way}_ms": round(median, 2) for way, median in medians.items()},
        **{f"{way}_p99_ms": to_ms(quantile(seconds[way], 0.99)) for way in ways},
        "server_ms": round(medians["raw_http"] - medians["backend"], 2),
        "pair_gap_ms": round(medians["queued_pair"] - medians["backend_pair"], 2),
        "sdk_ms": round(medians["client"] - medians["raw_http"], 2),
        "submit_ms": to_ms(statistics.median(raw.submit_s)),
        "retrieve_ms": to_ms(statistics.median(raw.retrieve_s)),
        "empty_request_ms": to_ms(statistics.median(empty)),
    }


def alternate(ways: dict[str, Measure], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds of each call. The ways take turns; the first round warms up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_number in range(rounds + 1):
        for way, measure in ways.items():
            taken = measure(calls)
            if round_number > 0:
                seconds[way].extend(taken)
    return seconds


def make_client_measure(client: tinker.ServiceClient, data: list[tinker.Datum]) -> Measure:
    """What a user waits for."""
    run = client.create_lora_training_client(base_model=SERVED, rank=RANK, seed=1).result()

    def measure(calls: int) -> list[float]:
        return [
            time_call(lambda: run.forward_backward(data, "cross_entropy").result())
            for _ in range(calls)
        ]

    return measure


class RawRun:
    """A run driven by HTTP requests that are the SDK's, byte for byte in their bodies."""

    def __init__(self, url: str, data: list[tinker.Datum]) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", timeout=60)
        self.submit_s: list[float] = []
        self.retrieve_s: list[float] = []
        self._data = data
        self._seq_id = 0
        session = self._post_json("create_session", {"sdk_version": tinker.__version__})
        body = {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": SERVED,
            "lora_config": {"rank": RANK, "seed": 1},
        }
        request_id = self._post_json("create_model", body)["request_id"]
        self._model_id: str = self._retrieve(request_id).json()["model_id"]

    def __enter__(self) -> RawRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def measure(self, calls: int) -> list[float]:
        """Bodies are made before the clock runs."""
        return [self._time_pass(self._make_body()) for _ in range(calls)]

    def measure_queued_pairs(self, calls: int) -> list[float]:
        """The mean over pairs that wait for one another, from the first one's end to the last one's."""
        prompts = make_prompts(BUSY_SEQUENCES, BUSY_LENGTH, 0, vocab_size=TINY_SHAPE["vocab_size"])
        self._post_pass(self._make_body(make_data(prompts)))
        steps: list[str] = []
        for _ in range(calls):
            self._post_pass(self._make_body())
            steps.append(self._post_step())
        sent = time.perf_counter()
        self._retrieve_step(steps[0])
        begin = time.perf_counter()
        if begin - sent < MOMENT_S:
            raise RuntimeError("the trainer had nothing to do before all requests were sent")
        self._retrieve_step(steps[-1])
        return [(time.perf_counter() - begin) / (calls - 1)]

    def _retrieve_step(self, request_id: str) -> None:
        answer = self._retrieve(request_id).json()
        if "metrics" not in answer:
            raise RuntimeError(str(answer))

    def _post_pass(self, body: bytes) -> str:
        answer = self.http.post("forward_backward", content=body, headers=PROTOBUF)
        return answer.json()["request_id"]

    def _post_step(self) -> str:
        self._seq_id += 1
        body = {"model_id": self._model_id, "seq_id": self._seq_id, "adam_params": ADAM}
        return self._post_json("optim_step", body)["request_id"]

    def _make_body(self, data: list[tinker.Datum] | None = None) -> bytes:
        self._seq_id += 1
        return encode_request(data or self._data, self._model_id, self._seq_id)

    def _time_pass(self, body: bytes) -> float:
        begin = time.perf_counter()
        request_id = self._post_pass(body)
        submitted = time.perf_counter()
        result = self._retrieve(request_id)
        end = time.perf_counter()
        if result.headers["content-type"] != PROTOBUF["content-type"]:
            raise RuntimeError(result.text)
        self.submit_s.append(submitted - begin)
        self.retrieve_s.append(end - submitted)
        return end - begin

    def _retrieve(self, request_id: str) -> httpx.Response:
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                return answer.raise_for_status()

    def _post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.http.post(path, json=body).raise_for_status().json()


def httpx_get(raw: RawRun) -> None:
    raw.http.get("healthz").raise_for_status()


def time_call(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextlib.contextmanager
def running_backend(
    model: Path, data: list[tinker.Datum], *, with_step: bool = False
) -> Iterator[Measure]:
    """A process with the trainer's backend and environment, which computes only when asked.

    With `with_step` each call takes an optimizer step too, and their mean is given.
    """
    with tempfile.TemporaryDirectory() as directory:
        body = Path(directory) / "request"
        body.write_bytes(encode_request(data, "run", 1))
        (Path(directory) / "model").write_text(str(model))
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.overhead", "--in-process", directory),
                *(["--with-step"] if with_step else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENTS["shared"], **os.environ},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        commands, answers = process.stdin, process.stdout

        def measure(calls: int) -> list[float]:
            commands.write(f"{calls}\n")
            commands.flush()
            seconds = json.loads(answers.readline())
            return [statistics.mean(seconds)] if with_step else seconds

        try:
            measure(1)
            yield measure
        finally:
            commands.close()
            process.wait(60)


def serve_backend(directory: Path, *, with_step: bool) -> None:
    """The child: reads how often to run the request, writes the seconds of each time."""
    transformers.logging.disable_progress_bar()
    model = (directory / "model").read_text()
    envelope = read_envelope((directory / "request").read_bytes())
    operation = decode_forward_backward(envelope)
    backend = PytorchBackend.load(model, PytorchConfig(), lambda _: None)
    backend.create_model(operation.model_id, LoraConfig(lora_rank=RANK, seed=1))
    for line in sys.stdin:
        seconds = [
            time_call(lambda: run_backend(backend, operation, with_step=with_step))
            for _ in range(int(line))
        ]
        print(json.dumps(seconds), flush=True)


def run_backend(backend: PytorchBackend, operation: ForwardBackward, *, with_step: bool) -> None:
    (output,) = backend.forward_backward([operation])
    if isinstance(output, Exception):
        raise output
    if with_step:
        backend.optim_step(operation.model_id, AdamParams(**ADAM))


def encode_request(data: list[tinker.Datum], model_id: str, seq_id: int) -> bytes:
    request = ForwardBackwardRequest(ForwardBackwardInput(data, "cross_entropy"), model_id, seq_id)
    message = forward_backward_request_to_proto(request)
    return message.SerializeToString()


def server_flags(model: Path) -> Sequence[str]:
    return (*name_flags(model), "--adapter-sync", "on_request")


def name_flags(model: Path) -> Sequence[str]:
    return ("--base-model", str(model), "--served-model-name", SERVED)


def make_tiny_model(directory: Path) -> None:
    """A Llama of two layers with random weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY_SHAPE)).save_pretrained(directory)


def to_ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


if __name__ == "__main__":
    main()
