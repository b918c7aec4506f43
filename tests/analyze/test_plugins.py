"""Metrics and components of a user's own, from the command line and from Python."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

from pico_analyze import analyze, results
from pico_analyze.cli import main
from pico_analyze.components import COMPONENTS, load_components
from pico_analyze.components.matrix import Matrix
from pico_analyze.metrics import METRICS, get_metric, load_metrics
from pico_analyze.plugins import PluginError

ROOT = Path(__file__).parents[2]

LARGEST = """
from pico_analyze.metrics import Metric

def largest(singular_values):
    return float(singular_values.max())

METRICS = {"NAME": Metric(f"{__name__}:largest", "spectrum", "largest singular value", "[0, inf)", "size")}
"""
TWICE = """
from pico_analyze.components import ComponentInfo, Piece
from pico_analyze.components.matrix import Matrix
from pico_analyze.components.single import Simple

class Twice(Simple):
    def pieces(self, checkpoint, selection):
        for piece in super().pieces(checkpoint, selection):
            yield Piece(piece.layer, None, piece.module, Matrix.dense(2 * piece.matrix.entries()), "", "")

COMPONENTS = {"twice": ComponentInfo(f"{__name__}:Twice", ("weights",), (), "twice the stored tensor")}
"""
SIMPLE = {"component_name": "simple", "data_type": "weights", "layer_suffixes": "swiglu.w_2"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory; modules loaded from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def plugin(folder):
    """``plugin("name", source)``: the path of a file that can be named under plugins."""

    def write(name, source):
        (folder / f"{name}.py").write_text(source)
        return f"{name}.py"

    return write


def metric(name, component=SIMPLE, **keys):
    return {"metric_name": name, "components": [component]} | keys


def measured(run, *metrics, plugins, steps=(0,)):
    frame = analyze(run, {"metrics": list(metrics), "plugins": list(plugins), "steps": list(steps)})
    return frame[frame["kind"] != "training"].reset_index(drop=True)


def call(*words, code=0):
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


# ---- the documented examples


def test_the_example_of_the_docs(make_run, monkeypatch):
    run = make_run("demo-tiny", suite="demo", steps=(0, 1))
    Path("examples").symlink_to(ROOT / "examples")
    assert (
        "near_zero: share of the entries below" in call("ls", "metrics", "--config", "examples/near_zero.yaml").output
    )
    assert "8 ok, 0 flagged, 0 undefined, 0 missing" in call("run", "examples/near_zero.yaml").stdout
    frame = results.read(Path("analysis_results/near_zero")).query("metric == 'near_zero'")
    assert set(frame["parameters"]) == {'{"below": "0.1"}'}
    weight = load_file(run / "checkpoints/step_1/model.safetensors")["model.layers.1.swiglu.w_2.weight"].double()
    (value,) = frame.query("step == 1 and layer == 1 and kind == 'weights'")["value"]
    assert value == (weight.abs() < 0.1 * weight.square().mean().sqrt()).double().mean().item()
    del sys.modules["near_zero"]


def test_the_example_of_the_readme(run_folder):
    section = (ROOT / "README.md").read_text().partition("## Add a metric")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (text,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    Path("my_metrics.py").write_text(code)
    Path("analysis.yaml").write_text(text + "runs: [runs/demo]\nanalysis_name: mine\n")
    call("run", "analysis.yaml", "write_json=pico_v0")
    frame = results.read(Path("analysis_results/mine")).query("metric == 'largest_share'")
    weight = load_file(run_folder / "checkpoints/step_10/model.safetensors")["model.layers.0.swiglu.w_2.weight"]
    sigma = torch.linalg.svdvals(weight.double())
    (value,) = frame.query("step == 10 and layer == 0")["value"]
    assert value == pytest.approx((sigma[0] / sigma.sum()).item(), rel=1e-12)
    assert Path("analysis_results/mine/step_10/largest_share.json").is_file()
    call("plot", "analysis_results/mine", "--metric", "largest_share", "--format", "png")


# ---- tables


def test_a_new_table_with_ours_first(plugin):
    table = load_metrics([plugin("largest_plugin", LARGEST)])
    assert list(table) == [*METRICS, "NAME"]
    assert get_metric("NAME", table).compute(Matrix.dense(torch.eye(3) * 2)) == 2.0
    assert "NAME" not in METRICS
    assert list(load_components([plugin("twice_plugin", TWICE)])) == [*COMPONENTS, "twice"]
    assert load_metrics(["twice_plugin.py"]) == METRICS  # it holds only components


def test_an_installed_module(plugin, folder, monkeypatch):
    plugin("installed_plugin", LARGEST)
    monkeypatch.syspath_prepend(folder)
    assert list(load_metrics(["installed_plugin"])) == [*METRICS, "NAME"]


def test_a_component_of_the_users_own(run_folder, plugin):
    plugins = [plugin("twice_plugin", TWICE)]
    twice = SIMPLE | {"component_name": "twice"}
    frame = measured(
        run_folder, *(metric("norm", one, norm_type="nuclear") for one in (SIMPLE, twice)), plugins=plugins
    )
    values = frame.groupby("component")["value"].apply(list)
    assert values["twice"] == pytest.approx([2 * value for value in values["simple"]])
    Path("analysis.yaml").write_text(yaml.safe_dump({"plugins": plugins}))
    assert "twice: twice the stored tensor" in call("ls", "components", "--config", "analysis.yaml").output


def test_a_pair_of_the_users_own_has_a_reference(run_folder, plugin):
    source = """
