"""Merge an adapter into its base and write 16-bit safetensors that ``from_pretrained`` opens without this package.

    hf-zeropp export --adapter runs/lora --output merged            # the base stands in the adapter's config
    hf-zeropp export --model packed --output dense                  # a packed checkpoint, decoded

The base is never in memory as a whole. Its safetensors are read tensor by tensor; each tensor is decoded if it is packed,
merged if an adapter layer belongs to it, and written. PEFT does the merging, one layer at a time, on a model whose other
weights are on ``meta``. So every kind of adapter that PEFT can merge (LoRA, DoRA, rsLoRA, IA3, single tokens, fused experts) is
merged as its ``merge_and_unload`` would do it, in fp32. Modules and biases that were trained in full take the place of the
base's. The memory needed is one shard of the output.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from hf_zeropp.files import MAX_JSON_BYTES, file_in, make_readable, read_json, written_at_once
from hf_zeropp.frozen.adapters import initial_that_changed_base
from hf_zeropp.frozen.modules import CODES, SCALES
from hf_zeropp.integrations.lora.base_checkpoint import BaseCheckpoint, tied_names
from hf_zeropp.integrations.lora.stored_tensors import INDEX, WEIGHT_DTYPES, WEIGHTS, tensors_in_files
from hf_zeropp.sizes import parse_bytes

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def export(
    output: str | Path,
    model: str | Path | None = None,
    adapter: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | str = "2GB",
    show_progress: bool = True,
) -> Path:
    """Write ``model``, with ``adapter`` merged into it, to the folder ``output``.

    Args:
        output: a folder that is empty or does not exist. It appears when everything is written, not before. An export that is
            killed leaves a folder ``.partial-*`` beside it, which can be removed.
        model: the base, 16-bit or packed: a folder or a hub name. Default: what the adapter's config names.
        adapter: a PEFT adapter folder; None only decodes a packed base.
        dtype: the dtype of the floating-point weights that are written.
        max_shard_size: the largest size of an output file, in bytes or as text ("2GB").
        show_progress: whether to show a progress bar.

    Returns:
        The folder.

    Raises:
        ValueError: nothing to export, a folder that is not empty, an adapter that does not fit the base, or a file of either
            that is damaged, incomplete or no safetensors. The message names it, and nothing is written.
    """
    output = Path(output)
    _require_new_folder(output)
    # Base and adapter are checked here, before anything is created: a wrong argument leaves no trace on the disk.
    base = BaseCheckpoint(_resolve_base(model, adapter))
    merger = _Merger(base.skeleton, adapter) if adapter is not None else None
    output.parent.mkdir(parents=True, exist_ok=True)
    # A run that fails or is interrupted must not leave a folder that looks like a model.
    with written_at_once(output) as folder:
        folder.mkdir()
        writer = _ShardWriter(folder, parse_bytes(max_shard_size), dtype)
        _write_weights(tqdm(base, desc="Exporting", disable=not show_progress), merger, writer)
        _copy_companions(base.path, folder, dtype, unties=merger is not None and merger.unties)
    return output


def _require_new_folder(output: Path) -> None:
    # ``lexists`` also sees a link that leads nowhere, which ``exists`` would take for a free name.
    if os.path.lexists(output) and (output.is_symlink() or not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"{str(output)!r} exists and is not an empty folder; nothing was written. Choose another --output."
        )


def _write_weights(base: Iterable[tuple[str, Tensor]], merger: _Merger | None, writer: _ShardWriter) -> None:
    for name, tensor in base:
        for merged_name, merged in merger.merge(name, tensor) if merger else [(name, tensor)]:
            writer.add(merged_name, merged)
    if merger is not None:
        merger.check_all_merged()
    writer.finish()


def _resolve_base(model: str | Path | None, adapter: str | Path | None) -> Path:
    """Return the folder of the base, which is downloaded if it is a hub name."""
    if model is None:
        if adapter is None:
            raise ValueError("Nothing to export: give --model (a packed or 16-bit base), --adapter, or both.")
        model = _read_adapter_config(Path(adapter)).get("base_model_name_or_path")
        if not model or not isinstance(model, str):
            raise ValueError("The adapter's config does not name its base model: give --model.")
    path = Path(model)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(
            snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
        )
    return path


def _read_adapter_config(adapter: Path) -> dict[str, Any]:
    if not (adapter / ADAPTER_CONFIG).exists():
        raise ValueError(f"{str(adapter)!r} is no PEFT adapter folder: it has no {ADAPTER_CONFIG}.")
    return read_json(adapter, ADAPTER_CONFIG)


class _Merger:
    """An adapter on a base that lies on ``meta``. Each layer holds its weight only for the moment in which it is merged."""

    def __init__(self, skeleton: nn.Module, adapter: str | Path) -> None:
        # PEFT is an optional dependency. A packed base without an adapter is exported without it.
        from peft.tuners.tuners_utils import BaseTunerLayer

        names = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
        model = _with_adapter(skeleton, Path(adapter))
        root = model.get_base_model()
        self._tied = tied_names(skeleton)
        self.unties = False  # whether training made two different weights of two tied ones
        # PEFT puts its layer in the place of the dense one, so the layer's name leads to the names of the base's tensors.
        self._layers: dict[str, Any] = {  # BaseTunerLayers
            f"{_name_in_base(name)}.{leaf}": module
            for name, module in root.named_modules()
            if isinstance(module, BaseTunerLayer)
            for leaf in _merged_leaves(module)
        }
        # Parameters of the base that were trained themselves: modules in full (``modules_to_save``), and biases.
        self._trained = {
            base_name: param.detach()
            for name, param in root.named_parameters()
            if param.requires_grad and (base_name := _name_in_base(name)) in names
        }
        adapters = {param for layer in self._layers.values() for param in layer.parameters()}
        for name, param in root.named_parameters():
            if param.requires_grad and param not in adapters and _name_in_base(name) not in names:
                raise ValueError(f"The adapter trains {name}, and the base has no such weight.")
        # Names of weights that the adapter changes, and that ``merge`` has not been given yet. In the end none may be left.
        self._left = set(self._trained) | {name for name in self._layers if not name.endswith(".bias")}

    def merge(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of the merged model for one of the base: itself, and those tied to it that training unties."""
        tied = [target for target, source in self._tied.items() if source == name]
        if tied and any(each in self._layers or each in self._trained for each in (name, *tied)):
            self.unties = True
            for target in tied:
                # The base stores a tied weight once. An adapter on one of its two places makes their values differ, so
                # both get written.
                yield target, self._merge(target, tensor.clone())
        yield name, self._merge(name, tensor)

    def _merge(self, name: str, tensor: Tensor) -> Tensor:
        self._left.discard(name)
        if (trained := self._trained.get(name)) is not None:
            tensor = trained
        if (layer := self._layers.get(name)) is None:
            return tensor
        leaf = name.rpartition(".")[2]
        expected = getattr(layer.get_base_layer(), leaf).shape
        if tensor.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in the base and {tuple(expected)} for the adapter. Is it the base this "
                "adapter was trained on?"
            )
        return _merge_layer(layer, leaf, tensor)

    def check_all_merged(self) -> None:
        """Check that the base had a weight for everything that was trained.

        Raises:
            ValueError: it had not.
        """
        if self._left:
            raise ValueError(
                f"The adapter changes {len(self._left)} weights that the base does not have ({min(self._left)}, ...). Is it the "
                "base this adapter was trained on?"
            )


