"""Who follows a run: its files, the display, Ray's metrics, trackers; and its first and last event."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import ray
import torch

from flowtrain import __version__
from flowtrain.config.load import plain_values
from flowtrain.config.secrets import redacted
from flowtrain.controller.audit import AuditTrail
from flowtrain.controller.elastic import StartsAnew
from flowtrain.controller.evaluations import Evaluations
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.recorder import Recorder
from flowtrain.controller.resume import ResumePoint, consumed_at
from flowtrain.controller.signals import StopRequest
from flowtrain.controller.state import Role
from flowtrain.errors import FlowTrainError
from flowtrain.observability.callback import deliver
from flowtrain.observability.event_file import EventFile
from flowtrain.observability.progress import ProgressDisplay
from flowtrain.observability.ray_sink import RayMetricsSink
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.stream import EventStream
from flowtrain.observability.trackers.registry import make_trackers
from flowtrain.types.run_events import Outcome, RunEnded, RunStarted


@contextmanager
def following(
    run_spec: RunSpec, files: RunDir, start: ResumePoint, display: ProgressDisplay, callbacks: Sequence[object]
) -> Iterator[tuple[EventStream, Recorder]]:
    """Open the stream of a run with everyone who follows it, and its recorder; wait for trackers at the end.

    callbacks: of the caller, beside the trackers of the configuration.
    """
    settings = run_spec.config.observability
    with ExitStack() as stack:
        stream = EventStream(start.step)
        stack.callback(stream.close)
        consumed = consumed_at(start)
        audit = AuditTrail(run_spec, files, start.step, consumed, stream.warn)
        stream.add(audit.take)  # first: what others show is on disk
        events = EventFile(files.events)
        stack.callback(events.close)
        stream.add(events.take)
        stream.add(partial(deliver, display))
        if settings.ray_metrics:
            stream.add(partial(deliver, RayMetricsSink()), diagnostic="Ray's metrics")
        stream.add_trackers(make_trackers(settings, callbacks))
        evaluations = Evaluations(run_spec, files, start.step)
        yield stream, Recorder(run_spec, audit, evaluations, stream, consumed)


def run_started(run_spec: RunSpec, files: RunDir, start: ResumePoint, device: str, roles: Iterable[Role]) -> RunStarted:
    """Return the event of a run whose actors have started. roles: of each actor except the coordinator."""
    config = run_spec.config
    return RunStarted(
        step=start.step,
        run=config.name,
        mode=config.mode,
        num_steps=run_spec.num_steps,
        resumed_from=start.step if start.checkpoint is not None else None,
        roles={Role.COORDINATOR.value: 1, **Counter(role.value for role in roles)},
        device=device,
        versions={"flowtrain": __version__, "torch": str(torch.__version__), "ray": ray.__version__},
        directory=str(files.root),
        config=redacted(plain_values(config)),
        emulated=config.emulation is not None,
    )


@contextmanager
def telling_the_end(
    stream: EventStream, recorder: Recorder, stop: StopRequest, num_steps: int, started: float
) -> Iterator[None]:
    """Close the recorder after the block, and tell the stream how the run ended.

    stop: whether it was asked to. started: when the command began, on the monotonic clock.
    """
    outcome: Outcome = "failed"
    reason: str | None = None
    try:
        yield
        outcome = "done"
    except KeyboardInterrupt:
        outcome, reason = "stopped", "interrupted"
        raise
    except StartsAnew as why:
        outcome, reason = "stopped", f"it starts anew from its last checkpoint: {why}"
        raise
    except BaseException as error:
        reason = str(error) if isinstance(error, FlowTrainError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        recorder.close()
        if outcome == "done" and stream.step < num_steps:
            outcome = "stopped"
            reason = "it goes on with all its replicas" if stop.ends_to_grow else "on request"
        duration_s = time.monotonic() - started
        stream.emit(RunEnded(step=stream.step, outcome=outcome, reason=reason, duration_s=duration_s))
