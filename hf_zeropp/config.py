"""Every setting of the package: validated once, read from Python, YAML, JSON, the environment or a DeepSpeed file.

The names follow the ZeRO++ paper (arXiv 2306.10209): qwZ quantizes the weight gather, hpZ keeps a secondary shard on
every node, qgZ quantizes the gradient reduction. Precedence: arguments, then ``ZEROPP_<FIELD>`` variables, then the
file named by ``ZEROPP_CONFIG_FILE``, then the defaults below.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

ENV_PREFIX = "ZEROPP_"
ENV_CONFIG_FILE = "ZEROPP_CONFIG_FILE"
# Variables that share the prefix but are no settings of a run: the kernel choice belongs to kernels.py.
ENV_CHECK = "ZEROPP_CHECK"
ENV_OTHER = frozenset({ENV_CONFIG_FILE, ENV_CHECK, "ZEROPP_KERNELS"})

WEIGHT_MODES = ("values", "delta")
WEIGHT_BITS = {"values": (8, 4, None), "delta": (8, 4, 3, 2)}
COPY_BITS = (8, None)
GRADIENT_BITS = (4, 8, None)
FROZEN_BITS = (8, 4, None)
MIN_BLOCK, MAX_BLOCK, BLOCK_MULTIPLE = 32, 4096, 32
MAX_CHUNKS = 64

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"qwz_bits": 8, "hpz_size": "node", "qgz_bits": 4, "qgz_intra_bits": 4},
    "balanced": {},
    "half_model": {"qwz_mode": "delta", "qwz_bits": 4},
    "min_traffic": {"qwz_mode": "delta", "qwz_bits": 2},
}
"""Settings under a name. scripts/results/half_model.md says what each costs and buys."""


@dataclasses.dataclass(frozen=True)
class ZeroPPConfig:
    """Settings of ZeRO++ for one model.

    Args:
        qwz_mode: what crosses nodes of the weights that train: their "values", or a "delta", how they moved since the copy
            that every node keeps was brought up to date. What a delta leaves out returns in the next. Takes hpZ, and
            trainable parameters in fp32 (mixed precision keeps them so).
        qwz_bits: bits per weight on the wire of a gather; 8, 4, or None (the compute dtype, unquantized). Of a delta 8, 4,
            3 or 2.
        qwz_resync_steps: send whole weights, in the compute dtype, after so many deltas; None for never but where it is
            due anyway: at the start, at checkpoints, after weights were loaded or edited.
        hpz_size: ranks that share one secondary copy of the weights. "node" (the ranks of a node), an int, or
            None (no copy is kept: every gather crosses the nodes).
        hpz_bits: with qwz_mode "delta", bits per weight of the copy; None (the compute dtype, 16 bits) or 8, at the error
            of INT8. Otherwise copies are kept as they crossed; those of frozen weights, beside deltas, in INT8.
        qgz_bits: bits per gradient across nodes; 4, 8, or None (the reduce dtype, unquantized).
        qgz_intra_bits: bits per gradient within a node; 8, 4, or None.
        qgz_until: fraction of training, 0 to 1, during which gradients are quantized (the paper's convergence study
            interleaves so: qwZ and hpZ throughout, qgZ for the first part). The Trainer callback keeps the clock; own
            loops call ``handle.set_progress``.
        qgz_chunks: pieces, 1 to 64, in which a unit's gradients are reduced: while one crosses the nodes, the next is
            still within one (paper section 4.1.2). The results are the same bit for bit.
        qgz_hadamard: rotate gradients, 32 by 32, by a Hadamard matrix while they are quantized, so that a large one does
            not cost its neighbours their digits.
        qgz_error_feedback: "full": what the hop across nodes leaves out of a step's gradients is kept (1/N of the model in
            INT8 per rank) and added to the next step's. A number in (0, 1]: the moving average of it, the newest with this
            weight (LoCo, arXiv 2407.04480). "off".
        qgz_reset_steps: forget what was left out after so many optimizer steps; None for never.
        frozen_bits: bits in which frozen weights are stored (LoRA's base); 8, 4, or None (as they are loaded). Either
            way they are sharded within the node and never cross it.
        weight_block: weights that share one scale.
        grad_block: gradients that share one scale.
        delta_block: differences that share one scale.
        overlap: start collectives early and finish them late on backends without streams (gloo); the results are
            the same bit for bit. False helps to see what a collective costs.
        shared_memory: on CPU, the ranks of a machine read each other's secondary copy in place of gathering it; the
            results are the same bit for bit. False sends it through sockets.
        ranks_per_node: "auto" (LOCAL_WORLD_SIZE, as launchers export it), or an int, which emulates nodes of that
            many consecutive ranks on one machine.
    """

    qwz_mode: Literal["values", "delta"] = "values"
    qwz_bits: int | None = 8
    qwz_resync_steps: int | None = None
    hpz_size: int | Literal["node"] | None = "node"
    hpz_bits: int | None = None
    qgz_bits: int | None = 4
    qgz_intra_bits: int | None = 8
    qgz_until: float = 1.0
    qgz_chunks: int = 1
    qgz_hadamard: bool = False
    qgz_error_feedback: float | Literal["off", "full"] = "off"
    qgz_reset_steps: int | None = None
    frozen_bits: int | None = None
    weight_block: int = 256
    grad_block: int = 128
    delta_block: int = 128
    overlap: bool = True
    shared_memory: bool = True
    ranks_per_node: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _check_choice("qwz_mode", self.qwz_mode, WEIGHT_MODES)
        _check_choice(f"qwz_bits (with qwz_mode {self.qwz_mode!r})", self.qwz_bits, WEIGHT_BITS[self.qwz_mode])
        _check_choice("hpz_bits", self.hpz_bits, COPY_BITS)
        _check_choice("qgz_bits", self.qgz_bits, GRADIENT_BITS)
        _check_choice("qgz_intra_bits", self.qgz_intra_bits, GRADIENT_BITS)
        _check_choice("frozen_bits", self.frozen_bits, FROZEN_BITS)
        _check_size("hpz_size", self.hpz_size, ("node", None))
        _check_size("ranks_per_node", self.ranks_per_node, ("auto",))
        for name in ("qwz_resync_steps", "qgz_reset_steps"):
            _check_size(name, getattr(self, name), (None,))
        for name in ("weight_block", "grad_block", "delta_block"):
            _check_block(name, getattr(self, name))
        _check_fraction("qgz_until", self.qgz_until)
        if not _is_int(self.qgz_chunks) or not 1 <= self.qgz_chunks <= MAX_CHUNKS:
            raise ValueError(f"qgz_chunks must be an integer from 1 to {MAX_CHUNKS}, got {self.qgz_chunks!r}.")
        for name in ("qgz_hadamard", "overlap", "shared_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if self.qgz_error_feedback is False:  # what YAML makes of an unquoted `off`
            object.__setattr__(self, "qgz_error_feedback", "off")
        _check_feedback(self.qgz_error_feedback)
        self._check_together()

    def _check_together(self) -> None:
        """Raises: ValueError: one setting makes no sense beside another."""
        if self.qgz_until < 1 and not self.quantizes_gradients:
            raise ValueError(
                f"qgz_until={self.qgz_until} says when to stop quantizing gradients, but qgz_bits and "
                "qgz_intra_bits are both None, so they never are. Set qgz_bits, or leave qgz_until at 1.0."
            )
        if self.qwz_mode == "delta" and self.hpz_size is None:
            raise ValueError(
                'qwz_mode="delta" sends how weights differ from the copy that every node keeps, but hpz_size=None keeps '
                'none. Set hpz_size="node", or qwz_mode="values".'
            )
        if self.qwz_mode != "delta" and (self.hpz_bits, self.qwz_resync_steps) != (None, None):
            raise ValueError(
                'hpz_bits and qwz_resync_steps are for qwz_mode="delta"; values are kept as they crossed, and cross anew '
                'after each step. Set qwz_mode="delta", or leave both at None.'
            )
        if self.qgz_hadamard and None in (self.qgz_bits, self.qgz_intra_bits):
            raise ValueError(
                "qgz_hadamard rotates gradients for their quantization, in both hops: expected qgz_bits and "
                f"qgz_intra_bits, got {self.qgz_bits} and {self.qgz_intra_bits}. Set both, or qgz_hadamard=False."
            )
        if self.error_feedback_decay is not None and self.qgz_bits is None:
            raise ValueError(
                "qgz_error_feedback returns what quantization across nodes leaves out, but qgz_bits=None leaves nothing "
                'out. Set qgz_bits, or qgz_error_feedback="off".'
            )
        if self.qgz_reset_steps is not None and self.error_feedback_decay is None:
            raise ValueError("qgz_reset_steps is for qgz_error_feedback, which is off. Set one, or leave the other.")

    @property
    def error_feedback_decay(self) -> float | None:
        """How much of a residual a step renews: 1.0 for "full"; None where none is kept."""
        words = {"off": None, "full": 1.0}
        return words[self.qgz_error_feedback] if isinstance(self.qgz_error_feedback, str) else self.qgz_error_feedback

    @property
    def quantizes_gradients(self) -> bool:
        return self.qgz_bits is not None or self.qgz_intra_bits is not None

    @classmethod
    def preset(cls, name: str, **settings: Any) -> ZeroPPConfig:
        """The settings of PRESETS[name], "balanced" being the defaults; others beside or over them."""
        return cls.from_dict({**settings, "preset": name})

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ZeroPPConfig:
        """Build from a mapping; ``preset`` names what the others go over. An unknown key is an error that names the nearest
        valid one."""
        if not isinstance(settings, Mapping):
            raise TypeError(f"ZeRO++ settings must be a mapping, got {type(settings).__name__}: {settings!r}")
        valid = ("preset", *field_names())
        for key in settings:
            if key not in valid:
                raise ValueError(
                    f"Unknown ZeRO++ setting {key!r}.{_nearest(str(key), valid)} Valid: {', '.join(valid)}."
                )
        settings = dict(settings)
        preset = settings.pop("preset", "balanced")
        if preset not in PRESETS:
            raise ValueError(
                f"preset must be one of {', '.join(PRESETS)}, got {preset!r}.{_nearest(str(preset), PRESETS)}"
            )
        return cls(**{**PRESETS[preset], **settings})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ZeroPPConfig:
        """Read a YAML or JSON file: the settings at top level, under ``zeropp_config:``, or a DeepSpeed file."""
        return cls.from_dict(_read_settings(Path(path)))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ZeroPPConfig:
        """Read ``ZEROPP_CONFIG_FILE``, then let ``ZEROPP_<FIELD>`` variables override it."""
        environ = os.environ if environ is None else environ
        path = environ.get(ENV_CONFIG_FILE)
        settings = _read_settings(Path(path)) if path else {}
        return cls.from_dict({**settings, **_env_settings(environ)})

    @classmethod
    def from_deepspeed(cls, settings: Mapping[str, Any]) -> ZeroPPConfig:
        """Translate a DeepSpeed configuration with ZeRO++ keys (``zero_quantized_weights`` and its siblings)."""
        return cls.from_dict(_translate_deepspeed(settings))

    @classmethod
    def resolve(cls, settings: ZeroPPConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> ZeroPPConfig:
        """Accept what users pass: a config, a mapping, a file path, or None (the environment)."""
        if isinstance(settings, ZeroPPConfig):
            return settings
        if settings is None:
            return cls.from_env()
        if isinstance(settings, (str, os.PathLike)):
            return cls.from_file(settings)
        return cls.from_dict(settings)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def field_names() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(ZeroPPConfig))


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read the ZeRO++ config file {str(path)!r}: {error}. Check the path.") from error
    try:
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"The ZeRO++ config file {str(path)!r} is no valid YAML or JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"The ZeRO++ config file {str(path)!r} must hold `key: value` lines, got: {settings!r}")
    if "zero_optimization" in settings:
        return _translate_deepspeed(settings)
    block = settings.get("zeropp_config", settings)
    if block is not None and not isinstance(block, dict):
        raise ValueError(f"zeropp_config in {str(path)!r} must be a mapping of settings, got: {block!r}")
    return block or {}  # `zeropp_config:` and nothing under it: the defaults


def _env_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    settings = {}
    valid = [ENV_PREFIX + name.upper() for name in ("preset", *field_names())]
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX) or key in ENV_OTHER:
            continue
        if key not in valid:
            raise ValueError(f"Unknown environment variable {key}.{_nearest(key, valid)}")
        try:
            settings[key.removeprefix(ENV_PREFIX).lower()] = _parse_env_value(text)
        except yaml.YAMLError as error:
            raise ValueError(f"The environment variable {key}={text!r} is no valid YAML value: {error}") from error
    return settings


def _parse_env_value(text: str) -> Any:
    return None if text.strip().lower() in ("none", "null", "") else yaml.safe_load(text)


def _translate_deepspeed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed keys to ours. DeepSpeed's qgZ uses INT4 in both hops."""
    zero = settings.get("zero_optimization", {})
    if zero.get("stage") != 3:
        raise ValueError(f"ZeRO++ builds on ZeRO stage 3, the DeepSpeed file says stage {zero.get('stage')!r}.")
    hpz_size = zero.get("zero_hpz_partition_size", 1)
    quantized_gradients = zero.get("zero_quantized_gradients", False)
    return {
        "qwz_bits": 8 if zero.get("zero_quantized_weights", False) else None,
        "hpz_size": hpz_size if hpz_size > 1 else None,
        "qgz_bits": 4 if quantized_gradients else None,
        "qgz_intra_bits": 4 if quantized_gradients else None,
    }


def _nearest(key: str, valid: Iterable[str]) -> str:
    folded = {name.lower(): name for name in valid}
    matches = difflib.get_close_matches(key.lower(), folded, n=1, cutoff=0.4)
    return f" Did you mean {folded[matches[0]]!r}?" if matches else ""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not (value is None or isinstance(value, str) or _is_int(value)) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")


def _check_size(name: str, value: Any, words: tuple[Any, ...]) -> None:
    if value in words and not isinstance(value, bool):
        return
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} must be a positive int or one of {words}, got {value!r}.")


def _check_block(name: str, value: Any) -> None:
    if not _is_int(value) or not MIN_BLOCK <= value <= MAX_BLOCK or value % BLOCK_MULTIPLE:
        raise ValueError(
            f"{name} must be a multiple of {BLOCK_MULTIPLE} from {MIN_BLOCK} to {MAX_BLOCK}, got {value!r}."
        )


def _check_feedback(value: Any) -> None:
    is_weight = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1
    if value not in ("off", "full") and not is_weight:
        raise ValueError(f'qgz_error_feedback must be "off", "full" or a number over 0 and up to 1, got {value!r}.')


def _check_fraction(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}.")
