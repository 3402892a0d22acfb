"""All experiments under one command: python -m experiments [NAME] [--dry-run] [--retry-failed] [-m] [key=value ...]

python -m experiments
python -m experiments throughput --dry-run -m batch=1,4,8
"""

import ast
import os
import sys
from pathlib import Path

from experiments.harness.command import ROOT

# Options that Hydra does not know, and the settings they stand for.
FLAGS = {"--dry-run": "dry_run=true", "--retry-failed": "retry_failed=true"}


def main(arguments: list[str]) -> int:
    """Hand over to the experiment in this same process; without a known name, list the experiments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(f"{name:14} {words}" for name, words in experiments().items()))
        return 0
    if arguments[0] not in experiments():
        allowed = ", ".join(experiments())
        print(f"error: experiment {arguments[0]!r} is not known; allowed: {allowed}", file=sys.stderr)
        return 2
    # Hydra wants its settings in one piece, so what the flags stand for comes last.
    name, *rest = [argument for argument in arguments if argument not in FLAGS]
    settings = [FLAGS[argument] for argument in arguments if argument in FLAGS]
    os.execv(sys.executable, [sys.executable, "-m", f"experiments.{name}", *rest, *settings])


def experiments() -> dict[str, str]:
    """The experiments, which are the modules with a primary config of their name, and what each says of itself."""
    folder = Path(__file__).parent
    files = {path.stem: folder / f"{path.stem}.py" for path in sorted((ROOT / "conf").glob("*.yaml"))}
    return {name: _first_line(path) for name, path in files.items() if path.is_file() and name != "reproduce"}


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
