"""Tables on the terminal."""

from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from experiments.harness.points import in_sweep
from experiments.harness.records import read_record
from experiments.reporting.collect import Collection, Section
from experiments.reporting.escape import for_terminal, printable
from experiments.reporting.files import is_text
from experiments.reporting.fitting import bands, column_widths, two_a_line
from experiments.reporting.tables import TABLES, no_records, parts

# A terminal has its own width; in a file or a CI log rich would take eighty columns, too few for the tables.
_WIDTH_OF_A_FILE = 100


def make_console() -> Console:
    """A console as wide as the terminal, or wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_A_FILE)


def show_point(path: Path | None) -> None:
    """Print the tables of one record, if there is one; in a sweep, where the report follows, only say where it is."""
    if path is None:
        return
    if in_sweep():
        print(f"recorded: {path.name}")
        return
    only = Collection([read_record(path)], [], [], [], [])
    for name in TABLES:
        if sections := only.sections(name):
            print_sections(make_console(), name, sections)


def print_sections(console: Console, name: str, sections: list[Section]) -> None:
    """Print the tables of one experiment with their captions, or how to get them."""
    if not sections:
        console.print(f"[bold]{name}[/bold]: {no_records(name)}")
    for section in sections:
        for part in parts(name, section):
            for number, band in enumerate(bands(part.texts, console.width)):
                console.print(_rich(part.title if number == 0 else "(continued)", band, console.width), "")
        console.print(for_terminal(section.caption) + "\n", style="italic", highlight=False)


def print_line(console: Console, text: str) -> None:
    """Print one line to copy, such as a command or a path, whole."""
    console.print(printable(text), soft_wrap=True, markup=False, highlight=False)


def _rich(title: str, texts: pd.DataFrame, width: int) -> RichTable:
    table = RichTable(title=for_terminal(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_edge = table.pad_edge = False
    for name, characters in zip(texts.columns, column_widths(texts, width), strict=True):
        side = "left" if is_text(name) else "right"
        # Where a terminal is narrower than one column, the rest of a number goes into the next line.
        table.add_column(for_terminal(name), justify=side, width=characters, overflow="fold", vertical="top")
    for line in texts.to_numpy().tolist():
        table.add_row(*(two_a_line(for_terminal(cell)) for cell in line))
    return table
