"""Errors that protrain raises for its users; each message names the argument and what to do."""


class ProtrainError(Exception):
    """Base of every error that protrain raises on purpose."""


class OptionError(ProtrainError, ValueError):
    """An option or argument that protrain does not know or cannot use."""


class PlanError(ProtrainError, ValueError):
    """A Plan that is malformed or does not fit the model it is used on."""


class ProfileError(ProtrainError, ValueError):
    """A Profile, or a part of one, that is malformed; names the field."""


class VersionError(ProtrainError, RuntimeError):
    """A PyTorch version that lacks what protrain builds on."""


class PipelineError(ProtrainError, RuntimeError):
    """A pass pipeline in an impossible order, or a pass that broke its contract."""


class VerifierError(ProtrainError, AssertionError):
    """A broken invariant; names the pass after which it was found and the nodes concerned."""


class ContextError(ProtrainError, RuntimeError):
    """A backward whose forward context is gone, or was changed since the forward."""


class RankError(ProtrainError, RuntimeError):
    """Ranks that differ where they must be equal, or a rank that waited in vain for the others."""


class DoorError(ProtrainError, RuntimeError):
    """Something was read, written or called at a moment when eager and the schedule would differ."""


class TraceError(ProtrainError, ValueError):
    """A model that cannot be traced into one graph with a backward, as ``protrain plan`` needs."""


class BudgetError(ProtrainError, MemoryError):
    """No plan fits into a memory budget.

    Attributes:
        needed_bytes: The smallest budget for which there is a plan.
        budget: The argument that is too small: ``memory_budget`` or ``host_memory_budget``.
    """

    def __init__(self, message: str, needed_bytes: int, budget: str = "memory_budget") -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget = budget
