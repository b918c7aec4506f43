"""How a count is said."""


def counted(n: int, noun: str) -> str:
    """``n`` things in words: 1 step, 1,200 steps."""
    return f"{n:,} {noun}" + "s" * (n != 1)
