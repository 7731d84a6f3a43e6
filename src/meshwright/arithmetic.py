"""Integers: divisors, prime factors, multiples, exact roots; values checked to be integers."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Ascending: `12` has `(1, 2, 3, 4, 6, 12)`."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def prime_factors(number: int) -> list[int]:
    """Ascending: `12` is `[2, 2, 3]`, `1` is `[]`."""
    factors = []
    prime = 2
    while prime * prime <= number:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return [*factors, number] if number > 1 else factors


def round_up(number: int, factor: int) -> int:
    """The least multiple of `factor` that is not below `number`.

    >>> round_up(257, 4), round_up(256, 4)
    (260, 256)
    """
    return -(-number // factor) * factor


def integer_root(number: int, degree: int) -> int | None:
    """The exact integer root, None if there is none.

    >>> integer_root(125, 3), integer_root(8, 2)
    (5, None)
    """
    low, high = 1, 1 << (number.bit_length() // degree + 1)
    while low <= high:
        middle = (low + high) // 2
        power = middle**degree
        if power == number:
            return middle
        low, high = (middle + 1, high) if power < number else (low, middle - 1)
    return None


def first_repeated(items: Sequence[Any]) -> Any | None:
    """The first item that stands a second time, None if none does."""
    seen: set[Any] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def whole_number(value: Any, what: str) -> int:
    """`value` as an int of at least 0, NumPy's included."""
    try:
        number = operator.index(value)
    except TypeError:
        raise MeshwrightError(f"{what}={value!r} is not a whole number") from None
    if number < 0:
        raise MeshwrightError(f"{what}={value!r} is not a whole number from 0")
    return number


def check_seed(seed: Any) -> int:
    """A random seed: jax takes 32 bits without a sign."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**32:
        raise MeshwrightError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}")
    return number


def whole_numbers(values: Any, what: str, at_least: int = 0) -> tuple[int, ...]:
    """`values` as a tuple of ints, NumPy's included; anything else is a mistake about `what`."""
    try:
        numbers = tuple(operator.index(value) for value in values)
    except TypeError:
        raise MeshwrightError(f"{what} {values!r} is not a tuple of whole numbers") from None
    if any(number < at_least for number in numbers):
        raise MeshwrightError(f"{what} {values!r}: every size must be at least {at_least}")
    return numbers
