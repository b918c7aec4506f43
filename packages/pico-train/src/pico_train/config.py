"""Every key that a training YAML may hold, in YAML order, and what it means.

A file becomes a ``RunConfig``, or one ``ConfigError`` that lists everything wrong with it. The whole config
stops at ``run.py``; other modules get their own section or scalars. Section and key names are those of the
published Pico files, which load as they are.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Strict

from pico_train.strict_yaml import (
    ConfigError,
    Problem,
    Section,
    flattened,
    merged,
    name_problem,
    read_mapping,
    read_overrides,
    shown,
    to_text,
    validated,
)
from pico_train.words import counted

Texts = Annotated[tuple[str, ...], Strict(False)]  # a YAML list arrives as a list
Steps = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
MOST_SAVES = 100_000  # milestones of one run
Metric = Literal["paloma", "held_out", "sample"]

# ---- data


class DatasetConfig(Section):
    """Where the documents come from."""

    name: str = Field(
        "pico-lm/pretokenized-dolma",
        min_length=1,
        description="python-stdlib = source text of the installed standard library; "
        "text = local text at `path`; else the id of a data set on the Hub",
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="file or folder of the data set `text`, from the working directory; null for others",
    )
    pattern: str | None = Field(
        None,
        min_length=1,
        description="glob of the files below a folder; null = all .txt, .jsonl and .parquet; only for `text`",
    )
    text_key: str = Field(
        "text", min_length=1, description="field of .jsonl and column of .parquet files that holds a document"
    )
    document_bytes: int = Field(
        16384,
        gt=0,
        description="a longer plain-text file is cut at line ends into documents of about this many bytes",
    )
    held_out_fraction: float = Field(
        0.05,
        ge=0,
        le=0.5,
        description="share of documents kept out of training, every k-th document; 0 = none",
    )

    def problems(self) -> Iterator[Problem]:
        """``path`` belongs to the data set ``text``, and only to it."""
        if self.name == "text" and self.path is None:
            yield Problem("path", None, "the data set `text` needs the path of a file or folder", ("name",))
        if self.name != "text" and self.path is not None:
            yield Problem("path", self.path, f"only for name: text, not for {shown(self.name)}", ("name",))


class DataloaderConfig(Section):
    """How the windows of tokens become batches."""

    batch_size: int = Field(
        1024,
        gt=0,
        description="global batch: sequences per optimizer step over all devices and accumulation steps",
    )
    shuffle: bool = Field(
        True,
        description="a new order every epoch; false = stored order, for data that comes pre-shuffled",
    )


class TokenizerConfig(Section):
    """What turns text into token ids."""

    name: str = Field(
        "allenai/OLMo-7B-0724-hf",
        min_length=1,
        description="byte-level-bpe = one trained on the training documents; "
        "else a folder, a tokenizer.json or a Hub id",
    )
    vocab_size: int = Field(50304, gt=0, description="token ids; at most model.vocab_size")


class DataConfig(Section):
    """Data set, batches and tokenizer."""

    dataset: DatasetConfig = DatasetConfig()
    dataloader: DataloaderConfig = DataloaderConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    cache_dir: str = Field("token_caches", min_length=1, description="folder of the token caches, shared by all runs")


# ---- model


class ModelConfig(Section):
    """The shape of the decoder and how it is initialised."""

    model_type: Literal["pico_decoder"] = Field("pico_decoder", description="the only family so far")
    d_model: int = Field(768, gt=0, description="width of the residual stream")
    n_layers: int = Field(12, gt=0, description="blocks")
    vocab_size: int = Field(50304, gt=0, description="rows of the embedding matrices")
    batch_size: int = Field(
        1024,
        gt=0,
        json_schema_extra={"deprecated": True},
        description="no effect; kept because published files hold it (see data.dataloader.batch_size)",
    )
    max_seq_len: int = Field(2048, gt=0, description="tokens per training window, and the longest position")
    attention_n_heads: int = Field(12, gt=0, description="query heads")
    attention_n_kv_heads: int | None = Field(4, gt=0, description="key and value heads; null = as many as query heads")
    activation_hidden_dim: int = Field(3072, gt=0, description="hidden width of the SwiGLU")
    norm_eps: float = Field(1e-6, gt=0, description="epsilon of the RMSNorm")
    position_emb_theta: float = Field(10000.0, gt=0, description="base of the rotary embedding")
    tie_embeddings: bool = Field(False, description="one matrix for embedding and output projection")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the residual contributions that is dropped")
    initialization: Literal["normal", "torch_default"] = Field(
        "normal",
        description="normal = N(0, init_std), residual projections scaled by 1/sqrt(2 n_layers); "
        "torch_default = as published",
    )
    init_std: float = Field(0.02, gt=0, description="standard deviation of the initialisation `normal`")

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.d_model // self.attention_n_heads

    @property
    def n_kv_heads(self) -> int:
        """Key and value heads, with null resolved."""
        return self.attention_n_heads if self.attention_n_kv_heads is None else self.attention_n_kv_heads

    @property
    def n_parameters_in_matrices(self) -> int:
        """The matrices of the blocks, without norms and embeddings."""
        attention = 2 * self.d_model * (self.attention_n_heads + self.n_kv_heads) * self.head_dim  # q, o and k, v
        swiglu = 3 * self.d_model * self.activation_hidden_dim
        return self.n_layers * (attention + swiglu)

    @property
    def n_parameters_without_embeddings(self) -> int:
        """Blocks and norms, without the embedding matrices."""
        return self.n_parameters_in_matrices + (2 * self.n_layers + 1) * self.d_model

    @property
    def n_parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        matrices = 1 if self.tie_embeddings else 2
        return self.n_parameters_without_embeddings + matrices * self.vocab_size * self.d_model

    def problems(self) -> Iterator[Problem]:
        """Heads share ``d_model`` equally, with an even part each; kv heads share the query heads equally."""
        width, heads = self.d_model, self.attention_n_heads
        if width % (2 * heads):
            fitting = [h for h in divisors(width) if width // h % 2 == 0]
            hint = f"counts that do: {nearest(fitting, heads)}" if fitting else "no count does: d_model is odd"
            yield Problem(
                "attention_n_heads",
                heads,
                f"must divide d_model {width} into heads of even width (rotary pairs); {hint}",
                ("d_model",),
            )
        if heads % self.n_kv_heads:
            yield Problem(
                "attention_n_kv_heads",
                self.attention_n_kv_heads,
                f"must divide attention_n_heads {heads}; counts that do: {nearest(divisors(heads), self.n_kv_heads)}",
                ("attention_n_heads",),
            )


def divisors(n: int) -> list[int]:
    """All divisors of ``n`` in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest(numbers: Sequence[int], wanted: int) -> str:
    """The nearest of the ascending ``numbers`` below and above ``wanted``, in words."""
    below = [n for n in numbers if n < wanted][-1:]
    above = [n for n in numbers if n > wanted][:1]
    return " or ".join(map(str, below + above))


