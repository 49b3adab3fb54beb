"""Resolved configurations that earlier versions wrote into runs, in the words of this one."""

from __future__ import annotations

from typing import Any


def in_todays_words(values: dict[str, Any]) -> None:
    """Rename values whose meaning is now called otherwise, so that such a run can be resumed and exported.

    Only for a run's own file: a user who writes ``shuffle: true`` today means ``blocks``.
    """
    backbone = values.get("backbone")
    if isinstance(backbone, dict) and backbone.get("tensor_parallel_size", 1) != 1:
        backbone.setdefault("sequence_parallel", False)  # norms and residuals were whole; a resume says that it changed
    data = values.get("data")
    if not isinstance(data, dict):
        return
    if data.get("shuffle") is True:  # rows were shuffled one by one, before there were blocks
        data["shuffle"] = "rows"
    for stored in (*(data.get("sources") or ()), data.get("eval")):
        if isinstance(stored, dict) and stored.get("format") == "llava":
            stored["format"] = "json"
    pool = values.get("pool")
    if isinstance(pool, dict):
        pool.pop("text_segment_nbytes", None)  # feeders give memory for images too; it is computed unless it is given
