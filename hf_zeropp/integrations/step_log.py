"""The figures that the Trainer callback logs: bytes of the steps since the last log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hf_zeropp.handle import ZeroPPHandle

CROSS_NODE = "zeropp/cross_node_gb_per_step"
INTRA_NODE = "zeropp/intra_node_gb_per_step"
ROLLOUT_CROSS_NODE = "zeropp/rollout_cross_node_gb_per_step"
ROLLOUT_INTRA_NODE = "zeropp/rollout_intra_node_gb_per_step"
OTHERS_CROSS_NODE = "zeropp/others_cross_node_gb_per_step"
SAVING = "zeropp/saving_vs_zero3"


@dataclasses.dataclass(frozen=True)
class Totals:
    """Counters since the start of training. They only grow, so a difference of two tells what happened in between.

    Attributes:
        steps: optimizer steps.
        cross_node_bytes: bytes that a node received from other nodes, all models together.
        intra_node_bytes: bytes that its ranks received from each other.
        rollout_cross_node_bytes: those of the trained model that came while it generated, or fed an inference engine. Where
            copies are kept (hpZ), the next forward pass does not send them again.
        rollout_intra_node_bytes: those of its intra-node bytes that came then.
        others_cross_node_bytes: bytes that a node received from other nodes in collectives of the model and of the script, by the
            counts of two early steps. They are not in ``cross_node_bytes``.
        zero3_bytes: bytes that a node would have received from other nodes under ZeRO-3 in these steps.
    """

    steps: int = 0
    cross_node_bytes: int = 0
    intra_node_bytes: int = 0
    rollout_cross_node_bytes: int = 0
    rollout_intra_node_bytes: int = 0
    others_cross_node_bytes: int = 0
    zero3_bytes: float = 0.0

    def __sub__(self, earlier: Totals) -> Totals:
        return Totals(
            *(mine - its for mine, its in zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True))
        )

    def log_entries(self) -> dict[str, float]:
        """Return the figures per step, in GB per node; none without a step.

        The bytes of evaluation and generation between the steps are included.
        """
        if not self.steps:
            return {}
        entries = {
            CROSS_NODE: self.cross_node_bytes / self.steps / 1e9,
            INTRA_NODE: self.intra_node_bytes / self.steps / 1e9,
        }
        if self.rollout_cross_node_bytes or self.rollout_intra_node_bytes:
            entries[ROLLOUT_CROSS_NODE] = self.rollout_cross_node_bytes / self.steps / 1e9
            entries[ROLLOUT_INTRA_NODE] = self.rollout_intra_node_bytes / self.steps / 1e9
        if self.others_cross_node_bytes:
            entries[OTHERS_CROSS_NODE] = self.others_cross_node_bytes / self.steps / 1e9
        # A ratio would divide by zero if no byte crossed nodes.
        if self.cross_node_bytes:
            entries[SAVING] = self.zero3_bytes / self.cross_node_bytes
        return entries


class StepLog:
    """Follow the traffic of a Trainer's models from step to step.

    Args:
        handles: the trained model's first, then those of models that are only evaluated (reference models). The
            figure for ZeRO-3, and so the saving, counts the trained model's steps alone.
    """

    def __init__(self, handles: Sequence[ZeroPPHandle]) -> None:
        self.handles = list(handles)
        # Counters are never reset here, because the user may read the same handle's traffic.
        self._logged = self.totals()

    @property
    def trained(self) -> ZeroPPHandle:
        """The handle of the model that is trained."""
        return self.handles[0]

    def since_last_log(self) -> dict[str, float]:
        """Return log entries for the steps since the last call; empty when there were none."""
        now = self.totals()
        entries = (now - self._logged).log_entries()
        # An interval without a step stays open: its bytes (an evaluation's) are logged with the steps that follow.
        if entries:
            self._logged = now
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

    def totals(self) -> Totals:
        """Return the counters as they stand."""
        trained = self.trained.traffic
        return Totals(
            steps=trained.steps,
            cross_node_bytes=sum(handle.traffic.cross_node_bytes for handle in self.handles),
            intra_node_bytes=sum(handle.traffic.intra_node_bytes for handle in self.handles),
            rollout_cross_node_bytes=trained.ranks_per_node * trained.rollouts.cross_node,
            rollout_intra_node_bytes=trained.ranks_per_node * trained.rollouts.intra_node,
            others_cross_node_bytes=trained.ranks_per_node * sum(count.cross_node for count in trained.others.values()),
            # The function divides by ``max(steps, 1)``. The same factor gives the total, also before the first step.
            zero3_bytes=trained.zero3_bytes_per_step() * max(trained.steps, 1),
        )
