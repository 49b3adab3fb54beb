"""The processes that take part in the pool: their indices in the address space, and their exports."""

from __future__ import annotations

from flowtrain.errors import ResourceError
from flowtrain.mempool.page_table import SegmentKey
from flowtrain.types.memory import SegmentExport, Tier


class Members:
    """Gives out process indices and keeps the exports of the processes.

    A node owns a contiguous block of ``processes_per_node`` indices, so that its part of the DRAM region is one
    contiguous range (FlowTrain 3.2). A restarted process gets a new index; no index is used again in a run.
    """

    def __init__(self, max_processes: int, processes_per_node: int) -> None:
        self._max_processes = max_processes
        self._per_node = processes_per_node
        self._nodes: dict[str, int] = {}
        self._num_joined: dict[int, int] = {}
        self._index_of_name: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._living: set[int] = set()
        self._exports: dict[SegmentKey, SegmentExport] = {}

    def join(self, name: str, node_id: str) -> tuple[int, int | None]:
        """Return the new index of the process called ``name``, and the index that the name had before, or None.

        Raises ResourceError, naming the knob, when the node's block or the space is used up.
        """
        node = self._nodes.setdefault(node_id, len(self._nodes))
        count = self._num_joined.get(node, 0)
        index = node * self._per_node + count
        if count >= self._per_node:
            raise ResourceError(
                f"{name}: node {node_id} has used all its {self._per_node} pool processes (restarts count); raise "
                "pool.processes_per_node"
            )
        if index >= self._max_processes:
            raise ResourceError(
                f"{name}: process index {index} is outside the pool's address space of {self._max_processes} "
                "processes; raise pool.max_processes"
            )
        self._num_joined[node] = count + 1
        previous = self._index_of_name.get(name)
        self._index_of_name[name] = index
        self._name_of[index] = name
        self._living.add(index)
        return index, previous

    def index_of(self, name: str) -> int | None:
        """Return the current index of the process called ``name``, or None if it never joined."""
        return self._index_of_name.get(name)

    def name_of(self, process_index: int) -> str:
        """Return the name of a process that joined."""
        return self._name_of[process_index]

    def is_living(self, process_index: int) -> bool:
        """Whether a process joined and is not known to be dead. Messages of a dead process may still arrive."""
        return process_index in self._living

    def publish(self, export: SegmentExport) -> None:
        """Keep the export of a living process, one segment per tier."""
        if self.is_living(export.process_index):
            self._exports[export.tier, export.process_index] = export

    def withdraw(self, process_index: int) -> None:
        """Forget a dead process, so that no new reader tries to map its memory."""
        self._living.discard(process_index)
        for tier in Tier:
            self._exports.pop((tier, process_index), None)

    def exports(self) -> tuple[SegmentExport, ...]:
        """Return the exports of all living processes."""
        return tuple(self._exports.values())
