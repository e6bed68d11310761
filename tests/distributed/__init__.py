"""Tests that need several processes; see `pool` for how a case reaches them."""
