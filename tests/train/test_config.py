import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pico_train.config import (
    CheckpointingConfig,
    ConfigError,
    ModelConfig,
    RunConfig,
    config_hash,
    differences,
    json_schema,
    load_config,
    not_built_yet,
    to_yaml,
)
from pico_train.strict_yaml import flattened, merged, parse, read_overrides, validated

REPOSITORY = Path(__file__).parents[2]
PUBLISHED = REPOSITORY / "tests" / "fixtures" / "published" / "training"


def run(*overrides: str) -> RunConfig:
    return validated(RunConfig, read_overrides(overrides), "here")


def problems(*overrides: str, text: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validated(RunConfig, merged(parse(text, "here") or {}, read_overrides(overrides)), "here")
    return list(caught.value.problems)


def beyond_defaults(config: RunConfig) -> dict[str, Any]:
    default = flattened(RunConfig().model_dump(mode="json"))
    return {k: v for k, v in flattened(config.model_dump(mode="json")).items() if v != default[k]}


# ---- published files


def published_size(size: str, d_model: int, accumulation: int, paloma_batch: int, capture_batch: int) -> dict[str, Any]:
    return {
        "checkpointing.run_name": f"pico-decoder-{size}-1",
        "checkpointing.save_to_hf": True,
        "checkpointing.hf_checkpoint.repo_id": f"pico-lm/pico-decoder-{size}",
        "checkpointing.learning_dynamics.batch_size": capture_batch,
        "model.d_model": d_model,
        "model.activation_hidden_dim": 4 * d_model,
        "evaluation.paloma.batch_size": paloma_batch,
        "monitoring.save_to_wandb": True,
        "monitoring.wandb.project": "pico-decoder",
        "monitoring.wandb.entity": "pico-lm",
        "training.optimization.gradient_accumulation_steps": accumulation,
        "training.fabric.num_nodes": 4,
        "training.fabric.num_devices": 4,
    }


PUBLISHED_SETTINGS = {
    "demo": {
        "checkpointing.run_name": "pico-decoder-demo-1",
        "checkpointing.save_every_n_steps": 50,
        "checkpointing.save_to_hf": True,
        "checkpointing.hf_checkpoint.repo_id": "pico-lm/demo",
        "checkpointing.learning_dynamics.batch_size": 16,
        "model.d_model": 96,
        "model.activation_hidden_dim": 384,
        "data.dataloader.batch_size": 32,
        "evaluation.paloma.batch_size": 32,
        "monitoring.save_to_wandb": True,
        "monitoring.wandb.project": "pico-demo",
        "monitoring.wandb.entity": "pico-lm",
        "monitoring.logging.log_every_n_steps": 10,
        "training.max_steps": 100,
        "training.optimization.lr": 0.001,
        "training.optimization.lr_warmup_steps": 30,
        "training.optimization.gradient_accumulation_steps": 2,
        "training.fabric.num_devices": 1,
    },
    "pico-decoder-tiny": published_size("tiny", 96, 4, 32, 256),
    "pico-decoder-small": published_size("small", 384, 8, 16, 128),
    "pico-decoder-medium": published_size("medium", 768, 8, 16, 128),
    "pico-decoder-large": published_size("large", 1536, 8, 16, 128),
}


@pytest.mark.parametrize("name", PUBLISHED_SETTINGS)
def test_a_published_file_loads_and_sets_what_it_says(name: str) -> None:
    config = load_config(PUBLISHED / f"{name}.yaml")
    default = flattened(RunConfig().model_dump(mode="json"))
    expected = {k: v for k, v in PUBLISHED_SETTINGS[name].items() if v != default[k]}  # medium repeats some defaults
    assert beyond_defaults(config) == expected


def test_defaults_that_are_published() -> None:
    assert (
        beyond_defaults(
            run(
                "data.dataset.name=pico-lm/pretokenized-dolma",
                "data.dataloader.batch_size=1024",
                "data.tokenizer.name=allenai/OLMo-7B-0724-hf",
                "data.tokenizer.vocab_size=50304",
                "model={d_model: 768, n_layers: 12, vocab_size: 50304, batch_size: 1024, max_seq_len: 2048}",
                "model={attention_n_heads: 12, attention_n_kv_heads: 4, activation_hidden_dim: 3072}",
                "model={norm_eps: 1e-6, position_emb_theta: 10000.0}",
                "training.max_steps=200_000",
                "training.optimization={optimizer: adamw, lr: 3e-4, lr_scheduler: linear_with_warmup}",
                "training.optimization={lr_warmup_steps: 2500, gradient_accumulation_steps: 128}",
                "evaluation.metrics=[paloma]",
                "evaluation.paloma={dataset_name: pico-lm/pretokenized-paloma-tinsy, dataset_split: val}",
                "evaluation.paloma={max_length: 2048, batch_size: 16}",
                "monitoring.logging={log_level: INFO, log_every_n_steps: 100}",
                "checkpointing={save_every_n_steps: 1000, runs_dir: runs, logs_dir: logs}",
                "checkpointing.learning_dynamics={sequence_idx: -1, batch_size: 8}",
                "checkpointing.learning_dynamics.eval_data=pico-lm/pretokenized-paloma-tinsy",
            )
        )
        == {}
    )


@pytest.mark.parametrize("size", ["tiny", "small", "medium", "large"])
def test_our_file_of_a_published_size_says_the_same(size: str) -> None:
    ours = load_config(REPOSITORY / "configs" / f"pico-decoder-{size}.yaml")
    assert ours == load_config(PUBLISHED / f"pico-decoder-{size}.yaml")


@pytest.mark.parametrize("size", ["tiny", "small", "medium", "large"])
def test_the_overrides_in_the_header_make_a_published_size_run(size: str) -> None:
    path = REPOSITORY / "configs" / f"pico-decoder-{size}.yaml"
    lines = [line.strip("#\\ \n") for line in path.read_text().splitlines()[:20] if line.startswith("# ")]
    overrides = [word for line in lines for word in line.split() if "=" in word and "." in word.split("=")[0]]
    assert len(overrides) == 14  # nine that are needed, five for the published rules
    assert not_built_yet(load_config(path, overrides)) == []
    assert len(not_built_yet(load_config(path))) == 4


@pytest.mark.parametrize(
    ("size", "n_parameters", "millions"),
    [("tiny", 11_282_784, 11.3), ("small", None, 64.6), ("medium", None, 181.1), ("large", None, 569.8)],
)
def test_parameters_of_the_published_sizes(size: str, n_parameters: int | None, millions: float) -> None:
    model = load_config(PUBLISHED / f"pico-decoder-{size}.yaml").model
    assert n_parameters in (None, model.n_parameters)
    assert round(model.n_parameters / 1e6, 1) == millions


def test_parameters_counted_by_hand() -> None:
    # d_model 4, 2 heads of 2, 1 kv head, hidden 3, vocabulary 5, 1 layer:
    # q 16, k 8, v 8, o 16, swiglu 3 * 12, three norms of 4
    shape = {"d_model": 4, "attention_n_heads": 2, "attention_n_kv_heads": 1, "activation_hidden_dim": 3}
    model = ModelConfig(**shape, vocab_size=5, n_layers=1)
    assert model.n_parameters_without_embeddings == 48 + 36 + 12
    assert model.n_parameters == 96 + 2 * 20
    assert ModelConfig(**shape, vocab_size=5, n_layers=1, tie_embeddings=True).n_parameters == 96 + 20


def test_null_kv_heads_are_as_many_as_query_heads() -> None:
    model = run("model.attention_n_kv_heads=null").model
    assert (model.n_kv_heads, model.head_dim) == (12, 64)


# ---- types and unknown keys


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.n_layers='12'", 'model.n_layers: "12" is not allowed; allowed: a whole number > 0'),
        ("model.n_layers=3.0", "model.n_layers: 3.0 is not allowed; allowed: a whole number > 0"),
        ("model.n_layers=true", "model.n_layers: true is not allowed; allowed: a whole number > 0"),
        ("model.n_layers=", "model.n_layers: null is not allowed; allowed: a whole number > 0"),
        ("training.optimization.lr=true", "training.optimization.lr: true is not allowed; allowed: a number > 0"),
        ("training.optimization.lr='3e-4'", 'training.optimization.lr: "3e-4" is not allowed; allowed: a number > 0'),
        ("training.optimization.lr=.nan", "training.optimization.lr: NaN is not allowed; allowed: a number > 0"),
        ("model.dropout=1", "model.dropout: 1 is not allowed; allowed: a number >= 0 and < 1"),
        (
            "training.optimization.betas=[0.9]",
            "training.optimization.betas: [0.9] is not allowed; allowed: a list of 2, each a number >= 0 and < 1",
        ),
        (
            "training.optimization.max_grad_norm=0",
            "training.optimization.max_grad_norm: 0 is not allowed; allowed: null or a number > 0",
        ),
        (
            "training.fabric.num_devices=two",
            'training.fabric.num_devices: "two" is not allowed; allowed: "auto" or a whole number > 0',
        ),
        (
            "training.non_finite=ignore",
            'training.non_finite: "ignore" is not allowed; allowed: one of "stop", "skip"',
        ),
        (
            "evaluation.metrics=[held_out, bleu]",
            'evaluation.metrics: ["held_out", "bleu"] is not allowed; '
            'allowed: null or a list, each item one of "paloma", "held_out", "sample"',
        ),
        (
            "data.dataloader.shuffle=1",
            "data.dataloader.shuffle: 1 is not allowed; allowed: true or false",
        ),
        ("data.cache_dir=''", 'data.cache_dir: "" is not allowed; allowed: text that is not empty'),
        (
            "checkpointing.logs_dir=log",
            'checkpointing.logs_dir: "log" is not allowed; allowed: "logs" (fixed by the checkpoint format)',
        ),
        ("seeds=7", "seeds: 7 is not allowed; allowed: a section with the keys weights, data, dropout"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(override: str, line: str) -> None:
    assert problems(override) == [line]


def test_numbers_as_people_write_them() -> None:
    config = run("training.optimization.lr=3e-4", "training.max_steps=50_000", "model.position_emb_theta=500000")
    assert config.training.optimization.lr == 0.0003
    assert config.training.max_steps == 50000
    assert config.model.position_emb_theta == 500000.0
    assert isinstance(config.model.position_emb_theta, float)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "learning_rate=1",
            "learning_rate: unknown key; did you mean training.optimization.lr or training.optimization.muon.lr?",
        ),
        (
            "training.optimization.weigth_decay=0",
            "training.optimization.weigth_decay: unknown key; did you mean training.optimization.weight_decay?",
        ),
        ("n_layer=3", "n_layer: unknown key; did you mean model.n_layers?"),
        ("model.num_heads=3", "model.num_heads: unknown key; did you mean model.attention_n_heads?"),
        ("model.n_head=3", "model.n_head: unknown key; did you mean model.attention_n_heads?"),
        ("data.batch_size=3", "data.batch_size: unknown key; did you mean data.dataloader.batch_size?"),
        ("training.max_step=3", "training.max_step: unknown key; did you mean training.max_steps?"),
        ("training.d_model=3", "training.d_model: unknown key; did you mean model.d_model?"),
        ("training.optimization.warmup_steps=3", "did you mean training.optimization.lr_warmup_steps?"),
        ("seeds.torch=3", "seeds has weights, data, dropout"),
        ("num-epochs=3", "num-epochs: unknown key; the top level has data, model, seeds, training, "),
        ("xyz=1", "xyz: unknown key; the top level has data, model, "),
        ("data.foo=1", "data.foo: unknown key; data has dataset, dataloader, tokenizer, cache_dir"),
        ("modle.d_model=3", "modle: unknown key; did you mean model?"),
        ("data.tokeniser.name=x", "data.tokeniser: unknown key; did you mean data.tokenizer?"),
        ("dataset=x", "dataset: unknown key; did you mean data.dataset?"),
        ("nam=x", "nam: unknown key; only a suite has a name; that of a run is checkpointing.run_name"),
        ("base.model.d_model=3", "base: unknown key; a section of the file of a suite; the keys of a run come without"),
        ("vary.seeds=3", "vary: unknown key; a section of the file of a suite, which is set there"),
        ("batch_size=3", "did you mean data.dataloader.batch_size or "),  # not model.batch_size, which has no effect
    ],
)
def test_an_unknown_key_names_the_nearest_of_the_whole_schema(override: str, line: str) -> None:
    (problem,) = problems(override)
    assert line in problem


