from pathlib import Path

import pytest

from pico_train.config import ConfigError, RunConfig, load_config, to_yaml
from pico_train.errors import UserError
from pico_train.suite import Suite, as_suite, json_schema, load, selected

REPOSITORY = Path(__file__).parents[2]

LISTED = """
base:
  training: {max_steps: 10}
  model: {n_layers: 2}
vary:
  - {name: small, model.d_model: 96, model: {max_seq_len: 64}}
  - {name: large, model.d_model: 192, model.n_layers: 3}
"""
GRID = """
name: sweep
base:
vary:
  training.optimization.lr: [1e-3, 3e-4]
  seeds.weights: [0, 1]
"""


def suite_from(folder: Path, text: str, *overrides: str, file: str = "sizes.yaml") -> Suite:
    path = folder / file
    path.write_text(text, encoding="utf-8")
    return load(path, overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        suite_from(folder, text, *overrides)
    return list(caught.value.problems)


def test_a_list_of_runs(tmp_path: Path) -> None:
    suite = suite_from(tmp_path, LISTED)
    assert (suite.name, suite.path) == ("sizes", tmp_path / "sizes.yaml")
    small, large = suite.runs
    assert small.checkpointing.run_name == "sizes-small"
    assert large.checkpointing.run_name == "sizes-large"
    assert (small.model.d_model, small.model.n_layers, small.model.max_seq_len) == (96, 2, 64)
    assert (large.model.d_model, large.model.n_layers, large.model.max_seq_len) == (192, 3, 2048)
    assert small.training == large.training
    assert small.training.max_steps == 10


def test_a_grid(tmp_path: Path) -> None:
    suite = suite_from(tmp_path, GRID)
    assert suite.name == "sweep"
    assert [(run.checkpointing.run_name, run.training.optimization.lr, run.seeds.weights) for run in suite.runs] == [
        ("sweep-lr-0.001_weights-0", 0.001, 0),
        ("sweep-lr-0.001_weights-1", 0.001, 1),
        ("sweep-lr-0.0003_weights-0", 0.0003, 0),
        ("sweep-lr-0.0003_weights-1", 0.0003, 1),
    ]


def test_a_grid_over_values_that_cannot_stand_in_the_name_of_a_folder(tmp_path: Path) -> None:
    text = """
    vary:
      training.optimization.betas: [[0.9, 0.95], [0.9, 0.999]]
      data.tokenizer.name: [some/where, else]
      training.optimization.max_grad_norm: [null, 1]
      checkpointing.learning_dynamics.sequence_idx: [-1, 1]
    """
    names = [run.checkpointing.run_name for run in suite_from(tmp_path, text).runs]
    assert len(set(names)) == 16
    assert names[0] == "sizes-betas-0.9-0.95_name-some-where_max_grad_norm-null_sequence_idx--1"


def test_overrides_apply_to_every_run(tmp_path: Path) -> None:
    suite = suite_from(tmp_path, LISTED, "training.max_steps=3", "seeds.data=7", "name=other")
    assert [(run.training.max_steps, run.seeds.data) for run in suite.runs] == [(3, 7), (3, 7)]
    assert [run.checkpointing.run_name for run in suite.runs] == ["other-small", "other-large"]
    assert suite.name == "other"


def test_a_run_is_a_suite_of_one(tmp_path: Path) -> None:
    suite = suite_from(tmp_path, "training: {max_steps: 10}", "training.max_steps=5", file="mine.yaml")
    assert suite.name is None
    assert suite.runs == (load_config(tmp_path / "mine.yaml", ["training.max_steps=5"]),)
    assert suite.runs[0].checkpointing.run_name == "mine"


def test_each_run_loads_back_equal_on_its_own(tmp_path: Path) -> None:
    for run in suite_from(tmp_path, GRID).runs:
        (tmp_path / "config.yaml").write_text(to_yaml(run))
        assert load_config(tmp_path / "config.yaml") == run


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("base: {}", ["vary: null is not allowed; allowed: a list of {name: small, model.d_model: 64}, or a mapping"]),
        ("vary: []", ["vary: [] is not allowed"]),
        ("vary: {}", ["vary: {} is not allowed"]),
        ("vary: {seeds.data: 3}", ["vary.seeds.data: 3 is not allowed; allowed: a list of values"]),
        ("vary: {seeds.data: []}", ["vary.seeds.data: [] is not allowed"]),
        ("vary: [3, {seeds.data: 1}]", ["vary.0: 3 is not allowed", "vary.1.name: null is not allowed"]),
        ("vary: [{name: a/b}]", ['vary.0.name: "a/b" must consist of letters, digits']),
        ("vary: [{name: .a}]", ['vary.0.name: ".a" must consist of letters, digits']),
        ("vary: [{name: 3}]", ["vary.0.name: 3 is not allowed; allowed: text"]),
        ("{base: 3, vary: [{name: a}]}", ["base: 3 is not allowed; allowed: a mapping"]),
        ("{name: a b, vary: [{name: a}]}", ['name: "a b" must consist of letters, digits']),
        ("{name: [a], vary: [{name: a}]}", ['name: ["a"] is not allowed; allowed: text']),
        (
            "{vary: [{name: a}], training: {max_steps: 3}, varied: 1}",
            [
                "training: unknown key; a section of the runs: put it below base, as base: {training: ...}",
                "varied: unknown key; a suite has name, base, vary",
            ],
        ),
        ("vary: [{name: a}, {name: a, seeds.data: 1}]", ['vary: two runs have the name "a"']),
        ("vary: [{name: a}, {name: b}]", ["b: the same run as a"]),
        ("vary: [{name: a, seeds.data: 0}, {name: b, seeds.data: 1}, {name: c}]", ["c: the same run as a"]),
        ("vary: {seeds.data: [1, 1]}", ['vary: two runs have the name "data-1"']),
        (
            "{base: {checkpointing: {run_name: x}}, vary: [{name: a}]}",
            ["checkpointing.run_name: a suite names its runs <suite>-<name>"],
        ),
        ("vary: [{name: a, checkpointing.run_name: x}]", ["checkpointing.run_name: a suite names its runs"]),
    ],
)
def test_suites_that_are_refused(tmp_path: Path, text: str, lines: list[str]) -> None:
    found = problems(tmp_path, text)
    assert len(found) == len(lines)
    for problem, line in zip(found, lines, strict=True):
        assert problem.startswith(line)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.d_model=32", "model.d_model"),
        ("model={d_model: 32}", "model.d_model"),
        ("model=", "model"),
        ("checkpointing.run_name=x", "checkpointing.run_name"),
    ],
)
def test_overrides_that_would_make_the_runs_the_same_are_refused(tmp_path: Path, override: str, key: str) -> None:
    (problem,) = problems(tmp_path, LISTED, override)
    assert problem.startswith(f"{key}: ")


