"""Whole numbers: divisors, prime factors, multiples, exact roots."""

import functools


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