def test_a_dotted_key_in_a_file_is_shown_as_sections() -> None:
    (problem,) = problems(text="training.optimization.lr: 1")
    assert problem.endswith("write it as sections: training: {optimization: {lr: ...}}")


def test_keys_that_are_no_text() -> None:
    found = problems(text="{1: 2, model: {null: 3}}")
    assert [line.split(";")[0] for line in found] == ["model.None: unknown key", "1: unknown key"]


def test_everything_wrong_is_listed_at_once() -> None:
    found = problems(
        text="""
        learning_rate: 1
        model: {n_layers: "12", d_model: 96, attention_n_heads: 5}
        data: {dataloader: {batch_size: 1000}}
        training: {optimization: {gradient_accumulation_steps: 12}}
        checkpointing: {run_name: a/b}
        """
    )
    assert sorted(line.split(":")[0] for line in found) == [
        "checkpointing.run_name",
        "data.dataloader.batch_size",
        "learning_rate",
        "model.attention_n_heads",
        "model.attention_n_kv_heads",
        "model.n_layers",
    ]


def test_a_check_is_silent_about_a_key_that_is_wrong_already() -> None:
    (problem,) = problems("model.d_model='96'", "model.attention_n_heads=7", "model.attention_n_kv_heads=7")
    assert problem.startswith("model.d_model:")  # 7 does not divide the default 768, but that was not asked for


