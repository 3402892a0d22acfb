"""A progress bar while a prompt is read. It stands on a terminal only, and goes away when the answer begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

# (layers done, layers in all), over all prompts of a batch.
OnLayer = Callable[[int, int], None]


@contextmanager
def reading_bar(to: TextIO | None) -> Iterator[OnLayer | None]:
    """Yields what is to be called after every layer; None unless ``to`` is a terminal."""
    if to is None or not to.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=to), transient=True) as progress:
        task = progress.add_task("reading the prompt", total=None)

        def on_layer(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if done == total:
                progress.stop()

        yield on_layer
