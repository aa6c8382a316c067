"""A vLLM server that follows an ``UpdateSender``: the weight-transfer backend ``hf_zeropp``.

    vllm serve MODEL --weight-transfer-config '{"backend": "hf_zeropp"}'     # with VLLM_SERVER_DEV_MODE=1

The server is told once where versions are, and then after each version to take it, by vLLM's own requests:

    POST /init_weight_transfer_engine    {"init_info": {"place": "https://trainer/updates"}}
    POST /pause, /start_weight_update
    POST /update_weights                 {"update_info": {"version": 7}}
    POST /finish_weight_update, /resume

A version is read and checked as a whole before the first weight of it is loaded, and no request is answered while weights are
loaded. So answers come from the version before or from this one, and a damaged version leaves the model as it was. With tensor
parallelism each process reads for itself: where only some could read a version, send the request again before the server resumes.

Weights are loaded in place, and nothing is computed anew from them. Models for which vLLM derives further weights at loading
(multi-head latent attention, quantized ones) are refused.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from hf_zeropp.rollouts.versions import UpdateReceiver


@dataclasses.dataclass
class Place(WeightTransferInitInfo):
    """The folder of an ``UpdateSender``, or its URL."""

    place: str


@dataclasses.dataclass
class Wanted(WeightTransferUpdateInfo):
    """The version to take: one and the same in all processes of a model."""

    version: int


class UpdateEngine(WeightTransferEngine[Place, Wanted]):
    """Loads the weights that changed into this process's part of the model. vLLM makes it, with its own arguments."""

    init_info_cls = Place
    update_info_cls = Wanted
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Place) -> None:
        """Read versions from a place from now on.

        Raises:
            ValueError: vLLM derives further weights from the model's own, which would stay as they are.
        """
        derives = {
            "multi-head latent attention": getattr(self.model_config, "use_mla", False),
            f"quantization={self.model_config.quantization!r}": self.model_config.quantization is not None,
        }
        if reasons := [reason for reason, applies in derives.items() if applies]:
            raise ValueError(
                f"the backend hf_zeropp loads weights in place, but with {' and '.join(reasons)} vLLM computes with others that "
                "it derives from them at loading. Serve the model unquantized and of another architecture, or reload it whole."
            )
        self._receiver = UpdateReceiver(init_info.place)
        self._loaded: dict[str, Tensor] = {}

    def start_weight_update(self) -> None:
        """Do nothing: weights are loaded in place."""

    def receive_weights(self, update_info: Wanted) -> None:
        """Bring the model to a version.

        Raises:
            DamagedUpdateError: it could not be read whole. The model is as it was.
            ValueError: the model is at a newer version.
        """
        receiver = self._receiver
        receiver.update(update_info.version)
        if receiver.version != update_info.version:
            raise ValueError(
                f"expected a version after {receiver.version}, which is loaded, got {update_info.version}."
            )
        changed = [(name, weight) for name, weight in receiver.weights.items() if weight is not self._loaded.get(name)]
        self._loaded = {}  # should loading fail, the next request loads everything
        self.model.load_weights(changed)
        self._loaded = receiver.weights

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing: no connection stays open."""
