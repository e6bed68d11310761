"""The token mixers: what each one of `blueprint/mixers/` computes."""
