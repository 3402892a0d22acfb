"""RULER's 13 tasks."""

from experiments.ruler_tasks.common_words import COMMON_WORDS
from experiments.ruler_tasks.frequent_words import FREQUENT_WORDS
from experiments.ruler_tasks.niah import NEEDLE_TASKS
from experiments.ruler_tasks.questions import QUESTION_TASKS
from experiments.ruler_tasks.task import RulerTask
from experiments.ruler_tasks.variable_tracking import VARIABLE_TRACKING

TASKS: dict[str, RulerTask] = {
    task.name: task for task in (*NEEDLE_TASKS, VARIABLE_TRACKING, COMMON_WORDS, FREQUENT_WORDS, *QUESTION_TASKS)
}
"""Task name to task, in the order of the RULER paper."""

OFFLINE_TASKS = [name for name, task in TASKS.items() if not task.needs]
"""The eleven tasks that need no data set."""