# ---- seeds


class SeedsConfig(Section):
    """Three seeds, one per kind of randomness."""

    weights: int = Field(0, ge=0, description="seed of the initial weights")
    data: int = Field(0, ge=0, description="seed of the data order, and of the sampled positions of capture")
    dropout: int = Field(0, ge=0, description="seed of dropout")


# ---- training


class MuonConfig(Section):
    """What the optimizer `muon` does with the matrices of the blocks."""

    lr: float = Field(
        0.02, gt=0, description="peak learning rate of these matrices; it follows the same schedule as optimization.lr"
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="decay of the momentum, which is Nesterov's")
    adjust_lr: Literal["original", "match_rms_adamw"] = Field(
        "original",
        description="original = lr * sqrt(max(1, rows / columns)); match_rms_adamw = lr * 0.2 sqrt(max(rows, columns)), "
        "with which an lr found for AdamW can be used",
    )


class OptimizationConfig(Section):
    """The optimizer, its learning rate, and the clipping."""

    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon = Muon for the matrices of the blocks, AdamW for embeddings, head and norms"
    )
    lr: float = Field(3e-4, gt=0, description="peak learning rate; under muon that of embeddings, head and norms")
    lr_scheduler: Literal["linear_with_warmup", "linear", "cosine", "wsd", "constant"] = Field(
        "linear_with_warmup",
        description="linear_with_warmup = the published curve, whose first update has rate 0; "
        "the others warm up from lr / lr_warmup_steps; wsd = flat, then straight down",
    )
    lr_warmup_steps: int = Field(2500, ge=0, description="steps of warm-up; 0 = none")
    gradient_accumulation_steps: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(
        128, description="micro-batches per optimizer step and device; auto = as few as the free memory allows"
    )
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = Field(
        (0.9, 0.999), description="AdamW's decay of its two moments"
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay; 0 = none")
    weight_decay_on: Literal["matrices", "all"] = Field(
        "matrices",
        description="matrices = 2-D weights outside the embeddings; all = every parameter, as published",
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="the gradient is scaled down to this 2-norm; null = no clipping, as published"
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="last learning rate of linear, cosine and wsd as a share of lr"
    )
    decay_fraction: float = Field(0.2, gt=0, le=1, description="share of all steps in which wsd goes down")
    muon: MuonConfig = MuonConfig()

    def problems(self) -> Iterator[Problem]:
        """A floor under the learning rate needs a schedule that has one; Muon's keys need Muon."""
        for key, value in self.muon.model_dump().items():
            if self.optimizer != "muon" and value != MuonConfig.model_fields[key].default:
                yield Problem(
                    f"muon.{key}", value, f"has no effect under optimizer: {self.optimizer}; use muon", ("optimizer",)
                )
        if self.min_lr_ratio > 0 and self.lr_scheduler in ("linear_with_warmup", "constant"):
            yield Problem(
                "min_lr_ratio",
                self.min_lr_ratio,
                f"has no effect under lr_scheduler: {self.lr_scheduler}; use linear, cosine or wsd, or 0",
                ("lr_scheduler",),
            )


class FabricConfig(Section):
    """The hardware."""

    num_nodes: int = Field(1, gt=0, description="machines")
    num_devices: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(
        "auto",
        description="devices per machine, with a process each; auto = one, or as many as torchrun or Slurm has started processes",
    )
    strategy: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description="how several devices share the work: ddp = each has the whole model and a part of the batch; "
        "fsdp = each holds a part of the model as well; auto = ddp",
    )
    timeout_minutes: float = Field(
        30.0, gt=0, description="how long a process waits for another one before the run ends with an error"
    )
    precision: Literal["auto", "32-true", "16-mixed", "bf16-mixed", "bf16-true"] = Field(
        "auto",
        description="auto = bf16-mixed on CUDA from Ampere on, 16-mixed on older CUDA, 32-true elsewhere; "
        "published: bf16-mixed",
    )
    accelerator: Literal["auto", "cpu", "cuda", "gpu", "mps"] = Field(
        "auto", description="auto = CUDA, else MPS, else CPU; published: cuda"
    )
    num_threads: int | None = Field(None, gt=0, le=1024, description="CPU threads; null = torch's own choice")


