from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from pico_analyze.config import (
    AnalysisConfig,
    ComponentEntry,
    ConfigError,
    MetricEntry,
    StepRange,
    load_config,
    not_built_yet,
)
from pico_analyze.metrics import METRICS

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "tests" / "fixtures" / "published" / "analysis"

GOOD = """
analysis_name: mine
runs: [runs/a]
steps: {start: 0, end: 100, step: 50}
metrics:
  - metric_name: norm
    norm_type: nuclear
    components:
      - {component_name: simple, data_type: weights, layer_suffixes: swiglu.w_2, layers: [0, 1]}
  - metric_name: cka
    target_checkpoint: 100
    data_split: val
    components:
      - component_name: ov_circuit
        data_type: activations
        layer_suffixes: {value_layer: attention.v_proj, output_layer: attention.o_proj}
"""


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "analysis.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load


@pytest.fixture
def problems(load):
    """What is wrong with a text, as a list of lines."""

    def problems(text, *overrides):
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return list(caught.value.problems)

    return problems


# ---- what is right


def test_defaults(load):
    config = load("")
    assert config == AnalysisConfig()
    assert (config.analysis_name, config.runs, config.steps, config.metrics) == (None, (), "all", ())
    assert config.monitoring.output_dir == "analysis_results"
    assert config.write_json is None


def test_null_sections_count_as_missing(load):
    assert load("monitoring:\n") == AnalysisConfig()
    assert load("monitoring: {wandb: }\n") == AnalysisConfig()


def test_values(load):
    config = load(GOOD)
    norm, cka = config.metrics
    assert config.steps == StepRange(start=0, end=100, step=50)
    assert norm.components[0] == ComponentEntry(
        component_name="simple", data_type="weights", layer_suffixes="swiglu.w_2", layers=(0, 1)
    )
    assert cka.components[0].layers == "all"
    assert cka.components[0].layer_suffixes == {"value_layer": "attention.v_proj", "output_layer": "attention.o_proj"}
    assert (norm.parameters, cka.parameters, cka.target_checkpoint) == ({"norm_type": "nuclear"}, {}, 100)


def test_own_parameters_of_cka_and_pwcca(load):
    text = GOOD.replace("target_checkpoint: 100", "target_checkpoint: last\n    estimator: plug_in")
    cka = load(text).metrics[1]
    assert (cka.target_checkpoint, cka.parameters) == ("last", {"estimator": "plug_in"})
    pwcca = load(text.replace("cka", "pwcca").replace("estimator: plug_in", "weights_from: y")).metrics[1]
    assert pwcca.parameters == {"weights_from": "y"}


def test_parameters_without_a_key_of_their_own(load, problems):
    text = GOOD.replace("norm_type: nuclear", "options: {k: 10, centre: columns, discard: 0.1}")
    text = text.replace("metric_name: norm", "metric_name: made_up")
    entry = load(text).metrics[0]
    assert entry.parameters == {"k": 10, "centre": "columns", "discard": 0.1}
    assert type(entry.parameters["k"]) is int
    assert load(text, "metrics.0.options.k=20").metrics[0].parameters["k"] == 20
    (line,) = problems(text.replace("k: 10", "estimator: debiased"))
    assert line.startswith('metrics.0.options: "estimator" is a key of its own: write estimator beside metric_name')
    for value in ("[1]", "null", "{a: b}"):
        (line,) = problems(text.replace("k: 10", f"k: {value}"))
        assert line.startswith("metrics.0.options: ")
        assert line.endswith("allowed: a mapping of text to text, or a whole number, or a number")


def test_to_yaml_reads_back_equal(load):
    for text in (GOOD, "", 'analysis_name: "12"\nruns: ["3e-4", "null", "2026-01-01", "true"]\n'):
        config = load(text)
        assert load(config.to_yaml()) == config


def test_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        AnalysisConfig().steps = "all"


def test_every_key_is_described():
    schema = AnalysisConfig.json_schema()
    sections = {"top level": schema, **schema["$defs"]}
    keys = [(name, key, value) for name, section in sections.items() for key, value in section["properties"].items()]
    assert len(keys) > 25
    assert [(name, key) for name, key, value in keys if "description" not in value and "$ref" not in value] == []


# ---- steps


@pytest.mark.parametrize(
    ("steps", "selected"),
    [
        ({"start": 0, "end": 100, "step": 30}, [0, 30, 60, 90]),  # the end only when hit
        ({"start": 0, "end": 90, "step": 30}, [0, 30, 60, 90]),
        ({"start": 5, "end": 5, "step": 1}, [5]),
        ([9, 0, 9], [0, 9]),
        ("all", [0, 1, 2, 10]),
        ([], []),
    ],
)
def test_select_steps(steps, selected):
    assert AnalysisConfig(steps=steps).select_steps([10, 0, 2, 1]) == selected


