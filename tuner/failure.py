"""How often GPUs fail, how long that lasts and what a restart costs: measured data, each figure with its source."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from tuner.cluster import Sourced
from tuner.spec import Name, Spec
from tuner.units import Count, Seconds

LEAST_EXPONENT = 0.1


def _number(value: object) -> object:
    """Return what is no truth value."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


Number = BeforeValidator(_number)
Share = Annotated[float, Number, Field(ge=0, le=1, allow_inf_nan=False)]
Lasting = Annotated[Seconds, Number, Field(gt=0)]
Pause = Annotated[Seconds, Number]


class Blast(Spec):
    """The share of events that take an aligned block of `gpus` GPUs."""

    gpus: Annotated[Count, Field(le=100_000)]
    share: Sourced[Share]


class FailureData(Spec):
    """Failures of a fleet, and what a job does about one.

    mtbf: seconds between events of one GPU, hardware and software; hardware_share: of the events; repair, software_repair: seconds until
    GPUs run again that an event of either kind has taken; detection, restart: seconds until an event is noticed, and from then on until
    the job runs again from a checkpoint; in_place_restart: the same where survivors go on with their peers' state; checkpoint_write:
    seconds that a checkpoint stops the job; blast: GPUs that an event takes; power_exponent: a GPU's speed goes as its power to this;
    power_cap: power that a rack can give a GPU for long, of its normal one.
    """

    name: Name
    aliases: tuple[Name, ...] = ()
    mtbf: Sourced[Lasting]
    hardware_share: Sourced[Share]
    repair: Sourced[Lasting]
    software_repair: Sourced[Pause]
    detection: Sourced[Pause]
    restart: Sourced[Pause]
    in_place_restart: Sourced[Pause]
    checkpoint_write: Sourced[Lasting]
    blast: tuple[Blast, ...]
    power_exponent: Sourced[Annotated[float, Number, Field(gt=0, le=1)]]
    power_cap: Sourced[Annotated[float, Number, Field(ge=1, le=3)]]

    @model_validator(mode="after")
    def _all_events_take_something(self) -> Self:
        if not self.blast:
            raise ValueError("blast must name at least one number of GPUs that an event takes, like 1 with share 1")
        if self.power_exponent.value < LEAST_EXPONENT:
            raise ValueError(
                f"power_exponent must be at least {LEAST_EXPONENT:g}, not {self.power_exponent.value:g}: "
                "there a tenth more speed already takes 2.6 times the power"
            )
        shares = sum(each.share.value for each in self.blast)
        if abs(shares - 1.0) > 1e-6:
            raise ValueError(f"the shares of blast must add up to 1, not {shares:g}")
        if len({each.gpus for each in self.blast}) < len(self.blast):
            raise ValueError("blast names a number of GPUs twice")
        return self

    @property
    def events_per_hour(self) -> float:
        """Events an hour of which one GPU is the cause."""
        return 3600.0 / self.mtbf.value

    @property
    def repair_hours(self) -> tuple[tuple[float, float], ...]:
        """(share of events, hours until the GPUs they took run again): hardware, software."""
        hardware = self.hardware_share.value
        return (hardware, self.repair.value / 3600.0), (1.0 - hardware, self.software_repair.value / 3600.0)

    @property
    def mean_repair_hours(self) -> float:
        """Hours until the GPUs that an event took run again, over all events."""
        return sum(share * hours for share, hours in self.repair_hours)
