"""Transformers: ``from_pretrained`` loads a model straight into packed weights, and saves and reloads it packed.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=ZeroPPQuantConfig(bits=4))
    model.save_pretrained(packed_path)          # safetensors with codes and scales
    model = AutoModelForCausalLM.from_pretrained(packed_path)    # after ``from hf_zeropp import ZeroPPQuantConfig``

Importing this module registers the config and the quantizer with Transformers.

[Note: two ways to load]
*From a 16-bit checkpoint.* The model is built on ``meta``. Transformers reads one tensor after the other and hands it to
``PackOnLoad``, which packs it and makes its module a packed one. So the 16-bit model is never in memory as a whole. A weight
that is tied to a packed one has no tensor of its own in the checkpoint: Transformers ties it after loading, by assigning the
packed weight to the module that shares it. That module is still a dense one, and is made a packed one at the very end.

*From a packed checkpoint.* Its tensors are named ``weight_codes`` and ``weight_scales``. So all modules are made packed ones
before loading, with codes and scales on ``meta``, and the tensors are then read like any others.

Transformers lists tied weights by name, target to source (``all_tied_weights_keys``). After packing a name stands for two
parameters, so the list is rewritten, before loading or after it.

[Note: damaged packed checkpoints]
Transformers casts a tensor of another dtype, and fills in values of its own for one that is missing, with a warning. For codes
and scales both give a model that computes nonsense. So a packed checkpoint is checked before it is loaded
(stored_tensors.py), and afterwards every packed weight must have been loaded. Only safetensors are read: Transformers would
also take a pickle where there are none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_zeropp.files import check_file
from hf_zeropp.frozen.modules import CODES, SCALES, Packed, convert_module, packed_modules, set_packed
from hf_zeropp.frozen.packing import convert_frozen, dense_modules, is_packable, unpack_frozen
from hf_zeropp.frozen.weight import PackedWeight
from hf_zeropp.integrations.lora.stored_tensors import METHOD, VERSION, check_packed, check_version, tensors_in_files
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.frozen_format import DEFAULT_BLOCK, MIN_BLOCK, FrozenFormat
from hf_zeropp.setting_checks import flag


@register_quantization_config(METHOD)
@dataclasses.dataclass
class ZeroPPQuantConfig(QuantizationConfigMixin):
    """Settings for loading frozen weights in INT8 or INT4: linear layers and fused experts.

    Args:
        bits: 8 or 4.
        block: the fewest weights of a row that share 16 bits of scales: one scale in 8 bits, two in 4.
        skip: modules to leave in 16 bits, with all inside: names, or parts of names ("down_proj"), for instance because an
            adapter config trains them (``modules_to_save``). A weight tied to one of theirs stays too.
        pack_embeddings: whether to pack embeddings and heads too (``heads.py``). By default they stay, as with
            bitsandbytes, so that tokens can be added and heads trained.
        version: of the format in which a checkpoint is packed; not to be set.
        quant_method: the name under which Transformers finds this class; not to be set.

    Raises:
        ValueError: ``bits`` or ``block`` is none of those supported, ``skip`` is not a list of names, or ``pack_embeddings`` is
            no bool.
    """

    bits: int = 4
    block: int = DEFAULT_BLOCK
    skip: list[str] = dataclasses.field(default_factory=list)
    pack_embeddings: bool = False
    version: int | None = VERSION
    quant_method: Any = METHOD  # by its type one of Transformers' own methods

    def __post_init__(self) -> None:
        self.post_init()

    def post_init(self) -> None:
        """Check the settings. Transformers calls this when it reads them from a checkpoint."""
        if not isinstance(self.skip, (list, tuple, set)) or not all(isinstance(name, str) for name in self.skip):
            raise ValueError(f'skip must be a list of module names, such as ["lm_head"], got {self.skip!r}.')
        self.skip = list(self.skip)
        flag("pack_embeddings", self.pack_embeddings)
        self.format  # noqa: B018 - checks bits and block

    @classmethod
    def from_dict(cls, config_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the config that a checkpoint's config.json holds, or a dictionary of the user's."""
        return super().from_dict({"version": None, **config_dict}, *args, **kwargs)

    @property
    def format(self) -> FrozenFormat:
        """Bits and block."""
        return FrozenFormat(self.bits, self.block)