def _name_in_base(name: str) -> str:
    """Return the name that a module or a parameter has without PEFT's wrappers around it and around the modules above it."""
    return re.sub(r"\.(modules_to_save\.default|base_layer|token_adapter)(?=\.|$)", "", name)


def _merged_leaves(layer: Any) -> list[str]:
    """Return the names of the base layer's own parameters that merging ``layer`` (a ``BaseTunerLayer``) may change."""
    if hasattr(layer, "parameter_name"):  # of fused experts, for instance (``target_parameters``)
        return [layer.parameter_name]
    own = dict(layer.get_base_layer().named_parameters(recurse=False))
    return [leaf for leaf in ("weight", "bias") if leaf in own]


def _mergeable_config(adapter: Path) -> Any:
    """Return the adapter's ``PeftConfig``, ready for merging."""
    from peft import PeftConfig

    settings = _read_adapter_config(adapter)
    try:
        config = PeftConfig.from_peft_type(**settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{str(adapter / ADAPTER_CONFIG)!r} is not a config that PEFT knows: {error!r}") from error
    # These add inputs, layers or other adapters to a model, which PEFT would read from wherever the config says.
    if config.is_prompt_learning or config.is_adaption_prompt or config.peft_type == "XLORA":
        raise ValueError(f"{str(adapter)!r} holds an adapter of type {config.peft_type}, which has no merged form.")
    # The adapter holds that part, and so does the base on disk, which was not changed. Merged, the part would count twice.
    if (initial := initial_that_changed_base(config)) is not None:
        raise ValueError(
            f"{str(adapter)!r} was trained on a base that init_lora_weights={initial!r} had changed. Merged into the one on disk "
            "it would add a part of it again. Save the adapter with path_initial_model_for_weight_conversion (PEFT), or the "
            f"changed base, and set init_lora_weights to true in {ADAPTER_CONFIG}."
        )
    config.inference_mode = False  # so that the adapter's parameters are the trainable ones
    # The weights are loaded afterwards. Some initializations (PiSSA, LoftQ) would compute with a base that has no values.
    config.init_lora_weights = True
    return config


def _with_adapter(skeleton: nn.Module, adapter: Path) -> Any:
    """Return the ``PeftModel`` of the skeleton, which stays on ``meta``, with the values of the adapter."""
    from peft import get_peft_model, set_peft_model_state_dict

    weights = _adapter_weights(adapter)
    config = _mergeable_config(adapter)
    try:
        with torch.device("meta"):
            model = get_peft_model(skeleton, config)
        _materialize_trainable(model, max_numel=sum(weight.numel() for weight in weights.values()))
        result: Any = set_peft_model_state_dict(model, weights)
    except Exception as error:  # a config that fits no model makes PEFT fail in any way
        raise ValueError(f"The adapter {str(adapter)!r} does not fit the base: {error}") from error
    trainable = {name for name, param in model.named_parameters() if param.requires_grad}
    missing = trainable.intersection(result.missing_keys)  # uninitialized memory
    if wrong := sorted(missing) or sorted(result.unexpected_keys):
        problem = "lacks" if missing else "has too much"
        raise ValueError(f"{str(adapter / ADAPTER_WEIGHTS)!r} {problem}: {wrong[0]} ({len(wrong)} tensors in all).")
    return model


def _adapter_weights(adapter: Path) -> dict[str, Tensor]:
    """Read the adapter's tensors. In the place of a missing file PEFT itself would load a pickle, or ask the hub."""
    from peft import load_peft_weights

    file = file_in(adapter, ADAPTER_WEIGHTS)
    # An adapter on an embedding is saved with the embedding. A packed one is left out here: the base has it.
    stored = {name: tensor for name, tensor in tensors_in_files([file]).items() if not name.endswith((CODES, SCALES))}
    for name, tensor in stored.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{str(file)!r}: {name} is {tensor.dtype}; expected 16-bit or 32-bit weights.")
        if not tensor.read(name).isfinite().all():
            raise ValueError(f"{str(file)!r} is damaged: {name} holds values that are NaN or infinite.")
    weights = load_peft_weights(str(adapter), device="cpu")
    return {name: weight for name, weight in weights.items() if not name.endswith((CODES, SCALES))}


def _materialize_trainable(model: nn.Module, max_numel: int) -> None:
    """Allocate the trainable parameters, which ``max_numel`` values are there for."""
    numel = sum(param.numel() for param in model.parameters() if param.requires_grad)
    # The shapes of an adapter follow from its config. A wrong number there must not make this process allocate huge
    # tensors, so the file of weights sets the limit.
    if numel > max_numel:
        raise ValueError(
            f"{ADAPTER_CONFIG} describes {numel} values, and {ADAPTER_WEIGHTS} holds {max_numel}: size mismatch"
        )
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.requires_grad:
                setattr(module, name, nn.Parameter(torch.empty_like(param, device="cpu")))


def _merge_layer(layer: Any, leaf: str, tensor: Tensor) -> Tensor:
    """Return the base's parameter ``leaf`` with the adapter of ``layer`` merged into it by PEFT, in fp32."""
    base_layer = layer.get_base_layer()
    on_meta = {name: getattr(base_layer, name) for name in _merged_leaves(layer)}
    for name, param in on_meta.items():
        # PEFT changes weight and bias in one call, and the base gives them one by one. Any values do for the other one. With
        # zeros DoRA would divide by the norm of nothing.
        values = tensor.float() if name == leaf else torch.ones(param.shape)
        setattr(base_layer, name, nn.Parameter(values, requires_grad=False))
    # The product of the adapter's matrices is computed in their dtype. 16 bits would round it before it is added.
    layer.float()
    with torch.no_grad():
        # The safe way raises where the merged weight is not finite, and writes to a copy.
        layer.merge(safe_merge=True)
    layer.merged_adapters.clear()  # the next parameter of this layer is merged by itself
    merged = getattr(base_layer, leaf).data
    # The layer goes back to ``meta``. Otherwise the skeleton would fill up with merged weights, layer by layer.
    for name, param in on_meta.items():
        setattr(base_layer, name, param)
    return merged


class _ShardWriter:
    """Collect tensors, and write a file of the output whenever they would exceed its size."""

    def __init__(self, folder: Path, shard_bytes: int, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor, cast to the output's dtype."""
        tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        if self._tensors and sum(map(_nbytes, self._tensors.values())) + _nbytes(tensor) > self._shard_bytes:
            self._flush()
        # ``save_file`` refuses tensors that share memory, and a view would keep the whole tensor behind it alive.
        self._tensors[name] = tensor.contiguous().clone()
        self._total_bytes += _nbytes(tensor)

    def finish(self) -> None:
        """Write the rest. Then name the files, because the names tell how many there are."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards, start=1):
            file = WEIGHTS if count == 1 else f"model-{i:05}-of-{count:05}.safetensors"
            self._path(i).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        if self._tensors:
            self._shards.append(list(self._tensors))
            save_file(self._tensors, self._path(len(self._shards)), metadata={"format": "pt"})
            make_readable(self._path(len(self._shards)))
            self._tensors = {}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.partial"


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_companions(base: Path, folder: Path, dtype: torch.dtype, *, unties: bool) -> None:
    """Write the config without quantization; copy tokenizer, generation config and chat template.

    Args:
        base: the folder to copy from.
        folder: the folder to write to.
        dtype: the dtype of the weights.
        unties: whether weights that were tied in the base are two in the output.
    """
    config = read_json(base, "config.json")
    config.pop("quantization_config", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if unties:
        config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in base.iterdir():
        is_companion = file.suffix in (".json", ".txt", ".model", ".jinja")
        # The index names the base's files. With an adapter's config beside the weights Transformers would load that
        # adapter again.
        if is_companion and file.name not in ("config.json", INDEX, ADAPTER_CONFIG):
            shutil.copyfile(file_in(base, file.name, MAX_JSON_BYTES), folder / file.name)