class TrainingConfig(Section):
    """How long and how the weights are trained."""

    max_steps: int = Field(200_000, gt=0, le=10**9, description="optimizer steps")
    optimization: OptimizationConfig = OptimizationConfig()
    fabric: FabricConfig = FabricConfig()
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="a loss or gradient that is not finite: stop the run, or skip that update"
    )
    max_skips: int = Field(10, gt=0, description="updates that `skip` may leave out in a whole run")
    activation_checkpointing: bool = Field(
        False,
        description="keep the input of each block only and compute the rest again in the backward: less memory, a "
        "third more time, the same gradients bit for bit",
    )
    compile: Literal["auto"] | bool = Field(
        False,
        description="torch.compile the training pass; its numbers agree with the plain one up to rounding only; "
        "auto = try it before step 0 and take the faster of the two, or the plain one where it cannot be compiled",
    )
    ignore_memory: bool = Field(False, description="start although the memory may not be enough")
    max_minutes: float | None = Field(
        None, gt=0, description="stop after this time with a restart point and exit code 75; null = no limit"
    )


# ---- evaluation


class PalomaConfig(Section):
    """Perplexity on the Paloma set."""

    dataset_name: str = Field("pico-lm/pretokenized-paloma-tinsy", min_length=1, description="data set on the Hub")
    dataset_split: str = Field("val", min_length=1, description="split of it")
    max_length: int = Field(2048, gt=0, description="tokens per window")
    batch_size: int = Field(16, gt=0, description="sequences per forward; does not change the number")