def test_sections_cannot_be_changed_or_made_wrong() -> None:
    with pytest.raises(ValidationError):
        RunConfig().model.d_model = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="attention_n_heads: 12 must divide d_model 100"):
        ModelConfig(d_model=100)


# ---- values that must fit each other


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["model.d_model=96", "model.attention_n_heads=5", "model.attention_n_kv_heads=1"],
            "model.attention_n_heads: 5 must divide d_model 96 into heads of even width (rotary pairs); "
            "counts that do: 4 or 6",
        ),
        (
            ["model.d_model=12", "model.attention_n_heads=12"],  # heads of width 1
            "model.attention_n_heads: 12 must divide d_model 12 into heads of even width (rotary pairs); "
            "counts that do: 6",
        ),
        (
            ["model.attention_n_kv_heads=5"],
            "model.attention_n_kv_heads: 5 must divide attention_n_heads 12; counts that do: 4 or 6",
        ),
        (
            [
                "data.dataloader.batch_size=1000",
                "training.fabric.num_devices=3",
                "training.optimization.gradient_accumulation_steps=4",
            ],
            "data.dataloader.batch_size: 1000 does not divide into 12 equal parts (3 devices * "
            "4 accumulation steps); nearest sizes: 996 or 1008; nearest numbers of devices: 2 or 5",
        ),
        (
            [
                "data.dataloader.batch_size=32",
                "training.fabric.num_nodes=4",
                "training.optimization.gradient_accumulation_steps=16",
            ],
            "data.dataloader.batch_size: 32 does not divide into 64 equal parts (4 devices * "
            "16 accumulation steps); nearest sizes: 64; nearest numbers of devices: 2",
        ),
        (
            ["model.vocab_size=2048"],
            "data.tokenizer.vocab_size: 50304 must be at most model.vocab_size 2048",
        ),
        (
            ["monitoring.save_to_wandb=true", "monitoring.wandb.entity=me"],
            'monitoring.wandb.project: "" must not be empty when save_to_wandb is true',
        ),
        (
            ["checkpointing.save_to_hf=true"],
            'checkpointing.hf_checkpoint.repo_id: "" must be owner/name when save_to_hf is true',
        ),
        (
            ["checkpointing.learning_dynamics.sequence_idx=2048"],
            "checkpointing.learning_dynamics.sequence_idx: 2048 must be a position of a window: -2048 to 2047 "
            "(model.max_seq_len 2048)",
        ),
        (
            ["checkpointing.learning_dynamics.sequence_idx=3", "checkpointing.learning_dynamics.rule=mean"],
            "checkpointing.learning_dynamics.sequence_idx: 3 has no effect under rule: mean; "
            "use rule: position, or leave it at -1",
        ),
        (
            ["checkpointing.learning_dynamics={rule: sample, tokens_per_sequence: 2049}"],
            "checkpointing.learning_dynamics.tokens_per_sequence: 2049 must be at most model.max_seq_len 2048",
        ),
        (
            ["training.max_steps=20", "checkpointing.schedule.also=[10, 21, 30]"],
            "checkpointing.schedule.also: [21, 30] must be at most training.max_steps 20",
        ),
        (
            ["data.dataset.held_out_fraction=0", "evaluation.metrics=[held_out]"],
            'evaluation.metrics: ["held_out"] needs held-out documents: set data.dataset.held_out_fraction above 0',
        ),
        (
            ["data.dataset.held_out_fraction=0", "checkpointing.learning_dynamics.eval_data=held_out"],
            'checkpointing.learning_dynamics.eval_data: "held_out" needs held-out documents: '
            "set data.dataset.held_out_fraction above 0",
        ),
        (
            ["data.dataset.name=text"],
            "data.dataset.path: null the data set `text` needs the path of a file or folder",
        ),
        (
            ["data.dataset.path=a.txt"],
            'data.dataset.path: "a.txt" only for name: text, not for "pico-lm/pretokenized-dolma"',
        ),
        (
            ["training.optimization.min_lr_ratio=0.1"],
            "training.optimization.min_lr_ratio: 0.1 has no effect under lr_scheduler: linear_with_warmup; "
            "use linear, cosine or wsd, or 0",
        ),
        (
            ["evaluation.metrics=[sample]", "evaluation.sample.max_new_tokens=2048"],
            "evaluation.sample.max_new_tokens: 2048 must be less than model.max_seq_len 2048",
        ),
        (
            ["checkpointing.run_name=../up"],
            "checkpointing.run_name: \"../up\" must consist of letters, digits, '.', '_' and '-', "
            "and not start with '.' (it becomes a folder)",
        ),
    ],
)
def test_values_that_do_not_fit_each_other(overrides: list[str], line: str) -> None:
    assert problems(*overrides) == [line]


