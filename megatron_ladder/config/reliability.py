"""When a run ends before its last step, and what it does about numbers that cannot be right."""

from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.flags import flag


@dataclass(frozen=True)
class ReliabilityConfig:
    """Stopping and bad numbers. SIGTERM and SIGINT too save and end the run with exit code 0."""

    exit_interval: int | None = None
    """Save and end after each step whose number is a multiple of it."""
    exit_duration_in_mins: float | None = None
    """Save and end after the step at which the process has run for so many minutes."""
    kill_switch_file: Path | None = flag(None, aliases=("--kill-switch-path",))
    """Save and end when this file exists; the first process looks about once a second."""
    max_consecutive_bad_steps: int = 3
    """Steps in a row with a loss or gradient that is not finite after which the run ends with exit code 3. Such a
    step changes nothing but the place in the data."""
    loss_spike_factor: float | None = None
    """Report a step whose loss is above this multiple of the median loss of the --loss-spike-window steps before it;
    no rule if not given."""
    loss_spike_window: int = 64
    """Steps whose median loss --loss-spike-factor multiplies, spikes among them included."""
    skip_loss_spikes: bool = False
    """Leave out the update of the steps that --loss-spike-factor reports."""


def reliability_mistakes(config: ReliabilityConfig) -> list[str]:
    """A line for each number that cannot be."""
    above_zero = {
        "--exit-interval": config.exit_interval,
        "--exit-duration-in-mins": config.exit_duration_in_mins,
        "--max-consecutive-bad-steps": config.max_consecutive_bad_steps,
        "--loss-spike-window": config.loss_spike_window,
    }
    mistakes = [
        f"{name} {value} must be above zero" for name, value in above_zero.items() if value is not None and value <= 0
    ]
    if config.loss_spike_factor is not None and config.loss_spike_factor <= 1:
        mistakes.append(f"--loss-spike-factor {config.loss_spike_factor} must be above 1: it multiplies a usual loss")
    if config.skip_loss_spikes and config.loss_spike_factor is None:
        mistakes.append("--skip-loss-spikes has no meaning without --loss-spike-factor")
    return mistakes