class HeldOutConfig(Section):
    """Loss on windows of the held-out documents."""

    max_windows: int | None = Field(128, gt=0, description="windows that are evaluated; null = all")
    batch_size: int = Field(16, gt=0, description="sequences per forward; does not change the number")


class SampleConfig(Section):
    """A short text that the model writes."""

    prompt: str = Field("def ", min_length=1, description="text that it starts from")
    max_new_tokens: int = Field(60, gt=0, description="tokens that it adds")
    temperature: float = Field(0.8, ge=0, description="temperature of the softmax; 0 = the likeliest token")
    seed: int = Field(0, ge=0, description="seed of the sampling")


class EvaluationConfig(Section):
    """What is measured at each checkpoint."""

    metrics: Annotated[tuple[Metric, ...], Strict(False)] | None = Field(
        ("paloma",), description="what is evaluated at each save; null or [] = nothing"
    )
    paloma: PalomaConfig = PalomaConfig()
    held_out: HeldOutConfig = HeldOutConfig()
    sample: SampleConfig = SampleConfig()


# ---- monitoring


class LoggingConfig(Section):
    """The console."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = Field("INFO", description="least level shown")
    log_every_n_steps: int = Field(100, gt=0, description="steps between two lines; metrics.jsonl has every step")


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field("", description="project, also of trackio; needed when save_to_wandb, else empty = pico")
    entity: str = Field("", description="user or team; needed when save_to_wandb")


class MonitoringConfig(Section):
    """Console and trackers."""

    logging: LoggingConfig = LoggingConfig()
    gradient_norms: Literal["whole", "layers"] = Field(
        "whole", description="what metrics.jsonl holds: the norm of the whole gradient; layers = also one per block"
    )
    gradient_noise_scale: bool = Field(
        False, description="estimate it from the micro-batches; needs gradient_accumulation_steps of 2 or more"
    )
    trackers: Annotated[tuple[Literal["csv", "tensorboard", "trackio", "wandb"], ...], Strict(False)] = Field(
        (), description="also show metrics.jsonl there; needs pico-train[trackers]"
    )
    save_to_wandb: bool = Field(False, description="log to Weights & Biases: the same as wandb among the trackers")
    wandb: WandbConfig = WandbConfig()

    @property
    def tracker_names(self) -> list[str]:
        """The trackers; ``save_to_wandb`` adds wandb."""
        return [*self.trackers, "wandb"] if self.save_to_wandb and "wandb" not in self.trackers else list(self.trackers)

    @property
    def tracker_project(self) -> str:
        """The project that the trackers put the run into."""
        return self.wandb.project or "pico"

    def problems(self) -> Iterator[Problem]:
        """A tracker needs to know where."""
        for key in ("project", "entity"):
            if self.save_to_wandb and not getattr(self.wandb, key):
                yield Problem(f"wandb.{key}", "", "must not be empty when save_to_wandb is true", ("save_to_wandb",))


# ---- checkpointing


class HubConfig(Section):
    """The repository that checkpoints go to."""

    repo_id: str = Field("", description="owner/name; needed when save_to_hf")
    collection_slug: str | None = Field(None, description="collection that the repository joins; null = none")


class ResumeConfig(Section):
    """What a start finds."""

    auto_resume: bool = Field(True, description="go on from the newest checkpoint of the run if there is one")


class EvaluationFilesConfig(Section):
    """Where results of evaluations go."""

    eval_results_dir: Literal["eval_results"] = Field("eval_results", description="fixed by the checkpoint format")


class ScheduleConfig(Section):
    """Steps that are saved besides every `save_every_n_steps`."""

    log2_until: int = Field(0, ge=0, description="also at 1, 2, 4, 8 ... up to this step; 0 = no")
    also: Steps = Field((), description="also at these steps")
    first: bool = Field(True, description="also at step 0, the initial weights")
    last: bool = Field(True, description="also at max_steps, the final weights")


class RestartConfig(Section):
    """Restart points: weights and optimizer only, in a folder of their own, so that a stop costs little."""

    every_minutes: float | None = Field(10.0, gt=0, description="minutes after the last save; null = not by time")
    every_n_steps: int = Field(0, ge=0, description="steps between two of them; 0 = not by steps")
    keep: int = Field(2, gt=0, description="how many of the newest are kept; milestones are never deleted")


TokenRule = Literal["last", "position", "mean", "all", "sample"]


class LearningDynamicsConfig(Section):
    """What is captured of the passes that are saved."""

    layer_suffixes: Texts | None = Field(
        ("attention.v_proj", "attention.o_proj", "swiglu.w_2"),
        description="modules, by the end of their name at a dot; null or [] = no capture",
    )
    sequence_idx: int = Field(-1, description="token position of rule `position`; negative counts from the end")
    batch_size: int = Field(8, gt=0, description="sequences per forward of the probe; does not change a number")
    eval_data: str | None = Field(
        "pico-lm/pretokenized-paloma-tinsy",
        min_length=1,
        description="the probe (split val): held_out = from the held-out documents; else a Hub id; null = no probe",
    )
    rule: TokenRule | None = Field(
        None,
        description="tokens of a sequence that are kept; null = last when sequence_idx is -1, else position",
    )
    tokens_per_sequence: int = Field(8, gt=0, description="tokens per sequence; only for rule `sample`")
    probe_windows: int = Field(32, gt=0, description="held-out windows in the probe")

    @property
    def effective_rule(self) -> TokenRule:
        """The rule with null resolved."""
        return self.rule or ("last" if self.sequence_idx == -1 else "position")

    def problems(self) -> Iterator[Problem]:
        """A position is only looked at by the rule that needs one."""
        if self.sequence_idx != -1 and self.effective_rule != "position":
            yield Problem(
                "sequence_idx",
                self.sequence_idx,
                f"has no effect under rule: {self.rule}; use rule: position, or leave it at -1",
                ("rule",),
            )


class CheckpointingConfig(Section):
    """Where, when and what is saved."""

    run_name: str | None = Field(None, description="folder of the run; null = the name of the file; set by a suite")
    runs_dir: str = Field("runs", min_length=1, description="parent folder of the runs, from the working directory")
    checkpoints_dir: Literal["checkpoints"] = Field("checkpoints", description="fixed by the checkpoint format")
    logs_dir: Literal["logs"] = Field("logs", description="fixed by the checkpoint format")
    fabric_checkpoint_dir: Literal["fabric_state"] = Field("fabric_state", description="fixed by the checkpoint format")
    fabric_checkpoint_filename: Literal["checkpoint.pt"] = Field(
        "checkpoint.pt", description="fixed by the checkpoint format"
    )
    learning_dynamics_dir: Literal["learning_dynamics"] = Field(
        "learning_dynamics", description="fixed by the checkpoint format"
    )
    save_every_n_steps: int = Field(1000, ge=0, description="steps between two checkpoints; 0 = no periodic save")
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer_state: Literal["all", "restart"] | Annotated[int, Field(gt=0)] = Field(
        "all",
        description="which milestones hold the optimizer's moments, twice the size of the weights: all, every k-th, "
        "or restart = none, only the restart points",
    )
    restart: RestartConfig = RestartConfig()
    ignore_disk_space: bool = Field(False, description="start although the disk has less room than the trail will take")
    save_to_hf: bool | None = Field(False, description="upload to the Hub; null = no")
    hf_checkpoint: HubConfig = HubConfig()
    training: ResumeConfig = ResumeConfig()
    evaluation: EvaluationFilesConfig = EvaluationFilesConfig()
    learning_dynamics: LearningDynamicsConfig = LearningDynamicsConfig()

    def save_steps(self, max_steps: int) -> list[int]:
        """The steps at which a run of ``max_steps`` is saved, in ascending order."""
        schedule = self.schedule
        steps = {0} if schedule.first else set()
        if schedule.last:
            steps.add(max_steps)
        if self.save_every_n_steps:
            steps |= set(range(self.save_every_n_steps, max_steps + 1, self.save_every_n_steps))
        steps |= {2**k for k in range(schedule.log2_until.bit_length())}
        steps |= set(schedule.also)
        return sorted(step for step in steps if step <= max_steps)

    def holds_optimizer(self, step: int, max_steps: int) -> bool:
        """Whether the milestone of ``step`` stores the optimizer; that of step 0 always does, as there is nothing to store."""
        if isinstance(self.optimizer_state, int):
            return self.save_steps(max_steps).index(step) % self.optimizer_state == 0
        return self.optimizer_state == "all" or step == 0

    def problems(self) -> Iterator[Problem]:
        """The run's name is a folder; an upload needs to know where."""
        if self.run_name is not None and (message := name_problem(self.run_name)):
            yield Problem("run_name", self.run_name, message)
        if self.save_to_hf and not self.hf_checkpoint.repo_id:
            yield Problem("hf_checkpoint.repo_id", "", "must be owner/name when save_to_hf is true", ("save_to_hf",))


