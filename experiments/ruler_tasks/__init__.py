"""RULER version 1: generators of all 13 tasks, length fitting and the official score.

Tasks, parameters, prompts and scoring follow NVIDIA/RULER (paper arXiv 2404.06654, commit c3f5e3b4); the sentences are
read from the installed lm-eval (`wording.py`). Where lm-eval's port departs from NVIDIA's code we follow NVIDIA: the
worked example of `cwe` is sent, in turns of its own, answer prefixes start with a space, units of noise are joined by
newlines, the chat template and the generated tokens count towards the length, the vocabulary of `fwe` follows from the
length without them, essays start again at their end, `qa` scores any match, scores go from 0 to 100.

What remains different from NVIDIA's code (in short in `prompts.py`, from where it goes into records and tables):
- the shipped essay haystack is Python's manual, unless a file is given (`material.py`), and prose is split into
  sentences by a rule, where NVIDIA uses the Punkt model of nltk, a download;
- the chat template is the model's own, its default system prompt included, where NVIDIA has a list of templates,
  most of them without a system prompt; a template may trim the white space around a question;
- every sample has a random source of its own, from task, length, seed and index, where NVIDIA shuffles needles, word
  lists and documents in the same way in all samples: so no sample is NVIDIA's to the letter;
- keys and values are distinct within a sample, and the value of the worked example of `vt` is never the one asked for;
- lengths are fitted per sample, to one unit of haystack, so samples are a little fuller; a haystack may be smaller than
  NVIDIA's least (10 documents, say), where NVIDIA's search does not end;
- making a sentence singular changes the task's template only, never the model's chat template;
- beyond 8,166 distinct words `cwe` goes on with adjective-noun pairs (from about 200K tokens);
- the length counts tokens of the prompt as it is sent, so a BOS that the chat template writes counts, as there, and one
  that only a tokenizer would add is neither counted nor sent.

A further task is a module that defines a `RulerTask`, plus one entry in `registry.py`.
"""

from experiments.ruler_tasks.material import DataFiles, NoData
from experiments.ruler_tasks.prompts import prompts_used
from experiments.ruler_tasks.registry import OFFLINE_TASKS, TASKS
from experiments.ruler_tasks.samples import Sampler, task_named
from experiments.ruler_tasks.scoring import score
from experiments.ruler_tasks.task import Draft, Request, RulerSample, RulerTask

__all__ = [
    "OFFLINE_TASKS",
    "TASKS",
    "DataFiles",
    "Draft",
    "NoData",
    "Request",
    "RulerSample",
    "RulerTask",
    "Sampler",
    "prompts_used",
    "score",
    "task_named",
]
