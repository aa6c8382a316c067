"""The figures that the Trainer callback logs: bytes of the steps since the last log."""

from __future__ import annotations

from collections.abc import Sequence

from hf_zeropp.handle import ZeroPPHandle

CROSS_NODE = "zeropp/cross_node_gb_per_step"
INTRA_NODE = "zeropp/intra_node_gb_per_step"
"""Names in the Trainer's logs: the gigabytes that a node received from other nodes in a step, and those that its ranks received
from each other. All models count together."""
ROLLOUT_CROSS_NODE = "zeropp/rollout_cross_node_gb_per_step"
ROLLOUT_INTRA_NODE = "zeropp/rollout_intra_node_gb_per_step"
"""The part of these gigabytes that was received while the trained model generated, or fed an inference engine. Where copies are
kept (hpZ), the next forward pass does not send them again."""
SAVING = "zeropp/saving_vs_zero3"

_STEPS, _ZERO3 = "optimizer steps", "what a node would have received from other nodes under ZeRO-3"


class StepLog:
    """Follow the traffic of a Trainer's models from step to step.

    Args:
        handles: the trained model's first, then those of models that are only evaluated (reference models). The
            figure for ZeRO-3, and so the saving, counts the trained model's steps alone.

    Attributes:
        trained: the handle of the model that is trained.
    """

    def __init__(self, handles: Sequence[ZeroPPHandle]) -> None:
        self._handles = list(handles)
        self.trained = self._handles[0]
        # Counters are never reset here, because the user may read the same handle's traffic.
        self._logged = self._totals()

    def since_last_log(self) -> dict[str, float]:
        """Return figures of the steps since the last call, in GB per node and step; empty when there were none.

        The bytes of evaluation and generation between the steps are included.
        """
        totals = self._totals()
        grown = {name: total - self._logged[name] for name, total in totals.items()}
        # An interval without a step stays open: its bytes (an evaluation's) are logged with the steps that follow.
        if not grown[_STEPS]:
            return {}
        self._logged = totals
        names = [CROSS_NODE, INTRA_NODE]
        if grown[ROLLOUT_CROSS_NODE] or grown[ROLLOUT_INTRA_NODE]:
            names += [ROLLOUT_CROSS_NODE, ROLLOUT_INTRA_NODE]
        entries = {name: grown[name] / grown[_STEPS] / 1e9 for name in names}
        # A ratio would divide by zero if no byte crossed nodes.
        if grown[CROSS_NODE]:
            entries[SAVING] = grown[_ZERO3] / grown[CROSS_NODE]
        return entries

    def print_summary(self, micro_steps: int) -> None:
        """Print the trained model's traffic, beside the prediction where one holds for all of training.

        The counts include evaluation and generation; the prediction does not.

        Args:
            micro_steps: micro-steps per step.
        """
        config = self.trained.config
        # When ``qgz_until`` ends quantization on the way, steps before and after it send different bytes, and no
        # prediction for one step fits the average.
        has_one_phase = config.qgz_until in (0.0, 1.0) or not config.quantizes_gradients
        self.trained.traffic.print(self.trained.predict(micro_steps) if has_one_phase else None)

    def _totals(self) -> dict[str, float]:
        """Return steps and bytes since the start of training. They only grow, so a difference tells what happened in between."""
        trained = self.trained.traffic
        return {
            _STEPS: trained.steps,
            CROSS_NODE: sum(handle.traffic.cross_node_bytes for handle in self._handles),
            INTRA_NODE: sum(handle.traffic.intra_node_bytes for handle in self._handles),
            ROLLOUT_CROSS_NODE: trained.ranks_per_node * trained.rollouts.cross_node,
            ROLLOUT_INTRA_NODE: trained.ranks_per_node * trained.rollouts.intra_node,
            # The function divides by ``max(steps, 1)``. The same factor gives the total, also before the first step.
            _ZERO3: trained.zero3_bytes_per_step() * max(trained.steps, 1),
        }
