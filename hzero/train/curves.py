"""Curves of a run's metrics: their smooth form, whose ends are the summary's means, and the points that are drawn of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

#: Stretches into which a long curve is divided; of each its least and greatest value are drawn.
STRETCHES = 400
#: Away from the ends the mean that makes a curve smooth reaches over this share of the steps more.
SHARE = 0.01


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Means over ``window`` values and, away from the ends, over more, by up to a hundredth of all values.

    The first and the last mean are those of exactly the first and the last ``window`` values, as in a summary. The window
    of every other one grows to both sides by a value per step from the nearer end. A mean is NaN where one of its
    ``window`` innermost values is; other NaNs are left out of it.

    Args:
        values: One value per step; NaN where it is not known.
        window: Values of a mean at the ends, at most as many as there are values.

    Returns:
        ``len(values) - window + 1`` means; mean ``i`` belongs to the step of value ``i + window - 1``.
    """
    known = np.asarray(values, dtype=float)
    good = np.isfinite(known)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, known, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    first = np.arange(len(known) - window + 1)
    reach = np.minimum(np.minimum(first, first[::-1]), int(len(known) * SHARE / 2))
    low, high = first - reach, first + window + reach
    complete = counts[first + window] - counts[first] == window
    means = (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    return [float(mean) for mean in np.where(complete, means, math.nan)]


def drawn(values: Sequence[float]) -> list[int]:
    """Indices of the values to draw: all of a short curve; of a long one both ends and the extremes of every stretch.

    A stretch with NaNs keeps one of them, so that the gap stays visible.
    """
    if len(values) <= 3 * STRETCHES:
        return list(range(len(values)))
    known = np.asarray(values, dtype=float)
    kept = {0, len(known) - 1}
    for stretch in np.array_split(np.arange(len(known)), STRETCHES):
        part = known[stretch]
        bad = ~np.isfinite(part)
        if not bad.all():
            kept |= {int(stretch[np.nanargmin(part)]), int(stretch[np.nanargmax(part)])}
        if bad.any():
            kept.add(int(stretch[np.argmax(bad)]))
    return sorted(kept)


def spans(numbers: Sequence[int], most: int = 8) -> str:
    """Ascending numbers as text, such as ``3, 7 to 9``; after the first ``most`` spans, how many numbers follow."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    text = ", ".join(f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high in found[:most])
    rest = sum(high - low + 1 for low, high in found[most:])
    return f"{text} and {rest:,} more" if rest else text
