"""Text to ids and back: the table of kinds of tokenizers, and the copies of them in models' directories."""
