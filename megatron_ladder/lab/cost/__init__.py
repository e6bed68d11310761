"""What a model costs, by arithmetic alone."""
