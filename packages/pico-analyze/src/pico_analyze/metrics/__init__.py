"""The table of metrics: what each is called, what it consumes, what it means. Computing one imports torch."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pico_analyze import plugins
from pico_analyze.metrics.entry import Metric, MetricError, Number, Parameter

__all__ = ["METRICS", "Metric", "MetricError", "Number", "Parameter", "get_metric", "load_metrics"]

METRICS: dict[str, Metric] = {
    "gini": Metric(
        function="pico_analyze.metrics.sparsity:gini",
        consumes="entries",
        summary="inequality of the magnitudes of the entries",
        range="[0, 1)",
        meaning="0 when all magnitudes are equal, 1 - 1/n when one of n entries holds everything; 0.41 for "
        "a normal distribution, whatever its scale. It sees the whole distribution, so it rises with heavy "
        "tails as well as with zeros, and says nothing about where the large entries are.",
    ),
    "hoyer": Metric(
        function="pico_analyze.metrics.sparsity:hoyer",
        consumes="entries",
        summary="sparsity from the ratio of the 1-norm to the 2-norm",
        range="[0, 1]",
        meaning="0 when all magnitudes are equal, 1 when exactly one entry is not zero; 0.2 for many "
        "entries from a normal distribution. A few outliers move it through the 2-norm. The value of noise "
        "depends slightly on the number of entries, so compare small matrices with care.",
    ),
    "per": Metric(
        function="pico_analyze.metrics.spectral:per",
        consumes="spectrum",
        summary="proportional effective rank: exp(entropy of the spectrum) / number of singular values",
        range="(0, 1]",
        meaning="1 when all singular values are equal, 1/k when one of k is not zero. It weighs singular "
        "values, not their squares, so a long tail of small ones counts. Random matrices of another aspect "
        "ratio have another value: compare with initialisation rather than across shapes.",
    ),
    "condition_number": Metric(
        function="pico_analyze.metrics.spectral:condition_number",
        consumes="spectrum",
        summary="largest over smallest singular value",
        range="[1, 4.5e15)",
        meaning="1 for a multiple of an isometry; undefined for a numerically singular matrix. The "
        "smallest singular value alone decides, so the number scatters widely: for square random matrices "
        "of size d it is of the order of d, often many times that. Look at many matrices, on a log axis.",
    ),
    "norm": Metric(
        function="pico_analyze.metrics.spectral:norm",
        consumes="matrix",
        summary="size of a matrix",
        range="[0, inf)",
        meaning="frobenius: root of the sum of squares; nuclear: sum of the singular values; spectral: the "
        "largest one; inf: the largest absolute entry; inf_operator: the largest absolute row sum. All but "
        "inf grow with the shape at equal scale of the entries, so normalise before comparing sizes.",
        parameters={"norm_type": Parameter(("frobenius", "nuclear", "spectral", "inf", "inf_operator"), default=None)},
    ),
    "stable_rank": Metric(
        function="pico_analyze.metrics.spectral:stable_rank",
        consumes="spectrum",
        summary="squared Frobenius norm over squared spectral norm",
        range="[1, number of singular values]",
        meaning="1 when one direction holds all energy, k when k directions share it equally. The largest "
        "singular value alone is the yardstick, so one growing direction lowers it whatever the others do; small "
        "singular values hardly count. It is at most the rank and moves smoothly with the entries.",
    ),
    "effective_rank": Metric(
        function="pico_analyze.metrics.spectral:effective_rank",
        consumes="spectrum",
        summary="exp(entropy of the spectrum)",
        range="[1, number of singular values]",
        meaning="The number of equal singular values that have the same entropy. It is PER times the number of "
        "singular values, so it grows with the size of the matrix: use PER to compare sizes, this to count "
        "dimensions. A long tail of small singular values counts.",
    ),
    "participation_ratio": Metric(
        function="pico_analyze.metrics.spectral:participation_ratio",
        consumes="matrix",
        summary="(sum of squared singular values)^2 / sum of their fourth powers",
        range="[1, number of singular values]",
        meaning="The number of directions that share the energy: 1 for one, k for k equal ones. With centre columns "
        "it is the participation ratio of the eigenvalues of the covariance, which is what is meant for "
        "activations; without, a mean that all samples share counts as a direction and often is the only one. Few "
        "samples bound it: n centred samples give at most n - 1.",
        parameters={"centre": Parameter(("none", "columns"), default="none")},
    ),
    "spectral_entropy": Metric(
        function="pico_analyze.metrics.spectral:spectral_entropy",
        consumes="spectrum",
        summary="entropy of the shares of energy of the singular values, over its largest possible value",
        range="[0, 1]",
        meaning="0 when one direction holds all energy, 1 when all hold the same. Unlike PER it weighs squares of "
        "singular values and takes no exponential, so it reacts to the large directions and hardly to a tail of "
        "small ones.",
    ),
    "alpha": Metric(
        function="pico_analyze.metrics.power_law:alpha",
        consumes="spectrum",
        summary="exponent of the power-law tail of the eigenvalues (squared singular values)",
        range="(1, inf); report ks_distance: [0, 1]",
        meaning="Small when few eigenvalues tower over the rest; well trained weights are reported between 2 and 6. A "
        "power law is fitted whether or not there is one: look at the distance of the fit (report: ks_distance) "
        "beside it. Fewer than 50 eigenvalues in the tail make it unreliable, and it is then flagged; of random "
        "matrices it depends on the shape.",
        parameters={"report": Parameter(("alpha", "ks_distance"), default="alpha")},
    ),
    "kurtosis": Metric(
        function="pico_analyze.metrics.sparsity:kurtosis",
        consumes="entries",
        summary="excess kurtosis of the entries",
        range="[-2, inf)",
        meaning="0 for a normal distribution, -1.2 for a uniform one, positive for heavy tails. The fourth power "
        "lets a handful of outliers decide, which is why it finds outlier features, and why it scatters: look at "
        "the Gini coefficient for the bulk.",
    ),
    "dead_units": Metric(
        function="pico_analyze.metrics.geometry:dead_units",
        consumes="matrix",
        summary="share of the units whose activation is the same for all samples",
        range="[0, 1]",
        meaning="0 when every column varies over the samples, 1 when none does. A unit that fires seldom looks "
        "dead in few samples, so the number falls with the number of rows. A residual stream or a linear "
        "projection has hardly ever dead units: it is meant for what follows a nonlinearity.",
        parameters={"tolerance": Number(0, 1, default=1e-6)},
        kinds=("activations",),
    ),
    "anisotropy": Metric(
        function="pico_analyze.metrics.geometry:anisotropy",
        consumes="matrix",
        summary="mean cosine between different rows",
        range="[-1/(n - 1), 1]",
        meaning="Near 0 when rows point everywhere, 1 when all point the same way. A mean that all samples share, "
        "or a single feature of large magnitude, is enough to bring it near 1, without saying anything about the "
        "other directions. Of a weight the rows are its output units.",
    ),
    "intrinsic_dimension": Metric(
        function="pico_analyze.metrics.geometry:intrinsic_dimension",
        consumes="matrix",
        summary="dimension of the manifold of the samples, from the distances to two neighbours (TwoNN)",
        range="(0, inf)",
        meaning="d for samples that are spread evenly over d dimensions, however curved, however many features. It "
        "is a local number and too low for high dimensions and few samples (20 dimensions need thousands). "
        "Rounding in storage and samples that occur twice spoil the smallest distances.",
        parameters={"discard": Number(0, 0.9, default=0.1)},
        kinds=("activations",),
    ),
    "eigenvalue_positivity": Metric(
        function="pico_analyze.metrics.eigenvalues:eigenvalue_positivity",
        consumes="matrix",
        summary="sum of the real parts of the eigenvalues over the sum of their magnitudes",
        range="[-1, 1]",
        meaning="1 when all eigenvalues of a square matrix are positive, -1 when all are negative. Of full_ov_circuit "
        "it is the copying score of a head: near 1 where seeing a token raises its own logit. Of ov_circuit it asks "
        "whether a head adds to the stream what it reads there. Large eigenvalues decide; random circuits scatter "
        "about 0.",
        kinds=("weights", "gradients"),
    ),
    "composition_score": Metric(
        function="pico_analyze.metrics.spectral:composition_score",
        consumes="matrix",
        summary="Frobenius norm of the product of two circuits over the product of their norms",
        range="[0, 1]; random: [-1, 1]",
        meaning="Only of q_, k_ and v_composition: how strongly a head can act on one of a later layer: 0 when the later "
        "one reads nothing of what the earlier one writes, 1 when both have rank one and fit. Circuits without "
        "any relation have about 1/sqrt(d_model), which baseline random takes away, so compare sizes with it. It says "
        "that heads can act on each other, not that they do: that depends on what they attend to.",
        parameters={"baseline": Parameter(("none", "random"), default="none")},
        kinds=("weights",),
    ),
    "cka": Metric(
        function="pico_analyze.metrics.similarity:cka",
        consumes="pair",
        over_orders="pico_analyze.metrics.similarity:cka_over_orders",
        summary="centred kernel alignment of two representations of the same samples",
        range="[-1, 1]; plug_in: [0, 1]",
        meaning="1 when the similarities between samples agree up to scale. Unchanged by rotations, "
        "scaling and shifts of the features, not by other linear maps: directions of large variance "
        "decide, so one outlier feature or sample can. Of unrelated features the debiased estimate "
        "scatters about 0, also below; the plug-in estimate rises towards 1 as samples become few against "
        "features. With kernel rbf near samples decide rather than far ones.",
        parameters={
            "estimator": Parameter(("debiased", "plug_in", "minibatch"), default="debiased"),
            "kernel": Parameter(("linear", "rbf"), default="linear"),
            "batch": Number(4, None, default=256, only=("estimator", "minibatch")),
        },
    ),
    "pwcca": Metric(
        function="pico_analyze.metrics.cca:pwcca",
        consumes="pair",
        over_orders="pico_analyze.metrics.cca:pwcca_over_orders",
        summary="mean canonical correlation of two representations, weighted by what one of them expresses",
        range="[0, 1]",
        meaning="1 when every direction of the weighting side is a linear function of the other side. "
        "Unchanged by invertible linear maps of the side that gives no weights; not symmetric. Unrelated "
        "features of k dimensions each already correlate by about sqrt(k/n), so it needs many more samples "
        "than features; it is flagged where some correlations are 1 whatever the data.",
        parameters={"weights_from": Parameter(("x", "y"), default="x")},
    ),
    "mean_cca": Metric(
        function="pico_analyze.metrics.cca:mean_cca",
        consumes="pair",
        over_orders="pico_analyze.metrics.cca:mean_cca_over_orders",
        summary="mean canonical correlation of two representations of the same samples",
        range="[0, 1]",
        meaning="1 when the side of smaller rank is a linear function of the other. All directions count alike, also "
        "those of tiny variance that are mostly noise. Unrelated features of k dimensions each already correlate by "
        "about sqrt(k/n), so it needs many more samples than features; it is flagged where some correlations are 1 "
        "whatever the data.",
    ),
    "svcca": Metric(
        function="pico_analyze.metrics.cca:svcca",
        consumes="pair",
        over_orders="pico_analyze.metrics.cca:svcca_over_orders",
        summary="mean canonical correlation of the principal directions that hold most of the variance",
        range="[0, 1]",
        meaning="Like mean CCA, after the directions of least variance are dropped. The directions that are kept all "
        "count alike, and their number changes over training, which moves the value on its own; a side with one "
        "dominant direction is reduced to it.",
        parameters={"variance": Number(0, 1, default=0.99)},
    ),
    "procrustes": Metric(
        function="pico_analyze.metrics.similarity:procrustes",
        consumes="pair",
        over_orders="pico_analyze.metrics.similarity:procrustes_over_orders",
        summary="cosine between two representations after the best rotation of one onto the other",
        range="[0, 1]",
        meaning="1 when the samples form the same shape, whatever its position, size and orientation. Directions "
        "count by their variance, less one-sidedly than in CKA. Of unrelated features it is well above 0 and rises "
        "towards 1 as samples become few against features: compare with permuted samples.",
    ),
    "rsa": Metric(
        function="pico_analyze.metrics.similarity:rsa",
        consumes="pair",
        over_orders="pico_analyze.metrics.similarity:rsa_over_orders",
        summary="correlation of the distances between samples in two representations",
        range="[-1, 1]",
        meaning="1 when the same pairs of samples are near and far. Pairs that share a sample are not independent, so "
        "the usual p-value of a correlation does not hold. A single outlying sample makes many large distances; "
        "spearman limits what they do.",
        parameters={"correlation": Parameter(("spearman", "pearson"), default="spearman")},
    ),
    "mutual_knn": Metric(
        function="pico_analyze.metrics.similarity:mutual_knn",
        consumes="pair",
        over_orders="pico_analyze.metrics.similarity:mutual_knn_over_orders",
        summary="share of nearest neighbours that two representations have in common",
        range="[0, 1]",
        meaning="1 when every sample has the same k neighbours in both. It sees local structure alone, whatever the "
        "large distances are. Unrelated features give k/(n - 1), so values of different n or k are not comparable; "
        "of few samples it moves in coarse steps.",
        parameters={
            "k": Number(1, None, default=10),
            "distance": Parameter(("cosine", "euclidean"), default="cosine"),
        },
    ),
}


def get_metric(name: str, table: Mapping[str, Metric] = METRICS) -> Metric:
    """The metric of that name.

    Raises:
        ValueError: There is none; the message lists those there are and the nearest.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no metric {name!r}; there are {', '.join(table)}{hint}")


def load_metrics(names: Sequence[str] = ()) -> dict[str, Metric]:
    """Our table and those of the plugins: modules or files that hold a dict ``METRICS`` of the same kind.

    Raises:
        PluginError: A plugin cannot be used, or two tables use one name.
    """
    return plugins.merged(METRICS, "METRICS", names)
