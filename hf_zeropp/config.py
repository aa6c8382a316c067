"""``ZeroPPConfig`` holds every setting of the package and checks it once, whatever source it comes from.

Sources are Python, YAML and JSON files, environment variables and DeepSpeed's own configuration files. What is passed in Python
(settings or a file) is used alone, over the defaults below, and a warning names the variables that say otherwise. Where nothing
is passed, ``ZEROPP_<FIELD>`` variables go over the file that ``ZEROPP_CONFIG_FILE`` names, and that over the defaults.

The names follow the ZeRO++ paper (arXiv 2306.10209): qwZ quantizes the weight gather (section 3.1), hpZ keeps a secondary
shard of the weights in every node (3.2), qgZ quantizes the gradient reduction (3.3). The table in ``hf_zeropp/README.md``
says when to change which setting, and how to add one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from hf_zeropp.files import MAX_SETTINGS_BYTES, parse_settings, read_text
from hf_zeropp.other_names import DEEPSPEED_BLOCK, hint, nearest, translate_deepspeed
from hf_zeropp.setting_checks import Check, flag, fraction, one_of, positive_int_or

ENV_PREFIX = "ZEROPP_"
ENV_CONFIG_FILE = "ZEROPP_CONFIG_FILE"
ENV_CHECK = "ZEROPP_CHECK"
ENV_ENABLED = "ZEROPP_ENABLED"
"""The switch that goes over all settings: see ``is_enabled``."""
BLOCK = "zeropp_config"
"""The key under which a file of another program (Accelerate's) holds our settings."""
ENV_RECORD = "ZEROPP_RECORD"
"""The folder for records of steps: see ``step_record.py``."""
ENV_OTHER = frozenset({ENV_CONFIG_FILE, ENV_CHECK, ENV_ENABLED, ENV_RECORD, "ZEROPP_KERNELS"})
"""Variables with our prefix that are not fields of the config."""

_SWITCH_WORDS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}

AUTO: Literal["auto"] = "auto"
DEFAULT_BITS = 8
GRADIENT_BITS = (4, 8, 3)
"""Widths of codes in which gradients may cross nodes."""
NODE_GRADIENT_BITS = (4, 8)
"""Widths of codes in which gradients may travel within a node."""
NODE_WEIGHT_BITS = (8,)
"""Widths of codes in which weights may travel within a node."""
WEIGHT_BITS = (8, 4)
"""Widths of codes in which whole weights may travel."""
DELTA_BITS = (8, 4, 3, 2)
"""Widths of codes in which differences of weights may travel. ``ops/README.md`` says how a width is added to these lists."""
BITS_OF_MODE = {"values": (*WEIGHT_BITS, None), "delta": DELTA_BITS, "exact": (None,)}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"qwz_bits": 8, "qwz_intra_bits": 8, "hpz_size": "node", "qgz_bits": 4, "qgz_intra_bits": 4},
    "balanced": {},
    "half_model": {"qwz_mode": "delta", "qwz_bits": 4},
    "min_traffic": {"qwz_mode": "delta", "qwz_bits": 2},
    "exact": {"qwz_mode": "exact"},
    # For one machine whose GPUs have slow links: each rank is a node, so that every exchange is quantized. A secondary shard
    # would be 1/N of the weights for N = 1, the whole model.
    "pcie": {"ranks_per_node": 1, "hpz_size": None, "qwz_intra_bits": 8, "qgz_intra_bits": 8},
}
"""Settings under a name. ``scripts/results/losses.md`` holds what they cost in loss and save in bytes."""


