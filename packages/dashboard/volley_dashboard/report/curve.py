"""Text plot of held-out success: one line per evaluation, with its 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence

from volley.reporting.intervals import SuccessRate

_BAND, _POINT, _EMPTY, _GRID = "░", "█", " ", "·"
_MOST_LINES = 24
_WIDEST, _NARROWEST = 72, 10
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def curve(rates: Sequence[SuccessRate], width: int) -> list[str]:
    """Lines of at most `width` characters (at least 38); none without evaluations.

    Shows at most `_MOST_LINES` evaluations, evenly spaced, always with the first and the last.
    """
    if not rates:
        return []
    shown = _thinned(rates)
    steps = max(4, *(len(str(rate.step)) for rate in shown))
    columns = max(_NARROWEST, min(_WIDEST, width - steps - 24))
    left_out = f" ({len(shown)} of {len(rates)} evaluations)" if len(shown) < len(rates) else ""
    head = f"held-out success{left_out}, {_BAND} 95% interval"
    return [head[:width], f"{'step':>{steps}}  {_axis(columns)}", *(_line(rate, steps, columns) for rate in shown)]


def _line(rate: SuccessRate, steps: int, columns: int) -> str:
    cells = [_EMPTY] * columns
    for tick in _TICKS:
        cells[_column(tick, columns)] = _GRID
    for column in range(_column(rate.low, columns), _column(rate.high, columns) + 1):
        cells[column] = _BAND
    cells[_column(rate.success, columns)] = _POINT
    return f"{rate.step:>{steps}}  {''.join(cells)}  {rate}"


def _axis(columns: int) -> str:
    ticks = _TICKS if columns >= 30 else (_TICKS[0], _TICKS[-1])
    axis = [" "] * columns
    for tick in ticks:
        label = f"{tick:.0%}"
        start = min(max(0, _column(tick, columns) - len(label) // 2), columns - len(label))
        axis[start : start + len(label)] = label
    return "".join(axis).rstrip()


def _column(share: float, columns: int) -> int:
    return round(share * (columns - 1))


def _thinned(rates: Sequence[SuccessRate]) -> list[SuccessRate]:
    if len(rates) <= _MOST_LINES:
        return list(rates)
    last = len(rates) - 1
    return [rates[round(i * last / (_MOST_LINES - 1))] for i in range(_MOST_LINES)]
