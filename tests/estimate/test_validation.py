"""The claims of scripts/results/estimate.md: recomputed from the rows that were measured, and equal to what the page says."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts/results"
sys.path.insert(0, str(ROOT / "scripts/benchmarks"))

import validate_estimate as page  # noqa: E402
from library.own_rows import Row, own_studies  # noqa: E402
from library.paper_rows import PAPER_ROWS, fit_model, predict_rows  # noqa: E402

pytestmark = pytest.mark.one_rank

TIES = {("cluster", "unlimited", 1), ("cluster", "unlimited", 8), ("cluster", "10gbit", 1)}
"""Tables whose two fastest variants differ by less than 3 %, where the steps of one variant differ by 10 to 20 %."""


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for study in own_studies(RESULTS) for row in study.rows()]


def test_own_rows_are_within_the_limits(rows: list[Row]) -> None:
    held = page.counted(rows)
    assert len(held) == 117 and not {row.variant for row in held} & {"compute", "compute, kept", "stock"}
    assert ("unlimited", "balanced") not in {(row.rate, row.variant) for row in held}
    assert statistics.median(abs(row.error) for row in held) <= page.MEDIAN_LIMIT
    assert not [row for row in held if abs(row.error) > page.LARGEST_LIMIT]


def test_measured_seconds_are_those_of_the_studies(rows: list[Row]) -> None:
    """A prediction cannot be compared with itself: the seconds come from the JSON files of the studies."""
    for name in ("cluster", "half_model_cluster"):
        cells = json.loads((RESULTS / f"{name}.json").read_text())["cells"]
        measured = {(cell["rate"], cell["accumulation"], cell["variant"]): cell["step_s"] for cell in cells}
        own = {(row.rate, row.micro_steps, row.variant): row.measured for row in rows if row.study == name}
        assert own == {cell: seconds for cell, seconds in measured.items() if not cell[2].startswith("compute")}


def test_the_fastest_variant_is_predicted_at_every_link(rows: list[Row]) -> None:
    claims = page.fastest_claims(rows)
    links = {rate for study, rate, *_ in claims if study == "cluster"}
    assert links == {"unlimited", "10gbit", "1gbit", "200mbit", "50mbit"}
    for study, rate, micro_steps, predicted, measured, cost in claims:
        is_tie = (study, rate, micro_steps) in TIES and cost < 0.03
        assert predicted == measured or is_tie, (study, rate, micro_steps)


def test_rows_of_18b_as_published() -> None:
    """All four rows of 18 B within the limit, from ZeRO-3's rows alone. 138 B is on the page, with what is off."""
    for result in predict_rows("18B", fit_model("18B")):
        assert abs(result.fit_error) <= 0.05 and abs(result.error) <= page.PAPER_LIMIT


def test_the_page_is_what_the_command_writes(rows: list[Row]) -> None:
    """The JSON file beside the page was made by this code from these rows."""
    content = json.loads((RESULTS / "estimate.json").read_text())
    written = {
        (row["study"], row["rate"], row["micro_steps"], row["variant"]): row["predicted"] for row in content["own"]
    }
    for row in rows:
        assert written[row.study, row.rate, row.micro_steps, row.variant] == pytest.approx(row.predicted, rel=1e-3)
    assert len(content["paper"]) == len(PAPER_ROWS)
    for one in content["paper"]:
        blog_holds = abs(one["blog_error"]) <= page.PAPER_LIMIT
        assert abs(one["error"]) <= page.PAPER_LIMIT or blog_holds, one["row"]  # one of the two readings
    text = (RESULTS / "estimate.md").read_text()
    assert "Nothing on this page was measured by it" in text
    assert all(f"{row.measured:.4g} | {row.predicted:.4g}" in text for row in rows)
