"""Experiments about the product: benchmarks, planner, studies and the emulated interconnect."""
