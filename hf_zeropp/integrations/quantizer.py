"""Transformers loads a model straight into packed weights, and saves and reloads it packed.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=ZeroPPQuantConfig(bits=4))
    model.save_pretrained(packed_path)          # safetensors with codes and scales
    model = AutoModelForCausalLM.from_pretrained(packed_path)    # after `from hf_zeropp import ZeroPPQuantConfig`

From a 16-bit checkpoint, weights are read and packed one after the other: the 16-bit model is never in memory. A packed
checkpoint is read as it is. Importing this module registers both with Transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_zeropp.frozen.modules import (
    CODES,
    SCALES,
    Packed,
    convert_frozen,
    convert_module,
    is_packable,
    is_skipped,
    set_packed,
)
from hf_zeropp.frozen.weight import PackedWeight
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.frozen_format import DEFAULT_BLOCK, FrozenFormat

METHOD = "zeropp"


@register_quantization_config(METHOD)
@dataclasses.dataclass
class ZeroPPQuantConfig(QuantizationConfigMixin):
    """Frozen weights in INT8 or INT4: linear layers, embeddings, fused experts.

    Args:
        bits: 8 or 4.
        block: weights of a row that share one scale.
        skip: modules to leave in 16 bits, with all inside: names, or parts of names ("lm_head"), for instance because an
            adapter config trains them (``modules_to_save``). A weight tied to one of them stays too.
    """

    bits: int = 4
    block: int = DEFAULT_BLOCK
    skip: list[str] = dataclasses.field(default_factory=list)
    quant_method: Any = METHOD  # Transformers declares an enum of its own methods

    def __post_init__(self) -> None:
        self.post_init()

    def post_init(self) -> None:
        self.skip = list(self.skip)
        self.format  # noqa: B018 - checks bits and block

    @property
    def format(self) -> FrozenFormat:
        return FrozenFormat(self.bits, self.block)


@register_quantizer(METHOD)
class ZeroPPQuantizer(HfQuantizer):
    """What `from_pretrained` and `save_pretrained` ask about packed weights."""

    quantization_config: ZeroPPQuantConfig
    requires_calibration = False

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        if isinstance(module, Packed) or is_skipped(param_name.rpartition(".")[0], self._skip(model)):
            return False
        return is_packable(module, name, getattr(module, name))

    def _skip(self, model: PreTrainedModel) -> set[str]:
        """Modules to leave in 16 bits: those asked for, and those that share a weight with one of them."""
        skip = set(self.quantization_config.skip)
        for pair in model.all_tied_weights_keys.items():
            owners = {name.rpartition(".")[0] for name in pair}
            if any(is_skipped(owner, self.quantization_config.skip) for owner in owners):
                skip |= owners
        return skip

    def get_quantize_ops(self) -> ConversionOps:
        return PackOnLoad(self.quantization_config.format)

    @property
    def quantized_element_size(self) -> float:
        return self.quantization_config.bits / 8

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """A packed checkpoint's keys are those of packed modules."""
        if self.pre_quantized:
            convert_frozen(model, self.quantization_config.format, self._skip(model), frozen_only=False)
            model.all_tied_weights_keys = _tied_keys(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Modules whose weight was tied to a packed one are made packed modules."""
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if isinstance(param, PackedWeight):
                    convert_module(module, name, param.format)
                    setattr(module, name, param)
        model.all_tied_weights_keys = _tied_keys(model)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        raise NotImplementedError(
            "To get a model in 16 bits, load the 16-bit checkpoint, or write one: hf-zeropp export --model <packed path>."
        )

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters on it


class PackOnLoad(ConversionOps):
    """One parameter as it is read from the checkpoint -> codes and scales of its module."""

    def __init__(self, format: FrozenFormat) -> None:
        self.format = format

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        *,
        model: PreTrainedModel | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, list[torch.Tensor]]:
        for full_name, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            module, name = get_module_from_name(model, full_name)
            codes, scales = frozen_format.pack(value, self.format)
            convert_module(module, name, self.format, dtype=value.dtype)
            set_packed(module, name, codes, scales)
            for suffix in (CODES, SCALES):
                getattr(module, name + suffix)._is_hf_initialized = True
            if missing_keys is not None:
                missing_keys.discard(full_name)
        return {}


def _tied_keys(model: PreTrainedModel) -> dict[str, str]:
    """``all_tied_weights_keys``, target to source, in terms of the parameters that there are."""
    keys: dict[str, str] = {}
    for target, source in model.all_tied_weights_keys.items():
        module, name = get_module_from_name(model, source)
        is_packed = isinstance(module, Packed) and name in module.packed_formats
        keys |= {target + suffix: source + suffix for suffix in ((CODES, SCALES) if is_packed else ("",))}
    return keys
