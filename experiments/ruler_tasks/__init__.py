"""RULER long-context tasks: four generators, length fitting and the official score.

The tasks, their parameters and their scoring follow RULER version 1 (paper arXiv 2404.06654; parameters in
NVIDIA/RULER `scripts/synthetic.yaml`).  The sentences of the prompts are our own: they have the structure and carry
the information of the originals, but not their words, and no prefix starts or ends with a space.  Absolute scores are
therefore NOT comparable with published RULER tables; compare two models or two decoders on the same samples instead.

Other deliberate differences: keys and values are distinct within a sample, the worked example of `vt` has a fixed
number of noise units instead of a token limit, the value it tracks never equals the one asked for, and lengths are
fitted per sample.

A further task is a module that defines one `RulerTask`, plus one entry in `registry.py`.
"""

from experiments.ruler_tasks.registry import TASKS
from experiments.ruler_tasks.samples import make_sample
from experiments.ruler_tasks.scoring import score
from experiments.ruler_tasks.task import Draft, RulerSample, RulerTask

__all__ = ["TASKS", "Draft", "RulerSample", "RulerTask", "make_sample", "score"]