# ---- overrides


def test_overrides(load):
    config = load(
        GOOD,
        "metrics.1.target_checkpoint=50",
        "metrics.0.components.0.layers=all",
        "steps=[0, 1_000]",
        "monitoring.output_dir=elsewhere",
        "analysis_name=",
        "steps=[7]",  # the last of a key wins
    )
    assert config.metrics[1].target_checkpoint == 50
    assert config.metrics[0].components[0].layers == "all"
    assert config.monitoring.output_dir == "elsewhere"
    assert (config.analysis_name, config.steps) == (None, (7,))
    assert load(GOOD, "steps.end=50").steps == StepRange(start=0, end=50, step=50)


def test_an_override_reaches_one_entry_although_yaml_aliases_share_it(load):
    text = """
metrics:
  - metric_name: gini
    components: &shared
      - {component_name: simple, data_type: weights, layer_suffixes: swiglu.w_2}
  - metric_name: hoyer
    components: *shared
"""
    first, second = load(text, "metrics.0.components.0.layers=[1]").metrics
    assert (first.components[0].layers, second.components[0].layers) == ((1,), "all")


def test_wrong_overrides_are_all_named(problems):
    assert problems(GOOD, "steps", "metrics.2.norm_type=inf", "metrics.0.norm_type=nuclear", "runs=[") == [
        "steps: must read key.sub=value, e.g. metrics.0.target_checkpoint=100",
        "metrics.2.norm_type=inf: there is no entry 2; the list has 0 to 1",
        "runs=[: line 1, column 2: while parsing a flow node expected the node content, but found '<stream end>'",
    ]


def test_an_override_is_checked_like_the_file_and_named(problems):
    assert problems(GOOD, "metrics.0.norm_typ=inf", "step=all") == [
        "metrics.0.norm_typ=inf: unknown key; did you mean metrics.0.norm_type?",
        "step=all: unknown key; did you mean steps?",
    ]
    assert problems(GOOD, "metrics.0.norm_type=nuclear", "metrics.0.norm_type=inff") == [
        'metrics.0.norm_type=inff: "inff" is not allowed; allowed: one of "frobenius", "nuclear", "spectral", "inf", '
        '"inf_operator", or null'
    ]
    assert problems(GOOD, "steps={start: 5, end: 1, step: 1}") == [
        "steps={start: 5, end: 1, step: 1}: steps.end: 1 must be at least start 5"
    ]


