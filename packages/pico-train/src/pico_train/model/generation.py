"""Writing text with a model: one token after another, over cached keys and values.

In: a model and the ids of a prompt. Out: the ids that follow it.
"""

import torch

from pico_train.model.decoder import KVCache, PicoDecoder


def generate(
    model: PicoDecoder,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    eos_id: int | None,
) -> list[int]:
    """The tokens that follow the prompt, without the prompt.

    At temperature 0 each is the most probable one; otherwise it is drawn from softmax(logits / temperature)
    by a generator of its own, seeded by ``seed``. The text ends with ``eos_id`` (included; None never ends
    it), after ``max_new_tokens``, or when prompt and text fill ``max_seq_len``. The model's mode and the
    global random state are left as they were.

    Raises ValueError for an empty prompt, a prompt longer than ``max_seq_len`` or a negative temperature.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: give at least one token to continue")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: it must be 0 (most probable token) or more")
    max_seq_len = model.config.max_seq_len
    if len(prompt_ids) > max_seq_len:
        raise ValueError(f"the prompt has {len(prompt_ids)} tokens, more than max_seq_len = {max_seq_len}")

    n_new = min(max_new_tokens, max_seq_len - len(prompt_ids))
    cache = KVCache(capacity=len(prompt_ids) + n_new)
    generator = torch.Generator("cpu").manual_seed(seed)
    device = model.embedding_proj.weight.device
    was_training = model.training
    model.eval()
    try:
        new_ids: list[int] = []
        unread = prompt_ids
        with torch.inference_mode():
            while len(new_ids) < n_new and eos_id not in new_ids[-1:]:
                hidden = model.hidden_states(torch.tensor([unread], device=device), cache)  # (1, T, D)
                logits = model.de_embedding_proj(hidden[0, -1]).float().cpu()  # (V,)
                if temperature == 0:
                    chosen = logits.argmax()
                else:
                    chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
                unread = [int(chosen)]
                new_ids += unread
        return new_ids
    finally:
        model.train(was_training)
