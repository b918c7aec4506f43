"""Whether the checkpoints of a run are what they claim to be: whole, in their place, and each its own.

Comes in: an open run. Goes out: for `verify` a list of faults, each with its file; for an analysis the steps whose
weights cast doubt on what is measured on them. torch is imported on first use.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from pico_analyze.checkpoint.format import MANIFEST, CheckpointError, Kind, file_hash
from pico_analyze.checkpoint.reader import Run

NEARER = 0.5
"""Weights move away from where they were, in a space of many dimensions: over the 144 matrices of three small runs no step
was nearer to a far one than 0.9 of the way to its neighbours. At less than this part of it the weights do not belong there."""

N_SAMPLED = 1024  # entries of a weight by which distances are estimated, to about 3 %

Holders = dict[tuple[Kind, str, str], set[int]]  # kind, module, content hash -> the steps that hold it


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a file or folder of a run."""

    path: Path
    text: str

    def __str__(self) -> str:
        text = " ".join(self.text.split())
        return text if text.startswith(str(self.path)) else f"{self.path}: {text}"


@dataclass(frozen=True)
class StandingStill:
    """The passes whose update changed nothing, by ``metrics.jsonl``: learning rate 0, or no update."""

    passes: frozenset[int]

    @classmethod
    def of(cls, run: Run) -> "StandingStill":
        """What the training log of the run says; raises CheckpointError where it cannot be read."""
        log = run.training_log()
        still: set[int] = set()
        if "lr" in log:
            still |= set(log["step"][log["lr"] == 0])
        if "updated" in log:
            still |= set(log["step"][log["updated"].eq(False)])
        return cls(frozenset(map(int, still)))

    def between(self, one: int, other: int) -> bool:
        """Whether the weights of the two steps have to be the same, since no update between them changed anything."""
        return all(step in self.passes for step in range(min(one, other), max(one, other)))


def holders(run: Run) -> Holders:
    """The steps that hold each content of each tensor, by the manifests."""
    found: Holders = defaultdict(set)
    for step, manifest in run.manifests.items():
        for row in manifest.tensors:
            found[row.kind, row.module, row.sha256].add(step)
    return found


def repeated(run: Run, still: StandingStill) -> dict[tuple[int, str], int]:
    """The weights (step, module) that another step holds too although an update lies between; the value is that step."""
    found: dict[tuple[int, str], int] = {}
    for (kind, module, _), steps in holders(run).items():
        for step in sorted(steps) if kind == "weights" and len(steps) > 1 else ():
            others = [other for other in sorted(steps - {step}) if not still.between(step, other)]
            if others:
                found[step, module] = others[0]
    return found


def out_of_place(run: Run, known: Mapping[tuple[int, str], int]) -> dict[tuple[int, str], int]:
    """The weights (step, module) that are nearer to those of a step further away than to those of the steps beside.

    The value is that step. Weights that are ``known`` to be `repeated` are not judged, nor taken as a measure for others.
    Only matrices are looked at: few numbers come back to where they were by chance. Distances are estimated from some
    entries, which are read without their hash.
    """
    import torch

    samples: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for step in run.steps:
        checkpoint = run.checkpoint(step)
        for row in checkpoint.select("weights"):
            if len(row.shape) > 1:
                try:
                    sample = checkpoint.sample(row, N_SAMPLED)
                except CheckpointError:
                    continue  # whoever needs the tensor will say why it cannot be had
                if sample.square().sum().isfinite():  # else it is far from everything, and its neighbours look lonely
                    samples[row.module][step] = sample
    found: dict[tuple[int, str], int] = {}
    for module, by_step in samples.items():
        if by_step and len({len(sample) for sample in by_step.values()}) == 1:
            stacked = torch.stack(list(by_step.values()))
            distances = torch.cdist(stacked, stacked, compute_mode="donot_use_mm_for_euclid_dist").tolist()
            doubtful = {step for step in by_step if (step, module) in known}
            found |= {(step, module): far for step, far in _strangers(list(by_step), distances, doubtful).items()}
    return found