# ---- the whole file


class RunConfig(Section):
    """One training run. Every section and key may be missing; its default then holds."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "name": "only a suite has a name; that of a run is checkpointing.run_name",
        "base": "a section of the file of a suite; the keys of a run come without it, as in model.d_model=64",
        "vary": "a section of the file of a suite, which is set there and not by an override",
    }

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    seeds: SeedsConfig = SeedsConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()

    def problems(self) -> Iterator[Problem]:
        """What must fit across sections."""
        yield from self._batch_problems()
        yield from self._held_out_problems()
        yield from self._noise_problems()
        seq_len, dynamics = self.model.max_seq_len, self.checkpointing.learning_dynamics
        if self.data.tokenizer.vocab_size > self.model.vocab_size:
            yield Problem(
                "data.tokenizer.vocab_size",
                self.data.tokenizer.vocab_size,
                f"must be at most model.vocab_size {self.model.vocab_size}",
                ("model.vocab_size",),
            )
        if not -seq_len <= dynamics.sequence_idx < seq_len:
            yield Problem(
                "checkpointing.learning_dynamics.sequence_idx",
                dynamics.sequence_idx,
                f"must be a position of a window: {-seq_len} to {seq_len - 1} (model.max_seq_len {seq_len})",
                ("model.max_seq_len",),
            )
        if dynamics.effective_rule == "sample" and dynamics.tokens_per_sequence > seq_len:
            yield Problem(
                "checkpointing.learning_dynamics.tokens_per_sequence",
                dynamics.tokens_per_sequence,
                f"must be at most model.max_seq_len {seq_len}",
                ("model.max_seq_len", "checkpointing.learning_dynamics.rule"),
            )
        every = self.checkpointing.save_every_n_steps
        if every and self.training.max_steps // every > MOST_SAVES:
            yield Problem(
                "checkpointing.save_every_n_steps",
                every,
                f"would save {self.training.max_steps // every:,} times in {self.training.max_steps:,} steps; at most {MOST_SAVES:,}",
                ("training.max_steps",),
            )
        late = [step for step in self.checkpointing.schedule.also if step > self.training.max_steps]
        if late:
            yield Problem(
                "checkpointing.schedule.also",
                late,
                f"must be at most training.max_steps {self.training.max_steps}",
                ("training.max_steps",),
            )
        if "sample" in (self.evaluation.metrics or ()) and self.evaluation.sample.max_new_tokens >= seq_len:
            yield Problem(
                "evaluation.sample.max_new_tokens",
                self.evaluation.sample.max_new_tokens,
                f"must be less than model.max_seq_len {seq_len}",
                ("model.max_seq_len", "evaluation.metrics"),
            )

    def _noise_problems(self) -> Iterator[Problem]:
        steps = self.training.optimization.gradient_accumulation_steps
        if self.monitoring.gradient_noise_scale and steps in (1, "auto"):
            yield Problem(
                "monitoring.gradient_noise_scale",
                True,
                f"needs a number of micro-batches, two or more, and gradient_accumulation_steps is {steps}",
                ("training.optimization.gradient_accumulation_steps",),
            )

    def _batch_problems(self) -> Iterator[Problem]:
        devices = self.training.fabric.num_devices
        message = self.batch_problem(self.training.fabric.num_nodes * (1 if devices == "auto" else devices))
        if message:
            yield Problem(
                "data.dataloader.batch_size",
                self.data.dataloader.batch_size,
                message,
                (
                    "training.fabric.num_nodes",
                    "training.fabric.num_devices",
                    "training.optimization.gradient_accumulation_steps",
                ),
            )

    def batch_problem(self, n_devices: int) -> str | None:
        """Why the batch cannot be cut for ``n_devices`` devices in all, None where it can."""
        batch, accumulation = self.data.dataloader.batch_size, self.training.optimization.gradient_accumulation_steps
        accumulation = 1 if accumulation == "auto" else accumulation
        parts = n_devices * accumulation
        if batch % parts == 0:
            return None
        sizes = [size for size in (batch // parts * parts, (batch // parts + 1) * parts) if size]
        message = (
            f"does not divide into {parts} equal parts ({counted(n_devices, 'device')} * {counted(accumulation, 'accumulation step')}); "
            f"nearest sizes: {' or '.join(map(str, sizes))}"
        )
        if n_devices > 1 and batch % accumulation == 0:
            message += f"; nearest numbers of devices: {nearest(divisors(batch // accumulation), n_devices)}"
        return message

    def _held_out_problems(self) -> Iterator[Problem]:
        if self.data.dataset.held_out_fraction > 0:
            return
        message = "needs held-out documents: set data.dataset.held_out_fraction above 0"
        if "held_out" in (self.evaluation.metrics or ()):
            yield Problem("evaluation.metrics", self.evaluation.metrics, message, ("data.dataset.held_out_fraction",))
        dynamics = self.checkpointing.learning_dynamics
        if dynamics.layer_suffixes and dynamics.eval_data == "held_out":
            yield Problem(
                "checkpointing.learning_dynamics.eval_data",
                "held_out",
                message,
                ("data.dataset.held_out_fraction", "checkpointing.learning_dynamics.layer_suffixes"),
            )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that the YAML file ``path`` describes: defaults < file < ``key.sub=value`` overrides.

    Without ``checkpointing.run_name`` the run is named as the file.

    Raises:
        ConfigError: the file cannot be read, or all that is wrong with what it says.
    """
    path = Path(path)
    raw = merged(read_mapping(path), read_overrides(overrides))
    config = validated(RunConfig, raw, str(path))
    if config.checkpointing.run_name is not None:
        return config
    if message := name_problem(path.stem):
        line = f"checkpointing.run_name: null takes the name of the file, and {shown(path.stem)} {message}"
        raise ConfigError(str(path), [line])
    return with_run_name(config, path.stem)


