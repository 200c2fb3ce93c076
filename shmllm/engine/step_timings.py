"""How long the phases of an engine core's steps took."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns

from shmllm.core.plan import StepPlan, StepResult


@dataclass(slots=True)
class StepTimings:
    """The time that all steps so far took, by phase, and the timestamps of the last step.

    If steps overlap, `schedule_ns` and `prepare_ns` are those of the following step, and
    `execute_ns` is the time that the core still had to wait for the step's result.

    Attributes:
        num_steps: the number of steps whose results were applied.
        moments_ns: when the last step began, and when its phases schedule, prepare, execute,
            sample and apply ended, in `time.perf_counter_ns()`.
        num_tokens: the number of tokens that the last step computed.
        num_requests: the number of requests in the last step.
        num_draft_tokens: the number of drafted tokens that the last step computed.
        num_accepted_tokens: the number of them that were right.
        device_ns: how long a device was busy with the last step; 0 on a CPU.
    """

    num_steps: int = 0
    schedule_ns: int = 0
    prepare_ns: int = 0
    execute_ns: int = 0
    sample_ns: int = 0
    apply_ns: int = 0
    moments_ns: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    num_tokens: int = 0
    num_requests: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    device_ns: int = 0

    def add(
        self,
        plan: StepPlan,
        result: StepResult,
        num_accepted_tokens: int,
        began_ns: int,
        planned_ns: int,
        submitted_ns: int,
        sampled_ns: int,
    ) -> None:
        """Add a step whose results have just been applied.

        Args:
            plan, result: those of the step.
            num_accepted_tokens: how many of its drafted tokens were right.
            began_ns, planned_ns: when its planning, or that of the following step, began and ended.
            submitted_ns, sampled_ns: when the core began to wait for the result, and had it.
        """
        prepared_ns, executed_ns = result.computing_ns or (submitted_ns, sampled_ns)
        prepared_ns = max(prepared_ns, planned_ns)  # a pipeline may have begun in an earlier call
        moments_ns = began_ns, planned_ns, prepared_ns, executed_ns, sampled_ns, perf_counter_ns()
        self.num_steps += 1
        self.device_ns = result.device_ns
        self.num_tokens, self.num_requests = plan.num_tokens, len(plan.requests)
        self.num_draft_tokens, self.num_accepted_tokens = plan.num_drafts, num_accepted_tokens
        began, planned, prepared, executed, sampled, applied = moments_ns
        self.schedule_ns += planned - began
        self.prepare_ns += prepared - planned
        self.execute_ns += executed - prepared
        self.sample_ns += sampled - executed
        self.apply_ns += applied - sampled
        self.moments_ns = moments_ns

    @property
    def total_ns(self) -> int:
        """How long the last step took, from the begin of its planning."""
        return self.moments_ns[-1] - self.moments_ns[0]
