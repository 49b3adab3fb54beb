"""Memory over a simulated step: activations that forwards keep until their backwards, on each rank."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.simulator.program import Op, Program


def held_nbytes(program: Program, kept: IntArray) -> IntArray:
    """Return the bytes of kept activations on an operation's rank while it runs, ``[N]``.

    A forward adds what it keeps when it starts, and its backward frees that when it ends. Order alone decides, so
    times are not needed.

    kept: bytes that each forward keeps until its backward, ``[C]``; values of backwards, and of forwards without one,
        do not count.
    """
    columns = program.computations
    backwards = np.flatnonzero(columns.is_backward)
    forwards = columns.forward[backwards]
    change = np.zeros(len(program.op) + 1, dtype=np.int64)
    change[columns.op[forwards]] += kept[forwards]
    change[columns.op[backwards] + 1] -= kept[forwards]  # a list that trains ends at 0, so ranks may follow each other
    return np.cumsum(change)[:-1]


def peak_nbytes(program: Program, kept: IntArray, working: IntArray) -> IntArray:
    """Return the most that each rank holds at once beside its parameters, ``[R]``.

    kept: as in ``held_nbytes``. working: bytes that each computation needs in addition while it runs, ``[C]``.
    """
    held = held_nbytes(program, kept)
    is_computing = program.op == Op.COMPUTE
    held[is_computing] += working[program.index[is_computing]]
    return np.maximum.reduceat(held, program.first[:-1])
