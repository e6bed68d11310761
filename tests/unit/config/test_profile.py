"""What --profile can be told."""

from pathlib import Path

import pytest

from megatron_ladder.config.profile import ProfileConfig, profile_mistakes


def mistakes_of(tensorboard_dir: Path | None = None, **changes: object) -> list[str]:
    config = ProfileConfig(**({"profile": True, "profile_dir": Path("p")} | changes))  # type: ignore[arg-type]
    return profile_mistakes(config, train_iters=20, world_size=4, tensorboard_dir=tensorboard_dir)


def test_what_can_be() -> None:
    assert mistakes_of() == mistakes_of(profile_step_start=0, profile_step_end=20, profile_ranks=(0, 3)) == []
    assert mistakes_of(Path("t"), profile_dir=None) == []
    assert profile_mistakes(ProfileConfig(), 1, 1, None) == [], "the defaults of a run without a profile"
    assert ProfileConfig(profile_dir=Path("p")).folder(Path("t")) == Path("p")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"profile_step_start": 12}, "--profile-step-start 12 and --profile-step-end 12"),
        ({"profile_step_start": -1}, "--profile-step-start -1"),
        ({"profile_step_end": 21}, "--profile-step-end 21 is above --train-iters 20"),
        ({"profile_ranks": (4, 0, -1)}, "--profile-ranks -1 4: expected ranks from 0 to 3"),
        ({"profile_ranks": ()}, "--profile-ranks "),
        ({"profile_dir": None}, "nowhere to write"),
        ({"profile": False, "profile_ranks": (1,)}, "--profile-ranks --profile-dir: nothing is profiled"),
    ],
)
def test_what_cannot_be(changes: dict[str, object], told: str) -> None:
    (mistake,) = mistakes_of(**changes)
    assert told in mistake
