"""One device that encoders and backbone share: their times add up, and their memory must fit together."""

from __future__ import annotations

from collections.abc import Mapping

from flowtrain.allocator.candidates import Candidate, Enumeration
from flowtrain.allocator.program.flow import Choice, FlowProblem
from flowtrain.allocator.request import Key, Request, SurrogateFactory, enumerate_module, fronts_of
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees

_GIB = 2**30


def shared_rate(*rates: float) -> float:
    """Return the samples/s of modules that take turns on one device; rates: of each module alone on the device."""
    return 1.0 / sum(1.0 / rate for rate in rates)


def fits_shared(request: Request) -> bool:
    """Whether one device holds all modules at once; each one fits alone."""
    return bool(len(_beside_encoders(request)))


def shared_choice(
    request: Request, fronts: Mapping[Key, tuple[Candidate, ...]], surrogate_for: SurrogateFactory
) -> Choice:
    """Return the best configurations of all modules on the only device; each module must have one.

    Raises ConfigError if the device does not hold all modules at once.
    """
    device_type, found = _device_type(request), _beside_encoders(request)
    if not len(found):
        assert found.least_peak_nbytes is not None, "the backbone fits alone"
        peaks = {**_encoder_peaks(request), BACKBONE: found.least_peak_nbytes}
        taken = " and ".join(f"{name} {nbytes / _GIB:.1f}" for name, nbytes in peaks.items())
        raise ConfigError(
            f"the device (1 {device_type}) holds each module alone but not all of them together ({taken} of "
            f"{_memory_nbytes(request) / _GIB:.1f} GiB); the nearest feasible choice: "
            f"{len(peaks) - 1} {device_type} more"
        )
    producers = {name: fronts[name, device_type][0] for name in request.model.encoders}
    key = BACKBONE, device_type
    return Choice(producers, fronts_of(request, {key: found}, surrogate_for)[key][-1])


def can_share(request: Request, problem: FlowProblem) -> bool:
    """Whether there is only one device, and each module has a configuration on it."""
    return request.cluster.num_devices == 1 and bool(
        problem.consumer and all(module.candidates for module in problem.producers)
    )


def _device_type(request: Request) -> str:
    return next(each.name for each in request.cluster.device_types if each.count)


def _memory_nbytes(request: Request) -> int:
    """Bytes for all modules together, without the pool's share."""
    return min(request.memory_nbytes(name, _device_type(request)) for name in (*request.model.encoders, BACKBONE))


def _beside_encoders(request: Request) -> Enumeration:
    """What the backbone can be in the memory that encoders leave."""
    room = _memory_nbytes(request) - sum(_encoder_peaks(request).values())
    return enumerate_module(request, BACKBONE, request.cluster[_device_type(request)], room)


def _encoder_peaks(request: Request) -> dict[str, int]:
    device_type = _device_type(request)
    return {name: request.peak_nbytes(Candidate(name, device_type, Degrees())) for name in request.model.encoders}
