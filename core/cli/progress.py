"""What a verb that replays shows while it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["progress"]


@contextmanager
def progress(silent: bool, *, counted: bool = False) -> Iterator[tuple[Callable[[str], None], Callable[..., None]]]:
    """What is being done, on stderr, with a bar where it is known how far it is.

    Gives two functions: what is being done; how far that is, from 0 to 1, or, ``counted``, so many done of so many.
    """
    if silent:
        yield lambda _: None, lambda *_: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns: list[Any] = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn() if counted else TaskProgressColumn(),
        TimeElapsedColumn(),
    ]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("working", total=None)

        def say(text: str) -> None:
            bar.reset(task, total=None, description=text)

        def tell(done: float, of: float = 1.0) -> None:
            bar.update(task, total=of, completed=done)

        yield say, tell
