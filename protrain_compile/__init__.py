"""protrain: a ``torch.compile`` backend that plans, prints and runs a transformer's schedule.

>>> model, optimizer = protrain_compile.prepare(model, optimizer)     # optional: parameters need not fit on the device
>>> model = torch.compile(model, backend="protrain")
>>> protrain_compile.schedule(model)     # after one call
"""

from protrain_compile.errors import (
    ContextError,
    DoorError,
    OptionError,
    PipelineError,
    PlanError,
    ProtrainError,
    VersionError,
)
from protrain_compile.plan import Plan
from protrain_compile.prepare import prepare
from protrain_compile.report.model_schedule import ModelSchedule, schedule
from protrain_compile.runtime.host_budget import HostMemoryError
from protrain_compile.runtime.host_worker import HostUpdateError

__all__ = [
    "ContextError",
    "DoorError",
    "HostMemoryError",
    "HostUpdateError",
    "ModelSchedule",
    "OptionError",
    "PipelineError",
    "Plan",
    "PlanError",
    "ProtrainError",
    "VersionError",
    "prepare",
    "schedule",
]
__version__ = "0.1.0"
