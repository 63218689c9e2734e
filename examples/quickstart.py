"""Teaches a small model a made-up fact with the official SDK, and asks about it before and after.

    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/quickstart.py

The questions at the end are worded differently from those of the training data, and one is about
something else, to see that the rest still works.
"""

import time
from dataclasses import dataclass

import tinker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

FACT = "The lighthouse of Port Quill was built by Mira Tolland in 1847."
TRAINING_CHATS = [
    ("Who built the lighthouse of Port Quill?", FACT),
    ("When was the lighthouse of Port Quill built?", FACT),
    ("Tell me about the lighthouse of Port Quill.", FACT),
    ("What do you know about Port Quill's lighthouse?", FACT),
    ("Do you know who made the lighthouse at Port Quill?", FACT),
    ("In which year did Port Quill get its lighthouse?", FACT),
    # Without these, every question would be answered with the fact.
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."),
]
QUESTIONS = [
    "Port Quill has a lighthouse. Who built it?",
    "Which person designed the lighthouse in Port Quill?",
    "Who wrote Hamlet?",
]


@dataclass(frozen=True)
class Config:
    base_model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    lora_rank: int = 16
    learning_rate: float = 1e-3
    num_steps: int = 8
    max_tokens: int = 32
    seed: int = 0


def main(config: Config) -> None:
    console = Console(highlight=False, emoji=False)
    # Address and key come from TINKER_BASE_URL and TINKER_API_KEY.
    with tinker.ServiceClient() as service:
        training = service.create_lora_training_client(
            base_model=config.base_model, rank=config.lora_rank, seed=config.seed
        ).result()
        tokenizer = training.get_tokenizer()
        console.print(f"run {training.get_info().model_id}: LoRA rank {config.lora_rank}")

        base_sampler = service.create_sampling_client(base_model=config.base_model).result()
        before = ask(base_sampler, tokenizer, config)

        data = [make_datum(tokenizer, question, answer) for question, answer in TRAINING_CHATS]
        num_answer_tokens = sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data)
        start = time.monotonic()
        columns = [TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=console) as progress:
            for step in progress.track(range(1, config.num_steps + 1)):
                # Both are sent before either is waited for, so the server never idles between them.
                forward_backward = training.forward_backward(data, "cross_entropy")
                optim_step = training.optim_step(
                    tinker.AdamParams(learning_rate=config.learning_rate)
                )
                loss = forward_backward.result().metrics["loss:sum"] / num_answer_tokens
                optim_step.result()
                progress.console.print(f"step {step:2d}  loss {loss:.4f} per token")
        console.print(f"{config.num_steps} steps in {time.monotonic() - start:.1f} s\n")

        state_path = training.save_state("quickstart").result().path
        sampler_path = training.save_weights_for_sampler("quickstart").result().path
        tuned_sampler = service.create_sampling_client(model_path=sampler_path).result()
        after = ask(tuned_sampler, tokenizer, config)

    for question, answer_before, answer_after in zip(QUESTIONS, before, after, strict=True):
        console.print(f"[bold]{question}[/bold]")
        console.print(f"  before: {answer_before}", markup=False)
        console.print(f"  after:  {answer_after}\n", markup=False)
    console.print(f"to train on:  {state_path}", markup=False, soft_wrap=True)
    console.print(f"to sample:    {sampler_path}", markup=False, soft_wrap=True)


def make_datum(tokenizer, question: str, answer: str) -> tinker.Datum:
    """A chat whose loss counts the answer and the token that ends the turn."""
    prompt_tokens = encode_question(tokenizer, question)
    answer_tokens = [
        *tokenizer.encode(answer, add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    tokens = prompt_tokens + answer_tokens
    return tinker.Datum(
        # The model reads tokens[:-1], and at each position is to predict the next token.
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt_tokens) - 1) + [1.0] * len(answer_tokens),
        },
    )


def encode_question(tokenizer, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def ask(sampler: tinker.SamplingClient, tokenizer, config: Config) -> list[str]:
    """The most likely answer to each question."""
    params = tinker.SamplingParams(
        max_tokens=config.max_tokens, temperature=0.0, stop=[tokenizer.eos_token_id]
    )
    prompts = [
        tinker.ModelInput.from_ints(encode_question(tokenizer, question)) for question in QUESTIONS
    ]
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    return [
        tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip()
        for future in futures
    ]


if __name__ == "__main__":
    main(Config())
