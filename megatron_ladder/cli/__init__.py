"""The programs: command lines on top of the package."""
