"""Which candidates ``hf-zeropp tune`` tries, which it recommends, and how it says so, on trials that take no time."""

from __future__ import annotations

import io
from typing import Any

import pytest
import yaml
from rich.console import Console

from hf_zeropp.config import PRESETS, ZeroPPConfig
from hf_zeropp.integrations.tune.candidates import Candidate
from hf_zeropp.integrations.tune.launches import TrialError
from hf_zeropp.integrations.tune.report import sentence, settings_of, show, to_json
from hf_zeropp.integrations.tune.search import Search
from hf_zeropp.integrations.tune.verdict import Measured, best_of


def moved(cross_node: float, intra_node: float) -> dict[str, float]:
    return {"cross_node": cross_node, "intra_node": intra_node}


def measured(candidate: Candidate, seconds: float, losses: list[float], own: ZeroPPConfig, **about: Any) -> Measured:
    spread = 1 + about.pop("spread", 0.05)
    is_stock = candidate.settings is None
    config = None if is_stock else ZeroPPConfig(**{**own.to_dict(), **candidate.settings})
    rank = {
        "seconds": [seconds, seconds, seconds * spread],
        "losses": losses,
        "memory": 10**9,
        "bytes": moved(2 * 10**6, 10**6) if candidate.ranks_per_node or not is_stock else None,
        "config": config and config.to_dict(),
        "in_force": config and config.resolve_node_bits(on_cpu=True).to_dict(),
        **{"num_nodes": 2, "nodes_of_a_replica": 2, "ranks_per_node": 2, "micro_steps": 2, "learning_rate": 1e-4},
        "in_python": False,
        **({} if is_stock else about),
    }
    return Measured.of(candidate, [rank, rank])


def search(times: dict[str, float], own: ZeroPPConfig | None = None, **about: Any) -> tuple[Search, list[str]]:
    """Search where each candidate takes the time of the first name that its own begins with."""
    tried: list[str] = []

    def trial(candidate: Candidate) -> Measured:
        tried.append(candidate.name)
        seconds = next(times[name] for name in times if candidate.name.startswith(name))
        losses = about.get("losses", {}).get(candidate.name, [5.0, 4.9])
        others = {key: value for key, value in about.items() if key != "losses"}
        return measured(candidate, seconds, losses, own or ZeroPPConfig(), **others)

    found = Search(trial)
    found.run()
    return found, tried


def test_candidates_that_may_be_the_fastest_are_tried_again() -> None:
    """The machine was quicker during the first trial of exact than it is otherwise."""
    exact = iter([0.5, 0.9])

    def trial(candidate: Candidate) -> Measured:
        seconds = {"stock FSDP2": 2.0, "half_model": 0.6}.get(candidate.name, 1.5)
        if candidate.name == "exact":
            seconds = next(exact)
        return measured(candidate, seconds, [5.0, 4.9], ZeroPPConfig(), spread=0.5, ranks_per_node=1, micro_steps=1)

    found = Search(trial)
    found.run()
    best = best_of(found.others, found.stocks)
    assert next(exact, None) is None and best is not None and best.candidate.name == "half_model"


def test_the_fastest_is_recommended_and_tried_with_other_node_hops() -> None:
    found, tried = search({"stock": 1.0, "half_model, native": 0.5, "half_model": 0.6, "": 0.8})
    assert tried[:5] == ["stock FSDP2", "your settings", "exact", "half_model", "min_traffic"]
    assert "half_model, native node hops" in tried and tried[-1] == "stock FSDP2"
    best = best_of(found.others, found.stocks)
    assert best is not None and best.candidate.name.startswith("half_model, native node hops")
    settings = settings_of(best.config)
    assert settings.items() >= {"preset": "half_model", "qwz_intra_bits": None, "qgz_intra_bits": None}.items()
    assert ZeroPPConfig.from_dict(settings) == best.config
    assert "2.00 x" in sentence(found, best)
    # The first trial of stock cannot know how many ranks a node has, by which bytes cross nodes or do not.
    assert {stock.cross_node for stock in found.stocks} == {2 * 10**6}


def test_nothing_slower_or_within_the_spread_is_recommended() -> None:
    for times in ({"": 1.0}, {"stock": 1.0, "": 1.3}, {"stock": 1.0, "": 0.97}):
        found, _ = search(times, spread=0.2)
        best = best_of(found.others, found.stocks)
        assert best is None and sentence(found, best).startswith("Leave it off")


def test_another_loss_is_refused() -> None:
    losses = {"exact": [5.0, 5.2], "half_model": [5.0, float("nan")]}
    found, _ = search({"exact": 0.1, "half_model": 0.1, "stock": 1.0, "": 0.8}, losses=losses)
    assert best_of(found.others, found.stocks).candidate.name.startswith(("your settings", "min_traffic"))


def test_two_bits_are_not_tried_at_low_rates() -> None:
    times = {"": 1.0}
    assert "min_traffic" not in search(times, learning_rate=9e-6)[1]
    assert "min_traffic" in search(times, learning_rate=1e-5)[1]