@register_quantizer(METHOD)
class ZeroPPQuantizer(HfQuantizer):
    """The answers to what ``from_pretrained`` and ``save_pretrained`` ask about packed weights. See [Note: two ways to load]."""

    quantization_config: ZeroPPQuantConfig

    def __init__(self, quantization_config: ZeroPPQuantConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            quantization_config.version = VERSION
        self._dense: set[nn.Module] = set()

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor of the checkpoint is to be packed when it is read."""
        module, name = get_module_from_name(model, param_name)
        # Transformers asks again when it assigns a tensor, and accepts any shape if the answer is yes. For modules that
        # are packed the answer is no, so codes of another shape are left out, and ``_check_loaded`` finds them missing.
        stays = isinstance(module, Packed) or module in self._dense
        return not stays and is_packable(module, name, getattr(module, name))

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that packs a tensor as it is read."""
        return PackOnLoad(self.quantization_config.format)

    @property
    def quantized_element_size(self) -> float:
        """Bytes of an element, for Transformers' estimates of memory."""
        return self.quantization_config.bits / 8

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        """Note what stays dense. Check a packed checkpoint, and make modules packed ones, whose parameters it names."""
        self._dense = _dense_modules(model, self.quantization_config)
        if self.pre_quantized:
            check_version(self.quantization_config.version, str(model.config.name_or_path))
            if checkpoint_files is not None:  # None: the caller passed a state dict
                _check_files([Path(file) for file in checkpoint_files], model, self.quantization_config, self._dense)
            # ``frozen_only`` is False, because all parameters of a model that is being loaded are trainable. The user
            # freezes them later.
            convert_frozen(model, self.quantization_config.format, self._dense, frozen_only=False)
            model.all_tied_weights_keys = _tied_keys(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Make modules packed ones that were tied to one, and still hold its weight as a parameter."""
        if self.pre_quantized:
            _check_loaded(model)
        for module in model.modules():
            # The list is needed, because conversion takes the parameter out of the dictionary that is iterated over.
            for name, param in list(module.named_parameters(recurse=False)):
                if isinstance(param, PackedWeight):
                    convert_module(module, name, param.form.format)
                    setattr(module, name, param)
        model.all_tied_weights_keys = _tied_keys(model)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Make the packed weights dense: ``model.dequantize()``."""
        unpack_frozen(model, dtype)
        tied = model.all_tied_weights_keys.items()
        model.all_tied_weights_keys = {_dense_name(target): _dense_name(source) for target, source in tied}
        return model

    def is_serializable(self, **kwargs: Any) -> bool:
        """Whether ``save_pretrained`` may save the model packed."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether a Trainer may take the model: for adapters on it."""
        return True


class PackOnLoad(ConversionOps):
    """Pack one tensor as it is read from the checkpoint, into codes and scales of its module."""

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
        """Pack the tensors of ``input_dict`` (one, under its full name) into ``model``.

        Returns:
            Nothing for Transformers to assign: the module holds its codes already.
        """
        for full_name, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            module, name = get_module_from_name(model, full_name)
            codes, scales = frozen_format.pack(value, self.format)
            convert_module(module, name, self.format, dtype=value.dtype)
            set_packed(module, name, codes, scales)
            # Transformers initializes what it does not find loaded. It did not assign these itself, so they are marked, and
            # the name of the dense weight, which the module does not have any more, is not missing.
            for suffix in (CODES, SCALES):
                getattr(module, name + suffix)._is_hf_initialized = True
            if missing_keys is not None:
                missing_keys.discard(full_name)
        return {}


def _dense_modules(model: PreTrainedModel, config: ZeroPPQuantConfig) -> set[nn.Module]:
    """Return the modules to leave in 16 bits, and those that share a weight with one of them."""
    dense = dense_modules(model, config.skip, pack_embeddings=config.pack_embeddings)
    # Tied modules share one tensor, once they are loaded. It cannot be packed for one of them and dense for the other.
    ties = [[get_module_from_name(model, name)[0] for name in pair] for pair in model.all_tied_weights_keys.items()]
    sources = {source for target, source in ties if target in dense or source in dense}
    return dense | sources | {target for target, source in ties if source in sources}


def _check_files(
    files: list[Path], model: PreTrainedModel, config: ZeroPPQuantConfig, dense: Collection[nn.Module]
) -> None:
    """Raise ``ValueError`` unless the files are whole and what ``config`` says. See [Note: damaged packed checkpoints]."""
    source = Path(str(model.config.name_or_path))
    for file in files:  # an index can name files anywhere on this machine
        check_file(file, source if source.is_dir() else file.parent)
    stored = tensors_in_files(files)
    check_packed(stored, config.format)
    prefix = f"{model.base_model_prefix}."  # a model with a head may be loaded from a checkpoint without one, and the reverse
    dense_weights = {
        f"{name}.{leaf}".removeprefix(prefix)
        for name, module in model.named_modules()
        for leaf, param in module.named_parameters(recurse=False)
        if module in dense or not is_packable(module, leaf, param)
    }
    for name, tensor in stored.items():
        if name.endswith(CODES) and name.removesuffix(CODES).removeprefix(prefix) in dense_weights:
            raise ValueError(
                f"{str(tensor.file)!r} holds {name}, but by config.json that weight is not packed: its quantization_config says "
                f"skip={config.skip} and pack_embeddings={config.pack_embeddings}, and rows of fewer than {MIN_BLOCK} weights "
                "are never packed."
            )


def _check_loaded(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` if a packed weight was not loaded. See [Note: damaged packed checkpoints]."""
    for module_name, module in packed_modules(model):
        for name, param in module.stored_params().items():
            # Transformers marks what it loads. What it offloads to a disk stays on ``meta``.
            if param.device.type != "meta" and not getattr(param, "_is_hf_initialized", False):
                raise ValueError(
                    f"The packed checkpoint {str(model.config.name_or_path)!r} does not fit {type(model).__name__}: it holds "
                    f"no {module_name}.{name} of the right shape. If that is a new layer, load a checkpoint in 16 bits."
                )


def _dense_name(name: str) -> str:
    return name.removesuffix(CODES).removesuffix(SCALES)


def _tied_keys(model: PreTrainedModel) -> dict[str, str]:
    """Return ``all_tied_weights_keys`` (target to source) with codes and scales in the places of packed weights."""
    keys: dict[str, str] = {}
    for target, source in model.all_tied_weights_keys.items():
        module, name = get_module_from_name(model, source)
        is_packed = isinstance(module, Packed) and name in module.packed_forms
        keys |= {target + suffix: source + suffix for suffix in ((CODES, SCALES) if is_packed else ("",))}
    return keys