from pico_analyze.metrics import Metric
def gap(x, y):
    return float((x.entries().double() - y.entries().double()).norm())
METRICS = {"gap": Metric(f"{__name__}:gap", "pair", "distance", "[0, inf)", "0 when equal")}
"""
    activations = SIMPLE | {"data_type": "activations"}
    gap = metric("gap", activations, data_split="val", target_checkpoint="last")
    frame = measured(run_folder, gap, plugins=[plugin("gap_plugin", source)], steps=(0, 10))
    assert list(frame["value"] == 0) == [False, False, True, True]
    with pytest.raises(ValueError, match="gap of simple: target_checkpoint: is needed; give a step, or last"):
        measured(run_folder, gap | {"target_checkpoint": None}, plugins=["gap_plugin.py"])


def test_options_are_parameters(run_folder, plugin):
    source = """
from pico_analyze.metrics import Metric, Parameter
def power(entries, k):
    return float(entries.double().abs().pow(int(k)).mean())
METRICS = {"power": Metric(f"{__name__}:power", "entries", "", "", "", {"k": Parameter(("1", "2"), default="1")})}
"""
    plugins = [plugin("power_plugin", source)]
    frame = measured(run_folder, metric("power"), metric("power", options={"k": "2"}), plugins=plugins)
    assert list(frame["parameters"].unique()) == ['{"k": "1"}', '{"k": "2"}']
    with pytest.raises(ValueError, match="k: '3' is not allowed; choose one of 1, 2"):
        measured(run_folder, metric("power", options={"k": "3"}), plugins=plugins)
    with pytest.raises(ValueError, match="q: not a parameter of this metric, which has: k"):
        measured(run_folder, metric("power", options={"q": "3"}), plugins=plugins)


def test_the_newest_text_of_a_file_counts(run_folder, plugin):
    first = measured(run_folder, metric("NAME"), plugins=[plugin("changing_plugin", LARGEST)])
    plugin("changing_plugin", LARGEST.replace("singular_values.max()", "singular_values.min()"))
    second = measured(run_folder, metric("NAME"), plugins=["changing_plugin.py"])
    assert (second["value"] < first["value"]).all()


# ---- what is wrong with a plugin


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LARGEST.replace("NAME", "gini"), r"METRICS\['gini'\]: a metric of that name exists already"),
        (TWICE.replace('"twice"', '"simple"'), r"COMPONENTS\['simple'\]: a component of that name exists already"),
        ("", "has no table METRICS or COMPONENTS"),
        ("METRICS = [1]", "METRICS is a list, not a dict"),
        ("METRICS = {'a': len}", r"METRICS\['a'\] is a builtin_function_or_method, not a pico_analyze.metrics.Metric"),
        ("COMPONENTS = {'a': 3}", r"COMPONENTS\['a'\] is a int, not a pico_analyze.components.ComponentInfo"),
        (LARGEST.replace('"NAME"', "3"), r"METRICS\[3\]: a name must be text"),
        (LARGEST.replace(":largest", ":smallest"), "function: 'bad_plugin:smallest' is not module:name of something"),
        (LARGEST.replace('f"{__name__}:largest"', '"nowhere"'), "function: 'nowhere' is not module:name of something"),
        (
            LARGEST.replace('"spectrum"', '"spectra"'),
            "consumes is 'spectra', not one of entries, spectrum, matrix, pair",
        ),
        (
            TWICE.replace('("weights",)', '("weight",)'),
            r"kinds is \('weight',\), not some of weights, activations, grad",
        ),
        (TWICE.replace(":Twice", ":Thrice"), "path: 'bad_plugin:Thrice' is not module:name"),
        ("def f(:", "cannot be imported: SyntaxError: "),
        ("import no_such_thing", "cannot be imported: No module named 'no_such_thing'$"),
        ("raise RuntimeError('no luck')", "cannot be imported: RuntimeError: no luck"),
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit: 3"),
    ],
)
def test_one_clear_message_and_nothing_written(run_folder, plugin, source, message):
    raw = {"runs": ["runs/demo"], "plugins": [plugin("bad_plugin", source)], "metrics": [metric("gini")]}
    Path("analysis.yaml").write_text(yaml.safe_dump(raw))
    error = call("run", "analysis.yaml", code=2).stderr
    assert error.startswith("error: plugins: bad_plugin.py")
    assert re.search(message, error.strip()), error
    assert not Path("analysis_results").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.py", "there is no such file in "),
        ("nothing", "No module named 'nothing'; a file of your own is named by its path"),
        ("json.py", "there is another module json; rename the file"),
        ("1st-try.py", "the name of the file must be that of a module"),
        ("pico_analyze", "has no table METRICS or COMPONENTS"),
    ],
)
def test_names_that_do_not_do(plugin, name, message):
    for stem in ("json", "1st-try"):
        plugin(stem, LARGEST)
    with pytest.raises(PluginError, match=message):
        load_metrics([name])
    assert sys.modules["json"].__name__ == "json"
    assert not str(sys.modules["json"].__file__).startswith(str(Path.cwd()))


def test_the_same_plugin_twice(plugin):
    name = plugin("largest_plugin", LARGEST)
    with pytest.raises(PluginError, match="exists already"):
        load_metrics([name, name])


def test_two_files_of_one_name(plugin, folder):
    plugin("largest_plugin", LARGEST)
    (folder / "sub").mkdir()
    (folder / "sub/largest_plugin.py").write_text(LARGEST.replace("NAME", "OTHER"))
    with pytest.raises(PluginError, match=r"sub/largest_plugin\.py: there is another module largest_plugin; rename"):
        load_metrics(["largest_plugin.py", "sub/largest_plugin.py"])
    assert "OTHER" in load_metrics(["sub/largest_plugin.py"])  # one after the other is fine


def test_a_file_that_was_imported_already(plugin, folder, monkeypatch):
    name = plugin("imported_plugin", LARGEST)
    monkeypatch.syspath_prepend(folder)
    import_module("imported_plugin")
    assert "NAME" in load_metrics([name])


# ---- what goes wrong while it measures


FAILING = """
from pico_analyze.metrics import Metric
def fails(entries):
    if entries.numel() == 512:
        BODY
    return 1.0
