"""Timing that can be trusted: interleaved rounds, paired ratios, and pictures of them."""
