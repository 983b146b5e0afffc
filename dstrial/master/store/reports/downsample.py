"""Downsampling of a long series for plots; pure."""

from __future__ import annotations

from collections.abc import Sequence


def downsample(xs: Sequence[float], ys: Sequence[float], max_points: int) -> list[int]:
    """Return the sorted indices of at most ``max_points`` points to keep.

    They include the first, last, minimum and maximum, and the first NaN, inf and -inf, so that a diverged training is visible.
    A bucket without finite values keeps a point, which appears as a gap in the line. With fewer than seven points, the last
    and first points have precedence.

    Source: largest triangle three buckets, Steinarsson 2013, section 4.2 (threshold = max_points).
    """
    if len(xs) != len(ys):
        raise ValueError(f"xs has {len(xs)} points and ys {len(ys)}; expected as many. Pass pairs.")
    if max_points < 1:
        raise ValueError(f"max_points is {max_points}; expected at least 1. Ask for more.")
    if len(ys) <= max_points:
        return list(range(len(ys)))
    kept = _always_kept(ys)[:max_points]
    return sorted({*kept, *_largest_triangles(xs, ys, max_points - len(kept))})


def _always_kept(ys: Sequence[float]) -> list[int]:
    """Return the indices of mandatory points, most important first."""
    found = [len(ys) - 1, 0]
    if _are_finite(ys):
        return list(dict.fromkeys([*found, ys.index(min(ys)), ys.index(max(ys))]))
    # x - x is 0 only for finite numbers
    finite = [idx for idx, y in enumerate(ys) if y - y == 0]
    if finite:
        found += [min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)]
    first: dict[str, int] = {}
    for idx, y in enumerate(ys):
        if y - y != 0:
            first.setdefault(str(float(y)), idx)
    return list(dict.fromkeys([*found, *first.values()]))


def _are_finite(ys: Sequence[float]) -> bool:
    """Return whether all values are finite; False too if only their sum overflows."""
    total = sum(ys)
    return total - total == 0


def _largest_triangles(xs: Sequence[float], ys: Sequence[float], num_buckets: int) -> list[int]:
    """Return one index per bucket between the first and last point.

    The point spans the largest triangle with the previously chosen point and the mean of the next bucket.
    """
    if num_buckets < 1:
        return []
    # Inlined loops, without checks of finite data: a page may request a million points.
    are_finite = _are_finite(ys)
    size = (len(ys) - 2) / num_buckets
    edges = [1 + int(bucket * size) for bucket in range(num_buckets)] + [len(ys) - 1, len(ys)]
    chosen: list[int] = []
    before_x, before_y = xs[0], ys[0] if ys[0] - ys[0] == 0 else 0.0
    for start, end, next_end in zip(edges, edges[1:], edges[2:], strict=False):
        behind = ys[end:next_end] if are_finite else [y for y in ys[end:next_end] if y - y == 0]
        behind_x, behind_y = xs[end], before_y
        if behind:
            behind_x, behind_y = sum(xs[end:next_end]) / (next_end - end), sum(behind) / len(behind)
        across, up = before_x - behind_x, behind_y - before_y
        places = (
            range(start, end) if are_finite else [idx for idx in range(start, end) if ys[idx] - ys[idx] == 0]
        )
        largest, best = -1.0, None
        for idx in places:
            area = abs(across * (ys[idx] - before_y) - (before_x - xs[idx]) * up)
            if area > largest:
                largest, best = area, idx
        if best is None:
            # If the area overflows to NaN, no comparison succeeds: keep the bucket's first finite point.
            best = next(iter(places), None)
        chosen.append(start if best is None else best)
        if best is not None:
            before_x, before_y = xs[best], ys[best]
    return chosen