METRICS = {"fails": Metric(f"{__name__}:fails", "entries", "", "", "")}
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 1 / 0", "the metric failed: ZeroDivisionError: division by zero"),
        ("return entries", "the metric failed: it gave back a Tensor, not a float"),
        ("return float('nan')", "the result is nan, not a finite number"),
        ("return 10**400", "the result does not fit into a float64"),
        ("raise SystemExit(0)", "the metric failed: SystemExit: 0"),
        ("raise MemoryError('of mine')", "the metric failed: MemoryError: of mine"),
    ],
)
def test_a_metric_that_fails_leaves_the_rest_of_the_table(run_folder, plugin, body, reason):
    small = SIMPLE | {"layer_suffixes": "v_proj"}
    frame = measured(
        run_folder,
        metric("fails"),
        metric("fails", small),
        metric("gini"),
        plugins=[plugin("raising_plugin", FAILING.replace("BODY", body))],
    )
    assert list(frame["status"]) == ["undefined"] * 2 + ["ok"] * 4
    assert list(frame["reason"][:2]) == [reason] * 2
    assert frame["value"].isna().sum() == 2


ZEROING = """
from pico_analyze.metrics import Metric
def zeroes(given):
    getattr(given, "left", given).zero_()
    return 1.0
METRICS = {"zeroes": Metric(f"{__name__}:zeroes", "CONSUMES", "", "", "")}
"""