@dataclasses.dataclass(frozen=True)
class ZeroPPConfig:
    """Settings of ZeRO++ for one model. A config is checked when it is made and cannot change afterwards.

    Args:
        qwz_mode: what trainable weights send across nodes: ``"values"`` the weights, ``"delta"`` their change since the last send
            (the next delta includes whatever this one rounded away), ``"exact"`` the 16-bit words that changed, unquantized.
            The last two need ``hpz_size``, and deltas fp32 masters (mixed precision keeps them so).
        qwz_bits: bits per weight in a gather: one of ``WEIGHT_BITS``, or None (the compute dtype, unquantized). Deltas take
            one of ``DELTA_BITS``. ``"exact"`` quantizes nothing, and turns the default into None.
        qwz_intra_bits: how weights travel within a node. None: each rank decodes its part of a unit, and the backend's own
            all-gather moves it in the compute dtype. 8: secondary shards travel as they are kept, and each rank decodes the
            whole unit. ``"auto"``: None on accelerators, 8 on CPU and where ``hpz_size`` spans nodes.
        hpz_size: number of ranks that share one copy of the weights, each holding a secondary shard of it: ``"node"`` (the
            ranks of a node), an int, or None (no copy is kept, and every gather crosses the nodes).
        hpz_bits: bits per weight of the secondary shard that deltas are added to: None (the compute dtype) or 8. Without
            deltas a secondary shard is kept in the form in which it crossed the nodes.
        qgz_bits: bits per gradient across nodes: one of ``GRADIENT_BITS``, or None (the reduce dtype, unquantized). 3 bits send a
            quarter less than 4, at 2.4 times the error; see ``scripts/results/real_model.md`` before you choose them.
        qgz_intra_bits: bits per gradient within a node: one of ``NODE_GRADIENT_BITS``, None (the reduce dtype, unquantized), or
            ``"auto"``: None on accelerators, 8 on CPU.
        qgz_until: fraction of training, 0 to 1, during which gradients are quantized (the paper trains the
            first part with qgZ and the rest without). The Trainer callback reports progress; other loops call
            ``handle.set_progress``.
        qgz_accumulator: dtype in which a node keeps the gradient sums of micro-steps that are not the last: ``"float32"``, or
            ``"bfloat16"``, which takes half of the memory. Sums are taken in fp32 all the same, and rounded to nearest. From some
            64 micro-steps on take fp32: a sum in bf16 stops growing once what is added is under 1/256 of it.
        qgz_accumulate: where the gradients of micro-steps add up. ``"node"``: every micro-step sums them within the node, and 1/N
            of the unit is kept. ``"rank"``: they stay on the rank at full size until the last micro-step, as
            under FSDP2's ``set_requires_gradient_sync(False)``. ``"whole"``: the weights that train stay on it too, so that
            each unit is gathered once per step (FSDP2's ``reshard_after_forward=False``).
        frozen_bits: bits in which frozen weights (LoRA's base) are stored: 8, 4 or None (the dtype they were loaded in).
            Frozen weights are sharded within the node in every case and do not cross nodes.
        pack_embeddings: whether ``frozen_bits`` packs embeddings and heads too. By default they stay as they were loaded, as
            with other quantizers, so that tokens can be added and heads trained.
        overlap: start collectives early and finish them late on backends without streams (gloo); run cross hops beside node
            hops on those with streams. Results are the same bit for bit; False shows what each collective costs.
        shared_memory: let the CPU ranks of one machine read each other's secondary shards instead of gathering them, unless
            ``qwz_intra_bits=None`` asks for gathers. Results are the same bit for bit; False sends the bytes through sockets.
        ranks_per_node: ``"auto"`` (``LOCAL_WORLD_SIZE``, which launchers export) or an int, which treats that many
            consecutive ranks as a node and so emulates several nodes on one machine.

    Raises:
        ValueError: a value is not allowed, or makes no sense beside another one. The message names the setting.
    """

    qwz_mode: Literal["values", "delta", "exact"] = "values"
    qwz_bits: int | None = DEFAULT_BITS
    qwz_intra_bits: int | Literal["auto"] | None = AUTO
    hpz_size: int | Literal["node"] | None = "node"
    hpz_bits: int | None = None
    qgz_bits: int | None = 4
    qgz_intra_bits: int | Literal["auto"] | None = AUTO
    qgz_until: float = 1.0
    qgz_accumulator: Literal["float32", "bfloat16"] = "float32"
    qgz_accumulate: Literal["node", "rank", "whole"] = "node"
    frozen_bits: int | None = None
    pack_embeddings: bool = False
    overlap: bool = True
    shared_memory: bool = True
    ranks_per_node: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        # Each value is checked alone first. The rules below compare values, and may rely on each being of its type.
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        if self.qwz_mode == "exact" and self.qwz_bits == DEFAULT_BITS:
            object.__setattr__(self, "qwz_bits", None)
        one_of(*BITS_OF_MODE[self.qwz_mode])(f"qwz_bits (with qwz_mode {self.qwz_mode!r})", self.qwz_bits)
        self._check_weights()
        self._check_gradients()
        if self.pack_embeddings and self.frozen_bits is None:
            raise ValueError(
                "pack_embeddings=True says what frozen_bits packs, but frozen_bits=None packs nothing. Set frozen_bits to 4 or "
                "8. A base that is packed while it loads takes ZeroPPQuantConfig(pack_embeddings=True)."
            )

    def _check_weights(self) -> None:
        """Raise ``ValueError`` where settings of the weights contradict each other."""
        if self.qwz_mode != "values" and self.hpz_size is None:
            raise ValueError(
                f"qwz_mode={self.qwz_mode!r} sends how weights differ from the copy that every node keeps, but hpz_size=None "
                'keeps none. Set hpz_size="node", or qwz_mode="values".'
            )
        if self.qwz_mode != "delta" and self.hpz_bits is not None:
            raise ValueError(
                'hpz_bits is for qwz_mode="delta" alone: other modes keep copies as they crossed. Set that mode, or leave '
                "hpz_bits at None."
            )

    def _check_gradients(self) -> None:
        """Raise ``ValueError`` where settings of the gradients contradict each other."""
        if self.qgz_until < 1 and not self.quantizes_gradients:
            raise ValueError(
                f"qgz_until={self.qgz_until} says when to stop quantizing gradients, but qgz_bits and "
                'qgz_intra_bits are both None ("auto" is None on accelerators), so they never are. Set qgz_bits, or leave '
                "qgz_until at 1.0."
            )

    @property
    def sends_deltas(self) -> bool:
        """Whether trainable weights cross nodes as rounded differences from a copy."""
        return self.qwz_mode == "delta"

    @property
    def sends_changes(self) -> bool:
        """Whether weights cross nodes as the 16-bit words that changed."""
        return self.qwz_mode == "exact"

    @property
    def accumulates_on_rank(self) -> bool:
        """Whether gradients stay on the rank, at full size, until the last micro-step."""
        return self.qgz_accumulate != "node"

    @property
    def keeps_weights(self) -> bool:
        """Whether weights that train stay gathered, at full size, until the last micro-step."""
        return self.qgz_accumulate == "whole"

    @property
    def of_frozen(self) -> dict[str, Any]:
        """The settings that say how frozen weights are stored."""
        return {"frozen_bits": self.frozen_bits, "pack_embeddings": self.pack_embeddings}

    @property
    def quantizes_gradients(self) -> bool:
        """Whether gradients are quantized in at least one of the two hops."""
        return self.qgz_bits is not None or self.qgz_intra_bits is not None

    @classmethod
    def preset(cls, name: str, **settings: Any) -> ZeroPPConfig:
        """Return the settings of ``PRESETS[name]``, with others beside or over them. ``"balanced"`` is the defaults."""
        return cls.from_dict({**settings, "preset": name})

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ZeroPPConfig:
        """Build a config from a mapping of fields.

        Args:
            settings: field names and values. The key ``preset`` names one of ``PRESETS``, which the others go over.

        Raises:
            TypeError: ``settings`` is not a mapping.
            ValueError: a key is unknown (the message names the nearest valid one) or a value is not allowed.
        """
        if not isinstance(settings, Mapping):
            raise TypeError(
                "ZeRO++ settings must be a mapping, a preset's name, a file, or None for those of the environment, got "
                f"{type(settings).__name__}: {settings!r}"
            )
        valid = ("preset", *field_names())
        for key in settings:
            if key not in valid:
                raise ValueError(f"Unknown ZeRO++ setting {key!r}.{hint(str(key), valid)} Valid: {', '.join(valid)}.")
        settings = dict(settings)
        preset = settings.pop("preset", "balanced")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(
                f"preset must be one of {', '.join(PRESETS)}, got {preset!r}.{nearest(str(preset), PRESETS)}"
            )
        # Settings beside a preset go over it, wherever each stands: in a file or, for ``from_env``, in a variable.
        return cls(**{**PRESETS[preset], **settings})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ZeroPPConfig:
        """Read a YAML or JSON file: the settings at top level, under ``zeropp_config:``, or a DeepSpeed file."""
        return cls.from_dict(_read_settings(Path(path)))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ZeroPPConfig:
        """Read the file (or preset) that ``ZEROPP_CONFIG_FILE`` names, then let ``ZEROPP_<FIELD>`` variables override it.

        A single setting goes over a preset, wherever each stands: with ``ZEROPP_PRESET`` the settings of the file stay.
        """
        environ = os.environ if environ is None else environ
        name = environ.get(ENV_CONFIG_FILE)
        settings = _read_named(name) if name else {}
        return cls.from_dict({**settings, **_env_settings(environ)})

    @classmethod
    def from_deepspeed(cls, settings: Mapping[str, Any]) -> ZeroPPConfig:
        """Translate a DeepSpeed configuration with ZeRO++ keys (``zero_quantized_weights`` and its siblings).

        Args:
            settings: the content of a DeepSpeed file. Its ``zero_optimization`` block must say stage 3.

        Raises:
            ValueError: another stage, a ZeRO++ key that has no translation, or none that turns ZeRO++ on; the message says what
                to set instead.
        """
        return cls.from_dict(translate_deepspeed(settings))

    @classmethod
    def resolve(cls, settings: ZeroPPConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> ZeroPPConfig:
        """Accept what users pass: a config, a mapping, a preset's name, a file's path, or None (the environment)."""
        if isinstance(settings, ZeroPPConfig):
            return settings
        if settings is None:
            return cls.from_env()
        if isinstance(settings, str):
            return cls.from_dict(_read_named(settings))
        if isinstance(settings, os.PathLike):
            return cls.from_file(settings)
        return cls.from_dict(settings)

    def resolve_node_bits(self, *, on_cpu: bool, copies_span_nodes: bool = False) -> ZeroPPConfig:
        """Return these settings with ``qwz_intra_bits`` and ``qgz_intra_bits`` as ``"auto"`` means them on a device.

        The links within a node of accelerators are fast: kernels that encode and decode take more time than fewer bytes save. On
        a CPU it is the other way round.

        Args:
            on_cpu: whether ranks compute on CPUs.
            copies_span_nodes: whether the ranks that share a copy of the weights are on several nodes. Gathers among them cross
                nodes.
        """
        weights = DEFAULT_BITS if on_cpu or copies_span_nodes else None
        gradients = DEFAULT_BITS if on_cpu else None
        return dataclasses.replace(
            self,
            qwz_intra_bits=weights if self.qwz_intra_bits == AUTO else self.qwz_intra_bits,
            qgz_intra_bits=gradients if self.qgz_intra_bits == AUTO else self.qgz_intra_bits,
        )

    def preset_name(self, *, on_cpu: bool) -> str | None:
        """Return the preset that these settings are, on whatever nodes; None if they are none.

        Args:
            on_cpu: as ``resolve_node_bits`` was told when it made these settings.
        """
        nodes = {"ranks_per_node": self.ranks_per_node}
        presets = {name: ZeroPPConfig(**nodes | settings) for name, settings in PRESETS.items()}
        return next((name for name, preset in presets.items() if self == preset.resolve_node_bits(on_cpu=on_cpu)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, fit for JSON and for ``from_dict``."""
        return dataclasses.asdict(self)


def is_enabled() -> bool:
    """Return what ``ZEROPP_ENABLED`` says; True where it is not set. With 0 the job runs on FSDP2's own collectives.

    It is no setting. Settings say how ZeRO++ runs, and a script that passes its own in Python reads none of the environment. The
    switch goes over all of them, so that a job can be compared with stock FSDP2 without a change in its files.

    Raises:
        ValueError: it is neither yes nor no.
    """
    text = os.environ.get(ENV_ENABLED, "1")
    if (answer := _SWITCH_WORDS.get(text.strip().lower())) is None:
        raise ValueError(
            f"{ENV_ENABLED} must be one of {', '.join(_SWITCH_WORDS)}, got {text!r}. Set 0 for stock FSDP2, or unset it."
        )
    return answer


def variables_of_settings() -> list[str]:
    """Return the names of the environment's variables that hold settings, or name a file of them."""
    others = ENV_OTHER - {ENV_CONFIG_FILE}
    return sorted(key for key in os.environ if key.startswith(ENV_PREFIX) and key not in others)


def field_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of the config."""
    return tuple(field.name for field in dataclasses.fields(ZeroPPConfig))


def check_misplaced(
    keys: Iterable[object], place: str, home: str = f"under `{BLOCK}:`. Indent it below that line"
) -> None:
    """Raise if a setting stands where nothing would read it.

    Args:
        keys: those of a place that holds no settings.
        place: the words for that place.
        home: the words for the place of settings.

    Raises:
        ValueError: a key is a setting, or a misspelt one.
    """
    names = ("preset", *field_names())
    for key in keys:
        if key in names or nearest(str(key), names, cutoff=0.8):
            raise ValueError(f"{key!r} stands {place}, where it has no effect: settings of ZeRO++ belong {home}.")


def is_like_block(key: object) -> bool:
    """Return whether a user may have meant all settings of ZeRO++ by this key."""
    name = str(key).lower()
    return any(word in name for word in ("zeropp", "zero_pp", "zero++", "zero-pp")) or bool(
        nearest(name, (BLOCK, "zeropp"), cutoff=0.8)
    )


def _read_named(name: str) -> dict[str, Any]:
    """Return the settings of the preset, or else of the file, that is called so. ``./balanced`` is a file in any case."""
    if name in PRESETS:
        return {"preset": name}
    # A path with a folder or a suffix is meant to be a file.
    if os.path.basename(name) == name and not Path(name).suffix and not Path(name).exists():
        raise ValueError(
            f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a ZeRO++ config file.{nearest(name, PRESETS)} Check the "
            "name, or the path."
        )
    return _read_settings(Path(name))


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, MAX_SETTINGS_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot read the ZeRO++ config file {str(path)!r}: {error}. Check the path.") from error
    try:
        settings = parse_settings(text, is_json=path.suffix == ".json")
    except ValueError as error:
        raise ValueError(f"The ZeRO++ config file {str(path)!r} is not valid YAML or JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"The ZeRO++ config file {str(path)!r} must hold `key: value` lines, got: {settings!r}")
    if DEEPSPEED_BLOCK in settings:
        if BLOCK in settings:
            raise ValueError(f"{str(path)!r} holds both `{DEEPSPEED_BLOCK}:` and `{BLOCK}:`. Remove one of them.")
        return translate_deepspeed(settings)
    if BLOCK not in settings:
        return settings
    check_misplaced(settings, f"at the top level of {str(path)!r}")
    block = settings[BLOCK]
    if isinstance(block, str) and block in PRESETS:
        return {"preset": block}
    if block is not None and not isinstance(block, dict):
        raise ValueError(f"{BLOCK} in {str(path)!r} must be a mapping of settings or a preset's name, got: {block!r}")
    return block or {}  # `zeropp_config:` with nothing under it means the defaults


def _env_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    settings = {}
    valid = ("preset", *field_names())
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX) or key in ENV_OTHER:
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        # A misspelt variable would otherwise leave its setting at the default, without a word.
        if name not in valid or key != key.upper():
            raise ValueError(f"Unknown environment variable {key}.{hint(name, valid, _variable_of)}")
        try:
            settings[name] = _parse_env_value(text)
        except ValueError as error:
            raise ValueError(f"The environment variable {key}={text!r} is not a valid YAML value: {error}") from error
    return settings


def _variable_of(setting: str) -> str:
    return ENV_PREFIX + setting.upper()


def _parse_env_value(text: str) -> Any:
    return None if text.strip().lower() in ("none", "null", "") else parse_settings(text)


_CHECKS: dict[str, Check] = {
    "qwz_mode": one_of(*BITS_OF_MODE),  # first: the bits of weights depend on it
    "qwz_intra_bits": one_of(AUTO, *NODE_WEIGHT_BITS, None),
    "hpz_size": positive_int_or("node", None),
    "hpz_bits": one_of(8, None),
    "qgz_bits": one_of(*GRADIENT_BITS, None),
    "qgz_intra_bits": one_of(AUTO, *NODE_GRADIENT_BITS, None),
    "qgz_until": fraction,
    "qgz_accumulator": one_of("float32", "bfloat16"),
    "qgz_accumulate": one_of("node", "rank", "whole"),
    "frozen_bits": one_of(8, 4, None),
    "pack_embeddings": flag,
    "overlap": flag,
    "shared_memory": flag,
    "ranks_per_node": positive_int_or("auto"),
}
"""The values that each setting allows by itself. ``qwz_bits`` is missing, because its values depend on ``qwz_mode``."""
