"""How far can the predictions of ``hf-zeropp estimate`` be trusted, and where does this package pay?

    python scripts/benchmarks/validate_estimate.py

It measures nothing. Predictions of the time model stand beside what this package's own studies measured, and beside what the
ZeRO++ paper published; then the model looks ahead to clusters that nobody has measured. It takes a minute and needs one core.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable
from typing import Any

from library.ahead import Ahead, ahead_grids, plot_ahead, predict_all
from library.own_rows import OwnStudy, Row, own_studies
from library.pages import Grid, write_page
from library.paper_rows import (
    HIGH,
    LOW,
    TECHNIQUES,
    PaperResult,
    PaperRow,
    Parameters,
    fit_model,
    predict_rows,
    technique_speedups,
    tflops,
)
from library.study import RESULTS, command_line, make_page_parser, versions
from library.variants import Variant

from hf_zeropp.config import PRESETS
from hf_zeropp.estimate.comparison import EXACTNESS, recommended
from hf_zeropp.estimate.comparison import Row as ComparisonRow
from hf_zeropp.estimate.step_time import StepTime
from hf_zeropp.estimate.unit_work import DEEPSPEED

MEDIAN_LIMIT, LARGEST_LIMIT, PAPER_LIMIT = 0.10, 0.25, 0.10
NAMED = ("cluster", "half_model_cluster")
"""Studies whose errors are held to the limits. ``overlap`` stands beside them."""

TECHNIQUE_GPUS = 128
TECHNIQUES_PUBLISHED = {LOW: ("1.3 to 1.4", "2.26"), HIGH: ("1.13 to 1.16", "1.3")}
SCALING = (64, 128, 256, 384)
TITLE = "Predicted step times, and how far they can be trusted"
INTRO = """`hf-zeropp estimate` simulates an optimizer step. This page compares the simulation with measurements, and then looks
ahead. **Nothing on this page was measured by it**: columns named "measured" come from this folder's JSON files, columns named
"published" from the ZeRO++ paper and its authors, and every "predicted" figure is arithmetic.

{summary}"""
SUMMARY = """- **Our own rows**, {held} that were not fitted: median error {median:.1%}, {over} over {largest:.0%} ({named}).
- **The fastest variant** is predicted in {right} of {claims} tables; what is predicted elsewhere takes at most {cost:.1%} longer.
- **ZeRO++ as published**, from ZeRO-3's rows alone: {within} of {published} rows \
within {limit:.0%} in the paper's reading ({off}), \
{announced} of {published} in the announcement's reading."""


# ------------------------------------------------------------------------------------------------------ our own studies


