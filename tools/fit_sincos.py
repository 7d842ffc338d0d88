"""Fits the polynomials of csrc/rope_math.h: minimax, by Remez exchange. Prints coefficients and errors."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
from mpmath import mpf

Function = Callable[[mpf], mpf]


def remez(f: Function, weight: Function, num_coefficients: int, end: mpf) -> tuple[list[mpf], mpf]:
    """Coefficients of p, lowest first, that minimise max |weight(t) (p(t) - f(t))| on [0, end]."""
    n = num_coefficients
    grid = [end * i / 2000 for i in range(2001)]
    nodes = [end / 2 * (1 - mpmath.cos(mpmath.pi * i / n)) for i in range(n + 1)]
    for _ in range(20):
        system, values = mpmath.matrix(n + 1, n + 1), mpmath.matrix(n + 1, 1)
        for i, t in enumerate(nodes):
            for j in range(n):
                system[i, j] = t**j
            system[i, n] = (-1) ** i / weight(t)
            values[i] = f(t)
        coefficients = list(mpmath.lu_solve(system, values))[:n]
        errors = [weight(t) * (mpmath.polyval(coefficients[::-1], t) - f(t)) for t in grid]
        nodes = [grid[i] for i in alternating_extrema(errors, n + 1)]
    return coefficients, max(abs(e) for e in errors)


def alternating_extrema(errors: list[mpf], count: int) -> list[int]:
    """Indices of the largest error of each run of one sign, `count` of them."""
    extrema: list[int] = []
    for i, error in enumerate(errors):
        if extrema and mpmath.sign(errors[extrema[-1]]) == mpmath.sign(error):
            if abs(error) > abs(errors[extrema[-1]]):
                extrema[-1] = i
        else:
            extrema.append(i)
    while len(extrema) > count:
        extrema.pop(0 if abs(errors[extrema[0]]) < abs(errors[extrema[-1]]) else -1)
    return extrema


def main() -> None:
    mpmath.mp.prec = 200
    quarter = mpmath.pi / 2
    # In t = x^2, x in quarter turns, |x| <= 1/2. The weights make the errors those of sin and cos.

    def sine(t: mpf) -> mpf:  # sin(pi/2 x) / x
        return mpmath.sin(quarter * mpmath.sqrt(t)) / mpmath.sqrt(t) if t else quarter

    def cosine(t: mpf) -> mpf:  # (cos(pi/2 x) - 1) / x^2
        return (mpmath.cos(quarter * mpmath.sqrt(t)) - 1) / t if t else -(quarter**2) / 2

    small = mpf("1e-3")  # keeps the weights off zero
    for name, f, weight in (
        ("sin", sine, lambda t: mpmath.sqrt(t) + small),
        ("cos", cosine, lambda t: t + small),
    ):
        coefficients, error = remez(f, weight, 4, mpf(1) / 4)
        print(name, *(mpmath.nstr(c, 12) for c in coefficients), f"largest error {mpmath.nstr(error, 2)}")


if __name__ == "__main__":
    main()
