"""Results as tables on the terminal and as a Markdown page, from the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

BY_HAND = "<!-- Below this line the page is written by hand, and kept when the study runs again. -->"


@dataclasses.dataclass
class Grid:
    """A titled table; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = dataclasses.field(default_factory=list)

    def rich(self) -> Table:
        table = Table(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _row(self.columns), _row(["---", *["---:"] * (len(self.columns) - 1)])]
        return "\n".join([*lines, *map(_row, self.rows)])


def headline(conditions: dict[str, Any]) -> str:
    """What the terminal shows above the tables."""
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    return f"{conditions['cores']} cores, {conditions['kernels']} kernels, {versions}"


def write_page(path: Path, title: str, conditions: dict[str, Any], intro: str, grids: list[Grid], plot: Path) -> None:
    """The page of one study: command, conditions, plot, tables; then whatever was written by hand before."""
    kept = path.read_text().partition(BY_HAND)[2] if path.exists() else "\n"
    settings = {key: value for key, value in conditions.items() if key not in ("command", "versions") and value}
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    parts = [
        f"# {title}",
        intro,
        f"    {conditions['command']}",
        "\n".join(f"- {key.replace('_', ' ')}: {_plain(value)}" for key, value in settings.items())
        + f"\n- versions: {versions}",
        f"![{title}]({plot.name})",
        *(grid.markdown() for grid in grids if grid.rows),
    ]
    path.write_text("\n\n".join(parts) + f"\n\n{BY_HAND}{kept}")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key.replace('_', ' ')} {_plain(part)}" for key, part in value.items())
