"""Robust least squares: the parameters of a formula, and a smooth correction on a lattice of breakpoints."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tuner.cost_model.curves import Grid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OUTLIER = 0.05  # log error beyond which a row's pull no longer grows


def round4(value: float) -> float:
    """Return `value` with four significant digits, as it is written."""
    return float(f"{value:.4g}")


def minimise(residuals: Callable[[Any], Any], start: Sequence[float], scale: float = OUTLIER) -> Any:
    """Return the parameters with the least soft-L1 loss of `residuals` (log errors)."""
    from scipy.optimize import least_squares

    return least_squares(residuals, np.asarray(start, dtype=float), loss="soft_l1", f_scale=scale, max_nfev=60).x


def fraction(x: Any) -> Any:
    """Return a number between 0 and 1 for any x."""
    return 1.0 / (1.0 + np.exp(-np.clip(x, -30.0, 30.0)))


def positive(x: Any) -> Any:
    """Return a positive number for any x."""
    return np.exp(np.clip(x, -60.0, 60.0))


def _design(axes: Sequence[Sequence[float]], columns: Sequence[Any]) -> Any:
    """Return the sparse matrix that interpolates a flat table of the lattice at `columns`, linearly along each axis."""
    from scipy import sparse

    count = len(columns[0])
    lows, weights = [], []
    for axis, column in zip(axes, columns, strict=True):
        points = np.asarray(axis, dtype=float)
        x = np.clip(column, points[0], points[-1])
        low = np.minimum(np.searchsorted(points[1:], x, side="right"), len(points) - 2)
        lows.append(low)
        weights.append((x - points[low]) / (points[low + 1] - points[low]))
    shape = [len(axis) for axis in axes]
    rows, cells, values = [], [], []
    for corner in product((0, 1), repeat=len(axes)):
        value = np.ones(count)
        for bit, weight in zip(corner, weights, strict=True):
            value = value * (weight if bit else 1.0 - weight)
        index = [low + bit for bit, low in zip(corner, lows, strict=True)]
        rows.append(np.arange(count))
        cells.append(np.ravel_multi_index(index, shape))
        values.append(value)
    coordinates = (np.concatenate(rows), np.concatenate(cells))
    return sparse.csr_matrix((np.concatenate(values), coordinates), shape=(count, int(np.prod(shape))))


def _roughness(axes: Sequence[Sequence[float]], smooth: float) -> Any:
    """Return the second differences of a flat table along each axis, times `smooth`."""
    from scipy import sparse

    blocks: list[Any] = []
    for axis, points in enumerate(axes):
        if len(points) < 3:
            continue
        operators: list[Any] = [sparse.eye(len(other)) for other in axes]
        operators[axis] = sparse.csr_matrix(np.diff(np.eye(len(points)), 2, axis=0))
        block: Any = operators[0]
        for operator in operators[1:]:
            block = sparse.kron(block, operator)
        blocks.append(block * smooth)
    return sparse.vstack(blocks) if blocks else sparse.csr_matrix((0, int(np.prod([len(axis) for axis in axes]))))


def correction(
    axes: Sequence[Sequence[float]], columns: Sequence[Any], logs: Any, *, smooth: float = 2.0, ridge: float = 0.3, weight: Any = 1.0
) -> Grid:
    """Return the factor whose log is nearest to `logs` at `columns`, smooth between breakpoints and near 1 where rows are few."""
    return corrections([Term(axes, columns, smooth)], logs, ridge=ridge, weight=weight)[0]


class Term(NamedTuple):
    """One of several factors that multiply: its lattice, the columns it is over, its smoothness, and the rows it acts on."""

    axes: Sequence[Sequence[float]]
    columns: Sequence[Any]
    smooth: float
    mask: Any = None


def corrections(terms: Sequence[Term], logs: Any, *, ridge: float = 0.3, weight: Any = 1.0, most: float = 1.0) -> list[Grid]:
    """Return the factors whose logs sum to what is nearest to `logs`, each smooth on its lattice and near 1 where rows are few; no
    log is beyond `most`.

    Minimises sum w (A x - logs)^2 + sum smooth^2 |second differences|^2 + ridge^2 |x|^2, with w falling for outliers.
    """
    from scipy import linalg, sparse

    parts = [_design(term.axes, term.columns) for term in terms]
    parts = [p if t.mask is None else sparse.diags(t.mask * 1.0) @ p for t, p in zip(terms, parts, strict=True)]
    matrix = sparse.hstack(parts).tocsr()
    penalty = sparse.block_diag([_roughness(term.axes, term.smooth) for term in terms])
    fixed = (penalty.T @ penalty).toarray() + np.eye(matrix.shape[1]) * ridge**2
    solution = np.zeros(matrix.shape[1])
    for _ in range(8):
        w = weight / np.sqrt(1.0 + ((logs - matrix @ solution) / OUTLIER) ** 2)
        square = (matrix.T @ sparse.diags(w * np.ones(len(logs))) @ matrix).toarray() + fixed
        solution = linalg.solve(square, matrix.T @ (w * logs), assume_a="pos")
    ends = np.cumsum([part.shape[1] for part in parts])[:-1]
    pieces = np.split(np.exp(np.clip(solution, -most, most)), ends)
    return [grid(term.axes, piece) for term, piece in zip(terms, pieces, strict=True)]


def grid(axes: Sequence[Sequence[float]], values: Any, digits: int = 4) -> Grid:
    """Return a Grid of `values` (flat or shaped), one line for each combination of the leading axes."""
    lines = np.asarray(values, dtype=float).reshape(-1, len(axes[-1]))
    text = "\n".join(" ".join(f"{value:.{digits}g}" for value in line) for line in lines)
    return Grid(axes=tuple(tuple(float(point) for point in axis) for axis in axes), values=text + "\n" * (len(lines) > 1))


def folds(*keys: Any, parts: int = 4) -> Any:
    """Return for each row the part (0 .. parts-1) that it is held out with: rows with equal keys together, parts by turns of
    a fixed shuffle.
    """
    combined = np.unique(np.stack([np.asarray(key, dtype=float) for key in keys]), axis=1, return_inverse=True)[1].reshape(-1)
    shuffled = np.random.default_rng(0).permutation(int(combined.max()) + 1) % parts
    return shuffled[combined]
