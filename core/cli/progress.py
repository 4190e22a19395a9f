"""What a verb that replays shows while it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["progress"]


@contextmanager
def progress(silent: bool) -> Iterator[tuple[Callable[[str], None], Callable[[float], None]]]:
    """What is being done, on stderr, with a bar where it is known how far it is."""
    if silent:
        yield lambda _: None, lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns: list[Any] = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    ]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("working", total=None)

        def say(text: str) -> None:
            bar.reset(task, total=None, description=text)

        def tell(share: float) -> None:
            bar.update(task, total=1.0, completed=share)

        yield say, tell