@pytest.mark.parametrize("consumes", ["entries", "spectrum", "matrix"])
def test_a_metric_that_changes_what_it_is_given_changes_it_for_nobody_else(run_folder, plugin, consumes):
    ours = metric("norm", norm_type="nuclear"), metric("gini")
    harmful = plugin("zeroing_plugin", ZEROING.replace("CONSUMES", consumes))
    harmed = measured(run_folder, metric("zeroes"), *ours, plugins=[harmful])
    clean = measured(run_folder, *ours, plugins=[])
    assert list(harmed[harmed["metric"] != "zeroes"]["value"]) == list(clean["value"])
    assert set(harmed["status"]) == {"ok"}


def test_a_failed_metric_is_tried_again(run_folder, plugin):
    settings = {"metrics": [metric("fails")], "plugins": [plugin("again_plugin", FAILING.replace("BODY", "1 / 0"))]}
    first = analyze(run_folder, settings)
    plugin("again_plugin", FAILING.replace("BODY", "pass"))
    again = analyze(run_folder, settings, previous=first)
    assert set(again.query("metric == 'fails'")["value"]) == {1.0}


def test_a_changed_file_computes_its_own_values_again_and_no_others(run_folder, plugin):
    plugins = [plugin("edited_plugin", LARGEST), plugin("other_plugin", TWICE)]
    twice = SIMPLE | {"component_name": "twice"}
    raw = {"runs": ["runs/demo"], "analysis_name": "mine", "plugins": plugins}
    Path("analysis.yaml").write_text(yaml.safe_dump(raw | {"metrics": [metric("NAME"), metric("gini", twice)]}))
    assert "16 values computed" in call("run", "analysis.yaml").stdout
    assert "0 values computed, 16 kept" in call("run", "analysis.yaml").stdout
    plugin("edited_plugin", LARGEST.replace("singular_values.max()", "singular_values.min()"))
    assert "8 values computed, 8 kept" in call("run", "analysis.yaml").stdout
    smallest = results.read(Path("analysis_results/mine")).query("metric == 'NAME'")["value"]
    plugin("edited_plugin", LARGEST)  # as it was: its values are still known
    assert "0 values computed, 16 kept" in call("run", "analysis.yaml").stdout
    assert (results.read(Path("analysis_results/mine")).query("metric == 'NAME'")["value"] > smallest).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("2 * piece", "{}[3] * piece"), "the component failed: KeyError: 3"),
        (("yield Piece", "if False: yield Piece"), "the component failed: it gave 0 matrices in 0 for 1 heads"),
        (("yield Piece", "yield 3\n            Piece"), "the component failed: AttributeError: 'int' object"),
    ],
)
def test_a_component_that_fails_leaves_the_rest_of_the_table(run_folder, plugin, change, reason):
    twice = SIMPLE | {"component_name": "twice"}
    plugins = [plugin("failing_component", TWICE.replace(*change))]
    frame = measured(run_folder, metric("gini", twice), metric("gini"), plugins=plugins)
    assert list(frame["status"]) == ["undefined"] * 2 + ["ok"] * 2
    assert frame["reason"][0].startswith(reason)