def with_run_name(config: RunConfig, name: str) -> RunConfig:
    """``config`` as the run ``name``."""
    checkpointing = config.checkpointing.model_copy(update={"run_name": name})
    return config.model_copy(update={"checkpointing": checkpointing})


def to_yaml(config: RunConfig) -> str:
    """``config`` with every key, as YAML that loads back equal."""
    return to_text(config.model_dump(mode="json"))


def json_schema() -> dict[str, Any]:
    """The JSON schema of a run's YAML file."""
    return RunConfig.model_json_schema()


# ---- what the numbers depend on

# Sections and keys that do not change a number of the training run or of what is captured in it: names,
# places, what is shown, when it is saved and evaluated. All other keys count, also those that change only the
# rounding: a resumed run is to be the same bit for bit.
DOES_NOT_MATTER = frozenset(
    {
        "data.cache_dir",
        "model.batch_size",
        "evaluation",
        "monitoring",
        "checkpointing.run_name",
        "checkpointing.runs_dir",
        "checkpointing.save_every_n_steps",
        "checkpointing.schedule",
        "checkpointing.save_to_hf",
        "checkpointing.hf_checkpoint",
        "checkpointing.training",
        "checkpointing.optimizer_state",
        "checkpointing.restart",
        "checkpointing.ignore_disk_space",
        "training.max_minutes",
        "training.fabric.timeout_minutes",
        "training.ignore_memory",
        "checkpointing.learning_dynamics.batch_size",
    }
)