def test_two_bits_of_the_user_are_refused_at_low_rates() -> None:
    own, times = ZeroPPConfig(**PRESETS["min_traffic"]), {"stock": 1.0, "half_model": 0.5, "your": 0.2, "": 0.8}
    found, tried = search(times, own, learning_rate=1e-6)
    assert not any("min_traffic" in name or "your settings," in name for name in tried)
    assert to_json(found, has_file=False)["recommended"].startswith("half_model")
    why = "your settings: refused, since changes of weights in 2 bits lose too much at a learning rate of 1e-06"
    assert why in " ".join(shown(found).split())
    assert search(times, own, learning_rate=1e-5)[0].passing[0].candidate.name == "your settings"


def test_accumulation_on_the_rank_is_tried_where_there_are_micro_steps() -> None:
    times = {"stock": 1.0, "exact, accumulation": 0.3, "exact": 0.5, "": 0.8}
    found, tried = search(times, ranks_per_node=1)
    assert "exact, accumulation on the rank" in tried
    assert to_json(found, has_file=False)["settings"] == {"preset": "exact", "qgz_accumulate": "rank"}
    assert not any("accumulation" in name for name in search(times, micro_steps=1)[1])


# ------------------------------------------------------------------------------------------------------------ the report


def shown(found: Search, *, has_file: bool = False) -> str:
    console = Console(width=80, file=io.StringIO())
    show(found, console, has_file=has_file)
    return console.file.getvalue()


def test_the_report_at_80_columns() -> None:
    times = {"stock": 1.0, "half_model, quantized": 123.456, "half_model": 0.2, "": 0.8}
    found, tried = search(times, losses={"exact": [5.0, 5.2]}, bytes=moved(2 * 10**10, 3 * 10**8))
    found.failed["balanced, native node hops"] = "the script failed: [errno 2] " + 9 * "words "
    lines = shown(found).splitlines()
    for name in ["your settings" if name == "your settings" else name for name in tried]:
        assert any(line.partition(":")[0] == name for line in lines)
    assert max(map(len, lines)) <= 80 and not any("\u2026" in line for line in lines)
    header, figures = lines[1], lines[3]
    assert header.split() == "s middle half x stock across within peak off by".split()
    assert figures.split() == ["1.000", "1.000-1.025", "1.00", "2.00", "1.00", "1000"]
    assert figures.index("2.00") + 4 == header.index("across") + len("across")
    assert any(line.split()[3:5] == ["20000.00", "300.00"] for line in lines)
    assert "exact: refused, since the loss differs" in lines
    assert any(line.startswith("balanced, native node hops: failed: the script failed: [errno 2]") for line in lines)


def test_bytes_are_a_reason_only_where_they_are_fewer() -> None:
    times = {"stock": 1.0, "": 0.8}
    for ours, words in ((10, "since 0.00 MB enter"), (10**7, "while 10.00 MB enter a node per step in place of 2.00.")):
        found, _ = search(times, bytes=moved(ours, 0))
        assert words in sentence(found, best_of(found.others, found.stocks))


@pytest.mark.parametrize("has_file", [True, False])
def test_what_to_paste(has_file: bool) -> None:
    found, _ = search({"stock": 1.0, "exact, native": 0.4, "exact": 0.5, "": 0.8})
    lines = [line for line in shown(found, has_file=has_file).splitlines() if line]
    settings = {"preset": "exact", "qwz_intra_bits": None, "qgz_intra_bits": None}
    if has_file:
        start = lines.index("zeropp_config:")
        assert yaml.safe_load("\n".join(lines[start:])) == {"zeropp_config": settings}
        return
    values = dict(line.removeprefix("export ").split("=") for line in lines if line.startswith("export "))
    best = best_of(found.others, found.stocks)
    assert best is not None and ZeroPPConfig.from_env(values) == best.config


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"losses": {"stock FSDP2": [5.0, float("nan")]}}, "on stock FSDP2 the loss of step 2 is nan"),
        ({"num_nodes": 1, "nodes_of_a_replica": 1}, "there is one node.*leave ZeRO\\+\\+ off.*pcie"),
        ({"nodes_of_a_replica": 1}, "each replica of the model lies within one node.*dp_replicate_size"),
    ],
)
def test_searches_that_end_early(about: dict[str, Any], words: str) -> None:
    with pytest.raises(TrialError, match=words):
        search({"": 1.0}, **about)


def test_a_script_that_is_another_at_each_start() -> None:
    """The loss of the first candidate is suspicious. Stock is tried again at once, and is another too."""
    losses = iter([[5.0, 4.9], [5.3, 4.7], [4.8, 5.2]])
    with pytest.raises(TrialError, match="two starts on stock FSDP2 have other losses .*seed"):
        Search(lambda candidate: measured(candidate, 1.0, next(losses), ZeroPPConfig())).run()
