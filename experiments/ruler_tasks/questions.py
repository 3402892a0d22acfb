"""Questions about documents, among which the gold ones are hidden (RULER paper arXiv 2404.06654, section 3.4).

`qa_1` uses SQuAD (answerable questions), `qa_2` HotpotQA, from files in the JSON form of their authors. A sample has
the documents of its question, then others of the same article, then any, shuffled; the pool repeats when it is too
small. The shuffle is seeded per sample, where RULER's is the same for all samples of a length, which puts the gold
document of every sample at the same place.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from dualdecoder.errors import ConfigError
from experiments.ruler_tasks.material import NoData, local_file
from experiments.ruler_tasks.task import Draft, Request, RulerTask
from experiments.ruler_tasks.wording import wording

NEW_TOKENS = 32


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and the numbers of its own and of related documents in the pool."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """All questions of a file, and its documents, each once and sorted."""

    questions: list[Question]
    documents: list[str]


def build(kind: str, size: int, rng: Random, request: Request) -> Draft:
    """Return question number `request.index` with `size` documents, or with its own if those are more."""
    corpus = load(kind, getattr(request.material.files, kind))
    if request.index >= len(corpus.questions):
        raise ConfigError(f"samples: data.{kind} holds {len(corpus.questions)} questions, which is the most allowed")
    question = corpus.questions[request.index]
    chosen = _choose(size, question, len(corpus.documents), rng)
    rng.shuffle(chosen)
    parts = [wording().document.format(i=i, document=corpus.documents[d]) for i, d in enumerate(chosen, start=1)]
    text = wording().qa.format(context="\n\n".join(parts), query=question.text)
    return Draft(text, wording().qa_prefix, question.answers)


def _choose(size: int, question: Question, pool: int, rng: Random) -> list[int]:
    """Numbers of `size` documents: the question's own, related ones, others, and all again while they are too few."""
    own, related = list(question.documents), list(question.related)
    known = {*own, *related}
    others = [number for number in range(pool) if number not in known]
    for group in (related, others):
        own += rng.sample(group, min(len(group), max(0, size - len(own))))
    while len(own) < size:
        own += range(min(pool, size - len(own)))
    return own


@cache
def load(kind: str, source: str) -> Corpus:
    """The corpus of a file.  Raises NoData if none is given, ConfigError if it cannot be used."""
    if not source:
        raise NoData(f"data.{kind} is empty, so there is no data; allowed: a path, or hub:OWNER/NAME/FILE")
    read, task = _FORMS[kind]
    try:
        corpus = read(json.loads(Path(local_file(kind, source)).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"data.{kind}={source!r} is not in the JSON form of {task}: {error!r}") from error
    if not corpus.questions:
        raise ConfigError(f"data.{kind}={source!r} holds no question; allowed: a file in the JSON form of {task}")
    return corpus


def _squad(data: Any) -> Corpus:
    documents = sorted({part["context"] for article in data["data"] for part in article["paragraphs"]})
    number = {text: place for place, text in enumerate(documents)}
    questions = []
    for article in data["data"]:
        article_numbers = dict.fromkeys(number[part["context"]] for part in article["paragraphs"])
        for part in article["paragraphs"]:
            own = number[part["context"]]
            related = tuple(other for other in article_numbers if other != own)
            questions += [
                Question(item["question"], tuple(answer["text"] for answer in item["answers"]), (own,), related)
                for item in part["qas"]
                if not item.get("is_impossible", False)
            ]
    return Corpus(questions, documents)


def _hotpot(data: Any) -> Corpus:
    def document(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    documents = sorted({document(*part) for item in data for part in item["context"]})
    number = {text: place for place, text in enumerate(documents)}
    questions = [
        Question(item["question"], (item["answer"],), tuple(number[document(*part)] for part in item["context"]))
        for item in data
    ]
    return Corpus(questions, documents)


_FORMS: dict[str, tuple[Callable[[Any], Corpus], str]] = {"squad": (_squad, "SQuAD"), "hotpot": (_hotpot, "HotpotQA")}
QUESTION_TASKS = [
    RulerTask(name, NEW_TOKENS, partial(build, kind), min_size=1, match="any", needs=kind)
    for name, kind in (("qa_1", "squad"), ("qa_2", "hotpot"))
]
