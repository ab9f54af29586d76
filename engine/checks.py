"""Checks of one value where it enters: an argument, a field of a settings object, a line of a file.

In: a name, whatever was given, and what it may be. Out: nothing, or an error that names argument,
value, limit and fix: a TypeError for a value of another kind, a ValueError for one out of range.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from types import UnionType


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r:.80}")


def check_kind(name: str, value: object, kind: type | UnionType, what: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {what}, got {value!r:.80}")


def check_one_of(name: str, value: object, options: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"unknown {name} {value!r:.80}; use {' or '.join(options)}")


def check_integer(name: str, value: object, low: int, high: int | None, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r:.80}; {fix}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low} .. {high}"
        raise ValueError(f"{name} must be {limit}, got {value}; {fix}")


def check_size(name: str, value: object, low: int, high: int) -> None:
    """`high` is where arrays would be absurd; only who exceeds it wants to know of it."""
    check_integer(name, value, low, None, "choose more")
    if value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}; choose less")


def check_number(
    name: str, value: object, low: float, high: float, fix: str, exclusive_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r:.80}; {fix}")
    above = value > low if exclusive_low else value >= low
    if not (above and value <= high):  # NaN fails both
        limit = f"above {low} and at most {high}" if exclusive_low else f"in {low} .. {high}"
        raise ValueError(f"{name} must be {limit}, got {value}; {fix}")


def plain_integers(params: object) -> None:
    """Make Python's integers of the numpy ones in a dataclass: small ones overflow in sums."""
    for name, value in vars(params).items():
        if isinstance(value, Integral) and not isinstance(value, bool):
            object.__setattr__(params, name, int(value))
