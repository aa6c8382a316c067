"""The frame of a study: command line, results on file that the same command continues, conditions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from library.sandbox import enter_sandbox
from library.variants import ModelShape

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "scripts" / "results"
Key = dict[str, Any]
"""Values by which a row is found."""
PACKAGES = ("torch", "accelerate", "transformers")
"""Packages whose versions stand on every page."""


def make_parser(description: str, default_output: str) -> argparse.ArgumentParser:
    """Make a parser of ``make_page_parser`` for studies that make a Llama of given sizes and continue rows on file."""
    parser = make_continued_parser(description, default_output)
    add_model_flags(parser)
    return parser


def make_continued_parser(description: str, default_output: str) -> argparse.ArgumentParser:
    """Make a parser of ``make_page_parser`` for studies that continue rows on file."""
    parser = make_page_parser(description, default_output)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    return parser


def make_page_parser(description: str, default_output: str) -> argparse.ArgumentParser:
    """Make a parser with the flags of studies whose page and plot lie beside a JSON file.

    Args:
        description: the study's module docstring.
        default_output: name of the JSON file in ``scripts/results``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=RESULTS / default_output, help="JSON; page and plot lie beside it"
    )
    parser.add_argument(
        "--from-file", action="store_true", help="measure nothing: write page and plot of the file --output anew"
    )
    return parser


def add_model_flags(
    parser: argparse.ArgumentParser, hidden_size: int = 512, layers: int = 6, vocab_size: int = 2048
) -> None:
    """Add the flags of a Llama's sizes, with their defaults, for ``shape_of``."""
    parser.add_argument("--hidden-size", type=int, default=hidden_size)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--vocab-size", type=int, default=vocab_size)


def parse(parser: argparse.ArgumentParser, quick: dict[str, Any], argv: list[str]) -> argparse.Namespace:
    """Parse a command line, in which ``--quick`` changes defaults.

    Args:
        parser: of ``make_parser``, or another.
        quick: defaults of the quick form. It also writes no results, unless ``--output`` is given.
        argv: the command line without the program's name.
    """
    parser.add_argument("--quick", action="store_true", help="a small form of a minute or two on a quiet machine")
    if "--quick" in argv:
        parser.set_defaults(output=None, **quick)
    return parser.parse_args(argv)


def add_cluster_flags(parser: argparse.ArgumentParser, rates: list[str], batch_size: int) -> None:
    """Add the flags of studies that measure on links of several rates, with their defaults."""
    parser.add_argument(
        "--rates", nargs="+", default=rates, help="of each link, both ways: 200mbit, unlimited, 1gbit+10ms"
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="sequences per rank and micro-step")


def shape_of(args: argparse.Namespace) -> ModelShape:
    """Return a Llama of the sizes on the command line, with usual proportions between them."""
    hidden = args.hidden_size
    return ModelShape(
        hidden, hidden * 11 // 4, args.layers, num_attention_heads=hidden // 64, vocab_size=args.vocab_size
    )


def crossing_bytes(conditions: dict[str, Any]) -> float:
    """Return M, by the nodes and the model of a study's conditions: the model in bf16 times (Y-1)/Y for Y nodes."""
    nodes = conditions["nodes"]
    return 2 * ModelShape(**conditions["model"]).num_parameters * (nodes - 1) / nodes