def test_a_component_that_cannot_select_is_refused(run_folder, plugin):
    broken = TWICE.replace("class Twice(Simple):", "class Twice(Simple):\n    def select(self, manifest): return [3]\n")
    with pytest.raises(ValueError, match="run demo: the component failed: it selects a int, not a Selection"):
        measured(run_folder, metric("gini", SIMPLE | {"component_name": "twice"}), plugins=[plugin("broken", broken)])


# --- entry points


@pytest.fixture
def package(folder, monkeypatch):
    """``package("dist", entries)``: an installed distribution with these entry points of the group."""
    site = folder / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(name, entries, version="1.2"):
        information = site / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{entry} = {value}\n" for entry, value in entries.items()]
        (information / "entry_points.txt").write_text("[pico_analyze.plugins]\n" + "".join(lines))
        return site

    return install


def test_a_plugin_of_an_installed_package(run_folder, package, folder):
    site = package("heavy-metrics", {"heavy": "heavy_metrics.pico", "spare": "heavy_metrics.other"})
    (site / "heavy_metrics").mkdir()
    (site / "heavy_metrics" / "__init__.py").write_text("")
    (site / "heavy_metrics" / "pico.py").write_text(LARGEST.replace("NAME", "heaviest"))
    assert "heaviest" not in load_metrics()  # an analysis says what it uses
    frame = measured(run_folder, metric("heaviest"), plugins=["heavy"])
    spectral = measured(run_folder, metric("norm", norm_type="spectral"), plugins=[])
    assert frame["value"].to_list() == spectral["value"].to_list()
    lines = [line.split() for line in call("ls", "plugins").stdout.splitlines()]
    assert lines[0] == ["plugin", "module", "package", "version"]
    assert ["heavy", "heavy_metrics.pico", "heavy-metrics", "1.2"] in lines
    (folder / "uses.yaml").write_text("plugins: [heavy]\n")
    assert "heaviest: largest singular value" in call("ls", "metrics", "--config", "uses.yaml").stdout


def test_entry_points_reach_other_processes(run_folder, package, monkeypatch):
    site = package("heavy-metrics", {"heavy": "heavy_pico"})
    (site / "heavy_pico.py").write_text(LARGEST.replace("NAME", "heaviest"))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    config = {"metrics": [metric("heaviest")], "plugins": ["heavy"], "steps": [0, 1]}
    assert analyze(run_folder, config, jobs=2).equals(analyze(run_folder, config))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"heavy": "no_such_module"}, "plugins: heavy cannot be imported: No module named 'no_such_module'"),
        ({"heavy": "heavy_pico:METRICS"}, r"its entry point is 'heavy_pico:METRICS'; it has to be a module"),
    ],
)
def test_an_entry_point_that_cannot_be_used(package, entries, message):
    package("heavy-metrics", entries)
    with pytest.raises(PluginError, match=message):
        load_metrics(["heavy"])


def test_two_packages_with_one_name(package):
    package("heavy-metrics", {"heavy": "one"})
    package("other-metrics", {"heavy": "two"})
    with pytest.raises(PluginError, match="heavy: several packages have an entry point of that name: one, two"):
        load_metrics(["heavy"])
