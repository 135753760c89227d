"""protrain: a ``torch.compile`` backend that plans, prints and runs a transformer's schedule.

>>> model = torch.compile(model, backend="protrain")
>>> protrain_compile.schedule(model)     # after one call
"""

from protrain_compile.errors import (
    ContextError,
    OptionError,
    PipelineError,
    PlanError,
    ProtrainError,
    VersionError,
)
from protrain_compile.plan import Plan
from protrain_compile.report.model_schedule import ModelSchedule, schedule

__all__ = [
    "ContextError",
    "ModelSchedule",
    "OptionError",
    "PipelineError",
    "Plan",
    "PlanError",
    "ProtrainError",
    "VersionError",
    "schedule",
]
__version__ = "0.1.0"
