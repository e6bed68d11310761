"""Readers of documents: JSON lines (also compressed or from stdin), plain text, Parquet, `datasets`."""
