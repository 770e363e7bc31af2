"""Ready-made tasks with their oracles, and the demo model."""
