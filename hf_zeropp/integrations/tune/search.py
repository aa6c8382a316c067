"""The order of the trials. It depends only on what all ranks have exchanged, so the tuners of all nodes go the same way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.weights.low_rates import lowest_rate
from hf_zeropp.integrations.tune.candidates import NODE_HOPS, ON_THE_RANK, OWN, STOCK, Candidate, presets
from hf_zeropp.integrations.tune.launches import TrialError
from hf_zeropp.integrations.tune.verdict import SAME_SCRIPT, TOLERANCE, Measured, difference, refusal

MAX_RIVALS = 3
"""How many candidates are measured once more, where the spread of their steps does not say which is the fastest."""

ONE_NODE = (
    "there is one node, so nothing crosses nodes and nothing can be saved: leave ZeRO++ off (ZEROPP_ENABLED=0). If the GPUs of "
    "this machine have slow links, try the preset for that: ZEROPP_PRESET=pcie hf-zeropp tune ..."
)
REPLICAS_OF_NODES = (
    "each replica of the model lies within one node, so ZeRO++ has nothing to do, and FSDP2 averages whole gradients over nodes: "
    "shard the model over several nodes (dp_replicate_size of 1, or a smaller one), or leave ZeRO++ off (ZEROPP_ENABLED=0)"
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
        self._try_stock(STOCK)
        about = self._try_own().about
        stock = dataclasses.replace(STOCK, ranks_per_node=about["ranks_per_node"])
        # The script may be another at each start. If so, nothing that follows would help.
        if not difference(self.others[0], self.stocks[0], mean=True) <= TOLERANCE / 4:
            self._try_stock(stock)
        self._try_new(presets())
        if about["ranks_per_node"] > 1:
            self._try_on_best(NODE_HOPS)
        if about["micro_steps"] > 1:
            self._try_on_best(ON_THE_RANK)
        self._try_rivals_again()
        self._try_stock(stock)
        # All trials of stock receive the same, and the first could not tell what crosses nodes.
        received = {name: getattr(self.stocks[-1], name) for name in ("cross_node", "intra_node")}
        self.stocks = [dataclasses.replace(each, **received) for each in self.stocks]

    @property
    def _best(self) -> Measured:
        """The fastest so far, by its median. What is decided on it is only what to try next."""
        return min(self.passing, key=lambda one: one.median, default=self.others[0])

    @property
    def passing(self) -> list[Measured]:
        """The other trials that are not refused."""
        return [one for one in self.others if refusal(one, self.stocks[0]) is None]

    def _try_stock(self, stock: Candidate) -> None:
        try:
            self.stocks.append(self._trial(stock))
        except TrialError as error:
            raise TrialError(f"on stock FSDP2 {error}") from error
        first, last = self.stocks[0], self.stocks[-1]
        if not all(map(math.isfinite, first.losses)):
            step = [math.isfinite(loss) for loss in first.losses].index(False) + 1
            raise TrialError(
                f"on stock FSDP2 the loss of step {step} is {first.losses[step - 1]}: nothing can be compared"
            )
        if not difference(last, first, mean=True) <= SAME_SCRIPT:
            raise TrialError(
                f"two starts on stock FSDP2 have other losses ({first.losses[0]:.5g} and {last.losses[0]:.5g} in the first "
                "step): the script must train the same at each start, so give it a seed for model and data"
            )

    def _try_own(self) -> Measured:
        try:
            own = self._trial(OWN)
        except TrialError as error:
            raise TrialError(f"stock FSDP2 runs, but under ZeRO++ {error}") from error
        if own.config is None:
            raise TrialError("no model comes under ZeRO++: the script turns it off (zeropp=False). Leave that out")
        if own.about["nodes_of_a_replica"] == 1:
            raise TrialError(ONE_NODE if own.about["num_nodes"] == 1 else REPLICAS_OF_NODES)
        self.others.append(own)
        return own

    def _try_on_best(self, settings: dict[str, dict[str, Any]]) -> None:
        """Try the fastest candidate with each of the settings."""
        best = self._best.candidate
        self._try_new([best.with_others(name, others) for name, others in settings.items()])

    def _try_new(self, candidates: list[Candidate]) -> None:
        """Try the candidates that fit the user's other settings, were not tried yet, and train well at the learning rate."""
        about = self.others[0].about
        for candidate in candidates:
            try:
                config = candidate.over(ZeroPPConfig(**about["in_force"]))
            except ValueError:
                continue
            is_new = config.to_dict() not in [one.about["in_force"] for one in self.others]
            if is_new and about["learning_rate"] >= lowest_rate(config):
                try:
                    self.others.append(self._trial(candidate))
                except TrialError as error:
                    self.failed[candidate.name] = str(error)

    def _try_rivals_again(self) -> None:
        """Double the steps of those that may be the fastest as well, since the machine may have been busy with other things."""
        rivals = [one for one in self.passing if one.quartiles[0] <= self._best.quartiles[1]]
        for rival in sorted(rivals, key=lambda one: one.median)[:MAX_RIVALS] if len(rivals) > 1 else []:
            try:
                again = self._trial(rival.candidate)
            except TrialError:  # it ran before, so this says nothing about it
                continue
            place = self.others.index(rival)
            self.others[place] = dataclasses.replace(rival, seconds=rival.seconds + again.seconds)
