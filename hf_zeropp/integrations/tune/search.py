"""The order of the trials. It depends only on what all ranks have exchanged, so the tuners of all nodes go the same way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from hf_zeropp.integrations.tune.candidates import (
    OWN,
    STOCK,
    Candidate,
    accumulation_on_the_rank,
    name_of,
    other_node_hops,
    presets,
)
from hf_zeropp.integrations.tune.launches import TrialError
from hf_zeropp.integrations.tune.verdict import SAME_SCRIPT, TOLERANCE, Measured, difference, refusal

MAX_RIVALS = 3
"""How many candidates are measured once more, where the spread of their steps does not say which is the fastest."""

ONE_NODE = (
    "there is one node, so nothing crosses nodes and nothing can be saved: leave ZeRO++ off (ZEROPP_ENABLED=0). If the GPUs of "
    "this machine have slow links, try the preset for that: ZEROPP_PRESET=pcie hf-zeropp tune ..."
)


class Search:
    """Tries candidates, and keeps what came of them.

    Args:
        trial: runs a candidate. It raises a TrialError where there is nothing to measure.

    Attributes:
        stocks: the trials of stock.
        others: the other trials that were measured.
        failed: the names of those that were not, and why.
    """

    def __init__(self, trial: Callable[[Candidate], Measured]) -> None:
        self._trial = trial
        self.stocks: list[Measured] = []
        self.others: list[Measured] = []
        self.failed: dict[str, str] = {}

    def run(self) -> None:
        """Try all that is worth it.

        Raises:
            TrialError: nothing can be compared. The message says what to do.
        """
        self._try_stock()
        own = self._try_own()
        config, about = own.config, own.about
        assert config is not None

        def try_those_worth_it(candidates: Iterable[Candidate]) -> None:
            self._try_all(one for one in candidates if one.is_worth_a_trial(config, about["learning_rate"]))

        try_those_worth_it(presets())
        if about["ranks_per_node"] > 1:
            try_those_worth_it(other_node_hops(self._best.candidate, config, on_accelerator=about["on_accelerator"]))
        try_those_worth_it(accumulation_on_the_rank(self._best.candidate, about["micro_steps"]))
        self._try_rivals_again()
        self._try_stock()
        self.stocks = [stock.with_bytes_of_fsdp2(about["ranks_per_node"]) for stock in self.stocks]

    @property
    def _best(self) -> Measured:
        """The fastest so far, by its median. What is decided on it is only what to try next."""
        return min(self.passing, key=lambda one: one.median, default=self.others[0])

    @property
    def passing(self) -> list[Measured]:
        """The other trials that are not refused."""
        return [one for one in self.others if refusal(one, self.stocks[0]) is None]

    def _try_stock(self) -> None:
        try:
            self.stocks.append(self._trial(STOCK))
        except TrialError as error:
            raise TrialError(f"on stock FSDP2 {error}") from error
        first, last = self.stocks[0], self.stocks[-1]
        if not all(map(math.isfinite, first.figures)):
            step = [math.isfinite(figure) for figure in first.figures].index(False) + 1
            raise TrialError(
                f"on stock FSDP2 the loss of step {step} is {first.figures[step - 1]}: nothing can be compared"
            )
        if not difference(last, first, mean=True) <= SAME_SCRIPT:
            raise TrialError(
                f"two starts on stock FSDP2 have other losses ({first.figures[0]:.5g} and {last.figures[0]:.5g} in the first "
                "step): the script must train the same at each start, so give it a seed for model and data"
            )

    def _try_own(self) -> Measured:
        try:
            own = self._trial(OWN)
        except TrialError as error:
            raise TrialError(f"stock FSDP2 runs, but under ZeRO++ {error}") from error
        if own.config is None:
            raise TrialError("no model comes under ZeRO++: the script turns it off (zeropp=False). Leave that out")
        if own.about["num_nodes"] == 1:
            raise TrialError(ONE_NODE)
        preset = name_of(own.config)
        self._add(dataclasses.replace(own, candidate=Candidate(f"{preset} (yours)" if preset else OWN.name, {})))
        return own

    def _try_all(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            try:
                self._add(self._trial(candidate))
            except TrialError as error:
                self.failed[candidate.name] = str(error)

    def _try_rivals_again(self) -> None:
        """Double the steps of those that may be the fastest as well, since the machine may have been busy with other things."""
        best = self._best
        rivals = [one for one in self.passing if one.quartiles[0] <= best.quartiles[1]]
        for rival in sorted(rivals, key=lambda one: one.median)[:MAX_RIVALS] if len(rivals) > 1 else []:
            try:
                again = self._trial(rival.candidate)
            except TrialError:  # it ran before, so this says nothing about it
                continue
            place = self.others.index(rival)
            self.others[place] = dataclasses.replace(rival, seconds=rival.seconds + again.seconds)

    def _add(self, measured: Measured) -> None:
        self.others.append(measured)
        # The script may be another at each start. If so, nothing that follows would help.
        if len(self.stocks) == 1 and not difference(measured, self.stocks[0], mean=True) <= TOLERANCE / 4:
            self._try_stock()