def test_who_is_at_fault_file_or_command_line(load):
    for text, overrides, source in (
        (GOOD, ["steps=none"], "command line"),
        ("step: all\n" + GOOD, ["steps=none"], "analysis.yaml, with steps=none"),
        ("step: all\n" + GOOD, [], "analysis.yaml"),
        (GOOD, ["metrics.0.metric_name=gini"], "analysis.yaml, with metrics.0.metric_name=gini"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert caught.value.source.endswith(source)


PARAMETERS = {key for metric in METRICS.values() for key in metric.parameters}


@pytest.mark.parametrize("key", sorted(PARAMETERS - set(MetricEntry.model_fields)))
def test_a_parameter_one_level_too_high(problems, key):
    assert problems(GOOD, f"metrics.0.{key}=1") == [
        f"metrics.0.{key}=1: unknown key; a parameter of the metric that has no key of its own stands under options, "
        f"as in options: {{{key}: ...}}"
    ]


# ---- what is wrong


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("step: all", "step: unknown key; did you mean steps?"),
        ("output_dir: x", "output_dir: unknown key; did you mean monitoring.output_dir?"),
        ("data_type: weights", "data_type: unknown key; did you mean metrics.N.components.N.data_type?"),
        ("analysis_name: 3e-4", "analysis_name: 0.0003 is not allowed; allowed: text, or null"),
        ("runs: runs/a", 'runs: "runs/a" is not allowed; allowed: a list, each item text that is not empty'),
        (
            'steps: "10"',
            'steps: "10" is not allowed; allowed: a list, each item a whole number >= 0, '
            'or a mapping with the keys start, end, step, or "all"',
        ),
        (
            "steps: [0, -1]",
            "steps: [0, -1] is not allowed; allowed: a list, each item a whole number >= 0, "
            'or a mapping with the keys start, end, step, or "all"',
        ),
        ("steps: {start: 0, end: 5}", "steps.step: missing; needed: a whole number > 0"),
        ("steps: {start: 0, end: 5, step: 0}", "steps.step: 0 is not allowed; allowed: a whole number > 0"),
        ("steps: {start: 5, end: 0, step: 1}", "steps.end: 0 must be at least start 5"),
        ("monitoring: {save_to_wandb: 1}", "monitoring.save_to_wandb: 1 is not allowed; allowed: true or false"),
        (
            "metrics: [gini]",
            'metrics.0: "gini" is not allowed; allowed: a mapping with the keys metric_name, data_split, ',
        ),
        ("write_json: true", 'write_json: true is not allowed; allowed: "pico_v0", or null'),
        ("1: 2", "1: a key must be text; put it in quotes"),
        ("steps: all\nsteps: [1]", "line 2, column 1: the key steps stands twice"),
        ("steps: [", "line 2, column 1: while parsing a flow node"),
        ("[1]", "must hold `key: value` lines at the top level, not [1]"),
        ("analysis_name: a/b", 'analysis_name: "a/b" must consist of letters, digits, '),
        ("analysis_name: ..", 'analysis_name: ".." must consist of letters, digits, '),
    ],
)
def test_one_thing_wrong(problems, text, problem):
    (line,) = problems(text + "\n")
    assert line.startswith(problem)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("norm_type: nuclear", ""), "metrics.0.norm_type: null is not enough for norm; give one of frobenius, "),
        (
            ("target_checkpoint: 100", ""),
            "metrics.1.target_checkpoint: null is not enough for cka; give a step, last, previous, all, same or nearest_tokens",
        ),
        (("metric_name: norm", "metric_name: gini"), 'metrics.0.norm_type: "nuclear" is only for norm, not for gini'),
        (
            ("norm_type: nuclear", "norm_type: nuclear\n    options: {norm_type: inf}"),
            'metrics.0.options: "norm_type" is a key of its own: write norm_type beside metric_name',
        ),
        (("data_split: val", "weights_from: x"), 'metrics.1.weights_from: "x" is only for pwcca, not for cka'),
        (("data_split: val", ""), "metrics.1.data_split: null must be train or val for activations"),
        (("layers: [0, 1]", "layers: []"), "metrics.0.components.0.layers: [] selects nothing"),
        (("layers: [0, 1]", 'layers: ["0"]'), 'metrics.0.components.0.layers: ["0"] is not allowed; allowed: a list, '),
        (
            ("layers: [0, 1]", "order: pico_v0"),
            'metrics.0.components.0.order: "pico_v0" is only for the weights of ov_circuit',
        ),
        (
            ("data_type: weights", "data_type: weight"),
            'metrics.0.components.0.data_type: "weight" is not allowed; allowed',
        ),
        (
            ("layer_suffixes: swiglu.w_2", "role: values"),
            'metrics.0.components.0.role: "values" is not allowed; allowed: one of "q", "k", "v"',
        ),
        (
            ("layer_suffixes: swiglu.w_2", "layer_suffixes: swiglu.w_2, role: down"),
            'metrics.0.components.0.role: "down" stands in the place of layer_suffixes',
        ),
        (
            ("layer_suffixes: swiglu.w_2, ", ""),
            "metrics.0.components.0.layer_suffixes: null is not enough for simple; give it, or a role",
        ),
        (("component_name: simple, ", ""), "metrics.0.components.0.component_name: missing; needed: text"),
    ],
)
def test_an_entry_that_does_not_fit_together(problems, change, problem):
    lines = problems(GOOD.replace(*change))
    assert any(line.startswith(problem) for line in lines), lines


def test_roles_have_no_published_file(problems):
    text = GOOD.replace("layer_suffixes: swiglu.w_2", "role: down")
    (line,) = problems(text, "write_json=pico_v0")
    assert line.startswith('write_json=pico_v0: "pico_v0" names modules: give layer_suffixes, not role down')


def test_several_things_wrong_are_all_named_once(problems):
    text = """
analysis_nam: x
steps: 5
metrics:
  - metric_name: norm
    data_splt: val
    components:
      - {component_name: simple, data_type: weight, layer_suffixes: a}
      - {component_name: simple, layer_suffixes: b}
  - {metric_name: cka, norm_type: inf, components: []}
monitoring: {save_to_wandb: true, wandb: {entity: 3}}
"""
    lines = problems(text, "monitoring.output_dir=")
    assert [line.partition(": ")[0] for line in lines] == [
        "metrics.0.components.0.data_type",
        "metrics.0.components.1.data_type",
        "metrics.0.data_splt",
        "metrics.0.norm_type",
        "metrics.1.norm_type",
        "metrics.1.target_checkpoint",
        "metrics.1.components",
        "monitoring.wandb.entity",
        "monitoring.output_dir=",
        "steps",
        "analysis_nam",
    ]
    assert not any("wandb.project" in line for line in lines)  # looked at a section that is wrong already


