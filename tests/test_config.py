"""Settings from every source. An error names the setting, what came, and what is valid."""

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zeropp import ZeroPPConfig
from hf_zeropp import config as config_module
from hf_zeropp.config import (
    BITS_OF_MODE,
    DELTA_BITS,
    GRADIENT_BITS,
    NODE_GRADIENT_BITS,
    NODE_WEIGHT_BITS,
    PRESETS,
    WEIGHT_BITS,
    field_names,
)
from hf_zeropp.ops.format import QMAX

pytestmark = pytest.mark.one_rank

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "hf_zeropp" / "README.md"
WIDTHS = {
    "qwz_bits": (*WEIGHT_BITS, *DELTA_BITS),
    "qwz_intra_bits": NODE_WEIGHT_BITS,
    "qgz_bits": GRADIENT_BITS,
    "qgz_intra_bits": NODE_GRADIENT_BITS,
}


@pytest.mark.parametrize("on_cpu", [False, True])
def test_auto_quantizes_within_a_node_on_cpu_alone(on_cpu: bool) -> None:
    bits = 8 if on_cpu else None
    resolved = ZeroPPConfig(hpz_size=4).resolve_node_bits(on_cpu=on_cpu)
    assert resolved == ZeroPPConfig(hpz_size=4, qwz_intra_bits=bits, qgz_intra_bits=bits)
    # Gathers among ranks of several nodes cross nodes; reductions have groups of their own.
    spanning = ZeroPPConfig(hpz_size=4).resolve_node_bits(on_cpu=on_cpu, copies_span_nodes=True)
    assert (spanning.qwz_intra_bits, spanning.qgz_intra_bits) == (8, bits)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_is_said_explicitly_stays_on_every_device(on_cpu: bool) -> None:
    for bits in (8, None):
        config = ZeroPPConfig(qwz_intra_bits=bits, qgz_intra_bits=bits)
        assert config.resolve_node_bits(on_cpu=on_cpu, copies_span_nodes=True) == config
    for name in PRESETS:
        preset = ZeroPPConfig.preset(name).resolve_node_bits(on_cpu=on_cpu)
        assert preset.preset_name(on_cpu=on_cpu) == name
        # The links within a node are slow where these presets are for.
        slow = {"paper": (8, 4), "pcie": (8, 8)}.get(name, (8, 8) if on_cpu else (None, None))
        assert (preset.qwz_intra_bits, preset.qgz_intra_bits) == slow


def test_auto_may_leave_nothing_to_end() -> None:
    config = ZeroPPConfig(qgz_until=0.5, qgz_bits=None)
    assert config.resolve_node_bits(on_cpu=True).qgz_intra_bits == 8
    with pytest.raises(ValueError, match='qgz_until=0.5 .*"auto" is None on accelerators.* Set qgz_bits'):
        config.resolve_node_bits(on_cpu=False)


def test_the_config_allows_what_the_format_can_do() -> None:
    for name, widths in WIDTHS.items():
        assert {*widths} <= QMAX.keys()
        for bits in widths:
            ZeroPPConfig(**{name: bits}, qwz_mode="values" if bits in WEIGHT_BITS or name != "qwz_bits" else "delta")


