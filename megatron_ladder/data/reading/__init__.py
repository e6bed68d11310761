"""Documents from any source: JSON lines (also compressed, also from stdin), plain text, Parquet, `datasets`."""
