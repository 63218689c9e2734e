"""The fake engine keeps what a client can check of a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hosted_tinker.backend_configs import FakeConfig
from hosted_tinker.sampling.fake import FakeEngine
from hosted_tinker.types import AdapterRef, Sample, SampleOutput, SamplingParams
from hosted_tinker.workers.messages import Failure

PROMPT = np.array([3, 1, 4, 1, 5], dtype=np.int64)
CONFIG = FakeConfig(vocab_size=50, context_length=64)


def run(
    params: SamplingParams, adapter: AdapterRef | None = None, **fields: Any
) -> SampleOutput | Failure:
    results: dict[str, SampleOutput | Failure] = {}
    engine = FakeEngine(CONFIG, results.__setitem__, lambda _id, _token: None)
    prompt = fields.pop("prompt", PROMPT)
    engine.add(Sample("r", adapter, prompt, params, **fields))
    while engine.has_work:
        engine.step()
    return results["r"]


def sample(params: SamplingParams, **fields: Any) -> SampleOutput:
    output = run(params, **fields)
    assert isinstance(output, SampleOutput), output
    return output


def test_a_seed_decides_and_adapters_differ(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, seed=1)
    first = sample(params, num_samples=2).sequences
    again = sample(params, num_samples=2).sequences
    adapted = sample(params, adapter=AdapterRef("m@1", tmp_path)).sequences
    assert [one.tokens.tolist() for one in first] == [one.tokens.tolist() for one in again]
    assert first[0].tokens.tolist() != first[1].tokens.tolist()
    assert first[0].tokens.tolist() != adapted[0].tokens.tolist()
    assert first[0].stop_reason == "length"


def test_scoring_sampled_tokens_gives_the_logprobs_of_sampling() -> None:
    (sequence,) = sample(SamplingParams(max_tokens=10, seed=2)).sequences
    whole = np.concatenate([PROMPT, sequence.tokens.astype(np.int64)])
    scored = sample(SamplingParams(max_tokens=1), prompt=whole, prompt_logprobs=True)
    assert scored.prompt_logprobs is not None
    assert np.isnan(scored.prompt_logprobs[0])
    np.testing.assert_allclose(scored.prompt_logprobs[5:], sequence.logprobs, rtol=1e-6)


def test_a_stop_id_is_kept_and_ends() -> None:
    tokens = sample(SamplingParams(max_tokens=30, seed=3)).sequences[0].tokens.tolist()
    stop = tokens[8]
    (stopped,) = sample(SamplingParams(max_tokens=30, seed=3, stop=(stop,))).sequences
    assert stopped.tokens.tolist() == tokens[: tokens.index(stop) + 1]
    assert stopped.stop_reason == "stop"


def test_shapes_of_everything_that_can_be_asked() -> None:
    targets = np.array([[1, -1]] * 4)
    output = sample(
        SamplingParams(max_tokens=3, top_k=2, top_p=0.9, temperature=0.5),
        prompt_logprobs_last_n=2,
        topk_prompt_logprobs=3,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
        topk_sample_logprobs=2,
    )
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs).tolist() == [True, True, True, False, False]
    topk = output.topk_prompt_logprobs
    assert topk is not None
    assert topk.token_ids.shape == (5, 3)
    assert topk.logprobs[0].tolist() == [-99999.0] * 3
    assert np.all(np.diff(topk.logprobs[1:], axis=1) <= 0)
    assert output.target_prompt_logprobs is not None
    assert np.all(output.target_prompt_logprobs[:, 0] < 0)
    assert np.all(output.target_prompt_logprobs[:, 1] == 0)
    assert output.prompt_alt_tokens is not None
    assert output.prompt_alt_tokens[0].shape == output.prompt_alt_tokens[1].shape == (4, 2)
    (sequence,) = output.sequences
    assert sequence.topk_logprobs is not None
    assert all(
        token in best
        for token, best in zip(sequence.tokens, sequence.topk_logprobs.token_ids, strict=True)
    )


def test_max_tokens_none_runs_to_the_end_of_the_context() -> None:
    assert len(sample(SamplingParams()).sequences[0].tokens) == 59


def test_a_missing_adapter_is_the_users_error(tmp_path: Path) -> None:
    failure = run(SamplingParams(max_tokens=1), adapter=AdapterRef("m@1", tmp_path / "gone"))
    assert isinstance(failure, Failure)
    assert failure.category == "user"


def test_cancel_ends_with_a_failure() -> None:
    results: dict[str, SampleOutput | Failure] = {}
    engine = FakeEngine(CONFIG, results.__setitem__, lambda _id, _token: None)
    engine.add(Sample("r", None, PROMPT, SamplingParams(max_tokens=50)))
    engine.step()
    engine.cancel("r")
    engine.cancel("unknown")
    assert results == {"r": Failure("cancelled", "user")}
    assert not engine.has_work


def test_it_imports_no_model_library() -> None:
    code = (
        "import sys, hosted_tinker.sampling.fake; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
