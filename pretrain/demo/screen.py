"""What the demo shows while it works: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_SECONDS = 10.0


class Screen:
    """Prints the story stage by stage."""

    def __init__(self, num_stages: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._num_stages = num_stages

    def title(self, text: str, below: str) -> None:
        self.console.print(f"\n[bold]{escape(text)}[/]\n[dim]{escape(below)}[/]")

    def stage(self, number: int, title: str) -> None:
        self.console.print(f"\n[bold cyan]{number}/{self._num_stages}[/] [bold]{escape(title)}[/]")

    def say(self, text: str) -> None:
        """A plain line about the stage."""
        self._indented(text, "")

    def kept(self, text: str) -> None:
        """The stage was finished before."""
        self._indented(f"{text}  (kept from before)", "dim")

    def good(self, text: str) -> None:
        """What was to be shown has been shown."""
        self._indented(text, "bold green")

    def bad(self, text: str) -> None:
        """It has not."""
        self._indented(text, "bold red")

    @contextlib.contextmanager
    def progress(self, what: str, total: float | None) -> Iterator[Meter]:
        """A bar that the block moves."""
        if not self.console.is_terminal:
            yield Meter(self, what, total)
            return
        columns = (
            TextColumn("    {task.description}"),
            BarColumn(28),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            yield Meter(self, what, total, bar, bar.add_task(what, total=total, note=""))

    def _indented(self, text: str, style: str) -> None:
        for line in text.splitlines():
            self.console.print(f"    {escape(line)}", style=style or None)


class Meter:
    """How far something is: the bar's handle, or the lines' clock."""

    def __init__(
        self,
        screen: Screen,
        what: str,
        total: float | None,
        bar: Progress | None = None,
        task: TaskID | None = None,
    ) -> None:
        self._screen, self._what, self._total = screen, what, total
        self._bar, self._task = bar, task
        self._done = 0.0
        self._begin = self._last_line = time.monotonic()

    def advance(self, amount: float, note: str = "") -> None:
        self.at(self._done + amount, note)

    def at(self, done: float, note: str = "") -> None:
        """`done` of the total are done; `note` says more."""
        self._done = done
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, note=escape(note))
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            share = f" {done / self._total:4.0%}" if self._total and done else ""
            self._screen.say(f"{self._what}{share}  {now - self._begin:3.0f} s  {note}".rstrip())
