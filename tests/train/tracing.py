"""``torch.compile`` without its compilers, for tests: half a minute less each time."""

from collections.abc import Callable
from typing import Any


def traced_only(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """``compile_`` such that dynamo and autograd trace as always, and what they give is run as it is instead of being made into C++."""

    def traced(model: Any, **options: Any) -> Any:
        return compile_(model, dynamic=options["dynamic"], backend="aot_eager")

    return traced
