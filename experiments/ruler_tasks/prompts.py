"""What the prompts of a measurement are: RULER's, their version here, and what differs. For records and tables."""

from experiments.ruler_tasks.material import DataFiles

NVIDIA = "NVIDIA/RULER c3f5e3b4"
VERSION = 2
"""To be raised when the same request would give another sample."""
_DIFFERENCES = (
    "samples are drawn and fitted one by one",
    "keys and values are distinct",
    "sentences are split by a rule",
    "the chat template is the model's own",
)


def prompts_used(files: DataFiles) -> dict[str, str]:
    """The fields of a row that say which prompts were answered.

    `prompts` names definition and version; `differs` says in words where they are not NVIDIA's.
    """
    essays = () if files.essays else ("essays are Python's manual",)
    return {
        "prompts": f"{NVIDIA}, version {VERSION}",
        "differs": f"not as in NVIDIA's: {', '.join((*essays, *_DIFFERENCES))} (experiments/ruler_tasks/__init__.py)",
    }
