"""Time limits of tests. They end what hangs, and a machine that shares its cores must not look as if it hung."""

_factor = 1.0


def be_patient(factor: float) -> None:
    """Multiply the limits of this test run."""
    global _factor
    _factor = factor


def patient(seconds: float) -> float:
    """Return the limit, in seconds, for what takes less than `seconds` on a machine of its own."""
    return _factor * seconds