# Keys that may change when a run goes on: where and in what parts a pass is computed, which changes its numbers by
# rounding only; and max_steps, as long as every update made so far keeps its learning rate (checkpoint/folder.py).
MAY_CHANGE = frozenset(
    {
        "training.max_steps",
        "training.optimization.gradient_accumulation_steps",
        "training.compile",
        "training.activation_checkpointing",
        "training.fabric.num_nodes",
        "training.fabric.num_devices",
        "training.fabric.strategy",
        "training.fabric.num_threads",
        "training.fabric.accelerator",
    }
)


def what_matters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the numbers depend on, by dotted key."""
    return {
        key: value
        for key, value in flattened(config).items()
        if not any(f"{key}.".startswith(f"{prefix}.") for prefix in DOES_NOT_MATTER)
    }


def config_hash(config: RunConfig | Mapping[str, Any]) -> str:
    """SHA-256 over what the numbers of the run depend on, as sorted JSON; of a ``config.yaml`` as it was read, the same."""
    raw = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    text = json.dumps(what_matters(raw), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """What matters and differs between two configurations, both as plain nested mappings: key -> a line for the user."""
    before, after = what_matters(old), what_matters(new)
    return {
        key: f"{key}: {shown(before[key]) if key in before else 'missing'} before, "
        f"{shown(after[key]) if key in after else 'missing'} now"
        for key in (before | after)
        if key not in before or key not in after or before[key] != after[key]
    }


def not_built_yet(config: RunConfig) -> list[str]:
    """What ``config`` asks for that this version cannot do, one line each: key, value, override to use."""
    dynamics = config.checkpointing.learning_dynamics
    data_set = config.data.dataset.name
    wanted = [
        (
            data_set not in ("python-stdlib", "text"),
            f"data.dataset.name: {shown(data_set)}: data sets from the Hub",
            "data.dataset.name=python-stdlib, or data.dataset.name=text data.dataset.path=FILE_OR_FOLDER",
        ),
        (
            "paloma" in (config.evaluation.metrics or ()),
            f"evaluation.metrics: {shown(config.evaluation.metrics)}: perplexity on paloma",
            "evaluation.metrics=[held_out], or evaluation.metrics=null",
        ),
        (
            bool(config.checkpointing.save_to_hf),
            "checkpointing.save_to_hf: true: upload to the Hub",
            "checkpointing.save_to_hf=false",
        ),
        (
            bool(dynamics.layer_suffixes) and dynamics.eval_data not in (None, "held_out"),
            f"checkpointing.learning_dynamics.eval_data: {shown(dynamics.eval_data)}: a probe from the Hub",
            "checkpointing.learning_dynamics.eval_data=held_out",
        ),
    ]
    return [f"{what}: not built yet; use {override}" for asked, what, override in wanted if asked]
