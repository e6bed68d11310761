"""Everything that knows DeepSpeed: the engine, its optimizer state, pipeline stages and the derived JSON."""
