"""Tables and figures from records: python -m experiments.report [results_dir=results/local] [readme=README.md]

Without a folder, every folder below results/ that holds records. Needs neither a model nor a GPU; the same records give
the same bytes.
"""

import sys
from pathlib import Path

import pandas as pd
from rich.console import Console

from experiments.harness.environment import ROOT
from experiments.harness.options import existing_folder, one_line, read_options
from experiments.reporting.collect import Collection, collect, result_folders
from experiments.reporting.figures import write_figure
from experiments.reporting.files import as_markdown
from experiments.reporting.paper import write_outputs
from experiments.reporting.readme import with_tables
from experiments.reporting.tables import MAIN_TABLES, TABLES, write_tables
from experiments.reporting.terminal import make_console, print_line, print_sections


def main(arguments: list[str]) -> int:
    """Print and write the report; returns the exit code."""
    try:
        options = read_options(arguments, {"results_dir": "", "readme": ""})
        given = options["results_dir"]
        folders = [existing_folder("results_dir", given)] if given else result_folders(ROOT / "results")
        readme = ROOT / options["readme"] if options["readme"] else None
        text = readme.read_text(encoding="utf-8") if readme else ""
        for folder in folders:
            build_report(folder)
        if readme:
            readme.write_text(with_tables(text, ROOT / "results"), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def build_report(folder: Path) -> None:
    """Make every table and figure that the records below `folder` allow, and name the records without a result."""
    console = make_console()
    collection = collect(folder)
    for name in TABLES:
        sections = collection.sections(name)
        if not sections and name not in MAIN_TABLES:
            continue
        print_sections(console, name, sections)
        write_tables(name, sections, folder / "tables")
        write_figure(name, sections, folder / "figures")
    outputs = write_outputs(collection, folder / "paper")
    _report_problems(console, collection, folder)
    if missing := [f"{title}: {state}" for title, state in outputs if state.startswith("no records")]:
        console.print("[bold]Without records[/bold]")
        for line in missing:
            print_line(console, line)
    for words, name in (("Tables", "tables"), ("Figures", "figures"), ("The paper's", "paper")):
        print_line(console, f"{words}: {folder / name}")


def _report_problems(console: Console, collection: Collection, folder: Path) -> None:
    problems = _problems(collection, folder)
    text = as_markdown(problems) if len(problems) else "none"
    (folder / "tables" / "problems.md").write_text(f"# Records without a result\n\n{text}\n", encoding="utf-8")
    if len(problems):
        console.print("[bold]Records without a result[/bold]")
        # No table: commands and paths are whole lines to copy.
        for line in problems.itertuples(index=False):
            print_line(console, ": ".join(line))


def _problems(collection: Collection, folder: Path) -> pd.DataFrame:
    """Failed, unfinished and unreadable records, one line each."""
    lines = [(record.status, record.command, _reason(record.error)) for record in collection.failed]
    lines += [("unfinished", record.command, "under way or interrupted") for record in collection.unfinished]
    lines += [
        ("unusable", error.path.relative_to(folder).as_posix(), str(error).replace(f"{folder}/", ""))
        for error in collection.errors
    ]
    return pd.DataFrame(lines, columns=["kind", "record", "reason"])


def _reason(error: dict[str, str] | None) -> str:
    error = error or {}
    return f"{error.get('type', 'error')}: {' '.join(error.get('message', '').split())}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