def counted(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose errors are held to the limits: those that were not fitted, of the named studies."""
    return [row for row in rows if row.study in NAMED and not row.is_fitted]


def fastest_claims(rows: list[Row]) -> list[tuple[str, str, int, str, str, float]]:
    """Return for each table its study, link, micro-steps, the fastest predicted and the fastest measured of its rows.

    The last value is how much longer the predicted choice took than the fastest, as measured.
    """
    claims = []
    for key in dict.fromkeys((row.study, row.rate, row.micro_steps) for row in rows):
        table = [row for row in rows if (row.study, row.rate, row.micro_steps) == key and row.study in NAMED]
        if not table:
            continue
        predicted = min(table, key=lambda row: row.predicted)
        measured = min(table, key=lambda row: row.measured)
        claims.append((*key, predicted.variant, measured.variant, predicted.measured / measured.measured - 1))
    return claims


def error_grid(rows: list[Row]) -> Grid:
    """Make the table of errors by study and variant."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        label = f"{row.study}, {row.variant}{' (fitted)' if row.is_fitted else ''}"
        errors.setdefault(label, []).append(row.error)
    columns = ("study, variant", "rows", "median", "lowest", "highest")
    grid = Grid("our own rows: errors of predictions by variant, over all links", columns)
    for label, found in errors.items():
        middle = statistics.median(map(abs, found))
        grid.rows.append([label, str(len(found)), f"{middle:.1%}", f"{min(found):+.1%}", f"{max(found):+.1%}"])
    return grid


def row_grid(rows: list[Row], study: str) -> Grid:
    """Make the table of all rows of one study."""
    grid = Grid(f"{study}.json, every row", ("link, micro-steps, variant", "measured s", "predicted s", "error"))
    for row in (row for row in rows if row.study == study):
        name = f"{row.rate}, {row.micro_steps} micro-steps, {row.variant}{' (fitted)' if row.is_fitted else ''}"
        grid.rows.append([name, f"{row.measured:.4g}", f"{row.predicted:.4g}", f"{row.error:+.1%}"])
    return grid


def fastest_grid(rows: list[Row]) -> Grid:
    """Make the table of the fastest row of each measured table."""
    columns = ("study, link, micro-steps", "fastest predicted", "fastest measured", "the choice costs")
    grid = Grid("which variant is the fastest", columns)
    for study, rate, micro_steps, predicted, measured, cost in fastest_claims(rows):
        grid.rows.append([f"{study}, {rate}, {micro_steps}", predicted, measured, f"{cost:.1%}"])
    return grid


def preset_grid(study: OwnStudy) -> Grid:
    """Make the table of predicted seconds of every preset, measured or not, and of the one that ``--recommend`` would name."""
    grid = Grid("presets on the emulated cluster, predicted seconds", ("link, micro-steps", *PRESETS, "recommended"))
    for rate, micro_steps in itertools.product(study.rates, (1, 8)):
        seconds = {name: study.predict(Variant(name, {"preset": name}), rate, micro_steps) for name in PRESETS}
        times = [ComparisonRow(name, StepTime(seconds[name], 0, 0), 0, True, {"preset": name}) for name in EXACTNESS]
        choice = recommended((), times)
        assert choice is not None
        cells = [f"{step_s:.3g}" for step_s in seconds.values()]
        grid.rows.append([f"{rate}, {micro_steps}", *cells, choice.method])
    return grid


def fit_grid(studies: list[OwnStudy]) -> Grid:
    """Make the table of fitted parameters."""
    columns = ("study", "gloo, MB/s per rank", "kernels, GB/s per core", "share of each link's rate")
    grid = Grid("fitted rates", columns)
    for study in studies:
        shares = ", ".join(f"{rate} {share:.2f}" for rate, share in study.link_shares.items())
        grid.rows.append([study.name, f"{study.wire_rate / 1e6:.0f}", f"{study.kernel_rate / 1e9:.1f}", shares])
    return grid


# ------------------------------------------------------------------------------------------------------------ the paper


def paper_grid(results: list[PaperResult]) -> Grid:
    """Make the table of the paper's rows in both readings."""
    columns = (
        "model, network, tokens", "ZeRO-3 published", "fitted", "ZeRO++ published", "predicted", "error", "announced", "error",
    )  # fmt: skip
    grid = Grid("ZeRO++ as published, TFLOPs per GPU on 384 V100", columns)
    for result in results:
        row, (low, high) = result.row, result.blog
        cells = [
            f"{row.model}, {row.gbit} Gbit/s, {row.tokens}", f"{row.zero3:g}", f"{result.zero3:.1f}", f"{row.zeropp:g}",
            f"{result.zeropp:.1f}", f"{result.error:+.1%}", f"{low:.0f} to {high:.0f}", f"{result.blog_error:+.1%}",
        ]  # fmt: skip
        grid.rows.append(cells)
    return grid


def parameters_grid(parameters: dict[str, Parameters]) -> Grid:
    """Make the table of what was fitted to ZeRO-3's rows."""
    grid = Grid("fitted to ZeRO-3's rows", ("model", "TFLOP/s", "share of the network", "within a node, GB/s"))
    for model, values in parameters.items():
        grid.rows.append(
            [model, f"{values['flops'] / 1e12:.0f}", f"{values['network share']:.2f}", f"{values['within'] / 1e9:.0f}"]
        )
    return grid


def further_grid(values: Parameters, results: list[PaperResult]) -> Grid:
    """Make the table of the paper's other figures."""
    grid = Grid("other published figures, x faster than ZeRO-3", ("figure", "published", "predicted"))
    first = next(one for one in results if (one.row.model, one.row.gbit, one.row.tokens) == ("18B", LOW, 1024))
    # The abstract says up to 2.16 x, a table 2.4 x.
    speedup = f"{first.zeropp / first.row.zero3:.2f}"
    grid.rows.append([f"18B, {LOW} Gbit/s, 1024 tokens", "2.16 or 2.4", speedup])
    for gbit, (alone, together) in TECHNIQUES_PUBLISHED.items():
        found = technique_speedups(gbit, 2048, TECHNIQUE_GPUS, values)
        each = ", ".join(f"{name} {found[name]:.2f}" for name in TECHNIQUES)
        grid.rows.append([f"18B on {TECHNIQUE_GPUS} GPUs, {gbit} Gbit/s: each alone", alone, each])
        grid.rows.append([f"18B on {TECHNIQUE_GPUS} GPUs, {gbit} Gbit/s: all three", together, f"{found['all']:.2f}"])
    return grid


def scaling_grid(values: Parameters) -> Grid:
    """Make the table of weak scaling, of which the paper shows a curve."""
    grid = Grid("18B, 2048 tokens, predicted TFLOPs per GPU over the number of GPUs", ("GPUs", "ZeRO-3", "ZeRO++"))
    for gbit in (LOW, HIGH):
        row = PaperRow("18B", gbit, 2048, math.nan, math.nan)
        for world in SCALING:
            stock, ours = (tflops(row, method, values, world) for method in ("ZeRO-3", DEEPSPEED))
            grid.rows.append([f"{world}, {gbit} Gbit/s", f"{stock:.1f}", f"{ours:.1f}"])
    return grid


# ------------------------------------------------------------------------------------------------------------- the page


def summary(rows: list[Row], results: list[PaperResult], claims: list[Any]) -> str:
    """Return the sentences at the head of the page."""
    held = counted(rows)
    over = [
        f"{row.study}, {row.rate}, {row.micro_steps} micro-steps, {row.variant}: {row.error:+.0%}"
        for row in held
        if abs(row.error) > LARGEST_LIMIT
    ]
    off = [
        f"{one.row.model} at {one.row.gbit} Gbit/s, {one.row.tokens} tokens: {one.error:+.0%}"
        for one in results
        if abs(one.error) > PAPER_LIMIT
    ]
    return SUMMARY.format(
        held=len(held),
        median=statistics.median(abs(row.error) for row in held),
        over=len(over),
        largest=LARGEST_LIMIT,
        named="; ".join(over) or "none",
        right=sum(predicted == measured for *_, predicted, measured, _ in claims),
        claims=len(claims),
        cost=max(cost for *_, cost in claims),
        within=len(results) - len(off),
        published=len(results),
        limit=PAPER_LIMIT,
        off="; ".join(off) or "none is further off",
        announced=sum(abs(one.blog_error) <= PAPER_LIMIT for one in results),
    )


def content_of(rows: list[Row], results: list[PaperResult], claims: list[Any], ahead: list[Ahead]) -> dict[str, Any]:
    """Return everything on the page, for JSON."""
    return {
        "own": [{**dataclasses.asdict(row), "fitted": row.is_fitted, "error": row.error} for row in rows],
        "fastest": [
            dict(zip(("study", "rate", "micro_steps", "predicted", "measured", "cost"), one, strict=True))
            for one in claims
        ],
        "paper": [
            {**dataclasses.asdict(one), "error": one.error, "fit_error": one.fit_error, "blog_error": one.blog_error}
            for one in results
        ],
        "ahead": [{**dataclasses.asdict(row), "gain": row.gain} for row in ahead],
    }


def main() -> None:
    """Predict everything, and write the JSON file, the plot and the page. ``--from-file`` draws the plot alone."""
    args = make_page_parser(__doc__, "estimate.json").parse_args()
    plot = args.output.with_suffix(".png")
    if args.from_file:
        rows_ahead = json.loads(args.output.read_text())["ahead"]
        plot_ahead([Ahead(**{key: value for key, value in row.items() if key != "gain"}) for row in rows_ahead], plot)
        return
    studies = own_studies(RESULTS)
    rows = [row for study in studies for row in study.rows()]
    parameters = {model: fit_model(model) for model in ("18B", "138B")}
    results = [result for model, values in parameters.items() for result in predict_rows(model, values)]
    claims, ahead = fastest_claims(rows), predict_all()
    conditions = {"command": command_line(__file__), "versions": versions()}
    content = {"conditions": conditions, **content_of(rows, results, claims, ahead)}
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    plot_ahead(ahead, plot)
    every_row = [row_grid(rows, study.name) for study in studies]
    grids = [error_grid(rows), fastest_grid(rows), preset_grid(studies[0]), fit_grid(studies), *every_row]
    grids += [paper_grid(results), parameters_grid(parameters), further_grid(parameters["18B"], results)]
    grids += [scaling_grid(parameters["18B"]), *ahead_grids(ahead)]
    head = summary(rows, results, claims)
    write_page(args.output.with_suffix(".md"), TITLE, conditions, INTRO.format(summary=head), grids)
    print(head)


if __name__ == "__main__":
    main()