def test_what_is_not_used_need_not_fit() -> None:
    run(
        "data.dataset.held_out_fraction=0",
        "checkpointing.learning_dynamics={layer_suffixes: null, eval_data: held_out}",
    )
    run("evaluation.sample.max_new_tokens=5000")
    run("checkpointing.schedule.log2_until=64", "training.max_steps=20", "training.optimization.lr_warmup_steps=50")


# ---- loading


def test_precedence_is_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("training: {max_steps: 7, optimization: {lr: 1}}\nmodel:\nevaluation: {held_out: }\n   \n")
    config = load_config(path, ["training.max_steps=9", "evaluation.metrics="])
    assert (config.training.max_steps, config.training.optimization.lr) == (9, 1.0)
    assert config.model == ModelConfig()
    assert config.evaluation.metrics is None
    assert config.evaluation.held_out.max_windows == 128
    assert config.checkpointing.run_name == "mine"


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.touch()
    assert beyond_defaults(load_config(path)) == {"checkpointing.run_name": "run"}


def test_a_file_whose_name_cannot_be_a_folder_needs_a_run_name(tmp_path: Path) -> None:
    path = tmp_path / "my run.yaml"
    path.touch()
    with pytest.raises(
        ConfigError, match=r'checkpointing\.run_name: null takes the name of the file, and "my run" must'
    ):
        load_config(path)
    assert load_config(path, ["checkpointing.run_name=mine"]).checkpointing.run_name == "mine"


