"""What is asked of the weights beside training: the loss over held-out windows, and a sample of text."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pico_train.checkpoint.contents import weights_hash
from pico_train.checkpoint.durable import replace_file
from pico_train.config import EvaluationConfig
from pico_train.data.batches import Batch, probe
from pico_train.data.cache import TokenCache
from pico_train.data.tokenizer import Tokenizer
from pico_train.model.decoder import PicoDecoder
from pico_train.model.generation import generate
from pico_train.ranks import Ranks
from pico_train.sharding import together
from pico_train.state import TrainState


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a saved checkpoint and stores each result under ``evaluations/step_<N>/``, keyed by the hash of its weights.

    Every rank computes the whole of it, so that the result is that of one rank; the first looks and stores.
    """

    run: Path
    section: EvaluationConfig
    cache: TokenCache
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    ranks: Ranks

    def __call__(self, state: TrainState, heed_stop: Callable[[], None]) -> float | None:
        """Do what ``evaluation.metrics`` lists and return the held-out loss in nats, None if it is not among them.

        What is stored already for the very weights is not computed again. ``heed_stop``, called before each batch and each sample,
        may raise; what was not finished by then leaves no trace.
        """
        weights = weights_hash(state.model)
        loss: float | None = None
        for name in self.section.metrics or ():
            assert name != "paloma", "refused before training"
            settings = getattr(self.section, name).model_dump(exclude={"batch_size"})
            made_from = {"step": state.step, "weights_sha256": weights, "settings": settings}
            path = self.run / "evaluations" / f"step_{state.step}" / f"{name}.json"
            result = self.ranks.decided(partial(stored_result, path, made_from))
            if result is None:
                heed_stop()
                with self.autocast(), together(state.model):
                    computed = (
                        self._held_out(state.model, heed_stop) if name == "held_out" else self._sample(state.model)
                    )
                result = made_from | computed
                self.ranks.lead(partial(store_result, path, result))
            if name == "held_out":
                loss = result["loss"]
        return loss

    def _held_out(self, model: PicoDecoder, heed_stop: Callable[[], None]) -> dict[str, Any]:
        section, seq_len = self.section.held_out, model.config.max_seq_len
        n_windows = section.max_windows or self.cache.n_windows("held_out", seq_len)
        windows = probe(self.cache, n_windows, seq_len)
        return {
            "loss": held_out_loss(
                model, windows, batch_size=section.batch_size, device=self.device, heed_stop=heed_stop
            ),
            "n_windows": len(windows.input_ids),
            "n_tokens": windows.n_scored,
            "unigram_entropy": self.cache.unigram_entropy_nats,  # of the training tokens, for comparison
        }

    def _sample(self, model: PicoDecoder) -> dict[str, Any]:
        return {"text": sample_text(model, self.cache.tokenizer, **self.section.sample.model_dump())}


@torch.no_grad()
def held_out_loss(
    model: PicoDecoder, windows: Batch, *, batch_size: int, device: torch.device, heed_stop: Callable[[], None]
) -> float:
    """Mean cross-entropy in nats over all scored tokens of ``windows``, in evaluation mode.

    ``batch_size`` sequences go through the model at a time; it changes the result by rounding only. ``heed_stop``, called before
    each of these batches, may raise.
    """
    was_training = model.training
    model.eval()
    try:
        total = 0.0
        for part in windows.split(batch_size):
            heed_stop()
            part = part.to(device)
            total += float(model(part.inputs, labels=part.labels)) * part.n_scored
        return total / windows.n_scored
    finally:
        model.train(was_training)


def sample_text(
    model: PicoDecoder,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """``prompt``, as the beginning of a document, and what the model writes after it."""
    ids = [tokenizer.bos_id, *tokenizer.encode_batch([prompt])[0]]
    new_ids = generate(
        model, ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, eos_id=tokenizer.eos_id
    )
    return prompt + tokenizer.decode([token for token in new_ids if token != tokenizer.eos_id])


def stored_result(path: Path, made_from: dict[str, Any]) -> dict[str, Any] | None:
    """The result at ``path`` if it was made from the same: the step, the hash of the weights, the settings."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(result, dict) and all(result.get(key) == value for key, value in made_from.items())
    return result if same else None


def store_result(path: Path, result: dict[str, Any]) -> None:
    """Write one result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