def test_presets_are_defaults_with_a_name() -> None:
    paper, balanced, half, least = map(ZeroPPConfig.preset, ("paper", "balanced", "half_model", "min_traffic"))
    assert (paper.qwz_bits, paper.qgz_bits, paper.qgz_intra_bits) == (8, 4, 4)
    assert balanced == ZeroPPConfig()
    assert half == ZeroPPConfig(qwz_mode="delta", qwz_bits=4)
    assert least == ZeroPPConfig(qwz_mode="delta", qwz_bits=2)
    assert (
        ZeroPPConfig.preset("exact") == ZeroPPConfig(qwz_mode="exact") == ZeroPPConfig(qwz_mode="exact", qwz_bits=None)
    )
    assert ZeroPPConfig.preset("min_traffic", qwz_bits=4).qwz_bits == 4
    assert ZeroPPConfig.from_dict({"preset": "paper", "qgz_until": 0.5}) == dataclasses.replace(paper, qgz_until=0.5)
    assert ZeroPPConfig.from_env({"ZEROPP_PRESET": "min_traffic", "ZEROPP_QWZ_BITS": "3"}).qwz_bits == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"qwz_bits": True}, ["qwz_bits", "True"]),
        ({"qgz_intra_bits": 4.0}, ["qgz_intra_bits", "4.0"]),
        ({"qgz_intra_bits": "Auto"}, ["qgz_intra_bits", "'Auto'", "'auto'"]),
        ({"qwz_intra_bits": 4}, ["qwz_intra_bits", "4", "('auto', 8, None)"]),
        ({"ranks_per_node": None}, ["ranks_per_node", "None", "auto"]),
        ({"qwz_mode": "delta", "qwz_bits": None}, ["qwz_bits (with qwz_mode 'delta')", str(DELTA_BITS), "None"]),
        ({"qwz_mode": "exact", "hpz_size": None}, ["hpz_size", "node"]),
        ({"qwz_mode": "exact", "qwz_bits": 4}, ["qwz_bits (with qwz_mode 'exact')", "None", "4"]),
        ({"qgz_accumulator": None}, ["qgz_accumulator", "float32", "bfloat16", "None"]),
        ({"qgz_accumulate": "gpu"}, ["qgz_accumulate", "node", "rank", "whole", "'gpu'"]),
        ({"qgz_bits": 2}, ["qgz_bits", str((*GRADIENT_BITS, None)), "got 2"]),
        ({"qgz_until": 1.5}, ["qgz_until", "from 0 to 1", "got 1.5"]),
        ({"hpz_size": 0}, ["hpz_size", "positive int or one of ('node', None)", "got 0"]),
        ({"hpz_size": "None"}, ["hpz_size", "got 'None'", "In a YAML or JSON file None is `null`."]),
        ({"qgz_bits": "None"}, ["qgz_bits", "got 'None'", "In a YAML or JSON file None is `null`."]),
        ({"hpz_bits": 8}, ['hpz_bits is for qwz_mode="delta" alone']),
        ({"frozen_bits": 2}, ["frozen_bits", "(8, 4, None)", "got 2"]),
        ({"overlap": "yes"}, ["overlap", "true or false", "'yes'"]),
    ],
    ids=str,
)
def test_bad_values_name_the_setting_what_came_and_what_is_valid(settings: dict, named: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ZeroPPConfig(**settings)
    for words in named:
        assert words in str(error.value)


FOUR = {"qwz_bits": 4, "qgz_bits": None}


@pytest.mark.parametrize(
    ("name", "text", "chosen"),
    [
        ("z.yaml", "qwz_bits: 4\nqgz_bits: null\n", FOUR),
        ("z.yaml", "zeropp_config:\n  qwz_bits: 4\n  qgz_bits: null\n", FOUR),
        ("z.json", '{"qwz_bits": 4, "qgz_bits": null}', FOUR),
        ("z.yaml", "zeropp_config:\n", {}),  # an empty block means the defaults
    ],
)
def test_files_in_yaml_and_json(tmp_path, name: str, text: str, chosen: dict) -> None:
    path = tmp_path / name
    path.write_text(text)
    expected = ZeroPPConfig(**chosen)
    assert ZeroPPConfig.from_file(path) == ZeroPPConfig.resolve(str(path)) == expected
    assert ZeroPPConfig.from_env({"ZEROPP_CONFIG_FILE": str(path)}) == expected


def test_environment_overrides_the_file(tmp_path) -> None:
    path = tmp_path / "z.yaml"
    path.write_text("qwz_bits: 4\nhpz_size: 2\n")
    environ = {
        "ZEROPP_CONFIG_FILE": str(path),
        "ZEROPP_QWZ_BITS": "none",
        "ZEROPP_QGZ_UNTIL": "0.5",
        "ZEROPP_KERNELS": "reference",
        "OTHER": "x",
    }
    assert ZeroPPConfig.from_env(environ) == ZeroPPConfig(qwz_bits=None, hpz_size=2, qgz_until=0.5)


def test_a_deepspeed_file_is_translated(tmp_path) -> None:
    """Other keys, and features that are off, are no error."""
    off = {"zeropp_loco_param": None, "zero_quantized_nontrainable_weights": False, "overlap_comm": True}
    hpz = {"stage": 3, "zero_hpz_partition_size": 8}
    zero = hpz | {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": zero | off}))
    expected = ZeroPPConfig(qwz_bits=8, hpz_size=8, qgz_bits=4, qgz_intra_bits=4)
    assert ZeroPPConfig.from_file(path) == expected
    # Variables go over such a file, as the errors promise.
    environ = {"ZEROPP_CONFIG_FILE": str(path), "ZEROPP_FROZEN_BITS": "8"}
    assert ZeroPPConfig.from_env(environ) == dataclasses.replace(expected, frozen_bits=8)
    one = ZeroPPConfig.from_deepspeed({"zero_optimization": hpz})
    assert one == ZeroPPConfig(qwz_bits=None, hpz_size=8, qgz_bits=None, qgz_intra_bits=None)
    with pytest.raises(ValueError, match="zero_optimization.*mapping"):
        ZeroPPConfig.from_deepspeed({"zero_optimization": True})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"zero_quantized_nontrainable_weights": True}, ["frozen_bits=8", "ZEROPP_FROZEN_BITS"]),
        ({"zeropp_new_thing": None}, ["'zeropp_new_thing'", "Translated: zero_quantized_weights"]),
        ({"zero_quantized_gradients": {"enabled": True, "num_bits": 8}}, ["zero_quantized_gradients must be true or"]),
        ({"zero_hpz_partition_size": "8"}, ["zero_hpz_partition_size must be a positive int, got '8'"]),
        ({"zeropp_loco_param": {"err_beta": 0.8}}, ["zeropp_loco_param", "error feedback"]),
        ({"stage": 2, "zero_quantized_weights": True}, ["stage 3", "says stage 2"]),
        ({}, ["turns no part of ZeRO++ on", "ZEROPP_ENABLED=0"]),
    ],
    ids=str,
)
def test_deepspeed_keys_without_translation_are_refused_with_a_remedy(keys: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ZeroPPConfig.from_deepspeed({"zero_optimization": {"stage": 3, **keys}})
    for word in words:
        assert word in str(error.value)


def test_a_presets_name_stands_for_its_settings(tmp_path, monkeypatch) -> None:
    """A name does where a mapping or a file does; a path with a folder or a suffix is a file in any case."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exact").write_text("qgz_bits: 8")
    (tmp_path / "exact.yaml").write_text("zeropp_config: half_model")
    (tmp_path / "mine").write_text("qgz_bits: 3")
    exact = ZeroPPConfig.preset("exact")
    assert ZeroPPConfig.resolve("exact") == exact
    assert ZeroPPConfig.from_env({"ZEROPP_CONFIG_FILE": "exact"}) == exact
    assert ZeroPPConfig.from_env({"ZEROPP_CONFIG_FILE": "exact", "ZEROPP_QGZ_BITS": "8"}).qgz_bits == 8
    for path in ("./exact", tmp_path / "exact", Path("exact")):
        assert ZeroPPConfig.resolve(path) == ZeroPPConfig(qgz_bits=8)
    assert ZeroPPConfig.resolve("exact.yaml") == ZeroPPConfig.preset("half_model")
    assert ZeroPPConfig.resolve("mine") == ZeroPPConfig(qgz_bits=3)
    with pytest.raises(ValueError, match="'ballanced' is neither a preset .* Did you mean 'balanced'"):
        ZeroPPConfig.resolve("ballanced")


def test_every_setting_is_checked_and_documented() -> None:
    assert {*config_module._CHECKS, "qwz_bits"} == set(field_names())
    # Without the indentation of the class, which Python 3.13 leaves out by itself.
    arguments = inspect.cleandoc(ZeroPPConfig.__doc__).split("Args:")[1].split("Raises:")[0]
    described = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    assert [name for name, _ in described] == list(field_names())


def table_of_settings(path: Path) -> dict[str, list[str]]:
    """Rows of the tables whose first column is ``setting``: name -> the other cells."""
    rows, is_inside = {}, False
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        is_inside = line.startswith("|") and (is_inside or cells[0] == "setting")
        if is_inside and cells[0].startswith("`"):
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def test_the_guide_lists_exactly_the_settings_with_their_defaults() -> None:
    rows = table_of_settings(GUIDE)
    defaults = {name: ast.literal_eval(default.strip("`")) for name, (_, default, _) in rows.items()}
    assert defaults == ZeroPPConfig().to_dict()
    assert list(rows) == list(field_names())


def test_the_guide_names_values_that_are_allowed_and_every_width() -> None:
    for name, (kind, _, _) in table_of_settings(GUIDE).items():
        for literal in re.findall(r"`([^`]+)`", kind):
            value = ast.literal_eval(literal)
            if name == "qwz_bits":
                assert any(value in bits for bits in BITS_OF_MODE.values())
            else:
                config_module._CHECKS[name](name, value)
        if name in WIDTHS:
            assert {int(bits) for bits in re.findall(r"`(\d)`", kind)} == {*WIDTHS[name]}, name


def test_the_readme_names_every_preset_and_no_other() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)`", text.partition("## Presets")[2].partition("\n## ")[0], re.MULTILINE)
    # One machine alone has a use for pcie: it is named where one machine is spoken of.
    assert {*rows, "pcie"} == {*PRESETS} and "preset `pcie`" in text
    assert "| `balanced`, the default |" in text and ZeroPPConfig.preset("balanced") == ZeroPPConfig()


VALID = st.fixed_dictionaries(
    {
        "qwz_bits": st.sampled_from(BITS_OF_MODE["values"]),
        "hpz_size": st.sampled_from(["node", None, 1, 2, 8]),
        "qgz_bits": st.sampled_from(GRADIENT_BITS),
        "qwz_intra_bits": st.sampled_from(["auto", *NODE_WEIGHT_BITS, None]),
        "qgz_intra_bits": st.sampled_from(["auto", *NODE_GRADIENT_BITS, None]),
        "qgz_until": st.floats(0, 1),
        "ranks_per_node": st.sampled_from(["auto", 1, 4]),
        "overlap": st.booleans(),
    }
)


@settings(max_examples=50, deadline=None)
@given(VALID)
def test_every_source_gives_the_same_settings(chosen: dict) -> None:
    config = ZeroPPConfig(**chosen)
    environ = {f"ZEROPP_{name.upper()}": yaml.safe_dump(value) for name, value in chosen.items()}
    assert ZeroPPConfig.from_env(environ) == config
    assert ZeroPPConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    assert ZeroPPConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(field_names()), st.one_of(st.text(), st.integers(), st.floats(), st.lists(st.integers())))
def test_any_value_is_taken_or_refused_by_name(name: str, value: object) -> None:
    """Never another exception, never an error that does not name the setting."""
    try:
        ZeroPPConfig(**{name: value})
    except ValueError as error:
        assert name in str(error)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("zeropp_config:\nqwz_bits: 4", "'qwz_bits' stands at the top level .* Indent it"),
        ("zero_optimization: {stage: 3}\nzeropp_config: {qwz_bits: 4}", "Remove one of them"),
        ("zeropp_config: 8", "zeropp_config in 'z.yaml' must be a mapping"),
        ("zeropp_config: [1]", "zeropp_config in 'z.yaml' must be a mapping"),
        ("just words", "'z.yaml' must hold `key: value` lines"),
        ("", "'z.yaml' must hold `key: value` lines"),
        ("preset: [paper]", "preset must be one of"),
        ("qwz_bitz: 8", "Did you mean 'qwz_bits'"),
        ("zero_quantized_weights: true", "DeepSpeed's key: set qwz_bits to 8"),
        ("num_nodes: 2", "told by ranks_per_node"),
        # Files of an attacker: they are refused before they take memory or call a function, and the message does not repeat them.
        ("qgz_bits: 4\n" + "#" * 2**21, "more than 1048576 bytes"),
        ("qgz_bits: " + "[" * 10**4, "nested too deeply"),
        ("!!python/object/apply:os.mkdir [exploded]", "not valid YAML"),
    ],
    ids=lambda text: text[:30],
)
def test_files_whose_settings_cannot_be_in_force_are_refused(tmp_path, monkeypatch, content: str, match: str) -> None:
    """Through the environment too, where settings of variables are laid over them."""
    monkeypatch.chdir(tmp_path)
    Path("z.yaml").write_text(content)
    for read in (ZeroPPConfig.from_file, lambda path: ZeroPPConfig.from_env({"ZEROPP_CONFIG_FILE": path})):
        with pytest.raises(ValueError, match=match) as error:
            read("z.yaml")
        assert len(str(error.value)) < 1000 and not Path("exploded").exists()


@pytest.mark.parametrize(
    ("variable", "text", "match"),
    [
        ("ZEROPP_QWZ_BITS", "[8", "ZEROPP_QWZ_BITS='\\[8'"),
        ("ZEROPP_QWZ_BITZ", "8", "Did you mean 'ZEROPP_QWZ_BITS'"),
        ("ZEROPP_CONFIG_FILE", "gone.yaml", "'gone.yaml'.* Check the path"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ZeroPPConfig.from_env({variable: text})


def test_the_switch_is_on_or_off(monkeypatch) -> None:
    monkeypatch.setenv("ZEROPP_ENABLED", "maybe")
    with pytest.raises(ValueError, match="ZEROPP_ENABLED must be one of .*'maybe'"):
        config_module.is_enabled()
