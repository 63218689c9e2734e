"""What a request asks of its prompt: log-probabilities of its tokens, of others, and alternatives.

All at temperature 1. The logits of one chunk of positions exist at a time.

Shape letters: P prompt tokens, D hidden size, V vocabulary, C positions of a chunk, K tokens asked
of a position.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hosted_tinker.sampling.token_choice import UniformStream, draw_tokens, top_logprobs
from hosted_tinker.types import EMPTY_TOPK_LOGPROB, Sample, SampleOutput, TopkLogprobs


def scores_prompt(sample: Sample) -> bool:
    """Whether the request asks anything of its prompt."""
    return _scores_tokens(sample) or _scores_others(sample)


def score_prompt(
    compute_logits: Callable[[Tensor], Tensor],
    hidden_PD: Tensor,
    sample: Sample,
    uniforms: UniformStream,
    *,
    vocab_size: int,
    chunk_tokens: int,
) -> SampleOutput:
    """The prompt's part of the output; its `sequences` are empty.

    Args:
        compute_logits: hidden states [C, D] to float32 [C, V].
        hidden_PD: the prompt's last hidden states. Row i predicts prompt token i + 1.
        uniforms: draws the alternative tokens.
    """
    num_scored = len(sample.prompt) - 1
    scores = allocate_scores(sample, vocab_size)
    uniform_PK = uniforms.draw_matrix(num_scored, sample.prompt_alt_tokens_k)
    last_n = sample.prompt_logprobs_last_n
    first_token = 0 if last_n is None else max(0, num_scored - last_n)
    first = 0 if _scores_others(sample) else first_token
    for start in range(first, num_scored, chunk_tokens):
        rows = slice(start, min(start + chunk_tokens, num_scored))
        logprobs_CV = torch.log_softmax(compute_logits(hidden_PD[rows]), dim=-1)
        _score_chunk(scores, logprobs_CV, sample, rows, uniform_PK[rows])
    if scores.prompt_logprobs is not None:
        scores.prompt_logprobs[: first_token + 1] = np.nan
    return scores


def allocate_scores(sample: Sample, vocab_size: int) -> SampleOutput:
    """Arrays of everything that the request asks of its prompt, each cell without a value yet."""
    length = len(sample.prompt)
    topk = min(sample.topk_prompt_logprobs, vocab_size)
    alternatives = (length - 1, sample.prompt_alt_tokens_k)
    targets = sample.target_prompt_logprobs
    return SampleOutput(
        sequences=(),
        prompt_logprobs=np.full(length, np.nan, np.float32) if _scores_tokens(sample) else None,
        topk_prompt_logprobs=TopkLogprobs(
            np.zeros((length, topk), np.int32),
            np.full((length, topk), EMPTY_TOPK_LOGPROB, np.float32),
        )
        if topk
        else None,
        target_prompt_logprobs=None if targets is None else np.zeros(targets.shape, np.float32),
        prompt_alt_tokens=(np.zeros(alternatives, np.int64), np.zeros(alternatives, np.float32))
        if sample.prompt_alt_tokens_k
        else None,
    )


def _scores_tokens(sample: Sample) -> bool:
    return sample.prompt_logprobs or sample.prompt_logprobs_last_n is not None


def _scores_others(sample: Sample) -> bool:
    return (
        sample.topk_prompt_logprobs > 0
        or sample.target_prompt_logprobs is not None
        or sample.prompt_alt_tokens_k > 0
    )


def _score_chunk(
    scores: SampleOutput,
    logprobs_CV: Tensor,
    sample: Sample,
    rows: slice,
    uniform_CK: np.ndarray,
) -> None:
    """Fills in the cells of the prompt tokens after positions `rows`."""
    tokens = slice(rows.start + 1, rows.stop + 1)
    if scores.prompt_logprobs is not None:
        asked_C1 = sample.prompt[tokens, None]
        scores.prompt_logprobs[tokens] = _gather(logprobs_CV, asked_C1)[:, 0]
    if scores.topk_prompt_logprobs is not None:
        best = top_logprobs(logprobs_CV, scores.topk_prompt_logprobs.token_ids.shape[1])
        scores.topk_prompt_logprobs.token_ids[tokens] = best.token_ids
        scores.topk_prompt_logprobs.logprobs[tokens] = best.logprobs
    if sample.target_prompt_logprobs is not None and scores.target_prompt_logprobs is not None:
        asked_CK = sample.target_prompt_logprobs[rows]
        found_CK = _gather(logprobs_CV, np.maximum(asked_CK, 0))
        scores.target_prompt_logprobs[rows] = np.where(asked_CK < 0, 0.0, found_CK)
    if scores.prompt_alt_tokens is not None:
        device = logprobs_CV.device
        drawn_CK = draw_tokens(logprobs_CV, torch.from_numpy(uniform_CK).to(device))
        scores.prompt_alt_tokens[0][rows] = drawn_CK.cpu().numpy()
        scores.prompt_alt_tokens[1][rows] = logprobs_CV.gather(1, drawn_CK).cpu().numpy()


def _gather(logprobs_CV: Tensor, tokens_CK: np.ndarray) -> np.ndarray:
    """Float32 [C, K]."""
    index_CK = torch.from_numpy(np.ascontiguousarray(tokens_CK, dtype=np.int64))
    return logprobs_CV.gather(1, index_CK.to(logprobs_CV.device)).cpu().numpy()