def test_the_resolved_config_loads_back_equal(tmp_path: Path) -> None:
    config = run(
        "checkpointing.run_name='1e5'",
        "evaluation.sample.prompt=' 2024-01-01: \"yes\" \\ # \n\té '",
        "training.optimization={lr: 1e-20, betas: [0, 0.95], max_grad_norm: null}",
        "checkpointing.schedule.also=[5, 3]",
        "checkpointing.learning_dynamics.layer_suffixes=[]",
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config
    assert "lr: 1.0e-20" in to_yaml(config)


# ---- steps, rule


@pytest.mark.parametrize(
    ("section", "max_steps", "steps"),
    [
        ({"save_every_n_steps": 4}, 10, [0, 4, 8, 10]),
        ({"save_every_n_steps": 5}, 10, [0, 5, 10]),
        ({"save_every_n_steps": 0}, 10, [0, 10]),
        ({"save_every_n_steps": 0, "schedule": {"log2_until": 5}}, 10, [0, 1, 2, 4, 10]),
        ({"save_every_n_steps": 0, "schedule": {"log2_until": 8}}, 10, [0, 1, 2, 4, 8, 10]),
        ({"save_every_n_steps": 0, "schedule": {"log2_until": 64}}, 10, [0, 1, 2, 4, 8, 10]),
        ({"save_every_n_steps": 100, "schedule": {"also": (7, 3)}}, 10, [0, 3, 7, 10]),
        ({"save_every_n_steps": 4, "schedule": {"first": False, "last": False}}, 8, [4, 8]),
        ({"save_every_n_steps": 4, "schedule": {"first": False, "last": False, "also": (0,)}}, 9, [0, 4, 8]),
        ({"save_every_n_steps": 3, "schedule": {"log2_until": 4}}, 10, [0, 1, 2, 3, 4, 6, 9, 10]),
    ],
)
def test_steps_that_are_saved(section: dict[str, Any], max_steps: int, steps: list[int]) -> None:
    assert CheckpointingConfig(**section).save_steps(max_steps) == steps


@pytest.mark.parametrize(
    ("settings", "rule"),
    [("{}", "last"), ("{sequence_idx: 0}", "position"), ("{sequence_idx: -2}", "position"), ("{rule: all}", "all")],
)
def test_the_rule_that_holds(settings: str, rule: str) -> None:
    config = run(f"checkpointing.learning_dynamics={settings}")
    assert config.checkpointing.learning_dynamics.effective_rule == rule


# ---- what the numbers depend on


@pytest.mark.parametrize(
    "override",
    [
        "data.cache_dir=elsewhere",
        "model.batch_size=8",
        "evaluation.metrics=[held_out]",
        "evaluation.sample.max_new_tokens=5",
        "monitoring.logging.log_every_n_steps=1",
        "checkpointing.run_name=other",
        "checkpointing.runs_dir=elsewhere",
        "checkpointing.save_every_n_steps=7",
        "checkpointing.schedule.log2_until=8",
        "checkpointing.learning_dynamics.batch_size=2",
    ],
)
def test_what_no_number_depends_on_is_not_hashed(override: str) -> None:
    assert run(override) != run()
    assert config_hash(run(override)) == config_hash(run())
    assert differences(run().model_dump(mode="json"), run(override).model_dump(mode="json")) == {}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seeds.data=1", "seeds.data: 0 before, 1 now"),
        ("model.d_model=384", "model.d_model: 768 before, 384 now"),
        ("training.max_steps=10", "training.max_steps: 200000 before, 10 now"),
        ("training.fabric.precision=bf16-mixed", 'training.fabric.precision: "auto" before, "bf16-mixed" now'),
        (
            "training.optimization.gradient_accumulation_steps=64",
            "training.optimization.gradient_accumulation_steps: 128 before, 64 now",
        ),
        ("data.dataset.held_out_fraction=0.1", "data.dataset.held_out_fraction: 0.05 before, 0.1 now"),
        (
            "checkpointing.learning_dynamics.rule=mean",
            'checkpointing.learning_dynamics.rule: null before, "mean" now',
        ),
    ],
)
def test_what_the_numbers_depend_on_is_hashed_and_named(override: str, line: str) -> None:
    assert config_hash(run(override)) != config_hash(run())
    assert differences(run().model_dump(mode="json"), run(override).model_dump(mode="json")) == {
        line.split(":")[0]: line
    }


