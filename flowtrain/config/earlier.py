"""Keys of earlier versions, and resolved configurations that these wrote into runs, in the words of this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED_KEYS: Mapping[str, str] = {
    "backbone.pipeline_schedule": "pipeline.schedule",
    "backbone.chunks_per_rank": "pipeline.chunks",
    "observability.trace_steps": "observability.trace.steps",
}
"""Keys that have another place now, by their former one."""


def in_todays_words(values: dict[str, Any]) -> None:
    """Rename values whose meaning is now called otherwise, so that such a run can be resumed and exported.

    Only for a run's own file: a user who writes ``shuffle: true`` today means ``blocks``.
    """
    backbone = values.get("backbone")
    if isinstance(backbone, dict) and backbone.get("tensor_parallel_size", 1) != 1:
        backbone.setdefault("sequence_parallel", False)  # norms and residuals were whole; a resume says that it changed
    for former, key in MOVED_KEYS.items():
        section, name = former.split(".")
        if isinstance(values.get(section), dict) and name in values[section]:
            *places, new_name = key.split(".")
            place = values
            for each in places:
                place = place.setdefault(each, {})
            place[new_name] = values[section].pop(name)
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
