"""What several test files use: ranks, commands, trainers, reference grids."""