def test_the_hash_is_of_values_not_of_how_they_are_written() -> None:
    assert config_hash(run("training.optimization.lr=0.0003")) == config_hash(run("training.optimization.lr=3e-4"))
    assert config_hash(run("model.position_emb_theta=10000")) == config_hash(run())


def test_a_key_that_an_older_config_lacks_is_named() -> None:
    old = run().model_dump(mode="json")
    del old["seeds"]["dropout"]
    assert differences(old, run().model_dump(mode="json")) == {"seeds.dropout": "seeds.dropout: missing before, 0 now"}


# ---- what cannot be done yet


def test_what_is_not_built_yet_is_named_with_its_override() -> None:
    found = not_built_yet(load_config(PUBLISHED / "pico-decoder-tiny.yaml"))
    assert [line.split(":")[0] for line in found] == [
        "data.dataset.name",
        "evaluation.metrics",
        "checkpointing.save_to_hf",
        "checkpointing.learning_dynamics.eval_data",
    ]
    assert found[2] == (
        "checkpointing.save_to_hf: true: upload to the Hub: not built yet; use checkpointing.save_to_hf=false"
    )


def test_a_probe_that_no_capture_uses_is_not_asked_for() -> None:
    config = run(
        "checkpointing.learning_dynamics.layer_suffixes=null", "data.dataset.name=python-stdlib", "evaluation.metrics="
    )
    assert not_built_yet(config) == []


# ---- schema, imports


def test_every_key_says_what_it_means() -> None:
    schema = json_schema()
    for section in [schema, *schema["$defs"].values()]:
        assert section["description"]
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            assert "$ref" in field or field["description"], f"{section['title']}.{name}"


def test_config_and_suite_import_without_torch() -> None:
    code = "import sys, pico_train.config, pico_train.suite; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
