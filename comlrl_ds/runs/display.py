"""What a person sees: progress bars on a terminal, a few lines elsewhere, tables at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from comlrl_ds.preference.evaluation import Evaluation


class Bar:
    """One running task of a progress display; a no-op where there is no terminal."""

    def __init__(self, progress: Progress | None, task: Any) -> None:
        self._progress, self._task = progress, task

    def advance(self, steps: int = 1, text: str = "") -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=steps, text=text)


class Display:
    """Prints for the main rank; silent with `verbose=False`."""

    def __init__(self, verbose: bool = True) -> None:
        self.console = Console(highlight=False, soft_wrap=True, quiet=not verbose)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        """A progress bar with a text beside it, on a terminal only."""
        if not self.console.is_terminal or self.console.quiet:
            yield Bar(None, None)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield Bar(progress, progress.add_task(title, total=total, text=""))

    def round_table(self, rows: Sequence[Mapping[str, Any]], initial: Evaluation | None) -> None:
        """Held-out reward, win rate over the initial policy and drift by round.

        Args:
            rows: {"round", "drift"} and, where there was an evaluation, {"mean", "error", "win_rate"}.
        """
        tasks = f" ({len(initial.items)} held-out tasks)" if initial else ""
        table = Table(title=f"by round{tasks}")
        for column in ("round", "mean reward", "standard error", "win rate over initial", "drift"):
            table.add_column(column, justify="right")
        if initial:
            table.add_row("initial", f"{initial.mean:.3f}", f"{initial.standard_error:.3f}", "", "")
        for row in rows:
            numbers = [f"{row[k]:.3f}" if k in row else "" for k in ("mean", "error", "win_rate")]
            table.add_row(str(row["round"]), *numbers, f"{row['drift']:.5f}")
        self.console.print(table)

    def reward_table(self, rows: Sequence[tuple[str, Evaluation]]) -> None:
        """Held-out mean reward of each evaluation with its standard error, and the paired gain from first to last."""
        table = Table(title=f"held-out mean reward ({len(rows[0][1].items)} tasks)")
        for column in ("", "mean", "standard error"):
            table.add_column(column, justify="left" if not column else "right")
        for name, evaluation in rows:
            table.add_row(name, f"{evaluation.mean:.3f}", f"{evaluation.standard_error:.3f}")
        if len(rows) > 1:
            gain, error = rows[-1][1].gain_over(rows[0][1])
            table.add_row("gain (paired)", f"{gain:+.3f}", f"{error:.3f}")
        self.console.print(table)
