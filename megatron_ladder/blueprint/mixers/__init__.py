"""The token mixers: what each one is, as a description that computes nothing."""
