"""Wrong settings: in a mapping, a file, and variables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from catalogue import Mistake

from hf_zeropp import ZeroPPConfig, ops
from hf_zeropp.config import AUTO, BITS_OF_MODE, GRADIENT_BITS, NODE_GRADIENT_BITS, is_enabled


def settings(name: str, *words: str, **values: Any) -> Mistake:
    return Mistake(f"{name}: {values}", lambda: ZeroPPConfig.from_dict(values), words)


def variable(name: str, env: dict[str, str], *words: str, read: Callable[[], Any] = ZeroPPConfig.from_env) -> Mistake:
    return Mistake(name, read, words, env)


def file(name: str, text: str, *words: str, suffix: str = "yaml") -> Mistake:
    def read() -> None:
        path = Path(f"settings.{suffix}")
        path.write_text(text)
        ZeroPPConfig.from_file(path)

    return Mistake(name, read, words)


DELTA = {"qwz_mode": "delta", "qwz_bits": 4}

SETTINGS = [
    settings("misspelt setting", "'qwz_bitz'", "Did you mean 'qwz_bits'?", qwz_bitz=8),
    settings(
        "bits without deltas",
        "qwz_bits (with qwz_mode 'values')",
        f"one of {BITS_OF_MODE['values']}",
        "got 3",
        qwz_bits=3,
    ),
    settings("a number as text", f"one of {BITS_OF_MODE['values']}", "got '8'", qwz_bits="8"),
    settings("unknown mode", "one of ('values', 'delta', 'exact')", "got 'deltas'", qwz_mode="deltas"),
    settings("too few bits", "qgz_bits", f"one of {(*GRADIENT_BITS, None)}", "got 2", qgz_bits=2),
    settings(
        "too many bits", "qgz_intra_bits", f"one of {(AUTO, *NODE_GRADIENT_BITS, None)}", "got 16", qgz_intra_bits=16
    ),
    settings("no copies", "hpz_size", "positive int or one of ('node', None)", "got 0", hpz_size=0),
    settings("misspelt word", "hpz_size", "('node', None)", "got 'nodes'", hpz_size="nodes"),
    settings("bits of deltas", 'hpz_bits is for qwz_mode="delta" alone', "Set that mode", hpz_bits=8),
    settings("deltas of nothing", "hpz_size=None", 'Set hpz_size="node"', hpz_size=None, **DELTA),
    settings("more than all", "qgz_until", "from 0 to 1", "got 1.5", qgz_until=1.5),
    settings("until what", "Set qgz_bits", qgz_until=0.5, qgz_bits=None, qgz_intra_bits=None),
    settings("sums in fp16", "qgz_accumulator", "float32", "bfloat16", "got 'float16'", qgz_accumulator="float16"),
    settings("yes as text", "overlap", "true or false", "got 'yes'", overlap="yes"),
    settings("two frozen bits", "frozen_bits", "one of (8, 4, None)", "got 2", frozen_bits=2),
    settings("negative nodes", "ranks_per_node", "positive int or one of ('auto',)", "got -1", ranks_per_node=-1),
    settings("misspelt preset", "preset", "half_model", "Did you mean 'balanced'?", preset="ballanced"),
    settings("no preset of that name", "one of paper, balanced", "got 'fast'.", preset="fast"),
    settings("a key of DeepSpeed's", "DeepSpeed's key", "set qwz_bits to 8", zero_quantized_weights=True),
    settings("a size of DeepSpeed's", "DeepSpeed's key", "set hpz_size to the same", zero_hpz_partition_size=8),
    settings("a block of DeepSpeed's", "ZeroPPConfig.from_deepspeed", zero_optimization={"stage": 3}),
    settings("a number of nodes", "ranks_per_node, the number of ranks of each node", nodes=2),
    Mistake("a name for settings", lambda: ZeroPPConfig.resolve("fast"), ("neither a preset (paper, ", "config file")),
    Mistake("a misspelt name for settings", lambda: ZeroPPConfig.resolve("exakt"), ("Did you mean 'exact'?",)),
    Mistake("a list of settings", lambda: ZeroPPConfig.from_dict([8]), ("must be a mapping", "list")),
    variable("misspelt variable", {"ZEROPP_QGZ_BITZ": "8"}, "Did you mean 'ZEROPP_QGZ_BITS'?"),
    variable("a variable of DeepSpeed's", {"ZEROPP_ZERO_QUANTIZED_WEIGHTS": "1"}, "set ZEROPP_QWZ_BITS to 8"),
    variable("a variable for nodes", {"ZEROPP_NODES": "2"}, "ZEROPP_RANKS_PER_NODE, the number of ranks of each"),
    variable(
        "a word for a number", {"ZEROPP_QGZ_BITS": "four"}, "qgz_bits", f"one of {(*GRADIENT_BITS, None)}", "got 'four'"
    ),
    variable("a file that is not there", {"ZEROPP_CONFIG_FILE": "gone.yaml"}, "'gone.yaml'", "Check the path"),
    variable("a folder for a file", {"ZEROPP_CONFIG_FILE": "."}, "'.'", "Check the path"),
    variable("half a switch", {"ZEROPP_ENABLED": "maybe"}, "ZEROPP_ENABLED", "'maybe'", "Set 0", read=is_enabled),
    variable("unknown kernels", {}, "expected auto, avx512", "'sse'", read=lambda: ops.set_kernels("sse")),
    file("broken YAML", "qwz_bits: [8", "settings.yaml", "not valid YAML"),
    file("broken JSON", '{"qwz_bits": 8', "settings.json", "not valid YAML or JSON", suffix="json"),
    file("a list in a file", "- 8", "`key: value` lines", "[8]"),
    file("settings beside the block", "zeropp_config:\nqwz_bits: 4", "'qwz_bits'", "'settings.yaml'", "Indent it"),
    file("misspelt beside the block", "zeropp_config:\nqwz_bitz: 4", "'qwz_bitz'", "Indent it"),
    file("a word for the block", "zeropp_config: fast", "a mapping of settings or a preset's name", "'fast'"),
    file("two kinds of settings", "zero_optimization: {stage: 3}\nzeropp_config: {qwz_bits: 4}", "Remove one of them"),
    file("DeepSpeed without ZeRO++", "zero_optimization: {stage: 3}", "turns no part of ZeRO++ on", "ZEROPP_ENABLED=0"),
    file("stage 2 of DeepSpeed", "zero_optimization: {stage: 2}", "stage 3", "says stage 2"),
    file("unknown key of DeepSpeed", "zero_optimization: {stage: 3, zero_quantised_weights: true}", "Did you mean"),
    file(
        "LoCo of DeepSpeed",
        "zero_optimization: {stage: 3, zeropp_loco_param: {err_beta: 0.8}}",
        *("zeropp_loco_param", "error feedback"),
    ),
]
