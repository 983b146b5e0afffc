"""Chooses which points of a long series are drawn; pure."""

from __future__ import annotations

from collections.abc import Sequence


def downsample(xs: Sequence[float], ys: Sequence[float], max_points: int) -> list[int]:
    """Return the indices of the points to keep, ascending; all if they are few enough.

    The first, the last, the least and the greatest are among them, and the first of each kind that is not
    finite (NaN, infinity, minus infinity), so that a training that went wrong is seen to. A part of the series
    without a finite value keeps a point, which is the gap in a line. With room for fewer than these seven, the last
    and the first come first.

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
    """Return the points that are never left out, the most important first."""
    found = [len(ys) - 1, 0]
    if _are_finite(ys):
        return list(dict.fromkeys([*found, ys.index(min(ys)), ys.index(max(ys))]))
    # x - x is 0 for finite numbers only.
    finite = [idx for idx, y in enumerate(ys) if y - y == 0]
    if finite:
        found += [min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)]
    first: dict[str, int] = {}
    for idx, y in enumerate(ys):
        if y - y != 0:
            first.setdefault(str(float(y)), idx)
    return list(dict.fromkeys([*found, *first.values()]))


def _are_finite(ys: Sequence[float]) -> bool:
    """Say whether all are finite; False also where only their sum overflows."""
    total = sum(ys)
    return total - total == 0


def _largest_triangles(xs: Sequence[float], ys: Sequence[float], num_buckets: int) -> list[int]:
    """Return a point of each bucket between the first point and the last.

    It makes the largest triangle with the point before and the mean of the next bucket.
    """
    if num_buckets < 1:
        return []
    # All loops are here, and nothing is looked through that is known to be finite: a page asks for a million points.
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
            # What overflows is no number, and larger than nothing: the bucket's first finite point is kept then.
            best = next(iter(places), None)
        chosen.append(start if best is None else best)
        if best is not None:
            before_x, before_y = xs[best], ys[best]
    return chosen
