"""Emulated interconnects for benchmarks on machines that have none."""
