"""Libraries that do a tokenizer's work faster than the one that defines its ids, and the proof that they may."""
