"""The dry run: builds ranks without devices, records their collectives and memory, and replays all ranks."""
