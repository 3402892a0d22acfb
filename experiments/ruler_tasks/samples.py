"""From a task, a tokenizer and a length to a sample, kept on disk."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from dualdecoder.checkpoints import cache_folder
from dualdecoder.errors import ConfigError
from dualdecoder.prompts import chat_text
from experiments.harness.identity import tokenizer_digest
from experiments.ruler_tasks.fitting import fit
from experiments.ruler_tasks.material import DataFiles, Material, NoData
from experiments.ruler_tasks.prompts import VERSION
from experiments.ruler_tasks.registry import TASKS
from experiments.ruler_tasks.task import Draft, Request, RulerSample, RulerTask
from experiments.ruler_tasks.wording import wording
from experiments.ruler_tasks.words import words_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def task_named(name: str) -> RulerTask:
    """The task called `name`. Raises ConfigError listing all."""
    if name not in TASKS:
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]


@dataclass(frozen=True)
class Sampler:
    """Makes samples for one tokenizer and keeps them in `folder`; with None nothing is kept.

    A kept sample is found by the hash of everything that it depends on: task, length, seed, tokenizer with its chat
    template, data files, sentences, words, and the version of this code.
    """

    tokenizer: "PreTrainedTokenizerBase"
    files: DataFiles = field(default_factory=DataFiles)
    folder: Path | None = field(default_factory=lambda: cache_folder() / "ruler")

    def __post_init__(self) -> None:
        if self.tokenizer.chat_template is None:
            raise ConfigError("tokenizer must have a chat template: use the tokenizer of an instruction-tuned model")

    def sample(self, task: str, length: int, index: int, seed: int = 42) -> RulerSample:
        """Return one sample; equal arguments give equal samples in every process.

        The sample is the largest one that fits: chat template, question, opening of the answer and generated tokens
        together take at most `length` tokens, and one more unit of haystack would take more.

        Args:
            task: a name in `TASKS`.
            length: limit in tokens; any integer, not only powers of two.
            index: number of the sample; each index gives other random choices.
            seed: changes the random choices of all samples.

        Raises:
            NoData: the data set of `task` is not given.
            ConfigError: unknown `task`, or a `length` that cannot hold its smallest prompt.
        """
        chosen = task_named(task)
        if chosen.needs and not getattr(self.files, chosen.needs):
            raise NoData(f"task {task!r} has no data: data.{chosen.needs} is empty")
        path = self._path(chosen, length, index, seed)
        if path is not None and (kept := _read(path)) is not None:
            return self._encoded(chosen, length, index, *kept)
        made = self._make(chosen, length, index, seed)
        if path is not None:
            _write(path, made)
        return made

    def _make(self, task: RulerTask, length: int, index: int, seed: int) -> RulerSample:
        request = Request(length, index, Material.of(self.tokenizer, self.files))

        def draw(size: int) -> RulerSample:
            draft = task.build(size, Random(f"{task.name}/{length}/{seed}/{index}"), request)
            return self._encoded(task, length, index, self._prompt(draft), draft.answers)

        return fit(draw, task, length)

    def _prompt(self, draft: Draft) -> str:
        """The question in the chat template, followed by the opening of the answer.

        A worked example comes first in the same form with its answer, which ends with a line feed and not with the
        template's end of turn: NVIDIA fills one text, template and opening together, once for each.
        """
        solved = [f"{self._turn(example.question)}{example.answer}\n" for example in draft.examples]
        return "".join(solved) + self._turn(draft.question) + draft.prefix

    def _turn(self, question: str) -> str:
        """The user's turn and the header of the assistant's."""
        return chat_text(self.tokenizer, [{"role": "user", "content": question}], add_generation_prompt=True)

    def _encoded(self, task: RulerTask, length: int, index: int, prompt: str, answers: tuple[str, ...]) -> RulerSample:
        # The template writes the special tokens, BOS included, so the tokenizer must not add them again.
        token_ids = tuple(self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
        return RulerSample(task.name, length, index, prompt, token_ids, answers, task.new_tokens)

    def _path(self, task: RulerTask, length: int, index: int, seed: int) -> Path | None:
        if self.folder is None:
            return None
        texts = {**self.files.digests(), **vars(wording()), "words": words_digest()}
        parts = [VERSION, task.name, length, seed, tokenizer_digest(self.tokenizer), texts]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"{task.name}-{length}-{key}" / f"{index}.json"


def _read(path: Path) -> tuple[str, tuple[str, ...]] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept["prompt"], tuple(kept["answers"])
    except (OSError, ValueError, KeyError):
        return None


def _write(path: Path, sample: RulerSample) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: what an interrupted process leaves behind is never taken for a sample.
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"prompt": sample.prompt, "answers": sample.answers}, file)
    os.replace(temporary, path)
