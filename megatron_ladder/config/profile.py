"""What of a run is recorded by a profiler."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProfileConfig:
    """Profile. A trace of some steps, with sub-blocks and all-reduces by name."""

    profile: bool = False
    """Record --profile-step-start to --profile-step-end on --profile-ranks, and write a trace of each rank, which
    tools/exposed_communication.py, Perfetto and chrome://tracing read."""
    profile_step_start: int = 10
    """Steps that are done when the profile begins: the first one in it is the next."""
    profile_step_end: int = 12
    """Steps that are done when the profile ends: the last one in it."""
    profile_ranks: tuple[int, ...] = (0,)
    """Global ranks that write a trace; all ranks wait for them before and after."""
    profile_dir: Path | None = None
    """Directory for the traces; --tensorboard-dir if not given."""

    def folder(self, tensorboard_dir: Path | None) -> Path | None:
        """Where traces go; None if neither directory was given."""
        return tensorboard_dir if self.profile_dir is None else self.profile_dir


def profile_mistakes(
    config: ProfileConfig, train_iters: int, world_size: int, tensorboard_dir: Path | None
) -> list[str]:
    """A line for each value, or combination of values, that cannot be."""
    if not config.profile:
        changed = [
            flag
            for flag, value, default in (
                ("--profile-step-start", config.profile_step_start, ProfileConfig.profile_step_start),
                ("--profile-step-end", config.profile_step_end, ProfileConfig.profile_step_end),
                ("--profile-ranks", config.profile_ranks, ProfileConfig.profile_ranks),
                ("--profile-dir", config.profile_dir, ProfileConfig.profile_dir),
            )
            if value != default
        ]
        return [f"{' '.join(changed)}: nothing is profiled without --profile: add it"] if changed else []
    start, end = config.profile_step_start, config.profile_step_end
    mistakes = []
    if not 0 <= start < end:
        mistakes.append(
            f"--profile-step-start {start} and --profile-step-end {end}: the steps after the first up to the second "
            "are profiled, and there is none: give 0 <= start < end"
        )
    elif end > train_iters:
        mistakes.append(f"--profile-step-end {end} is above --train-iters {train_iters}: the profile would not end")
    strange = sorted({rank for rank in config.profile_ranks if not 0 <= rank < world_size})
    if strange or not config.profile_ranks:
        mistakes.append(
            f"--profile-ranks {' '.join(map(str, strange))}: expected ranks from 0 to {world_size - 1} of the "
            f"{world_size} launched processes"
        )
    if config.folder(tensorboard_dir) is None:
        mistakes.append("--profile has nowhere to write its traces: give --profile-dir or --tensorboard-dir")
    return mistakes
