"""What the benchmarks share: results on file that the same command continues, conditions, and a progress bar."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results")
PACKAGES = ("torch", "accelerate", "transformers")


def make_parser(description: str, default_output: str) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small form under 2 minutes that checks the direction")
    parser.add_argument("--output", type=Path, default=RESULTS / default_output, help="JSON, continued if it exists")
    parser.add_argument("--fresh", action="store_true", help="measure all anew")
    parser.add_argument("--plot", type=Path, help="also write a plot")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, default=2048)
    return parser


def parse(parser: argparse.ArgumentParser, quick: dict[str, Any], argv: list[str]) -> argparse.Namespace:
    """`--quick` changes defaults only, and keeps nothing on file unless told where."""
    if "--quick" in argv:
        parser.set_defaults(output=None, **quick)
    return parser.parse_args(argv)


def shape_of(args: argparse.Namespace):
    """A Llama of these sizes, with usual proportions."""
    from training_run import ModelShape

    hidden = args.hidden_size
    return ModelShape(
        hidden, hidden * 11 // 4, args.layers, num_attention_heads=hidden // 64, vocab_size=args.vocab_size
    )


class Study:
    """Rows of several kinds, written to a JSON file after each addition.

    Args:
        path: where; None keeps nothing. What is there already is continued.
        conditions: noted with the rows. `fixed` names those that must not change when a study is continued.
        fresh: drop what is there.
    """

    def __init__(self, path: Path | None, conditions: dict[str, Any], fixed: Iterable[str], *, fresh: bool) -> None:
        self.path = path
        self.conditions = conditions | {"versions": versions(), "kernels": kernels(), "cores": os.cpu_count()}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        if path and path.exists() and not fresh:
            self._continue(json.loads(path.read_text()), [*fixed, "versions", "kernels"])

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return self._rows.get(kind, [])

    def find(self, kind: str, **key: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows(kind) if key.items() <= row.items()), None)

    def add(self, kind: str, row: dict[str, Any]) -> None:
        self._rows.setdefault(kind, []).append(row)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"conditions": self.conditions, **self._rows}, indent=1) + "\n")
        partial.replace(self.path)

    def _continue(self, before: dict[str, Any], fixed: list[str]) -> None:
        conditions = before.pop("conditions")
        now = json.loads(json.dumps(self.conditions))
        if changed := [key for key in fixed if conditions.get(key) != now[key]]:
            raise SystemExit(
                f"{self.path.name} was measured under other conditions ({', '.join(changed)}). "
                "Give another --output, or --fresh to replace it."
            )
        self._rows = before


def command_line(script: str) -> str:
    """The command for the results page, without anybody's folders."""
    words = (Path(word).name if os.sep in word else word for word in sys.argv[1:])
    return " ".join([f"python scripts/{Path(script).name}", *map(shlex.quote, words)])


def versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "linux": platform.release().partition("-")[0], **packages}


def kernels() -> str:
    from hf_zeropp import ops

    return ops.kernel_info().cpu


def progress_bar(console: Any) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def rank_environment(threads: int) -> dict[str, str]:
    """What ranks of the emulated cluster need: CPU, quiet, and this checkout first."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "ACCELERATE_USE_CPU": "true",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