def test_what_is_wrong_in_all_runs_is_said_once_and_what_is_wrong_in_some_names_them(tmp_path: Path) -> None:
    text = """
    base: {training: {max_step: 10}, seeds: {data: x}}
    vary:
      - {name: a, model.d_model: 100}
      - {name: b, model.d_model: 100, model.n_layers: "2"}
      - {name: c, model.d_model: 96}
    """
    found = problems(tmp_path, text)
    assert sorted(line.split(";")[0] for line in found) == [
        "a, b: model.attention_n_heads: 12 must divide d_model 100 into heads of even width (rotary pairs)",
        'b: model.n_layers: "2" is not allowed',
        'seeds.data: "x" is not allowed',
        "training.max_step: unknown key",
    ]


def test_from_python(tmp_path: Path) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text(LISTED)
    suite = load(path)
    assert as_suite(str(path)) == suite
    assert as_suite(suite) is suite
    mapping = {"name": "sizes", "base": {"training": {"max_steps": 10}, "model": {"n_layers": 2}}}
    mapping["vary"] = [
        {"name": "small", "model.d_model": 96, "model.max_seq_len": 64},
        {"name": "large", "model.d_model": 192, "model.n_layers": 3},
    ]
    assert as_suite(mapping).runs == suite.runs
    one = as_suite(suite.runs[0], ["training.max_steps=4"])
    assert one.name is None
    assert one.runs[0].training.max_steps == 4
    assert one.runs[0].checkpointing.run_name == "sizes-small"
    assert as_suite({"checkpointing": {"run_name": "x"}}).runs[0].model == RunConfig().model


