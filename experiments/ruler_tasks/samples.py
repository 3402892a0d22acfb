"""From a task, a tokenizer and a length to a sample."""

from random import Random
from typing import TYPE_CHECKING

from dualdecoder.errors import ConfigError
from experiments.ruler_tasks.fitting import fit
from experiments.ruler_tasks.registry import TASKS
from experiments.ruler_tasks.task import RulerSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _chat_prompt(tokenizer: "PreTrainedTokenizerBase", question: str, prefix: str) -> str:
    """Return the question in the chat template, followed by the opening of the answer."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + prefix


def make_sample(
    task: str, tokenizer: "PreTrainedTokenizerBase", length: int, index: int, seed: int = 42
) -> RulerSample:
    """Return one sample; equal arguments give equal samples in every process.

    The sample is the largest one that fits: chat template, question, opening of the answer and generated tokens
    together take at most `length` tokens, and one more unit of haystack would take more.

    Args:
        task: a name in `TASKS`.
        tokenizer: a Hugging Face tokenizer with a chat template.
        length: limit in tokens; any integer, not only powers of two.
        index: number of the sample; each index gives other random choices.
        seed: changes the random choices of all samples.

    Raises:
        ConfigError: unknown `task`, a `tokenizer` without chat template, or a `length` that the task cannot fill or
            that cannot hold its smallest prompt.
    """
    if task not in TASKS:
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    if tokenizer.chat_template is None:
        raise ConfigError("tokenizer must have a chat template: use the tokenizer of an instruction-tuned model")
    variant = TASKS[task].for_length(length)

    def draw(size: int) -> RulerSample:
        draft = variant.build(size, Random(f"{task}/{length}/{seed}/{index}"))
        prompt = _chat_prompt(tokenizer, draft.question, draft.prefix)
        # The template writes the special tokens, BOS included, so the tokenizer must not add them again.
        token_ids = tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        return RulerSample(task, length, index, prompt, token_ids, draft.answers, variant.new_tokens)

    return fit(draw, variant, length)
