"""The base of an export: a checkpoint folder, checked before it is used, and read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_zeropp.files import read_json
from hf_zeropp.frozen.modules import CODES, SCALES
from hf_zeropp.integrations.lora.stored_tensors import (
    METHOD,
    WEIGHT_DTYPES,
    check_packed,
    check_version,
    tensors_in_folder,
)
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.frozen_format import FrozenFormat


class BaseCheckpoint:
    """A checkpoint folder. Iterating over it reads one tensor after the other, under the names of the unpacked model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._format = _packed_format(path)
        self._stored = tensors_in_folder(path)
        self.skeleton = _skeleton(path, len(self._stored))
        self._params = dict(self.skeleton.named_parameters(remove_duplicate=False))
        self._packed = {
            name.removesuffix(CODES)
            for name in self._stored
            if name.endswith(CODES) and name.removesuffix(CODES) + SCALES in self._stored
        }
        self._dense = self._stored.keys() - {name + suffix for name in self._packed for suffix in (CODES, SCALES)}
        self._check()

    def __len__(self) -> int:
        return len(self._packed) + len(self._dense)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stored.items():
            if name in self._dense:
                yield name, tensor.read(name)
            elif name.endswith(CODES):  # its scales are read with it
                yield name.removesuffix(CODES), self._decode(name.removesuffix(CODES))

    def _decode(self, name: str) -> Tensor:
        assert self._format is not None  # ``_check`` finds packed weights without a format
        # Weights are decoded to fp32, because an adapter may be added. The sum is then rounded once, when it is
        # written.
        codes, scales = (self._stored[name + suffix].read(name + suffix) for suffix in (CODES, SCALES))
        return frozen_format.unpack(codes, scales, self._params[name].shape[-1], self._format, torch.float32)

    def _check(self) -> None:
        """Raise ``ValueError`` where a stored tensor is not what the config says, or one is missing."""
        if self._format is not None:
            check_packed(self._stored, self._format)
        for name in self._packed:
            self._check_codes(name)
        # Names that the model does not have are passed over, because Transformers renames the tensors of some models
        # while it loads them.
        for name in self._dense & self._params.keys():
            tensor, shape = self._stored[name], tuple(self._params[name].shape)
            if tensor.shape != shape or tensor.dtype not in WEIGHT_DTYPES:
                raise ValueError(
                    f"{str(tensor.file)!r}: {name} is {tensor.dtype} with shape {tensor.shape}, but the model of config.json "
                    f"has a 16-bit or 32-bit weight with shape {shape} there."
                )
        self._check_complete()

    def _check_codes(self, name: str) -> None:
        codes = self._stored[name + CODES]
        if self._format is None or name not in self._params:
            lacks = "no format for packed weights" if self._format is None else "no such weight"
            raise ValueError(f"{str(codes.file)!r} holds codes of {name}, but the model of config.json has {lacks}.")
        *rows, columns = self._params[name].shape
        if codes.shape != (*rows, self._format.code_columns(columns)):
            raise ValueError(
                f"{str(codes.file)!r}: the codes of {name} have shape {codes.shape}, but the model of config.json has a "
                f"weight with shape {(*rows, columns)} there, in {self._format.bits} bits."
            )

    def _check_complete(self) -> None:
        """Raise ``ValueError`` if a weight is missing, where the checkpoint uses the names that the model has in memory.

        Some models are stored under other names, which Transformers translates while it loads. They are not checked.
        """
        present = self._packed | self._dense
        if present - self._params.keys():
            return
        tied = tied_names(self.skeleton)
        # A checkpoint holds one of two tied weights, and which one depends on the program that saved it.
        present |= {target for target, source in tied.items() if source in present}
        present |= {source for target, source in tied.items() if target in present}
        for name, param in self._params.items():
            # A parameter that the model itself freezes is no checkpoint's: the model computes it, as Marian does its positions.
            if name not in present and param.requires_grad:
                raise ValueError(f"{str(self.path)!r} is incomplete: none of its files holds {name}.")


def _packed_format(base: Path) -> FrozenFormat | None:
    """Return the format of a packed base, as its config says; None for a base that is not packed."""
    quantization = read_json(base, "config.json").get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"The base was quantized by {method!r}; export reads 16-bit bases and those packed with ZeroPPQuantConfig. Give "
            "the 16-bit base as --model."
        )
    check_version(quantization.get("version"), str(base))
    try:
        return FrozenFormat(quantization["bits"], quantization["block"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"The quantization_config of {str(base / 'config.json')!r} is wrong: {error}") from error


def tied_names(skeleton: nn.Module) -> dict[str, str]:
    """Return the names of tied weights, target to source."""
    return getattr(skeleton, "all_tied_weights_keys", {})


def _skeleton(base: Path, num_tensors: int) -> PreTrainedModel:
    """Return the dense model on ``meta``, as the base's config describes it."""
    try:
        return _build(base, num_tensors)
    except Exception as error:  # a config that describes no model makes libraries fail in any way
        raise ValueError(f"{str(base / 'config.json')!r} describes no model that can be built: {error}") from error


def _build(base: Path, num_tensors: int) -> PreTrainedModel:
    # Neither code from the folder nor an attention kernel that the config names is run: nothing is computed with this model.
    config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False, attn_implementation="eager")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if num_layers > num_tensors:  # would take hours to build
        raise ValueError(f"it has {num_layers} layers, and the checkpoint {num_tensors} tensors")
    architecture = str((config.architectures or [None])[0])
    model_class: Any = getattr(transformers, architecture, transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        if model_class is transformers.AutoModelForCausalLM:
            return model_class.from_config(config)
        # The name could be that of any function of Transformers.
        if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
            raise ValueError(f"{architecture!r} is not a model")
        return model_class(config)