class Study:
    """Rows of several kinds, written to a JSON file after each addition.

    Args:
        path: the file; None keeps rows in memory only. A file that exists is continued.
        conditions: noted with the rows.
        fixed: keys of conditions that must be the same when a file is continued. Versions and kernels must be, too.
        fresh: replace a file that exists.

    Raises:
        SystemExit: the file holds rows that were measured under other conditions.
    """

    def __init__(
        self, path: Path | None, conditions: dict[str, Any], fixed: Iterable[str] = (), *, fresh: bool = False
    ) -> None:
        self.path = path
        self.conditions = conditions | {"versions": versions(), "kernels": kernels(), "cores": os.cpu_count()}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        if path and path.exists() and not fresh:
            self._continue(json.loads(path.read_text()), [*fixed, "versions", "kernels"])

    @classmethod
    def from_file(cls, path: Path, command: str) -> Study:
        """Return a study that exists, on whatever machine and with whatever versions it was measured.

        Args:
            path: the file, which is not written.
            command: that writes the page.
        """
        study = cls(None, {})
        study.path = path
        study._rows = json.loads(path.read_text())
        study.conditions = study._rows.pop("conditions") | {"command": command}
        return study

    def rows(self, kind: str, **key: Any) -> list[dict[str, Any]]:
        """Return the rows of a kind that have these values, in the order in which they were added."""
        return [row for row in self._rows.get(kind, []) if key.items() <= row.items()]

    def find(self, kind: str, **key: Any) -> dict[str, Any] | None:
        """Return the first row of a kind that has these values, or None."""
        return next(iter(self.rows(kind, **key)), None)

    def missing(self, kind: str, keys: Iterable[Key]) -> list[Key]:
        """Return the keys of which the study has no row."""
        return [key for key in keys if self.find(kind, **key) is None]

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """Add a row, and write the file."""
        self._rows.setdefault(kind, []).append(row)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The file is replaced as a whole, so that a study that is killed while it writes loses nothing.
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"conditions": self.conditions, **self._rows}, indent=1) + "\n")
        partial.replace(self.path)

    def _continue(self, before: dict[str, Any], fixed: list[str]) -> None:
        conditions = before.pop("conditions")
        now = json.loads(json.dumps(self.conditions))  # tuples become lists, as they did in the file
        if changed := [key for key in fixed if conditions.get(key) != now[key]]:
            raise SystemExit(
                f"{self.path.name} was measured under other conditions ({', '.join(changed)}). "
                "Give another --output, or --fresh to replace it."
            )
        self._rows = before


def study_of(
    args: argparse.Namespace,
    script: str,
    fixed: Iterable[str],
    measure: Callable[[argparse.Namespace, Study], None],
    **others: Any,
) -> Study:
    """Return a study on the emulated cluster with all rows that its command line asks for, after measuring those it lacks.

    Args:
        args: the command line.
        script: ``__file__`` of the study.
        fixed: conditions that must be the same when a file is continued: flags, and ``model`` for the sizes of the Llama
            where the command line has them.
        measure: adds the rows that the study lacks.
        others: values of those that are neither.
    """
    command = command_line(script)
    if args.from_file:
        return Study.from_file(args.output, command)
    enter_sandbox()
    sizes = {"model": dataclasses.asdict(shape_of(args))} if hasattr(args, "hidden_size") else {}
    known = vars(args) | sizes | others
    conditions = {"command": command} | {key: known[key] for key in fixed}
    study = Study(args.output, conditions, fixed, fresh=args.fresh)
    measure(args, study)
    return study


def require(claims: dict[str, bool]) -> None:
    """End a quick form with an error where a result does not have the expected direction.

    Args:
        claims: sentences, and whether they hold.

    Raises:
        SystemExit: one or more do not hold; the message names them.
    """
    if failed := [claim for claim, holds in claims.items() if not holds]:
        raise SystemExit(f"It does not hold that: {'; '.join(failed)}")


def command_line(script: str) -> str:
    """Return the command that started this program, for a page: paths in the clone begin at its root, others are file names.

    Args:
        script: ``__file__`` of the study.
    """
    given = (word for word in sys.argv[1:] if word != "--from-file")

    def shown(word: str) -> str:
        if os.sep not in word:
            return word
        path = Path(word).resolve()
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return " ".join([f"python scripts/benchmarks/{Path(script).name}", *(shlex.quote(shown(word)) for word in given)])


def versions() -> dict[str, str]:
    """Return the versions of Python, Linux and the packages on which results may depend."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "linux": platform.release().partition("-")[0], **packages}


def kernels() -> str:
    """Return the name of the CPU kernels that this machine runs."""
    from hf_zeropp import ops

    return ops.kernel_info().cpu


def rank_environment(threads: int, device: str = "cpu") -> dict[str, str]:
    """Return the environment variables with which ranks compute on a device, quietly, with so many threads each."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "ACCELERATE_USE_CPU": str(device == "cpu").lower(),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "PYTHONWARNINGS": "ignore",
    }
