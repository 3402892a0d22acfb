"""The tasks that are trained on: RULER's families in other words, with other keys, values and texts.

Each makes an example of about ``length`` tokens: facts to look up (one or several keys, values and questions, in prose,
in repeated sentences or among nothing but facts), chains of assignments, the most frequent words of a list or a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from experiments.long_context.example import PROSE, Chat, Example, Question
from experiments.long_context.haystack import Prose, hide
from experiments.long_context.vocabulary import VALUES, Vocabulary, coded_words, names

STATEMENTS = (
    "The registered {kind} of {key} is {value}.",
    "Let it be recorded that {key} holds the {kind} {value}.",
    "According to the ledger, the {kind} for {key} reads {value}.",
    "In the files, {key} goes with the {kind} {value}.",
)
KINDS = {"number": ("serial number", "account number", "lot number"), "code": ("access code", "seal", "device code")}
FILLERS = (
    "The clerk closed the window. The lamps were lit one after the other. Nobody came that evening.",
    "Rain fell on the harbour. The ships lay still. A bell rang twice and was silent.",
    "The road led past the mill. Dust rose and settled. The next village was far away.",
)
LOOKUP_BEFORE = (
    "Facts are scattered through the text below. Read all of it, questions about them follow.\n\n",
    "Read this text with care and keep the facts in it in mind.\n",
    "Below is a long document. Afterwards you are asked for details from it.\n\n",
)
CHAIN_BEFORE = "The text below passes values from one variable to another. Follow them.\n\n"
# A numbered word of a list takes no more in the mean: up to six for the number, and the word.
MOST_ENTRY_TOKENS = 9
LIST_BEFORE = "Count how often each word of the list below occurs.\n"
CODED_BEFORE = "The words of the text below belong to no language. Count how often each occurs.\n"


@dataclass(frozen=True)
class Maker:
    """Makes examples for one tokenizer from one vocabulary and prose."""

    chat: Chat
    vocabulary: Vocabulary
    prose: Prose
    line_end: int
    sentence_end: int

    def make(self, task: str, length: int, rng: Random) -> Example:
        return TASKS[task](self, length, rng)

    def language(self, length: int, rng: Random) -> Example:
        """Prose alone."""
        return Example(self.prose.piece(length, rng), [PROSE] * length)

    def lookup(self, length: int, rng: Random) -> Example:
        """Questions about keys that were given one value or several."""
        values = rng.choice((1, 1, 1, 2, 4))
        kind_of, keys = rng.choice(("number", "number", "code")), rng.choice((1, 4, 8, 16))
        facts = _Facts.draw(self.vocabulary, kind_of, keys, values, rng)
        questions = facts.questions(rng)
        before = rng.choice(LOOKUP_BEFORE)
        haystack = rng.choice(("prose", "prose", "fillers", "facts"))
        statements = [self.chat.ids(f"{rng.choice((' ', chr(10)))}{text}") for text in facts.statements(rng)]
        room = length - self.chat.overhead(before, questions) - sum(map(len, statements))
        straw, is_prose = self._straw(haystack, facts, room, rng)
        context = hide(statements, straw, rng, self.sentence_end if haystack == "prose" else self.line_end)
        return self.chat.example(before, context, questions, is_prose)

    def _straw(self, haystack: str, facts: _Facts, tokens: int, rng: Random) -> tuple[list[int], bool]:
        if haystack == "prose":
            return self.prose.piece(max(tokens, 0), rng), True
        if haystack == "fillers":
            unit = self.chat.ids(rng.choice(FILLERS) + "\n")
            return unit * (max(tokens, 0) // len(unit)), False
        return self._other_facts(facts, tokens, rng), False

    def _other_facts(self, facts: _Facts, tokens: int, rng: Random) -> list[int]:
        """Statements of the same form about keys that nobody asks for."""
        out: list[int] = []
        while True:
            key = self.vocabulary.key(rng)
            if key in facts.pairs:
                continue
            line = self.chat.ids(facts.statement(key, VALUES[facts.value_kind](rng)) + "\n")
            if len(out) + len(line) > tokens:
                return out
            out += line

    def chain(self, length: int, rng: Random) -> Example:
        """Which variables hold a value that was passed on from one to the next; several chains are mixed."""
        chains, hops = rng.choice((1, 1, 2, 3)), rng.choice((2, 3, 4, 5))
        every = names(chains * (hops + 1), rng)
        groups = [every[n : n + hops + 1] for n in range(0, len(every), hops + 1)]
        starts = [VALUES["number"](rng) for _ in groups]
        lines = [_assignments(group, start) for group, start in zip(groups, starts, strict=True)]
        questions = [_chain_question(*pair) for pair in zip(groups, starts, strict=True)]
        statements = [self.chat.ids(line + "\n") for line in _merged(lines, rng)]
        room = length - self.chat.overhead(CHAIN_BEFORE, questions) - sum(map(len, statements))
        unit = self.chat.ids(rng.choice(FILLERS) + "\n")
        straw = unit * (max(room, 0) // len(unit))
        return self.chat.example(CHAIN_BEFORE, hide(statements, straw, rng, self.line_end), questions)

    def common(self, length: int, rng: Random) -> Example:
        """The most frequent words of a numbered list."""
        asked, often, seldom = rng.choice((5, 8, 10)), rng.choice((6, 12, 30)), rng.choice((1, 2, 3))
        low, high = asked + 1, min(len(self.vocabulary.words), length)
        while high - low > 1:
            middle = (low + high) // 2
            entries = asked * often + (middle - asked) * seldom
            low, high = (middle, high) if entries * MOST_ENTRY_TOKENS < length else (low, middle)
        words = rng.sample(self.vocabulary.words, low)
        frequent, entries = words[:asked], words[:asked] * often + words[asked:] * seldom
        rng.shuffle(entries)
        text = " ".join(f"{place}. {word}" for place, word in enumerate(entries, start=1))
        answer = " ".join(f"{place}. {word}" for place, word in enumerate(frequent, start=1))
        question = Question(f"\nWhich {asked} words occur most often in the list?", f"The {asked} words are: {answer}")
        return self.chat.example(LIST_BEFORE, self.chat.ids(text), [question])

    def frequent(self, length: int, rng: Random) -> Example:
        """The three most frequent words of a text whose words' frequencies fall with the square of their rank."""
        count = length // 7
        words = coded_words(max(8, length // rng.choice((40, 50, 80))), rng)
        times = [int(count * 0.6 / rank**2) for rank in range(1, len(words) + 1)]
        entries = [word for word, n in zip(words, times, strict=True) for _ in range(n)]
        rng.shuffle(entries)
        question = Question("\nName the three words that occur most often.", f"They are: {', '.join(words[:3])}.")
        return self.chat.example(CODED_BEFORE, self.chat.ids(" ".join(entries)), [question])


@dataclass(frozen=True)
class _Facts:
    """Values by key, and the sentence in which they stand."""

    pairs: dict[str, list[str]]
    value_kind: str
    kind: str
    sentence: str

    @classmethod
    def draw(cls, vocabulary: Vocabulary, value_kind: str, keys: int, values: int, rng: Random) -> _Facts:
        pairs = {key: [VALUES[value_kind](rng) for _ in range(values)] for key in vocabulary.keys(keys, rng)}
        return cls(pairs, value_kind, rng.choice(KINDS[value_kind]), rng.choice(STATEMENTS))

    def statement(self, key: str, value: str) -> str:
        return self.sentence.format(kind=self.kind, key=key, value=value)

    def statements(self, rng: Random) -> list[str]:
        """All of them in random order; a key's values keep theirs."""
        order = [key for key, values in self.pairs.items() for _ in values]
        rng.shuffle(order)
        left = {key: iter(values) for key, values in self.pairs.items()}
        return [self.statement(key, next(left[key])) for key in order]

    def questions(self, rng: Random) -> list[Question]:
        """About up to six keys, one at a time or four at once."""
        asked = rng.sample(list(self.pairs), min(6, len(self.pairs)))
        if len(asked) >= 4 and rng.random() < 0.3:
            return [self._question(asked[:4])]
        return [self._question([key]) for key in asked]

    def _question(self, keys: list[str]) -> Question:
        values = [value for key in keys for value in self.pairs[key]]
        subject, verb = (f"{self.kind}s", "are") if len(values) > 1 else (self.kind, "is")
        return Question(
            f"\nWhich {subject} does the text give for {_listed(keys)}?",
            f"The {subject} for {_listed(keys)} that the text gives {verb} {_listed(values)}.",
        )


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


def _assignments(group: list[str], value: str) -> list[str]:
    return [f"LET {group[0]} = {value}", *(f"LET {after} = {before}" for before, after in pairwise(group))]


def _chain_question(group: list[str], value: str) -> Question:
    text = f"\nWhich variables hold the value {value} in the end?"
    return Question(text, f"There are {len(group)} variables that hold {value}: {' '.join(group)}")


def _merged(lines: list[list[str]], rng: Random) -> list[str]:
    """The chains' lines in one random order that keeps each chain's own."""
    order = [number for number, chain in enumerate(lines) for _ in chain]
    rng.shuffle(order)
    left = [iter(chain) for chain in lines]
    return [next(left[number]) for number in order]


TASKS: dict[str, Callable[[Maker, int, Random], Example]] = {
    "language": Maker.language,
    "lookup": Maker.lookup,
    "chain": Maker.chain,
    "common": Maker.common,
    "frequent": Maker.frequent,
}
