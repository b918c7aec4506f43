"""What is compared with what: steps, layers and runs, from the configuration to the table."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from pico_analyze import results
from pico_analyze.analysis import AnalysisError, analyze, describe, plan
from pico_analyze.checkpoint.reader import open_run
from pico_analyze.cli import main
from pico_analyze.config import AnalysisConfig
from pico_analyze.measure import measure
from pico_analyze.plan import Cell
from pico_analyze.strict_yaml import ConfigError, validated

OV = {"value_layer": "attention.v_proj", "output_layer": "attention.o_proj"}
ACTIVATIONS = {"component_name": "simple", "data_type": "activations", "layer_suffixes": "swiglu.w_2"}


def entry(metric="cka", component=ACTIVATIONS, split="val", **own):
    return {"metric_name": metric, "data_split": split, "components": [component]} | own


def config(*entries, **more):
    return validated(AnalysisConfig, {"metrics": list(entries)} | more, "test")


def measured(runs, *entries, **more):
    frame = analyze(runs, config(*entries, **more))
    return frame[frame["kind"] != "training"].reset_index(drop=True)


def debiased_cka(x, y):
    """Unbiased HSIC by its matrices, in numpy."""

    def hsic(k, l):  # noqa: E741
        n = len(k)
        k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
        return (np.trace(k @ l) + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ l).sum()) / (n * (n - 3))

    k, l = x @ x.T, y @ y.T  # noqa: E741
    return hsic(k, l) / np.sqrt(hsic(k, k) * hsic(l, l))


def stored(folder, step, layer, module="swiglu.w_2", split="val"):
    file = folder / "checkpoints" / f"step_{step}" / "learning_dynamics" / f"{split}_activations.safetensors"
    return load_file(file)[f"layers.{layer}.{module}"].double().numpy()


def pairs(frame):
    return list(zip(frame["step"], frame["reference_step"], strict=True))


class TestSteps:
    def test_the_previous_one_of_those_analysed(self, run_folder):
        frame = measured(run_folder, entry(target_checkpoint="previous"), steps=[0, 2, 10])
        assert pairs(frame[frame["layer"] == 0]) == [(2, 0), (10, 2)]
        for row in frame.itertuples():
            x, y = (stored(run_folder, step, row.layer) for step in (row.step, row.reference_step))
            assert row.value == pytest.approx(debiased_cka(x, y), rel=1e-9)
        assert frame["reference_layer"].equals(frame["layer"])

    def test_each_with_each_once(self, run_folder):
        frame = measured(run_folder, entry(target_checkpoint="all"))
        one = frame[frame["layer"] == 1]
        assert pairs(one) == [(t, s) for t in (0, 1, 2, 10) for s in (0, 1, 2, 10) if s <= t]
        values = dict(zip(pairs(one), one["value"], strict=True))
        assert [values[step, step] for step in (0, 1, 2, 10)] == pytest.approx([1] * 4, abs=1e-12)
        for (t, s), value in values.items():  # whichever of the two is x
            assert value == pytest.approx(debiased_cka(stored(run_folder, s, 1), stored(run_folder, t, 1)), rel=1e-9)

    def test_what_two_entries_ask_for_is_one_row(self, run_folder):
        frame = measured(run_folder, *(entry(target_checkpoint=target) for target in ("all", "previous", 0, "last")))
        assert not frame.duplicated([*results.IDENTITY, "head"]).any()
        assert len(frame) == 2 * (10 + 3)  # the triangle, and the three earlier steps against the last

    def test_the_change_since_the_previous_step(self, run_folder):
        delta = {"component_name": "delta", "data_type": "weights", "layer_suffixes": "swiglu.w_2", "layers": [1]}
        frame = measured(run_folder, entry("norm", delta, norm_type="frobenius", target_checkpoint="previous"))
        for row, (t, s) in zip(frame.itertuples(), [(1, 0), (2, 1), (10, 2)], strict=True):
            sides = [
                load_file(run_folder / "checkpoints" / f"step_{step}" / "model.safetensors")[
                    "model.layers.1.swiglu.w_2.weight"
                ]
                for step in (t, s)
            ]
            assert row.value == pytest.approx(float((sides[0].double() - sides[1].double()).norm()), rel=1e-12)
            assert (row.step, row.reference_step) == (t, s)

    def test_a_gap_is_a_gap(self, run_folder):
        (run_folder / "checkpoints" / "step_2" / "manifest.json").unlink()
        frame = measured(run_folder, entry(target_checkpoint="previous"))
        said = frame[frame["layer"] == 0].set_index("step")
        assert said["status"].to_dict() == {1: "ok", 2: "missing", 10: "missing"}
        assert said.loc[10, "reason"].startswith("the reference: ")
        assert said.loc[10, "reference_step"] == 2

    def test_heads_are_compared_with_themselves(self, run_folder):
        circuit = {"component_name": "ov_circuit", "data_type": "activations", "layer_suffixes": OV, "layers": [0]}
        frame = measured(run_folder, entry(component=circuit, target_checkpoint="previous"), steps=[1, 2])
        assert frame["head"].to_list() == [0, 1, 2, 3, pd.NA]


class TestLayers:
    def test_each_with_each_at_the_same_step(self, make_run, make_shape):
        folder = make_run(shape=make_shape(n_layers=3))
        frame = measured(folder, entry(target_checkpoint="same", target_layers="all"), steps=[0, 10])
        at_10 = frame[frame["step"] == 10]
        assert list(zip(at_10["layer"], at_10["reference_layer"], strict=True)) == [
            (i, j) for i in range(3) for j in range(i + 1)
        ]
        for row in at_10.itertuples():
            x, y = stored(folder, 10, row.layer), stored(folder, 10, row.reference_layer)
            assert row.value == pytest.approx(debiased_cka(x, y), rel=1e-9)
            assert (row.value == pytest.approx(1, abs=1e-12)) == (row.layer == row.reference_layer)
        assert (at_10["reference_step"] == 10).all()

    def test_each_with_each_of_another_step(self, run_folder):
        frame = measured(run_folder, entry(target_checkpoint=0, target_layers="all"), steps=[2])
        assert list(zip(frame["layer"], frame["reference_layer"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert frame.set_index(["layer", "reference_layer"])["value"][0, 1] == pytest.approx(
            debiased_cka(stored(run_folder, 2, 0), stored(run_folder, 0, 1)), rel=1e-9
        )

    def test_only_the_selected_ones(self, make_run, make_shape):
        folder = make_run(shape=make_shape(n_layers=4))
        frame = measured(
            folder, entry(component=ACTIVATIONS | {"layers": [1, 3]}, target_checkpoint="same", target_layers="all")
        )
        assert set(zip(frame["layer"], frame["reference_layer"], strict=True)) == {(1, 1), (3, 1), (3, 3)}

    def test_the_training_batch_is_the_same_within_a_step(self, run_folder):
        frame = measured(run_folder, entry(split="train", target_checkpoint="same", target_layers="all"), steps=[1])
        expected = debiased_cka(stored(run_folder, 1, 1, split="train"), stored(run_folder, 1, 0, split="train"))
        assert frame["value"][1] == pytest.approx(expected, rel=1e-9)

    def test_heads_of_other_layers_are_no_counterparts(self, run_folder):
        circuit = {"component_name": "ov_circuit", "data_type": "activations", "layer_suffixes": OV}
        frame = measured(run_folder, entry(component=circuit, target_checkpoint="same", target_layers="all"), steps=[1])
        across = frame[frame["layer"] != frame["reference_layer"]]
        assert across["head"].isna().all()
        assert len(across) == 1


class TestRuns:
    def test_every_pair_of_runs_equals_numpy(self, make_run, make_shape):
        folders = {
            name: make_run(name, seed=seed, shape=make_shape(d))
            for name, seed, d in (("b", 2, 16), ("c", 1, 16), ("a", 0, 24))
        }
        frame = measured(list(folders.values()), entry(target_checkpoint="same", target_run="all"), steps=[0, 10])
        # Ordered by size, then by name; the reference is the run before.
        assert set(zip(frame["run"], frame["reference_run"], strict=True)) == {("c", "b"), ("a", "b"), ("a", "c")}
        for row in frame.itertuples():
            x, y = (stored(folders[name], row.step, row.layer) for name in (row.run, row.reference_run))
            assert row.value == pytest.approx(debiased_cka(x, y), rel=1e-9)
            assert (row.reference_step, row.reference_layer) == (row.step, row.layer)

    def test_a_named_run_at_its_last_step(self, make_run):
        folders = [make_run(name, seed=seed) for seed, name in enumerate("ab")]
        frame = measured(folders, entry(target_checkpoint="last", target_run="b"), steps=[0, 10])
        assert len(frame) == 8  # b against its own last step too
        values = frame.set_index(["run", "step", "layer"])["value"]
        assert values["b", 10, 0] == pytest.approx(1, abs=1e-12)
        assert values["a", 0, 1] == pytest.approx(
            debiased_cka(stored(folders[0], 0, 1), stored(folders[1], 10, 1)), rel=1e-9
        )

    def test_a_named_run_at_the_same_step_is_not_compared_with_itself(self, make_run):
        frame = measured([make_run(name) for name in "ab"], entry(target_checkpoint="same", target_run="b"))
        assert set(frame["run"]) == {"a"}

    def test_each_step_with_each_of_another_run(self, make_run):
        frame = measured(
            [make_run(name) for name in "ab"], entry(target_checkpoint="all", target_run="all"), steps=[0, 1, 2]
        )
        assert pairs(frame[frame["layer"] == 0]) == [(t, s) for t in (0, 1, 2) for s in (0, 1, 2)]
        assert set(frame["run"]) == {"b"}

    def test_the_step_of_nearest_tokens(self, make_run):
        folders = [make_run("a", steps=(0, 4, 10)), make_run("b", steps=(0, 1, 7, 8))]
        frame = measured(folders, entry(target_checkpoint="nearest_tokens", target_run="a"))
        assert pairs(frame[frame["layer"] == 0]) == [
            (0, 0),
            (1, 0),
            (7, 4),
            (8, 10),
        ]  # 7 is as far from 10: the earlier

    def test_a_step_that_the_other_run_lacks_is_missing(self, make_run):
        folders = [make_run("a", steps=(0, 4)), make_run("b", steps=(0, 1))]
        frame = measured(folders, entry(target_checkpoint="same", target_run="a"), steps="all")
        said = frame[frame["layer"] == 0].set_index("step")["reason"].to_dict()
        assert pd.isna(said[0])
        assert said[1] == "the reference: there is no step 1"

    def test_other_depths_compare_layer_by_layer(self, make_run, make_shape):
        folders = [make_run(f"deep{n}", shape=make_shape(n_layers=n)) for n in (2, 3)]
        ask = entry(target_checkpoint="same", target_run="all")
        with pytest.raises(AnalysisError, match=r"run deep3 has 3 layers and run deep2 2.*use target_layers: all"):
            plan([open_run(folder) for folder in folders], config(ask))
        frame = measured(folders, ask | {"target_layers": "all"}, steps=[1])
        assert list(zip(frame["layer"], frame["reference_layer"], strict=True)) == [
            (i, j) for i in range(3) for j in range(2)
        ]
        listed = ask | {"components": [ACTIVATIONS | {"layers": [0, 1]}]}
        assert set(measured(folders, listed, steps=[1])["layer"]) == {0, 1}

    def test_other_probes_are_refused(self, make_run):
        def other(step, tensors):
            tensors["batch", "val", "input_ids"] = tensors["batch", "val", "input_ids"] + 1

        runs = [open_run(make_run("a")), open_run(make_run("b", change=other))]
        hashes = [run.manifests[0].probe_hash for run in runs]
        with pytest.raises(AnalysisError, match="not probed with the same samples") as caught:
            plan(runs, config(entry(target_checkpoint="same", target_run="all")))
        assert all(text in str(caught.value) for text in hashes)

    def test_runs_without_a_probe_are_refused(self, make_run):
        runs = [open_run(make_run(name, splits=("train",))) for name in "ab"]
        problem = entry(split="val", target_checkpoint="same", target_run="all")
        with pytest.raises(AnalysisError, match="no activations of split val"):
            plan(runs, config(problem))

    def test_other_tokens_of_the_probe_are_refused(self, make_run):
        a, b = (open_run(make_run(name)) for name in "ab")
        rule = {"rule": "position", "position": 3}
        manifests = {
            step: manifest.model_copy(update={"capture": manifest.capture.model_copy(update=rule)})
            for step, manifest in b.manifests.items()
        }
        with pytest.raises(AnalysisError, match="captured other tokens of the probe: by the rules all and position 3"):
            plan([a, replace(b, manifests=manifests)], config(entry(target_checkpoint="same", target_run="b")))


class TestRefused:
    @pytest.mark.parametrize(
        ("own", "message"),
        [
            (
                {"target_checkpoint": "same"},
                "compares each matrix with itself; give a target_run, or target_layers: all",
            ),
            ({"target_checkpoint": "nearest_tokens"}, "is a step of another run; give target_run"),
            ({"target_checkpoint": "previous", "target_run": "all"}, "is a step of the same run; leave out target_run"),
            ({"target_checkpoint": "next"}, "target_checkpoint"),
            ({"target_checkpoint": 0, "target_layers": "some"}, "target_layers"),
        ],
    )
    def test_by_the_configuration(self, own, message):
        with pytest.raises(ConfigError, match=message):
            config(entry(**own))

    def test_a_target_run_needs_a_step(self):
        with pytest.raises(ConfigError, match='target_run: "all" needs a target_checkpoint, for example same'):
            config(entry("rsa", target_run="all"))

    def test_published_files_have_no_place_for_pairs(self):
        with pytest.raises(ConfigError, match=r"one value for each step and layer.*not with all"):
            config(entry(target_checkpoint="all"), write_json="pico_v0")

    @pytest.mark.parametrize(
        ("own", "message"),
        [
            ({"target_checkpoint": "same", "target_run": "all"}, "needs two runs or more, and there is only demo"),
            ({"target_checkpoint": "last", "target_run": "x"}, "target_run: there is no run x; there are demo"),
            (
                {"target_checkpoint": "same", "target_run": "demo"},
                "demo is the only run, so nothing is compared with it",
            ),
        ],
    )
    def test_by_the_runs(self, run_folder, own, message):
        with pytest.raises(AnalysisError, match=message):
            plan([open_run(run_folder)], config(entry(**own)))

    def test_previous_of_a_single_step(self, run_folder):
        with pytest.raises(AnalysisError, match="previous needs two analysed steps, and there are the steps 10"):
            plan([open_run(run_folder)], config(entry(target_checkpoint="previous"), steps=[10]))

    def test_a_difference_is_within_a_run(self, run_folder):
        delta = {"component_name": "delta", "data_type": "weights", "layer_suffixes": "swiglu.w_2"}
        with pytest.raises(AnalysisError, match="a difference is one of the same weight of the same run"):
            plan([open_run(run_folder)], config(entry("per", delta, target_checkpoint=0, target_layers="all")))

    def test_through_the_command_line(self, make_run, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)

        def other(step, tensors):
            tensors["batch", "val", "input_ids"] = tensors["batch", "val", "input_ids"] + 1

        for name, change in (("a", None), ("b", other)):
            make_run(name, change=change)
        ask = {"analysis_name": "x", "runs": ["runs/*"], "metrics": [entry(target_checkpoint="same", target_run="all")]}
        (tmp_path / "a.yaml").write_text(json.dumps(ask))
        result = CliRunner().invoke(main, ["run", "a.yaml"])
        assert result.exit_code == 2
        assert (
            "target_run: the runs b and a were not probed with the same samples: their probe hashes are"
            in result.output
        )
        assert not (tmp_path / "analysis_results").exists()
        result = CliRunner().invoke(main, ["run", "a.yaml", "metrics.0.target_checkpoint=previous"])
        assert result.exit_code == 2
        assert 'metrics.0.target_checkpoint=previous: "previous" is a step of the same run' in result.output


class TestTheRest:
    def test_a_dry_run_counts_pairs(self, run_folder):
        cells = plan(
            [open_run(run_folder)], config(entry(target_checkpoint="all"), entry("rsa", target_checkpoint="previous"))
        )
        lines = describe(cells)
        assert lines[0].endswith("(val) against each step, layers 0, 1: 4 checkpoints, 20 pairs, 20 values")
        assert lines[1].endswith("(val) against the previous step, layers 0, 1: 3 checkpoints, 6 pairs, 6 values")

    def test_a_rerun_computes_only_new_pairs(self, run_folder):
        first = analyze(run_folder, config(entry(target_checkpoint="previous")))
        again = analyze(run_folder, config(entry(target_checkpoint="all")), previous=first)
        assert (again.attrs["computed"], again.attrs["kept"]) == (14, 6)

    def test_processes_give_the_same_table(self, make_run, make_shape):
        folders = [make_run(name, seed=seed) for seed, name in enumerate("ab")]
        asked = config(
            entry(target_checkpoint="all"),
            entry(target_checkpoint="same", target_run="all", target_layers="all"),
        )
        frames = [analyze(folders, asked, jobs=jobs) for jobs in (1, 2)]
        pd.testing.assert_frame_equal(*frames)

    def test_references_that_do_not_fit_are_loaded_again(self, run_folder, monkeypatch):
        whole = measured(run_folder, entry(target_checkpoint="all"))
        monkeypatch.setattr("pico_analyze.measure.KEPT_BYTES", 2000)  # one of 24 x 16 bfloat16
        pd.testing.assert_frame_equal(whole, measured(run_folder, entry(target_checkpoint="all")))

    def test_only_what_the_checkpoint_needs_is_kept(self, run_folder):
        from pico_analyze.measure import Work

        run = open_run(run_folder)
        cells: list[Cell] = plan([run], config(entry(target_checkpoint="previous")))
        references: dict = {}
        for step in (1, 2, 10):
            measure(Work(run, step, [cell for cell in cells if cell.step == step]), references)
            assert len(references) == 2  # of two layers, never those of the step before

    def test_a_repeated_checkpoint_marks_its_pairs(self, make_run):
        first: dict[str, torch.Tensor] = {}

        def repeat(step, tensors):
            module = ("activations", "val", "layers.0.swiglu.w_2")
            if step in (1, 10):
                tensors[module] = first.setdefault("it", tensors[module])

        frame = measured(
            make_run(change=repeat), entry(component=ACTIVATIONS | {"layers": [0]}, target_checkpoint="all")
        )
        said = {pair: reason for pair, reason in zip(pairs(frame), frame["reason"], strict=True) if pd.notna(reason)}
        assert said[10, 0] == "the same content as step 1"
        assert said[2, 1] == "its reference: the same content as step 10"
        assert said[10, 1] == "the same content as step 1; its reference: the same content as step 10"
        assert said[10, 10] == "the same content as step 1"
        assert (2, 0) not in said

    def test_tables_of_before_are_read(self, run_folder, tmp_path):
        frame = analyze(run_folder, config(entry(target_checkpoint=0), entry("gini", ACTIVATIONS)))
        old = frame.drop(columns=["reference_layer", "reference_head", *results.ADDED])
        old.to_parquet(tmp_path / "results.parquet", index=False)
        pd.testing.assert_frame_equal(results.read(tmp_path), frame, check_flags=False)
