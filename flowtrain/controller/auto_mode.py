"""``mode: auto``: plans for the devices at hand, so that a run starts what the plan chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from flowtrain.config.run import RunConfig
from flowtrain.controller import at_hand, cluster
from flowtrain.controller.at_hand import DevicesAtHand
from flowtrain.controller.planning.devices import AskedDevices
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.controller.planning.report import PlanReport, make_report
from flowtrain.costs.devices import device_spec
from flowtrain.costs.profile import Profile, configured_profile
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.observability.progress import ProgressDisplay


@contextmanager
def planned_on_cluster(config: RunConfig, devices: int | None = None) -> Iterator[PlanReport]:
    """Connect to the cluster, or start a local one, for as long as the context lasts, and plan for its devices.

    devices: at most so many of them; None: all. Raises ConfigError or DataError if there is no plan, ResourceError if
    no cluster answers.
    """
    profile = configured_profile(config)  # before a cluster is started
    with ExitStack() as stack:
        with ProgressDisplay(config.observability.progress) as display:
            display.phase("connecting to Ray, or starting it")
            stack.enter_context(cluster.connected(config))
            display.phase("planning, since mode is auto")
            report = _plan_for(config, at_hand.of_cluster(config, devices), profile)
        yield report


def planned_here(config: RunConfig, devices: int | None = None) -> PlanReport:
    """Plan for this machine's devices, without a cluster; arguments and errors as in ``planned_on_cluster``."""
    return _plan_for(config, at_hand.of_machine(config, devices), configured_profile(config))


def _plan_for(config: RunConfig, devices: DevicesAtHand, profile: Profile | None) -> PlanReport:
    if profile is None:
        _check_data_sheets(devices)
    report = make_report(planned_run(config), AskedDevices(at_hand=devices.sized), profile=profile, where=devices.where)
    if report.faults:
        reasons = "; ".join(fault.text for fault in report.faults)
        raise ConfigError(f"mode 'auto' chose {report.winner.mode!r}, which cannot start: {reasons}", report.faults)
    return report


def _check_data_sheets(devices: DevicesAtHand) -> None:
    unknown = [str(each.name) for each in devices.sized if device_spec(str(each.name)) is None]
    if unknown:
        text = (
            f"mode 'auto' has no rates of {', '.join(unknown)} ({devices.text}): allocator.profile is not set, and "
            "there is no data sheet of these devices. Measure them with `flowtrain profile CONFIG --save profile.json` "
            "and set allocator.profile=profile.json, or set the mode"
        )
        raise ConfigError.of("allocator.profile", FaultCode.VALUE, text)
