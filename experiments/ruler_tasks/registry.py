"""The RULER tasks this package offers."""

from experiments.ruler_tasks.common_words import COMMON_WORDS
from experiments.ruler_tasks.niah import NIAH_MULTIKEY_2, NIAH_SINGLE_1
from experiments.ruler_tasks.task import RulerTask
from experiments.ruler_tasks.variable_tracking import VARIABLE_TRACKING

TASKS: dict[str, RulerTask] = {
    task.name: task for task in (NIAH_SINGLE_1, NIAH_MULTIKEY_2, VARIABLE_TRACKING, COMMON_WORDS)
}
"""Task name to task."""