def _strangers(steps: Sequence[int], distances: Sequence[Sequence[float]], known: Set[int]) -> dict[int, int]:
    """The steps that are nearer to a far one than to those beside, with the far one; the clearest pair first.

    Foreign weights at one step make its neighbours look lonely too: what is found is not judged again, and from then on the
    sound steps beyond it count as neighbours as well.

    >>> line = [0, 1, 9.1, 3, 6, 9, 12]  # at the third step somebody has put what belongs to the sixth
    >>> _strangers([0, 1, 2, 4, 8, 16, 32], [[abs(a - b) for b in line] for a in line], set())
    {2: 16, 16: 2}
    """
    found: dict[int, int] = {}
    while True:
        sound = [place for place, step in enumerate(steps) if step not in known and step not in found]
        pairs = []
        for place in sound:
            beside = {other for other in (place - 1, place + 1) if 0 <= other < len(steps)}
            beside |= {
                *[other for other in sound if other < place][-1:],
                *[other for other in sound if other > place][:1],
            }
            near = [distances[place][other] for other in beside]
            for other, distance in enumerate(distances[place]):
                if abs(other - place) > 1 and near and 0 < distance < NEARER * min(near):
                    pairs.append((distance / min(near), place, other))
        if not pairs:
            return found
        _, place, other = min(pairs)
        found[steps[place]] = steps[other]
        if steps[other] not in known:
            found.setdefault(steps[other], steps[place])


def verify(run: Run) -> list[Fault]:
    """All that is wrong with the checkpoints of a run, in the order of the steps; every file is read once or twice.

    Folders that cannot be used (half-written, truncated, of another run or step), files and tensors that do not have the
    content that the manifest names, weights that two steps share although an update lies between them, weights that are
    nearer to those of a step further away than to those beside, what was stored with the weights and says another step, and
    steps of the saved schedule that are absent.

    So folders that were exchanged show by the step in their manifests, files by their hashes, manifests that were written
    anew by the hash in the next one. Where a whole chain was written anew, late neighbours, which are alike, show only by
    the counts of their optimizer state and by evaluations; weights that were exchanged without either show by nothing.
    """
    checkpoints = run.path / "checkpoints"
    faults = [(step, Fault(checkpoints / f"step_{step}", reason)) for step, reason in run.skipped.items()]
    for step in run.steps:
        faults += [(step, fault) for fault in (*_damaged(run, step), *_of_another_step(run, step))]
        parent = run.manifests[step].parent
        before = None if parent is None else checkpoints / f"step_{parent.step}" / MANIFEST
        if parent and before and before.is_file() and file_hash(before) != parent.manifest_sha256:
            text = f"was changed: it is not the {MANIFEST} that step {step} follows"
            faults.append((parent.step, Fault(before, text)))
    same: dict[tuple[int, str], int] = {}
    try:
        same = repeated(run, StandingStill.of(run))
    except CheckpointError as error:
        faults.append((-1, Fault(run.path / "metrics.jsonl", str(error))))
    for (step, other), modules in _grouped(same).items():
        n_weights = len(run.checkpoint(step).select("weights"))
        which = (
            "all weights" if len(modules) == n_weights else f"{len(modules)} of {n_weights} weights, {_some(modules)},"
        )
        text = f"{which} have the same content as in step {other}, although updates lie between"
        faults.append((step, Fault(_file_of(run, step, modules[0]), text)))
    for (step, other), modules in _grouped(out_of_place(run, same)).items():
        text = f"{_some(modules)}: nearer to step {other} than to the steps beside, so one of the two holds foreign weights"
        faults.append((step, Fault(_file_of(run, step, modules[0]), text)))
    try:
        faults += [(step, Fault(checkpoints / f"step_{step}", "is missing")) for step in missing_steps(run)]
    except CheckpointError as error:
        faults.append((-1, Fault(run.path / "config.yaml", str(error))))
    return [fault for _, fault in sorted(faults, key=lambda entry: entry[0])]