def test_from_python_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"checkpointing\.run_name: null takes the name of the file, and there is none"
    ):
        as_suite(RunConfig())
    with pytest.raises(ConfigError, match="name: null is not allowed"):
        as_suite({"vary": [{"name": "a"}]})
    path = tmp_path / "sizes.yaml"
    path.write_text(LISTED)
    with pytest.raises(ConfigError, match="takes no overrides"):
        as_suite(load(path), ["training.max_steps=4"])


def test_the_demo_is_three_sizes_that_differ_in_size_only() -> None:
    suite = load(REPOSITORY / "configs" / "demo.yaml")
    assert [run.checkpointing.run_name for run in suite.runs] == ["demo-tiny", "demo-small", "demo-medium"]
    # 2 * 2048 d for the embeddings, 4 blocks of 3 d^2 attention (2 + 2/2), 12 d^2 SwiGLU and 2 d norms, d at the end
    assert [run.model.n_parameters for run in suite.runs] == [
        4096 * d + 4 * (15 * d * d + 2 * d) + d for d in (32, 64, 128)
    ]
    steps = [0, 1, 2, 4, 8, 16, 32, 64, *range(100, 901, 100)]
    assert all(run.checkpointing.save_steps(run.training.max_steps) == steps for run in suite.runs)
    same = {"d_model": 32, "activation_hidden_dim": 128}
    assert len({run.model.model_copy(update=same) for run in suite.runs}) == 1
    assert len({(run.data, run.seeds, run.training, run.evaluation) for run in suite.runs}) == 1
    short = load(REPOSITORY / "configs" / "demo.yaml", ["training.max_steps=20"])
    assert short.runs[0].checkpointing.save_steps(20) == [0, 1, 2, 4, 8, 16, 20]


def test_the_schema_of_a_suite_refers_to_that_of_a_run() -> None:
    schema = json_schema()
    assert schema["properties"]["base"]["$ref"] == "#/$defs/RunConfig"
    assert schema["$defs"]["RunConfig"]["properties"]["model"]["$ref"].rpartition("/")[2] in schema["$defs"]


def names_of(suite: Suite) -> list[str]:
    return [str(run.checkpointing.run_name) for run in suite.runs]


def test_a_process_takes_some_runs_of_a_suite() -> None:
    suite = load(REPOSITORY / "configs" / "demo.yaml")
    assert selected(suite) == suite
    assert names_of(selected(suite, ["medium", "demo-tiny"])) == ["demo-tiny", "demo-medium"]
    assert selected(suite, ["small"]).name == "demo"


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_shards_are_all_runs_once(n: int) -> None:
    grid = {"name": "g", "base": {}, "vary": {"seeds.weights": [0, 1, 2, 3, 4, 5, 6]}}
    suite = as_suite(grid)
    shards = [names_of(selected(suite, shard=f"{i}/{n}")) for i in range(1, n + 1)]
    assert sorted(name for shard in shards for name in shard) == names_of(suite)
    assert [shard[0] for shard in shards] == names_of(suite)[:n]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert names_of(selected(suite, ["weights-1", "weights-5"], "2/2")) == ["g-weights-5"]
    assert selected(suite, shard="8/8").runs == ()


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1/0", "1", "-1/4", "a/b", "1/4/2"])
def test_a_shard_out_of_range_is_refused(shard: str) -> None:
    with pytest.raises(UserError, match="must be i/n with i from 1 to n"):
        selected(load(REPOSITORY / "configs" / "demo.yaml"), shard=shard)


def test_an_unknown_run_is_refused_with_the_names_there_are() -> None:
    message = r"--only smal: .*demo.yaml has no such run \(did you mean 'small'\?\); there are: tiny, small, medium"
    with pytest.raises(UserError, match=message):
        selected(load(REPOSITORY / "configs" / "demo.yaml"), ["tiny", "smal"])