def test_the_message_names_the_file(load, tmp_path):
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load("step: all\n")
    assert str(caught.value).startswith(f"{tmp_path / 'analysis.yaml'}:\n  step: unknown key")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"analysis_name: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"not a text file in UTF-8 \(byte 18\)"):
        load_config(tmp_path / "latin.yaml")


def test_yaml_cannot_make_python_objects(problems):
    (line,) = problems("analysis_name: !!python/object/apply:os.getcwd []\n")
    assert "could not determine a constructor" in line


def test_wandb_needs_to_know_where(problems):
    assert problems("monitoring: {save_to_wandb: true}\n") == [
        "monitoring.wandb.entity: null must not be empty when save_to_wandb is true",
        "monitoring.wandb.project: null must not be empty when save_to_wandb is true",
    ]


# ---- the files that there are


def test_published_demo():
    config = load_config(PUBLISHED / "demo.yaml")
    assert config.analysis_name == "pico-decoder-demo-1-analysis"
    assert config.select_steps([]) == [0, 50, 100]
    found = [
        (entry.metric_name, entry.data_split, entry.target_checkpoint, entry.norm_type, c.component_name, c.data_type)
        for entry in config.metrics
        for c in entry.components
    ]
    assert found == [
        ("cka", "val", 100, None, "ov_circuit", "activations"),
        ("pwcca", "val", 100, None, "ov_circuit", "activations"),
        ("per", "train", None, None, "simple", "gradients"),
        ("condition_number", "val", None, None, "simple", "weights"),
        ("gini", "val", None, None, "simple", "weights"),
        ("hoyer", "train", None, None, "simple", "gradients"),
        ("norm", "val", None, "nuclear", "ov_circuit", "weights"),
    ]
    assert all(c.layers == (0, 11) for entry in config.metrics for c in entry.components)
    assert (config.monitoring.wandb.entity, config.monitoring.wandb.project) == ("pico-lm", "pico-demo")


@pytest.mark.parametrize("size", ["tiny", "small", "medium", "large"])
def test_published_ov(size):
    config = load_config(PUBLISHED / f"pico-decoder-{size}-ov.yaml")
    assert config.analysis_name == f"pico-decoder-{size}-ov-analysis"
    assert config.select_steps([]) == list(range(0, 50_001, 5000))
    assert [entry.metric_name for entry in config.metrics] == ["cka", "per", "condition_number", "gini", "norm"]
    assert (config.metrics[0].target_checkpoint, config.metrics[4].norm_type) == (50_000, "frobenius")
    for entry in config.metrics[1:]:
        assert [c.data_type for c in entry.components] == ["weights", "gradients"]
    for entry in config.metrics:
        assert entry.data_split == "val"
        for c in entry.components:
            assert c.layers == tuple(range(12))
            assert c.layer_suffixes == {"value_layer": "attention.v_proj", "output_layer": "attention.o_proj"}
    assert config.monitoring.wandb.project == "pico-analysis"


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.yaml")), ids=lambda path: path.stem)
def test_published_files_ask_for_wandb_which_is_not_built_yet(path):
    (line,) = not_built_yet(load_config(path))
    assert "use monitoring.save_to_wandb=false" in line
    assert not_built_yet(load_config(path, ["monitoring.save_to_wandb=false"])) == []


@pytest.mark.parametrize("path", sorted((ROOT / "analysis_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_our_files(path):
    config = load_config(path)
    assert config.analysis_name == path.stem
    assert config.metrics
    assert not_built_yet(config) == []
    assert f"pico-analyze run --config analysis_configs/{path.name}" in path.read_text()
    assert config == AnalysisConfig.model_validate(yaml.safe_load(path.read_text()))  # nothing YAML 1.1 reads otherwise


def test_python_can_say_the_same():
    config = AnalysisConfig(
        runs=["runs/a"],
        steps=[0, 1],
        metrics=[
            MetricEntry(
                metric_name="gini",
                components=[ComponentEntry(component_name="simple", data_type="weights", layer_suffixes="swiglu.w_2")],
            )
        ],
    )
    assert config.steps == (0, 1)
    with pytest.raises(ValueError, match="norm_type: null is not enough for norm"):
        MetricEntry(metric_name="norm", components=config.metrics[0].components)