def missing_steps(run: Run) -> list[int]:
    """The steps of the schedule in ``config.yaml`` that the run has passed and that have no folder.

    Empty where the configuration has no schedule. Raises CheckpointError where it or the log cannot be read.
    """
    try:
        max_steps = run.config["training"]["max_steps"]
        saving = run.config["checkpointing"]
        schedule, every = saving["schedule"], saving["save_every_n_steps"]
        scheduled = {0} if schedule["first"] else set()
        scheduled |= {max_steps} if schedule["last"] else set()
        scheduled |= set(range(every, max_steps + 1, every)) if every else set()
        scheduled |= {2**k for k in range(schedule["log2_until"].bit_length())} | set(schedule["also"])
    except (KeyError, TypeError, AttributeError):
        return []
    passes = run.training_log()["step"]
    logged = int(passes.max()) if len(passes) else 0
    reached = max([logged, *run.steps, *run.skipped])
    there = {*run.steps, *run.skipped}
    absent = [step for step in sorted(scheduled - there) if step < reached or step == reached == max_steps]
    # The trainer may still be writing the newest one.
    writing = [
        step
        for step in absent
        if (run.path / f"checkpoints/step_{step}.tmp").is_dir() and step > max(there, default=-1)
    ]
    return [step for step in absent if step not in writing]


def _damaged(run: Run, step: int) -> Iterator[Fault]:
    """The files of a checkpoint that are not what the manifest names, and the tensors in those that are."""
    checkpoint = run.checkpoint(step)
    broken = set()
    for file in checkpoint.manifest.files:
        path = checkpoint.folder / file.path
        try:
            same = file_hash(path) == file.sha256
        except OSError as error:
            same = False
            yield Fault(path, f"cannot be read: {error.strerror}")
        else:
            if not same:
                yield Fault(path, f"was changed or damaged: its SHA-256 is not that of {MANIFEST}")
        if not same:
            broken.add(file.path)
    for row in checkpoint.manifest.tensors:
        if row.file not in broken:
            try:
                tensor = checkpoint.tensor(row)
            except CheckpointError as error:
                yield Fault(checkpoint.folder / row.file, str(error).removeprefix(f"{checkpoint.folder / row.file}: "))
                continue
            if row.kind == "weights" and not tensor.isfinite().all():
                yield Fault(checkpoint.folder / row.file, f"{row.module} has entries that are not finite")


def _of_another_step(run: Run, step: int) -> Iterator[Fault]:
    """What was written together with the weights of a step, or computed from them, and belongs to others."""
    checkpoint, manifest = run.checkpoint(step), run.manifests[step]
    n_updates = step - manifest.skipped_updates
    for row in [row for row in manifest.tensors if row.role == "step"][:1]:
        try:
            counted = int(checkpoint.tensor(row))
        except CheckpointError:
            continue  # said already
        if counted != n_updates:
            text = (
                f"the optimizer counts {counted} updates where {MANIFEST} says {n_updates}: it belongs to another step"
            )
            yield Fault(checkpoint.folder / row.file, text)
    weights = "\n".join(row.sha256 for row in manifest.tensors if row.kind == "weights")
    expected = {"step": step, "weights_sha256": hashlib.sha256(weights.encode("ascii")).hexdigest()}
    state = checkpoint.folder / "training_state/state.json"
    for path in (state, *sorted(run.path.glob(f"evaluations/step_{step}/*.json"))):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            wrong = [key for key, value in expected.items() if content.get(key, value) != value]
        except FileNotFoundError:
            continue  # not every checkpoint keeps it
        except (OSError, ValueError, AttributeError) as error:
            yield Fault(path, f"cannot be read: {error}")
            continue
        if wrong:
            yield Fault(path, f"has another {wrong[0]} than step {step}: it belongs to other weights")


def _grouped(found: Mapping[tuple[int, str], int]) -> dict[tuple[int, int], list[str]]:
    """(step, module) -> other step, as (step, other step) -> modules."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for (step, module), other in found.items():
        groups[step, other].append(module)
    return groups


def _some(modules: list[str]) -> str:
    return ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")


def _file_of(run: Run, step: int, module: str) -> Path:
    checkpoint = run.checkpoint(step)
    row = next(row for row in checkpoint.select("weights") if row.module == module)
    return checkpoint.folder / row.file
