"""Which layout a run should have, and how long it will take: arithmetic over what `cost` knows."""
