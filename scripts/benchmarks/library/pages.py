"""Results as tables on the terminal, as a plot, and as a Markdown page, all from the same rows."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from library.study import Study

BY_HAND = "<!-- Below this line the page is written by hand, and kept when the study runs again. -->"


@dataclasses.dataclass
class Grid:
    """A table with a title.

    Attributes:
        title: above the table.
        columns: headers. The first column names the row; the others hold figures.
        rows: cells, as text.
    """

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]]) -> Grid:
        """Return the table of rows whose cells stand under their headers, which are those of the first row."""
        return cls(title, tuple(rows[0]) if rows else (), [list(row.values()) for row in rows])

    def rich(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table for a page."""
        lines = [f"**{self.title}**", "", _row(self.columns), _row(["---", *["---:"] * (len(self.columns) - 1)])]
        return "\n".join([*lines, *map(_row, self.rows)])


def megabytes(num_bytes: float | None) -> str:
    """Return a cell of megabytes, which is empty where nothing was counted."""
    return f"{num_bytes / 1e6:.2f}" if num_bytes else ""


def report(study: Study, title: str, intro: str, grids: Sequence[Grid], plot: Callable[[Study, Path], None]) -> None:
    """Show a study's tables, and write its plot and its page beside its JSON file, where it has one.

    Args:
        study: rows and conditions.
        title: of the page.
        intro: first paragraph of the page.
        grids: tables.
        plot: draws the study into a file.
    """
    show(grids, headline(study.conditions))
    if study.path:
        plot(study, study.path.with_suffix(".png"))
        write_page(study.path.with_suffix(".md"), title, study.conditions, intro, grids)


def show(grids: Iterable[Grid], heading: str = "", *, markdown: bool = False) -> None:
    """Print tables for the terminal, and with ``markdown`` once more as a page that is written by hand takes them."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(heading)
    for grid in grids:
        console.print(grid.rich())
        if markdown:
            print(grid.markdown())


def headline(conditions: dict[str, Any]) -> str:
    """Return the line above the tables on the terminal."""
    return f"{conditions['cores']} cores, {conditions['kernels']} kernels, {_plain(conditions['versions'])}"


def write_page(path: Path, title: str, conditions: dict[str, Any], intro: str, grids: Sequence[Grid]) -> None:
    """Write the page of a study: command, conditions, the plot beside it, and tables.

    Text below the line ``BY_HAND`` in a page that exists is kept.

    Args:
        path: the page.
        title: its title.
        conditions: of ``Study``, with the command.
        intro: its first paragraph.
        grids: tables. A table without rows is left out.
    """
    kept = path.read_text().partition(BY_HAND)[2] if path.exists() else "\n"
    settings = {key: value for key, value in conditions.items() if key not in ("command", "versions") and value}
    parts = [
        f"# {title}",
        intro,
        f"    {conditions['command']}",
        "\n".join(f"- {key.replace('_', ' ')}: {_plain(value)}" for key, value in settings.items())
        + f"\n- versions: {_plain(conditions['versions'])}",
        f"![{title}]({path.stem}.png)",
        *(grid.markdown() for grid in grids if grid.rows),
    ]
    path.write_text("\n\n".join(parts) + f"\n\n{BY_HAND}{kept}")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key.replace('_', ' ')} {_plain(part)}" for key, part in value.items())
